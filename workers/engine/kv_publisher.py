"""Sends a feed's batches to the directory from a thread of its own, which never keeps the owner of the pages waiting."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvtier.tier.pages.page import TierName
from kvtier.tier.protocol.kv_events import SOON_KEYS, Batch, Feed, Reply

log = logging.getLogger(__name__)

TICK_S = 0.05  # between two looks at what was noted: below the feed's patience
FIRST_RETRY_S = 0.1
LAST_RETRY_S = 2.0
MAX_NOTED = 1 << 18  # keys noted while the thread waits for an answer
CLOSE_S = 5.0

Holds = Mapping[TierName, Sequence[bytes]]  # keys of the pages in each tier


class PublishError(Exception):
    """The directory, or the owner of the pages, doesn't answer; the message says why. It is tried again."""


class Publisher:
    """`note` may be called from any thread, at any time; it waits for nothing but another `note`.

    `send` gives the directory a batch and returns its answer; `snapshot` returns the keys that each tier has, and what
    changes after it is noted. Both raise PublishError. What couldn't be sent is sent later, or a snapshot instead of it. Any
    other exception is a fault: it is logged with its traceback, and a snapshot is sent later.
    """

    def __init__(
        self, feed: Feed, send: Callable[[Batch], Reply], snapshot: Callable[[], Holds], name: str = ""
    ) -> None:
        self.outages = 0
        self._feed = feed  # the thread's
        self._send = send
        self._snapshot = snapshot
        # Guards what was noted: the owner appends, the thread takes all of it.
        self._lock = threading.Lock()
        self._noted: list[tuple[TierName, Sequence[bytes], Sequence[bytes]]] = []
        self._num_noted = 0
        self._overflowed = False
        self._wake = threading.Event()  # many keys wait, or it is closed
        self._is_closed = threading.Event()
        self._retry_s = 0.0  # 0: all is well
        self._thread = threading.Thread(target=self._run, name=f"publisher-{name}", daemon=True)

    def start(self) -> None:
        """Begin with a snapshot. What changes after this must be noted."""
        self._thread.start()

    def note(self, tier: TierName, came: Iterable[bytes], left: Iterable[bytes]) -> None:
        """Pages came to a tier and left it, by their keys."""
        here, gone = tuple(came), tuple(left)
        with self._lock:
            self._num_noted += len(here) + len(gone)
            if self._num_noted > MAX_NOTED:
                self._noted.clear()
                self._num_noted, self._overflowed = 0, True
            else:
                self._noted.append((tier, here, gone))
            is_soon = self._num_noted >= SOON_KEYS
        if is_soon:
            self._wake.set()

    def close(self) -> None:
        """Send nothing more; the directory forgets what it isn't told of. Not from what `snapshot` waits for. Idempotent."""
        self._is_closed.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._is_closed.is_set():
            try:
                while self._turn():
                    self._is_up()
            except PublishError as error:
                self._is_down(str(error))
                self._is_closed.wait(self._retry_s)
            except Exception as error:  # noqa: BLE001  of hints only: the thread goes on, with a snapshot
                self._feed.lose()
                self._is_down(f"{error!r}", exc_info=True)
                self._is_closed.wait(self._retry_s)
            else:
                self._wake.wait(TICK_S)
                self._wake.clear()

    def _turn(self) -> bool:
        """Send one batch; False when there is none to send."""
        self._take_noted()
        if self._feed.snapshot_needed:
            self._feed.announce_snapshot()
            self._feed.begin_snapshot(self._ask_owner())
        batch = self._feed.take(time.monotonic())
        if batch is None or self._is_closed.is_set():
            return False
        self._feed.answered(self._send(batch))
        return True

    def _ask_owner(self) -> Holds:
        try:
            return self._snapshot()
        except PublishError:
            self._feed.lose()  # the announcement is of no use any more
            raise

    def _take_noted(self) -> None:
        with self._lock:
            noted, self._noted = self._noted, []
            overflowed, self._overflowed = self._overflowed, False
            self._num_noted = 0
        if overflowed:
            self._feed.lose()
        for tier, came, left in noted:
            self._feed.note(tier, came, left)

    def _is_up(self) -> None:
        if self._retry_s:
            log.warning("the directory answers again")
        self._retry_s = 0.0

    def _is_down(self, why: str, *, exc_info: bool = False) -> None:
        if not self._retry_s:
            self.outages += 1
            name = self._feed.source.name
            log.warning("the directory isn't told what %s holds: %s", name, why, exc_info=exc_info)
        self._retry_s = min(LAST_RETRY_S, 2 * self._retry_s or FIRST_RETRY_S)


class Outlet:
    """Where changes go: to a publisher, once there is one. Until then nothing hears of them, and its snapshot has them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # one calls `connect` or `close` at a time
        self._publisher: Publisher | None = None

    def __call__(self, tier: TierName, came: Iterable[bytes], left: Iterable[bytes]) -> None:
        """Note changes. From the owner's loop."""
        publisher = self._publisher
        if publisher is not None:
            publisher.note(tier, came, left)

    def connect(self, publisher: Publisher) -> None:
        """From now on changes go there: it is started, once the one before is closed."""
        with self._lock:
            if self._publisher is not None:
                self._publisher.close()  # what it sent after the new one's snapshot would take the place of that
            self._publisher = publisher
            publisher.start()

    def close(self) -> None:
        """Let the publisher go. Idempotent."""
        with self._lock:
            if self._publisher is not None:
                self._publisher.close()
            self._publisher = None
