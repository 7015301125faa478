"""The ahead-of-time gate sees what it is there to see; compiling all kernels is `make aot`."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from kvtier.kernels import aot
from kvtier.kernels.triton_kernels import cuda_target

LOOP = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   LDG.E R4, [R2.64] ;
        /*0020*/                   HMMA.16816.F32 R8, R4, R6, R8 ;
        /*0030*/                   {loads} ;
        /*0040*/              @!P0 BRA 0x10 ;
        /*0050*/                   HMMA.16816.F32 R8, R4, R6, R8 ;
        /*0060*/               @P1 BRA 0x0 ;
        /*0070*/                   EXIT ;
"""
GCN = """
.LBB0_1:
	v_add_u32_e32 v1, v2, v3
	s_cbranch_scc1 .LBB0_1
.LBB0_2:
	global_load_dwordx4 v[0:3], v4, s[0:1]
	v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]
	{loads}
	s_cbranch_vccnz .LBB0_2
	s_endpgm
"""
GOOD = aot.Built("sm_90", "decode", 128, 0, 40_000, 0, 262, 0, 262, 1.0)


def test_the_hot_loop_is_the_shortest_one_with_matrix_instructions() -> None:
    assert aot._sass_loop(LOOP.format(loads="LDG.E R4, [R2.64+0x10]")) == (4, 0)
    assert aot._gcn_loop(GCN.format(loads="v_add_f32_e32 v1, v2, v3")) == (4, 0)
    assert aot._sass_loop("/*0000*/ EXIT ;") == (0, 0)


def test_a_spill_inside_the_hot_loop_is_counted() -> None:
    assert aot._sass_loop(LOOP.format(loads="STL [R1+0x4], R7")) == (4, 1)
    assert aot._gcn_loop(GCN.format(loads="scratch_load_dword v1, off, s32")) == (4, 1)


@pytest.mark.parametrize(
    "changes, limit, objection",
    [
        ({"loop_spills": 2}, 262, "2 accesses to local memory"),
        ({"stack_bytes": 136}, 262, "a stack of 136 bytes"),
        ({"shared_bytes": 240_000}, 262, "240000 bytes of shared memory"),
        ({}, 261, "262 issue cycles per 64 tokens, the table says 261"),
        ({}, None, "no number of cycles in the table"),
    ],
)
def test_the_gate_objects_to_what_would_be_slow_or_not_run(
    changes: dict[str, int], limit: int | None, objection: str
) -> None:
    assert GOOD.trouble(262) == []
    (found,) = replace(GOOD, **changes).trouble(limit)
    assert objection in found


@pytest.mark.parametrize("target", get_args(aot.Target))
def test_every_hot_loop_has_its_cycles_in_the_committed_table(target: aot.Target) -> None:
    hot = {name for name, variant in aot.variants(target).items() if variant.tile_tokens}
    assert hot and hot == set(aot.read_table()[target])


def test_the_committed_table_keeps_the_goals_on_hopper() -> None:
    """BF16 at most 262 issue cycles per tile of 64 tokens, FP8 460, INT4C 540, for 8 KV heads in groups of 4."""
    cycles = aot.read_table()["sm_90"]
    for format, goal in (("raw", 262), ("fp8", 460), ("int4c", 540)):
        assert cycles[f"decode_{format}_p64_d128"] <= goal


@pytest.mark.parametrize(
    "capability, target",
    [
        ((8, 0), "sm_80"),  # A100
        ((8, 6), "sm_86"),  # RTX 30, A10
        ((8, 7), "sm_80"),  # Orin
        ((8, 9), "sm_89"),  # RTX 40, L4
        ((9, 0), "sm_90"),
        ((10, 0), "sm_100"),
        ((12, 0), "sm_120"),  # RTX 50
        ((7, 5), None),
        ((13, 0), None),
    ],
)
def test_a_device_gets_kernels_that_fit_its_shared_memory(
    capability: tuple[int, int], target: aot.Target | None
) -> None:
    """GPUs of 8.6, 8.9 and 12.0 have 99 KiB for a program: kernels tuned for 8.0 would not launch there."""
    assert cuda_target(*capability) == target


@pytest.mark.parametrize("target", get_args(aot.Target))
def test_the_gate_compiles_float32_and_the_smallest_and_widest_heads(target: aot.Target) -> None:
    names = aot.variants(target).keys()
    for name in ("decode_raw_p16_d128_fp32", "prefill_raw_p16_d256_fp32", "latent_fp8_16_heads_fp32"):
        assert name in names
    assert {"decode_raw_p16_d8", "prefill_raw_p16_d512", "decode_int4_p16_d8"} <= names
