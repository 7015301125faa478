"""The simulated cluster: its requests all end, what it counts is there, and time is what queues and links make of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.cluster.routing.router import Policy
from kvtier.lab.simulation.cluster import Job, Shape, SimRequest, Simulation
from kvtier.lab.simulation.parts import PAGE_TOKENS, Hardware, Link
from kvtier.tier.policy.base import PolicySettings

LRU = PolicySettings(name="lru")
SHAPE = Shape(2, workers_per_node=1, l1_pages=16, l3_pages=32, l4_pages=64, policy=LRU)
PAGE_S = SHAPE.costs.page_s


def request(
    arrival_s: float, first: int, pages: int, parent: int | None = None, output: int = 10
) -> SimRequest:
    """A prompt of whole pages and half a page more."""
    tokens = pages * PAGE_TOKENS + PAGE_TOKENS // 2
    return SimRequest(arrival_s, tuple(range(first, first + pages)), tokens, output, parent)


def played(shape: Shape, requests: list[SimRequest], routing: Policy = "prefix") -> list[Job]:
    """The jobs by number. All that the nodes had to do is done, and their books are right."""
    simulation = Simulation(shape, requests, routing)
    simulation.run()
    for _ in range(10_000):
        simulation.agenda.step()
    for node in simulation.nodes.values():
        node.coordinator.check()
    for worker in simulation.workers:
        worker.l1.check()
        assert (worker.load.queued_tokens, worker.load.sequences, worker.decoding) == (0, 0, 0)
    return sorted(simulation.jobs, key=lambda job: job.number)


def wait_s(job: Job) -> float:
    """To its first token."""
    assert job.first_token_s is not None
    return job.first_token_s - job.arrived_s


def test_a_prompt_that_nothing_has_takes_what_its_pages_cost() -> None:
    (job,) = played(SHAPE, [request(0.0, 0, 8)])

    assert wait_s(job) == pytest.approx(8.5 * SHAPE.costs.recompute_s(8.5 / 2))
    assert sum(job.hits.values()) == 0


def test_what_continues_a_prompt_goes_where_its_pages_are_after_the_answer() -> None:
    first, second = played(SHAPE, [request(0.0, 0, 8, output=100), request(0.0, 0, 10, parent=0)])

    assert first.first_token_s is not None
    assert second.arrived_s == pytest.approx(first.first_token_s + 100 * SHAPE.token_s + SHAPE.think_s)
    assert second.worker is first.worker and second.hits == {"L1": 8}
    assert wait_s(second) < 3 * SHAPE.costs.recompute_s(10)


def test_prompts_wait_for_each_other_and_answers_take_their_share() -> None:
    shape = replace(SHAPE, workers=1)
    share = shape.decode_s / shape.token_s

    # The first one's answer goes on for as long as the second one is computed.
    a, b = played(shape, [request(0.0, 0, 4), request(0.0, 100, 4)])
    alone = wait_s(a)
    assert wait_s(b) == pytest.approx(alone + alone / (1 - share))

    # And here it ends meanwhile.
    _, b = played(shape, [request(0.0, 0, 4, output=2), request(0.0, 100, 4)])
    assert wait_s(b) == pytest.approx(2 * alone + 2 * shape.token_s * share)


@pytest.mark.parametrize("l3_pages", [32, 8])
def test_pages_come_from_the_tiers_below(l3_pages: int) -> None:
    """A prompt pushes the other out of L1; 8 pages of L3 don't hold both."""
    shape = replace(SHAPE, workers=1, l1_pages=8, l3_pages=l3_pages)
    *_, again = played(
        shape, [request(0.0, 0, 6), request(5.0, 100, 8), request(10.0, 200, 8), request(15.0, 0, 6)]
    )

    assert again.hits.get("L1", 0) == 0 and again.cached == 6
    of_l3, of_l4 = again.hits.get("L3", 0), again.hits.get("L4", 0)
    assert of_l3 + of_l4 == 6 and (of_l4 > 0) == (l3_pages == 8)
    load_s = 6 * shape.hardware.l3_s + (shape.hardware.l4_s if of_l4 else 0.0)
    assert again.begun_s - again.arrived_s > 0.99 * load_s


def test_pages_come_from_another_node() -> None:
    """Round robin sends the second turn to the other node, whose exchange fetches what the first one's has."""
    jobs = played(SHAPE, [request(0.0, 0, 8), request(5.0, 0, 8)], "round_robin")

    assert jobs[0].worker is not jobs[1].worker
    assert jobs[1].hits == {"L1": 0, "remote": 8}
    hardware = SHAPE.hardware
    assert (
        8 * hardware.remote_s
        < wait_s(jobs[1])
        < 8 * (hardware.remote_s + hardware.l3_s) + 0.01 + 0.5 * PAGE_S * 2
    )


def test_a_slow_network_is_tried_and_then_left_alone() -> None:
    shape = replace(SHAPE, hardware=Hardware(remote_s=10 * PAGE_S))
    requests = [request(5.0 * n, 100 * (n // 2), 8) for n in range(6)]
    jobs = played(shape, requests, "round_robin")

    assert jobs[1].hits.get("remote", 0) == 8
    assert jobs[5].hits.get("remote", 0) == 0


def test_nothing_is_found_of_a_page_that_the_directory_has_not_heard_of() -> None:
    """The second prompt comes while the first is being computed."""
    a, b = played(SHAPE, [request(0.0, 0, 8), request(0.01, 0, 8)])

    assert a.worker is not b.worker
    assert b.hits.get("remote", 0) == 0


def test_where_pages_are_demoted_they_are_below_once_l1_drops_them() -> None:
    shape = replace(SHAPE, workers=1, l1_pages=8, write="demote")
    *_, again = played(shape, [request(0.0, 0, 8), request(5.0, 100, 8), request(10.0, 0, 8)])

    assert again.cached == 8 and again.hits.get("L1", 0) == 0


def test_a_link_carries_so_many_at_once() -> None:
    link = Link(2)

    assert [link.take(0.0, 1.0) for _ in range(3)] == [1.0, 1.0, 2.0]
    assert link.take(5.0, 1.0) == 6.0


@settings(deadline=None, max_examples=25)
@given(
    workers=st.integers(1, 4),
    routing=st.sampled_from(["prefix", "least_loaded", "round_robin"]),
    write=st.sampled_from(["through", "demote"]),
    policy=st.sampled_from(["lru", "rvi"]),
    prompts=st.lists(
        st.tuples(st.floats(0, 3), st.integers(0, 6), st.integers(0, 12), st.booleans(), st.integers(0, 100)),
        min_size=1,
        max_size=25,
    ),
)
def test_any_requests_end_and_find_no_more_than_was_computed(
    workers: int,
    routing: Policy,
    write: str,
    policy: str,
    prompts: list[tuple[float, int, int, bool, int]],
) -> None:
    """Tiers so small that pages are always on their way somewhere."""
    shape = Shape(
        workers,
        workers_per_node=2,
        l1_pages=12,
        l3_pages=12,
        l4_pages=16,
        policy=PolicySettings(name=policy),
        write="demote" if write == "demote" else "through",
    )
    requests = [
        request(arrival_s, 100 * chain, pages, number - 1 if follows and number else None, output)
        for number, (arrival_s, chain, pages, follows, output) in enumerate(prompts)
    ]

    jobs = played(shape, requests, routing)

    assert [job.number for job in jobs] == list(range(len(requests)))
    computed: set[int] = set()
    for job in sorted(jobs, key=lambda job: job.arrived_s):
        assert job.first_token_s is not None and wait_s(job) > 0
        assert sum(job.hits.values()) == job.cached <= len(job.request.pages)
    for job in sorted(jobs, key=lambda job: job.begun_s):
        assert computed.issuperset(job.request.pages[: job.cached])
        computed.update(job.request.pages)
