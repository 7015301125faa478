"""Drives a gateway before workers that step only when told to, and checks that nothing of it is left in the end."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from gateway_kit import EchoWorker, Served, serving
from waiting import eventually, until

from kvtier.cli.client import Client, completion, connect
from kvtier.workers.models.text import Text


class Drive:
    """A gateway before workers that step only when told to, with one client."""

    def __init__(self, served: Served, client: Client, pool: ThreadPoolExecutor) -> None:
        self.served = served
        self.client = client
        self._pool = pool

    def ask(self, prompt: Any, **options: Any) -> Future[dict[str, Any]]:
        """Send a request, and wait until a worker has it."""
        before = sum(len(worker.submitted) for worker in self.workers)
        call = self._pool.submit(lambda: completion(self.client.generate(prompt, **options)))
        until(lambda: sum(len(worker.submitted) for worker in self.workers) > before, "a worker has it")
        return call

    @property
    def workers(self) -> list[EchoWorker]:
        return self.served.workers

    def holder(self, but: EchoWorker | None = None) -> EchoWorker:
        """The worker that runs something."""
        return until(
            lambda: next((one for one in self.workers if one.running and one is not but), None),
            "a worker runs it",
        )

    def step(self, worker: EchoWorker, times: int = 1) -> None:
        for _ in range(times):
            self.served.call(worker.step)

    def lose(self, worker: EchoWorker, reason: str = "its process ended") -> None:
        """It is gone: it does nothing more."""
        worker.running.clear()
        self.served.call(self.served.core.lose_worker, worker.info.worker_id, reason)

    def finish(self, call: Future[dict[str, Any]]) -> dict[str, Any]:
        """Let all go on until the request has ended."""

        def ended() -> bool:
            for worker in self.workers:
                if worker.running:
                    self.step(worker)
            return call.done()

        until(ended, "the request ends")
        return call.result()


@contextmanager
def driving(text: Text | None, workers: int = 2, **options: Any) -> Iterator[Drive]:
    with (
        serving(text, workers=workers, is_manual=True, **options) as served,
        connect(served.endpoint) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        yield Drive(served, client, pool)
        core = served.core
        assert eventually(lambda: core.in_flight == 0)
        assert eventually(lambda: not (core._submitting or core._unwanted))
        assert all(worker.sequences == 0 for worker in core.workers.values())
        assert all(worker.load.queued_tokens == 0 for worker in core.workers.values())
