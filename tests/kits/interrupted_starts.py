"""Starts a deployment's supervisor over and over, each time with a signal at the next thing that it does; prints what it left.

A moment is an audit event of the main thread: a file made, renamed or removed, a process started, a socket bound; and the return
of each function of the supervisor. What the supervisor launches is a process and some files here, in place of Ray, so that hundreds of starts take seconds.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from kvtier.cli import supervisor, up
from kvtier.cluster.config.deployment import Config, load_config

MOMENTS = frozenset(
    ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.kill", "subprocess.Popen", "socket.bind")
)


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class LaunchError(RuntimeError):
    """As launch.LaunchError."""


class Launched:
    """In place of launch.Launched."""

    endpoint = ""
    has_tokenizer = False
    notes: tuple[str, ...] = ()

    def __init__(self, config: object, model: Path, cache: Path, ray_dir: Path) -> None:
        self._folder = ray_dir
        self._looks = 0

    def start(self, progress: Callable[[str], None], ray_started: Callable[[], None]) -> None:
        progress("starting Ray")
        (self._folder / "ray").mkdir()
        for _ in range(2):
            subprocess.Popen(["sleep", "600"], start_new_session=True)
        ray_started()
        progress("loading the model")
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(self._folder / "node-0.sock"))
        progress("opening the gateway")
        self.endpoint = "127.0.0.1:1"

    def look(self) -> list[str]:
        self._looks += 1
        if self._looks == 2:  # it has served for a while
            os.kill(os.getpid(), signal.SIGTERM)
        return []

    def hopeless(self) -> str:
        return ""

    def stop(self, progress: Callable[[str], None]) -> list[str]:
        progress("finishing requests")
        return []


def writes(arguments: Any) -> bool:
    """Whether a file is opened for more than to be read."""
    flags = arguments[2]
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def signalled(config: Config, numbers: dict[int, int], told: int) -> None:
    """Run a supervisor with these signals at these moments; writes how many moments there were."""
    seen = 0

    def passed() -> None:
        nonlocal seen
        at, seen = seen, seen + 1
        os.pwrite(told, b"%8d" % seen, 0)
        if at in numbers:
            os.kill(os.getpid(), numbers.pop(at))

    def profile(frame: types.FrameType, event: str, argument: object) -> None:
        if event == "return" and frame.f_code.co_filename == supervisor.__file__:
            passed()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if (
            event not in MOMENTS
            or (event == "open" and not writes(arguments))
            or threading.current_thread() is not threading.main_thread()
        ):
            return
        passed()

    sys.addaudithook(hook)
    sys.setprofile(profile)
    try:
        supervisor.Supervisor(config, up._Foreground()).run()
    except KeyboardInterrupt:
        os._exit(130)


def left(folder: Path) -> list[str]:
    """What a start has left behind."""
    found = [str(path) for path in (folder / "tmp").iterdir()]
    found += [str(path) for path in (folder / "state").glob("deployment.json*")]
    for process in psutil.process_iter():
        try:
            if process.environ().get("KVTIER_STATE") == str(folder / "state") and process.pid != os.getpid():
                found.append(f"{process.pid} {process.name()} {process.status()}")
        except psutil.Error:
            continue
    return found


def tried(folder: Path, config: Config, numbers: dict[int, int]) -> tuple[int, dict[str, Any]]:
    """How many moments a start with these signals had, and what came of it."""
    with open(folder / "told", "w+b") as told:
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                signalled(config, dict(numbers), told.fileno())
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        moments = int(os.pread(told.fileno(), 8, 0) or b"0")
    return moments, {"signals": numbers, "code": os.waitstatus_to_exitcode(status), "left": left(folder)}


def run(folder: Path, config: Config, is_twice: bool) -> list[dict[str, Any]]:
    """Every moment of a start, with one signal, or with another at the next moment."""
    supervisor.TMP = folder / "tmp"
    launch: Any = types.ModuleType("kvtier.cluster.supervisor.launch")
    launch.Launched, launch.LaunchError = Launched, LaunchError
    sys.modules["kvtier.cluster.supervisor.launch"] = launch
    results, moments, at = [], 1, 0
    while at < moments:
        number = SIGNALS[at % len(SIGNALS)]
        reached, result = tried(folder, config, {at: number} | ({at + 1: number} if is_twice else {}))
        moments = max(moments, reached)
        results.append(result)
        at += 1
    return results


if __name__ == "__main__":
    where, how, *overrides = sys.argv[1:]
    print(json.dumps(run(Path(where), load_config(None, tuple(overrides)), how == "twice")))
