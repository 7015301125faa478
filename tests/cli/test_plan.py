"""`kvtier plan` from the command line: presets, configs and folders in, tables, JSON and pictures out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_tiny_gemma2, make_tiny_llama

from kvtier.cli import main
from kvtier.lab.plan.model import weights_bytes
from kvtier.lab.plan.model_presets import PRESETS

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "plan.md"
REFERENCE = (
    "--model",
    "llama-2-7b",
    "--seq-len",
    "2048",
    "--hbm-gb",
    "80",
    "--weights-gb",
    "14",
    "--overhead",
    "0.1",
)


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """Run `kvtier plan` with these arguments: exit code, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("KVTIER_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvtier", "plan", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
        said = capsys.readouterr()
        assert isinstance(left.value.code, int)
        return left.value.code, said.out, said.err

    return call


@pytest.fixture
def planned(run: Any) -> Callable[..., dict[str, Any]]:
    """The JSON of a plan that succeeds."""

    def call(*arguments: object) -> dict[str, Any]:
        code, out, err = run(*arguments, "--json")
        assert code == 0, err
        found: dict[str, Any] = json.loads(out)
        return found

    return call


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    """A trace in which conversations come back after as many others as there are."""
    file = tmp_path / "chat.jsonl"
    lines = []
    for turn in range(6):
        for session in range(40):
            own = [10_000 + 100 * session + page for page in range(3 + 2 * turn)]
            ids = [*range(4), *own]
            lines.append(
                {
                    "timestamp": 1000 * (40 * turn + session),
                    "input_length": 512 * len(ids),
                    "output_length": 100,
                    "hash_ids": ids,
                }
            )
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return file


def test_json_has_the_reference_figures_and_says_what_went_in(planned: Any) -> None:
    found = planned(*REFERENCE)

    assert found["kv_bytes_per_token"] == 512 * 1024
    assert found["kv_bytes_per_request"] == 2**30
    assert found["max_batch"] == 54
    assert found["numbers_per_token_layer"] == 8192
    assert found["paged_waste"] == 0 and found["contiguous_waste"] == 0.5
    assert found["inputs"] == {
        "model": "llama-2-7b",
        "hbm_gb": 80,
        "weights_gb": 14,
        "overhead": 0.1,
        "seq_len": 2048,
        "output_len": 0,
        "kv_heads": 32,
        "format": "fp16",
        "page_tokens": 16,
        "tp": 1,
    }
    assert found["by_format"]["fp16"]["max_batch"] == 54
    assert found["by_format"]["fp8"]["kv_bytes_per_token"] == 32 * (2 * 32 * 128 + 2 * 2 * 32)
    assert found["trace"] is None
    assert planned(*REFERENCE, "--kv-heads", 8)["max_batch"] == 216


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_plans_with_its_own_weights(planned: Any, name: str) -> None:
    found = planned("--model", name, "--tp", 16)

    bits = 8 if name == "deepseek-v3" else 16
    assert found["inputs"]["weights_gb"] == pytest.approx(found["model"]["parameters"] * bits / 8e9, rel=0.01)
    assert found["max_batch"] > 0


def test_a_config_file_alone_is_counted_and_weights_beside_it_are_weighed(
    planned: Any, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["llama-3-8b"]))
    counted = planned("--model", "config.json")

    (tmp_path / "model.safetensors").write_bytes(bytes(4000))
    weighed = planned("--model", tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 5000}}')
    indexed = planned("--model", "config.json")

    assert counted["inputs"]["weights_gb"] == 8_030_261_248 * 2 / 1e9
    assert weighed["inputs"]["weights_gb"] == 4000 / 1e9
    assert indexed["inputs"]["weights_gb"] == 5000 / 1e9


def test_a_real_folder_is_read_whole(planned: Any, tmp_path: Path) -> None:
    folder = make_tiny_gemma2(tmp_path / "tiny")

    found = planned("--model", folder, "--seq-len", 100)

    assert found["model"]["layers"] == [{"layers": 2, "window": 0}, {"layers": 2, "window": 32}]
    assert found["inputs"]["weights_gb"] * 1e9 == pytest.approx(weights_bytes(folder))
    assert found["kv_bytes_per_request"] == 2 * (100 + 32) * 2 * 2 * 32 * 4


def test_a_pulled_model_is_found_by_its_name(planned: Any, tmp_path: Path) -> None:
    make_tiny_llama(tmp_path / "cache" / "models" / "mine")

    assert planned("--model", "mine")["model"]["heads"] == 4


def test_the_table_says_what_fits_and_notes_what_is_often_wrong(run: Any) -> None:
    code, out, _ = run(*REFERENCE)

    assert code == 0
    assert "1.074 GB" in out and "512.0 KiB in fp16" in out
    assert "- output counts too: with --output-len 512 max_batch is 43, not 54" in out
    assert "- activations:" in out
    code, out, _ = run("--model", "deepseek-v3", "--tp", 8, "--hbm-gb", 141)
    assert code == 0 and "- tp 8: MLA does not divide" in out and "of it on each GPU" in out


def test_a_plot_is_a_picture(run: Any, tmp_path: Path) -> None:
    code, _, _ = run("--model", "gemma-2-9b", "--plot", "fits.png")

    assert code == 0
    assert (tmp_path / "fits.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "lama-3-8b"], "did you mean llama-3-8b?"),
        (["--model", "empty"], "no config.json"),
        (["--model", "bad.json"], "bad.json is no JSON"),
        (["--model", "list.json"], "must hold a mapping"),
        (["--model", "llama-3-8b", "--hbm-gb", "0"], "--hbm-gb"),
        (["--model", "llama-3-8b", "--hbm-gb", "nan"], "--hbm-gb"),
        (["--model", "llama-3-8b", "--weights-gb", "-1"], "--weights-gb"),
        (["--model", "llama-3-8b", "--overhead", "1"], "overhead"),
        (["--model", "llama-3-8b", "--seq-len", "0"], "at least 1 prompt token"),
        (["--model", "llama-3-8b", "--format", "fp7"], "'fp7'"),
        (["--model", "llama-3-8b", "--page-tokens", "7"], "power of two"),
        (["--model", "llama-3-8b", "--page-tokens", "0"], "power of two"),
        (["--model", ""], "give a config.json, a Hugging Face folder"),
        (["--model", "llama-3-8b", "--running", "5"], "--running needs --trace"),
        (["--model", "llama-3-8b", "--trace", "chat.jsonl", "--ttft-ms", "nan"], "must be positive, got nan"),
        (
            ["--model", "llama-3-8b", "--trace", "chat.jsonl", "--ttft-ms", "900", "--ssd-tb", "nan"],
            "got nan TB",
        ),
        (
            ["--model", "llama-3-8b", "--trace", "chat.jsonl", "--ttft-ms", "900", "--dwpd", "inf"],
            "inf DWPD",
        ),
        (["--model", "llama-3-8b", "--kv-heads", "5"], "1, 2, 4, 8, 16, 32"),
        (["--model", "deepseek-v3", "--kv-heads", "8"], "latent"),
        (["--model", "deepseek-v3", "--format", "int8"], "fp32, fp16, bf16, fp8"),
        (["--model", "llama-3-8b", "--plot", "x.svg"], "--plot"),
        (["--model", "llama-3-8b", "--ttft-ms", "100"], "--trace"),
        (["--model", "llama-3-8b", "--trace", "chat.jsonl"], "--target-hit-rate or --ttft-ms"),
        (
            ["--model", "llama-3-8b", "--trace", "chat.jsonl", "--ttft-ms", "1", "--target-hit-rate", "0.5"],
            "--target-hit-rate and --ttft-ms",
        ),
        (["--model", "llama-3-8b", "--trace", "chat.jsonl", "--target-hit-rate", "1.5"], "between 0 and 1"),
        (["--model", "llama-3-8b", "--trace", "chat.jsonl", "--target-hit-rate", "0.99"], "never evicts"),
        (["--model", "llama-3-8b", "--trace", "chat.jsonl", "--ttft-ms", "1"], "never evicts"),
        (["--model", "llama-3-8b", "--trace", "chat.jsonl", "--ttft-ms", "900", "--dwpd", "0"], "DWPD"),
        (
            ["--model", "llama-3-8b", "--trace", "chat.jsonl", "--ttft-ms", "9", "--recompute-ms", "0"],
            "--recompute-ms",
        ),
        (
            ["--model", "llama-3-8b", "--trace", "chat.jsonl", "--ttft-ms", "9", "--host-gb", "-1"],
            "--host-gb",
        ),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    run: Any, chat: Path, tmp_path: Path, arguments: list[str], named: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")

    code, out, err = run(*arguments)

    assert (code, out) == (2, "")
    assert named in err and err.count("kvtier:") == 1


def test_a_trace_that_is_broken_or_missing_is_named(run: Any, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"timestamp": 0, "input_length": 1, "output_length": 1}\n')

    for file, named in (("bad.jsonl", "bad.jsonl line 1"), ("none.jsonl", "none.jsonl")):
        code, _, err = run("--model", "llama-3-8b", "--trace", file, "--target-hit-rate", "0.1")
        assert code == 1 and named in err


def test_tiers_are_the_smallest_that_reach_a_hit_rate(planned: Any, chat: Path) -> None:
    found = planned(
        *("--model", "llama-3-8b", "--trace", chat, "--target-hit-rate", "0.6", "--half", "all"),
        *("--running", 0, "--host-gb", "8", "--hbm-gb", "30"),
    )["trace"]

    assert (found["requests"], found["block_tokens"]) == (240, 512)
    assert [row["policy"] for row in found["results"]] == ["lru", "rvi"]
    for row in found["results"]:
        assert row["block_hit_rate"] >= 0.6
        tiers = row["tiers"]
        assert sum(tier["blocks"] for tier in tiers.values()) == row["capacity_blocks"]
        assert tiers["L1"]["bytes_gpu"] == tiers["L1"]["blocks"] * 512 * 131072
        assert tiers["L3"]["bytes"] <= 8e9
        assert row["capacity_bytes"] == row["capacity_blocks"] * found["block_slot_bytes"]
        ssd = row["ssd"]
        assert (ssd["through"]["years"] is None) == (tiers["L4"]["blocks"] == 0)


def test_a_tighter_time_to_the_first_token_takes_more(planned: Any, chat: Path) -> None:
    def blocks(ttft_ms: float) -> list[int]:
        found = planned("--model", "llama-3-8b", "--trace", chat, "--ttft-ms", ttft_ms)["trace"]
        assert all(row["ttft_ms"] <= ttft_ms for row in found["results"])
        return [row["capacity_blocks"] for row in found["results"]]

    assert all(tight >= loose for tight, loose in zip(blocks(120), blocks(250), strict=True))


def test_the_table_of_tiers_says_how_long_drives_live(run: Any, chat: Path) -> None:
    code, out, err = run(
        *(
            "--model",
            "llama-3-8b",
            "--trace",
            chat,
            "--target-hit-rate",
            "0.6",
            "--hbm-gb",
            "20",
            "--host-gb",
            "1",
        )
    )

    assert code == 0, err
    assert "SSD writes a day" in out and "days" in out
    assert "a cache that never evicts hits" in out


# ---- the document ----------------------------------------------------------------------------------------------------


def test_the_document_shows_what_the_command_prints(run: Any) -> None:
    """Every line of the reference table that docs/plan.md quotes."""
    _, out, _ = run(*REFERENCE)
    quoted = DOCUMENT.read_text().split("<!-- reference -->")[1].split("```")[1].splitlines()[1:]

    assert len(quoted) > 10
    for line in quoted:
        assert line.strip() in out


@pytest.mark.parametrize(
    ("how", "fits"),
    [
        ("no overhead, weights in GiB beside HBM in GB", lambda kv: (80e9 - 14 * 2**30) // kv),
        ("1 GB of overhead", lambda kv: (80e9 - 14e9 - 1e9) // kv),
    ],
)
def test_what_the_document_says_of_60_and_242_is_how_they_come_about(how: str, fits: Any) -> None:
    assert (fits(2**30), fits(2**28)) == (60, 242), how


def test_what_the_document_says_of_40_gb_is_how_they_come_about(planned: Any) -> None:
    def request(tokens: int, kv_heads: int) -> int:
        found = planned("--model", "llama-2-70b", "--tp", 8, "--seq-len", tokens, "--kv-heads", kv_heads)
        nbytes: int = found["kv_bytes_per_request"]
        return nbytes

    assert request(4096, 64) == 10 * 2**30
    assert request(4096, 8) == 1.25 * 2**30
    assert request(16_384, 64) == request(131_072, 8) == 40 * 2**30
