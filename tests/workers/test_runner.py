"""Loading a runner: what its identity depends on, what it refuses, GGUF files, and the compiled kernels' cache."""

from __future__ import annotations

import itertools
import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_models
import torch
from runner_kit import Pool, Sequence, random_tokens
from runner_kit import step as run_step
from safetensors.torch import load_file

from kvtier.kernels import reference
from kvtier.kernels.cpu import build
from kvtier.kernels.ops import BuildError, Format, choose_kernels
from kvtier.tier.pages.identity import root_key
from kvtier.tier.pages.page import PageFormat
from kvtier.tier.pages.recipe import Recipe
from kvtier.workers.models.files import files as model_files
from kvtier.workers.models.files import gguf as model_gguf
from kvtier.workers.models.files.files import resolve_model, weights_fingerprint
from kvtier.workers.models.files.gguf import KNOWN_SPLITS, convert_gguf, pre_tokenizer
from kvtier.workers.models.formats import FORMAT_CODES, layout_of
from kvtier.workers.runner.runner import (
    GroupPages,
    Runner,
    SequenceRows,
    StepBatch,
    eight_bit_format,
    fixed_tiles,
    load_runner,
)

pytestmark = pytest.mark.slow


def load(folder: Path, cache_dir: Path, **changes: Any) -> Runner:
    options: dict[str, Any] = {
        "dtype": "float32",
        "page_tokens": 16,
        "l1_bytes": 1 << 20,
        "numerics": "auto",
        "forward": "auto",
        "threads": 1,
        "max_context": 0,
        "max_batch_tokens": 64,
        "epoch": 0,
        "native": "off",
    }
    return load_runner(str(folder), **{**options, **changes}, cache_dir=cache_dir)


def test_a_runner_says_what_it_serves(tiny_llama: Path, tmp_path: Path) -> None:
    runner = load(tiny_llama, tmp_path)

    assert runner.vocab_size == tiny_models.VOCAB and runner.max_context == 4096 and runner.eos_ids == ()
    assert runner.dtype == "float32" and runner.model_name == tiny_llama.name
    assert runner.arena.dtype == torch.uint8
    page = runner.groups[0].specs[PageFormat.FP32].nbytes
    assert runner.arena.shape == ((1 << 20) // page, page)
    assert runner.groups[0].layers == (0, 1) and runner.groups[0].window == 0
    assert runner.recipe == Recipe(PageFormat.FP32) and runner.raw_format is PageFormat.FP32
    assert (runner.window, runner.sinks, runner.window_refusal, runner.l4_format) == (0, 0, "", None)
    assert all(isinstance(v, str) and len(v) <= 200 for v in runner.root_fields().values())


@pytest.mark.parametrize(
    "name, recipe",
    [
        ("auto", Recipe(PageFormat.FP32)),
        ("fp8", Recipe(PageFormat.FP8)),
        ("int8", Recipe(PageFormat.INT8)),
        ("k8v4", Recipe(PageFormat.K8V4)),
        ("int4", Recipe(PageFormat.INT4)),
        ("int4c", Recipe(PageFormat.FP8, PageFormat.INT4C)),
        ("timedecay", Recipe(PageFormat.FP8, PageFormat.INT4C, recent_tokens=112, sink_tokens=20)),
    ],
)
def test_a_cache_formats_name_is_its_recipe_and_gives_pages_of_its_formats_alone(
    tiny_llama: Path, tmp_path: Path, name: str, recipe: Recipe
) -> None:
    """Recent tokens are rounded up to whole pages."""
    runner = load(tiny_llama, tmp_path, cache_format=name, recent_tokens=100, decay_sinks=20)

    assert runner.recipe == recipe
    specs = runner.groups[0].specs
    assert set(specs) == {recipe.write, recipe.decayed} - {None}
    uniform = len(specs) == 1
    assert runner.arena.shape[1] == (specs[recipe.write].nbytes if uniform else 1024)


def test_an_l4_format_has_pages_in_l1_too_where_they_are_made(tiny_llama: Path, tmp_path: Path) -> None:
    runner = load(tiny_llama, tmp_path, l4_format="int4c")

    assert runner.l4_format is PageFormat.INT4C and runner.recipe == Recipe(PageFormat.FP32)
    assert set(runner.groups[0].specs) == {PageFormat.FP32, PageFormat.INT4C}
    assert runner.arena.shape[1] == 1024


def test_a_device_withouteight_bit_format_floats_writes_int8(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert eight_bit_format(torch.device("cuda")) is PageFormat.INT8
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert eight_bit_format(torch.device("cuda")) is PageFormat.FP8


def test_converted_pages_hold_what_their_sources_held(tiny_llama: Path, tmp_path: Path) -> None:
    runner = load(tiny_llama, tmp_path, cache_format="int4c")
    tokens = random_tokens(0, 16, tiny_models.VOCAB)
    frames = np.array([40], np.int32)
    rows = [SequenceRows(0, 16, 16, (GroupPages(frames),))]
    runner.forward(StepBatch(tokens, np.arange(16, dtype=np.int32), rows, np.array([15], np.int32)))

    runner.convert(0, frames, PageFormat.FP8, np.array([3], np.int32), PageFormat.INT4C)

    group, arena = runner.groups[0], runner.arena
    layout = layout_of(group, torch.float32, 1024, PageFormat.FP8)
    for layer in range(2):
        before = reference.read_pages(arena, layout, Format.FP8, layer, torch.tensor([40]))
        after = reference.read_pages(arena, layout, Format.INT4C, layer, torch.tensor([3]))
        for old, new in zip(before, after, strict=True):
            assert 0 < (new - old).norm() < 0.15 * old.norm()


@pytest.mark.parametrize("cache_format", ["auto", "int4c"])
def test_a_step_marks_the_units_that_it_writes_and_those_that_it_reads(
    tiny_llama: Path, tmp_path: Path, cache_format: str
) -> None:
    """Copies wait for what is marked: a write that isn't would be copied half done."""
    runner = load(tiny_llama, tmp_path, cache_format=cache_format)
    unit_bytes = runner.arena.shape[1]
    marks: list[tuple[set[int], set[int]]] = []

    class Marks:
        def mark(self, used: Any, written: Any) -> None:
            marks.append((set(used.tolist()), set(written.tolist())))

    runner.fences = Marks()  # type: ignore[assignment]
    pool = Pool(runner)
    tokens = random_tokens(3, 90, tiny_models.VOCAB).tolist()
    sequences = [Sequence(pool, tokens), Sequence(pool, tokens[5:])]
    for lengths in ((7, 20), (9, 1), (1, 1), (33, 1)):
        pages = [s.rows(0, n).pages[0] for s, n in zip(sequences, lengths, strict=True)]
        marks.clear()
        before = runner.arena.clone()
        run_step(runner, list(zip(sequences, lengths, strict=True)))
        [(used, written)] = marks
        changed = set(torch.nonzero((runner.arena != before).any(1))[:, 0].tolist())
        assert changed and changed <= written
        expected = set()
        for page in pages:
            assert page.formats is not None
            for frame, code in zip(page.frames.tolist(), page.formats.tolist(), strict=True):
                (format,) = [f for f in runner.groups[0].specs if FORMAT_CODES[f] == code]
                size = -(-runner.groups[0].specs[format].nbytes // unit_bytes)
                expected |= set(range(frame, frame + size))
        assert written <= expected and used == expected


def test_the_root_names_the_window_the_recipe_and_what_is_lossy(tiny_llama: Path, tmp_path: Path) -> None:
    runner = load(tiny_llama, tmp_path, cache_format="timedecay")
    kinds = {
        "plain": runner.root_fields(),
        "window": runner.root_fields(window=64),
        "other window": runner.root_fields(window=128),
        "sinks": runner.root_fields(window=64, sinks=4),
        "lossy": runner.root_fields(lossy=True),
        "uniform": load(tiny_llama, tmp_path, cache_format="fp8").root_fields(),
        "recent": load(tiny_llama, tmp_path, cache_format="timedecay", recent_tokens=64).root_fields(),
    }

    assert len({root_key(fields) for fields in kinds.values()}) == len(kinds)
    assert kinds["sinks"]["attention"].startswith("window 64, sinks 4")
    assert {n for n in kinds["plain"] if kinds["plain"][n] != kinds["lossy"][n]} == {"recipe"}


def test_a_models_own_window_is_the_root_of_requests_that_set_none(tmp_path: Path) -> None:
    folder = tiny_models.make_tiny_mistral(tmp_path / "model", sliding_window=32)

    runner = load(folder, tmp_path)

    assert runner.groups[0].window == 32
    assert runner.root_fields() == runner.root_fields(window=32) != runner.root_fields(window=16)
    with pytest.raises(ValueError, match="model.window must be at most the model's own 32, got 48"):
        load(folder, tmp_path, window=48)


def test_a_default_window_is_kept_for_requests_that_set_none(tiny_llama: Path, tmp_path: Path) -> None:
    runner = load(tiny_llama, tmp_path, window=64, sinks=4)

    assert (runner.window, runner.sinks) == (64, 4)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16"},
        {"page_tokens": 32},
        {"numerics": "fast"},
        {"forward": "transformers"},
        {"epoch": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_root_differs_when_a_pages_bytes_could(
    tiny_llama: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    before = load(tiny_llama, tmp_path).root_fields()
    again = load(tiny_llama, tmp_path).root_fields()
    after = load(tiny_llama, tmp_path, **change).root_fields()

    assert root_key(before) == root_key(again)
    assert root_key(before) != root_key(after)
    assert before.keys() == after.keys()


def test_sizes_of_this_worker_are_no_part_of_the_root(tiny_llama: Path, tmp_path: Path) -> None:
    one = load(tiny_llama, tmp_path)
    other = load(tiny_llama, tmp_path, l1_bytes=2 << 20, threads=2, max_batch_tokens=32, max_context=512)

    assert one.root_fields() == other.root_fields()


def test_other_weights_behind_the_same_name_are_another_root(tmp_path: Path) -> None:
    """The file keeps its size: only content and times tell."""
    folder = tiny_models.make_tiny_llama(tmp_path / "model")
    before = load(folder, tmp_path).root_fields()
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)

    after = load(folder, tmp_path).root_fields()

    assert {name for name in before if before[name] != after[name]} == {"weights"}


def test_weights_are_read_once_and_their_digest_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_models.make_tiny_llama(tmp_path / "model")
    first = weights_fingerprint(folder, tmp_path)
    copied = shutil.copytree(folder, tmp_path / "copy")
    reads: list[Path] = []
    digest = model_files.file_digest
    monkeypatch.setattr(model_files, "file_digest", lambda file: reads.append(file) or digest(file))

    assert weights_fingerprint(folder, tmp_path) == first and reads == []
    assert weights_fingerprint(copied, tmp_path) == first and len(reads) == 1
    (tmp_path / "fingerprints.json").write_text("no JSON")
    assert weights_fingerprint(folder, tmp_path) == first and len(reads) == 2


@pytest.mark.parametrize(
    "change, message",
    [
        ({"numerics": "exact"}, "numerics must be auto, fast or invariant, got 'exact'"),
        ({"forward": "eager"}, "forward must be auto, lean or transformers, got 'eager'"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"max_context": 5000}, "max_context 5000 is more than the model's 4096"),
        ({"l1_bytes": 1000}, "L1 of 1000 bytes holds 0 pages"),
        ({"native": "maybe"}, "native kernels must be auto, off or require"),
        ({"cache_format": "fp4"}, "cache.format must be one of auto, fp8, .*, got 'fp4'"),
        (
            {"cache_format": "fp8", "page_tokens": 8},
            "fp8 needs pages of at least 16 tokens, page_tokens is 8",
        ),
        ({"cache_format": "timedecay", "page_tokens": 4}, "timedecay needs pages of at least 16 tokens"),
        ({"l4_format": "auto"}, "tiers.l4.format must be empty or one of fp8, .*, got 'auto'"),
        ({"l4_format": "int4c", "page_tokens": 8}, "tiers.l4.format int4c needs pages of at least 16 tokens"),
        ({"window": 8}, "model.window must be 0 or at least a page of 16 tokens, got 8"),
        ({"sinks": 4}, "model.window must be 0 or at least a page of 16 tokens, got 0"),
        ({"window": 32, "sinks": 33}, "model.sinks must be from 0 to the window of 32, got 33"),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_its_value(
    tiny_llama: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load(tiny_llama, tmp_path, **change)


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()

    with pytest.raises(FileNotFoundError, match="no such model folder: './nowhere'"):
        resolve_model("./nowhere", tmp_path)
    with pytest.raises(FileNotFoundError, match="no such GGUF file"):
        resolve_model(str(tmp_path / "none.gguf"), tmp_path)
    with pytest.raises(FileNotFoundError, match="has no config.json"):
        load(tmp_path / "empty", tmp_path)


def test_a_hub_id_without_a_network_says_the_way_out(tmp_path: Path) -> None:
    """The tests run with the hub offline."""
    with pytest.raises(FileNotFoundError, match="give a folder or a .gguf file as model.path"):
        resolve_model("nothing/no-such-model", tmp_path)


def test_a_step_of_more_rows_than_promised_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    runner = load(tiny_llama, tmp_path)
    rows = np.zeros(65, np.int32)
    pages = (GroupPages(np.arange(5, dtype=np.int32)),)

    with pytest.raises(ValueError, match="65 rows, at most 64 fit in a step"):
        runner.forward(StepBatch(rows, rows, [SequenceRows(0, 65, 65, pages)], np.array([0], np.int32)))


def test_fixed_tiles_keep_each_row_its_context_and_its_pages_of_all_groups() -> None:
    ids = np.arange(20, dtype=np.int32)
    pages = tuple(GroupPages(np.arange(4, dtype=np.int32), window=w) for w in (0, 32))
    sequences = [SequenceRows(0, 1, 9, pages), SequenceRows(1, 19, 50, pages)]

    tiles = list(fixed_tiles(StepBatch(ids, ids + 100, sequences, np.array([19], np.int32)), 16))

    assert [len(t.token_ids) for t in tiles] == [16, 16]
    assert [[(s.start, s.length, s.context) for s in t.sequences] for t in tiles] == [
        [(0, 1, 9), (1, 15, 46)],
        [(0, 4, 50)],
    ]
    assert all(s.pages is pages for t in tiles for s in t.sequences)
    assert [len(t.logit_rows) for t in tiles] == [0, 16]
    assert tiles[1].token_ids[:4].tolist() == [16, 17, 18, 19] and not tiles[1].token_ids[4:].any()


def write_gguf(
    path: Path,
    folder: Path,
    pre: str = "smollm",
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    leave_out: tuple[str, ...] = (),
) -> None:
    """A tiny Llama as a GGUF file, as its converters write it: q and k with the halves of each head interleaved.

    Its matrices are of this kind; the tensors `leave_out` are not written.
    """
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    if pre:
        writer.add_tokenizer_pre(pre)
    words = ["<|endoftext|>"] + [chr(33 + i) for i in range(94)] + ["Ġ", "Ċ", "ab", "12"]
    words += [f"<extra{i}>" for i in range(config["vocab_size"] - len(words))]
    writer.add_token_list(words)
    writer.add_token_types([3] + [1] * (len(words) - 1))
    writer.add_token_merges(["a b", "1 2"])
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    parts = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for i in range(config["num_hidden_layers"]):
        names |= {f"model.layers.{i}.{hf}.weight": f"blk.{i}.{name}.weight" for hf, name in parts.items()}
    for hf, name in names.items():
        weight = tensors[hf].float()
        for part, count in (("attn_q", heads), ("attn_k", kv_heads)):
            if part in name:
                weight = weight.view(count, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        if name in leave_out:
            continue
        if weight.dim() == 1 or kind is gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, weight.numpy().copy())
        else:
            writer.add_tensor(name, gguf.quants.quantize(weight.numpy().copy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_converted_once_to_the_same_weights(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama)

    folder = resolve_model(str(tmp_path / "tiny.gguf"), tmp_path / "cache")
    monkeypatch.setattr(model_gguf, "convert_gguf", lambda gguf, folder: pytest.fail("converted twice"))
    again = resolve_model(str(tmp_path / "tiny.gguf"), tmp_path / "cache")

    assert again == folder and folder.parent == tmp_path / "cache" / "models"
    expected, converted = load_file(tiny_llama / "model.safetensors"), load_file(folder / "model.safetensors")
    assert expected.keys() == converted.keys()
    assert all(torch.equal(expected[name], converted[name]) for name in expected)
    assert (folder / "tokenizer.json").is_file() and (folder / "chat_template.jinja").is_file()
    assert not list((tmp_path / "cache" / "models").glob(".*")), "no half-made folder stays"


KINDS = gguf.GGMLQuantizationType


@pytest.mark.parametrize("kind", [KINDS.F32, KINDS.F16, KINDS.BF16, KINDS.Q8_0, KINDS.Q4_0, KINDS.Q5_1])
@pytest.mark.parametrize("tied", [False, True])
def test_tensors_that_are_converted_one_by_one_are_those_of_the_whole_model(
    tiny_llama: Path, tmp_path: Path, kind: gguf.GGMLQuantizationType, tied: bool
) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama, kind=kind, leave_out=("output.weight",) if tied else ())

    model_gguf._write_weights(tmp_path / "tiny.gguf", tmp_path / "each")
    model_gguf._write_whole(tmp_path / "tiny.gguf", tmp_path / "whole")

    expected, found = (load_file(tmp_path / way / "model.safetensors") for way in ("whole", "each"))
    assert expected.keys() == found.keys()
    assert ("lm_head.weight" in found) is not tied
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "each" / name).read_text() == (tmp_path / "whole" / name).read_text()


def test_converting_a_gguf_file_holds_few_tensors_at_a_time(tmp_path: Path) -> None:
    folder = tiny_models.make_tiny_llama(
        tmp_path / "model", num_hidden_layers=12, hidden_size=256, intermediate_size=512
    )
    write_gguf(tmp_path / "tiny.gguf", folder, kind=KINDS.Q8_0)
    model_gguf._write_weights(tmp_path / "tiny.gguf", tmp_path / "first")  # imports what it needs
    tracemalloc.start()
    try:
        model_gguf._write_weights(tmp_path / "tiny.gguf", tmp_path / "second")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < (tmp_path / "second" / "model.safetensors").stat().st_size / 3


@pytest.mark.parametrize("left_out", ["blk.1.ffn_up.weight", "output_norm.weight"])
def test_a_gguf_file_that_lacks_a_tensor_is_refused_by_its_name(
    tiny_llama: Path, tmp_path: Path, left_out: str
) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama, leave_out=(left_out,))

    with pytest.raises(
        ValueError, match=r"lacks 1 of the model's tensors: model\.(layers\.1\.mlp\.up_proj|norm)\."
    ):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_converted_smollm_tokenizer_splits_digits(tiny_llama: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_gguf(tmp_path / "tiny.gguf", tiny_llama)
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "model")

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")

    assert tokenizer.tokenize("ab12") == ["ab", "1", "2"]


@pytest.mark.parametrize("pre", ["deepseek-llm", "default", ""])
def test_a_gguf_file_whose_tokenizer_splits_text_in_an_unknown_way_is_refused_by_name(
    tiny_llama: Path, tmp_path: Path, pre: str
) -> None:
    """It would else be split as GPT-2's text is, and every prompt be read in other tokens than the model knows."""
    write_gguf(tmp_path / "tiny.gguf", tiny_llama, pre)

    said = f"its tokenizer splits text by '{pre}'" if pre else "doesn't say how it splits text"
    with pytest.raises(ValueError, match=rf"can't convert .*tiny.gguf: .*{said} .*known: .*qwen2"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "models" / "tiny")

    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("llama-bpe", ["It", "'S", " ", " 1234"[:1], "123", "4", "\n\n", "x"]),
        ("qwen2", ["It", "'S", " ", " ", "1", "2", "3", "4", "\n\n", "x"]),
        ("gpt-4o", ["It'S", " ", " ", "123", "4", "\n\n", "x"]),
        ("tekken", ["It", "'S", " ", " ", "1", "2", "3", "4", "\n\n", "x"]),
        ("gpt-2", ["It", "'", "S", " ", " 1234", "\n", "\n", "x"]),
        ("smollm", ["It", "'", "S", "  ", "1", "2", "3", "4", "\n", "\n", "x"]),
        ("falcon", ["It", "'", "S", " ", " ", "123", "4", "\n", "\n", "x"]),
    ],
)
def test_text_is_split_as_the_name_of_a_gguf_tokenizer_says(pre: str, pieces: list[str]) -> None:
    split = pre_tokenizer(pre).pre_tokenize_str("It'S  1234\n\nx")

    assert ["".join(part).replace("\u0120", " ").replace("\u010a", "\n") for part, _ in split] == pieces


@pytest.mark.parametrize("pre", KNOWN_SPLITS)
def test_a_split_loses_no_character(pre: str) -> None:
    text = "Hello, W\u00f6rld! it's 12,345.678 \u4f60\u597d\r\n\t \N{GRINNING FACE}a_b <tag/> \u0e01\u0e33  "

    split = pre_tokenizer(pre).pre_tokenize_str(text)

    spans = [span for _, span in split]
    assert spans[0][0] == 0 and spans[-1][1] == len(text)
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(spans))


def test_a_file_that_is_no_gguf_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "no.gguf").write_bytes(b"something else")

    with pytest.raises(ValueError, match="no.gguf is no GGUF file"):
        convert_gguf(tmp_path / "no.gguf", tmp_path / "models" / "no")

    assert list((tmp_path / "models").iterdir()) == []


def test_without_a_compiler_torch_serves_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    cpu = torch.device("cpu")

    assert choose_kernels(cpu, tmp_path, 1, "auto").name == "torch"
    assert "no compiled CPU kernels, plain torch serves: no C++ compiler on the path" in caplog.text
    with pytest.raises(BuildError, match="no C\\+\\+ compiler on the path"):
        choose_kernels(cpu, tmp_path, 1, "require")


def test_kernels_that_do_not_compile_are_a_build_error_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exec echo "g++ 1"\necho "error: no such thing" >&2; exit 1\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{compiler.parent}:/bin:/usr/bin")

    with pytest.raises(BuildError, match="g\\+\\+ failed: error: no such thing"):
        build.load_library(tmp_path)

    assert list((tmp_path / "kernels").iterdir()) == []


def test_a_build_is_found_again_by_the_digest_of_what_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build of other sources, by another compiler or for another CPU is never loaded."""
    digest = build.build_digest("g++ 12", "native")
    assert digest == build.build_digest("g++ 12", "native")
    assert digest != build.build_digest("g++ 13", "native")
    assert digest != build.build_digest("g++ 12", "x86-64-v3")

    (tmp_path / "engine.cpp").write_text("int other;")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert digest != build.build_digest("g++ 12", "native")
