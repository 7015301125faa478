"""Pages that other code computed are never found: the root holds what computes them."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
import tiny_models
from runner_kit import runner_of

from kvtier.tier.pages.identity import root_key
from kvtier.workers.models.files import versions as model_versions
from kvtier.workers.models.files.versions import code_digest, forward_sources


def root(folder: Path) -> bytes:
    with runner_of(folder) as runner:
        return root_key(runner.root_fields())


@pytest.mark.parametrize("part", ["transformers", "torch", "our own code"])
def test_the_root_differs_by_each_part_of_the_code_that_computes_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    folder = tiny_models.make_tiny_llama(tmp_path)
    before, again = root(folder), root(folder)
    assert before == again

    if part == "our own code":
        monkeypatch.setattr(model_versions, "forward_sources", lambda: forward_sources()[1:])
    else:
        other = {part: "999.0"}
        monkeypatch.setattr(model_versions, "version", lambda name: other.get(name) or version(name))

    assert root(folder) != before


def test_the_digest_of_our_code_follows_names_and_contents(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.py", "b.py", "c.py")]
    for file, text in zip(files, ("x", "x", "y"), strict=True):
        file.write_text(text)

    assert len({code_digest((file,)) for file in files}) == 3


def test_the_code_that_computes_pages_is_the_forwards_and_all_kernels() -> None:
    names = {f"{file.parent.name}/{file.name}" for file in forward_sources()}

    assert {
        "forwards/lean.py",
        "forwards/latent.py",
        "forwards/transformers.py",
        "forwards/rope.py",
        "cpu/llama.hpp",
        "cpu/engine.cpp",
        "cpu/native.py",
        "cpu/build.py",
        "kernels/reference.py",
        "kernels/gqa.py",
    } <= names
