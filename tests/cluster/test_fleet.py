"""Workers come, go and come back, and each count is that of the worker it was told of."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier.cluster.routing.fleet import FIRST_ROWS, Fleet, Load

NAMES = st.integers(0, 3 * FIRST_ROWS).map("w{}".format)


class Workers(RuleBasedStateMachine):
    """A fleet beside a dict of what each worker was told."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet()
        self.loads: dict[str, tuple[Load, list[int]]] = {}
        self.gone: list[tuple[Load, list[int]]] = []

    @rule(first=st.integers(0, 2 * FIRST_ROWS), count=st.integers(1, FIRST_ROWS), node=st.integers(0, 5))
    def come(self, first: int, count: int, node: int) -> None:
        for number in range(first, first + count):
            self.leave(f"w{number}")
            self.loads[f"w{number}"] = (self.fleet.add(f"w{number}", f"n{node}"), [0, 0, 0])

    @rule(name=NAMES)
    def leave(self, name: str) -> None:
        self.fleet.remove(name)
        if name in self.loads:
            self.gone.append(self.loads.pop(name))

    @rule(name=NAMES, queued=st.integers(0, 99), sequences=st.integers(0, 9), chosen=st.integers(0, 9))
    def tell(self, name: str, queued: int, sequences: int, chosen: int) -> None:
        if name in self.loads:
            _tell(self.loads[name], queued, sequences, chosen)

    @rule(data=st.data(), queued=st.integers(0, 99))
    def tell_one_that_is_gone(self, data: st.DataObject, queued: int) -> None:
        if self.gone:
            _tell(data.draw(st.sampled_from(self.gone)), queued, 7, 7)

    @invariant()
    def counts_are_those_told(self) -> None:
        fleet = self.fleet
        assert len(fleet) == len(self.loads) == len(fleet.rows)
        for load, counts in [*self.loads.values(), *self.gone]:
            assert [load.queued_tokens, load.sequences, load.chosen] == counts
        numbers = {name: fleet.node_numbers[load.node_id] for name, (load, _) in self.loads.items()}
        for name, (load, counts) in self.loads.items():
            assert fleet.get(name) is load is fleet[load.row]
            assert fleet.counts[:, load.row].tolist() == counts
            assert fleet.nodes[load.row] == numbers[name] > 0
        assert sorted(load.row for load, _ in self.loads.values()) == fleet.rows.tolist()
        assert len(set(fleet.node_numbers.values())) == len(fleet.node_numbers)
        assert fleet.counts.sum() == sum(sum(counts) for _, counts in self.loads.values())


def _tell(told: tuple[Load, list[int]], *counts: int) -> None:
    load, known = told
    load.queued_tokens, load.sequences, load.chosen = counts
    known[:] = counts


TestWorkers = Workers.TestCase
TestWorkers.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)
