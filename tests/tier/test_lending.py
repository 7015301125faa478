"""L2 at the node: who lends, who borrows, who reads, against a world that distrusts it."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from cache_world import (
    BF16,
    LRU,
    PAYLOAD_BYTES,
    SimWorker,
    World,
    chain_keys,
    key_of,
    tenant_of,
)
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.tier.node.recording import MODULES
from kvtier.tier.pages.page import TierName
from kvtier.tier.policy.base import PolicySettings
from kvtier.tier.protocol.events import Clear, Disconnect, Evict, FromWorker, WorkerRef
from kvtier.tier.protocol.messages import (
    ArenaGone,
    ArenaUnopened,
    FramesGranted,
    Lend,
    LentFrame,
    LoadFailed,
    Located,
    PeerGrant,
    Reclaim,
    ReturnFrames,
    WantFrames,
    WriteMode,
)
from kvtier.tier.record import checkpoint
from kvtier.tier.stats import TierCounters
from kvtier.tier.stores.base import Outcome

TENANT = "ada"
FRAMES = 16  # of a lender's arena


def l2(world: World) -> TierCounters:
    return world.node.snapshot().tiers[TierName.PEER]


def at_peers(located: Located) -> list[int]:
    return [page.page[1] for page in located.peer]


def lending_world(frames: int = 8, **more: Any) -> tuple[World, SimWorker, SimWorker]:
    """A world with a worker that has lent so many frames, and one that borrows."""
    world = World(**{"num_slots": 32, "ssd_slots": 32, **more})
    lender = world.connect("lender", "l1", arena_bytes=FRAMES * PAYLOAD_BYTES)
    borrower = world.connect("borrower", "b1", brings_down=False)
    world.lend(lender, range(frames))
    return world, lender, borrower


def put(world: World, borrower: SimWorker, path: str) -> None:
    """Store a chain in L3, and in L2 as far as frames go."""
    world.want(borrower, len(path))
    world.store(borrower, TENANT, path)
    for depth in range(len(path)):
        world.say(borrower, WantFrames(1, PAYLOAD_BYTES))
        world.store_in_peers(borrower, [(TENANT, path[: depth + 1])])


# ---- stories -----------------------------------------------------------------------------------------------------


def test_a_page_in_a_peers_frame_is_found_there_before_l3() -> None:
    world, _, borrower = lending_world()
    put(world, borrower, "abc")

    located = world.locate(borrower, "r", TENANT, "abcd")

    assert at_peers(located) == [0, 1, 2] and not located.host and not located.loading
    assert l2(world).pages == 3 and l2(world).demoted_pages == 3
    assert l2(world).capacity_bytes == 8 * PAYLOAD_BYTES and l2(world).used_bytes == 3 * PAYLOAD_BYTES


def test_a_page_that_one_worker_alone_uses_makes_room_once_that_has_it_again() -> None:
    world, _, borrower = lending_world()
    other = world.connect("other", "o1")
    put(world, borrower, "ab")
    world.locate(other, "r", TENANT, "a")
    world.copied_from_peers(other, "r", [0])

    world.locate(borrower, "r", TENANT, "ab")
    world.copied_from_peers(borrower, "r", [0, 1])

    assert at_peers(world.locate(borrower, "s", TENANT, "ab")) == [0]
    assert l2(world).promoted_pages == 3 and l2(world).evicted_pages == 0


def test_the_lender_itself_gets_the_page_from_l3() -> None:
    world, lender, borrower = lending_world()
    put(world, borrower, "ab")

    located = world.locate(lender, "r", TENANT, "ab")

    assert not located.peer and len(located.host) == 2


def test_a_page_without_a_copy_below_is_not_taken() -> None:
    world, _, borrower = lending_world()
    world.say(borrower, WantFrames(1, PAYLOAD_BYTES))

    world.store_in_peers(borrower, [(TENANT, "a")])

    assert l2(world).pages == 0 and l2(world).used_bytes == 0


def test_what_is_not_the_page_that_is_here_is_not_taken() -> None:
    world, _, borrower = lending_world()
    world.want(borrower, 1)
    world.store(borrower, TENANT, "a")
    for wrong in ({"tokens": 3}, {"spec_digest": b"?" * 16}, {"variant": "int4c"}):
        world.say(borrower, WantFrames(1, PAYLOAD_BYTES))
        world.store_in_peers(borrower, [(TENANT, "a")], **wrong)

    assert l2(world).pages == 0 and l2(world).used_bytes == 0


def test_with_the_last_copy_below_the_one_in_l2_goes() -> None:
    world, _, borrower = lending_world(ssd_slots=0)
    put(world, borrower, "ab")

    world.ask(Evict, (key_of(TENANT, "ab"),), TierName.HOST)

    assert world.held(TierName.PEER) == {(key_of(TENANT, "a"), BF16)}
    assert at_peers(world.locate(borrower, "r", TENANT, "ab")) == [0]


def test_a_page_that_l3_has_no_more_is_read_from_l2_and_not_from_l4() -> None:
    world, _, borrower = lending_world()
    put(world, borrower, "ab")
    world.finish_all()
    world.ask(Evict, tuple(chain_keys(TENANT, "ab")), TierName.HOST)

    located = world.locate(borrower, "r", TENANT, "ab", recompute_s=1e-9)

    assert at_peers(located) == [0, 1] and located.missing is None


def test_a_lender_has_what_nothing_uses_at_once() -> None:
    world, lender, borrower = lending_world()
    put(world, borrower, "ab")

    world.reclaim(lender, list(lender.lent))

    assert not lender.lent and l2(world).capacity_bytes == 0
    assert len(world.locate(borrower, "r", TENANT, "ab").host) == 2


def test_a_frame_that_is_read_goes_home_when_the_read_ends() -> None:
    world, lender, borrower = lending_world(frames=1)
    put(world, borrower, "a")
    world.locate(borrower, "r", TENANT, "a")

    world.reclaim(lender, [0])

    assert lender.lent and l2(world).pages == 0
    assert not world.locate(borrower, "s", TENANT, "a").peer
    world.copied_from_peers(borrower, "r", [0])
    assert not lender.lent


def test_a_frame_in_a_borrowers_stock_is_recalled() -> None:
    world, lender, borrower = lending_world(frames=1)
    (granted,) = world.say(borrower, WantFrames(1, PAYLOAD_BYTES))
    assert isinstance(granted, FramesGranted)

    world.reclaim(lender, [0])

    assert lender.lent and borrower.recalled == granted.grants
    world.return_frames(borrower, granted.grants)
    assert not lender.lent


def test_what_is_stored_into_a_recalled_frame_is_not_kept() -> None:
    world, lender, borrower = lending_world(frames=1)
    world.want(borrower, 1)
    world.store(borrower, TENANT, "a")
    world.say(borrower, WantFrames(1, PAYLOAD_BYTES))

    world.reclaim(lender, [0])
    world.store_in_peers(borrower, [(TENANT, "a")])

    assert not lender.lent and l2(world).pages == 0


def test_with_its_lender_a_page_is_gone_and_who_reads_it_is_told() -> None:
    world, lender, borrower = lending_world()
    put(world, borrower, "abc")
    world.say(borrower, WantFrames(1, PAYLOAD_BYTES))
    world.locate(borrower, "r", TENANT, "abc")

    borrower.messages.clear()
    world.die(lender)

    failed, gone = borrower.messages
    assert isinstance(failed, LoadFailed) and (failed.missing.page, failed.missing.reason) == (
        0,
        "load_failed",
    )
    assert isinstance(gone, ArenaGone) and gone.lender == "l1"
    assert l2(world).capacity_bytes == l2(world).used_bytes == l2(world).pages == 0
    assert world.node.is_idle or world.writer
    assert len(world.locate(borrower, "r", TENANT, "abc").host) == 3


def test_what_a_borrower_held_is_free_once_it_is_gone() -> None:
    world, _, borrower = lending_world(frames=1)
    put(world, borrower, "a")
    other = world.connect("other", "o1")
    world.locate(borrower, "r", TENANT, "a")
    assert world.say(other, WantFrames(1, PAYLOAD_BYTES)) == []

    world.die(borrower)

    assert len(other.stock) == 1


def test_the_page_worth_least_makes_room_for_one_to_come() -> None:
    world, _, borrower = lending_world(frames=2, policy=LRU)
    put(world, borrower, "ab")
    world.now += 1
    world.locate(borrower, "r", TENANT, "a")
    world.release(borrower, "r")
    world.finished(borrower, TENANT, "a")
    world.now += 1

    world.say(borrower, WantFrames(1, PAYLOAD_BYTES))

    assert world.held(TierName.PEER) == {(key_of(TENANT, "a"), BF16)}
    assert l2(world).evicted_pages == 1


def test_a_corrupt_copy_is_dropped_and_counted() -> None:
    world, _, borrower = lending_world()
    put(world, borrower, "ab")
    world.locate(borrower, "r", TENANT, "ab")

    world.copied_from_peers(borrower, "r", [0], corrupt=[0])

    assert l2(world).corrupt_pages == 1
    world.release(borrower, "r")
    located = world.locate(borrower, "s", TENANT, "ab")
    assert at_peers(located) == [1] and [page.page[1] for page in located.host] == [0]


def test_a_worker_that_cannot_open_an_arena_gets_nothing_of_it() -> None:
    world, _, borrower = lending_world()
    other = world.connect("other", "o1")
    put(world, borrower, "ab")
    world.say(other, WantFrames(1, PAYLOAD_BYTES))
    used = l2(world).used_bytes

    world.say(other, ArenaUnopened("l1", "no such device"))
    other.stock.clear()

    assert l2(world).used_bytes == used - PAYLOAD_BYTES
    assert world.say(other, WantFrames(1, PAYLOAD_BYTES)) == []
    assert len(world.locate(other, "r", TENANT, "ab").host) == 2
    assert any("no such device" in note for note in world.notes)


def test_a_cleared_tenants_page_does_not_come_back_from_a_peer() -> None:
    world, _, borrower = lending_world()
    put(world, borrower, "a")
    world.say(borrower, WantFrames(1, PAYLOAD_BYTES))

    world.ask(Clear, tenant_of(TENANT))
    world.store_in_peers(borrower, [(TENANT, "a")])

    assert world.held(TierName.PEER) == set() and l2(world).used_bytes == 0


def test_a_copy_that_began_before_a_clear_is_not_taken_for_the_page_that_was_made_since() -> None:
    """The borrower hasn't heard of the clear; another worker has, and has made the same page again."""
    world, _, borrower = lending_world()
    put(world, borrower, "a")
    world.say(borrower, WantFrames(1, PAYLOAD_BYTES))
    world.ask(Clear, tenant_of(TENANT), 7)
    other = world.connect("other", "o1")
    other.knows[tenant_of(TENANT)] = 7
    world.want(other, 1)
    world.store(other, TENANT, "a")

    world.store_in_peers(borrower, [(TENANT, "a")])

    assert world.held(TierName.HOST) == {(key_of(TENANT, "a"), "bf16")}
    assert world.held(TierName.PEER) == set() and l2(world).used_bytes == 0


def test_operators_see_and_evict_what_is_in_l2() -> None:
    world, _, borrower = lending_world()
    put(world, borrower, "ab")

    ticket = world.ask(Evict, tuple(chain_keys(TENANT, "ab")), TierName.PEER)

    assert [outcome for _, outcome in world.answers[ticket]] == [Outcome.ACCEPTED] * 2
    assert world.held(TierName.PEER) == set() and len(world.held(TierName.HOST)) == 2


def test_what_is_evicted_everywhere_while_it_is_read_in_l2_is_said_to_go_later() -> None:
    world, _, borrower = lending_world()
    put(world, borrower, "ab")
    world.finish_writes()
    world.locate(borrower, "r", TENANT, "a")

    ticket = world.ask(Evict, tuple(chain_keys(TENANT, "ab")), None)

    assert [outcome for _, outcome in world.answers[ticket]] == [Outcome.DEFERRED, Outcome.ACCEPTED]
    assert world.held(TierName.PEER) == set() and l2(world).used_bytes == PAYLOAD_BYTES
    world.copied_from_peers(borrower, "r", [0])
    assert l2(world).used_bytes == 0


@pytest.mark.parametrize(
    ("frames", "named"),
    [
        ([LentFrame(0, PAYLOAD_BYTES + 1)], "some of them twice"),
        (
            [LentFrame(15 * PAYLOAD_BYTES, PAYLOAD_BYTES), LentFrame(14 * PAYLOAD_BYTES + 1, PAYLOAD_BYTES)],
            "twice",
        ),
        ([LentFrame(FRAMES * PAYLOAD_BYTES, 1)], f"of an arena of {FRAMES * PAYLOAD_BYTES}"),
        ([LentFrame(-1, 5)], "bytes -1 to 4"),
        ([LentFrame(0, 0)], "bytes 0 to 0"),
    ],
)
def test_frames_that_cannot_be_end_the_lenders_connection(frames: list[LentFrame], named: str) -> None:
    world, _, _ = lending_world(frames=8)
    world.workers[WorkerRef("lender", "l1")].lent.clear()

    commands = world.node.handle(FromWorker(WorkerRef("lender", "l1"), Lend(frames)), world.now)

    (disconnect,) = [command for command in commands if isinstance(command, Disconnect)]
    assert named in disconnect.reason
    world.node.check()


def test_who_has_no_arena_lends_nothing() -> None:
    world, _, borrower = lending_world()

    commands = world.node.handle(FromWorker(borrower.ref, Lend([LentFrame(0, PAYLOAD_BYTES)])), world.now)

    (disconnect,) = [command for command in commands if isinstance(command, Disconnect)]
    assert "named no arena" in disconnect.reason
    world.node.check()


def test_a_grant_that_is_not_ones_own_ends_nothing() -> None:
    world, _, borrower = lending_world(frames=1)
    other = world.connect("other", "o1")
    (granted,) = world.say(borrower, WantFrames(1, PAYLOAD_BYTES))
    assert isinstance(granted, FramesGranted)
    (grant,) = granted.grants

    world.say(other, ReturnFrames([grant]))
    world.say(
        borrower,
        ReturnFrames([PeerGrant(grant.lender, grant.offset, grant.generation - 1, grant.payload_bytes)]),
    )

    assert l2(world).used_bytes == PAYLOAD_BYTES


def test_stocks_leave_most_of_l2_to_pages() -> None:
    world, _, borrower = lending_world(frames=16)
    others = [world.connect(f"w{i}", f"o{i}") for i in range(2)]

    for worker in (borrower, *others):
        world.say(worker, WantFrames(100, PAYLOAD_BYTES))

    assert [len(worker.stock) for worker in (borrower, *others)] == [1, 1, 1]


def test_a_node_that_lends_is_the_same_read_from_a_recording() -> None:
    world, lender, borrower = lending_world()
    put(world, borrower, "ab")
    world.say(borrower, WantFrames(1, PAYLOAD_BYTES))
    world.locate(borrower, "r", TENANT, "ab")

    again = checkpoint.load(checkpoint.dump(world.node, MODULES), MODULES)

    again.check()
    event = FromWorker(lender.ref, Reclaim(list(lender.lent)))
    assert again.handle(event, world.now) == world.node.handle(event, world.now)
    again.check()


# ---- random lives ------------------------------------------------------------------------------------------------

NAMES = ("w0", "w1", "w2")
PATHS = ("a", "ab", "abc", "abd", "b", "bc")
WRITES: tuple[WriteMode, ...] = ("through", "demote")


class Actors:
    """Workers that lend, borrow, read, take back, cheat and die. The world asserts that each command is safe."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.lives = 0

    def worker(self, name: str) -> SimWorker:
        for worker in self.world.workers.values():
            if worker.ref.worker_id == name:
                return worker
        self.lives += 1
        arena = FRAMES * PAYLOAD_BYTES if name != "w2" else 0
        return self.world.connect(name, f"i{self.lives}", arena_bytes=arena, brings_down=name == "w1")

    def lend(self, name: str, first: int, count: int) -> None:
        worker = self.worker(name)
        if name != "w2":
            self.world.lend(worker, range(first, min(FRAMES, first + count)))

    def reclaim(self, name: str, which: int) -> None:
        worker = self.worker(name)
        self.world.reclaim(worker, [at for at in worker.lent if which >> (at // PAYLOAD_BYTES) & 1])

    def want(self, name: str, count: int) -> None:
        self.world.say(self.worker(name), WantFrames(count, PAYLOAD_BYTES))

    def give_back(self, name: str, only_recalled: bool) -> None:
        worker = self.worker(name)
        self.world.return_frames(worker, list(worker.recalled if only_recalled else worker.stock))

    def push(self, name: str, path: str, **wrong: Any) -> None:
        worker = self.worker(name)
        self.world.store_in_peers(worker, [(TENANT, path[: i + 1]) for i in range(len(path))], **wrong)

    def push_stale(self, name: str, path: str) -> None:
        worker = self.worker(name)
        if worker.stock:
            self.world.say(worker, ReturnFrames([PeerGrant("i0", 0, 1, PAYLOAD_BYTES)]))

    def store(self, name: str, path: str, hold: bool) -> None:
        worker = self.worker(name)
        self.world.want(worker, len(path))
        self.world.store(worker, TENANT, path, hold_for="h" if hold else None)

    def locate(self, name: str, request: str, path: str, cost: float) -> None:
        self.world.locate(self.worker(name), request, TENANT, path, recompute_s=cost)

    def copy(self, name: str, request: str, which: int, corrupt: int) -> None:
        worker = self.worker(name)
        pages = [page for _, page in worker.peer_leases.get(request, {}) if which >> page & 1]
        if pages:
            bad = [page for page in pages if corrupt >> page & 1]
            self.world.copied_from_peers(worker, request, pages, bad)
        others = [ref for ref in worker.leases.get(request, {}) if which >> ref[1] & 1]
        if others:
            self.world.copied(worker, request, others)

    def release(self, name: str, request: str, from_page: int) -> None:
        self.world.release(self.worker(name), request, from_page)

    def finish(self, name: str, path: str) -> None:
        self.world.finished(self.worker(name), TENANT, path)

    def die(self, name: str) -> None:
        self.world.die(self.worker(name))

    def evict(self, path: str, tier: TierName | None) -> None:
        self.world.ask(Evict, tuple(chain_keys(TENANT, path)), tier)

    def clear(self, is_numbered: bool = False) -> None:
        """Of what workers have told the node, too."""
        world = self.world
        world.number += is_numbered
        world.ask(Clear, None, world.number if is_numbered else 0)
        while world.to_catch_up:
            world.ask(Clear, *world.to_catch_up.popleft())

    def hears(self, name: str) -> None:
        """A worker hears of the latest clear."""
        self.worker(name).knows[None] = self.world.number

    def end(self) -> None:
        """All gives back what it has; then every frame is free, and goes home."""
        world = self.world
        world.settle()
        for worker in list(world.workers.values()):
            for request in ("h", "r0", "r1"):
                world.release(worker, request)
            world.say(worker, WantFrames(0, PAYLOAD_BYTES))
        for worker in list(world.workers.values()):
            world.return_frames(worker, list(worker.stock))
        assert l2(world).used_bytes == l2(world).pages * PAYLOAD_BYTES
        for worker in list(world.workers.values()):
            world.reclaim(worker, list(worker.lent))
            assert not worker.lent and not worker.asked_back
        assert l2(world).capacity_bytes == l2(world).pages == l2(world).used_bytes == 0
        for worker in list(world.workers.values()):
            world.die(worker)
        world.finish_all()
        assert world.node.is_idle


names, paths, requests = map(st.sampled_from, (NAMES, PATHS, ("r0", "r1")))
bits = st.integers(0, 2**FRAMES - 1)


class Lives(RuleBasedStateMachine):
    """What hypothesis makes of the actors."""

    def __init__(self) -> None:
        super().__init__()
        self.actors = Actors(World(4, 4))

    @initialize(slots=st.integers(2, 8), ssd=st.sampled_from([0, 4, 8]), write=st.sampled_from(WRITES))
    def start(self, slots: int, ssd: int, write: WriteMode) -> None:
        self.actors = Actors(World(slots, ssd, write=write))

    @rule(name=names, first=st.integers(0, FRAMES), count=st.integers(1, 8))
    def lends(self, **what: Any) -> None:
        self.actors.lend(**what)

    @rule(name=names, which=bits)
    def takes_back(self, **what: Any) -> None:
        self.actors.reclaim(**what)

    @rule(name=names, count=st.integers(0, 4))
    def wants(self, **what: Any) -> None:
        self.actors.want(**what)

    @rule(name=names, only_recalled=st.booleans())
    def gives_back(self, **what: Any) -> None:
        self.actors.give_back(**what)

    @rule(name=names, path=paths)
    def stores_in_peers(self, **what: Any) -> None:
        self.actors.push(**what)

    @rule(name=names, path=paths, hold=st.booleans())
    def stores(self, **what: Any) -> None:
        self.actors.store(**what)

    @rule(name=names, request=requests, path=paths, cost=st.sampled_from([0.0, 1e-9]))
    def locates(self, **what: Any) -> None:
        self.actors.locate(**what)

    @rule(name=names, request=requests, which=st.integers(0, 7), corrupt=st.just(0) | st.integers(0, 7))
    def copies(self, **what: Any) -> None:
        self.actors.copy(**what)

    @rule(name=names, request=requests, from_page=st.integers(0, 2))
    def releases(self, **what: Any) -> None:
        self.actors.release(**what)

    @rule(name=names, path=paths)
    def finishes(self, **what: Any) -> None:
        self.actors.finish(**what)

    @rule(name=names)
    def dies(self, name: str) -> None:
        self.actors.die(name)

    @rule(path=paths, tier=st.sampled_from([None, TierName.PEER, TierName.HOST, TierName.SSD]))
    def operator_evicts(self, **what: Any) -> None:
        self.actors.evict(**what)

    @rule(is_numbered=st.booleans())
    def operator_clears(self, is_numbered: bool) -> None:
        self.actors.clear(is_numbered)

    @rule(name=st.sampled_from(NAMES))
    def hears_of_a_clear(self, name: str) -> None:
        self.actors.hears(name)

    @precondition(lambda self: self.actors.world.writer or self.actors.world.reads)
    @rule()
    def io_ends(self) -> None:
        self.actors.world.finish_all()

    @rule()
    def time_passes(self) -> None:
        self.actors.world.now += 1.0

    @invariant()
    def l2_holds_what_is_said(self) -> None:
        self.actors.world.held(TierName.PEER)

    def teardown(self) -> None:
        self.actors.end()


Lives.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLives = Lives.TestCase


@given(seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None, phases=[Phase.generate])
def test_busy_lives_break_nothing(seed: int) -> None:
    rng = Random(seed)
    policy = PolicySettings(name=rng.choice(["lru", "rvi"]))
    actors = Actors(World(rng.randint(4, 12), rng.choice([0, 8]), policy=policy, write=rng.choice(WRITES)))
    rare = [
        lambda: actors.die(rng.choice(NAMES)),
        lambda: actors.clear(rng.random() < 0.5),
        lambda: actors.hears(rng.choice(NAMES)),
        lambda: actors.push(rng.choice(NAMES), rng.choice(PATHS), tokens=3),
        lambda: actors.push_stale(rng.choice(NAMES), "a"),
    ]
    usual = [
        lambda: actors.lend(rng.choice(NAMES), rng.randrange(FRAMES), rng.randint(1, 8)),
        lambda: actors.reclaim(rng.choice(NAMES), rng.randrange(2**FRAMES)),
        lambda: actors.want(rng.choice(NAMES), rng.randint(1, 4)),
        lambda: actors.give_back(rng.choice(NAMES), rng.random() < 0.8),
        lambda: actors.evict(rng.choice(PATHS), rng.choice([None, *TierName])),
        lambda: actors.world.finish_all(),
    ]
    often = [
        lambda: actors.push(rng.choice(NAMES), rng.choice(PATHS)),
        lambda: actors.store(rng.choice(NAMES), rng.choice(PATHS), rng.random() < 0.2),
        lambda: actors.locate(rng.choice(NAMES), rng.choice(("r0", "r1")), rng.choice(PATHS), 0.0),
        lambda: actors.copy(
            rng.choice(NAMES), rng.choice(("r0", "r1")), 7, rng.randrange(8) * (rng.random() < 0.1)
        ),
        lambda: actors.release(rng.choice(NAMES), rng.choice(("r0", "r1")), rng.randrange(3)),
        lambda: actors.finish(rng.choice(NAMES), rng.choice(PATHS)),
    ]
    for _ in range(200):
        (deeds,) = rng.choices([rare, usual, often], [1, 8, 16])
        rng.choice(deeds)()
        actors.world.now += rng.choice([0.0, 0.01, 10.0])
    actors.end()


@given(seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None, phases=[Phase.generate])
def test_a_reclaim_waits_for_what_is_used_now_and_for_nothing_that_comes_later(seed: int) -> None:
    """So each frame is home once its borrower has spoken of it once more, however busy all are."""
    rng = Random(seed)
    actors = Actors(World(rng.randint(4, 12), 8, write=rng.choice(WRITES)))
    world = actors.world
    lender = actors.worker("w0")
    actors.lend("w0", 0, FRAMES)
    for _ in range(rng.randint(10, 80)):
        be_busy(actors, rng)

    world.reclaim(lender, list(lender.lent))

    owed = used_of(world, lender)
    assert set(lender.lent) == owed
    for _ in range(rng.randint(0, 40)):
        be_busy(actors, rng)
        assert set(lender.lent) == (owed := owed & used_of(world, lender))
    for worker in list(world.workers.values()):
        world.return_frames(worker, list(worker.recalled))
        for request, leases in list(worker.peer_leases.items()):
            mine = [page for (_, page), peer in leases.items() if peer.grant.lender == lender.ref.incarnation]
            world.copied_from_peers(worker, request, mine)
    assert not lender.lent


def be_busy(actors: Actors, rng: Random) -> None:
    """A borrower stores, reads, or ends a read."""
    name, request, path = rng.choice(("w1", "w2")), rng.choice(("r0", "r1")), rng.choice(PATHS)
    deeds: list[Callable[[], None]] = [
        lambda: actors.want(name, rng.randint(1, 4)),
        lambda: actors.store(name, path, False),
        lambda: actors.push(name, path),
        lambda: actors.locate(name, request, path, 0.0),
        lambda: actors.copy(name, request, rng.randrange(8), 0),
        lambda: actors.release(name, request, rng.randrange(3)),
        lambda: actors.world.finish_all(),
    ]
    rng.choice(deeds)()


def used_of(world: World, lender: SimWorker) -> set[int]:
    """A lender's frames that others have in stock, or read."""
    grants = [
        grant
        for worker in world.workers.values()
        for grant in (
            *worker.stock,
            *(peer.grant for leases in worker.peer_leases.values() for peer in leases.values()),
        )
    ]
    return {grant.offset for grant in grants if grant.lender == lender.ref.incarnation}
