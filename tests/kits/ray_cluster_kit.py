"""Ray clusters that aren't a deployment's own: a head, and machines that come and go, all on this one."""

from __future__ import annotations

import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from kvtier.cluster.machines.leftovers import remove

OBJECT_STORE_BYTES = 80 * 2**20


def joined_environment() -> dict[str, str]:
    """What Ray's own processes and those that join them must find in theirs."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONUNBUFFERED": "1",
    }


@contextmanager
def head(environment: Mapping[str, str], cpus: int, *more: str) -> Iterator[str]:
    """A cluster of one machine, as `ray start` with these options too makes it; its address."""
    folder = tempfile.mkdtemp(prefix="kvtier-test-", dir="/tmp")  # short: Ray's sockets lie there
    options = ["--head", "--port=0", "--include-dashboard=false", f"--temp-dir={folder}"]
    try:
        with machine(environment, cpus, *options, *more) as said:
            found = re.search(r"ray start --address='([^']+)'", said)
            assert found, said
            yield found[1]
    finally:
        remove(Path(folder))


@contextmanager
def machine(
    environment: Mapping[str, str], cpus: int, *options: str, within: Sequence[str] = ()
) -> Iterator[str]:
    """One machine of a cluster; what `ray start` said. It is gone at the end, like one that loses its power.

    `within` is the beginning of the command line, such as one that enters a network namespace.
    """
    command = [*within, sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--num-cpus={cpus}"]
    process = subprocess.Popen(
        [*command, f"--object-store-memory={OBJECT_STORE_BYTES}", *options],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield _said(process)
    finally:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for one in family:
            with suppress(psutil.NoSuchProcess):  # one that has just ended by itself
                one.kill()
        process.communicate()
        psutil.wait_procs(family[1:], timeout=10)


def _said(process: subprocess.Popen[str]) -> str:
    """All until it runs."""
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if "block forever" in line:
            return "".join(said)
    raise AssertionError("".join(said))
