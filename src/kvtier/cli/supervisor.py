"""The process that owns a deployment: starts it, waits for a signal or a failure, and leaves nothing behind."""

from __future__ import annotations

import errno
import os
import secrets
import select
import shutil
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvtier.cli.checks import folder_checks, has_gpus, limit_checks, weights_bytes
from kvtier.cli.common import CliError, state_dir
from kvtier.cli.folders import STATE_BYTES, TMP, problem
from kvtier.cli.state import Deployment, StateFolder, clean_up_after
from kvtier.cluster.machines.addresses import bind_error
from kvtier.cluster.machines.environment import prepare
from kvtier.cluster.machines.leftovers import Stamp, descendants, end, lasting, remove, stamp_of
from kvtier.kernels.cpu.build import BuildError, load_library
from kvtier.workers.machine.endpoints import Endpoint
from kvtier.workers.machine.limits import read_limits
from kvtier.workers.models.files.store import ModelError, default_cache, resolve

if TYPE_CHECKING:
    from kvtier.cluster.config.deployment import Config
    from kvtier.cluster.supervisor.launch import Launched

_WATCH_S = 0.5  # how often it looks whether all parts live


def cannot_listen(host: str, port: int) -> tuple[str, str] | None:
    """Why nothing can listen there, and the way out; None when it can."""
    where = Endpoint(host, port)
    error = bind_error(where)
    if error is None:
        return None
    reason = f"can't listen on {where}: {error.strerror}"
    if error.errno in (errno.EADDRINUSE, errno.EACCES):
        return reason, "--set grpc.port=0 takes any free one"
    return reason, "grpc.host must be an address of this machine: 127.0.0.1, or 0.0.0.0 for all of them"


class View(Protocol):
    """Who is told how it goes."""

    def step(self, step: str, done: int = 0, total: int | None = None) -> None: ...

    def notice(self, text: str) -> None: ...

    def ready(self, record: Deployment) -> None: ...

    def ended(self, failed: bool) -> None: ...


class Interrupted(Exception):
    """A signal came while the deployment was starting."""


class Supervisor:
    """Runs one deployment from start to end in this process, and holds the state folder meanwhile.

    The first SIGINT, SIGTERM or SIGHUP stops it cleanly, in the middle of a start too; a second one kills all that it
    has started. Signal handlers run on the main thread, so all state here has one owner.
    """

    def __init__(self, config: Config, view: View, *, keeps_log: bool = False) -> None:
        """`keeps_log`: what this process prints goes to the state folder's log, once the folder is ours."""
        self._config = config
        self._view = view
        self._keeps_log = keeps_log
        self._folder = StateFolder(state_dir())
        self._record = Deployment(
            pid=os.getpid(),
            started=stamp_of(os.getpid())[1],
            model=config.model.name or config.model.path,
            config=config.model_dump(mode="json"),
            tls_ca=config.grpc.tls.cert if config.grpc.tls else "",
        )
        self._launched: Launched | None = None
        self._signals = 0
        self._woken, self._waker = os.pipe()

    def run(self) -> None:
        """Start, wait, stop. CliError when it can't be started or can't serve; KeyboardInterrupt when a signal came
        before it was ready."""
        self._catch_signals()  # a record that nothing removes must not be written first
        self._claim()
        failed = True
        try:
            self._start()
            self._view.ready(self._record)
            self._wait()
            failed = False
        except Interrupted as signalled:
            raise KeyboardInterrupt from signalled
        finally:
            self._stop()
            with suppress(OSError):
                self._view.ended(failed)

    def _claim(self) -> None:
        """Take the state folder, and clean up after a supervisor that was killed."""
        where = self._folder.folder
        if wrong := problem(where, STATE_BYTES):  # before the log there takes what is said
            raise CliError(f"state folder: {wrong}; set KVTIER_STATE to another")
        try:
            if not self._folder.claim():
                raise CliError(self._folder.already_running())
            if self._keeps_log:
                self._folder.take_output()
            if dead := self._folder.read():
                found = clean_up_after(dead)
                self._notice(f"the deployment before this one was killed (pid {dead.pid}): {found}")
            self._folder.write(self._record)
        except OSError as error:
            raise CliError(
                f"can't use the state folder {where} ({error.strerror}); set KVTIER_STATE to another"
            ) from error

    def _start(self) -> None:
        if problem := cannot_listen(self._config.grpc.host, self._config.grpc.port):
            raise CliError("; ".join(problem))
        self._check_folders()
        if caution := self._config.cluster.caution:
            self._notice(caution)
        prepare(os.environ, is_ours=self._config.ray.is_ours)  # before Ray's import, which reads it
        if not self._config.ray.is_ours:
            self._find_cluster()
        try:
            model = resolve(self._config.model.path, default_cache(), self._step)
        except ModelError as error:
            raise CliError(str(error)) from error
        self._check_limits(model)
        self._compile_kernels()
        self._step("starting Ray" if self._config.ray.is_ours else "joining the Ray cluster")
        self._make_ray_dir()
        from kvtier.cluster.supervisor.launch import Launched, LaunchError

        try:
            self._launched = Launched(self._config, model, default_cache(), Path(self._record.ray_dir))
            self._launched.start(self._step, self._catch_signals)
        except LaunchError as error:
            raise CliError(self._with_logs(str(error))) from error
        self._record.endpoint = self._launched.endpoint
        self._record.has_tokenizer = self._launched.has_tokenizer
        self._record.processes = descendants()
        self._record.phase, self._record.step = "ready", ""
        self._write()
        for note in self._launched.notes:
            self._notice(note)

    def _check_folders(self) -> None:
        """Before Ray starts, which says little of what it can't write."""
        for check in folder_checks(self._config):
            if check.level == "fail":
                raise CliError(f"{check.name}: {check.found}; {check.way_out}")
            if check.level == "warn":
                self._notice(check.notice)

    def _check_limits(self, model: Path) -> None:
        """They are told only: what is needed is an estimate."""
        if not self._config.ray.is_ours:
            return  # the nodes may be on other machines
        on_gpus = self._config.worker.gpus != 0 and has_gpus()
        for check in limit_checks(self._config, read_limits(), weights_bytes(model), on_gpus):
            if check.level != "ok":
                self._notice(check.notice)

    def _make_ray_dir(self) -> None:
        """Under /tmp, not the state folder: the paths of sockets in it must stay under 108 bytes. Only we may enter it.

        Its name is written down before it is made, so that it is removed whenever this process ends.
        """
        folder = TMP / f"kvtier-{secrets.token_hex(6)}"
        self._record.ray_dir = str(folder)
        self._write()
        try:
            folder.mkdir(mode=0o700)
        except OSError as error:
            self._record.ray_dir = ""  # it may be another's
            raise CliError(f"can't make {folder}: {error.strerror}") from error

    def _find_cluster(self) -> None:
        """Before the model, which may take long to fetch."""
        from kvtier.cluster.machines.raylets import RayUnavailable, cluster_address

        self._step("looking for the Ray cluster")
        try:
            self._step(f"found the Ray cluster at {cluster_address(self._config.ray.address)}")
        except RayUnavailable as error:
            raise CliError(str(error)) from error

    def _compile_kernels(self) -> None:
        """Here rather than in the worker, because the first time takes long enough to be told."""
        self._step("preparing the kernels for this CPU")
        try:
            load_library(default_cache())
        except BuildError as error:
            self._notice(f"{error}; plain torch serves instead, slower")

    def _wait(self) -> None:
        """Until a signal; CliError when nothing is left to serve."""
        assert self._launched is not None
        while not self._signals:
            select.select([self._woken], [], [], _WATCH_S)
            lines = self._launched.look()
            for line in lines:
                self._notice(line)
            if reason := self._launched.hopeless():
                raise CliError(self._with_logs(f"{reason}, so everything was stopped"))
            if lines:  # a later cleanup must know the processes that are new
                self._record.processes = list(self._started())
                self._write()

    def _stop(self) -> None:
        """Drain and end everything, whatever state it is in."""
        self._record.phase = "stopping"
        self._step("stopping")
        started = self._started()
        left: list[str] = []
        try:
            if self._launched:
                left = self._launched.stop(self._step)
        finally:
            end({*started, *descendants()})
            self._leave(left)
        for line in left:
            self._notice(line)

    def _kill(self) -> None:
        end(self._started(), at_once=True)
        self._leave()
        with suppress(OSError):
            self._view.ended(True)
        os._exit(130)  # the interrupted stop is somewhere in Ray, which no longer exists

    def _started(self) -> set[Stamp]:
        """All processes of this deployment, those that have lost their parent too."""
        return lasting(self._record.processes) | set(descendants())

    def _leave(self, left: Sequence[str] = ()) -> None:
        if self._record.ray_dir:
            remove(Path(self._record.ray_dir))
        with suppress(OSError):  # a full disk: the record may stay, which names no process that lives
            self._folder.release(left)

    def _step(self, step: str, done: int = 0, total: int | None = None) -> None:
        if step != self._record.step:
            self._record.step = step
            self._record.processes = list(self._started())
            self._write()
        with suppress(OSError):  # the terminal may be gone, and the pages are to be saved all the same
            self._view.step(step, done, total)
        if self._signals and self._record.phase == "starting":
            raise Interrupted

    def _write(self) -> None:
        """The record. While it serves or stops, a full disk is no reason to end: the record before stays."""
        try:
            self._folder.write(self._record)
        except OSError as error:
            if self._record.phase == "starting":
                where = self._folder.folder
                raise CliError(
                    f"can't write to the state folder {where}: {error.strerror}; set KVTIER_STATE to another"
                ) from error

    def _notice(self, line: str) -> None:
        with suppress(OSError):  # as in _step: a log on a full disk is no reason to end
            self._view.notice(line)

    def _catch_signals(self) -> None:
        """Once at first, and again when Ray has put its handlers in place: they end the process after an alarm."""
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals += 1
        if self._signals > 1:
            self._kill()
        os.write(self._waker, b"!")

    def _with_logs(self, sentence: str) -> str:
        """Keep Ray's logs of a failure where they can be looked into: its session folder goes."""
        kept = self._folder.folder / "logs"
        remove(kept)
        try:
            shutil.copytree(Path(self._record.ray_dir) / "ray" / "session_latest" / "logs", kept)
        except (OSError, shutil.Error):
            return sentence
        kept.chmod(0o700)  # Ray's own is open to all
        return f"{sentence}; logs are in {kept}"
