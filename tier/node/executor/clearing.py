"""What a node has to do to L4 so that cleared pages are gone from it, tried again until the disk has done it.

It works on the writer's thread, between the mover's other orders. A clear is unfinished in the folder's ClearFile from
before its first order until all records are dropped, all slots wiped and all of that is synced.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable

from kvtier.tier.pages.clear_epochs import Tenant
from kvtier.tier.pages.page import PageKey, TierName
from kvtier.tier.protocol.events import PageId
from kvtier.tier.stores.base import Place, Uncleared
from kvtier.tier.stores.ssd.clear_file import ClearFile
from kvtier.tier.stores.ssd.store import SsdTier


class Clearing:
    """Owned by the mover's writer. `note` takes a line for the operator; of an error that lasts there is one."""

    def __init__(self, ssd: SsdTier, file: ClearFile, note: Callable[[str], None]) -> None:
        self._ssd, self._file, self._note = ssd, file, note
        self._is_saved = True
        # What the disk has refused so far; bounded by the records and slots there are.
        self._undropped: dict[PageId, None] = {}
        self._unwiped: dict[Place, None] = {}
        self._unforgotten: dict[Tenant, None] = {}
        self._ended: dict[Tenant, None] = {}  # clears whose orders have all been given
        self._failing: dict[str, Uncleared] = {}  # by what was tried

    def begin(self, clears: Iterable[tuple[Tenant, int]]) -> None:
        """Clears begin, or go on."""
        for tenant, number in clears:
            self._ended.pop(tenant, None)
            is_news = number > 0 and bool(self._file.clears.behind([(tenant or b"", number)]))
            if is_news or tenant not in self._file.unfinished:
                self._file.begin(tenant, number)
                self._is_saved = False
        if not self._is_saved:
            self._save()

    def with_undropped(self, drops: Iterable[PageId]) -> dict[PageId, None]:
        """The records to drop in the next commit: these, and those that an earlier commit did not drop."""
        return {**self._undropped, **dict.fromkeys(drops)}

    def dropped(self) -> None:
        """The commit of `with_undropped` is done."""
        self._undropped = {}

    def not_dropped(self, drops: Iterable[PageId]) -> None:
        """It failed."""
        self._undropped.update(dict.fromkeys(drops))

    def wipe(self, places: Iterable[Place]) -> None:
        """Overwrite slots whose records are dropped."""
        self._unwiped.update(dict.fromkeys(places))
        self._try("wiping slots", self._wipe)

    def written(self, place: Place) -> None:
        """Another page lies in a slot: what was there is overwritten."""
        self._unwiped.pop(place, None)

    def forget(self, tenant: Tenant) -> None:
        """All orders of a clear have been given; this is the last one."""
        self._unforgotten[tenant] = None
        self._try("clearing a tenant", self._forget)
        self._ended[tenant] = None

    def settle(self) -> tuple[Uncleared, ...]:
        """Do all that is left and sync; what the disk still refuses."""
        self._try("dropping records", self._drop)
        self._try("wiping slots", self._wipe)
        self._try("clearing a tenant", self._forget)
        self._try("syncing", self._ssd.sync)
        left = tuple(self._failing.values())
        if not left:
            for tenant in self._ended:
                self._file.unfinished.pop(tenant, None)
                self._is_saved = False
            self._ended = {}
        if not self._is_saved:
            self._save()
        return left

    def _save(self) -> None:
        """Where this fails the clear goes on, and is done once more by whatever uses the folder next."""
        try:
            self._file.save()
            self._is_saved = True
        except OSError as error:
            self._note(f"L4's record of clears can't be written: {error}")

    def _drop(self) -> None:
        if self._undropped:
            self._ssd.commit((), [(PageKey(key), variant) for key, variant in self._undropped])
            self._undropped = {}

    def _wipe(self) -> None:
        for place in list(self._unwiped):
            self._ssd.wipe(place)
            del self._unwiped[place]

    def _forget(self) -> None:
        for tenant in list(self._unforgotten):
            self._ssd.forget(tenant)
            del self._unforgotten[tenant]

    def _try(self, what: str, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            if what not in self._failing:
                self._note(f"{what} in L4 failed, and is tried again: {error}")
            name = errno.errorcode.get(error.errno or 0, "")
            self._failing[what] = Uncleared(TierName.SSD, name, f"{what} in L4 failed: {error}")
        else:
            self._failing.pop(what, None)
