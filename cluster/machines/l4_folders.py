"""Which folder of L4 is which node's, and which nodes' folders a disk has: a node is known again by its folder."""

from __future__ import annotations

import errno
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvtier.tier.stores.ssd.layout import LAYOUT_FILE

_NODE = re.compile(r"node-(0|[1-9]\d*)")


@dataclass(frozen=True, slots=True)
class Kept:
    """A node's folder on a disk. `number` is the node's, `used_s` when the folder was last written to, in Unix time."""

    number: int
    used_s: float
    path: str


def node_name(number: int) -> str:
    """The id of a node."""
    return f"node-{number}"


def l4_root(path: str, cache: Path, deployment: str) -> Path:
    """The folder of all nodes on a machine. `path` is as configured, `cache` the user's cache folder there."""
    return Path(path or str(cache / "l4" / deployment)).expanduser().absolute()


def clears_folder(cache: Path, deployment: str) -> Path:
    """Where a deployment's gateway keeps the numbers of all clears, on its machine: they outlast it and its nodes."""
    return (cache / "clears" / deployment).expanduser().absolute()


def l4_folder(root: Path, node_id: str) -> Path:
    """Where a node keeps its pages under `root`: a subfolder by its id, so that nodes may share a disk.

    A folder that holds pages itself was one node's alone, and stays the first node's.
    """
    return root if node_id == node_name(0) and (root / LAYOUT_FILE).is_file() else root / node_id


def l4_refusal(error: OSError, folder: Path) -> str:
    """Why a node can't have this folder, and the way out; "" for an error that is of something else."""
    if error.filename is None:
        return ""
    about = Path(os.fsdecode(error.filename))
    if about != folder and about not in folder.parents and folder not in about.parents:
        return ""
    why = error.strerror
    way_out = "set tiers.l4.path to a folder that can be written, or turn L4 off (--set tiers.l4.bytes=0)"
    if error.errno == errno.EBUSY:
        way_out = (
            "give one of the two deployments another name (--set name=...), or a tiers.l4.path of its own"
        )
    return f"tiers.l4.path: {folder} can't be used: {why}; {way_out}"


def kept_in(root: Path) -> list[Kept]:
    """Folders of nodes that have pages there, by number. Raises OSError where `root` is there and can't be read."""
    if not root.is_dir():
        return []
    folders = {int(match[1]): each for each in root.iterdir() if (match := _NODE.fullmatch(each.name))}
    if (root / LAYOUT_FILE).is_file():
        folders[0] = root
    return [
        Kept(number, _used_s(folder), str(folder))
        for number, folder in sorted(folders.items())
        if (folder / LAYOUT_FILE).is_file()
    ]


def _used_s(folder: Path) -> float:
    latest = 0.0
    for file in folder.iterdir():
        with suppress(FileNotFoundError):  # a node that runs replaces some of them
            latest = max(latest, file.stat().st_mtime)
    return latest
