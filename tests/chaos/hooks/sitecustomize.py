"""Runs first in every Python process of a deployment under test: faults that can't be made from outside, and questions.

Python imports a module of this name at its start. `faults.json` in the folder KVTIER_CHAOS says which faults are on now;
without that variable nothing here does anything. Every part of the deployment answers questions at a socket in that
folder, which other network namespaces reach too.
"""

from __future__ import annotations

import errno
import importlib.machinery
import json
import os
import random
import socket
import sys
import threading
import time
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

_real_time = time.time
FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND


class Faults:
    """What is on now, as the file says; read again when it has changed."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seen = -1
        self._now: dict[str, Any] = {}

    def __call__(self, name: str) -> Any:
        try:
            changed = os.stat(self._file).st_mtime_ns
            if changed != self._seen:
                self._now, self._seen = json.loads(self._file.read_text()), changed
        except FileNotFoundError:
            return None
        return self._now.get(name)


def hit(fault: str) -> None:
    """A fault has just been made: `Deployment.hits` counts these, over all processes and their lives."""
    file = os.open(Path(os.environ["KVTIER_CHAOS"]) / f"hits-{os.getpid()}", FLAGS, 0o600)
    try:
        os.write(file, f"{fault}\n".encode())
    finally:
        os.close(file)


def jump_clock(faults: Faults) -> None:
    """The wall clock of a process is off by so many seconds; the monotonic one is as it is."""
    last = 0.0

    def jumping() -> float:
        nonlocal last
        off_s = (faults("clock") or {}).get(str(os.getpid()), 0.0)
        if off_s != last:
            last = off_s
            hit("clock")
        return _real_time() + float(off_s)

    time.time = jumping


# ---- after imports -----------------------------------------------------------------------------------------------


class Instead:
    """Stands for a module, with some of its functions replaced."""

    def __init__(self, module: Any, **replaced: Any) -> None:
        self._module = module
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def full_disk(slab: Any, faults: Faults) -> None:
    """Writes of pages to L4 fail with the errno named by the fault "disk"."""

    def failing(name: str) -> Any:
        real = getattr(os, name)

        def call(*arguments: Any) -> Any:
            if wrong := faults("disk"):
                hit("disk")
                raise OSError(getattr(errno, wrong), os.strerror(getattr(errno, wrong)))
            return real(*arguments)

        return call

    slab.os = Instead(os, **{name: failing(name) for name in ("pwrite", "pwritev", "posix_fallocate")})


def lying_pages(sender: Any, faults: Any, rng: random.Random | None = None) -> None:
    """One page of each frame is not what it should be, in the way that the fault "lie" names."""
    from chaos_lies import lied

    real = sender.wire.pages_frame

    def pages_frame(parts: Any) -> bytes:
        lie = faults("lie")
        if not lie:
            return bytes(real(parts))
        frame = lied(b"".join(parts), lie, rng or random.Random())
        hit("lie")
        return bytes(real([frame]))

    sender.wire = Instead(sender.wire, pages_frame=pages_frame)


def proxied(server: Any, faults: Faults) -> None:
    """Others reach an exchange through a proxy only, which does to its bytes what the fault "wire" says of the node."""
    start = server.ExchangeServer.start

    def started(self: Any, host: str, port: int) -> int:
        exchange = sys._getframe(1).f_locals["self"]
        node_id = exchange._node_id
        target = host.strip("[]"), int(start(self, host, port))
        answering(exchange, "exchange", node_id)
        return Proxy(target, lambda: (faults("wire") or {}).get(node_id, "")).port

    server.ExchangeServer.start = started


def questions(kind: str, class_name: str, method: str, name: str = "") -> Any:
    """Who calls this method of an object answers from then on; its own class is Ray's copy, which can't be changed here.

    `name` is the attribute of the object that names it.
    """

    def after(module: Any, faults: Faults) -> None:
        cls = getattr(module, class_name)
        real = getattr(cls, method)

        def called(self: Any, *arguments: Any, **named: Any) -> Any:
            result = real(self, *arguments, **named)
            answering(sys._getframe(1).f_locals["self"], kind, getattr(self, name) if name else "")
            return result

        setattr(cls, method, called)

    return after


AFTER = {
    "kvtier.tier.stores.ssd.slab": full_disk,
    "kvtier.cluster.transfer.sender": lying_pages,
    "kvtier.cluster.transfer.server": proxied,
    "kvtier.tier.node.service": questions("node", "CacheService", "start", "node_id"),
    "kvtier.cluster.directory.core": questions("directory", "DirectoryCore", "__init__"),
    "kvtier.workers.engine.worker": questions("worker", "DecodeWorker", "start", "worker_id"),
}


class AfterImport:
    """Finds the modules of AFTER as usual, and changes each once it is executed."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in AFTER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_change(module: Any) -> None:
            execute(module)
            AFTER[name](module, self._faults)

        spec.loader.exec_module = execute_and_change
        return spec


# ---- questions ---------------------------------------------------------------------------------------------------


def answering(part: Any, kind: str, name: str) -> None:
    """Answer calls of the part's methods that take nothing, a line of JSON each, until the process ends."""
    said = {"kind": kind, "name": name, "pid": os.getpid()}
    file = Path(os.environ["KVTIER_CHAOS"]) / f"part-{os.getpid()}.json"
    server = socket.socket(socket.AF_UNIX)
    file.with_suffix(".sock").unlink(missing_ok=True)
    server.bind(str(file.with_suffix(".sock")))
    server.listen()
    file.with_suffix(".new").write_text(json.dumps(said))
    file.with_suffix(".new").rename(file)

    def serve() -> None:
        while True:
            connection, _ = server.accept()
            with connection, connection.makefile("rw") as lines:
                try:
                    print(
                        json.dumps(answer(part, lines.readline().strip()), default=plain),
                        file=lines,
                        flush=True,
                    )
                except OSError:
                    pass  # who asked is gone

    threading.Thread(target=serve, name="chaos-questions", daemon=True).start()


def answer(part: Any, method: str) -> dict[str, Any]:
    try:
        return {"result": getattr(part, method)()}
    except (AssertionError, RuntimeError, OSError, AttributeError) as error:  # the last: it isn't made yet
        return {"error": f"{type(error).__name__}: {error}"}


def plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


# ---- the wire ----------------------------------------------------------------------------------------------------


class Proxy:
    """A port that stands for another one, on threads of this process.

    Its `mode`, asked for each piece: "" passes all on; "cut" passes nothing either way and closes nothing, so that what
    was held back goes on when it ends, as after lost packets; "slow" passes 1 KB/s to the client; "flip" changes a bit
    of each piece for the client.
    """

    def __init__(self, target: tuple[str, int], mode: Any) -> None:
        self._target = target
        self._mode = mode
        self._listener = socket.create_server((target[0], 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="chaos-proxy", daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            server = socket.create_connection(self._target)
            for source, sink, is_back in ((client, server, False), (server, client, True)):
                arguments = (source, sink, is_back)
                threading.Thread(target=self._pass_on, args=arguments, name="chaos-wire", daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, is_back: bool) -> None:
        try:
            while data := source.recv(16384):
                self._send(sink, data, is_back)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            for end in (source, sink):
                end.close()

    def _send(self, sink: socket.socket, data: bytes, is_back: bool) -> None:
        was_cut = False
        while data:
            mode = self._mode()
            if mode == "cut":
                if not was_cut:
                    hit("cut")
                was_cut = True
                time.sleep(0.02)
                continue
            piece = data
            if mode == "slow" and is_back:
                time.sleep(0.1)
                piece = data[:100]
                hit("slow")
            sent = piece
            if mode == "flip" and is_back and len(piece) > 1000:
                at = random.randrange(len(piece))
                sent = piece[:at] + bytes([piece[at] ^ 1 << random.randrange(8)]) + piece[at + 1 :]
                hit("flip")
            sink.sendall(sent)
            data = data[len(piece) :]


if "KVTIER_CHAOS" in os.environ:
    on = Faults(Path(os.environ["KVTIER_CHAOS"]) / "faults.json")
    jump_clock(on)
    sys.meta_path.insert(0, AfterImport(on))  # type: ignore[arg-type]
