"""Splits a message with long lists into several that say the same, each well below ipc.MAX_FRAME_BYTES. Pure.

`FIELDS` names the lists of every message and how each is bounded; a test holds it against tier/protocol/messages.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from kvtier.tier.protocol.messages import (
    Chain,
    Copied,
    Fetched,
    FramesGranted,
    Granted,
    Lend,
    Loaded,
    Located,
    RecallFrames,
    Reclaim,
    Reclaimed,
    ReturnFrames,
    ReturnSlots,
    SavePages,
    Stored,
    StoredInPeer,
    ToNode,
    ToWorker,
    Unsaved,
)

MAX_ITEMS = 8192  # of a list that is split; an item takes at most some 400 bytes

# The one list of these messages; a receiver treats each part as it would a message of its own.
FIELDS: dict[type[msgspec.Struct], str] = {
    ReturnSlots: "grants",
    Stored: "pages",
    Unsaved: "pages",
    Lend: "frames",
    Reclaim: "offsets",
    ReturnFrames: "grants",
    StoredInPeer: "pages",
    Granted: "grants",
    SavePages: "pages",
    FramesGranted: "grants",
    RecallFrames: "grants",
    Reclaimed: "offsets",
}


def parts(message: ToNode | ToWorker) -> Iterable[ToNode | ToWorker]:
    """The message, or several in its place that are to be sent in this order."""
    field = FIELDS.get(type(message))
    if field is not None:
        items = getattr(message, field)
        if len(items) <= MAX_ITEMS:
            return (message,)
        return [msgspec.structs.replace(message, **{field: part}) for part in _cut(items)]
    split = _SPLITS.get(type(message))
    return (message,) if split is None else split(message)


def cut_chains(chains: list[Chain], max_keys: int) -> list[Chain]:
    """A Locate's chains with one key more each than a node looks at, by which it sees that there are more."""
    most = max_keys // len(chains) + 1
    if len(chains[0].keys) <= most:
        return chains
    return [
        msgspec.structs.replace(
            chain, keys=chain.keys[:most], other_keys=chain.other_keys[:most], held=chain.held[:most]
        )
        for chain in chains
    ]


def _cut(items: list[Any]) -> list[list[Any]]:
    return [items[at : at + MAX_ITEMS] for at in range(0, len(items), MAX_ITEMS)]


def _copied(message: Copied) -> Iterable[Copied]:
    """Bytes and seconds are shared out by pages."""
    total = len(message.pages)
    if total <= MAX_ITEMS:
        return (message,)
    corrupt, done = set(message.corrupt), 0
    found: list[Copied] = []
    for pages in _cut(message.pages):
        before, done = done, done + len(pages)
        found.append(
            Copied(
                message.request_id,
                pages,
                message.nbytes * done // total - message.nbytes * before // total,
                message.seconds * len(pages) / total,
                [ref for ref in pages if ref in corrupt],
            )
        )
    return found


def _fetched(message: Fetched) -> Iterable[Fetched]:
    """What it measured, and whether it is over, is said with the last part."""
    if len(message.failed) <= MAX_ITEMS:
        return (message,)
    *first, last = _cut(message.failed)
    early = [
        msgspec.structs.replace(message, failed=part, nbytes=0, seconds=0.0, is_over=False) for part in first
    ]
    return [*early, msgspec.structs.replace(message, failed=last)]


def _located(message: Located) -> Iterable[Located | Loaded]:
    """Pages that are there, but in no message yet, are said to be loading; then they are Loaded."""
    if len(message.host) <= MAX_ITEMS and len(message.peer) <= MAX_ITEMS:
        return (message,)
    host, peer = message.host[MAX_ITEMS:], message.peer[MAX_ITEMS:]
    later = [page.page for page in host] + [page.page for page in peer]
    first = msgspec.structs.replace(
        message,
        host=message.host[:MAX_ITEMS],
        peer=message.peer[:MAX_ITEMS],
        loading=message.loading + later,
    )
    return [first, *_loaded(Loaded(message.request_id, host, peer))]


def _loaded(message: Loaded) -> Iterable[Loaded]:
    if len(message.pages) <= MAX_ITEMS and len(message.peer) <= MAX_ITEMS:
        return (message,)
    return [
        *(Loaded(message.request_id, part) for part in _cut(message.pages)),
        *(Loaded(message.request_id, [], part) for part in _cut(message.peer)),
    ]


_SPLITS: dict[type[msgspec.Struct], Callable[[Any], Iterable[Any]]] = {
    Copied: _copied,
    Fetched: _fetched,
    Located: _located,
    Loaded: _loaded,
}
