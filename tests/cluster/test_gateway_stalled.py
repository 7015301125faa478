"""A worker that is stalled: it is passed over while others can take what comes, and nothing waits for it past a deadline."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, Literal

import grpc
import pytest
from drive_kit import Drive, driving
from gateway_kit import echo_info
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import eventually, until

from kvtier.cli.client import ClientError, completion
from kvtier.cluster.gateway.owners.workers import STALLED_LOOKS, Workers
from kvtier.cluster.gateway.requests.reading import Refusal
from kvtier.cluster.gateway.streams.streams import Stream
from kvtier.workers.requests.api import EngineRequest, Output, SamplingParams

ROOM = 4
TOKENS = (1, 2, 3, 4, 5, 6, 7, 8)


def look(drive: Drive, times: int = STALLED_LOOKS, but: str = "") -> None:
    """So many looks, in which all workers but one are heard of."""
    core = drive.served.core
    for _ in range(times):
        drive.served.call(core.look)
        for worker_id in core.workers:
            if worker_id != but:
                drive.served.call(core.on_outputs, worker_id, [])


def health(drive: Drive) -> dict[str, str]:
    return {worker["id"]: worker["health"] for worker in drive.client.status()["workers"]}


# ---- who is passed over ------------------------------------------------------------------------------------------


def test_a_worker_that_is_not_heard_of_gets_nothing_more_until_it_is() -> None:
    with driving(None, workers=2) as drive:
        before = time.time()
        look(drive, STALLED_LOOKS - 1, but="w0")
        assert health(drive) == {"w0": "healthy", "w1": "healthy"}
        look(drive, 1, but="w0")
        stalled, well = drive.client.status()["workers"]
        assert (stalled["health"], well["health"]) == ("stalled", "healthy")
        assert stalled["detail"] == "nothing is heard of it for 5 s" and stalled["since"] >= before
        calls = [drive.ask(TOKENS, max_tokens=2) for _ in range(6)]
        assert [len(worker.submitted) for worker in drive.workers] == [0, 6]

        drive.served.call(drive.served.core.on_outputs, "w0", [])
        assert health(drive) == {"w0": "healthy", "w1": "healthy"}
        calls += [drive.ask(TOKENS, max_tokens=2) for _ in range(2)]
        assert len(drive.workers[0].submitted) == 2
        for call in calls:
            drive.finish(call)


def test_it_gets_what_nothing_else_can_take() -> None:
    with driving(None, workers=2, max_sequences=1) as drive:
        look(drive, but="w0")
        first, second = (drive.ask(TOKENS, max_tokens=2) for _ in range(2))
        assert [len(worker.submitted) for worker in drive.workers] == [1, 1]
        with pytest.raises(ClientError, match="1 sequences in flight, at most 1"):
            completion(drive.client.generate(TOKENS))
        drive.finish(first)
        drive.finish(second)


def test_a_gateway_that_was_stalled_itself_blames_nothing() -> None:
    """However long ago the last look was, it is one."""
    workers = Workers(ROOM, 1024, "prefix")
    workers.add(echo_info("w0"), SimpleNamespace())  # type: ignore[arg-type]
    worker = workers.by_id["w0"]
    for _ in range(20):
        assert [workers.look() for _ in range(STALLED_LOOKS - 1)] == [[]] * (STALLED_LOOKS - 1)
        assert not workers.hear(worker)
    for _ in range(STALLED_LOOKS - 1):
        workers.look()
    assert workers.look() == [worker] and workers.look() == []
    assert workers.hear(worker) and not workers.hear(worker)


def test_what_it_had_goes_on_elsewhere_once_its_process_is_killed() -> None:
    with driving(None, workers=2) as drive:
        call = drive.ask(TOKENS, max_tokens=8, worker="w0")
        drive.step(drive.workers[0], 3)
        look(drive, but="w0")
        assert not drive.workers[1].submitted, "it may go on, or be killed: that is for others to decide"

        drive.lose(drive.workers[0])

        assert drive.finish(call)["token_ids"] == list(TOKENS)


# ---- as the rule says --------------------------------------------------------------------------------------------


Role = Literal["both", "prefill", "decode"]
State = Literal["well", "stalled", "down"]
worker_states = st.tuples(
    st.sampled_from(["both", "prefill", "decode"]),
    st.sampled_from(["well", "well", "stalled", "down"]),
    st.integers(0, ROOM),
)


def able(
    worker_states: dict[str, tuple[Role, State, int]], stage: str, has_given: bool, needed: int
) -> set[str]:
    """Who may be chosen: the plain rule. Empty: nothing has room."""

    def having(states: set[str], any_role: bool) -> dict[str, int]:
        return {
            name: used
            for name, (role, state, used) in worker_states.items()
            if state in states and (any_role or role in (stage, "both"))
        }

    for states in ({"well"}, {"well", "stalled"}):
        own = having(states, False)
        groups = [own or having(states, True)]
        if has_given:
            groups.append(having(states, True))
        for group in groups:
            roomy = {name for name, used in group.items() if used + needed <= ROOM}
            if roomy:
                return roomy
    return set()


@settings(deadline=None, max_examples=300)
@given(
    states=st.lists(worker_states, min_size=1, max_size=6),
    n=st.integers(1, 3),
    has_given=st.booleans(),
    avoided=st.sets(st.integers(0, 5), max_size=2),
)
def test_who_is_chosen_is_who_the_rule_says(
    states: list[tuple[Role, State, int]], n: int, has_given: bool, avoided: set[int]
) -> None:
    workers = Workers(ROOM, 1024, "prefix")
    named = {f"w{number}": state for number, state in enumerate(states)}
    for name, (role, state, used) in named.items():
        workers.add(echo_info(name, role=role), SimpleNamespace())  # type: ignore[arg-type]
        worker = workers.by_id[name]
        worker.load.sequences = used
        if state == "down":
            workers.mark_down(worker, "its process ended")
    for _ in range(STALLED_LOOKS):
        workers.look()
        for name, (_, state, _) in named.items():
            if state == "well":
                workers.hear(workers.by_id[name])
    avoid = {f"w{number}" for number in avoided}
    there = {name: state for name, state in named.items() if name not in avoid and state[1] != "down"}
    stream = _stream(n, has_given)
    stage = "decode" if has_given else "prefill"

    expected = able(there, stage, has_given, n)
    if expected:
        picked = workers.pick(stream, 4, [], avoid=avoid)
        assert picked.worker.info.worker_id in expected
        assert picked.worker.load.chosen == 1
        decoders = {
            name
            for name, (role, state, _) in named.items()
            if role != "prefill" and state == "well" and name != picked.worker.info.worker_id
        }
        is_handed_over = picked.worker.info.role == "prefill" and not has_given and bool(decoders)
        assert picked.is_prefill_only == is_handed_over
        return
    with pytest.raises(Refusal) as refused:
        workers.pick(stream, 4, [], avoid=avoid)
    status = grpc.StatusCode.RESOURCE_EXHAUSTED if there else grpc.StatusCode.UNAVAILABLE
    assert refused.value.code is status


def _stream(n: int, has_given: bool) -> Stream:
    request = EngineRequest("r", "default", TOKENS, SamplingParams(max_tokens=9, n=n))
    stream = Stream(request, None, (), (256,))
    stream.begin("w9", "r#1")
    if has_given:
        for index in range(n):
            stream.take(Output("r#1", index, (5,)))
    return stream


# ---- calls that are not answered ---------------------------------------------------------------------------------


class Stopped:
    """Makes a worker's answers to submissions wait."""

    def __init__(self, worker: Any) -> None:
        self._goes_on = asyncio.Event()
        self._submit = worker.submit
        self.asked = 0
        worker.submit = self._wait

    async def _wait(self, request: EngineRequest) -> None:
        self.asked += 1
        await self._goes_on.wait()
        await self._submit(request)

    def go_on(self, drive: Drive) -> None:
        drive.served.call(self._goes_on.set)


def test_a_request_at_a_worker_that_does_not_answer_ends_by_its_deadline_and_holds_nothing_up() -> None:
    with driving(None, workers=2) as drive:
        stopped = Stopped(drive.workers[0])
        late = [drive._pool.submit(_status_of, drive, TOKENS, worker="w0", timeout_s=3.0) for _ in range(3)]
        until(lambda: stopped.asked == 3, "it is asked")
        assert drive.finish(drive.ask(TOKENS, max_tokens=8, worker="w1"))["token_ids"] == list(TOKENS)

        assert [call.result(120) for call in late] == ["DEADLINE_EXCEEDED"] * 3
        stopped.go_on(drive)
        # What it takes so late nothing wants any more, and it is told so.
        assert eventually(lambda: len(drive.workers[0].cancelled) == 3)


def test_as_many_as_it_has_room_for_wait_for_its_answer_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kvtier.cluster.gateway import in_flight as gateway_flights

    monkeypatch.setattr(gateway_flights, "LAST_WORD_S", 0.05)
    with driving(None, workers=1, max_sequences=ROOM) as drive:
        stopped = Stopped(drive.workers[0])
        late = [drive._pool.submit(_status_of, drive, TOKENS, timeout_s=3.0) for _ in range(ROOM)]
        assert [call.result(120) for call in late] == ["DEADLINE_EXCEEDED"] * ROOM
        until(lambda: drive.served.core.in_flight == 0, "their calls are over")
        assert _status_of(drive, TOKENS, timeout_s=1.0) == "RESOURCE_EXHAUSTED"
        assert stopped.asked == ROOM

        stopped.go_on(drive)
        until(lambda: drive.served.core.workers["w0"].sequences == 0, "its room is free")
        assert drive.finish(drive.ask(TOKENS, max_tokens=2))["token_ids"] == [1, 2]


def test_a_request_that_it_left_unanswered_goes_on_elsewhere_when_it_is_lost() -> None:
    with driving(None, workers=2) as drive:
        stopped = Stopped(drive.workers[0])
        call = drive._pool.submit(
            lambda: completion(drive.client.generate(TOKENS, max_tokens=8, worker="w0"))
        )
        until(lambda: stopped.asked == 1, "it is asked")

        drive.lose(drive.workers[0])

        until(lambda: bool(drive.workers[1].running), "the other one has it")
        assert drive.finish(call)["token_ids"] == list(TOKENS)
        stopped.go_on(drive)
        until(lambda: not drive.served.core._submitting, "the late answer is heard")
        drive.workers[0].running.clear()


def _status_of(drive: Drive, prompt: Any, **options: Any) -> str:
    try:
        completion(drive.client.generate(prompt, **options))
    except ClientError as error:
        return error.status
    return "OK"
