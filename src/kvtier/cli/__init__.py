"""The `kvtier` command. One file per group of verbs; this one gathers them and turns errors into one line."""

from __future__ import annotations

import sys
from contextlib import suppress

import typer

from kvtier.cli import demo, doctor, generate, model, pages, plan, quality, record, replay, up, watch
from kvtier.cli.common import CliError, visible
from kvtier.cli.streams import StreamFailed, discard_output, standard_streams

app = typer.Typer(
    name="kvtier",
    help="A distributed multi-tier KV cache service for transformer inference.\n\n"
    "Start with `kvtier up`, then, from another terminal, `kvtier generate --chat 'Why is the sky blue?'`.",
    epilog="Every table has --json. Errors go to stderr and the exit code is 0 only on success.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
up.register(app)
generate.register(app)
watch.register(app)
pages.register(app)
model.register(app)
doctor.register(app)
demo.register(app)
quality.register(app)
replay.register(app)
record.register(app)
plan.register(app)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and leave.")) -> None:
    if version:
        from kvtier import __version__

        print(f"kvtier {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command of sys.argv. Exits with 0 on success, 1 on failure, 2 on a wrong command line, 130 on Ctrl-C."""
    with standard_streams():
        code = _run()
    sys.exit(code)


def _run() -> int:
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except CliError as error:
        return _complain(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:  # the reader has what it wanted, as in `kvtier pages ls | head`
        discard_output()
        return 1
    except StreamFailed as error:
        _complain(str(error), 1)
        discard_output()
        return 1
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise  # a bug of ours: its traceback is what a report needs
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message(), file=sys.stderr)
            return 2
        return _complain(_usage_sentence(error), 2)
    return code if isinstance(code, int) else 0


def _complain(message: str, code: int) -> int:
    with suppress(OSError):  # standard error may be what failed
        print(f"kvtier: {' '.join(visible(message).split())}", file=sys.stderr, flush=True)
    return code


def _usage_sentence(error: object) -> str:
    """What the argument parser complains about, and where its help is; the parser's classes moved between releases."""
    sentence = str(error.format_message())  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    return f"{sentence.rstrip('.')} (see `{context.command_path if context else 'kvtier'} --help`)"
