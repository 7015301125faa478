"""A group whose ranks are processes, of which one dies, hangs or never comes: the worker says so and ends, in bounded time."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import tiny_models
from group_kit import Processes, ThreadRank, group_of
from runner_kit import random_tokens
from tiny_models import VOCAB
from waiting import until
from worker_kit import caching, page_sizes, serving, settle, sink_to_l3, tiny_runner

from kvtier.tier.pages.page import PageKey, RootKey, TierName, slot_bytes
from kvtier.tier.protocol.messages import Grant
from kvtier.tier.stores.base import Place
from kvtier.tier.stores.host import HostTier
from kvtier.workers.engine.heartbeat import Heartbeat
from kvtier.workers.paging.copier import SaveJob, SavePage
from kvtier.workers.parallel.pages import RankPages
from kvtier.workers.parallel.plan import Begin, CopyIn, GroupBroken, Joined
from kvtier.workers.parallel.rank import Mailbox
from kvtier.workers.requests.api import FinishReason, WorkerStopped
from kvtier.workers.runner.runner import StepBatch

pytestmark = pytest.mark.slow

WATCHED_S = 6.0  # a group's patience where a test waits for it


def prompt(length: int, seed: int = 3) -> list[int]:
    tokens: list[int] = random_tokens(seed, length, VOCAB).tolist()
    return tokens


def test_a_leader_that_waits_for_a_rank_counts_as_turning(tiny_llama: Path) -> None:
    """A rank may make kernels meanwhile, for longer than a part may stall; the group's patience bounds it."""
    processes = Processes()
    with group_of(tiny_llama, pages=128, launch=processes) as group, serving(group) as client:
        # By a clock that goes on by 1 whenever it is read: a loop that is stalled is found further behind at each look.
        heartbeat = Heartbeat(client.worker._loop.thread, itertools.count(100).__next__)
        name = client.send(prompt(50), max_tokens=1500)
        client.first(name)

        os.kill(processes.children[0].pid, signal.SIGSTOP)

        until(
            lambda: all(heartbeat.read() == 1 for _ in range(100)),
            "the leader waits, and is seen to at a hundred looks in a row",
        )
        os.kill(processes.children[0].pid, signal.SIGCONT)
        assert client.result(name).reason is FinishReason.LENGTH


def test_ranks_in_processes_say_the_same_and_end_with_their_leader(tiny_llama: Path, tmp_path: Path) -> None:
    p = prompt(100)
    with serving(tiny_runner(tiny_llama, 128)) as client:
        wanted = client.generate(p, max_tokens=20).tokens
    processes = Processes()
    with (
        group_of(tiny_llama, pages=128, launch=processes) as group,
        caching(tmp_path) as service,
        serving(group, tmp_path / "s") as client,
    ):
        cold = client.generate(p, max_tokens=20)
        sink_to_l3(client.worker, service)
        again = client.generate(p, max_tokens=20)
        settle(client.worker, service)

    assert cold.tokens == again.tokens == wanted
    assert again.cached == {"L3": 96}
    assert [child.wait(120) for child in processes.children] == [0]


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_killed_rank_ends_the_worker(tiny_llama: Path, is_busy: bool) -> None:
    processes = Processes()
    with group_of(tiny_llama, pages=128, launch=processes) as group, serving(group) as client:
        name = ""
        if is_busy:
            name = client.send(prompt(50), max_tokens=1500)
            client.first(name)

        processes.children[0].kill()

        until(lambda: not client.worker.is_healthy(), "the worker is out of order")
        assert client.worker.error is not None and "rank" in client.worker.error
        with pytest.raises(WorkerStopped):
            client.send(prompt(10))
        if is_busy:
            assert client.result(name).reason is FinishReason.CANCELLED


def test_a_rank_that_hangs_in_a_step_ends_the_worker_and_is_killed(
    tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    processes = Processes()
    with (
        group_of(tiny_llama, pages=128, launch=processes, patience_s=WATCHED_S) as group,
        serving(group) as client,
    ):
        name = client.send(prompt(50), max_tokens=1500)
        client.first(name)

        os.kill(processes.children[0].pid, signal.SIGSTOP)

        assert client.result(name).reason is FinishReason.CANCELLED
        assert not client.worker.is_healthy()
        assert group.error is not None and "rank 1 has not answered step" in group.error
    assert processes.children[0].wait(120) == -signal.SIGKILL
    (dump,) = [r.getMessage() for r in caplog.records if "the group hangs" in r.getMessage()]
    assert "step-loop-w0 at" in dump and "\n" not in dump


def test_a_rank_killed_in_the_middle_of_saves_and_loads_hangs_nothing(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """The node takes all that the worker had back, once the last rank is gone."""
    processes = Processes()
    prompts = [prompt(120, seed) for seed in range(6)]
    with (
        caching(tmp_path),
        group_of(tiny_llama, pages=24, launch=processes) as group,
        serving(group, tmp_path / "s") as client,
    ):
        names = [client.send(p, max_tokens=200) for p in prompts]
        client.first(names[0])
        processes.children[0].kill()
        reasons = {client.result(name).reason for name in names}

        assert reasons <= {FinishReason.CANCELLED, FinishReason.LENGTH}
        assert not client.worker.is_healthy()


@pytest.mark.parametrize("latents", [False, True])
def test_what_a_group_had_saved_is_there_for_the_next_one_when_a_rank_dies(
    tiny_llama: Path, tmp_path: Path, latents: bool
) -> None:
    """Latents are written down by the leader alone, heads by all ranks: either way a page is whole, or not there."""
    folder = tiny_models.make_tiny_deepseek_v2(tmp_path / "model") if latents else tiny_llama
    sizes = page_sizes(tiny_runner(folder, 64))
    asked, more = ([prompt(100, seed) for seed in range(at, at + 3)] for at in (0, 10))
    processes = Processes()
    with caching(tmp_path, page_bytes=sizes) as service:
        with (
            group_of(folder, pages=256, launch=processes) as group,
            serving(group, tmp_path / "s") as client,
        ):
            wanted = [client.generate(p, max_tokens=20).tokens for p in asked]
            settle(client.worker, service)
            saved = {page.key for page in service.pages(tier=TierName.HOST, limit=10_000)}
            names = [client.send(p, max_tokens=200) for p in more]
            client.first(names[0])
            processes.children[0].kill()
            assert {client.result(name).reason for name in names} <= {
                FinishReason.CANCELLED,
                FinishReason.LENGTH,
            }

        until(service.idle, "the node has all that the group had")
        held = service.pages(tier=TierName.HOST, limit=10_000)
        assert saved and saved <= {page.key for page in held}
        assert service.stats().tiers[TierName.HOST].used_bytes == len(held) * slot_bytes(sizes[0])

        with group_of(folder, pages=256) as group, serving(group, tmp_path / "s") as client:
            found = [client.generate(p, max_tokens=20) for p in asked]
            assert [result.tokens for result in found] == wanted
            assert [result.cached for result in found] == [{"L3": 96}] * 3
            assert service.stats().tiers[TierName.HOST].corrupt_pages == 0


def test_ranks_of_a_killed_leader_end(tiny_llama: Path) -> None:
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1] / "kits")!r})
from pathlib import Path
from group_kit import Processes, group_of
processes = Processes()
with group_of(Path({str(tiny_llama)!r}), launch=processes):
    print(processes.children[0].pid, flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as leader:
        assert leader.stdout is not None
        rank = psutil.Process(int(leader.stdout.readline()))

        leader.kill()

        until(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE, "the rank ends")


def test_the_process_of_a_worker_whose_rank_died_ends(tiny_llama: Path) -> None:
    """So that it is restarted as a whole."""
    script = f"""
import sys, psutil
from kvtier.workers.actor import DecodeWorkerProcess
from kvtier.workers.scheduling.settings import EngineSettings
worker = DecodeWorkerProcess(
    worker_id="w0", node_id="n0", socket_path=None, model_path={str(tiny_llama)!r}, tenants={{"default": ""}},
    engine=EngineSettings(), dtype="float32", page_tokens=16,
    l1_bytes=1 << 20, max_context=1024, tensor_parallel=2,
)
assert worker.health() is None and worker.info().page_tokens == 16
print(psutil.Process().children()[0].pid, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout is not None
        rank = psutil.Process(int(worker.stdout.readline()))

        rank.kill()

        assert worker.wait(120) == 1


@pytest.mark.timeout(600)
def test_a_rank_that_dies_on_its_way_to_the_others_is_not_waited_for(tiny_llama: Path) -> None:
    """It has said that it is there, so only the meeting of the ranks would find out, after as long as loading may take."""

    class Dying:
        def __init__(self, rank: int, connection: socket.socket) -> None:
            self._socket = connection.dup()
            threading.Thread(target=self._run, daemon=True).start()

        def _run(self) -> None:
            mailbox = Mailbox(self._socket, lambda: None)
            begin = mailbox.take()
            assert isinstance(begin, Begin)
            mailbox.send(Joined())
            until(Path(begin.store).exists, "the leader is on its way")
            mailbox.close()

        def kill(self) -> None:
            pass

        def wait(self, timeout: float | None = None) -> None:
            pass

    with (
        pytest.raises(GroupBroken, match="rank 1 can't go on: it is gone"),
        group_of(tiny_llama, launch=Dying, load_s=3600.0),
    ):
        pass


def test_a_rank_that_ends_before_it_has_loaded_is_said(tiny_llama: Path) -> None:
    def launch(rank: int, connection: socket.socket) -> Any:
        child = ThreadRank(rank, connection)
        child.kill()
        return child

    with (
        pytest.raises(GroupBroken, match="rank 1 can't go on: it is gone"),
        group_of(tiny_llama, launch=launch),
    ):
        pass


def test_a_failed_save_is_not_over_before_the_last_rank_is_gone(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots go back to the node then, and a rank that hangs in a copy may wake up and write into them."""
    copy_out = RankPages.copy_out
    writes, may_end = threading.Event(), threading.Event()

    def hang(self: RankPages, frame: int, payload: memoryview, digest: bytes, tokens: int) -> None:
        if not self._is_first:
            writes.set()
            may_end.wait()
        copy_out(self, frame, payload, digest, tokens)

    monkeypatch.setattr(RankPages, "copy_out", hang)
    slab = HostTier(1 << 20, pretouch=False)
    node, ours = socket.socketpair()
    client: Any = SimpleNamespace(slab=slab, fd=ours.fileno())
    failures: list[BaseException] = []
    with group_of(tiny_llama, patience_s=1.0) as group:
        _, copies = group.open_l1()
        copies.follow(client)
        spec = group.groups[0].specs[group.raw_format]
        grant = Grant(0, 1, spec.nbytes)
        key = PageKey(bytes(32))
        page = SavePage(
            frame=3,
            slot=slab.slot(Place(0, 0), spec.nbytes),
            grant=grant,
            key=key,
            spec=spec,
            made_from="",
            parent=bytes(32),
            root=RootKey(bytes(32)),
            tenant=bytes(16),
            depth=0,
            tokens=spec.page_tokens,
            content=b"",
            checksum=b"",
            record=None,
        )

        def save() -> None:
            try:
                copies.do(SaveJob(1, [page]))
            except GroupBroken as error:
                failures.append(error)

        saving = threading.Thread(target=save)
        saving.start()
        until(lambda: writes.is_set() and group.error is not None, "the group breaks")
        with pytest.raises(GroupBroken):
            group.forward(StepBatch(*(np.empty(0, np.int32),) * 2, [], np.empty(0, np.int32)))
        assert saving.is_alive() and not failures
        may_end.set()
        saving.join(120)

        assert len(failures) == 1 and "has not answered step" in str(failures[0])
    page.slot.release()
    node.close()
    ours.close()
    slab.close()


def test_the_nodes_connection_ends_only_when_no_rank_maps_its_slab(tiny_llama: Path) -> None:
    """Else the node would give a slot to another worker that a rank of a dead leader is still writing into."""
    node, ours = socket.socketpair()
    slab = HostTier(1 << 20, pretouch=False)
    client: Any = SimpleNamespace(slab=slab, fd=ours.fileno())
    node.setblocking(False)
    with group_of(tiny_llama) as group:
        _, copies = group.open_l1()
        copies.follow(client)
        group._link.result(group._link.step(CopyIn([]), wanted=True))  # every rank has the slab

        ours.close()
        with pytest.raises(BlockingIOError):
            node.recv(1)
        copies.follow(None)

        assert node.recv(1) == b""
    node.close()
    slab.close()
