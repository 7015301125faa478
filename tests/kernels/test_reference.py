"""The torch kernels, which define the page formats, against their definitions written out in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_kit import make_layout, poisoned_arena, spread_frames

from kvtier.kernels import reference
from kvtier.kernels.ops import Format, KVLayout, PlanSequence, StepPlan, make_plan, merge

QUANTIZED = [Format.FP8, Format.INT8, Format.K8V4, Format.INT4, Format.INT4C]


def e4m3_values() -> torch.Tensor:
    """All finite numbers of e4m3fn, by their definition: sign, 4 bits of exponent with bias 7, 3 bits of mantissa."""
    found = []
    for code in range(256):
        sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
        if exponent == 15 and mantissa == 7:
            found.append(float("nan"))
        elif exponent == 0:
            found.append(sign * mantissa / 8 * 2.0**-6)
        else:
            found.append(sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return torch.tensor(found, dtype=torch.float64)


def test_fp8_codes_are_the_nearest_e4m3_numbers_of_the_scaled_row() -> None:
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-5, 3, 200)[:, None]
    codes, scale = reference.encode_rows(x, Format.FP8)
    values = e4m3_values()
    wanted = (x / scale.float()).double().clamp(-448, 448)
    finite = values[~values.isnan()]
    best = (wanted[..., None] - finite).abs().amin(-1)

    assert torch.equal((values[codes.long()] - wanted).abs(), best)
    torch.testing.assert_close(
        reference.decode_rows(codes, scale, Format.FP8).double(),
        values[codes.long()] * scale.double(),
        rtol=1e-6,
        atol=0,
    )


@pytest.mark.parametrize("format", [Format.FP8, Format.INT8])
def test_a_row_of_zeros_and_one_of_huge_numbers_stay_what_they_are_in_eight_bits(format: Format) -> None:
    x = torch.stack([torch.zeros(16), torch.full((16,), 3e4), torch.full((16,), -1e-6)])
    codes, scale = reference.encode_rows(x, format)
    back = reference.decode_rows(codes, scale, format)
    assert torch.equal(back[0], x[0])
    torch.testing.assert_close(back[1], x[1], rtol=2e-3, atol=0)
    assert back[2].abs().max() < 1e-4


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_the_hadamard_matrix_is_orthonormal_and_symmetric(dim: int) -> None:
    matrix = reference.hadamard(dim)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(dim), atol=1e-6, rtol=0)
    assert torch.equal(matrix, matrix.T)


@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("format", QUANTIZED)
def test_a_page_read_back_is_within_half_a_step_of_what_was_written(format: Format, dim: int) -> None:
    layout = make_layout(heads=3, dim=dim, page_tokens=32)
    arena = poisoned_arena(layout, 3)
    g = torch.Generator().manual_seed(1)
    k, v = (torch.randn(2, 3, 32, dim, generator=g) for _ in range(2))
    frames = spread_frames(layout, 3)[:2].long()

    reference.write_pages(arena, layout, format, 1, frames, k, v)
    keys, values = reference.read_pages(arena, layout, format, 1, frames)

    def spread(x: torch.Tensor, dim: int) -> torch.Tensor:
        return x.amax(dim, keepdim=True) - x.amin(dim, keepdim=True)

    def reach(x: torch.Tensor) -> torch.Tensor:
        return x.abs().amax(-1, keepdim=True)

    slack = 1.01  # scales and zeros are rounded to halves
    limits = {
        Format.FP8: (
            reach(k) / 28,
            reach(v) / 28,
        ),  # half of the last of 3 mantissa bits at the top: 16 / 448
        Format.INT8: (reach(k) / 254, reach(v) / 254),
        Format.K8V4: (reach(k) / 254, spread(v, -1) / 30),
        Format.INT4: (None, spread(v, -1) / 30),
        Format.INT4C: (spread(k, -2) / 30, spread(v, -1) / 30),
    }[format]
    assert ((values - v).abs() <= limits[1] * slack + 1e-3).all()
    if limits[0] is not None:
        assert ((keys - k).abs() <= limits[0] * slack + 1e-3).all()
    else:
        rotation = reference.hadamard(dim)
        error = (keys - k) @ rotation
        assert (error.abs() <= spread(k @ rotation, -1) / 30 * slack + 2e-3).all()


def attend_exactly(
    q: torch.Tensor,  # [rows, Hq, D] float64, the last row at position context - 1
    q_sinks: torch.Tensor,
    k: torch.Tensor,  # [context, H, D] float64
    v: torch.Tensor,
    window: int,
    sinks: int,
    softcap: float,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by its definition, one row and head after another."""
    rows, heads, _ = q.shape
    out = torch.zeros(rows, heads, v.shape[-1], dtype=torch.float64)
    lse = torch.full((rows, heads), -torch.inf, dtype=torch.float64)
    group = heads // k.shape[1]
    for r in range(rows):
        t = len(k) - rows + r
        seen = [j for j in range(t + 1) if not window or j > t - window or j < sinks]
        for h in range(heads):
            scores = (
                torch.stack([(q_sinks if window and j < sinks else q)[r, h] @ k[j, h // group] for j in seen])
                * scale
            )
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            lse[r, h] = torch.logsumexp(scores, 0)
            out[r, h] = torch.exp(scores - lse[r, h]) @ v[seen, h // group]
    return out, lse


def fill_sequence(
    arena: torch.Tensor, layout: KVLayout, plan: StepPlan, sequence: int, k: torch.Tensor, v: torch.Tensor
) -> None:
    """Write the named pages of a sequence, each in its format, all layers alike; rows behind the context stay poison."""
    tokens = layout.page_tokens
    for page in range(-(-len(k) // tokens)):
        if int(plan.sink_pages[sequence]) <= page < int(plan.first_pages[sequence]):
            continue
        entry = plan.entry(sequence, page)
        frame, format = torch.tensor([int(plan.frames[entry])]), Format(int(plan.formats[entry]))
        part = slice(page * tokens, (page + 1) * tokens)
        rows = len(k[part])
        pad = (0, 0, 0, 0, 0, tokens - rows)
        keys, values = (torch.nn.functional.pad(x[part], pad).transpose(0, 1)[None] for x in (k, v))
        for layer in range(layout.num_layers):
            views = reference.record_views(arena, layout, format, layer)
            before = [x[frame].clone() for x in (views.k, views.v)]
            reference.write_pages(arena, layout, format, layer, frame, keys, values)
            if rows < tokens:
                views.k[frame, :, rows:], views.v[frame, :, rows:] = (
                    before[0][:, :, rows:],
                    before[1][:, :, rows:],
                )


@st.composite
def mixed_sequences(draw: st.DrawFn) -> tuple[int, int, int, int, list[int]]:
    """Context, rows, window, sinks, and the format of each page (INT4C for full pages only)."""
    context = draw(st.integers(1, 150))
    rows = draw(st.integers(1, min(context, 20)))
    window = draw(st.sampled_from([0, 1, 7, 32, 64]))
    sinks = draw(st.integers(0, 20)) if window else 0
    pages = -(-context // 16)
    formats = [draw(st.sampled_from(list(Format))) for _ in range(pages)]
    if context % 16 and formats[-1] is Format.INT4C:
        formats[-1] = Format.INT8
    return context, rows, window, sinks, [int(f) for f in formats]


@settings(max_examples=40, deadline=None)
@given(st.lists(mixed_sequences(), min_size=1, max_size=2), st.sampled_from([0.0, 5.0]))
def test_attention_over_any_mix_of_formats_is_that_over_the_numbers_the_pages_hold(
    sequences: list[tuple[int, int, int, int, list[int]]], softcap: float
) -> None:
    layout = make_layout(heads=2, dim=16)
    pages = sum(-(-c // 16) for c, *_ in sequences)
    arena = poisoned_arena(layout, pages)
    frames = spread_frames(layout, pages).numpy()
    parts, at, start = [], 0, 0
    for context, rows, window, sinks, formats in sequences:
        lowest = max(0, context - rows - window + 1) if window else 0
        sink_pages = -(-sinks // 16)
        first = max(sink_pages, lowest // 16) if window else 0
        held = [p for p in range(-(-context // 16)) if p < sink_pages or p >= first]
        codes = np.array([formats[p] for p in held], np.uint8)
        parts.append(
            PlanSequence(
                start, rows, context, frames[at : at + len(held)], codes, sink_pages, first, window, sinks
            )
        )
        at, start = at + len(held), start + rows
    plan = make_plan(parts, 16)
    g = torch.Generator().manual_seed(2)
    q, q_sinks = (torch.randn(start, 6, 16, generator=g) for _ in range(2))
    for s, (context, *_) in enumerate(sequences):
        k, v = (torch.randn(context, 2, 16, generator=g) for _ in range(2))
        fill_sequence(arena, layout, plan, s, k, v)

    out, lse = reference.paged_attention(q, arena, layout, plan, 1, 0.3, q_sinks=q_sinks, softcap=softcap)

    for s, (context, rows, window, sinks, _) in enumerate(sequences):
        k, v = (torch.zeros(context, 2, 16, dtype=torch.float64) for _ in range(2))
        for page in range(-(-context // 16)):
            if int(plan.sink_pages[s]) <= page < int(plan.first_pages[s]):
                continue
            span = (page * 16, min(context, page * 16 + 16))
            keys, values = reference.read_positions(arena, layout, plan, 1, s, *span)
            k[slice(*span)], v[slice(*span)] = keys.transpose(0, 1).double(), values.transpose(0, 1).double()
        mine = slice(int(plan.starts[s]), int(plan.starts[s]) + rows)
        wanted = attend_exactly(q[mine].double(), q_sinks[mine].double(), k, v, window, sinks, softcap, 0.3)
        torch.testing.assert_close(out[mine].double(), wanted[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[mine].double(), wanted[1], rtol=1e-5, atol=1e-5)


def test_new_tokens_lie_where_their_positions_say_and_nothing_else_is_touched() -> None:
    layout = make_layout(heads=2, dim=16, formats=[Format.INT8, Format.INT4C], write_format=Format.INT8)
    arena = poisoned_arena(layout, 6)
    before = arena.clone()
    frames = spread_frames(layout, 6).numpy()
    windowed = PlanSequence(
        0, 5, 101, frames[:3], None, 1, 5, 16, 4
    )  # pages 0, 5, 6; rows at positions 96 to 100
    plan = make_plan([windowed, (5, 2, 2, frames[3:4])], 16, Format.INT8)
    k, v = (torch.randn(7, 2, 16, generator=torch.Generator().manual_seed(3)) for _ in range(2))

    reference.write_kv(k, v, arena, layout, plan, 1)

    keys, _ = reference.read_positions(arena, layout, plan, 1, 0, 96, 101)
    torch.testing.assert_close(keys.transpose(0, 1), k[:5], atol=0.02, rtol=0)
    _, values = reference.read_positions(arena, layout, plan, 1, 1, 0, 2)
    torch.testing.assert_close(values.transpose(0, 1), v[5:], atol=0.02, rtol=0)
    changed = (arena != before).view(-1).nonzero().flatten()
    record = layout.records[Format.INT8].nbytes
    for at in changed.tolist():
        page = next(f for f in frames.tolist() if 0 <= at - f * 1024 < 2 * record)
        assert page in (frames[2], frames[3]) and record <= at - page * 1024 < 2 * record


def test_a_converted_page_comes_from_the_numbers_of_its_codes() -> None:
    layout = make_layout(heads=2, dim=32)
    arena = poisoned_arena(layout, 4)
    source, target, back, _ = spread_frames(layout, 4).numpy()
    g = torch.Generator().manual_seed(4)
    for layer in range(2):
        k, v = (torch.randn(1, 2, 16, 32, generator=g) for _ in range(2))
        reference.write_pages(arena, layout, Format.FP8, layer, torch.tensor([source]), k, v)
    read = [reference.read_pages(arena, layout, Format.FP8, n, torch.tensor([source])) for n in range(2)]

    reference.convert_pages(arena, layout, np.array([source]), Format.FP8, np.array([target]), Format.INT4C)
    reference.convert_pages(arena, layout, np.array([target]), Format.INT4C, np.array([back]), Format.RAW)

    for layer in range(2):
        again = poisoned_arena(layout, 4)
        reference.write_pages(again, layout, Format.INT4C, layer, torch.tensor([target]), *read[layer])
        wanted = reference.read_pages(again, layout, Format.INT4C, layer, torch.tensor([target]))
        for got in (
            reference.read_pages(arena, layout, Format.INT4C, layer, torch.tensor([target])),
            reference.read_pages(arena, layout, Format.RAW, layer, torch.tensor([back])),
        ):
            assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])


@pytest.mark.parametrize("format", [Format.RAW, Format.FP8])
def test_latent_attention_reads_each_latent_as_key_and_as_value(format: Format) -> None:
    layout = make_layout(
        heads=1, dim=32, rope_dim=16, formats=[Format.RAW, Format.FP8], write_format=format, page_tokens=16
    )
    arena = poisoned_arena(layout, 5)
    plan = make_plan([(0, 70, 70, spread_frames(layout, 5).numpy())], 16, format)
    g = torch.Generator().manual_seed(5)
    latents, rope = torch.randn(70, 32, generator=g), torch.randn(70, 16, generator=g)
    q = torch.randn(70, 5, 48, generator=g)

    reference.write_latents(latents, rope, arena, layout, plan, 1)
    out, lse = reference.latent_attention(q, arena, layout, plan, 1, 0.2)

    read, keys = reference.read_latents(arena, layout, plan, 1, 0, 0, 70)
    assert torch.equal(keys, rope) and (format is Format.FP8 or torch.equal(read, latents))
    torch.testing.assert_close(read, latents, atol=0.15, rtol=0)
    k = torch.cat([read, keys], 1).double()[:, None]
    wanted = attend_exactly(q.double(), q.double(), k, read.double()[:, None], 0, 0, 0.0, 0.2)
    torch.testing.assert_close(out.double(), wanted[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), wanted[1], rtol=1e-5, atol=1e-5)


def test_parts_over_disjoint_keys_merge_to_the_whole() -> None:
    g = torch.Generator().manual_seed(6)
    q, k, v = (
        torch.randn(9, 3, 24, generator=g),
        torch.randn(50, 3, 24, generator=g),
        torch.randn(50, 3, 16, generator=g),
    )
    whole = reference.dense_attention(q, k, v, 41, 0.2)
    parts = [
        reference.dense_attention(q, k[:20], v[:20], 41, 0.2),
        reference.dense_attention(q, k[20:43], v[20:43], 21, 0.2),
        reference.dense_attention(q, k[43:], v[43:], -2, 0.2),  # its first rows attend nothing
    ]
    assert (parts[2][1][:2] == -torch.inf).all() and not parts[2][0][:2].any()
    out, lse = merge(parts)
    torch.testing.assert_close(out, whole[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, whole[1], rtol=1e-5, atol=1e-5)


def test_learned_sink_logits_take_part_in_the_denominator_alone() -> None:
    out, lse = torch.randn(4, 2, 8), torch.tensor([[0.5, -1.0]] * 3 + [[-torch.inf] * 2])
    joined, e = reference.join_sink_logits(out, lse, torch.tensor([1.0, 2.0]))
    weight = torch.exp(lse[:3]) / (torch.exp(lse[:3]) + torch.exp(torch.tensor([1.0, 2.0])))
    torch.testing.assert_close(joined[:3], out[:3] * weight[..., None])
    assert (e[3] == -torch.inf).all() and not joined[3].any()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"frames": np.zeros(1, np.int32)}, "need 7 pages, got 1"),
        ({"window": 16, "sink_pages": 0, "first_page": 6}, "attends position 85"),
        ({"first_page": 2}, "attends position 0"),
        (
            {"window": 16, "sink_pages": 3, "first_page": 2, "frames": np.arange(9, dtype=np.int32)},
            "lies among the 3 pages of sinks",
        ),
        ({"window": 16, "sink_pages": 1, "first_page": 4, "sinks": 17}, "17 sinks don't fit in 1 pages"),
        ({"length": 102}, "102 of them new"),
        ({"formats": np.zeros(3, np.uint8)}, "7 pages need as many formats, got 3"),
    ],
)
def test_a_plan_that_names_too_little_is_refused(changes: dict[str, object], message: str) -> None:
    good = PlanSequence(0, 1, 101, np.arange(7, dtype=np.int32))
    with pytest.raises(ValueError, match=message):
        make_plan([good._replace(**changes)], 16)  # type: ignore[arg-type]
