"""kill -9 of the CacheNode process while a worker writes through it: it opens at once, every page whole or absent."""

from __future__ import annotations

import json
import queue
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from node_kit import plain_chain
from tier_pages import SPEC, TENANT, VARIANT, envelope_of, page_key, payload_of

from kvtier.tier.pages.page import HEADER_BYTES, Envelope
from kvtier.tier.protocol.ipc import NodeClient
from kvtier.tier.protocol.messages import (
    Copied,
    Granted,
    Hello,
    HostPage,
    Loaded,
    LoadFailed,
    Locate,
    Located,
    Stored,
    StoredPage,
    ToWorker,
    WantSlots,
)

pytestmark = pytest.mark.slow

PAYLOAD = 128 * 1024
SLOT = PAYLOAD + HEADER_BYTES
L3_BYTES = 24 * SLOT
L4_BYTES = 24 * 2**20
KILLS = 30


@contextmanager
def cache_node(folder: Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """The node's process, and what it said when it was ready; killed at the end."""
    arguments = [folder / "s", PAYLOAD, L3_BYTES, folder / "l4", L4_BYTES, "slab"]
    process = subprocess.Popen(
        [
            sys.executable,
            str(Path(__file__).parents[1] / "kits" / "cache_node_process.py"),
            *map(str, arguments),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        assert process.stdin and process.stdout
        process.stdin.close()
        process.stdout.close()


class Worker:
    """Writes numbered pages through the node, and looks them up again."""

    def __init__(self, folder: Path) -> None:
        self.messages: queue.SimpleQueue[ToWorker | None] = queue.SimpleQueue()
        hello = Hello("w0", f"i{id(self)}", {SPEC: PAYLOAD}, {}, {"model": "none"})
        self.client = NodeClient.connect(
            folder / "s", hello, self.messages.put, lambda: self.messages.put(None)
        )

    def write_until_closed(self, numbers: Iterator[int]) -> None:
        """Store page after page until the node is gone."""
        try:
            while True:
                self.client.send(WantSlots(4, PAYLOAD))
                message = self.messages.get(timeout=120)
                if message is None:
                    return
                assert isinstance(message, Granted)
                pages = []
                for grant in message.grants:
                    number = next(numbers)
                    payload = payload_of(number, PAYLOAD)
                    envelope = envelope_of(number, payload)
                    slot = self.client.slot(grant)
                    slot[: len(envelope.pack())] = envelope.pack()
                    slot[HEADER_BYTES : HEADER_BYTES + PAYLOAD] = payload
                    pages.append(
                        StoredPage(
                            grant,
                            envelope.key,
                            VARIANT,
                            "",
                            SPEC,
                            envelope.root,
                            envelope.parent,
                            TENANT,
                            envelope.depth,
                            envelope.tokens,
                            envelope.checksum,
                            b"",
                        )
                    )
                self.client.send(Stored(pages))
        except ConnectionError:
            return

    def find(self, number: int) -> bool:
        """Is the page there? If so it must be whole."""
        chains = [plain_chain([page_key(number)], VARIANT)]
        self.client.send(Locate(f"r{number}", b"r" * 32, TENANT, 16, 0, 16, chains, 0.0))
        while True:
            match self.messages.get(timeout=120):
                case Located(host=[page, *_]) | Loaded(pages=[page, *_]):
                    self.look_at(number, page)
                    return True
                case Located(loading=[], host=[]) | LoadFailed():
                    return False
                case Located():
                    pass
                case other:
                    raise AssertionError(f"unexpected {other}")

    def look_at(self, number: int, page: HostPage) -> None:
        slot = self.client.slot(page.grant)
        envelope = Envelope.unpack(slot)
        payload = slot[HEADER_BYTES : HEADER_BYTES + PAYLOAD]
        assert envelope.key == page_key(number)
        envelope.verify(payload)
        assert payload == payload_of(number, PAYLOAD)
        self.client.send(Copied(f"r{number}", [(0, 0)], PAYLOAD, 0.001))


def test_a_killed_cachenode_opens_in_seconds_of_a_core_with_every_page_whole_or_absent(
    tmp_path: Path,
) -> None:
    rng = random.Random(5)
    written = 0

    def numbers() -> Iterator[int]:
        nonlocal written
        while True:
            written += 1
            yield written

    def begun(killer: threading.Timer, numbers: Iterator[int]) -> Iterator[int]:
        """The time runs from the first page on."""
        yield next(numbers)
        killer.start()
        yield from numbers

    found = 0
    for _ in range(KILLS):
        with cache_node(tmp_path) as (process, ready):
            assert ready["seconds"] < 5.0
            assert ready["notes"] == []
            worker = Worker(tmp_path)
            for number in rng.sample(range(max(1, written - 150), written + 1), min(written, 20)):
                found += worker.find(number)
            killer = threading.Timer(rng.uniform(0.02, 0.25), process.kill)
            worker.write_until_closed(begun(killer, numbers()))
            killer.join()
            worker.client.close()

    with cache_node(tmp_path) as (_, ready):
        assert ready["notes"] == []
        worker = Worker(tmp_path)
        left = [number for number in range(1, written + 1) if worker.find(number)]
        worker.client.close()
    assert found > 0
    assert left
