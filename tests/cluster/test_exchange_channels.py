"""Which channels to other nodes are kept open, and which are let go; without a network."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, ClassVar

import pytest

from kvtier.cluster.transfer import channels as exchange_channels
from kvtier.cluster.transfer import wire
from kvtier.cluster.transfer.channels import ASK_LAST_S, MAX_IDLE, Channels
from kvtier.proto import page_transfer_pb2


class Channel:
    """A GrpcChannel to nowhere."""

    open: ClassVar[list[Channel]] = []
    asked: ClassVar[int] = 0
    reply: ClassVar[dict[str, str]] = {}

    def __init__(self, name: tuple[str, str], *_: Any) -> None:
        self.name = name
        Channel.open.append(self)

    def meet(self, call: Any) -> page_transfer_pb2.MeetReply:
        Channel.asked += 1
        return page_transfer_pb2.MeetReply(node_id=self.name[0], **Channel.reply)

    def close(self) -> None:
        Channel.open.remove(self)


@pytest.fixture
def channels(monkeypatch: pytest.MonkeyPatch) -> Channels:
    monkeypatch.setattr(Channel, "open", [])
    monkeypatch.setattr(Channel, "asked", 0)
    monkeypatch.setattr(exchange_channels, "GrpcChannel", Channel)
    return Channels("home", "exchange:home", "secret", print, uses_memory=False)


def test_more_channels_than_may_be_idle_are_closed_and_names_without_any_are_no_obstacle(
    channels: Channels,
) -> None:
    names = [(f"n{number}", "host:1") for number in range(MAX_IDLE // 2 + 1)]
    call: Any = None
    first = channels.open(names[0], call)
    channels.done(names[0], first, "keep")
    assert channels.open(names[0], call) is first  # its name has no idle channel now

    for name in names[1:]:
        both = [channels.open(name, call) for _ in range(2)]
        for channel in both:
            channels.done(name, channel, "keep")
    more = channels.open(names[1], call), channels.open(names[1], call), channels.open(names[1], call)
    for channel in more:
        channels.done(names[1], channel, "keep")

    assert len(Channel.open) == MAX_IDLE + 1  # and the one in use
    channels.done(names[0], first, "keep")
    assert len(Channel.open) == MAX_IDLE
    channels.close()
    assert not Channel.open


def test_of_a_peer_at_another_address_nothing_is_kept_for_the_old_ones(channels: Channels) -> None:
    call: Any = None
    older = "n1", "host:0"
    in_use = channels.open(older, call)
    for number in range(1, 5):
        name = "n1", f"host:{number}"
        both = [channels.open(name, call) for _ in range(2)]
        channels.done(older, in_use, "keep")
        channels.done(name, both[0], "keep")
        assert len(Channel.open) == 2  # one idle, one in use, both of this address
        older, in_use = name, both[1]
    assert list(channels._met) == [older]
    channels.done(older, in_use, "keep")
    channels.close()
    assert not Channel.open


def test_a_peer_whose_memory_is_out_of_reach_is_asked_again_ever_more_rarely(
    channels: Channels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On this machine, but its cache is away: the answer names no socket."""
    monkeypatch.setattr(Channel, "reply", {"boot_id": wire.boot_id()})
    now = 0.0
    near = Channels("home", "exchange:home", "secret", print, clock=lambda: now)
    call: Any = None
    asked = []
    for now in range(1000):  # a fetch every second
        before = Channel.asked
        near.done(("n1", "host:1"), near.open(("n1", "host:1"), call), "keep")
        asked += [now] * (Channel.asked - before)

    gaps = [after - before for before, after in pairwise(asked)]
    assert gaps[:7] == [1, 1, 2, 4, 8, 16, 32]
    assert set(gaps[7:]) == {ASK_LAST_S}
    near.close()
    assert not Channel.open


def test_a_peer_on_another_machine_is_asked_once(channels: Channels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Channel, "reply", {"boot_id": "another kernel", "socket_path": "/some/sock"})
    far = Channels("home", "exchange:home", "secret", print, clock=lambda: 1e6)
    call: Any = None

    for _ in range(3):
        far.done(("n1", "host:1"), far.open(("n1", "host:1"), call), "keep")

    assert Channel.asked == 1
    far.close()
