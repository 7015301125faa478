"""Calls our compiled CPU kernels: checks every argument, since a wrong one would write over foreign memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvtier.kernels.cpu.build import BuildError, load_library
from kvtier.kernels.layout import IntArray, KVLayout, StepPlan, check_rows
from kvtier.kernels.memory import huge_bytes

PANEL = 32  # outputs of a weight panel: gemm.hpp's NR
_LANES = 16
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _Layout(Structure):
    _fields_ = [
        ("heads", c_int32),
        ("dim", c_int32),
        ("page_tokens", c_int32),
        ("frame_bytes", c_int64),
        ("record_bytes", c_int64),
    ]


class _Plan(Structure):
    _fields_ = [
        ("sequences", c_int32),
        ("starts", c_void_p),
        ("lengths", c_void_p),
        ("contexts", c_void_p),
        ("first_frames", c_void_p),
        ("frames", c_void_p),
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
                "page_tokens",
            )
        ),
        ("record_bytes", c_int64),
        ("eps", c_float),
        ("scale", c_float),
        ("layers", POINTER(_Layer)),
        *((name, c_void_p) for name in ("head", "embedding", "norm", "cos", "sin")),
    ]


class _Step(Structure):
    _fields_ = [
        ("rows", c_int32),
        ("num_logits", c_int32),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("plan", _Plan),
        ("arena", c_void_p),
        ("frame_bytes", c_int64),
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

    def __init__(self, cache_dir: Path, threads: int, march: str = "native") -> None:
        if threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        self.library = load_library(cache_dir, march)
        _declare(self.library)
        self.name = f"native {self.library.kvt_instructions().decode()}"
        sizes = (c_int64 * 5)()
        self.library.kvt_sizes(sizes)
        expected = [ctypes.sizeof(s) for s in (_Layout, _Plan, _Layer, _Model, _Step)]
        if list(sizes) != expected:
            raise BuildError(f"the compiled kernels expect structures of {list(sizes)} bytes, not {expected}")
        self.pool: int | None = self.library.kvt_pool_new(threads)

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
        for x in (k, v):
            check_rows(x, arena, layout, layout.num_kv_heads)
        check_plan(plan, min(len(k), len(v)), arena, layout, layer)
        k, v = k.contiguous(), v.contiguous()
        held = _layout(layout, arena)
        self.library.kvt_write(
            byref(held),
            byref(_plan(plan)),
            arena.data_ptr(),
            layer,
            layout.dtype.itemsize,
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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ops.Kernels."""
        check_rows(q, arena, layout)
        check_plan(plan, len(q), arena, layout, layer)
        q = q.contiguous()
        out = torch.empty_like(q)
        lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32)
        held = _layout(layout, arena)
        assert self.pool is not None, "kernels are closed"
        self.library.kvt_attention(
            self.pool,
            _DTYPES[layout.dtype],
            byref(held),
            byref(_plan(plan)),
            arena.data_ptr(),
            layer,
            q.shape[1] // layout.num_kv_heads,
            scale,
            len(q),
            q.data_ptr(),
            out.data_ptr(),
            lse.data_ptr(),
        )
        return out, lse


def check_plan(plan: StepPlan, rows: int, arena: torch.Tensor, layout: KVLayout, layer: int) -> None:
    """Raise ValueError unless each access that the plan leads to is inside the arena and the rows."""
    if not arena.is_contiguous() or arena.device.type != "cpu":
        raise ValueError(
            f"the arena must be contiguous and on the CPU, got {arena.stride()} on {arena.device}"
        )
    if not 0 <= layer < layout.num_layers:
        raise ValueError(f"layer {layer} of {layout.num_layers}")
    if not plan.num_sequences:
        return
    if int(plan.starts.min()) < 0 or int((plan.starts + plan.lengths).max()) > rows:
        raise ValueError(f"a sequence's rows lie outside the step's {rows}")
    if int(plan.lengths.min()) < 0 or bool((plan.contexts < plan.lengths).any()):
        raise ValueError("a sequence has more rows than context")
    pages = -(-plan.contexts // layout.page_tokens)
    if int((plan.first_frames + pages).max()) > len(plan.frames) or int(plan.first_frames.min()) < 0:
        raise ValueError("a sequence has fewer frames than its context needs")
    if len(plan.frames) and (int(plan.frames.min()) < 0 or int(plan.frames.max()) >= len(arena)):
        raise ValueError(f"frames must be in [0, {len(arena)})")


def pack(weight: torch.Tensor) -> torch.Tensor:
    """[outputs, inputs] as panels of 32 outputs, zeros behind the last output; bfloat16 pairs up along the inputs."""
    step = 2 if weight.dtype == torch.bfloat16 else 1
    outputs, inputs = weight.shape
    if inputs % step:
        raise ValueError(f"inputs must be a multiple of {step}, got {inputs}")
    missing = -outputs % PANEL
    padded = torch.nn.functional.pad(weight, (0, 0, 0, missing)) if missing else weight
    panels = padded.view(-1, PANEL, inputs // step, step).transpose(1, 2)
    packed = huge_bytes(panels.numel() * weight.element_size()).view(weight.dtype)
    packed.view(panels.shape).copy_(panels)
    return packed


def _gate_up(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """16 gates, then their 16 ups, and so on, so that a panel has all that its outputs need."""
    pad = (0, 0, 0, -len(gate) % _LANES)
    both = [torch.nn.functional.pad(w, pad).view(-1, _LANES, w.shape[1]) for w in (gate, up)]
    return torch.cat(both, dim=1).flatten(0, 1)


class NativeLinear(torch.nn.Module):
    """torch.nn.Linear in our compiled code; each row's result is the same bits whatever the other rows."""

    def __init__(self, kernels: NativeKernels, linear: torch.nn.Linear) -> None:
        """Packs the weights, of which no other copy is kept. Raises ValueError for a dtype or size we don't have."""
        super().__init__()
        if linear.weight.dtype not in _DTYPES:
            raise ValueError(f"no compiled linear for {linear.weight.dtype}")
        self._kernels = kernels
        self._dtype = linear.weight.dtype
        self._packed = pack(linear.weight.detach())
        self._bias = None if linear.bias is None else linear.bias.detach().float().contiguous()
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
        rope: tuple[torch.Tensor, torch.Tensor],  # cosines and sines, float32 [positions, dim / 2]
        query_heads: int,
        eps: float,
        intermediate: int,
        max_rows: int,
    ) -> None:
        self._kernels = kernels
        self._layout = layout
        self._max_rows = max_rows
        self.vocab, self.hidden = embedding.shape
        refusal = llama_refusal(self.hidden, query_heads, layout)
        if refusal:
            raise ValueError(refusal)
        self._kept: list[torch.Tensor] = []
        cos, sin = (self._keep(t.float()) for t in rope)
        self._positions = len(rope[0])
        self._layers = (_Layer * layout.num_layers)(*(self._pack_layer(w) for w in layers))
        self._model = _Model(
            dtype=_DTYPES[layout.dtype],
            num_layers=layout.num_layers,
            hidden=self.hidden,
            intermediate=intermediate,
            query_heads=query_heads,
            heads=layout.num_kv_heads,
            dim=layout.head_dim,
            vocab=self.vocab,
            max_rows=max_rows,
            page_tokens=layout.page_tokens,
            record_bytes=layout.record_bytes,
            eps=eps,
            scale=layout.head_dim**-0.5,
            layers=self._layers,
            head=self._keep(pack(embedding if head is None else head)),
            embedding=None if head is None else self._keep(embedding),
            norm=self._keep(norm.float()),
            cos=cos,
            sin=sin,
        )
        self._llama: int | None = kernels.library.kvt_llama_new(byref(self._model), kernels.pool)

    def close(self) -> None:
        """Free the step's buffers; before the kernels are closed. No call may follow."""
        if self._llama is not None:
            self._kernels.library.kvt_llama_delete(self._llama)
            self._llama = None

    def _keep(self, t: torch.Tensor) -> int:
        t = t.contiguous()
        self._kept.append(t)
        return t.data_ptr()

    def _pack_layer(self, w: LlamaLayerWeights) -> _Layer:
        down = torch.nn.functional.pad(w.down, (0, -w.down.shape[1] % _LANES))
        return _Layer(
            attention_norm=self._keep(w.attention_norm.float()),
            mlp_norm=self._keep(w.mlp_norm.float()),
            qkv_bias=None if w.qkv_bias is None else self._keep(w.qkv_bias.float()),
            q_norm=None if w.q_norm is None else self._keep(w.q_norm.float()),
            k_norm=None if w.k_norm is None else self._keep(w.k_norm.float()),
            qkv=self._keep(pack(w.qkv)),
            out=self._keep(pack(w.out)),
            gate_up=self._keep(pack(_gate_up(w.gate, w.up))),
            down=self._keep(pack(down)),
        )

    def forward(
        self,
        token_ids: IntArray,  # [rows]
        positions: IntArray,  # [rows]
        plan: StepPlan,
        arena: torch.Tensor,
        logit_rows: IntArray,  # [m]
    ) -> torch.Tensor:
        """Write the rows' K/V into their pages; logits of `logit_rows`, float32 [m, vocab]."""
        rows = len(token_ids)
        self._check(token_ids, positions, logit_rows)
        check_plan(plan, rows, arena, self._layout, 0)
        logits = torch.empty(len(logit_rows), self.vocab, dtype=torch.float32)
        if not rows:
            return logits
        ids, at, wanted = (np.ascontiguousarray(a, np.int32) for a in (token_ids, positions, logit_rows))
        step = _Step(
            rows=rows,
            num_logits=len(logit_rows),
            token_ids=ids.ctypes.data,
            positions=at.ctypes.data,
            plan=_plan(plan),
            arena=arena.data_ptr(),
            frame_bytes=arena.shape[1],
            logit_rows=wanted.ctypes.data,
            logits=logits.data_ptr(),
        )
        assert self._llama is not None, "the model is closed"
        self._kernels.library.kvt_llama_forward(self._llama, byref(step))
        return logits

    def _check(self, token_ids: IntArray, positions: IntArray, logit_rows: IntArray) -> None:
        rows = len(token_ids)
        if rows > self._max_rows or len(logit_rows) > rows or len(positions) != rows:
            raise ValueError(
                f"{rows} rows, {len(positions)} positions and {len(logit_rows)} logit rows in a step of at most"
                f" {self._max_rows}"
            )
        for name, values, limit in (
            ("token ids", token_ids, self.vocab),
            ("positions", positions, self._positions),
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


def _layout(layout: KVLayout, arena: torch.Tensor) -> _Layout:
    return _Layout(
        layout.num_kv_heads, layout.head_dim, layout.page_tokens, arena.shape[1], layout.record_bytes
    )


def _plan(plan: StepPlan) -> _Plan:
    arrays = (plan.starts, plan.lengths, plan.contexts, plan.first_frames, plan.frames)
    assert all(a.dtype == np.int32 and a.flags.c_contiguous for a in arrays)
    return _Plan(plan.num_sequences, *(a.ctypes.data for a in arrays))


def _declare(library: ctypes.CDLL) -> None:
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "kvt_pool_new": (c_void_p, [c_int32]),
        "kvt_pool_delete": (None, [c_void_p]),
        "kvt_attention": (
            None,
            [c_void_p, c_int32, c_void_p, c_void_p, c_void_p, c_int32, c_int32, c_float, c_int32]
            + [c_void_p] * 3,
        ),
        "kvt_linear": (
            None,
            [c_void_p, c_int32, c_void_p, c_int32, c_int32, c_void_p, c_int32, c_void_p, c_void_p],
        ),
        "kvt_write": (None, [c_void_p, c_void_p, c_void_p, c_int32, c_int32, c_void_p, c_void_p]),
        "kvt_llama_new": (c_void_p, [c_void_p, c_void_p]),
        "kvt_llama_forward": (None, [c_void_p, c_void_p]),
        "kvt_llama_delete": (None, [c_void_p]),
        "kvt_sizes": (None, [c_void_p]),
        "kvt_instructions": (ctypes.c_char_p, []),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
