"""Asks several owners at once, and says which of them don't answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import grpc

from kvtier.cluster.gateway_ports import OwnerDown
from kvtier.cluster.gateway_requests import Refusal

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

    await asyncio.gather(*map(ask, calls))
    if silent:
        raise Refusal(grpc.StatusCode.UNAVAILABLE, "; ".join(sorted(silent)))
    return answers


async def within(limit_s: float, answer: Awaitable[T]) -> T:
    """An owner's answer. Raises Silence when it takes longer."""
    try:
        async with asyncio.timeout(limit_s) as window:
            return await answer
    except TimeoutError as error:
        if window.expired():
            raise Silence(limit_s) from error
        raise  # the owner's own
