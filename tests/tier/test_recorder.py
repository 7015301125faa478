"""A running node records what it hears, into a file that runs again, and lets nothing of that hold it up."""

from __future__ import annotations

import stat
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from cache_world import World
from node_kit import Peer, running, wait_until

from kvtier.lab.recordings import opened
from kvtier.tier.node.recording import NODE, about
from kvtier.tier.node.service import ServiceStopped
from kvtier.tier.pages.page import TierName
from kvtier.tier.protocol.events import Drain, Event, WriteDone
from kvtier.tier.record.format import Alias, RecordingError
from kvtier.tier.record.rerun import Verdict, rerun
from kvtier.tier.record.writer import MIN_BYTES, Recorder

both_forms = pytest.mark.parametrize("name", ["node.kvrec", "node.kvrec.gz"])


def run_again(path: Path) -> Verdict:
    with opened(path) as reader:
        return rerun(reader, NODE)


@both_forms
def test_what_a_node_heard_in_the_middle_of_its_life_runs_again(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    with running(tmp_path, l3_pages=8) as service:
        before = Peer(tmp_path, "w0")
        before.store(0, 6)
        started = service.record(file)
        peer = Peer(tmp_path, "w1")
        for i in range(12):
            peer.store(1000 * i, 4)
        peer.fetch(0, 7)
        before.fetch(5000, 4)
        wait_until(service.idle)
        keys = peer.keys(0, 4)
        service.pin(keys)
        service.evict(keys, TierName.HOST)
        service.clear("ada")
        ended = service.stop_recording()
        peer.close()
        before.close()

    verdict = run_again(file)
    assert started.path == str(file) and started.ended == ""
    assert ended is not None and ended.ended == "it was stopped"
    assert verdict.difference is None and not verdict.is_torn and verdict.is_same_code
    assert verdict.events == ended.events > 60 and verdict.commands > 0 and verdict.end == "it was stopped"
    assert ended.nbytes == file.stat().st_size
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_node_that_stops_ends_its_recording(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        service.record(tmp_path / "file")
        peer = Peer(tmp_path)
        peer.store(0, 3)
        peer.close()

    verdict = run_again(tmp_path / "file")

    assert verdict.difference is None and verdict.end == "the node stopped" and not verdict.is_torn
    with pytest.raises(ServiceStopped):
        service.record(tmp_path / "another")
    assert not (tmp_path / "another").exists()


def test_one_recording_at_a_time_and_never_over_a_file_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    with running(tmp_path) as service:
        assert service.recording() is None and service.stop_recording() is None
        for name, why in (("there", "another name"), ("no/folder", "No such file")):
            with pytest.raises(RecordingError, match=why):
                service.record(tmp_path / name)
        with pytest.raises(RecordingError, match="at least"):
            service.record(tmp_path / "small", MIN_BYTES - 1)
        service.record(tmp_path / "one")
        with pytest.raises(RecordingError, match="already"):
            service.record(tmp_path / "two")
        service.stop_recording()
        service.record(tmp_path / "three")

    assert {file.name for file in tmp_path.iterdir() if file.is_file()} == {"there", "one", "three"}
    assert (tmp_path / "there").read_text() == "mine"


@both_forms
def test_a_recording_stays_within_its_bytes_and_the_node_goes_on(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    with running(tmp_path) as service:
        service.record(file, MIN_BYTES)
        peer = Peer(tmp_path)

        def is_over() -> bool:
            peer.fetch(0, 4000)  # 128 KB of keys
            return service.recording().ended != ""  # type: ignore[union-attr]

        wait_until(is_over)
        wait_until(lambda: any("bytes that it may" in note for note in service.notes()))
        assert len(peer.fetch(0, 1)[0]) == 0
        assert service.stop_recording().nbytes <= MIN_BYTES  # type: ignore[union-attr]
        peer.close()

    verdict = run_again(file)
    assert verdict.difference is None and not verdict.is_torn and verdict.events > 3
    assert str(MIN_BYTES) in verdict.end and file.stat().st_size <= MIN_BYTES


def test_a_file_that_falls_behind_ends_the_recording_with_what_it_has(tmp_path: Path) -> None:
    """The loop only appends to a queue: it is never held up, so the queue must have an end."""
    goes_on, notes = threading.Event(), []

    def slowly(event: Event, alias: Alias) -> Event:
        assert goes_on.wait(120)
        return event

    node = World(4, 4).node
    recorder = Recorder(
        replace(NODE, hide=slowly), "n0", tmp_path / "file", MIN_BYTES, notes.append, max_queued=10
    )
    recorder.begin(node, "i", about(node))
    recorder.wait_begun()
    heard = 0
    while not recorder.is_over:
        recorder.heard(Drain(), 200.0, node.handle(Drain(), 200.0), node.snapshot)
        heard += 1
    recorder.heard(Drain(), 200.0, [], node.snapshot)
    goes_on.set()
    recorder.close("too late to be why")

    verdict = run_again(tmp_path / "file")
    assert 11 <= heard <= 22 and verdict.events == recorder.status().events >= 10
    assert verdict.difference is None and not verdict.is_torn
    assert verdict.end == recorder.status().ended and "more slowly" in verdict.end
    assert len(notes) == 1 and "more slowly" in notes[0]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_a_node_broke_at_is_recorded(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        service.record(tmp_path / "file")
        peer = Peer(tmp_path)
        peer.store(0, 2)
        service._post([WriteDone(10**6)])  # of a write that nothing ordered
        wait_until(lambda: service.health() is not None)
        peer.close()

    verdict = run_again(tmp_path / "file")

    assert verdict.difference is None and verdict.events > 3 and not verdict.is_torn


def in_a_process(folder: Path, script: str) -> str:
    """What a process says that does this in `folder`; it may kill itself."""
    program = f"""
import os, resource, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from node_kit import Peer, running, wait_until
folder = Path(sys.argv[2])
{script}"""
    arguments = [str(Path(__file__).parents[1] / "kits"), str(folder)]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


@both_forms
def test_a_killed_node_leaves_what_it_had_recorded(tmp_path: Path, name: str) -> None:
    said = in_a_process(
        tmp_path,
        f"""
with running(folder) as service:
    service.record(folder / "{name}")
    peer = Peer(folder)
    peer.store(0, 5)
    wait_until(service.idle)
    wait_until(lambda: service.recording().events > 10 and service.recording().is_on_disk)
    print(service.recording().events, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
""",
    )

    verdict = run_again(tmp_path / name)

    assert verdict.events >= int(said) > 10
    assert verdict.is_torn and verdict.difference is None


def test_a_disk_that_takes_no_more_ends_the_recording_alone(tmp_path: Path) -> None:
    said = in_a_process(
        tmp_path,
        """
with running(folder, l4_bytes=0) as service:
    peer = Peer(folder)
    service.record(folder / "file")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
    def is_over():
        peer.fetch(0, 1000)
        return service.recording().ended != ""
    wait_until(is_over)
    peer.store(0, 2)
    assert len(peer.fetch(0, 2)[0]) == 2
    print(service.stop_recording().ended)
    peer.close()
""",
    )

    verdict = run_again(tmp_path / "file")

    assert "File too large" in said
    assert verdict.is_torn and verdict.difference is None and verdict.events > 1
