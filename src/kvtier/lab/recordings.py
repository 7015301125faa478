"""Recordings as users handle them: opens the files, runs them again, sums them up, and makes traces of them."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvtier.tier.node.recording import NODE
from kvtier.tier.protocol.events import FromWorker, Send
from kvtier.tier.protocol.messages import Locate, Located
from kvtier.tier.record.format import RecordingError, RecordingReader
from kvtier.tier.record.rerun import Verdict, heard, rerun
from kvtier.tier.record.trace_export import APPROXIMATE, Collector

Tick = Callable[[int], None]  # hears how many bytes of the file have been read

_PIECE_BYTES = 2**20
_GZIP = b"\x1f\x8b"
_GZIP_WINDOW = 31  # zlib's number for "a gzip stream"


def _unheard(nbytes: int) -> None:
    """For those who show no progress."""


@contextmanager
def opened(path: Path, tick: Tick = _unheard) -> Iterator[RecordingReader]:
    """A reader of this file, plain or compressed. Raises RecordingError."""
    try:
        with path.open("rb") as file:
            yield RecordingReader(_unpacked(_pieces(file.read, tick)))
    except OSError as error:
        raise RecordingError(f"can't read {path}: {error.strerror}") from error


def _pieces(read: Callable[[int], bytes], tick: Tick) -> Iterator[bytes]:
    done = 0
    while piece := read(_PIECE_BYTES):
        yield piece
        done += len(piece)
        tick(done)


def _unpacked(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """What is packed as far as it goes: a file that was cut off gives all before the cut."""
    first = next(pieces, b"")
    if not first.startswith(_GZIP):
        yield first
        yield from pieces
        return
    unpack = zlib.decompressobj(_GZIP_WINDOW)
    try:
        yield unpack.decompress(first)
        for piece in pieces:
            yield unpack.decompress(piece)
    except zlib.error as error:
        raise RecordingError(f"its compressed bytes are damaged: {error}") from error


# ---- what it says ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Summary:
    """What happened in a recording. `found` are pages by the tier that lookups found them in."""

    owner: str
    machine: str
    kvtier: str
    started: str  # UTC
    about: dict[str, Any]
    events: Counter[str] = field(default_factory=Counter)  # by kind
    commands: Counter[str] = field(default_factory=Counter)
    lookups: int = 0
    asked_pages: int = 0
    found: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)  # lookups by why their prefix was no longer

    def watch(self, event: Any, now: float, answer: Any) -> None:
        """rerun's."""
        message = event.message if isinstance(event, FromWorker) else event
        self.events[type(message).__name__] += 1
        for command in answer:
            inner: Any = command.message if isinstance(command, Send) else command
            self.commands[type(inner).__name__] += 1
            if isinstance(message, Locate) and isinstance(inner, Located):
                self._looked_up(message, inner)

    def _looked_up(self, asked: Locate, found: Located) -> None:
        self.lookups += 1
        self.asked_pages += sum(asked.first_page + len(chain.keys) for chain in asked.chains)
        held = found.pages - asked.first_page
        self.found["L1"] += sum(
            asked.first_page + sum(map(bool, chain.held[:held])) for chain in asked.chains
        )
        self.found["L3"] += len(found.host)
        self.found["L4"] += len(found.loading)
        self.ends["whole" if found.missing is None else found.missing.reason] += 1


def summed_up(path: Path, tick: Tick = _unheard) -> tuple[Summary, Verdict]:
    """What happened in a recording, by running it again. Raises RecordingError."""
    with opened(path, tick) as reader:
        header = reader.header
        started = datetime.fromtimestamp(header.wall_s, UTC).isoformat(timespec="seconds")
        summary = Summary(header.owner, header.machine, header.kvtier, started, header.about)
        return summary, rerun(reader, NODE, summary.watch)


def verified(path: Path, tick: Tick = _unheard) -> Verdict:
    """Whether the recording comes out the same again. Raises RecordingError."""
    with opened(path, tick) as reader:
        return rerun(reader, NODE)


# ---- traces ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Exported:
    """A trace that was written: its requests, those that were left out, and why it is approximate."""

    requests: int
    headless: int
    other_page_size: int
    is_torn: bool
    approximate: tuple[str, ...] = APPROXIMATE


def export(path: Path, out: Path, tick: Tick = _unheard) -> Exported:
    """Write the requests of a node's recording as a trace. Raises RecordingError; `out` must not be there."""
    collector = Collector()
    with opened(path, tick) as reader:
        for event, now in heard(reader, NODE):
            collector.take(event, now)
        about = {
            "trace": f"recorded of {reader.header.owner}",
            "license": "the operator's own",
            "source": f"kvtier {reader.header.kvtier} record export",
            "commit": reader.header.code.hex(),
        }
        is_torn = reader.is_torn
    requests = -1  # the header is no request
    try:
        with out.open("x", encoding="utf-8") as file:
            for line in collector.lines(about):
                file.write(line + "\n")
                requests += 1
    except FileExistsError:
        raise RecordingError(f"{out} is there already: give the trace another name") from None
    except OSError as error:
        raise RecordingError(f"can't write {out}: {error.strerror}") from error
    return Exported(requests, collector.headless, collector.other_sizes, is_torn)
