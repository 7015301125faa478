"""Device code of the page formats: codes to numbers and numbers to codes, bit for bit as kernels/reference.py does it.

Written with integer operations and IEEE division where a target's own casts or approximate division could differ:
Triton's interpreter loses a carry in its e4m3 cast, sm_80 has none, and gfx942's native 8-bit type is another one.
"""

from __future__ import annotations

import triton
import triton.language as tl

FP8_MAX = tl.constexpr(448.0)
INT8_MAX = tl.constexpr(127.0)
FP16_MAX = tl.constexpr(65504.0)
LEAST_RANGE = tl.constexpr(1e-4)  # rows of zeros get a scale too, so that no division is by zero
E4M3_BITS_SCALE = tl.constexpr(256.0)  # what fp16_of_e4m3_bits leaves out


@triton.jit
def rne(x):
    """Round half to even, for |x| < 2^22, without a library call."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def e4m3_code(y):
    """float32 -> e4m3fn code as uint8: round half to even, saturating at +-448. NaN has no code here."""
    bits = tl.minimum(tl.abs(y), FP8_MAX).to(tl.uint32, bitcast=True)
    # Three mantissa bits stay; adding just under half of the last one, plus its own parity, rounds half to even, and a
    # carry moves into the exponent by itself. 960 = (127 - 7) << 3 changes the exponent's bias.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    magnitude = bits.to(tl.float32, bitcast=True)
    subnormal = rne(magnitude * 512.0).to(tl.uint32)
    code = tl.where(magnitude < 0.015625, subnormal, normal)
    return (code | ((y.to(tl.uint32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def fp16_of_e4m3_bits(code):
    """e4m3fn code -> float16 number / 256, exactly, on every target: fold E4M3_BITS_SCALE into the row's scale."""
    wide = code.to(tl.uint16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def fp16_of_int8(code):
    """Stored INT8 code (biased by 128) -> float16 number, exactly: 0x6400 | code is the float16 1024 + code."""
    return (code.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1152.0


@triton.jit
def fp16_of_code8(code, IS_FP8: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """8-bit code -> float16 number; divided by E4M3_BITS_SCALE where it is FP8 and the target has no such type."""
    if IS_FP8:
        if NATIVE_FP8:
            return code.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        else:
            return fp16_of_e4m3_bits(code)
    else:
        return fp16_of_int8(code)


@triton.jit
def fp16_of_nibbles(packed):
    """Packed uint8 -> (low, high) nibbles as float16, exactly.

    0x6400 | byte is the float16 1024 + byte; masked, it is 1024 + low, or 1024 + 16 * high: one subtraction, one fma.
    """
    wide = packed.to(tl.uint16) | 0x6400
    low = (wide & 0xFF0F).to(tl.float16, bitcast=True) - 1024.0
    high = (wide & 0xFFF0).to(tl.float16, bitcast=True) * 0.0625 - 64.0
    return low, high


@triton.jit
def scale16(x):
    """float32 -> float16, saturating: what scales and zeros are stored as."""
    return tl.minimum(tl.maximum(x, -FP16_MAX), FP16_MAX).to(tl.float16)


@triton.jit
def encode8(x, amax, IS_FP8: tl.constexpr):
    """Rows x [T, D] float32 of largest magnitudes amax [T] -> (codes uint8 [T, D], scales float16 [T])."""
    if IS_FP8:
        s = scale16(tl.div_rn(tl.maximum(amax, LEAST_RANGE), FP8_MAX))
        return e4m3_code(tl.div_rn(x, s.to(tl.float32)[:, None])), s
    else:
        s = scale16(tl.div_rn(tl.maximum(amax, LEAST_RANGE), INT8_MAX))
        y = tl.div_rn(x, s.to(tl.float32)[:, None])
        code = rne(tl.minimum(tl.maximum(y, -INT8_MAX), INT8_MAX)) + 128.0
        return code.to(tl.uint8), s


@triton.jit
def nibble_scale(low, high):
    """(scale, zero) float16 of asymmetric nibbles for numbers from low to high, float32."""
    return scale16(tl.div_rn(tl.maximum(high - low, LEAST_RANGE), 15.0)), scale16(low)


@triton.jit
def nibble(x, scale, zero):
    """Numbers float32 -> nibbles as uint8; scale and zero float32, of a shape that broadcasts to x."""
    y = tl.div_rn(x - zero, scale)
    return rne(tl.minimum(tl.maximum(y, 0.0), 15.0)).to(tl.uint8)


@triton.jit
def encode4(first, second, low, high):
    """Rows of float32 from low to high [T], as halves of their columns [T, D/2] -> (packed uint8, scale, zero [T])."""
    s, z = nibble_scale(low, high)
    scale = s.to(tl.float32)[:, None]
    zero = z.to(tl.float32)[:, None]
    return nibble(first, scale, zero) | (nibble(second, scale, zero) << 4), s, z


@triton.jit
def raw_bits(x, BITS: tl.constexpr, IS_BF16: tl.constexpr):
    """float32 -> the bits of the raw format (32: float32; 16: bfloat16 or float16), round half to even."""
    if BITS == 32:
        return x.to(tl.uint32, bitcast=True)
    else:
        if IS_BF16:
            bits = x.to(tl.uint32, bitcast=True)
            return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16)
        else:
            return x.to(tl.float16).to(tl.uint16, bitcast=True)


@triton.jit
def raw_number(bits, BITS: tl.constexpr, IS_BF16: tl.constexpr):
    """The bits of a raw format as uint16 or uint32 -> float32, exactly."""
    if BITS == 32:
        return bits.to(tl.float32, bitcast=True)
    else:
        if IS_BF16:
            return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        else:
            return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def as_bits(x, BITS: tl.constexpr):
    """The bits of a raw number, for a typeless copy."""
    if BITS == 32:
        return x.to(tl.uint32, bitcast=True)
    else:
        return x.to(tl.uint16, bitcast=True)
