"""Compares a forward over pages with transformers' own of the same weights, on a short text, when a model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kvtier.kernels.ops import IntArray, KVLayout, PlanSequence, make_plan
from kvtier.tier.pages.page import PageFormat
from kvtier.workers.models.base import ModelStep, on_device
from kvtier.workers.models.formats import LayerGroup, layout_of, unit_bytes_of

PROBE_PAGE_TOKENS = 16  # the least that every device's kernels take
PROBE_TOKENS = 22  # two pages, the second of which isn't full
_ENDS = (10, 19, 20, 21, 22)  # of the text's chunks, of which the last are single rows
_SPANS = (
    (0, 10),
    (10, 19),
    (19, 22),
)  # rows that go the same way: of the first chunk, of a further one over both pages, alone
_WINDOW = 5  # less than the text has tokens; models' own windows are too long to try at each load
# Of a row's logits' norm. In half precision rounding makes about 0.01, in float32 about 1e-6; a wrong mask, position or
# weight makes 0.5 and more.
_ERRORS = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}

ProbeForward = Callable[[ModelStep, torch.Tensor, tuple[KVLayout, ...]], torch.Tensor]


def own_logits(model: Any, device: torch.device, ours: str) -> torch.Tensor:
    """Logits of the probe's text by the model's own attention, float32 [tokens, vocab], its windows tried in small.

    `ours` names the attention that is set again behind it.
    """
    config = model.config
    (ids,) = on_device(device, _ids(int(config.vocab_size)))
    window = getattr(config, "sliding_window", None)
    if window:
        config.sliding_window = _WINDOW
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=ids[None], use_cache=False).logits[0].float()
    model.set_attn_implementation(ours)
    if window:
        config.sliding_window = window
    return logits


def run_probe(
    vocab: int,
    groups: tuple[LayerGroup, ...],
    dtype: torch.dtype,
    device: torch.device,
    forward: ProbeForward,
) -> torch.Tensor:
    """Logits of the probe's text by `forward` over unquantized pages of its own. Groups with a window have the probe's."""
    raw = {torch.float32: PageFormat.FP32, torch.bfloat16: PageFormat.BF16, torch.float16: PageFormat.FP16}[
        dtype
    ]
    probed = tuple(_probe_group(group, raw) for group in groups)
    unit = unit_bytes_of(probed)
    layouts = tuple(layout_of(group, dtype, unit, raw) for group in probed)
    pages = -(-PROBE_TOKENS // PROBE_PAGE_TOKENS)
    units = [-(-group.specs[raw].nbytes // unit) for group in probed]
    arena = torch.zeros(pages * sum(units), unit, dtype=torch.uint8, device=device)
    firsts = np.cumsum([0] + [pages * n for n in units])
    frames = [
        (first + n * np.arange(pages)).astype(np.int32) for first, n in zip(firsts, units, strict=False)
    ]
    ids, at = _ids(vocab), np.arange(PROBE_TOKENS, dtype=np.int32)
    parts, start = [], 0
    for end in _ENDS:
        plans = tuple(
            make_plan(
                [PlanSequence(0, end - start, end, f, window=_WINDOW if group.window else 0)],
                PROBE_PAGE_TOKENS,
            )
            for f, group in zip(frames, groups, strict=True)
        )
        step = ModelStep(ids[start:end], at[start:end], plans, at[: end - start])
        with torch.inference_mode():
            parts.append(forward(step, arena, layouts))
        start = end
    return torch.cat(parts)


def check_probe(
    name: str, own: torch.Tensor, ours: torch.Tensor, dtype: torch.dtype, *, routed: bool
) -> None:
    """Raise ValueError unless `ours` are the logits `own`, up to what rounding in this dtype makes.

    `routed`: rows choose experts. Then, and in half precision, it goes by the median of rows that go the same way: a
    few rows may choose others and be far off without being wrong.
    """
    if own.isnan().any():
        raise ValueError(f"{name} can't be served: by transformers too, its logits in {dtype} are no numbers")
    errors = (ours - own.to(ours.device)).norm(dim=1) / own.to(ours.device).norm(dim=1)
    by_row = dtype == torch.float32 and not routed
    error = max(float(part.max() if by_row else part.median()) for part in (errors[a:b] for a, b in _SPANS))
    if not error < _ERRORS[dtype]:
        raise ValueError(
            f"{name} isn't supported: over pages its logits differ by {error:.2%} from its own attention's"
        )


def _ids(vocab: int) -> IntArray:
    return (np.arange(PROBE_TOKENS, dtype=np.int64) * 7919 % vocab).astype(np.int32)


def _probe_group(group: LayerGroup, raw: PageFormat) -> LayerGroup:
    any_spec = next(iter(group.specs.values()))
    return replace(
        group, specs={raw: replace(any_spec, format=raw, page_tokens=PROBE_PAGE_TOKENS, rope_format=raw)}
    )
