"""Messages with long lists are sent in parts that say the same, each short enough to be taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import msgspec
import pytest

from kvtier.tier.node.state.records import Limits
from kvtier.tier.protocol.ipc import MAX_FRAME_BYTES, frame
from kvtier.tier.protocol.messages import (
    Chain,
    Copied,
    Fetch,
    Fetched,
    FetchPage,
    Finished,
    FramesGranted,
    Grant,
    Granted,
    HostPage,
    Lend,
    LentFrame,
    LentPage,
    Loaded,
    Locate,
    Located,
    PeerGrant,
    PeerPage,
    RecallFrames,
    Reclaim,
    Reclaimed,
    ReturnFrames,
    ReturnSlots,
    SavePages,
    Stored,
    StoredInPeer,
    StoredPage,
    ToNode,
    ToWorker,
    Unsaved,
)
from kvtier.tier.protocol.parts import MAX_ITEMS, cut_chains, parts

KEY = bytes(range(32))
BIG = 2**62
LENDER = "f" * 32 + ".1234"


def grant(i: int) -> Grant:
    return Grant(i, BIG, BIG)


def peer_grant(i: int) -> PeerGrant:
    return PeerGrant(LENDER, BIG + i, BIG, BIG)


def host_page(i: int) -> HostPage:
    return HostPage((63, i), grant(i), KEY, "int8_per_channel", KEY, KEY, 2**20, "remote")


def peer_page(i: int) -> PeerPage:
    return PeerPage((63, i), peer_grant(i), KEY, "int8_per_channel", KEY, KEY, 2**20, "int8_per_channel")


def stored_page(i: int) -> StoredPage:
    variant = "int8_per_channel"
    return StoredPage(grant(i), KEY, variant, variant, KEY, KEY, KEY, KEY[:16], i, 2**20, KEY, KEY[:16])


def pairs(n: int) -> list[tuple[bytes, str]]:
    return [(i.to_bytes(32, "big"), "int8_per_channel") for i in range(n)]


LISTS: dict[type, tuple[str, Callable[[int], Any]]] = {
    ReturnSlots: ("grants", lambda n: ReturnSlots([grant(i) for i in range(n)])),
    Stored: ("pages", lambda n: Stored([stored_page(i) for i in range(n)], "r" * 200)),
    Unsaved: ("pages", lambda n: Unsaved(pairs(n))),
    Copied: ("pages", lambda n: Copied("r", [(0, i) for i in range(n)], 1001 * n, 2.0)),
    Fetched: ("failed", lambda n: Fetched(7, pairs(n), "evicted", "x" * 200, 5, 0.5)),
    Lend: ("frames", lambda n: Lend([LentFrame(BIG + i, BIG) for i in range(n)])),
    Reclaim: ("offsets", lambda n: Reclaim([BIG + i for i in range(n)])),
    ReturnFrames: ("grants", lambda n: ReturnFrames([peer_grant(i) for i in range(n)])),
    StoredInPeer: (
        "pages",
        lambda n: StoredInPeer(
            [LentPage(peer_grant(i), KEY, "int8_per_channel", KEY, KEY, 2**20) for i in range(n)]
        ),
    ),
    Granted: ("grants", lambda n: Granted([grant(i) for i in range(n)])),
    Loaded: ("pages", lambda n: Loaded("r" * 200, [host_page(i) for i in range(n)])),
    SavePages: ("pages", lambda n: SavePages(pairs(n))),
    FramesGranted: ("grants", lambda n: FramesGranted([peer_grant(i) for i in range(n)])),
    RecallFrames: ("grants", lambda n: RecallFrames([peer_grant(i) for i in range(n)])),
    Reclaimed: ("offsets", lambda n: Reclaimed([BIG + i for i in range(n)])),
}
BOUNDED = {Locate, Finished, Fetch, Located}  # each has a test of its own below


def has_list(message: type) -> bool:
    return any("list" in str(field.type) for field in msgspec.structs.fields(message))


def test_every_message_with_a_list_is_bounded() -> None:
    with_lists = {message for message in get_args(ToNode | ToWorker) if has_list(message)}

    assert with_lists == LISTS.keys() | BOUNDED


@pytest.mark.parametrize("message", LISTS, ids=lambda message: message.__name__)
@pytest.mark.parametrize("size", [0, 1, MAX_ITEMS, MAX_ITEMS + 1, 3 * MAX_ITEMS + 5])
def test_the_parts_of_a_message_say_the_same_in_the_same_order(message: type, size: int) -> None:
    field, make = LISTS[message]
    whole = make(size)

    found = list(parts(whole))

    assert [item for part in found for item in getattr(part, field)] == getattr(whole, field)
    assert len(found) == max(1, -(-size // MAX_ITEMS))
    if len(found) == 1:
        assert found[0] == whole
    summed = {"nbytes", "seconds", "is_over"}
    for name in {f.name for f in msgspec.structs.fields(message)} - {field} - summed:
        assert {str(getattr(part, name)) for part in found} == {str(getattr(whole, name))}


@pytest.mark.parametrize("message", LISTS, ids=lambda message: message.__name__)
def test_no_part_comes_near_what_is_taken(message: type) -> None:
    _, make = LISTS[message]

    longest = max(len(frame(part)) for part in parts(make(40_000)))

    assert longest < MAX_FRAME_BYTES // 2


def test_a_copied_in_parts_counts_all_bytes_and_seconds_and_each_corrupt_page_once() -> None:
    refs = [(0, i) for i in range(2 * MAX_ITEMS + 7)]
    corrupt = [refs[0], refs[MAX_ITEMS], refs[-1]]

    found = [part for part in parts(Copied("r", refs, 10**9 + 1, 3.0, corrupt)) if isinstance(part, Copied)]

    assert sum(part.nbytes for part in found) == 10**9 + 1
    assert sum(part.seconds for part in found) == pytest.approx(3.0)
    assert [ref for part in found for ref in part.corrupt] == corrupt
    assert all(set(part.corrupt) <= set(part.pages) for part in found)


def test_a_fetch_is_over_with_the_last_part_alone() -> None:
    whole = Fetched(7, pairs(2 * MAX_ITEMS + 1), "evicted", "", 5, 0.5)

    found = [part for part in parts(whole) if isinstance(part, Fetched)]

    assert [(part.is_over, part.nbytes, part.seconds) for part in found] == [
        (False, 0, 0.0),
        (False, 0, 0.0),
        (True, 5, 0.5),
    ]


def test_pages_of_a_long_answer_that_come_later_are_loading_until_then() -> None:
    """A worker copies what it waits for and ends when nothing is left to come."""
    host = [host_page(i) for i in range(2 * MAX_ITEMS + 3)]
    peer = [peer_page(i) for i in range(len(host), len(host) + MAX_ITEMS + 2)]
    whole = Located("r", len(host) + len(peer) + 1, host, [(0, 5)], None, peer, [(0, 5)])

    first, *rest = parts(whole)

    assert isinstance(first, Located)
    later = [part for part in rest if isinstance(part, Loaded)]
    assert len(later) == len(rest)
    assert [*first.host, *(page for part in later for page in part.pages)] == host
    assert [*first.peer, *(page for part in later for page in part.peer)] == peer
    came = {page.page for part in later for page in (*part.pages, *part.peer)}
    assert set(first.loading) == {(0, 5)} | came
    assert (first.pages, first.missing, first.saving) == (whole.pages, None, [(0, 5)])
    assert max(len(frame(part)) for part in (first, *rest)) < MAX_FRAME_BYTES


def test_the_longest_answer_and_the_longest_question_are_taken() -> None:
    """At the bound of what a node looks at in one Locate."""
    most = Limits().keys_per_locate
    host = [host_page(i) for i in range(most // 2)]
    peer = [peer_page(i) for i in range(most // 2, most)]
    answer = Located("r" * 200, most, host, [], None, peer)
    chain = Chain(
        [KEY] * 10**6, [KEY] * 10**6, bytes(10**6), "raw", "int8_per_channel", 0, 0, 0, 0, 0, True, KEY
    )
    cut = cut_chains([chain] * 2, most)
    question = Locate("r" * 200, KEY, KEY, 16, 0, 0, cut, 0.0)
    keys = [[KEY] * most]
    use = Finished("r" * 200, keys, BIG, BIG, 0, 0, BIG, False, False, 0.0, 0.0, 0.0)
    fetch = Fetch(
        BIG, "n" * 256, "a" * 256, KEY, KEY, 16, 0, [FetchPage(grant(0), KEY, "raw", KEY)] * 64, 5.0
    )

    assert all(len(frame(part)) < MAX_FRAME_BYTES // 2 for part in parts(answer))
    assert all(len(frame(message)) < MAX_FRAME_BYTES for message in (question, use, fetch))


@pytest.mark.parametrize("num_chains", [1, 3])
def test_a_question_has_one_key_more_than_is_looked_at_and_is_else_left_alone(num_chains: int) -> None:
    chain = Chain([KEY] * 50, [KEY] * 50, bytes(50), "raw", "", 0, 0, 0, 0, 0, False)

    cut = cut_chains([chain] * num_chains, 30)
    whole = cut_chains([chain] * num_chains, 50 * num_chains)

    looked_at = 30 // num_chains
    assert [(len(c.keys), len(c.other_keys), len(c.held)) for c in cut] == [(looked_at + 1,) * 3] * num_chains
    assert whole == [chain] * num_chains
