"""Device code of codes: every number that float16 has, and more, against torch's own casts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvtier.kernels import codes


@triton.jit
def _encode(x_ptr, code_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(code_ptr + i, codes.e4m3_code(tl.load(x_ptr + i, mask=i < n, other=0.0)), mask=i < n)


@triton.jit
def _decode(code_ptr, fp8_ptr, int8_ptr, low_ptr, high_ptr, BLOCK: tl.constexpr, NATIVE: tl.constexpr):
    i = tl.arange(0, BLOCK)
    code = tl.load(code_ptr + i)
    tl.store(fp8_ptr + i, codes.fp16_of_code8(code, True, NATIVE))
    tl.store(int8_ptr + i, codes.fp16_of_code8(code, False, NATIVE))
    low, high = codes.fp16_of_nibbles(code)
    tl.store(low_ptr + i, low)
    tl.store(high_ptr + i, high)


@triton.jit
def _raw(x_ptr, bits_ptr, back_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits = codes.raw_bits(tl.load(x_ptr + i, mask=i < n, other=0.0), 16, True)
    tl.store(bits_ptr + i, bits, mask=i < n)
    tl.store(back_ptr + i, codes.raw_number(bits, 16, True), mask=i < n)


def _every_half() -> torch.Tensor:
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    return x[x.isfinite()].float()


def _numbers() -> torch.Tensor:
    """Every finite float16, random float32 over e4m3's whole range, and what lies around its ties."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(100_000, generator=generator) * torch.exp2(
        torch.randint(-14, 11, (100_000,), generator=generator).float()
    )
    values = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (values[1:] + values[:-1]) / 2
    near = torch.cat(
        [ties, torch.nextafter(ties, torch.tensor(1e9)), torch.nextafter(ties, torch.tensor(0.0))]
    )
    return torch.cat([_every_half(), spread, near, -near])


def test_e4m3_codes_round_half_to_even_and_saturate() -> None:
    x = _numbers()
    code = torch.empty(len(x), dtype=torch.uint8)

    _encode[(triton.cdiv(len(x), 1 << 16),)](x, code, len(x), BLOCK=1 << 16)

    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(code, expected)


def test_codes_become_the_numbers_that_they_are_in_both_ways() -> None:
    code = torch.arange(256, dtype=torch.uint8)
    finite = code.view(torch.float8_e4m3fn).float().isfinite()
    for native in (True, False):
        fp8, int8, low, high = (torch.empty(256, dtype=torch.float16) for _ in range(4))

        _decode[(1,)](code, fp8, int8, low, high, BLOCK=256, NATIVE=native)

        unit = 1.0 if native else 256.0
        assert torch.equal((fp8.float() * unit)[finite], code.view(torch.float8_e4m3fn).float()[finite])
        assert torch.equal(int8.float(), code.float() - 128)
        assert torch.equal(low, (code & 15).half())
        assert torch.equal(high, (code >> 4).half())


def test_bfloat16_bits_round_half_to_even() -> None:
    x = _numbers()
    bits = torch.empty(len(x), dtype=torch.uint16)
    back = torch.empty(len(x))

    _raw[(triton.cdiv(len(x), 1 << 16),)](x, bits, back, len(x), BLOCK=1 << 16)

    assert torch.equal(bits.view(torch.bfloat16), x.to(torch.bfloat16))
    assert torch.equal(back, x.to(torch.bfloat16).float())
