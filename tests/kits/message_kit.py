"""Messages of both sides for tests: a good one of each kind, and random ones that keep to the ranges of their fields.

What is random is drawn from the types themselves, mostly from both ends of each range.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from math import inf, nan
from random import Random
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from kvtier.tier.pages.page import PageFormat
from kvtier.tier.protocol import messages as m

KEY, OTHER_KEY, DIGEST = b"k" * 32, b"l" * 32, b"d" * 16
GRANT = m.Grant(3, 7, 4096)
PEER_GRANT = m.PeerGrant("i", 4096, 7, 4096)
CHAIN = m.Chain([KEY, OTHER_KEY], [], bytes(2), "bf16", "", 0, 0, 16, 0, 0, False, DIGEST)
HOST_PAGE = m.HostPage((0, 1), GRANT, KEY, "bf16", DIGEST, DIGEST, 16, "L3")
PEER_PAGE = m.PeerPage((0, 1), PEER_GRANT, KEY, "bf16", DIGEST, DIGEST, 16, "")
STORED = m.StoredPage(GRANT, KEY, "bf16", "int8", DIGEST, KEY, KEY, DIGEST, 3, 16, DIGEST, DIGEST)

GOOD: Sequence[Any] = (
    m.Hello("w", "1", {DIGEST: 4096}, {DIGEST: 8192}, {"weights": "w"}, arena_bytes=1),
    m.NewRoot({"weights": "w"}),
    m.WantSlots(2, 4096),
    m.ReturnSlots([GRANT]),
    m.Stored([STORED], "r"),
    m.Unsaved([(KEY, "bf16")]),
    m.Locate("r", KEY, DIGEST, 16, 0, 32, [CHAIN], 1.0, DIGEST, [m.Remote("n1", "h:1", 2)], 2.0, 1.0, 1.0),
    m.Copied("r", [(0, 1)], 4096, 1.0, [(0, 1)]),
    m.Release("r", 1),
    m.Finished("r", [[KEY, OTHER_KEY]], 1, 1, 1, 1, 1, False, False, 1.0, 1.0, 2.0),
    m.Fetched(1, [(KEY, "bf16")], "lost", "gone", 1, 1.0),
    m.Lend([m.LentFrame(0, 4096)]),
    m.Reclaim([0]),
    m.WantFrames(1, 4096),
    m.ReturnFrames([PEER_GRANT]),
    m.ArenaUnopened("i", "why"),
    m.StoredInPeer([m.LentPage(PEER_GRANT, KEY, "bf16", DIGEST, DIGEST, 16)]),
    m.Welcome("n", "i", 1),
    m.Refused("why"),
    m.Granted([GRANT]),
    m.Located("r", 1, [HOST_PAGE], [(0, 1)], m.Missing(1, "lost", "gone"), [PEER_PAGE], [(0, 1)]),
    m.Loaded("r", [HOST_PAGE]),
    m.LoadFailed("r", m.Missing(1, "lost", "gone")),
    m.SavePages([(KEY, "bf16")]),
    m.FramesGranted([PEER_GRANT]),
    m.RecallFrames([PEER_GRANT]),
    m.Reclaimed([0]),
    m.Arena("i", 1, b""),
    m.ArenaGone("i"),
    m.Fetch(1, "n1", "h:1", KEY, DIGEST, 16, 0, [m.FetchPage(GRANT, KEY, "bf16", DIGEST)], 1.0),
    m.CancelFetch(1),
)

NUMBERS = (0, 1, 2, 3, 16, 255, 4096, 2**16 - 1, 2**20, 2**30 - 1, 2**31 - 1, 2**32, 2**62)
FLOATS = (0.0, 1.0, 0.25, 1e-9, 1e-300, 1e3, 1e8)
NO_NUMBERS = (-1, -(2**63), 2**63, 2**64 - 1)  # in no range
NO_FLOATS = (-1.0, -1e-300, inf, -inf, nan)


def types_of(kind: Any) -> Mapping[str, Any]:
    """The types of a message's fields, with their ranges."""
    return typing.get_type_hints(kind, include_extras=True)


class Drawn:
    """Draws messages. `known` says what a field of some name is mostly drawn from, so that messages meet."""

    def __init__(self, random: Random, known: Mapping[str, Sequence[Any]]) -> None:
        self._random, self._known = random, known

    def message(self, kind: Any) -> Any:
        hints = types_of(kind)
        return kind(**{name: self._value(hints[name], name) for name in kind.__struct_fields__})

    def _value(self, kind: Any, name: str) -> Any:
        random, known = self._random, self._known.get(name)
        if known and random.random() < 0.98:
            return random.choice(known)
        origin, args = get_origin(kind), get_args(kind)
        if origin is Annotated:
            return self._within(args[0], args[1], name)
        if origin in (types.UnionType, typing.Union):
            return self._value(random.choice(args), name)
        if origin is Literal:
            return random.choice(args)
        if origin is tuple:
            return tuple(self._value(arg, name) for arg in args)
        if origin in (list, dict) or kind in (bool, bytes, type(None)):
            return self._within(kind, Meta(), name)
        return self.message(kind)

    def _within(self, kind: Any, meta: Meta, name: str) -> Any:
        random, origin = self._random, get_origin(kind)
        least, most = meta.min_length or 0, 3 if meta.max_length is None else meta.max_length
        if origin is list:
            return [self._value(get_args(kind)[0], name) for _ in range(random.randint(least, min(3, most)))]
        if origin is dict:
            return {self._value(get_args(kind)[0], ""): self._value(get_args(kind)[1], "") for _ in range(2)}
        if kind is bytes:
            return bytes([random.randrange(4)]) * random.choice((least, min(max(least, 16), most)))
        if kind is str:
            return random.choice([*PageFormat]).value if meta.pattern else random.choice(("a", "b", ""))
        if kind is bool:
            return random.random() < 0.5
        if kind is type(None):
            return None
        low = meta.ge
        high = meta.le if meta.le is not None else None if meta.lt is None else meta.lt - 1
        assert low is not None and high is not None, f"{name} has no range"
        ends: tuple[Any, ...] = (low, high)
        inner = [n for n in (FLOATS if kind is float else NUMBERS) if low <= n <= high]
        return random.choice(ends) if random.random() < 0.2 else random.choice(inner)


def as_builtins(message: Any) -> Any:
    """A message as the wire's plain values, to be made wrong."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message))
