"""Asks several owners at once, and says which of them don't answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

import grpc

from kvtier.cluster.gateway.ports import OwnerDown
from kvtier.cluster.gateway.requests.reading import Refusal

BEGUN_AT_ONCE = 16  # calls of owners: a call through Ray takes about 0.1 ms to begin

T = TypeVar("T")


class Silence(Exception):
    """An owner did not answer in time."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"does not answer within {limit_s:g} s")


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """What one owner is asked."""

    owner_id: str
    lose: Callable[[str], None]  # with the reason
    make: Callable[[], Awaitable[T]]


async def answers_of(calls: Iterable[Call[T]], limit_s: float) -> list[tuple[str, T]]:
    """Every owner's answer, by its id.

    An owner found dead is noted and left out. Raises Refusal naming those that don't answer in time; what they were
    asked may be done all the same.
    """
    answers: list[tuple[str, T]] = []
    silent: list[str] = []

    async def ask(call: Call[T]) -> None:
        try:
            answers.append((call.owner_id, await within(limit_s, call.make())))
        except OwnerDown as error:
            call.lose(str(error))
        except Silence as silence:
            silent.append(f"{call.owner_id} {silence}")
        except TimeoutError:  # its own
            silent.append(f"{call.owner_id} waited for its own loop in vain")

    await together(map(ask, calls))
    if silent:
        raise Refusal(grpc.StatusCode.UNAVAILABLE, "; ".join(sorted(silent)))
    return answers


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, in order. Raises what the first that fails does; the others go on.

    So much is begun in each turn of the loop that asking a thousand owners holds nothing else up.
    """
    coming = iter(work)
    tasks: list[asyncio.Task[T]] = []
    try:
        while begun := [asyncio.ensure_future(one) for one in islice(coming, BEGUN_AT_ONCE)]:
            tasks += begun
            await asyncio.sleep(0)
    except BaseException:
        for task in tasks:
            task.cancel()
        raise
    return await asyncio.gather(*tasks)


class Shared(Generic[T]):
    """One question to many owners that callers have in common: who comes while it is asked gets the next answer.

    So many watchers ask no owner more often than one does, and none gets an answer from before it called.
    """

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._ask = ask
        self._asking = asyncio.Lock()
        self._next: asyncio.Task[T] | None = None  # that hasn't begun

    async def answer(self) -> T:
        """What `ask` gives, which is the callers' in common. Raises what it raises."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._turn())
        return await asyncio.shield(self._next)

    async def _turn(self) -> T:
        async with self._asking:
            self._next = None
            return await self._ask()


async def within(limit_s: float, answer: Awaitable[T]) -> T:
    """An owner's answer. Raises Silence when it takes longer."""
    try:
        async with asyncio.timeout(limit_s) as window:
            return await answer
    except TimeoutError as error:
        if window.expired():
            raise Silence(limit_s) from error
        raise  # the owner's own
