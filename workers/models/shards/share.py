"""What one rank of a tensor parallel group computes and stores: its attention heads, its columns of the MLP. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvtier.tier.pages.page import RECORD_ALIGN_BYTES, PageSpec
from kvtier.workers.models.base import ModelShape
from kvtier.workers.models.formats import LayerGroup


@dataclass(frozen=True, slots=True)
class Share:
    """Rank `rank` of `ranks`. Ranks split query heads evenly, and KV heads so that each has those its queries need.

    Where there are fewer KV heads than ranks, ranks side by side hold the same one, and the first of them writes it
    down. Latents (MLA) are whole on all ranks, and rank 0 writes them down.
    """

    rank: int = 0
    ranks: int = 1

    def check(self, shape: ModelShape) -> None:
        """Raise ValueError unless the model can be split so."""
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank {self.rank} is none of {self.ranks}")
        if shape.num_heads % self.ranks:
            raise ValueError(
                f"tensor_parallel {self.ranks} can't split the {shape.num_heads} heads of {shape.architecture}: it must"
                " divide them"
            )
        heads = shape.num_kv_heads
        if not shape.is_latent and heads % self.ranks and self.ranks % heads:
            raise ValueError(
                f"tensor_parallel {self.ranks} can't split the {heads} KV heads of {shape.architecture}: one must"
                " divide the other"
            )

    def heads(self, num_heads: int) -> range:
        """Its query heads of so many."""
        each = num_heads // self.ranks
        return range(self.rank * each, (self.rank + 1) * each)

    def kv_heads(self, num_kv_heads: int) -> range:
        """Its KV heads of so many (of an attention without latents)."""
        first = self.rank * num_kv_heads // self.ranks
        return range(first, first + max(1, num_kv_heads // self.ranks))

    def columns(self, columns: int) -> range:
        """Its part of so many columns."""
        return range(self.rank * columns // self.ranks, (self.rank + 1) * columns // self.ranks)

    def of(self, shape: ModelShape) -> ModelShape:
        """The model as this rank has it."""
        kv_heads = shape.num_kv_heads if shape.is_latent else len(self.kv_heads(shape.num_kv_heads))
        return replace(
            shape,
            num_heads=len(self.heads(shape.num_heads)),
            num_kv_heads=kv_heads,
            intermediate=len(self.columns(shape.intermediate)),
        )

    def stored(self, whole: PageSpec) -> range:
        """Which heads of a whole page lie in this rank's frames."""
        return range(1) if whole.is_latent else self.kv_heads(whole.num_kv_heads)

    def saves(self, whole: PageSpec) -> bool:
        """This rank writes its heads into pages below L1, and not another one that holds the same."""
        if whole.is_latent:
            return self.rank == 0
        return self.ranks <= whole.num_kv_heads or self.rank % (self.ranks // whole.num_kv_heads) == 0


WHOLE = Share()


def share_unit_bytes(own: tuple[LayerGroup, ...], whole: tuple[LayerGroup, ...], whole_unit: int) -> int:
    """Bytes of a unit of a rank's arena in which each page reaches over no more units than the whole page would.

    So frames have the same numbers on all ranks, as in an arena of whole pages with units of `whole_unit` bytes.
    """
    sizes = [
        -(-own_group.specs[format].nbytes // -(-spec.nbytes // whole_unit))
        for own_group, group in zip(own, whole, strict=True)
        for format, spec in group.specs.items()
    ]
    return -(-max(sizes) // RECORD_ALIGN_BYTES) * RECORD_ALIGN_BYTES
