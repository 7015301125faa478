"""How long a step loop hasn't turned: not while it is idle or makes kernels, but while it waits for what doesn't end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from waiting import until
from worker_kit import serving, tiny_runner

from kvtier.workers.engine.heartbeat import TURN_S, Heartbeat

# Makes kernels until their thread was found to turn five times, by a clock that goes on by 1 whenever it is read: a loop
# that is stalled is found further behind at each look. Prints how often it was found to turn.
MAKES_KERNELS = """
import itertools, threading, time
from kvtier.kernels import aot
from kvtier.workers.engine.heartbeat import Heartbeat
is_seen = threading.Event()
def make():
    for name in aot.variants("sm_90"):
        if not is_seen.is_set():
            aot.build("sm_90", name)
making = threading.Thread(target=make)
heartbeat = Heartbeat(making, itertools.count(100).__next__)
making.start()
heartbeat.read(), heartbeat.read()
turning = 0
while making.is_alive():
    turning += heartbeat.read() == 1
    if turning == 5:
        is_seen.set()
    time.sleep(0.002)
print(turning)
"""


def test_an_idle_loop_turns_and_tells_so(tiny_llama: Path) -> None:
    with serving(tiny_runner(tiny_llama, 8)) as client:
        until(lambda: client.steps.count([]) >= 3, "the loop turns and has nothing to tell")

        until(lambda: client.worker.heartbeat() < TURN_S, "it has just turned")


def test_a_step_that_does_not_end_is_seen_from_outside(tiny_llama: Path) -> None:
    runner = tiny_runner(tiny_llama, 8)
    going_on, stands = threading.Event(), threading.Event()

    def stand_still(batch: Any) -> None:
        stands.set()
        going_on.wait(120)

    runner.before = stand_still
    with serving(runner) as client:
        name = client.send(range(20), max_tokens=2)
        assert stands.wait(120)
        told = len(client.steps)
        until(lambda: client.worker.heartbeat() > 3 * TURN_S, "its heartbeat is missed")
        assert len(client.steps) == told and client.worker.is_healthy()

        going_on.set()
        client.result(name)
        until(lambda: client.worker.heartbeat() < TURN_S, "it turns again")


def test_a_kernel_that_is_made_counts_as_turning(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", MAKES_KERNELS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3000, check=True)
    assert int(done.stdout) >= 5


def test_a_thread_that_has_ended_turns_no_more() -> None:
    now = 5.0
    thread = threading.Thread(target=lambda: None)
    heartbeat = Heartbeat(thread, lambda: now)
    thread.start()
    thread.join()
    now = 9.0

    assert heartbeat.read() == 4.0
