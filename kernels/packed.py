"""Device code that turns packed codes into float16 operands of matrix instructions, with as few instructions as it takes.

A nibble or a byte in the low bits of 16 is, read as a float16, the subnormal c * 2^-24, and a nibble in bits 4 to 7 is
c * 2^-20: exact, and for a mask alone. Matrix units take subnormals as they are, so the factors move to the other
operand or to the result. Values are read two bytes at a time, because 16-bit elements can be transposed on their way
from shared memory and bytes can't; what was one column becomes two or four, each with an accumulator of its own.

Each function has a form in PTX, which works on packed words where the compiler would take elements apart one by one, and
a plain form with the same results for other targets.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvtier.kernels.codes import fp16_of_code8

BYTE_UNIT = tl.constexpr(2.0**-24)
LOW_UNIT = tl.constexpr(2.0**-24)
HIGH_UNIT = tl.constexpr(2.0**-20)


@triton.jit
def fp16_of_byte(code, PTX: tl.constexpr):
    """uint8 -> float16 number * BYTE_UNIT."""
    if PTX:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, 0, 0x4140; prmt.b32 $1, $2, 0, 0x4342;",
            "=&r,=&r,r",
            [code],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        return code.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def fp16_of_fp8(code, NATIVE_FP8: tl.constexpr, PTX: tl.constexpr):
    """uint8 of e4m3fn -> float16 number; / E4M3_BITS_SCALE where FP8 is not native."""
    if PTX and not NATIVE_FP8:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, c, d;
            prmt.b32 a, $2, 0, 0x1404;
            prmt.b32 b, $2, 0, 0x3424;
            shr.u32 c, a, 1;
            shr.u32 d, b, 1;
            and.b32 c, c, 0x3f803f80;
            and.b32 d, d, 0x3f803f80;
            lop3.b32 $0, a, 0x80008000, c, 0xea;
            lop3.b32 $1, b, 0x80008000, d, 0xea;
            }
            """,
            "=&r,=&r,r",
            [code],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        return fp16_of_code8(code, True, NATIVE_FP8)


@triton.jit
def fp16_of_nibbles(packed, PTX: tl.constexpr):
    """uint8 -> float16 (low nibble * LOW_UNIT, high nibble * HIGH_UNIT)."""
    if PTX:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b;
            prmt.b32 a, $4, 0, 0x4140;
            prmt.b32 b, $4, 0, 0x4342;
            and.b32 $0, a, 0x000f000f;
            and.b32 $1, b, 0x000f000f;
            and.b32 $2, a, 0x00f000f0;
            and.b32 $3, b, 0x00f000f0;
            }
            """,
            "=&r,=&r,=&r,=&r,r",
            [packed],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        wide = packed.to(tl.uint16)
        return (wide & 0x0F).to(tl.float16, bitcast=True), (wide & 0xF0).to(tl.float16, bitcast=True)


@triton.jit
def fp16_of_two_packed(two, PTX: tl.constexpr):
    """uint16 of two bytes of nibbles -> float16: low nibbles of the first and second * LOW_UNIT, high ones * HIGH_UNIT."""
    if PTX:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a;
            shr.u32 a, $4, 8;
            and.b32 $0, $4, 0x000f000f;
            and.b32 $1, a, 0x000f000f;
            and.b32 $2, $4, 0x00f000f0;
            and.b32 $3, a, 0x00f000f0;
            }
            """,
            "=&r,=&r,=&r,=&r,r",
            [two],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        second = two >> 8
        return (
            (two & 0x0F).to(tl.float16, bitcast=True),
            (second & 0x0F).to(tl.float16, bitcast=True),
            (two & 0xF0).to(tl.float16, bitcast=True),
            (second & 0xF0).to(tl.float16, bitcast=True),
        )


@triton.jit
def fp16_of_two_codes(two, IS_FP8: tl.constexpr, NATIVE_FP8: tl.constexpr, PTX: tl.constexpr):
    """uint16 of two 8-bit codes -> float16 (first, second); / E4M3_BITS_SCALE where FP8 is not native."""
    if PTX and IS_FP8 and NATIVE_FP8:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 t;
            .reg .b16 a, b;
            prmt.b32 t, $2, 0, 0x3120;
            mov.b32 {a, b}, t;
            cvt.rn.f16x2.e4m3x2 $0, a;
            cvt.rn.f16x2.e4m3x2 $1, b;
            }
            """,
            "=&r,=&r,r",
            [two],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    elif PTX and IS_FP8:
        # Sign and magnitude of each byte go to bits 15 and 7 to 13 of its half word.
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, c;
            shl.b32 a, $2, 8;
            shr.u32 b, a, 1;
            shr.u32 c, $2, 1;
            and.b32 b, b, 0x3f803f80;
            and.b32 c, c, 0x3f803f80;
            lop3.b32 $0, a, 0x80008000, b, 0xea;
            lop3.b32 $1, $2, 0x80008000, c, 0xea;
            }
            """,
            "=&r,=&r,r",
            [two],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    elif PTX:
        # 0x6400 | code is the float16 1024 + code, and codes are stored with 128 added.
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, c, d;
            mov.b32 c, 0x64006400;
            mov.b32 d, 0x64806480;
            lop3.b32 a, $2, 0x00ff00ff, c, 0xea;
            prmt.b32 b, $2, c, 0x7351;
            sub.f16x2 $0, a, d;
            sub.f16x2 $1, b, d;
            }
            """,
            "=&r,=&r,r",
            [two],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        first = (two & 0xFF).to(tl.uint8)
        second = (two >> 8).to(tl.uint8)
        return fp16_of_code8(first, IS_FP8, NATIVE_FP8), fp16_of_code8(second, IS_FP8, NATIVE_FP8)
