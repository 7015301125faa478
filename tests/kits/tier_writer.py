"""Writes, records and drops pages in an L4 folder until it is killed. Run by test_kill9.py.

Says `+n` when page n's record is committed, `-n` before its drop is, one line each.
"""

from __future__ import annotations

import sys
from collections import deque
from pathlib import Path
from typing import cast

from tier_pages import VARIANT, entry_of, page_key, write_page

from kvtier.tier.pages.page import slot_bytes
from kvtier.tier.stores.base import CatalogueEntry, Place
from kvtier.tier.stores.ssd.layout import Store
from kvtier.tier.stores.ssd.store import open_ssd

BATCH = 4


def main(folder: Path, capacity_bytes: int, store: Store, page_bytes: int, first: int) -> None:
    tier = open_ssd(folder, capacity_bytes, store, slot_bytes(page_bytes))
    held: deque[tuple[bytes, Place]] = deque((entry.envelope.key, entry.place) for entry in tier.recovered)
    numbers = {page_key(n): n for n in range(first)}
    say("ready")
    number = first
    while True:
        puts: list[CatalogueEntry] = []
        while len(puts) < BATCH:
            place = tier.allocator.alloc(slot_bytes(page_bytes))
            if place is None:
                drop_oldest(tier, held, numbers)
                continue
            write_page(tier, place, number, page_bytes)
            puts.append(entry_of(number, place, page_bytes))
            numbers[page_key(number)] = number
            number += 1
        tier.commit(puts)
        for entry in puts:
            held.append((entry.envelope.key, entry.place))
            say(f"+{numbers[entry.envelope.key]}")


def drop_oldest(tier, held, numbers) -> None:  # type: ignore[no-untyped-def]
    dropped = [held.popleft() for _ in range(min(BATCH, len(held)))]
    for key, _ in dropped:
        say(f"-{numbers[key]}")
    tier.commit([], [(key, VARIANT) for key, _ in dropped])
    for _, place in dropped:
        tier.allocator.free(place)


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    folder, capacity_bytes, store, page_bytes, first = sys.argv[1:]
    main(Path(folder), int(capacity_bytes), cast(Store, store), int(page_bytes), int(first))
