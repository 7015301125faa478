"""A worker's connection to its node's cache: connects and reconnects in the background, keeps the stock of L3 slots.

Without a connection the worker goes on with L1 alone.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kvtier.tier.l1.arena import ArenaShare
from kvtier.tier.pages.page import slot_bytes
from kvtier.tier.protocol.ipc import NodeClient, NodeRefused
from kvtier.tier.protocol.messages import Grant, Hello, ReturnSlots, ToNode, ToWorker, WantSlots

log = logging.getLogger(__name__)

RETRY_FIRST_S, RETRY_LAST_S = 0.05, 2.0
STOCK_SHARE = 8  # a worker keeps at most 1/8 of the slab in stock


@dataclass(frozen=True, slots=True)
class Connected:
    """The node answered connection `number`. `lifeline`: where it may lend the arena, the read end of that pipe."""

    number: int
    client: NodeClient
    lifeline: int | None = None

    def close(self) -> None:
        """End a connection that nothing has taken."""
        self.client.close()
        if self.lifeline is not None:
            os.close(self.lifeline)


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

    `number` counts connections: what an earlier one granted or leased is void. There is a stock of slots, at most
    `stock`, for each size of page that `hello` names; all stocks together take at most 1/8 of the slab. `pin_slab`
    registers the slab with CUDA before the connection counts: for a worker whose L1 lies on a GPU.
    """

    def __init__(
        self,
        socket_path: str | None,
        hello: Hello,
        stock: int,
        post: Callable[[LinkEvent], None],
        *,
        pin_slab: bool = False,
        share: ArenaShare | None = None,
        follow: Callable[[NodeClient | None], None] = lambda client: None,
    ) -> None:
        """`share` is what peers open the arena by, where `hello` lends. `follow` is told of each connection, before any
        of its slots is used, and by None that it is to end, once none is.
        """
        self._socket_path = socket_path
        self._pin_slab = pin_slab
        self._share = share
        self._follow = follow
        self._hello = hello
        self._max_stock = stock
        self._post = post
        self._client: NodeClient | None = None
        self._stock: dict[int, deque[Grant]] = {size: deque() for size in hello.payloads.values()}
        self._targets = dict.fromkeys(self._stock, 0)
        self._asked: set[int] = set()  # sizes for which the node owes an answer
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

    def can_save(self, payload_bytes: int) -> bool:
        """The node is there and has an L3 that pages of this size fit in."""
        return self._targets[payload_bytes] > 0

    @property
    def is_configured(self) -> bool:
        """There is, or will be, a node to save pages to."""
        return self._socket_path is not None

    def take_arena_fds(self, lender: str) -> list[int]:
        """The descriptors that came with a peer's Arena; the caller's from now on."""
        return [] if self._client is None else self._client.take_arena_fds(lender)

    def free_slots(self, payload_bytes: int) -> int:
        """Slots in stock for pages of this size."""
        return len(self._stock[payload_bytes])

    def stock(self) -> dict[int, int]:
        """Slots in stock, by bytes of the pages that they are for."""
        return {size: len(stock) for size, stock in self._stock.items()}

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
            event.close()
            if event.number == self.number:
                self.start()
            return False
        self._client = event.client
        self._follow(event.client)
        slab_bytes = event.client.welcome.slab_bytes
        for size in self._targets:
            slots = slab_bytes // slot_bytes(size)
            self._targets[size] = min(self._max_stock, slots // (STOCK_SHARE * len(self._targets)))
            self._targets[size] = self._targets[size] or min(1, slots)
        self.refill()
        return True

    def lose_connection(self, number: int) -> bool:
        """A connection broke: forget its slots and reconnect. False when it was over before."""
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
        return self._client.slot(grant)

    def take_slot(self, payload_bytes: int) -> Grant | None:
        """A slot of the stock for pages of this size."""
        stock = self._stock[payload_bytes]
        return stock.popleft() if stock else None

    def granted(self, grants: list[Grant]) -> None:
        """The node answered `refill` for one size."""
        for grant in grants:
            self._asked.discard(grant.payload_bytes)
            self._stock[grant.payload_bytes].append(grant)

    def refill(self) -> None:
        """Ask for slots of each size whose stock is half used up. The node answers when it has some."""
        if not self.is_up:
            return
        for size, stock in self._stock.items():
            target = self._targets[size]
            if target and size not in self._asked and len(stock) <= target // 2:
                self._asked.add(size)
                self.send(WantSlots(target - len(stock), size))

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
        if any(self._stock.values()):
            self.send(ReturnSlots([grant for stock in self._stock.values() for grant in stock]))
        self._drop_client()

    def _drop_client(self) -> None:
        client, self._client = self._client, None
        for stock in self._stock.values():
            stock.clear()
        self._targets = dict.fromkeys(self._stock, 0)
        self._asked.clear()
        if client is not None:
            self._follow(None)
            client.close()

    def _connect(self, number: int, socket_path: str) -> None:
        """Try until the node answers, refuses, or the link closes. Runs on a thread of its own."""
        # An incarnation of its own per connection: the node fences what an earlier one was granted.
        hello = msgspec.structs.replace(self._hello, incarnation=f"{self._hello.incarnation}.{number}")
        wait_s = RETRY_FIRST_S
        while not self._closing.is_set():
            is_posted = threading.Event()  # what the node says at once is heard after Connected
            try:
                client, lifeline = self._say_hello(socket_path, hello, number, is_posted)
            except NodeRefused as error:
                self._post(ConnectionRefused(str(error)))
                return
            except OSError as error:
                log.debug("no cache node at %s: %s", socket_path, error)
                self._closing.wait(wait_s)
                wait_s = min(2 * wait_s, RETRY_LAST_S)
                continue
            if self._pin_slab:
                _pin(client)
            self._post(Connected(number, client, lifeline))
            is_posted.set()
            return

    def _say_hello(
        self, socket_path: str, hello: Hello, number: int, is_posted: threading.Event
    ) -> tuple[NodeClient, int | None]:
        """The connection; where the worker lends, the end of its lifeline that stays here."""

        def hear(message: ToWorker) -> None:
            is_posted.wait()
            self._post(NodeMessage(number, message))

        lifeline: int | None = None
        arena_fds: tuple[int, ...] = ()
        if self._share is not None:
            lifeline, held = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            arena_fds = (held,) if self._share.fd is None else (held, self._share.fd)
        try:
            client = NodeClient.connect(
                socket_path,
                hello,
                hear,
                lambda: self._post(ConnectionLost(number)),
                arena_fds=arena_fds,
            )
        except BaseException:
            if lifeline is not None:
                os.close(lifeline)
            raise
        finally:
            for held in arena_fds[:1]:
                os.close(held)
        return client, lifeline


def _pin(client: NodeClient) -> None:
    """Before the first copy: pinning takes seconds, and until Connected is posted no slot of the slab is in use."""
    if client.slab is None:
        return
    try:
        client.slab.register_pinned()
    except RuntimeError as error:
        log.warning("L3 stays unpinned, so the driver stages its copies: %s", error)
