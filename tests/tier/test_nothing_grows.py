"""A node's memory does not depend on how long it has run: many short lives leave its tables as few did."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterator, Mapping

import numpy as np
import pytest
from cache_world import BF16, PAYLOAD_BYTES, SimWorker, World, chain_keys, key_of, tenant_of

from kvtier.tier.node.state.ranking import Histories
from kvtier.tier.node.state.records import Limits
from kvtier.tier.pages.page import TierName
from kvtier.tier.policy.base import Kind, PolicySettings, Use
from kvtier.tier.policy.guard import Guarded
from kvtier.tier.protocol.events import Clear, Evict, Pin, Unpin, Verify
from kvtier.tier.protocol.messages import Finished, NewRoot, WriteMode

LIMITS = Limits(gone=16, roots=4, specs=4, contents=8, peers=2, requests_per_worker=4)
# Bounded by numbers that no test gets to: what requests begin with, and what a policy has learned from.
LEARNED = {"Stems", "ReuseIntervals", "ReuseModel", "PageNames", "GhostCache"}


def sizes(root: object) -> Counter[str]:
    """How many things each attribute of each class holds, summed over all objects that hang on `root`."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    to_see: list[tuple[str, object]] = [("", root)]
    while to_see:
        name, value = to_see.pop()
        if isinstance(value, (str, bytes, int, float, np.ndarray, type(None), type)) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, array):
            continue
        if isinstance(value, Mapping):
            found[name] += len(value)
            to_see += [(name, one) for pair in value.items() for one in pair]
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            found[name] += len(value)
            to_see += [(name, one) for one in value]
        elif type(value).__module__.startswith("kvtier."):
            kind = type(value).__name__
            if kind not in LEARNED:
                to_see += [(f"{kind}.{attribute}", one) for attribute, one in attributes(value)]
    return found


def attributes(value: object) -> Iterator[tuple[str, object]]:
    names = dict.fromkeys(getattr(value, "__dict__", ()))
    for kind in type(value).__mro__:
        for listed in ("__slots__", "__struct_fields__"):
            some = kind.__dict__.get(listed, ())
            names |= dict.fromkeys(some if isinstance(some, (tuple, list)) else ())
    return ((name, getattr(value, name)) for name in names if hasattr(value, name))


class Lives:
    """One worker, tenant, session, identity, page shape and other node after the other, each new."""

    def __init__(self, write: WriteMode, policy: PolicySettings) -> None:
        self.world = World(
            8, 8, LIMITS, write=write, policy=policy, shares={"ada": 0.5, "bob": 0.5}, segment_slots=2
        )
        self.exchange = self.world.connect_exchange()
        self.lender = self.world.connect("lender", "l", arena_bytes=4 * PAYLOAD_BYTES)
        self.world.lend(self.lender, range(4))
        self.number = 0

    def live(self) -> None:
        self.number += 1
        world, number = self.world, self.number
        world.now += 10.0
        tenant = ("ada", "bob", f"tenant{number}")[number % 3]
        worker = world.connect(
            f"w{number % 3}",
            f"i{number}",
            fields={"weights": f"w{number}"},
            payloads={(0, BF16): PAYLOAD_BYTES, (number, BF16): 1 + number % 4000},
        )
        world.say(worker, NewRoot({"weights": f"other {number}"}))
        path = "".join(chr(0x4E00 + (number * 4 + n) % 20000) for n in range(4))
        self._store(worker, tenant, path)
        self._use(worker, tenant, path)
        self._fetch(worker, tenant, path)
        key = key_of(tenant, path[0])
        for verb in (Pin, Verify, Unpin):
            world.ask(verb, (key,))
        world.ask(Evict, (key,), (None, TierName.HOST, TierName.SSD)[number % 3])
        world.settle()
        world.die(worker)
        world.settle()

    def _store(self, worker: SimWorker, tenant: str, path: str) -> None:
        world, stored = self.world, 0
        for _ in path:
            world.want(worker, len(path) - stored)
            world.finish_all()
            stored += world.store(
                worker, tenant, path[: stored + len(worker.grants)], first=stored, content=tenant_of(path)
            )
            world.finish_all()
        assert stored

    def _use(self, worker: SimWorker, tenant: str, path: str) -> None:
        world, number = self.world, self.number
        world.locate(worker, f"r{number}", tenant, path, recompute_s=1.0)
        world.settle()
        world.finished(worker, tenant, path, session=number, closed=number % 2 == 0, kind=int(Kind.TURN))
        keys = chain_keys(tenant, path)
        elsewhere = [key_of(tenant, f"{path}{n}") for n in range(4)]  # in L1 alone
        used = Finished("q", [[*keys, *elsewhere]], 4, 8, 0, 0, number, False, False, 1.0, 0.0, 0.0)
        world.say(worker, used)

    def _fetch(self, worker: SimWorker, tenant: str, path: str) -> None:
        world, number = self.world, self.number
        world.locate(worker, f"f{number}", tenant, f"{path}x", remotes=[(f"n{number}", 9)], recompute_s=9.0)
        world.settle()


RUNS = {
    "lru": ("through", PolicySettings(name="lru")),
    "guarded rvi": ("through", PolicySettings(name="rvi")),
    "demoting rvi": ("demote", PolicySettings(name="rvi", guard=False)),
}


@pytest.mark.parametrize(("write", "policy"), RUNS.values(), ids=RUNS)
def test_many_short_lives_leave_what_few_did(write: WriteMode, policy: PolicySettings) -> None:
    lives = Lives(write, policy)
    most: Counter[str] = Counter()
    for _ in range(40):  # all that has a bound is at its bound
        lives.live()
        most |= sizes(lives.world.node)

    for _ in range(60):
        lives.live()

    left = sizes(lives.world.node)
    # What each life leaves one thing in has 60 more; a table with a bound is as full as it happens to be.
    grown = {name: (most[name], size) for name, size in left.items() if size > 1.1 * most[name] + 16}
    del grown["TierCounters.loads_s"]  # its bound is one that check() knows
    assert not grown


def test_a_node_that_all_have_left_and_that_is_cleared_holds_nothing() -> None:
    lives = Lives("through", PolicySettings(name="lru"))
    fresh = sizes(World(8, 8, LIMITS).node)
    for _ in range(10):
        lives.live()
    for worker in (lives.lender, lives.exchange):
        lives.world.die(worker)

    lives.world.ask(Clear, None)
    lives.world.finish_all()

    node = lives.world.node
    kept = {name for name, size in sizes(node).items() if size > fresh[name]}
    remembered = {name for name in kept if name.split(".")[0] in ("Misses", "Histories", "Lru", "Shares")}
    measured = {name for name in kept if name.endswith(".loads_s") or name.startswith("FetchCounters")}
    assert {name for name in kept - remembered - measured if "order" not in name} <= {
        "NodeTables.raw_payloads",  # of pages that may come back with another worker
        "Fetches.peers",  # their speeds
        "Order._drawn",  # up to DRAWN
        "_Oldest.heap",  # up to SLACK
    }
    node.check()


def watch(part: object, looked: set[tuple[str, str]]) -> None:
    """Note which attributes of a coordinator's part are looked at."""
    kind = type(part)

    class Watched(kind):  # type: ignore[misc,valid-type]
        def __getattribute__(self, name: str) -> object:
            looked.add((kind.__name__, name))
            return super().__getattribute__(name)

    part.__class__ = Watched


def test_check_looks_at_every_table_there_is() -> None:
    """A table that is added without a check fails here: say in tier/node/checks what bounds it, or what it is derived from."""
    lives = Lives("demote", PolicySettings(name="rvi"))
    for _ in range(4):
        lives.live()
    node = lives.world.node
    parts = [part for part in vars(node).values() if type(part).__module__.startswith("kvtier.tier.node.")]
    tables = {
        (type(part).__name__, name)
        for part in parts
        for name, value in vars(part).items()
        if value not in parts and has_room(value)
    }
    looked: set[tuple[str, str]] = set()
    for part in parts:
        watch(part, looked)

    node.check()

    assert len(parts) > 12 and len(tables) > 40
    assert not tables - looked - {("NodeTables", "ssd_variants")}  # which is its owner's


def has_room(value: object) -> bool:
    """Whether it is, or has somewhere, what can hold any number of things."""
    if type(value).__module__ == "kvtier.tier.node.state.records" and isinstance(value, Limits):
        return False
    growing = (Mapping, list, set, deque)
    if isinstance(value, growing):
        return True
    return type(value).__module__.startswith("kvtier.") and any(
        isinstance(one, (*growing, frozenset)) or has_room(one) for _, one in attributes(value)
    )


def test_what_is_known_of_page_shapes_is_bounded_and_the_latest_stays() -> None:
    world = World(4, 0, Limits(specs=4))
    for number in range(1, 20):
        worker = world.connect("w", f"i{number}", payloads={(number, BF16): PAYLOAD_BYTES})
    kept = dict(world.node.tables.raw_payloads)

    assert len(kept) == 4 and worker.payloads == {(19, BF16): PAYLOAD_BYTES}
    assert list(kept)[-1] in world.node.tables.workers[worker.ref].hello.payloads


@pytest.mark.parametrize("by_lru", [False, True])
def test_closed_sessions_are_remembered_as_long_as_their_pages_are_here(by_lru: bool) -> None:
    """Each closed session left an entry for each of its pages, and more when it was closed again, for good."""
    policy = Guarded(PolicySettings(), 256)
    policy.by_lru = by_lru
    histories: Histories[bytes] = Histories(policy, 256)
    one = policy.candidates()
    here: dict[int, bytes] = {}
    now, number = 0.0, 0
    for session in range(1, 200):
        now += 1.0
        rows = []
        for depth in range(16):
            while len(here) >= 256:
                row = one.victims(1, now)[0].row
                one.discard(row)
                histories.left(here.pop(row), row)
            number += 1
            key = number.to_bytes(32, "little")
            row = histories.came(key, depth, 1 << 20, now)
            here[row] = key
            rows.append(row)
            one.add(row)
        for _ in range(2):  # a client may say so again
            histories.end(
                rows, range(15, -1, -1), Use(16, 16, 10, Kind.TURN, 1, session, True, False), now, now
            )
        one.check()
    assert sizes(one)["GuardedSet._dead"] <= len(one) <= 256
