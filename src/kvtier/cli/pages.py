"""`kvtier pages ...`: list, look at and act on single pages in the tiers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import typer

from kvtier.cli.common import CliError, err, human_bytes, human_count, human_seconds, out, print_json
from kvtier.cli.connection import EndpointOption, JsonOption, TlsOption, connected
from kvtier.cli.tables import table

KeysArgument = Annotated[
    list[str], typer.Argument(help="Page keys in hex, or their first digits (`kvtier pages ls`).")
]
TierChoice = Literal["L1", "L2", "L3", "L4", "remote"]

_SHOWN_DIGITS = 16
_LONG = ("key", "root", "parent")
_GOOD = ("ACCEPTED", "DEFERRED")


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(
        no_args_is_help=True, help="List, look at and act on pages in the tiers.", rich_markup_mode=None
    )
    group.command()(ls)
    for verb in (show, pin, unpin, evict):
        group.command(no_args_is_help=True)(verb)
    group.command()(clear)
    group.command()(verify)
    app.add_typer(group, name="pages")


def ls(
    tenant: Annotated[str, typer.Option(help="Only this tenant's; default: all.")] = "",
    tier: Annotated[TierChoice | None, typer.Option(help="Only copies in this tier; default: all.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many copies, up to 10,000.")] = 100,
    endpoint: EndpointOption = "",
    tls: TlsOption = "",
    as_json: JsonOption = False,
) -> None:
    """List copies of pages, those in the highest tier first.

    \b
    Examples:
      kvtier pages ls --tier L3 --limit 20
      kvtier pages ls --json | jq -r '.[].key'
    """
    with connected(endpoint, tls) as client:
        rows = client.pages_ls(tenant=tenant, tier=tier or "", limit=limit)
    print_json(rows) if as_json else _print_copies(rows)
    if len(rows) == limit:
        err.print(f"these are {limit:,} copies, there may be more: see --limit, --tier and --tenant")


def show(
    key: Annotated[str, typer.Argument(help="Page key in hex, or its first digits.")],
    endpoint: EndpointOption = "",
    tls: TlsOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show all copies of one page, with everything known of them.

    \b
    Examples:
      kvtier pages show 3fa94c01
    """
    with connected(endpoint, tls) as client:
        copies = client.pages_show(key)
    if as_json:
        print_json(copies)
        return
    values = {name: [str(copy[name]) for copy in copies] for name in (copies[0] if copies else ())}
    for name in _LONG:  # columns would cut them off
        if len(set(values.get(name, ()))) == 1:
            out.print(f"{name:7} {values.pop(name)[0] or '-'}", soft_wrap=True)
    tiers = values.pop("tier", [])
    out.print(table(None, ("", *tiers), [[name, *row] for name, row in values.items()]))


def pin(
    keys: KeysArgument, endpoint: EndpointOption = "", tls: TlsOption = "", as_json: JsonOption = False
) -> None:
    """Keep pages from being evicted, until `kvtier pages unpin`.

    \b
    Examples:
      kvtier pages pin 3fa94c01 77d0e2aa
    """
    with connected(endpoint, tls) as client:
        _report(client.pages_pin(keys), as_json)


def unpin(
    keys: KeysArgument, endpoint: EndpointOption = "", tls: TlsOption = "", as_json: JsonOption = False
) -> None:
    """Let pinned pages be evicted again.

    \b
    Examples:
      kvtier pages unpin 3fa94c01
    """
    with connected(endpoint, tls) as client:
        _report(client.pages_unpin(keys), as_json)


def evict(
    keys: Annotated[
        list[str] | None, typer.Argument(help="Page keys in hex, or their first digits; none: all of --tier.")
    ] = None,
    tier: Annotated[TierChoice | None, typer.Option(help="Only from this tier; default: from all.")] = None,
    endpoint: EndpointOption = "",
    tls: TlsOption = "",
    as_json: JsonOption = False,
) -> None:
    """Drop pages from one tier, or from all. Copies in other tiers stay.

    Pages in use go when their readers are done (DEFERRED).

    \b
    Examples:
      kvtier pages evict 3fa94c01
      kvtier pages evict --tier L1        # all of them: the next requests find them further down
    """
    if not keys and tier is None:
        raise CliError("say which pages (their keys), or with --tier that all of a tier should go", 2)
    with connected(endpoint, tls) as client:
        _report(client.pages_evict(keys or (), tier=tier or ""), as_json)


def clear(
    tenant: Annotated[str, typer.Option(help="Whose pages.")] = "",
    all_tenants: Annotated[bool, typer.Option("--all", help="The pages of all tenants.")] = False,
    endpoint: EndpointOption = "",
    tls: TlsOption = "",
    as_json: JsonOption = False,
) -> None:
    """Drop and wipe all pages of a tenant, or of all.

    Nothing brings them back, a rebuilt catalogue neither. Each part of the deployment says what it did. DEFERRED: a node is
    down or its disk refuses; it clears before it serves again. The exit code is 1 if something was not cleared and won't be.

    \b
    Examples:
      kvtier pages clear --tenant default
      kvtier pages clear --all
    """
    if bool(tenant) == all_tenants:
        raise CliError("say whose pages go: --tenant NAME, or --all", 2)
    with connected(endpoint, tls) as client:
        done = client.pages_clear(tenant=tenant)
    if not as_json:
        _print_parts(done["parts"])
    _report(done, as_json)
    if rejected := [part["part"] for part in done["parts"] if part["outcome"] not in _GOOD]:
        raise CliError(f"not all was cleared: see what is said of {', '.join(rejected)}, and clear once more")


def verify(
    keys: Annotated[list[str] | None, typer.Argument(help="Page keys; default: all pages.")] = None,
    endpoint: EndpointOption = "",
    tls: TlsOption = "",
    as_json: JsonOption = False,
) -> None:
    """Read pages and compare their checksums.

    Damaged ones are dropped; the exit code is 1 if any page is not whole.

    \b
    Examples:
      kvtier pages verify
    """
    with connected(endpoint, tls) as client:
        complaint = "damaged and dropped, or not held" if keys else "damaged and dropped"
        _report(client.pages_verify(keys or ()), as_json, f"were {complaint}", good=("ACCEPTED",))


def _print_parts(parts: Sequence[dict[str, Any]]) -> None:
    rows = [
        (
            part["part"],
            part["outcome"],
            f"{part['pages']:,}",
            " ".join(filter(None, (part["tier"], part["error"]))),
            part["detail"],
        )
        for part in parts
    ]
    if rows:
        columns = ("part", "outcome", "pages", "left in", "what is left")
        out.print(table(None, columns, rows, right=("pages",), keys=1))


def _print_copies(rows: Sequence[dict[str, Any]]) -> None:
    columns = ("key", "tier", "tenant", "format", "depth", "tokens", "size", "uses", "idle", "state")
    lines = [
        (
            row["key"][:_SHOWN_DIGITS],
            row["tier"],
            row["tenant"][:_SHOWN_DIGITS],
            _format(row),
            str(row["depth"]),
            str(row["tokens"]),
            human_bytes(row["nbytes"]),
            human_count(row["uses"]),
            human_seconds(row["idle_s"]),
            _state(row),
        )
        for row in rows
    ]
    out.print(table(None, columns, lines, right=("depth", "tokens", "size", "uses", "idle"), keys=2))


def _format(row: dict[str, Any]) -> str:
    return f"{row['variant']} of {row['made_from']}" if row["made_from"] else str(row["variant"])


def _state(row: dict[str, Any]) -> str:
    pinned = ", pinned" if row["pinned"] else ""
    readers = f", {row['readers']} readers" if row["readers"] else ""
    return f"{row['state']}{pinned}{readers}"


def _report(
    done: dict[str, Any],
    as_json: bool,
    complaint: str = "were not done as asked (see the outcomes)",
    good: Sequence[str] = _GOOD,
) -> None:
    """Print what became of each key; the command fails, with the complaint, when an outcome is not a good one."""
    if as_json:
        print_json(done)
    else:
        rows = [
            (
                r["key"][:_SHOWN_DIGITS],
                r["outcome"],
                ", ".join(f"{who}: {what}" for who, what in r["owners"].items()),
            )
            for r in done["results"]
        ]
        if rows:
            out.print(table(None, ("key", "outcome", "by owner"), rows))
        said = ", ".join(
            f"{number:,} {outcome}" for outcome, number in sorted(done["counts"].items()) if number
        )
        out.print(said or "no pages")
    failed = sum(number for outcome, number in done["counts"].items() if outcome not in good)
    if failed:
        raise CliError(f"{failed:,} of {sum(done['counts'].values()):,} pages {complaint}")
