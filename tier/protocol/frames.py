"""Frames on a stream of bytes: four bytes of length, then the body. Pure."""

from __future__ import annotations

import struct

_LENGTH = struct.Struct("<I")


def pack_frame(body: bytes, max_bytes: int) -> bytes:
    """A body as it goes over the wire. Raises ValueError for one of more than `max_bytes`."""
    if len(body) > max_bytes:
        raise ValueError(f"a frame of {len(body)} bytes, at most {max_bytes} are taken")
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a stream into the bodies of its frames, of at most `max_bytes`. Holds at most one that isn't whole."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> list[bytes]:
        """The bodies that `chunk` completes. Raises ValueError for a length that can't be."""
        self._buffer += chunk
        bodies: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > self.max_bytes:
                raise ValueError(f"a frame of {length} bytes, at most {self.max_bytes} are taken")
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return bodies
