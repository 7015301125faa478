"""Moves the files of an L4 folder aside and back, so that a kill at any moment leaves a folder that can be opened.

What lies aside is in the folder ASIDE. Files go there through LEAVING, which gets its name when all are in it; files
come back through COMING, which gets its name when nothing is in their way any more. A start that finds LEAVING alone moves
its files back, one that finds COMING goes on. OLD is what lay aside before; it is deleted when all else is done.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvtier.tier.stores.ssd.catalogue import CATALOGUE, PAGES
from kvtier.tier.stores.ssd.layout import LAYOUT_FILE
from kvtier.tier.stores.ssd.slab import SlabFiles, sync_folder

ASIDE, LEAVING, COMING, OLD = "aside", "aside.new", "aside.back", "aside.old"
FOLDERS = {ASIDE, LEAVING, COMING, OLD}
_MADE_BESIDE = {f"{name}.new" for name in (CATALOGUE, PAGES, LAYOUT_FILE)}
_LOCKS = {f"{name}-lock" for name in (CATALOGUE, PAGES)}


def files_of(folder: Path) -> list[str]:
    """The files of pages, catalogue and layout, in the order in which they are deleted: what tells of the others last."""
    names = os.listdir(folder)
    order = {PAGES: 1, CATALOGUE: 2, LAYOUT_FILE: 3}
    return sorted(
        (name for name in names if name in order or SlabFiles.is_slab(name)), key=lambda n: order.get(n, 0)
    )


def delete_files(folder: Path) -> None:
    """All of ours in a folder, and only ours."""
    for name in files_of(folder):
        os.unlink(folder / name)
    for name in (_MADE_BESIDE | _LOCKS) & set(os.listdir(folder)):
        os.unlink(folder / name)


def delete_folder(folder: Path) -> None:
    """A folder of files that were moved; the name may be gone already."""
    if os.path.lexists(folder):
        delete_files(folder)
        os.rmdir(folder)


def finish(folder: Path) -> None:
    """Go on with, or take back, a move that was cut short."""
    if os.path.lexists(folder / COMING):
        _come_back(folder)
    elif os.path.lexists(folder / LEAVING):
        _move_all(folder / LEAVING, folder)
        os.rmdir(folder / LEAVING)
        sync_folder(folder)
    if os.path.lexists(folder / OLD) and not os.path.lexists(folder / ASIDE):
        os.rename(folder / OLD, folder / ASIDE)


def set_aside(folder: Path) -> None:
    """The files of the folder go aside, what lay there becomes OLD."""
    _leave(folder)
    if os.path.lexists(folder / ASIDE):
        delete_folder(folder / OLD)
        os.rename(folder / ASIDE, folder / OLD)
    os.rename(folder / LEAVING, folder / ASIDE)
    sync_folder(folder)


def swap(folder: Path) -> None:
    """What lies aside comes back, and what is here goes there."""
    _leave(folder)
    os.rename(folder / ASIDE, folder / COMING)
    sync_folder(folder)
    _come_back(folder)


def adopt(folder: Path) -> None:
    """What lies aside comes back; what is here has no pages and is deleted."""
    delete_files(folder)
    os.rename(folder / ASIDE, folder / COMING)
    sync_folder(folder)
    _come_back(folder)


def _leave(folder: Path) -> None:
    os.mkdir(folder / LEAVING, 0o700)
    _move_all(folder, folder / LEAVING)


def _come_back(folder: Path) -> None:
    _move_all(folder / COMING, folder)
    if os.path.lexists(folder / LEAVING):  # alone it would be taken back
        os.rename(folder / LEAVING, folder / ASIDE)
    os.rmdir(folder / COMING)
    sync_folder(folder)


def _move_all(source: Path, target: Path) -> None:
    for name in files_of(source):
        os.rename(source / name, target / name)
    sync_folder(target)
    sync_folder(source)
