"""What README.md tells a reader to type or open is there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from kvtier.cli import app

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def commands(program: str) -> list[str]:
    """Lines of the shell blocks that call `program`, comments cut off."""
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    lines = [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.split(maxsplit=1)[0] == program]


def parse(command: Any, arguments: list[str]) -> None:
    """Parse a command line down to its verb, without running it."""
    context = command.make_context(command.name or "kvtier", list(arguments), resilient_parsing=False)
    if isinstance(getattr(command, "commands", None), dict):
        name, sub, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        assert sub is not None, name
        parse(sub, rest)


@pytest.mark.parametrize("line", commands("make"))
def test_every_make_command_is_a_target(line: str) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)

    for target in line.split()[1:]:
        assert target in targets


@pytest.mark.parametrize("line", commands("kvtier"))
def test_every_kvtier_command_is_understood(line: str) -> None:
    parse(typer.main.get_command(app), shlex.split(line)[1:])


def test_the_blocks_are_found() -> None:
    assert len(commands("make")) >= 5
    assert len(commands("kvtier")) >= 10


@pytest.mark.parametrize("verb", sorted(set(re.findall(r"`kvtier ([a-z]+)", README))))
def test_every_verb_in_the_text_exists(verb: str) -> None:
    names = {
        command.name or command.callback.__name__ for command in app.registered_commands if command.callback
    }

    assert verb in names | {group.name for group in app.registered_groups}


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#]+)\)", README))
def test_every_link_leads_somewhere(link: str) -> None:
    assert (ROOT / link).exists()


@pytest.mark.parametrize(
    "key", sorted(set(re.findall(r"(?:--set |`)((?:tiers|grpc|model)(?:\.\w+)+)", README)))
)
def test_every_configuration_key_is_in_local_yaml(key: str) -> None:
    value: Any = yaml.safe_load((ROOT / "cluster" / "local.yaml").read_text())

    for part in key.split("."):
        assert part in value
        value = value[part]


def test_a_command_that_does_not_exist_would_be_seen() -> None:
    with pytest.raises(Exception, match="bogus"):
        parse(typer.main.get_command(app), ["generate", "hi", "--bogus"])
