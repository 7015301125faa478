"""An exchange's connections to CacheNodes, its own node's and those on the same machine: leases, orders, the slab."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from math import inf
from queue import Empty, SimpleQueue

from kvtier.tier.pages.page import HEADER_BYTES, PACKED_ENVELOPE_BYTES, Envelope, PageCorrupt
from kvtier.tier.protocol.ipc import NodeClient, NodeRefused
from kvtier.tier.protocol.messages import (
    CancelFetch,
    Copied,
    Fetch,
    Grant,
    Hello,
    HostPage,
    Loaded,
    LoadFailed,
    Located,
    Missing,
    Release,
    ToNode,
    ToWorker,
)
from kvtier.tier.transport.frames import Ending, PagesRequest

log = logging.getLogger(__name__)

RETRY_FIRST_S, RETRY_LAST_S = 0.05, 2.0
CONNECT_TIMEOUT_S = 5.0
SAVE_WAIT_S = (
    0.75  # less than the shortest deadline of a Fetch, and than what a peer is given before it counts as slow
)

Order = Fetch | CancelFetch


class NodeGone(ConnectionError):
    """The connection to a CacheNode is over: its grants and leases are void, and its slab is not to be touched."""


class _Touching:
    """`with session.touching():`, once for every piece of a page: the same object each time, which costs nothing."""

    def __init__(self, session: NodeSession) -> None:
        self._session = session

    def __enter__(self) -> None:
        self._session.begin_touch()

    def __exit__(self, *error: object) -> None:
        self._session.end_touch()


class NodeSession:
    """One connection to a CacheNode. Any thread may use it until it is lost.

    The slab stays mapped while a thread is in `touching`; then the connection closes, which tells the node that nothing
    touches it any more. `number` tells the connections of one process apart.
    """

    def __init__(self, number: int, on_order: Callable[[NodeSession, Order], None]) -> None:
        self.number = number
        self.node_id = ""
        self.incarnation = ""  # of the node
        self.lost = threading.Event()
        self._on_order = on_order
        # Guards all below; held for no more than a dict or queue operation, and taken inside no other lock.
        self._lock = threading.Lock()
        self._client: NodeClient | None = None
        self._early: list[ToWorker] = []  # heard while `connect` had not returned
        self._readings: dict[str, Reading] = {}
        self._users = 0
        self._touch = _Touching(self)
        self._last_request = 0

    def connect(self, path: str, worker_id: str, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        """Say Hello. Raises ConnectionError; NodeRefused with the node's reason."""
        hello = Hello(worker_id, f"{secrets.token_hex(8)}.{self.number}", {}, {}, {}, role="exchange")
        client = NodeClient.connect(path, hello, self._hear, self.close, timeout_s=timeout_s)
        self.node_id, self.incarnation = client.welcome.node_id, client.welcome.incarnation
        with self._lock:
            self._client = client
            early, self._early = self._early, []
            for message in early:
                self._take(message)
        if client.slab is None:
            self.close()
            raise ConnectionError(f"node {self.node_id} has no L3 to exchange pages through")
        if self.lost.is_set():
            self._close_if_unused()
            raise NodeGone("the CacheNode went away")

    def touching(self) -> AbstractContextManager[None]:
        """The slab may be read and written inside. Raises NodeGone."""
        return self._touch

    def begin_touch(self) -> None:
        """What `touching` does first."""
        with self._lock:
            if self.lost.is_set():
                raise NodeGone(f"the cache of node {self.node_id} went away")
            self._users += 1

    def end_touch(self) -> None:
        """What `touching` does last."""
        with self._lock:
            self._users -= 1
            is_last = not self._users and self.lost.is_set()
        if is_last:
            self._close_if_unused()

    def slot(self, grant: Grant) -> memoryview:
        """A whole slot, header first. Inside `touching` only."""
        assert self._client is not None
        return self._client.slot(grant)

    def send(self, message: ToNode) -> None:
        """Tell the node, in order with other sends. Raises NodeGone."""
        client = self._client
        if client is None or self.lost.is_set():
            raise NodeGone(f"the cache of node {self.node_id} went away")
        try:
            client.send(message)
        except OSError as error:
            raise NodeGone(str(error)) from error

    def read(self, request: PagesRequest) -> Reading:
        """Ask the node for pages; `release` the reading at the end. Raises NodeGone."""
        with self._lock:
            self._last_request += 1
            reading = Reading(self, f"pages:{self._last_request}", request)
            self._readings[reading.request_id] = reading
        try:
            self.send(request.locate(reading.request_id))
        except NodeGone:
            self.forget(reading)
            raise
        return reading

    def forget(self, reading: Reading) -> None:
        """Nothing listens for this reading any more."""
        with self._lock:
            self._readings.pop(reading.request_id, None)

    def close(self) -> None:
        """Let go: all waits end with NodeGone, and the connection closes once nothing touches the slab. Idempotent."""
        with self._lock:
            self.lost.set()
            for reading in self._readings.values():
                reading.wake()
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        with self._lock:
            if self._users or not self.lost.is_set():
                return
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _hear(self, message: ToWorker) -> None:
        with self._lock:
            if self._client is None and not self.lost.is_set():
                self._early.append(message)
            else:
                self._take(message)

    def _take(self, message: ToWorker) -> None:
        match message:
            case Located() | Loaded() | LoadFailed():
                reading = self._readings.get(message.request_id)
                if reading is not None:
                    reading.hear(message)
            case Fetch() | CancelFetch():
                self._on_order(self, message)
            case _:
                log.warning(
                    "the cache of node %s says %s to an exchange", self.node_id, type(message).__name__
                )


class Reading:
    """The pages of one request as a node comes up with them, each leased until `copied` or `release`.

    What a worker there is to save first is waited for SAVE_WAIT_S at most, since it may be in a long step: it, and what is
    behind it, does not come then, which is no fault of the node.

    One thread uses it; `wake` may be called from any.
    """

    def __init__(self, session: NodeSession, request_id: str, request: PagesRequest) -> None:
        self.request_id = request_id
        self._session = session
        self._request = request
        self._queue: SimpleQueue[Located | Loaded | LoadFailed | None] = SimpleQueue()
        self._is_located = False
        self._loading: set[int] = set()
        self._saving: set[int] = set()  # of these
        self._saved_by = inf  # when these are waited for no more
        self._wanted = sum(not have for have in request.held)
        self._given = 0
        self._missing: Missing | None = None

    def hear(self, message: Located | Loaded | LoadFailed) -> None:
        """From the connection's thread."""
        self._queue.put(message)

    def wake(self) -> None:
        """Let a wait in `take` end now."""
        self._queue.put(None)

    def take(self, timeout_s: float) -> list[HostPage]:
        """Pages that came; none when they don't within `timeout_s`, or at `wake`. Raises NodeGone."""
        if self._saving:
            timeout_s = min(timeout_s, self._saved_by - time.monotonic())
        try:
            message = self._queue.get(timeout=timeout_s) if timeout_s > 0 else self._queue.get_nowait()
        except Empty:
            self._end_saving()
            return []
        if self._session.lost.is_set():
            raise NodeGone(f"the cache of node {self._session.node_id} went away")
        match message:
            case None:
                return []
            case Located():
                self._is_located = True
                self._loading = {page for _, page in message.loading}
                self._saving = {page for _, page in message.saving}
                self._saved_by = time.monotonic() + SAVE_WAIT_S
                self._missing = message.missing
                return self._fitting(message.host)
            case Loaded():
                came = {page.page[1] for page in message.pages}
                self._loading -= came
                self._saving -= came
                return self._fitting(message.pages)
            case LoadFailed():
                self._end_at(message.missing)
                return []

    @property
    def ending(self) -> Ending | None:
        """Why no more pages come; None while more may."""
        if not self._is_located or self._loading:
            return None
        if self._given >= self._wanted:
            return Ending()
        if self._missing is not None:
            return Ending(self._missing.reason, self._missing.detail)
        return Ending(
            "load_failed", f"node {self._session.node_id} has pages of another size, or in another place"
        )

    def _end_saving(self) -> None:
        """Give up what is saved too late."""
        if self._saving and time.monotonic() >= self._saved_by:
            self._end_at(
                Missing(min(self._saving), "unsaved", "only a worker there may have it, and it is busy")
            )

    def _end_at(self, missing: Missing) -> None:
        """A page won't come, nor any behind it."""
        self._loading = {page for page in self._loading if page < missing.page}
        self._saving = {page for page in self._saving if page < missing.page}
        if self._missing is None or missing.page < self._missing.page:
            self._missing = missing

    def copied(self, pages: list[HostPage], nbytes: int, seconds: float, corrupt: list[HostPage]) -> None:
        """These pages are no longer needed in L3. Raises NodeGone."""
        refs, bad = [page.page for page in pages], [page.page for page in corrupt]
        self._session.send(Copied(self.request_id, refs, nbytes, seconds, bad))

    def release(self) -> None:
        """End all leases and loads."""
        self._session.forget(self)
        try:
            self._session.send(Release(self.request_id))
        except NodeGone:
            pass  # they ended with the connection

    def _fitting(self, pages: list[HostPage]) -> list[HostPage]:
        """Those that are as asked for; leases of others end with `release`."""
        request = self._request
        keys, first = request.keys, request.first_page
        kind = request.variant, request.spec_digest, request.payload_bytes
        found = []
        for page in pages:
            chain, number = page.page
            if chain != 0 or not first <= number < first + len(keys) or page.key != keys[number - first]:
                continue
            if (page.variant, page.spec_digest, page.grant.payload_bytes) == kind:
                found.append(page)
        self._given += len(found)
        return found


def is_damaged(page: HostPage, slot: memoryview) -> bool:
    """Whether a leased slot holds something else than its node says: envelope or payload, as a worker's load would find."""
    try:
        found = Envelope.unpack(slot[:PACKED_ENVELOPE_BYTES])
        found.verify(slot[HEADER_BYTES : HEADER_BYTES + page.grant.payload_bytes])
    except (PageCorrupt, UnicodeDecodeError):
        return True
    said = page.key, page.variant, page.spec_digest, page.checksum, page.tokens
    return (found.key, found.variant, found.spec_digest, found.checksum, found.tokens) != said


def run_or_exit(run: Callable[[], None]) -> None:
    """Run what a process can't do without; its fault ends the process, and its supervisor restarts it."""
    is_well = False
    try:
        run()
        is_well = True
    finally:
        if not is_well:
            log.critical("the exchange ends: it is to be restarted", exc_info=True)  # noqa: LOG014
            logging.shutdown()
            os._exit(1)


class NodeLink:
    """Keeps an exchange connected to its own CacheNode, on a thread of its own.

    `on_lost` is called with the number of each connection that is over, after its last order.
    """

    def __init__(
        self,
        socket_path: str,
        worker_id: str,
        on_order: Callable[[NodeSession, Order], None],
        on_lost: Callable[[int], None],
        note: Callable[[str], None],
    ) -> None:
        self._socket_path = socket_path
        self._worker_id = worker_id
        self._on_order = on_order
        self._on_lost = on_lost
        self._note = note
        self._closing = threading.Event()
        self._session: NodeSession | None = None
        self._thread = threading.Thread(
            target=lambda: run_or_exit(self._run), name="exchange-node", daemon=True
        )

    @property
    def is_alive(self) -> bool:
        """It reconnects when it must."""
        return self._thread.is_alive()

    @property
    def session(self) -> NodeSession | None:
        """The connection that stands; None while there is none."""
        session = self._session
        return None if session is None or session.lost.is_set() else session

    @property
    def socket_path(self) -> str:
        """Of the CacheNode."""
        return self._socket_path

    def start(self) -> None:
        """Connect in the background."""
        self._thread.start()

    def close(self) -> None:
        """Let go of the node for good."""
        self._closing.set()
        session = self._session
        if session is not None:
            session.close()
        self._thread.join()

    def _run(self) -> None:
        number, wait_s = 0, RETRY_FIRST_S
        said = ""  # of an outage, so that it is one line
        while not self._closing.is_set():
            number += 1
            session = NodeSession(number, self._on_order)
            try:
                session.connect(self._socket_path, self._worker_id)
            except OSError as error:
                why = f"refused: {error}" if isinstance(error, NodeRefused) else str(error)
                if why != said:
                    said = why
                    self._note(f"no cache at {self._socket_path} to exchange pages for: {why}")
                self._on_lost(number)
                self._closing.wait(wait_s)
                wait_s = min(2 * wait_s, RETRY_LAST_S)
                continue
            wait_s, said = RETRY_FIRST_S, ""
            self._note(f"connected to the cache of node {session.node_id}")
            self._session = session
            if self._closing.is_set():
                session.close()
            session.lost.wait()
            self._session = None
            self._on_lost(number)
            if not self._closing.is_set():
                self._note(
                    f"the cache of node {session.node_id} went away; pages are exchanged again when it is back"
                )
