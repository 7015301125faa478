"""What tests share: kits whose assertions say as much as those of tests, and waits that end by what they wait for."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from deployment_kit import Shell
from waiting import eventually, until

HERE = Path(__file__).parent
KITS = [file.stem for file in sorted((HERE / "kits").glob("*.py"))]


@pytest.mark.parametrize("kit", [*KITS, "triton_kit", "ptx_emulator"])
def test_an_assertion_of_a_kit_that_fails_says_both_sides(kit: str) -> None:
    spec = find_spec(kit)

    assert spec is not None
    assert type(spec.loader).__name__ == "AssertionRewritingHook"


def test_a_wait_ends_at_the_first_true_answer_and_says_what_did_not_come() -> None:
    answers = iter([0, "", "there"])

    assert until(lambda: next(answers), "an answer") == "there"
    with pytest.raises(AssertionError, match="not within 0.01 s: the rain"):
        until(lambda: False, "the rain", 0.01)
    assert eventually(list, 0.01) == []


def test_a_wait_asks_once_more_when_its_time_is_up() -> None:
    """A thread that gets no turn meanwhile has still asked what is now true."""
    began = time.monotonic()

    assert until(lambda: time.monotonic() - began > 0.05, "the time", 0.05)


def test_shared_memory_that_a_deployment_leaves_is_seen_and_that_of_others_is_not(tmp_path: Path) -> None:
    shell = Shell(tmp_path, tmp_path)
    ours, theirs = (Path(f"/dev/shm/kvtier-test-{os.getpid()}-{who}") for who in ("ours", "theirs"))
    code = f"import mmap, os; kept = mmap.mmap(os.open({str(ours)!r}, os.O_RDWR), 4096); print(flush=True); input()"
    try:
        for file in (ours, theirs):
            file.write_bytes(bytes(4096))
        with subprocess.Popen(
            [sys.executable, "-c", code],
            env=shell.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            shell.note_shared_memory()
            process.kill()

        with pytest.raises(AssertionError, match=ours.name):
            shell.check_nothing_left()
        ours.unlink()
        shell.check_nothing_left()
    finally:
        for file in (ours, theirs):
            file.unlink(missing_ok=True)


def test_the_page_of_kits_names_each() -> None:
    page = (HERE / "kits" / "README.md").read_text()

    assert [kit for kit in KITS if f"| `{kit}` |" not in page] == []
