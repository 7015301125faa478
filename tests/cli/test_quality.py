"""`kvtier quality` measures what a cache format costs, on a tiny model and real text, without a service."""

from __future__ import annotations

import errno
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gateway_kit import make_byte_tokenizer
from tiny_models import VOCAB, make_tiny_deepseek_v2, make_tiny_gemma3, make_tiny_llama
from transformers import LlamaForCausalLM

from kvtier.cli import main
from kvtier.lab import quality
from kvtier.lab.quality import (
    FORMATS,
    QualityError,
    Reading,
    Report,
    Settings,
    buckets,
    check_formats,
    formats_for,
    measure,
    read_contexts,
)
from kvtier.tier.pages.page import PageFormat
from kvtier.workers.models.text import Text
from kvtier.workers.runner.runner import Runner

pytestmark = pytest.mark.slow

CONTEXT = 400
WORDS = ("alice", "rabbit", "said", "the", "queen", "of", "hearts", "and", "they", "were", "curious", "then")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose tokens are bytes."""
    folder = make_tiny_llama(tmp_path_factory.mktemp("tiny"), num_hidden_layers=3)
    make_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of about 3,000 bytes."""
    file = tmp_path_factory.mktemp("prose") / "prose.txt"
    chosen = random.Random(0)
    file.write_text(" ".join(chosen.choice(WORDS) for _ in range(600)))
    return file


@pytest.fixture(scope="module")
def settings(model: Path) -> Settings:
    """Two contexts, in which timedecay has something to do."""
    return Settings(
        model, "tiny", context=CONTEXT, tokens=2 * CONTEXT, dtype="float32", recent_tokens=64, sink_tokens=16
    )


@pytest.fixture(scope="module")
def contexts(settings: Settings, prose: Path) -> quality.IntArray:
    """[2, CONTEXT]."""
    text = Text.load(settings.model)
    assert text is not None
    return read_contexts([("prose", prose.read_text())], text, settings)


@pytest.fixture(scope="module")
def report(settings: Settings, contexts: quality.IntArray) -> Report:
    """All formats, and the unquantized cache measured against itself."""
    return quality.run(settings, contexts, ("auto", *FORMATS), lambda *_: None)


@pytest.fixture
def runner(settings: Settings) -> Iterator[Callable[..., Runner]]:
    """Load runners of cache formats."""
    loaded: list[Runner] = []

    def load(cache_format: str, **changes: Any) -> Runner:
        loaded.append(quality._load(replace(settings, **changes), cache_format))
        return loaded[-1]

    yield load
    for one in loaded:
        one.close()


def test_the_unquantized_cache_diverges_nowhere_from_itself(report: Report) -> None:
    own = report.formats[0]

    assert (own.kl, own.kl_p99, own.same_top, own.ratio, own.perplexity_change) == (0, 0, 1, 1, 0)
    assert own.by_position == report.reference.by_position


def test_fewer_bits_cost_more_and_take_less(report: Report) -> None:
    by_name = {row.format: row for row in report.formats}
    kl = {name: row.kl for name, row in by_name.items()}
    ratio = {name: row.ratio for name, row in by_name.items()}

    assert 0 < kl["int8"] < kl["k8v4"] < kl["int4"]
    assert 0 < kl["int8"] < kl["fp8"] < min(kl["int4"], kl["int4c"])
    assert kl["fp8"] < kl["timedecay"]
    assert 1 < ratio["fp8"] == ratio["int8"] < ratio["k8v4"] < ratio["int4"]
    assert ratio["fp8"] < ratio["timedecay"] < ratio["int4c"]
    assert all(row.same_top > 0.5 and row.kl_p99 >= row.kl for row in report.formats)


def test_perplexity_is_that_of_the_models_own_forward(
    report: Report, settings: Settings, contexts: quality.IntArray
) -> None:
    theirs = LlamaForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    ids = torch.from_numpy(contexts.astype(np.int64))

    with torch.inference_mode():
        logits = theirs(ids).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    assert report.reference.perplexity == pytest.approx(float(loss.exp()), rel=1e-5)


def test_before_anything_decays_timedecay_is_its_eight_bit_form(report: Report) -> None:
    by_name = {row.format: row for row in report.formats}

    for name in ("timedecay", "int4c"):
        assert by_name[name].by_position[0] == by_name["fp8"].by_position[0]
        assert by_name[name].by_position[-1].kl > by_name["fp8"].by_position[-1].kl


@pytest.mark.parametrize("cache_format", ["int4c", "timedecay"])
def test_a_context_read_in_chunks_is_read_as_decode_would(
    runner: Callable[..., Runner], contexts: quality.IntArray, cache_format: str
) -> None:
    """Row by row every format is where it belongs at each position: chunks must not change what a row attends."""
    ids = contexts[0][:300]
    loaded = runner(cache_format)

    chunked = Reading(loaded, len(ids))
    whole = torch.cat([chunked.feed(ids[at : at + 128]).clone() for at in range(0, len(ids), 128)])
    single = Reading(loaded, len(ids))
    rows = torch.cat([single.feed(ids[at : at + 1]).clone() for at in range(len(ids))])

    assert torch.equal(whole, rows)


def test_pages_end_in_the_formats_of_the_recipe(
    runner: Callable[..., Runner], contexts: quality.IntArray
) -> None:
    loaded = runner("timedecay")
    reading = Reading(loaded, CONTEXT)

    for at in range(0, CONTEXT, 128):
        reading.feed(contexts[0][at : at + 128])

    codes = {loaded.recipe.format_at(page, 384, 16): code for page, code in enumerate(reading._formats)}
    assert codes.keys() == {loaded.recipe.write, PageFormat.INT4C}
    assert len(set(codes.values())) == 2


def test_two_measurements_agree_to_the_last_bit(
    runner: Callable[..., Runner], contexts: quality.IntArray
) -> None:
    plain, small = runner("auto"), runner("int4")

    first, second = (measure(plain, small, contexts[:1], lambda *_: None) for _ in range(2))

    assert np.array_equal(first.kl, second.kl)
    assert (first.kl > -1e-6).all()


def test_buckets_cover_every_prediction_once() -> None:
    for context in (32, 128, 129, 130, 400, 2048):
        spans = list(buckets(context))
        assert [at for span in spans for at in range(*span)] == list(range(context - 1))


def test_contexts_come_from_each_text_in_turn_and_never_span_two(settings: Settings) -> None:
    text = Text.load(settings.model)
    assert text is not None
    small = replace(settings, context=32, tokens=100)

    found = read_contexts([("a", "a" * 70), ("b", "b" * 40)], text, small)

    assert [set(bytes(row.astype(np.uint8)).decode()) for row in found] == [{"a"}, {"b"}, {"a"}]


def test_what_the_tokenizer_puts_first_stands_before_every_context(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Text.load(settings.model)
    assert text is not None
    monkeypatch.setattr(text, "encode", lambda content: [256, *content.encode()])

    found = read_contexts([("a", "a" * 64)], text, replace(settings, context=32, tokens=64))

    assert found.shape == (2, 32)
    assert found[:, 0].tolist() == [256, 256]
    assert (found[:, 1:] == ord("a")).all()


def test_a_measurement_that_decays_nothing_says_so(settings: Settings, contexts: quality.IntArray) -> None:
    short = replace(settings, context=128, recent_tokens=1024)

    report = quality.run(short, contexts[:1, :128], ("timedecay", "int4c"), lambda *_: None)

    assert [note.partition(":")[0] for note in report.notes] == ["timedecay", "int4c"]
    assert "recent_tokens (1024)" in report.notes[0] and "--context of 1154 or more" in report.notes[0]
    assert "recent_tokens" not in report.notes[1] and "--context of 130 or more" in report.notes[1]


@pytest.mark.parametrize(
    ("cache_format", "recent_tokens", "sink_tokens", "needed"),
    [
        ("int4c", 0, 0, 130),
        ("timedecay", 64, 16, 130),
        ("timedecay", 100, 0, 130),
        ("timedecay", 112, 1, 258),
    ],
)
def test_the_context_that_a_note_asks_for_is_the_shortest_that_decays(
    settings: Settings,
    contexts: quality.IntArray,
    cache_format: str,
    recent_tokens: int,
    sink_tokens: int,
    needed: int,
) -> None:
    """The cause may be the stride alone: a note that blames recent_tokens sends the user the wrong way."""

    def measured(length: int) -> Report:
        changed = replace(settings, context=length, recent_tokens=recent_tokens, sink_tokens=sink_tokens)
        return quality.run(changed, contexts[:1, :length], ("fp8", cache_format), lambda *_: None)

    short, enough = measured(needed - 1), measured(needed)

    assert len(short.notes) == 1 and f"--context of {needed} or more" in short.notes[0]
    assert short.formats[0].kl == short.formats[1].kl
    assert enough.notes == ()
    assert enough.formats[0].kl != enough.formats[1].kl


def test_the_unquantized_cache_is_not_measured_twice(settings: Settings) -> None:
    assert check_formats(["auto", "int8", "auto", "fp8", "int8"]) == ("int8", "fp8")
    assert check_formats([]) == ()
    assert formats_for(settings, ()) == FORMATS

    with pytest.raises(
        QualityError, match="--formats auto is what the others are compared with: name some of fp8"
    ):
        check_formats(["auto"])


@pytest.mark.parametrize("make", [make_tiny_gemma3, make_tiny_deepseek_v2])
def test_layer_groups_and_latents_are_measured_too(
    settings: Settings, tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    short = replace(settings, model=make(tmp_path), context=200, recent_tokens=32)
    ids = np.random.default_rng(0).integers(0, VOCAB, (1, 200)).astype(np.int32)
    formats = formats_for(short, ())

    report = quality.run(short, ids, ("auto", *formats), lambda *_: None)

    assert formats == (FORMATS if make is make_tiny_gemma3 else ("fp8",))
    assert report.formats[0].kl == 0
    assert all(0 < row.kl < 1 and row.ratio > 1.5 for row in report.formats[1:])


def test_logits_that_are_no_numbers_are_an_error(
    settings: Settings, contexts: quality.IntArray, tmp_path: Path
) -> None:
    """Of a token that the comparison at loading doesn't have."""
    broken = LlamaForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    probed = {7919 * i % VOCAB for i in range(22)}
    token = next(int(t) for t in contexts[0, :64] if int(t) not in probed)
    broken.get_parameter("model.embed_tokens.weight").data[token, 3] = float("nan")
    broken.save_pretrained(tmp_path)

    with pytest.raises(QualityError, match="with pages as fp32 .* no numbers"):
        quality.run(replace(settings, model=tmp_path), contexts[:1, :64], ("fp8",), lambda *_: None)


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """Run `kvtier quality` with these arguments: exit code, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvtier", "quality", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
        said = capsys.readouterr()
        assert isinstance(left.value.code, int)
        return left.value.code, said.out, said.err

    return call


def test_json_has_every_number_and_files_are_written(
    run: Any, model: Path, prose: Path, tmp_path: Path
) -> None:
    options = (
        "--model",
        model,
        "--context",
        256,
        "--tokens",
        256,
        "--dtype",
        "float32",
        "--formats",
        "fp8,int4c",
    )

    code, out, err = run(prose, *options, "--plot", "q.png", "--markdown", "q.md", "--json")

    told = json.loads(out)
    assert code == 0
    assert "measuring fp8" in err and "measuring int4c" in err
    assert (told["context"], told["contexts"], told["predictions"], told["page_tokens"]) == (256, 1, 255, 16)
    assert (told["dtype"], told["notes"]) == ("float32", [])
    assert [row["format"] for row in told["formats"]] == ["fp8", "int4c"]
    for row in (told["reference"], *told["formats"]):
        assert set(row) == {
            *("format", "recipe", "bytes_per_token", "ratio", "perplexity", "perplexity_change"),
            *("kl", "kl_p99", "same_top", "by_position"),
        }
        assert [(bucket["start"], bucket["end"]) for bucket in row["by_position"]] == [(0, 128), (128, 255)]
        assert all(set(bucket) == {"start", "end", "perplexity", "kl"} for bucket in row["by_position"])
    assert (tmp_path / "q.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "q.md").read_text()
    assert "| int4c | fp8_e4m3 to int4c" in page
    assert "](q.png)" in page and "kvtier quality" in page


def test_the_table_says_what_each_format_costs(run: Any, model: Path, prose: Path) -> None:
    code, out, _ = run(
        prose, "--model", model, "--context", 64, "--tokens", 64, "--formats", "int8", "--dtype", "float32"
    )

    assert code == 0
    for part in ("cache.format", "fp32", "int8", "1.00x", "+0.00 %", "same top", "0-63"):
        assert part in out


@pytest.mark.parametrize(
    ("options", "code", "named"),
    [
        (("nowhere.txt",), 1, "nowhere.txt: No such file"),
        (("short.txt", "--context", "2048"), 2, "short.txt has 100 tokens, fewer than a context of 2048"),
        (("short.txt", "--formats", "fp8,fp4"), 2, "--formats must be among auto, fp8, .*, got 'fp4'"),
        (("short.txt", "--formats", "auto"), 2, "--formats auto is what the others are compared with"),
        (("short.txt", "--context", "8"), 2, "--context must be at least 32, got 8"),
        (("short.txt", "--context", "0"), 2, "--context must be at least 32, got 0"),
        (
            ("short.txt", "--context", "8192", "--tokens", "8192"),
            2,
            "--context must be at most the model's 4096",
        ),
        (("short.txt", "--tokens", "-5"), 2, "--tokens must be at least one context .* got -5"),
        (
            ("short.txt", "--tokens", "200"),
            2,
            "--tokens must .* 2048 .*, got 200: raise it, or .* from 32 to 200",
        ),
        (("short.txt", "--tokens", "20"), 2, "--tokens must .* 2048 .*, got 20: raise it$"),
        (
            ("short.txt", "--page-tokens", "8"),
            2,
            "--page-tokens must be a power of two from 16 to 4096, got 8",
        ),
        (("short.txt", "--page-tokens", "24"), 2, "--page-tokens must be a power of two .* got 24"),
        (("short.txt", "--threads", "99999"), 2, "--threads must be at most .* got 99999"),
        (("short.txt", "--plot", "q.jpg"), 2, "--plot writes a .png file, got q.jpg"),
        (("short.txt", "--plot", "no/q.png"), 2, "--plot no/q.png: there is no folder no; make it"),
        (("short.txt", "--plot", "short.txt/q.png"), 2, "--plot .*: there is no folder short.txt"),
        (("short.txt", "--plot", "folder.png"), 2, "--plot folder.png: this is a folder"),
        (("short.txt", "--markdown", "q.txt"), 2, "--markdown writes a .md file, got q.txt"),
        (("short.txt", "--markdown", "no/q.md"), 2, "--markdown no/q.md: there is no folder no; make it"),
        (("bytes.txt",), 2, "bytes.txt is no UTF-8 text .byte 0.: save it as UTF-8"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_mistake_is_one_line_that_names_it(
    run: Any, model: Path, tmp_path: Path, options: tuple[str, ...], code: int, named: str
) -> None:
    (tmp_path / "short.txt").write_text("a" * 100)
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "folder.png").mkdir()

    got, out, err = run(*options, "--model", model)

    assert (got, out) == (code, "")
    assert "loading the model" not in err
    last = err.splitlines()[-1]
    assert last.startswith("kvtier: ")
    assert re.search(named, last), last


def test_formats_that_pages_of_latents_cannot_have_are_refused_before_the_model_loads(
    run: Any, prose: Path, tmp_path: Path
) -> None:
    code, out, err = run(prose, "--model", make_tiny_deepseek_v2(tmp_path / "v2"), "--formats", "fp8,int4")

    assert (code, out) == (2, "")
    assert "--formats int4 can't be for DeepseekV2ForCausalLM, which keeps latents: use fp8" in err
    assert "loading the model" not in err


def test_numbers_are_told_although_a_file_cannot_be_written(
    run: Any, model: Path, prose: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fills while the text is measured must not take the numbers along."""

    def full(report: Report, file: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(file))

    monkeypatch.setattr(quality, "draw", full)
    small = ("--context", 32, "--tokens", 32, "--formats", "int8", "--dtype", "float32", "--json")

    code, out, err = run(prose, "--model", model, *small, "--plot", "q.png")

    assert code == 1
    assert json.loads(out)["formats"][0]["format"] == "int8"
    assert "can't write q.png: No space left on device" in err.splitlines()[-1]


def test_a_model_without_tokenizer_is_named(run: Any, prose: Path, tmp_path: Path) -> None:
    bare = make_tiny_llama(tmp_path / "bare")

    code, _, err = run(prose, "--model", bare)

    assert code == 1
    assert "no tokenizer" in err.splitlines()[-1]
