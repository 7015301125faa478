"""One request's way back: its sequences' tokens become text and chunks. Knows no gRPC call, no Ray, no clock."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace

import grpc

from kvtier.cluster.gateway.requests.reading import Refusal
from kvtier.cluster.gateway.streams.text import StopScanner
from kvtier.cluster.gateway.streams.unread import Unread
from kvtier.proto import inference_pb2
from kvtier.tier.pages.page import TierName
from kvtier.workers.models.text import Detokenizer, Text
from kvtier.workers.requests.api import EngineRequest, FinishReason, Output, Timings, Usage

MAX_UNREAD_BYTES = 4 * 2**20  # of a request: 200,000 tokens with their text, 16,000 with 20 logprobs each
MAX_MOVED_TOKENS = 1 << 20  # of a request: with more, 4 MB, it doesn't go on at another worker

_FINISH = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}


class Sequence:
    """What one of a request's n sequences has given and its client has not yet taken. Owned by its Stream.

    Grows by what the worker makes while the client is slow, so by at most max_tokens tokens; the Stream bounds it too.
    """

    __slots__ = (
        "_detokenizer",
        "_scanner",
        "_unscanned_tokens",
        "count",
        "delivered_tokens",
        "finish",
        "given",
        "index",
        "is_done",
        "prompt_unread",
        "unread",
    )

    def __init__(
        self, index: int, detokenizer: Detokenizer | None, scanner: StopScanner | None, min_tokens: int = 0
    ) -> None:
        self.index = index
        self.unread = Unread()
        self.prompt_unread = Unread()  # log probabilities of the prompt's tokens
        self.count = 0  # its tokens so far
        self.given: array[int] | None = array(
            "I"
        )  # them: what another worker would go on from; None: too many
        self.finish: FinishReason | None = None  # what the client will read
        self.is_done = False  # its last chunk has been taken
        self.delivered_tokens = 0
        self._detokenizer = detokenizer
        self._scanner = scanner
        self._unscanned_tokens = min_tokens - 1  # no stop string ends the sequence before min_tokens

    def take(self, output: Output, silent_ids: frozenset[int]) -> None:
        """Add a step's tokens; the token that ends the sequence, one of `silent_ids`, gives no text."""
        is_stop = output.finish_reason is FinishReason.STOP
        taken = 0
        for token_id in output.token_ids:
            taken += 1
            is_silent = is_stop and taken == len(output.token_ids) and token_id in silent_ids
            if self._detokenizer and not is_silent and self._add(self._detokenizer.push((token_id,))):
                self.finish = FinishReason.STOP
                break
            self._unscanned_tokens -= 1
        self.unread.add(output.token_ids[:taken], output.logprobs[:taken])
        self.count += taken
        if self.given is not None:
            self.given.extend(output.token_ids[:taken])
        if self.finish is None and output.finish_reason is not None:
            self._end(output.finish_reason)

    def _add(self, text: str) -> bool:
        """Whether the text completes a stop string."""
        if not self._scanner or self._unscanned_tokens > 0:
            self.unread.add_text(text)
            return False
        shown, is_stop = self._scanner.push(text)
        self.unread.add_text(shown)
        return is_stop

    def drop_unread(self) -> None:
        """Forget what the client has not taken: it will get none of it."""
        self.unread.clear()
        self.prompt_unread.clear()

    def _end(self, reason: FinishReason) -> None:
        self.finish = reason
        if self._detokenizer and self._add(self._detokenizer.finish()):
            self.finish = FinishReason.STOP
        elif self._scanner:
            self.unread.add_text(self._scanner.flush())

    def chunk(self, request_id: str) -> inference_pb2.GenerateChunk | None:
        """What is there for the client and fits in one, taken out; None when there is nothing."""
        if not self.prompt_unread and not self.unread and (self.finish is None or self.is_done):
            return None
        chunk = inference_pb2.GenerateChunk(request_id=request_id, index=self.index)
        if self.prompt_unread:
            self.prompt_unread.fill_prompt(chunk)
            return chunk
        self.delivered_tokens += self.unread.fill(chunk)
        if self.finish is not None and not self.unread:
            chunk.finish_reason = _FINISH[self.finish]
            self.is_done = True
        return chunk


@dataclass(slots=True)
class Attempt:
    """A request at one worker, under this id. `left` says why it went on elsewhere; empty: it did not."""

    worker_id: str
    request_id: str
    given: int  # tokens that it had, over all sequences, when it began
    left: str = ""


class Stream:
    """A request in flight. The gateway's loop feeds it (`take`, `fail`); its call's handler drains it.

    It may go from worker to worker (`begin`): each goes on behind the tokens that those before have given.
    """

    def __init__(
        self,
        request: EngineRequest,
        text: Text | None,
        stops: tuple[str, ...],
        eos_ids: tuple[int, ...],
        continues: bool = True,
    ) -> None:
        """`continues`: its text goes on from the prompt's, as an answer in a chat doesn't."""
        self.request = request
        self.attempts: list[Attempt] = []
        self.sequences = [
            Sequence(
                index,
                text.detokenizer(request.token_ids if continues else ()) if text else None,
                StopScanner(stops) if stops else None,
                request.sampling.min_tokens,
            )
            for index in range(request.sampling.n)
        ]
        self.failure: Refusal | None = None
        self.is_overfull = False  # it failed, because its client reads too slowly
        self.is_cancelling = False  # the worker has been told that what it still makes is not wanted
        self.moves = 0  # times that it went on elsewhere since its worker was lost
        self._told_prompt = (
            1  # of the prompt's tokens, those whose log probabilities have come; the first has none
        )
        self.queued_tokens = 0  # that its worker is still expected to compute before the next token
        self._began_at = ""  # the worker that was the first to say anything
        self._usage: Usage | None = None
        self._is_counted = False  # a worker before has counted its prompt
        self._first: Timings | None = None  # as of its first token
        self._last: Timings | None = None  # with the last word of its last worker
        self._silent_ids = frozenset(eos_ids) | frozenset(request.sampling.stop_ids)
        self._at_worker: set[int] = set()  # sequences that the worker has not ended
        self._silent: set[int] = set()  # of these, those that it has given no token of
        self._news = asyncio.Event()
        self._is_first = True
        self._is_abandoned = False

    @property
    def worker_id(self) -> str:
        """Where it is, or was last."""
        return self.attempts[-1].worker_id

    @property
    def has_given(self) -> bool:
        """A token has come."""
        return any(sequence.count for sequence in self.sequences)

    @property
    def given_tokens(self) -> int:
        """Tokens that have come, over all sequences."""
        return sum(sequence.count for sequence in self.sequences)

    @property
    def is_settled(self) -> bool:
        """No worker is to do anything more for it."""
        return self._is_abandoned or self.is_complete or self.failure is not None

    @property
    def is_abandoned(self) -> bool:
        """Nothing drains it any more."""
        return self._is_abandoned

    @property
    def can_move(self) -> bool:
        """What it has given is known, so that another worker can go on."""
        return all(sequence.given is not None for sequence in self.sequences)

    def begin(self, worker_id: str, request_id: str) -> EngineRequest:
        """It goes to a worker, under this id: what that is asked for."""
        self.attempts.append(Attempt(worker_id, request_id, self.given_tokens))
        ended = tuple(sequence.index for sequence in self.sequences if sequence.finish is not None)
        self._at_worker = set(range(len(self.sequences))).difference(ended)
        self._silent = set(self._at_worker)
        self._is_counted = self.has_given
        self.is_cancelling = False
        if not self.has_given:
            return replace(self.request, request_id=request_id)
        resumed = tuple(tuple(sequence.given or ()) for sequence in self.sequences)
        return replace(self.request, request_id=request_id, resumed=resumed, ended=ended)

    def leave(self, why: str) -> None:
        """It has left its worker, and will go on elsewhere if it can."""
        self.attempts[-1].left = why

    @property
    def is_over_at_worker(self) -> bool:
        """The worker has said its last word on every sequence."""
        return not self._at_worker

    @property
    def has_gone_on(self) -> bool:
        """The worker has given a token of every sequence that it has."""
        return not self._silent

    @property
    def is_complete(self) -> bool:
        """Every sequence has its end; nothing the worker may still say changes what the client reads."""
        return all(sequence.finish is not None for sequence in self.sequences)

    @property
    def is_drained(self) -> bool:
        """The client has been given everything."""
        return all(sequence.is_done for sequence in self.sequences)

    def take(self, output: Output) -> None:
        """Add a step's output of one sequence."""
        self._news.set()
        if output.token_ids:
            self._silent.discard(output.index)
        if output.finish_reason is not None:
            self._at_worker.discard(output.index)
        if self._is_abandoned or self.is_overfull:
            return
        self._take_books(output)
        if not self._began_at:
            self._began_at = self.worker_id
        sequence = self.sequences[output.index]
        if sequence.finish is not None:
            return
        match output.finish_reason:
            case FinishReason.ERROR:
                reason = output.error or "the worker failed without a word"
                self.fail(Refusal(grpc.StatusCode.INTERNAL, reason))
            case FinishReason.CANCELLED | FinishReason.PREFILLED:
                pass  # no end that its client reads
            case None | FinishReason.STOP | FinishReason.LENGTH:
                self._take_prompt(output)
                sequence.take(output, self._silent_ids)
                self._check_room()

    def _take_prompt(self, output: Output) -> None:
        """A worker that takes the request over before its first token tells of the prompt from the beginning."""
        new = output.prompt_logprobs[max(0, self._told_prompt - output.prompt_position) :]
        self._told_prompt += len(new)
        self.sequences[output.index].prompt_unread.add([0] * len(new), new)

    def _take_books(self, output: Output) -> None:
        """The prompt counts where its first token came from; times are told up to there, and behind it."""
        if output.usage is not None and not self._is_counted and (output.index == 0 or self._usage is None):
            self._usage = output.usage
        if output.timings is None:
            return
        if self._first is None:
            self._first = output.timings
        if output.finish_reason is not None:
            self._last = output.timings

    def _check_room(self) -> None:
        if self.given_tokens > MAX_MOVED_TOKENS:
            for sequence in self.sequences:
                sequence.given = None
        waiting = sum(sequence.unread.nbytes + sequence.prompt_unread.nbytes for sequence in self.sequences)
        if waiting <= MAX_UNREAD_BYTES or self.failure is not None:
            return
        tokens = sum(len(sequence.unread) for sequence in self.sequences)
        self.fail(
            Refusal(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"the client reads too slowly: {tokens} tokens in {waiting} bytes wait for it, at most "
                f"{MAX_UNREAD_BYTES} bytes are kept",
            )
        )
        self.is_overfull = True
        for sequence in self.sequences:
            sequence.drop_unread()

    def fail(self, failure: Refusal) -> None:
        """End the stream with a status, unless it has all its output; what was not taken yet is dropped."""
        if self.failure is None and not self.is_complete:
            self.failure = failure
        self._news.set()

    def abandon(self) -> None:
        """Nothing drains it any more; from now on it only counts the worker's last words."""
        self._is_abandoned = True

    def conclude(self) -> None:
        """Wait no longer for the worker's last word."""
        self._at_worker.clear()
        self._news.set()

    async def wait_over(self) -> None:
        """Until the worker has said its last word; for a stream nothing drains."""
        while not self.is_over_at_worker:
            await self._news.wait()
            self._news.clear()

    async def wait(self) -> None:
        """Until something is new. Raises the stream's failure."""
        await self._news.wait()
        self._news.clear()
        if self.failure is not None:
            raise self.failure

    def drain(self) -> Iterator[inference_pb2.GenerateChunk]:
        """Chunks for the client, each made when it is asked for: what comes meanwhile may go with it.

        The last one of all, with the usage, comes when the worker has said its last word: it knows the timings.
        """
        for sequence in self.sequences:
            while self.is_over_at_worker or not self.is_complete:
                chunk = sequence.chunk(self.request.request_id)
                if chunk is None:
                    break
                if self._is_first:
                    self._is_first = False
                    chunk.worker = self._began_at
                    chunk.seed = self.request.sampling.seed
                if self.is_drained:
                    self._conclude(chunk)
                yield chunk

    def _conclude(self, chunk: inference_pb2.GenerateChunk) -> None:
        completion_tokens = sum(sequence.delivered_tokens for sequence in self.sequences)
        if self._usage is not None:
            chunk.usage.CopyFrom(usage_message(self._usage, completion_tokens))
        if self._first is not None and self._last is not None:
            told = merged_timings(self._first, self._last) if self._is_counted else self._last
            for name in ("queue", "load", "prefill", "ttft", "decode"):
                setattr(chunk.timings_ms, name, getattr(told, name))


def merged_timings(first: Timings, last: Timings) -> Timings:
    """Of a request that went on elsewhere: up to its first token, and from there to its end, the moves among it."""
    return replace(first, decode=max(0.0, last.ttft - first.ttft) + last.decode)


def usage_message(usage: Usage, completion_tokens: int) -> inference_pb2.Usage:
    """As clients read it, with every tier present."""
    return inference_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=completion_tokens,
        computed_tokens=usage.computed_tokens,
        cached_tokens={tier.value: usage.cached_tokens.get(tier.value, 0) for tier in TierName},
    )
