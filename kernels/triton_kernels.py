"""The Triton kernels as one object with the methods of ops.Kernels, for one GPU (or the interpreter)."""

from __future__ import annotations

import torch

from kvtier.kernels.gqa import PagedAttention
from kvtier.kernels.mla import LatentAttention
from kvtier.kernels.variants import Target
from kvtier.kernels.write import PageWriter

PROGRAMS_PER_UNIT = 4  # so many fill a multiprocessor: what fits of the decode kernels beside each other
INTERPRETED_PROGRAMS = 8  # enough that sequences are split
INVARIANT_SPLIT_TOKENS = 1024  # more: fewer partial results; less: short batches fill the device


class TritonKernels:
    """Owned by one worker; calls are queued on the current stream. See ops.Kernels for the methods.

    `invariant`: a row's attention depends on its own keys alone, bit for bit, at the price of uneven splits.
    """

    def __init__(self, device: torch.device, invariant: bool = False) -> None:
        """Raises ValueError for a device that no kernel is made for."""
        target = target_of(device)
        programs = INTERPRETED_PROGRAMS
        if device.type == "cuda":
            programs = PROGRAMS_PER_UNIT * torch.cuda.get_device_properties(device).multi_processor_count
        split = INVARIANT_SPLIT_TOKENS if invariant else 0
        attention, latent, writer = (
            PagedAttention(target, programs, split),
            LatentAttention(target, programs, split),
            PageWriter(),
        )
        self.name = f"triton {target}"
        self.invariant = invariant
        self.write_kv = writer.write_kv
        self.paged_attention = attention.paged_attention
        self.write_latents = writer.write_latents
        self.latent_attention = latent.latent_attention
        self.read_latents = latent.read_latents
        self.dense_attention = latent.dense_attention
        self.convert_pages = writer.convert_pages
        # What these keep of a plan on the device, for steps that replay a captured graph.
        self.tables = (*attention.tables, *latent.tables, *writer.tables)

    def close(self) -> None:
        """See Kernels."""


def target_of(device: torch.device) -> Target:
    """The target whose kernels a device runs; the interpreter's are sm_90's. Raises ValueError for one there is none for."""
    if device.type == "cpu":
        return "sm_90"
    if torch.version.hip is not None:
        name = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
        if name == "gfx942":
            return "gfx942"
        raise ValueError(
            f"no kernels for {name}; there are some for gfx942 and for NVIDIA GPUs from sm_80 on"
        )
    major, minor = torch.cuda.get_device_capability(device)
    target = cuda_target(major, minor)
    if target is None:
        raise ValueError(f"no kernels for sm_{major}{minor}; there are some for sm_80 and newer GPUs")
    return target


def cuda_target(major: int, minor: int) -> Target | None:
    """The target for an NVIDIA GPU of this compute capability: one of its architecture, and no more shared memory than it has."""
    if major == 8:
        # 8.7 (Orin) has as much shared memory as 8.0; kernels for 8.0 run on it.
        return "sm_89" if minor == 9 else "sm_86" if minor in (6, 8) else "sm_80"
    targets: dict[int, Target] = {9: "sm_90", 10: "sm_100", 12: "sm_120"}
    return targets.get(major)
