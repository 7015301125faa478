"""Time-decayed caches through worker and node: a batch's tokens are those of each prompt alone, whatever happens to pages.

With FP8 and with INT8 as what pages are written in, and with compiled kernels where there is a compiler.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from runner_kit import random_tokens
from tiny_models import VOCAB
from worker_kit import (
    PAGE_TOKENS,
    Client,
    Result,
    Slowed,
    caching,
    flip_bit,
    page_sizes,
    serving,
    settle,
    sink_to_l3,
    sink_to_l4,
    tiny_runner,
)

from kvtier.tier.node.service import CacheService
from kvtier.tier.pages.page import PageFormat, TierName
from kvtier.workers.runner import runner as runner_module

pytestmark = pytest.mark.slow

RECIPES: dict[str, dict[str, Any]] = {
    "timedecay": {"cache_format": "timedecay", "recent_tokens": 64, "decay_sinks": 16, "native": "auto"},
    "int4c": {"cache_format": "int4c", "native": "auto"},
}
NEW_TOKENS = 100
LENGTHS = (
    300,
    170,
    250,
    130,
)  # tokens; with the answers, each crosses one or two strides at which pages decay
PROMPTS = [random_tokens(i, length, VOCAB).tolist() for i, length in enumerate(LENGTHS)]
FOUND = [(length - 1) // PAGE_TOKENS * PAGE_TOKENS for length in LENGTHS]
GROWING = [
    prompt[: 40 + i] for i, prompt in enumerate(PROMPTS)
]  # admitted together, and then too much for a tight L1
GROWN_TOKENS = 240
ROOMY, TIGHT = 64, 12  # L1, in unquantized pages


@pytest.fixture(params=[PageFormat.FP8, PageFormat.INT8])
def eight_bit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PageFormat:
    """What pages are written in: on devices without FP8 numbers it is INT8."""
    format: PageFormat = request.param
    monkeypatch.setattr(runner_module, "eight_bit_format", lambda device: format)
    return format


@contextmanager
def started(runner: Slowed, place: Path, batch_tokens: int) -> Iterator[tuple[Client, CacheService]]:
    """A worker and its node, over what L4 has in `place`."""
    with (
        caching(place, page_bytes=page_sizes(runner)) as service,
        serving(
            runner, place / "s", max_batch_tokens=batch_tokens, always_load=True, load_deadline_ms=60_000.0
        ) as client,
    ):
        yield client, service


def together(
    client: Client, prompts: list[list[int]] = PROMPTS, new_tokens: int = NEW_TOKENS
) -> list[Result]:
    """All prompts' answers, computed in one batch."""
    names = [client.send(prompt, max_tokens=new_tokens) for prompt in prompts]
    return [client.result(name, patience_s=240.0) for name in names]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_batchs_tokens_are_those_of_each_prompt_alone_wherever_its_pages_were(
    tiny_llama: Path, tmp_path: Path, recipe: str, eight_bit: PageFormat
) -> None:
    """Computed now, in each tier, damaged, and after a restart; in other chunks too."""
    runner = tiny_runner(tiny_llama, ROOMY, **RECIPES[recipe])
    results: dict[str, list[Result]] = {}
    with started(runner, tmp_path, 256) as (client, service):
        alone = [client.generate(p, max_tokens=NEW_TOKENS, use_cache=False) for p in PROMPTS]
        results["cold"] = together(client)
        results["L1"] = together(client)
        sink_to_l3(client.worker, service)
        results["L3"] = together(client)
        sink_to_l4(client.worker, service)
        results["L4"] = together(client)
        sink_to_l3(client.worker, service)
        flip_bit(tmp_path / "s", runner, depth=3)
        results["damaged"] = together(client)
        settle(client.worker, service)
        corrupt = service.stats().tiers[TierName.HOST].corrupt_pages
    with started(runner, tmp_path, 40) as (client, _):
        results["restarted"] = together(client)
    with started(runner, tmp_path / "new", 40) as (client, _):
        results["other chunks"] = together(client)

    assert {(source, target) for source, target, _ in runner.conversions} == {(eight_bit, PageFormat.INT4C)}
    for what, batch in results.items():
        assert [result.tokens for result in batch] == [result.tokens for result in alone], what
    cached = {what: [result.cached for result in batch] for what, batch in results.items()}
    assert cached["cold"] == cached["other chunks"] == [{}] * len(PROMPTS)
    # An answer that crossed a stride has let originals go that its prompt starts from: they are below.
    assert all({"L1"} <= set(found) <= {"L1", "L3"} for found in cached["L1"])
    assert [sum(found.values()) for found in cached["L1"]] == FOUND
    assert cached["L3"] == [{"L3": found} for found in FOUND]
    assert cached["L4"] == cached["restarted"] == [{"L4": found} for found in FOUND]
    assert corrupt >= len(PROMPTS)


@pytest.mark.parametrize("recipe", RECIPES)
def test_preempted_sequences_say_what_they_say_alone(
    tiny_llama: Path, tmp_path: Path, recipe: str, eight_bit: PageFormat
) -> None:
    runner = tiny_runner(tiny_llama, TIGHT, **RECIPES[recipe])
    with started(runner, tmp_path, 64) as (client, _):
        alone = [client.generate(p, max_tokens=GROWN_TOKENS, use_cache=False) for p in GROWING]
        results = together(client, GROWING, GROWN_TOKENS)
        told = [client.worker.explain(result.last.request_id) for result in results]

    assert [result.tokens for result in results] == [result.tokens for result in alone]
    assert sum(t.preemptions for t in told if t is not None) > 0
    assert {source for source, _, _ in runner.conversions} == {eight_bit}
