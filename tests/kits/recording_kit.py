"""Records the coordinator of a simulated world, and makes lives worth recording: events of all kinds, failures included."""

from __future__ import annotations

import io
from random import Random
from typing import Any

from cache_world import (
    BF16,
    FP8,
    INT4C,
    LRU,
    ONE_SIZE,
    PAGE_TOKENS,
    Kind,
    SimWorker,
    World,
    chain_keys,
    chain_of,
    spec_of,
    tenant_of,
)

from kvtier.tier.node.coordinator import Coordinator
from kvtier.tier.node.recording import MODULES, NODE
from kvtier.tier.node.state.records import Limits
from kvtier.tier.pages.page import TierName
from kvtier.tier.policy.base import PolicySettings
from kvtier.tier.protocol.events import Clear, ClearPages, Command, Event, Evict, Pin, Unpin, Verify
from kvtier.tier.record import checkpoint
from kvtier.tier.record.format import (
    SUM_EVERY,
    VERSION,
    Alias,
    Header,
    RecordingReader,
    RecordingWriter,
    code_digest,
)
from kvtier.tier.record.rerun import Verdict, Watch, rerun

PATHS = ["aaaa", "aaab", "aa", "abbbb", "b"]
TENANTS = ["ada", "ada", "bob"]
SECRETS = ["what-a-client-calls-it", "mary's question"]  # request ids
SALT = b"salt of these tests"
FEW = Limits(writes=2, reads=2, verifies=1, gone=4, contents=2, contents_unsaved=2, roots=2, persist_every=3)
TWO_SIZES: dict[Kind, int] = {(0, FP8): 2 * 4096, (0, INT4C): 4096}
RVI = PolicySettings(name="rvi", draw=4, per_draw=2)
UNGUARDED = PolicySettings(name="rvi", draw=4, per_draw=2, guard=False)
POLICIES = [*5 * [LRU], PolicySettings(name="score"), RVI, UNGUARDED]


class Recorded:
    """A coordinator whose events are recorded from now on; for the rest it is the coordinator."""

    def __init__(self, node: Coordinator) -> None:
        self.node = node
        self.out = io.BytesIO()
        self.answers: list[list[Command]] = []
        self.last_s = 0.0
        alias = Alias(SALT)
        self.writer = RecordingWriter(NODE, alias, self._write)
        state = checkpoint.dump(node, MODULES, lambda one, its: NODE.hide_state(one, its, alias))
        header = Header(VERSION, NODE.name, "n0", "i", "0", code_digest(MODULES), 0.0, {})
        self.writer.begin(header, state)

    def handle(self, event: Event, now: float) -> list[Command]:
        commands, self.last_s = self.node.handle(event, now), now
        self.answers.append(commands)
        is_time = (self.writer.events + 1) % SUM_EVERY == 0
        self.writer.heard(event, now, commands, self.node.snapshot() if is_time else None)
        return commands

    def __getattr__(self, name: str) -> Any:
        return getattr(self.node, name)

    def ended(self) -> bytes:
        """The whole recording."""
        self.writer.end("the test is over", self.node.snapshot())
        return self.out.getvalue()

    def _write(self, data: bytes) -> None:
        self.out.write(data)


def recorded(world: World) -> Recorded:
    """Record a world's node from now on."""
    node = Recorded(world.node)
    world.node = node  # type: ignore[assignment]  # it is one for all that the world does
    return node


def run_again(data: bytes, watch: Watch | None = None) -> Verdict:
    """Rerun a recording of a node."""
    return rerun(RecordingReader([data]), NODE, watch)


class Life:
    """Workers that store, ask, copy, finish and die, a disk that fails at times, and operators."""

    def __init__(self, world: World, rng: Random) -> None:
        self.world, self.rng = world, rng
        self.incarnation = 0

    def go_on(self, steps: int) -> None:
        """So many of them do something."""
        often = [self.store, self.locate, self.copy, self.io, self.finish, self.fetch]
        rarely = [self.release, self.operate, self.die, self.wait]
        for _ in range(steps):
            self.rng.choice([*often, *often, *rarely])()

    def worker(self) -> SimWorker:
        here = {worker.ref.worker_id for worker in self.world.workers.values()}
        for name in sorted({"w0", "w1"} - here):
            self.incarnation += 1
            self.world.connect(name, str(self.incarnation))
        return self.rng.choice([w for w in self.world.workers.values() if not w.is_exchange])

    def fetch(self) -> None:
        """The exchange goes on with a fetch, where there is one; else it comes, or dies."""
        exchange = next((w for w in self.world.workers.values() if w.is_exchange), None)
        if exchange is None:
            self.incarnation += 1
            self.world.connect_exchange("n0", str(self.incarnation))
        elif exchange.fetches:
            number = self.rng.choice(list(exchange.fetches))
            if exchange.fetches[number][1] and self.rng.random() < 0.7:
                self.world.arrive(exchange, number, self.rng.choice([1, 2]))
            else:
                self.world.end_fetch(exchange, number, self.rng.choice(["", "load_failed", "evicted"]))
        elif self.rng.random() < 0.05:
            self.world.die(exchange)

    def store(self) -> None:
        worker, path = self.worker(), self.rng.choice(PATHS)
        kind = self.rng.choice(list(worker.payloads))
        hold = self.rng.choice([None, None, SECRETS[0]])
        made_from = FP8 if kind[1] == INT4C else ""
        self.world.want(worker, len(path), kind)
        self.world.store(
            worker,
            self.rng.choice(TENANTS),
            path,
            hold_for=hold,
            content=b"c" * 16,
            kind=kind,
            made_from=made_from,
        )

    def locate(self) -> None:
        tenant, path = self.rng.choice(TENANTS), self.rng.choice(PATHS)
        keys = chain_keys(tenant, path)
        is_lossy = INT4C in {variant for _, variant in self.world.payloads} and self.rng.random() < 0.5
        variant = BF16 if self.world.payloads is ONE_SIZE else FP8
        chain = chain_of(keys, variant=variant, spec=spec_of((0, variant)))
        if is_lossy:
            chain = chain_of(keys, variant=FP8, decayed=INT4C, recent=1 << 30, any_variant=True)
        self.world.locate(
            self.worker(),
            self.rng.choice(SECRETS),
            tenant,
            path,
            recompute_s=self.rng.choice([0.0, 1e-7, 1e-5]),
            content=b"c" * 16,
            chains=[chain],
            last_position=PAGE_TOKENS * len(path),
            remotes=[("n1", self.rng.randrange(6))],
        )

    def copy(self) -> None:
        worker = self.worker()
        for request, leases in list(worker.leases.items()):
            self.world.copied(worker, request, list(leases), [r for r in leases if self.rng.random() < 0.1])

    def finish(self) -> None:
        self.world.finished(
            self.worker(),
            self.rng.choice(TENANTS),
            self.rng.choice(PATHS),
            kind=self.rng.randrange(4),
            session=self.rng.randrange(3),
            closed=self.rng.random() < 0.2,
            seconds=self.rng.choice([0.0, 0.5]),
            costs=self.rng.choice([(0.0, 0.0), (0.01, 2048.0)]),
        )

    def release(self) -> None:
        self.world.release(self.worker(), self.rng.choice(SECRETS), self.rng.choice([0, 0, 1]))

    def io(self) -> None:
        if self.world.reads:
            self.world.finish_read(self.rng.choice([None, None, None, "corrupt", "io"]))
        if self.world.writer:
            self.world.finish_write(self.rng.choice([None, None, None, "io"]))
        if self.world.checks:
            self.world.finish_check()

    def operate(self) -> None:
        keys = tuple(chain_keys(self.rng.choice(TENANTS), self.rng.choice(PATHS)))
        verb = self.rng.choice([Pin, Unpin, Evict, Verify, Clear, ClearPages])
        if verb is Clear:
            self.world.ask(Clear, self.rng.choice([None, tenant_of("ada")]))
        elif verb is ClearPages:
            self.world.ask(ClearPages, tuple(self.world.node.admin.page_ids(3)))
        elif verb is Evict:
            self.world.ask(Evict, keys, self.rng.choice([None, TierName.HOST, TierName.SSD]))
        else:
            self.world.ask(verb, keys)

    def die(self) -> None:
        if self.rng.random() < 0.2:
            self.world.die(self.worker())

    def wait(self) -> None:
        self.world.now += self.rng.choice([0.001, 1.0, 100.0])


def a_world(rng: Random, policy: PolicySettings | None = None) -> World:
    """A node of any kind: one format or two, any policy where none is given, with or without L4."""
    one_size = rng.random() < 0.5
    return World(
        rng.randint(2, 12),
        rng.choice([0, 2, 4, 8, 16]),
        limits=FEW if rng.random() < 0.5 else None,
        payloads=ONE_SIZE if one_size else TWO_SIZES,
        host_segment_slots=None if one_size else 1,
        ssd_variants=None if one_size else rng.choice([None, frozenset({INT4C}), frozenset({INT4C, FP8})]),
        policy=policy or rng.choice(POLICIES),
        write=rng.choice(["through", "demote"]),
        shares=rng.choice([None, {"ada": 0.5}]),
    )


def a_life(seed: int, before: int = 60, steps: int = 60, policy: PolicySettings | None = None) -> Recorded:
    """A node that has lived `before` steps when its recording begins, and `steps` in it."""
    rng = Random(seed)
    world = a_world(rng, policy)
    life = Life(world, rng)
    life.go_on(before)
    node = recorded(world)
    life.go_on(steps)
    return node
