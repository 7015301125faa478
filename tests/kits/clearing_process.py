"""Runs a node's cache that clears a tenant and is killed on the way, for tests: SIGKILL at the call that is named."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from node_kit import PAYLOAD_BYTES, SLOT_BYTES, SMALL_BYTES

from kvtier.tier.node.service import CacheService
from kvtier.tier.stores.ssd.clear_file import ClearFile
from kvtier.tier.stores.ssd.store import SsdTier


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    folder, store, step, number = sys.argv[1:]
    assert store in ("slab", "lmdb")
    service = CacheService(
        "n0",
        f"{folder}/run/sock",
        PAYLOAD_BYTES,
        16 * SLOT_BYTES,
        f"{folder}/l4",
        16 << 20,
        store,  # type: ignore[arg-type]
        min_payload_bytes=SMALL_BYTES,
    )
    service.start()
    if step == "end":  # the mark is taken away by the second save
        save = ClearFile.save

        def save_once(file: ClearFile) -> None:
            save(file)
            ClearFile.save = die  # type: ignore[method-assign,assignment]

        ClearFile.save = save_once  # type: ignore[method-assign]
    else:
        setattr(SsdTier, step, die)
    service.clear("ada", int(number))
    raise AssertionError(f"the clear went past {step}")


if __name__ == "__main__":
    main()
