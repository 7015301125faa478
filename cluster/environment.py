"""What a deployment's processes find in their environment. To be set before Ray is imported: it reads it then."""

from __future__ import annotations

import secrets
from collections.abc import MutableMapping


def prepare(environment: MutableMapping[str, str], *, loopback: bool = True) -> None:
    """Set what Ray, its daemons and our actors, which all inherit it, are to go by.

    `loopback`: the whole Ray cluster is on this machine, so nothing of it listens on other addresses.
    """
    environment.update(
        {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",  # nobody else on this machine may run code in our processes
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_memory_monitor_refresh_ms": "0",  # its killer would take a worker for what other programs use
            "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin between steps take the cores from all others
            "TOKENIZERS_PARALLELISM": "false",
        }
    )
    if loopback:  # Ray turns a node address of 127.0.0.1 into an outside one unless it may not cluster at all
        environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
