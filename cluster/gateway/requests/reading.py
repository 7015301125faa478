"""Reads what clients ask for, checks every value, and makes the worker's request of it. Performs no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from kvtier.cluster.config.deployment import MAX_STREAM_PROMPT, MAX_STREAM_TOKENS
from kvtier.proto import cache_pb2, inference_pb2
from kvtier.workers.models.text import Text, TextError
from kvtier.workers.requests.api import MAX_TOLD_PROMPT, SamplingParams

DEFAULT_TENANT = "default"
DEFAULT_MAX_TOKENS = 1024  # where the request names none and the context leaves as much
MAX_CHAT_MESSAGES = 8192  # rendering one takes some 20 us
MAX_STOPS = 16
MAX_STOP_BYTES = 1024
MAX_STOP_IDS = 64
MAX_ID_CHARS = 128
MAX_QUOTED_CHARS = 128
PART_IDS = 1 << 15  # checked in one go: a millisecond
ROLES = ("system", "user", "assistant", "tool")

Prompted = inference_pb2.GenerateRequest | cache_pb2.LookupRequest


class Refusal(Exception):
    """A call is answered with this status code and one readable sentence."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def quoted(text: str) -> str:
    """What a client sent, as an error shows it: at most MAX_QUOTED_CHARS of it."""
    return repr(text) if len(text) <= MAX_QUOTED_CHARS else f"{text[:MAX_QUOTED_CHARS]!r}..."


def invalid(message: str) -> Refusal:
    """A value of the request is wrong."""
    return Refusal(grpc.StatusCode.INVALID_ARGUMENT, message)


@dataclass(frozen=True, slots=True)
class Limit:
    """How many tokens a sequence may have, prompt and output together; as text, how to say so."""

    tokens: int
    is_windowed: bool = False
    is_l1_short: bool = False  # it is what the workers' L1 holds

    @property
    def prompt(self) -> int:
        """How many of them may be the prompt's."""
        return min(self.tokens, MAX_STREAM_PROMPT) if self.is_windowed else self.tokens

    def __str__(self) -> str:
        if self.is_windowed:
            return f"a request with a window has at most {self.tokens} tokens, {self.prompt} of them its prompt's"
        why = " (what tiers.l1.bytes holds)" if self.is_l1_short else ""
        return f"max_context is {self.tokens} tokens{why}; a request with a window may be longer"


def windowed(request: inference_pb2.GenerateRequest, page_tokens: int) -> tuple[int, int]:
    """The window and the sinks that a request sets itself, 0 where none. Raises Refusal.

    Whether the model can be given a window is the worker's to say.
    """
    window, sinks = request.window, request.sinks
    if not 0 <= window <= MAX_STREAM_TOKENS or 0 < window < page_tokens:
        raise invalid(
            f"window must be 0 (as configured) or from {page_tokens} (a page) to {MAX_STREAM_TOKENS} tokens, "
            f"got {window}"
        )
    if sinks and not window:
        raise invalid(f"sinks {sinks} need a window beside them: set window too")
    if not 0 <= sinks <= window:
        raise invalid(f"sinks must be from 0 to the window ({window} tokens), got {sinks}")
    return window, sinks


def prompt_size(request: Prompted) -> int:
    """How much must be read to have the prompt's tokens: characters of text, bytes of a chat, token ids by 16."""
    match request.WhichOneof("prompt"):
        case "token_ids":
            return len(request.token_ids.ids) // 16  # an id costs a sixteenth of a character or less
        case "text":
            return len(request.text)
        case "chat":
            return request.chat.ByteSize()  # not of the contents alone: messages without any have a price too
        case _:
            return 0


def prompt_ids(request: Prompted, text: Text | None, vocab_size: int, limit: Limit) -> tuple[int, ...]:
    """The prompt as token ids, each in the vocabulary, no more than the limit. Raises Refusal.

    Text that is too long whatever its tokens are is refused before it is read.
    """
    match request.WhichOneof("prompt"):
        case "token_ids":
            return _given_ids(request.token_ids.ids, vocab_size, limit)
        case "text":
            if not request.text:
                raise invalid("prompt is empty: text has no characters")
            ids = _text_ids(request.text, _tokenizer(text), limit.prompt)
        case "chat":
            ids = _chat_ids(request.chat, _tokenizer(text), limit.prompt)
        case _:
            raise invalid("prompt is missing: send one of text, token_ids or chat")
    return _given_ids(ids, vocab_size, limit)


def _given_ids(ids: Sequence[int], vocab_size: int, limit: Limit) -> tuple[int, ...]:
    """A prompt's ids, checked; in parts, between which other threads of this process get their turns."""
    if not ids:
        raise invalid("prompt is empty: it has no tokens")
    if len(ids) > limit.prompt:
        raise invalid(f"prompt of {len(ids)} tokens is too long: {limit}")
    found: list[int] = []
    for start in range(0, len(ids), PART_IDS):
        part = ids[start : start + PART_IDS]
        check_vocabulary("prompt", part, vocab_size, start)
        found += part
    return tuple(found)


def check_vocabulary(what: str, ids: Sequence[int], vocab_size: int, start: int = 0) -> None:
    """Refuse ids that the model doesn't know, naming the first. They are those of `what` from position `start` on."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        position, wrong = next((p, i) for p, i in enumerate(ids, start) if not 0 <= i < vocab_size)
        raise invalid(
            f"token id {wrong} at position {position} of {what} is out of vocabulary: ids go from 0 to {vocab_size - 1}"
        )


def _tokenizer(text: Text | None) -> Text:
    if text is None:
        raise Refusal(
            grpc.StatusCode.FAILED_PRECONDITION, "the model has no tokenizer: send the prompt as token_ids"
        )
    return text


def _text_ids(prompt: str, text: Text, max_context: int) -> list[int]:
    try:
        return text.encode(prompt, max_context)
    except TextError as error:
        raise invalid(str(error)) from error


def _chat_ids(chat: inference_pb2.Chat, text: Text, max_context: int) -> list[int]:
    if not chat.messages:
        raise invalid("prompt is empty: chat has no messages")
    if len(chat.messages) > MAX_CHAT_MESSAGES:
        raise invalid(f"chat must have at most {MAX_CHAT_MESSAGES} messages, got {len(chat.messages)}")
    for position, message in enumerate(chat.messages):
        if message.role not in ROLES:
            raise invalid(
                f"role of chat message {position} must be one of {', '.join(ROLES)}, got {quoted(message.role)}"
            )
    if not text.has_chat_template:
        raise Refusal(
            grpc.StatusCode.FAILED_PRECONDITION,
            "the model has no chat template: send the prompt as text or token_ids",
        )
    try:
        return text.encode_chat([{"role": m.role, "content": m.content} for m in chat.messages], max_context)
    except TextError as error:
        raise invalid(str(error)) from error


def sampling_params(
    sampling: inference_pb2.Sampling,
    prompt_tokens: int,
    limit: Limit,
    vocab_size: int,
    fresh_seed: int,
    defaults: SamplingParams,
) -> SamplingParams:
    """The request's sampling with defaults filled in. Raises Refusal."""
    room = limit.tokens - prompt_tokens
    if room < 1:
        raise invalid(f"prompt of {prompt_tokens} tokens leaves no room for output: {limit}")
    params = _with_defaults(sampling, min(room, DEFAULT_MAX_TOKENS), fresh_seed, defaults)
    try:
        params.validate()
    except ValueError as error:
        raise invalid(str(error)) from error
    if params.max_tokens > room:
        raise invalid(
            f"prompt of {prompt_tokens} tokens and max_tokens {params.max_tokens} are {prompt_tokens + params.max_tokens} "
            f"tokens: {limit}"
        )
    if len(params.stop_ids) > MAX_STOP_IDS:
        raise invalid(f"stop_ids must be at most {MAX_STOP_IDS}, got {len(params.stop_ids)}")
    check_vocabulary("stop_ids", params.stop_ids, vocab_size)
    if params.prompt_logprobs and prompt_tokens > MAX_TOLD_PROMPT:
        raise invalid(
            f"prompt_logprobs are told of prompts of at most {MAX_TOLD_PROMPT} tokens, got {prompt_tokens}"
        )
    check_vocabulary("logit_bias", [token for token, _ in params.logit_bias], vocab_size)
    return params


def _with_defaults(
    sampling: inference_pb2.Sampling, max_tokens: int, seed: int, defaults: SamplingParams
) -> SamplingParams:
    def given(name: str, default: Any) -> Any:
        return getattr(sampling, name) if sampling.HasField(name) else default

    return SamplingParams(
        max_tokens=given("max_tokens", max_tokens),
        min_tokens=given("min_tokens", defaults.min_tokens),
        temperature=given("temperature", defaults.temperature),
        top_k=given("top_k", defaults.top_k),
        top_p=given("top_p", defaults.top_p),
        min_p=given("min_p", defaults.min_p),
        repetition_penalty=given("repetition_penalty", defaults.repetition_penalty),
        presence_penalty=given("presence_penalty", defaults.presence_penalty),
        frequency_penalty=given("frequency_penalty", defaults.frequency_penalty),
        logit_bias=tuple(sampling.logit_bias.items()),
        seed=given("seed", seed),
        stop_ids=tuple(sampling.stop_ids),
        ignore_eos=given("ignore_eos", defaults.ignore_eos),
        logprobs=given("logprobs", defaults.logprobs),
        n=given("n", defaults.n),
        prompt_logprobs=given("prompt_logprobs", defaults.prompt_logprobs),
    )


def stop_strings(sampling: inference_pb2.Sampling, text: Text | None) -> tuple[str, ...]:
    """The request's stop strings. Raises Refusal."""
    stops = tuple(sampling.stop)
    if len(stops) > MAX_STOPS:
        raise invalid(f"stop must be at most {MAX_STOPS} strings, got {len(stops)}")
    for stop in stops:
        if not stop:
            raise invalid("a stop string must not be empty")
        if len(stop.encode()) > MAX_STOP_BYTES:
            raise invalid(f"a stop string must be at most {MAX_STOP_BYTES} bytes, got {len(stop.encode())}")
    if stops:
        _tokenizer_for_stops(text)
    return stops


def _tokenizer_for_stops(text: Text | None) -> None:
    if text is None:
        raise Refusal(
            grpc.StatusCode.FAILED_PRECONDITION,
            "the model has no tokenizer: stop takes stop_ids, not strings",
        )


def checked_id(request_id: str, fresh: str) -> str:
    """The request's id, or the fresh one when it names none. Raises Refusal."""
    if len(request_id) > MAX_ID_CHARS or not request_id.isprintable():
        raise invalid(
            f"request_id must be at most {MAX_ID_CHARS} printable characters, got {quoted(request_id)}"
        )
    return request_id or fresh
