"""A plan as JSON and as curves."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from kvtier.lab.plan.notes import notes
from kvtier.lab.plan.plan import (
    GB,
    RAW_FORMATS,
    Plan,
    Sums,
    numbers_by_attention,
    numbers_per_token_layer,
    raw_name,
    sums,
)
from kvtier.lab.plan.tiers import Endurance, Rooms, TierSizes, endurance
from kvtier.lab.plots import Curve, Panel, draw

_SHORTEST, _LONGEST = 8, 20  # powers of two of tokens that are drawn


def to_json(plan: Plan) -> dict[str, Any]:
    """All sums. Bytes of the whole model's cache, one copy, but for names that end in _gpu."""
    model, inputs, chosen = plan.model, plan.inputs, plan.chosen
    return {
        "model": {
            "name": model.name,
            "parameters": model.parameters,
            "active_parameters": model.active_parameters,
            "layers": [{"layers": kind.layers, "window": kind.window} for kind in model.kinds],
            "heads": model.heads,
            "kv_heads": model.kv_heads,
            "head_dim": model.head_dim,
            "rope_dim": model.rope_dim,
            "max_tokens": model.max_tokens,
            "dtype": model.dtype,
        },
        "inputs": {
            "model": model.name,
            "hbm_gb": inputs.hbm_bytes / GB,
            "weights_gb": inputs.weights_bytes / GB,
            "overhead": inputs.overhead,
            "seq_len": inputs.prompt_tokens,
            "output_len": inputs.output_tokens,
            "kv_heads": model.kv_heads,
            "format": inputs.format,
            "page_tokens": inputs.page_tokens,
            "tp": inputs.tp,
        },
        **_sums_json(chosen),
        "kv_bytes_per_token_gpu": _number(chosen.bytes_per_token_gpu),
        "kv_bytes_per_request_gpu": _number(chosen.content_bytes_gpu),
        "room_bytes_gpu": inputs.room_bytes_gpu,
        "numbers_per_token_layer": numbers_per_token_layer(model),
        "numbers_by_attention": numbers_by_attention(model),
        "by_format": {name: _sums_json(one) for name, one in plan.by_format.items()},
        "refused_formats": plan.refused,
        "paged_waste_mean": plan.paged_waste_mean,
        "contiguous_waste": plan.contiguous_waste,
        "max_batch_contiguous": plan.max_batch_contiguous,
        "activation_bytes_gpu": plan.activation_bytes_gpu,
        "notes": notes(plan),
    }


def _sums_json(one: Sums) -> dict[str, Any]:
    return {
        "kv_bytes_per_token": _number(one.bytes_per_token),
        "kv_bytes_per_request": _number(one.content_bytes),
        "kv_page_bytes_per_request": one.paged_bytes,
        "max_batch": one.max_batch,
        "paged_waste": one.paged_waste,
    }


def _number(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)


def sizes_json(sizes: TierSizes, rooms: Rooms, lives: dict[str, Endurance]) -> dict[str, Any]:
    """One policy's tiers. `tiers` are for tiers.write demote; with through, L4 holds all of `capacity_blocks`."""
    score = sizes.result.score
    slot = rooms.slot_bytes
    return {
        "policy": sizes.policy,
        "capacity_blocks": sizes.capacity_pages,
        "capacity_bytes": sizes.capacity_pages * slot,
        "block_hit_rate": score.block_hit_rate,
        "token_hit_rate": score.token_hit_rate,
        "compute_saved": score.compute_saved,
        "ttft_ms": 1e3 * sizes.ttft_s,
        "tiers": {
            "L1": {"blocks": sizes.l1_pages, "bytes_gpu": sizes.l1_pages * rooms.page_bytes_gpu},
            "L3": {"blocks": sizes.l3_pages, "bytes": sizes.l3_pages * slot},
            "L4": {"blocks": sizes.l4_pages, "bytes": sizes.l4_pages * slot},
        },
        "ssd": {
            write: {
                "bytes_a_day": life.bytes_a_day,
                "drive_writes_a_day": life.drive_writes_a_day,
                "drives": life.drives,
                "tbw": life.tbw,
                "years": life.years,
            }
            for write, life in lives.items()
        },
    }


def lives_of(
    sizes: TierSizes, rooms: Rooms, span_s: float, drive_tb: float, dwpd: float
) -> dict[str, Endurance]:
    """The drives' lives by tiers.write. Raises ValueError."""
    held = {"demote": sizes.l4_pages, "through": sizes.capacity_pages if sizes.l4_pages else 0}
    return {
        write: endurance(
            sizes.written_pages[write] * rooms.slot_bytes,
            span_s,
            pages * rooms.slot_bytes,
            drive_tb,
            dwpd,
        )
        for write, pages in held.items()
    }


def draw_plan(plan: Plan, file: Path) -> None:
    """A PNG: requests that fit, and what one takes, over its tokens, a line a format. Raises OSError."""
    lengths = [1 << power for power in range(_SHORTEST, _LONGEST + 1)]
    batches, sizes = [], []
    for found in _drawn(plan, lengths).values():
        label = ", ".join(one[0].format for one in found)
        fitting = [(n, one.max_batch) for n, one in zip(lengths, found[0], strict=True) if one.max_batch]
        if fitting:
            batches.append(Curve(label, [n for n, _ in fitting], [batch for _, batch in fitting]))
        sizes.append(Curve(label, lengths, [float(one.content_bytes) / GB for one in found[0]]))
    where = f"{plan.inputs.tp} x {plan.inputs.hbm_bytes / GB:g} GB"
    xlabel = "tokens of a request, output included"
    draw(
        [
            Panel(
                f"{plan.model.name}: fits {where}",
                xlabel,
                "requests at once",
                batches,
                log_x=True,
                log_y=True,
            ),
            Panel(f"{plan.model.name}: one request", xlabel, "KV cache (GB)", sizes, log_x=True, log_y=True),
        ],
        file,
    )


def _drawn(plan: Plan, lengths: list[int]) -> dict[tuple[Fraction, ...], list[list[Sums]]]:
    """Formats' sums over these lengths, those that are equal together; of plain types the chosen one only."""
    groups: dict[tuple[Fraction, ...], list[list[Sums]]] = {}
    for name in plan.by_format:
        if name in RAW_FORMATS and name not in (plan.inputs.format, raw_name(plan.model)):
            continue
        changed = (replace(plan.inputs, prompt_tokens=n, output_tokens=0) for n in lengths)
        found = [sums(plan.model, inputs, name) for inputs in changed]
        groups.setdefault(tuple(one.content_bytes for one in found), []).append(found)
    return groups
