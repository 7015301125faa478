"""Ctrl-C and SIGTERM at any moment of `kvtier up` leave nothing: no process, file, socket, Ray session or record."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.kernels.cpu.build import load_library
from kvtier.workers.models.files.store import default_cache

KITS = Path(__file__).resolve().parents[1] / "kits"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("how", ["once", "twice"])
def test_a_signal_at_any_moment_of_a_start_leaves_nothing(
    short_path: Path, tiny_llama: Path, how: str
) -> None:
    """Each thing that the supervisor does is such a moment; a second signal, at the next one, kills what was started."""
    for name in ("tmp", "state", "cache"):
        (short_path / name).mkdir()
    compiled = default_cache() / "kernels"  # each start would compile them again
    load_library(default_cache())
    (short_path / "cache" / "kernels").symlink_to(compiled)
    environment = {
        **os.environ,
        "KVTIER_STATE": str(short_path / "state"),
        "KVTIER_CACHE": str(short_path / "cache"),
        "PYTHONPATH": os.pathsep.join([str(KITS), *sys.path]),
    }
    overrides = [f"model.path={tiny_llama}", "grpc.port=0", "tiers.l4.bytes=0"]

    program = [sys.executable, str(KITS / "interrupted_starts.py"), str(short_path), how, *overrides]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False, timeout=580)

    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert len(results) > 60
    assert [result for result in results if result["left"]] == []
    early = {-number for number in (signal.SIGTERM, signal.SIGHUP)}  # nothing is there yet
    assert {result["code"] for result in results} <= {0, 130, *early}
