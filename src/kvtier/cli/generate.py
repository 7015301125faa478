"""`kvtier generate`: one request, its text as it comes, or one JSON object."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kvtier.cli.client import Chunk, Client, completion
from kvtier.cli.common import CliError, err, human_count, human_seconds, print_json, read_text
from kvtier.cli.connection import EndpointOption, TlsOption, connected
from kvtier.cli.streams import read_stdin
from kvtier.workers.requests.api import BIAS_RANGE, RANGES

Prompt = str | list[int] | list[dict[str, str]]

_SAMPLING = "Sampling"


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(name="generate", no_args_is_help=True)(generate)


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue, or with --chat to answer; - reads stdin.")
    ] = None,
    token_ids: Annotated[str | None, typer.Option(help="Token ids in place of text: 1,2,3.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="PROMPT is a user's message for the model's chat template.")
    ] = False,
    system: Annotated[Path | None, typer.Option(help="File with the system message; implies --chat.")] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="End after so many tokens; default: what the context leaves, at most 1,024."),
    ] = None,
    min_tokens: Annotated[int, typer.Option(help="Don't end before so many tokens.")] = 0,
    temperature: Annotated[
        float | None,
        typer.Option(help=f"More is more varied; {RANGES['temperature']}; default 0, or the model's."),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help=f"Choose among the K likeliest tokens, {RANGES['top_k']}.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help=f"Choose among the likeliest tokens that sum to P, {RANGES['top_p']}."),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help=f"Drop tokens less likely than P times the likeliest, {RANGES['min_p']}."),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(help=f"Above 1 makes tokens seen before less likely; {RANGES['repetition_penalty']}."),
    ] = None,
    presence_penalty: Annotated[
        float,
        typer.Option(
            help=f"Above 0 makes tokens of the answer so far less likely; {RANGES['presence_penalty']}."
        ),
    ] = 0.0,
    frequency_penalty: Annotated[
        float,
        typer.Option(help=f"The same, for each time they are there; {RANGES['frequency_penalty']}."),
    ] = 0.0,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID:BIAS",
            help=f"Add BIAS to a token id's logit, {BIAS_RANGE}; may be given again.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help=f"The same seed gives the same tokens; {RANGES['seed']}; default: a random one."),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the answer; may be given again.")
    ] = None,
    stop_id: Annotated[
        list[int] | None, typer.Option(help="Token id that ends the answer; may be given again.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the model's end of sequence.")
    ] = False,
    logprobs: Annotated[
        int,
        typer.Option(help=f"With --json: log probabilities of the K likeliest tokens, {RANGES['logprobs']}."),
    ] = 0,
    prompt_logprobs: Annotated[
        int,
        typer.Option(
            help=f"With --json: the same of each prompt token, {RANGES['prompt_logprobs']}; nothing is cached."
        ),
    ] = 0,
    n: Annotated[
        int, typer.Option("--n", "-n", help=f"So many answers to the same prompt, {RANGES['n']}.")
    ] = 1,
    tenant: Annotated[str, typer.Option(help="Whose cache is used; tenants never share pages.")] = "default",
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Neither read nor leave cached pages.")
    ] = False,
    lossy: Annotated[
        bool,
        typer.Option(
            "--lossy",
            help="Where exact pages are gone, take smaller ones: 4-bit pages of timedecay and int4c, and those that"
            " tiers.l4.format made: more hits, slightly other text.",
        ),
    ] = False,
    window: Annotated[
        int,
        typer.Option(
            metavar="TOKENS",
            help="Each token attends the latest TOKENS only: memory stays flat, and the text may run past the model's context"
            " (up to 16,777,216 tokens, 262,144 of them the prompt's). 0: as configured.",
        ),
    ] = 0,
    sinks: Annotated[
        int,
        typer.Option(
            metavar="TOKENS",
            help="With --window: the first TOKENS stay attended too. 4 keep most models fluent.",
        ),
    ] = 0,
    session: Annotated[
        str,
        typer.Option(
            metavar="ID",
            help="The conversation that this is a turn of: the cache learns when its next turn comes, and what is its own.",
        ),
    ] = "",
    session_open: Annotated[
        bool, typer.Option("--session-open", help="With --session: another turn will follow.")
    ] = False,
    session_closed: Annotated[
        bool,
        typer.Option(
            "--session-closed",
            help="With --session: this is its last turn; pages that no other session has used are the first to go.",
        ),
    ] = False,
    expect_tokens: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="A guess at the answer's length: requests nearly done keep their memory. 0: none.",
        ),
    ] = 0,
    worker: Annotated[
        str, typer.Option(help="Id of the worker that takes the request first (`kvtier status`).")
    ] = "",
    request_id: Annotated[
        str, typer.Option(help="Name it, for `kvtier explain`; default: the gateway makes one.")
    ] = "",
    timeout: Annotated[float | None, typer.Option(help="Give up after so many seconds.")] = None,
    endpoint: EndpointOption = "",
    tls: TlsOption = "",
    as_json: Annotated[bool, typer.Option("--json", help="One object at the end in place of text.")] = False,
) -> None:
    """Generate text from a prompt, token by token.

    \b
    Examples:
      kvtier generate 'Once upon a time' --max-tokens 40
      kvtier generate --chat 'Why is the sky blue?' --system prompt.txt
      kvtier generate --token-ids 1,2,3 --json
      cat letter.txt | kvtier generate --chat - --temperature 0.7 --seed 1
      kvtier generate 'Once upon a time' --window 1024 --sinks 4 --ignore-eos --max-tokens 100000
      kvtier generate --chat 'Thanks, that is all.' --session chat-17 --session-closed
    """
    state = _session_state(session, session_open, session_closed)
    asked = _prompt(prompt, token_ids, chat, system)
    biases = _biases(logit_bias or ())
    with connected(endpoint, tls) as client:
        shows_ids = isinstance(asked, list) and not as_json and not _has_tokenizer(client)
        chunks = client.generate(
            asked,
            tenant=tenant,
            request_id=request_id,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=biases,
            seed=seed,
            stop=stop or (),
            stop_ids=stop_id or (),
            ignore_eos=ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            n=n,
            no_cache=no_cache,
            lossy=lossy,
            window=window,
            sinks=sinks,
            session_id=session,
            session_state=state,
            expected_output_tokens=expect_tokens,
            worker=worker,
            timeout_s=timeout,
        )
        if as_json:
            print_json(completion(chunks))
            return
        done = completion(printing(chunks, shows_ids) if n == 1 else chunks)
    if n > 1:
        for sequence in done["sequences"]:
            print(f"[{sequence['index']}] {sequence['text'] or _spaced(sequence['token_ids'])}")
    if err.is_terminal:
        err.print(summary(done), style="dim", soft_wrap=True)


def summary(done: dict[str, Any]) -> str:
    """One line on where the prompt came from and how long things took."""
    usage, timings = done["usage"], done["timings_ms"]
    cached = [
        f"{human_count(tokens)} from {tier}" for tier, tokens in usage["cached_tokens"].items() if tokens
    ]
    parts = ", ".join([*cached, f"{human_count(usage['computed_tokens'])} computed"])
    tokens, decode_s = usage["completion_tokens"], timings["decode"] / 1e3
    speed = f" ({(tokens - 1) / decode_s:.0f}/s)" if tokens > 1 and decode_s > 0 else ""
    return (
        f"{human_count(usage['prompt_tokens'])} prompt tokens: {parts} · first token in "
        f"{human_seconds(timings['ttft'] / 1e3)} · {human_count(tokens)} tokens{speed} · {done['finish_reason']} · "
        f"request {done['request_id']}"
    )


def _biases(options: Iterable[str]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for option in options:
        token, colon, bias = option.partition(":")
        try:
            biases[int(token)] = float(bias if colon else "")
        except ValueError:
            raise CliError(f"--logit-bias wants ID:BIAS, such as 42:-100, got {option!r}", 2) from None
    return biases


def _session_state(session: str, is_open: bool, is_closed: bool) -> Literal["", "open", "closed"]:
    if is_open and is_closed:
        raise CliError("give one of --session-open and --session-closed: a last turn has none after it", 2)
    if not (is_open or is_closed):
        return ""
    if not session:
        raise CliError("--session-open and --session-closed need the session: give --session ID too", 2)
    return "open" if is_open else "closed"


def _prompt(prompt: str | None, token_ids: str | None, chat: bool, system: Path | None) -> Prompt:
    if (prompt is None) == (token_ids is None):
        raise CliError("give one of PROMPT and --token-ids (see `kvtier generate --help`)", 2)
    if token_ids is not None:
        if chat or system:
            raise CliError("--chat and --system go with a PROMPT of text, not with --token-ids", 2)
        return _ids(token_ids)
    assert prompt is not None
    text = _utf8(prompt)
    if not chat and system is None:
        return text
    messages = [{"role": "user", "content": text}]
    if system:
        messages.insert(0, {"role": "system", "content": read_text(system, "system message")})
    return messages


def _utf8(prompt: str) -> str:
    try:
        text = read_stdin() if prompt == "-" else prompt
        text.encode()  # by the locale, other bytes may have become lone surrogates instead of an error
    except UnicodeError as error:
        raise CliError(
            "the prompt is no UTF-8 text: give it as UTF-8, or its tokens with --token-ids", 2
        ) from error
    return text


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise CliError(
            f"--token-ids takes whole numbers separated by commas, such as 1,2,3; got {text!r}", 2
        ) from error


def _has_tokenizer(client: Client) -> bool:
    return bool(client.status().get("model", {}).get("tokenizer_digest"))


def printing(chunks: Iterable[Chunk], shows_ids: bool = False) -> Iterator[Chunk]:
    """The chunks, each printed on its way; a newline ends them, whole or not."""
    begun = False
    try:
        for chunk in chunks:
            begun = True
            ids = "".join(f"{token} " for token in chunk.token_ids)
            sys.stdout.write(ids if shows_ids else chunk.text)
            sys.stdout.flush()
            yield chunk
    finally:
        if begun:
            print(flush=True)


def _spaced(token_ids: list[int]) -> str:
    return " ".join(str(token) for token in token_ids)
