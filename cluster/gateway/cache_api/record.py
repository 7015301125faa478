"""The words of `Record` on the gateway: what is asked for, and how the recordings go. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import PurePath

import grpc

from kvtier.cluster.gateway.requests.reading import Refusal, invalid, quoted
from kvtier.proto import cache_pb2
from kvtier.tier.record.writer import DEFAULT_BYTES, MIN_BYTES, RecordingStatus

MAX_NAME_BYTES = 255  # of a file, as file systems have it
OWNER_BYTES = 80  # ... that an owner's id takes of it, and the ending of what isn't complete


def checked(message: cache_pb2.RecordRequest) -> tuple[str, int]:
    """The path and the bytes of a request. Raises Refusal."""
    path = PurePath(message.path)
    if not path.is_absolute():
        raise invalid(f"path must be absolute, got {quoted(message.path)}")
    if "\0" in message.path or path.name in ("", ".."):
        raise invalid(f"path must name a file to make, got {quoted(message.path)}")
    if max(len(part.encode()) for part in path.parts) > MAX_NAME_BYTES - OWNER_BYTES:
        raise invalid(
            f"path must have names of at most {MAX_NAME_BYTES - OWNER_BYTES} bytes, got {quoted(message.path)}"
        )
    if message.max_bytes and message.max_bytes < MIN_BYTES:
        raise invalid(f"max_bytes must be 0 or at least {MIN_BYTES}, got {message.max_bytes}")
    return message.path, message.max_bytes or DEFAULT_BYTES


def check_known(named: Iterable[str], there: Collection[str]) -> None:
    """All nodes that are named are there. Raises Refusal."""
    for name in named:
        if name not in there:
            known = ", ".join(sorted(there)) or "none"
            raise invalid(f"node {quoted(name)} isn't running: there are {known}")


def replied(recordings: Iterable[RecordingStatus]) -> cache_pb2.RecordReply:
    """As a reply, in the order of their owners."""
    reply = cache_pb2.RecordReply()
    for one in sorted(recordings, key=lambda one: one.owner):
        reply.recordings.add(
            owner=one.owner,
            path=one.path,
            events=one.events,
            nbytes=one.nbytes,
            seconds=one.seconds,
            ended=one.ended,
        )
    return reply


def cannot(reasons: Iterable[str]) -> Refusal:
    """What an owner that can't record says."""
    return Refusal(grpc.StatusCode.FAILED_PRECONDITION, "; ".join(sorted(reasons)))


def nothing() -> Refusal:
    """There is nothing to stop."""
    return Refusal(grpc.StatusCode.NOT_FOUND, "nothing is being recorded, and nothing has been")
