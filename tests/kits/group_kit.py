"""Runs tensor parallel groups in tests: ranks as threads of this process, or as processes, behind a socket that may be slow."""

from __future__ import annotations

import random
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from kvtier.workers.models.files.weights import Checkpoint
from kvtier.workers.models.forwards import latent as model_mla
from kvtier.workers.models.forwards import reference as model_expected
from kvtier.workers.models.forwards import transformers as model_transformers
from kvtier.workers.parallel.leader import GroupRunner, load_group
from kvtier.workers.parallel.link import Child, Launch, launch_process
from kvtier.workers.parallel.rank import serve

PATIENCE_S = 120.0
_CHUNK_BYTES = 1 << 20


class ThreadRank:
    """A rank as a thread: it can't be killed in the middle of a step, but it needs no new process."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self._socket = connection.dup()
        self._thread = threading.Thread(
            target=serve, args=(self._socket, lambda: None), name=f"test-rank-{rank}", daemon=True
        )
        self._thread.start()

    def kill(self) -> None:
        """Its end of the socket reads nothing more."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended

    def wait(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)


class Processes:
    """Starts ranks as processes, and remembers them."""

    def __init__(self) -> None:
        self.children: list[subprocess.Popen[bytes]] = []

    def __call__(self, rank: int, connection: socket.socket) -> Child:
        child = launch_process(rank, connection)
        assert isinstance(child, subprocess.Popen)
        self.children.append(child)
        return child


class Delayed:
    """Puts a relay in front of each rank that holds each piece back for a random while, in both directions."""

    def __init__(self, launch: Launch, seed: int, most_s: float) -> None:
        self._launch = launch
        self._rng = random.Random(seed)
        self._most_s = most_s
        self.delays = 0

    def __call__(self, rank: int, connection: socket.socket) -> Child:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        outer = connection.dup()
        for source, target in ((outer, ours), (ours, outer)):
            threading.Thread(target=self._relay, args=(source, target), daemon=True).start()
        with theirs:
            return self._launch(rank, theirs)

    def _relay(self, source: socket.socket, target: socket.socket) -> None:
        while True:
            try:
                chunk, fds, _, _ = socket.recv_fds(source, _CHUNK_BYTES, 2)
                time.sleep(self._rng.random() * self._most_s)
                self.delays += 1
                sent = socket.send_fds(target, [chunk], fds) if fds else 0
                target.sendall(chunk[sent:])
                if not chunk:
                    target.shutdown(socket.SHUT_WR)
                    return
            except OSError:
                return
            finally:
                for fd in fds:
                    socket.close(fd)


_loading = threading.Lock()
_load_modules = model_transformers.load_modules


def _load_in_turn(files: Checkpoint, dtype: torch.dtype) -> Any:
    """transformers changes what is global while it loads; in processes ranks need not take turns."""
    with _loading:
        return _load_modules(files, dtype)


@contextmanager
def group_of(
    folder: Path,
    ranks: int = 2,
    *,
    pages: int = 64,
    page_tokens: int = 16,
    launch: Launch = ThreadRank,
    **options: Any,
) -> Iterator[GroupRunner]:
    """A group on a tiny model, each rank with room in its L1 for its share of so many pages of the tiny Llama in float32."""
    page_bytes = page_tokens * 2 * 2 * 2 * 16 * 4
    with (
        mock.patch.object(model_transformers, "load_modules", _load_in_turn),
        mock.patch.object(model_mla, "load_modules", _load_in_turn),
        mock.patch.object(model_expected, "load_modules", _load_in_turn),
    ):
        runner = load_group(
            str(folder),
            ranks,
            launch=launch,
            **{
                "patience_s": PATIENCE_S,
                "load_s": 120.0,
                "dtype": "float32",
                "page_tokens": page_tokens,
                "l1_bytes": pages * page_bytes // ranks,
                "numerics": "auto",
                "forward": "auto",
                "threads": 1,
                "max_context": 2048,
                "max_batch_tokens": 256,
                "epoch": 0,
                "native": "off",
                **options,
            },
        )
    try:
        yield runner
    finally:
        runner.close()
