"""Counts what a message's bytes hold, before they are parsed: parsing is one long turn of the gateway's loop. Pure."""

from __future__ import annotations

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor

MAX_FIELDS = 120_000  # of all sorts, in all parts of a message: a tenth of a second
MAX_NUMBERS = 2**20  # in packed lists, such as token ids: some 30 ms

_FIXED = {
    FieldDescriptor.TYPE_DOUBLE: 8,
    FieldDescriptor.TYPE_FIXED64: 8,
    FieldDescriptor.TYPE_SFIXED64: 8,
    FieldDescriptor.TYPE_FLOAT: 4,
    FieldDescriptor.TYPE_FIXED32: 4,
    FieldDescriptor.TYPE_SFIXED32: 4,
}
_NO_LIST = {FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES}


def excess(data: bytes, kind: Descriptor) -> str:
    """What there is too much of in a message of this kind; "" where all is within bounds, or is no message at all."""
    count = _Count(data)
    try:
        count.walk(kind, 0, len(data))
    except _TooMany as error:
        return str(error)
    except IndexError:  # cut off: parsing says so
        pass
    return ""


class _TooMany(Exception):
    pass


class _Count:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._fields = self._numbers = 0

    def walk(self, kind: Descriptor, at: int, end: int) -> None:
        """The fields in bytes [at, end), of a message of this kind."""
        by_number = kind.fields_by_number
        while at < end:
            tag, at = self._varint(at)
            self._add(fields=1)
            wire = tag & 7
            if wire == 2:
                length, at = self._varint(at)
                field = by_number.get(tag >> 3)
                if field is not None:
                    self._look_into(field, at, min(at + length, end))
                at += length
            elif wire == 0:
                _, at = self._varint(at)
            else:
                at += {1: 8, 5: 4}.get(wire, 0)

    def _look_into(self, field: FieldDescriptor, at: int, end: int) -> None:
        if field.message_type is not None:
            self.walk(field.message_type, at, end)
        elif field.is_repeated and field.type not in _NO_LIST:
            size = _FIXED.get(field.type)
            last = np.frombuffer(self._data, np.uint8, max(0, end - at), at) < 0x80  # bytes of varints
            self._add(numbers=(end - at) // size if size else int(np.count_nonzero(last)))

    def _add(self, fields: int = 0, numbers: int = 0) -> None:
        self._fields += fields
        self._numbers += numbers
        if self._fields > MAX_FIELDS:
            raise _TooMany(f"a request has at most {MAX_FIELDS} fields in all")
        if self._numbers > MAX_NUMBERS:
            raise _TooMany(f"a request has at most {MAX_NUMBERS} numbers in its lists, got {self._numbers}")

    def _varint(self, at: int) -> tuple[int, int]:
        """Value and the index behind it. IndexError where it is cut off."""
        value = shift = 0
        while True:
            byte = self._data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80 or shift > 63:
                return value, at
