"""Small workers of all kinds and what happens to them: windows, layer groups, formats, people."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from scheduler_kit import TENANT, Machine, expected, namespace_of

from kvtier.tier.pages.page import PageFormat
from kvtier.tier.pages.recipe import ChainNeeds, Recipe, Window
from kvtier.tier.policy.base import PolicySettings
from kvtier.workers.requests.api import FinishReason
from kvtier.workers.requests.sequence import Namespace

RAW, INT8, INT4C = PageFormat.FP32, PageFormat.INT8, PageFormat.INT4C


@dataclass
class Workload:
    """A small machine, and requests that it accepts: (step, kind, prompt, max_tokens, n, cached)."""

    made: Machine
    requests: list[tuple[int, Namespace, list[int], int, int, bool]]


def workload(rng: Random, settings: PolicySettings | None = None) -> Workload:
    page_tokens = rng.choice([1, 2, 4])
    recipe = Recipe(RAW)
    if rng.random() < 0.5:
        recent, sinks = rng.choice([0, 4, 8]), rng.choice([0, 1, 4])
        recipe = Recipe(INT8, INT4C, recent, sinks, stride_tokens=page_tokens * rng.choice([1, 2, 4]))
    sizes: list[Mapping[PageFormat, int]] = [{recipe.write: rng.choice([2, 3, 4])}]
    windows = [Window()]
    if rng.random() < 0.4:
        sizes.append({recipe.write: rng.choice([2, 3, 5])})
        windows.append(Window(rng.randint(1, 12)))
    has_lossy = rng.random() < 0.6
    if not recipe.is_uniform or has_lossy:
        sizes = [{**group, INT4C: rng.choice([1, 2])} for group in sizes]
    kinds = kinds_of(rng, recipe, windows, has_lossy)
    has_node = rng.random() < 0.7
    made = Machine(
        rng.randint(10, 150),
        page_tokens,
        max_batch_tokens=rng.randint(4, 40),
        max_sequences=rng.randint(2, 4),
        rng=rng,
        has_node=has_node,
        slots=rng.choice([0, 2, 100, 100]) if has_node else 0,
        pages=tuple(sizes),
        faults=rng.choice([0.0, 0.0, 0.3]),
        margin=rng.choice([0, 0, 1, 30]),
        rvi=rng.random() < 0.3,
        settings=settings,
        shares=rng.choice([{}, {}, {TENANT: 0.3}]),
    )
    shared = [rng.randrange(3) for _ in range(rng.randint(0, 40))]
    requests = []
    for _ in range(rng.randint(1, 8)):
        kind = rng.choice(kinds)
        head = shared[: rng.randint(0, len(shared))]
        prompt = head + [rng.randrange(3) for _ in range(rng.randint(1, 20))]
        max_tokens = rng.randint(1, 40)
        try:
            made.scheduler.check_fits(len(prompt), max_tokens, kind.needs)
        except ValueError:
            continue
        requests.append((rng.randint(0, 30), kind, prompt, max_tokens, rng.randint(1, 3), rng.random() < 0.8))
    return Workload(made, sorted(requests, key=lambda r: r[0]))


def kinds_of(rng: Random, recipe: Recipe, windows: list[Window], has_lossy: bool) -> list[Namespace]:
    """The kinds of requests that one worker serves at once."""
    exact = namespace_of("exact", tuple(ChainNeeds(recipe, window) for window in windows))
    kinds = [exact]
    if has_lossy:
        needs = tuple(ChainNeeds(recipe, window, any_variant=True) for window in windows)
        kinds.append(namespace_of("lossy", needs, exact, recipe.decayed or INT4C))
    if len(windows) == 1:
        for i in range(2):
            tokens = rng.randint(1, 16)
            window = Window(tokens, rng.randint(0, min(tokens, 6)))
            kinds.append(namespace_of(f"window {i}", (ChainNeeds(recipe, window),)))
    return kinds


def drive(
    load: Workload, *, meddle: bool, before_step: Callable[[Machine], None] = lambda made: None
) -> None:
    """Submit and run all; with `meddle` requests are cancelled, pages pinned and removed, trees cleared meanwhile."""
    made, rng = load.made, load.made.rng
    cancelled = set()
    trees: dict[bytes, Namespace] = {}
    for i, (step, kind, prompt, max_tokens, n, use_cache) in enumerate(load.requests):
        while made.now < step and made.scheduler.unfinished:
            before_step(made)
            made.step()
            if meddle:
                cancelled |= disturb(made, rng, trees)
        kind = trees.get(kind.root, kind)
        trees[kind.root] = kind
        made.submit(str(i), prompt, max_tokens, n, use_cache, kind)
    for _ in range(40 if meddle else 0):
        if made.scheduler.unfinished:
            before_step(made)
            made.step()
            cancelled |= disturb(made, rng, trees)
    for key in list(made.table.pinned):
        made.table.unpin(key, made.now)
    made.run()
    for i, (_, _, prompt, max_tokens, n, _) in enumerate(load.requests):
        for index in range(n):
            if (str(i), index) in made.finished and (str(i), index) not in cancelled:
                assert made.outputs[str(i), index] == expected(prompt, max_tokens, index)


def disturb(made: Machine, rng: Random, trees: dict[bytes, Namespace]) -> set[tuple[str, int]]:
    """Something that people do; the sequences that it ended."""
    table = made.table
    alive = made.scheduler.active + made.scheduler.waiting
    cached = [record.key for record, _ in table.cached()]
    chance = rng.random()
    if alive and chance < 0.1:
        seq = rng.choice(alive)
        made.end(seq, FinishReason.CANCELLED)
        made.scheduler.check()
        return {(seq.request.spec.request_id, seq.index)}
    if cached and chance < 0.2:
        table.pin(rng.choice(cached))
    elif cached and chance < 0.3:
        key = rng.choice(cached)
        if not table.is_pinned(key):
            table.remove(key, made.now)
    elif table.pinned and chance < 0.4:
        table.unpin(rng.choice(list(table.pinned)), made.now)
    elif trees and chance < 0.45:
        root = rng.choice(list(trees))
        trees[root] = made.clear(trees[root])
    made.scheduler.check()
    return set()


POLICIES = [
    PolicySettings("lru"),
    PolicySettings("score"),
    PolicySettings(draw=4, per_draw=2),
    PolicySettings(draw=4, per_draw=2, guard=False),
]
