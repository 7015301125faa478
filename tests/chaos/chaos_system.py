"""Faults that the system makes, not the process that meets them: all packets of a node are lost, a disk is full or breaks."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from random import Random

import psutil
from chaos_deployment import ONE_NODE, PATIENCE_S, STALLED_AFTER_S, Deployment, deployed
from chaos_load import Question, Reference
from chaos_root import Disk, Wire, disk, wire
from chaos_scene import MIDDLE, SHORT, Missed, Scene
from ray_cluster_kit import head, joined_environment, machine
from waiting import until

DISK_BYTES = 40 << 20
TEND_S = 0.2
AWAY_S = 60.0  # time for its parts to be given up, and for Ray to give up the machine, or for neither
NEAR, FAR = ("worker-0", "cache node node-0"), ("worker-1", "cache node node-1", "exchange of node-1")


# ---- a machine far away ------------------------------------------------------------------------------------------


def machine_lost(folder: Path, model: Path, right: Reference, rng: Random, comes_back: bool) -> None:
    """Of two machines, one is cut off in decode with all that runs there."""
    there = Deployment(
        folder / "there",
        model,
        ONE_NODE,
        nodes__count=2,
        worker__gpus=0,
        cache__load="always",
        transfer__same_host="off",
        cluster__stalled_after_s=STALLED_AFTER_S,
    )
    there.shell.environment |= joined_environment()
    environment = {name: value for name, value in there.shell.environment.items() if name != "KVTIER_STATE"}
    with ExitStack() as stack:
        stack.callback(there.remove)
        cable = stack.enter_context(wire())
        address = stack.enter_context(head(environment, 1, f"--node-ip-address={cable.here}"))
        far = FarMachine(cable, address, _with_a_disk_of_its_own(environment, folder / "far"))
        stack.callback(far.stop)
        far.start()
        there.up("--address", address)
        stack.callback(there.leave)
        _cut_off(Scene(there, right, rng), cable, far, comes_back)


def _cut_off(scene: Scene, cable: Wire, far: FarMachine, comes_back: bool) -> None:
    there = scene.there
    pids = [there.process(part).pid for part in FAR]
    asked = scene.questions(4, SHORT, 400)
    load = scene.load(asked, "worker-1")
    load.until_given(scene.rng.randint(1, 400))
    was_over = load.is_over
    cable.cut()
    scene.finish(load)
    until(lambda: "worker-1" in _unwell(there), "the machine to be missed", PATIENCE_S, every_s=0.1)
    scene.ask(scene.questions(2, MIDDLE, 8))
    if comes_back:
        scene.pause(AWAY_S)
        cable.mend()
        with far.tended():
            there.settled()
            scene.fetches_again()
            scene.end(asked[:2])
            there.down()
    else:
        until(lambda: all(there.ask(part, "idle") for part in NEAR), "the other node to be idle", PATIENCE_S)
        for part in (*NEAR, "directory"):
            there.ask(part, "check")
        assert not there.status()["in_flight"]
        there.down()
    _are_gone(pids)  # without being told, where nothing could
    if was_over:
        raise Missed("all requests had ended")


def _unwell(there: Deployment) -> list[str]:
    """Workers that don't answer."""
    return [worker["id"] for worker in there.status()["workers"] if worker["health"] != "healthy"]


def _are_gone(pids: Iterable[int]) -> None:
    for pid in pids:
        until(lambda pid=pid: not _lives(pid), f"process {pid} to end", PATIENCE_S, every_s=0.1)  # type: ignore[misc]


def _lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class FarMachine:
    """One of a Ray cluster, at the other end of a wire."""

    def __init__(self, cable: Wire, address: str, environment: Mapping[str, str]) -> None:
        self._cable = cable
        self._options = (f"--address={address}", f"--node-ip-address={cable.there}")
        self._environment = environment
        self._running = ExitStack()

    def start(self) -> None:
        """Raises AssertionError with what Ray said when it doesn't."""
        self._running.enter_context(machine(self._environment, 1, *self._options, within=self._cable.within))

    def stop(self) -> None:
        self._running.close()

    @property
    def has_raylet(self) -> bool:
        mine = f"--node_ip_address={self._cable.there}"
        return any(mine in (each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"]))

    @contextmanager
    def tended(self) -> Iterator[None]:
        """Meanwhile it is started again whenever it has ended, as a service manager does."""
        is_over = threading.Event()

        def tend() -> None:
            while not is_over.wait(TEND_S):
                if not self.has_raylet:
                    self.stop()
                    with suppress(AssertionError):  # the next time, then
                        self.start()

        thread = threading.Thread(target=tend, name="chaos-tend")
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


def _with_a_disk_of_its_own(environment: Mapping[str, str], cache: Path) -> dict[str, str]:
    cache.mkdir()
    (cache / "kernels").symlink_to(Path(environment["KVTIER_CACHE"]) / "kernels")
    return {**environment, "KVTIER_CACHE": str(cache)}


# ---- a disk ------------------------------------------------------------------------------------------------------


def disk_full(folder: Path, model: Path, right: Reference, rng: Random) -> None:
    """Another's file takes all that is left: pages, the catalogue and its log find no room, until it goes."""
    with _with_l4_on_a_disk(folder, model, right, rng) as (scene, there):
        kept = _kept(scene)
        there.fill()
        scene.until_no_writes(0, "worker-0")
        scene.reads_l4(kept, "worker-0")
        pages = scene.tier("L4", "pages")
        there.make_room()

        def written() -> bool:
            scene.ask(scene.questions(3, MIDDLE, 8))
            return bool(scene.tier("L4", "pages") > pages)

        until(written, "pages to be written again", PATIENCE_S)
        scene.end(kept)


def disk_fails(folder: Path, model: Path, right: Reference, rng: Random) -> None:
    """The kernel makes the file system read-only under the open files. Its repair needs a restart."""
    with _with_l4_on_a_disk(folder, model, right, rng) as (scene, there):
        kept = _kept(scene)
        there.settle()
        load = scene.load(scene.questions(6, MIDDLE, 16))
        scene.pause(0.5)
        there.fail()
        scene.finish(load)
        scene.until_no_writes(0, "worker-0")
        scene.reads_l4(kept, "worker-0")
        scene.there.down()
        there.unmount()
        there.mount()
        scene.there.up()
        assert scene.ask([kept[0]])[0].cached.get("L4"), "what was on the disk is gone"
        scene.end(kept)


@contextmanager
def _with_l4_on_a_disk(
    folder: Path, model: Path, right: Reference, rng: Random
) -> Iterator[tuple[Scene, Disk]]:
    with (
        disk(folder / "l4", DISK_BYTES) as small,
        deployed(
            folder / "there", model, ONE_NODE, tiers__l4__path=small.folder, cache__load="always"
        ) as there,
    ):
        yield Scene(there, right, rng), small


def _kept(scene: Scene) -> list[Question]:
    """Questions whose pages are on the disk."""
    kept = scene.questions(2, MIDDLE, 8)
    scene.ask(kept)
    scene.there.settled()
    return kept
