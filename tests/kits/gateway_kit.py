"""Helpers of the gateway's tests: a tokenizer of bytes, a worker that echoes, and a gateway served from a thread."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from kvtier.cluster.config.deployment import GrpcConfig
from kvtier.cluster.gateway.admission import GatewayCore
from kvtier.cluster.gateway.cache_api.cache import CacheApi, Node
from kvtier.cluster.gateway.cache_api.clears import Clearer, ClearRecord
from kvtier.cluster.gateway.owners.locations import Holders, HoldersPort
from kvtier.cluster.gateway.ports import OwnerDown
from kvtier.cluster.gateway.server import GatewayServer
from kvtier.proto import inference_pb2
from kvtier.tier.pages.clear_epochs import Clears
from kvtier.tier.pages.page import TierName
from kvtier.tier.protocol.key_query import HeldKeys, keys_with, split_keys
from kvtier.tier.protocol.results import Cleared, ManyOutcomes
from kvtier.tier.stats import RequestTotals, Snapshot, TierCounters
from kvtier.tier.stores.base import Outcome, PageInfo, Uncleared
from kvtier.workers.models.text import Text, tokenizer_digest
from kvtier.workers.requests.api import (
    DEFAULT_SAMPLING,
    EngineRequest,
    Explanation,
    FinishReason,
    Output,
    PageNote,
    QueueFull,
    SamplingParams,
    Timings,
    TokenLogprobs,
    Usage,
    WorkerInfo,
)

EOS, IM_START = 256, 257
VOCAB_SIZE = 300  # 258 tokens of the tokenizer; the rest is padding, as real models have it
CONTEXT = 512
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_byte_tokenizer(folder: Path, *, template: str = TEMPLATE, more: Sequence[str] = ()) -> Path:
    """A model folder's text files: token id b stands for byte b, 256 and 257 are special, `more` tokens follow."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {char: byte for byte, char in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_end|>"), AddedToken("<|im_start|>")])
    tokenizer.add_tokens([AddedToken(token) for token in more])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    wrapped.chat_template = template or None
    wrapped.save_pretrained(folder)
    return folder


def make_piece_tokenizer(folder: Path) -> Path:
    """SentencePiece's ways as Llama 2 has them: a space before the first word, and bytes for unknown characters."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    space = "\N{LOWER ONE EIGHTH BLOCK}"
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), "</s>", "<s>", space, *"abcdefgh"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<0x00>", fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(space), normalizers.Replace(" ", space)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>"), AddedToken("<s>")])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    wrapped.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    wrapped.save_pretrained(folder)
    return folder


def echo_info(
    worker_id: str = "w0",
    digest: str = "",
    node_id: str = "n0",
    role: Literal["both", "prefill", "decode"] = "both",
) -> WorkerInfo:
    """What an echoing worker says of itself."""
    return WorkerInfo(
        worker_id=worker_id,
        node_id=node_id,
        role=role,
        pid=os.getpid(),
        model_name="echo",
        vocab_size=VOCAB_SIZE,
        max_context=CONTEXT,
        eos_ids=(EOS,),
        dtype="float32",
        page_tokens=4,
        page_bytes=1024,
        tokenizer_digest=digest,
        root_fields={"model": "echo"},
    )


@dataclass
class _Sequence:
    request: EngineRequest
    index: int
    made: int = 0
    is_prefilled: bool = False

    def next_output(self, cancelled: FinishReason | None) -> Output:
        request, sampling = self.request, self.request.sampling
        if cancelled is not None:
            return self._last((), cancelled)
        if self.is_prefilled:
            return self._last((), FinishReason.PREFILLED)
        self.is_prefilled = request.is_prefill_only
        token_id = request.token_ids[self.made % len(request.token_ids)]
        self.made += 1
        logprobs = (TokenLogprobs(-0.5, ((token_id, -0.5), (0, -1.5))[: sampling.logprobs]),)
        is_end = token_id in sampling.stop_ids or (token_id == EOS and not sampling.ignore_eos)
        if is_end and self.made >= sampling.min_tokens:
            return self._last((token_id,), FinishReason.STOP, logprobs if sampling.logprobs else ())
        if self.made == sampling.max_tokens:
            return self._last((token_id,), FinishReason.LENGTH, logprobs if sampling.logprobs else ())
        given = len(request.given(self.index))
        usage = self._usage() if self.made == given + 1 and self.index == 0 else None
        return Output(
            request.request_id, self.index, (token_id,), logprobs if sampling.logprobs else (), usage=usage
        )

    def _last(
        self, ids: tuple[int, ...], reason: FinishReason, logprobs: tuple[TokenLogprobs, ...] = ()
    ) -> Output:
        timings = Timings(queue=1.0, load=2.0, prefill=3.0, ttft=6.0, decode=7.0)
        return Output(self.request.request_id, self.index, ids, logprobs, reason, self._usage(), timings)

    def _usage(self) -> Usage:
        prompt = len(self.request.token_ids)
        return Usage(prompt, self.made, prompt - prompt // 2, {"L1": prompt // 2})


def counted(requests: int) -> Snapshot:
    """What an owner that ran so many requests of ten tokens might have counted, a quarter of them found."""
    tokens, found = 10 * requests, 5 * requests // 2
    return Snapshot(
        tiers={
            TierName.HBM: TierCounters(
                capacity_bytes=100,
                used_bytes=40,
                pages=4,
                lookups_tokens=tokens,
                hit_tokens=found,
                page_bytes=30,
                raw_bytes=60,
                variants={"fp8_e4m3": 3, "int4c": 1},
                policy="rvi",
                fallbacks=1,
                refused_writes=3,
            )
        },
        totals=RequestTotals(requests, tokens, tokens - found, found),
    )


def client_id(name: str) -> str:
    """What a client calls the request that has this name at a worker."""
    return name.rpartition("#")[0]


@dataclass
class EchoWorker:
    """A worker whose model repeats the prompt: deterministic, one token per sequence and step.

    Steps run by themselves while it has work, or only by `step()` when `is_manual`.
    """

    info: WorkerInfo
    sink: Callable[[str, list[Output]], None] = lambda worker_id, outputs: None
    is_manual: bool = False
    max_waiting: int = 10_000
    is_dead: bool = False  # its process has ended, and nothing has noticed yet
    wrong: str | None = None
    pages_held: dict[str, PageInfo] = field(default_factory=dict)
    counters: Snapshot = field(default_factory=lambda: counted(2))
    cancelled: list[str] = field(default_factory=list)
    applied: Clears = field(default_factory=Clears)
    left: tuple[Uncleared, ...] = ()  # of a clear
    unused: tuple[tuple[str, Uncleared], ...] = ()
    stopped: list[str] = field(default_factory=list)  # cancelled, since their answers are whole
    submitted: list[EngineRequest] = field(default_factory=list)
    running: dict[str, list[_Sequence]] = field(default_factory=dict)
    _cancelling: set[str] = field(default_factory=set)
    _task: asyncio.Task[None] | None = None

    async def submit(self, request: EngineRequest) -> None:
        if self.is_dead:
            raise OwnerDown("its process ended")
        if len(self.running) >= self.max_waiting:
            raise QueueFull(f"{self.max_waiting} requests are waiting, at most {self.max_waiting} are taken")
        self.submitted.append(request)
        self.running[request.request_id] = [
            _Sequence(request, index, len(request.given(index)))
            for index in range(request.sampling.n)
            if index not in request.ended
        ]
        if not self.is_manual and (self._task is None or self._task.done()):
            self._task = asyncio.ensure_future(self._run())

    async def cancel(self, request_id: str, is_stopped: bool) -> None:
        self.cancelled.append(request_id)
        if is_stopped:
            self.stopped.append(request_id)
        self._cancelling.add(request_id)
        if self.is_manual:
            self.step()

    async def _run(self) -> None:
        while self.running:
            self.step()
            await asyncio.sleep(0)

    def step(self) -> None:
        """One token for every sequence."""
        outputs = []
        for request_id, sequences in list(self.running.items()):
            cancelled = None
            if request_id in self._cancelling:
                cancelled = FinishReason.STOP if request_id in self.stopped else FinishReason.CANCELLED
            made = [sequence.next_output(cancelled) for sequence in sequences]
            alive = [s for s, output in zip(sequences, made, strict=True) if output.finish_reason is None]
            self.running[request_id] = alive
            if not alive:
                del self.running[request_id]
            outputs += made
        self._cancelling &= self.running.keys()
        self.sink(self.info.worker_id, outputs)

    def stop_names(self) -> list[str]:
        """Ids, as their clients gave them, of what was cancelled since its answer was whole."""
        return [client_id(name) for name in self.stopped]

    def name_of(self, request_id: str) -> str:
        """What the latest request of a client's id is called here."""
        names = (request.request_id for request in reversed(self.submitted))
        return next(name for name in names if client_id(name) == request_id)

    async def explain(self, request_id: str) -> Explanation | None:
        for request in self.submitted:
            if request_id in (request.request_id, client_id(request.request_id)):
                prompt = len(request.token_ids)
                notes = (
                    PageNote(0, prompt // 2, "L1"),
                    PageNote(prompt // 2, prompt, "computed", "never_stored", "no tier has had it"),
                )
                usage = Usage(prompt, 1, prompt - prompt // 2, {"L1": prompt // 2})
                return Explanation(
                    request_id, request.tenant, self.info.worker_id, prompt, notes, usage, preemptions=1
                )
        return None

    async def stats(self) -> Snapshot:
        return deepcopy(self.counters)

    async def pages(self, tenant: str | bytes | None, tier: TierName | None, limit: int) -> list[PageInfo]:
        from kvtier.tier.pages.identity import tenant_digest

        digest = tenant_digest(tenant) if isinstance(tenant, str) else tenant
        wanted = None if digest is None else digest.hex()
        found = [
            page
            for page in self.pages_held.values()
            if (wanted is None or page.tenant == wanted) and (tier is None or page.tier is tier)
        ]
        return found[:limit]

    async def pages_of(self, keys: list[bytes]) -> list[PageInfo]:
        wanted = {key.hex() for key in keys}
        return [page for page in self.pages_held.values() if page.key in wanted]

    async def held(self, keys: bytes) -> list[HeldKeys]:
        wanted = split_keys(keys)
        found: dict[tuple[TierName, str], list[int]] = {}
        for page in self.pages_held.values():
            if page.state == "sealed" and (key := bytes.fromhex(page.key)) in wanted:
                found.setdefault((page.tier, page.variant), []).append(wanted.index(key))
        return HeldKeys.of(found, len(wanted))

    async def keys_with(self, heads: list[str], limit: int) -> list[list[bytes]]:
        return keys_with([bytes.fromhex(page.key) for page in self.pages_held.values()], heads, limit)

    async def pin(self, keys: list[bytes]) -> list[tuple[bytes, Outcome]]:
        return self._each(keys)

    async def unpin(self, keys: list[bytes]) -> list[tuple[bytes, Outcome]]:
        return self._each(keys)

    async def evict_all(self, tier: TierName | None) -> ManyOutcomes:
        keys = [bytes.fromhex(page.key) for page in await self.pages(None, tier, 10**9)]
        return ManyOutcomes.of(await self.evict(keys, tier))

    async def evict(self, keys: list[bytes], tier: TierName | None) -> list[tuple[bytes, Outcome]]:
        return [
            (key, outcome)
            for key, outcome in self._each(keys)
            if tier is None or key.hex() not in self.pages_held or self.pages_held[key.hex()].tier is tier
        ]

    async def clear(self, tenant: str | bytes | None, number: int) -> Cleared:
        from kvtier.tier.pages.identity import tenant_digest

        self.applied.note(tenant_digest(tenant) if isinstance(tenant, str) else tenant, number)
        pages = await self.pages(tenant, None, 10**9)
        outcomes = ManyOutcomes.of(self._each([bytes.fromhex(page.key) for page in pages]))
        return Cleared(outcomes, self.left, self.unused)

    async def clears(self) -> list[tuple[bytes, int]]:
        return self.applied.numbers()

    async def know(self, told: list[tuple[bytes, int]]) -> None:
        for tenant, number in self.applied.behind(told):
            self.applied.note(tenant, number)

    async def verify(self, keys: list[bytes]) -> list[tuple[bytes, Outcome]]:
        return self._each(keys)

    async def verify_all(self) -> ManyOutcomes:
        return ManyOutcomes.of(self._each([bytes.fromhex(key) for key in self.pages_held]))

    async def health(self) -> str | None:
        return self.wrong

    async def notes(self) -> list[str]:
        return ["started fresh"]

    async def pid(self) -> int:
        return 4242

    def _each(self, keys: list[bytes]) -> list[tuple[bytes, Outcome]]:
        return [(key, self._outcome(key.hex())) for key in keys]

    def _outcome(self, key: str) -> Outcome:
        page = self.pages_held.get(key)
        if page is None:
            return Outcome.MISSING
        return Outcome.REJECTED if page.pinned else Outcome.ACCEPTED


def page_info(
    key: str,
    tier: TierName,
    owner: str,
    tenant: str,
    depth: int = 0,
    *,
    pinned: bool = False,
    variant: str = "fp32",
    made_from: str = "",
) -> PageInfo:
    """One copy of a page."""
    from kvtier.tier.pages.identity import tenant_digest

    return PageInfo(
        key=key,
        tier=tier,
        owner=owner,
        tenant=tenant_digest(tenant).hex(),
        root="aa" * 32,
        parent="bb" * 32,
        variant=variant,
        depth=depth,
        tokens=4,
        nbytes=1024,
        uses=3,
        idle_s=1.5,
        pinned=pinned,
        readers=0,
        state="sealed",
        made_from=made_from,
    )


class Served:
    """A gateway that runs on an event loop in a thread of its own; `call` runs code there."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.endpoint = ""
        self.core: GatewayCore
        self.server: GatewayServer
        self.cache: CacheApi
        self.clearer: Clearer
        self.workers: list[EchoWorker] = []

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The function's result, run on the gateway's loop."""

        async def run() -> Any:
            result = function(*arguments)
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(timeout=120)

    async def status(self) -> inference_pb2.StatusReply:
        """A short status."""
        return inference_pb2.StatusReply(
            endpoint=self.endpoint,
            model=inference_pb2.ModelStatus(name="echo", vocab_size=VOCAB_SIZE),
            nodes=await self.cache.node_statuses(),
            workers=await self.core.worker_statuses(),
            in_flight=self.core.in_flight,
        )


@contextmanager
def serving(
    text: Text | None = None,
    *,
    config: GrpcConfig | None = None,
    workers: int = 1,
    nodes: list[EchoWorker] | None = None,
    is_manual: bool = False,
    max_sequences: int = 64,
    max_waiting: int = 10_000,
    tenants: dict[str, str] | None = None,
    max_context: int = CONTEXT,
    window: int = 0,
    infos: Sequence[WorkerInfo] = (),
    directory: HoldersPort | None = None,
    clears: Path | None = None,
    expected: Sequence[str] = (),
    sampling: SamplingParams = DEFAULT_SAMPLING,
) -> Iterator[Served]:
    """Serve echoing workers over real gRPC on a free loopback port. `max_context` is the last worker's.

    `infos` are what the workers say of themselves, instead of so many that are alike. The numbers of clears are kept in the
    folder `clears`; `expected` are ids of nodes that there are.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    served = Served(loop)
    digest = text.digest if text else ""
    served.workers = [
        EchoWorker(info, is_manual=is_manual, max_waiting=max_waiting)
        for info in infos or [echo_info(f"w{number}", digest) for number in range(workers)]
    ]
    served.workers[-1].info = replace(served.workers[-1].info, max_context=max_context)

    async def start() -> None:
        names = tenants if tenants is not None else {"default": "", "acme": "salt"}
        holders = None if directory is None else Holders(directory, loop.time)
        record = ClearRecord(clears)
        record.load()
        served.clearer = Clearer(record)
        served.core = GatewayCore(
            [(w.info, w) for w in served.workers],
            text,
            names,
            max_sequences,
            window,
            holders=holders,
            clears=record.clears,
            sampling=sampling,
        )
        for worker in served.workers:
            worker.sink = served.core.on_outputs
        held = [Node(node.info.node_id, node.info.pid, node) for node in nodes or []]
        served.cache = CacheApi(served.core, held, names, served.clearer, expected)
        await served.cache.attach_nodes()
        served.server = GatewayServer(
            served.core, served.cache, served.status, config or GrpcConfig(port=0), workers * max_sequences
        )
        served.endpoint = await served.server.start()

    try:
        served.call(start)
        try:
            yield served
        finally:
            served.call(served.core.stop)
            served.call(served.server.stop, 0.0)
            served.call(served.core.settle)
            served.core.close()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=120)
        loop.close()


def folder_digest(folder: Path) -> str:
    """The digest a worker would report for a model folder."""
    return tokenizer_digest(folder)
