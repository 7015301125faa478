"""What all verbs share: errors of one line, folders, tables, human units, progress."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

if TYPE_CHECKING:
    from kvtier.cluster.config.deployment import Config

_PIPE_COLUMNS = 160  # nothing resizes a pipe, so tables get room there

# Control characters of values, which would move the cursor or worse; lines may break.
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def visible(text: str) -> str:
    """With control characters as escapes."""
    return text.translate(_ESCAPES)


class PlainConsole(Console):
    """Prints text as it is: nothing in it is markup, an emoji's name or a command to the terminal. Styles are arguments,
    or a `rich.text.Text` of ours."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)


err = PlainConsole(stderr=True)
out = PlainConsole()
if not out.is_terminal and "COLUMNS" not in os.environ:
    out.width = _PIPE_COLUMNS


class CliError(Exception):
    """Ends the command: one line on stderr that names what is wrong and the way out."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def state_dir() -> Path:
    """Where a running deployment writes how to reach it: KVTIER_STATE, else the user's state folder."""
    if own := os.environ.get("KVTIER_STATE"):
        return Path(own).expanduser().absolute()
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser().absolute() / "kvtier"


def print_json(value: Any) -> None:
    """One object, on stdout; in ASCII where that can't show all characters."""
    is_unicode = (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")
    print(json.dumps(value, indent=2, ensure_ascii=not is_unicode))


def human_bytes(nbytes: float) -> str:
    """1536 -> 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def human_count(number: int) -> str:
    """1234567 -> 1,234,567."""
    return f"{number:,}"


def human_seconds(seconds: float) -> str:
    """0.0123 -> 12 ms, 75 -> 1m15s."""
    if seconds < 1:
        return f"{1e3 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def share(part: float) -> str:
    """0.123 -> 12.3 %."""
    return f"{100 * part:.1f} %"


def settings(file: Path | None, overrides: Sequence[str]) -> Config:
    """The checked configuration; its library takes longer to import than most verbs run, so only these verbs do."""
    from kvtier.cluster.config.deployment import ConfigError, load_config

    try:
        return _with_absolute_paths(load_config(file or default_config(), tuple(overrides)))
    except ConfigError as error:
        raise CliError(str(error), 2) from error


def _with_absolute_paths(config: Config) -> Config:
    """Paths relative to the current folder must mean the same to commands that are run in other folders."""
    from kvtier.workers.models.files.store import known

    def absolute(path: str) -> str:
        return str(Path(path).expanduser().absolute()) if path else ""

    model, l4, tls = config.model, config.tiers.l4, config.grpc.tls
    if not known(model.path) and model.path and Path(model.path).expanduser().exists():
        model = model.model_copy(update={"path": absolute(model.path)})
    if tls:
        files = {name: absolute(getattr(tls, name)) for name in ("cert", "key", "client_ca")}
        tls = tls.model_copy(update=files)
    tiers = config.tiers.model_copy(update={"l4": l4.model_copy(update={"path": absolute(l4.path)})})
    grpc = config.grpc.model_copy(update={"tls": tls})
    return config.model_copy(update={"model": model, "tiers": tiers, "grpc": grpc})


def default_config() -> Path:
    """The local.yaml that comes with kvtier."""
    from kvtier.cluster.machines import leftovers

    return Path(leftovers.__file__).parents[1] / "local.yaml"


class Steps:
    """Shows how far long work is: a bar or a spinner on a terminal, a line per step elsewhere. Call it with each step.

    Calls with the same step update it; `close` ends the last step, and the next call starts over.
    """

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._step = ""

    def __call__(self, step: str, done: int = 0, total: int | None = None) -> None:
        step = visible(step)
        if not err.is_terminal:
            if step != self._step:
                err.print(f"  {step} ...", soft_wrap=True)
        else:
            self._draw(step, done, total)
        self._step = step

    def close(self, *, failed: bool = False) -> None:
        """Take the display down; what it showed last stays, as done unless it failed."""
        if self._progress:
            if not failed:
                self._tick()
            self._progress.stop()
        self._progress, self._step = None, ""

    def _draw(self, step: str, done: int, total: int | None) -> None:
        if self._progress is None:
            self._progress = _progress()
            self._progress.start()
        elif step == self._step:
            self._progress.update(self._task, completed=done, total=total)
            return
        else:
            self._tick()
        self._task = self._progress.add_task(step, total=total, completed=done)

    def _tick(self) -> None:
        assert self._progress is not None
        total = self._progress.tasks[-1].total or 1
        self._progress.update(self._task, total=total, completed=total)


def _progress() -> Progress:
    return Progress(
        SpinnerColumn(finished_text="[green]✓[/]"),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=err,
    )


@contextmanager
def steps() -> Iterator[Steps]:
    """Progress on stderr for the duration of the block."""
    shown = Steps()
    try:
        yield shown
    except BaseException:
        shown.close(failed=True)
        raise
    shown.close()


def read_text(path: Path, what: str) -> str:
    """A text file the user named."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CliError(f"can't read {what} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CliError(
            f"{what} {path} is no UTF-8 text (byte {error.start}): save it as UTF-8 or give another file", 2
        ) from error


def check_target(option: str, file: Path, suffix: str) -> None:
    """Refuse a file that can't be written, before anything is computed. The disk may still be full later."""
    if file.suffix != suffix:
        raise CliError(f"{option} writes a {suffix} file, got {file}", 2)
    if not file.parent.is_dir():
        raise CliError(f"{option} {file}: there is no folder {file.parent}; make it, or name another", 2)
    if file.is_dir():
        raise CliError(f"{option} {file}: this is a folder; name a file in it", 2)
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise CliError(f"{option} {file}: permission denied; name a file that you may write", 2)
