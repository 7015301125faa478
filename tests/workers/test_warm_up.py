"""What a worker serves needs no kernel that its warm-up has not run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from runner_kit import generate, random_tokens

from kvtier.kernels.ops import Kernels, KVLayout, StepPlan, TorchKernels
from kvtier.workers.runner import runner as runner_module
from kvtier.workers.runner.runner import load_runner
from kvtier.workers.runner.warm_up import warm_up

pytestmark = pytest.mark.slow

Kind = tuple[Any, ...]


class Watched(TorchKernels):
    """Plain torch, which notes what of each call decides which compiled kernel a GPU would run."""

    def __init__(self, kinds: set[Kind]) -> None:
        super().__init__()
        for method in ("write_kv", "paged_attention", "write_latents", "latent_attention", "convert_pages"):
            setattr(self, method, self._noting(method, kinds))

    def _noting(self, method: str, kinds: set[Kind]) -> Any:
        function = getattr(super(), method)

        def call(*arguments: Any, **options: Any) -> Any:
            (layout,) = [a for a in arguments if isinstance(a, KVLayout)]
            plans = [a for a in arguments if isinstance(a, StepPlan)]
            if method == "convert_pages":
                kinds.add((method, layout.num_layers, int(arguments[3]), int(arguments[5])))
            for plan in plans:
                rows = {("one row" if n == 1 else "a chunk") for n in plan.lengths.tolist()}
                formats = {layout.write_format} if "write" in method else set(plan.formats.tolist())
                kinds.update((method, layout.num_layers, int(f), r) for f in formats for r in rows)
            return function(*arguments, **options)

        return call


def load(folder: Path, cache_dir: Path, **changes: Any) -> runner_module.Runner:
    options: dict[str, Any] = {
        "dtype": "float32",
        "page_tokens": 16,
        "l1_bytes": 4 << 20,
        "numerics": "fast",
        "forward": "auto",
        "threads": 1,
        "max_context": 0,
        "max_batch_tokens": 64,
        "epoch": 0,
    }
    return load_runner(str(folder), **{**options, **changes}, cache_dir=cache_dir)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"cache_format": "int4c"},
        {"cache_format": "timedecay", "recent_tokens": 32},
        {"max_context": 40, "max_batch_tokens": 8},
        {"l1_bytes": 4 * 16384},
    ],
    ids=["raw", "int4c", "timedecay", "little", "four-pages"],
)
def test_serving_runs_no_kernel_that_the_warm_up_has_not(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    kinds: set[Kind] = set()

    def watched(*_: Any) -> Kernels:
        return Watched(kinds)

    monkeypatch.setattr(runner_module, "choose_kernels", watched)
    runner = load(tiny_llama, tmp_path, **changes)
    kinds.clear()
    warm_up(runner)
    warmed = set(kinds)
    assert torch.equal(runner.arena, torch.zeros_like(runner.arena)), "nothing is left of it"

    kinds.clear()
    if "l1_bytes" not in changes:
        length, count = (30, 1) if "max_context" in changes else (150, 2)
        prompts = [random_tokens(seed, length - seed, tiny_models.VOCAB).tolist() for seed in range(count)]
        generate(runner, prompts, 5, 8)
        assert kinds and kinds <= warmed


def test_a_warmed_runner_gives_the_same_tokens(tiny_llama: Path, tmp_path: Path) -> None:
    prompt = random_tokens(1, 60, tiny_models.VOCAB).tolist()
    cold = generate(load(tiny_llama, tmp_path), [prompt], 8, 16)
    runner = load(tiny_llama, tmp_path)
    warm_up(runner)
    assert generate(runner, [prompt], 8, 16) == cold
    assert np.isfinite(runner.arena.numpy().view(np.float32)).any()
