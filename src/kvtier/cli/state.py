"""What a running deployment writes down, so that other commands find it and the next `up` can clean up after it.

One deployment per state folder. Its supervisor holds a lock on `deployment.lock` as long as it lives, so whether
one is running never hangs on a process id; `deployment.json` says how to reach it and what it has made.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from kvtier.cluster.machines.leftovers import Stamp, end, remove

_CLAIM_TRIES = 10
_CLAIM_WAIT_S = 0.02


@dataclass(slots=True)
class Deployment:
    """The record of one deployment."""

    pid: int
    started: str  # of that process (leftovers.Stamp)
    phase: str = "starting"  # starting, ready, stopping
    step: str = ""  # what it is doing while starting or stopping
    endpoint: str = ""  # host:port, once ready
    model: str = ""  # as the config names it
    has_tokenizer: bool = False
    tls_ca: str = ""  # PEM file that clients check the server with; "": plain text
    config: dict[str, Any] = field(default_factory=dict)
    ray_dir: str = ""  # of Ray's session and of our sockets, removed at the end
    processes: list[Stamp] = field(default_factory=list)  # all that it has started


class StateFolder:
    """Reads and writes the record. The supervisor is the only writer, between `claim` and `release`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "up.log"
        self._record = folder / "deployment.json"
        self._lock = folder / "deployment.lock"
        self._left = folder / "left-running.txt"
        self._held: IO[str] | None = None

    def claim(self) -> bool:
        """Become the supervisor of this folder; False when another lives. OSError when the folder can't be used."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = self._lock.open("a")
        for _ in range(_CLAIM_TRIES):  # `is_alive` of another process holds it too, for microseconds
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_CLAIM_WAIT_S)
                continue
            self._held = file
            self._left.unlink(missing_ok=True)
            return True
        file.close()
        return False

    def release(self, left: Sequence[str] = ()) -> None:
        """The deployment is gone, but for what these lines say: forget it, let the next one start."""
        if left:
            self._left.write_text("".join(f"{line}\n" for line in left))
        self._record.unlink(missing_ok=True)
        if self._held:
            self._held.close()
            self._held = None

    def write(self, deployment: Deployment) -> None:
        """Replace the record, whole or not at all; only its owner may read it (the config holds tenants' salts)."""
        part = self._record.with_suffix(".part")
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with open(descriptor, "w") as file:
                json.dump(asdict(deployment), file)
            os.replace(part, self._record)
        except OSError:  # a full disk
            part.unlink(missing_ok=True)
            raise

    def read(self) -> Deployment | None:
        """The record, of a live or a dead deployment; None when there is none."""
        try:
            fields = json.loads(self._record.read_text())
            fields["processes"] = [(int(pid), str(start)) for pid, start in fields["processes"]]
            return Deployment(**fields)
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def is_alive(self) -> bool:
        """Whether a supervisor holds the folder."""
        if self._held:
            return True
        try:
            with self._lock.open("r") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def already_running(self) -> str:
        """What to say when there must not be one."""
        record = self.read()
        if record is None:
            return f"a deployment is already starting or ending (state folder {self.folder}); try again in a moment"
        what = f"running at {record.endpoint}" if record.endpoint else record.phase
        return f"a deployment is already {what} (pid {record.pid}); stop it first: kvtier down"

    def take_output(self) -> None:
        """What this process prints goes to a new log from now on; the one before it is kept as up.log.1.

        For the holder of the claim: another one would take a running deployment's log away.
        """
        assert self._held
        if self.log.exists():
            os.replace(self.log, self.log.with_suffix(".log.1"))
        with self.log.open("wb") as log:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
                os.dup2(log.fileno(), stream.fileno())

    def left_running(self) -> list[str]:
        """What `release` was told by the last supervisor of this folder."""
        try:
            return self._left.read_text().splitlines()
        except FileNotFoundError:
            return []

    def clean_up(self) -> str:
        """End and remove what a supervisor that was killed has left, if none lives now; a sentence, "" if nothing was."""
        if not self._record.exists() or not self.claim():
            return ""
        dead = self.read()
        said = f"the deployment was killed (pid {dead.pid}): {clean_up_after(dead)}" if dead else ""
        self.release()
        return said

    def killed(self) -> Deployment | None:
        """The record of a deployment whose supervisor was killed, and that nothing has cleaned up after."""
        return None if self.is_alive() else self.read()

    def running(self) -> Deployment | None:
        """The record of the deployment that is alive."""
        return self.read() if self.is_alive() else None


def clean_up_after(dead: Deployment) -> str:
    """End what a supervisor that was killed has left behind; says what."""
    said = []
    if ended := end(dead.processes):
        said.append(f"ended {ended} of its processes")
    if dead.ray_dir and remove(Path(dead.ray_dir)):
        said.append("removed its Ray session")
    return ", ".join(said) or "it had left nothing running"
