"""`kvtier model ...`: the models that kvtier knows by name."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtier.cli.common import CliError, out, print_json, steps
from kvtier.cli.connection import JsonOption
from kvtier.cli.tables import table
from kvtier.workers.models.files.store import KNOWN_MODELS, ModelError, default_cache, list_models
from kvtier.workers.models.files.store import pull as pull_model


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(
        no_args_is_help=True, help="The models that kvtier knows by name.", rich_markup_mode=None
    )
    group.command()(pull)
    group.command()(ls)
    app.add_typer(group, name="model")


def pull(
    name: Annotated[str, typer.Argument(help="A name from `kvtier model ls`.")] = KNOWN_MODELS[0].name,
    as_json: JsonOption = False,
) -> None:
    """Download a model, check its digest and convert it, once.

    \b
    Examples:
      kvtier model pull
    """
    try:
        with steps() as progress:
            folder = pull_model(name, default_cache(), progress)
    except ModelError as error:
        raise CliError(str(error)) from error
    print_json({"name": name, "path": str(folder)}) if as_json else print(folder)


def ls(as_json: JsonOption = False) -> None:
    """List models, the default first.

    \b
    Examples:
      kvtier model ls --json | jq -r '.[0].path'
    """
    models = list_models(default_cache())
    if as_json:
        print_json(models)
        return
    rows = [
        (m["name"], m["path"] or "not pulled: kvtier model pull", m["license"], m["about"]) for m in models
    ]
    out.print(table(None, ("name", "path", "license", "what it is"), rows))
