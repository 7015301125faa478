"""The GPU benchmarks, dry: tiny shapes without a GPU, so that the scripts work when there is one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
REPORT = ROOT / "docs" / "gpu-results.md"


def run_dry(script: str, folder: Path, *options: str) -> dict[str, Any]:
    """Run a script in a folder with a copy of the report, and return what it wrote to out.json."""
    done = subprocess.run(
        [
            sys.executable,
            ROOT / "bench" / script,
            "--dry",
            "--out",
            "out.json",
            "--report",
            REPORT.name,
            *options,
        ],
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return written


def section(folder: Path, script: str) -> list[str]:
    """The report's lines between the marks of a script, which there are once."""
    text = (folder / REPORT.name).read_text()
    begin, end = f"<!-- begin bench/{script} -->", f"<!-- end bench/{script} -->"
    assert text.count(begin) == text.count(end) == 1
    return text.split(begin)[1].split(end)[0].strip().splitlines()


def rest(folder: Path, script: str) -> str:
    """The report without that section."""
    text = (folder / REPORT.name).read_text()
    return text.split(f"<!-- begin bench/{script}")[0] + text.split(f"<!-- end bench/{script}")[1]


def test_gpu_checks_every_kernel_and_keeps_its_rows_for_the_same_device_and_kernels(tmp_path: Path) -> None:
    shutil.copy(REPORT, tmp_path)
    before = rest(tmp_path, "gpu.py")

    first = run_dry("gpu.py", tmp_path)
    lines = section(tmp_path, "gpu.py")
    failed = {**first["rows"], "check gather": {"ok": False}}
    (tmp_path / "out.json").write_text(json.dumps({**first, "rows": failed}))
    again = run_dry("gpu.py", tmp_path)

    assert rest(tmp_path, "gpu.py") == before and len(section(tmp_path, "gpu.py")) == len(lines)
    checks = {name: row for name, row in first["rows"].items() if name.startswith("check")}
    assert len(checks) > 40 and all(row["ok"] is True for row in checks.values())
    assert again["rows"].pop("check gather")["ok"] is True
    assert again["rows"] == {name: row for name, row in first["rows"].items() if name != "check gather"}

    (tmp_path / "out.json").write_text(json.dumps({**first, "sources": "of other kernels"}))
    others = run_dry("gpu.py", tmp_path, "--only", "gather")
    assert set(others["rows"]) == {"check gather", "copy", "gather tiny"}


def test_gpu_service_finds_the_same_tokens_in_every_tier(tmp_path: Path) -> None:
    shutil.copy(REPORT, tmp_path)
    before = rest(tmp_path, "gpu_service.py")

    rows = run_dry("gpu_service.py", tmp_path)["rows"]

    assert all(row["ok"] is True for row in rows.values())
    assert set(rows) == {
        "tiers, small Llama",
        "tiers, small DeepSeek-V3",
        "decode by CUDA graphs",
        "copies",
        "frames of another process",
    }
    lines = section(tmp_path, "gpu_service.py")
    assert [line for line in lines if line.startswith("| tiers, small Llama | ok True")]
    assert rest(tmp_path, "gpu_service.py") == before


def test_a_section_that_is_written_again_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        from common import write_section
    finally:
        sys.path.pop(0)
    shutil.copy(REPORT, tmp_path)
    path = tmp_path / REPORT.name

    for lines in (["old", "older"], ["new"], ["new"]):
        write_section(path, "bench/gpu_service.py", lines)

    assert section(tmp_path, "gpu_service.py") == ["new"]
    assert path.read_text().startswith(REPORT.read_text().split("<!-- begin bench/gpu_service.py")[0])
