"""The thin client of a running kvtier: one call per verb, plain values back, one readable line when it fails."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvtier.cluster.machines.addresses import is_own
from kvtier.proto import cache_pb2, cache_pb2_grpc, inference_pb2, inference_pb2_grpc
from kvtier.workers.machine.endpoints import Endpoint

Prompt = str | Sequence[int] | Sequence[dict[str, str]]  # text, token ids, or chat [{"role", "content"}]

TIERS = ("L1", "L2", "L3", "L4", "remote")
MAX_REPLY_BYTES = 64 * 2**20  # the server's own limit is lower or equal in any sensible configuration

CALL_TIMEOUT_S = 60.0  # of calls that touch no page's bytes

_PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")  # in the order in which gRPC looks
_USAGE, _UNREACHABLE, _NOT_FOUND = 2, 3, 4  # exit codes beside 1
_EXIT_CODES = {
    grpc.StatusCode.INVALID_ARGUMENT: _USAGE,
    grpc.StatusCode.FAILED_PRECONDITION: _USAGE,
    grpc.StatusCode.PERMISSION_DENIED: _USAGE,
    grpc.StatusCode.ALREADY_EXISTS: _USAGE,
    grpc.StatusCode.UNAVAILABLE: _UNREACHABLE,
    grpc.StatusCode.NOT_FOUND: _NOT_FOUND,
}
_SESSION_STATES = {
    "": inference_pb2.SESSION_STATE_UNSPECIFIED,
    "open": inference_pb2.SESSION_STATE_OPEN,
    "closed": inference_pb2.SESSION_STATE_CLOSED,
}
_REASONS = {inference_pb2.FINISH_REASON_STOP: "stop", inference_pb2.FINISH_REASON_LENGTH: "length"}


class ClientError(Exception):
    """A call failed; `str(error)` is one readable line, `exit_code` what the command should exit with.

    Exit codes: 2 the request is wrong, 3 nothing answers at the endpoint, 4 not found, 1 anything else.
    `status` is the gRPC status code's name, "" when there was none.
    """

    def __init__(self, message: str, exit_code: int = 1, status: str = "") -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.status = status


@dataclass(frozen=True, slots=True)
class TLSFiles:
    """PEM files of a TLS connection: who signed the server, and who we are where the server asks."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of a stream. `usage` (the object of `generate --json`) and `timings_ms` come on the last one only."""

    request_id: str
    worker: str  # on the first chunk
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[str, Any]]  # one per token id when asked for: {"logprob", "top": [{"id", "logprob"}]}
    finish_reason: str | None  # "stop", "length" on a sequence's last chunk
    usage: dict[str, Any] | None
    timings_ms: dict[str, float] | None
    seed: int | None  # on the first chunk
    prompt_logprobs: list[dict[str, Any]] = field(
        default_factory=list
    )  # of the prompt's tokens from the second on


def connect(endpoint: str, tls: TLSFiles | None = None, *, timeout_s: float = 5.0) -> Client:
    """Connect to HOST:PORT; ClientError when nothing answers within `timeout_s`.

    A proxy of the environment (http_proxy) is for other machines only: none can reach an address of this one.
    """
    try:
        where = Endpoint.parse(endpoint)
    except ValueError as error:
        raise ClientError(f"--endpoint {error}", _USAGE) from error
    channel = _channel(where, tls)
    try:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
    except grpc.RpcError as error:
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            channel.close()
            raise ClientError(
                f"nothing answers at {endpoint}: is it running there, and with the same TLS settings?{_proxy_note(where)}",
                _UNREACHABLE,
                error.code().name,
            ) from error
    return Client(channel, endpoint)


def _proxy_note(where: Endpoint) -> str:
    """Which proxy stands between."""
    if is_own(where.host):
        return ""
    name = next((name for name in _PROXY_VARIABLES if os.environ.get(name)), "")
    return (
        f" It was called through {name}={os.environ[name]}; no_proxy={where.host} calls it directly"
        if name
        else ""
    )


def _channel(where: Endpoint, tls: TLSFiles | None) -> grpc.Channel:
    endpoint = str(where)
    options = [
        ("grpc.enable_http_proxy", 0 if is_own(where.host) else 1),
        ("grpc.max_receive_message_length", MAX_REPLY_BYTES),
        ("grpc.max_send_message_length", MAX_REPLY_BYTES),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    if tls is None:
        return grpc.insecure_channel(endpoint, options)
    try:
        ca, cert, key = (file.read_bytes() if file else None for file in (tls.ca, tls.cert, tls.key))
    except OSError as error:
        raise ClientError(f"can't read {error.filename}: {error.strerror}", _USAGE) from error
    return grpc.secure_channel(endpoint, grpc.ssl_channel_credentials(ca, key, cert), options)


class Client:
    """A connection; a context manager. Calls block, and raise ClientError. Ctrl-C during `generate` cancels it."""

    def __init__(self, channel: grpc.Channel, endpoint: str) -> None:
        self.endpoint = endpoint
        self._channel = channel
        self._inference = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        self._cache = cache_pb2_grpc.CacheStub(channel)  # type: ignore[no-untyped-call]

    def generate(
        self,
        prompt: Prompt,
        *,
        tenant: str = "",  # "": the tenant named default
        request_id: str = "",  # "": the gateway makes one
        max_tokens: int | None = None,  # None: what the context leaves, at most 1,024
        min_tokens: int = 0,
        temperature: float | None = None,  # None, here and in the next four: the deployment's default
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] = MappingProxyType({}),  # added to the logits of these token ids
        seed: int | None = None,
        stop: Sequence[str] = (),
        stop_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        logprobs: int = 0,
        n: int = 1,
        prompt_logprobs: int = 0,
        no_cache: bool = False,
        lossy: bool = False,  # True: takes pages re-quantized for a lower tier where the exact ones are gone
        window: int = 0,  # tokens that each token attends; 0: as the deployment is configured
        sinks: int = 0,  # first tokens attended beside the window
        session_id: str = "",  # the conversation that this is a turn of
        session_state: Literal[
            "", "open", "closed"
        ] = "",  # open: another turn will follow; closed: this is the last
        expected_output_tokens: int = 0,  # a guess; 0: none
        worker: str = "",
        timeout_s: float | None = None,
    ) -> Iterator[Chunk]:
        """Stream a completion's chunks; closing the iterator cancels the request."""
        request = _message(
            inference_pb2.GenerateRequest,
            request_id=request_id,
            tenant=tenant,
            worker=worker,
            cache=inference_pb2.CacheOptions(no_cache=no_cache, lossy=lossy),
            window=window,
            sinks=sinks,
            session_id=session_id,
            session_state=_state_number(session_state),
            expected_output_tokens=expected_output_tokens,
            sampling=_message(
                inference_pb2.Sampling,
                max_tokens=max_tokens,
                min_tokens=min_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                repetition_penalty=repetition_penalty,
                presence_penalty=presence_penalty,
                frequency_penalty=frequency_penalty,
                logit_bias=dict(logit_bias),
                seed=seed,
                stop=stop,
                stop_ids=stop_ids,
                ignore_eos=ignore_eos,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                n=n,
            ),
            **_prompt(prompt),
        )
        call = self._inference.Generate(request, timeout=timeout_s)
        try:
            for chunk in call:
                yield _chunk(chunk)
        except grpc.RpcError as error:
            raise self._failure(error) from error
        finally:
            call.cancel()

    def status(self) -> dict[str, Any]:
        """The object of `kvtier status --json`. Each "since" is a Unix time; "directory" is None where there is none."""
        reply = self._call(self._inference.Status, inference_pb2.StatusRequest())
        return {
            "endpoint": reply.endpoint,
            "version": reply.version,
            "gateway_pid": reply.gateway_pid,
            "in_flight": reply.in_flight,
            "since": reply.since,
            "tenants": list(reply.tenants),
            "model": _plain(reply.model),
            "nodes": [_plain(node) for node in reply.nodes],
            "workers": [_plain(worker) for worker in reply.workers],
            "directory": _plain(reply.directory) if reply.HasField("directory") else None,
        }

    def stats(self) -> dict[str, Any]:
        """The object of `kvtier stats --json`: {"tiers": {"L1": {..}, ..}, "prompt_tokens": .., ..}.

        A tier's "saved" is 1 - "page_bytes" / "raw_bytes": what quantized pages save, 0 where there are none. Its
        "policy" says what chooses the pages that leave it, and whether a guard has fallen back to lru.
        """
        reply = self._call(self._cache.Stats, cache_pb2.StatsRequest())
        tiers = {name: _tier(reply.tiers[name]) for name in TIERS}
        return {"tiers": tiers} | {name: value for name, value in _plain(reply).items() if name != "tiers"}

    def explain(self, request_id: str) -> dict[str, Any]:
        """{"request_id", "tenant", "worker", "prompt_tokens", "preemptions", "usage", "notes": [{"start", "end",
        "tier", "reason", "detail"}], "moves": [{"worker", "tokens", "reason"}]}; usage is None before the first token,
        moves says where the request went on elsewhere."""
        reply = self._call(self._cache.Explain, _message(cache_pb2.ExplainRequest, request_id=request_id))
        return _plain(reply) | {
            "usage": _usage(reply.usage) if reply.HasField("usage") else None,
            "notes": [_plain(note) for note in reply.notes],
            "moves": [_plain(move) for move in reply.moves],
        }

    def lookup(self, prompt: Prompt, *, tenant: str = "") -> dict[str, Any]:
        """{"prompt_tokens", "pages": [{"key", "start", "end", "tiers": [..], "variants": [..]}]}: which pages of a
        prompt are held where and in which formats, up to the first that nothing holds."""
        request = _message(cache_pb2.LookupRequest, tenant=tenant, **_prompt(prompt))
        reply = self._call(self._cache.Lookup, request)
        return {"prompt_tokens": reply.prompt_tokens, "pages": [_plain(page) for page in reply.pages]}

    def pages_ls(self, *, tenant: str = "", tier: str = "", limit: int = 100) -> list[dict[str, Any]]:
        """One object per copy of a page: {"key", "tier", "owner", "tenant", "root", "parent", "variant", "depth",
        "tokens", "nbytes", "uses", "idle_s", "pinned", "readers", "state", "made_from"}; tenant is a name where it is
        known, made_from the variant that the copy was converted from ("": computed)."""
        request = _message(cache_pb2.ListPagesRequest, tenant=tenant, tier=tier, limit=limit)
        return [_plain(page) for page in self._call(self._cache.ListPages, request).pages]

    def pages_show(self, key: str) -> list[dict[str, Any]]:
        """The copies of one page, by its key in hex or a head of it that no other page has."""
        request = _message(cache_pb2.ShowPageRequest, key=key)
        return [_plain(page) for page in self._call(self._cache.ShowPage, request).pages]

    def pages_pin(self, keys: Sequence[str]) -> dict[str, Any]:
        """{"results": [{"key", "outcome", "owners": {owner: outcome}}], "counts": {outcome: number of keys}}."""
        return self._outcomes(self._cache.Pin, keys)

    def pages_unpin(self, keys: Sequence[str]) -> dict[str, Any]:
        """As pages_pin."""
        return self._outcomes(self._cache.Unpin, keys)

    def pages_evict(self, keys: Sequence[str] = (), *, tier: str = "") -> dict[str, Any]:
        """As pages_pin, in one tier or in all; without keys all pages of `tier`, and results list only what was not
        ACCEPTED."""
        return _outcomes(
            self._call(self._cache.Evict, _message(cache_pb2.EvictRequest, keys=keys, tier=tier), None)
        )

    def pages_clear(self, *, tenant: str = "") -> dict[str, Any]:
        """As pages_pin, for all pages of a tenant ("": of all tenants); results list only what was not ACCEPTED.

        "parts" has what each part of the deployment did, those first that aren't done: {"part", "outcome", "pages", "tier",
        "error", "detail"}. DEFERRED is done later, and serves nothing of it until then; REJECTED must be asked once more.
        """
        reply = self._call(self._cache.Clear, _message(cache_pb2.ClearRequest, tenant=tenant), None)
        parts = [{**_plain(part), "outcome": _outcome(part.outcome)} for part in reply.parts]
        return {**_outcomes(reply), "parts": parts}

    def pages_verify(self, keys: Sequence[str] = ()) -> dict[str, Any]:
        """As pages_pin, for these pages or all; where no keys are given, results list only what was not ACCEPTED."""
        return self._outcomes(self._cache.Verify, keys, None)

    def record_start(self, path: str, *, max_bytes: int = 0, nodes: Sequence[str] = ()) -> dict[str, Any]:
        """{"recordings": [{"owner", "path", "events", "nbytes", "seconds", "ended"}]}; "ended" is "" while it goes on.

        `path` is absolute, on the machines of those that record: these nodes, or all where none is named.
        """
        request = _message(cache_pb2.RecordRequest, path=path, max_bytes=max_bytes, nodes=nodes)
        return _recordings(self._call(self._cache.Record, request))

    def record_stop(self) -> dict[str, Any]:
        """As record_start, of what has ended."""
        return _recordings(self._call(self._cache.StopRecord, cache_pb2.StopRecordRequest()))

    def close(self) -> None:
        """Let the connection go. Idempotent."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _outcomes(
        self, method: Callable[..., Any], keys: Sequence[str], timeout_s: float | None = CALL_TIMEOUT_S
    ) -> dict[str, Any]:
        return _outcomes(self._call(method, _message(cache_pb2.KeysRequest, keys=keys), timeout_s))

    def _call(
        self, method: Callable[..., Any], request: Any, timeout_s: float | None = CALL_TIMEOUT_S
    ) -> Any:
        try:
            return method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise self._failure(error) from error

    def _failure(self, error: grpc.RpcError) -> ClientError:
        code, details = error.code(), error.details()
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            details = f"{self.endpoint} did not finish in the time given"
        line = " ".join((details or code.name).split())
        return ClientError(line, _EXIT_CODES.get(code, 1), code.name)


def completion(chunks: Iterable[Chunk]) -> dict[str, Any]:
    """The object of `generate --json`; with n > 1 it has "sequences", one {"index", "text", ..} each, beside it.

    {"request_id", "worker", "text", "token_ids", "finish_reason", "usage": {"prompt_tokens", "completion_tokens",
    "computed_tokens", "cached_tokens": {"L1", "L2", "L3", "L4", "remote"}}, "timings_ms": {"queue", "load",
    "prefill", "ttft", "decode"}, "seed"}; "logprobs" and "prompt_logprobs" where asked for.
    """
    whole: dict[str, Any] = {"request_id": "", "worker": "", "usage": None, "timings_ms": None, "seed": None}
    sequences: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for name in ("request_id", "worker", "usage", "timings_ms"):
            whole[name] = getattr(chunk, name) or whole[name]
        if chunk.seed is not None:
            whole["seed"] = chunk.seed
        if chunk.prompt_logprobs:
            whole.setdefault("prompt_logprobs", []).extend(chunk.prompt_logprobs)
        _extend(sequences, chunk)
    first = sequences.get(0) or _sequence(0)
    result = {name: value for name, value in first.items() if name != "index"} | whole
    if len(sequences) > 1:
        result["sequences"] = [sequences[index] for index in sorted(sequences)]
    return result


def _sequence(index: int) -> dict[str, Any]:
    return {"index": index, "text": "", "token_ids": [], "finish_reason": None}


def _extend(sequences: dict[int, dict[str, Any]], chunk: Chunk) -> None:
    sequence = sequences.setdefault(chunk.index, _sequence(chunk.index))
    sequence["text"] += chunk.text
    sequence["token_ids"] += chunk.token_ids
    if chunk.logprobs:
        sequence.setdefault("logprobs", []).extend(chunk.logprobs)
    sequence["finish_reason"] = chunk.finish_reason or sequence["finish_reason"]


def _message(kind: Callable[..., Any], **fields: Any) -> Any:
    """A protobuf message; ClientError for a value that its field can't hold."""
    given = {name: value for name, value in fields.items() if value is not None}
    for name, value in given.items():
        try:
            kind(**{name: value})
        except (ValueError, TypeError) as error:
            raise ClientError(f"bad value for {name}: {error}", _USAGE) from error
    return kind(**given)


def _state_number(state: str) -> inference_pb2.SessionState:
    if state not in _SESSION_STATES:
        raise ClientError(f"session_state must be open, closed or empty, got {state!r}", _USAGE)
    return _SESSION_STATES[state]


def _prompt(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"text": prompt}
    if prompt and isinstance(prompt[0], dict):
        messages = [_message(inference_pb2.ChatMessage, **message) for message in prompt]  # type: ignore[arg-type]
        return {"chat": _message(inference_pb2.Chat, messages=messages)}
    return {"token_ids": _message(inference_pb2.TokenIds, ids=prompt)}


def _chunk(chunk: inference_pb2.GenerateChunk) -> Chunk:
    return Chunk(
        request_id=chunk.request_id,
        worker=chunk.worker,
        index=chunk.index,
        text=chunk.text,
        token_ids=list(chunk.token_ids),
        logprobs=_logprobs(chunk.logprobs),
        prompt_logprobs=_logprobs(chunk.prompt_logprobs),
        finish_reason=_REASONS.get(chunk.finish_reason),
        usage=_usage(chunk.usage) if chunk.HasField("usage") else None,
        timings_ms=_plain(chunk.timings_ms) if chunk.HasField("timings_ms") else None,
        seed=chunk.seed if chunk.HasField("seed") else None,
    )


def _logprobs(positions: Iterable[inference_pb2.TokenLogprobs]) -> list[dict[str, Any]]:
    return [
        {"logprob": one.logprob, "top": [{"id": top.id, "logprob": top.logprob} for top in one.top]}
        for one in positions
    ]


def _usage(usage: inference_pb2.Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "computed_tokens": usage.computed_tokens,
        "cached_tokens": {tier: usage.cached_tokens[tier] for tier in TIERS},
    }


def _outcomes(reply: cache_pb2.OutcomesReply) -> dict[str, Any]:
    results = [
        {
            "key": result.key,
            "outcome": _outcome(result.outcome),
            "owners": {owner: _outcome(outcome) for owner, outcome in sorted(result.owners.items())},
        }
        for result in reply.results
    ]
    return {"results": results, "counts": dict(sorted(reply.counts.items()))}


def _recordings(reply: cache_pb2.RecordReply) -> dict[str, Any]:
    return {"recordings": [_plain(one) for one in reply.recordings]}


def _outcome(number: cache_pb2.Outcome) -> str:
    return cache_pb2.Outcome.Name(number).removeprefix("OUTCOME_")


def _plain(message: Any) -> dict[str, Any]:
    """A message's fields by name, with their defaults where unset; repeated strings as lists, maps as dicts."""
    return {field.name: _value(message, field) for field in message.DESCRIPTOR.fields}


def _tier(stats: cache_pb2.TierStats) -> dict[str, Any]:
    saved = 1 - stats.page_bytes / stats.raw_bytes if stats.raw_bytes else 0.0
    return _plain(stats) | {"saved": saved}


def _value(message: Any, field: Any) -> Any:
    value = getattr(message, field.name)
    if not field.is_repeated:
        return value
    is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
    return dict(sorted(value.items())) if is_map else list(value)
