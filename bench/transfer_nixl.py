#!/usr/bin/env python3
"""NIXL (UCX) between two processes of this machine, for bench/transfer.py: seconds of each round, as JSON.

  bench/transfer_nixl.py PAGE_BYTES PAGES ROUNDS

One agent registers pages, the other reads all of them into its own, checked once against what was written.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np

WAYS = {"NIXL, as UCX chooses": "all", "NIXL over TCP": "tcp"}


def agent(name: str) -> Any:
    """With UCX alone."""
    from nixl._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


def pages(agent: Any, nbytes: int, count: int, fill: int) -> tuple[Any, Any]:
    """The memory, and its pages as NIXL's descriptors."""
    memory = np.full(nbytes * count, fill, np.uint8)
    base = memory.ctypes.data
    agent.register_memory(agent.get_reg_descs([(base, memory.nbytes, 0, "")], "DRAM"))
    rows = [(base + number * nbytes, nbytes, 0) for number in range(count)]
    return memory, agent.get_xfer_descs(rows, "DRAM")


def serve(nbytes: int, count: int) -> None:
    """Say where the pages are, and wait."""
    mine = agent("target")
    _, descriptors = pages(mine, nbytes, count, 7)
    packed = [mine.get_agent_metadata(), mine.get_serialized_descs(descriptors)]
    print("HERE " + json.dumps([base64.b64encode(part).decode() for part in packed]), flush=True)
    sys.stdin.read()


def read(nbytes: int, count: int, rounds: int) -> list[float]:
    """Seconds of each round; two before are not counted."""
    command = [sys.executable, __file__, "--serve", str(nbytes), str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as target:
        assert target.stdin is not None and target.stdout is not None
        line = next(line for line in target.stdout if line.startswith("HERE "))
        metadata, descriptors = (base64.b64decode(part) for part in json.loads(line[5:]))
        mine = agent("initiator")
        memory, local = pages(mine, nbytes, count, 0)
        name = mine.add_remote_agent(metadata)
        remote = mine.deserialize_descs(descriptors)
        seconds = []
        for number in range(-2, rounds):
            start = time.perf_counter()
            handle = mine.initialize_xfer("READ", local, remote, name)
            state = mine.transfer(handle)
            while state not in ("DONE", "ERR"):
                state = mine.check_xfer_state(handle)
            elapsed = time.perf_counter() - start
            assert state == "DONE", state
            mine.release_xfer_handle(handle)
            if number >= 0:
                seconds.append(elapsed)
        assert (memory == 7).all()
        target.stdin.close()
    return seconds


def main() -> None:
    """Each way in a process of its own: UCX reads its environment once."""
    if sys.argv[1] == "--serve":
        serve(int(sys.argv[2]), int(sys.argv[3]))
    elif sys.argv[1] == "--read":
        print(json.dumps(read(*(int(number) for number in sys.argv[2:]))))
    else:
        found = {}
        for name, transports in WAYS.items():
            environment = {**os.environ, "UCX_TLS": transports}
            done = subprocess.run(
                [sys.executable, __file__, "--read", *sys.argv[1:]],
                env=environment,
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            )
            found[name] = json.loads(done.stdout.strip().splitlines()[-1])
        print(json.dumps(found))


if __name__ == "__main__":
    main()
