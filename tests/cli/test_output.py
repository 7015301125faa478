"""What the command prints, whatever the values, the width of the terminal and the state of its standard streams."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from kvtier.cli import watch
from kvtier.cli.common import PlainConsole, Steps, err, out, print_json
from kvtier.cli.streams import Output, StreamFailed, read_stdin, standard_streams
from kvtier.cli.tables import table

BRACKETED = ("chat[red]-7", "job[/1]", "x[/INST]", "[team]", "bad [/dev/sda]", ":smile:", r"\[bold]")
TIERS = ("L1", "L2", "L3", "L4", "remote")


@pytest.mark.parametrize("value", BRACKETED)
def test_no_value_is_read_as_markup(capsys: pytest.CaptureFixture[str], value: str) -> None:
    out.print(value)
    out.print(f"request {value} of tenant {value}", style="yellow", soft_wrap=True)
    out.print(table(value, (value, "b"), [(value, value)]))
    steps = Steps()
    steps(f"fetching {value}")
    steps.close()

    said = capsys.readouterr()
    assert said.out.count(value) == 1 + 2 + 4
    assert value in said.err


@pytest.mark.parametrize("value", BRACKETED)
@pytest.mark.parametrize("where", ["model", "detail", "request_id", "tenant", "reason"])
def test_status_and_explain_show_brackets_wherever_they_come_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, where: str, value: str
) -> None:
    told = {"model": "m", "detail": "d", "request_id": "r", "tenant": "t", "reason": "x"} | {where: value}

    class Client:
        def status(self) -> dict[str, Any]:
            node = {"id": "node-0", "pid": 1, "health": "unhealthy", "detail": told["detail"], "host": "h"}
            return {
                "endpoint": "127.0.0.1:1",
                "gateway_pid": 1,
                "in_flight": 0,
                "since": 0,
                "workers": [],
                "directory": None,
                "model": {"name": told["model"]},
                "nodes": [node | {"since": 0, "exchange": "", "notes": [told["reason"]]}],
            }

        def explain(self, request_id: str) -> dict[str, Any]:
            note = {
                "start": 0,
                "end": 3,
                "tier": "computed",
                "reason": told["reason"],
                "detail": told["detail"],
            }
            return {
                **{name: told[name] for name in ("request_id", "tenant")},
                "worker": "w",
                "prompt_tokens": 3,
                "preemptions": 0,
                "notes": [note],
                "moves": [{"worker": "w1", "tokens": 7, "reason": told["reason"]}],
            }

    @contextmanager
    def connected(*_: object) -> Any:
        yield Client()

    monkeypatch.setattr(watch, "connected", connected)
    monkeypatch.setattr(out, "width", 200)

    watch.status()
    watch.explain("r")

    assert value in capsys.readouterr().out


@given(value=st.text(st.characters(max_codepoint=0x2FF, exclude_characters="\n\t"), max_size=30))
def test_every_text_is_printed_as_it_is_with_control_characters_as_escapes(value: str) -> None:
    shown = io.StringIO()
    console = PlainConsole()
    console.file, console.width = shown, 1000

    console.print(value, soft_wrap=True)

    escaped = "".join(f"\\x{ord(c):02x}" if ord(c) < 32 or 127 <= ord(c) < 160 else c for c in value)
    assert shown.getvalue() == escaped + "\n"


def test_a_number_of_a_value_that_would_move_the_cursor_is_harmless(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out.print(table(None, ("id",), [("a\x1b[2Jb",)]))

    assert "a\\x1b[2Jb" in capsys.readouterr().out


@pytest.mark.parametrize("width", [30, 40, 60, 80, 100, 200])
def test_every_row_keeps_what_identifies_it_and_every_number_is_whole_at_any_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    numbers = [f"{10 ** (n % 7):,} KiB" for n in range(8)]
    columns = ("tier", *(f"hit tokens {n}" for n in range(8)))
    monkeypatch.setattr(out, "width", width)

    out.print(table(None, columns, [(tier, *numbers) for tier in TIERS], right=columns[1:]))

    lines = capsys.readouterr().out.splitlines()
    assert max(map(cell_len, lines)) <= width
    rows = {tier: [line for line in lines if line.startswith(tier)] for tier in TIERS}
    tables = len([line for line in lines if line.startswith("tier")])
    for found in rows.values():
        assert len(found) == tables
        assert [n for line in found for n in re.findall(r"[\d,]+ KiB", line)] == numbers
    heads = " ".join(line for line in lines if line.startswith("tier"))
    assert all(column in heads for column in columns)


def test_the_statistics_name_each_tier_in_each_table_at_60_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    number = dict.fromkeys(
        [
            "used_bytes",
            "capacity_bytes",
            "pages",
            "hit_rate",
            "hit_tokens",
            "lookups_tokens",
            "promoted_pages",
            "demoted_pages",
            "evicted_pages",
            "corrupt_pages",
            "bytes_in",
            "bytes_out",
            "load_ms_p50",
            "load_ms_p99",
            "page_bytes",
            "raw_bytes",
            "saved",
            "converted_pages",
            "dropped_pages",
            "fallbacks",
            "refused_writes",
        ],
        12345,
    )
    tiers = {name: number | {"variants": {"bf16": 3}, "policy": "rvi"} for name in TIERS}
    totals = dict.fromkeys(("cached_tokens", "computed_tokens", "aborted_prompt_tokens", "page_fill"), 0)
    monkeypatch.setattr(out, "width", 60)

    out.print(watch.stats_view({"tiers": tiers, "prompt_tokens": 0, **totals}))

    lines = capsys.readouterr().out.splitlines()
    tables = [line for line in lines if line.startswith("tier ")]
    for name in TIERS:
        assert len([line for line in lines if line.startswith(f"{name} ")]) == len(tables) >= 4


def test_a_long_word_is_folded_and_not_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(out, "width", 40)
    path = "/a/very/long/path/" + "x" * 60

    out.print(table(None, ("check", "found"), [("disk", path)]))

    said = capsys.readouterr().out
    assert path in "".join(re.sub(r"^disk|\s|─", "", line) for line in said.splitlines())


# ---- streams that fail -----------------------------------------------------------------------------------------------


def kvtier(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvtier", *arguments]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, timeout=120, **options)


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["model", "ls"], ["model", "ls", "--json"]])
def test_output_that_is_full_is_one_line_and_an_exit_code(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = kvtier(*arguments, stdout=full)

    assert (done.returncode, done.stderr) == (
        1,
        "kvtier: can't write to standard output: No space left on device\n",
    )


@pytest.mark.parametrize(
    ("descriptor", "arguments", "said"),
    [
        (1, ["model", "ls"], "kvtier: standard output is closed\n"),
        (1, ["--help"], "kvtier: standard output is closed\n"),
        (0, ["generate", "-"], "kvtier: standard input is closed\n"),
    ],
)
def test_a_closed_stream_is_one_line_and_an_exit_code(
    descriptor: int, arguments: list[str], said: str
) -> None:
    done = kvtier(*arguments, preexec_fn=lambda: os.close(descriptor))

    assert (done.returncode, done.stderr) == (1, said)


def test_an_error_that_cannot_be_told_still_gives_its_exit_code(tmp_path: Path) -> None:
    environment = {**os.environ, "KVTIER_STATE": str(tmp_path)}
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "kvtier", "status"]
        done = subprocess.run(command, stderr=full, stdout=full, env=environment, check=False, timeout=120)

    assert done.returncode == 3


def test_an_encoding_that_lacks_a_character_is_a_line_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", raw)

    with standard_streams():
        with pytest.raises(
            StreamFailed, match=r"can't show '\\U0001f600' in its encoding ascii.*PYTHONIOENCODING"
        ):
            print("\U0001f600", flush=True)
        with pytest.raises(StreamFailed, match="PYTHONIOENCODING"):
            out.print(table(None, ("a",), [("é",)]))
        print_json({"é": "\U0001f600"})

    raw.flush()
    assert '{\n  "\\u00e9": "\\ud83d\\ude00"\n}' in raw.buffer.getvalue().decode()  # type: ignore[attr-defined]


def test_the_streams_of_a_caller_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.stdout, sys.stderr

    with standard_streams():
        assert isinstance(sys.stdout, Output) and err.file is sys.stderr

    assert (sys.stdout, sys.stderr) == before


def test_standard_input_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Broken(io.StringIO):
        def read(self, size: int | None = -1) -> str:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(sys, "stdin", Broken())

    with pytest.raises(StreamFailed, match="can't read standard input: Input/output error"):
        read_stdin()


# ---- stats --watch ---------------------------------------------------------------------------------------------------


class Enough(Exception):
    """Ends a watch."""


class Counting:
    """Statistics that count how often they were asked for; the fourth time it is enough."""

    def __init__(self) -> None:
        self.asked = 0

    def stats(self) -> dict[str, Any]:
        self.asked += 1
        if self.asked > 3:
            raise Enough
        totals = dict.fromkeys(("cached_tokens", "computed_tokens", "aborted_prompt_tokens", "page_fill"), 0)
        return {"tiers": {}, "prompt_tokens": 0, "requests": self.asked, **totals}


def test_a_watch_without_a_terminal_prints_the_tables_each_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch.time, "sleep", lambda seconds: None)

    with pytest.raises(Enough):
        watch._watch(Counting(), 0.1, as_json=False)  # type: ignore[arg-type]

    said = capsys.readouterr().out
    assert [f"{n} requests" in said for n in (1, 2, 3)] == [True] * 3
    assert said.count("evicts by") == 3 and "\x1b" not in said
