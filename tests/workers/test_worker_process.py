"""The process of a worker whose step loop has failed: it tells its requests so, and ends, to be restarted."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.tier.protocol.frames import FrameReader
from kvtier.workers.engine.outputs import MAX_FRAME_BYTES, unpack_hello, unpack_outputs
from kvtier.workers.requests.api import FinishReason

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
from kvtier.workers.actor import DecodeWorkerProcess
from kvtier.workers.requests.api import EngineRequest, SamplingParams
from kvtier.workers.scheduling.settings import EngineSettings
model, address, is_broken = sys.argv[1], sys.argv[2], sys.argv[3] == "broken"
worker = DecodeWorkerProcess(
    worker_id="w0", node_id="n0", socket_path=None, model_path=model, tenants={"default": ""},
    engine=EngineSettings(), dtype="float32", page_tokens=16,
    l1_bytes=1 << 20, max_context=1024,
)
worker.connect_gateway(address, b"secret")
if is_broken:
    def fail(batch):
        raise RuntimeError("no memory")
    worker._runner.forward = fail
worker.submit(EngineRequest("r", "default", tuple(range(40)), SamplingParams(max_tokens=4)))
sys.stdin.readline()
worker.stop()
"""


def run(model: Path, how: str) -> tuple[int, list[FinishReason], str]:
    """The process's exit code, and how its one request ended."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(120)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        command = [sys.executable, "-c", SCRIPT, str(model), address, how]
        with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            try:
                reasons, said = _read(server)
                if how != "broken":
                    assert process.poll() is None
                    process.stdin.write("stop\n")
                    process.stdin.flush()
                return process.wait(120), reasons, said
            finally:
                process.kill()


def _read(server: socket.socket) -> tuple[list[FinishReason], str]:
    connection, _ = server.accept()
    reader, frames = FrameReader(MAX_FRAME_BYTES), 0
    with connection:
        connection.settimeout(120)
        while data := connection.recv(1 << 16):
            for frame in reader.feed(data):
                frames += 1
                if frames == 1:
                    assert unpack_hello(frame).worker_id == "w0"
                    continue
                ends = [output for output in unpack_outputs(frame) if output.finish_reason is not None]
                if ends:
                    return [end.finish_reason for end in ends if end.finish_reason], ends[0].error or ""
    return [], ""


def test_a_worker_whose_step_loop_failed_says_so_and_ends(tiny_llama: Path) -> None:
    code, reasons, said = run(tiny_llama, "broken")

    assert reasons == [FinishReason.CANCELLED] and "the worker failed: RuntimeError: no memory" in said
    assert code == 1


def test_a_worker_that_is_stopped_ends_as_its_process_does(tiny_llama: Path) -> None:
    assert run(tiny_llama, "well") == (0, [FinishReason.LENGTH], "")
