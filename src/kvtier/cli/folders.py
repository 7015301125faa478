"""Whether the folders of a deployment can be used: each is tried, because permissions alone don't tell."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

TMP = Path("/tmp")  # of Ray's session and our sockets, whose paths must stay short
TMP_BYTES = 32 * 2**20  # Ray's logs
STATE_BYTES = 2**20  # the record and a log


def problem(folder: Path, need_bytes: int = 0) -> str:
    """Why files of so many bytes can't be written there, once it is made; "" when they can."""
    place = first_existing(folder)
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"\0" * 4096)
            file.flush()
        free = shutil.disk_usage(place).free
    except OSError as error:
        return f"can't write to {place}: {error.strerror or error}"
    if free < need_bytes:
        return f"{place} has {free >> 20} MiB free, {need_bytes >> 20} are needed"
    return ""


def first_existing(folder: Path) -> Path:
    """The folder, or what is there of the way to it."""
    return next(place for place in (folder, *folder.parents) if place.exists())
