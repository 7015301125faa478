"""The requests of one worker: which are taken, how they end, and what is said of each at its end."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace

from kvtier.tier.pages.identity import tenant_digest
from kvtier.tier.pages.page import PageKey
from kvtier.workers.engine.handoff import Handoffs
from kvtier.workers.engine.metrics import RequestMetrics
from kvtier.workers.engine.outputs import StepOutputs
from kvtier.workers.engine.sampling.prompt_logprobs import PromptLogprobs
from kvtier.workers.engine.sampling.token_sampler import TokenSampler
from kvtier.workers.node_io.admin import L1Admin, Outcomes
from kvtier.workers.node_io.namespaces import Kind, Namespaces
from kvtier.workers.node_io.node_link import NodeLink
from kvtier.workers.node_io.pager import Pager
from kvtier.workers.paging.frames import SaveState
from kvtier.workers.requests.api import MAX_TOLD_PROMPT, WORKER_FAILED, EngineRequest, FinishReason, Output
from kvtier.workers.requests.sequence import Request, Sequence, SequenceState
from kvtier.workers.requests.sessions import Turns
from kvtier.workers.runner.runner import ModelRunner
from kvtier.workers.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Submitted:
    """A request that was submitted, by the monotonic clock and by the wall clock."""

    spec: EngineRequest
    submitted_s: float
    wall_s: float


class Requests:
    """The requests that aren't over, by their ids in `live`. Owned by the step loop; `validate` may be called anywhere."""

    def __init__(
        self,
        *,
        runner: ModelRunner,
        namespaces: Namespaces,
        scheduler: Scheduler,
        pager: Pager,
        link: NodeLink,
        l1_admin: L1Admin,
        sampler: TokenSampler,
        prompt_logprobs: PromptLogprobs,
        metrics: RequestMetrics,
        outputs: StepOutputs,
    ) -> None:
        self._runner, self._namespaces, self._scheduler = runner, namespaces, scheduler
        self._table, self._eos_ids = scheduler.table, scheduler.eos_ids
        self._pager, self._link, self._l1_admin = pager, link, l1_admin
        self._sampler, self._prompt_logprobs = sampler, prompt_logprobs
        self._metrics, self._outputs = metrics, outputs
        self.live: dict[str, Request] = {}
        self.handoffs = Handoffs()
        self._next_number = 0
        self._sessions = Turns()
        self._is_stopping = False

    def end_faulty(self, request: Request, doing: str, error: Exception, now: float) -> None:
        """What one request raised ends that request, with its reason, and nothing else."""
        log.error("request %s ends: %s failed", request.spec.request_id, doing, exc_info=error)
        why = f"{doing} failed: {type(error).__name__}: {error}"
        self.end(request, FinishReason.ERROR, now, why)

    def validate(self, spec: EngineRequest) -> None:
        """Raise ValueError, naming what is wrong, for a request that can't be served. From any thread."""
        spec.sampling.validate()
        spec.validate_resumed()
        if not spec.token_ids:
            raise ValueError("the prompt is empty: it needs at least one token")
        if spec.tenant not in self._namespaces.tenants:
            raise ValueError(f"unknown tenant {spec.tenant!r}")
        vocab_size = self._runner.vocab_size
        stops = spec.sampling.stop_ids
        biased = tuple(token for token, _ in spec.sampling.logit_bias)
        for tokens in filter(None, (spec.token_ids, *spec.resumed, stops, biased)):
            for token in (min(tokens), max(tokens)):
                if not 0 <= token < vocab_size:
                    raise ValueError(f"token {token} is not in the vocabulary of {vocab_size} tokens")
        if spec.sampling.prompt_logprobs and len(spec.token_ids) > MAX_TOLD_PROMPT:
            raise ValueError(
                f"prompt_logprobs are told of prompts of at most {MAX_TOLD_PROMPT} tokens, got {len(spec.token_ids)}"
            )
        if spec.sampling.min_tokens and len({*stops, *self._eos_ids}) >= vocab_size:
            raise ValueError(f"min_tokens needs a token that ends nothing, and all {vocab_size} are stop ids")
        kind = self.kind(spec)
        length, longest = len(spec.token_ids), self._namespaces.longest(kind)
        if length >= longest:
            raise ValueError(f"prompt of {length} tokens leaves no room in the context of {longest}")
        answer = min(spec.sampling.max_tokens, longest - length)
        if any(len(tokens) >= answer for index, tokens in enumerate(spec.resumed) if index not in spec.ended):
            raise ValueError(
                f"resumed leaves no room behind a prompt of {length} tokens in the context of {longest}"
            )
        self._scheduler.check_fits(length, answer, self._namespaces.needs_of(kind))
        if spec.request_id in self.live or spec.request_id in self.handoffs:
            raise ValueError(f"request {spec.request_id!r} is in flight already")

    def accept(self, submitted: Submitted) -> None:
        """Queue a request with the scheduler; one that can't be any more is answered at once."""
        spec = submitted.spec
        if spec.sampling.prompt_logprobs:
            spec = replace(spec, use_cache=False)
        if self._is_stopping:
            self._outputs.pending += refused(spec, FinishReason.CANCELLED, "the worker is stopping")
            return
        if spec.request_id in self.live or spec.request_id in self.handoffs:
            self._outputs.pending += refused(spec, FinishReason.ERROR, "its id is in flight already")
            return
        for tenant, number in self._l1_admin.behind([(tenant_digest(spec.tenant), spec.cleared)]):
            self.clear(tenant, number)
        namespace = self._namespaces.namespace(spec.tenant, self.kind(spec))
        turn = self._sessions.count(spec.session, spec.turn, closed=spec.session_closed)
        self.live[spec.request_id] = self._scheduler.submit(
            spec,
            self._next_number,
            namespace,
            self.longest(spec),
            submitted_s=submitted.submitted_s,
            wall_s=submitted.wall_s,
            turn=turn,
        )
        self._next_number += spec.sampling.n

    def longest(self, spec: EngineRequest) -> int:
        """Most tokens that a sequence of this request may have."""
        return self._namespaces.longest(self.kind(spec))

    def kind(self, spec: EngineRequest) -> Kind:
        """What its pages are found by, beside its tenant."""
        return self._namespaces.kind_of(spec.window, spec.sinks, spec.lossy)

    def longest_context(self) -> int:
        """Tokens that a request without a window of its own may have, prompt and answer."""
        kind = self._namespaces.kind_of(0, 0, False)
        needs = self._namespaces.needs_of(kind)
        fits, too_long = 0, self._namespaces.longest(kind) + 1
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            try:
                self._scheduler.check_fits(middle, 1, needs)
                fits = middle
            except ValueError:
                too_long = middle
        return fits

    def cancel(self, request_id: str, *, is_stopped: bool) -> None:
        """End a request, if it isn't over; `is_stopped`: its client has the whole answer."""
        request = self.live.get(request_id)
        reason = FinishReason.STOP if is_stopped else FinishReason.CANCELLED
        now = time.monotonic()
        if request is not None:
            self.end(request, reason, now)
        self._outputs.pending += self.handoffs.end(request_id, reason, now)

    def cancel_all(self) -> None:
        """End all requests that aren't over."""
        now = time.monotonic()
        for request in list(self.live.values()):
            self.end(request, FinishReason.CANCELLED, now)
        self._outputs.pending += self.handoffs.end_all(FinishReason.CANCELLED, now)

    def hand_off(self, seq: Sequence, now: float) -> None:
        """A sequence has given the one token that it was to give here: its last word comes when its pages are saved."""
        _, keys = self._scheduler.use_of(seq, seq.kind(FinishReason.PREFILLED))
        self.handoffs.begin(seq.request, seq.index, (key for chain in keys for key in chain), now)
        self.retire(seq, FinishReason.PREFILLED, now)

    def end_handoffs(self, now: float) -> None:
        """Send the last word of sequences that were only prefilled here, once their pages are saved."""
        new = self.handoffs.take_new()
        if new:
            self._pager.save_now([record for key in new for record in self._table.records_of(key)], now)
        self._outputs.pending += self.handoffs.over(now, self._is_saved)
        self._outputs.send()

    def _is_saved(self, key: PageKey) -> bool:
        """There is nothing to wait for: the page is below L1, or not to be saved from here any more."""
        if not self._link.is_up:
            return True
        return all(record.save is SaveState.CLEAN for record in self._table.records_of(key))

    def end(self, request: Request, reason: FinishReason, now: float, error: str | None = None) -> None:
        """End every sequence of the request that isn't over, those not made yet too."""
        self._metrics.totals.failed_requests += reason is FinishReason.ERROR
        over = {seq.index for seq in request.sequences if seq.state is SequenceState.FINISHED}
        over.update(request.spec.ended)
        made = {seq.index: seq for seq in request.sequences}
        for index in range(request.spec.sampling.n):
            if index in over:
                continue
            tokens = made[index].completion_tokens if index in made else 0
            self._outputs.pending.append(
                Output(
                    request_id=request.spec.request_id,
                    index=index,
                    token_ids=(),
                    finish_reason=reason,
                    usage=request.usage_of(tokens),
                    timings=request.timings(now),
                    error=error,
                )
            )
        for seq in request.sequences:
            if seq.index not in over:
                self.retire(seq, reason, now)
        if request.spec.request_id in self.live:
            self._close(request)

    def give_up_starved(self, now: float) -> None:
        """End a request that waits in vain for frames that were lent to peers."""
        seq = self._pager.given_up(now)
        if seq is not None:
            why = "peers don't give back the room in L1 that was lent to them, and it needs that"
            self.end(seq.request, FinishReason.CANCELLED, now, why)

    def retire(self, seq: Sequence, reason: FinishReason, now: float) -> None:
        """A sequence is over: its pages go back; cached ones stay cached."""
        kind = seq.kind(reason)
        if reason is not FinishReason.PREFILLED:  # else it isn't over, and will be elsewhere
            self._pager.finished(seq, kind, now)
        self._pager.forget(seq)
        self._sampler.forget(seq)
        self._scheduler.finish(seq, now, reason, kind)
        request = seq.request
        request.unfinished -= 1
        if not request.unfinished:
            self._close(request)

    def _close(self, request: Request) -> None:
        del self.live[request.spec.request_id]
        self._prompt_logprobs.forget(request)
        self._metrics.close(request, time.monotonic())

    def stop(self) -> None:
        """Take no more, end what runs, and save what is unsaved. Called once."""
        self._is_stopping = True
        for request in list(self.live.values()):
            self.end(request, FinishReason.CANCELLED, time.monotonic(), "the worker is stopping")
        self._outputs.pending += self.handoffs.end_all(FinishReason.PREFILLED, time.monotonic())
        self._outputs.send()
        self._pager.save_all(time.monotonic())

    def fail_all(self, error: str) -> None:
        """The loop can't go on: nothing may wait for it."""
        for request in self.live.values():
            self._outputs.pending += refused(
                request.spec, FinishReason.CANCELLED, f"{WORKER_FAILED}: {error}"
            )
        self.live.clear()
        self._outputs.pending += self.handoffs.end_all(FinishReason.PREFILLED, time.monotonic())
        self._outputs.send()

    def clear(self, tenant: str | None, number: int = 0) -> Outcomes:
        """See L1Admin.clear; requests that run go on under a namespace that is found by nothing from before."""
        requests = self.live.values()
        outcomes = self._l1_admin.clear(tenant, [request.namespace for request in requests], number)
        for request in requests:
            request.namespace = self._namespaces.namespace(request.spec.tenant, self.kind(request.spec))
        return outcomes


def refused(spec: EngineRequest, reason: FinishReason, error: str) -> list[Output]:
    """The last word on each sequence of a request that this worker does nothing more for."""
    wanted = (index for index in range(spec.sampling.n) if index not in spec.ended)
    return [Output(spec.request_id, index, (), finish_reason=reason, error=error) for index in wanted]
