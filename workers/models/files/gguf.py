"""Turns a GGUF file into a Hugging Face folder: float32 weights, config, tokenizer, chat template."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Container, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

log = logging.getLogger(__name__)

_SHARD = (
    "512MB"  # of weights that are written at once; more is fewer files, and so much more memory meanwhile
)

# general.architecture of files of which several tensors become one of transformers' (its TENSOR_PROCESSORS).
_FUSED = ("gpt2", "qwen2moe", "qwen3moe", "gpt_oss", "gpt-oss", "minimax-m2")

_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_WORDS = (f"{_BEFORE}{_UPPER}*{_LOWER}+", f"{_BEFORE}{_UPPER}+{_LOWER}*")
_SLASHED = _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = f"{_WORDS[0]}{_SHORT}|{_WORDS[1]}{_SHORT}" + r"|\p{N}{1,3}" + _SLASHED
_TEKKEN = f"{_WORDS[0]}|{_WORDS[1]}" + r"|\p{N}" + _SLASHED

# tokenizer.ggml.pre, which names how text is split before byte-level merges, by the ways that llama.cpp splits it.
_BY_EXPRESSION = {
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _GPT4O),
    "tekken": _TEKKEN,
}
_AS_GPT2 = ("gpt-2", "mpt", "olmo", "jais", "phi-2", "roberta-bpe", "gigachat", "trillion")
_DIGITS_FIRST = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_PUNCTUATION_FIRST = ("falcon",)
KNOWN_SPLITS = tuple(sorted([*_BY_EXPRESSION, *_AS_GPT2, *_DIGITS_FIRST, *_PUNCTUATION_FIRST]))


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write a GGUF file's model as a Hugging Face folder: float32 safetensors, config, tokenizer, chat template.

    The weights are exactly what the quantized values stand for. `folder` appears whole or not at all.
    Raises ValueError when the file is no GGUF file, or its architecture or its tokenizer is unknown.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        staged = Path(scratch) / "model"
        _write_converted(gguf, staged)
        try:
            staged.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
            log.info("%s was converted by another process at the same time", gguf)


def _write_converted(gguf: Path, folder: Path) -> None:
    with gguf.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{gguf} is no GGUF file")
    splits = _split_name(gguf)  # first: it is soon known, and the weights take long
    _write_weights(gguf, folder)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    if splits is not None:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizer(splits)
    tokenizer.save_pretrained(folder)


def _write_weights(gguf: Path, folder: Path) -> None:
    """Weights, config and generation settings. Raises ValueError for an architecture that isn't known.

    One tensor after the other is dequantized and written, so memory holds one of them. Of architectures whose tensors
    are made of several of the file's, transformers makes the whole model first.
    """
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    architecture = reader.fields.get("general.architecture")
    try:
        if architecture is None or str(architecture.contents()) in _FUSED:
            _write_whole(gguf, folder)
        else:
            _write_each(gguf, reader, str(architecture.contents()), folder)
    except (KeyError, NotImplementedError) as error:
        raise ValueError(f"can't convert {gguf}: {error}") from error


def _write_each(gguf: Path, reader: Any, architecture: str, folder: Path) -> None:
    from gguf import dequantize
    from transformers import AutoConfig, AutoModelForCausalLM, modeling_gguf_pytorch_utils

    make: Any = AutoModelForCausalLM
    known: Any = modeling_gguf_pytorch_utils
    try:
        settings = known.load_gguf_checkpoint(str(gguf))["config"]
        config = AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        with torch.device("meta"):
            model = make.from_config(config, dtype=torch.float32)
    except (ValueError, RuntimeError, TypeError) as error:
        raise ValueError(f"can't convert {gguf}: {error}") from error
    processor = known.TENSOR_PROCESSORS.get(architecture, known.TensorProcessor)(config=settings)
    names: dict[str, str] = known.get_gguf_hf_weights_map(model, processor)
    stored = {names[tensor.name]: tensor for tensor in reader.tensors if tensor.name in names}
    _refuse_lacking(gguf, model, stored)
    state = model.state_dict()
    shapes = {name: tuple(state[name].shape) for name in stored}

    def values(name: str) -> Any:
        tensor = stored[name]
        weights = dequantize(tensor.data, tensor.tensor_type)
        made = processor.process(
            weights=weights, name=tensor.name, tensor_key_mapping=names, parsed_parameters={"tensors": {}}
        ).weights
        if made.shape != shapes[name]:
            raise ValueError(
                f"can't convert {gguf}: {tensor.name} is {list(made.shape)}, and {list(shapes[name])} by its settings"
            )
        return np.ascontiguousarray(made, np.float32)

    folder.mkdir(parents=True)
    write_safetensors(folder / "model.safetensors", shapes, values)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


def _refuse_lacking(gguf: Path, model: Any, stored: Container[str]) -> None:
    """Raise ValueError for tensors that the model has and the file hasn't; a tied output is the embedding."""
    head = model.get_output_embeddings()
    tied = {id(head.weight)} if head is not None and model.config.tie_word_embeddings else set()
    lacking = sorted(
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name not in stored and id(parameter) not in tied
    )
    if lacking:
        more = f" and {len(lacking) - 4} more" if len(lacking) > 4 else ""
        raise ValueError(
            f"can't convert {gguf}: it lacks {len(lacking)} of the model's tensors:"
            f" {', '.join(lacking[:4])}{more}"
        )


def write_safetensors(
    file: Path, shapes: Mapping[str, tuple[int, ...]], values: Callable[[str], Any]
) -> None:
    """Write float32 tensors of known shapes, asking for one after the other (a contiguous array), in the order of `shapes`.

    The form is that of safetensors: the header's length (u64, little-endian), the header as JSON, padded to 8 bytes,
    and the tensors' bytes one behind the other (https://github.com/huggingface/safetensors, README, "Format").
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in shapes:
            stream.write(values(name).data)


def _write_whole(gguf: Path, folder: Path) -> None:
    """The model is in memory once, in float32, and one shard of it as bytes."""
    from transformers import AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM
    try:
        model, found = loader.from_pretrained(
            str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32, output_loading_info=True
        )
    except ValueError as error:
        raise ValueError(f"can't convert {gguf}: {error}") from error
    _refuse_lacking(gguf, model, model.state_dict().keys() - found["missing_keys"])
    # It is a plain model from here on, and is written as one.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    for name in ("hf_quantizer", "_weight_conversions"):
        model.__dict__.pop(name, None)
    model.is_quantized = False
    model.save_pretrained(folder, max_shard_size=_SHARD)


def _split_name(gguf: Path) -> str | None:
    """How a byte-level tokenizer splits text; None for tokenizers that aren't. Raises ValueError for one not known."""
    from gguf import GGUFReader

    fields = GGUFReader(gguf).fields
    kind, name = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind is None or kind.contents() != "gpt2":
        return None
    found = "" if name is None else str(name.contents())
    if found not in KNOWN_SPLITS:
        said = f"splits text by {found!r}" if found else "doesn't say how it splits text"
        raise ValueError(
            f"can't convert {gguf}: its tokenizer {said} (tokenizer.ggml.pre); known: {', '.join(KNOWN_SPLITS)};"
            " give the model's Hugging Face folder instead"
        )
    return found


def pre_tokenizer(name: str) -> Any:
    """What splits text as a known tokenizer.ggml.pre says."""
    from tokenizers import Regex, pre_tokenizers

    words = pre_tokenizers.ByteLevel(add_prefix_space=False)  # with GPT-2's own expression
    if name in _BY_EXPRESSION:
        split = pre_tokenizers.Split(Regex(_BY_EXPRESSION[name]), behavior="isolated")
        parts = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    elif name in _DIGITS_FIRST:
        parts = [pre_tokenizers.Digits(individual_digits=True), words]
    elif name in _PUNCTUATION_FIRST:
        marks = pre_tokenizers.Split(Regex(r"[\p{P}\$\+<=>\^~\|`]+"), behavior="isolated")
        parts = [marks, words, pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), behavior="isolated")]
    else:
        parts = [words]
    return pre_tokenizers.Sequence(parts)
