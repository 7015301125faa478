"""A state folder has one supervisor at a time, and what a dead one left is found and ended."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from kvtier.cli.state import Deployment, StateFolder, clean_up_after
from kvtier.cluster.machines import leftovers
from kvtier.cluster.machines.leftovers import alive, descendants, end, stamp_of

HOLDER = """
import sys, time
from pathlib import Path
from kvtier.cli.state import Deployment, StateFolder
folder = StateFolder(Path(sys.argv[1]))
assert folder.claim()
folder.write(Deployment(pid=1, started="", endpoint="127.0.0.1:7"))
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Another process that has claimed `tmp_path`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_folder_has_one_supervisor(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    folder = StateFolder(tmp_path)

    assert not folder.claim()
    assert folder.is_alive()
    assert "already running at 127.0.0.1:7 (pid 1)" in folder.already_running()


def test_a_killed_supervisor_is_known_to_be_dead_and_its_record_is_still_there(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    folder = StateFolder(tmp_path)
    holder.kill()
    holder.wait()

    assert not folder.is_alive()
    assert folder.running() is None
    dead = folder.killed()
    assert dead is not None and dead.endpoint == "127.0.0.1:7"
    assert folder.claim()
    assert folder.killed() is None
    record = folder.read()
    assert record is not None and record.endpoint == "127.0.0.1:7"
    folder.release()
    assert folder.read() is None


STOPPED = """
import os, signal, sys
from pathlib import Path
from kvtier.cli.state import Deployment, StateFolder
from kvtier.cluster.machines.leftovers import stamp_of
folder = StateFolder(Path(sys.argv[1]))
assert folder.claim()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
folder.write(Deployment(*stamp_of(os.getpid()), phase="ready"))
print("held", flush=True)
signal.sigwait([signal.SIGTERM])
folder.release(sys.argv[2:])
"""


@pytest.mark.parametrize("left", [[], ["node-1 (10.0.0.2) could not be reached", "node-2 neither"]])
def test_down_names_what_its_supervisor_could_not_stop(tmp_path: Path, left: list[str]) -> None:
    """It said that all was stopped, while the parts of a machine that was cut off ran on."""
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED, str(tmp_path), *left], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    environment = os.environ | {"KVTIER_STATE": str(tmp_path)}
    command = [sys.executable, "-m", "kvtier", "down"]

    down = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    process.communicate()
    assert down.returncode == 0, down.stderr
    assert down.stderr.splitlines()[-1 - len(left) :] == [*left, "stopped"]
    assert StateFolder(tmp_path).claim()
    assert StateFolder(tmp_path).left_running() == [], "it is of the deployment before"


STOPPING = """
import subprocess
from types import SimpleNamespace
from kvtier.cli.supervisor import Supervisor
from kvtier.cluster.config.deployment import Config
from kvtier.cluster.machines.leftovers import stamp_of
nothing = lambda *_: None
supervisor = Supervisor(Config(), SimpleNamespace(step=nothing, notice=nothing))
assert supervisor._folder.claim()
orphan = subprocess.run("sleep 300 >/dev/null 2>&1 & echo $!", shell=True, capture_output=True, text=True).stdout
supervisor._record.processes = [stamp_of(int(orphan))]
supervisor._stop()
print(orphan)
"""


def test_a_process_that_has_lost_its_parent_is_ended_too(tmp_path: Path) -> None:
    """The first step of a stop forgot all that are no descendants any more."""
    environment = os.environ | {"KVTIER_STATE": str(tmp_path)}

    run = subprocess.run(
        [sys.executable, "-c", STOPPING], env=environment, capture_output=True, text=True, check=False
    )

    assert run.returncode == 0, run.stderr
    assert not psutil.pid_exists(int(run.stdout)) or is_zombie(int(run.stdout))


def is_zombie(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_asking_whether_one_is_alive_never_makes_a_claim_fail(tmp_path: Path) -> None:
    asking = f"import itertools\nfrom pathlib import Path\nfrom kvtier.cli.state import StateFolder\nf = StateFolder(Path({str(tmp_path)!r}))\nfor _ in range(20000): f.is_alive()\n"
    StateFolder(tmp_path).claim()
    asker = subprocess.Popen([sys.executable, "-c", asking])

    claims = []
    while asker.poll() is None and len(claims) < 200:
        folder = StateFolder(tmp_path)
        claims.append(folder.claim())
        folder.release()
    asker.kill()
    asker.wait()

    assert all(claims)


def test_the_log_begins_again_with_each_deployment_and_the_one_before_it_is_kept(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom kvtier.cli.state import StateFolder\n"
        "folder = StateFolder(Path(sys.argv[1]))\nassert folder.claim()\nprint('before')\nfolder.take_output()\n"
        "print(sys.argv[2])\nos.system('echo of a child >&2')\n"
    )
    heard = [
        subprocess.run(
            [sys.executable, "-u", "-c", code, str(tmp_path), name],
            capture_output=True,
            text=True,
            check=True,
        )
        for name in ("first", "second")
    ]

    assert [(each.stdout, each.stderr) for each in heard] == [("before\n", "")] * 2
    assert (tmp_path / "up.log").read_text() == "second\nof a child\n"
    assert (tmp_path / "up.log.1").read_text() == "first\nof a child\n"


def test_a_record_reads_back_as_written_and_only_for_its_owner(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    record = Deployment(
        pid=5, started="boot/15", processes=[(7, "boot/25")], config={"tenants": [{"salt": "secret"}]}
    )

    folder.write(record)

    assert folder.read() == record
    assert stat.S_IMODE((tmp_path / "deployment.json").stat().st_mode) == 0o600


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"pid": 1}', "not json", '{"processes": [[1]]}'])
def test_a_damaged_record_reads_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "deployment.json").write_text(text)

    assert StateFolder(tmp_path).read() is None


def test_what_a_dead_deployment_left_is_ended_and_removed(tmp_path: Path) -> None:
    ray_dir = tmp_path / "ray"
    (ray_dir / "session").mkdir(parents=True)
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    stamps = [stamp for stamp in descendants() if stamp[0] == left.pid]

    said = clean_up_after(Deployment(pid=1, started="", ray_dir=str(ray_dir), processes=stamps))

    assert said == "ended 1 of its processes, removed its Ray session"
    assert not psutil.pid_exists(left.pid)
    assert not ray_dir.exists()


def test_cleaning_up_waits_for_a_supervisor_that_lives_and_forgets_one_that_does_not(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    folder = StateFolder(tmp_path)
    assert folder.clean_up() == ""
    holder.kill()
    holder.wait()

    assert folder.clean_up() == "the deployment was killed (pid 1): it had left nothing running"
    assert folder.read() is None and folder.clean_up() == ""


def test_a_process_that_took_over_an_old_number_is_left_alone(tmp_path: Path) -> None:
    pid, start = stamp_of(os.getpid())
    boot, tick = start.split("/")

    assert [process.pid for process in alive([(pid, start)])] == [pid]
    for other in (f"{boot}/{int(tick) - 1}", f"{boot[::-1]}/{tick}"):
        assert alive([(pid, other)]) == []
        assert end([(pid, other)]) == 0


def test_a_clock_that_is_set_makes_no_process_look_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the clock on the wall moves the boot time, from which psutil makes the times of starts."""
    before, told = stamp_of(os.getpid()), psutil.Process().create_time()
    boot_time = psutil._pslinux.boot_time
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: boot_time() + 3600)

    assert psutil.Process().create_time() > told + 3000
    assert stamp_of(os.getpid()) == before
    assert [process.pid for process in alive([before])] == [os.getpid()]


def test_a_process_whose_name_looks_like_a_stat_line_has_a_stamp() -> None:
    code = "open('/proc/self/comm', 'w').write('a) R 1 (b) 2'); print('on', flush=True); input()"
    odd = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert odd.stdout is not None and odd.stdin is not None
    with odd, odd.stdout, odd.stdin:
        assert odd.stdout.readline() == "on\n"
        [started] = [stamp for stamp in descendants() if stamp[0] == odd.pid]
        assert started == stamp_of(odd.pid)
        assert stamp_of(os.getpid())[1] != started[1]
        assert [process.pid for process in alive([started])] == [odd.pid]


def test_a_process_that_is_gone_has_no_stamp() -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()

    with pytest.raises(psutil.NoSuchProcess):
        stamp_of(done.pid)
    assert alive([(done.pid, "")]) == []


def test_a_process_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "_TERM_WAIT_S", 0.2)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(60)"
    stubborn = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert stubborn.stdout is not None
    assert stubborn.stdout.readline() == "on\n"

    with stubborn.stdout:
        ended = end([stamp_of(stubborn.pid)])

    assert ended == 1
    assert not psutil.pid_exists(stubborn.pid)
