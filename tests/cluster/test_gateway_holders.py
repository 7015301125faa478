"""Hints of the directory: whose pages are asked for, who is told of them, and what a bad directory costs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from gateway_kit import Served, echo_info, serving
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cli.client import completion, connect
from kvtier.cluster.directory.locations import Held
from kvtier.cluster.gateway.owners import locations as gateway_holders
from kvtier.cluster.gateway.owners.locations import (
    FAILURES,
    KEY_BYTES,
    MOST_PAUSE_S,
    Addresses,
    Holders,
)
from kvtier.cluster.gateway.ports import OwnerDown
from kvtier.tier.pages.identity import page_keys, root_key, tenant_salt
from kvtier.tier.transport.peer_health import Breaker
from kvtier.workers.requests.api import EngineRequest, WorkerInfo

HINT = Held("n1", "", "L3", "peer:7", 2)


class Directory:
    """Answers what it is told to, and remembers what it was asked."""

    def __init__(self, answer: Callable[[], Awaitable[Sequence[Held]]]) -> None:
        self.asked: list[bytes] = []
        self.answer = answer

    async def lookup(self, keys: bytes) -> Sequence[Held]:
        self.asked.append(keys)
        return await self.answer()


def says(*held: Held) -> Directory:
    async def answer() -> Sequence[Held]:
        return held

    return Directory(answer)


def submitted(served: Served) -> list[EngineRequest]:
    return [request for worker in served.workers for request in worker.submitted]


def test_the_directory_is_asked_by_the_keys_that_workers_use_and_the_worker_is_told_who_has_more() -> None:
    directory = says(HINT)
    prompt = list(range(11))
    with serving(workers=2, directory=directory) as served, connect(served.endpoint) as client:
        completion(client.generate(prompt, max_tokens=1, tenant="acme"))
        [request] = submitted(served)

    keys = page_keys(
        root_key(echo_info().root_fields), tenant_salt("acme", "salt"), np.array(prompt, np.int32), 4
    )
    assert len(keys) == 2, "full pages only"
    assert directory.asked == [b"".join(key[:KEY_BYTES] for key in keys)]
    assert request.remotes == (("n1", "peer:7", 2),)


def test_a_prompt_goes_to_the_worker_that_has_its_pages() -> None:
    infos = [echo_info(f"w{i}", node_id=f"n{i}") for i in range(3)]
    directory = says(Held("n2", "w2", "L1", "", 40))
    with serving(infos=infos, directory=directory) as served, connect(served.endpoint) as client:
        took = {completion(client.generate([1] * 200, max_tokens=1))["worker"] for _ in range(5)}

    assert took == {"w2"}


@pytest.mark.parametrize(
    ("options", "window"),
    [({"no_cache": True}, 0), ({"lossy": True}, 0), ({"window": 8}, 0), ({}, 8)],
    ids=["no cache", "lossy", "window", "configured window"],
)
def test_what_goes_by_other_keys_is_not_asked_for(options: dict[str, bool | int], window: int) -> None:
    directory = says(HINT)
    with serving(workers=2, directory=directory, window=window) as served, connect(served.endpoint) as client:
        completion(client.generate([1] * 20, max_tokens=1, **options))  # type: ignore[arg-type]

    assert directory.asked == []


def test_a_prompt_without_a_whole_page_is_not_asked_for() -> None:
    directory = says(HINT)
    with serving(workers=2, directory=directory) as served, connect(served.endpoint) as client:
        completion(client.generate([1, 2, 3], max_tokens=1))

    assert directory.asked == []


def test_a_long_prompts_keys_are_made_too() -> None:
    directory = says()
    with (
        serving(workers=2, max_context=9000, directory=directory, infos=[_long("w0"), _long("w1")]) as served,
        connect(served.endpoint) as client,
    ):
        completion(client.generate([1] * 8000, max_tokens=1))

    assert [len(asked) for asked in directory.asked] == [2000 * KEY_BYTES]


def _long(name: str) -> WorkerInfo:
    return replace(echo_info(name), max_context=9000)


@pytest.mark.parametrize("how", ["dead", "silent"])
def test_a_directory_that_does_not_answer_costs_hints_and_then_nothing(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer() -> Sequence[Held]:
        if how == "dead":
            raise OwnerDown("its process ended")
        await asyncio.Event().wait()
        return []

    directory = Directory(answer)
    now = 0.0
    holders = Holders(directory, lambda: now)

    async def lookups(times: int) -> list[list[Held]]:
        return [await holders.lookup([b"k" * 32]) for _ in range(times)]

    assert asyncio.run(lookups(FAILURES + 5)) == [[]] * (FAILURES + 5)
    assert len(directory.asked) == FAILURES
    assert (holders.lookups, holders.failures, holders.skipped) == (FAILURES, FAILURES, 5)
    assert [record.message for record in caplog.records if "asked no more" in record.message] != []
    assert len(caplog.records) == 1

    # After a pause it is tried once; when it answers, it is asked as before.
    now = gateway_holders.PAUSE_S
    asyncio.run(lookups(3))
    assert len(directory.asked) == FAILURES + 1
    now += 2 * gateway_holders.PAUSE_S
    directory.answer = says(HINT).answer
    assert asyncio.run(lookups(2)) == [[HINT], [HINT]]
    assert "answers again" in caplog.text


def test_an_exchange_that_was_dropped_while_the_directory_was_asked_is_not_told_of() -> None:
    """The answer of a directory that had an exchange's address brought it back after the exchange had died."""
    served: Served

    async def answer() -> Sequence[Held]:
        served.core.addresses.drop("n1")
        return [HINT]

    with serving(workers=2, directory=Directory(answer)) as served, connect(served.endpoint) as client:
        served.call(served.core.addresses.attach, "n1", HINT.address)
        completion(client.generate(list(range(11)), max_tokens=1))
        [request] = submitted(served)

        assert request.remotes == ()
        assert served.call(served.core.addresses.of, "n1") == ""


NODES = st.sampled_from(["n0", "n1"])
PLACES = st.sampled_from(["here:1", "there:2", ""])


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("attach"), NODES, st.sampled_from(["here:1", "there:2"])),
            st.tuples(st.just("drop"), NODES, st.just("")),
            st.tuples(st.just("hear"), NODES, PLACES),
        )
    )
)
def test_only_an_exchange_itself_takes_the_place_of_one_that_was_dropped(
    story: list[tuple[str, str, str]],
) -> None:
    addresses = Addresses()
    # The latest attach or drop, or the latest hint before the first of those.
    told: dict[str, tuple[str, str]] = {}
    for what, node_id, address in story:
        if what == "attach":
            addresses.attach(node_id, address)
            told[node_id] = what, address
        elif what == "drop":
            addresses.drop(node_id)
            told[node_id] = what, ""
        else:
            [held] = addresses.hear([HINT._replace(node_id=node_id, address=address)])
            if address and told.get(node_id, ("hear", ""))[0] == "hear":
                told[node_id] = what, address
            assert held.address == (told.get(node_id, ("", ""))[1] if address else "")
        assert addresses.of(node_id) == told.get(node_id, ("", ""))[1]


def test_however_many_are_under_way_when_it_fails_the_pause_is_the_first_one() -> None:
    """A hundred lookups that a directory let wait for 40 ms were a hundred failures in a row: no hints for 30 s."""

    async def answer() -> Sequence[Held]:
        await asyncio.Event().wait()
        return []

    directory, now = Directory(answer), 0.0
    holders = Holders(directory, lambda: now)

    async def at_once(times: int) -> None:
        await asyncio.gather(*(holders.lookup([b"k" * 32]) for _ in range(times)))

    asyncio.run(at_once(100))
    now = 0.9 * gateway_holders.PAUSE_S
    asyncio.run(at_once(10))
    assert len(directory.asked) == 100
    now = gateway_holders.PAUSE_S
    asyncio.run(at_once(10))
    assert len(directory.asked) == 101
    now += 1.9 * gateway_holders.PAUSE_S
    asyncio.run(at_once(10))
    assert len(directory.asked) == 101
    now += 0.1 * gateway_holders.PAUSE_S
    asyncio.run(at_once(10))
    assert len(directory.asked) == 102


@given(answers=st.lists(st.tuples(st.booleans(), st.floats(0.0, 40.0)), max_size=60))
def test_one_that_fails_is_tried_ever_more_seldom_but_never_given_up(
    answers: list[tuple[bool, float]],
) -> None:
    breaker, now, failures, last_try = Breaker(FAILURES, 1.0, MOST_PAUSE_S), 0.0, 0, 0.0
    for is_well, pause in answers:
        now += pause
        if breaker.why_not(now) is not None:
            assert failures >= FAILURES
            assert now - last_try < MOST_PAUSE_S
            continue
        last_try = now
        is_probe = breaker.begin()
        assert is_probe == (failures >= FAILURES)
        if is_well:
            breaker.succeeded()
            failures = 0
        else:
            failures += 1
            assert breaker.failed(now, is_probe=is_probe) == (failures >= FAILURES)
