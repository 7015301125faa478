"""A Ray of one machine for tests of single actors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from waiting import until


@contextmanager
def small_ray(num_cpus: int = 2) -> Iterator[None]:
    """Until the block ends. Its processes find what tests import, so that a test may define the actors that it starts."""
    tests = str(Path(__file__).resolve().parent)
    path = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
    ray.init(
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        object_store_memory=80 * 2**20,
        _node_ip_address="127.0.0.1",
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )
    try:
        yield
    finally:
        ray.shutdown()


def kill(actor: Any) -> None:
    """Kill an actor, and wait until its callers are told so: that comes some time after its death."""
    ray.kill(actor)
    until(lambda: is_dead(actor), "calls of a killed actor fail")


def is_dead(actor: Any) -> bool:
    """Whether Ray says so."""
    try:
        ray.get(actor.__ray_ready__.remote(), timeout=1.0)
    except RayActorError:
        return True
    except GetTimeoutError:
        pass
    return False
