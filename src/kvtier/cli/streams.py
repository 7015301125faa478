"""The command's standard streams: what fails there is a StreamFailed, which ends the command with one line."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO, cast


class StreamFailed(OSError):
    """A standard stream is closed, full or lacks a character; the message says which and the way out."""


class Output(io.TextIOBase):
    """Standard output or error. A reader that has left stays a BrokenPipeError, which is no failure of the command."""

    def __init__(self, stream: TextIO | None, name: str) -> None:
        self._stream = stream
        self._name = name

    def write(self, text: str) -> int:
        stream = self._open()
        try:
            return stream.write(text)
        except BrokenPipeError:
            raise
        except UnicodeEncodeError as error:
            missing = ascii(error.object[error.start : error.end][:20])
            raise StreamFailed(
                f"{self._name} can't show {missing} in its encoding {error.encoding}: set PYTHONIOENCODING=utf-8, "
                "or use --json"
            ) from error
        except OSError as error:
            raise StreamFailed(f"can't write to {self._name}: {error.strerror or error}") from error

    def flush(self) -> None:
        try:
            if self._stream is not None:
                self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise StreamFailed(f"can't write to {self._name}: {error.strerror or error}") from error

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def fileno(self) -> int:
        return self._open().fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]  # of a text stream it is read only everywhere else too
        return self._stream.encoding if self._stream is not None else "utf-8"

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self._stream.errors if self._stream is not None else None

    def _open(self) -> TextIO:
        if self._stream is None:
            raise StreamFailed(f"{self._name} is closed")
        return self._stream


@contextmanager
def standard_streams() -> Iterator[None]:
    """Standard output and error as Outputs for the duration of the block."""
    _occupy()
    before = sys.stdout, sys.stderr
    sys.stdout = cast(TextIO, Output(sys.stdout, "standard output"))
    sys.stderr = cast(TextIO, Output(sys.stderr, "standard error"))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def discard_output() -> None:
    """What is still buffered can't be written: let it go, or Python tries again at its end and complains."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)


def read_stdin() -> str:
    """All of standard input. UnicodeError where it is no text."""
    if sys.stdin is None:
        raise StreamFailed("standard input is closed")
    try:
        return sys.stdin.read()
    except OSError as error:
        raise StreamFailed(f"can't read standard input: {error.strerror or error}") from error


def _occupy() -> None:
    """Stands in for standard streams that are closed: a file that is opened must not become one of them."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
