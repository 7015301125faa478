"""A model on two ranks answers as on one: logits, tokens, and pages that either reads of the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from group_kit import Delayed, ThreadRank, group_of
from runner_kit import random_tokens
from worker_kit import (
    caching,
    flip_bit,
    page_sizes,
    serving,
    settle,
    sink_to_l3,
    sink_to_l4,
    tiny_runner,
)

from kvtier.tier.pages.page import TierName
from kvtier.workers.models.formats import largest_page_bytes
from kvtier.workers.parallel.pages import RankPages
from kvtier.workers.runner.runner import GroupPages, SequenceRows, StepBatch

pytestmark = pytest.mark.slow

PROMPT = random_tokens(1, 70, tiny_models.VOCAB).tolist()


def prompt(length: int, seed: int = 3) -> list[int]:
    tokens: list[int] = random_tokens(seed, length, tiny_models.VOCAB).tolist()
    return tokens


def logits_of(runner: Any, tokens: list[int]) -> torch.Tensor:
    """Of all rows of a text, computed in two chunks and single rows."""
    pages = -(-len(tokens) // runner.page_tokens)
    units = -(-largest_page_bytes(runner.groups) // runner.arena.shape[1])
    kept = tuple(
        GroupPages(units * np.arange(2 + i * pages, 2 + (i + 1) * pages, dtype=np.int32), window=g.window)
        for i, g in enumerate(runner.groups)
    )
    parts = []
    for start, end in (
        (0, 30),
        (30, len(tokens) - 2),
        (len(tokens) - 2, len(tokens) - 1),
        (len(tokens) - 1, len(tokens)),
    ):
        rows = SequenceRows(0, end - start, end, kept)
        at = np.arange(start, end, dtype=np.int32)
        parts.append(
            runner.forward(
                StepBatch(
                    np.array(tokens[start:end], np.int32), at, [rows], np.arange(end - start, dtype=np.int32)
                )
            )
        )
    return torch.cat(parts)


MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (tiny_models.make_tiny_llama, {}),
    "llama, tied, one KV head": (
        tiny_models.make_tiny_llama,
        {"num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "llama, uneven MLP": (tiny_models.make_tiny_llama, {"intermediate_size": 161}),
    "qwen2": (tiny_models.make_tiny_qwen2, {}),
    "qwen3": (tiny_models.make_tiny_qwen3, {}),
    "gemma2": (tiny_models.make_tiny_gemma2, {}),
    "gemma3": (tiny_models.make_tiny_gemma3, {}),
    "gpt-oss": (tiny_models.make_tiny_gpt_oss, {}),
    "deepseek v2": (tiny_models.make_tiny_deepseek_v2, {}),
    "deepseek v3": (tiny_models.make_tiny_deepseek_v3, {"attention_bias": True}),
}


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_give_the_logits_of_one(name: str, tmp_path: Path) -> None:
    make, changes = MODELS[name]
    folder = make(tmp_path / "model", **changes)
    single = tiny_runner(folder, 256)

    with group_of(folder, pages=256) as group:
        ours = logits_of(group, PROMPT)

    theirs = logits_of(single, PROMPT)
    assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize("forward", ["lean", "transformers"])
def test_compiled_kernels_attend_a_share(tiny_llama: Path, forward: str) -> None:
    single = tiny_runner(tiny_llama, 64)

    with group_of(tiny_llama, native="require", forward=forward) as group:
        ours = logits_of(group, PROMPT)

    assert torch.allclose(ours, logits_of(single, PROMPT), rtol=1e-4, atol=1e-4)


def test_a_group_on_gpus_leaves_the_slab_unpinned(tiny_llama: Path) -> None:
    """Pinning takes as long as touching all of it, and serves copies that a group's GPUs never make."""
    with group_of(tiny_llama, pages=64) as group:
        group.device = torch.device("cuda")
        with serving(group) as client:
            assert not client.worker._loop.link._pin_slab


@pytest.mark.parametrize("name", ["gemma2", "deepseek v3"])
def test_each_rank_has_its_columns_of_mlps_and_experts(name: str, tmp_path: Path) -> None:
    make, changes = MODELS[name]
    folder = make(tmp_path / "model", **changes)

    def columns(runner: Any) -> dict[str, int]:
        weights = runner.model._model.named_parameters()
        return {name: w.shape[-1] for name, w in weights if "mlp" in name and "down_proj" in name}

    whole = columns(tiny_runner(folder, 256))
    with group_of(folder, pages=256) as group:
        own = columns(group._own)

    assert whole and own == {name: n // 2 for name, n in whole.items()}


def test_each_rank_stores_its_heads_and_latents_are_whole(tiny_llama: Path, tmp_path: Path) -> None:
    latent = tiny_models.make_tiny_deepseek_v2(tmp_path / "model")
    for folder, part in ((tiny_llama, 2), (latent, 1)):
        with group_of(folder) as group:
            whole = group.groups[0].specs[group.raw_format]
            own = group._own.groups[0].specs[group.raw_format]

            assert (
                whole.nbytes
                == part * own.nbytes
                == tiny_runner(folder, 64).groups[0].specs[group.raw_format].nbytes
            )
            assert group.arena.shape == (len(group._own.arena), whole.nbytes)


@pytest.mark.parametrize("name", ["llama", "deepseek v2"])
def test_tokens_are_the_same_from_every_tier(name: str, tmp_path: Path) -> None:
    make, changes = MODELS[name]
    folder = make(tmp_path / "model", **changes)
    p = prompt(100)
    with serving(tiny_runner(folder, 128)) as client:
        wanted = client.generate(p, use_cache=False, max_tokens=40).tokens
    with (
        group_of(folder, pages=128) as group,
        caching(tmp_path, page_bytes=page_sizes(group)) as service,
        serving(group, tmp_path / "s") as client,
    ):
        off = client.generate(p, use_cache=False, max_tokens=40)
        cold = client.generate(p, max_tokens=40)
        hit = client.generate(p, max_tokens=40)
        sink_to_l3(client.worker, service)
        from_l3 = client.generate(p, max_tokens=40)
        sink_to_l4(client.worker, service)
        from_l4 = client.generate(p, max_tokens=40)

    assert off.cached == cold.cached == {}
    assert hit.cached == {"L1": 99}
    assert from_l3.cached == {"L3": 96}
    assert from_l4.cached == {"L4": 96}
    assert wanted == off.tokens == cold.tokens == hit.tokens == from_l3.tokens == from_l4.tokens


FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "raw": ("llama", {}),
    "raw, four ranks of two KV heads": ("llama", {"ranks": 4}),
    "fp8": ("llama", {"cache_format": "fp8"}),
    "timedecay": ("llama", {"cache_format": "timedecay", "recent_tokens": 32}),
    "raw, int4c in L4": ("llama", {"l4_format": "int4c"}),
    "latents": ("deepseek v3", {}),
    "fp8 latents": ("deepseek v2", {"cache_format": "fp8"}),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_group_and_a_single_worker_read_each_others_pages(name: str, tmp_path: Path) -> None:
    """In fast numerics, which promise no bits: there the number of ranks is no part of a page's identity."""
    model, options = FORMATS[name]
    make, changes = MODELS[model]
    folder = make(tmp_path / "model", **changes)
    options = {"numerics": "fast", **options}
    ranks = options.pop("ranks", 2)
    single = tiny_runner(folder, 128, **options)
    ours, theirs = prompt(150, seed=5), prompt(150, seed=6)
    with (
        group_of(folder, ranks, pages=128 * ranks, **options) as group,
        caching(tmp_path, page_bytes=page_sizes(single)) as service,
    ):
        found = []
        for runner, mine, other in ((group, ours, None), (single, theirs, ours), (group, None, theirs)):
            with serving(runner, tmp_path / "s") as client:
                found += [client.generate(p, max_tokens=30) for p in (mine, other) if p is not None]
                settle(client.worker, service)
        by_group, by_single, by_single_again, by_group_again = found

    assert by_group.cached == by_single.cached == {}
    assert by_single_again.cached == by_group_again.cached == {"L3": 144}
    assert by_single_again.tokens == by_group.tokens
    assert by_group_again.tokens == by_single.tokens


def test_a_stream_says_the_same(tiny_llama: Path, tmp_path: Path) -> None:
    """Its window moves on, and sinks are seen by a second query."""
    p = prompt(200)
    with serving(tiny_runner(tiny_llama, 64)) as client:
        wanted = client.generate(p, window=64, sinks=4, max_tokens=60).tokens
    with (
        group_of(tiny_llama, pages=64) as group,
        caching(tmp_path),
        serving(group, tmp_path / "s") as client,
    ):
        cold = client.generate(p, window=64, sinks=4, max_tokens=60)
        warm = client.generate(p, window=64, sinks=4, max_tokens=60)

    assert cold.tokens == warm.tokens == wanted
    assert warm.cached


@pytest.mark.parametrize("has_node", [True, False])
def test_preempted_requests_say_the_same(tiny_llama: Path, tmp_path: Path, has_node: bool) -> None:
    prompts = [prompt(60 + i, seed=i) for i in range(4)]
    with serving(tiny_runner(tiny_llama, 64)) as client:
        wanted = [client.generate(p, max_tokens=100, use_cache=False).tokens for p in prompts]
    with (
        group_of(tiny_llama, pages=24) as group,
        caching(tmp_path),
        serving(group, tmp_path / "s" if has_node else None) as client,
    ):
        names = [client.send(p, max_tokens=100) for p in prompts]
        results = [client.result(name) for name in names]
        told = [client.worker.explain(name) for name in names]

    assert [r.tokens for r in results] == wanted
    assert sum(t.preemptions for t in told if t is not None) > 0


@pytest.mark.parametrize("seed", range(2))
def test_ranks_that_hear_late_change_nothing(tiny_llama: Path, tmp_path: Path, seed: int) -> None:
    """Each rank by another, random delay; pages are evicted, loaded, converted and moved meanwhile."""
    options = {"cache_format": "timedecay", "recent_tokens": 32}
    system = prompt(80, seed=99)
    prompts = [system + prompt(20, seed=i) for i in range(5)]
    with serving(tiny_runner(tiny_llama, 256, **options)) as client:
        wanted = [client.generate(p, max_tokens=40, use_cache=False).tokens for p in prompts]
    launch = Delayed(ThreadRank, seed, 0.002)
    with (
        group_of(tiny_llama, pages=14, launch=launch, **options) as group,
        caching(tmp_path, page_bytes=page_sizes(group)) as service,
        serving(group, tmp_path / "s") as client,
    ):
        for _ in range(2):
            assert client.together(prompts, max_tokens=40) == wanted
        settle(client.worker, service)
        stats = client.worker.stats()

    assert launch.delays > 100
    assert stats.tiers[TierName.HBM].promoted_pages > 0
    assert stats.tiers[TierName.HBM].converted_pages > 0


def test_a_damaged_page_is_a_miss_on_all_ranks(tiny_llama: Path, tmp_path: Path) -> None:
    p = prompt(100)
    with (
        group_of(tiny_llama, pages=128) as group,
        caching(tmp_path, l4_bytes=0) as service,
        serving(group, tmp_path / "s") as client,
    ):
        cold = client.generate(p)
        sink_to_l3(client.worker, service)
        flip_bit(tmp_path / "s", group, depth=2)  # type: ignore[arg-type]

        again = client.generate(p)

        settle(client.worker, service)
        assert service.stats().tiers[TierName.HOST].corrupt_pages == 1
    assert again.tokens == cold.tokens
    assert again.cached == {"L3": 32}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_page_that_one_rank_cannot_copy_in_is_a_miss_on_all(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    p = prompt(100)
    copy_in = RankPages.copy_in
    left = [1]

    def fail_once(self: RankPages, frame: int, payload: memoryview, digest: bytes) -> None:
        if self._is_first == (rank == 0) and left:
            left.clear()
            raise MemoryError("no memory on this rank")
        copy_in(self, frame, payload, digest)

    with (
        group_of(tiny_llama, pages=128) as group,
        caching(tmp_path) as service,
        serving(group, tmp_path / "s") as client,
    ):
        cold = client.generate(p)
        sink_to_l3(client.worker, service)
        monkeypatch.setattr(RankPages, "copy_in", fail_once)

        again = client.generate(p)

        told = client.worker.explain("r2")
    assert told is not None
    assert any(f"rank {rank}: MemoryError: no memory on this rank" in n.detail for n in told.notes), (
        told.notes
    )
    assert again.tokens == cold.tokens
    assert sum(again.cached.values()) < 96 and not left


def test_a_page_that_one_rank_cannot_write_is_not_stored(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_out = RankPages.copy_out
    left = [1]

    def fail_once(self: RankPages, frame: int, payload: memoryview, digest: bytes, tokens: int) -> None:
        if not self._is_first and left:
            left.clear()
            raise MemoryError("no memory on this rank")
        copy_out(self, frame, payload, digest, tokens)

    p = prompt(100)
    monkeypatch.setattr(RankPages, "copy_out", fail_once)
    with (
        group_of(tiny_llama, pages=128) as group,
        caching(tmp_path) as service,
        serving(group, tmp_path / "s") as client,
    ):
        cold = client.generate(p)
        sink_to_l3(client.worker, service)  # what failed is saved once more
        again = client.generate(p)

    assert not left
    assert again.tokens == cold.tokens
    assert again.cached == {"L3": 96}


def test_the_number_of_ranks_is_part_of_the_identity_where_bits_are_promised(tiny_llama: Path) -> None:
    for numerics, differing in (("invariant", {"forward"}), ("fast", set())):
        single = tiny_runner(tiny_llama, 16, numerics=numerics).root_fields()
        with group_of(tiny_llama, numerics=numerics) as group:
            fields = group.root_fields()

        assert {name for name in fields if fields[name] != single[name]} == differing


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (1, "at least 2 ranks"),
        (3, "tensor_parallel 3 can't split the 4 heads"),
        (8, "can't split the 4 heads"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused_by_name(tiny_llama: Path, ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message), group_of(tiny_llama, ranks):
        pass


def test_kv_heads_that_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    folder = tiny_models.make_tiny_llama(
        tmp_path / "model", hidden_size=96, num_attention_heads=12, num_key_value_heads=3
    )
    with pytest.raises(ValueError, match="tensor_parallel 2 can't split the 3 KV heads"), group_of(folder):
        pass
