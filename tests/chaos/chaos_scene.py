"""What every fault is tried on: a deployment, the right answers, and randomness that can be repeated."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from chaos_deployment import PATIENCE_S, Deployment
from chaos_load import Answer, Load, Question, Reference, judge, questions
from waiting import until

SHORT, MIDDLE, LONG = (30, 120), (150, 500), (1200, 1800)  # tokens of prompts
PAGE_TOKENS = 16
ROUNDS = 4  # in which a fetch must be hit
WRITES = 20  # rounds in which a page must go to L4
NO_WRITES = "L4 takes no writes"
NO_ROOM = "has no room for another segment"


TRIES = 3  # of a fault that hits nothing


class Missed(Exception):
    """The fault came too late or too early to hit what it is meant for: try once more."""


def until_hit(make: Callable[[int], None]) -> list[str]:
    """Make a fault, by the number of the try, until it hits what it is meant for.

    Why the tries before that one missed; AssertionError when all of some tries did.
    """
    missed: list[str] = []
    for number in range(TRIES):
        try:
            make(number)
        except Missed as why:
            missed.append(str(why))
        else:
            return missed
    raise AssertionError(f"the fault hit nothing in {TRIES} tries: {'; '.join(missed)}")


class Scene:
    """One thread uses it. Each fault begins and ends with nothing cached and nothing under way."""

    def __init__(self, deployment: Deployment, reference: Reference, rng: Random) -> None:
        self.there = deployment
        self.rng = rng
        self._reference = reference

    # ---- requests ------------------------------------------------------------------------------------------------

    def questions(self, count: int, tokens: tuple[int, int] = MIDDLE, max_tokens: int = 24) -> list[Question]:
        """New ones, whose right answers are known by now."""
        asked = questions(self.rng, count, tokens, max_tokens)
        self._reference.tokens(asked)
        return asked

    def load(self, asked: Sequence[Question], *workers: str, clients: int = 4) -> Load:
        """Requests that run from now on; where workers are named, they get them in turn."""
        return Load(
            self.there.endpoint,
            asked,
            clients,
            lambda number: workers[number % len(workers)] if workers else "",
        )

    def finish(self, load: Load, may_fail: bool = False) -> list[Answer]:
        """The answers, judged."""
        answers = load.finish()
        judge(answers, self._reference.tokens([answer.question for answer in answers]), may_fail)
        return answers

    def ask(self, asked: Sequence[Question], *workers: str) -> list[Answer]:
        """Requests that none of may fail."""
        return self.finish(self.load(asked, *workers))

    # ---- moments -------------------------------------------------------------------------------------------------

    def pause(self, most_s: float) -> None:
        """A random while."""
        time.sleep(self.rng.uniform(0.0, most_s))

    def until_busy(self, worker: str, load: Load) -> None:
        """Until a worker has a request of the load, or the load is over."""
        until(
            lambda: load.is_over or not self.there.ask(worker, "idle"),
            f"{worker} to have a request",
            PATIENCE_S,
        )

    def until_fetching(self, load: Load) -> None:
        """Until node-1 fetches pages, or the load is over."""
        until(lambda: load.is_over or self.is_fetching, "a fetch", PATIENCE_S)

    @property
    def is_fetching(self) -> bool:
        """Whether node-1 fetches pages now."""
        return bool(self.there.ask("exchange of node-1", "stats")["fetches"])

    def spread(self, asked: Sequence[Question], worker: str) -> None:
        """Have the pages of these questions, and no others, on a worker's node alone, and the directory know it."""
        self.there.clear()
        self.ask(asked, worker)
        self.there.settled()
        pages = {
            question.prompt[:end]
            for question in asked
            for end in range(PAGE_TOKENS, len(question.prompt) + 1, PAGE_TOKENS)
        }
        until(
            lambda: self.there.entries >= len(pages),
            "the directory to hear of pages",
            PATIENCE_S,
            every_s=0.1,
        )

    def fetching(
        self, fault: str, reasons: Sequence[str], during: Callable[[], None] = lambda: None, **faults: Any
    ) -> None:
        """Ask node-1 for what node-0 has, with faults on, until `fault` was made and a fetch failed for one of these reasons.

        `during` is called while the requests run. Raises Missed when the fault was not made in some rounds, and
        AssertionError when it was, and no fetch failed for that.
        """
        made = 0
        for _ in range(ROUNDS):
            asked = self.questions(6, MIDDLE, 8)
            self.spread(asked, "worker-0")
            before, hits = self.there.fetch_failures(), self.there.hits(fault)
            self.there.set(**faults)
            load = self.load(asked, "worker-1")
            during()
            self.finish(load)
            self.there.set()
            self.there.settled()
            after, was_made = self.there.fetch_failures(), self.there.hits(fault) > hits
            made += was_made
            if was_made and any(after.get(reason, 0) > before.get(reason, 0) for reason in reasons):
                return
        assert not made, f"in {made} rounds with the fault no fetch failed of {reasons}, only {after}"
        raise Missed(f"{fault}: no page came to it")

    # ---- laws ----------------------------------------------------------------------------------------------------

    def fetches_again(self) -> None:
        """Once its peers are trusted again, a node gets pages from another one, and all of the answers are right."""

        def fetched() -> bool:
            asked = self.questions(1, MIDDLE, 4)
            self.spread(asked, "worker-0")
            return bool(self.ask(asked, "worker-1")[0].cached.get("remote"))

        until(fetched, "pages from the other node", PATIENCE_S)

    def reads_l4(self, asked: Sequence[Question], worker: str = "worker-1") -> None:
        """With L1 and L3 empty, some of what a worker was asked before comes from L4."""
        for tier in ("L1", "L3"):
            self.there.client.pages_evict(tier=tier)
        warm = [answer.cached.get("L4", 0) for answer in self.ask(asked, worker)]
        assert any(warm), f"nothing came from L4: {warm}"

    def end(self, asked: Sequence[Question] = ()) -> None:
        """No fault is on any more: all is well and idle, questions have the same answers, and nothing leaks."""
        self.there.set()
        self.there.settled()
        self.ask(asked or self.questions(2, SHORT, 8))
        self.there.check()

    def until_no_writes(self, notes: int, worker: str, said: str = NO_WRITES) -> None:
        """Ask a worker until one more than these notes says that L4 takes no writes, in the words `said`.

        More than once: what files have room for is written all the same, and a cache that is busy leaves pages out.
        """
        for _ in range(WRITES):
            self.ask(self.questions(6, MIDDLE, 16), worker)
            self.there.settled()
            if self.notes(said) > notes:
                return
        raise AssertionError(f"no note says {said!r}: {self.there.status()['nodes']}")

    def tier(self, name: str, field: str) -> Any:
        return self.there.client.stats()["tiers"][name][field]

    def ordered_pages(self, node: str) -> int:
        """Pages that a node had ordered from others, and that came or that it was told of as not coming."""
        fetches = self.there.ask(node, "stats")["fetches"]
        return int(fetches["fetched_pages"] + fetches["fetch_failed_pages"])

    def notes(self, text: str) -> int:
        """Notes of all nodes that say this."""
        return sum(text in note for node in self.there.status()["nodes"] for note in node["notes"])
