"""How `kvtier plan` shows its sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.cli.common import human_bytes, human_count, human_seconds, out, share
from kvtier.cli.tables import table

if TYPE_CHECKING:
    from kvtier.lab.plan.plan import Plan
    from kvtier.lab.plan.tiers import Rooms
    from kvtier.lab.plan.trace import Row, Sizing


def print_plan(made: Plan) -> None:
    """The sums, all formats, and the notes."""
    from kvtier.lab.plan.notes import notes
    from kvtier.lab.plan.plan import numbers_per_token_layer

    model = made.model
    heads = "1 latent" if model.is_latent else f"{model.kv_heads} of {model.heads} heads with KV"
    out.print(
        f"{model.name}: {model.parameters / 1e9:.2f} B parameters, {model.layers} layers, {heads}, "
        f"{numbers_per_token_layer(model):,} numbers a token and layer",
        soft_wrap=True,
    )
    out.print(table(None, ("sum", "value"), _sum_rows(made)))
    columns = ("cache.format", "a token", "a request", "fit at once", f"of {made.chosen.format}")
    out.print()
    out.print(table(None, columns, _format_rows(made), right=columns[1:]))
    out.print()
    _print_notes(notes(made))


def _sum_rows(made: Plan) -> list[tuple[str, str]]:
    inputs, chosen = made.inputs, made.chosen
    on_each = [("of it on each GPU", _gb(float(chosen.content_bytes_gpu)))] if inputs.tp > 1 else []
    paged = f"{share(chosen.paged_waste)} at this length, {share(made.paged_waste_mean)} on average"
    return [
        ("weights", f"{inputs.weights_bytes / 1e9:.2f} GB over {inputs.tp} GPU{'s' * (inputs.tp > 1)}"),
        ("room for pages on each GPU", f"{inputs.room_bytes_gpu / 1e9:.2f} GB of {inputs.hbm_bytes / 1e9:g}"),
        ("KV cache of a token", f"{human_bytes(float(chosen.bytes_per_token))} in {chosen.format}"),
        (f"KV cache of a request of {human_count(inputs.tokens)} tokens", _gb(float(chosen.content_bytes))),
        *on_each,
        ("requests that fit at once", human_count(chosen.max_batch)),
        (f"wasted in pages of {inputs.page_tokens} tokens", paged),
        (
            "wasted if contiguous",
            f"{share(made.contiguous_waste)}; {human_count(made.max_batch_contiguous)} would fit",
        ),
    ]


def _format_rows(made: Plan) -> list[tuple[str, ...]]:
    return [
        (
            name,
            human_bytes(float(one.bytes_per_token)),
            _gb(float(one.content_bytes)),
            human_count(one.max_batch),
            f"{float(one.bytes_per_token / made.chosen.bytes_per_token):.2f}",
        )
        for name, one in made.by_format.items()
    ]


def _print_notes(notes: list[str]) -> None:
    for note in notes:
        out.print(f"- {note}", style="yellow", soft_wrap=True)


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.4g} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.4g} MB"


def print_sizing(sizing: Sizing) -> None:
    """The tiers that reach the target."""
    out.print()
    out.print(sizing.headline, soft_wrap=True)
    columns = (
        "policy",
        "blocks",
        "hit rate",
        "ttft",
        "L1 a GPU",
        "L3",
        "L4",
        "SSD writes a day",
        "SSDs live",
    )
    rows = [_size_row(row, sizing.rooms) for row in sizing.rows]
    out.print(table(None, columns, rows, right=columns[1:]))
    _print_notes(sizing.notes)


def _size_row(row: Row, rooms: Rooms) -> tuple[str, ...]:
    from kvtier.lab.plan.trace import lifetime

    sizes, life = row.sizes, row.lives["demote"]
    return (
        sizes.policy,
        human_count(sizes.capacity_pages),
        share(sizes.result.score.block_hit_rate),
        human_seconds(sizes.ttft_s),
        human_bytes(sizes.l1_pages * rooms.page_bytes_gpu),
        human_bytes(sizes.l3_pages * rooms.slot_bytes),
        human_bytes(sizes.l4_pages * rooms.slot_bytes),
        f"{life.bytes_a_day / 1e12:.3g} TB",
        lifetime(life),
    )
