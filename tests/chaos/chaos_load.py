"""Requests at a deployment that things happen to, and the judgement of each: the right tokens, or a clear failure."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from random import Random
from typing import Any

from waiting import until
from worker_kit import Client as WorkerClient
from worker_kit import serving

from kvtier.cli.client import ClientError, connect
from kvtier.workers.runner.runner import load_runner

DEADLINE_S = 120.0  # of each request
PATIENCE_S = 600.0  # of a loaded machine; no law hangs on it
VOCABULARY = 500
# What a request may fail with where its fault allows one to fail: the client is told to try again.
CLEAR = frozenset({"UNAVAILABLE"})


@dataclass(frozen=True)
class Question:
    """One request, the same whenever it is asked."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    tenant: str = "default"


def questions(rng: Random, count: int, prompt_tokens: tuple[int, int], max_tokens: int) -> list[Question]:
    """Some in groups that share a beginning, of random length; every second one samples."""
    found: list[Question] = []
    while len(found) < count:
        shared = [rng.randrange(VOCABULARY) for _ in range(rng.randint(*prompt_tokens))]
        for _ in range(min(3, count - len(found))):
            own = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 40))]
            kept = shared[: rng.randint(len(shared) // 2, len(shared))]
            temperature = 0.8 if len(found) % 2 else 0.0
            found.append(Question((*kept, *own), max_tokens, temperature, rng.randrange(2**31)))
    return found


class Reference:
    """The right tokens of a question: a worker alone, in this process, that caches nothing."""

    def __init__(self, client: WorkerClient) -> None:
        self._client = client
        self._known: dict[Question, list[int]] = {}

    def tokens(self, asked: Sequence[Question]) -> list[list[int]]:
        """Of all these questions."""
        new = [question for question in dict.fromkeys(asked) if question not in self._known]
        names = {
            question: self._client.send(
                question.prompt,
                use_cache=False,
                max_tokens=question.max_tokens,
                temperature=question.temperature,
                seed=question.seed,
            )
            for question in new
        }
        for question, name in names.items():
            self._known[question] = self._client.result(name, patience_s=PATIENCE_S).tokens
        return [self._known[question] for question in asked]


@contextmanager
def reference(model: Path) -> Iterator[Reference]:
    """Computes as the deployments of deployment_kit.Shell do."""
    runner = load_runner(
        str(model),
        dtype="float32",
        page_tokens=16,
        l1_bytes=8 << 20,
        numerics="auto",
        forward="auto",
        threads=1,
        max_context=0,
        max_batch_tokens=128,
        epoch=0,
    )
    with serving(runner, max_batch_tokens=128) as client:  # type: ignore[arg-type]  # Slowed adds to a runner only
        yield Reference(client)


@dataclass
class Answer:
    """What came of one request so far."""

    question: Question
    tokens: list[int] = field(default_factory=list)
    worker: str = ""
    cached: dict[str, int] = field(default_factory=dict)
    status: str = ""  # gRPC's, when it failed
    error: str = ""
    is_over: bool = False
    seconds: float = 0.0


class Load:
    """Asks questions, `clients` at once, each on a connection of its own, and keeps what came."""

    def __init__(
        self,
        endpoint: str,
        asked: Iterable[Question],
        clients: int = 4,
        worker: Callable[[int], str] = lambda number: "",
    ) -> None:
        """`worker` names the one that takes the request of a number first; "": whichever."""
        self.answers = [Answer(question) for question in asked]
        self._endpoint = endpoint
        self._worker = worker
        self._todo: SimpleQueue[int] = SimpleQueue()
        for number in range(len(self.answers)):
            self._todo.put(number)
        self._threads = [
            threading.Thread(target=self._run, name=f"chaos-client-{client}", daemon=True)
            for client in range(clients)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def given(self) -> int:
        """Tokens that have come."""
        return sum(len(answer.tokens) for answer in self.answers)

    @property
    def is_over(self) -> bool:
        return all(answer.is_over for answer in self.answers)

    @property
    def is_decoding(self) -> bool:
        """Some request has had a token, and is to get more."""
        return any(
            answer.tokens and len(answer.tokens) < answer.question.max_tokens and not answer.is_over
            for answer in self.answers
        )

    def until_given(self, tokens: int) -> None:
        """Until so many tokens have come, or no more will."""
        until(lambda: self.given >= tokens or self.is_over, f"{tokens} tokens", PATIENCE_S)

    def finish(self) -> list[Answer]:
        """All answers, once they are over: nothing but the requests' own deadlines ends them."""
        for thread in self._threads:
            thread.join(DEADLINE_S * len(self.answers))
        assert self.is_over, (
            f"a request outlived its deadline: {[one for one in self.answers if not one.is_over]}"
        )
        return self.answers

    def _run(self) -> None:
        while True:
            try:
                number = self._todo.get_nowait()
            except Empty:
                return
            self._ask(self.answers[number], self._worker(number))

    def _ask(self, answer: Answer, worker: str) -> None:
        question, start = answer.question, time.monotonic()
        try:
            with connect(self._endpoint) as client:
                for chunk in client.generate(
                    question.prompt,
                    tenant=question.tenant,
                    max_tokens=question.max_tokens,
                    temperature=question.temperature,
                    seed=question.seed,
                    worker=worker,
                    timeout_s=DEADLINE_S,
                ):
                    answer.worker = answer.worker or chunk.worker
                    answer.tokens += chunk.token_ids
                    if chunk.usage:
                        answer.cached = {tier: n for tier, n in chunk.usage["cached_tokens"].items() if n}
        except ClientError as error:
            answer.status, answer.error = error.status, str(error)
        answer.seconds = time.monotonic() - start
        answer.is_over = True


def judge(answers: Sequence[Answer], right: Sequence[Sequence[int]], may_fail: bool = False) -> int:
    """AssertionError for a wrong token, for a failure where none may be, and for one that isn't clear; how many failed."""
    for answer, tokens in zip(answers, right, strict=True):
        if not answer.status and not answer.error:
            assert answer.tokens == list(tokens), f"wrong tokens: {answer.tokens}, not {tokens} ({answer})"
            continue
        assert answer.tokens == list(tokens[: len(answer.tokens)]), f"wrong tokens before it failed: {answer}"
        assert may_fail and answer.status in CLEAR, f"a request failed: {told(answer)}"
    return sum(bool(answer.status) for answer in answers)


def told(answer: Answer) -> dict[str, Any]:
    """An answer in short."""
    return {
        "status": answer.status,
        "error": answer.error,
        "worker": answer.worker,
        "given": len(answer.tokens),
        "of": answer.question.max_tokens,
        "prompt": len(answer.question.prompt),
        "seconds": round(answer.seconds, 2),
    }
