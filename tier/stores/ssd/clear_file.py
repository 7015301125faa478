"""The file `clears` of an L4 folder: the clear epochs that its pages have been cleared by, and the clears that aren't done.

It is replaced whole, and on the disk when `save` returns. A clear is in it as unfinished before anything of it is done, and
until all of it is on the disk, so whatever uses the folder next finishes it before it serves a page.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec
import xxhash

from kvtier.tier.pages.clear_epochs import Clears, Tenant, from_json, to_json
from kvtier.tier.stores.ssd.layout import CLEARS_FILE, LAYOUT_FILE, LOCK_FILE, replace_file

VERSION = 1


class _File(msgspec.Struct):
    version: int
    cleared: dict[str, int]  # as of clears.to_json
    unfinished: list[str]  # tenants' digests in hex; "" for all tenants


class ClearFile:
    """What the file says. One thread uses it."""

    def __init__(self, folder: Path, clears: Clears, unfinished: dict[Tenant, None]) -> None:
        self.clears = clears
        self.unfinished = unfinished
        self.note = ""  # what the operator should know of how it was found
        self._folder = folder

    @classmethod
    def load(cls, folder: Path) -> ClearFile:
        """An empty one where there is none, and where it is damaged, with a note. Raises OSError for a disk that refuses."""
        try:
            content = (folder / CLEARS_FILE).read_bytes()
        except FileNotFoundError:
            return cls(folder, Clears(), {})
        try:
            found = _decode(content)
            unfinished = dict.fromkeys(bytes.fromhex(tenant) or None for tenant in found.unfinished)
            return cls(folder, Clears(from_json(found.cleared)), unfinished)
        except (ValueError, msgspec.DecodeError) as error:
            made = cls(folder, Clears(), {})
            made.note = f"the record of clears in {folder} is not used: {error}; what the gateway knows is cleared again"
            return made

    def begin(self, tenant: Tenant, number: int) -> None:
        """A clear is to be done; 0: it has no number."""
        if number:
            self.clears.note(tenant, number)
        self.unfinished[tenant] = None

    def save(self) -> None:
        """Raises OSError; the file is as it was then."""
        found = _File(
            VERSION, to_json(self.clears.numbers()), [(tenant or b"").hex() for tenant in self.unfinished]
        )
        body = msgspec.json.encode(found)
        checked = body + b"\n" + xxhash.xxh3_64(body).hexdigest().encode() + b"\n"
        replace_file(self._folder / CLEARS_FILE, checked, durable=True)


def _decode(content: bytes) -> _File:
    body, _, digest = content.partition(b"\n")
    if xxhash.xxh3_64(body).hexdigest().encode() != digest.strip():
        raise ValueError("it is damaged")
    if (version := msgspec.json.decode(body).get("version")) != VERSION:
        raise ValueError(f"it has version {version}, this program reads {VERSION}")
    return msgspec.json.decode(body, type=_File)


def mark_unused(folder: Path, tenant: Tenant, number: int) -> bool:
    """Have the next user of an L4 folder clear a tenant's pages in it. False: something has it open, or it has no pages.

    Raises OSError where that can't be written.
    """
    if not (folder / LAYOUT_FILE).is_file():
        return False
    lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file = ClearFile.load(folder)
        file.begin(tenant, number)
        file.save()
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
