"""Tells the cluster's directory which pages something holds: changes in numbered batches, or all of them again. Pure.

The directory may forget everything at any time, and a batch may be lost, come twice or late. Batches are numbered, so it
notices, and asks for a snapshot: all keys in parts, with the changes meanwhile between them. What the directory believes
is a hint, and costs a miss at most where it is wrong.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from kvtier.tier.pages.page import TierName

KEY_BYTES = 8  # of a page's key, its first ones: what the directory knows it by
MAX_KEYS = 4096  # in one batch
SOON_KEYS = 512  # waiting, that are sent at once
PATIENCE_S = 0.1  # of fewer
HEARTBEAT_S = 1.0
MAX_PENDING = 1 << 18  # keys

Reply = Literal["ok", "snapshot"]


@dataclass(frozen=True, slots=True)
class Source:
    """Who tells: one life of a worker about its L1, or of a node's cache about its tiers.

    `worker_id` is "" for a node. `address` is where others fetch its pages: the HOST:PORT of its node's exchange.
    """

    name: str
    incarnation: str
    node_id: str
    worker_id: str
    address: str


@dataclass(frozen=True, slots=True)
class Change:
    """Pages that came to a tier and that left it: the prefixes of their keys, KEY_BYTES each, one behind the other."""

    tier: TierName
    came: bytes
    left: bytes


@dataclass(frozen=True, slots=True)
class Batch:
    """What is told in one go; without changes it says that its source lives. `number` rises by 1 with each.

    A batch that `opens` begins a snapshot, one that `closes` ends it: what came in batches from that one to this one is
    all that the source has.
    """

    source: Source
    number: int
    changes: tuple[Change, ...]
    opens: bool = False
    closes: bool = False


class Feed:
    """Owned by the sender of its batches. At most `batch_keys` keys go into one.

    When more than `max_pending` would wait, they are forgotten, and a snapshot follows.

    It is "lost" until a snapshot is announced: nothing is noted meanwhile. It is then "asked" for until the keys come,
    and "sending" until all its parts are taken. Of what happened to a key before it is sent the last thing counts, so a
    change may be noted again: a key that came and left is told to have left, even where nothing was told that it came.
    """

    def __init__(
        self,
        source: Source,
        tiers: Iterable[TierName],
        max_pending: int = MAX_PENDING,
        *,
        batch_keys: int = MAX_KEYS,
    ) -> None:
        assert batch_keys >= 2, "a part of a snapshot takes one half of a batch"
        self.source = source
        self.snapshots = 0  # that have begun
        self._tiers = tuple(tiers)
        self._max_pending = max_pending
        self._batch_keys = batch_keys
        self._state: Literal["lost", "asked", "sending", "live"] = "lost"
        # Whether a key has come or left, not sent yet.
        self._pending: dict[TierName, dict[bytes, bool]] = {tier: {} for tier in self._tiers}
        self._parts: deque[tuple[TierName, bytes]] = deque()  # of the snapshot, not sent yet
        # Keys that left since the snapshot was taken: no part of it brings them back.
        self._gone: dict[TierName, set[bytes]] = {tier: set() for tier in self._tiers}
        self._number = 0  # of the next batch
        self._sent: Batch | None = None  # not answered yet
        self._opens = False
        self._due_s: float | None = None  # when few waiting keys go
        self._heartbeat_s = 0.0

    @property
    def snapshot_needed(self) -> bool:
        """A snapshot must be announced, taken and begun before anything is sent."""
        return self._state == "lost"

    @property
    def is_quiet(self) -> bool:
        """All that was noted is sent and answered."""
        return self._state == "live" and self._sent is None and not self._waiting()

    # ---- what happens --------------------------------------------------------------------------------------------

    def note(self, tier: TierName, came: Iterable[bytes], left: Iterable[bytes]) -> None:
        """Pages came to a tier and left it, by their keys."""
        if self._state == "lost":
            return
        pending, gone = self._pending[tier], self._gone[tier]
        is_sending = self._state == "sending"
        for has_come, keys in ((True, came), (False, left)):
            for key in keys:
                short = key[:KEY_BYTES]
                pending[short] = has_come
                if is_sending:
                    gone.discard(short) if has_come else gone.add(short)
        if self._waiting() + sum(map(len, self._gone.values())) > self._max_pending:
            self.lose()

    def lose(self) -> None:
        """Changes were missed, or not kept: what is sent next is a snapshot."""
        self._forget()
        self._state = "lost"

    def announce_snapshot(self) -> None:
        """From now on changes are kept: a snapshot that is taken after this may begin."""
        self._forget()
        self._state = "asked"

    def begin_snapshot(self, keys: Mapping[TierName, Iterable[bytes]]) -> None:
        """What each tier had at some time since the announcement. Changes noted since it are still noted.

        Does nothing where too much has changed meanwhile: `snapshot_needed` says so.
        """
        if self._state != "asked":
            return
        for tier in self._tiers:
            self._gone[tier] = {key for key, has_come in self._pending[tier].items() if not has_come}
            rest = iter(keys.get(tier, ()))
            while part := b"".join(key[:KEY_BYTES] for key in islice(rest, self._batch_keys // 2)):
                self._parts.append((tier, part))
        self._state, self._opens = "sending", True
        self.snapshots += 1

    def answered(self, reply: Reply) -> None:
        """The directory's answer to the batch that was taken last."""
        self._sent = None
        if reply == "snapshot":
            self.lose()

    # ---- what to send --------------------------------------------------------------------------------------------

    def take(self, now: float) -> Batch | None:
        """What to send now; the same again until it is answered. None: nothing yet."""
        if self._sent is None and self._is_due(now):
            self._sent = self._cut()
            self._due_s = now if self._waiting() else None
            self._heartbeat_s = now + HEARTBEAT_S
        return self._sent

    def _is_due(self, now: float) -> bool:
        if self._state in ("lost", "asked"):
            return False
        waiting = self._waiting()
        if waiting and self._due_s is None:
            self._due_s = now + PATIENCE_S
        return (
            self._state == "sending"
            or waiting >= SOON_KEYS
            or (self._due_s is not None and now >= self._due_s)
            or now >= self._heartbeat_s
        )

    def _cut(self) -> Batch:
        is_sending, opens = self._state == "sending", self._opens
        changes = self._cut_changes(self._batch_keys // 2 if is_sending else self._batch_keys)
        if is_sending and self._parts:
            changes.append(self._cut_part())
        closes = is_sending and not self._parts
        if closes:
            self._state = "live"
            self._gone = {tier: set() for tier in self._tiers}
        self._opens = False
        self._number += 1
        return Batch(self.source, self._number - 1, tuple(changes), opens, closes)

    def _cut_changes(self, room: int) -> list[Change]:
        changes = []
        for tier, pending in self._pending.items():
            keys = list(islice(pending.items(), room))
            for key, _ in keys:
                del pending[key]
            if keys:
                came = b"".join(key for key, has_come in keys if has_come)
                left = b"".join(key for key, has_come in keys if not has_come)
                changes.append(Change(tier, came, left))
            room -= len(keys)
        return changes

    def _cut_part(self) -> Change:
        tier, part = self._parts.popleft()
        gone = self._gone[tier]
        if gone:
            keys = (part[at : at + KEY_BYTES] for at in range(0, len(part), KEY_BYTES))
            part = b"".join(key for key in keys if key not in gone)
        return Change(tier, part, b"")

    def _waiting(self) -> int:
        return sum(map(len, self._pending.values()))

    def _forget(self) -> None:
        for tier in self._tiers:
            self._pending[tier].clear()
            self._gone[tier].clear()
        self._parts.clear()
        self._sent = None
        self._opens = False
