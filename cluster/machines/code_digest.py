"""Which kvtier runs here: its version, and a digest of its code, since a version has many checkouts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from xxhash import xxh3_128

import kvtier

Sources = tuple[str, str]  # version and digest: plain text, which any version of kvtier can be sent
_CODE = (".py", ".cpp", ".hpp")


def sources_here() -> Sources:
    """Of this process."""
    return version("kvtier"), sources_digest(Path(kvtier.__file__).parent)


def sources_digest(package: Path) -> str:
    """Of all code in a package's folder: the files' names in it, and their content."""
    digest = xxh3_128()
    for name, file in sorted((file.relative_to(package).as_posix(), file) for file in _code(package)):
        content = file.read_bytes()
        digest.update(f"{name} {len(content)} ".encode())
        digest.update(content)
    return digest.hexdigest()


def sources_refusal(here: Sources, ours: Sources) -> str:
    """Why a machine with the sources `here` can't work with one that has `ours`; "" when it can."""
    if here == ours:
        return ""
    other = f"kvtier {here[0]}" if here[0] != ours[0] else f"other sources of kvtier {here[0]}"
    return f"it has {other}, and `kvtier up` is of {ours[0]}: install the same on both"


def _code(package: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(package, followlinks=True):  # in a checkout our folders are links
        yield from (Path(folder, name) for name in names if name.endswith(_CODE))
