"""Sums a tensor over the ranks of a group: gloo between processes on CPUs, NCCL where each rank has a GPU of its own.

These sums, inside a forward, are all that ranks say to each other: what to do is never negotiated.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from kvtier.workers.models.shards.share import Share

Reduce = Callable[[torch.Tensor], torch.Tensor]  # the sum over all ranks, which may take the tensor's place


def alone(x: torch.Tensor) -> torch.Tensor:
    """The sum over one rank."""
    return x


class Collective:
    """One rank's end of the group's sums. Calls must be the same, in the same order, on all ranks; from one thread."""

    def __init__(self, share: Share, store: str, device: torch.device, timeout_s: float) -> None:
        """Meet the other ranks over the file `store`, in a folder of this user. Blocks; raises RuntimeError when they
        don't come in `timeout_s`, which is also the longest that a sum waits for them.
        """
        meeting = dist.FileStore(store, share.ranks)  # type: ignore[attr-defined]  # it exports it without saying so
        timeout = timedelta(seconds=timeout_s)
        meeting.set_timeout(timeout)
        self._is_nccl = device.type == "cuda" and torch.cuda.device_count() >= share.ranks
        self._group: Any = (_nccl if self._is_nccl else _gloo)(meeting, share, timeout)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, in x. Raises RuntimeError when a rank is gone."""
        x = x.contiguous()
        self._group.allreduce([x]).wait()
        return x

    def abort(self) -> None:
        """Let nothing wait in a sum of GPUs any more; gloo's end with the other ranks' processes. From any thread."""
        if self._is_nccl:
            self._group.abort()


def _gloo(meeting: Any, share: Share, timeout: timedelta) -> Any:
    backend: Any = dist.ProcessGroupGloo
    options = backend._Options()
    # A group lies on one machine: its traffic never needs to leave it, nor a name that resolves.
    options._devices = [backend.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    return backend(meeting, share.rank, share.ranks, options)


def _nccl(meeting: Any, share: Share, timeout: timedelta) -> Any:
    backend: Any = dist.ProcessGroupNCCL
    options = backend.Options()
    options._timeout = timeout
    return backend(meeting, share.rank, share.ranks, options)
