"""Rounding f32 to bf16 and f16 by its bits.

Integer arithmetic says the same on every backend; conversions by value do not (Triton's interpreter
truncates f32 -> bf16).  Patterns are i32 holding a 16-bit pattern in the low half; the high half is
whatever falls out, because the cast to i16 drops it.  NaN is selected explicitly: adding to the bits of
0x7FFFFFFF, which is what NVIDIA's arithmetic returns, would wrap to -0.
"""

from __future__ import annotations

from optgen.formats.format import Noise
from optgen.lang.values import (
    Num,
    bitcast,
    bits,
    block_max,
    block_min,
    cast,
    equal,
    floor,
    from_bits,
    lshr,
    maximum,
    minimum,
    where,
)
from optgen.ops.dtypes import NAN_LAST, DType, bf16, f16, f32, i16, i32

NAN = 0x7FC00000  # f32
INF = 0x7F800000  # f32
LARGEST = 0x7F7FFFFF  # f32, the largest finite

F16_EXPONENT_SHIFT = 112 << 23  # f32 bits of 2^-112: what separates the exponents of f32 and f16
F16_INF = 31 << 23  # f32 bits of 2^16 after that shift
F16_TINY = 2.0**-14  # the smallest normal f16


def block_top(pattern: Num, block: int) -> Num:
    """The largest pattern of a block of numbers >= +0, i32; a NaN counts as 0, so that it stays in its element."""
    return maximum(block_max(pattern + NAN_LAST, block), NAN_LAST) - NAN_LAST


def block_bottom(pattern: Num, block: int) -> Num:
    """The smallest, where a NaN of either sign counts as more than Inf."""
    return block_min(pattern & 0x7FFFFFFF, block)


def stored(pattern: Num, dtype: DType) -> Num:
    """A 16-bit pattern as the bf16 or f16 that a buffer holds."""
    return bitcast(cast(pattern, i16), dtype)


def pattern(x: Num) -> Num:
    """The sign-extended 16-bit pattern of a bf16 or f16."""
    return cast(bitcast(x, i16), i32)


def round_bf16(x: Num, noise: Noise | None = None) -> Num:
    """The pattern of x rounded to bf16: half to even, or stochastically with 16 bits of noise.

    Inf stays Inf; finite values beyond the largest bf16 may become Inf, as in any conversion.
    """
    x_bits = bits(x)
    carry = noise.integer() if noise else ((x_bits >> 16) & 1) + 0x7FFF
    return where(equal(x, x), x_bits + carry, NAN) >> 16


def dithered(exact: Num, noise: Noise, bias: int = 0) -> Num:
    """i32 of exact + bias, rounded by noise; a whole number stays."""
    # 1.5 * 2^(23 - n) leaves n bits of fraction at the end of the pattern, the integer right above them: the noise is
    # added there, and what it does not carry over is cut off.
    pattern = bits(exact + (1.5 * 2.0 ** (23 - noise.bits) + bias))
    return (pattern + noise.integer()) >> noise.bits


def _half_up(x: Num) -> Num:
    """i32 of x >= 0, x < 2^31, rounded half up."""
    whole = floor(x)
    return cast(whole, i32) + cast(floor((x - whole) + 0.5), i32)


def wide_f16(x: Num, low: int, noise: Noise | None = None) -> Num:
    """|x| as f16 with `low` further mantissa bits, an i32: exponent 5 bits, mantissa 10 + low bits.

    Inf and all that rounds beyond the last pattern give the pattern of Inf; the caller selects NaN.
    Nearest rounds half up; `noise` has 8 bits or more.
    """
    magnitude = bits(x) & 0x7FFFFFFF
    drop = 13 - low  # mantissa bits of f32 that do not fit
    rebiased = minimum(magnitude - F16_EXPONENT_SHIFT, F16_INF)
    is_subnormal = from_bits(magnitude) < F16_TINY
    if drop < 0:
        return where(is_subnormal, _half_up(from_bits(magnitude) * 2.0 ** (24 + low)), rebiased << -drop)
    # Both with `places` further bits, so that what decides how they are rounded is added, and the noise made, once.
    places = max(drop, noise.bits + 1) if noise else drop
    more = noise.middle(places) if noise else 1 << (places - 1)
    subnormal = cast(from_bits(magnitude) * 2.0 ** (24 + low + places), i32)
    fixed = where(is_subnormal, subnormal, rebiased << (places - drop))
    return lshr(fixed + more, places)


def narrow_f16(wide: Num, low: int) -> Num:
    """|x| of a wide pattern: undoes wide_f16; above the pattern of Inf lies NaN."""
    drop = 13 - low
    normal = (wide << drop if drop > 0 else wide >> -drop) + F16_EXPONENT_SHIFT
    subnormal = bits(cast(wide, f32) * 2.0 ** -(24 + low))
    finite = where(wide < (1 << (10 + low)), subnormal, normal)
    inf = 31 << (10 + low)
    return from_bits(where(wide < inf, finite, NAN - cast(equal(wide, inf), i32) * (NAN - INF)))


def round_f16(x: Num, noise: Noise | None = None) -> Num:
    """x as f16: half to even, or stochastically; beyond the largest f16 it becomes Inf."""
    if noise is None:
        return cast(x, f16)
    sign = (bits(x) >> 16) & 0x8000
    return stored(where(equal(x, x), sign | wide_f16(x, 0, noise), 0x7E00), f16)


def widen(x: Num, dtype: DType) -> Num:
    """f32 of a stored f32, bf16 or f16, exactly."""
    return x if dtype is f32 else cast(x, f32)


def narrow(x: Num, dtype: DType, noise: Noise | None = None) -> Num:
    """x rounded to f32 (unchanged), bf16 or f16."""
    if dtype is f32:
        return x
    return stored(round_bf16(x, noise), bf16) if dtype is bf16 else round_f16(x, noise)


def noise_bits(dtype: DType) -> int:
    """Return the bits that stochastic rounding to this dtype draws: as many as it drops from an f32."""
    return {"f32": 0, "bf16": 16, "f16": 13}[dtype.name]
