"""Tries every fault again and again with random timing, and says how often the law held: `make chaos`.

A run is bounded by its rounds and its minutes, and is repeated by its seed. What happens at which moment is up to the
machine, so a seed gives the same faults and requests, and not the same run.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "kits")]

from chaos_deployment import Deployment, two_nodes
from chaos_deployments import OWN_FAULTS, OwnFault
from chaos_faults import FAULTS, Fault
from chaos_load import Reference, reference
from chaos_root import Unable
from chaos_scene import Scene, until_hit
from tiny_models import make_tiny_llama

BEGIN, END = "<!-- rows: make chaos -->", "<!-- end of rows -->"
LOG_LINES = 40  # of the supervisor's, where the law was broken
TABLE = ["| fault | what the user sees | times tried |", "|---|---|---|"]
ROW = re.compile(r"\| (?P<name>[^|]+) \| [^|]+ \| (?P<hit>\d+)(?: \(and (?P<missed>\d+) not in time\))? \|")
SEEN = {fault.name: fault.seen for fault in (*FAULTS, *OWN_FAULTS)}


@dataclass
class Tally:
    """How often each fault was tried, and hit what it is meant for."""

    tried: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)  # of these, too early or too late
    broken: dict[str, str] = field(default_factory=dict)  # the law, by fault: how

    def count(self, name: str, make: Callable[[int], None]) -> str:
        """Make a fault until it hits; what came of it, in words."""
        said = "holds"
        try:
            missed = until_hit(make)
        except Unable as unable:
            return f"not tried: {unable}"
        except AssertionError as error:
            self.broken[name] = said = f"BROKEN: {error}"
        else:
            self.missed[name] += len(missed)
            self.tried[name] += len(missed)
            said += f", and held when it came at no good moment ({'; '.join(missed)})" if missed else ""
        self.tried[name] += 1
        return said

    def rows(self) -> list[str]:
        """The table of docs/faults.md."""
        return [*TABLE, *(f"| {name} | {seen} | {self._told(name)} |" for name, seen in SEEN.items())]

    def add(self, rows: Iterable[str]) -> None:
        """What a table of an earlier run says too; of faults that there are no more, nothing."""
        for row in rows:
            match = ROW.fullmatch(row)
            if match and match["name"] in SEEN:
                missed = int(match["missed"] or 0)
                self.tried[match["name"]] += int(match["hit"]) + missed
                self.missed[match["name"]] += missed

    def _told(self, name: str) -> str:
        hit = self.tried[name] - self.missed[name]
        return f"{hit}" + (f" (and {self.missed[name]} not in time)" if self.missed[name] else "")


class Run:
    """One run. The deployment of two nodes is there from the first fault that needs it to the end."""

    def __init__(self, seed: int, minutes: float, only: str) -> None:
        self._rng = random.Random(seed)
        self._ends = time.monotonic() + 60 * minutes
        self._only = only
        self.tally = Tally()

    def go(self, rounds: int) -> None:
        """At most so many rounds; none is begun when the time is up."""
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-faults-")))
            model = folder / "model"
            model.mkdir()
            make_tiny_llama(model)
            right = stack.enter_context(reference(model))
            shared: list[Deployment] = []
            for number in range(rounds):
                for name, make in self._shuffled(stack, shared, folder, model, right):
                    if time.monotonic() > self._ends or self.tally.broken:
                        return
                    self._try(name, make, number)
                    if self.tally.broken and shared:
                        print("\n".join(shared[0].log.splitlines()[-LOG_LINES:]), file=sys.stderr)

    def _shuffled(
        self, stack: ExitStack, shared: list[Deployment], folder: Path, model: Path, right: Reference
    ) -> Iterator[tuple[str, Callable[[random.Random, int], None]]]:
        for fault in self._rng.sample([*FAULTS, *OWN_FAULTS], len(FAULTS) + len(OWN_FAULTS)):
            if not re.search(self._only, fault.name):
                continue
            if isinstance(fault, OwnFault):
                yield fault.name, partial(_alone, fault, folder, model, right)
                continue
            if not shared:
                shared.append(stack.enter_context(two_nodes(folder / "two", model)))
            yield fault.name, partial(_on, fault, shared[0], right)

    def _try(self, name: str, make: Callable[[random.Random, int], None], number: int) -> None:
        rng = random.Random(self._rng.randrange(2**32))
        began = time.monotonic()
        said = self.tally.count(name, partial(make, rng))
        print(f"round {number + 1}: {name}: {said} ({time.monotonic() - began:.0f} s)", flush=True)


def _on(fault: Fault, there: Deployment, right: Reference, rng: random.Random, number: int) -> None:
    fault.make(Scene(there, right, rng))


def _alone(
    fault: OwnFault, folder: Path, model: Path, right: Reference, rng: random.Random, number: int
) -> None:
    fault.make(Path(tempfile.mkdtemp(dir=folder)), model, right, rng)


def report(file: Path, tally: Tally) -> None:
    """Add a run's counts to the table of a document."""
    head, _, rest = file.read_text().partition(BEGIN)
    rows, _, tail = rest.partition(END)
    tally.add(rows.splitlines())
    file.write_text("\n".join([head + BEGIN, *tally.rows(), END + tail]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="of all choices; default: a new one")
    parser.add_argument("--rounds", type=int, default=3, help="each tries every fault once")
    parser.add_argument("--minutes", type=float, default=60.0, help="no fault is begun after that")
    parser.add_argument("--only", default="", help="faults whose name has this pattern in it")
    parser.add_argument("--report", type=Path, help="a document to whose table the counts are added")
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if given.seed is None else given.seed
    again = f"make chaos CHAOS_SEED={seed} CHAOS_ROUNDS={given.rounds}"
    print(f"seed {seed}; once more: {again}", flush=True)
    run = Run(seed, given.minutes, given.only)
    run.go(given.rounds)
    print("\n".join(["", *run.tally.rows()]))
    for name, how in run.tally.broken.items():
        print(f"\nthe law does not hold when {name}: {how}\nonce more: {again}", file=sys.stderr)
    if given.report and not run.tally.broken:
        report(given.report, run.tally)
    return 1 if run.tally.broken else 0


if __name__ == "__main__":
    sys.exit(main())
