"""transformers' own modules for any causal LM, with attention over pages in place of theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from kvtier.kernels.ops import (
    IntArray,
    Kernels,
    KVLayout,
    NativeKernels,
    NativeLinear,
    PlanSequence,
    StepPlan,
    make_plan,
)
from kvtier.tier.page import PageFormat
from kvtier.workers.formats import LayerGroup, layout_of, unit_bytes_of
from kvtier.workers.group_collective import Reduce, alone
from kvtier.workers.group_kernels import SharedKernels
from kvtier.workers.group_modules import split_feed_forward
from kvtier.workers.group_share import WHOLE, Share
from kvtier.workers.model import ModelShape, ModelStep, on_device, window_refusal
from kvtier.workers.rope import Rope, Turns, rotate, spread

_ATTENTION_NAME = "kvtier_paged"
_PROBE_PAGE_TOKENS = 16  # the least that every device's kernels take
_PROBE_TOKENS = 22  # two pages, the second of which isn't full
_PROBE_ENDS = (10, 19, 20, 21, 22)  # of the probe's chunks, of which the last are single rows
_PROBE_SPANS = (
    (0, 10),
    (10, 19),
    (19, 22),
)  # rows that go the same way: of the first chunk, of a further one over both pages, alone
_PROBE_WINDOW = 5  # less than the probe has tokens; models' own windows are too long to try at each load
_PROBE_ERROR = 0.1  # of a row's logits' norm; rounding makes about 0.01 in bfloat16, a wrong mask or position 0.5 and more
_TURN_ERROR = (
    0.05  # of a query's norm; rounding makes about 0.01 in bfloat16, another kind of rope 0.5 and more
)
_PROBE_POSITIONS = (3, 40)
_SAY_NOTHING = (  # keywords that attention functions are given and that change no score
    "cache",
    "cache_position",
    "dropout",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "use_cache",
)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a probe saw of one call of attention: queries [rows, heads, D] and the window that the module named."""

    layer: int
    query: torch.Tensor
    window: int


@dataclass(frozen=True, slots=True)
class Step:
    """What our attention needs beside q, k and v; travels as the keyword kvtier_step through transformers' layers."""

    plans: tuple[StepPlan, ...]
    arena: torch.Tensor
    layouts: tuple[KVLayout, ...]
    places: tuple[tuple[int, int], ...]  # by layer: its group, and its record in the group's pages
    kernels: Kernels
    sink_turns: Turns | None = None  # as `rotate` takes them
    seen: list[Seen] | None = None  # a probe: nothing is written or attended


def places_of(groups: tuple[LayerGroup, ...]) -> tuple[tuple[int, int], ...]:
    """By layer of the model: its group, and its record in the group's pages."""
    found = {
        layer: (number, record)
        for number, group in enumerate(groups)
        for record, layer in enumerate(group.layers)
    }
    return tuple(found[layer] for layer in sorted(found))


class TransformersModel:
    """A module tree of transformers whose attention modules call ours; owns it."""

    kind: Literal["lean", "transformers"] = "transformers"

    def __init__(
        self,
        folder: Path,
        shape: ModelShape,
        groups: tuple[LayerGroup, ...],
        layouts: tuple[KVLayout, ...],
        kernels: Kernels,
        device: torch.device,
        share: Share = WHOLE,
        reduce: Reduce = alone,
    ) -> None:
        """Load the model of `folder`. Raises ValueError for an architecture that can't take our attention.

        `shape` is the whole model's. With a `share`, a rank attends and stores its heads, and has its columns of gated
        MLPs; all else is computed on all ranks alike.
        """
        self._model = load_modules(folder, layouts[0].dtype)
        if not getattr(self._model, "_supports_attention_backend", False):
            name = type(self._model).__name__
            raise ValueError(f"{name} isn't supported: its attention can't be replaced")
        if share.ranks > 1:
            split_feed_forward(self._model, share, reduce)
        self._model.eval().to(device)
        self.invariant = False
        if isinstance(kernels, NativeKernels):
            # How a sum over ranks rounds may depend on the number of rows.
            self.invariant = compile_linears(self._model, kernels) and share.ranks == 1
        if share.ranks > 1:
            kernels = SharedKernels(kernels, shape, share, reduce)
        self._device = device
        self._groups = groups
        self._layouts = layouts
        self._places = places_of(groups)
        self._kernels = kernels
        seen = self._look()
        self._check_windows(shape, seen)
        self._rotary: _StreamRotary | None = None
        self.window_refusal = window_refusal(shape) or self._prepare_streams(seen)

    def close(self) -> None:
        """See Model."""

    def forward(self, step: ModelStep, arena: torch.Tensor) -> torch.Tensor:
        """See Model."""
        sink_turns: Turns | None = None
        if self._rotary is not None:
            back = self._rotary.prepare(step, self._device)
            sink_turns = None if back is None else spread(back, self._device, torch.float32)
        call = Step(step.plans, arena, self._layouts, self._places, self._kernels, sink_turns)
        return run_modules(self._model, step, call, self._device)

    def verify(self) -> None:
        """Compare a short text's logits over pages with those of the model's own attention.

        Finds architectures whose modules do more than they tell their attention function. A window is tried in small.
        Raises ValueError when the logits differ by more than rounding could make them.
        """
        config = self._model.config
        own_window = getattr(config, "sliding_window", None)
        if any(group.window for group in self._groups):
            config.sliding_window = _PROBE_WINDOW
        own = own_logits(self._model, self._device)

        def forward(step: ModelStep, arena: torch.Tensor, layouts: tuple[KVLayout, ...]) -> torch.Tensor:
            call = Step(step.plans, arena, layouts, self._places, self._kernels)
            return run_modules(self._model, step, call, self._device)

        check_probe(self._model, own, self._groups, self._layouts[0].dtype, self._device, forward)
        if any(group.window for group in self._groups):
            config.sliding_window = own_window

    def _look(self) -> list[Seen]:
        """What each layer's attention is given for one and the same token, alone, at two positions."""
        at = np.array(_PROBE_POSITIONS, np.int32)
        plan = make_plan([], _PROBE_PAGE_TOKENS)
        step = ModelStep(np.full(2, 1, np.int32), at, (plan,) * len(self._groups), at[:0])
        seen: list[Seen] = []
        arena = torch.empty(0, dtype=torch.uint8)
        call = Step(step.plans, arena, self._layouts, self._places, self._kernels, seen=seen)
        with torch.inference_mode():
            run_modules(self._model, step, call, self._device)
        return seen

    def _check_windows(self, shape: ModelShape, seen: list[Seen]) -> None:
        for call in seen:
            expected = self._groups[self._places[call.layer][0]].window
            if call.window != expected:
                raise ValueError(
                    f"{shape.architecture} isn't supported: layer {call.layer} has a window of {call.window}, by its"
                    f" config it has {expected} (0: none)"
                )

    def _prepare_streams(self, seen: list[Seen]) -> str:
        """Let rows of streams have angles of their own; or why that can't be."""
        theirs = getattr(self._model.base_model, "rotary_emb", None)
        frequencies = getattr(theirs, "inv_freq", None)
        factor = getattr(theirs, "attention_scaling", None)
        if not isinstance(frequencies, torch.Tensor) or not isinstance(factor, int | float):
            return f"{type(self._model).__name__} has no rotary embedding of the usual kind"
        rope = Rope(frequencies, factor, own_window=self._groups[0].window)
        back = torch.tensor([_PROBE_POSITIONS[1] - _PROBE_POSITIONS[0]], dtype=torch.float64)
        angles = back[:, None] * frequencies.double().cpu()
        turns = spread((angles.cos().float(), angles.sin().float()), self._device, torch.float32)
        for call in seen:
            here, there = call.query[:1].float(), call.query[1:].float()
            if here.shape[-1] != turns[0].shape[-1]:
                return f"{type(self._model).__name__} has rope on a part of each head"
            if not (rotate(here, *turns) - there).norm() < _TURN_ERROR * there.norm():
                return (
                    f"layer {call.layer} of {type(self._model).__name__} turns its queries in another way than by"
                    " half-split rope"
                )
        self._rotary = _StreamRotary(theirs, rope)
        self._model.base_model.rotary_emb = self._rotary
        return ""


class _StreamRotary(torch.nn.Module):
    """Their rotary module, but that rows of streams get our angles, at any position."""

    def __init__(self, theirs: Any, rope: Rope) -> None:
        super().__init__()
        self._theirs = theirs
        self._rope = rope
        self._streams: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def prepare(self, step: ModelStep, device: torch.device) -> Turns | None:
        """Before each step's forward: take its rows. Returns how queries are turned once more for sinks, if any."""
        plan, rows = step.plans[0], len(step.positions)
        streams = self._rope.streams(plan, rows)
        self._streams = None
        if streams is not None:
            cos, sin = (t.to(device).repeat(1, 2) for t in self._rope.rows(step.positions, plan))
            self._streams = torch.from_numpy(streams)[:, None].to(device), cos, sin
        return self._rope.sink_rows(step.positions, plan)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [1, rows, D]."""
        cos, sin = self._theirs(x, position_ids)
        if self._streams is None:
            return cos, sin
        streams, our_cos, our_sin = self._streams
        return (
            torch.where(streams, our_cos.to(cos.dtype), cos),
            torch.where(streams, our_sin.to(sin.dtype), sin),
        )


def load_modules(folder: Path, dtype: torch.dtype) -> Any:
    """transformers' module tree of a folder, set to call our attention. Raises ValueError where that can't be.

    Of an attention that isn't its own transformers asks for no mask, which would be rows x rows of a step.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(_ATTENTION_NAME, _paged_attention)
    loader: Any = AutoModelForCausalLM
    try:
        return loader.from_pretrained(folder, dtype=dtype, attn_implementation=_ATTENTION_NAME)
    except KeyError as error:
        if error.args != (_ATTENTION_NAME,):
            raise ValueError(f"transformers can't load {folder}: no {error}") from error
        raise ValueError(f"{folder} isn't supported: its model's attention can't be replaced") from error
    except ValueError as error:
        raise ValueError(f"transformers can't load {folder}: {error}") from error


def compile_linears(model: Any, kernels: NativeKernels) -> bool:
    """Let our kernels do the model's linear layers; True when they do all of its products.

    What remains then works on one row at a time, and row by row its bits don't depend on the number of rows, as long
    as torch runs it in one thread and no row ends within a vector.
    """
    complete = True
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear and child.in_features % 2 == 0:
                setattr(parent, name, NativeLinear(kernels, child))
                complete = complete and child.in_features % 32 == 0
    for module in model.modules():
        matrices = any(p.dim() > 1 for p in module.parameters(recurse=False))
        embeds = isinstance(module, torch.nn.Embedding)
        complete = complete and not (matrices and not embeds)
    return complete


def run_modules(model: Any, step: ModelStep, call: Any, device: torch.device) -> torch.Tensor:
    """Logits of the step's rows, float32 [m, vocab]; `call` goes to the attention modules as kvtier_step."""
    ids, at, wanted = on_device(device, step.token_ids, step.positions, step.logit_rows)
    output = model(
        input_ids=ids[None], position_ids=at[None], use_cache=False, logits_to_keep=wanted, kvtier_step=call
    )
    logits: torch.Tensor = output.logits[0].float()
    return logits


def _probe_ids(vocab: int) -> IntArray:
    return (np.arange(_PROBE_TOKENS, dtype=np.int64) * 7919 % vocab).astype(np.int32)


def own_logits(model: Any, device: torch.device) -> torch.Tensor:
    """Logits of the probe's text by the model's own attention, float32 [tokens, vocab]."""
    (ids,) = on_device(device, _probe_ids(int(model.config.vocab_size)))
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=ids[None], use_cache=False).logits[0].float()
    model.set_attn_implementation(_ATTENTION_NAME)
    return logits


def check_probe(
    model: Any,
    own: torch.Tensor,
    groups: tuple[LayerGroup, ...],
    dtype: torch.dtype,
    device: torch.device,
    forward: Callable[[ModelStep, torch.Tensor, tuple[KVLayout, ...]], torch.Tensor],
) -> None:
    """Raise ValueError unless `forward`, over unquantized pages of its own, gives `own` for the probe's text.

    Groups with a window have the probe's.
    """
    raw = {torch.float32: PageFormat.FP32, torch.bfloat16: PageFormat.BF16, torch.float16: PageFormat.FP16}[
        dtype
    ]
    probed = tuple(_probe_group(group, raw) for group in groups)
    unit = unit_bytes_of(probed)
    layouts = tuple(layout_of(group, dtype, unit, raw) for group in probed)
    pages = -(-_PROBE_TOKENS // _PROBE_PAGE_TOKENS)
    units = [-(-group.specs[raw].nbytes // unit) for group in probed]
    arena = torch.zeros(pages * sum(units), unit, dtype=torch.uint8, device=device)
    firsts = np.cumsum([0] + [pages * n for n in units])
    frames = [
        (first + n * np.arange(pages)).astype(np.int32) for first, n in zip(firsts, units, strict=False)
    ]
    ids, at = _probe_ids(own.shape[-1]), np.arange(_PROBE_TOKENS, dtype=np.int32)
    parts, start = [], 0
    for end in _PROBE_ENDS:
        plans = tuple(
            make_plan(
                [PlanSequence(0, end - start, end, f, window=_PROBE_WINDOW if group.window else 0)],
                _PROBE_PAGE_TOKENS,
            )
            for f, group in zip(frames, groups, strict=True)
        )
        step = ModelStep(ids[start:end], at[start:end], plans, at[: end - start])
        with torch.inference_mode():
            parts.append(forward(step, arena, layouts))
        start = end
    # By the median of rows: in half precision a few may choose other experts, and then they are far off and not wrong.
    errors = (torch.cat(parts) - own).norm(dim=1) / own.norm(dim=1)
    error = max(errors[slice(*span)].median() for span in _PROBE_SPANS)
    if not error < _PROBE_ERROR:
        raise ValueError(
            f"{type(model).__name__} isn't supported: over pages its logits differ by {error:.0%} from its own"
            " attention's"
        )


def _probe_group(group: LayerGroup, raw: PageFormat) -> LayerGroup:
    any_spec = next(iter(group.specs.values()))
    return replace(
        group, specs={raw: replace(any_spec, format=raw, page_tokens=_PROBE_PAGE_TOKENS, rope_format=raw)}
    )


def _paged_attention(
    module: Any,
    query: torch.Tensor,  # [1, Hq, rows, D]
    key: torch.Tensor,  # [1, H, rows, D]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    kvtier_step: Step | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Called by transformers' attention modules: write this step's K/V into pages, then attend the pages.

    `s_aux` [Hq] are learned logits that join each softmax's denominator. Raises ValueError for what we don't know.
    """
    name = type(module).__name__
    if kvtier_step is None:
        raise ValueError(f"{name} doesn't pass our step on to its attention")
    for keyword, given in kwargs.items():
        if given is not None and keyword not in _SAY_NOTHING:
            raise ValueError(f"{name} isn't supported yet: it uses {keyword}={given}")
    if kwargs.get("is_causal") is False:
        raise ValueError(f"{name} isn't supported: its attention isn't causal")
    step, layer = kvtier_step, int(module.layer_idx)
    q, k, v = (t[0].transpose(0, 1).to(step.layouts[0].dtype) for t in (query, key, value))
    if step.seen is not None:
        step.seen.append(Seen(layer, q, sliding_window or 0))
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)[None], None
    group, record = step.places[layer]
    layout, plan = step.layouts[group], step.plans[group]
    step.kernels.write_kv(k, v, step.arena, layout, plan, record)
    out, _ = step.kernels.paged_attention(
        q,
        step.arena,
        layout,
        plan,
        record,
        scaling if scaling is not None else layout.head_dim**-0.5,
        q_sinks=None if step.sink_turns is None else rotate(q.float(), *step.sink_turns).to(q.dtype),
        sink_logits=s_aux,
        softcap=softcap or 0.0,
    )
    return out[None], None
