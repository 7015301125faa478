"""A rank of a tensor parallel group other than the leader: applies the plan, decides nothing.

`python -m kvtier.workers.parallel.rank FD`, started by the leader, whose end of the socket FD says when to end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from kvtier.kernels.memory import raise_malloc_thresholds
from kvtier.tier.pages.page import HEADER_BYTES, PageFormat
from kvtier.tier.protocol.ipc import Garbage, MessageReader, frame
from kvtier.tier.stores.base import Place
from kvtier.tier.stores.host import HostTier
from kvtier.workers.models.shards.collective import Collective
from kvtier.workers.models.shards.share import Share
from kvtier.workers.parallel.pages import RankPages
from kvtier.workers.parallel.plan import (
    Begin,
    CloseSlab,
    Convert,
    CopyHead,
    CopyIn,
    CopyOut,
    Done,
    Failed,
    Forward,
    FromRank,
    GroupBroken,
    Joined,
    Move,
    OpenSlab,
    Order,
    Ready,
    SlotPage,
    Step,
    Stop,
    ToRank,
    batch_of,
)
from kvtier.workers.runner.runner import Runner, load_runner

log = logging.getLogger(__name__)

CHUNK_BYTES = 256 * 1024
COPY_THREADS = 2
FDS = 2  # that come with OpenSlab: the slab's, and the connection's


class Mailbox:
    """The socket to the leader: a reader thread takes steps off it, so that its end is seen whatever the rank does.

    `on_lost` is called there when the leader is gone. Of steps at most MAX_UNANSWERED wait, since the leader waits then.
    """

    def __init__(self, connection: socket.socket, on_lost: Callable[[], None]) -> None:
        self._socket = connection
        self._on_lost = on_lost
        self._came: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._fds: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._sending = threading.Lock()  # the copy threads answer too
        self._is_closing = False
        self._thread = threading.Thread(target=self._read, name="plan-reader", daemon=True)
        self._thread.start()

    def take(self) -> object:
        """The next message. Raises GroupBroken when the leader is gone."""
        message = self._came.get()
        if message is None:
            raise GroupBroken("the leader is gone")
        return message

    def take_fd(self) -> int:
        """A descriptor that came with the message taken last."""
        return self._fds.get_nowait()

    def send(self, message: FromRank) -> None:
        """Answer; to a leader that is gone, nothing."""
        with self._sending, contextlib.suppress(OSError):
            self._socket.sendall(frame(message))

    def close(self) -> None:
        """Nothing is read or sent any more."""
        self._is_closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()
        while not self._fds.empty():
            os.close(self._fds.get())

    def _read(self) -> None:
        reader = MessageReader(ToRank)
        while True:
            try:
                chunk, fds, _, _ = socket.recv_fds(self._socket, CHUNK_BYTES, FDS, socket.MSG_CMSG_CLOEXEC)
                messages = reader.feed(chunk)
            except (OSError, Garbage) as error:
                log.error("the plan can't be read: %s", error)
                chunk, fds, messages = b"", [], []
            for fd in fds:
                self._fds.put(fd)
            for message in messages:
                self._came.put(message)
            if not chunk:
                self._came.put(None)
                if not self._is_closing:
                    self._on_lost()
                return


class _Slab:
    """The node's slab, as long as no step closes it. Its slots are the leader's to know.

    It isn't pinned: no GPU reads it, since the processor copies a rank's heads between slots and staging. The plan would
    wait for as long as touching all of it takes, and with the plan copies, their leases on slots, and the group's patience.
    """

    def __init__(self, slab_fd: int, connection_fd: int, nbytes: int) -> None:
        self._connection_fd = connection_fd
        try:
            self._tier = HostTier.attach(slab_fd, nbytes)
        finally:
            os.close(slab_fd)

    def payload(self, slot: int, nbytes: int) -> memoryview:
        """What lies in a slot behind its header. Raises IndexError for one that isn't in the slab."""
        return self._tier.slot(Place(0, slot), nbytes)[HEADER_BYTES : HEADER_BYTES + nbytes]

    def close(self) -> None:
        """First the memory, then the connection, by whose end the node knows."""
        self._tier.close()
        os.close(self._connection_fd)


class RankLoop:
    """Applies steps in their order. Copies between frames and slots run on threads: nothing behind them in the plan
    touches their frames before the leader has heard that they are over.
    """

    def __init__(self, mailbox: Mailbox, runner: Runner, pages: RankPages) -> None:
        self._mailbox = mailbox
        self._runner = runner
        self._pages = pages
        self._order = Order()
        self._slab: _Slab | None = None
        self._copies = ThreadPoolExecutor(COPY_THREADS, "rank-copy")

    def run(self) -> None:
        """Until the leader says Stop. Raises GroupBroken, or what a step raised."""
        try:
            while True:
                step = self._mailbox.take()
                assert isinstance(step, Step), f"{type(step).__name__} in the plan"
                self._order.next(step.number)
                if isinstance(step.body, Stop):
                    self._mailbox.send(Done(step.number))
                    return
                self._apply(step)
        finally:
            self._copies.shutdown()
            self._close_slab()

    def _apply(self, step: Step) -> None:
        match step.body:
            case Forward() as body:
                self._runner.forward(batch_of(body))
            case CopyHead(source, target, tokens, spec):
                self._pages.copy_head(source, target, tokens, spec)
            case Move(source, target, units):
                self._pages.move(source, target, units)
            case Convert() as body:
                self._runner.convert(
                    body.group,
                    np.array(body.sources, np.int32),
                    PageFormat(body.source_format),
                    np.array(body.targets, np.int32),
                    PageFormat(body.target_format),
                )
            case CopyIn() | CopyOut():
                self._copies.submit(self._copy, step.number, step.body)
                return
            case OpenSlab(nbytes):
                self._close_slab()
                slab_fd, connection_fd = self._mailbox.take_fd(), self._mailbox.take_fd()
                self._slab = _Slab(slab_fd, connection_fd, nbytes)
            case CloseSlab():
                self._close_slab()
            case Stop():
                raise AssertionError("Stop is the last step")
        self._mailbox.send(Done(step.number))

    def _copy(self, number: int, body: CopyIn | CopyOut) -> None:
        failed: dict[int, str] = {}
        for place, page in enumerate(body.pages):
            try:
                self._copy_page(page, is_in=isinstance(body, CopyIn))
            except Exception as error:  # whatever it is, the leader must hear that the page isn't copied
                log.exception("a page copy failed")
                failed[place] = f"{type(error).__name__}: {error}"
        self._mailbox.send(Done(number, failed))

    def _copy_page(self, page: SlotPage, *, is_in: bool) -> None:
        if self._slab is None:
            raise ValueError("no slab is open")
        payload = self._slab.payload(page.slot, self._pages.spec(page.spec).nbytes)
        if is_in:
            self._pages.copy_in(page.frame, payload, page.spec)
        else:
            self._pages.copy_out(page.frame, payload, page.spec, page.tokens)

    def _close_slab(self) -> None:
        slab, self._slab = self._slab, None
        if slab is not None:
            slab.close()


def serve(connection: socket.socket, on_lost: Callable[[], None]) -> None:
    """Be the rank that the leader's first frame says, until it says Stop or is gone."""
    mailbox = Mailbox(connection, on_lost)
    try:
        begin = mailbox.take()
        assert isinstance(begin, Begin), f"{type(begin).__name__} as first frame"
        mailbox.send(Joined())
        _serve(mailbox, begin)
    except GroupBroken as error:
        log.info("rank ends: %s", error)
    except Exception as error:  # whatever it is, the leader must hear that this rank can't go on
        log.exception("a rank failed")
        mailbox.send(Failed(f"{type(error).__name__}: {error}"))
    finally:
        mailbox.close()


def _serve(mailbox: Mailbox, begin: Begin) -> None:
    share = Share(begin.rank, begin.ranks)
    cache_dir = begin.options.get("cache_dir")
    options = {**begin.options, "cache_dir": None if cache_dir is None else Path(cache_dir)}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    collective = Collective(share, begin.store, device, begin.collective_s)
    runner = load_runner(begin.path, share=share, reduce=collective.sum, **options)
    try:
        mailbox.send(Ready(len(runner.arena), runner.root_fields()))
        RankLoop(
            mailbox, runner, RankPages(runner.arena, share, runner.groups, runner.whole_groups, runner.fences)
        ).run()
    finally:
        runner.close()


def main() -> None:
    """A rank's process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s rank: %(message)s")
    raise_malloc_thresholds()
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        # Without waiting for anything: a copy that goes on would write into slots that aren't the leader's any more
        # as soon as this process has let go of the connection.
        serve(connection, on_lost=lambda: os._exit(1))


if __name__ == "__main__":
    main()
