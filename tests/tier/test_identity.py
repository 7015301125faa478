"""Keys of pages: the same after any change of the code, and others for other weights, tenants, secrets, tokens, parents.

A page that lies on a disk is found by these bytes, so they are pinned: by an implementation of the definition in
docs/design.md that shares no line with the product's, and by values that it had when pages were first written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from hashlib import blake2b
from itertools import combinations
from struct import pack
from typing import Any

import numpy as np
from hypothesis import assume, example, given
from hypothesis import strategies as st

from kvtier.tier.pages.identity import (
    CONTENT_TOKENS,
    content_digest,
    page_keys,
    root_key,
    session_number,
    tenant_digest,
    tenant_salt,
)
from kvtier.tier.pages.page import Envelope, PageFormat, PageKey, PageSpec, RootKey, page_checksum

FIELDS = {"model": "llama", "weights": "00ff", "page_tokens": "4"}
SALT = bytes(range(64))
ROOT = RootKey(bytes(range(32)))

root_fields = st.dictionaries(st.text(max_size=6), st.text(max_size=6), max_size=5)
token_lists = st.lists(st.integers(0, 2**31 - 1), max_size=40)


# ---- the definition ----------------------------------------------------------------------------------------------


def defined_root(fields: Mapping[str, str]) -> bytes:
    whole = b""
    for name in sorted(fields):
        for part in (name.encode(), fields[name].encode()):
            whole += pack("<Q", len(part)) + part
    return blake2b(whole, digest_size=32, person=b"kvtier.root").digest()


def defined_salt(tenant: str, secret: str) -> bytes:
    key = blake2b(secret.encode(), digest_size=64).digest()
    return blake2b(tenant.encode(), digest_size=64, key=key, person=b"kvtier.salt").digest()


def defined_keys(parent: bytes, salt: bytes, tokens: Sequence[int], size: int, partial: bool) -> list[bytes]:
    keys = []
    for at in range(0, len(tokens), size):
        page = tokens[at : at + size]
        if len(page) == size or partial:
            parent = blake2b(parent + pack(f"<{len(page)}i", *page), digest_size=32, key=salt).digest()
            keys.append(parent)
    return keys


def defined_content(salt: bytes, tokens: Sequence[int]) -> bytes:
    first = tokens[:CONTENT_TOKENS]
    return blake2b(
        pack(f"<{len(first)}i", *first), digest_size=16, key=salt, person=b"kvtier.content"
    ).digest()


@given(root_fields, st.text(max_size=9), st.text(max_size=9), token_lists, st.integers(1, 8), st.booleans())
def test_identities_are_what_the_definition_says(
    fields: dict[str, str], tenant: str, secret: str, tokens: list[int], size: int, partial: bool
) -> None:
    root, salt = root_key(fields), tenant_salt(tenant, secret)
    ids = np.array(tokens, np.int32)

    assert root == defined_root(fields)
    assert salt == defined_salt(tenant, secret)
    assert page_keys(root, salt, ids, size, partial) == defined_keys(root, salt, tokens, size, partial)
    assert content_digest(salt, tokens) == content_digest(salt, ids) == defined_content(salt, tokens)
    assert tenant_digest(tenant) == blake2b(tenant.encode(), digest_size=16, person=b"kvtier.tenant").digest()


def test_identities_are_those_that_pages_on_disks_have() -> None:
    root, salt = root_key(FIELDS), tenant_salt("acme", "secret")
    tokens = np.arange(10, dtype=np.int32)

    assert root.hex() == "920835bb5e2a3d44b38741dee125968098be4c21b3d235b1c999cb6a472b18a8"
    assert salt.hex() == (
        "8de8f475d02bf663acab6b888101e006676e193a2d55c144f78564292afa60303e057757bbbf18c7dc3f4370fc9d20bcabd6b827adf8"
        "b939f911e88f07c16808"
    )
    assert tenant_salt("acme").hex() == (
        "3e655ac8147c8dc53ed8670ad3301813bd1d953f8eba88e661130751c3ca7a7a6a54f35e02d4203478c9e0a41f96498d15b016a7325a"
        "621cc48f73a01bd63315"
    )
    assert tenant_digest("acme").hex() == "e9faf98c354d8d6a805c7727e6188851"
    assert [key.hex() for key in page_keys(root, salt, tokens, 4, include_partial=True)] == [
        "61795b2b4c03a62fedb379e654393dd2e0fb70593e5eb544b8a0169d94ed83b4",
        "441216d3bf7a30e628c5a323c826cfb13751902749788897ebadf81cff7b3667",
        "f12ae85055dac2f9731432ec16b41e7548a28e5d48362309083561aeb4b67da0",
    ]
    assert content_digest(salt, tokens).hex() == "c5e0b3d5f4cc1c5a6eb7c986324b1381"
    assert session_number(salt, "chat 7") == 7640098089576415051


# ---- what must differ --------------------------------------------------------------------------------------------


@given(root_fields, root_fields)
@example({"a": "bc"}, {"ab": "c"})  # a boundary between a name and its value
@example({"a": "b", "c": "d"}, {"a": "bc", "": "d"})
@example({"a": "1", "b": "2"}, {"a": "1b2"})  # between fields
@example({"a": ""}, {})
def test_roots_are_the_same_for_the_same_fields_only(one: dict[str, str], other: dict[str, str]) -> None:
    assert (root_key(one) == root_key(other)) == (one == other)
    assert root_key(dict(reversed(one.items()))) == root_key(one), "whatever their order"


def test_a_boundary_that_moves_within_the_fields_makes_another_root() -> None:
    """The bytes of names and values, joined, are the same in all of these."""
    text = "abcdef"
    cuts = [{text[:a]: text[a:b], text[b:c]: text[c:]} for a, b, c in combinations(range(1, 7), 3)]
    cuts += [{text[:a]: text[a:]} for a in range(7)]

    assert {"".join(f"{name}{each[name]}" for name in sorted(each)) for each in cuts} == {text}
    assert len({root_key(each) for each in cuts}) == len(cuts)


names = st.text(max_size=9)


@given(names, names, names, names)
@example("acme", "secret", "acme", "")
@example("acme", "secret", "acme", "another")
@example("acme", "secret", "acmes", "ecret")
@example("acme", "", "", "acme")
def test_a_salt_differs_by_the_tenant_and_by_its_secret(
    tenant: str, secret: str, other: str, another: str
) -> None:
    is_same = (tenant, secret) == (other, another)

    assert (tenant_salt(tenant, secret) == tenant_salt(other, another)) == is_same
    assert (tenant_digest(tenant) == tenant_digest(other)) == (tenant == other)


@given(token_lists.filter(bool), st.integers(1, 8), st.data())
def test_a_key_differs_by_the_salt_the_parent_and_each_token_before_it(
    tokens: list[int], size: int, data: st.DataObject
) -> None:
    ids = np.array(tokens, np.int32)
    keys = page_keys(ROOT, SALT, ids, size, include_partial=True)
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = ids.copy()
    changed[at] ^= 1

    after = page_keys(ROOT, SALT, changed, size, include_partial=True)

    assert after[: at // size] == keys[: at // size]
    assert not {*after[at // size :]} & {*keys}
    assert not {*page_keys(RootKey(bytes(32)), SALT, ids, size, True)} & {*keys}
    assert not {*page_keys(ROOT, bytes(64), ids, size, True)} & {*keys}
    assert len({*keys}) == len(keys)


@given(token_lists.filter(bool), st.integers(1, 8))
def test_a_chain_goes_on_behind_any_of_its_pages(tokens: list[int], size: int) -> None:
    ids = np.array(tokens, np.int32)
    keys = page_keys(ROOT, SALT, ids, size)

    for number in range(len(keys)):
        assert page_keys(keys[number], SALT, ids[size * (number + 1) :], size) == keys[number + 1 :]


@given(token_lists, token_lists, st.integers(0, 63))
def test_what_begins_a_prompt_is_known_to_its_tenant_only(
    tokens: list[int], others: list[int], at: int
) -> None:
    """Two tenants with one prompt have digests that say nothing of each other's."""
    another = SALT[:at] + bytes([SALT[at] ^ 1]) + SALT[at + 1 :]
    is_same = tokens[:CONTENT_TOKENS] == others[:CONTENT_TOKENS]

    assert (content_digest(SALT, tokens) == content_digest(SALT, others)) == is_same
    assert content_digest(SALT, tokens) != content_digest(another, tokens)


@given(names, names, st.integers(0, 63))
def test_a_sessions_number_differs_by_its_name_and_its_tenants_salt_and_is_never_0(
    session: str, other: str, at: int
) -> None:
    another = SALT[:at] + bytes([SALT[at] ^ 1]) + SALT[at + 1 :]

    assert 0 < session_number(SALT, session) < 2**63
    assert (session_number(SALT, session) == session_number(SALT, other)) == (session == other)
    assert session_number(SALT, session) != session_number(another, session)


# ---- what a page is ----------------------------------------------------------------------------------------------

SPEC = PageSpec(num_layers=4, num_kv_heads=1, head_dim=64, page_tokens=32, format=PageFormat.FP8, rope_dim=16)


CHANGES: list[dict[str, Any]] = [
    {"num_layers": 5},
    {"num_kv_heads": 2, "rope_dim": 0},
    {"head_dim": 128},
    {"page_tokens": 64},
    {"format": PageFormat.FP16},
    {"layout_version": 3},
    {"rope_dim": 32},
    {"rope_format": PageFormat.FP32},
]


def test_a_specs_digest_differs_by_each_of_its_fields() -> None:
    digests = {replace(SPEC, **changes).digest for changes in CHANGES}

    assert len({SPEC.digest, *digests}) == 1 + len(CHANGES)
    assert {name for changes in CHANGES for name in changes} == {each.name for each in fields(PageSpec)}


@given(st.binary(min_size=32, max_size=32), st.binary(max_size=50), st.data())
def test_a_pages_checksum_differs_by_key_variant_shape_and_payload(
    key: bytes, payload: bytes, data: st.DataObject
) -> None:
    truth = (key, "fp8_e4m3", bytes(16), payload)
    lies = [
        (bytes([key[0] ^ 1]) + key[1:], *truth[1:]),
        (key, "int8", *truth[2:]),
        (*truth[:2], bytes(15) + b"\1", payload),
        (*truth[:3], payload + b"\0"),
    ]
    if payload:
        at = data.draw(st.integers(0, len(payload) - 1))
        lies.append((*truth[:3], payload[:at] + bytes([payload[at] ^ 1]) + payload[at + 1 :]))
    assume(len({*lies}) == len(lies))

    assert page_checksum(*truth) not in {page_checksum(*lie) for lie in lies}


def test_an_envelope_comes_back_as_it_was_written_and_is_the_bytes_that_disks_have() -> None:
    envelope = Envelope(
        key=PageKey(bytes(range(32))),
        variant="int8",
        spec_digest=bytes(range(16)),
        payload_bytes=12345,
        checksum=bytes(range(16, 32)),
        root=ROOT,
        parent=bytes(range(32, 64)),
        tenant=bytes(range(64, 80)),
        depth=7,
        tokens=11,
        made_from="fp8_e4m3",
    )

    assert Envelope.unpack(envelope.pack()) == envelope
    assert blake2b(envelope.pack(), digest_size=16).hexdigest() == "292c03fa2510bc5976d01d00e049a001"
