"""Takes what a page in a lent frame is checked by, where its bytes are: a checksum in host memory, a digest on a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import NamedTuple, Protocol

import numpy as np
import torch

from kvtier.tier.l1.arena import Arena
from kvtier.tier.pages.page import PageKey, PageSpec, page_checksum

AT_ONCE = 16  # pages of one size that a GPU digests in one go
MOST_BYTES = (
    16 << 20
)  # ... and their bytes, where that is more than one: the digest takes four times as much meanwhile
SEED = 0x6B767469  # of the multipliers, which all workers of a node must have alike


class FramePage(NamedTuple):
    """A whole page in a frame of one's own arena."""

    frame: int
    key: PageKey
    spec: PageSpec


class PageChecks(Protocol):
    """From any thread. No copy into the pages' frames may be under way."""

    at_once: int  # pages that are best checked in one call, right after they were copied
    are_checksums: bool  # as of an envelope, so that one that is known needn't be taken again

    def take(self, pages: list[FramePage]) -> list[bytes]:
        """16 bytes for each page, of its key, variant, spec and bytes."""


class HostChecks:
    """The checksums that pages have in all tiers, of an arena in host memory."""

    at_once = 1  # while it is in the processor's cache
    are_checksums = True

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def take(self, pages: list[FramePage]) -> list[bytes]:
        """See PageChecks."""
        return [self._checksum(page) for page in pages]

    def _checksum(self, page: FramePage) -> bytes:
        payload = self._arena.host_bytes(page.frame, page.spec.nbytes)
        assert payload is not None, "an arena that isn't host memory"
        return page_checksum(page.key, page.spec.format.value, page.spec.digest, payload)


class DeviceChecks:
    """Digests by torch operations, the same bytes on any device, so that no page comes to the host for its check.

    A page's 32-bit words w_i give two sums mod 2**64 of w_i * m_i, with fixed odd multipliers m_i; their 16 bytes are
    then hashed with the page's names. What changes one word only is always found, any other change but with a chance of
    at most 2**-64, as long as it wasn't made with the multipliers in hand: it is for damage, and for frames that were
    written over, not for an adversary. About twelve times a page's bytes pass through the device's memory, on a stream
    beside the forward's; the multipliers of each size of page stay there, four times its bytes.
    """

    at_once = AT_ONCE
    are_checksums = False

    def __init__(self, arena: torch.Tensor) -> None:
        """`arena`: uint8 [units, unit bytes], of whole words. Raises ValueError."""
        self._unit_words, rest = divmod(arena.shape[1], 4)
        if rest:
            raise ValueError(f"units of {arena.shape[1]} bytes aren't whole words of 4 bytes")
        self._words = arena.view(-1).view(torch.int32)
        self._multipliers: dict[
            int, torch.Tensor
        ] = {}  # by words of a page; as many as there are sizes of pages
        self._stream: torch.cuda.Stream | None = None
        if arena.device.type == "cuda":
            self._stream = torch.cuda.Stream(arena.device)  # type: ignore[no-untyped-call]

    def take(self, pages: list[FramePage]) -> list[bytes]:
        """See PageChecks. The copies into the frames are done: nothing queued on another stream is waited for."""
        taken: list[bytes] = [b""] * len(pages)
        for places in _alike(pages):
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                sums = self._sums([pages[place].frame for place in places], pages[places[0]].spec.nbytes)
                digests = sums.cpu().numpy()
            for place, digest in zip(places, digests, strict=True):
                page = pages[place]
                taken[place] = page_checksum(
                    page.key, page.spec.format.value, page.spec.digest, digest.tobytes()
                )
        return taken

    def _sums(self, frames: list[int], nbytes: int) -> torch.Tensor:
        """int64 [pages, 2]."""
        num_words = nbytes // 4
        starts = [frame * self._unit_words for frame in frames]
        words = torch.stack([self._words[start : start + num_words] for start in starts])
        first, second = self._multipliers_for(num_words)
        return torch.stack([(words * first).sum(1), (words * second).sum(1)], 1)

    def _multipliers_for(self, num_words: int) -> torch.Tensor:
        found = self._multipliers.get(num_words)
        if found is None:
            drawn = np.random.PCG64(SEED).random_raw(2 * num_words) | np.uint64(1)
            found = torch.from_numpy(drawn.view(np.int64)).view(2, num_words).to(self._words.device)
            self._multipliers[num_words] = found
        return found


def page_checks(arena: torch.Tensor) -> PageChecks:
    """The checks of an arena (uint8 [units, unit bytes]). Workers that can open each other's arenas have the same."""
    return HostChecks(Arena(arena)) if arena.device.type == "cpu" else DeviceChecks(arena)


def _alike(pages: list[FramePage]) -> Iterable[list[int]]:
    """Places of pages of one size, as many as are digested in one go."""
    by_size: dict[int, list[int]] = {}
    for place, page in enumerate(pages):
        by_size.setdefault(page.spec.nbytes, []).append(place)
    for nbytes, places in by_size.items():
        count = max(1, MOST_BYTES // nbytes)
        yield from (places[at : at + count] for at in range(0, len(places), count))
