"""Which deaths the kernel's count of its kills explains."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtier.cluster.health.memory_kills import MemoryKills, memory_sentence
from kvtier.cluster.health.memory_watch import MemoryWatch


def test_a_kill_explains_one_death_that_follows_it() -> None:
    kills = MemoryKills(3)
    kills.count(4, now=0.0)

    assert [kills.explains(), kills.explains()] == [True, False]


def test_kills_before_the_start_and_kills_long_ago_explain_nothing() -> None:
    kills = MemoryKills(3)
    kills.count(3, now=0.0)
    assert not kills.explains()

    kills.count(4, now=1.0)
    kills.count(4, now=100.0)

    assert not kills.explains()


def test_where_the_kernel_does_not_say_nothing_is_explained() -> None:
    kills = MemoryKills(None)
    kills.count(7, now=0.0)
    assert not kills.explains()
    kills.count(8, now=1.0)
    kills.count(None, now=2.0)
    kills.count(20, now=3.0)

    assert [kills.explains(), kills.explains()] == [True, False]


@given(steps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=20))
def test_no_more_deaths_are_explained_than_there_were_kills(steps: list[tuple[int, int]]) -> None:
    kills, counted, explained = MemoryKills(0), 0, 0
    for now, (more, deaths) in enumerate(steps):
        counted += more
        kills.count(counted, float(now))
        explained += sum(kills.explains() for _ in range(deaths))

    assert explained <= counted


def test_a_death_for_memory_names_the_limit_and_what_to_lower() -> None:
    counts = iter([5, 6, 6])
    watch = MemoryWatch(lambda: next(counts))

    reason = watch.reason()

    assert reason.startswith("the kernel killed it for memory (") and "tiers.l1.bytes" in reason
    assert watch.reason() == ""
    assert "the limit of 1.0 GiB at /sys/fs/cgroup/x" in memory_sentence(2**30, "/sys/fs/cgroup/x")
    assert "the machine's 2.0 GiB" in memory_sentence(2**31, "")
