"""A deployment that quantizes: smaller pages in L1, smaller ones yet in L4, and streams longer than the context."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deployment_kit import Shell, wait_for

from kvtier.cli.client import Client, ClientError, completion, connect

pytestmark = pytest.mark.slow

PROMPT = [(11 * i + 5) % 500 for i in range(100)]
PAGES = 6  # full ones of the prompt
CONTEXT = 256


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Iterator[Shell]:
    """Pages are INT8 in L1 and L3, INT4C in L4; the context is short."""
    formats = {"cache__format": "int8", "tiers__l4__format": "int4c", "model__max_context": CONTEXT}
    shell = Shell(tmp_path_factory.mktemp("formats"), tiny_llama, **formats)
    shell(*shell.up_arguments, "--detach")
    try:
        yield shell
    finally:
        shell("down")


@pytest.fixture(scope="module")
def client(up: Shell) -> Iterator[Client]:
    """A connection to it."""
    with connect(up.json("status")["endpoint"]) as connected:
        yield connected


def generate(client: Client, **options: Any) -> dict[str, Any]:
    """A completion of the prompt."""
    return completion(client.generate(PROMPT, **{"max_tokens": 8, **options}))


def tier(client: Client, name: str) -> dict[str, Any]:
    """One tier's statistics."""
    numbers: dict[str, Any] = client.stats()["tiers"][name]
    return numbers


def wait_for_l4(client: Client) -> None:
    """Until the prompt's pages are in L4."""
    wait_for(lambda: tier(client, "L4")["variants"].get("int4c", 0) >= PAGES, "the prompt in L4")


def leave_l4_alone(client: Client) -> None:
    """The prompt's pages are in L4, and in no tier above it."""
    wait_for_l4(client)
    for name in ("L1", "L3"):
        client.pages_evict(tier=name)
        wait_for(lambda name=name: tier(client, name)["pages"] == 0, f"{name} to be empty")


def test_status_names_the_format(up: Shell) -> None:
    assert "stored as int8" in up("status")


def test_stats_tell_what_each_tier_saves_and_in_which_formats(up: Shell, client: Client) -> None:
    generate(client)
    wait_for_l4(client)

    first, last = tier(client, "L1"), tier(client, "L4")
    assert set(first["variants"]) == {"int8"} and set(last["variants"]) == {"int4c"}
    assert 0.6 < first["saved"] < 0.75, "32 bits to 8, and scales"
    assert 0.7 < last["saved"] < 0.85, "32 bits to 4, and scales"
    assert first["saved"] == 1 - first["page_bytes"] / first["raw_bytes"]
    assert last["pages"] == sum(last["variants"].values())
    table = up("stats")
    assert "unquantized" in table and "int4c" in table


def test_a_page_of_l4_is_shown_with_what_it_was_made_from(up: Shell, client: Client) -> None:
    generate(client)
    wait_for_l4(client)

    copies = client.pages_ls(tier="L4")

    assert {(copy["variant"], copy["made_from"]) for copy in copies} == {("int4c", "int8")}
    assert "int4c of int8" in up("pages", "ls", "--tier", "L4")


def test_only_lossy_requests_find_what_l4_keeps_smaller(up: Shell, client: Client) -> None:
    cold = generate(client)
    leave_l4_alone(client)

    exact = generate(client, request_id="exact")
    notes = client.explain("exact")["notes"]
    leave_l4_alone(client)
    lossy = up.generate(PROMPT, "--lossy")

    assert exact["usage"]["computed_tokens"] == len(PROMPT)
    assert exact["token_ids"] == cold["token_ids"]
    assert ("computed", "variant") in {(note["tier"], note["reason"]) for note in notes}
    assert lossy["usage"]["cached_tokens"]["L4"] >= 16 * (PAGES - 1)


def test_a_stream_with_a_window_outgrows_the_context_in_bounded_memory(up: Shell, client: Client) -> None:
    with pytest.raises(ClientError, match="max_context is 256 tokens; a request with a window may be longer"):
        generate(client, max_tokens=600)

    options = ("--window", "64", "--sinks", "4", "--ignore-eos", "--max-tokens", "600")
    told = up.json("generate", "--token-ids", ",".join(map(str, PROMPT)), *options)

    assert len(told["token_ids"]) == 600
    passed = (len(PROMPT) + 600 - 64) // 16 - 1  # but for the sinks' page
    kept = 64 // 16  # which the same prompt would start from
    assert tier(client, "L1")["dropped_pages"] >= passed - kept


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"window": 8}, "window must be 0 .* or from 16"),
        ({"sinks": 4}, "sinks 4 need a window"),
        ({"window": 32, "sinks": 33}, "from 0 to the window"),
    ],
)
def test_a_window_that_cannot_be_is_refused_by_name(
    client: Client, options: dict[str, int], named: str
) -> None:
    with pytest.raises(ClientError) as refused:
        generate(client, **options)

    assert re.search(named, str(refused.value))
