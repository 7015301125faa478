"""Asking many owners at once, in turns of the loop that stay short."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import grpc
import pytest

from kvtier.cluster.gateway.owners.ask import BEGUN_AT_ONCE, Call, Shared, answers_of, together
from kvtier.cluster.gateway.ports import OwnerDown
from kvtier.cluster.gateway.requests.reading import Refusal


def test_many_are_asked_at_once_but_few_are_begun_in_a_turn_of_the_loop() -> None:
    """What else the loop has to do gets its turn between them."""
    begun: list[int] = []
    turns: list[int] = []

    async def story() -> list[int]:
        all_are_asked = asyncio.Event()

        async def ask(number: int) -> int:
            begun.append(number)
            if len(begun) == 100:
                all_are_asked.set()
            await all_are_asked.wait()  # for ever, were they asked one after the other
            return number

        async def live() -> None:
            while True:
                turns.append(len(begun))
                await asyncio.sleep(0)

        living = asyncio.ensure_future(live())
        answers = await together(map(ask, range(100)))
        living.cancel()
        return answers

    assert asyncio.run(story()) == list(range(100))
    assert max(after - before for before, after in pairwise(turns)) <= BEGUN_AT_ONCE


def test_the_first_that_fails_is_told_and_who_stops_waiting_stops_them_all() -> None:
    begun: list[int] = []
    stopped: list[int] = []

    async def ask(number: int) -> int:
        if number == 3:
            raise ValueError("the third")
        begun.append(number)
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append(number)
        return number

    async def story() -> None:
        with pytest.raises(ValueError, match="the third"):
            await together(map(ask, range(5)))
        begun.clear()
        asking = asyncio.ensure_future(together(map(ask, range(10, 1000))))
        while not begun:
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.sleep(0)
        assert 0 < len(begun) < 990
        assert stopped == begun

    asyncio.run(story())


def test_what_is_asked_for_in_common_is_asked_again_for_who_comes_while_it_is_asked() -> None:
    """Their answer may not be from before their call. A failure is told to all who share it, and to nothing else."""
    asked: list[asyncio.Event] = []

    async def ask() -> int:
        number, may_end = len(asked), asyncio.Event()
        asked.append(may_end)
        await may_end.wait()
        if number == 1:
            raise ValueError("the second")
        return number

    async def begin(shared: Shared[int], count: int) -> list[asyncio.Task[int]]:
        calls = [asyncio.ensure_future(shared.answer()) for _ in range(count)]
        for _ in range(5):
            await asyncio.sleep(0)
        return calls

    async def story() -> None:
        shared = Shared(ask)
        first, second = await begin(shared, 3), await begin(shared, 3)
        assert len(asked) == 1
        first[0].cancel()  # who doesn't wait any more stops nothing else
        asked[0].set()
        assert await asyncio.gather(*first[1:]) == [0, 0]
        third = await begin(shared, 1)
        asked[1].set()
        errors = await asyncio.gather(*second, return_exceptions=True)
        assert [str(error) for error in errors] == ["the second"] * 3
        await begin(shared, 0)
        asked[2].set()
        assert await asyncio.gather(*third) == [2]

    asyncio.run(story())


def test_who_does_not_answer_is_named_by_every_caller() -> None:
    """An owner whose own loop is stalled gave up first, and all that was said was `TimeoutError: `."""
    lost: list[str] = []

    async def silent() -> int:
        await asyncio.Event().wait()
        return 0

    async def late() -> int:
        raise TimeoutError

    async def dead() -> int:
        raise OwnerDown("its process ended")

    async def story() -> None:
        calls = [Call(name, lost.append, make) for name, make in (("a", silent), ("b", late), ("c", dead))]
        with pytest.raises(Refusal) as refusal:
            await answers_of(calls, 0.05)
        assert refusal.value.code is grpc.StatusCode.UNAVAILABLE
        said = "a does not answer within 0.05 s; b waited for its own loop in vain"
        assert refusal.value.message == said

    asyncio.run(story())
    assert lost == ["its process ended"]
