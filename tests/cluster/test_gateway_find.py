"""Finding pages over several owners, against going through all that they hold; and how little of that comes across."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gateway_kit import EchoWorker, Served, echo_info, page_info, serving
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.cli.client import Client, ClientError, connect
from kvtier.cluster.gateway.cache_api import find as gateway_find
from kvtier.cluster.gateway.cache_api.find import (
    FIRST_KEYS,
    MAX_ALIKE,
    MAX_HEADS,
    MAX_ROWS,
    alike,
    alike_limit,
    held_first,
)
from kvtier.cluster.gateway.requests.reading import Refusal
from kvtier.tier.pages.identity import page_keys, root_key, tenant_salt
from kvtier.tier.pages.page import TierName
from kvtier.tier.protocol.key_query import HeldKeys, keys_with

MANY = 3_000  # pages of an owner
TIERS = [TierName.HBM, TierName.HOST, TierName.SSD]
VARIANTS = ["fp32", "int4c"]

KEYS = st.builds(
    lambda head, number: (head + number.to_bytes(32, "big"))[:31] + bytes([number]),
    st.lists(st.sampled_from([0x00, 0xA1, 0xA2]), min_size=2, max_size=4).map(bytes),
    st.integers(0, 20),
)


@settings(deadline=None)
@given(
    owners=st.lists(st.lists(KEYS, max_size=25), min_size=1, max_size=4),
    cuts=st.lists(st.tuples(KEYS, st.integers(4, 63)), min_size=1, max_size=6),
)
def test_heads_are_made_whole_as_if_all_keys_were_known(
    owners: list[list[bytes]], cuts: list[tuple[bytes, int]]
) -> None:
    heads = gateway_find.heads_of(key.hex()[:digits] for key, digits in cuts)
    limit = alike_limit(len(heads))

    found = alike(heads, [keys_with(keys, heads, limit) for keys in owners], limit)

    for head in heads:
        held = {key.hex() for keys in owners for key in keys if key.hex().startswith(head)}
        if len(held) < 2:
            assert found[head].whole() == next(iter(held), None)
            continue
        with pytest.raises(
            Refusal, match=rf"pages have keys that begin with {head}: give more digits"
        ) as refused:
            found[head].whole()
        said = refused.value.message
        if said.startswith("at least "):
            assert limit <= int(said.split()[2]) <= len(held)
        else:
            assert int(said.split()[0]) == len(held)


@given(
    num_keys=st.integers(0, 20),
    owners=st.lists(
        st.dictionaries(
            st.tuples(st.sampled_from(TIERS), st.sampled_from(VARIANTS)),
            st.sets(st.integers(0, 19)),
            max_size=4,
        ),
        max_size=4,
    ),
)
def test_a_prompt_is_held_up_to_its_first_page_that_nothing_has(
    num_keys: int, owners: list[dict[tuple[TierName, str], set[int]]]
) -> None:
    answers = [
        HeldKeys.of({name: {at for at in some if at < num_keys} for name, some in held.items()}, num_keys)
        for held in owners
    ]

    found = held_first(answers, num_keys)

    by_page = [
        [name for held in owners for name, some in held.items() if at in some] for at in range(num_keys)
    ]
    gap = next((at for at, names in enumerate(by_page) if not names), num_keys)
    assert len(found) == gap
    for (tiers, variants), names in zip(found, by_page, strict=False):
        assert tiers == [tier.value for tier in TIERS if tier in {t for t, _ in names}]
        assert variants == sorted({variant for _, variant in names})


class Counting:
    """Stands before an owner and counts what it answers with: rows, and bytes of keys."""

    def __init__(self, owner: EchoWorker) -> None:
        self._owner = owner
        self.asked: list[str] = []
        self.rows = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._owner, name)
        if name not in ("pages", "pages_of", "held", "keys_with", "pin"):
            return method

        async def counted(*arguments: Any) -> Any:
            self.asked.append(name)
            answer = await method(*arguments)
            if name == "held":
                self.rows += sum(len(one.bits) for one in answer)
            else:
                self.rows += sum(map(len, answer)) if name == "keys_with" else len(answer)
            return answer

        return counted


PROMPT = [number % 300 for number in range(4 * 200)]  # 200 pages
TOKENS = np.asarray(PROMPT, dtype=np.int32)
PROMPT_KEYS = [
    key.hex() for key in page_keys(root_key({"model": "echo"}), tenant_salt("acme", "salt"), TOKENS, 4)
]


def many(prefix: str, tier: TierName, owner: str) -> dict[str, Any]:
    pages = (page_info(f"{prefix}{number:060x}", tier, owner, "default", number) for number in range(MANY))
    return {page.key: page for page in pages}


@pytest.fixture
def served() -> Iterator[tuple[Served, list[Counting]]]:
    """Two workers and a node with thousands of pages each, of which some are those of PROMPT."""
    infos = [replace(echo_info(f"w{number}"), max_context=2000) for number in range(2)]
    node = EchoWorker(echo_info("n0"))
    with serving(infos=infos, nodes=[node], max_context=2000) as made:
        owners = [*made.workers, node]
        for owner, tier, prefix in zip(
            owners, [TierName.HBM, TierName.HBM, TierName.HOST], ("aaaa", "aaab", "bbbb"), strict=True
        ):
            owner.pages_held = many(prefix, tier, owner.info.worker_id)
        counting = [Counting(owner) for owner in owners]
        for number, worker in enumerate(made.core.workers.values()):
            worker.port = counting[number]  # type: ignore[assignment]
        made.cache.nodes[0].port = counting[2]  # type: ignore[assignment]
        yield made, counting


@pytest.fixture
def client(served: tuple[Served, list[Counting]]) -> Iterator[Client]:
    with connect(served[0].endpoint) as connected:
        yield connected


def test_a_page_is_shown_and_pinned_without_any_owners_full_list(
    served: tuple[Served, list[Counting]], client: Client
) -> None:
    _, owners = served
    key = f"bbbb{MANY // 2:060x}"

    assert [page["owner"] for page in client.pages_show(key)] == ["n0"]
    assert [owner.rows for owner in owners] == [0, 0, 1]
    assert client.pages_pin([key])["counts"] == {"ACCEPTED": 1}
    with pytest.raises(ClientError) as refused:
        client.pages_show("bbbb")

    assert str(refused.value).startswith(
        f"at least {MAX_ALIKE} pages have keys that begin with bbbb: give more digits"
    )
    assert f"and at least {MAX_ALIKE - 3} more" in str(refused.value)
    assert sum(owner.rows for owner in owners) <= MAX_ALIKE + 5
    assert not any("pages" in owner.asked for owner in owners)


def test_several_heads_at_once_are_made_whole(served: tuple[Served, list[Counting]], client: Client) -> None:
    _, owners = served
    owners[0]._owner.pages_held |= {
        key: page_info(key, TierName.HBM, "w0", "acme") for key in PROMPT_KEYS[:3]
    }

    done = client.pages_pin([key[:24] for key in PROMPT_KEYS[:3]] + ["cccc"])

    assert [result["key"] for result in done["results"]] == [*PROMPT_KEYS[:3], "cccc"]
    assert done["counts"] == {"ACCEPTED": 3, "MISSING": 1}
    with pytest.raises(
        ClientError, match=f"at most {MAX_HEADS} may be given by their first digits, got {MAX_HEADS + 1}"
    ):
        client.pages_pin([f"{number:08x}" for number in range(MAX_HEADS + 1)])


@pytest.mark.parametrize("held", [0, 3, FIRST_KEYS, FIRST_KEYS + 1, 150, 200])
def test_a_lookup_asks_for_a_prompts_pages_alone_and_for_few_when_few_are_held(
    served: tuple[Served, list[Counting]], client: Client, held: int
) -> None:
    _, owners = served
    for number, key in enumerate(PROMPT_KEYS):
        if number != held:  # what lies behind the gap is of no use
            owner = owners[2 if number % 3 else number % 2]
            tier = TierName.SSD if number % 3 else TierName.HBM
            owner._owner.pages_held[key] = page_info(key, tier, owner._owner.info.worker_id, "acme")

    found = client.lookup(PROMPT, tenant="acme")

    assert [page["key"] for page in found["pages"]] == PROMPT_KEYS[:held]
    assert [page["start"] for page in found["pages"]] == [4 * number for number in range(held)]
    assert [page["tiers"] for page in found["pages"]] == [["L4" if n % 3 else "L1"] for n in range(held)]
    assert sum(owner.rows for owner in owners) <= 3 * 200 // 8 + 3  # bytes: a bit a page and tier
    asked = 1 if held < FIRST_KEYS else 2 if held < 3 * FIRST_KEYS else 3
    assert [owner.asked for owner in owners] == [["held"] * asked] * 3


def test_a_listing_stops_asking_when_it_has_enough(
    served: tuple[Served, list[Counting]], client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, owners = served

    assert len(client.pages_ls(limit=MANY - 1)) == MANY - 1
    assert [owner.asked for owner in owners] == [["pages"], ["pages"], []]  # L1 has enough
    assert sum(owner.rows for owner in owners) <= max(2 * MANY, MAX_ROWS)

    monkeypatch.setattr(gateway_find, "MAX_ROWS", 10)
    for owner in owners:
        owner.asked, owner.rows = [], 0
    listed = client.pages_ls(limit=MANY + 5)
    assert len(listed) == MANY + 5 and {page["owner"] for page in listed} == {"w0", "w1"}
    assert [owner.asked for owner in owners] == [["pages"], ["pages"], []]
    assert sum(owner.rows for owner in owners) == MANY + 6  # one more tells that there are more
    assert {page["owner"] for page in client.pages_ls(tier="L3", limit=9)} == {"n0"}
    assert client.pages_ls(tier="remote") == []
    with pytest.raises(ClientError, match="limit must be at most 10000, got 10001"):
        client.pages_ls(limit=10_001)
