"""Quantized and time-decayed caches in a live worker: the same tokens from everywhere, and pages that decay once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import until
from worker_kit import (
    PAGE_TOKENS,
    Slowed,
    caching,
    flip_bit,
    keys,
    l3_pages,
    page_sizes,
    serving,
    settle,
    sink_to_l3,
    sink_to_l4,
    tiny_runner,
)

from kvtier.tier.pages.page import PageFormat, TierName

pytestmark = pytest.mark.slow

RECIPES: dict[str, dict[str, Any]] = {
    "fp8": {"cache_format": "fp8"},
    "int8": {"cache_format": "int8"},
    "k8v4": {"cache_format": "k8v4"},
    "int4": {"cache_format": "int4"},
    "int4c": {"cache_format": "int4c"},
    "timedecay": {"cache_format": "timedecay", "recent_tokens": 64, "decay_sinks": 16},
}
STRIDE = 128


def prompt(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 512, length).tolist()
    return tokens


def quantized(folder: Path, recipe: str, pages: int = 64, **options: Any) -> Slowed:
    return tiny_runner(folder, pages, **RECIPES[recipe], **options)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_quantized_cache_says_the_same_from_every_tier_and_after_a_restart(
    tiny_llama: Path, tmp_path: Path, recipe: str
) -> None:
    p = prompt(300)
    options = {"max_tokens": 100}
    runner = quantized(tiny_llama, recipe)
    sizes = page_sizes(runner)
    with caching(tmp_path, page_bytes=sizes) as service, serving(runner, tmp_path / "s") as client:
        off = client.generate(p, use_cache=False, **options)
        cold = client.generate(p, **options)
        warm = client.generate(p, **options)
        sink_to_l3(client.worker, service)
        from_l3 = client.generate(p, **options)
        sink_to_l4(client.worker, service)
        from_l4 = client.generate(p, **options)
        settle(client.worker, service)
    with caching(tmp_path, page_bytes=sizes), serving(runner, tmp_path / "s") as client:
        restarted = client.generate(p, **options)

    assert off.cached == cold.cached == {}
    # Originals of what decayed while the answer was written are below.
    assert set(warm.cached) <= {"L1", "L3"}
    assert sum(warm.cached.values()) >= 288
    assert from_l3.cached == {"L3": 288}
    assert from_l4.cached == restarted.cached == {"L4": 288}
    assert off.tokens == cold.tokens == warm.tokens == from_l3.tokens == from_l4.tokens == restarted.tokens


@pytest.mark.parametrize("recipe", ["fp8", "int4c", "timedecay"])
def test_a_quantized_cache_says_the_same_when_preempted(
    tiny_llama: Path, tmp_path: Path, recipe: str
) -> None:
    prompts = [prompt(40 + i, seed=i) for i in range(4)]
    with serving(quantized(tiny_llama, recipe, pages=256)) as client:
        wanted = client.together(prompts, max_tokens=200, use_cache=False)
    runner = quantized(tiny_llama, recipe, pages=13)
    with (
        caching(tmp_path, page_bytes=page_sizes(runner)),
        serving(runner, tmp_path / "s") as client,
    ):
        names = [client.send(p, max_tokens=200) for p in prompts]
        results = [client.result(name) for name in names]
        told = [client.worker.explain(name) for name in names]

    assert [r.tokens for r in results] == wanted
    assert sum(t.preemptions for t in told if t is not None) > 0


@pytest.mark.parametrize(
    ("recipe", "found"),
    # Of a shorter prefix the rows want other formats than those that were loaded for the longer one.
    [("int8", {"L3": 5 * PAGE_TOKENS}), ("int4c", {}), ("timedecay", {"L3": PAGE_TOKENS})],
)
def test_a_damaged_page_costs_hits_and_no_token(
    tiny_llama: Path, tmp_path: Path, recipe: str, found: dict[str, int]
) -> None:
    p = prompt(300)
    runner = quantized(tiny_llama, recipe)
    with (
        caching(tmp_path, page_bytes=page_sizes(runner), l4_bytes=0) as service,
        serving(runner, tmp_path / "s") as client,
    ):
        cold = client.generate(p)
        sink_to_l3(client.worker, service)
        flip_bit(tmp_path / "s", runner, depth=5)

        again = client.generate(p)
        settle(client.worker, service)
        corrupt = service.stats().tiers[TierName.HOST].corrupt_pages

    assert again.tokens == cold.tokens
    assert again.cached == found
    assert corrupt >= 1


def test_a_late_load_loses_to_recompute(tiny_llama: Path, tmp_path: Path) -> None:
    p = prompt(300)
    runner = quantized(tiny_llama, "timedecay")
    sizes = page_sizes(runner)
    with caching(tmp_path, page_bytes=sizes) as service, serving(runner, tmp_path / "s") as client:
        cold = client.generate(p)
        sink_to_l4(client.worker, service)
    with (
        caching(tmp_path, page_bytes=sizes) as service,
        serving(runner, tmp_path / "s", load_deadline_ms=1e-6) as client,
    ):
        late = client.generate(p)
        settle(client.worker, service)

    assert late.tokens == cold.tokens
    assert late.cached == {}


def test_a_node_that_goes_and_comes_back_gets_decayed_pages_with_their_provenance(
    tiny_llama: Path, tmp_path: Path
) -> None:
    runner = quantized(tiny_llama, "timedecay")
    sizes = page_sizes(runner)
    with serving(runner, tmp_path / "s", connected=False) as client:
        cold = client.generate(prompt(300), max_tokens=60)
        for folder in ("1", "2"):
            with caching(tmp_path, page_bytes=sizes, l4_folder=tmp_path / folder) as service:
                until(lambda: client.worker.is_connected, "the worker finds its node")
                settle(client.worker, service)
                found = Counter((page.variant, page.made_from) for page in service.pages(limit=10_000))
                client.worker.evict(keys(client.worker))
                again = client.generate(prompt(300), max_tokens=60)
                settle(client.worker, service)
            until(lambda: not client.worker.is_connected, "the worker sees that its node is gone")
            assert set(found) == {("fp8_e4m3", ""), ("int4c", "fp8_e4m3")}
            assert again.tokens == cold.tokens
            assert again.cached == {"L3": 288}


def test_the_formats_behind_a_row_are_the_recipes_whatever_the_chunks(tiny_llama: Path) -> None:
    runner = quantized(tiny_llama, "timedecay")
    with serving(runner) as client:
        client.generate(prompt(400), max_tokens=20)
        recipe, seen = runner.recipe, 0

        def check(batch: Any) -> None:
            nonlocal seen
            for sequence in batch.sequences:
                position = sequence.context - sequence.length
                (pages,) = sequence.pages
                wanted = [recipe.format_at(i, position, PAGE_TOKENS) for i in range(len(pages.frames))]
                is_decayed = [format is PageFormat.INT4C for format in wanted]
                assert (pages.formats == 5).tolist() == is_decayed  # Format.INT4C
                assert (sequence.context - 1) // STRIDE == position // STRIDE
                seen += sum(is_decayed)

        runner.before = check
        for seed, batch_tokens in ((0, 1), (1, 3)):
            names = [client.send(prompt(390 + batch_tokens * i, seed=seed), max_tokens=20) for i in range(3)]
            for name in names:
                client.result(name)
        runner.before = lambda batch: None
        assert client.worker.is_healthy()

    assert seen > 0


def test_a_page_decays_once_and_from_its_eight_bit_codes(tiny_llama: Path, tmp_path: Path) -> None:
    runner = quantized(tiny_llama, "timedecay")
    p = prompt(500)
    with (
        caching(tmp_path, page_bytes=page_sizes(runner)) as service,
        serving(runner, tmp_path / "s") as client,
    ):
        client.generate(p, max_tokens=60)
        settle(client.worker, service)
        recent, sinks = 64 // PAGE_TOKENS, 16 // PAGE_TOKENS
        decayed = (559 - 1) // STRIDE * STRIDE // PAGE_TOKENS - recent - sinks
        assert {(source, target) for source, target, _ in runner.conversions} == {
            (PageFormat.FP8, PageFormat.INT4C)
        }
        assert sum(pages for _, _, pages in runner.conversions) == decayed

        client.generate(p, max_tokens=60)
        settle(client.worker, service)
        assert sum(pages for _, _, pages in runner.conversions) == decayed  # L1 had them
        in_l3 = service.pages(tier=TierName.HOST, limit=10_000)
        found = Counter((page.variant, page.made_from) for page in in_l3)
        stored = sum(page.nbytes for page in in_l3)
        written = client.worker.stats().tiers[TierName.HBM].bytes_out
        with l3_pages(tmp_path / "s", runner) as pages:
            envelopes = {(e.variant, e.made_from) for e, _ in pages}

    assert found == {("fp8_e4m3", ""): 559 // PAGE_TOKENS, ("int4c", "fp8_e4m3"): decayed}
    assert written == stored
    assert envelopes == set(found)


def test_decayed_pages_are_loaded_as_such_and_eight_bit_ones_are_converted_where_that_is_what_is_left(
    tiny_llama: Path, tmp_path: Path
) -> None:
    runner = quantized(tiny_llama, "int4c")
    p = prompt(300)
    with (
        caching(tmp_path, page_bytes=page_sizes(runner), l4_bytes=0) as service,
        serving(runner, tmp_path / "s") as client,
    ):
        cold = client.generate(p, max_tokens=1)
        sink_to_l3(client.worker, service)
        runner.conversions.clear()
        client.generate(p, max_tokens=1)
        assert runner.conversions == []
        settle(client.worker, service)
        client.worker.clear()
        service.clear("default")

        # A shorter request leaves the same first pages in eight bits alone.
        client.generate(p[:120], max_tokens=1)
        sink_to_l3(client.worker, service)
        runner.conversions.clear()
        longer = client.generate(p, max_tokens=1)

    assert longer.cached["L3"] == 112
    assert sum(pages for _, _, pages in runner.conversions) == 256 // PAGE_TOKENS
    assert longer.tokens == cold.tokens


def test_l1_holds_longer_sequences_when_pages_decay(tiny_llama: Path) -> None:
    p = prompt(1500)
    with serving(quantized(tiny_llama, "fp8", pages=28)) as client, pytest.raises(ValueError, match="L1"):
        client.send(p, max_tokens=20)
    with serving(quantized(tiny_llama, "timedecay", pages=28)) as client:
        result = client.generate(p, max_tokens=20)
        stats = client.worker.stats().tiers[TierName.HBM]
    with serving(quantized(tiny_llama, "timedecay", pages=256)) as client:
        roomy = client.generate(p, max_tokens=20)

    assert result.tokens == roomy.tokens
    assert stats.used_bytes <= stats.capacity_bytes


def test_statistics_say_what_pages_take_and_what_they_would_take_as_they_were(tiny_llama: Path) -> None:
    runner = quantized(tiny_llama, "timedecay")
    (specs,) = [group.specs for group in runner.groups]
    with serving(runner) as client:
        client.generate(prompt(500), max_tokens=10)
        stats = client.worker.stats().tiers[TierName.HBM]
        listed = client.worker.pages(limit=10_000)
        verified = client.worker.verify()

    assert stats.variants == Counter(page.variant for page in listed)
    assert stats.variants["int4c"] == stats.converted_pages == 384 // PAGE_TOKENS - 5
    assert stats.page_bytes == sum(page.nbytes for page in listed)
    assert stats.raw_bytes == len(listed) * 8192
    assert {page.nbytes for page in listed} == {
        specs[PageFormat.FP8].nbytes,
        specs[PageFormat.INT4C].nbytes,
    }
    assert {page.made_from for page in listed if page.variant == "int4c"} == {"fp8_e4m3"}
    assert all(outcome == "ACCEPTED" for _, outcome in verified)


def test_a_cleared_tenants_decayed_pages_are_gone_everywhere(tiny_llama: Path, tmp_path: Path) -> None:
    runner = quantized(tiny_llama, "int4c")
    with (
        caching(tmp_path, page_bytes=page_sizes(runner)) as service,
        serving(runner, tmp_path / "s") as client,
    ):
        client.generate(prompt(300))
        client.generate(prompt(300), tenant="other")
        settle(client.worker, service)
        client.worker.clear("default")
        service.clear("default")

        assert client.generate(prompt(300)).cached == {}
        assert client.generate(prompt(300), tenant="other").cached["L1"] >= 288
        client.worker.clear()
        assert keys(client.worker) == []


def test_a_storm_over_two_formats_changes_no_token_and_leaks_nothing(
    tiny_llama: Path, tmp_path: Path
) -> None:
    rng = np.random.default_rng(3)
    requests = [
        (
            prompt(int(rng.integers(40, 330)), seed=int(rng.integers(3))),
            {"max_tokens": int(rng.integers(1, 60)), "n": int(rng.integers(1, 3))},
        )
        for _ in range(12)
    ]
    with serving(quantized(tiny_llama, "timedecay", pages=256)) as client:
        wanted = []
        for tokens, options in requests:
            name = client.send(tokens, use_cache=False, **options)
            wanted.append([client.result(name, index).tokens for index in range(options["n"])])
    runner = quantized(tiny_llama, "timedecay", pages=13)
    with (
        caching(tmp_path, page_bytes=page_sizes(runner), l3_pages=40, l4_bytes=4 << 20) as service,
        serving(runner, tmp_path / "s") as client,
    ):
        for _ in range(2):
            names = [client.send(tokens, **options) for tokens, options in requests]
            client.worker.evict(keys(client.worker)[:3])
            results = [
                [client.result(name, index).tokens for index in range(options["n"])]
                for name, (_, options) in zip(names, requests, strict=True)
            ]
            assert results == wanted
        settle(client.worker, service)
        client.worker.check()
