"""Every fault, what it does to a deployment, and what its user is to see. The law is in chaos_scene and chaos_load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import psutil
from chaos_deployment import PATIENCE_S
from chaos_scene import LONG, MIDDLE, NO_ROOM, NO_WRITES, SHORT, Missed, Scene
from waiting import until

LIES = {
    "bit": "a flipped bit",
    "short": "a truncated page",
    "key": "another page's key",
    "spec_digest": "a page of another format",
    "tenant": "a page of another tenant",
    "root": "a page of other weights",
}


@dataclass(frozen=True)
class Fault:
    """One row of docs/faults.md. `in_suite`: the normal test suite tries it too."""

    name: str
    seen: str  # what a user sees of it
    make: Callable[[Scene], None]
    in_suite: bool = False


# ---- processes that die ------------------------------------------------------------------------------------------


def worker_in_prefill(scene: Scene) -> None:
    victim = scene.rng.choice(("worker-0", "worker-1"))
    deaths = scene.there.deaths(victim)
    asked = scene.questions(8, LONG, 8)
    process = scene.there.process(victim)
    load = scene.load(asked, victim, clients=len(asked))
    scene.until_busy(victim, load)
    scene.pause(0.1)
    in_prefill = [answer for answer in load.answers if not answer.tokens]
    process.kill()
    scene.finish(load)
    scene.there.has_returned(victim, deaths + 1)
    scene.end(asked[:1])
    if not in_prefill:
        raise Missed("all requests had a token by then")


def worker_in_decode(scene: Scene, lose: Callable[[psutil.Process], None]) -> None:
    """One that only is stalled answers nothing and closes nothing, until it is found to do so and is killed."""
    victim = scene.rng.choice(("worker-0", "worker-1"))
    deaths = scene.there.deaths(victim)
    asked = scene.questions(4, SHORT, 64)
    process = scene.there.process(victim)
    load = scene.load(asked, victim)
    load.until_given(scene.rng.randint(1, 120))
    is_decoding = load.is_decoding
    lose(process)
    scene.finish(load)
    scene.there.has_returned(victim, deaths + 1)
    scene.end(asked[:2])
    if not is_decoding:
        raise Missed("no request was in decode")


def both_workers(scene: Scene) -> None:
    deaths = {worker: scene.there.deaths(worker) for worker in ("worker-0", "worker-1")}
    asked = scene.questions(4, SHORT, 64)
    processes = [scene.there.process(worker) for worker in deaths]
    load = scene.load(asked)
    load.until_given(scene.rng.randint(1, 60))
    was_over = load.is_over
    for process in processes:
        process.kill()
    scene.finish(load, may_fail=True)
    for worker, count in deaths.items():
        scene.there.has_returned(worker, count + 1)
    scene.end(asked[:2])
    if was_over:
        raise Missed("all requests had ended")


def cache_node(scene: Scene) -> None:
    """Its requests go on from L1, and what was in L4 is found there by its next life."""
    part = "cache node node-1"
    deaths = scene.there.deaths(part)
    kept = scene.questions(2, MIDDLE, 8)
    scene.ask(kept, "worker-1")
    scene.there.settled()
    process = scene.there.process(part)
    load = scene.load(scene.questions(6, MIDDLE, 24), "worker-1")
    load.until_given(scene.rng.randint(0, 60))
    was_over = load.is_over
    process.kill()
    scene.finish(load)
    scene.there.has_returned(part, deaths + 1)
    scene.there.settled()
    scene.reads_l4(kept)
    scene.end(kept)
    if was_over:
        raise Missed("all requests had ended")


def directory(scene: Scene) -> None:
    deaths = scene.there.deaths("directory")
    process = scene.there.process("directory")
    load = scene.load(scene.questions(8, MIDDLE, 24))
    load.until_given(scene.rng.randint(0, 80))
    was_over = load.is_over
    process.kill()
    scene.finish(load)
    scene.there.has_returned("directory", deaths + 1)
    scene.fetches_again()
    scene.end()
    if was_over:
        raise Missed("all requests had ended")


def gateway(scene: Scene) -> None:
    deaths = scene.there.deaths("gateway")
    endpoint = scene.there.endpoint
    asked = scene.questions(6, MIDDLE, 48)
    process = scene.there.process("gateway")
    load = scene.load(asked)
    load.until_given(scene.rng.randint(0, 60))
    was_over = load.is_over
    process.kill()
    scene.finish(load, may_fail=True)
    scene.there.has_returned("gateway", deaths + 1)
    assert scene.there.status()["endpoint"] == endpoint
    scene.end(asked)
    if was_over:
        raise Missed("all requests had ended")


def exchange(scene: Scene, part: str) -> None:
    """Of the node that serves, or of the one that fetches, in a transfer that is slow so that it lasts."""
    deaths = scene.there.deaths(part)
    asked = scene.questions(6, MIDDLE, 8)
    scene.spread(asked, "worker-0")
    process = scene.there.process(part)
    scene.there.set(wire={"node-0": "slow"})
    load = scene.load(asked, "worker-1")
    scene.until_fetching(load)
    scene.pause(0.5)
    is_fetching = scene.is_fetching
    process.kill()
    scene.finish(load)
    scene.there.set()
    scene.there.has_returned(part, deaths + 1)
    scene.fetches_again()
    scene.end(asked)
    if not is_fetching:
        raise Missed("no page was on its way")


# ---- the network -------------------------------------------------------------------------------------------------


def cut_off(scene: Scene) -> None:
    """In the middle of a transfer, which is slow so that it lasts, packets are lost, and nothing is told."""

    def cut() -> None:
        scene.pause(0.5)
        scene.there.set(wire={"node-0": "cut"})

    scene.fetching("cut", ("deadline", "load_failed"), cut, wire={"node-0": "slow"})
    scene.fetches_again()
    scene.end()


def silent(scene: Scene) -> None:
    """The exchange that serves is stalled: its connections stay, and say nothing."""
    asked = scene.questions(6, MIDDLE, 8)
    scene.spread(asked, "worker-0")
    before = scene.there.fetch_failures()
    with scene.there.stopped("exchange of node-0"):
        scene.ask(asked, "worker-1")
    scene.there.settled()
    failed = scene.there.fetch_failures() != before
    scene.fetches_again()
    scene.end(asked)
    if not failed:
        raise Missed("no fetch failed")


def silent_at_home(scene: Scene) -> None:
    """The exchange that a node fetches by is stalled: the node's orders are not answered."""
    asked = scene.questions(6, MIDDLE, 8)
    scene.spread(asked, "worker-0")
    before = scene.ordered_pages("cache node node-1")
    with scene.there.stopped("exchange of node-1"):
        scene.ask(asked, "worker-1")
    scene.there.settled()
    ordered = (
        scene.ordered_pages("cache node node-1") - before
    )  # while it was stalled: nothing was asked for since
    scene.fetches_again()
    scene.end(asked)
    if not ordered:
        raise Missed("no order was given")


def slow(scene: Scene) -> None:
    scene.fetching("slow", ("deadline", "load_failed"), wire={"node-0": "slow"})
    scene.fetches_again()
    scene.end()


def noisy(scene: Scene) -> None:
    """Bits flip on the way, in what gRPC says too."""
    scene.fetching("flip", ("corrupt", "load_failed", "deadline"), wire={"node-0": "flip"})
    scene.fetches_again()
    scene.end()


def lie(scene: Scene, what: str) -> None:
    scene.fetching("lie", ("corrupt",), lie=what)
    scene.fetches_again()
    scene.end()


# ---- disk and clock ----------------------------------------------------------------------------------------------


def disk(scene: Scene, wrong: str) -> None:
    """Every write of a page to L4 fails; what is there is read, and once there is room pages are written again."""
    kept = scene.questions(2, MIDDLE, 8)
    scene.ask(kept, "worker-1")
    scene.there.settled()
    said = NO_ROOM if wrong == "ENOSPC" else NO_WRITES
    notes, hits = scene.notes(said), scene.there.hits("disk")
    scene.there.set(disk=wrong)
    scene.there.settled()
    pages = scene.tier("L4", "pages")  # not before: what was about to be written may still have been
    scene.until_no_writes(notes, "worker-1", said)
    assert scene.there.hits("disk") > hits, "no write failed, and a note says that one did"
    assert scene.tier("L4", "pages") <= pages, "pages were written to a disk that takes none"
    scene.reads_l4(kept)
    scene.there.set()
    scene.ask(scene.questions(2, MIDDLE, 8), "worker-1")
    until(lambda: scene.tier("L4", "pages") > pages, "pages to be written again", PATIENCE_S, every_s=0.1)
    scene.end(kept)


def no_file_grows(scene: Scene) -> None:
    """The kernel refuses a node's writes to any file: catalogue, pages and logs."""
    process = scene.there.process("cache node node-1")
    limits, notes = process.rlimit(psutil.RLIMIT_FSIZE), scene.notes(NO_WRITES)
    process.rlimit(psutil.RLIMIT_FSIZE, (0, limits[1]))
    try:
        scene.until_no_writes(notes, "worker-1")
    finally:
        process.rlimit(psutil.RLIMIT_FSIZE, limits)
    scene.end()


def clock(scene: Scene) -> None:
    """Of each process to another time, back and forth, while requests run."""
    pids = [part["pid"] for part in scene.there.parts().values()] + [scene.there.process("gateway").pid]
    load = scene.load(scene.questions(8, MIDDLE, 64), "worker-0", "worker-1")
    hits, jumps = scene.there.hits("clock"), 0
    for _ in range(5):
        scene.there.set(
            clock={str(pid): scene.rng.choice((-1, 1)) * scene.rng.uniform(1, 4e7) for pid in pids}
        )
        scene.pause(0.3)
        if not load.is_over:
            jumps = scene.there.hits("clock") - hits
    scene.finish(load)
    scene.there.set()
    scene.fetches_again()
    scene.end()
    if not jumps:
        raise Missed("no clock jumped while requests ran")


FAULTS = [
    Fault(
        "a worker is killed in prefill",
        "nothing: its requests begin again at another worker",
        worker_in_prefill,
        in_suite=True,
    ),
    Fault(
        "a worker is killed in decode",
        "a pause in its streams: they go on at another worker with the same tokens",
        partial(worker_in_decode, lose=psutil.Process.kill),
        in_suite=True,
    ),
    Fault(
        "a worker is stalled",
        "a long pause in its streams: they go on at another worker with the same tokens",
        partial(worker_in_decode, lose=psutil.Process.suspend),
        in_suite=True,
    ),
    Fault(
        "all workers are killed at once",
        "UNAVAILABLE for what they ran, until one is back",
        both_workers,
    ),
    Fault(
        "a CacheNode is killed",
        "slower answers: its node's workers go on from L1, and what was on SSD is found again when it is back",
        cache_node,
        in_suite=True,
    ),
    Fault(
        "the directory is killed",
        "nothing, but that pages of other nodes are not found until it has heard of them again",
        directory,
        in_suite=True,
    ),
    Fault(
        "the gateway is killed",
        "UNAVAILABLE for what was running; it is back at the same address",
        gateway,
        in_suite=True,
    ),
    Fault(
        "the exchange that serves is killed in a transfer",
        "slower answers: what it did not send is computed",
        partial(exchange, part="exchange of node-0"),
        in_suite=True,
    ),
    Fault(
        "the exchange that fetches is killed in a transfer",
        "slower answers: what it did not get is computed",
        partial(exchange, part="exchange of node-1"),
    ),
    Fault(
        "a node is cut off in a transfer (packets dropped)",
        "slower answers: the transfer is given up, the rest is computed",
        cut_off,
        in_suite=True,
    ),
    Fault(
        "a peer's exchange is stalled", "slower answers: it is given up, and left alone for a while", silent
    ),
    Fault(
        "a node's own exchange is stalled",
        "slower answers: what other nodes hold is computed, until it goes on or is restarted",
        silent_at_home,
    ),
    Fault("a peer answers at 1 KB/s", "slower answers: it is given up, and left alone for a while", slow),
    Fault("bits flip between nodes", "nothing: what came damaged is computed, and counted", noisy),
    *(
        Fault(
            f"a peer sends {words}",
            "nothing: the page is dropped, counted and computed",
            partial(lie, what=what),
            in_suite=what in ("bit", "tenant"),
        )
        for what, words in LIES.items()
    ),
    Fault(
        "the disk is full",
        "fewer hits after a restart: pages stay above L4, a note says so",
        partial(disk, wrong="ENOSPC"),
        in_suite=True,
    ),
    Fault(
        "the disk is read-only",
        "as above; what is on it is still found",
        partial(disk, wrong="EROFS"),
    ),
    Fault("no file of a node may grow, its catalogue and logs too", "as above", no_file_grows),
    Fault("clocks jump", "nothing: only the times shown are of another day", clock, in_suite=True),
]
