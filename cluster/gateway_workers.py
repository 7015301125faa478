"""The workers that the gateway knows, what each has to do, and which one a request goes to. Performs no I/O."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import grpc

from kvtier.cluster.gateway_ports import WorkerPort
from kvtier.cluster.gateway_requests import Refusal
from kvtier.cluster.gateway_status import Condition
from kvtier.cluster.gateway_streams import Stream
from kvtier.cluster.routing import Choice, Costs, Held, Load, Policy, Speed, WorkerView, choose
from kvtier.workers.api import Output, WorkerInfo

Stage = Literal["prefill", "decode"]


class Worker:
    """A worker as the gateway sees it: one life of it. `streams` are by the ids that they have there."""

    def __init__(self, info: WorkerInfo, port: WorkerPort) -> None:
        self.info = info
        self.port = port
        self.streams: dict[str, Stream] = {}  # until it has said its last word on them
        self.load = Load()
        self.down: str | None = None  # why it is gone
        self.condition = Condition(time.time())
        self.chosen = 0  # number of the last choice that fell on it
        self._wanted: dict[str, int] = {}  # sequences of each stream that it has

    @property
    def sequences(self) -> int:
        """In flight there."""
        return self.load.sequences

    def take(self, request_id: str, stream: Stream, sequences: int, tokens: int) -> None:
        """A stream comes, that it has so many sequences of, and so many tokens to compute for before the first one."""
        self.streams[request_id] = stream
        self._wanted[request_id] = sequences
        self.load.sequences += sequences
        self.load.queued_tokens += tokens
        stream.queued_tokens = tokens

    def computed(self, stream: Stream) -> None:
        """A stream's prompt is computed: it has given a token here."""
        self.load.queued_tokens -= stream.queued_tokens
        stream.queued_tokens = 0

    def let_go(self, request_id: str) -> None:
        """It has, or is taken to have, said its last word on a stream: its room is free. Idempotent."""
        stream = self.streams.pop(request_id, None)
        if stream is not None:
            self.load.sequences -= self._wanted.pop(request_id)
            self.computed(stream)


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
        self._max_sequences = max_sequences
        self._policy: Policy = policy
        self._speed = Speed(Costs.of_pages(page_bytes))
        self._choices = 0

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def by_id(self) -> dict[str, Worker]:
        """To be read."""
        return self._workers

    def put(self, worker: Worker) -> None:
        """It is there, in place of one of the same id."""
        self._workers[worker.info.worker_id] = worker

    def remove(self, worker_id: str) -> None:
        """It is not expected to come back."""
        del self._workers[worker_id]

    def get(self, worker_id: str) -> Worker | None:
        """None for one that isn't known, or isn't any more."""
        return self._workers.get(worker_id)

    @property
    def is_any_well(self) -> bool:
        """At least one is not down."""
        return any(worker.down is None for worker in self)

    def named(self, worker_id: str) -> Worker:
        """The worker that a client asks for. Raises Refusal."""
        worker = self._workers.get(worker_id)
        if worker is None:
            raise Refusal(
                grpc.StatusCode.NOT_FOUND,
                f"unknown worker {worker_id!r}: there are {', '.join(self._workers)}",
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

        `wanted` is the id of one that must take it, `avoid` are ids of those that must not.
        """
        stage = _stage(stream, page_tokens)
        candidates = [self.named(wanted)] if wanted else self._able(stage, avoid)
        if not candidates:
            other = "no other worker" if avoid else "no worker"
            raise Refusal(grpc.StatusCode.UNAVAILABLE, f"{other} is healthy")
        sequences = _sequences(stream)
        roomy = self._roomy(candidates, sequences)
        if not roomy and stream.has_given and not wanted:  # what has begun goes on at whoever can
            roomy = self._roomy(self._healthy(avoid), sequences)
        tokens = len(stream.request.token_ids) + stream.given_tokens
        views = [
            WorkerView(one.info.worker_id, one.info.node_id, one.load, one.chosen)
            for one in roomy or candidates
        ]
        choice = choose(tokens, page_tokens, views, held, self._speed.costs, self._policy)
        best = self._workers[choice.worker_id]
        if not roomy:
            raise Refusal(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"worker {best.info.worker_id} has {best.sequences} sequences in flight, at most {self._max_sequences} "
                "are taken: try again later",
            )
        self._choices += 1
        best.chosen = self._choices
        others = self._able("decode", {best.info.worker_id})
        hands_over = stage == "prefill" and best.info.role == "prefill"
        can_hand_over = any(one.info.role != "prefill" for one in others)
        return Picked(best, choice, hands_over and can_hand_over)

    def place(self, picked: Picked, request_id: str, stream: Stream) -> None:
        """The stream goes to the worker that was picked for it, where it has this id."""
        picked.worker.take(request_id, stream, _sequences(stream), picked.choice.computed_tokens)

    def measure(self, output: Output) -> None:
        """What a prompt's computation took, as its first output tells."""
        if output.usage is not None and output.timings is not None:
            self._speed.measure(output.usage.computed_tokens, output.timings.prefill / 1e3)

    def _able(self, stage: Stage, avoid: Collection[str] = ()) -> Sequence[Worker]:
        """The healthy ones whose role it is; where there are none, all that are healthy: any worker can do both."""
        healthy = self._healthy(avoid)
        return [one for one in healthy if one.info.role in (stage, "both")] or healthy

    def _healthy(self, avoid: Collection[str]) -> list[Worker]:
        return [one for one in self if one.down is None and one.info.worker_id not in avoid]

    def _roomy(self, workers: Iterable[Worker], sequences: int) -> list[Worker]:
        return [one for one in workers if one.sequences + sequences <= self._max_sequences]


def _stage(stream: Stream, page_tokens: int) -> Stage:
    """What is to be done next. A prompt without a whole page that may be cached leaves nothing to hand over."""
    request = stream.request
    is_worth_it = (
        request.use_cache and len(request.token_ids) >= page_tokens and request.sampling.max_tokens > 1
    )
    return "prefill" if is_worth_it and not stream.has_given else "decode"


def _sequences(stream: Stream) -> int:
    return sum(sequence.finish is None for sequence in stream.sequences)
