"""Two nodes as a user starts them with `tiers.write: demote`: what only one worker's L1 has, the other node's worker gets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from deployment_kit import Shell, wait_for

from kvtier.cli.client import Client, completion, connect

pytestmark = pytest.mark.slow

CONFIG = Path(__file__).resolve().parents[2] / "cluster" / "two-nodes.yaml"
PAGE_TOKENS = 16


@pytest.fixture
def client(tmp_path: Path, tiny_llama: Path) -> Iterator[Client]:
    # Such a small model computes any prompt sooner than a page can be fetched.
    up = Shell(tmp_path, tiny_llama, cache__load="always", tiers__write="demote")
    try:
        up("up", str(CONFIG), *up.up_arguments[1:], "--detach")
        with connect(json.loads((up.state / "deployment.json").read_text())["endpoint"]) as client:
            yield client
    finally:
        if (up.state / "deployment.json").exists():
            up("down")


def test_what_only_one_workers_l1_has_the_other_node_fetches(client: Client) -> None:
    """Each try is with a prompt of its own. The directory hears of pages a moment after they are there."""
    rng = Random(6)

    def fetched() -> bool:
        before = client.status()["directory"]["entries"]
        prompt = [rng.randrange(500) for _ in range(300)]
        pages = len(prompt) // PAGE_TOKENS
        first = completion(client.generate(prompt, max_tokens=8, worker="worker-0"))
        wait_for(
            lambda: client.status()["directory"]["entries"] >= before + pages, "the directory to hear of it"
        )
        held = client.lookup(prompt)["pages"]
        assert len(held) == pages and {tier for page in held for tier in page["tiers"]} == {"L1"}

        second = completion(client.generate(prompt, max_tokens=8, worker="worker-1"))

        assert second["token_ids"] == first["token_ids"]
        if second["usage"]["cached_tokens"]["remote"] == 0:
            return False  # the hint came too late
        notes = client.explain(second["request_id"])["notes"]
        assert (notes[0]["start"], notes[0]["end"], notes[0]["tier"]) == (0, pages * PAGE_TOKENS, "remote")
        return True

    wait_for(fetched, "pages from the other node")
