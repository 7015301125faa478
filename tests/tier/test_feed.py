"""A feed and a directory that forgets, over a channel that loses, repeats and delays: in the end they agree."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.cluster.directory.core import DirectoryCore
from kvtier.tier.pages.page import TierName
from kvtier.tier.protocol.kv_events import (
    HEARTBEAT_S,
    KEY_BYTES,
    PATIENCE_S,
    SOON_KEYS,
    Batch,
    Feed,
    Reply,
    Source,
)

L3, L4 = TierName.HOST, TierName.SSD
SOURCE = Source("node:n0", "life-0", "n0", "", "host:1")


def key(number: int) -> bytes:
    """A page's key; those of different numbers differ in their first bytes."""
    return number.to_bytes(KEY_BYTES, "big") + bytes(32 - KEY_BYTES)


def shorts(prefixes: bytes) -> list[bytes]:
    return [prefixes[at : at + KEY_BYTES] for at in range(0, len(prefixes), KEY_BYTES)]


def live_feed(**options: int) -> Feed:
    """A feed whose first snapshot, an empty one, is taken."""
    feed = Feed(SOURCE, (L3, L4), **options)
    feed.announce_snapshot()
    feed.begin_snapshot({})
    assert feed.take(0.0) == Batch(SOURCE, 0, (), opens=True, closes=True)
    feed.answered("ok")
    return feed


# ---- when what is sent -------------------------------------------------------------------------------------------


def test_few_keys_wait_a_moment_many_go_at_once() -> None:
    feed = live_feed()

    feed.note(L3, [key(1)], [])
    assert feed.take(0.5) is None
    assert feed.take(0.5 + PATIENCE_S / 2) is None
    batch = feed.take(0.5 + PATIENCE_S)
    assert batch is not None and [shorts(c.came) for c in batch.changes] == [[key(1)[:KEY_BYTES]]]
    feed.answered("ok")

    feed.note(L4, map(key, range(SOON_KEYS)), [])
    batch = feed.take(0.7)
    assert batch is not None and len(shorts(batch.changes[0].came)) == SOON_KEYS


def test_a_silent_feed_says_each_second_that_it_lives() -> None:
    feed = live_feed()

    assert feed.take(HEARTBEAT_S - 0.01) is None
    assert feed.take(HEARTBEAT_S) == Batch(SOURCE, 1, ())
    feed.answered("ok")
    assert feed.take(HEARTBEAT_S + 0.5) is None


def test_of_what_happened_to_a_key_before_it_is_sent_the_last_thing_counts() -> None:
    """The note that a key came may be a repetition: were it forgotten when the key leaves, the directory kept the key."""
    feed = live_feed()

    feed.note(L3, [key(1), key(2)], [])
    feed.note(L3, [key(3)], [key(1), key(4)])
    feed.note(L3, [key(4)], [key(3)])

    batch = feed.take(1.0)
    assert batch is not None and len(batch.changes) == 1
    assert set(shorts(batch.changes[0].came)) == {key(2)[:KEY_BYTES], key(4)[:KEY_BYTES]}
    assert set(shorts(batch.changes[0].left)) == {key(1)[:KEY_BYTES], key(3)[:KEY_BYTES]}


def test_a_batch_is_given_again_until_it_is_answered_and_takes_up_nothing_new() -> None:
    feed = live_feed()
    feed.note(L3, [key(1)], [])
    first = feed.take(1.0)

    feed.note(L3, [key(2)], [])

    assert feed.take(9.0) is first
    feed.answered("ok")
    second = feed.take(10.0)
    assert first is not None and second is not None and second.number == first.number + 1


def test_a_batch_holds_no_more_keys_than_it_may() -> None:
    feed = live_feed(batch_keys=10)
    feed.note(L3, map(key, range(25)), [])
    feed.note(L4, map(key, range(5)), [])

    sizes = []
    while (batch := feed.take(5.0)) is not None:
        sizes.append(sum(len(shorts(change.came)) for change in batch.changes))
        feed.answered("ok")

    assert sizes == [10, 10, 10]


def test_more_changes_than_are_kept_end_in_a_snapshot() -> None:
    feed = live_feed(max_pending=100)

    feed.note(L3, map(key, range(101)), [])

    assert feed.snapshot_needed and feed.take(5.0) is None
    feed.note(L3, map(key, range(1000)), [])  # is not even kept
    feed.announce_snapshot()
    feed.note(L3, map(key, range(101)), [])  # again, before the keys are there
    feed.begin_snapshot({L3: map(key, range(101))})
    assert feed.snapshot_needed and feed.take(5.0) is None


def test_a_snapshot_comes_in_parts_with_changes_between_them() -> None:
    feed = live_feed(batch_keys=10)
    feed.answered("snapshot")
    feed.announce_snapshot()
    feed.begin_snapshot({L3: map(key, range(12))})
    first = feed.take(5.0)
    feed.answered("ok")
    feed.note(L3, [key(99)], [key(2), key(11)])  # one of a part that was sent, one of a part that wasn't
    second = feed.take(5.0)
    feed.answered("ok")
    third = feed.take(5.0)

    assert first is not None and (first.opens, first.closes) == (True, False)
    assert second is not None and (second.opens, second.closes) == (False, False)
    assert third is not None and (third.opens, third.closes) == (False, True)
    assert shorts(second.changes[0].came) == [key(99)[:KEY_BYTES]]
    assert set(shorts(second.changes[0].left)) == {key(2)[:KEY_BYTES], key(11)[:KEY_BYTES]}
    assert [shorts(change.came) for change in third.changes] == [[key(10)[:KEY_BYTES]]]


def test_a_key_noted_before_the_snapshot_that_has_it_too_may_still_leave() -> None:
    """It was told by a part; forgetting that it came, because it left before that was sent, would leave it there."""
    feed, directory = live_feed(batch_keys=2), DirectoryCore()
    feed.lose()
    feed.announce_snapshot()
    feed.note(L3, [key(3), key(1)], [])
    feed.begin_snapshot({L3: [key(1), key(3)]})
    batch = feed.take(1.0)
    assert batch is not None and [shorts(c.came) for c in batch.changes] == [[key(3)[:8]], [key(1)[:8]]]
    feed.answered(directory.publish(batch, 1.0))

    feed.note(L3, [], [key(1)])
    while not feed.is_quiet:
        batch = feed.take(2.0)
        assert batch is not None
        feed.answered(directory.publish(batch, 2.0))

    assert directory.lookup(key(1)[:8], 2.0) == []
    assert directory.lookup(key(3)[:8], 2.0) != []


# ---- with a directory --------------------------------------------------------------------------------------------


KEYS = st.lists(st.integers(0, 15), max_size=6, unique=True)


class FeedAndDirectory(RuleBasedStateMachine):
    """Truth changes; batches are lost, repeated, delayed; either side restarts; at rest all agree."""

    @initialize(batch_keys=st.sampled_from([2, 6, 4096]), max_pending=st.sampled_from([8, 10_000]))
    def begin(self, batch_keys: int, max_pending: int) -> None:
        self.options = {"batch_keys": batch_keys, "max_pending": max_pending}
        self.truth: dict[TierName, set[int]] = {L3: set(), L4: set()}
        self.directory = DirectoryCore()
        self.now, self.lives = 0.0, 0
        self.late: list[Batch] = []
        self.taken: dict[TierName, set[int]] | None = None
        self.new_feed()
        self.rest()

    def new_feed(self) -> None:
        self.lives += 1
        self.feed = Feed(replace(SOURCE, incarnation=f"life-{self.lives}"), (L3, L4), **self.options)
        self.taken, self.is_asked = None, False

    @rule(tier=st.sampled_from([L3, L4]), came=KEYS, left=KEYS)
    def change(self, tier: TierName, came: list[int], left: list[int]) -> None:
        """Some of these come where they are already, and leave where they aren't."""
        left = [number for number in left if number not in came]
        self.truth[tier] = (self.truth[tier] | set(came)) - set(left)
        self.feed.note(tier, map(key, came), map(key, left))

    @rule(fate=st.sampled_from(["sent", "sent", "lost", "no answer", "late", "twice"]))
    def step(self, fate: str) -> None:
        """The next thing that a publisher does: a snapshot takes three of them, and much may happen between."""
        self.now += 0.2
        if self.feed.snapshot_needed:
            self.feed.announce_snapshot()
            self.taken, self.is_asked = None, True
        elif self.is_asked and self.taken is None:
            self.taken = {tier: set(keys) for tier, keys in self.truth.items()}
        elif self.is_asked and self.taken is not None:
            keys = {tier: map(key, sorted(numbers)) for tier, numbers in self.taken.items()}
            self.feed.begin_snapshot(keys)
            self.is_asked = False
        elif (batch := self.feed.take(self.now)) is not None and fate != "lost":
            self.send(batch, fate)

    def send(self, batch: Batch, fate: str) -> None:
        self.late.append(batch)  # and may come once more, whatever happens now
        if fate == "late":
            return
        reply = self.publish(batch)
        if fate == "twice":
            assert self.publish(batch) == reply
        self.last_ok = batch if reply == "ok" else None
        if fate != "no answer":
            self.feed.answered(reply)

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def arrive_late(self, data: st.DataObject) -> None:
        self.publish(self.late.pop(data.draw(st.integers(0, len(self.late) - 1))))

    @rule()
    def directory_restarts(self) -> None:
        self.directory = DirectoryCore()

    @rule(is_emptied=st.booleans())
    def owner_restarts(self, is_emptied: bool) -> None:
        if is_emptied:
            self.truth = {L3: set(), L4: set()}
        self.new_feed()

    @rule()
    def rest(self) -> None:
        """For as long as it takes; then the directory must believe what is true."""
        self.last_ok = None
        for _ in range(200):
            self.now += HEARTBEAT_S
            self.step("sent")
            if self.feed.is_quiet and self.last_ok is not None and not self.last_ok.changes:
                break
        assert self.feed.is_quiet
        for number in range(16):
            held = {h.tier for h in self.directory.lookup(key(number)[:KEY_BYTES], self.now)}
            in_l3, in_l4 = number in self.truth[L3], number in self.truth[L4]
            assert (L3 in held, L4 in held) == (in_l3, in_l3 or in_l4), number
        stats = self.directory.stats(self.now)
        assert stats.entries == len(self.truth[L3] | self.truth[L4])
        assert [holder.is_whole for holder in stats.holders] == [True]

    def publish(self, batch: Batch) -> Reply:
        return self.directory.publish(batch, self.now)

    @invariant()
    def counts_are_right(self) -> None:
        if hasattr(self, "directory"):
            self.directory.check()

    def teardown(self) -> None:
        if hasattr(self, "directory"):
            self.rest()


FeedAndDirectory.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestFeedAndDirectory = FeedAndDirectory.TestCase
