"""From a step's logits to tokens: samples, appends, tells them, and ends or hands off the sequences that are over."""

from __future__ import annotations

import torch

from kvtier.workers.engine.metrics import RequestMetrics
from kvtier.workers.engine.outputs import StepOutputs
from kvtier.workers.engine.requests import Requests
from kvtier.workers.engine.sampling.prompt_logprobs import PromptLogprobs
from kvtier.workers.engine.sampling.token_sampler import TokenSampler
from kvtier.workers.node_io.arena_ops import ArenaOps
from kvtier.workers.requests.api import FinishReason, Output, TokenLogprobs
from kvtier.workers.requests.sequence import Request, Sequence, SequenceState
from kvtier.workers.scheduling.scheduler import Row, Scheduler


class TokenOutputs:
    """Owned by the step loop."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        ops: ArenaOps,
        requests: Requests,
        sampler: TokenSampler,
        prompt_logprobs: PromptLogprobs,
        metrics: RequestMetrics,
        outputs: StepOutputs,
    ) -> None:
        self._scheduler, self._ops, self._requests = scheduler, ops, requests
        self._sampler, self._prompt_logprobs = sampler, prompt_logprobs
        self._metrics, self._outputs = metrics, outputs

    def tell_prompts(
        self, rows: list[Row], sampled: list[Sequence], logits: torch.Tensor, now: float
    ) -> tuple[torch.Tensor, list[Sequence]]:
        """Log probabilities of prompt tokens, whose logits lie behind those that sample; what is left to sample."""
        at = len(sampled)
        for row in rows:
            count = self._prompt_logprobs.rows(row)
            mine, at = logits[at : at + count], at + count
            if not count or row.seq.state is SequenceState.FINISHED:
                continue
            try:
                output = self._prompt_logprobs.output(row, mine)
            except Exception as error:  # noqa: BLE001  # it ends its request, whatever it is
                self._requests.end_faulty(
                    row.seq.request, "reading its prompt's log probabilities", error, now
                )
                continue
            if output is not None:
                self._outputs.pending.append(output)
        left = [i for i, seq in enumerate(sampled) if seq.state is not SequenceState.FINISHED]
        return logits[left], [sampled[i] for i in left]

    def sample(self, seqs: list[Sequence], logits: torch.Tensor, now: float) -> None:
        """Draw a token for each sequence, float32 logits [sequences, vocabulary], and tell it."""
        if not seqs:
            return
        assert len(logits) == len(seqs)
        picks = list(range(len(seqs)))
        for i, seq in enumerate(seqs[:]):
            siblings = self._siblings(seq, now)
            seqs += siblings
            picks += [i] * len(siblings)
        if len(picks) > len(logits):
            logits = logits[picks]
        drawn = self._sampler.draw(seqs, logits)
        tokens, logprobs = drawn.tokens, drawn.logprobs
        for seq in seqs:
            if seq.state is SequenceState.WAITING:
                self._ops.run(self._scheduler.fork(seq.request.sequences[0], seq, now))
                if seq.state is SequenceState.WAITING:
                    self._sampler.forget(seq)
        firsts = self._append(seqs, tokens, now)
        for i, seq in enumerate(seqs):
            if i in drawn.faults and seq.state is not SequenceState.FINISHED:
                self._requests.end_faulty(seq.request, "sampling", drawn.faults[i], now)
            self._take(seq, tokens[i], logprobs[i] if logprobs else None, now, is_first=seq in firsts)

    def _append(self, seqs: list[Sequence], tokens: list[int | None], now: float) -> list[Sequence]:
        """Give each sequence its token, but for those that a sibling before them takes along: it has none.

        Those whose token is their request's first.
        """
        sampled = [token for token in tokens if token is not None]
        if len(sampled) < len(seqs):
            seqs, sampled = _before_their_ends(seqs, tokens)
        return self._scheduler.sampled(seqs, sampled, now)

    def _siblings(self, seq: Sequence, now: float) -> list[Sequence]:
        """The other sequences of a request whose prompt has just been computed; made now."""
        request = seq.request
        if request.usage is not None or request.spec.sampling.n == 1 or request.spec.is_resumed:
            return []
        return self._scheduler.siblings(seq, self._requests.longest(request.spec))

    def _take(
        self, seq: Sequence, token: int | None, logprobs: TokenLogprobs | None, now: float, *, is_first: bool
    ) -> None:
        """One sequence's new token, which it has: tell the client, and end the sequence where it ends."""
        request = seq.request
        if seq.state is SequenceState.FINISHED:
            return  # a sibling's bad logits ended the whole request
        if token is None:
            self._requests.end(request, FinishReason.ERROR, now, "the model's output was not a number")
            return
        if is_first:
            self._metrics.count(request, now)
        reason = seq.ends_with(token)
        last = reason is not None
        self._outputs.pending.append(
            Output(
                request_id=request.spec.request_id,
                index=seq.index,
                token_ids=(token,),
                logprobs=(logprobs,) if logprobs is not None else (),
                finish_reason=reason,
                usage=request.usage_of(seq.completion_tokens) if is_first or last else None,
                timings=request.timings(now) if is_first or last else None,
            )
        )
        if reason is not None:
            self._requests.retire(seq, reason, now)
        elif request.spec.is_prefill_only:
            self._requests.hand_off(seq, now)


def _before_their_ends(seqs: list[Sequence], tokens: list[int | None]) -> tuple[list[Sequence], list[int]]:
    """Those that have a token, with it, but for those behind a sibling that has none."""
    ended: set[Request] = set()
    left: list[Sequence] = []
    sampled: list[int] = []
    for seq, token in zip(seqs, tokens, strict=True):
        if token is None:
            ended.add(seq.request)
        elif seq.request not in ended:
            left.append(seq)
            sampled.append(token)
    return left, sampled
