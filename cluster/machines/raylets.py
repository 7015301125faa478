"""Starts Ray on this machine, with more than one raylet to try many nodes out, or joins a cluster that runs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import SubprocessError
from typing import Any

import ray
from ray._private import utils as ray_utils
from ray._private import worker as ray_worker
from ray._private.accelerators import get_accelerator_manager_for_resource
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray.exceptions import RayError

from kvtier.cluster.config.nodes import RayConfig
from kvtier.cluster.machines.addresses import unreachable
from kvtier.cluster.machines.leftovers import descendants, end

_ATTEMPTS = 2
REVIVE_S = 2.0  # before a raylet that could not be started again is tried again; twice as long each time
REVIVE_MOST_S = 60.0
_LOOPBACK = "127.0.0.1"  # holds by what environment.prepare has set
_OBJECT_STORE_BYTES = 80 * 2**20  # Ray refuses less than 75 MiB; no page bytes ever go there


class RayUnavailable(RuntimeError):
    """Ray doesn't start, or can't be joined; the message says why and the way out."""


class RaySlow(RayUnavailable):
    """Its daemons took longer than the half minute that Ray gives them: the next attempt may go well."""


def raylet_resource(number: int) -> str:
    """The resource that only the raylet of this number has, where there are several on a machine."""
    return f"kvtier-raylet-{number}"


def cluster_address(address: str) -> str:
    """HOST:PORT of the cluster that ray.address names; auto: of the one that Ray finds on this machine.

    Raises RayUnavailable where nothing answers there.
    """
    try:
        found = canonicalize_bootstrap_address_or_die(address) if address == "auto" else address
    except (ConnectionError, ValueError) as error:
        raise RayUnavailable(
            f"no Ray cluster is found for ray.address auto ({_first_line(error)}): name one with ray.address HOST:PORT, "
            "or start one here with local"
        ) from error
    if problem := unreachable(found):  # Ray itself would try for minutes
        raise RayUnavailable(f"nothing answers at ray.address {found} ({problem}): is Ray's head there?")
    return found


class Raylets:
    """Ray, as this process started or joined it. To be used on its main thread: Ray's daemons die with that thread."""

    def __init__(self, config: RayConfig, processes: int, more_on_head: int, folder: Path) -> None:
        """`processes` are those that each raylet starts at once, in wait for actors, `more_on_head` those that the first
        one starts beside them; `folder` is a short one, in which a folder is made for Ray's session."""
        self._config = config
        self._processes = processes
        self._more_on_head = more_on_head
        self._folder = folder
        self._more: dict[int, Node] = {}  # raylets beside the head's own, by number
        self._failures: dict[int, int] = {}  # of starting one again, in a row
        self._not_before: dict[int, float] = {}  # the next attempt
        self._gpu_variable = ""  # of the environment, in which processes find the GPUs that they may use
        self._gpus = shared_out([], config.raylets)

    def start(self) -> None:
        """Raises RayUnavailable."""
        ray_worker.print_to_stdstream = _left_to_its_logs
        ray_utils.set_sigterm_handler = _left_to_ours
        if not self._config.is_ours:
            self._join()
            return
        if self._config.raylets > 1:
            self._gpu_variable, gpus = _visible_gpus()
            self._gpus = shared_out(gpus, self._config.raylets)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                with _told():
                    self._start_own()
                return
            except RaySlow:
                self.stop()
                end(descendants(), at_once=True)
                if attempt == _ATTEMPTS:
                    raise

    def _start_own(self) -> None:
        with self._seeing_gpus_of(0):
            self._start_head()
        for number in range(1, self._config.raylets):
            self._more[number] = self._started(number)

    def restart(self) -> list[str]:
        """Start raylets again that have died; one line for each. The head's can't be: its death is Ray's."""
        said = []
        for number, node in list(self._more.items()):
            if _all_live(node):
                self._failures.pop(number, None)
            elif time.monotonic() >= self._not_before.get(number, 0.0):
                said.append(self._revive(number, node))
        return said

    def _revive(self, number: int, dead: Node) -> str:
        before = set(descendants())
        try:
            with _told():
                dead.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
                self._more[number] = self._started(number)
        except RayUnavailable as error:
            end(set(descendants()) - before, at_once=True)  # what has been started of it, which nothing knows
            failures = self._failures[number] = self._failures.get(number, 0) + 1
            pause_s = min(REVIVE_MOST_S, REVIVE_S * 2 ** (failures - 1))
            self._not_before[number] = time.monotonic() + pause_s
            return f"raylet {number} died, and is tried again in {pause_s:g} s: {error}"
        return f"raylet {number} died, and is started again"

    def is_alive(self) -> bool:
        """Whether the daemons of our own cluster's head live; True for a cluster that is not ours."""
        return not self._config.is_ours or _all_live(ray_worker._global_node)

    def stop(self) -> None:
        """End what was started, or leave the cluster."""
        for node in self._more.values():
            node.kill_all_processes(check_alive=False, allow_graceful=True, wait=True)
        self._more = {}
        ray.shutdown()

    def _join(self) -> None:
        address = cluster_address(self._config.address)
        try:
            ray.init(address=address, log_to_driver=False, configure_logging=False)
        except (RayError, OSError, RuntimeError, ValueError) as error:  # OSError: its ConnectionError
            raise RayUnavailable(
                f"can't join the Ray cluster at ray.address {address}: {_first_line(error)}; this machine must be part of it "
                "(`ray start`), and if it has a token, that must be the one in RAY_AUTH_TOKEN or ~/.ray/auth_token here; "
                "ray.address local starts one here"
            ) from error

    def _start_head(self) -> None:
        several: dict[str, Any] = {"resources": {raylet_resource(0): 1}} if self._config.raylets > 1 else {}
        ray.init(
            address="local",
            num_cpus=self._processes + self._more_on_head,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            _node_ip_address=_LOOPBACK,
            _temp_dir=str(self._folder / "ray"),  # Ray opens it to all users of the machine
            **several,
        )

    def _started(self, number: int) -> Node:
        head: Any = ray_worker._global_node
        parameters = RayParams(
            gcs_address=head.gcs_address,
            node_ip_address=_LOOPBACK,
            num_cpus=self._processes,
            resources={raylet_resource(number): 1},
            object_store_memory=_OBJECT_STORE_BYTES,
            include_log_monitor=False,  # type: ignore[arg-type]  # a truth value, whatever Ray's types say
            node_manager_port=0,
            min_worker_port=0,
            max_worker_port=0,
        )
        with self._seeing_gpus_of(number):
            return Node(parameters, head=False, shutdown_at_exit=False, spawn_reaper=True)

    @contextmanager
    def _seeing_gpus_of(self, number: int) -> Iterator[None]:
        """A raylet gives out the GPUs that the environment shows it at its start."""
        if not any(self._gpus):
            yield
            return
        name = self._gpu_variable
        before = os.environ.get(name)
        os.environ[name] = ",".join(self._gpus[number])
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


@contextmanager
def _told() -> Iterator[None]:
    """What Ray's start may raise, as ours."""
    try:
        yield
    except (RayError, OSError, RuntimeError, ValueError, SubprocessError) as error:
        raise RayUnavailable(f"Ray doesn't start: {_first_line(error)}") from error
    except Exception as error:
        if type(error) is not Exception:  # which is what Ray raises itself for daemons that are slow
            raise
        why = f"{_first_line(error)}; try again when this machine has less to do"
        raise RaySlow(f"Ray doesn't start: {why}") from error


def _left_to_its_logs(data: object, ignore_prefix: bool) -> None:
    """In place of Ray's own print of what dies, a paragraph each time, which log_to_driver doesn't turn off: cluster/supervisor/watch.py
    tells it in a line."""


def _left_to_ours(handler: object) -> None:
    """In place of Ray's own handler of SIGTERM, which ends this process in the middle of whatever it does."""


def _all_live(node: Any) -> bool:
    return node is not None and bool(node.remaining_processes_alive())


def _visible_gpus() -> tuple[str, list[str]]:
    """The environment's variable that says which GPUs this process may use, and these."""
    manager: Any = get_accelerator_manager_for_resource("GPU")
    seen = manager.get_current_process_visible_accelerator_ids()
    ids = range(manager.get_current_node_num_accelerators()) if seen is None else seen
    return manager.get_visible_accelerator_ids_env_var(), [str(one) for one in ids]


def shared_out(gpus: list[str], raylets: int) -> list[list[str]]:
    """GPUs by raylet: each its own part, or all of them where there are fewer GPUs than raylets."""
    if len(gpus) < raylets:
        return [gpus] * raylets
    share = len(gpus) // raylets
    return [gpus[number * share : (number + 1) * share] for number in range(raylets)]


def _first_line(error: object) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].split(". ")[0]
