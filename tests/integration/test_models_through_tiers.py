"""Every kind of model through a worker and its node: transformers' own tokens, wherever the prompts' pages come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import tiny_models
import torch
from runner_kit import random_tokens
from transformers import AutoModelForCausalLM
from worker_kit import (
    PAGE_TOKENS,
    Client,
    Result,
    Slowed,
    caching,
    page_sizes,
    serving,
    sink_to_l3,
    sink_to_l4,
    tiny_runner,
)

from kvtier.tier.node.service import CacheService
from kvtier.tier.pages.page import TierName
from kvtier.tier.pages.recipe import Window
from kvtier.workers.models.forwards.latent import LatentModel
from kvtier.workers.runner.runner import StepBatch

pytestmark = pytest.mark.slow

NEW_TOKENS = 64
WINDOW = 32
BATCH_TOKENS = 256
LENGTHS = (300, 50, 50, 83)  # tokens: the first takes several steps, all are longer than the window
FOUND = [(length - 1) // PAGE_TOKENS * PAGE_TOKENS for length in LENGTHS]  # a hit computes at least one token
MODELS: dict[str, Callable[..., Path]] = {
    "deepseek v2": tiny_models.make_tiny_deepseek_v2,
    "deepseek v3": tiny_models.make_tiny_deepseek_v3,
    "gemma 2": tiny_models.make_tiny_gemma2,
    "gemma 3": tiny_models.make_tiny_gemma3,
    "qwen 3": tiny_models.make_tiny_qwen3,
    "mistral with a window": partial(tiny_models.make_tiny_mistral, sliding_window=WINDOW),
}
LATENT = ("deepseek v2", "deepseek v3")
PROMPTS = [random_tokens(i, length, tiny_models.VOCAB).tolist() for i, length in enumerate(LENGTHS)]


class Seen:
    """The most pages that a sequence had in any step, in any layer group, beyond those that are attended.

    Attended is what rows from the sequence's last full page on see: from there it would go on after a preemption.
    """

    def __init__(self, runner: Slowed) -> None:
        self.idle_pages = 0
        self._windows = [Window(group.window) for group in runner.groups]
        runner.before = self._look

    def _look(self, batch: StepBatch) -> None:
        for sequence in batch.sequences:
            full, end = (
                (sequence.context - sequence.length) // PAGE_TOKENS,
                -(-sequence.context // PAGE_TOKENS),
            )
            for window, pages in zip(self._windows, sequence.pages, strict=True):
                attended = end - window.first_page(full * PAGE_TOKENS, PAGE_TOKENS)
                self.idle_pages = max(self.idle_pages, len(pages.frames) - attended)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A tiny model's name and folder."""
    return request.param, MODELS[request.param](tmp_path_factory.mktemp("model"))


def own_tokens(folder: Path) -> list[list[int]]:
    """What transformers' own generate says after each prompt, in float32."""
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers: dict[int, list[int]] = {}
    with torch.inference_mode():
        for length in set(LENGTHS):
            rows = [number for number, prompt in enumerate(PROMPTS) if len(prompt) == length]
            ids = torch.tensor([PROMPTS[number] for number in rows])
            whole = own.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                pad_token_id=0,
            )
            answers |= dict(zip(rows, whole[:, length:].tolist(), strict=True))
    return [answers[number] for number in range(len(PROMPTS))]


@contextmanager
def started(folder: Path, place: Path) -> Iterator[tuple[Slowed, Client, CacheService]]:
    """A node and a worker again, over what L4 has in `place`."""
    runner = tiny_runner(folder, pages=512, max_batch_tokens=BATCH_TOKENS, native="auto")
    with (
        caching(place, page_bytes=page_sizes(runner)) as service,
        serving(
            runner, place / "s", max_batch_tokens=BATCH_TOKENS, always_load=True, load_deadline_ms=60_000.0
        ) as client,
    ):
        yield runner, client, service


def together(client: Client) -> list[Result]:
    """All prompts' answers, computed in one batch."""
    names = [client.send(prompt, max_tokens=NEW_TOKENS) for prompt in PROMPTS]
    return [client.result(name, patience_s=120.0) for name in names]


def promoted(client: Client) -> int:
    return client.worker.stats().tiers[TierName.HBM].promoted_pages


def loads_needed(runner: Slowed) -> int:
    """Pages of all layer groups that the prompts' first rows behind what is found attend."""
    return sum(
        found // PAGE_TOKENS - Window(group.window).first_page(found, PAGE_TOKENS)
        for group in runner.groups
        for found in FOUND
    )


def test_tokens_equal_generate_cold_from_each_tier_and_after_a_restart(
    model: tuple[str, Path], tmp_path: Path
) -> None:
    """A batch of several prompts each time; the tiers did serve, and only with pages that something attends."""
    name, folder = model
    expected = own_tokens(folder)
    results: dict[str, list[Result]] = {}
    loaded: dict[str, int] = {}

    def ask(where: str, client: Client) -> None:
        before = promoted(client)
        results[where] = together(client)
        loaded[where] = promoted(client) - before

    with started(folder, tmp_path) as (runner, client, service):
        seen = Seen(runner)
        ask("nowhere", client)
        ask("L1", client)
        sink_to_l3(client.worker, service)
        ask("L3", client)
        sink_to_l4(client.worker, service)
        ask("L4", client)
        if name in LATENT:
            check_paths(runner, [result for batch in results.values() for result in batch])
    with started(folder, tmp_path) as (runner, client, service):
        ask("L4 after a restart", client)
        needed = loads_needed(runner)

    cached = {where: [result.cached for result in batch] for where, batch in results.items()}
    for where, batch in results.items():
        assert [result.tokens for result in batch] == expected, where
    assert cached["nowhere"] == [{}] * len(PROMPTS)
    assert all(set(found) == {"L1"} for found in cached["L1"])
    assert cached["L3"] == [{"L3": found} for found in FOUND]
    assert cached["L4"] == cached["L4 after a restart"] == [{"L4": found} for found in FOUND]
    assert loaded["nowhere"] == loaded["L1"] == 0
    assert loaded["L3"] == loaded["L4"] == loaded["L4 after a restart"] == needed
    assert seen.idle_pages == 0


def check_paths(runner: Slowed, results: list[Result]) -> None:
    """Each row that was decoded was absorbed, and of prompts only the last token's where all others were cached."""
    own: LatentModel = runner.model
    assert isinstance(own, LatentModel)
    computed = [result.usage.computed_tokens for result in results]
    assert own.absorbed_rows == len(results) * (NEW_TOKENS - 1) + computed.count(1)
    assert own.expanded_rows == sum(n for n in computed if n > 1)
