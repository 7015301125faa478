"""Replays several policies and sizes at once, in a process for each core."""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from time import monotonic, process_time

from kvtier.lab.replay.models import Setup, run_setup
from kvtier.lab.replay.replay import Result
from kvtier.lab.traces.trace import Trace
from kvtier.workers.machine.limits import cpus_here

Tick = Callable[[int, int], None]  # pages replayed, of all jobs together, and in all
Heard = Callable[
    [int, Result, float], None
]  # a setup's number, what it gave, and the CPU seconds that it took

_SMALL = 400_000  # pages in all: less is done before processes have begun
_TELL_EVERY_S = 0.1


class ReplayFailed(RuntimeError):
    """A process of a replay died; the message says how."""


def run_jobs(
    trace: Trace,
    setups: Sequence[Setup],
    tick: Tick,
    processes: int | None = None,
    heard: Heard = lambda number, result, cpu_s: None,
) -> list[Result]:
    """The results of all setups, in their order; `heard` is called with each as it comes.

    Ends its processes whatever happens. Raises ReplayFailed, and RuntimeError for what a replay raised.
    """
    count = min(processes or cpus_here(), len(setups))
    total = trace.references * len(setups)
    if count <= 1 or (processes is None and total < _SMALL):
        return _here(trace, setups, tick, heard)
    return _Pool(trace, setups, lambda done: tick(done, total), heard).run(count)


def _here(trace: Trace, setups: Sequence[Setup], tick: Tick, heard: Heard) -> list[Result]:
    total = trace.references * len(setups)
    results = []
    for number, setup in enumerate(setups):
        before = number * trace.references
        tick(before, total)
        result, cpu_s = _timed(trace, setup, partial(_tick_from, tick, before, total))
        heard(number, result, cpu_s)
        results.append(result)
    tick(total, total)
    return results


def _timed(trace: Trace, setup: Setup, tick: Callable[[int], None]) -> tuple[Result, float]:
    start = process_time()
    result = run_setup(trace, setup, _sparing(tick))
    return result, process_time() - start


def _tick_from(tick: Tick, before: int, total: int, done: int) -> None:
    tick(before + done, total)


class _Pool:
    """A process takes the next setup when it has done one, so that a slow one holds up no other."""

    def __init__(
        self, trace: Trace, setups: Sequence[Setup], tick: Callable[[int], None], heard: Heard
    ) -> None:
        self._trace, self._setups, self._tick, self._heard = trace, setups, tick, heard
        self._next = 0
        self._done = [0] * len(setups)  # pages replayed
        self._results: dict[int, Result] = {}
        self._processes: dict[Connection, SpawnProcess] = {}

    def run(self, count: int) -> list[Result]:
        try:
            for _ in range(count):
                self._start()
            while len(self._results) < len(self._setups):
                for ready in wait(list(self._processes)):
                    assert isinstance(ready, Connection)
                    self._hear(ready)
                self._tick(sum(self._done))
        finally:
            for connection, process in self._processes.items():
                process.terminate()
                process.join()
                connection.close()
        return [self._results[number] for number in range(len(self._setups))]

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs,), daemon=True)
        with (
            _interrupts_held()
        ):  # Ctrl-C goes to the whole group, and it is the parent that ends its processes
            process.start()
        theirs.close()
        self._processes[ours] = process
        self._tell(ours, self._trace)
        self._give(ours)

    def _give(self, connection: Connection) -> None:
        if self._next < len(self._setups):
            self._tell(connection, (self._next, self._setups[self._next]))
            self._next += 1
        else:
            process = self._processes.pop(connection)
            with suppress(BrokenPipeError, ConnectionResetError):  # it has given all that it was asked for
                connection.send(None)
            process.join()
            connection.close()

    def _tell(self, connection: Connection, what: object) -> None:
        try:
            connection.send(what)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._dead(connection) from error

    def _hear(self, connection: Connection) -> None:
        try:
            number, told = connection.recv()
        except (EOFError, ConnectionResetError) as error:
            raise self._dead(connection) from error
        match told:
            case str():
                raise RuntimeError(f"a replay failed:\n{told}")  # a bug, and this is where
            case int():
                self._done[number] = told
            case result, cpu_s:
                self._results[number] = result
                self._heard(number, result, cpu_s)
                self._done[number] = self._trace.references
                self._give(connection)

    def _dead(self, connection: Connection) -> ReplayFailed:
        process = self._processes[connection]
        process.join()
        return ReplayFailed(
            f"a process ended with exit code {process.exitcode} in the middle of a replay; a negative one is a signal, "
            "-9 mostly too little memory: name fewer policies at once"
        )


def _work(connection: Connection) -> None:
    """A process: setups in, pages done and results out, until there are no more."""
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        trace = connection.recv()
        while (job := connection.recv()) is not None:
            number, setup = job
            try:
                result: tuple[Result, float] | str = _timed(trace, setup, partial(_send, connection, number))
            except Exception:  # noqa: BLE001  # whatever it is, the parent must hear it
                result = traceback.format_exc()
            connection.send((number, result))


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Processes started here never see SIGINT; this one does, afterwards."""
    resource_tracker.ensure_running()  # or the first start would run it, which lets SIGINT in again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _send(connection: Connection, number: int, done: int) -> None:
    connection.send((number, done))


def _sparing(tick: Callable[[int], None]) -> Callable[[int], None]:
    """The same, but not called more often than anything looks."""
    told = monotonic()

    def call(done: int) -> None:
        nonlocal told
        if monotonic() - told >= _TELL_EVERY_S:
            told = monotonic()
            tick(done)

    return call
