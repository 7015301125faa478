"""Every call that opening and healing L4 makes to the system and to LMDB, seen, and failed or ended by a kill as a test asks.

The modules' own names `os`, `fcntl`, `mmap` and `lmdb` are replaced by stand-ins that pass all through to the real ones: so the
list of calls is what is called, and no sample.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import lmdb

from kvtier.tier.stores.ssd import aside as ssd_aside
from kvtier.tier.stores.ssd import catalogue as ssd_lmdb
from kvtier.tier.stores.ssd import healing as ssd_heal
from kvtier.tier.stores.ssd import layout as ssd_layout
from kvtier.tier.stores.ssd import lmdb_format, slab
from kvtier.tier.stores.ssd import moves as ssd_moves
from kvtier.tier.stores.ssd import store as ssd

MODULES = (lmdb_format, slab, ssd, ssd_aside, ssd_heal, ssd_layout, ssd_lmdb, ssd_moves)
REPLACED = ("os", "fcntl", "mmap", "lmdb")
LMDB_TYPES = (lmdb.Environment, lmdb.Transaction, lmdb.Cursor)
HARMLESS = {"os.getpid", "open.close"}  # can't fail, and change nothing
AUDITED = {
    "open",
    "os.listdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "fcntl.flock",
    "mmap.__new__",
}

Before = Callable[[int, str], None]  # the call's number and name; may raise


class Calls:
    """The calls of one run, in their order; `before` is asked before each."""

    def __init__(self, before: Before = lambda number, name: None) -> None:
        self.names: list[str] = []
        self._before = before

    def made(self, name: str) -> None:
        self.names.append(name)
        self._before(len(self.names) - 1, name)


class StandIn:
    """Passes everything on to `real`; what is called is told before."""

    def __init__(self, real: Any, name: str, calls: Calls) -> None:
        self._real, self._name, self._calls = real, name, calls

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(self._real, attribute)
        name = f"{self._name}.{attribute}"
        if isinstance(value, ModuleType):
            return StandIn(value, name, self._calls)
        if not callable(value) or (isinstance(value, type) and issubclass(value, BaseException)):
            return value

        def call(*arguments: Any, **named: Any) -> Any:
            if name not in HARMLESS:
                self._calls.made(name)
            return self._wrap(value(*arguments, **named), name)

        return call

    def _wrap(self, result: Any, name: str) -> Any:
        return (
            StandIn(result, name.rpartition(".")[2], self._calls)
            if isinstance(result, LMDB_TYPES)
            else result
        )

    def __enter__(self) -> Any:
        self._real.__enter__()
        return self

    def __exit__(self, *error: object) -> Any:
        if error[0] is None and isinstance(self._real, lmdb.Transaction):
            try:
                self._calls.made(f"{self._name}.commit")
            except BaseException:
                self._real.abort()
                raise
        return self._real.__exit__(*error)

    def __iter__(self) -> Any:
        self._calls.made(f"{self._name}.iter")
        return iter(self._real)


@contextmanager
def shimmed(calls: Calls) -> Iterator[None]:
    """All calls of the modules go through `calls`."""
    changed: list[tuple[ModuleType, str, Any]] = []
    try:
        for module in MODULES:
            for name in REPLACED:
                if (real := vars(module).get(name)) is not None:
                    changed.append((module, name, real))
                    setattr(module, name, StandIn(real, name, calls))
        yield
    finally:
        for module, name, real in changed:
            setattr(module, name, real)


def killed_at(number: int, run: Callable[[], None]) -> bool:
    """Whether a process that runs this was killed before its call of this number; else it has ended by itself."""

    def before(at: int, name: str) -> None:
        if at == number:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        try:
            with shimmed(Calls(before)):
                run()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


class Audit:
    """What Python itself saw of calls, to hold the list against. Hooks can't be taken out: one for all tests."""

    _hooked = False
    _seen: list[str] | None = None

    @classmethod
    @contextmanager
    def of(cls) -> Iterator[list[str]]:
        """The audited events of what runs within."""
        if not cls._hooked:
            sys.addaudithook(cls._hook)
            cls._hooked = True
        cls._seen = seen = []
        try:
            yield seen
        finally:
            cls._seen = None

    @classmethod
    def _hook(cls, event: str, arguments: tuple[Any, ...]) -> None:
        if cls._seen is not None and event in AUDITED:
            cls._seen.append(event)
