"""The command line without a deployment: help that teaches, one line per error, output as promised."""

from __future__ import annotations

import io
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import grpc
import pytest

from kvtier.cli import connection, doctor, main, watch
from kvtier.cli.client import Chunk, Client, ClientError
from kvtier.cli.common import out, settings
from kvtier.cli.state import Deployment, StateFolder
from kvtier.cli.supervisor import cannot_listen
from kvtier.cluster.config.deployment import load_config
from kvtier.workers.models.files.store import ModelError, resolve

VERBS = [
    *(["up"], ["down"], ["status"], ["generate"], ["stats"], ["explain"], ["doctor"], ["demo"], ["quality"]),
    *(["plan"], ["replay"]),
    *(["pages", verb] for verb in ("ls", "show", "pin", "unpin", "evict", "clear", "verify")),
    *(["model", verb] for verb in ("pull", "ls")),
    *(["record", verb] for verb in ("start", "stop", "show", "verify", "export")),
]
USAGE = {
    "prompt_tokens": 40,
    "completion_tokens": 2,
    "computed_tokens": 8,
    "cached_tokens": {"L1": 16, "L2": 0, "L3": 16, "L4": 0, "remote": 0},
}
TIMINGS = {"queue": 0.1, "load": 1.0, "prefill": 2.0, "ttft": 3.5, "decode": 10.0}
TIER = {
    "capacity_bytes": 2**20,
    "used_bytes": 2**19,
    "pages": 3,
    "lookups_tokens": 40,
    "hit_tokens": 16,
    "hit_rate": 0.4,
    "promoted_pages": 1,
    "demoted_pages": 2,
    "evicted_pages": 4,
    "bytes_in": 5,
    "bytes_out": 6,
    "load_ms_p50": 1.5,
    "load_ms_p99": 0.0,
    "corrupt_pages": 0,
    "page_bytes": 3 * 2**17,
    "raw_bytes": 2**20,
    "variants": {"fp8_e4m3": 1, "int4c": 1200},
    "saved": 0.625,
    "converted_pages": 1234,
    "dropped_pages": 77,
    "policy": "rvi, lru for now",
    "fallbacks": 3456,
    "refused_writes": 2345,
}
STATS = {
    "tiers": {name: TIER for name in ("L1", "L2", "L3", "L4", "remote")},
    "requests": 1,
    "prompt_tokens": 40,
    "computed_tokens": 8,
    "cached_tokens": 32,
    "aborted_prompt_tokens": 0,
    "failed_requests": 0,
    "page_fill": 0.96,
}
PAGE = {
    "key": "ab" * 32,
    "tier": "L3",
    "owner": "node-0",
    "tenant": "default",
    "root": "cd" * 32,
    "parent": "ef" * 32,
    "variant": "bf16",
    "depth": 3,
    "tokens": 16,
    "nbytes": 368640,
    "uses": 2,
    "idle_s": 90.0,
    "pinned": True,
    "readers": 0,
    "state": "sealed",
    "made_from": "",
}


def _words(value: object) -> str | None:
    return " ".join(value) if isinstance(value, list) and all(isinstance(v, str) for v in value) else None


class FakeClient:
    """Answers as a deployment would, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}
        self.outcomes = {"ACCEPTED": 1}
        self.parts: list[dict[str, Any]] = []  # of a clear
        self.error: ClientError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def generate(self, prompt: object, **options: Any) -> Iterator[Chunk]:
        self.asked = {"prompt": prompt, **options}
        if self.error:
            raise self.error
        first = {"request_id": "r1", "worker": "w0", "index": 0, "logprobs": [], "seed": 7}
        yield Chunk(text="Hello", token_ids=[5], finish_reason=None, usage=None, timings_ms=None, **first)
        yield Chunk(
            text=" you", token_ids=[6], finish_reason="stop", usage=USAGE, timings_ms=TIMINGS, **first
        )

    def status(self) -> dict[str, Any]:
        return {
            "endpoint": "127.0.0.1:1",
            "model": {
                "name": "m",
                "tokenizer_digest": "",
                "recipe": "fp8_e4m3 to int4c",
                "window": 1024,
                "sinks": 4,
            },
            "gateway_pid": 4,
            "in_flight": 3,
            "since": time.time() - 90,
            "directory": {
                "pid": 5,
                "health": "unhealthy",
                "detail": "it does not answer",
                "since": time.time(),
                "entries": 1234,
                "holders": 2,
            },
            "nodes": [
                {
                    "id": "node-0",
                    "pid": 1,
                    "health": "healthy",
                    "detail": "",
                    "notes": ["L4 was rebuilt"],
                    "host": "box",
                    "since": time.time() - 3600,
                    "exchange": "10.0.0.1:7000",
                }
            ],
            "workers": [
                {
                    "id": "w0",
                    "node": "node-0",
                    "pid": 2,
                    "role": "decode",
                    "health": "dead",
                    "detail": "gone",
                    "in_flight": 0,
                    "since": time.time() - 5,
                }
            ],
        }

    def stats(self) -> dict[str, Any]:
        return STATS

    def explain(self, request_id: str) -> dict[str, Any]:
        notes = [
            {"start": 0, "end": 32, "tier": "L1", "reason": "", "detail": ""},
            {
                "start": 32,
                "end": 40,
                "tier": "computed",
                "reason": "never_stored",
                "detail": "nothing had it",
            },
        ]
        told = {"request_id": request_id, "tenant": "default", "worker": "w0", "prompt_tokens": 40}
        moves = [{"worker": "w1", "tokens": 7, "reason": "w0 went down: its process ended"}]
        return {**told, "preemptions": 0, "usage": USAGE, "notes": notes, "moves": moves}

    def pages_ls(self, **options: Any) -> list[dict[str, Any]]:
        self.asked = options
        return [PAGE]

    def pages_show(self, key: str) -> list[dict[str, Any]]:
        return [PAGE]

    def _acted(self, keys: object = (), **options: Any) -> dict[str, Any]:
        self.asked = {"keys": keys, **options}
        result = {"key": PAGE["key"], "outcome": next(iter(self.outcomes)), "owners": {"node-0": "ACCEPTED"}}
        return {"results": [result], "counts": self.outcomes}

    pages_pin = pages_unpin = pages_evict = pages_verify = _acted

    def pages_clear(self, **options: Any) -> dict[str, Any]:
        return {**self._acted(**options), "parts": self.parts}


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeClient:
    fake = FakeClient()
    monkeypatch.setattr(connection, "connect", lambda endpoint, tls: fake)
    monkeypatch.setenv("KVTIER_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("KVTIER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    return fake


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run `kvtier` with these arguments: exit code, stdout, stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvtier", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        said = capsys.readouterr()
        assert isinstance(left.value.code, int)
        return left.value.code, said.out, said.err

    return call


@pytest.mark.parametrize("verb", VERBS, ids=_words)
def test_help_of_every_verb_has_an_example_that_calls_it(run: Any, verb: list[str]) -> None:
    code, out, _ = run(*verb, "--help")

    assert code == 0
    assert f"kvtier {' '.join(verb)}" in out.partition("Examples:")[2]


@pytest.mark.parametrize("group", [[], ["pages"], ["model"], ["record"]])
def test_a_group_alone_shows_its_help_and_fails(run: Any, group: list[str]) -> None:
    code, _, err = run(*group)

    assert code == 2
    assert "Commands:" in err


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["bogus"], 2, "bogus"),
        (["generate", "hi", "--bogus"], 2, "--bogus"),
        (["generate", "hi", "--max-tokens", "many"], 2, "--max-tokens"),
        (["generate", "--chat"], 2, "PROMPT"),
        (["generate", "hi", "--token-ids", "1"], 2, "--token-ids"),
        (["generate", "--token-ids", "1,x"], 2, "'1,x'"),
        (["generate", "--token-ids", "1", "--chat"], 2, "--chat"),
        (["generate", "hi", "--system", "/nowhere"], 1, "/nowhere"),
        (["generate", "hi \udcff", "--endpoint", "h:1"], 2, "the prompt is no UTF-8 text: give it as UTF-8"),
        (["generate", "hi", "--logit-bias", "42"], 2, "--logit-bias wants ID:BIAS"),
        (
            ["generate", "hi", "--session", "s", "--session-open", "--session-closed"],
            2,
            "one of --session-open",
        ),
        (["generate", "hi", "--session-closed"], 2, "--session ID"),
        (["generate", "hi", "--tls", "/nowhere.pem"], 2, "/nowhere.pem"),
        (["generate", "hi", "--tls", "a,b"], 2, "'a,b'"),
        (["pages", "ls", "--tier", "L9"], 2, "L9"),
        (["pages", "clear"], 2, "--all"),
        (["stats"], 3, "kvtier up"),
        (["down"], 1, "no deployment is running"),
        (["up", "/nowhere.yaml"], 2, "/nowhere.yaml"),
        (["up", "--set", "tiers.l3.bytes=lots"], 2, "tiers.l3.bytes"),
        (["up", "--set", "page_tokens=12", "--detach"], 2, "12"),
        (["up", "--set", "cache.policy=arc", "--detach"], 2, "'arc'"),
        (["doctor", "--set", "nope=1"], 2, "nope"),
        (["model", "pull", "gpt-9"], 1, "gpt-9"),
    ],
    ids=_words,
)
def test_a_mistake_is_one_line_on_stderr_that_names_it(
    run: Any, client: FakeClient, arguments: list[str], code: int, named: str
) -> None:
    got, out, err = run(*arguments)

    assert (got, out) == (code, "")
    assert err.startswith("kvtier: ") and err.count("\n") == 1 and named in err


def test_text_streams_and_json_is_one_object(run: Any, client: FakeClient) -> None:
    code, out, _ = run("generate", "hi", "--endpoint", "h:1")
    assert (code, out) == (0, "Hello you\n")

    code, out, _ = run("generate", "hi", "--endpoint", "h:1", "--json")

    done = json.loads(out)
    assert code == 0
    assert (done["text"], done["token_ids"], done["finish_reason"]) == ("Hello you", [5, 6], "stop")
    assert (done["usage"], done["timings_ms"], done["request_id"]) == (USAGE, TIMINGS, "r1")


def test_every_sampling_option_reaches_the_request(run: Any, client: FakeClient) -> None:
    options = (
        "--max-tokens 5 --min-tokens 2 --temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --seed 4 --n 1"
    )
    more = "--repetition-penalty 1.1 --stop a --stop b --stop-id 9 --ignore-eos --logprobs 2 --tenant t --no-cache"
    last = "--worker w0 --request-id mine --timeout 3 --lossy --window 64 --sinks 4"
    told = "--session chat-17 --session-closed --expect-tokens 30"
    also = "--presence-penalty 0.25 --frequency-penalty -0.5 --logit-bias 7:2.5 --logit-bias 8:-1 --prompt-logprobs 3"

    run("generate", "hi", *f"{options} {more} {last} {told} {also}".split(), "--endpoint", "h:1", "--json")

    assert client.asked == {
        "prompt": "hi",
        "max_tokens": 5,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 4,
        "n": 1,
        "repetition_penalty": 1.1,
        "stop": ["a", "b"],
        "stop_ids": [9],
        "ignore_eos": True,
        "logprobs": 2,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "logit_bias": {7: 2.5, 8: -1.0},
        "prompt_logprobs": 3,
        "tenant": "t",
        "no_cache": True,
        "lossy": True,
        "window": 64,
        "sinks": 4,
        "session_id": "chat-17",
        "session_state": "closed",
        "expected_output_tokens": 30,
        "worker": "w0",
        "request_id": "mine",
        "timeout_s": 3.0,
    }


@pytest.mark.parametrize(("options", "state"), [([], ""), (["--session-open"], "open")])
def test_a_session_goes_on_only_where_it_is_said(
    run: Any, client: FakeClient, options: list[str], state: str
) -> None:
    run("generate", "hi", "--session", "chat-17", *options, "--endpoint", "h:1")

    assert (client.asked["session_id"], client.asked["session_state"]) == ("chat-17", state)


def test_prompts_come_as_text_chat_ids_and_stdin(
    run: Any, client: FakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = tmp_path / "system.txt"
    system.write_text("Be brief.")
    user = {"role": "user", "content": "hi"}

    run("generate", "hi", "--chat", "--endpoint", "h:1")
    assert client.asked["prompt"] == [user]
    run("generate", "hi", "--system", str(system), "--endpoint", "h:1")
    assert client.asked["prompt"] == [{"role": "system", "content": "Be brief."}, user]
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    run("generate", "-", "--endpoint", "h:1")
    assert client.asked["prompt"] == "from a pipe"

    code, out, _ = run("generate", "--token-ids", "1,2, 3", "--endpoint", "h:1")
    assert client.asked["prompt"] == [1, 2, 3]
    assert (code, out.split()) == (0, ["5", "6"])  # the model has no tokenizer, so ids come back


def test_a_prompt_on_stdin_that_is_no_text_is_refused_with_the_way_out(
    run: Any, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"))

    code, out, err = run("generate", "-", "--endpoint", "h:1")

    assert (code, out) == (2, "")
    assert err == "kvtier: the prompt is no UTF-8 text: give it as UTF-8, or its tokens with --token-ids\n"


def test_a_failed_call_gives_its_own_line_and_code(run: Any, client: FakeClient) -> None:
    client.error = ClientError("temperature must be from 0 to 100, got -1.0", 2, "INVALID_ARGUMENT")

    code, out, err = run("generate", "hi", "--temperature", "-1", "--endpoint", "h:1")

    assert (code, out, err) == (2, "", "kvtier: temperature must be from 0 to 100, got -1.0\n")


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["stats"], ["L1", "remote", "512.0 KiB", "40.0 %", "1.50 ms", "32 cached (80.0 %)", "96.0 % full"]),
        (["stats"], ["384.0 KiB", "1.0 MiB", "62.5 %", "1,234", "77", "int4c 1,200, fp8_e4m3 1"]),
        (["stats"], ["evicts by", "rvi, lru for now", "3,456", "2,345"]),
        (["status"], ["127.0.0.1:1", "node-0", "dead: gone", "L4 was rebuilt"]),
        (["status"], ["box", "pages at 10.0.0.1:7000", "1h00m", "1m30s"]),
        (["status"], ["knows 1,234 pages of 2 holders", "unhealthy: it does not answer"]),
        (["status"], ["stored as fp8_e4m3 to int4c", "window of 1,024 tokens and 4 sinks"]),
        (["explain", "r1"], ["request r1", "32-40", "never_stored", "nothing had it", "went on at w1"]),
        (["pages", "ls"], ["abababababababab", "360.0 KiB", "1m30s", "sealed, pinned"]),
        (["pages", "show", "abab"], ["ab" * 32, "368640"]),
        (["pages", "pin", "abab"], ["abababababababab", "node-0: ACCEPTED", "1 ACCEPTED"]),
    ],
    ids=_words,
)
def test_tables_say_it_in_human_units(
    run: Any, client: FakeClient, arguments: list[str], shown: list[str]
) -> None:
    code, out, _ = run(*arguments, "--endpoint", "h:1")

    assert code == 0
    for part in shown:
        assert part in out


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["stats"], STATS),
        (["pages", "ls", "--tier", "L3", "--tenant", "default"], [PAGE]),
        (["pages", "show", "abab"], [PAGE]),
    ],
    ids=_words,
)
def test_json_is_the_object_itself(run: Any, client: FakeClient, arguments: list[str], value: object) -> None:
    code, out, _ = run(*arguments, "--json", "--endpoint", "h:1")

    assert (code, json.loads(out)) == (0, value)


@pytest.mark.parametrize("verb", ["pin", "unpin", "evict"])
@pytest.mark.parametrize(
    ("outcome", "expected"),
    [("ACCEPTED", 0), ("DEFERRED", 0), ("REJECTED", 1), ("MISSING", 1), ("CLIPPED", 1)],
)
def test_an_action_on_pages_succeeds_only_if_it_was_done(
    run: Any, client: FakeClient, verb: str, outcome: str, expected: int
) -> None:
    client.outcomes = {outcome: 1}

    code, out, err = run("pages", verb, "abab", "--endpoint", "h:1")

    assert code == expected
    assert outcome in out
    assert err.count("\n") == expected


def test_verifying_fails_when_pages_were_damaged_and_says_how_many(run: Any, client: FakeClient) -> None:
    client.outcomes = {"ACCEPTED": 127}
    assert run("pages", "verify", "--endpoint", "h:1")[0] == 0
    client.outcomes = {"MISSING": 30, "ACCEPTED": 127, "CLIPPED": 8, "DEFERRED": 1}

    code, _, err = run("pages", "verify", "--endpoint", "h:1")

    assert (code, err) == (1, "kvtier: 39 of 166 pages were damaged and dropped\n")


def test_a_listing_that_reaches_its_limit_says_so(run: Any, client: FakeClient) -> None:
    for options in ((), ("--json",)):
        assert run("pages", "ls", "--endpoint", "h:1", *options)[2] == ""
        code, out, err = run("pages", "ls", "--limit", "1", "--endpoint", "h:1", *options)
        assert (code, err.strip()) == (
            0,
            "these are 1 copies, there may be more: see --limit, --tier and --tenant",
        )
        assert PAGE["key"][:16] in out and "may be more" not in out


def test_a_converted_copy_is_listed_as_what_it_is_of_what_it_was(
    run: Any, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = PAGE | {"tier": "L4", "variant": "int4c", "made_from": "fp8_e4m3"}
    monkeypatch.setattr(client, "pages_ls", lambda **options: [PAGE, small])

    code, said, _ = run("pages", "ls", "--endpoint", "h:1")

    assert code == 0
    assert [("of fp8_e4m3" in line, "bf16" in line) for line in said.splitlines() if "ab" * 8 in line] == [
        (False, True),
        (True, False),
    ]


def test_a_page_with_three_copies_is_shown_with_its_keys_whole(
    run: Any, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        client, "pages_show", lambda key: [PAGE | {"tier": tier} for tier in ("L1", "L3", "L4")]
    )
    monkeypatch.setattr(out, "width", 80)

    code, said, _ = run("pages", "show", "abab", "--endpoint", "h:1")

    assert code == 0
    assert said.splitlines()[:3] == [f"key     {'ab' * 32}", f"root    {'cd' * 32}", f"parent  {'ef' * 32}"]
    assert said.count("368640") == 3


@pytest.mark.parametrize("how", [[], ["--json"]])
def test_watching_ends_well_and_quietly_by_ctrl_c(
    run: Any, client: FakeClient, monkeypatch: pytest.MonkeyPatch, how: list[str]
) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watch, "time", SimpleNamespace(sleep=interrupted))

    code, said, err = run("stats", "--watch", *how, "--endpoint", "h:1")

    assert (code, err) == (0, "")
    assert "hit_rate" in said or "hit rate" in said


def test_a_number_too_large_for_the_wire_is_named_with_its_option() -> None:
    with connect_nowhere() as client, pytest.raises(ClientError, match="max_tokens.*10000000000") as caught:
        next(client.generate("hi", max_tokens=10_000_000_000))

    assert caught.value.exit_code == 2


def connect_nowhere() -> Client:
    """A client that has not called anything."""
    return Client(grpc.insecure_channel("127.0.0.1:1"), "127.0.0.1:1")


def test_a_place_that_cannot_be_listened_on_comes_with_its_own_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        in_use = cannot_listen("127.0.0.1", port)
    elsewhere = cannot_listen("192.0.2.77", 0)

    assert in_use and f"127.0.0.1:{port}" in in_use[0] and "grpc.port=0" in in_use[1]
    assert elsewhere and "192.0.2.77" in elsewhere[0] and "grpc.host" in elsewhere[1]
    assert cannot_listen("127.0.0.1", 0) is None


def test_a_model_that_cannot_be_fetched_gives_the_way_out_once(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        resolve("nothing/no-such-model", tmp_path)

    assert str(caught.value).count("give a") == str(caught.value).count("model.path") == 1


def test_paths_of_a_configuration_hold_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    sets = ("model.path=model", "tiers.l4.path=l4", "grpc.tls={cert: c.pem, key: /k.pem}")

    config = settings(None, sets)

    assert config.model.path == str(tmp_path / "model")
    assert config.tiers.l4.path == str(tmp_path / "l4")
    assert config.grpc.tls is not None
    assert (config.grpc.tls.cert, config.grpc.tls.key) == (str(tmp_path / "c.pem"), "/k.pem")
    assert config.grpc.tls.client_ca == ""
    elsewhere = settings(None, ("model.path=owner/model",))
    assert (elsewhere.model.path, elsewhere.tiers.l4.path) == ("owner/model", "")


def test_down_cleans_up_after_a_deployment_that_was_killed(
    run: Any, client: FakeClient, tmp_path: Path
) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "state").mkdir()
    StateFolder(tmp_path / "state").write(Deployment(pid=4242, started="", ray_dir=str(tmp_path / "ray")))

    code, _, err = run("status")

    assert (code, err.count("\n")) == (3, 1)
    assert "was killed (pid 4242)" in err and "`kvtier down` cleans up" in err

    code, _, err = run("down")

    assert (code, err) == (0, "the deployment was killed (pid 4242): removed its Ray session\n")
    assert not (tmp_path / "ray").exists()
    assert run("down")[0] == 1


def test_evicting_names_pages_or_a_tier(run: Any, client: FakeClient) -> None:
    run("pages", "evict", "--tier", "L1", "--endpoint", "h:1")
    assert client.asked == {"keys": (), "tier": "L1"}
    code, _, err = run("pages", "evict", "--endpoint", "h:1")
    assert (code, err.count("\n")) == (2, 1)
    assert "--tier" in err


def a_part(name: str, outcome: str, detail: str = "", tier: str = "", error: str = "") -> dict[str, Any]:
    return {
        "part": name,
        "outcome": outcome,
        "pages": 3,
        "tier": tier,
        "error": error,
        "detail": detail,
    }


def test_clearing_shows_each_part_and_fails_only_where_something_is_not_cleared_and_will_not_be(
    run: Any, client: FakeClient
) -> None:
    client.parts = [
        a_part("node-1", "DEFERRED", "wiping slots in L4 failed: Read-only file system", "L4", "EROFS"),
        a_part("worker-0", "ACCEPTED"),
    ]

    code, out, _ = run("pages", "clear", "--tenant", "a", "--endpoint", "h:1")

    assert code == 0
    lines = out.splitlines()
    for words in (("node-1", "DEFERRED", "3", "L4 EROFS", "wiping slots"), ("worker-0", "ACCEPTED", "3")):
        assert any(all(word in line for word in words) for line in lines), words
    code, out, _ = run("pages", "clear", "--all", "--json", "--endpoint", "h:1")
    assert code == 0 and json.loads(out)["parts"] == client.parts

    client.parts.append(a_part("gateway", "REJECTED", "its record can't be written", error="ENOSPC"))
    for how in ((), ("--json",)):
        code, _, err = run("pages", "clear", "--all", *how, "--endpoint", "h:1")
        assert code == 1 and "not all was cleared: see what is said of gateway" in err


def test_clearing_names_the_tenant_or_all(run: Any, client: FakeClient) -> None:
    run("pages", "clear", "--tenant", "a", "--endpoint", "h:1")
    assert client.asked["tenant"] == "a"
    run("pages", "clear", "--all", "--endpoint", "h:1")
    assert client.asked["tenant"] == ""


def test_the_default_model_is_listed_first(run: Any, client: FakeClient) -> None:
    code, out, _ = run("model", "ls", "--json")

    first = json.loads(out)[0]
    assert code == 0
    assert (first["name"], first["path"]) == ("smollm2-135m-instruct", "")


def test_doctor_checks_this_machine_and_says_what_fails(run: Any, client: FakeClient) -> None:
    code, out, _ = run("doctor", "--set", "grpc.port=0", "--json")
    report = json.loads(out)
    assert (code, report["ok"]) == (0, True)
    assert {"python", "torch", "memory", "direct I/O", "port", "model"} <= {
        c["name"] for c in report["checks"]
    }

    code, out, err = run("doctor", "--set", "grpc.port=0", "--set", "tiers.l3.bytes=900TiB")

    assert (code, err) == (1, "kvtier: 1 checks failed: memory\n")
    assert "smaller tiers" in out


def test_doctor_counts_the_disk_of_each_raylet(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    config = load_config(None, ("tiers.l4.bytes=7GiB", "ray.raylets=2", "nodes.count=2"))

    for free, level in ((14 * gib - 1, "warn"), (14 * gib + 1, "ok")):
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))  # noqa: B023
        assert doctor._disk(config)[0].level == level


def test_a_reader_that_leaves_early_sees_no_complaint(tmp_path: Path) -> None:
    code = "import sys; from kvtier.cli import main; sys.argv = ['kvtier', 'generate', '--help']; main()"
    writer = subprocess.Popen(
        [sys.executable, "-u", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None and writer.stderr is not None
    writer.stdout.close()

    with writer.stderr:
        assert writer.stderr.read() == ""
    assert writer.wait() != 0
