"""Starts a real kvtier for a benchmark, in folders of its own, and measures it by gRPC from this process."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peer_line import prompt_ids

from kvtier.cli.client import Chunk, Client, connect


class Service:
    """A running deployment; `down` and `up` restart it on the same folders."""

    def __init__(self, folder: Path, overrides: list[str]) -> None:
        self.folder = folder
        self.overrides = overrides
        self.client: Client
        self.ready_s = 0.0

    def _kvtier(self, *arguments: str) -> str:
        env = {**os.environ, "KVTIER_STATE": str(self.folder / "state")}
        done = subprocess.run(
            [sys.executable, "-m", "kvtier", *arguments],
            check=False,
            env=env,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"kvtier {' '.join(arguments)} failed:\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def up(self) -> None:
        """Start and connect; `ready_s` is how long it took."""
        start = time.perf_counter()
        settings = ["grpc.port=0", f"tiers.l4.path={self.folder / 'l4'}", *self.overrides]
        flags = [part for setting in settings for part in ("--set", setting)]
        self._kvtier("up", "--detach", *flags)
        self.ready_s = time.perf_counter() - start
        status = json.loads(self._kvtier("status", "--json"))
        self.status = status
        self.client = connect(status["endpoint"])

    def down(self) -> None:
        """Stop, draining to L4."""
        self.client.close()
        self._kvtier("down")

    def empty(self, tier: str) -> None:
        """Evict every page of a tier; copies further down stay."""
        self.client.pages_evict((), tier=tier)

    def settle(self, timeout_s: float = 60.0) -> None:
        """Wait until write-through is over: nothing has moved between the tiers for a while."""
        deadline = time.monotonic() + timeout_s
        before = None
        while before != (now := self._moved()):
            if time.monotonic() > deadline:
                raise SystemExit(f"pages still move after {timeout_s:.0f} s: {now}")
            before = now
            time.sleep(0.3)

    def _moved(self) -> list[int]:
        tiers = self.client.stats()["tiers"]
        return [tiers[name][counter] for name in ("L1", "L3", "L4") for counter in ("bytes_in", "bytes_out")]

    # ---- measurements ----

    def first_token_s(self, prompt: list[int], new: int = 1) -> tuple[float, dict[str, Any]]:
        """Seconds from the call to the first token, and the usage of the whole call."""
        start = time.perf_counter()
        first, usage = 0.0, {}
        for chunk in self.client.generate(prompt, max_tokens=new, ignore_eos=True):
            if not first and chunk.token_ids:
                first = time.perf_counter() - start
            usage = chunk.usage or usage
        return first, usage

    def decode_tokens_per_s(self, batch: int, context: int, new: int, fresh: random.Random) -> float:
        """Tokens a second of `batch` concurrent streams, from the last stream's first token to the first's last."""
        marks: list[list[tuple[float, int]]] = [[] for _ in range(batch)]

        def one(row: int) -> None:
            chunks: Iterator[Chunk] = self.client.generate(
                prompt_ids(fresh.randrange(2**40), context), max_tokens=new, ignore_eos=True
            )
            for chunk in chunks:
                if chunk.token_ids:
                    marks[row].append((time.perf_counter(), len(chunk.token_ids)))

        threads = [threading.Thread(target=one, args=(row,)) for row in range(batch)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        start = max(row[0][0] for row in marks)
        end = min(row[-1][0] for row in marks)
        tokens = sum(count for row in marks for at, count in row if start < at <= end)
        return tokens / (end - start)


@contextmanager
def running(*overrides: str) -> Iterator[Service]:
    """A service with these `--set` overrides, stopped and its folders removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="kvtier-bench-"))
    service = Service(folder, list(overrides))
    try:
        service.up()
        try:
            yield service
        finally:
            service.down()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Peer:
    """A peer engine in its own interpreter, driven by bench/peer_line.py's protocol."""

    def __init__(self, python: str, engine: str, model: str, preload: str = "") -> None:
        env = {**os.environ, "LD_PRELOAD": preload} if preload else dict(os.environ)
        script = Path(__file__).with_name("peer_line.py")
        self._process = subprocess.Popen(
            [python, str(script), "--engine", engine, "--model", model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=env,
        )
        if not self._read().get("ready"):
            raise SystemExit(f"{engine} did not start")

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the peer engine ended early")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, **request: Any) -> dict[str, Any]:
        """One request, one answer."""
        assert self._process.stdin
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._read()

    def close(self) -> None:
        """End the peer."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(60)


def vllm_preload(python: str) -> str:
    """The libraries that vLLM's CPU build wants preloaded (Intel's OpenMP, tcmalloc), where they are at hand."""
    root = Path(python).parent.parent
    found = [str(p) for p in root.glob("lib/libiomp5.so")]
    found += [str(p) for p in Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")][:1]
    return ":".join(found)
