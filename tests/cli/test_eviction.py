"""Deployments whose tiers are too small for what is asked: each policy keeps the tokens, and a closed session's pages go first.

Real processes, with a tiny random model; its own tokens are those of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deployment_kit import Shell
from runner_kit import random_tokens
from tiny_models import VOCAB
from transformers import AutoModelForCausalLM

from kvtier.cli.client import Client, completion, connect

pytestmark = pytest.mark.slow

PAGE_TOKENS = 16
PAGE_BYTES = PAGE_TOKENS * 2 * 2 * 2 * 16 * 4  # tokens, layers, k and v, heads, head size, float32
L1_PAGES = 64
NEW_TOKENS = 8
SHARED = random_tokens(1, 5 * PAGE_TOKENS, VOCAB).tolist()
DEMOTING = "rvi, demoting"
DEPLOYMENTS: dict[str, dict[str, object]] = {
    DEMOTING: {"cache__policy": "rvi", "tiers__write": "demote"},
    "lru": {"cache__policy": "lru"},
    "score": {"cache__policy": "score"},
}


def own(seed: int, pages: int = 5) -> list[int]:
    """Tokens that no other prompt has."""
    tokens: list[int] = random_tokens(seed, pages * PAGE_TOKENS, VOCAB).tolist()
    return tokens


PROMPTS = [SHARED + own(100 + number) for number in range(12)]  # of 10 pages: more than L1 holds, or L3


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> list[list[int]]:
    """What transformers' own generate says after each prompt."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    ids = torch.tensor(PROMPTS)
    with torch.inference_mode():
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
    answers: list[list[int]] = whole[:, ids.shape[1] :].tolist()
    return answers


@pytest.fixture(scope="module", params=DEPLOYMENTS)
def kind(request: pytest.FixtureRequest) -> str:
    """Which deployment."""
    return str(request.param)


@pytest.fixture(scope="module")
def shell(kind: str, tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Iterator[Shell]:
    """It runs."""
    small = {"tiers__l1__bytes": L1_PAGES * PAGE_BYTES, "tiers__l3__bytes": L1_PAGES * PAGE_BYTES}
    made = Shell(tmp_path_factory.mktemp("eviction"), tiny_llama, **small, **DEPLOYMENTS[kind])
    made(*made.up_arguments, "--detach")
    try:
        yield made
    finally:
        made("down")


@pytest.fixture
def client(shell: Shell) -> Iterator[Client]:
    """A connection to it."""
    with connect(shell.json("status")["endpoint"]) as connected:
        yield connected


def ask(client: Client, prompt: list[int], **options: Any) -> dict[str, Any]:
    """A whole completion."""
    done = completion(client.generate(prompt, max_tokens=NEW_TOKENS, **options))
    usage = done["usage"]
    assert sum(usage["cached_tokens"].values()) + usage["computed_tokens"] == len(prompt)
    return done


def pages_in_l1(client: Client, prompt: list[int]) -> int:
    """How many pages at the prompt's head are in L1."""
    held = 0
    for page in client.lookup(prompt)["pages"]:
        if "L1" not in page["tiers"]:
            break
        held += 1
    return held


def test_every_prompt_gets_the_models_own_tokens_whatever_has_left(
    client: Client, expected: list[list[int]]
) -> None:
    first = [ask(client, prompt) for prompt in PROMPTS]
    again = [ask(client, prompt) for prompt in reversed(PROMPTS)][::-1]

    assert [done["token_ids"] for done in first] == expected
    assert [done["token_ids"] for done in again] == expected
    stats = client.stats()["tiers"]
    assert stats["L1"]["evicted_pages"] > 0
    below = [done["usage"]["cached_tokens"] for done in again]
    assert sum(found["L3"] + found["L4"] for found in below) > 0, "what left L1 was found further down"


def test_a_closed_sessions_own_pages_leave_l1_first_and_what_it_shared_stays(client: Client) -> None:
    client.pages_clear()
    kept, closed = SHARED + own(7), SHARED + own(8, 20)
    ask(client, kept, session_id="kept", session_state="open")
    ask(client, closed, session_id="closed", session_state="closed")

    filler = 1000
    while (held := pages_in_l1(client, closed)) > 15:
        assert pages_in_l1(client, kept) == 10, f"an older page left before {held - 5} of the closed session"
        assert filler < 1000 + L1_PAGES, "nothing has left"
        ask(client, own(filler, 2))
        filler += 1

    assert held >= 5
    assert pages_in_l1(client, kept) == 10


def test_stats_name_the_policy_of_each_tier(kind: str, shell: Shell, client: Client) -> None:
    tiers = client.stats()["tiers"]
    name = str(DEPLOYMENTS[kind]["cache__policy"])

    assert all(tiers[tier]["policy"].startswith(name) for tier in ("L1", "L3", "L4"))
    assert name in shell("stats").partition("evicts by")[2]


@pytest.mark.parametrize("kind", [DEMOTING], indirect=True)
def test_after_a_restart_the_tokens_are_the_same_and_what_was_saved_is_found(
    shell: Shell, expected: list[list[int]]
) -> None:
    with connect(shell.json("status")["endpoint"]) as client:
        for prompt in PROMPTS:
            ask(client, prompt)
    shell("down")
    shell(*shell.up_arguments, "--detach")

    with connect(shell.json("status")["endpoint"]) as client:
        done = [ask(client, prompt) for prompt in PROMPTS]

    assert [each["token_ids"] for each in done] == expected
    found = [each["usage"]["cached_tokens"]["L4"] for each in done]
    assert sum(found) > len(SHARED) + len(PROMPTS) * len(own(100)) // 2, (
        "most of what only one prompt has, too"
    )
