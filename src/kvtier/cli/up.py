"""`kvtier up` and `down`: start a deployment, in the foreground or in a session of its own, and stop it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Annotated, Any, NoReturn

import typer

from kvtier.cli.common import (
    CliError,
    Steps,
    default_config,
    err,
    human_seconds,
    out,
    settings,
    state_dir,
    steps,
)
from kvtier.cli.state import Deployment, StateFolder
from kvtier.cli.supervisor import Supervisor
from kvtier.cluster.machines.leftovers import alive

_POLL_S = 0.05
_DOWN_WAIT_S = (
    150.0  # each step of a stop has a limit of its own (cluster/supervisor/launch.py); this is past their sum
)
_LOG_LINES = 15

SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a key of the config, such as tiers.l3.bytes=1GiB."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    app.command()(up)
    app.command()(down)


def up(
    config: Annotated[
        Path | None, typer.Argument(help="YAML file; default: the local.yaml that comes with kvtier.")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Leave it running in the background.")
    ] = False,
    overrides: SetOption = None,
    address: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT|auto|local",
            help="The Ray cluster to join, or local to start one here; default: the config's ray.address.",
        ),
    ] = "",
    notify_fd: Annotated[
        int | None, typer.Option(hidden=True, help="Where a detached supervisor reports.")
    ] = None,
) -> None:
    """Start the service: Ray, cache nodes, workers and gateway. Ctrl-C stops it cleanly.

    A part that dies is started again. With several nodes, each gets a cache node, workers, and an exchange of pages.

    \b
    Examples:
      kvtier up
      kvtier up --detach
      kvtier up cluster/local.yaml --set tiers.l3.bytes=2GiB --set grpc.port=0
      kvtier up --set model.path=/models/my-llama
      kvtier up cluster/two-nodes.yaml
      kvtier up cluster/h200.yaml --address 10.0.0.10:6379 --detach
    """
    overrides = [*(overrides or ()), *([f"ray.address={json.dumps(address)}"] if address else ())]
    checked = settings(config, overrides)
    if detach:
        file = str((config or default_config()).absolute())
        _detached([file, *(f"--set={override}" for override in overrides)])
    elif notify_fd is not None:
        with os.fdopen(notify_fd, "w") as pipe:
            Supervisor(checked, _Pipe(pipe), keeps_log=True).run()
    else:
        Supervisor(checked, _Foreground()).run()


def down() -> None:
    """Stop the service that `kvtier up` has started, or clean up after one that was killed.

    Running requests end, pages that are not on SSD yet are saved (for at most 30 s), and nothing is left behind. A node
    of a joined Ray cluster that can't be reached is named: Ray ends what runs there, some minutes after it was cut off.

    \b
    Examples:
      kvtier down
    """
    folder = StateFolder(state_dir())
    if folder.is_alive():
        with steps() as progress:
            _stop_and_wait(folder, progress)
        for line in folder.left_running():
            err.print(line, style="yellow", soft_wrap=True)
        err.print("stopped")
    elif dead := folder.clean_up():
        err.print(dead, soft_wrap=True)
    else:
        raise CliError(f"no deployment is running here (state folder: {folder.folder})")


def _stop_and_wait(folder: StateFolder, progress: Steps) -> None:
    record = folder.running()
    if record is None:
        raise CliError("the deployment is just starting or ending; try again in a moment")
    os.kill(record.pid, signal.SIGTERM)
    step = "asking it to stop"
    deadline = time.monotonic() + _DOWN_WAIT_S
    while folder.is_alive() or alive([(record.pid, record.started)]):
        now = folder.read()
        if now and now.phase == "stopping" and now.step:
            step = now.step
        progress(step)
        if time.monotonic() > deadline:
            raise CliError(
                f"it is still stopping after {_DOWN_WAIT_S:.0f} s; see {folder.log}, or kill {record.pid}"
            )
        time.sleep(_POLL_S)


class _Foreground:
    """Tells the person at the terminal."""

    def __init__(self) -> None:
        self._steps = Steps()
        self._began = time.monotonic()

    def step(self, step: str, done: int = 0, total: int | None = None) -> None:
        self._steps(step, done, total)

    def notice(self, text: str) -> None:
        err.print(text, style="yellow", soft_wrap=True)

    def ready(self, record: Deployment) -> None:
        self._steps.close()
        _say_ready(record, time.monotonic() - self._began, "Ctrl-C stops it")

    def ended(self, failed: bool) -> None:
        self._steps.close(failed=failed)
        if not failed:
            err.print("stopped")


class _Pipe:
    """Tells the `kvtier up --detach` that waits for us, which may be gone."""

    def __init__(self, pipe: IO[str]) -> None:
        self._pipe = pipe

    def step(self, step: str, done: int = 0, total: int | None = None) -> None:
        self._tell(step=step, done=done, total=total)

    def notice(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
        self._tell(notice=text)

    def ready(self, record: Deployment) -> None:
        self._tell(ready=True)
        self._close()

    def ended(self, failed: bool) -> None:
        self._close()

    def _tell(self, **fields: Any) -> None:
        try:
            if not self._pipe.closed:
                print(json.dumps(fields), file=self._pipe, flush=True)
        except BrokenPipeError:
            self._close()

    def _close(self) -> None:
        try:
            self._pipe.close()
        except BrokenPipeError:
            pass


def _detached(arguments: list[str]) -> None:
    """Start a supervisor in a session of its own and wait until it is ready. Ctrl-C and SIGTERM stop it until then."""
    folder = StateFolder(state_dir())
    began = time.monotonic()
    if folder.is_alive():
        raise CliError(folder.already_running())
    with (
        _signals() as signalled,
        TemporaryFile("w+", errors="replace") as early,
    ):  # what it says before it has a log
        child, reports = _started(arguments, early)
        notices: list[str] = []
        with os.fdopen(reports, "rb", buffering=0) as pipe, steps() as progress:
            last = _follow(pipe, signalled, progress, notices)
            if last is None:
                _stop_child(child, signalled)
                raise KeyboardInterrupt
            if not last.get("ready"):
                code = child.wait()
                early.seek(0)
                _fail(code, _text(folder.log) if last else early.read(), notices)
    record = folder.running()
    if record is None:
        _fail(child.wait(), _text(folder.log))
    _say_ready(record, time.monotonic() - began, f"kvtier down stops it; its log is {folder.log}")


def _started(arguments: list[str], early: IO[str]) -> tuple[subprocess.Popen[bytes], int]:
    """The supervisor, and the file descriptor of its reports."""
    reports, writer = os.pipe()
    command = [sys.executable, "-m", "kvtier", "up", *arguments, "--notify-fd", str(writer)]
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=early,
        stderr=early,
        start_new_session=True,
        pass_fds=(writer,),
    )
    os.close(writer)
    return child, reports


@contextmanager
def _signals() -> Iterator[int]:
    """A file descriptor that can be read once for each SIGINT or SIGTERM: none interrupts what is being done."""
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: os.write(waker, b"!")) for number in numbers]
    try:
        yield woken
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        os.close(woken)
        os.close(waker)


def _stop_child(child: subprocess.Popen[bytes], signalled: int) -> None:
    """Stop a supervisor that isn't ready; each further signal is handed on, and the second one kills."""
    child.terminate()
    while child.poll() is None:
        if select.select([signalled], [], [], _POLL_S)[0]:
            os.read(signalled, 1)
            child.terminate()


def _follow(pipe: IO[bytes], signalled: int, progress: Steps, notices: list[str]) -> dict[str, Any] | None:
    """Show what the supervisor reports until it is ready or its end of the pipe closes; the last report, {} for none.
    None once a signal has come. Adds the notices that it shows.

    It reports once the state folder is its own, and so is the log.
    """
    told: dict[str, Any] = {}
    unread = b""
    while not told.get("ready"):
        ready, _, _ = select.select([pipe.fileno(), signalled], [], [])
        if signalled in ready:
            os.read(signalled, 1)
            return None
        part = pipe.read(4096)
        if not part:
            break
        *lines, unread = (unread + part).split(b"\n")
        for line in lines:
            told = json.loads(line)
            if "notice" in told:
                notices.append(told["notice"])
                err.print(told["notice"], style="yellow", soft_wrap=True)
            elif "step" in told:
                progress(told["step"], told["done"], told["total"])
    return told


def _text(log: Path) -> str:
    return log.read_text(errors="replace")


def _fail(code: int, said: str, shown: Sequence[str] = ()) -> NoReturn:
    """The supervisor's own sentence, and the last lines before it where it said more than what was shown already."""
    lines = [line for line in said.splitlines() if line.strip() and line not in shown]
    sentence = lines.pop().removeprefix("kvtier: ") if lines else f"the supervisor ended with code {code}"
    for line in lines[-_LOG_LINES:]:
        print(line, file=sys.stderr)
    raise CliError(sentence)


def _say_ready(record: Deployment, seconds: float, how_to_stop: str) -> None:
    call = "--chat 'Why is the sky blue?'" if record.has_tokenizer else "--token-ids 1,2,3"
    out.print(
        f"ready in {human_seconds(seconds)}: {record.model} at {record.endpoint} (pid {record.pid}); {how_to_stop}\n"
        f"  kvtier generate {call}",
        soft_wrap=True,
    )
