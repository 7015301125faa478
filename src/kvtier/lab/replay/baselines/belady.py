"""Belady's optimum: what is used again last leaves first, which only a replay can know. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier.lab.replay.baselines.cache import Pages
from kvtier.lab.replay.baselines.ranked import MAX_MAJOR, RankedCache
from kvtier.tier.policy.base import Use


class Requests(Protocol):
    """A trace's requests, in the order of their times."""

    def __len__(self) -> int: ...

    def pages(self, request: int) -> Pages:
        """Page ids of its chain, head first."""


@dataclass(frozen=True, slots=True)
class Future:
    """Of every page of every request of a trace, the number of the request that uses it next.

    `starts[i]:starts[i + 1]` are request i's places in `next_use`, head first; of a page not used again `next_use` is
    the number of requests.
    """

    starts: npt.NDArray[np.int64]  # [requests + 1]
    next_use: npt.NDArray[np.int64]  # [references]

    @staticmethod
    def of(requests: Requests) -> Future:
        """What a whole trace tells; takes about 50 bytes a reference while it works."""
        chains = [requests.pages(request) for request in range(len(requests))]
        starts = np.concatenate([[0], np.cumsum([chain.size for chain in chains], dtype=np.int64)])
        pages = np.concatenate([*chains, np.empty(0, np.int64)])
        number = np.repeat(np.arange(len(chains)), np.diff(starts))
        by_page = np.argsort(pages, kind="stable")
        again = pages[by_page[1:]] == pages[by_page[:-1]]
        next_use = np.full(pages.size, len(chains))
        next_use[by_page[:-1][again]] = number[by_page[1:][again]]
        return Future(starts, next_use)

    def __len__(self) -> int:
        return self.starts.size - 1


class Belady(RankedCache):
    """MIN (L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal, 1966),
    with bypass: a new page may leave at once. The most hits that any cache of whole chains can have, for who uses a page
    uses its parent. Must be given the trace's requests in their order, each exactly as `future` knows it.
    """

    name = "belady"

    def __init__(self, capacity: int, future: Future) -> None:
        super().__init__(capacity)
        if len(future) > MAX_MAJOR:
            raise ValueError(
                f"belady can look over {MAX_MAJOR} requests, the trace has {len(future)}; cut it"
            )
        self._future = future

    def request(self, pages: Pages, use: Use, now: float) -> int:
        i, starts = self._requests, self._future.starts
        if i == len(self._future) or pages.size != starts[i + 1] - starts[i]:
            raise ValueError(f"request {i} with {pages.size} pages isn't the one that belady's future holds")
        return super().request(pages, use, now)

    def _ranks(self, order: Pages, use: Use) -> npt.NDArray[np.int64]:
        i, starts = self._requests, self._future.starts
        next_use = self._future.next_use[starts[i] : starts[i + 1]][::-1]
        return self._by_touch(len(self._future) - next_use)
