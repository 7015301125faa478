"""`kvtier plan`: how many requests fit my GPUs, what each cache format buys, and how large must the tiers be?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvtier.cli.common import (
    CliError,
    check_target,
    err,
    print_json,
    steps,
)
from kvtier.cli.connection import JsonOption
from kvtier.cli.plan_print import print_plan, print_sizing

if TYPE_CHECKING:
    from kvtier.lab.plan.model_numbers import ModelNumbers
    from kvtier.lab.plan.plan import Plan
    from kvtier.lab.plan.trace import Sizing, Wishes

_Progress = Callable[[str, int, int | None], None]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(no_args_is_help=True)(plan)


def plan(
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME|config.json|FOLDER",
            help="llama-2-7b, llama-2-70b, llama-3-8b, llama-3-70b, qwen2.5-7b, mistral-7b, gemma-2-9b, deepseek-v2, "
            "deepseek-v3, smollm2-135m, or your model's config.json or Hugging Face folder.",
        ),
    ],
    hbm_gb: Annotated[float, typer.Option(help="Memory of one GPU; GB is 10^9 bytes.")] = 80.0,
    weights_gb: Annotated[
        float | None,
        typer.Option(
            help="Of the whole model; default: its files' bytes, else its parameters in its own type."
        ),
    ] = None,
    overhead: Annotated[
        float, typer.Option(help="Share of the HBM kept for activations, CUDA context and graphs.")
    ] = 0.1,
    seq_len: Annotated[int, typer.Option(help="Prompt tokens of a request.")] = 4096,
    output_len: Annotated[int, typer.Option(help="Output tokens of a request: they are cached too.")] = 0,
    kv_heads: Annotated[
        int | None, typer.Option(help="What if the model had so many KV heads? Its weights stay.")
    ] = None,
    format: Annotated[
        str,
        typer.Option(
            help="As cache.format: auto (the model's type), fp8, int8, k8v4, int4, int4c, timedecay; or fp32, fp16, bf16."
        ),
    ] = "auto",
    page_tokens: Annotated[int, typer.Option(help="As page_tokens of the configuration.")] = 16,
    tp: Annotated[int, typer.Option(help="GPUs that share the model by tensor parallelism.")] = 1,
    trace: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE", help="Size the tiers by this trace, as `kvtier replay` takes it; repeatable."
        ),
    ] = None,
    target_hit_rate: Annotated[
        float | None, typer.Option(help="With --trace: share of prompt blocks that should be cached.")
    ] = None,
    ttft_ms: Annotated[
        float | None, typer.Option(help="With --trace: mean time to load and prefill a prompt, at most.")
    ] = None,
    running: Annotated[
        int | None,
        typer.Option(min=0, help="With --trace: requests that run at once; default: half of max_batch."),
    ] = None,
    host_gb: Annotated[float, typer.Option(help="With --trace: host memory for L3.")] = 256.0,
    recompute_ms: Annotated[
        float | None,
        typer.Option(help="With --trace: prefill of a block at depth 0; default: by the model's parameters."),
    ] = None,
    ssd_tb: Annotated[float, typer.Option(help="With --trace: size of an SSD, 10^12 bytes.")] = 3.84,
    dwpd: Annotated[
        float, typer.Option(help="With --trace: drive writes a day that it is rated for, over 5 years.")
    ] = 1.0,
    half: Annotated[
        Literal["second", "all"], typer.Option(help="With --trace: requests that are scored.")
    ] = "second",
    block_tokens: Annotated[
        int | None, typer.Option(min=1, max=1 << 20, help="Tokens a block, where the trace doesn't say.")
    ] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Go on without lines that can't be read.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw what fits over the length of requests.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Sum up a model's KV cache: bytes a token, bytes a request, and how many requests fit.

    A token takes 2 (key and value) x layers x KV heads x head size numbers, with MLA layers x (latent + rope key).
    Pages get hbm x (1 - overhead) - weights / tp, and each request whole pages for prompt AND output. Layers with a
    sliding window hold their window only. Notes below the tables say what such sums often get wrong.

    With --trace and a target it replays the trace under lru and rvi, finds the smallest cache that reaches the
    target, splits it over L1, L3 and L4, and says how long the SSDs live. No GPU and no weights are needed.

    \b
    Examples:
      kvtier plan --model llama-2-7b --seq-len 2048 --weights-gb 14
      kvtier plan --model llama-3-70b --tp 4 --seq-len 8192 --output-len 1024 --format fp8 --plot fits.png
      kvtier plan --model ./my-model/config.json --json
      kvtier plan --model llama-3-8b --trace conversation_trace.jsonl --target-hit-rate 0.2
      kvtier plan --model deepseek-v3 --hbm-gb 141 --tp 8 --trace trace.jsonl.gz --ttft-ms 900 --host-gb 1000
    """
    if plot is not None:
        check_target("--plot", plot, ".png")
    _check_together(trace, {"--target-hit-rate": target_hit_rate, "--ttft-ms": ttft_ms})
    if not trace:
        _refuse_alone({"--running": running, "--recompute-ms": recompute_ms, "--block-tokens": block_tokens})
    made = _planned(
        _model(model, kv_heads), hbm_gb, weights_gb, overhead, seq_len, output_len, format, page_tokens, tp
    )
    sizing: Sizing | None = None
    if trace:
        from kvtier.lab.plan.trace import Wishes

        wishes = Wishes(
            trace_files=tuple(trace),
            hit_rate=target_hit_rate,
            ttft_ms=ttft_ms,
            running=running if running is not None else made.chosen.max_batch // 2,
            host_gb=host_gb,
            recompute_ms=recompute_ms,
            ssd_tb=ssd_tb,
            dwpd=dwpd,
            half=half,
            block_tokens=block_tokens,
            skip_bad=skip_bad,
        )
        sizing = _sized(made, wishes, as_json)
    from kvtier.lab.plan.report import to_json

    if as_json:
        print_json({**to_json(made), "trace": sizing.to_json() if sizing else None})
    else:
        print_plan(made)
        if sizing:
            print_sizing(sizing)
    if plot is not None:
        _draw(made, plot)


# ---- what was asked for ----------------------------------------------------------------------------------------------


def _check_together(trace: list[str] | None, wanted: dict[str, float | None]) -> None:
    targets = [name for name, value in wanted.items() if value is not None]
    if trace and len(targets) != 1:
        raise CliError(
            f"--trace needs one target, --target-hit-rate or --ttft-ms, got {' and '.join(targets) or 'none'}",
            2,
        )
    if targets and not trace:
        raise CliError(f"{targets[0]} needs --trace FILE: what a cache hits depends on who asks for what", 2)


def _refuse_alone(options: dict[str, float | None]) -> None:
    for name, value in options.items():
        if value is not None:
            raise CliError(f"{name} needs --trace FILE: only tiers are sized by it", 2)


def _model(name: str, kv_heads: int | None) -> ModelNumbers:
    from kvtier.lab.plan.model import find_model

    try:
        found = find_model(name)
        return found if kv_heads is None else found.with_kv_heads(kv_heads)
    except ValueError as error:
        raise CliError(str(error), 2) from error
    except OSError as error:
        raise CliError(f"can't read {error.filename}: {error.strerror}") from error


def _planned(
    model: ModelNumbers,
    hbm_gb: float,
    weights_gb: float | None,
    overhead: float,
    seq_len: int,
    output_len: int,
    format: str,
    page_tokens: int,
    tp: int,
) -> Plan:
    from kvtier.lab.plan.plan import Inputs, make_plan, raw_name

    try:
        inputs = Inputs(
            hbm_bytes=_bytes("--hbm-gb", hbm_gb, least=1e-3),
            weights_bytes=model.weights_bytes
            if weights_gb is None
            else _bytes("--weights-gb", weights_gb, least=0),
            overhead=overhead,
            prompt_tokens=seq_len,
            output_tokens=output_len,
            format=raw_name(model) if format == "auto" else format,
            page_tokens=page_tokens,
            tp=tp,
        )
        return make_plan(model, inputs)
    except ValueError as error:
        raise CliError(str(error), 2) from error


def _bytes(option: str, gb: float, least: float) -> int:
    if not least <= gb < 1e9:
        raise CliError(f"{option} must be at least {least:g} and less than 1e9 (GB), got {gb:g}", 2)
    return round(gb * 1e9)


def _sized(made: Plan, wishes: Wishes, as_json: bool) -> Sizing:
    from kvtier.lab.plan.trace import size_tiers
    from kvtier.lab.traces.formats import TraceError

    try:
        with steps() as shown:
            progress: _Progress = (lambda *_: None) if as_json and not err.is_terminal else shown
            return size_tiers(made.model, made.inputs, wishes, progress)
    except TraceError as error:
        raise CliError(str(error)) from error
    except ValueError as error:
        raise CliError(str(error), 2) from error
    except OSError as error:
        raise CliError(f"can't read {error.filename}: {error.strerror}") from error


def _draw(made: Plan, plot: Path) -> None:
    from kvtier.lab.plan.report import draw_plan

    try:
        draw_plan(made, plot)
    except OSError as error:
        raise CliError(f"can't write {error.filename}: {error.strerror}") from error
