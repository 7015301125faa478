"""Opens request traces: plain or compressed files, and stdin."""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import BinaryIO, cast

from kvtier.lab.traces.formats import TraceError
from kvtier.lab.traces.trace import Source, Trace, read_trace

STDIN = "-"
_GZIP = b"\x1f\x8b"
_TICK_LINES = 1000
MAX_LINE_BYTES = 1 << 28  # a longer one is no request, and would take all memory


def load_trace(
    names: Sequence[str],
    *,
    page_tokens: int | None = None,
    skip_bad: bool = False,
    tick: Callable[[int], None] = lambda lines: None,
) -> Trace:
    """The traces of these files ("-": stdin) as one, merged by time; `tick` hears of the lines read so far.

    Raises TraceError for a line that can't be read (see `read_trace`), OSError for a file.
    """
    lines = _Counter(tick)
    sources = [Source("stdin" if name == STDIN else name, lines.of(_lines(name))) for name in names]
    return read_trace(sources, page_tokens=page_tokens, skip_bad=skip_bad)


class _Counter:
    def __init__(self, tick: Callable[[int], None]) -> None:
        self._tick = tick
        self._count = 0

    def of(self, lines: Iterator[bytes]) -> Iterator[bytes]:
        for line in lines:
            self._count += 1
            if self._count % _TICK_LINES == 0:
                self._tick(self._count)
            yield line


def _lines(name: str) -> Iterator[bytes]:
    if name == STDIN:
        yield from _unpacked("stdin", sys.stdin.buffer)
        return
    with open(name, "rb") as file:
        yield from _unpacked(name, file)


def _unpacked(name: str, file: BinaryIO) -> Iterator[bytes]:
    buffered = file if isinstance(file, io.BufferedReader) else io.BufferedReader(cast(io.RawIOBase, file))
    if not buffered.peek(2).startswith(_GZIP):
        yield from _bounded(name, buffered)
        return
    try:
        with gzip.open(buffered) as unpacked:
            yield from _bounded(name, unpacked)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{name} is no whole gzip file ({error}): fetch it again") from error


def _bounded(name: str, file: io.BufferedIOBase) -> Iterator[bytes]:
    for line in iter(partial(file.readline, MAX_LINE_BYTES), b""):
        if len(line) == MAX_LINE_BYTES:
            raise TraceError(
                f"{name} has a line of {MAX_LINE_BYTES >> 20} MiB or more: that is no trace of requests"
            )
        yield line
