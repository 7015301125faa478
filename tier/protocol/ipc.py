"""The Unix socket between a node's workers and its CacheNode: length-prefixed msgpack frames, and the slab's memfd.

A connection's end tells the node that the worker touches the slab no more: the worker's kernel closes it after the
process's last thread is gone, or the worker calls `NodeClient.close` when no copy is under way. So the node never
closes a worker's connection first; it says that it hears no more (half-close) and waits for the other half.
"""

from __future__ import annotations

import logging
import os
import select
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvtier.tier.protocol.events import FromWorker, WorkerGone, WorkerRef
from kvtier.tier.protocol.frames import FrameReader, pack_frame
from kvtier.tier.protocol.messages import Arena, Grant, Hello, Refused, ToNode, ToWorker, Welcome
from kvtier.tier.protocol.parts import parts
from kvtier.tier.protocol.rules import malformed
from kvtier.tier.stores.base import Place
from kvtier.tier.stores.host import HostTier

MAX_FRAME_BYTES = 16 * 2**20  # twice the longest message (tier/protocol/parts.py); anything longer is garbage
MAX_UNSENT_BYTES = 32 * 2**20  # a peer that lets so much pile up is not reading
MAX_CONNECTIONS = 256  # well below a process's usual 1,024 descriptors
HELLO_S = 10.0  # a connection that hasn't said Hello by then is dropped: NodeClient says it at once
MAX_STRANGERS = 64  # connections that haven't said it yet: for one more the oldest is dropped
MAX_PATH_BYTES = 107  # sun_path, without its zero
MAX_ARENAS = MAX_CONNECTIONS  # that a worker keeps descriptors of, until it opens them
ACCEPT_AGAIN_S = 1.0  # after the process had no descriptor or memory left for one more connection
ARENA_FDS = 2  # of one arena: its lifeline, and its memfd where it has one
_CHUNK_BYTES = 256 * 1024
_CHUNKS_PER_POLL = 16
_CLOEXEC = socket.MSG_CMSG_CLOEXEC
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid

Heard = FromWorker | WorkerGone

log = logging.getLogger(__name__)


class NodeRefused(ConnectionError):
    """The node can't serve this worker; the message says why."""


class Garbage(Exception):
    """What arrived is no frame of this protocol."""


class MessageReader:
    """Decodes the messages of a stream, checking the range of each field; holds at most one that isn't whole."""

    def __init__(self, kind: object) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._frames = FrameReader(MAX_FRAME_BYTES)

    def feed(self, chunk: bytes) -> list[object]:
        """The messages completed by `chunk`. Raises Garbage."""
        try:
            bodies = self._frames.feed(chunk)
        except ValueError as error:
            raise Garbage(str(error)) from error
        return [self._decoded(body) for body in bodies]

    def _decoded(self, body: bytes) -> object:
        try:
            message: object = self._decoder.decode(body)
        except (msgspec.MsgspecError, RecursionError) as error:  # the latter: of lists in lists in lists
            raise Garbage(f"a frame that is no message ({error})") from error
        wrong = malformed(message)
        if wrong is not None:
            raise Garbage(f"{type(message).__name__} with {wrong}")
        return message


def frame(message: msgspec.Struct) -> bytes:
    """A message as it goes over the wire. ValueError when it is too long to be taken."""
    return pack_frame(msgspec.msgpack.encode(message), MAX_FRAME_BYTES)


def _check_path(path: str | Path) -> str:
    name = os.fspath(path)
    if len(os.fsencode(name)) > MAX_PATH_BYTES:
        raise ValueError(f"socket path must have at most {MAX_PATH_BYTES} bytes, got {len(name)}: {name}")
    return name


# ---- the node's side -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Riders:
    at: int
    fds: list[int]
    is_own: bool  # to be closed once they are sent

    def close(self) -> None:
        if self.is_own:
            _close_all(self.fds)


@dataclass(slots=True, eq=False)
class _Connection:
    socket: socket.socket
    reader: MessageReader = field(default_factory=lambda: MessageReader(ToNode))
    ref: WorkerRef | None = None
    unsent: bytearray = field(default_factory=bytearray)
    # Descriptors to ride along with the byte of `unsent` at which their message begins; all but the slab's are its own.
    riders: deque[_Riders] = field(default_factory=deque)
    arena_fds: list[int] = field(default_factory=list)  # those that came with its Hello
    is_ending: bool = False  # heard no more; half-closed when all is sent
    is_half_closed: bool = False
    writes: bool = False  # registered for writability

    def clear_unsent(self) -> None:
        """Send nothing of what waits."""
        self.unsent.clear()
        while self.riders:
            self.riders.popleft().close()

    def close_fds(self) -> None:
        """Let all descriptors go."""
        self.clear_unsent()
        _close_all(self.arena_fds)


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())


def _receive(connection: _Connection) -> bytes:
    """The next bytes; before the Hello is whole, descriptors too."""
    if connection.ref is not None:
        return connection.socket.recv(_CHUNK_BYTES)
    room = ARENA_FDS - len(connection.arena_fds)
    chunk, fds, _, _ = socket.recv_fds(connection.socket, _CHUNK_BYTES, room, _CLOEXEC)
    connection.arena_fds += fds
    return chunk


def _send_some(connection: _Connection) -> None:
    """Send what the socket takes, up to the next message that descriptors ride along with."""
    riders, unsent = connection.riders, connection.unsent
    is_due = bool(riders) and riders[0].at == 0
    end = next((later.at for later in riders if later.at > 0), len(unsent))
    with memoryview(unsent) as view, view[:end] as part:
        if is_due:
            sent = socket.send_fds(connection.socket, [part], riders[0].fds)
        else:
            sent = connection.socket.send(part)
    if is_due:
        riders.popleft().close()
    del unsent[:sent]
    for later in riders:
        later.at -= sent


class NodeServer:
    """The listening socket and its connections. All methods but `wake` are for one thread, the node's loop.

    Bytes that are no frames, or no messages, end their connection and leave a line in `notes`. So does a worker
    that doesn't read: at most MAX_UNSENT_BYTES wait for it.
    """

    def __init__(self, path: str | Path, slab_fd: int | None) -> None:
        """Listen at `path`, in a folder that only this user enters. OSError when that can't be."""
        self.path = _check_path(path)
        self.notes: deque[str] = deque(maxlen=64)
        self.bad_messages = 0  # each ended its connection
        self._accepts_at: float | None = None  # while no connection is accepted: when the next one is
        self._slab_fd = slab_fd
        self._by_ref: dict[WorkerRef, _Connection] = {}
        self._lenders: dict[str, _Connection] = {}  # by incarnation
        self._connections: dict[_Connection, None] = {}
        self._strangers: dict[_Connection, float] = {}  # no Hello yet; when each is dropped, the oldest first
        self._to_flush: dict[_Connection, None] = {}
        self._heard: list[Heard] = []  # in the order in which it happened, of all connections
        folder = os.path.dirname(self.path) or "."
        os.makedirs(folder, mode=0o700, exist_ok=True)
        os.chmod(folder, 0o700)
        if os.path.lexists(self.path):
            os.unlink(self.path)
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            self._listener.bind(self.path)
            self._listener.listen(64)
            self._listener.setblocking(False)
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._selector.register(self._wake_fd, selectors.EVENT_READ)
        except BaseException:
            self._close_own()
            raise

    def wake(self) -> None:
        """Let `poll` return. From any thread, until `close`."""
        os.eventfd_write(self._wake_fd, 1)

    def poll(self, timeout_s: float | None) -> list[Heard]:
        """Send what waits, then wait for workers to speak; returns at `wake`, at `timeout_s`, or with what they said."""
        self.flush()
        for key, events in self._selector.select(self._expire(self._accept_again(timeout_s))):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj == self._wake_fd:
                os.eventfd_read(self._wake_fd)
            else:
                connection: _Connection = key.data
                if events & selectors.EVENT_READ and connection in self._connections:
                    self._read(connection)
                if events & selectors.EVENT_WRITE and connection in self._connections:
                    self._to_flush[connection] = None
        heard, self._heard = self._heard, []
        return heard

    def send(self, worker: WorkerRef, message: ToWorker) -> None:
        """Queue a message; `poll` and `flush` send. A worker that is gone hears nothing."""
        connection = self._by_ref.get(worker)
        if connection is None or connection.is_ending:
            return
        try:
            data = b"".join(map(frame, parts(message)))
            arena_fds = self._arena_fds(message) if isinstance(message, Arena) else []
        except (ValueError, OSError) as error:  # its own names are that long; no descriptor is left
            self._end(connection, str(error))
            return
        if isinstance(message, Welcome) and self._slab_fd is not None:
            connection.riders.append(_Riders(len(connection.unsent), [self._slab_fd], is_own=False))
        elif isinstance(message, Arena):
            if not arena_fds:
                return  # its lender is gone; that is said next
            connection.riders.append(_Riders(len(connection.unsent), arena_fds, is_own=True))
        connection.unsent += data
        self._to_flush[connection] = None

    def _arena_fds(self, message: Arena) -> list[int]:
        """Duplicates of the descriptors that an arena is opened by; none when its lender is gone."""
        lender, fds = self._lenders.get(message.lender), list[int]()
        try:
            for fd in [] if lender is None else lender.arena_fds:
                fds.append(os.dup(fd))
        except OSError:
            _close_all(fds)
            raise
        return fds

    def disconnect(self, worker: WorkerRef, reason: str) -> None:
        """Hear the worker no more. WorkerGone comes when it has let go of its end."""
        connection = self._by_ref.get(worker)
        if connection is not None and not connection.is_ending:
            self._end(connection, reason)

    def flush(self) -> None:
        """Send what the sockets take."""
        connections, self._to_flush = self._to_flush, {}
        for connection in connections:
            if connection in self._connections:
                self._write(connection)

    def close(self) -> None:
        """Close everything and remove the socket's name."""
        self.flush()
        for connection in list(self._connections):
            connection.socket.close()
            connection.close_fds()
        self._connections = {}
        self._strangers = {}
        self._by_ref = {}
        self._lenders = {}
        if os.path.lexists(self.path):
            os.unlink(self.path)
        self._close_own()

    def _close_own(self) -> None:
        self._selector.close()
        self._listener.close()
        os.close(self._wake_fd)

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            self._listen_again()
            return
        except OSError as error:
            # The connection stays in the listener's queue, so the listener would wake the loop at once, again and again.
            if self._accepts_at is None:
                self.notes.append(
                    f"no connection to the cache's socket is accepted for now: {error.strerror}"
                )
                self._selector.unregister(self._listener)
            self._accepts_at = time.monotonic() + ACCEPT_AGAIN_S
            return
        self._listen_again()
        _, uid, _ = _CREDENTIALS.unpack(
            peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if len(self._strangers) >= MAX_STRANGERS:
            self._drop_stranger(f"{MAX_STRANGERS} connections have said no Hello yet")
        if uid != os.getuid() or len(self._connections) >= MAX_CONNECTIONS:
            self.notes.append(f"a connection of user {uid} to the cache's socket was refused")
            peer.close()
            return
        peer.setblocking(False)
        connection = _Connection(peer)
        self._connections[connection] = None
        self._strangers[connection] = time.monotonic() + HELLO_S
        self._selector.register(peer, selectors.EVENT_READ, connection)

    def _expire(self, timeout_s: float | None) -> float | None:
        """Drop those whose time for a Hello is up; how long `poll` may wait."""
        while self._strangers:
            left_s = next(iter(self._strangers.values())) - time.monotonic()
            if left_s > 0:
                return left_s if timeout_s is None else min(timeout_s, left_s)
            self._drop_stranger(f"it has said no Hello in {HELLO_S:g} s")
        return timeout_s

    def _drop_stranger(self, reason: str) -> None:
        """The oldest one."""
        self.notes.append(f"a peer is disconnected from the cache: {reason}")
        self._drop(next(iter(self._strangers)))

    def _accept_again(self, timeout_s: float | None) -> float | None:
        """Try to accept, where it is time for that after a failure; how long `poll` may wait."""
        if self._accepts_at is not None and time.monotonic() >= self._accepts_at:
            self._accept()
        if self._accepts_at is None:
            return timeout_s
        left_s = max(0.0, self._accepts_at - time.monotonic())
        return left_s if timeout_s is None else min(timeout_s, left_s)

    def _listen_again(self) -> None:
        if self._accepts_at is not None:
            self.notes.append("connections to the cache's socket are accepted again")
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._accepts_at = None

    def _read(self, connection: _Connection) -> None:
        for _ in range(_CHUNKS_PER_POLL):
            try:
                chunk = _receive(connection)
            except BlockingIOError:
                return
            except OSError:
                chunk = b""
            if not chunk:
                self._drop(connection)
                return
            if connection.is_ending:
                continue
            try:
                for message in connection.reader.feed(chunk):
                    self._take(connection, message)
            except Garbage as garbage:
                self.bad_messages += 1
                self._end(connection, str(garbage))
            if len(chunk) < _CHUNK_BYTES:
                return

    def _take(self, connection: _Connection, message: object) -> None:
        if connection.is_ending:
            return
        if isinstance(message, Hello):
            ref = WorkerRef(message.worker_id, message.incarnation)
            if connection.ref is not None:
                raise Garbage("a second Hello")
            if ref in self._by_ref:
                reason = f"worker {ref.worker_id} is connected with this incarnation already"
                connection.unsent += frame(Refused(reason))
                self._end(connection, reason)
                return
            if message.arena_bytes:
                if len(connection.arena_fds) != (1 if message.arena_handle else ARENA_FDS):
                    raise Garbage(f"an arena with {len(connection.arena_fds)} descriptors")
                self._lenders.setdefault(ref.incarnation, connection)
            connection.ref = ref
            del self._strangers[connection]
            self._by_ref[ref] = connection
        if connection.ref is None:
            raise Garbage("a message before Hello")
        self._heard.append(FromWorker(connection.ref, message))  # type: ignore[arg-type]  # the decoder's union

    def _end(self, connection: _Connection, reason: str) -> None:
        who = "a peer" if connection.ref is None else f"worker {connection.ref.worker_id}"
        self.notes.append(f"{who} is disconnected from the cache: {reason}")
        connection.is_ending = True
        self._to_flush[connection] = None

    def _write(self, connection: _Connection) -> None:
        try:
            while connection.unsent:
                _send_some(connection)
        except BlockingIOError:
            if len(connection.unsent) > MAX_UNSENT_BYTES:
                if not connection.is_ending:
                    self._end(connection, f"it left {len(connection.unsent)} bytes unread")
                connection.clear_unsent()
        except ConnectionError:
            connection.clear_unsent()  # its end of the stream, read next, says the rest
        except OSError as error:  # no memory, or too many descriptors in flight
            if not connection.is_ending:
                self._end(connection, f"it can't be told: {error.strerror}")
            connection.clear_unsent()
        if connection.is_ending and not connection.unsent and not connection.is_half_closed:
            if connection.ref is None:
                self._drop(connection)  # no worker yet: it never had a slot
                return
            connection.is_half_closed = True
            try:
                connection.socket.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # the other end is closed already
        if bool(connection.unsent) != connection.writes:
            connection.writes = bool(connection.unsent)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.writes else 0)
            self._selector.modify(connection.socket, events, connection)

    def _drop(self, connection: _Connection) -> None:
        del self._connections[connection]
        self._strangers.pop(connection, None)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        connection.close_fds()
        if connection.ref is not None:
            if self._lenders.get(connection.ref.incarnation) is connection:
                del self._lenders[connection.ref.incarnation]
            del self._by_ref[connection.ref]
            self._heard.append(WorkerGone(connection.ref))


# ---- the worker's side -----------------------------------------------------------------------------------------


class NodeClient:
    """A worker's connection to its CacheNode, and its mapping of the slab.

    `send` may be called from any thread and never waits for the node; messages arrive on the reader thread. When the
    node goes away, or hears no more, `on_closed` is called there once; then call `close` as soon as no copy touches
    the slab.
    """

    def __init__(
        self,
        connection: socket.socket,
        welcome: Welcome,
        slab: HostTier | None,
        reader: MessageReader,
        first: list[object],
        on_message: Callable[[ToWorker], None],
        on_closed: Callable[[], None],
        arena_fds: list[int],
    ) -> None:
        self.welcome = welcome
        self.slab = slab  # None when the node has no L3
        self._socket = connection
        self._reader = reader
        self._on_message = on_message
        self._on_closed = on_closed
        self._lock = threading.Lock()  # guards _unsent and the order of sends; held for no more than a send
        self._unsent = bytearray()
        self._came_fds = arena_fds  # of arenas whose message isn't whole yet; the reader thread's
        self._arena_fds: dict[str, list[int]] = {}  # by lender, until taken; guarded by _lock
        self._is_closing = False
        self._is_closed = False
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, args=(first,), name="node-client", daemon=True)
        self._thread.start()

    @classmethod
    def connect(
        cls,
        path: str | Path,
        hello: Hello,
        on_message: Callable[[ToWorker], None],
        on_closed: Callable[[], None],
        *,
        arena_fds: tuple[int, ...] = (),
        timeout_s: float = 10.0,
    ) -> NodeClient:
        """Say Hello and take the Welcome. Raises NodeRefused with the node's reason, else ConnectionError.

        `arena_fds` ride along with a Hello that lends; they stay the caller's.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        reader = MessageReader(ToWorker)
        fds: list[int] = []
        try:
            connection.settimeout(timeout_s)
            try:
                connection.connect(_check_path(path))
                _send_hello(connection, frame(hello), arena_fds)
                messages = cls._first_messages(connection, reader, fds)
            except (OSError, Garbage) as error:
                if isinstance(error, ConnectionError):
                    raise
                raise ConnectionError(f"no CacheNode answers at {path}: {error}") from error
            welcome = messages[0]
            if isinstance(welcome, Refused):
                raise NodeRefused(welcome.reason)
            if not isinstance(welcome, Welcome):
                raise ConnectionError(f"the CacheNode at {path} answered {type(welcome).__name__} to Hello")
            slab = None
            if welcome.slab_bytes:
                if not fds:
                    raise ConnectionError(f"the CacheNode at {path} sent no slab")
                slab = HostTier.attach(fds[0], welcome.slab_bytes)
                os.close(fds.pop(0))
            connection.setblocking(False)
            arenas, fds = fds, []
            return cls(connection, welcome, slab, reader, messages[1:], on_message, on_closed, arenas)
        except BaseException:
            connection.close()
            raise
        finally:
            for fd in fds:
                os.close(fd)

    @staticmethod
    def _first_messages(connection: socket.socket, reader: MessageReader, fds: list[int]) -> list[object]:
        while True:
            chunk, received, _, _ = socket.recv_fds(connection, _CHUNK_BYTES, ARENA_FDS, _CLOEXEC)
            fds.extend(received)
            if not chunk:
                raise ConnectionError("the CacheNode closed the connection")
            if messages := reader.feed(chunk):
                return messages

    @property
    def fd(self) -> int:
        """The connection's descriptor. It is over, for the node, when the last duplicate of this is closed."""
        return self._socket.fileno()

    def slot(self, grant: Grant) -> memoryview:
        """The whole slot of the slab, header first. Only while the grant, or a lease on it, is held."""
        if self.slab is None:
            raise ValueError("the node has no L3")
        return self.slab.slot(Place(0, grant.slot), grant.payload_bytes)

    def take_arena_fds(self, lender: str) -> list[int]:
        """The descriptors that came with a lender's Arena, its lifeline first: the caller's from now on."""
        with self._lock:
            return self._arena_fds.pop(lender, [])

    def send(self, message: ToNode) -> None:
        """Send, in order with other sends. Raises ConnectionError when the connection is over.

        A message that is too long, though its lists are sent in parts, ends the connection: what it was to end or to
        lease is void with that.
        """
        try:
            data = b"".join(map(frame, parts(message)))
        except ValueError as error:
            self._socket.shutdown(socket.SHUT_RDWR)  # the reader hears of it, and says `on_closed`
            raise ConnectionError(f"{type(message).__name__} can't be sent: {error}") from error
        with self._lock:
            if self._is_closing:
                raise ConnectionError("the connection to the CacheNode is closed")
            sent = 0
            if not self._unsent:
                try:
                    sent = self._socket.send(data)
                except BlockingIOError:
                    pass
            if sent < len(data):
                if len(self._unsent) > MAX_UNSENT_BYTES:
                    raise ConnectionError(f"the CacheNode leaves {len(self._unsent)} bytes unread")
                self._unsent += data[sent:]
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Unmap the slab, then tell the node so by closing the connection. Idempotent; no slot may be in use."""
        with self._lock:
            if self._is_closed:
                return
            has_ended, self._is_closing, self._is_closed = self._is_closing, True, True
            if not has_ended:
                os.eventfd_write(self._wake_fd, 1)  # after the flag: the reader looks at it once it is awake
        if threading.current_thread() is not self._thread:
            self._thread.join()
        if self.slab is not None:
            self.slab.close()
        with self._lock:
            for fds in (self._came_fds, *self._arena_fds.values()):
                _close_all(fds)
        self._socket.close()

    def _run(self, first: list[object]) -> None:
        try:
            for message in first:
                self._take(message)
            self._read_on()
        finally:
            with self._lock:
                is_own = self._is_closed
                self._is_closing = True
                os.close(self._wake_fd)
            if not is_own:
                self._on_closed()

    def _take(self, message: object) -> None:
        if isinstance(message, Arena):
            num_fds = 1 if message.handle else ARENA_FDS
            if len(self._came_fds) < num_fds or len(self._arena_fds) >= MAX_ARENAS:
                raise Garbage(f"an arena with {len(self._came_fds)} descriptors")
            with self._lock:
                self._arena_fds[message.lender] = self._came_fds[:num_fds]
            del self._came_fds[:num_fds]
        self._on_message(message)  # type: ignore[arg-type]  # the decoder's union

    def _read_on(self) -> None:
        """Read until the connection or this client ends; send what `send` couldn't."""
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        poll.register(self._socket, select.POLLIN)
        while True:
            events = dict(poll.poll())
            if self._wake_fd in events:
                os.eventfd_read(self._wake_fd)
            if self._is_closing:
                return
            fd = self._socket.fileno()
            try:
                if events.get(fd, 0) & ~select.POLLOUT:
                    chunk, fds, _, _ = socket.recv_fds(self._socket, _CHUNK_BYTES, ARENA_FDS, _CLOEXEC)
                    self._came_fds += fds
                    if not chunk:
                        return
                    for message in self._reader.feed(chunk):
                        self._take(message)
                if self._is_closing:
                    return
                with self._lock:
                    if self._unsent:
                        del self._unsent[: self._socket.send(self._unsent)]
                    poll.register(fd, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            except BlockingIOError:
                poll.register(fd, select.POLLIN | select.POLLOUT)
            except Garbage as garbage:
                log.warning("the cache node is left: it sent %s", garbage)
                return
            except OSError:
                return


def _send_hello(connection: socket.socket, data: bytes, fds: tuple[int, ...]) -> None:
    """Send all of a Hello, with descriptors, on a socket that waits."""
    sent = socket.send_fds(connection, [data], fds) if fds else 0
    connection.sendall(data[sent:])
