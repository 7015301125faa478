"""The unpacking of codes: all bytes, in the plain form and in the PTX form."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from ptx_emulator import emulate

from kvtier.kernels.packed import (
    fp16_of_byte,
    fp16_of_fp8,
    fp16_of_nibbles,
    fp16_of_two_codes,
    fp16_of_two_packed,
)


@triton.jit
def unpack_kernel(
    x_ptr, out_ptr, N: tl.constexpr, KIND: tl.constexpr, IS_FP8: tl.constexpr, NATIVE: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    n = tl.arange(0, N)
    x = tl.load(x_ptr + n)
    if KIND == 0:
        tl.store(out_ptr + n, fp16_of_byte(x, PTX))
    elif KIND == 1:
        tl.store(out_ptr + n, fp16_of_fp8(x, NATIVE, PTX))
    elif KIND == 2:
        low, high = fp16_of_nibbles(x, PTX)
        tl.store(out_ptr + n, low)
        tl.store(out_ptr + N + n, high)
    elif KIND == 3:
        first, second = fp16_of_two_codes(x, IS_FP8, NATIVE, PTX)
        tl.store(out_ptr + n, first)
        tl.store(out_ptr + N + n, second)
    else:
        a, b, c, d = fp16_of_two_packed(x, PTX)
        tl.store(out_ptr + n, a)
        tl.store(out_ptr + N + n, b)
        tl.store(out_ptr + 2 * N + n, c)
        tl.store(out_ptr + 3 * N + n, d)


def unpacked(x: torch.Tensor, parts: int, kind: int, is_fp8: bool, native: bool, ptx: bool) -> torch.Tensor:
    """float64 [parts, n]."""
    out = torch.full((parts, len(x)), torch.nan, dtype=torch.float16)
    unpack_kernel[(1,)](x, out, len(x), kind, is_fp8, native, ptx)
    return out.double()


@pytest.fixture(params=[False, True], ids=["plain", "ptx"])
def ptx(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(tl, "inline_asm_elementwise", emulate)
    return bool(request.param)


BYTES = torch.arange(256, dtype=torch.int32).to(torch.uint8)
FIRST = torch.arange(65536, dtype=torch.int32) & 255
SECOND = torch.arange(65536, dtype=torch.int32) >> 8
PAIRS = torch.from_numpy(np.arange(65536, dtype=np.uint16))


def e4m3(codes: torch.Tensor) -> torch.Tensor:
    return codes.to(torch.uint8).view(torch.float8_e4m3fn).double()


def test_a_byte_is_its_number_of_units(ptx: bool) -> None:
    assert torch.equal(unpacked(BYTES, 1, 0, False, False, ptx)[0] * 2**24, BYTES.double())


def test_nibbles_are_their_numbers_of_units(ptx: bool) -> None:
    low, high = unpacked(BYTES, 2, 2, False, False, ptx)
    assert torch.equal(low * 2**24, (BYTES & 15).double())
    assert torch.equal(high * 2**20, (BYTES >> 4).double())


def test_two_bytes_of_nibbles_come_apart_in_the_order_of_their_columns(ptx: bool) -> None:
    parts = unpacked(PAIRS, 4, 4, False, False, ptx)
    assert torch.equal(parts[0] * 2**24, (FIRST & 15).double())
    assert torch.equal(parts[1] * 2**24, (SECOND & 15).double())
    assert torch.equal(parts[2] * 2**20, (FIRST >> 4).double())
    assert torch.equal(parts[3] * 2**20, (SECOND >> 4).double())


def test_two_int8_codes_are_their_numbers(ptx: bool) -> None:
    first, second = unpacked(PAIRS, 2, 3, False, False, ptx)
    assert torch.equal(first, FIRST.double() - 128) and torch.equal(second, SECOND.double() - 128)


@pytest.mark.parametrize("native", [False, True])
def test_fp8_codes_are_their_numbers_where_they_have_one(native: bool, ptx: bool) -> None:
    unit = 1 if native else 256
    for codes, found in zip(
        (BYTES, FIRST, SECOND),
        (
            *unpacked(BYTES, 1, 1, True, native, ptx),
            *unpacked(PAIRS, 2, 3, True, native, ptx),
        ),
        strict=True,
    ):
        numbers = (codes & 127) != 127
        assert torch.equal(found[numbers] * unit, e4m3(codes)[numbers])
