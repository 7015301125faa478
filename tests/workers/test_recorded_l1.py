"""What a worker's L1 heard runs again in another one that has no tokens, answer by answer; nothing of the text is kept."""

from __future__ import annotations

import gzip
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from l1_worlds import a_world, run_again
from waiting import until
from worker_kit import PAGE_TOKENS, caching, page_sizes, serving, settle, sink_to_l3, sink_to_l4, tiny_runner

from kvtier.lab.recordings import Summary, opened, summed_up, verified
from kvtier.tier.l1.prefix import PrefixIndex
from kvtier.tier.pages.identity import tenant_salt
from kvtier.tier.record import checkpoint
from kvtier.tier.record.format import Alias, RecordingError, RecordingReader
from kvtier.tier.record.rerun import Verdict, rerun
from kvtier.workers.requests.api import EngineRequest, SamplingParams
from kvtier.workers.runner.runner import StepBatch
from kvtier.workers.scheduling.l1 import L1
from kvtier.workers.scheduling.l1_events import LoadOver
from kvtier.workers.scheduling.recorded import MODULES, WORKER, hiding_machine


def prompt(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 512, length).tolist()
    return tokens


def has_tokens(data: bytes, tokens: list[int]) -> bool:
    """Whether one of some runs of four tokens stands there as integers, of whatever width and order of bytes, or packed."""
    runs = [tokens[i : i + 4] for i in range(0, len(tokens) - 3, 16)]
    kinds = [np.dtype(order + width) for order in "<>" for width in ("i2", "i4", "i8")]
    packed = [b"".join(map(msgspec.msgpack.encode, run)) for run in runs]
    return any(run in data for run in packed) or any(
        np.array(run, kind).tobytes() in data for run in runs for kind in kinds
    )


def checked(file: Path) -> tuple[Summary, Verdict]:
    """What is in a recording that must come out the same."""
    summary, verdict = summed_up(file)
    assert verdict.difference is None and not verdict.is_torn and verdict.is_same_code
    return summary, verdict


def test_a_worker_under_load_with_a_node_runs_again(tiny_llama: Path, tmp_path: Path) -> None:
    """It begins with requests under way; then pages are evicted, come up from L3 and L4, and sequences are preempted."""
    file = tmp_path / "w0.kvrec"
    system = prompt(6 * PAGE_TOKENS, seed=99)
    asked = [system + prompt(3 * PAGE_TOKENS + 5, seed=i) for i in range(8)]
    with (
        caching(tmp_path) as service,
        serving(tiny_runner(tiny_llama, 40), tmp_path / "s", max_batch_tokens=64) as client,
    ):
        worker = client.worker
        client.generate(prompt(200, seed=55))
        early = [client.send(p, max_tokens=60) for p in asked[:6]]
        client.first(early[0])
        worker.record(file)
        answers = [client.result(name).tokens for name in early]
        for p in asked:
            answers += [client.result(client.send(p, max_tokens=30, n=2), i).tokens for i in range(2)]
        sink_to_l3(worker, service)
        client.together(asked[:2])
        sink_to_l4(worker, service)
        client.together([*asked[2:4], asked[2]], max_tokens=40)
        client.generate(asked[0], use_cache=False)
        worker.pin([bytes.fromhex(worker.pages(limit=1)[0].key)])
        cancelled = client.send(prompt(300, seed=7), max_tokens=300)
        client.first(cancelled)
        worker.clear("default")
        worker.cancel(cancelled)
        client.result(cancelled)
        settle(worker, service)
        status = worker.stop_recording()

    assert status is not None and status.ended == "it was stopped"
    summary, verdict = checked(file)
    assert summary.machine == "worker" and summary.owner == "w0" and verdict.events == status.events > 500
    assert all(summary.events[kind] for kind in ("Schedule", "Sampled", "Found", "Arrive", "Saved", "Finish"))
    assert summary.commands["Demotes"] and summary.commands["Drops"] > 20 and summary.commands["Loads"] > 2
    with opened(file) as reader:
        data = file.read_bytes() + reader.state()
    assert not any(has_tokens(data, tokens) for tokens in [*asked[:3], *answers[:3]])
    assert b"default" not in data


@given(seed=st.integers(0, 2**32), begin=st.sampled_from([0, 1, 8, 20]))
@settings(max_examples=80, deadline=None, phases=[Phase.generate])
def test_a_life_recorded_from_any_moment_on_runs_again_answer_by_answer(seed: int, begin: int) -> None:
    recorded = a_world(seed, begin)
    assume(recorded is not None)
    assert recorded is not None
    again: list[object] = []

    verdict = run_again(recorded.ended(), lambda event, now, answer: again.append(answer))

    assert verdict.difference is None and not verdict.is_torn and verdict.is_same_code
    assert again == recorded.answers and verdict.events == len(again)


def test_other_decisions_are_found_at_the_event_where_they_begin() -> None:
    """A scheduler that has been changed since: it makes steps up of fewer tokens."""
    recorded = next(made for seed in range(50) if (made := a_world(seed, 0)) is not None)

    def revive(l1: L1) -> None:
        WORKER.revive(l1)
        l1.scheduler.max_batch_tokens = 1

    verdict = rerun(RecordingReader([recorded.ended()]), replace(WORKER, revive=revive))

    assert verdict.difference is not None and "(Schedule)" in verdict.difference
    assert verdict.events < len(recorded.answers)


def test_an_event_that_l1_fails_at_is_the_last_and_must_fail_again() -> None:
    recorded = next(made for seed in range(50) if (made := a_world(seed, 8)) is not None)
    with pytest.raises(KeyError):
        recorded.l1.hear(LoadOver(10**6), 1e6)
    recorded.writer.end("the worker failed")

    verdict = run_again(recorded.out.getvalue())

    assert verdict.difference is None and verdict.end == "the worker failed"


def test_the_state_in_a_recording_has_no_token_salt_or_name(tiny_llama: Path, tmp_path: Path) -> None:
    """What is searched for is found in the same state, in the middle of a step, where nothing is hidden."""
    file = tmp_path / "w0.kvrec.gz"
    asked, name, salt = prompt(100, seed=3), "what-a-client-calls-it", tenant_salt("default")
    runner = tiny_runner(tiny_llama, 64)
    hiding, states = hiding_machine(b"salt"), []

    def before(batch: StepBatch) -> None:
        if name in client.worker._requests and not states:
            l1, alias = client.worker._l1, Alias(b"salt")
            states.append(checkpoint.dump(l1, MODULES, _only_what_no_file_can_hold))
            states.append(checkpoint.dump(l1, MODULES, lambda one, its: hiding.hide_state(one, its, alias)))

    with serving(runner) as client:
        client.generate(asked, max_tokens=40)
        client.worker.record(file)
        runner.before = before
        params = SamplingParams(max_tokens=20)
        client.worker.submit(EngineRequest(name, "default", tuple(asked), params, arrived_s=time.time()))
        client.result(name)
        status = client.worker.stop_recording()
    with opened(file) as reader:
        recorded = reader.state() + gzip.decompress(file.read_bytes())

    open_state, hidden = states
    assert status is not None and verified(file).difference is None
    assert has_tokens(open_state, asked) and name.encode() in open_state and salt in open_state
    for data in (hidden, recorded):
        assert not has_tokens(data, asked) and name.encode() not in data and salt not in data
        assert b"default" not in data


def _only_what_no_file_can_hold(one: object, state: checkpoint.State) -> checkpoint.State:
    if isinstance(one, PrefixIndex):
        return {**state, "_leaves_of": None, "_on_leave": None}
    return {**state, "_tap": None} if isinstance(one, L1) else state


def test_a_recording_that_can_not_begin_leaves_no_file_and_one_that_is_full_ends(
    tiny_llama: Path, tmp_path: Path
) -> None:
    full = tmp_path / "full.kvrec"
    with serving(tiny_runner(tiny_llama, 64)) as client:
        worker = client.worker
        assert worker.stop_recording() is None
        client.generate(prompt(100))
        worker.record(tmp_path / "one.kvrec")
        with pytest.raises(RecordingError, match=r"worker w0 records into .*one\.kvrec already"):
            worker.record(tmp_path / "two.kvrec")
        first = worker.stop_recording()
        worker.record(full, max_bytes=2**20)
        while not (client.worker._recorder or pytest.fail("no recorder")).is_over:
            client.generate(prompt(900), max_tokens=2)
        after = client.generate(prompt(100))
        status = worker.stop_recording()

    assert not (tmp_path / "two.kvrec").exists()
    assert first is not None and verified(tmp_path / "one.kvrec").events == first.events
    assert status is not None and "1048576 bytes" in status.ended and len(after.tokens) == 8
    assert full.stat().st_size <= 2**20 and verified(full).difference is None


def test_a_worker_that_writes_when_pages_leave_and_makes_variants_runs_again(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """Pages of two formats and windows: they lie in the pool, and those for L4 are converted in frames of nobody's."""
    file = tmp_path / "w0.kvrec"
    runner = tiny_runner(tiny_llama, 48, l4_format="int4c")
    sizes, asked = page_sizes(runner), [prompt(120, seed=i) for i in range(6)]
    with (
        caching(tmp_path, page_bytes=sizes, l4_variants=frozenset({"int4c"})) as service,
        serving(runner, tmp_path / "s", write="demote", max_batch_tokens=64) as client,
    ):
        worker = client.worker
        client.generate(asked[0])
        worker.record(file)
        client.together(asked, max_tokens=40)
        client.together(asked[:3], max_tokens=40, lossy=True)
        client.together(asked[3:], max_tokens=40, window=32, sinks=4)
        sink_to_l4(worker, service)
        client.generate(asked[0], lossy=True)
        settle(worker, service)
        worker.stop(drain_s=30.0)
        until(service.idle, "the node's cache is idle")

    summary, verdict = checked(file)
    assert verdict.end == "the worker stopped" and summary.events["SetAside"] and summary.events["Borrow"]
    assert summary.commands["Drops"] and summary.commands["Loads"] and summary.events["Arrive"]


def test_a_node_that_goes_and_comes_back_is_in_the_recording(tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "w0.kvrec"
    with serving(tiny_runner(tiny_llama, 64), tmp_path / "s", connected=False) as client:
        worker = client.worker
        worker.record(file)
        for number in range(2):
            with caching(tmp_path, l4_folder=tmp_path / f"l4-{number}") as service:
                until(lambda: worker.is_connected, "the worker connects")
                client.together([prompt(150, seed=i) for i in range(4)], max_tokens=20)
                settle(worker, service)
            until(lambda: not worker.is_connected, "the node is gone")
            client.generate(prompt(150, seed=9))
        worker.stop_recording()

    summary, _ = checked(file)
    assert summary.events["NodeCame"] == summary.events["NodeWent"] == 2
