"""The demo model, served: the demo tells its story, and the README's commands run as written."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 900.0  # of a busy machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


@pytest.fixture(scope="module")
def environment(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The model comes from the user's cache; the state folder is ours."""
    state = tmp_path_factory.mktemp("demo") / "state"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "KVTIER_STATE": str(state), "COLUMNS": "120"}


def run(command: str, environment: dict[str, str]) -> str:
    """Its output, of both streams; it must succeed."""
    done = subprocess.run(
        shlex.split(command),
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, f"{command}: code {done.returncode}\n{done.stdout}"
    return done.stdout


def test_the_demo_shows_hits_in_every_tier_and_stops_everything(environment: dict[str, str]) -> None:
    out = run("kvtier demo", environment)

    lines = [line.split() for line in out.partition("Hits by tier")[2].splitlines()]
    requests = [line for line in lines if len(line) >= 11 and line[0].isdigit() and line[1].isalpha()]
    hits = {tier: [row[column] for row in requests] for tier, column in (("L1", 3), ("L3", 5), ("L4", 6))}
    assert len(requests) == 12
    for tier, column in hits.items():
        assert any(cell.replace(",", "").isdigit() and int(cell.replace(",", "")) > 100 for cell in column), (
            tier
        )
    assert out.rstrip().endswith("stopped")
    assert not list(Path(environment["KVTIER_STATE"]).rglob("deployment.json"))


@pytest.fixture(scope="module")
def commands() -> list[str]:
    """The README's kvtier commands, in order, comments cut off."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("kvtier ")]


@pytest.fixture(scope="module")
def up(commands: list[str], environment: dict[str, str]) -> Iterator[str]:
    """The service, started by the README's own line for the background, ended whatever happens."""
    [line] = [line for line in commands if "--detach" in line]
    yield run(line, environment)
    if list(Path(environment["KVTIER_STATE"]).rglob("deployment.json")):
        run("kvtier down", environment)


def test_the_commands_of_the_readme_run_as_written(
    commands: list[str], up: str, environment: dict[str, str]
) -> None:
    request_id = ""
    ran = []
    for line in commands:
        if line.startswith("kvtier up"):
            continue  # the one in the background runs; the other one would hold this terminal
        if "--watch" in line:
            watch(line, environment)
            continue
        out = run(line.replace("REQUEST_ID", request_id), environment)
        if found := re.search(r'"request_id": "(\w+)"', out):
            request_id = found[1]
        ran.append(line)

    assert "kvtier generate --chat 'Why is the sky blue?'" in up
    assert len(ran) >= 8
    assert ran[-1] == "kvtier down"


def watch(line: str, environment: dict[str, str]) -> None:
    """Start it, see a first table, press Ctrl-C."""
    process = subprocess.Popen(
        [*shlex.split(line), "--json"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith('{"tiers"')
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE_S) == 0
    process.stdout.close()
