"""What a deployment's processes find in their environment. To be set before Ray is imported: it reads it then."""

from __future__ import annotations

import secrets
from collections.abc import MutableMapping


def prepare(environment: MutableMapping[str, str]) -> None:
    """Set what Ray, its daemons and our actors, which all inherit it, are to go by."""
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
