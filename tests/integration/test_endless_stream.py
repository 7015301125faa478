"""A stream of 20,000 tokens through a worker and its node: flat memory, and the rule of attention sinks to the last token.

Every key is cached once, turned by its true position. What the stream computes is compared with float64 numbers that,
for each row again, put all keys which the row attends at positions without a gap and turn them there (arXiv 2309.17453).
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from runner_kit import random_tokens
from tiny_models import VOCAB, make_tiny_llama
from transformers import AutoModelForCausalLM
from worker_kit import (
    PAGE_TOKENS,
    Client,
    Slowed,
    caching,
    serving,
    settle,
    sink_to_l3,
    sink_to_l4,
    tiny_runner,
)

from kvtier.kernels.ops import give_back
from kvtier.tier.node.service import CacheService
from kvtier.tier.pages.page import TierName
from kvtier.workers.models.base import ModelShape, read_shape
from kvtier.workers.models.files.weights import Checkpoint
from kvtier.workers.models.forwards.lean import LeanWeights, load_rope
from kvtier.workers.requests.api import Output
from kvtier.workers.runner.runner import IntArray, StepBatch

pytestmark = pytest.mark.slow

STREAM_TOKENS = 20_000
PROMPT = [435]  # one token, so that the first 600 rows are the stream's own too
WINDOW, SINKS = 256, 4
OPTIONS: dict[str, Any] = {"window": WINDOW, "sinks": SINKS, "temperature": 1.0, "seed": 11}
BATCH_TOKENS = 128
PAGE_BYTES = 8192
L1_PAGES = 64
WINDOW_PAGES = 1 + WINDOW // PAGE_TOKENS + 1  # the sinks', and a window's wherever in a page it begins
BEING_SAVED = 24  # pages that left the window and wait for L3, at most; what a worker may have in flight

# Rows compared: every one of the first 600 positions, then 24 in a row, which cross a page's edge, every 970 or so.
END = len(PROMPT) + STREAM_TOKENS - 1
SEGMENTS = [(len(PROMPT) - 1, 600), *((int(at) - 24, int(at)) for at in np.linspace(1600, END, 20))]
ROW_OF = {position: i for i, position in enumerate(p for segment in SEGMENTS for p in range(*segment))}
TOLERANCE = 2e-5  # of the largest logit; float32 over some hundred keys and two layers
ASKED, ANSWERED = 600, 600  # the stream's beginning as another request's prompt, and what that is to answer
FOUND = (ASKED - 1) // PAGE_TOKENS * PAGE_TOKENS


@dataclass
class Tape:
    """A stream as it came: its tokens, the logits of the rows in ROW_OF, and what was in use meanwhile."""

    tokens: array[int] = field(default_factory=lambda: array("i", PROMPT))
    ended: threading.Event = field(default_factory=threading.Event)
    logits: torch.Tensor = field(default_factory=lambda: torch.full((len(ROW_OF), VOCAB), torch.nan))
    most_pages: int = 0  # of the sequence, in any step
    l1_bytes: list[int] = field(default_factory=list)
    process_bytes: dict[int, int] = field(default_factory=dict)  # by position
    dropped_pages: int = 0

    def sink(self, outputs: list[Output]) -> None:
        """Of the worker's outputs nothing is kept but the tokens."""
        for output in outputs:
            self.tokens.extend(output.token_ids)
            if output.finish_reason is not None:
                self.ended.set()

    def before(self, batch: StepBatch) -> None:
        """See Slowed."""
        self.most_pages = max(self.most_pages, *(len(s.pages[0].frames) for s in batch.sequences))

    def after(self, batch: StepBatch, logits: torch.Tensor) -> torch.Tensor:
        """See Slowed."""
        position = int(batch.positions[-1])
        if position in ROW_OF:
            self.logits[ROW_OF[position]] = logits[0]
        if position % 1000 == 0:
            give_back()  # else what is free at the time counts, which other threads and tests have left
            self.process_bytes[position] = psutil.Process().memory_info().rss
        return logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with 1,024 positions, whose rows tell keys apart more than random weights would let them."""
    folder = make_tiny_llama(tmp_path_factory.mktemp("stream"), max_position_embeddings=1024)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(2.0)
            layer.self_attn.k_proj.weight.mul_(2.0)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def runner(folder: Path) -> Slowed:
    """The stream's runner, with compiled kernels where there is a compiler."""
    return tiny_runner(folder, L1_PAGES, BATCH_TOKENS, native="auto", max_context=1024)


@contextmanager
def started(runner: Slowed, place: Path, **options: Any) -> Iterator[tuple[Client, CacheService]]:
    """A worker and its node; L3 and L4 hold a small part of what the stream leaves behind."""
    with (
        caching(place, l3_pages=96, l4_bytes=4 << 20) as service,
        serving(
            runner,
            place / "s",
            max_batch_tokens=BATCH_TOKENS,
            always_load=True,
            load_deadline_ms=60_000.0,
            **options,
        ) as client,
    ):
        yield client, service


@pytest.fixture(scope="module")
def tape(runner: Slowed, tmp_path_factory: pytest.TempPathFactory) -> Tape:
    """The whole stream."""
    tape = Tape()
    runner.before, runner.after = tape.before, tape.after
    with started(runner, tmp_path_factory.mktemp("tape"), sink=tape.sink) as (client, service):
        client.send(PROMPT, max_tokens=STREAM_TOKENS, **OPTIONS)
        while not tape.ended.wait(0.1):
            tape.l1_bytes.append(client.worker.stats().tiers[TierName.HBM].used_bytes)
        settle(client.worker, service)
        tape.dropped_pages = client.worker.stats().tiers[TierName.HBM].dropped_pages
    runner.before, runner.after = lambda batch: None, lambda batch, logits: logits
    assert len(tape.tokens) == len(PROMPT) + STREAM_TOKENS
    return tape


@dataclass(frozen=True)
class Rule:
    """What a row at t attends and how far apart it sees it: keys j <= t with j > t - window or j < sinks.

    `gap` is how many positions lie between the last sink and the window where the window has left the sinks behind;
    None leaves every key at its own position.
    """

    window: int = WINDOW
    sinks: int = SINKS
    gap: int | None = 0

    def keys(self, row: int) -> tuple[IntArray, IntArray, int]:
        """Positions of the keys that a row attends, where it sees them, and itself."""
        first = max(self.sinks, row - self.window + 1)
        kept = np.concatenate([np.arange(min(self.sinks, row + 1)), np.arange(first, row + 1)])
        if self.gap is None or first == self.sinks:
            return kept, kept, row
        stands = np.arange(len(kept))
        stands[self.sinks :] += self.gap
        return kept, stands, int(stands[-1])


def explicit_logits(folder: Path, tokens: IntArray, rows: tuple[int, int], rule: Rule) -> torch.Tensor:
    """Logits of rows [first, end), float64 [rows, vocab], from nothing but the tokens and the weights.

    Of the tokens before, those are computed whose keys the rows see, through all layers.
    """
    shape = read_shape(folder)
    weights = LeanWeights(Checkpoint(folder), shape, torch.float64, torch.device("cpu"))
    turns = _table(folder, shape, len(tokens) if rule.gap is None else rule.sinks + rule.window + 2)
    first = [
        max(0, rows[0] - (shape.num_layers - i) * (rule.window - 1)) for i in range(shape.num_layers + 1)
    ]
    places = np.unique(np.concatenate([np.arange(rule.sinks), np.arange(first[0], rows[1])]))
    at = {int(position): i for i, position in enumerate(places)}
    x = weights.embedding[torch.from_numpy(tokens[places].astype(np.int64))]
    group = shape.num_heads // shape.num_kv_heads
    for number in range(shape.num_layers):
        layer = weights.layer(number)
        qkv = (_norm(x, layer.attention_norm, shape) @ layer.qkv.T).view(len(x), -1, shape.head_dim)
        q, k, v = qkv.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], 1)
        attended = torch.zeros(len(x), shape.num_heads * shape.head_dim, dtype=torch.float64)
        for row in places[(places >= first[number + 1]) | (places < rule.sinks)].tolist():
            kept, stands, own = rule.keys(row)
            seen = torch.tensor([at[j] for j in kept.tolist()])
            keys = _turn(k[seen], turns, torch.from_numpy(stands)).repeat_interleave(group, 1)
            query = _turn(q[at[row]][None], turns, torch.tensor([own]))[0]
            scores = torch.einsum("hd,jhd->hj", query, keys) * shape.head_dim**-0.5
            values = v[seen].repeat_interleave(group, 1)
            attended[at[row]] = torch.einsum("hj,jhd->hd", scores.softmax(-1), values).flatten()
        x = x + attended @ layer.out.T
        y = _norm(x, layer.mlp_norm, shape)
        x = x + (torch.nn.functional.silu(y @ layer.gate.T) * (y @ layer.up.T)) @ layer.down.T
    head = weights.embedding if weights.head is None else weights.head
    return _norm(x[[at[row] for row in range(*rows)]], weights.norm, shape) @ head.T


def _table(folder: Path, shape: ModelShape, positions: int) -> torch.Tensor:
    """The turn at each position, complex128 [positions, 1, head_dim / 2]."""
    frequencies = torch.from_numpy(load_rope(Checkpoint(folder), shape)._frequencies).double()
    angles = torch.arange(positions).double()[:, None, None] * frequencies
    return torch.polar(torch.ones_like(angles), angles)


def _turn(x: torch.Tensor, turns: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * turns[positions]
    return torch.cat([turned.real, turned.imag], -1)


def _norm(x: torch.Tensor, weight: torch.Tensor, shape: ModelShape) -> torch.Tensor:
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + shape.norm_eps)


def errors(folder: Path, tape: Tape, segment: tuple[int, int], rule: Rule) -> torch.Tensor:
    """How far each row of the stream is from the rule, of the largest logit."""
    exact = explicit_logits(folder, np.array(tape.tokens, np.int32), segment, rule)
    ours = tape.logits[[ROW_OF[position] for position in range(*segment)]]
    return (ours - exact).abs().amax(1) / exact.abs().max()


def test_memory_is_flat_however_long_the_stream(tape: Tape) -> None:
    """The pages held, L1's bytes, and the process's, in which the stream's tokens and the node's bounded tables grow."""
    settled = [nbytes for position, nbytes in tape.process_bytes.items() if position >= 2000]

    assert tape.most_pages <= WINDOW_PAGES
    assert max(tape.l1_bytes) <= (WINDOW_PAGES + BEING_SAVED) * PAGE_BYTES
    assert tape.dropped_pages >= (len(tape.tokens) - WINDOW) // PAGE_TOKENS - WINDOW_PAGES
    assert max(settled) - settled[0] < 3 << 20


@pytest.mark.parametrize("segment", SEGMENTS, ids=lambda segment: f"{segment[0]}-{segment[1]}")
def test_every_row_is_what_turning_all_its_keys_again_gives(
    folder: Path, tape: Tape, segment: tuple[int, int]
) -> None:
    assert errors(folder, tape, segment, Rule()).max() <= TOLERANCE


@pytest.mark.parametrize(
    "wrong",
    [
        Rule(window=WINDOW - 1),
        Rule(window=WINDOW + 1),
        Rule(sinks=SINKS - 1),
        Rule(sinks=SINKS + 1),
        Rule(gap=1),
        Rule(gap=None),
    ],
    ids=str,
)
def test_a_rule_that_is_off_by_one_key_or_position_is_told_from_the_stream(
    folder: Path, tape: Tape, wrong: Rule
) -> None:
    """In every row, so that the test above would fail."""
    for segment in (SEGMENTS[1], SEGMENTS[-1]):
        assert errors(folder, tape, segment, wrong).min() > 100 * TOLERANCE


def test_the_stream_goes_on_the_same_from_a_prompt_that_is_computed_or_found_in_any_tier(
    runner: Slowed, tape: Tape, tmp_path: Path
) -> None:
    prompt, expected = tape.tokens[:ASKED].tolist(), tape.tokens[ASKED : ASKED + ANSWERED].tolist()
    with started(runner, tmp_path) as (client, service):
        loaded = []

        def ask() -> dict[str, int]:
            before = client.worker.stats().tiers[TierName.HBM].promoted_pages
            result = client.generate(prompt, max_tokens=ANSWERED, **OPTIONS)
            loaded.append(client.worker.stats().tiers[TierName.HBM].promoted_pages - before)
            assert result.tokens == expected
            return result.cached

        assert ask() == {}
        assert ask() == {"L1": FOUND}
        sink_to_l3(client.worker, service)
        assert ask() == {"L3": FOUND}
        sink_to_l4(client.worker, service)
        assert ask() == {"L4": FOUND}

    assert loaded[:2] == [0, 0]
    assert 0 < loaded[2] == loaded[3] <= WINDOW_PAGES


def test_the_stream_goes_on_the_same_when_it_is_preempted(runner: Slowed, tape: Tape, tmp_path: Path) -> None:
    """By a crowd that comes in its middle, beside an older stream: the one with most tokens to go makes room."""
    prompt, expected = tape.tokens[:ASKED].tolist(), tape.tokens[ASKED : ASKED + 1500].tolist()
    crowd: list[str] = []
    with started(runner, tmp_path) as (client, _):

        def disturb(batch: StepBatch) -> None:
            for sequence in batch.sequences:
                if sequence.pages[0].window == WINDOW and sequence.context == ASKED + 200 and not crowd:
                    prompts = [random_tokens(i, 160, VOCAB).tolist() for i in range(1, 5)]
                    crowd.extend(client.send(each, max_tokens=300) for each in prompts)

        runner.before = disturb
        older = client.send(PROMPT, max_tokens=5000, window=32)
        client.first(older)
        name = client.send(prompt, max_tokens=len(expected), **OPTIONS)
        result = client.result(name, patience_s=120.0)
        told = client.worker.explain(name)
        client.worker.cancel(older)
        others = [client.result(each) for each in crowd]
    runner.before = lambda batch: None

    assert result.tokens == expected
    assert told is not None and told.preemptions > 0
    assert [len(other.tokens) for other in others] == [300] * 4
