"""What a lean forward is compared with: computed by transformers in another process, kept, and never trusted alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from waiting import until

from kvtier.workers.models.files.weights import Checkpoint
from kvtier.workers.models.forwards import reference as model_expected
from kvtier.workers.models.forwards.reference import Expected, compute_expected
from kvtier.workers.runner.runner import Runner, load_runner

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")

OF_ITS_OWN = """
import sys
from pathlib import Path
from kvtier.workers.runner.runner import load_runner
try:
    runner = load_runner(sys.argv[1], cache_dir=Path(sys.argv[2]), dtype="float32", page_tokens=16, l1_bytes=1 << 20,
        numerics="auto", forward="lean", threads=1, max_context=0, max_batch_tokens=64, epoch=0, native="off")
    print(runner.model.kind)
except ValueError as error:
    print("refused:", error)
print(sorted(name for name in sys.modules if name.startswith("transformers.model") and "modeling_llama" in name))
"""


def load(folder: Path, cache: Path) -> Runner:
    return load_runner(
        str(folder),
        cache_dir=cache,
        dtype="float32",
        page_tokens=16,
        l1_bytes=1 << 20,
        numerics="auto",
        forward="lean",
        threads=1,
        max_context=0,
        max_batch_tokens=64,
        epoch=0,
        native="off",
    )


def load_alone(folder: Path, cache: Path) -> list[str]:
    """What a process prints that loads a model and has loaded nothing before."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", OF_ITS_OWN, str(folder), str(cache)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders for which transformers computes, from now on."""
    folders = []
    compute = model_expected.compute_expected

    def counted(files: Checkpoint, dtype: torch.dtype, device: torch.device) -> Expected:
        folders.append(files.folder)
        return compute(files, dtype, device)

    monkeypatch.setattr(model_expected, "compute_expected", counted)
    return folders


def kept(cache: Path) -> list[Path]:
    return sorted((cache / "expected").glob("*"))


def test_a_worker_never_loads_transformers_modules_and_refuses_what_they_refuse(tmp_path: Path) -> None:
    folder, cache = tiny_models.make_tiny_llama(tmp_path / "model"), tmp_path / "cache"

    assert load_alone(folder, cache) == ["lean", "[]"]
    assert len(kept(cache)) == 1

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    said, modules = load_alone(folder, cache)
    assert said.startswith("refused:") and "model.layers.1.mlp.up_proj.weight" in said
    assert modules == "[]"
    assert len(kept(cache)) == 1


def test_the_other_process_computes_the_same(tmp_path: Path) -> None:
    folder = tiny_models.make_tiny_llama(tmp_path)
    files = Checkpoint(folder)

    there = model_expected._expected_elsewhere(folder, torch.float32, CPU)
    here = compute_expected(files, torch.float32, CPU)

    torch.testing.assert_close(there.logits, here.logits)
    torch.testing.assert_close(there.inv_freq, here.inv_freq)
    assert there.scaling == here.scaling


def test_a_second_start_computes_nothing_by_transformers(tmp_path: Path, computed: list[Path]) -> None:
    folder, cache = tiny_models.make_tiny_llama(tmp_path / "model"), tmp_path / "cache"

    load(folder, cache)
    load(folder, cache)

    assert computed == [folder]


def test_other_weights_of_the_same_shapes_are_computed_for_themselves(
    tmp_path: Path, computed: list[Path]
) -> None:
    folder, cache = tiny_models.make_tiny_llama(tmp_path / "model"), tmp_path / "cache"
    load(folder, cache)
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**weights, name: weights[name] * 1.02}, folder / "model.safetensors", {"format": "pt"})

    load(folder, cache)

    assert computed == [folder, folder]


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    "damage",
    [flipped, lambda data: data[:1000], lambda data: b"", lambda data: data[:32] + flipped(data[32:])],
    ids=["a bit", "cut off", "empty", "a bit of the end"],
)
def test_a_damaged_result_is_computed_again_and_replaced(
    tmp_path: Path, computed: list[Path], damage: Callable[[bytes], bytes]
) -> None:
    folder, cache = tiny_models.make_tiny_llama(tmp_path / "model"), tmp_path / "cache"
    load(folder, cache)
    (file,) = kept(cache)
    file.write_bytes(damage(file.read_bytes()))

    load(folder, cache)
    load(folder, cache)

    assert computed == [folder, folder]


def test_a_kept_result_that_is_whole_but_wrong_refuses_no_model(
    tmp_path: Path, computed: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder, cache = tiny_models.make_tiny_llama(tmp_path / "model"), tmp_path / "cache"
    load(folder, cache)
    (file,) = kept(cache)
    found = model_expected._read(file.read_bytes(), file.stem)
    assert found is not None
    wrong = Expected(found.logits.roll(1, 1), found.inv_freq, found.scaling)
    model_expected._keep(file.stem, wrong, cache)

    load(folder, cache)
    load(folder, cache)

    assert computed == [folder, folder]
    assert "computed again by transformers" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        lambda logits: logits[:, :-1],
        lambda logits: logits[:0],
        lambda logits: logits.int(),
        lambda logits: logits.double(),
        lambda logits: torch.full_like(logits, float("inf")),
    ],
    ids=["a narrower vocabulary", "no rows", "integers", "float64", "infinite"],
)
def test_a_kept_result_of_another_form_is_computed_again(
    tmp_path: Path, computed: list[Path], change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    folder, cache = tiny_models.make_tiny_llama(tmp_path / "model"), tmp_path / "cache"
    load(folder, cache)
    (file,) = kept(cache)
    found = model_expected._read(file.read_bytes(), file.stem)
    assert found is not None
    model_expected._keep(file.stem, Expected(change(found.logits), found.inv_freq, found.scaling), cache)

    load(folder, cache)
    load(folder, cache)

    assert computed == [folder, folder]


def test_a_result_under_another_key_is_not_taken(tmp_path: Path) -> None:
    result = Expected(torch.zeros(2, 3), torch.zeros(4), 1.0)
    model_expected._keep("a", result, tmp_path)
    (file,) = kept(tmp_path)
    file.rename(file.with_stem("b"))

    assert model_expected._kept("a", tmp_path) is None
    assert model_expected._kept("b", tmp_path) is None


def test_a_few_results_are_kept_those_used_last(tmp_path: Path) -> None:
    result = Expected(torch.zeros(2, 3), torch.zeros(4), 1.0)
    for number in range(model_expected.KEPT + 3):
        model_expected._keep(f"{number:02}", result, tmp_path)
        os.utime(tmp_path / "expected" / f"{number:02}.safetensors", (number, number))
    model_expected._keep("last", result, tmp_path)

    names = [file.stem for file in kept(tmp_path)]
    assert names == [*(f"{number:02}" for number in range(4, 11)), "last"]


def test_a_cache_folder_that_cannot_be_written_only_costs_time(tmp_path: Path, computed: list[Path]) -> None:
    folder, cache = tiny_models.make_tiny_llama(tmp_path / "model"), tmp_path / "cache"
    cache.mkdir()
    (cache / "expected").write_text("a file where a folder should be")

    load(folder, cache)
    load(folder, cache)

    assert computed == [folder, folder]


def test_the_other_process_ends_with_this_one(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    fifo = tmp_path / "config.json"
    os.mkfifo(fifo)  # it waits for the model's config for as long as nothing writes it
    child: Any = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "kvtier.workers.models.forwards.reference",
            str(tmp_path),
            "float32",
            "cpu",
            "1",
        ],
        stdin=subprocess.PIPE,
        env=environment,
    )
    with fifo.open("wb"):  # opened once the child reads, so it runs
        child.stdin.close()
        until(lambda: child.poll() is not None, "the process ends")

    assert child.returncode == 1
