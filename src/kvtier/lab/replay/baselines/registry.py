"""Baseline caches by name: published policies, the optimum and the cache without a bound. Pure."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.lab.replay.baselines.arc import Arc
from kvtier.lab.replay.baselines.belady import Belady, Future, Requests
from kvtier.lab.replay.baselines.cache import BaselineCache
from kvtier.lab.replay.baselines.fifo import Fifo
from kvtier.lab.replay.baselines.gdsf import Gdsf
from kvtier.lab.replay.baselines.infinite import Infinite
from kvtier.lab.replay.baselines.length_aware import LengthAware
from kvtier.lab.replay.baselines.length_first import LengthFirst
from kvtier.lab.replay.baselines.lfu import Lfu
from kvtier.lab.replay.baselines.lirs import Lirs
from kvtier.lab.replay.baselines.s3fifo import S3Fifo
from kvtier.lab.replay.baselines.sieve import Sieve
from kvtier.lab.replay.baselines.slru import Slru
from kvtier.lab.replay.baselines.workload_aware import WorkloadAware

_ONLINE: dict[str, Callable[[int], BaselineCache]] = {
    "fifo": Fifo,
    "lfu": Lfu,
    "length_first": LengthFirst,
    "length_aware": LengthAware,
    "slru": Slru,
    "arc": Arc,
    "s3fifo": S3Fifo,
    "sieve": Sieve,
    "gdsf": Gdsf,
    "lirs": Lirs,
    "wa": WorkloadAware,
}
BASELINES = (*_ONLINE, "belady", "infinite")


def make_baseline(
    name: str, capacity: int, requests: Requests | None = None, *, future: Future | None = None
) -> BaselineCache:
    """An empty cache of `capacity` pages, of which `infinite` takes no notice.

    `belady` needs the `requests` it will get, or their `future`, which several caches may share. Raises ValueError.
    """
    if name == "infinite":
        return Infinite()
    if name == "belady":
        if future is None and requests is not None:
            future = Future.of(requests)
        if future is None:
            raise ValueError(
                "belady needs the requests of the whole trace, or their future; give it one of them"
            )
        return Belady(capacity, future)
    if name not in _ONLINE:
        raise ValueError(f"no baseline is called {name!r}; there are {', '.join(BASELINES)}")
    return _ONLINE[name](capacity)
