"""Random messages, and random bytes, end their sender's connection at most: never the node, and nothing else's pages."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from random import Random
from typing import Any, get_args

import msgspec
import pytest
from cache_world import BF16, FP8, INT4C, hello_of, spec_of, tenant_of
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from message_kit import GOOD, Drawn
from node_kit import Peer, running, wait_until
from node_kit import hello_of as node_hello

from kvtier.tier.node.coordinator import Coordinator
from kvtier.tier.pages.page import TierName, slot_bytes
from kvtier.tier.policy.base import PolicySettings
from kvtier.tier.protocol.events import (
    Clear,
    Disconnect,
    Event,
    Evict,
    FromWorker,
    Pin,
    ReadDone,
    ReadFailed,
    ReadPage,
    Send,
    Unpin,
    Verified,
    Verify,
    VerifyPage,
    WorkerGone,
    WorkerRef,
    WriteDone,
    WriteFailed,
    WritePage,
)
from kvtier.tier.protocol.ipc import Garbage, MessageReader, frame
from kvtier.tier.protocol.messages import (
    Chain,
    Copied,
    Finished,
    FramesGranted,
    Granted,
    Hello,
    Lend,
    LentFrame,
    Locate,
    Stored,
    StoredPage,
    ToNode,
    WantSlots,
)
from kvtier.tier.stores.base import SegmentAllocator
from kvtier.tier.stores.host_slots import host_slots

PAGE, SMALL = 4096, 8192
KEYS = [bytes([n]) * 32 for n in range(8)]
SPECS = [spec_of((0, BF16)), spec_of((0, FP8))]
TIERS = (None, TierName.PEER, TierName.HOST, TierName.SSD)
SPOKEN = [kind for kind in get_args(ToNode) if kind is not Hello]
OFTEN = (WantSlots, Stored, Stored, Locate, Finished, Copied)  # beside all, so that there are pages


class Life:
    """A coordinator, two workers that say what comes to mind, and a disk that does as it likes."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        size = slot_bytes(SMALL)
        self.now = 1e3
        self.node = Coordinator(
            node_id="n0",
            incarnation="i",
            host=host_slots(32 * size, size),
            ssd=SegmentAllocator(64 * size, 8 * size),
            now=self.now,
            policy=PolicySettings(name=random.choice(["rvi", "lru"])),
            page_bytes=SMALL,
            write=random.choice(["through", "demote"]),
            directory=True,
            shares={tenant_of("ada"): 0.5} if random.random() < 0.3 else None,
        )
        self.transfers: list[ReadPage | WritePage | VerifyPage] = []
        self.gone: list[WorkerRef] = []
        self.workers: dict[str, WorkerRef] = {}
        self.lives = 0
        self.grants: list[Any] = []
        self.peer_grants: list[Any] = []
        self.drawn = Drawn(
            random,
            {
                "key": KEYS, "keys": KEYS, "other_keys": KEYS, "parent": KEYS, "root": KEYS,
                "tenant": [tenant_of("ada"), tenant_of("ada"), tenant_of("bob")],
                "spec_digest": SPECS, "variant": [BF16, BF16, FP8], "made_from": ["", "", BF16],
                "decayed": ["", "", INT4C], "payload_bytes": [PAGE, SMALL], "grant": self.grants,
                "request_id": ["a", "b", "c"], "lender": ["1", "2"], "node_id": ["n0", "n1", "n2"],
                "offset": [0, PAGE, SMALL, 5000], "offsets": [0, PAGE, SMALL], "content": [b"", b"c" * 16],
                "grants": self.grants, "tokens": [16, 16, 1, 65535], "page_tokens": [16, 16, 1, 65535],
                "hold_for": [None, None, "a", "b"], "count": [1, 4, 40, 2**30 - 1],
                "first_page": [0, 0, 0, 1, 3], "depth": [0, 0, 1, 2, 3, 2**20, 2**30 - 1],
            },
        )  # fmt: skip

    def step(self) -> None:
        random = self.random
        self.now += random.choice([0, 0.001, 1.0, 100.0])
        for name in ("w0", "w1"):
            if name not in self.workers:
                self._connect(name)
        choice = random.random()
        if choice < 0.15 and self.transfers:
            self._tell(self._ended(self.transfers.pop(0)))
        elif choice < 0.2:
            keys, verb = tuple(random.sample(KEYS, 3)), random.randrange(5)
            tier = random.choice(TIERS)
            clear = Clear(1, random.choice([None, tenant_of("ada")])) if random.random() < 0.1 else Pin(1, ())
            self._tell((Pin(1, keys), Unpin(1, keys), Evict(1, keys, tier), Verify(1, keys), clear)[verb])
        else:
            self._say(random.choice(["w0", "w1"]), random.choice([*SPOKEN, *OFTEN]))
        while self.gone:
            self._tell(WorkerGone(self.gone.pop()))

    def _connect(self, name: str) -> None:
        self.lives += 1
        ref = self.workers[name] = WorkerRef(name, str(self.lives))
        hello = hello_of(name, str(self.lives), {(0, BF16): PAGE, (0, FP8): SMALL})
        saves = self.random.random() < 0.5
        self._tell(FromWorker(ref, msgspec.structs.replace(hello, arena_bytes=2**20, saves_when_asked=saves)))

    def _say(self, name: str, kind: Any) -> None:
        message = self.drawn.message(kind)
        if self.random.random() < 0.95:
            message = self._likely(message)
        try:
            (heard,) = MessageReader(ToNode).feed(frame(message))
        except Garbage:
            self._tell(WorkerGone(self.workers.pop(name)))
            return
        self._tell(FromWorker(self.workers[name], heard))  # type: ignore[arg-type]  # the decoder's union

    def _likely(self, message: Any) -> Any:
        """What takes several fields to be right is mostly right, else most workers would be disconnected at once."""
        random, changed = self.random, msgspec.structs.replace
        match message:
            case Locate():
                length = random.randrange(5)
                chains = [self._likely_chain(chain, length) for chain in message.chains]
                double = random.choice([0.0, 1.0, 1e12])
                return changed(message, chains=chains, double_pages=double, first_content=b"")
            case Stored():
                pages = [self._likely_page(page) for page in message.pages]
                return changed(message, pages=pages)
            case Finished():
                keys = [random.sample(KEYS, random.randrange(5)) for _ in message.keys]
                return changed(message, keys=keys, double_pages=random.choice([1.0, 2048.0, 1e12]))
            case Copied():
                refs = [(0, page) for page in range(random.randrange(4))]
                return changed(message, pages=refs, corrupt=refs[:1] if random.random() < 0.1 else [])
            case Lend():
                return changed(message, frames=[LentFrame(random.randrange(256) * PAGE, PAGE)])
        return message

    def _likely_chain(self, chain: Chain, length: int) -> Chain:
        random = self.random
        return msgspec.structs.replace(
            chain,
            keys=[random.choice(KEYS) for _ in range(length)],
            other_keys=random.choice([[], [], [random.choice(KEYS) for _ in range(length)]]),
            held=bytes(
                random.randrange(4 if chain.decayed else 2) * (random.random() < 0.2) for _ in range(length)
            ),
            window_tokens=random.choice([0, 0, 0, 16, chain.window_tokens]),
        )

    def _likely_page(self, page: StoredPage) -> StoredPage:
        grant = self.random.choice(self.grants[-4:] or [page.grant])
        return msgspec.structs.replace(page, grant=grant, spec_digest=SPECS[grant.payload_bytes != PAGE])

    def _ended(self, transfer: ReadPage | WritePage | VerifyPage) -> Event:
        is_well, failure = self.random.random() < 0.8, self.random.choice(["io", "corrupt", "missing"])
        if isinstance(transfer, WritePage):
            done = WriteDone(transfer.transfer)
            return done if is_well else WriteFailed(transfer.transfer, failure, "")
        if isinstance(transfer, VerifyPage):
            return Verified(transfer.transfer, None if is_well else "corrupt")
        if not is_well:
            return ReadFailed(transfer.transfer, failure, "")
        return ReadDone(transfer.transfer, self.node.in_flight.reads[transfer.transfer].source.entry.envelope)

    def _tell(self, event: Event) -> None:
        for command in self.node.handle(event, self.now):
            match command:
                case Send(message=Granted(grants=grants)):
                    self.grants.extend(grants)
                case Send(message=FramesGranted(grants=peer_grants)):
                    self.peer_grants.extend(peer_grants)
                case ReadPage() | WritePage() | VerifyPage():
                    self.transfers.append(command)
                case Disconnect():
                    self.gone.append(command.worker)
                    self.workers = {n: ref for n, ref in self.workers.items() if ref != command.worker}
                case _:
                    pass
        del self.grants[:-8]


@given(seed=st.integers(0, 2**32))
@settings(max_examples=25, phases=[Phase.generate])
def test_no_message_ends_a_coordinator(seed: int) -> None:
    life = Life(seed)
    for number in range(200):
        life.step()
        if number % 10 == 0:
            life.node.check()
    life.node.check()


# ---- over a socket -------------------------------------------------------------------------------------------------


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def text(value: bytes) -> bytes:
    return bytes([0xA0 | len(value)]) + value


def message_of(kind: bytes, name: bytes, value: bytes) -> bytes:
    """A message with one field, in msgpack."""
    return framed(b"\x82" + text(b"type") + text(kind) + text(name) + value)


GARBAGE: dict[str, bytes] = {
    "a length beyond all": struct.pack("<I", 2**32 - 1),
    "a length of nothing": struct.pack("<I", 0),
    "random bytes": Random(1).randbytes(4096),
    "text that is none": message_of(b"Release", b"request_id", text(b"\xff\xfe")),
    "a kind that is none": framed(b"\x81" + text(b"type") + text(b"\xff\xff")),
    "a kind that nothing knows": message_of(b"Explode", b"at", b"\x00"),
    "a list of 4 billion": message_of(b"ReturnSlots", b"grants", b"\xdd\xff\xff\xff\xff"),
    "a table of 4 billion": message_of(b"NewRoot", b"root_fields", b"\xdf\xff\xff\xff\xff"),
    "a number beyond int64": message_of(b"Release", b"from_page", b"\xcf" + b"\xff" * 8),
    "lists in lists": framed(b"\x91" * 100_000),
    "lists in lists in a field": message_of(b"Release", b"whatever", b"\x91" * 100_000),
    "tables in tables": message_of(b"NewRoot", b"whatever", b"\x81\xa1a" * 50_000),
    "a type that isn't the field's": message_of(b"WantSlots", b"count", text(b"three")),
    "a field left out": framed(b"\x81" + text(b"type") + text(b"WantSlots")),
    "no table": framed(b"\x00"),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_bytes_of_any_kind_end_their_connection_and_are_counted_once(tmp_path: Path, garbage: bytes) -> None:
    with running(tmp_path) as service:
        good = Peer(tmp_path, "good")
        bad = connected(tmp_path, "bad")
        with bad:
            bad.sendall(garbage)

            assert closes(bad)

        wait_until(lambda: any("bad is disconnected" in note for note in service.notes()))
        assert service.stats().bad_messages == 1 and service.health() is None
        assert len(good.store(0, 2)) == 2 and len(good.fetch(0, 2)[0]) == 2
        good.close()


def test_what_a_worker_was_granted_is_free_when_a_bad_message_has_ended_it(tmp_path: Path) -> None:
    with running(tmp_path, l3_pages=8) as service:
        bad = connected(tmp_path, "bad")
        with bad:
            bad.sendall(frame(WantSlots(4, 16 * 1024)))
            wait_until(lambda: service.stats().tiers[TierName.HOST].used_bytes > 0)

            bad.sendall(message_of(b"Release", b"from_page", b"\xcf" + b"\xff" * 8))
            assert closes(bad)

        wait_until(lambda: service.stats().tiers[TierName.HOST].used_bytes == 0)


def test_a_message_cut_off_anywhere_is_none(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        for message in GOOD:
            if isinstance(message, get_args(ToNode)):
                data = frame(message)
                with connected(tmp_path, "bad") as bad:
                    bad.sendall(data[: len(data) - 1])
        wait_until(lambda: service.idle() and service.stats().bad_messages == 0)


def test_frames_that_were_tampered_with_end_no_node(tmp_path: Path) -> None:
    """Single bytes of good messages changed, then sent by one worker after the other; what is left of it must be well."""
    random = Random(7)
    with running(tmp_path) as service:
        good = Peer(tmp_path, "good")
        for number in range(150):
            message = random.choice([one for one in GOOD if isinstance(one, get_args(ToNode))])
            body = bytearray(msgspec.msgpack.encode(message))
            for _ in range(random.choice([1, 1, 2, 5])):
                body[random.randrange(len(body))] = random.randrange(256)
            with connected(tmp_path, f"bad{number % 8}", str(number)) as bad:
                bad.sendall(framed(bytes(body)))
        assert service.health() is None
        keys = good.store(0, 2)
        assert [page.key for page in good.fetch(0, 2)[0]] == keys
        good.close()


def connected(folder: Path, name: str, incarnation: str = "1") -> socket.socket:
    """A worker that has said Hello and heard Welcome, and then says whatever the test does."""
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    raw.settimeout(120)
    raw.connect(str(folder / "run" / "sock"))
    raw.sendall(frame(node_hello(name, incarnation)))
    _, fds, _, _ = socket.recv_fds(raw, 65536, 1)
    for fd in fds:
        os.close(fd)
    return raw


def closes(raw: socket.socket) -> bool:
    """The node says no more on this connection."""
    try:
        while raw.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True
