"""A worker's connection to its node's cache: connects and reconnects in the background, keeps the stock of L3 slots.

Without a connection the worker goes on with L1 alone.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kvtier.tier.ipc import NodeClient, NodeRefused
from kvtier.tier.messages import Grant, Hello, ReturnSlots, ToNode, ToWorker, WantSlots

log = logging.getLogger(__name__)

RETRY_FIRST_S, RETRY_LAST_S = 0.05, 2.0
STOCK_SHARE = 8  # a worker keeps at most 1/8 of the slab in stock


@dataclass(frozen=True, slots=True)
class Connected:
    """The node answered connection `number`."""

    number: int
    client: NodeClient


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """Connection `number` is over."""

    number: int


@dataclass(frozen=True, slots=True)
class ConnectionRefused:
    """The node will not serve this worker."""

    reason: str


@dataclass(frozen=True, slots=True)
class NodeMessage:
    """The node said something on connection `number`."""

    number: int
    message: ToWorker


LinkEvent = Connected | ConnectionLost | ConnectionRefused | NodeMessage


class NodeLink:
    """Owned by the step loop. Its threads only connect, and pass on what they hear, as events to `post`.

    `number` counts connections: what an earlier one granted or leased is void.
    """

    def __init__(
        self, socket_path: str | None, hello: Hello, stock: int, post: Callable[[LinkEvent], None]
    ) -> None:
        self._socket_path = socket_path
        self._hello = hello
        self._max_stock = stock
        self._post = post
        self._client: NodeClient | None = None
        self._stock: deque[Grant] = deque()
        self._target = 0
        self._has_asked = False
        self._lost: set[int] = (
            set()
        )  # connections that ended before they were taken; at most the one in the making
        self._closing = threading.Event()
        self._connector: threading.Thread | None = None
        self.number = 0

    @property
    def is_up(self) -> bool:
        """The node can be asked."""
        return self._client is not None

    @property
    def can_save(self) -> bool:
        """The node is there and has an L3 to save pages in."""
        return self._client is not None and self._target > 0

    @property
    def is_configured(self) -> bool:
        """There is, or will be, a node to save pages to."""
        return self._socket_path is not None

    @property
    def free_slots(self) -> int:
        """Slots in stock."""
        return len(self._stock)

    def start(self) -> None:
        """Connect in the background; Connected is posted when the node answers."""
        if self._socket_path is None or self._closing.is_set():
            return
        self.number += 1
        self._connector = threading.Thread(
            target=self._connect, args=(self.number, self._socket_path), name="node-connect", daemon=True
        )
        self._connector.start()

    def take_connection(self, event: Connected) -> bool:
        """A connection stands: from now on the node can be asked. False when it broke already."""
        if event.number != self.number or event.number in self._lost:
            self._lost.discard(event.number)
            event.client.close()
            if event.number == self.number:
                self.start()
            return False
        self._client = event.client
        welcome = event.client.welcome
        slots = welcome.slab_bytes // welcome.slot_bytes if welcome.slot_bytes else 0
        self._target = min(self._max_stock, slots // STOCK_SHARE) or min(1, slots)
        self.refill()
        return True

    def lose_connection(self, number: int) -> bool:
        """A connection broke: forget its slots and connect anew. False when it was over before."""
        if number != self.number:
            return False
        if self._client is None:
            self._lost.add(number)
            return False
        self._drop_client()
        self.start()
        return True

    def slot(self, grant: Grant) -> memoryview:
        """The whole slot: header and payload."""
        assert self._client is not None
        return self._client.slot(grant.slot)

    def take_slot(self) -> Grant | None:
        """A slot of the stock."""
        return self._stock.popleft() if self._stock else None

    def granted(self, grants: list[Grant]) -> None:
        """The node answered `refill`."""
        self._has_asked = False
        self._stock.extend(grants)

    def refill(self) -> None:
        """Ask for slots when half of the stock is used up. The node answers when it has some."""
        if self.is_up and not self._has_asked and len(self._stock) <= self._target // 2 and self._target:
            self._has_asked = True
            self.send(WantSlots(self._target - len(self._stock)))

    def send(self, message: ToNode) -> None:
        """Tell the node; what can't be told is void with the connection, whose end is posted."""
        if self._client is None:
            return
        try:
            self._client.send(message)
        except OSError as error:
            log.info("the cache node can't be reached: %s", error)

    def close(self) -> None:
        """Give the stock back and end the connection; nothing is posted afterwards."""
        self._closing.set()
        if self._connector is not None:
            self._connector.join()
        if self._stock:
            self.send(ReturnSlots(list(self._stock)))
        self._drop_client()

    def _drop_client(self) -> None:
        client, self._client = self._client, None
        self._stock.clear()
        self._has_asked = False
        if client is not None:
            client.close()

    def _connect(self, number: int, socket_path: str) -> None:
        """Try until the node answers, refuses, or the link closes. Runs on a thread of its own."""
        # An incarnation of its own per connection: the node fences what an earlier one was granted.
        hello = msgspec.structs.replace(self._hello, incarnation=f"{self._hello.incarnation}.{number}")
        wait_s = RETRY_FIRST_S
        while not self._closing.is_set():
            try:
                client = NodeClient.connect(
                    socket_path,
                    hello,
                    lambda message: self._post(NodeMessage(number, message)),
                    lambda: self._post(ConnectionLost(number)),
                )
            except NodeRefused as error:
                self._post(ConnectionRefused(str(error)))
                return
            except OSError as error:
                log.debug("no cache node at %s: %s", socket_path, error)
                self._closing.wait(wait_s)
                wait_s = min(2 * wait_s, RETRY_LAST_S)
                continue
            self._post(Connected(number, client))
            return
