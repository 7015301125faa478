"""The directory as it is deployed: an actor that is told by the publishers of other processes, and that may die."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from node_kit import PAYLOAD_BYTES
from ray.exceptions import RayError
from small_ray import kill, small_ray
from waiting import until

from kvtier.cluster.directory.actor import Directory
from kvtier.cluster.directory.locations import Held
from kvtier.cluster.node import CacheNodeProcess
from kvtier.tier.pages.page import TierName
from kvtier.tier.policy.base import PolicySettings
from kvtier.tier.protocol.kv_events import KEY_BYTES, Feed, Source
from kvtier.workers.actor import DecodeWorkerProcess, sender_to
from kvtier.workers.engine.kv_publisher import Publisher, PublishError
from kvtier.workers.requests.api import EngineRequest, SamplingParams
from kvtier.workers.scheduling.settings import EngineSettings

L1, L3 = TierName.HBM, TierName.HOST
PAGE_BYTES = 16 * 2 * 2 * 2 * 16 * 4  # of the tiny Llama


def key(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "big") + bytes(24)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A small local Ray."""
    with small_ray():
        yield


@pytest.fixture
def directory(cluster: None) -> Iterator[Any]:
    handle = Directory.remote()
    ray.get(handle.info.remote(), timeout=300)
    yield handle
    ray.kill(handle)


def answered(call: Callable[[], Any]) -> Any:
    """What an actor says; None while it can't."""
    try:
        return ray.get(call(), timeout=5)
    except RayError:
        return None


def test_a_killed_directory_is_told_everything_again_in_its_next_life(directory: Any) -> None:
    numbers = list(range(1, 3001))
    feed = Feed(Source("node:n0", "life", "n0", "", "host:1"), (L3,))
    publisher = Publisher(feed, sender_to(directory), lambda: {L3: [key(n) for n in numbers]})
    prompt = b"".join(key(n)[:KEY_BYTES] for n in numbers)
    whole = [Held("n0", "", L3, "host:1", 3000), Held("n0", "", TierName.SSD, "host:1", 3000)]
    publisher.start()
    try:
        until(lambda: ray.get(directory.lookup.remote(prompt)) == whole, "the pages are known")
        publisher.note(L3, [], [key(3000)])
        numbers.pop()
        until(
            lambda: Held(*ray.get(directory.lookup.remote(prompt))[0]).pages == 2999,
            "a page is known to be gone",
        )

        old = ray.get(directory.info.remote())["pid"]
        psutil.Process(old).kill()
        until(lambda: answered(lambda: directory.lookup.remote(prompt[:80])), "it is told again")

        until(lambda: Held(*ray.get(directory.lookup.remote(prompt))[0]).pages == 2999, "all of it")
        assert ray.get(directory.info.remote())["pid"] != old
        ray.get(directory.check.remote())
        ray.get(directory.wrong.remote("n0", None, key(11)[:KEY_BYTES]))
        assert Held(*ray.get(directory.lookup.remote(prompt))[0]).pages == 10
        assert ray.get(directory.stats.remote()).entries == 2998
    finally:
        publisher.close()


def test_a_directory_that_is_gone_is_a_publish_error(cluster: None) -> None:
    handle = Directory.options(max_restarts=0).remote()
    ray.get(handle.info.remote(), timeout=300)
    kill(handle)
    feed = Feed(Source("node:n0", "life", "n0", "", ""), ())
    feed.announce_snapshot()
    feed.begin_snapshot({})
    batch = feed.take(0.0)
    assert batch is not None

    with pytest.raises(PublishError, match="ActorDied"):
        sender_to(handle)(batch)


def test_a_worker_and_its_node_tell_where_a_prompt_is(
    directory: Any, tiny_llama: Path, tmp_path: Path
) -> None:
    node = CacheNodeProcess(
        node_id="n0",
        socket_path=str(tmp_path / "s" / "node"),
        payload_bytes=max(PAYLOAD_BYTES, PAGE_BYTES),
        l3_bytes=4 << 20,
        l4_path=str(tmp_path / "l4"),
        l4_bytes=0,
        policy=PolicySettings(),
        write="through",
        shares={},
    )
    worker = DecodeWorkerProcess(
        worker_id="w0",
        node_id="n0",
        socket_path=str(tmp_path / "s" / "node"),
        model_path=str(tiny_llama),
        tenants={"default": ""},
        engine=EngineSettings(),
        dtype="float32",
        page_tokens=16,
        l1_bytes=64 * PAGE_BYTES,
        threads=1,
        max_context=1024,
    )
    try:
        worker.connect_directory(directory, "host:1")
        node.connect_directory(directory, "host:1")
        worker.submit(EngineRequest("r", "default", tuple(range(5, 105)), SamplingParams(max_tokens=4)))
        until(lambda: len(worker._worker.holds()) == 6 and node.idle(), "the prompt's pages are there")
        until(lambda: len(node._service.holds()[L3]) == 6, "and are saved")

        ordered = sorted(worker.pages(), key=lambda page: page.depth)
        keys = b"".join(bytes.fromhex(page.key)[:KEY_BYTES] for page in ordered)
        until(lambda: len(_known(directory, keys, 6)) == 3, "all is known")
        assert {(held.node_id, held.worker_id, held.tier) for held in _known(directory, keys, 6)} == {
            ("n0", "w0", L1),
            ("n0", "", L3),
            ("n0", "", TierName.SSD),
        }

        worker.clear()
        until(lambda: len(_known(directory, keys, 6)) == 2, "L1 has nothing any more")
        node.connect_directory(directory, "host:2")
        until(lambda: {h.address for h in _known(directory, keys, 6)} == {"host:2"}, "it lives elsewhere")
    finally:
        worker.stop()
        node.stop(0)


def _known(directory: Any, keys: bytes, pages: int) -> list[Held]:
    """Those who have so many pages, when all that answer have them."""
    found = [Held(*one) for one in ray.get(directory.lookup.remote(keys))]
    return found if all(held.pages == pages for held in found) else []
