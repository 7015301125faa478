"""Runs deployments by their command line, each with a state and a cache folder of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from waiting import until

from kvtier.workers.models.files.store import default_cache

DEADLINE_S = 600.0  # of a busy machine; no law hangs on it


class Shell:
    """Runs `kvtier` with a state and a cache folder of its own."""

    def __init__(self, folder: Path, model: Path, **more: object) -> None:
        """`more`: keys of the configuration beside those that make it small, with __ for each dot."""
        self.state = folder / "state"
        self._shared_memory: set[str] = set()  # files that processes of this deployment were seen to have
        self._share_compiled_kernels(folder / "cache")
        self.environment = {
            **os.environ,
            "KVTIER_STATE": str(self.state),
            "KVTIER_CACHE": str(folder / "cache"),
            "COLUMNS": "120",
        }
        sets = {
            "model.path": model,
            "model.dtype": "float32",
            "grpc.port": 0,
            "tiers.l1.bytes": "4MiB",
            "tiers.l3.bytes": "8MiB",
            "tiers.l4.bytes": "32MiB",
            "worker.threads": 1,
            "worker.max_batch_tokens": 128,
            **{key.replace("__", "."): value for key, value in more.items()},
        }
        self.up_arguments = ["up", *(f"--set={key}={value}" for key, value in sets.items())]

    @staticmethod
    def _share_compiled_kernels(cache: Path) -> None:
        compiled = default_cache() / "kernels"
        compiled.mkdir(parents=True, exist_ok=True)
        cache.mkdir()
        (cache / "kernels").symlink_to(compiled)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """A `kvtier` that runs beside us."""
        self.note_shared_memory()
        command = [sys.executable, "-m", "kvtier", *arguments]
        return subprocess.Popen(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """Run to the end; stdout, or stderr when it is to fail with `code`."""
        process = self.start(*arguments)
        out, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == code, f"{arguments}: code {process.returncode}\n{out}\n{err}"
        return err if code else out

    def json(self, *arguments: str) -> Any:
        """What it prints with --json."""
        return json.loads(self(*arguments, "--json"))

    def generate(self, token_ids: list[int], *arguments: str) -> dict[str, Any]:
        """A completion of token ids, checked against the law of a request's numbers."""
        ids = ",".join(map(str, token_ids))
        done: dict[str, Any] = self.json("generate", "--token-ids", ids, "--max-tokens", "8", *arguments)
        usage = done["usage"]
        assert usage["prompt_tokens"] == len(token_ids)
        assert sum(usage["cached_tokens"].values()) + usage["computed_tokens"] == usage["prompt_tokens"]
        return done

    def processes(self) -> list[psutil.Process]:
        """All processes of this deployment: they inherit its environment."""
        found = []
        for process in psutil.process_iter():
            try:
                ours = process.environ().get("KVTIER_STATE") == str(self.state)
            except psutil.Error:
                continue
            if ours and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found

    def note_shared_memory(self) -> None:
        """Look which named memory the deployment has now: others on this machine have some too, which comes and goes."""
        for process in self.processes():
            with suppress(OSError):  # it has just ended
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                self._shared_memory |= set(re.findall(r"(/dev/shm/\S+)$", maps, re.MULTILINE))

    def check_nothing_left(self) -> None:
        """No process, no shared memory, no Ray session, no record."""
        assert self.processes() == []
        assert [name for name in sorted(self._shared_memory) if os.path.exists(name)] == []
        assert not (self.state / "deployment.json").exists()
        assert not list(Path("/tmp").glob(f"kvtier-{self.session}*")) if self.session else True

    session = ""  # name of the Ray session's folder, from the record

    def remember_session(self) -> None:
        self.note_shared_memory()
        self.session = Path(json.loads((self.state / "deployment.json").read_text())["ray_dir"]).name


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """The condition's first true value."""
    return until(condition, what, DEADLINE_S, every_s=0.05)


def read_until(process: subprocess.Popen[str], pattern: str) -> str:
    """Lines of stdout up to one that matches."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if re.search(pattern, line):
            return "".join(lines)
    raise AssertionError(
        f"no {pattern!r} in {lines}, stderr: {process.stderr.read() if process.stderr else ''}"
    )
