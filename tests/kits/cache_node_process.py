"""Runs a CacheService in a process of its own, for tests that kill it: prints "ready SECONDS NOTES", ends with stdin."""

from __future__ import annotations

import json
import sys

from waiting import cpu_s

from kvtier.tier.node.service import CacheService


def main() -> None:
    socket_path, payload_bytes, l3_bytes, l4_path, l4_bytes, store = sys.argv[1:]
    assert store in ("slab", "lmdb")
    start_s = cpu_s()
    service = CacheService(
        "n0",
        socket_path,
        int(payload_bytes),
        int(l3_bytes),
        l4_path,
        int(l4_bytes),
        store,  # type: ignore[arg-type]
    )
    service.start()
    print(json.dumps({"seconds": cpu_s() - start_s, "notes": service.notes()}), flush=True)
    sys.stdin.read()
    service.check()
    service.stop(5.0)


if __name__ == "__main__":
    main()
