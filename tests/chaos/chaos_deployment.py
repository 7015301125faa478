"""A deployment whose processes can be found, killed, lied to and asked: `kvtier up` with the hooks of this folder."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from deployment_kit import Shell
from waiting import eventually, until

from kvtier.cli.client import Client, ClientError, connect
from kvtier.tier.node.state.peer_frames import STOCK_PARTS
from kvtier.workers.node_io.node_link import STOCK_SHARE

ROOT = Path(__file__).resolve().parents[2]
TWO_NODES, ONE_NODE = ROOT / "cluster" / "two-nodes.yaml", ROOT / "cluster" / "local.yaml"
HOOKS = Path(__file__).resolve().parent / "hooks"
PATIENCE_S = 600.0  # of a loaded machine; no law hangs on it
STALLED_AFTER_S = 30  # a part that is stalled so long is killed: well before a request's deadline
STARTS = 6  # Ray gives its own processes half a minute, which a loaded machine may not have
RAY_WAS_SLOW = ("timed out during startup", "Ray doesn't start")
MOST_PAGES = 10_000


class Deployment:
    """A running deployment. `part` names are the supervisor's: worker-0, cache node node-0, exchange of node-0, ..."""

    def __init__(self, folder: Path, model: Path, config: Path, **more: object) -> None:
        """`more`: keys of the configuration, with __ for each dot."""
        folder.mkdir(exist_ok=True)
        self.shell = Shell(folder, model, **more)
        self._config = config
        self._faults: dict[str, Any] = {}
        self._told = Path(tempfile.mkdtemp(prefix="kvtier-chaos-", dir="/tmp"))  # short: sockets lie there
        environment = self.shell.environment
        # On a machine that is busy, Ray's own choices starve its workers, and don't wait for its agents.
        environment |= {"RAY_worker_niceness": "0", "RAY_agent_register_timeout_ms": "600000"}
        environment["KVTIER_CHAOS"] = str(self._told)
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(HOOKS), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        self._client: Client | None = None
        self._busy = ""  # who is not well or idle

    # ---- its life ------------------------------------------------------------------------------------------------

    def up(self, *options: str) -> None:
        """Start it, with these options too; AssertionError with what it said when it doesn't."""
        arguments = [*self.shell.up_arguments[1:], *options, "--detach"]
        for _ in range(STARTS):
            starting = self.shell.start("up", str(self._config), *arguments)
            out, err = _end_of(starting)
            if starting.returncode == 0:
                self.shell.remember_session()
                return
            if not any(word in f"{out}{err}" for word in RAY_WAS_SLOW):
                break
        raise AssertionError(f"it doesn't start: {out}\n{err}")

    def down(self) -> None:
        """Stop it, or clean up after it was killed; nothing may be left."""
        self.set()
        self._disconnect()
        stopping = self.shell.start("down")
        out, err = _end_of(stopping)
        assert stopping.returncode == 0, f"{out}\n{err}"
        self.shell.check_nothing_left()

    def leave(self) -> None:
        """Stop it if it is up."""
        if self.is_up:
            self.down()

    def ended(self) -> None:
        """It has ended, or is about to, without being asked to: what is left of it is nothing, or what `down` cleans up."""
        self._disconnect()
        until(lambda: not self.supervisor, "the supervisor to end", PATIENCE_S, every_s=0.1)
        self.leave()
        self.shell.check_nothing_left()

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    @property
    def supervisor(self) -> psutil.Process | None:
        """The process that `up` has started, while it lives."""
        return next((one for one in self.shell.processes() if "--notify-fd" in _command_of(one)), None)

    @property
    def is_up(self) -> bool:
        return (self.shell.state / "deployment.json").exists()

    @property
    def endpoint(self) -> str:
        return str(json.loads((self.shell.state / "deployment.json").read_text())["endpoint"])

    @property
    def client(self) -> Client:
        """One that stays connected, also over the gateway's lives."""
        if self._client is None:
            self._client = until(self._connected, "the gateway to answer", PATIENCE_S, every_s=0.1)
        return self._client

    def _connected(self) -> Client | None:
        try:
            return connect(self.endpoint)
        except ClientError:
            return None

    @property
    def log(self) -> str:
        """What the supervisor has said."""
        return (self.shell.state / "up.log").read_text()

    # ---- its faults ----------------------------------------------------------------------------------------------

    def set(self, **faults: Any) -> None:
        """These faults are on from now on, and no other: see hooks/sitecustomize.py."""
        self._faults = faults
        part = self._told / "faults.new"
        part.write_text(json.dumps(faults))
        os.replace(part, self._told / "faults.json")

    def hits(self, fault: str) -> int:
        """How often a fault of the hooks has been made so far, over all processes."""
        files = self._told.glob("hits-*")
        return sum(file.read_text().splitlines().count(fault) for file in files)

    def process(self, part: str) -> psutil.Process:
        """The process of a part, now."""
        if part == "gateway":
            return psutil.Process(int(self.status()["gateway_pid"]))
        return psutil.Process(int(self._part(part)["pid"]))

    def kill(self, part: str) -> None:
        """SIGKILL; the supervisor must have noticed the deaths before this one."""
        self.process(part).kill()

    @contextmanager
    def stopped(self, part: str) -> Iterator[None]:
        """The part's process does nothing meanwhile, and closes nothing."""
        process = self.process(part)
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            with suppress(psutil.NoSuchProcess):  # it was killed for stalled
                process.send_signal(signal.SIGCONT)

    # ---- questions -----------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """As `kvtier status` has it; waits for a gateway."""
        return until(self._status, "the gateway to tell its status", PATIENCE_S, every_s=0.1)

    def _status(self) -> dict[str, Any] | None:
        try:
            return self.client.status()
        except ClientError:
            return None

    def parts(self) -> dict[str, dict[str, Any]]:
        """Every part that lives and answers questions, by its name."""
        found: dict[str, dict[str, Any]] = {}
        for file in sorted(self._told.glob("part-*.json"), key=lambda file: file.stat().st_mtime_ns):
            said = json.loads(file.read_text())
            if psutil.pid_exists(said["pid"]):
                found[_name(said)] = said
        return found

    def ask(self, part: str, method: str) -> Any:
        """What a method of a part returns; AssertionError with what it raises."""
        address = str(self._told / f"part-{self._part(part)['pid']}.sock")
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(PATIENCE_S)
            connection.connect(address)
            with connection.makefile("rw") as lines:
                print(method, file=lines, flush=True)
                answer = json.loads(lines.readline())
        assert "error" not in answer, f"{part} {method}: {answer['error']}"
        return answer["result"]

    def _part(self, part: str) -> dict[str, Any]:
        return until(lambda: self.parts().get(part), f"{part} to be there", PATIENCE_S, every_s=0.05)

    # ---- what must hold when nothing runs ------------------------------------------------------------------------

    def settled(self) -> dict[str, Any]:
        """The status once all is well and nothing is under way."""
        status = eventually(self._settled, PATIENCE_S, every_s=0.1)
        assert status is not None, f"not within {PATIENCE_S:g} s well and idle: {self._busy}"
        return status

    def _settled(self) -> dict[str, Any] | None:
        self._busy = "the gateway"
        if (status := self._status()) is None:
            return None
        shown = [*status["nodes"], *status["workers"], *filter(None, [status["directory"]])]
        unwell = [part for part in shown if part["health"] != "healthy"]
        parts = self.parts()
        self._busy = f"{unwell}, {status['in_flight']} requests in flight, {sorted(parts)} are there"
        expected = len(shown) + sum(bool(node["exchange"]) for node in status["nodes"])
        if unwell or status["in_flight"] or len(parts) < expected:
            return None
        for part in parts:
            self._busy = part
            try:
                if not self._is_idle(part):
                    return None
            except (OSError, AssertionError, ValueError) as error:  # it has just died, or is just coming up
                self._busy = f"{part}: {error}"
                return None
        return status

    def _is_idle(self, part: str) -> bool:
        if part.startswith("exchange"):
            stats = self.ask(part, "stats")
            return self.ask(part, "health") is None and not stats["streams"] and not stats["fetches"]
        return bool(part == "directory" or self.ask(part, "idle"))

    def check(self) -> None:
        """The counts of every part are right, nothing holds a page, and without pages nothing is in use."""
        self.settled()
        for part in self.parts():
            if not part.startswith("exchange"):
                self.ask(part, "check")
        pages = self.client.pages_ls(limit=MOST_PAGES)
        assert not [page for page in pages if page["readers"] or page["state"] != "sealed"]
        self.clear()
        status, tiers = self.settled(), self.client.stats()["tiers"]
        per_node = len(status["workers"]) // len(status["nodes"])
        stocks = {  # slots and frames that workers have at hand for pages to come
            "L2": tiers["L2"]["capacity_bytes"] // STOCK_PARTS,
            "L3": tiers["L3"]["capacity_bytes"] // STOCK_SHARE * per_node,
        }
        for name, tier in tiers.items():
            is_over = tier["used_bytes"] > stocks.get(name, 0)
            assert (tier["pages"], is_over) == (0, False), f"{name} with no page in it: {tier}"

    def clear(self) -> None:
        """Nothing is cached any more, and the directory knows it."""
        self.client.pages_clear()
        self.settled()
        until(lambda: self.entries == 0, "the directory to forget all pages", PATIENCE_S, every_s=0.1)

    @property
    def entries(self) -> int:
        """Pages that the directory knows of; 0 where there is none."""
        directory = self.status()["directory"]
        return int(directory["entries"]) if directory else 0

    def has_returned(self, part: str, deaths: int) -> None:
        """The supervisor has told of so many deaths of a part, and of its return from each."""
        for what in ("died", "runs again"):
            until(
                lambda what=what: self.log.count(f"{part} {what}") >= deaths,  # type: ignore[misc]
                f"{part} {what}, {deaths} times",
                PATIENCE_S,
                every_s=0.1,
            )

    def deaths(self, part: str) -> int:
        return self.log.count(f"{part} died")

    def fetch_failures(self) -> dict[str, int]:
        """Fetches from other nodes that failed, by reason, over all exchanges that live."""
        total: dict[str, int] = {}
        for part in self.parts():
            if part.startswith("exchange"):
                for peer in self.ask(part, "stats")["fetched"].values():
                    for reason, count in peer["failures"].items():
                        total[reason] = total.get(reason, 0) + count
        return total

    def remove(self) -> None:
        """What is left of it; a part that still lives has been told of by now."""
        for part in self.parts().values():
            with suppress(psutil.NoSuchProcess):
                psutil.Process(part["pid"]).kill()
        shutil.rmtree(self._told, ignore_errors=True)


def _command_of(process: psutil.Process) -> list[str]:
    """Its words; none once it has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # a zombie too
        return []


def _name(said: dict[str, Any]) -> str:
    names = {
        "node": f"cache node {said['name']}",
        "exchange": f"exchange of {said['name']}",
        "worker": said["name"],
    }
    return str(names.get(said["kind"], said["kind"]))


def _end_of(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        return process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"it takes longer than {PATIENCE_S:g} s\n{out}\n{err}") from None


@contextmanager
def deployed(folder: Path, model: Path, config: Path, **more: object) -> Iterator[Deployment]:
    """A deployment that is up, and down at the end."""
    deployment = Deployment(folder, model, config, **more)
    try:
        deployment.up()
        yield deployment
    finally:
        deployment.leave()
        deployment.remove()


def two_nodes(folder: Path, model: Path) -> AbstractContextManager[Deployment]:
    """What most faults are tried on: pages go through the network stack, and always when they can."""
    return deployed(
        folder,
        model,
        TWO_NODES,
        cache__load="always",
        transfer__same_host="off",
        cluster__stalled_after_s=STALLED_AFTER_S,
    )
