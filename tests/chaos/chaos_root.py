"""What only root can make: a machine behind a wire that can be cut, and a disk that fills up and breaks."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from ipaddress import IPv4Network
from pathlib import Path

NETWORKS = list(IPv4Network("198.18.0.0/15").subnets(new_prefix=30))  # set aside for tests of networks
NOBODY = "02:00:00:00:00:fe"  # a hardware address that none has


class Unable(Exception):
    """The fault can't be made on this machine or by this user; the message says what lacks."""


def run(*command: str, codes: Collection[int] = (0,)) -> None:
    """AssertionError with what the command says when it ends with another code."""
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode in codes, f"{' '.join(command)}: {done.stdout.strip()} {done.stderr.strip()}"


@contextmanager
def _made() -> Iterator[None]:
    """Raises Unable where a command is refused, or isn't there."""
    if os.geteuid() != 0:
        raise Unable("only root may")
    try:
        yield
    except (FileNotFoundError, AssertionError) as error:
        raise Unable(str(error)) from error


# ---- a wire ------------------------------------------------------------------------------------------------------


class Wire:
    """Between this machine, at address `here`, and a network namespace, at address `there`. `wire` makes it."""

    def __init__(self, name: str, here: str, there: str) -> None:
        self.here = here
        self.there = there
        self.within = ("ip", "netns", "exec", name)  # begins a command that is to run behind the wire
        self._ends = f"{name}a", f"{name}b"

    def lay(self) -> None:
        """For `wire` alone."""
        near, far = self._ends
        name = self.within[-1]
        run("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        run("ip", "address", "add", f"{self.here}/30", "dev", near)
        run("ip", "link", "set", near, "up")
        run(*self.within, "ip", "address", "add", f"{self.there}/30", "dev", far)
        for link in ("lo", far):
            run(*self.within, "ip", "link", "set", link, "up")

    def cut(self) -> None:
        """All packets are lost, both ways: they go to a hardware address that nothing has. Nothing is told."""
        near, far = self._ends
        run("ip", "neigh", "replace", self.there, "lladdr", NOBODY, "dev", near, "nud", "permanent")
        lost = ("ip", "neigh", "replace", self.here, "lladdr", NOBODY, "dev", far, "nud", "permanent")
        run(*self.within, *lost)

    def mend(self) -> None:
        """Packets arrive again."""
        near, far = self._ends
        run("ip", "neigh", "del", self.there, "dev", near)
        run(*self.within, "ip", "neigh", "del", self.here, "dev", far)

    def remove(self) -> None:
        """Both ends, at once; with their namespace they would go some time later, and the next wire has their names."""
        run("ip", "link", "del", self._ends[0])


@contextmanager
def wire() -> Iterator[Wire]:
    """A network namespace with a wire to it, of this process. Raises Unable."""
    name = f"kvtier{os.getpid()}"
    here, there = NETWORKS[os.getpid() % len(NETWORKS)].hosts()
    with _made():
        run("ip", "netns", "add", name)
    try:
        made = Wire(name, str(here), str(there))
        with _made():
            made.lay()
        try:
            yield made
        finally:
            made.remove()
    finally:
        run("ip", "netns", "del", name)


# ---- a disk ------------------------------------------------------------------------------------------------------


class Disk:
    """A file system of its own, in a file, mounted at `folder`. `disk` makes it."""

    def __init__(self, image: Path, folder: Path) -> None:
        self.folder = folder
        self._image = image
        self._filler = folder / "of another"

    def mount(self) -> None:
        """Once the disk has been made or unmounted: what broke is repaired."""
        run("fsck.ext4", "-f", "-y", str(self._image), codes=(0, 1))  # 1: it has repaired something
        run("mount", "-o", "loop,errors=remount-ro", str(self._image), str(self.folder))

    def unmount(self) -> None:
        """No process may have a file open there."""
        run("umount", str(self.folder))

    def settle(self) -> None:
        """All that was written is on the disk, as it is after some seconds anyway."""
        run("sync", "--file-system", str(self.folder))

    def fill(self) -> None:
        """Another file takes all the room that is left."""
        size = 1 << 20
        with self._filler.open("wb", buffering=0) as file:
            while size >= 512:
                try:
                    written = file.write(bytes(size))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    written = 0
                if written < size:
                    size //= 2

    def make_room(self) -> None:
        """The other file goes."""
        self._filler.unlink()

    def fail(self) -> None:
        """The kernel finds an error, as it might any time, and allows no more writes, to files that are open too."""
        run("mount", "-o", "remount,abort", str(self.folder))


@contextmanager
def disk(folder: Path, size_bytes: int) -> Iterator[Disk]:
    """A disk of this size, mounted in a folder below this one. Raises Unable."""
    folder.mkdir()
    image, mounted = folder / "image", folder / "disk"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(size_bytes)
    made = Disk(image, mounted)
    with _made():
        run("mkfs.ext4", "-q", "-m", "0", str(image))
        made.mount()
    try:
        yield made
    finally:
        made.unmount()
