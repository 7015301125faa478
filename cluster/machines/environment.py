"""What a deployment's processes find in their environment. To be set before Ray is imported: it reads it then."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, MutableMapping
from pathlib import Path


def prepare(environment: MutableMapping[str, str], *, is_ours: bool = True) -> None:
    """Set what Ray, its daemons and our actors, which all inherit it, are to go by.

    `is_ours`: this process starts the whole Ray cluster, all of it on this machine, so nothing of it listens on other
    addresses, and nothing else gets in. A cluster that is joined has a token of its own, or none: what is found of it is shown.
    """
    environment.update(
        {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_memory_monitor_refresh_ms": "0",  # its killer would take a worker for what other programs use
            "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin between steps take the cores from all others
            "TOKENIZERS_PARALLELISM": "false",
            "GRPC_ENABLE_FORK_SUPPORT": "0",  # else it starts its threads in the child that writes a recording's state
            # When its raylet dies, Ray ends a driver without a word if that driver's parent is gone too, and who has
            # detached a supervisor is. It looks for this process instead; each raylet tells its own workers another.
            "RAY_RAYLET_PID": str(os.getpid()),
        }
    )
    if not is_ours:
        environment.setdefault("RAY_BACKEND_LOG_LEVEL", "error")  # what can't be joined is told in one line
        if _has_token(environment):  # shown in this mode only; a cluster without tokens doesn't mind
            environment.setdefault("RAY_AUTH_MODE", "token")
    else:
        environment["RAY_AUTH_MODE"] = "token"  # nothing else on this machine may run code in our processes
        environment["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        # Ray turns a node address of 127.0.0.1 into an outside one unless it may not cluster at all.
        environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        # Ray's default of 15 gives decode steps the leavings of all else that runs on the machine.
        environment.setdefault("RAY_worker_niceness", "0")


def _has_token(environment: Mapping[str, str]) -> bool:
    """Whether Ray would find a token, in the places where it looks."""
    if any(environment.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        return True
    return Path(environment.get("HOME", "~"), ".ray", "auth_token").expanduser().is_file()
