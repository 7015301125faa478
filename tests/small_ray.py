"""A Ray of one machine for tests of single actors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray


@contextmanager
def small_ray(num_cpus: int = 2) -> Iterator[None]:
    """Until the block ends. Its processes find what tests import, so that a test may define the actors that it starts."""
    ray.init(
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        object_store_memory=80 * 2**20,
        _node_ip_address="127.0.0.1",
        runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).resolve().parent)}},
    )
    try:
        yield
    finally:
        ray.shutdown()
