"""The Cache verbs over several owners, by real gRPC."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
from gateway_kit import EchoWorker, Served, counted, echo_info, page_info, serving
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.cli.client import Client, ClientError, completion, connect
from kvtier.cluster.gateway.cache_api import cache as gateway_cache
from kvtier.cluster.gateway.cache_api.results import merged_outcome
from kvtier.cluster.gateway.ports import OwnerDown
from kvtier.cluster.gateway.requests.reading import Refusal
from kvtier.tier.pages.identity import page_keys, root_key, tenant_digest, tenant_salt
from kvtier.tier.pages.page import TierName
from kvtier.tier.stats import Snapshot
from kvtier.tier.stores.base import Outcome

A, B, C = "aa11" + "0" * 60, "aa22" + "0" * 60, "bb33" + "0" * 60
MISSING = "cc44" + "0" * 60


@pytest.fixture
def served() -> Iterator[Served]:
    """A worker with pages A and B in L1, and a node with A and C in L3; C belongs to another tenant and is pinned."""
    node = EchoWorker(echo_info("n0"))
    node.pages_held = {
        A: page_info(A, TierName.HOST, "n0", "default"),
        C: page_info(C, TierName.HOST, "n0", "acme", pinned=True),
    }
    with serving(nodes=[node]) as made:
        made.workers[0].pages_held = {
            A: page_info(A, TierName.HBM, "w0", "default"),
            B: page_info(B, TierName.HBM, "w0", "default", depth=1),
        }
        yield made


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    """A connection to it."""
    with connect(served.endpoint) as connected:
        yield connected


def test_stats_add_up_all_owners(client: Client) -> None:
    stats = client.stats()

    assert set(stats["tiers"]) == {"L1", "L2", "L3", "L4", "remote"}
    assert stats["tiers"]["L1"] == {
        "capacity_bytes": 200,
        "used_bytes": 80,
        "pages": 8,
        "lookups_tokens": 40,
        "hit_tokens": 10,
        "hit_rate": 0.25,
        "promoted_pages": 0,
        "demoted_pages": 0,
        "evicted_pages": 0,
        "bytes_in": 0,
        "bytes_out": 0,
        "load_ms_p50": 0.0,
        "load_ms_p99": 0.0,
        "corrupt_pages": 0,
        "page_bytes": 60,
        "raw_bytes": 120,
        "variants": {"fp8_e4m3": 6, "int4c": 2},
        "saved": 0.5,
        "converted_pages": 0,
        "dropped_pages": 0,
        "policy": "rvi",
        "fallbacks": 2,
        "refused_writes": 6,
    }
    assert (stats["tiers"]["L4"]["variants"], stats["tiers"]["L4"]["saved"]) == ({}, 0.0)
    totals = {name: value for name, value in stats.items() if name != "tiers"}
    assert totals == {
        "requests": 4,
        "prompt_tokens": 40,
        "computed_tokens": 30,
        "cached_tokens": 10,
        "aborted_prompt_tokens": 0,
        "failed_requests": 0,
        "page_fill": 1.0,
        "bad_messages": 0,
    }


def test_what_a_dead_worker_counted_stays_and_what_it_held_does_not(served: Served, client: Client) -> None:
    before = client.stats()

    served.call(served.core.lose_worker, "w0", "gone")

    for _ in range(2):
        after = client.stats()
        assert after["tiers"]["L1"] == before["tiers"]["L1"] | {
            "capacity_bytes": 100,
            "used_bytes": 40,
            "pages": 4,
            "page_bytes": 30,
            "raw_bytes": 60,
            "variants": {"fp8_e4m3": 3, "int4c": 1},
        }
        assert {**after, "tiers": None} == {**before, "tiers": None}


def test_counters_go_on_where_a_restarted_node_left_them(served: Served, client: Client) -> None:
    node = served.cache.nodes[0].port
    before = client.stats()

    for requests, total in ((0, 4), (1, 5), (1, 5)):
        node.counters = counted(requests)  # type: ignore[attr-defined]
        after = client.stats()
        assert after["requests"] == total
        assert after["prompt_tokens"] == 10 * total
        assert after["tiers"]["L1"]["hit_tokens"] + after["computed_tokens"] == after["prompt_tokens"]
        assert after["tiers"]["L1"]["capacity_bytes"] == before["tiers"]["L1"]["capacity_bytes"]


def test_calls_that_wait_for_counters_are_answered_together(
    served: Served, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0
    stats = served.workers[0].stats

    async def slow() -> Snapshot:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0.05)
        return await stats()

    async def all_at_once() -> list[int]:
        calls = [asyncio.ensure_future(served.cache.stats()) for _ in range(3)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # they are being answered: who comes now is told of what is counted after that
        served.workers[0].counters = counted(3)
        calls += [asyncio.ensure_future(served.cache.stats()) for _ in range(3)]
        calls[4].cancel()
        done = await asyncio.gather(*calls, return_exceptions=True)
        return [0 if isinstance(one, BaseException) else one.requests for one in done]

    monkeypatch.setattr(served.workers[0], "stats", slow)

    requests = served.call(all_at_once)

    assert requests[3:] == [5, 0, 5] and set(requests[:3]) <= {4, 5}
    assert asked == 2


async def silence(*_: object) -> None:
    """An answer that never comes."""
    await asyncio.Event().wait()


def test_an_owner_that_does_not_answer_is_named_and_not_waited_for(
    served: Served, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_cache, "ASK_S", 0.2)
    monkeypatch.setattr(gateway_cache, "WORK_S", 0.2)
    questions = ("stats", "pages", "pages_of", "held", "keys_with")
    for verb in (*questions, "pin", "unpin", "evict", "evict_all", "verify", "verify_all"):
        monkeypatch.setattr(served.cache.nodes[0].port, verb, silence)
    monkeypatch.setattr(served.workers[0], "explain", silence)

    for ask, named in (
        (client.stats, "n0"),
        (client.pages_ls, "n0"),
        (lambda: client.pages_show(A), "n0"),
        (lambda: client.pages_show(A[:8]), "n0"),
        (lambda: client.pages_pin([A]), "n0"),
        (lambda: client.pages_evict(tier="L3"), "n0"),
        (client.pages_verify, "n0"),
        (lambda: client.lookup([1] * 8), "n0"),
        (lambda: client.explain("mine"), "w0"),
    ):
        with pytest.raises(ClientError, match=rf"\b{named} does not answer within 0\.2 s") as refused:
            ask()
        assert refused.value.status == "UNAVAILABLE"


def test_pages_are_listed_highest_tier_first_with_tenants_by_name(client: Client) -> None:
    pages = client.pages_ls()

    places = [(page["key"], page["tier"], page["owner"]) for page in pages]
    assert places[:2] == [(A, "L1", "w0"), (B, "L1", "w0")]
    assert set(places[2:]) == {(A, "L3", "n0"), (C, "L3", "n0")}
    assert {page["key"]: page["tenant"] for page in pages} == {A: "default", B: "default", C: "acme"}
    assert set(pages[0]) == {
        "key",
        "tier",
        "owner",
        "tenant",
        "root",
        "parent",
        "variant",
        "depth",
        "tokens",
        "nbytes",
        "uses",
        "idle_s",
        "pinned",
        "readers",
        "state",
        "made_from",
    }


def test_a_converted_page_is_listed_with_what_it_was_made_from(served: Served, client: Client) -> None:
    small = page_info(A, TierName.SSD, "n0", "default", variant="int4c", made_from="fp8_e4m3")
    served.cache.nodes[0].port.pages_held["small"] = small  # type: ignore[attr-defined]

    forms = {(page["tier"], page["variant"], page["made_from"]) for page in client.pages_show(A)}

    assert forms == {("L1", "fp32", ""), ("L3", "fp32", ""), ("L4", "int4c", "fp8_e4m3")}


def test_pages_are_listed_by_tenant_and_tier_up_to_a_limit(client: Client) -> None:
    assert [page["key"] for page in client.pages_ls(tenant="acme")] == [C]
    assert {page["key"] for page in client.pages_ls(tier="L3")} == {A, C}
    assert len(client.pages_ls(limit=3)) == 3
    with pytest.raises(ClientError, match="tier must be one of L1, .* got 'L9'"):
        client.pages_ls(tier="L9")


def test_a_page_is_shown_by_the_head_of_its_key_if_only_it_has_it(client: Client) -> None:
    assert [page["tier"] for page in client.pages_show("AA11")] == ["L1", "L3"]

    for key, status, message in (
        ("bb33" + "1", "NOT_FOUND", "no tier holds"),
        ("aa", "INVALID_ARGUMENT", "4 to 64 hex digits"),
        ("zzzz", "INVALID_ARGUMENT", "got 'zzzz'"),
    ):
        with pytest.raises(ClientError, match=message) as refused:
            client.pages_show(key)
        assert refused.value.status == status


def test_a_head_that_several_pages_have_is_refused_with_their_number(served: Served, client: Client) -> None:
    other = "aa11" + "f" * 60
    served.workers[0].pages_held[other] = page_info(other, TierName.HBM, "w0", "default")

    for verb in (client.pages_show, lambda key: client.pages_evict([key])):
        with pytest.raises(ClientError, match="2 pages have keys that begin with aa11"):
            verb("aa11")


def test_outcomes_are_told_per_key_and_owner_and_counted(client: Client) -> None:
    result = client.pages_evict([A, "bb33", MISSING, "cc44"])

    assert result["results"] == [
        {"key": A, "outcome": "ACCEPTED", "owners": {"n0": "ACCEPTED", "w0": "ACCEPTED"}},
        {"key": C, "outcome": "REJECTED", "owners": {"n0": "REJECTED"}},
        {"key": MISSING, "outcome": "MISSING", "owners": {}},
        {"key": "cc44", "outcome": "MISSING", "owners": {}},
    ]
    assert result["counts"] == {"ACCEPTED": 1, "MISSING": 2, "REJECTED": 1}


def test_every_verb_that_takes_keys_asks_all_owners(client: Client) -> None:
    for verb in (client.pages_pin, client.pages_unpin, client.pages_evict, client.pages_verify):
        assert verb([A])["counts"] == {"ACCEPTED": 1}
    for verb in (client.pages_pin, client.pages_unpin, client.pages_evict):
        with pytest.raises(ClientError, match="at least one"):
            verb([])


def test_evict_takes_a_page_from_one_tier_or_all_pages_of_a_tier(client: Client) -> None:
    assert client.pages_evict([A], tier="L1")["results"][0]["owners"] == {"w0": "ACCEPTED"}
    assert client.pages_evict(tier="L1") == {"results": [], "counts": {"ACCEPTED": 2}}  # A and B
    with pytest.raises(ClientError, match="tier must be one of L1, L2, L3, L4, remote, got 'L9'"):
        client.pages_evict(tier="L9")


def test_clear_and_verify_of_all_count_everything_and_list_what_was_not_done(client: Client) -> None:
    cleared = client.pages_clear(tenant="default")
    assert (cleared["results"], cleared["counts"]) == ([], {"ACCEPTED": 2})
    for everything in (client.pages_clear(), client.pages_verify()):
        assert everything["counts"] == {"ACCEPTED": 2, "REJECTED": 1}
        assert [result["key"] for result in everything["results"]] == [C]


def test_a_tenant_nothing_knows_is_refused_where_pages_are_listed_or_cleared(client: Client) -> None:
    for verb in (client.pages_ls, client.pages_clear):
        with pytest.raises(ClientError, match="unknown tenant 'acne'") as refused:
            verb(tenant="acne")
        assert refused.value.status == "PERMISSION_DENIED"


def test_a_tenant_that_the_configuration_lost_goes_by_its_digest(served: Served, client: Client) -> None:
    port = served.cache.nodes[0].port
    port.pages_held[B] = page_info(B, TierName.SSD, "n0", "gone")  # type: ignore[attr-defined]
    digest = tenant_digest("gone").hex()

    [page] = client.pages_ls(tenant=digest.upper())
    assert (page["key"], page["owner"], page["tenant"]) == (B, "n0", digest)
    cleared = client.pages_clear(tenant=digest)
    assert (cleared["results"], cleared["counts"]) == ([], {"ACCEPTED": 1})
    assert {page["key"] for page in client.pages_ls(tenant=tenant_digest("default").hex())} == {A, B}


def test_explain_asks_the_others_where_a_worker_cannot_be_reached() -> None:
    async def unreachable(*_: object) -> None:
        raise Refusal(grpc.StatusCode.UNAVAILABLE, "w0 can't be reached now: try again")

    with serving(workers=2) as served, connect(served.endpoint) as client:
        completion(client.generate([1, 2], max_tokens=2, request_id="mine", worker="w1"))
        served.workers[0].explain = unreachable  # type: ignore[assignment, method-assign]

        assert client.explain("mine")["worker"] == "w1"
        with pytest.raises(ClientError, match="w0 can't be reached now") as refused:
            client.explain("no one's")
        assert refused.value.status == "UNAVAILABLE"


def test_explain_asks_only_those_who_had_the_request() -> None:
    with serving(workers=3) as served, connect(served.endpoint) as client:
        completion(client.generate([1, 2], max_tokens=2, request_id="mine", worker="w1"))
        for worker in (served.workers[0], served.workers[2]):
            worker.explain = silence  # type: ignore[assignment, method-assign]

        assert client.explain("mine")["worker"] == "w1"


def test_explain_tells_what_the_worker_remembers(client: Client) -> None:
    completion(client.generate([1, 2, 3, 4], max_tokens=1, request_id="mine"))

    explanation = client.explain("mine")

    assert explanation["worker"] == "w0"
    assert explanation["usage"]["cached_tokens"]["L1"] == 2
    assert explanation["preemptions"] == 1
    assert explanation["notes"] == [
        {"start": 0, "end": 2, "tier": "L1", "reason": "", "detail": ""},
        {
            "start": 2,
            "end": 4,
            "tier": "computed",
            "reason": "never_stored",
            "detail": "no tier has had it",
        },
    ]
    with pytest.raises(ClientError, match="no worker remembers request 'other'") as refused:
        client.explain("other")
    assert refused.value.exit_code == 4


def test_lookup_names_the_pages_of_a_prompt_that_are_held_and_where(served: Served, client: Client) -> None:
    prompt = list(range(1, 15))
    tokens = np.asarray(prompt, dtype=np.int32)
    keys = [
        key.hex() for key in page_keys(root_key({"model": "echo"}), tenant_salt("acme", "salt"), tokens, 4)
    ]
    served.workers[0].pages_held[keys[0]] = page_info(keys[0], TierName.HBM, "w0", "acme")
    node = served.cache.nodes[0].port
    for key in (keys[0], keys[1]):
        page = page_info(key, TierName.SSD, "n0", "acme", variant="int4c", made_from="fp32")
        node.pages_held[key] = page  # type: ignore[attr-defined]

    found = client.lookup(prompt, tenant="acme")

    assert found == {
        "prompt_tokens": 14,
        "pages": [
            {"key": keys[0], "start": 0, "end": 4, "tiers": ["L1", "L4"], "variants": ["fp32", "int4c"]},
            {"key": keys[1], "start": 4, "end": 8, "tiers": ["L4"], "variants": ["int4c"]},
        ],
    }
    assert client.lookup(prompt)["pages"] == []
    with pytest.raises(ClientError, match="unknown tenant"):
        client.lookup(prompt, tenant="nothing")


def test_an_owner_found_dead_is_left_out_and_shown(served: Served, client: Client) -> None:
    async def gone(*_: object) -> None:
        raise OwnerDown("its process ended")

    served.cache.nodes[0].port.pages = gone  # type: ignore[method-assign, assignment]

    assert {page["owner"] for page in client.pages_ls()} == {"w0"}
    [node] = client.status()["nodes"]
    assert (node["health"], node["detail"]) == ("dead", "its process ended")
    assert client.stats()["requests"] == 2


def test_what_an_owner_says_is_wrong_with_it_is_shown(served: Served, client: Client) -> None:
    served.cache.nodes[0].port.wrong = "the disk is full"  # type: ignore[attr-defined]
    served.workers[0].wrong = "no connection to its node"

    status = client.status()

    assert [(n["health"], n["detail"]) for n in status["nodes"]] == [("unhealthy", "the disk is full")]
    assert [(w["health"], w["detail"]) for w in status["workers"]] == [
        ("unhealthy", "no connection to its node")
    ]


def test_a_nodes_notes_are_in_the_status(client: Client) -> None:
    [node] = client.status()["nodes"]

    assert (node["id"], node["health"], node["notes"]) == ("n0", "healthy", ["started fresh"])


@settings(deadline=None)
@given(st.lists(st.sampled_from(Outcome)))
def test_a_merged_outcome_never_depends_on_order_and_never_claims_more_than_was_done(
    outcomes: list[Outcome],
) -> None:
    merged = merged_outcome(outcomes)

    for order in itertools.islice(itertools.permutations(outcomes), 24):
        assert merged_outcome(order) is merged
    if merged is Outcome.ACCEPTED:
        assert set(outcomes) == {Outcome.ACCEPTED}
