"""Captured decode steps, on a recorded list of calls: what a replay computes is what the step would have.

`Recorder` stands in for a CUDA graph. It notes each operation and each kernel launch of a capture, and a replay makes the same
calls on the same tensors; whatever a capture computed is spoiled first, so nothing of it can be taken for a replay's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from runner_kit import Pool, Sequence, Window, generate, random_tokens, runner_of, step
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import GridExecutor

from kvtier.kernels.ops import Kernels
from kvtier.kernels.triton_kernels import TritonKernels
from kvtier.workers.runner.decode_graphs import Replay
from kvtier.workers.runner.runner import Runner

Call = Callable[[], None]


class Recorder(TorchDispatchMode):
    """Captures and replays; counts both."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] | None = None
        self.results: list[torch.Tensor] = []
        self.captures = 0

    def capture(self, function: Callable[[], torch.Tensor]) -> tuple[Replay, torch.Tensor]:
        self.captures += 1
        self.calls, self.results = [], []
        with self:
            logits = function()
        calls, results = self.calls, self.results
        self.calls = None

        def replay() -> None:
            for result in results:
                result.fill_(77)
            for call in calls:
                call()

        return replay, logits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        assert self.calls is not None
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        made = [t for t in _tensors(result) if t.untyped_storage().data_ptr() not in given]
        if func._schema.is_mutable:
            self.calls.append(lambda: func(*args, **(kwargs or {})))
        elif made and "empty" not in str(func):

            def again() -> None:
                for old, new in zip(_tensors(result), _tensors(func(*args, **(kwargs or {}))), strict=True):
                    old.copy_(new)

            self.calls.append(again)
        self.results += made
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Launches of interpreted kernels are recorded whole: what the interpreter does inside is no operation of the step."""
    recorder = Recorder()
    launch = GridExecutor.__call__

    def recorded(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
        if recorder.calls is not None:
            recorder.calls.append(lambda: launch(executor, *args, **kwargs))
        with _disable_current_modes():
            launch(executor, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", recorded)
    return recorder


@pytest.fixture
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.kernels.triton_kernels.INTERPRETED_PROGRAMS", 1)  # few: they are slow

    def kernels(device: torch.device, cache: Path, threads: int, native: str, invariant: bool) -> Kernels:
        return TritonKernels(device, invariant)

    monkeypatch.setattr("kvtier.workers.runner.runner.choose_kernels", kernels)


@pytest.fixture(scope="module")
def tinier_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tinier")
    return tiny_models.make_tiny_llama(
        folder, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )


@pytest.fixture
def graphs(tinier_llama: Path, on_triton: None, recorder: Recorder) -> Iterator[Runner]:
    with runner_of(tinier_llama, numerics="fast") as runner:
        assert runner.use_graphs(recorder.capture) == ""
        yield runner


def decode(runner: Runner, sequences: list[Sequence]) -> torch.Tensor:
    """Logits of one decode step of these sequences, whose next tokens are then chosen greedily."""
    logits = torch.cat(step(runner, [(sequence, 1) for sequence in sequences])).clone()
    for sequence, row in zip(sequences, logits, strict=True):
        sequence.tokens.append(int(row.argmax()))
    return logits


def prefilled(runner: Runner, lengths: list[int], window: Window = Window()) -> list[Sequence]:  # noqa: B008
    pool = Pool(runner)
    sequences = []
    for seed, length in enumerate(lengths):
        sequence = Sequence(pool, random_tokens(seed, length, tiny_models.VOCAB), window)
        (logits,) = step(runner, [(sequence, length)])
        sequence.tokens.append(int(logits[-1].argmax()))
        sequences.append(sequence)
    return sequences


@pytest.mark.parametrize("cache_format", ["auto", "int4c"])
def test_replayed_steps_give_the_tokens_of_steps_that_are_run(
    tinier_llama: Path, on_triton: None, recorder: Recorder, cache_format: str
) -> None:
    prompts = [random_tokens(i, n, tiny_models.VOCAB).tolist() for i, n in enumerate((20, 7))]
    with runner_of(tinier_llama, numerics="fast", cache_format=cache_format) as runner:
        expected = generate(runner, prompts, 4, chunk=24)
    with runner_of(tinier_llama, numerics="fast", cache_format=cache_format) as runner:
        assert runner.use_graphs(recorder.capture) == ""
        assert generate(runner, prompts, 4, chunk=24) == expected
        assert runner._graphs is not None and runner._graphs.replays >= 2


def test_one_graph_serves_its_bucket_whatever_the_rows_hold(graphs: Runner, recorder: Recorder) -> None:
    """Other sequences, other pages, longer contexts, fewer rows: each replay is of its own step, to 1e-5."""
    sequences = prefilled(graphs, [30, 5, 17, 34, 40])
    for chosen in ([0, 1, 2], [2, 1, 0], [3, 4, 1, 0], [4, 0, 2], [1, 2, 3, 4]):
        before = graphs.arena.clone()
        some = [sequences[n] for n in chosen]
        state = [(s.done, list(s.tokens)) for s in some]
        got = decode(graphs, some)
        after = graphs.arena.clone()

        graphs.arena.copy_(before)
        for sequence, (done, tokens) in zip(some, state, strict=True):
            sequence.done, sequence.tokens = done, tokens
        replaying, graphs._graphs = graphs._graphs, None
        expected = decode(graphs, some)
        graphs._graphs = replaying
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            after.view(torch.float32), graphs.arena.view(torch.float32), rtol=1e-5, atol=1e-5, equal_nan=True
        )
    assert recorder.captures == 1, "three and four rows go by one bucket"
    assert graphs._graphs is not None and graphs._graphs.replays == 4


def test_windows_with_sinks_have_graphs_of_their_own(graphs: Runner, recorder: Recorder) -> None:
    window = Window(32, 4)
    streams = prefilled(graphs, [20, 50], window)
    plain = prefilled(graphs, [12, 9])
    for _ in range(3):
        decode(graphs, streams)
        decode(graphs, plain)
    assert recorder.captures == 2


def test_steps_that_are_no_decode_of_every_row_are_run_as_ever(graphs: Runner, recorder: Recorder) -> None:
    sequences = prefilled(graphs, [8, 8])
    for _ in range(3):
        sequences[0].tokens += [1, 2]
        step(graphs, [(sequences[0], 3), (sequences[1], 1)])
        sequences[1].tokens.append(3)
        sequences[0].tokens.append(4)
    assert recorder.captures == 0


def test_a_step_that_does_not_fit_the_shape_of_its_graph_is_run_as_ever(
    graphs: Runner, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.kernels.gqa.most_items", lambda wanted, shape: 1)
    sequences = prefilled(graphs, [30, 5])
    for _ in range(3):
        assert torch.isfinite(decode(graphs, sequences)).all()
    assert graphs._graphs is not None and graphs._graphs.replays == 0


def test_graphs_are_bounded(graphs: Runner, recorder: Recorder) -> None:
    assert graphs._graphs is not None
    graphs._graphs._max_graphs = 1
    sequences = prefilled(graphs, [9, 9, 9])
    for _ in range(3):
        decode(graphs, sequences)
        decode(graphs, sequences[:1])
    assert recorder.captures == 1


def test_what_cannot_be_captured_is_said(tinier_llama: Path, recorder: Recorder, on_triton: None) -> None:
    with runner_of(tinier_llama, numerics="fast", forward="transformers") as runner:
        assert "transformers forward of LlamaForCausalLM does work on the host" in runner.use_graphs(
            recorder.capture
        )
    with runner_of(tinier_llama, numerics="invariant") as runner:
        assert "numerics invariant" in runner.use_graphs(recorder.capture)
        assert np.isfinite(generate(runner, [[1, 2, 3]], 2, 4)).all()
