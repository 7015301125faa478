"""Locations of a prompt's pages as the directory has them, for routing. Pure."""

from __future__ import annotations

from typing import NamedTuple


class Held(NamedTuple):
    """Something says that it has the first `pages` pages of a prompt: a node in one of its tiers, or a worker in its L1.

    `worker_id` is "" for a node's own tiers, `tier` the name of a TierName, and `address` the HOST:PORT of the node's
    exchange, "" where there is none. The directory names each of a node's tiers with all that the faster ones have
    beside it: L4's `pages` are what L2, L3 and L4 have together. A tuple, since a request may have hundreds of them.
    """

    node_id: str
    worker_id: str
    tier: str
    address: str
    pages: int
