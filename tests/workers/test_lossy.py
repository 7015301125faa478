"""A lossier variant for L4: lossy requests find it where the exact pages are gone, exact requests never do."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import until
from worker_kit import (
    Slowed,
    caching,
    keys,
    page_sizes,
    serving,
    settle,
    sink_to_l3,
    sink_to_l4,
    tiny_runner,
)

from kvtier.tier.pages.page import PageFormat, TierName
from kvtier.workers.requests.api import FinishReason

INT4C = frozenset({"int4c"})


def prompt(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 512, length).tolist()
    return tokens


@pytest.fixture
def runner(tiny_llama: Path) -> Slowed:
    return tiny_runner(tiny_llama, 128, l4_format="int4c")


def test_a_lossy_request_finds_the_variant_in_l4_and_an_exact_one_never_does(
    runner: Slowed, tmp_path: Path
) -> None:
    p = prompt(100)
    with (
        caching(tmp_path, page_bytes=page_sizes(runner), l4_variants=INT4C) as service,
        serving(runner, tmp_path / "s") as client,
    ):
        exact = client.generate(p, max_tokens=40)
        settle(client.worker, service)
        in_l4 = Counter(
            (page.variant, page.made_from) for page in service.pages(limit=1000) if page.tier is TierName.SSD
        )
        sink_to_l4(client.worker, service)
        lossy = client.generate(p, max_tokens=40, lossy=True)
        again = client.generate(p, max_tokens=40, lossy=True)
        still_exact = client.generate(p, max_tokens=40)
        settle(client.worker, service)

    assert in_l4 == {("int4c", "fp32"): 139 // 16}
    assert lossy.cached == {"L4": 96}
    assert again.cached["L1"] >= 96
    assert again.tokens == lossy.tokens
    assert still_exact.cached == {}
    assert still_exact.tokens == exact.tokens


def test_a_lossy_request_takes_exact_pages_where_there_are_any(runner: Slowed, tmp_path: Path) -> None:
    p = prompt(100)
    with (
        caching(tmp_path, page_bytes=page_sizes(runner), l4_variants=INT4C) as service,
        serving(runner, tmp_path / "s") as client,
    ):
        exact = client.generate(p, max_tokens=20)
        sink_to_l3(client.worker, service)
        lossy = client.generate(p, max_tokens=20, lossy=True)

    assert lossy.cached == {"L3": 96}
    assert lossy.tokens == exact.tokens


def test_lossy_and_exact_pages_survive_a_restart_apart(runner: Slowed, tmp_path: Path) -> None:
    p = prompt(100)
    sizes = page_sizes(runner)
    with (
        caching(tmp_path, page_bytes=sizes, l4_variants=INT4C) as service,
        serving(runner, tmp_path / "s") as client,
    ):
        exact = client.generate(p, max_tokens=40)
        settle(client.worker, service)
    with (
        caching(tmp_path, page_bytes=sizes, l4_variants=INT4C) as service,
        serving(runner, tmp_path / "s") as client,
    ):
        lossy = client.generate(p, max_tokens=40, lossy=True)
        longer = p + lossy.tokens + prompt(5, seed=1)
        sink_to_l4(client.worker, service)
        on_top = client.generate(longer, lossy=True)
        exact_on_top = client.generate(longer)
        settle(client.worker, service)

    with serving(runner) as client:
        off = client.generate(longer, use_cache=False)
    assert lossy.cached == {"L4": 96}
    assert on_top.cached["L4"] >= 128  # the prompt's under the exact root, the answer's under the lossy one
    assert exact_on_top.cached == {}
    assert exact_on_top.tokens == off.tokens
    assert exact.cached == {}


def test_lossy_is_simply_exact_where_no_variant_is_configured(tiny_llama: Path) -> None:
    with serving(tiny_runner(tiny_llama, 64)) as client:
        exact = client.generate(prompt(100))
        lossy = client.generate(prompt(100), lossy=True)

    assert lossy.cached == {"L1": 96}
    assert lossy.tokens == exact.tokens


def test_variants_are_made_once_and_leave_l1_as_soon_as_they_are_saved(
    runner: Slowed, tmp_path: Path
) -> None:
    with (
        caching(tmp_path, page_bytes=page_sizes(runner), l4_variants=INT4C) as service,
        serving(runner, tmp_path / "s") as client,
    ):
        client.generate(prompt(200), max_tokens=1)
        client.generate(prompt(200), max_tokens=1)
        settle(client.worker, service)
        stats = client.worker.stats().tiers[TierName.HBM]

    assert sum(pages for _, _, pages in runner.conversions) == stats.converted_pages == 200 // 16
    assert {target for _, target, _ in runner.conversions} == {PageFormat.INT4C}
    assert stats.variants == {"fp32": 200 // 16}


def test_a_l1_without_room_for_variants_serves_without_them(tiny_llama: Path, tmp_path: Path) -> None:
    runner = tiny_runner(tiny_llama, 13, l4_format="int4c")
    prompts = [prompt(100, seed=i) for i in range(4)]
    with (
        caching(tmp_path, page_bytes=page_sizes(runner), l4_variants=INT4C) as service,
        serving(runner, tmp_path / "s") as client,
    ):
        off = [client.generate(p, use_cache=False, max_tokens=20).tokens for p in prompts]
        names = [client.send(p, max_tokens=20, lossy=i % 2 == 1) for i, p in enumerate(prompts)]
        results = [client.result(name).tokens for name in names]
        settle(client.worker, service)
        client.worker.check()

    assert results == off


@pytest.mark.parametrize("cache_format", ["auto", "timedecay"])
def test_a_storm_of_every_kind_of_request_changes_no_exact_token_and_leaks_nothing(
    tiny_llama: Path, tmp_path: Path, cache_format: str
) -> None:
    """Tiny tiers, windows, lossy requests, siblings, cancellations, clears, and a node that comes back."""
    rng = random.Random(4)
    kinds: list[dict[str, Any]] = [{}, {}, {"window": 64, "sinks": 4}, {"window": 48}, {"lossy": True}]
    requests = [
        (
            prompt(rng.choice([30, 100, 150]), seed=rng.randrange(2)) + prompt(rng.randint(1, 20), seed=i),
            {"max_tokens": rng.randint(1, 50), "n": rng.choice([1, 1, 2]), **rng.choice(kinds)},
        )
        for i in range(14)
    ]
    options = {"cache_format": cache_format, "recent_tokens": 32, "l4_format": "int4c"}
    with serving(tiny_runner(tiny_llama, 256, **options)) as client:
        truth = []
        for tokens, wanted in requests:
            name = client.send(tokens, use_cache=False, **wanted)
            truth.append([client.result(name, index).tokens for index in range(wanted["n"])])

    runner = tiny_runner(tiny_llama, 26 if cache_format == "auto" else 12, **options)
    with serving(runner, tmp_path / "s", connected=False) as client:
        for half in range(2):
            with caching(
                tmp_path, l3_pages=24, l4_bytes=4 << 20, page_bytes=page_sizes(runner), l4_variants=INT4C
            ) as service:
                until(lambda: client.worker.is_connected, "the worker finds its node")
                names = [client.send(tokens, **wanted) for tokens, wanted in requests]
                for name in rng.sample(names, 3):
                    rng.choice([client.worker.cancel, client.worker.explain])(name)
                    client.worker.evict(keys(client.worker)[-2:])
                if half:
                    client.worker.clear()
                else:
                    service.stop(0)
                for name, (_, wanted), expected in zip(names, requests, truth, strict=True):
                    for index, tokens in enumerate(expected):
                        result = client.result(name, index)
                        if not wanted.get("lossy") and result.reason is not FinishReason.CANCELLED:
                            assert result.tokens == tokens
                until(client.worker.idle, "the worker is idle")
                client.worker.check()
