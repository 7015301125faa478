"""A rank's share of pages: where its heads lie in the whole pages of the tiers below, and in its own frames."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvtier.tier.l1.arena import Arena, Fences
from kvtier.tier.pages.page import PageSpec
from kvtier.workers.models.formats import LayerGroup
from kvtier.workers.models.shards.share import Share

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Part:
    """One section's heads in all records: as many runs of `nbytes` in whole pages as in own ones, from these bytes on."""

    nbytes: int
    whole_at: int
    own_at: int


@dataclass(frozen=True, slots=True)
class _Kind:
    whole: PageSpec
    own: PageSpec
    parts: tuple[_Part, ...]
    saves: bool


class RankPages:
    """The frames of one rank. Owned by its runner; calls may come from any thread, two at once not for one frame.

    Pages are named by the digest of their whole spec. A whole payload has all heads, as without tensor parallelism, so
    that its bytes don't depend on the number of ranks: each rank reads and writes the runs of its own heads.
    """

    def __init__(
        self,
        arena: torch.Tensor,
        share: Share,
        own: tuple[LayerGroup, ...],
        whole: tuple[LayerGroup, ...],
        fences: Fences | None = None,
    ) -> None:
        self._arena = Arena(arena, fences)
        self._is_first = share.rank == 0
        self._kinds = {
            spec.digest: _kind(share, spec, mine.specs[format])
            for mine, group in zip(own, whole, strict=True)
            for format, spec in group.specs.items()
        }
        self._staging = threading.local()  # of arenas on a GPU: a share in one piece, for one transfer

    def spec(self, digest: bytes) -> PageSpec:
        """The whole spec of this name. Raises KeyError."""
        return self._kinds[digest].whole

    def copy_in(self, frame: int, payload: memoryview, digest: bytes) -> None:
        """Fill a frame from a whole page."""
        kind = self._kinds[digest]
        own = self._host(frame, kind)
        _copy_runs(np.frombuffer(payload, np.uint8), own, kind, to_own=True)
        if self._arena.host_bytes(frame, kind.own.nbytes) is None:
            self._arena.copy_in(frame, own.data)

    def copy_out(self, frame: int, payload: memoryview, digest: bytes, tokens: int) -> None:
        """Write what this rank saves of a page with so many tokens into a whole page; rank 0 writes its padding too."""
        kind = self._kinds[digest]
        if tokens < kind.own.page_tokens:
            self._arena.zero_tail(frame, tokens, kind.own)
        whole = np.frombuffer(payload, np.uint8)
        if self._is_first:
            used = kind.whole.sections[-1].end
            whole.reshape(kind.whole.num_layers, kind.whole.record_bytes)[:, used:] = 0
        if not kind.saves:
            return
        own = self._host(frame, kind)
        if self._arena.host_bytes(frame, kind.own.nbytes) is None:
            self._arena.copy_out(frame, own.data)
        _copy_runs(whole, own, kind, to_own=False)

    def copy_head(self, source: int, target: int, tokens: int, digest: bytes) -> None:
        """See Arena.copy_head."""
        self._arena.copy_head(source, target, tokens, self._kinds[digest].own)

    def move(self, source: int, target: int, units: int) -> None:
        """Copy so many units over others."""
        self._arena.move(source, target, units * self._arena.unit_bytes)

    def _host(self, frame: int, kind: _Kind) -> Bytes:
        """The frame's bytes, or pinned memory for them that this thread has."""
        nbytes = kind.own.nbytes
        view = self._arena.host_bytes(frame, nbytes)
        if view is not None:
            return np.frombuffer(view, np.uint8)
        staging: torch.Tensor | None = getattr(self._staging, "bytes", None)
        if staging is None or staging.numel() < nbytes:
            staging = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            self._staging.bytes = staging
        found: Bytes = staging.numpy()[:nbytes]
        return found


def _kind(share: Share, whole: PageSpec, own: PageSpec) -> _Kind:
    heads = share.stored(whole)
    parts = tuple(
        _Part(
            nbytes=len(heads) * of_whole.tokens * of_whole.row_bytes,
            whole_at=of_whole.offset + heads.start * of_whole.tokens * of_whole.row_bytes,
            own_at=of_own.offset,
        )
        for of_whole, of_own in zip(whole.sections, own.sections, strict=True)
        if of_whole.row_bytes
    )
    return _Kind(whole, own, parts, share.saves(whole))


def _copy_runs(whole: Bytes, own: Bytes, kind: _Kind, *, to_own: bool) -> None:
    layers = kind.whole.num_layers
    of_whole = whole.reshape(layers, kind.whole.record_bytes)
    of_own = own.reshape(layers, kind.own.record_bytes)
    for part in kind.parts:
        there = of_whole[:, part.whole_at : part.whole_at + part.nbytes]
        here = of_own[:, part.own_at : part.own_at + part.nbytes]
        np.copyto(*((here, there) if to_own else (there, here)))
