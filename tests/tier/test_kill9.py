"""A writer of L4 is killed at random moments, again and again over the same folder."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tier_pages import page_key, read_page, used_on_disk
from waiting import cpu_s

from kvtier.tier.pages.page import slot_bytes
from kvtier.tier.stores.ssd.layout import Store
from kvtier.tier.stores.ssd.store import open_ssd

pytestmark = pytest.mark.slow

KITS = Path(__file__).parents[1] / "kits"
PAGE_BYTES = 100 * 1024 + 256
CAPACITY = 12 * 2**20


class Killed:
    """What a killed writer had said about the pages of a folder."""

    def __init__(self) -> None:
        self.present: set[int] = set()  # recorded, and no drop was begun
        self.doubtful: set[int] = set()  # begun to be dropped, or written without a word yet
        self.next = 0

    def hear(self, line: str) -> None:
        number = int(line[1:])
        if line[0] == "+":
            self.present.add(number)
            self.next = max(self.next, number + 1)
        else:
            self.present.discard(number)
            self.doubtful.add(number)


@pytest.mark.parametrize(("store", "kills"), [("slab", 30), ("lmdb", 10)])
def test_a_killed_writer_leaves_every_page_whole_or_absent(tmp_path: Path, store: Store, kills: int) -> None:
    """And it loses nothing that was committed, and to open the folder takes less than 5 s of a core."""
    rng = random.Random(9)
    heard = Killed()
    for _ in range(kills):
        run_writer_and_kill_it(tmp_path / "l4", store, heard, rng)
        unheard = range(heard.next, heard.next + 200)
        numbers = {page_key(n): n for n in [*heard.present, *heard.doubtful, *unheard]}

        before_s = cpu_s()
        tier = open_ssd(tmp_path / "l4", CAPACITY, store, slot_bytes(PAGE_BYTES))
        assert cpu_s() - before_s < 5.0

        found = {numbers[entry.envelope.key]: entry.place for entry in tier.recovered}
        for number, place in found.items():
            read_page(tier, place, number, PAGE_BYTES)
        assert heard.present <= found.keys()
        assert tier.notes == []
        tier.allocator.check()
        assert used_on_disk(tmp_path / "l4") <= CAPACITY
        tier.close()

        heard.present = set(found)
        heard.doubtful.clear()
        heard.next = max([heard.next - 1, *found]) + 1
    assert len(heard.present) > 20


def run_writer_and_kill_it(folder: Path, store: Store, heard: Killed, rng: random.Random) -> None:
    writer = subprocess.Popen(
        [
            sys.executable,
            KITS / "tier_writer.py",
            folder,
            str(CAPACITY),
            store,
            str(PAGE_BYTES),
            str(heard.next),
        ],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(KITS), "OMP_NUM_THREADS": "1"},
    )
    assert writer.stdout is not None
    with writer, writer.stdout as said:
        assert said.readline() == "ready\n"
        for _ in range(rng.randrange(150)):
            heard.hear(said.readline())
        time.sleep(rng.uniform(0, 0.005))  # so that the kill isn't tied to what was just said
        writer.kill()
        for line in said:
            if line.endswith("\n"):
                heard.hear(line)
