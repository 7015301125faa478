"""The same-tokens law in bfloat16: `numerics: invariant` on the real model, whatever the cache and the batch do."""

from __future__ import annotations

from pathlib import Path

from worker_kit import caching, page_sizes, serving, sink_to_l3, sink_to_l4

from kvtier.workers.runner.runner import load_runner

PROMPTS = [
    [(31 * i * (p + 3) + 17 * p) % 40_000 + 10 for i in range(length)]
    for p, length in enumerate((90, 140, 77))
]
OPTIONS = {"max_tokens": 24, "ignore_eos": True}


def test_bfloat16_tokens_are_the_same_alone_batched_chunked_cached_sunk_and_preempted(
    demo_model: Path, tmp_path: Path
) -> None:
    runner = load_runner(
        str(demo_model),
        dtype="bfloat16",
        page_tokens=16,
        l1_bytes=18 * 368_640,  # 18 pages: three sequences at once don't fit
        numerics="invariant",
        forward="auto",
        threads=2,
        max_context=1024,
        max_batch_tokens=64,
        epoch=0,
    )
    sizes = page_sizes(runner)  # type: ignore[arg-type]
    with (
        caching(tmp_path, l3_pages=128, l4_bytes=128 << 20, page_bytes=sizes) as service,
        serving(runner, tmp_path / "s", max_batch_tokens=64, always_load=True) as client,  # type: ignore[arg-type]
    ):
        alone = [client.generate(prompt, use_cache=False, **OPTIONS).tokens for prompt in PROMPTS]

        names = [client.send(prompt, **OPTIONS) for prompt in PROMPTS]
        together = [client.result(name).tokens for name in names]
        preemptions = [client.worker.explain(name).preemptions for name in names]  # type: ignore[union-attr]
        assert together == alone
        assert sum(preemptions) > 0

        sink_to_l3(client.worker, service)
        for prompt, tokens in zip(PROMPTS, alone, strict=True):
            again = client.generate(prompt, **OPTIONS)
            assert again.tokens == tokens
            assert again.cached["L3"] >= (len(prompt) - 1) // 16 * 16

        sink_to_l4(client.worker, service)
        for prompt, tokens in zip(PROMPTS, alone, strict=True):
            again = client.generate(prompt, **OPTIONS)
            assert again.tokens == tokens
            assert again.cached["L4"] >= (len(prompt) - 1) // 16 * 16
            from_l1 = client.generate(prompt, **OPTIONS)
            assert from_l1.tokens == tokens
            assert set(from_l1.cached) == {"L1"}
