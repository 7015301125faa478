"""Loading a runner: what its identity depends on, what it refuses, GGUF files, and the compiled kernels' cache."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_models
import torch

from kvtier.kernels.cpu import build
from kvtier.kernels.ops import BuildError, choose_kernels
from kvtier.tier.identity import root_key
from kvtier.workers import model_files
from kvtier.workers.model_files import convert_gguf, load_tensors, resolve_model, weights_fingerprint
from kvtier.workers.runner import Runner, SequenceRows, StepBatch, fixed_tiles, load_runner


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
    assert runner.arena.shape == ((1 << 20) // runner.spec.nbytes, runner.spec.nbytes)
    assert all(isinstance(v, str) and len(v) <= 200 for v in runner.root_fields.values())


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
    before = load(tiny_llama, tmp_path).root_fields
    again = load(tiny_llama, tmp_path).root_fields
    after = load(tiny_llama, tmp_path, **change).root_fields

    assert root_key(before) == root_key(again)
    assert root_key(before) != root_key(after)
    assert before.keys() == after.keys()


def test_sizes_of_this_worker_are_no_part_of_the_root(tiny_llama: Path, tmp_path: Path) -> None:
    one = load(tiny_llama, tmp_path)
    other = load(tiny_llama, tmp_path, l1_bytes=2 << 20, threads=2, max_batch_tokens=32, max_context=512)

    assert one.root_fields == other.root_fields


def test_other_weights_behind_the_same_name_are_another_root(tmp_path: Path) -> None:
    """The file keeps its size: only content and times tell."""
    folder = tiny_models.make_tiny_llama(tmp_path / "model")
    before = load(folder, tmp_path).root_fields
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)

    after = load(folder, tmp_path).root_fields

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
        resolve_model("nobody/no-such-model", tmp_path)


def test_a_step_of_more_rows_than_promised_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    runner = load(tiny_llama, tmp_path)
    rows = np.zeros(65, np.int32)
    frames = np.arange(5, dtype=np.int32)

    with pytest.raises(ValueError, match="65 rows, at most 64 fit in a step"):
        runner.forward(StepBatch(rows, rows, [SequenceRows(0, 65, 65, frames)], np.array([0], np.int32)))


def test_fixed_tiles_keep_each_row_and_its_context() -> None:
    ids = np.arange(20, dtype=np.int32)
    frames = np.arange(4, dtype=np.int32)
    sequences = [SequenceRows(0, 1, 9, frames), SequenceRows(1, 19, 50, frames)]

    tiles = list(fixed_tiles(StepBatch(ids, ids + 100, sequences, np.array([19], np.int32)), 16))

    assert [len(t.token_ids) for t in tiles] == [16, 16]
    assert [[(s.start, s.length, s.context) for s in t.sequences] for t in tiles] == [
        [(0, 1, 9), (1, 15, 46)],
        [(0, 4, 50)],
    ]
    assert [len(t.logit_rows) for t in tiles] == [0, 16]
    assert tiles[1].token_ids[:4].tolist() == [16, 17, 18, 19] and not tiles[1].token_ids[4:].any()


def write_gguf(path: Path, folder: Path) -> None:
    """A tiny Llama as a GGUF file, as its converters write it: q and k with the halves of each head interleaved."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_tensors(folder)
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
    writer.add_tokenizer_pre("smollm")
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
        writer.add_tensor(name, weight.numpy().copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_converted_once_to_the_same_weights(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama)

    folder = resolve_model(str(tmp_path / "tiny.gguf"), tmp_path / "cache")
    monkeypatch.setattr(model_files, "convert_gguf", lambda gguf, folder: pytest.fail("converted twice"))
    again = resolve_model(str(tmp_path / "tiny.gguf"), tmp_path / "cache")

    assert again == folder and folder.parent == tmp_path / "cache" / "models"
    expected, converted = load_tensors(tiny_llama), load_tensors(folder)
    assert expected.keys() == converted.keys()
    assert all(torch.equal(expected[name], converted[name]) for name in expected)
    assert (folder / "tokenizer.json").is_file() and (folder / "chat_template.jinja").is_file()
    assert not list((tmp_path / "cache" / "models").glob(".*")), "no half-made folder stays"


def test_a_converted_smollm_tokenizer_splits_digits(tiny_llama: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_gguf(tmp_path / "tiny.gguf", tiny_llama)
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "model")

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")

    assert tokenizer.tokenize("ab12") == ["ab", "1", "2"]


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
