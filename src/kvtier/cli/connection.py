"""How verbs reach a deployment: the one of this state folder, or the one at --endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli.client import Client, ClientError, TLSFiles, connect
from kvtier.cli.common import CliError, state_dir
from kvtier.cli.state import StateFolder

EndpointOption = Annotated[
    str,
    typer.Option("--endpoint", metavar="HOST:PORT", help="Where it listens; default: the one started here."),
]
TlsOption = Annotated[
    str,
    typer.Option(
        "--tls",
        metavar="CA[,CERT,KEY]",
        help="PEM files: who signed the server, and who we are if it asks; default: as the one started here.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object in place of a table.")]


@contextmanager
def connected(endpoint: str = "", tls: str = "") -> Iterator[Client]:
    """A client for the duration of the block, whose failures end the command with one line."""
    where, files = find(endpoint, tls)
    try:
        with connect(where, files) as client:
            yield client
    except ClientError as error:
        raise CliError(str(error), error.exit_code) from error


def find(endpoint: str, tls: str) -> tuple[str, TLSFiles | None]:
    """HOST:PORT and TLS files to use."""
    files = _tls_files(tls)
    if endpoint:
        return endpoint, files
    folder = StateFolder(state_dir())
    running = folder.running()
    if running is None:
        if dead := folder.killed():
            raise CliError(
                f"the deployment here was killed (pid {dead.pid}): `kvtier down` cleans up after it, and so does "
                "`kvtier up`, which starts it again",
                3,
            )
        raise CliError(
            "no deployment is running here; start one with `kvtier up`, or name one: --endpoint HOST:PORT", 3
        )
    if running.phase != "ready":
        raise CliError(
            f"the deployment (pid {running.pid}) is {running.phase}: {running.step}; try again in a moment", 3
        )
    return running.endpoint, files or (TLSFiles(ca=Path(running.tls_ca)) if running.tls_ca else None)


def _tls_files(option: str) -> TLSFiles | None:
    if not option:
        return None
    parts = [Path(part).expanduser() for part in option.split(",")]
    if len(parts) not in (1, 3):
        raise CliError(f"--tls takes CA or CA,CERT,KEY, got {option!r}", 2)
    for part in parts:
        if not part.is_file():
            raise CliError(f"--tls: no such file: {part}", 2)
    return TLSFiles(*parts)
