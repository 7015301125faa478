"""What a worker tells its node, and its own cache, when a request is over: over a real socket, with a real tiny model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import until
from worker_kit import PAGE_TOKENS, Client, Slowed, keys, serving, tiny_runner

from kvtier.tier.policy.base import Kind, PolicySettings
from kvtier.tier.protocol.events import FromWorker
from kvtier.tier.protocol.ipc import NodeServer
from kvtier.tier.protocol.messages import Finished, Hello, Locate, Located, Missing, ToNode, Welcome
from kvtier.workers.requests.api import EngineRequest, FinishReason, SamplingParams


@pytest.fixture(scope="module")
def roomy(tiny_llama: Path) -> Slowed:
    return tiny_runner(tiny_llama, 256)


@contextmanager
def listening(folder: Path) -> Iterator[list[ToNode]]:
    """A node that has nothing and keeps what it hears."""
    heard: list[ToNode] = []
    server = NodeServer(folder / "s", None)
    stopping = threading.Event()

    def run() -> None:
        while not stopping.is_set():
            for event in server.poll(None):
                if not isinstance(event, FromWorker):
                    continue
                if isinstance(event.message, Hello):
                    server.send(event.worker, Welcome("n0", "1", 0))
                elif isinstance(event.message, Locate):
                    first = event.message.first_page
                    missing = Missing(first, "never_stored", "")
                    server.send(event.worker, Located(event.message.request_id, first, [], [], missing))
                heard.append(event.message)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield heard
    finally:
        stopping.set()
        server.wake()
        thread.join()
        server.close()  # not by the thread: it may see `stopping` before it is woken


def finished(heard: list[ToNode]) -> list[Finished]:
    return [message for message in heard if isinstance(message, Finished)]


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 512, length).tolist())


def ask(client: Client, name: str, tokens: tuple[int, ...], **fields: Any) -> list[int]:
    """Send a request and wait for its end; fields are the request's or its sampling's."""
    sampling = {k: fields.pop(k) for k in ("max_tokens", "n", "stop_ids", "temperature") if k in fields}
    params = replace(SamplingParams(max_tokens=8), **sampling)
    client.worker.submit(EngineRequest(name, "default", tokens, params, **fields))
    return client.result(name).tokens


def test_a_node_hears_of_each_request_that_used_the_cache_and_of_all_its_full_pages(
    roomy: Slowed, tmp_path: Path
) -> None:
    with listening(tmp_path) as heard, serving(roomy, tmp_path / "s") as client:
        ask(client, "a", prompt(100), max_tokens=30)
        ask(client, "off", prompt(100), use_cache=False)
        ask(client, "b", prompt(100), max_tokens=5)
        until(lambda: len(finished(heard)) == 2, "the node hears of both")
        cached = keys(client.worker)

    first, second = finished(heard)
    assert [first.request_id, second.request_id] == ["a", "b"]
    assert [*map(len, first.keys)] == [129 // PAGE_TOKENS]
    assert set(first.keys[0]) == set(cached)
    assert second.keys[0] == first.keys[0][: 104 // PAGE_TOKENS]
    assert (first.new_pages, second.new_pages) == (8, 0)
    assert (first.output_tokens, second.output_tokens) == (30, 5)
    assert first.kind == second.kind == Kind.OTHER
    assert first.seconds > 0 and first.page_s > 0 and first.double_pages > 0


def test_a_lookup_says_what_computing_costs_at_each_depth_and_how_long_it_is_waited_for(
    roomy: Slowed, tmp_path: Path
) -> None:
    with listening(tmp_path) as heard, serving(roomy, tmp_path / "s", load_deadline_ms=1500.0) as client:
        ask(client, "unmeasured", prompt(100))
        ask(client, "measured", prompt(200, seed=1))

    first, second = (message for message in heard if isinstance(message, Locate))
    assert (first.recompute_s, first.patience_s, first.busy_s) == (0.0, 0.0, 0.0)
    assert second.recompute_s > 0 and second.double_pages >= 1
    assert second.patience_s == pytest.approx(1.5) and second.busy_s == 0.0


def test_a_lookup_says_how_long_the_prompts_before_it_take(
    roomy: Slowed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=1)
    with listening(tmp_path) as heard, serving(roomy, tmp_path / "s", max_batch_tokens=32) as client:
        ask(client, "measured", prompt(400))
        monkeypatch.setattr(roomy, "before", lambda batch: behind())

        def behind() -> None:  # while the first of many chunks is computed
            monkeypatch.undo()
            client.worker.submit(EngineRequest("behind", "default", prompt(1600, 2), params))

        client.worker.submit(EngineRequest("long", "default", prompt(1600, 1), params))
        for name in ("long", "behind"):
            client.result(name)

    (asked,) = (m for m in heard if isinstance(m, Locate) and m.request_id.startswith("behind"))
    assert 0.0 < asked.busy_s <= 2 * 100 * asked.recompute_s


def test_the_kind_says_why_it_stopped_and_the_session_which_turn_it_was(
    roomy: Slowed, tmp_path: Path
) -> None:
    with listening(tmp_path) as heard, serving(roomy, tmp_path / "s") as client:
        stop = ask(client, "free", prompt(40))[2]
        ask(client, "turn", prompt(40), stop_ids=(stop,), session=7, session_open=True)
        ask(client, "tool", prompt(40), stop_ids=(stop,), tool_stop_ids=(stop,), session=7)
        ask(client, "told", prompt(40), session=7, turn=9, session_closed=True)
        ask(client, "again", prompt(40), session=7)
        until(lambda: len(finished(heard)) == 5, "the node hears of all")

    told = {m.request_id: (m.kind, m.session, m.turn, m.open, m.closed) for m in finished(heard)}
    assert told == {
        "free": (Kind.OTHER, 0, 0, False, False),
        "turn": (Kind.TURN, 7, 1, True, False),
        "tool": (Kind.TOOL, 7, 2, False, False),
        "told": (Kind.OTHER, 7, 9, False, True),
        "again": (Kind.OTHER, 7, 1, False, False),
    }


def test_a_call_of_a_tool_that_the_models_end_follows_is_one_and_a_call_in_the_prompt_is_none(
    roomy: Slowed, tmp_path: Path
) -> None:
    with listening(tmp_path) as heard, serving(roomy, tmp_path / "s") as client:
        call, end = ask(client, "free", prompt(40))[1:3]
        ask(client, "called", prompt(40), stop_ids=(end,), tool_stop_ids=(call,))
        ask(client, "asked about", prompt(40), stop_ids=(end,), tool_stop_ids=prompt(40)[-1:])
        until(lambda: len(finished(heard)) == 3, "the node hears of all")

    kinds = {m.request_id: m.kind for m in finished(heard)}
    assert (kinds["called"], kinds["asked about"]) == (Kind.TOOL, Kind.TURN)


@pytest.mark.parametrize(("is_stopped", "kind", "learned"), [(True, Kind.TURN, 1), (False, Kind.OTHER, 0)])
def test_an_answer_that_a_stop_string_ended_counts_as_the_models_own_end(
    tiny_llama: Path, tmp_path: Path, is_stopped: bool, kind: Kind, learned: int
) -> None:
    runner = tiny_runner(tiny_llama, 256)
    with listening(tmp_path) as heard, serving(runner, tmp_path / "s") as client:
        runner.before = lambda batch: client.worker.cancel("a", is_stopped=is_stopped)
        ask(client, "a", prompt(100), max_tokens=1500)
        until(lambda: len(finished(heard)) == 1, "the node hears of it")
        reason = client.result("a").reason
        assert len(client.worker._loop.scheduler.expected) == learned

    assert reason is (FinishReason.STOP if is_stopped else FinishReason.CANCELLED)
    assert finished(heard)[0].kind == kind


def test_siblings_are_one_request_and_one_cancelled_in_the_queue_is_none(
    roomy: Slowed, tmp_path: Path
) -> None:
    with (
        listening(tmp_path) as heard,
        serving(roomy, tmp_path / "s", max_sequences=3) as client,
    ):
        client.worker.submit(
            EngineRequest("n", "default", prompt(40), SamplingParams(max_tokens=60, n=3, temperature=1.0))
        )
        client.worker.submit(EngineRequest("waits", "default", prompt(60, 1), SamplingParams()))
        client.worker.cancel("waits")
        for index in range(3):
            client.result("n", index)
        client.result("waits")
        ask(client, "after", prompt(40))
        until(lambda: "after" in [m.request_id for m in finished(heard)], "the node hears of the last one")

    names = [m.request_id for m in finished(heard)]
    assert names.count("n") == 1 and names[-1] == "after"


@pytest.mark.parametrize("name", ["lru", "rvi"])
def test_a_closed_sessions_own_pages_leave_first_and_shared_ones_stay(tiny_llama: Path, name: str) -> None:
    """L1 holds 12 pages. Two are all tenants'; the session that is over leaves its own, though it was used last."""
    system = prompt(2 * PAGE_TOKENS)
    settings = PolicySettings(name, guard=False, draw=512)
    with serving(tiny_runner(tiny_llama, 12), policy=settings) as client:
        ask(client, "other", system + prompt(33, 1), session=1, max_tokens=1)
        ask(client, "over", system + prompt(33, 2), session=2, session_closed=True, max_tokens=1)
        ask(client, "new", prompt(7 * PAGE_TOKENS + 1, 3), session=3, max_tokens=1)
        cached = len(keys(client.worker))
        again = EngineRequest("again", "default", system + prompt(33, 1), SamplingParams(max_tokens=1))
        client.worker.submit(again)
        found = client.result("again").cached

    assert cached == 11
    assert found == {"L1": 4 * PAGE_TOKENS}


def test_a_request_of_more_pages_than_a_node_takes_in_one_message_is_not_told(
    roomy: Slowed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.workers.node_io.pager.MOST_KEYS", 6)
    with listening(tmp_path) as heard, serving(roomy, tmp_path / "s") as client:
        ask(client, "long", prompt(7 * PAGE_TOKENS), max_tokens=2)
        ask(client, "short", prompt(6 * PAGE_TOKENS), max_tokens=2)
        until(lambda: len(finished(heard)) == 1, "the node hears of one")

    assert [message.request_id for message in finished(heard)] == ["short"]


def test_of_a_stream_the_guard_hears_what_it_holds_and_costs_what_it_attends(
    roomy: Slowed, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(roomy, policy=PolicySettings()) as client:
        observed: list[int] = []
        attended: list[int] = []
        policy, costs = client.worker._loop.table.policy, client.worker._loop._costs
        monkeypatch.setattr(policy, "observe", lambda pages, use, now: observed.append(len(pages)))
        measure = costs.measure
        monkeypatch.setattr(
            costs, "measure", lambda rows, s: (attended.extend(start for start, _ in rows), measure(rows, s))
        )
        ask(client, "stream", prompt(600), window=2 * PAGE_TOKENS)
        ask(client, "plain", prompt(600))

    assert observed == [2, 607 // PAGE_TOKENS]
    assert attended == [0, 32, 32, 0, 256, 512]


def test_explain_tells_what_the_policy_thought_of_a_page_that_left(tiny_llama: Path) -> None:
    with serving(tiny_runner(tiny_llama, 8), policy=PolicySettings(guard=False)) as client:
        ask(client, "a", prompt(100))
        ask(client, "b", prompt(110, 1))
        ask(client, "c", prompt(100))
        told = client.worker.explain("c")

    assert told is not None
    assert told.notes[0].reason == "evicted"
    assert told.notes[0].detail.startswith("from L1 by rvi, score = ")


def test_what_prefill_costs_is_measured(roomy: Slowed) -> None:
    with serving(roomy) as client:
        ask(client, "a", prompt(200))
        costs = client.worker._loop.table.policy.costs

    assert costs.page_s > 0.0
    assert costs.recompute_s(100.0) > costs.page_s
