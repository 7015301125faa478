"""Since when a part is as it is."""

from __future__ import annotations

from kvtier.cluster.gateway.owners.status import Condition
from kvtier.cluster.gateway.ports import DEAD, HEALTHY, UNHEALTHY


def test_a_part_is_healthy_since_it_began_however_often_it_is_looked_at() -> None:
    condition = Condition(5.0)

    assert [condition.is_now(HEALTHY, now) for now in (6.0, 7.0)] == [5.0, 5.0]


def test_each_change_counts_from_the_look_that_saw_it() -> None:
    condition = Condition(5.0)
    seen = [(UNHEALTHY, 6.0), (UNHEALTHY, 7.0), (HEALTHY, 8.0), (DEAD, 9.0), (DEAD, 10.0)]

    assert [condition.is_now(health, now) for health, now in seen] == [6.0, 6.0, 8.0, 9.0, 9.0]
