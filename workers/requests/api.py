"""What goes into a decode worker and what comes out, beside the model: requests, outputs, usage. Pure data.

These values cross Ray calls between the gateway and a worker; none holds page bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple


class QueueFull(Exception):
    """A worker has as many requests waiting as it takes; the message names the number. Try again later."""


WORKER_FAILED = "the worker failed"  # how the error of each request begins that a step loop ended with


class WorkerStopped(RuntimeError):
    """The worker takes nothing more: it is stopping, or it failed, and the message says how."""


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # a stop id, a stop string, or the model's end of sequence
    LENGTH = "length"  # max_tokens, or the context is full
    CANCELLED = "cancelled"  # as asked, or given up by a worker that stops or failed: `error` says so
    ERROR = "error"
    PREFILLED = "prefilled"  # not over: what `is_prefill_only` asks for is done, and another worker can go on


class Range(NamedTuple):
    """The values that a sampling parameter may have: `least` to `most`, and 0 too where that means something else."""

    least: float
    most: float
    zero: str = ""  # what 0 means
    is_open: bool = False  # `least` itself is no such value

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, int | float):
            return False
        if self.zero and value == 0:
            return True
        return (self.least < value or (self.least == value and not self.is_open)) and value <= self.most

    def __str__(self) -> str:
        if self.is_open:
            return f"above {self.least} and at most {self.most}"
        zero = f"0 ({self.zero}) or " if self.zero else ""
        return f"{zero}from {self.least} to {self.most}"


# Within these every request ends well, whatever its model's finite logits. A temperature below 1e-06 is as good as 0, and
# soon no float32; a repetition penalty far from 1 makes infinities.
RANGES: dict[str, Range] = {
    "temperature": Range(1e-6, 100, zero="greedy"),
    "top_k": Range(1, 2**31 - 1, zero="off"),
    "top_p": Range(0, 1, is_open=True),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0.01, 100),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "seed": Range(0, 2**63 - 1),
    "logprobs": Range(0, 20),
    "n": Range(1, 16),
    "prompt_logprobs": Range(0, 20),
}


BIAS_RANGE = Range(-100, 100)
MAX_LOGIT_BIAS = 1024  # tokens
MAX_TOLD_PROMPT = (
    8192  # tokens of a prompt whose log probabilities are asked for: they are kept until they are read
)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Checked by `validate`, see RANGES; temperature 0 is greedy."""

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = (
        1.0  # of every token of prompt and output: logits above 0 by it, below 0 times it
    )
    presence_penalty: float = 0.0  # taken from the logit of each token of the output
    frequency_penalty: float = 0.0  # ... once for each time it is there
    logit_bias: tuple[tuple[int, float], ...] = ()  # added to these tokens' logits, each named once
    seed: int = 0  # randomness is keyed by (seed, sequence index, position)
    stop_ids: tuple[int, ...] = ()  # beside the model's own end-of-sequence ids
    ignore_eos: bool = False
    logprobs: int = 0  # 0: none; k: the chosen token's and the k most likely ones'
    n: int = 1
    # 0: none; k: of each prompt token behind the first one its own, and the k most likely ones'. Such a request neither
    # reads nor leaves cached pages: what a page was computed from gives no logits again.
    prompt_logprobs: int = 0

    def validate(self) -> None:
        """Raise ValueError, with the value and what would be right."""
        checks: list[tuple[bool, str]] = [
            (self.max_tokens >= 1, f"max_tokens must be at least 1, got {self.max_tokens}"),
            (
                0 <= self.min_tokens <= self.max_tokens,
                f"min_tokens must be from 0 to max_tokens ({self.max_tokens}), got {self.min_tokens}",
            ),
            *(
                (getattr(self, name) in allowed, f"{name} must be {allowed}, got {getattr(self, name)}")
                for name, allowed in RANGES.items()
            ),
            (
                len(self.logit_bias) <= MAX_LOGIT_BIAS,
                f"logit_bias must name at most {MAX_LOGIT_BIAS} tokens, got {len(self.logit_bias)}",
            ),
            (
                len(dict(self.logit_bias)) == len(self.logit_bias),
                f"logit_bias must name each token once, got {[token for token, _ in self.logit_bias]}",
            ),
            *(
                (bias in BIAS_RANGE, f"logit_bias must be {BIAS_RANGE}, got {bias} of token {token}")
                for token, bias in self.logit_bias
            ),
        ]
        for ok, message in checks:
            if not ok:
                raise ValueError(message)


DEFAULT_SAMPLING = SamplingParams()


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request as a worker takes it: token ids in, token ids out."""

    request_id: str
    tenant: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    use_cache: bool = True  # False: neither reads nor leaves cached pages
    window: int = 0  # tokens each token attends, itself among them; 0: as the model does
    sinks: int = 0  # first tokens that are attended whatever the window
    lossy: bool = False  # takes pages of a lossier variant (tiers.l4.format) where the exact one is gone
    arrived_s: float = 0.0  # the gateway's wall clock (time.time()) at arrival
    session: int = 0  # digest of tenant and session_id; 0: none told
    session_closed: bool = False  # the client says that this is the session's last request
    session_open: bool = False  # ... that another one will follow
    turn: int = 0  # of the session, from 1; 0: not told
    expected_output_tokens: int = 0  # the client's guess; 0: none
    tool_stop_ids: tuple[
        int, ...
    ] = ()  # that end a call of a tool, each the last token of an answer or close to it
    # Tokens that each of the n sequences has given already, at a worker that is gone or only prefills; empty: none.
    resumed: tuple[tuple[int, ...], ...] = ()
    ended: tuple[
        int, ...
    ] = ()  # with `resumed`: those of the n sequences that are over, of which nothing more is wanted
    is_prefill_only: bool = False  # end after the first token, once the prompt's pages are saved below L1
    remotes: tuple[
        tuple[str, str, int], ...
    ] = ()  # node, its exchange's address, pages of the prompt it is said to hold
    cleared: int = 0  # the tenant's clear epoch: a worker that is behind clears L1 first

    @property
    def is_resumed(self) -> bool:
        """Another worker has given its first token, and has counted its prompt."""
        return any(self.resumed)

    def given(self, index: int) -> tuple[int, ...]:
        """The tokens that one of its sequences has given already."""
        return self.resumed[index] if self.resumed else ()

    def validate_resumed(self) -> None:
        """Raise ValueError where `resumed` and `ended` don't fit the rest, with the value and what would be right."""
        n, most = self.sampling.n, self.sampling.max_tokens
        if self.resumed and len(self.resumed) != n:
            raise ValueError(
                f"resumed must have the tokens of each of {n} sequences, got {len(self.resumed)}"
            )
        if not set(self.ended) < set(range(n)) or (self.ended and not self.resumed):
            raise ValueError(f"ended must name some, not all, of {n} resumed sequences, got {self.ended}")
        for index, tokens in enumerate(self.resumed):
            if index not in self.ended and len(tokens) >= most:
                raise ValueError(
                    f"sequence {index} is resumed with {len(tokens)} tokens, of max_tokens {most}: name it in ended"
                )


@dataclass(frozen=True, slots=True)
class Usage:
    """Where a prompt's tokens came from: sum(cached_tokens.values()) + computed_tokens == prompt_tokens, always.

    Counted once per request at its first token, preemption and retries excluded. Keys: L1, L2, L3, L4, remote.
    """

    prompt_tokens: int
    completion_tokens: int
    computed_tokens: int
    cached_tokens: dict[str, int]


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds of a request's stages in the worker; ttft from the gateway's arrival to the first token."""

    queue: float
    load: float
    prefill: float
    ttft: float
    decode: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one position: the chosen token's, and the most likely ones' (id, logprob)."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Output:
    """What one step gave one sequence. A worker sends one list of these per step."""

    request_id: str
    index: int  # which of the request's n sequences
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None  # on the first output of index 0 (so far) and on each last one
    timings: Timings | None = None  # with the request's first one, and with each last one
    error: str | None = (
        None  # with FinishReason.ERROR, and CANCELLED that nothing asked for: one readable sentence
    )
    prompt_position: int = 0  # of the first of `prompt_logprobs` in the prompt
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of prompt tokens, on index 0 before its first token


@dataclass(frozen=True, slots=True)
class PageNote:
    """One stretch of a prompt in `explain`: tokens [start, end) were found in `tier`, or were computed because."""

    start: int
    end: int
    tier: str  # L1, L2, L3, L4, remote, or "computed"
    reason: str = ""  # for "computed": never_stored, evicted, identity_differs, ... (messages.Missing)
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer to `explain REQUEST_ID`; a worker keeps a bounded number of the latest."""

    request_id: str
    tenant: str
    worker_id: str
    prompt_tokens: int
    notes: tuple[PageNote, ...]
    usage: Usage | None
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker says of itself when it is ready."""

    worker_id: str
    node_id: str
    pid: int
    model_name: str
    vocab_size: int
    max_context: int  # tokens of a request without a window of its own
    eos_ids: tuple[int, ...]
    dtype: str
    page_tokens: int
    page_bytes: int
    tokenizer_digest: str  # "" when the model folder has no tokenizer
    root_fields: dict[str, str] = field(default_factory=dict)
    role: Literal["both", "prefill", "decode"] = "both"  # what the gateway is to send it
    is_l1_short: bool = False  # L1 holds fewer tokens than the model and model.max_context allow
