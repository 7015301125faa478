"""What a worker's L1 does depends on what it is told and on nothing else: the same calls in another process end alike."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from random import Random

from l1_worlds import POLICIES, drive, workload

KITS = Path(__file__).parents[1] / "kits"


def lives() -> str:
    """What became of some small workers of all kinds."""
    told: list[object] = []
    for seed in range(12):
        rng = Random(seed)
        life = workload(rng, rng.choice(POLICIES))
        drive(life, meddle=True)
        made, table = life.made, life.made.table
        counts = table.evicted_pages, table.dropped_pages, table.converted_pages, made.scheduler.preemptions
        pages = sorted((record.key.hex(), record.frame, record.save.value) for record, _ in table.cached())
        told.append(
            (seed, made.now, made.computed_rows, made.moves, counts, pages, sorted(made.outputs.items()))
        )
    return repr(told)


def test_no_decision_depends_on_the_order_of_a_set() -> None:
    """Texts and bytes hash otherwise in each process."""
    told = [
        subprocess.run(
            [sys.executable, "-c", "import test_determinism; print(test_determinism.lives())"],
            env={
                **os.environ,
                "PYTHONHASHSEED": hash_seed,
                "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)]),
            },
            capture_output=True,
            text=True,
            check=True,
            cwd=KITS,
        ).stdout
        for hash_seed in ("1", "2")
    ]

    assert told[0] == told[1] and len(told[0]) > 10_000
