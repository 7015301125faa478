"""What may be said between workers and node: the ranges of all fields, at both of their ends, and beyond."""

from __future__ import annotations

import struct
import types
import typing
from collections.abc import Iterator, Mapping
from math import inf, nan
from random import Random
from typing import Annotated, Any, get_args, get_origin

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from message_kit import (
    CHAIN,
    DIGEST,
    GOOD,
    KEY,
    NO_FLOATS,
    NO_NUMBERS,
    OTHER_KEY,
    STORED,
    Drawn,
    as_builtins,
    types_of,
)
from msgspec import Meta

from kvtier.tier.node.state.records import envelope_of
from kvtier.tier.pages.page import Envelope, PageFormat
from kvtier.tier.protocol.ipc import Garbage, MessageReader, frame
from kvtier.tier.protocol.messages import (
    Copied,
    Finished,
    Locate,
    Release,
    Remote,
    Stored,
    StoredPage,
    ToNode,
    ToWorker,
    WantSlots,
)
from kvtier.tier.protocol.rules import malformed
from kvtier.tier.transport.frames import (
    MAX_FIRST_PAGE,
    MAX_KEYS,
    MAX_PAGE_TOKENS,
    MAX_PAYLOAD_BYTES,
    PagesRequest,
)

ANY = ToNode | ToWorker
KINDS = get_args(ToNode)


def heard(plain: Any) -> Any:
    """What the other end of a socket makes of plain values. Raises Garbage."""
    body = msgspec.msgpack.encode(plain)
    (message,) = MessageReader(ANY).feed(struct.pack("<I", len(body)) + body)
    return message


def is_taken(plain: Any) -> bool:
    try:
        heard(plain)
    except Garbage:
        return False
    return True


def test_each_kind_of_message_comes_as_it_was_sent() -> None:
    assert {type(message) for message in GOOD} == set(get_args(ANY))
    for message in GOOD:
        assert MessageReader(ANY).feed(frame(message)) == [message]


# ---- each field ----------------------------------------------------------------------------------------------------

Path = tuple[Any, ...]


def leaves(kind: Any, plain: Any, path: Path) -> Iterator[tuple[Path, Any, Meta | None]]:
    """The numbers, texts and bytes in a message of this type, where each is, and its range."""
    meta = None
    if get_origin(kind) is Annotated:
        kind, meta = get_args(kind)[:2]
    origin, args = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, typing.Union):
        (kind,) = [arg for arg in args if arg is not types.NoneType]
        yield from leaves(kind, plain, path)
    elif origin is list:
        for at, one in enumerate(plain):
            yield from leaves(args[0], one, (*path, at))
    elif origin is tuple:
        for at, (one, its) in enumerate(zip(plain, args, strict=True)):
            yield from leaves(its, one, (*path, at))
    elif isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        for at, (name, its) in enumerate(types_of(kind).items()):
            key = at if isinstance(plain, list) else name
            if isinstance(plain, list) or key in plain:
                yield from leaves(its, plain[key], (*path, key))
    elif kind in (int, float, str, bytes):
        yield path, kind, meta


def put(plain: Any, path: Path, value: Any) -> Any:
    """A copy with another value at a place."""
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(plain))
    at = copy
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return copy


FIELDS = [
    (type(message).__name__, as_builtins(message), path, kind, meta)
    for message in GOOD
    for path, kind, meta in leaves(type(message), as_builtins(message), ())
]
NAMES = [f"{name}{list(path)}" for name, _, path, _, _ in FIELDS]
NUMBERS = [
    pytest.param(*field, id=name)
    for field, name in zip(FIELDS, NAMES, strict=True)
    if field[3] in (int, float)
]
BYTES = [
    pytest.param(*field, id=name) for field, name in zip(FIELDS, NAMES, strict=True) if field[3] is bytes
]


@pytest.mark.parametrize(("name", "plain", "path", "kind", "meta"), NUMBERS)
def test_each_number_has_two_ends_and_nothing_beyond_them_is_taken(
    name: str, plain: Any, path: Path, kind: type, meta: Meta | None
) -> None:
    assert meta is not None and meta.ge is not None, "it has no least value"
    most = meta.le if meta.le is not None else None if meta.lt is None else meta.lt - 1
    assert most is not None, "it has no largest value"
    for value in (meta.ge, most):
        # What a rule forbids of both fields together is no matter of this one's range.
        body = msgspec.msgpack.encode(put(plain, path, kind(value)))
        msgspec.msgpack.Decoder(ANY).decode(body)
    step = 1 if kind is int else max(1.0, abs(most) * 1e-9)
    beyond = (meta.ge - step, most + step, *(NO_NUMBERS if kind is int else NO_FLOATS))
    for value in beyond:
        if kind is float or -(2**63) <= value < 2**64:
            assert not is_taken(put(plain, path, kind(value))), f"{value} is taken"


@pytest.mark.parametrize(("name", "plain", "path", "kind", "meta"), BYTES)
def test_keys_and_digests_are_as_long_as_they_are(
    name: str, plain: Any, path: Path, kind: type, meta: Meta | None
) -> None:
    value = plain
    for key in path:
        value = value[key]

    assert is_taken(put(plain, path, value))
    if len(value) in (16, 32):
        assert not is_taken(put(plain, path, value[:-1])) and not is_taken(put(plain, path, value + b"x"))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_node_keeps_no_text_or_bytes_of_any_length(kind: Any) -> None:
    for message in GOOD:
        if isinstance(message, kind):
            for path, leaf, meta in leaves(kind, as_builtins(message), ()):
                if leaf in (str, bytes) and path[-1] != 2:  # a chain's `held` is as long as its keys
                    assert meta is not None and (meta.max_length is not None or meta.pattern), path


# ---- several fields together ---------------------------------------------------------------------------------------


LOCATE = Locate("r", KEY, DIGEST, 16, 0, 32, [CHAIN], 1.0)
FINISHED = Finished("r", [[KEY, OTHER_KEY]], 1, 1, 1, 1, 1, False, False, 1.0, 1.0, 2.0)
changed = msgspec.structs.replace
PAIRS: Mapping[str, tuple[Any, Any]] = {  # what is taken, and what is not
    "chains of one length": (
        changed(LOCATE, chains=[CHAIN, CHAIN]),
        changed(LOCATE, chains=[CHAIN, changed(CHAIN, keys=[KEY], held=b"\0")]),
    ),
    "a held byte for each key": (LOCATE, changed(LOCATE, chains=[changed(CHAIN, held=bytes(3))])),
    "another key for each, or none": (
        changed(LOCATE, chains=[changed(CHAIN, other_keys=[KEY, KEY])]),
        changed(LOCATE, chains=[changed(CHAIN, other_keys=[KEY])]),
    ),
    "held as written": (
        changed(LOCATE, chains=[changed(CHAIN, held=b"\1\0")]),
        changed(LOCATE, chains=[changed(CHAIN, held=b"\2\0")]),
    ),
    "held as decayed, where there is such a format": (
        changed(LOCATE, chains=[changed(CHAIN, decayed="int4c", held=b"\3\2")]),
        changed(LOCATE, chains=[changed(CHAIN, decayed="int4c", held=b"\4\0")]),
    ),
    "decays into another format": (
        changed(LOCATE, chains=[changed(CHAIN, decayed="int4c")]),
        changed(LOCATE, chains=[changed(CHAIN, decayed="bf16")]),
    ),
    "formats there are": (LOCATE, changed(LOCATE, chains=[changed(CHAIN, variant="bf17")])),
    "written token by token": (LOCATE, changed(LOCATE, chains=[changed(CHAIN, variant="int4c")])),
    "a spec or none": (
        changed(LOCATE, chains=[changed(CHAIN, spec_digest=b"")]),
        changed(LOCATE, chains=[changed(CHAIN, spec_digest=b"short")]),
    ),
    "a prompt's digest or none": (
        changed(LOCATE, first_content=b""),
        changed(LOCATE, first_content=b"short"),
    ),
    "hints that are few": (
        changed(LOCATE, remotes=[Remote("n1", "h:1", 1)] * 64),
        changed(LOCATE, remotes=[Remote("n1", "h:1", 1)] * 65),
    ),
    "hints that are short": (
        changed(LOCATE, remotes=[Remote("n" * 256, "h" * 256, 1)]),
        changed(LOCATE, remotes=[Remote("n1", "h" * 257, 1)]),
    ),
    "no chains": (LOCATE, changed(LOCATE, chains=[])),
    "a page's prompt's digest or none": (
        Stored([changed(STORED, content=b"")]),
        Stored([changed(STORED, content=b"short")]),
    ),
    "costs that don't grow": (changed(LOCATE, double_pages=0.0), changed(LOCATE, double_pages=0.49)),
    "costs that double": (changed(LOCATE, double_pages=1.0), changed(LOCATE, double_pages=1e-300)),
    "costs of a use": (changed(FINISHED, double_pages=1.0), changed(FINISHED, double_pages=0.49)),
    "costs of a use that are measured": (
        changed(FINISHED, page_s=0.0, double_pages=0.0),
        changed(FINISHED, double_pages=0.0),
    ),
    "each page once": (FINISHED, changed(FINISHED, keys=[[KEY, KEY]])),
    "corrupt are some of the copied": (
        Copied("r", [(0, 1), (0, 2)], 1, 1.0, [(0, 2)]),
        Copied("r", [(0, 1)], 1, 1.0, [(0, 2)]),
    ),
}


@pytest.mark.parametrize(("good", "bad"), PAIRS.values(), ids=PAIRS)
def test_what_takes_several_fields_to_see_is_seen(good: Any, bad: Any) -> None:
    assert heard(as_builtins(good)) == good
    assert not is_taken(as_builtins(bad))


@pytest.mark.parametrize(
    "plain",
    [
        put(as_builtins(Stored([STORED])), ("pages", 0, 8), 2**31 - 1),
        put(as_builtins(FINISHED), ("double_pages",), 0.4),
        put(as_builtins(Copied("r", [], 1, 1.0)), ("seconds",), inf),
        put(as_builtins(Copied("r", [], 1, 1.0)), ("seconds",), nan),
        put(as_builtins(Release("r")), ("from_page",), 2**64 - 1),
        put(as_builtins(WantSlots(1, 1)), ("count",), 2**62),
        put(as_builtins(Stored([STORED])), ("pages", 0, 2), "bf16\0"),
        put(as_builtins(Stored([STORED])), ("pages", 0, 2), "bf16\n"),
        put(as_builtins(Stored([STORED])), ("pages", 0, 2), "é" * 16),
        put(as_builtins(Stored([STORED])), ("pages", 0, 2), "x" * 17),
        put(as_builtins(Release("r")), ("request_id",), "x" * 1025),
    ],
    ids=[
        *("a depth that can't be added to", "costs below a page", "endless seconds", "no number of seconds"),
        *(
            "a page past int64",
            "more slots than there can be",
            "a variant that an envelope pads",
            "a new line",
        ),
        *("more bytes than characters", "a variant too long", "a name too long"),
    ],
)
def test_what_once_ended_a_node_is_garbage(plain: Any) -> None:
    assert not is_taken(plain)


def test_a_release_of_the_last_page_there_can_be_is_taken() -> None:
    assert is_taken(put(as_builtins(Release("r")), ("from_page",), 2**30 - 1))


# ---- what others need of them --------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**32))
@settings(max_examples=300)
def test_an_envelope_can_hold_every_page_that_a_message_can_describe(seed: int) -> None:
    page: StoredPage = Drawn(Random(seed), {}).message(StoredPage)
    if not malformed(Stored([page])):
        envelope = envelope_of(page)
        assert Envelope.unpack(envelope.pack()) == envelope


def request_of(**how: Any) -> PagesRequest:
    keys = tuple(bytes([n % 256]) * 32 for n in range(how.pop("num_keys", 2)))
    fields: dict[str, Any] = {
        "root": KEY,
        "tenant": DIGEST,
        "page_tokens": 16,
        "first_page": 0,
        "keys": keys,
        "held": bytes(len(keys)),
        "variant": "bf16",
        "spec_digest": DIGEST,
        "payload_bytes": 4096,
    }
    return PagesRequest(**(fields | how))


LARGEST: dict[str, Any] = {
    "num_keys": MAX_KEYS, "page_tokens": MAX_PAGE_TOKENS, "first_page": MAX_FIRST_PAGE,
    "payload_bytes": MAX_PAYLOAD_BYTES, "variant": PageFormat.BF16, "root": KEY, "tenant": DIGEST, "spec_digest": DIGEST,
}  # fmt: skip


@given(
    num_keys=st.sampled_from([0, 1, 2, MAX_KEYS, MAX_KEYS + 1]),
    page_tokens=st.sampled_from([0, 1, 16, MAX_PAGE_TOKENS, MAX_PAGE_TOKENS + 1]),
    first_page=st.sampled_from([-1, 0, MAX_FIRST_PAGE, MAX_FIRST_PAGE + 1]),
    payload_bytes=st.sampled_from([0, 1, MAX_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES + 1]),
    variant=st.sampled_from([*PageFormat, "", "bf17"]),
    root=st.sampled_from([KEY, KEY[:-1], b""]),
    tenant=st.sampled_from([DIGEST, DIGEST[:-1], b""]),
    spec_digest=st.sampled_from([DIGEST, DIGEST[:-1], b""]),
)
@example(**(LARGEST | {"variant": PageFormat.INT4C}))
@example(**LARGEST)
def test_what_another_node_may_ask_for_costs_no_exchange_its_connection(**how: Any) -> None:
    """An exchange passes on to its own CacheNode what other nodes ask it for."""
    request = request_of(**how)
    if request.malformed() is None:
        assert is_taken(as_builtins(request.locate("r")))
