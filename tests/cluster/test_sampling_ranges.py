"""The range of each sampling parameter stands once; what clients read of it says the same."""

from __future__ import annotations

import inspect
import math
import re
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli.generate import generate
from kvtier.workers.requests.api import RANGES, SamplingParams

PROTO = Path(__file__).resolve().parents[2] / "proto" / "inference.proto"


@pytest.mark.parametrize("name", RANGES)
def test_the_wire_and_the_command_line_say_a_parameters_range(name: str) -> None:
    message = PROTO.read_text().partition("message Sampling {")[2].partition("\n}")[0]
    (comment,) = re.findall(rf"optional \w+ {name} = \d+; *// (.*(?:\n *// .*)*)", message)
    option = inspect.signature(generate, eval_str=True).parameters[name].annotation.__metadata__[0]

    assert str(RANGES[name]) in comment
    assert str(RANGES[name]) in option.help


@pytest.mark.parametrize("name", RANGES)
def test_a_range_takes_its_ends_and_refuses_what_lies_beside_them(name: str) -> None:
    allowed = RANGES[name]
    inside: list[float] = [allowed.most]
    outside: list[float] = [
        math.nan,
        math.inf,
        -math.inf,
        math.nextafter(allowed.most, math.inf),
        -9,
    ]
    (outside if allowed.is_open else inside).append(allowed.least)
    if allowed.zero:
        inside.append(0)
        outside.append(0.5 * allowed.least)

    for value in inside:
        params(name, value).validate()
    for value in outside:
        with pytest.raises(ValueError, match=re.escape(f"{name} must be {allowed}, got {value}")):
            params(name, value).validate()


def params(name: str, value: Any) -> SamplingParams:
    return SamplingParams(**{name: value})
