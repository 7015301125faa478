"""What ends workers is found out at the second one, and what was beside it goes on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from drive_kit import driving
from gateway_kit import EchoWorker, client_id, make_byte_tokenizer
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from waiting import until

from kvtier.cli.client import ClientError
from kvtier.cluster.gateway.owners.suspects import Suspects
from kvtier.workers.models.text import Text
from kvtier.workers.requests.api import WORKER_FAILED, FinishReason, Output

WORKERS = [f"w{i}" for i in range(4)]


class Apart(RuleBasedStateMachine):
    """Requests of which one ends the worker that it is at, in each step there; nothing else ends any."""

    @initialize(requests=st.integers(1, 6), culprit=st.integers(0, 5))
    def begin(self, requests: int, culprit: int) -> None:
        self.suspects = Suspects()
        self.at = {f"r{i}": "w0" for i in range(requests)}
        self.culprit = f"r{culprit}"
        self.alive = [*WORKERS]
        self.refused: set[str] = set()
        self.deaths: dict[str, int] = dict.fromkeys(self.at, 0)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.alive))
        here = [request for request, at in self.at.items() if at == worker]
        if self.culprit in here:
            self.alive.remove(worker)
            for request in here:
                self.deaths[request] += 1
                self.at.pop(request)
            self.refused |= self.suspects.died(worker, data.draw(st.permutations(here)))
            return
        for request in here:
            self.suspects.gave(request)

    @precondition(lambda self: bool(self.suspects.waiting))
    @rule()
    def place(self) -> None:
        free = [one for one in self.alive if one not in self.suspects.trials.values()]
        if free:
            request = self.suspects.waiting[0]
            self.suspects.begin(request, free[0])
            self.at[request] = free[0]

    @precondition(lambda self: bool(self.suspects.trials))
    @rule(data=st.data())
    def refuse_to_take_it(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.suspects.trials)))
        del self.at[request]
        self.suspects.left(request)

    @precondition(lambda self: bool(self.at))
    @rule(data=st.data())
    def come_in(self, data: st.DataObject) -> None:
        request = f"r{len(self.deaths)}"
        self.deaths[request] = 0
        self.at[request] = data.draw(st.sampled_from(self.alive))

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.deaths)))
        was_suspect = self.suspects.is_suspect(request)
        self.at.pop(request, None)

        assert self.suspects.over(request) == was_suspect
        assert not self.suspects.is_suspect(request)

    @invariant()
    def only_what_ended_two_workers_is_refused(self) -> None:
        assert self.refused <= {self.culprit}
        if self.culprit in self.refused:
            assert self.deaths[self.culprit] == 2
        assert self.deaths.get(self.culprit, 0) <= 2

    @invariant()
    def no_two_suspects_are_at_one_worker(self) -> None:
        trials = [*self.suspects.trials.values()]
        assert len(set(trials)) == len(trials)
        assert not {*self.suspects.waiting} & {*self.suspects.trials, *self.at}


Apart.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestApart = Apart.TestCase


# ---- over gRPC, with workers that echo -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Text]:
    loaded = Text.load(make_byte_tokenizer(tmp_path_factory.mktemp("bytes")))
    assert loaded is not None
    yield loaded


def has(worker: EchoWorker, request_id: str, made: int) -> bool:
    """The worker is to make this token of this request next."""
    return any(
        client_id(name) == request_id and sequence.made == made
        for name, sequences in worker.running.items()
        for sequence in sequences
    )


@pytest.mark.parametrize("at_token", [0, 3])
@pytest.mark.parametrize("is_told", [False, True], ids=["its process ends", "its last words"])
def test_what_two_workers_died_of_is_refused_and_named_and_what_was_beside_it_goes_on(
    text: Text, caplog: pytest.LogCaptureFixture, at_token: int, is_told: bool
) -> None:
    with driving(text, workers=4) as drive:
        beside = [drive.ask("abcd", max_tokens=30, request_id=f"good-{i}", worker="w0") for i in range(3)]
        drive.step(drive.workers[0], 2)
        bad = drive.ask("xyz", max_tokens=30, request_id="bad", worker="w0")
        beside.append(drive.ask("efgh", max_tokens=30, request_id="late", worker="w0"))
        lost: list[str] = []

        def turn() -> bool:
            for worker in drive.workers:
                if not has(worker, "bad", at_token):
                    drive.step(worker)
                    continue
                lost.append(worker.info.worker_id)
                names = [*worker.running]
                if is_told:
                    worker.running.clear()
                    why = f"{WORKER_FAILED}: IndexError"
                    last = [Output(n, 0, (), finish_reason=FinishReason.CANCELLED, error=why) for n in names]
                    drive.served.call(drive.served.core.on_outputs, worker.info.worker_id, last)
                drive.lose(worker, "its process ended")
            return bad.done() and all(call.done() for call in beside)

        until(turn, "all requests end")

        assert [call.result()["text"] for call in beside] == ["abcd" * 7 + "ab"] * 3 + ["efgh" * 7 + "ef"]
        with pytest.raises(ClientError, match="not moved on") as refused:
            bad.result()
    assert len(lost) == 2
    assert refused.value.status == "INTERNAL"
    assert all(f"worker {worker} went down" in str(refused.value) for worker in lost)
    [line] = [r.getMessage() for r in caplog.records if "is refused" in r.getMessage()]
    assert "request bad of tenant default" in line


def test_a_worker_that_is_taken_out_makes_nothing_a_suspect(text: Text) -> None:
    with driving(text, workers=3) as drive:
        calls = [drive.ask("abcd", max_tokens=8, worker="w0") for _ in range(3)]
        drive.served.call(drive.served.core.detach, "w0")
        drive.workers[0].running.clear()

        until(lambda: sum(len(one.running) for one in drive.workers) == 3, "all go on at once")
        drive.served.call(drive.served.core.detach, "w1")
        drive.workers[1].running.clear()
        assert [drive.finish(call)["text"] for call in calls] == ["abcdabcd"] * 3


def test_suspects_wait_for_a_worker_that_is_there_and_fail_where_there_is_none(text: Text) -> None:
    with driving(text, workers=2) as drive:
        calls = [drive.ask("abcd", max_tokens=8, worker="w0", request_id=f"r{i}") for i in range(3)]
        drive.lose(drive.workers[0])
        until(lambda: drive.workers[1].running, "one is tried")
        [tried] = [client_id(name) for name in drive.workers[1].running]

        drive.lose(drive.workers[1], "it was unplugged")

        for number, call in enumerate(calls):
            with pytest.raises(ClientError) as failed:
                call.result(30)
            is_tried = tried == f"r{number}"
            assert failed.value.status == ("INTERNAL" if is_tried else "UNAVAILABLE")


def test_workers_that_die_at_once_make_no_culprit_of_what_the_second_never_had(text: Text) -> None:
    """Every worker is killed at the same moment: requests are told that nothing serves them, and may be sent again."""
    with driving(text, workers=2) as drive:
        calls = [drive.ask("abcd", max_tokens=8, worker="w0") for _ in range(3)]
        drive.step(drive.workers[0], 3)
        drive.workers[1].is_dead = True
        drive.lose(drive.workers[0])

        for call in calls:
            with pytest.raises(ClientError) as failed:
                call.result(30)
            assert failed.value.status == "UNAVAILABLE"


def test_a_suspect_that_a_dead_worker_never_had_goes_on_at_the_next(text: Text) -> None:
    with driving(text, workers=3) as drive:
        call = drive.ask("abcd", max_tokens=8, worker="w0")
        drive.step(drive.workers[0], 3)
        for worker in drive.workers[1:]:
            worker.is_dead = True
        drive.workers[2].is_dead = False
        drive.lose(drive.workers[0])
        assert drive.finish(call)["text"] == "abcdabcd"


def test_a_suspect_whose_client_leaves_makes_way_for_the_next(text: Text) -> None:
    with driving(text, workers=2) as drive:
        calls = [drive.ask("abcd", max_tokens=8, worker="w0", timeout_s=t) for t in (30, 30)]
        gone = drive.ask("abcd", max_tokens=8, worker="w0", timeout_s=1.0, request_id="gone")
        drive.lose(drive.workers[0])
        with pytest.raises(ClientError):
            gone.result(30)

        assert [drive.finish(call)["text"] for call in calls] == ["abcdabcd"] * 2
