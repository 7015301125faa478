"""The connection that brings a worker's outputs to the gateway."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import eventually

from kvtier.cluster.gateway.streams import outputs as gateway_outputs
from kvtier.cluster.gateway.streams.outputs import OutputReceiver
from kvtier.tier.protocol.frames import FrameReader, pack_frame
from kvtier.workers.actor import Outbox
from kvtier.workers.engine import outputs
from kvtier.workers.engine.outputs import MAX_FRAME_BYTES, OutputSender, unpack_outputs
from kvtier.workers.requests.api import FinishReason, Output, Timings, TokenLogprobs, Usage

WHOLE = Output(
    request_id="r",
    index=1,
    token_ids=(1, 2),
    logprobs=(TokenLogprobs(-0.5, ((1, -0.5), (7, -2.5))),),
    finish_reason=FinishReason.STOP,
    usage=Usage(10, 2, 4, {"L1": 6}),
    timings=Timings(1.0, 2.0, 3.0, 4.0, 5.0),
    error="none",
    prompt_position=3,
    prompt_logprobs=(TokenLogprobs(-1.5, ((2, -0.25),)), TokenLogprobs(-0.75, ())),
)


class Listening:
    """A receiver on a loop of its own, and what it was told."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, list[Output]]] = []
        self.lost: list[tuple[str, str]] = []
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self.loop).result(120)

    async def _start(self) -> None:
        self.receiver = OutputReceiver(
            ["w0", "w1"],
            lambda worker_id, outputs: self.taken.append((worker_id, outputs)),
            lambda worker_id, reason: self.lost.append((worker_id, reason)),
        )
        self.address = await self.receiver.start("127.0.0.1")

    async def _close(self) -> None:
        self.receiver.close()
        for _ in range(3):  # transports close their sockets in the loop's next turns
            await asyncio.sleep(0)

    def connect(self, worker_id: str, secret: bytes | None = None) -> OutputSender:
        return OutputSender.connect(self.address, secret or self.receiver.secret, worker_id)

    def stranger(self) -> socket.socket:
        host, port = self.address.split(":")
        return socket.create_connection((host, int(port)), timeout=120)

    def wait_complete(self, timeout_s: float, worker_id: str | None = None) -> None:
        waiting = self.receiver.wait_complete(timeout_s, worker_id)
        asyncio.run_coroutine_threadsafe(waiting, self.loop).result(20)

    def expect(self, worker_id: str) -> None:
        self.call(self.receiver.expect, worker_id)

    def call(self, function: Callable[..., None], *arguments: str) -> None:
        async def run() -> None:
            function(*arguments)

        asyncio.run_coroutine_threadsafe(run(), self.loop).result(120)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self.loop).result(120)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(120)
        self.loop.close()


@pytest.fixture
def listening() -> Iterator[Listening]:
    """A receiver that expects w0 and w1."""
    made = Listening()
    yield made
    made.close()


def _is_closed(connection: socket.socket) -> bool:
    connection.settimeout(120)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_outputs_arrive_whole_and_in_order(listening: Listening) -> None:
    sender = listening.connect("w0")

    for number in range(500):
        sender.send([WHOLE, Output("r", 0, (number,))])

    assert eventually(lambda: len(listening.taken) == 500)
    assert all(worker_id == "w0" and outputs[0] == WHOLE for worker_id, outputs in listening.taken)
    assert [outputs[1].token_ids for _, outputs in listening.taken] == [(n,) for n in range(500)]
    sender.close()


def test_a_worker_whose_connection_ends_is_lost_and_another_is_not(listening: Listening) -> None:
    first, second = listening.connect("w0"), listening.connect("w1")
    listening.wait_complete(10.0)

    first.close()

    assert eventually(lambda: [worker_id for worker_id, _ in listening.lost] == ["w0"])
    second.send([WHOLE])
    assert eventually(lambda: len(listening.taken) == 1)
    second.close()


def test_workers_that_do_not_connect_are_named(listening: Listening) -> None:
    sender = listening.connect("w0")

    with pytest.raises(TimeoutError, match="did not connect .*: w1$"):
        listening.wait_complete(0.2)

    sender.close()


@pytest.mark.parametrize(
    "junk",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        pack_frame(b"no hello", 2**20),
        pack_frame(b"x" * 5000, 2**20),
        pack_frame(b"\x81\xa1a" + b"\x91" * 4000, 2**20),
        pack_frame(b"\x82\xa9worker_id\xa1\xff\xa6secret\xc0", 2**20),
    ],
    ids=["http", "huge length", "no hello", "long hello", "lists in lists", "no text"],
)
def test_junk_is_cut_off_and_nothing_is_lost(listening: Listening, junk: bytes) -> None:
    host, port = listening.address.split(":")
    with socket.create_connection((host, int(port)), timeout=120) as connection:
        connection.sendall(junk)

        assert _is_closed(connection)
    assert listening.lost == []


def test_who_says_nothing_is_cut_off_and_who_said_hello_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_outputs, "HELLO_S", 0.1)
    with closing(Listening()) as listening, listening.stranger() as stranger:
        assert _is_closed(stranger)

        sender = listening.connect("w0")
        listening.wait_complete(10.0, "w0")
        with listening.stranger() as later:
            assert _is_closed(later)
        sender.send([WHOLE])
        assert eventually(lambda: len(listening.taken) == 1)
        assert listening.lost == []
        sender.close()


def test_no_more_strangers_are_let_in_than_there_may_be(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_outputs, "MAX_STRANGERS", 2)
    with ExitStack() as stack:
        first, second = (stack.enter_context(listening.stranger()) for _ in range(2))
        assert eventually(lambda: len(listening.receiver._connections) == 2)
        third = stack.enter_context(listening.stranger())
        assert _is_closed(first), "the oldest one makes room"
        assert eventually(lambda: len(listening.receiver._connections) == 2)

        sender = listening.connect("w0")
        listening.wait_complete(10.0, "w0")
        assert _is_closed(second)
        sender.close()
        third.close()


def test_strangers_that_come_again_and_again_keep_no_worker_out(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_outputs, "MAX_STRANGERS", 16)
    with ExitStack() as stack:
        for _ in range(64):
            stack.enter_context(listening.stranger())
        sender = listening.connect("w0")
        for _ in range(8):
            stack.enter_context(listening.stranger())

        listening.wait_complete(10.0, "w0")
        sender.send([WHOLE])
        assert eventually(lambda: len(listening.taken) == 1)
        assert eventually(lambda: len(listening.receiver._connections) <= 17)
        sender.close()


def test_an_error_of_who_takes_outputs_is_not_taken_for_junk(
    listening: Listening, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(worker_id: str, outputs: list[Output]) -> None:
        raise ValueError("a fault of ours")

    monkeypatched = listening.receiver._on_outputs
    listening.receiver._on_outputs = broken
    sender = listening.connect("w0")
    sender.send([WHOLE])

    assert eventually(lambda: "a fault of ours" in caplog.text)
    assert "is cut off" not in caplog.text
    listening.receiver._on_outputs = monkeypatched
    sender.close()


def test_a_stranger_without_the_secret_and_a_second_of_the_same_name_are_cut_off(
    listening: Listening,
) -> None:
    first = listening.connect("w0")
    first.send([WHOLE])
    assert eventually(lambda: len(listening.taken) == 1)

    for stranger in (
        listening.connect("w1", b"wrong"),
        listening.connect("w0"),
        listening.connect("nothing"),
    ):
        assert _is_closed(stranger._socket)

    first.send([WHOLE])
    assert eventually(lambda: len(listening.taken) == 2)
    assert listening.lost == []
    first.close()


def test_a_worker_that_comes_back_is_taken_once_it_is_expected(listening: Listening) -> None:
    first = listening.connect("w0")
    first.send([WHOLE])
    assert eventually(lambda: len(listening.taken) == 1)

    listening.expect("w0")
    second = listening.connect("w0")
    listening.wait_complete(10.0, "w0")
    second.send([WHOLE])

    assert eventually(lambda: len(listening.taken) == 2)
    assert _is_closed(first._socket)
    assert listening.lost == [], "the old connection ends without a word"
    assert listening.receiver.is_connected("w0")
    second.close()
    assert eventually(lambda: [worker_id for worker_id, _ in listening.lost] == ["w0"])
    assert not listening.receiver.is_connected("w0")


def test_a_worker_that_is_not_waited_for_does_not_hold_up_another(listening: Listening) -> None:
    sender = listening.connect("w1")

    listening.wait_complete(10.0, "w1")

    with pytest.raises(TimeoutError, match="did not connect .*: w0$"):
        listening.wait_complete(0.05, "w0")
    sender.close()


class Cancelling:
    """A worker that only counts what is cancelled."""

    def __init__(self) -> None:
        self.all = 0
        self.cancelled: list[str] = []

    def cancel_all(self) -> None:
        self.all += 1

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)


def test_a_gateway_that_dies_takes_its_requests_along_though_nothing_is_sent(listening: Listening) -> None:
    worker, outbox = Cancelling(), Outbox()
    outbox.connect(worker, listening.connect("w0"))  # type: ignore[arg-type]
    assert worker.all == 1, "what was asked for before is no one's"
    outbox([WHOLE])
    assert eventually(lambda: len(listening.taken) == 1)

    listening.call(listening.receiver.close)

    assert eventually(lambda: worker.all == 2)
    outbox([Output("late", 0, (1,)), Output("over", 0, (), finish_reason=FinishReason.STOP)])
    assert worker.cancelled == ["late"]


def test_a_new_gateway_ends_the_old_ones_connection_and_requests(listening: Listening) -> None:
    worker, outbox = Cancelling(), Outbox()
    old = listening.connect("w0")
    outbox.connect(worker, old)  # type: ignore[arg-type]
    listening.wait_complete(10.0, "w0")

    outbox.connect(worker, listening.connect("w1"))  # type: ignore[arg-type]

    assert worker.all == 2
    assert eventually(lambda: [worker_id for worker_id, _ in listening.lost] == ["w0"])
    outbox([WHOLE])
    assert eventually(lambda: [worker_id for worker_id, _ in listening.taken] == ["w1"])
    outbox.close()
    assert worker.all == 2


def test_sending_to_a_gateway_that_is_gone_raises() -> None:
    listening = Listening()
    sender = listening.connect("w0")
    sender.send([WHOLE])
    assert eventually(lambda: len(listening.taken) == 1)
    listening.close()

    def send_fails() -> bool:
        try:
            sender.send([WHOLE])
        except OSError:
            return True
        return False

    assert eventually(send_fails)


def _full(sender: OutputSender, large: Output) -> int:
    """Outputs sent until the connection takes no more of them."""
    for number in range(1, 1000):
        sender.send([large])
        if sender._unsent:
            return number
    raise AssertionError("the connection takes everything")


LARGE = Output("r", 0, tuple(range(70_000, 170_000)))


def test_a_gateway_that_is_stalled_holds_no_step_loop_up_and_gets_all_when_it_goes_on() -> None:
    theirs, ours = socket.socketpair()
    with theirs, closing(OutputSender(ours)) as sender:
        sent = _full(sender, LARGE) + 3
        for _ in range(3):
            sender.send([LARGE])  # would wait for the reader below, which comes after it

        reader = FrameReader(MAX_FRAME_BYTES)
        frames: list[bytes] = []
        theirs.setblocking(False)
        while sender._unsent or len(frames) < sent + 1:
            try:
                frames += reader.feed(theirs.recv(1 << 20))
            except BlockingIOError:
                sender.send([])  # as its loop's next turn does
        found = [unpack_outputs(frame) for frame in frames]

    assert [one for one in found if one] == [[LARGE]] * sent


def test_a_gateway_that_takes_nothing_for_long_is_taken_to_be_gone() -> None:
    now = 0.0
    theirs, ours = socket.socketpair()
    with theirs, closing(OutputSender(ours, lambda: now)) as sender:
        _full(sender, LARGE)
        now = outputs.UNSENT_S - 1
        sender.send([])
        theirs.recv(1 << 20)
        sender.send([])
        now += outputs.UNSENT_S - 1
        sender.send([])
        now += 1
        with pytest.raises(OSError, match="taken nothing for 30 s"):
            sender.send([])


def test_a_connection_whose_other_end_takes_nothing_ends_though_nothing_more_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it does when the gateway's machine is gone: keep-alive alone waits for as long as bytes are on their way."""
    monkeypatch.setattr(outputs, "UNSENT_S", 3.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = OutputSender.connect(f"127.0.0.1:{server.getsockname()[1]}", b"secret", "w0")
        theirs, _ = server.accept()
        with theirs, closing(sender):
            _full(sender, LARGE)
            watch = threading.Thread(target=sender.wait_closed, daemon=True)
            watch.start()
            watch.join(120)
            assert not watch.is_alive()


def test_what_is_kept_for_a_gateway_that_takes_nothing_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "MAX_UNSENT_BYTES", 2**20)
    theirs, ours = socket.socketpair()
    with theirs, closing(OutputSender(ours)) as sender, pytest.raises(OSError, match="at most 1048576"):
        for _ in range(1000):
            sender.send([LARGE])


@settings(deadline=None)
@given(bodies=st.lists(st.binary(max_size=20), max_size=5), cut=st.integers(1, 7))
def test_frames_come_out_as_they_went_in_however_they_are_cut(bodies: list[bytes], cut: int) -> None:
    data = b"".join(pack_frame(body, 2**20) for body in bodies)
    reader = FrameReader(MAX_FRAME_BYTES)

    frames = [frame for at in range(0, len(data), cut) for frame in reader.feed(data[at : at + cut])]

    assert frames == bodies


def test_a_frame_longer_than_allowed_is_refused_before_it_is_held() -> None:
    reader = FrameReader(max_bytes=10)

    with pytest.raises(ValueError, match="frame of 11 bytes, at most 10"):
        reader.feed(pack_frame(b"x" * 11, 2**20)[:4])
