"""`kvtier quality`: which cache format can I afford? Perplexity and KL on real text, measured in this process."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvtier.cli.common import CliError, check_target, out, print_json, read_text, steps
from kvtier.cli.connection import JsonOption
from kvtier.cli.tables import table
from kvtier.workers.models.files.store import KNOWN_MODELS, ModelError, default_cache, resolve
from kvtier.workers.models.text import Text, TextError

if TYPE_CHECKING:
    from kvtier.lab.quality import Report

_DEFAULT = KNOWN_MODELS[0].name


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(no_args_is_help=True)(quality)


def quality(
    files: Annotated[
        list[Path], typer.Argument(metavar="TEXT_FILE...", help="Text of the kind that you will serve.")
    ],
    model: Annotated[
        str, typer.Option(help="A name from `kvtier model ls`, a Hugging Face folder or id, or a .gguf file.")
    ] = _DEFAULT,
    formats: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="Values of cache.format: fp8, int8, k8v4, int4, int4c, timedecay; default: all that the model can have.",
        ),
    ] = "",
    tokens: Annotated[
        int, typer.Option(help="Tokens of text to read, all files together; more is surer and slower.")
    ] = 8192,
    context: Annotated[
        int,
        typer.Option(help="Tokens that a prediction sees at most; as long as your prompts are, if you can."),
    ] = 2048,
    page_tokens: Annotated[int, typer.Option(help="As page_tokens of the configuration, at least 16.")] = 16,
    dtype: Annotated[
        Literal["bfloat16", "float32", "float16"], typer.Option(help="As model.dtype of the configuration.")
    ] = "bfloat16",
    recent_tokens: Annotated[int, typer.Option(min=0, help="Of timedecay, as cache.recent_tokens.")] = 1024,
    sink_tokens: Annotated[int, typer.Option(min=0, help="Of timedecay, as cache.sink_tokens.")] = 16,
    threads: Annotated[int, typer.Option(min=0, help="0: the physical cores.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw KL by position and perplexity by size.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE.md", help="Write the tables as a page of Markdown.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure what each cache format costs in quality, on your text and your model.

    Perplexity says how well the text is predicted (lower is better), KL how far the next token's distribution is from
    the unquantized cache's (0: not at all), "same top" how often greedy decoding would choose the same token. Nothing
    needs to be running. The text is read once for each format, and once more beside it with the unquantized cache.

    \b
    Examples:
      kvtier quality docs/quality/alice.txt
      kvtier quality letters.txt code.py --formats fp8,int4c --context 4096 --tokens 32768
      kvtier quality docs/quality/alice.txt --plot quality.png --json > quality.json
    """
    for option, file, suffix in (("--plot", plot, ".png"), ("--markdown", markdown, ".md")):
        if file is not None:
            check_target(option, file, suffix)
    texts = [(str(file), read_text(file, "text")) for file in files]
    report = _measured(
        texts,
        model,
        [name.strip() for name in formats.split(",") if name.strip()],
        tokens=tokens,
        context=context,
        page_tokens=page_tokens,
        dtype=dtype,
        recent_tokens=recent_tokens,
        sink_tokens=sink_tokens,
        threads=threads,
    )
    if as_json:
        print_json(report.to_json())
    else:
        _print(report)
    _write(report, plot, markdown)  # last: what took minutes is on the screen, whatever the disk says


def _measured(texts: list[tuple[str, str]], model: str, formats: list[str], **numbers: int | str) -> Report:
    from kvtier.lab.quality import Settings, check_formats, check_numbers, formats_for, read_contexts, run

    try:
        name = Path(model).stem if model.endswith(".gguf") else Path(model).name
        settings = Settings(Path(model), name, **numbers)  # type: ignore[arg-type]
        named = check_formats(formats)
        check_numbers(settings)
        with steps() as progress:
            folder = resolve(model, default_cache(), progress)
            settings = replace(settings, model=folder)
            wanted = formats_for(settings, named)
            text = Text.load(folder)
            if text is None:
                raise CliError(f"{folder} has no tokenizer, so no text can be read: add its tokenizer.json")
            return run(settings, read_contexts(texts, text, settings), wanted, progress)
    except ModelError as error:
        raise CliError(str(error)) from error
    except (
        TextError,
        ValueError,
        FileNotFoundError,
    ) as error:  # a value that the model or the cache can't have
        raise CliError(str(error), 2) from error


def _write(report: Report, plot: Path | None, markdown: Path | None) -> None:
    from kvtier.lab import quality as measuring

    try:
        if plot is not None:
            measuring.draw(report, plot)
        if markdown is not None:
            command = shlex.join(["kvtier", *sys.argv[1:]])
            picture = plot.name if plot is not None and plot.parent == markdown.parent else str(plot or "")
            markdown.write_text(measuring.markdown(report, command, picture))
    except OSError as error:
        raise CliError(f"can't write {error.filename}: {error.strerror}") from error


def _print(report: Report) -> None:
    from kvtier.lab.quality import MAIN_COLUMNS, headline, main_row

    what = f"{report.model} in {report.dtype}, {report.forward} forward"
    out.print(f"{what}: {headline(report)}", soft_wrap=True)
    out.print(table(None, MAIN_COLUMNS, [main_row(row) for row in report.rows], right=MAIN_COLUMNS[2:]))
    spans = [f"{bucket.start}-{bucket.end}" for bucket in report.reference.by_position]
    kl = [(row.format, *(f"{bucket.kl:.5f}" for bucket in row.by_position)) for row in report.formats]
    out.print()
    out.print(table("Mean KL by position (nats)", ("cache.format", *spans), kl, right=spans))
    ppl = [(row.format, *(f"{bucket.perplexity:.3f}" for bucket in row.by_position)) for row in report.rows]
    out.print()
    out.print(table("Perplexity by position", ("cache.format", *spans), ppl, right=spans))
    for note in report.notes:
        out.print(note, style="yellow", soft_wrap=True)
