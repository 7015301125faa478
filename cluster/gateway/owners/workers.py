"""The workers that the gateway knows, what each has to do, and which one a request goes to. Performs no I/O."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import grpc
import numpy as np

from kvtier.cluster.directory.locations import Held
from kvtier.cluster.gateway.owners.status import Condition
from kvtier.cluster.gateway.ports import WorkerPort
from kvtier.cluster.gateway.requests.reading import Refusal, quoted
from kvtier.cluster.gateway.streams.streams import Stream
from kvtier.cluster.routing.fleet import Fleet, IntArray, Load
from kvtier.cluster.routing.router import Choice, Costs, Policy, Speed, choose
from kvtier.workers.requests.api import Output, WorkerInfo

Stage = Literal["prefill", "decode"]

STALLED_LOOKS = (
    5  # in a row that found nothing heard of a worker, which says something in every heartbeat.TURN_S
)


class Worker:
    """A worker as the gateway sees it: one life of it. `streams` are by the ids that they have there.

    Workers says whether it is down or is stalled.
    """

    def __init__(self, info: WorkerInfo, port: WorkerPort, load: Load) -> None:
        self.info = info
        self.port = port
        self.load = load
        self.streams: dict[str, Stream] = {}  # until it has said its last word on them
        self.down: str | None = None  # why it is gone
        self.unheard = 0  # looks in a row that found nothing heard of it
        self.condition = Condition(time.time())
        self._wanted: dict[str, int] = {}  # sequences of each stream that takes room there
        self._unanswered: set[str] = set()  # of these, what it has not said yet whether it takes

    @property
    def sequences(self) -> int:
        """In flight there."""
        return self.load.sequences

    @property
    def is_stalled(self) -> bool:
        """Nothing is heard of it, though it lives for all that is known."""
        return self.unheard >= STALLED_LOOKS

    def take(self, request_id: str, stream: Stream, sequences: int, tokens: int) -> None:
        """A stream comes, that it has so many sequences of, and so many tokens to compute for before the first one.

        `answered` must follow.
        """
        self.streams[request_id] = stream
        self._wanted[request_id] = sequences
        self._unanswered.add(request_id)
        self.load.sequences += sequences
        self.load.queued_tokens += tokens
        stream.queued_tokens = tokens

    def answered(self, request_id: str) -> None:
        """It has said whether it takes a stream, or never will."""
        self._unanswered.discard(request_id)
        self._free(request_id)

    def computed(self, stream: Stream) -> None:
        """A stream's prompt is computed: it has given a token here."""
        self.load.queued_tokens -= stream.queued_tokens
        stream.queued_tokens = 0

    def let_go(self, request_id: str) -> None:
        """It has, or is taken to have, said its last word on a stream. Idempotent."""
        stream = self.streams.pop(request_id, None)
        if stream is not None:
            self.computed(stream)
            self._free(request_id)

    def _free(self, request_id: str) -> None:
        """Its room is free, but for one that it hasn't answered: so they are bounded where it answers nothing."""
        if request_id not in self.streams and request_id not in self._unanswered:
            self.load.sequences -= self._wanted.pop(request_id, 0)


@dataclass(frozen=True, slots=True)
class Picked:
    """A worker for a request, and what it is to be told."""

    worker: Worker
    choice: Choice
    is_prefill_only: bool


class Workers:
    """Owned by the gateway's event loop. At most `max_sequences` sequences of each worker are in flight."""

    def __init__(self, max_sequences: int, page_bytes: int, policy: Policy) -> None:
        self._workers: dict[str, Worker] = {}
        self._fleet = Fleet()
        self._max_sequences = max_sequences
        self._policy: Policy = policy
        self._speed = Speed(Costs.of_pages(page_bytes))
        self._choices = 0
        self._able: dict[tuple[Stage | None, bool], IntArray] = {}  # see _rows
        self._max_context: int | None = None  # None: something came or went

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def by_id(self) -> dict[str, Worker]:
        """To be read."""
        return self._workers

    def add(self, info: WorkerInfo, port: WorkerPort) -> None:
        """A worker is there, in place of one of the same id."""
        load = self._fleet.add(info.worker_id, info.node_id)
        self._workers[info.worker_id] = Worker(info, port, load)
        self._able.clear()
        self._max_context = None

    def remove(self, worker_id: str) -> None:
        """It is not expected to come back."""
        del self._workers[worker_id]
        self._fleet.remove(worker_id)
        self._able.clear()
        self._max_context = None

    def get(self, worker_id: str) -> Worker | None:
        """None for one that isn't known, or isn't any more."""
        return self._workers.get(worker_id)

    @property
    def max_context(self) -> int | None:
        """Tokens of a sequence that each of them can hold; None where there is nothing."""
        if self._max_context is None:
            self._max_context = min((worker.info.max_context for worker in self), default=None)
        return self._max_context

    @property
    def is_l1_short(self) -> bool:
        """Whether L1 is what bounds `max_context`."""
        return any(w.info.is_l1_short and w.info.max_context == self.max_context for w in self)

    @property
    def is_any_well(self) -> bool:
        """At least one is not down."""
        return any(worker.down is None for worker in self)

    def able(self, stream: Stream, left: Worker) -> set[str]:
        """Ids of those with room for a stream that has left a worker; those that stall only where all do."""
        there = [one for one in self if one.down is None and one is not left]
        there = [one for one in there if not one.is_stalled] or there
        most = self._max_sequences - _sequences(stream)
        return {one.info.worker_id for one in there if one.sequences <= most}

    def mark_down(self, worker: Worker, reason: str) -> None:
        """It is gone: nothing goes there any more."""
        worker.down = reason
        self._able.clear()

    def look(self) -> list[Worker]:
        """Once in heartbeat.TURN_S: who is stalled since this look.

        Looks are counted, and no time is measured: a gateway that was stalled itself takes nothing else to have done so.
        """
        there = [worker for worker in self if worker.down is None]
        for worker in there:
            worker.unheard += 1
        stalled = [worker for worker in there if worker.unheard == STALLED_LOOKS]
        if stalled:
            self._able.clear()
        return stalled

    def hear(self, worker: Worker) -> bool:
        """It has said something, be it nothing; whether it was stalled before."""
        was_stalled = worker.is_stalled
        worker.unheard = 0
        if was_stalled:
            self._able.clear()
        return was_stalled

    def named(self, worker_id: str) -> Worker:
        """The worker that a client asks for. Raises Refusal."""
        worker = self._workers.get(worker_id)
        if worker is None:
            raise Refusal(
                grpc.StatusCode.NOT_FOUND,
                f"unknown worker {quoted(worker_id)}: there are {', '.join(self._workers)}",
            )
        if worker.down is not None:
            raise Refusal(grpc.StatusCode.UNAVAILABLE, f"worker {worker_id} is down: {worker.down}")
        return worker

    def pick(
        self,
        stream: Stream,
        page_tokens: int,
        held: Iterable[Held],
        *,
        wanted: str = "",
        avoid: Collection[str] = (),
    ) -> Picked:
        """The worker for a stream's next attempt. Raises Refusal where there is none, or none that has room.

        `wanted` is the id of one that must take it, `avoid` are ids of those that must not. What has begun goes on at
        those that can; one that is stalled gets only what nothing else can take.
        """
        stage = _stage(stream, page_tokens)
        if wanted:
            groups = [np.array([self.named(wanted).load.row])]
        else:
            groups = list(self._groups(stage, avoid, any_role=stream.has_given))
        if not groups:
            other = "no other worker" if avoid else "no worker"
            raise Refusal(grpc.StatusCode.UNAVAILABLE, f"{other} is healthy")
        roomy = next(filter(len, self._roomy(groups, _sequences(stream))), None)
        tokens = len(stream.request.token_ids) + stream.given_tokens
        rows = groups[0] if roomy is None else roomy
        costs = self._speed.costs
        choice = choose(tokens, page_tokens, self._fleet, held, costs, self._policy, rows)
        best = self._workers[choice.worker_id]
        if roomy is None:
            raise Refusal(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"worker {best.info.worker_id} has {best.sequences} sequences in flight, at most {self._max_sequences} "
                "are taken: try again later",
            )
        self._choices += 1
        best.load.chosen = self._choices
        hands_over = stage == "prefill" and best.info.role == "prefill"
        return Picked(best, choice, hands_over and self._can_decode(best))

    def place(self, picked: Picked, request_id: str, stream: Stream) -> None:
        """The stream goes to the worker that was picked for it, where it has this id."""
        picked.worker.take(request_id, stream, _sequences(stream), picked.choice.computed_tokens)

    def measure(self, output: Output) -> None:
        """What a prompt's computation took, as its first output tells."""
        if output.usage is not None and output.timings is not None:
            self._speed.measure(output.usage.computed_tokens, output.timings.prefill / 1e3)

    def _groups(self, stage: Stage, avoid: Collection[str], *, any_role: bool) -> Iterator[IntArray]:
        """Rows of those that may take it, the best ones first. Where nothing has the role, any worker can do both."""
        for is_awake in (True, False):
            able = self._rows(stage, is_awake, avoid)
            if len(able):
                yield able
            if any_role or not len(able):
                others = self._rows(None, is_awake, avoid)
                if len(others):
                    yield others

    def _rows(self, stage: Stage | None, is_awake: bool, avoid: Collection[str]) -> IntArray:
        """Of those that are not down; whose role it is; and, with `is_awake`, don't stall."""
        rows = self._able.get((stage, is_awake))
        if rows is None:
            found = (
                worker.load.row
                for worker in self
                if worker.down is None
                and (stage is None or worker.info.role in (stage, "both"))
                and not (is_awake and worker.is_stalled)
            )
            rows = self._able[stage, is_awake] = np.array(sorted(found), np.int64)
        for load in filter(None, map(self._fleet.get, avoid)):
            rows = rows[rows != load.row]
        return rows

    def _roomy(self, groups: Iterable[IntArray], sequences: int) -> Iterator[IntArray]:
        for rows in groups:
            yield rows[self._fleet.counts[1, rows] + sequences <= self._max_sequences]

    def _can_decode(self, prefiller: Worker) -> bool:
        """Another whose role that is doesn't stall."""
        return len(self._rows("decode", True, {prefiller.info.worker_id})) > 0


def _stage(stream: Stream, page_tokens: int) -> Stage:
    """What is to be done next. A prompt without a whole page that may be cached leaves nothing to hand over."""
    request = stream.request
    is_worth_it = (
        request.use_cache and len(request.token_ids) >= page_tokens and request.sampling.max_tokens > 1
    )
    return "prefill" if is_worth_it and not stream.has_given else "decode"


def _sequences(stream: Stream) -> int:
    return sum(sequence.finish is None for sequence in stream.sequences)
