"""Calls our compiled CPU kernels: checks every argument, since a wrong one would write over foreign memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from copy import copy
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvtier.kernels.cpu.build import BuildError, load_library
from kvtier.kernels.layout import (
    Format,
    IntArray,
    KVLayout,
    StepPlan,
    check_arena,
    check_attention,
    check_conversion,
    check_dense,
    check_latent_queries,
    check_latents,
    check_layer,
    check_new_rows,
    check_plan,
    check_span,
)
from kvtier.kernels.memory import HugeRoom
from kvtier.kernels.plans import PerPlan

PANEL = 32  # outputs of a weight panel: gemm.hpp's NR
_LANES = 16
_PLAN_ARRAYS = (
    "starts",
    "lengths",
    "contexts",
    "first_frames",
    "frames",
    "formats",
    "sink_pages",
    "first_pages",
    "windows",
    "sinks",
)
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _Record(Structure):
    _fields_ = [(name, c_int64) for name in ("v", "k_scales", "v_scales", "nbytes")]


class _Layout(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("heads", "dim", "page_tokens", "rope_dim", "write_format")),
        ("unit_bytes", c_int64),
        ("records", _Record * len(Format)),
    ]


class _Plan(Structure):
    _fields_ = [("sequences", c_int32), *((name, c_void_p) for name in _PLAN_ARRAYS)]


class _Attention(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("dtype", "layer", "group", "rows")),
        ("scale", c_float),
        ("softcap", c_float),
        ("layout", _Layout),
        ("plan", _Plan),
        *((name, c_void_p) for name in ("arena", "q", "q_sinks", "sink_logits", "out", "lse")),
    ]


class _Dense(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("dtype", "rows", "keys", "heads", "dim", "value_dim")),
        ("offset", c_int64),
        ("scale", c_float),
        *((name, c_void_p) for name in ("q", "k", "v", "out", "lse")),
    ]


class _Layer(Structure):
    _fields_ = [
        (name, c_void_p)
        for name in (
            "attention_norm",
            "mlp_norm",
            "qkv_bias",
            "q_norm",
            "k_norm",
            "qkv",
            "out",
            "gate_up",
            "down",
        )
    ]


class _Model(Structure):
    _fields_ = [
        *(
            (name, c_int32)
            for name in (
                "dtype",
                "num_layers",
                "hidden",
                "intermediate",
                "query_heads",
                "heads",
                "dim",
                "vocab",
                "max_rows",
            )
        ),
        ("pages", _Layout),
        ("eps", c_float),
        ("scale", c_float),
        ("layers", POINTER(_Layer)),
        *((name, c_void_p) for name in ("head", "embedding", "norm")),
    ]


class _Step(Structure):
    _fields_ = [
        ("rows", c_int32),
        ("num_logits", c_int32),
        *((name, c_void_p) for name in ("token_ids", "cos", "sin", "sink_cos", "sink_sin")),
        ("plan", _Plan),
        ("arena", c_void_p),
        ("logit_rows", c_void_p),
        ("logits", c_void_p),
    ]


@dataclass(frozen=True, slots=True)
class LlamaLayerWeights:
    """One layer of a Llama-family model, matrices in the compute dtype as [outputs, inputs]."""

    attention_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(query heads + 2 heads) dim, hidden]
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None  # [dim]
    k_norm: torch.Tensor | None
    out: torch.Tensor  # [hidden, query heads * dim]
    mlp_norm: torch.Tensor  # [hidden]
    gate: torch.Tensor  # [intermediate, hidden]
    up: torch.Tensor  # [intermediate, hidden]
    down: torch.Tensor  # [hidden, intermediate]


class NativeKernels:
    """Our compiled kernels and their threads. One caller at a time. Raises BuildError where they can't be had."""

    invariant = True

    def __init__(self, cache_dir: Path, threads: int, march: str = "native") -> None:
        if threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        self.library = load_library(cache_dir, march)
        _declare(self.library)
        self.name = f"native {self.library.kvt_instructions().decode()}"
        structures = (_Layout, _Plan, _Attention, _Dense, _Layer, _Model, _Step)
        sizes = (c_int64 * len(structures))()
        self.library.kvt_sizes(sizes)
        expected = [ctypes.sizeof(s) for s in structures]
        if list(sizes) != expected:
            raise BuildError(f"the compiled kernels expect structures of {list(sizes)} bytes, not {expected}")
        self.pool: int | None = self.library.kvt_pool_new(threads)
        self._checked = _Checked()

    def close(self) -> None:
        """End the threads; no call may follow."""
        if self.pool is not None:
            self.library.kvt_pool_delete(self.pool)
            self.pool = None

    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        arena: torch.Tensor,
        layout: KVLayout,
        plan: StepPlan,
        layer: int,
    ) -> None:
        """See ops.Kernels."""
        check_new_rows(k, v, arena, layout)
        pages, steps = self._checked.of(plan, len(k), arena, layout, layer, writes=True)
        k, v = k.contiguous(), v.contiguous()
        assert self.pool is not None, "kernels are closed"
        self.library.kvt_write(
            self.pool,
            _DTYPES[layout.dtype],
            byref(pages),
            byref(steps),
            arena.data_ptr(),
            layer,
            k.data_ptr(),
            v.data_ptr(),
        )

    def paged_attention(
        self,
        q: torch.Tensor,
        arena: torch.Tensor,
        layout: KVLayout,
        plan: StepPlan,
        layer: int,
        scale: float,
        *,
        q_sinks: torch.Tensor | None = None,
        sink_logits: torch.Tensor | None = None,
        softcap: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ops.Kernels."""
        check_attention(q, arena, layout, q_sinks, sink_logits, softcap)
        pages, steps = self._checked.of(plan, len(q), arena, layout, layer)
        q = q.contiguous()
        second = None if q_sinks is None else q_sinks.contiguous()
        logits = None if sink_logits is None else sink_logits.float().contiguous()
        out = torch.empty_like(q)
        lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32)
        assert self.pool is not None, "kernels are closed"
        call = _Attention(
            dtype=_DTYPES[layout.dtype],
            layer=layer,
            group=q.shape[1] // layout.num_kv_heads,
            rows=len(q),
            scale=scale,
            softcap=softcap,
            layout=pages,
            plan=steps,
            arena=arena.data_ptr(),
            q=q.data_ptr(),
            q_sinks=None if second is None else second.data_ptr(),
            sink_logits=None if logits is None else logits.data_ptr(),
            out=out.data_ptr(),
            lse=lse.data_ptr(),
        )
        self.library.kvt_attention(self.pool, byref(call))
        return out, lse

    def write_latents(
        self,
        latents: torch.Tensor,
        rope_keys: torch.Tensor,
        arena: torch.Tensor,
        layout: KVLayout,
        plan: StepPlan,
        layer: int,
    ) -> None:
        """See ops.Kernels."""
        check_latents(latents, rope_keys, arena, layout)
        pages, steps = self._checked.of(plan, len(latents), arena, layout, layer, writes=True)
        latents, rope_keys = latents.contiguous(), rope_keys.contiguous()
        self.library.kvt_write_latents(
            _DTYPES[layout.dtype],
            byref(pages),
            byref(steps),
            arena.data_ptr(),
            layer,
            latents.data_ptr(),
            rope_keys.data_ptr(),
        )

    def latent_attention(
        self,
        q: torch.Tensor,
        arena: torch.Tensor,
        layout: KVLayout,
        plan: StepPlan,
        layer: int,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ops.Kernels."""
        check_latent_queries(q, arena, layout)
        pages, steps = self._checked.of(plan, len(q), arena, layout, layer)
        q = q.contiguous()
        out = torch.empty(*q.shape[:2], layout.head_dim, dtype=q.dtype)
        lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32)
        assert self.pool is not None, "kernels are closed"
        call = _Attention(
            dtype=_DTYPES[layout.dtype],
            layer=layer,
            group=q.shape[1],
            rows=len(q),
            scale=scale,
            layout=pages,
            plan=steps,
            arena=arena.data_ptr(),
            q=q.data_ptr(),
            out=out.data_ptr(),
            lse=lse.data_ptr(),
        )
        self.library.kvt_latent_attention(self.pool, byref(call))
        return out, lse

    def read_latents(
        self,
        arena: torch.Tensor,
        layout: KVLayout,
        plan: StepPlan,
        layer: int,
        sequence: int,
        first: int,
        last: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ops.Kernels."""
        check_arena(arena, layout)
        pages, steps = self._checked.of(plan, None, arena, layout, layer)
        check_span(plan, layout, sequence, first, last)
        latents = torch.empty(last - first, layout.head_dim, dtype=layout.dtype)
        rope_keys = torch.empty(last - first, layout.rope_dim, dtype=layout.dtype)
        self.library.kvt_read_latents(
            _DTYPES[layout.dtype],
            byref(pages),
            byref(steps),
            arena.data_ptr(),
            layer,
            sequence,
            first,
            last,
            latents.data_ptr(),
            rope_keys.data_ptr(),
        )
        return latents, rope_keys

    def dense_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offset: int, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ops.Kernels."""
        check_dense(q, k, v)
        if q.dtype not in _DTYPES or q.shape[2] % 2 or v.shape[2] % 2:
            raise ValueError(
                f"heads must be even, of a floating-point type, got {q.dtype} {q.shape[2]}, {v.shape[2]}"
            )
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype)
        lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32)
        assert self.pool is not None, "kernels are closed"
        call = _Dense(
            dtype=_DTYPES[q.dtype],
            rows=len(q),
            keys=len(k),
            heads=q.shape[1],
            dim=q.shape[2],
            value_dim=v.shape[2],
            offset=offset,
            scale=scale,
            q=q.data_ptr(),
            k=k.data_ptr(),
            v=v.data_ptr(),
            out=out.data_ptr(),
            lse=lse.data_ptr(),
        )
        self.library.kvt_dense_attention(self.pool, byref(call))
        return out, lse

    def convert_pages(
        self,
        arena: torch.Tensor,
        layout: KVLayout,
        sources: IntArray,
        source_format: Format,
        targets: IntArray,
        target_format: Format,
    ) -> None:
        """See ops.Kernels."""
        check_conversion(arena, layout, sources, source_format, targets, target_format)
        check_on_cpu(arena)
        src, dst = (np.ascontiguousarray(a, np.int32) for a in (sources, targets))
        assert self.pool is not None, "kernels are closed"
        self.library.kvt_convert(
            self.pool,
            _DTYPES[layout.dtype],
            byref(_layout(layout)),
            arena.data_ptr(),
            layout.num_layers,
            len(src),
            src.ctypes.data,
            source_format,
            dst.ctypes.data,
            target_format,
        )


class _Checked:
    """The last plans that were found right, and their C structures: one plan serves all layers of a step."""

    def __init__(self) -> None:
        self._kept: PerPlan[tuple[_Layout, _Plan]] = PerPlan()

    def of(
        self,
        plan: StepPlan,
        rows: int | None,
        arena: torch.Tensor,
        layout: KVLayout,
        layer: int,
        writes: bool = False,
    ) -> tuple[_Layout, _Plan]:
        """Layout and plan as C has them. Raises ValueError unless each access they lead to is a right one."""
        check_on_cpu(arena)
        check_layer(layer, layout)

        def make(plan: StepPlan) -> tuple[_Layout, _Plan]:
            check_plan(plan, rows, arena, layout, writes=writes)
            return _layout(layout), _plan(plan)

        return self._kept.get(plan, (layout, rows, arena.numel(), writes), make)


def check_on_cpu(arena: torch.Tensor) -> None:
    """Raise ValueError unless the arena's bytes lie side by side in this process's memory."""
    if not arena.is_contiguous() or arena.device.type != "cpu":
        raise ValueError(
            f"the arena must be contiguous and on the CPU, got {arena.stride()} on {arena.device}"
        )


def pack(weight: torch.Tensor, room: HugeRoom) -> torch.Tensor:
    """[outputs, inputs] as panels of 32 outputs, zeros behind the last output; bfloat16 pairs up along the inputs.

    It lies in the room's memory.
    """
    step = 2 if weight.dtype == torch.bfloat16 else 1
    outputs, inputs = weight.shape
    if inputs % step:
        raise ValueError(f"inputs must be a multiple of {step}, got {inputs}")
    missing = -outputs % PANEL
    padded = torch.nn.functional.pad(weight, (0, 0, 0, missing)) if missing else weight
    panels = padded.view(-1, PANEL, inputs // step, step).transpose(1, 2)
    packed = room.take(panels.numel() * weight.element_size()).view(weight.dtype)
    packed.view(panels.shape).copy_(panels)
    return packed


def _gate_up(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """16 gates, then their 16 ups, and so on, so that a panel has all that its outputs need."""
    pad = (0, 0, 0, -len(gate) % _LANES)
    both = [torch.nn.functional.pad(w, pad).view(-1, _LANES, w.shape[1]) for w in (gate, up)]
    return torch.cat(both, dim=1).flatten(0, 1)


class NativeLinear(torch.nn.Module):
    """torch.nn.Linear in our compiled code; each row's result is the same bits whatever the other rows."""

    def __init__(self, kernels: NativeKernels, linear: torch.nn.Linear, room: HugeRoom | None = None) -> None:
        """Packs the weights, of which no other copy is kept, into `room`. Raises ValueError for a dtype or size we don't have."""
        super().__init__()
        if linear.weight.dtype not in _DTYPES:
            raise ValueError(f"no compiled linear for {linear.weight.dtype}")
        self._kernels = kernels
        self._dtype = linear.weight.dtype
        self._packed = pack(linear.weight.detach(), room or HugeRoom(0))
        self._bias = None if linear.bias is None else linear.bias.detach().float().clone()
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        if x.dtype != self._dtype or x.shape[-1] != self.in_features:
            raise ValueError(f"rows of {self.in_features} {self._dtype}, got {x.shape[-1]} {x.dtype}")
        x = x.contiguous()
        y = torch.empty(*x.shape[:-1], self.out_features, dtype=x.dtype)
        assert self._kernels.pool is not None, "kernels are closed"
        self._kernels.library.kvt_linear(
            self._kernels.pool,
            _DTYPES[self._dtype],
            x.data_ptr(),
            x.numel() // self.in_features,
            self.in_features,
            self._packed.data_ptr(),
            self.out_features,
            None if self._bias is None else self._bias.data_ptr(),
            y.data_ptr(),
        )
        return y


class NativeLlama:
    """A Llama-family model whose whole step runs in our compiled code; owns the packed weights.

    Each row's logits and K/V are the same bits whatever the other rows of the step, the chunking, and the number of
    threads.
    """

    def __init__(
        self,
        kernels: NativeKernels,
        layout: KVLayout,
        *,
        layers: Iterable[LlamaLayerWeights],  # taken one by one, so that only one is unpacked at a time
        embedding: torch.Tensor,  # [vocab, hidden]
        head: torch.Tensor | None,  # [vocab, hidden]; None: the embedding
        norm: torch.Tensor,  # [hidden]
        query_heads: int,
        eps: float,
        intermediate: int,
        max_rows: int,
    ) -> None:
        self.vocab, self.hidden = embedding.shape
        self._intermediate, self._query_heads, self._eps = intermediate, query_heads, eps
        refusal = llama_refusal(self.hidden, query_heads, layout)
        if refusal:
            raise ValueError(refusal)
        self._dtype, self._heads, self._dim = layout.dtype, layout.num_kv_heads, layout.head_dim
        self._check_weight("norm", norm, self.hidden)
        self._check_weight("embedding", embedding, self.vocab, self.hidden)
        if head is not None:
            self._check_weight("head", head, self.vocab, self.hidden)
        self._kept: list[torch.Tensor] = []
        room = HugeRoom()
        packed = [self._pack_layer(number, w, room) for number, w in enumerate(layers)]
        if len(packed) != layout.num_layers:
            raise ValueError(f"{len(packed)} layers of weights for pages of {layout.num_layers}")
        self._layers = (_Layer * layout.num_layers)(*packed)
        self._head = self._keep(pack(embedding if head is None else head, room))
        self._embedding = None if head is None else self._keep(embedding)
        self._norm = self._keep(norm.float())
        self._open(kernels, layout, max_rows)

    def _open(self, kernels: NativeKernels, layout: KVLayout, max_rows: int) -> None:
        self._kernels = kernels
        self._layout = layout
        self._checked = _Checked()
        self._max_rows = max_rows
        self._model = _Model(
            dtype=_DTYPES[layout.dtype],
            num_layers=layout.num_layers,
            hidden=self.hidden,
            intermediate=self._intermediate,
            query_heads=self._query_heads,
            heads=layout.num_kv_heads,
            dim=layout.head_dim,
            vocab=self.vocab,
            max_rows=max_rows,
            pages=_layout(layout),
            eps=self._eps,
            scale=layout.head_dim**-0.5,
            layers=self._layers,
            head=self._head,
            embedding=self._embedding,
            norm=self._norm,
        )
        self._llama: int | None = kernels.library.kvt_llama_new(byref(self._model), kernels.pool)

    def over(self, layout: KVLayout, max_rows: int) -> NativeLlama:
        """The same model over other pages, with the same packed weights; to be closed by itself."""
        given = (layout.dtype, layout.num_layers, layout.num_kv_heads, layout.head_dim)
        if given != (self._dtype, len(self._layers), self._heads, self._dim):
            raise ValueError(f"pages of {given} for a model of other sizes")
        other = copy(self)
        other._open(self._kernels, layout, max_rows)
        return other

    def close(self) -> None:
        """Free the step's buffers; before the kernels are closed. No call may follow."""
        if self._llama is not None:
            self._kernels.library.kvt_llama_delete(self._llama)
            self._llama = None

    def _keep(self, t: torch.Tensor) -> int:
        t = t.contiguous()
        self._kept.append(t)
        return t.data_ptr()

    def _check_weight(self, name: str, weight: torch.Tensor | None, *shape: int) -> None:
        """Compiled code reads what the sizes say, wherever the weight ends."""
        if weight is not None and (tuple(weight.shape) != shape or weight.dtype != self._dtype):
            raise ValueError(
                f"{name} must be {self._dtype} {list(shape)}, got {weight.dtype} {list(weight.shape)}"
            )

    def _check_layer(self, number: int, w: LlamaLayerWeights) -> None:
        queries, rows = self._query_heads * self._dim, (self._query_heads + 2 * self._heads) * self._dim
        for name, weight, shape in (
            ("attention_norm", w.attention_norm, (self.hidden,)),
            ("mlp_norm", w.mlp_norm, (self.hidden,)),
            ("qkv", w.qkv, (rows, self.hidden)),
            ("qkv_bias", w.qkv_bias, (rows,)),
            ("q_norm", w.q_norm, (self._dim,)),
            ("k_norm", w.k_norm, (self._dim,)),
            ("out", w.out, (self.hidden, queries)),
            ("gate", w.gate, (self._intermediate, self.hidden)),
            ("up", w.up, (self._intermediate, self.hidden)),
            ("down", w.down, (self.hidden, self._intermediate)),
        ):
            self._check_weight(f"layer {number}: {name}", weight, *shape)

    def _pack_layer(self, number: int, w: LlamaLayerWeights, room: HugeRoom) -> _Layer:
        self._check_layer(number, w)
        down = torch.nn.functional.pad(w.down, (0, -w.down.shape[1] % _LANES))
        return _Layer(
            attention_norm=self._keep(w.attention_norm.float()),
            mlp_norm=self._keep(w.mlp_norm.float()),
            qkv_bias=None if w.qkv_bias is None else self._keep(w.qkv_bias.float()),
            q_norm=None if w.q_norm is None else self._keep(w.q_norm.float()),
            k_norm=None if w.k_norm is None else self._keep(w.k_norm.float()),
            qkv=self._keep(pack(w.qkv, room)),
            out=self._keep(pack(w.out, room)),
            gate_up=self._keep(pack(_gate_up(w.gate, w.up), room)),
            down=self._keep(pack(down, room)),
        )

    def forward(
        self,
        token_ids: IntArray,  # [rows]
        rope: tuple[torch.Tensor, torch.Tensor],  # the rows' cosines and sines, float32 [rows, dim / 2]
        plan: StepPlan,
        arena: torch.Tensor,
        logit_rows: IntArray,  # [m]
        sink_rope: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Write the rows' K/V into their pages; logits of `logit_rows`, float32 [m, vocab].

        `sink_rope`, like `rope`: the turn from a row's query in its place to the one that sink keys see.
        """
        rows = len(token_ids)
        self._check(token_ids, logit_rows)
        check_arena(arena, self._layout)
        _, steps = self._checked.of(plan, rows, arena, self._layout, 0, writes=True)
        logits = torch.empty(len(logit_rows), self.vocab, dtype=torch.float32)
        if not rows:
            return logits
        cos, sin = self._turns(rope, rows)
        sinks = None if sink_rope is None else self._turns(sink_rope, rows)
        ids, wanted = (np.ascontiguousarray(a, np.int32) for a in (token_ids, logit_rows))
        step = _Step(
            rows=rows,
            num_logits=len(logit_rows),
            token_ids=ids.ctypes.data,
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            sink_cos=None if sinks is None else sinks[0].data_ptr(),
            sink_sin=None if sinks is None else sinks[1].data_ptr(),
            plan=steps,
            arena=arena.data_ptr(),
            logit_rows=wanted.ctypes.data,
            logits=logits.data_ptr(),
        )
        assert self._llama is not None, "the model is closed"
        self._kernels.library.kvt_llama_forward(self._llama, byref(step))
        return logits

    def _turns(self, rope: tuple[torch.Tensor, torch.Tensor], rows: int) -> list[torch.Tensor]:
        shape = (rows, self._layout.head_dim // 2)
        if any(t.shape != shape or t.dtype != torch.float32 for t in rope):
            raise ValueError(
                f"rope must be float32 {list(shape)}, got {[(t.dtype, list(t.shape)) for t in rope]}"
            )
        return [t.contiguous() for t in rope]

    def _check(self, token_ids: IntArray, logit_rows: IntArray) -> None:
        rows = len(token_ids)
        if rows > self._max_rows or len(logit_rows) > rows:
            raise ValueError(
                f"{rows} rows and {len(logit_rows)} logit rows in a step of at most {self._max_rows}"
            )
        for name, values, limit in (
            ("token ids", token_ids, self.vocab),
            ("logit rows", logit_rows, rows),
        ):
            if len(values) and (int(values.min()) < 0 or int(values.max()) >= limit):
                raise ValueError(f"{name} must be in [0, {limit}), got {values.min()} to {values.max()}")


def llama_refusal(hidden: int, query_heads: int, layout: KVLayout) -> str:
    """Why the compiled model can't have this shape; "" when it can."""
    if hidden % PANEL:
        return f"hidden size {hidden} is no multiple of {PANEL}"
    if layout.head_dim % 8 or query_heads % layout.num_kv_heads:
        return f"{query_heads} heads of {layout.head_dim} over {layout.num_kv_heads} KV heads"
    return ""


def _layout(layout: KVLayout) -> _Layout:
    records = (_Record * len(Format))()
    for format, r in layout.records.items():
        records[format] = _Record(r.v, r.k_scales, r.v_scales, r.nbytes)
    return _Layout(
        heads=layout.num_kv_heads,
        dim=layout.head_dim,
        page_tokens=layout.page_tokens,
        rope_dim=layout.rope_dim,
        write_format=layout.write_format,
        unit_bytes=layout.unit_bytes,
        records=records,
    )


def _plan(plan: StepPlan) -> _Plan:
    arrays = [getattr(plan, name) for name in _PLAN_ARRAYS]
    assert all(a.dtype == (np.uint8 if a is plan.formats else np.int32) for a in arrays)
    assert all(a.flags.c_contiguous for a in arrays)
    return _Plan(plan.num_sequences, *(a.ctypes.data for a in arrays))


def _declare(library: ctypes.CDLL) -> None:
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "kvt_pool_new": (c_void_p, [c_int32]),
        "kvt_pool_delete": (None, [c_void_p]),
        "kvt_attention": (None, [c_void_p, c_void_p]),
        "kvt_latent_attention": (None, [c_void_p, c_void_p]),
        "kvt_dense_attention": (None, [c_void_p, c_void_p]),
        "kvt_write_latents": (None, [c_int32, c_void_p, c_void_p, c_void_p, c_int32, c_void_p, c_void_p]),
        "kvt_read_latents": (
            None,
            [c_int32, c_void_p, c_void_p, c_void_p, c_int32, c_int32, c_int32, c_int32, c_void_p, c_void_p],
        ),
        "kvt_linear": (
            None,
            [c_void_p, c_int32, c_void_p, c_int32, c_int32, c_void_p, c_int32, c_void_p, c_void_p],
        ),
        "kvt_write": (None, [c_void_p, c_int32, c_void_p, c_void_p, c_void_p, c_int32, c_void_p, c_void_p]),
        "kvt_convert": (
            None,
            [c_void_p, c_int32, c_void_p, c_void_p, c_int32, c_int32, c_void_p, c_int32, c_void_p, c_int32],
        ),
        "kvt_llama_new": (c_void_p, [c_void_p, c_void_p]),
        "kvt_llama_forward": (None, [c_void_p, c_void_p]),
        "kvt_llama_delete": (None, [c_void_p]),
        "kvt_sizes": (None, [c_void_p]),
        "kvt_instructions": (ctypes.c_char_p, []),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
