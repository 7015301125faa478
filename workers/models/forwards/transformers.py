"""transformers' own modules for any causal LM, with attention over pages in place of theirs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from kvtier.kernels.ops import (
    HugeRoom,
    Kernels,
    KVLayout,
    NativeKernels,
    NativeLinear,
    StepPlan,
    make_plan,
)
from kvtier.workers.models.base import ModelShape, ModelStep, on_device, window_refusal
from kvtier.workers.models.files.config import causal_class
from kvtier.workers.models.files.weights import Checkpoint, check_fit
from kvtier.workers.models.formats import LayerGroup
from kvtier.workers.models.forwards.probe import PROBE_PAGE_TOKENS, check_probe, own_logits, run_probe
from kvtier.workers.models.forwards.rope import Rope, Turns, rotate, spread
from kvtier.workers.models.shards.collective import Reduce, alone
from kvtier.workers.models.shards.kernels import SharedKernels
from kvtier.workers.models.shards.modules import split_feed_forward
from kvtier.workers.models.shards.share import WHOLE, Share

ATTENTION_NAME = "kvtier_paged"
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
        files: Checkpoint,
        shape: ModelShape,
        groups: tuple[LayerGroup, ...],
        layouts: tuple[KVLayout, ...],
        kernels: Kernels,
        device: torch.device,
        share: Share = WHOLE,
        reduce: Reduce = alone,
    ) -> None:
        """Load the model of `files`. Raises ValueError for an architecture that can't take our attention.

        `shape` is the whole model's. With a `share`, a rank attends and stores its heads, and has its columns of gated
        MLPs; all else is computed on all ranks alike.
        """
        self._model = load_modules(files, layouts[0].dtype)
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
        leave_files(self._model)
        if share.ranks > 1:
            kernels = SharedKernels(kernels, shape, share, reduce)
        self._device = device
        self._is_routed = shape.has_experts
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

        Finds architectures whose modules do more than they tell their attention function. Raises ValueError when the
        logits differ by more than rounding could make them.
        """
        config, dtype = self._model.config, self._layouts[0].dtype
        own = own_logits(self._model, self._device, ATTENTION_NAME)

        def forward(step: ModelStep, arena: torch.Tensor, layouts: tuple[KVLayout, ...]) -> torch.Tensor:
            call = Step(step.plans, arena, layouts, self._places, self._kernels)
            return run_modules(self._model, step, call, self._device)

        ours = run_probe(int(config.vocab_size), self._groups, dtype, self._device, forward)
        check_probe(type(self._model).__name__, own, ours, dtype, routed=self._is_routed)

    def _look(self) -> list[Seen]:
        """What each layer's attention is given for one and the same token, alone, at two positions."""
        at = np.array(_PROBE_POSITIONS, np.int32)
        plan = make_plan([], PROBE_PAGE_TOKENS)
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


def load_modules(files: Checkpoint, dtype: torch.dtype) -> Any:
    """transformers' module tree of a checkpoint, set to call our attention.

    Raises ValueError where that can't be, and unless the files hold each of its tensors in its shape and no others. Of
    an attention that isn't its own transformers asks for no mask, which would be rows x rows of a step.
    """
    import transformers
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, _paged_attention)
    loader: Any = getattr(transformers, causal_class(files.config))
    folder = files.folder
    try:
        with _quiet_loading():
            model, found = loader.from_pretrained(
                None,
                config=files.config,
                state_dict=files.state_dict(dtype),
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                ignore_mismatched_sizes=True,  # they are refused below, by name
                output_loading_info=True,
            )
    except KeyError as error:
        if error.args != (ATTENTION_NAME,):
            raise ValueError(f"transformers can't load {folder}: no {error}") from error
        raise ValueError(f"{folder} isn't supported: its model's attention can't be replaced") from error
    except (ValueError, RuntimeError, ImportError) as error:
        raise ValueError(f"transformers can't load {folder}: {error}") from error
    check_fit(folder, found["missing_keys"], found["unexpected_keys"], found["mismatched_keys"])
    return model


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """Without transformers' progress bars and reports: what is wrong is raised."""
    from transformers.utils import logging

    said: Any = logging
    level, had_bar = said.get_verbosity(), said.is_progress_bar_enabled()
    said.set_verbosity_error()
    said.disable_progress_bar()
    try:
        yield
    finally:
        said.set_verbosity(level)
        if had_bar:
            said.enable_progress_bar()


def compile_linears(model: Any, kernels: NativeKernels) -> bool:
    """Let our kernels do the model's linear layers; True when they do all of its products.

    What remains then works on one row at a time, and row by row its bits don't depend on the number of rows, as long
    as torch runs it in one thread and no row ends within a vector.
    """
    complete, room = True, HugeRoom()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear and child.in_features % 2 == 0:
                setattr(parent, name, NativeLinear(kernels, child, room))
                complete = complete and child.in_features % 32 == 0
    for module in model.modules():
        matrices = any(p.dim() > 1 for p in module.parameters(recurse=False))
        embeds = isinstance(module, torch.nn.Embedding)
        complete = complete and not (matrices and not embeds)
    return complete


def leave_files(model: Any) -> None:
    """Copy a module tree's tensors out of the files' memory, all of which one of them would keep."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu":
            tensor.data = tensor.data.clone()


def run_modules(model: Any, step: ModelStep, call: Any, device: torch.device) -> torch.Tensor:
    """Logits of the step's rows, float32 [m, vocab]; `call` goes to the attention modules as kvtier_step."""
    ids, at, wanted = on_device(device, step.token_ids, step.positions, step.logit_rows)
    output = model(
        input_ids=ids[None], position_ids=at[None], use_cache=False, logits_to_keep=wanted, kvtier_step=call
    )
    logits: torch.Tensor = output.logits[0].float()
    return logits


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
