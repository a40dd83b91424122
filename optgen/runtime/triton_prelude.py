"""Device functions that generated kernels share: masked access, block reductions, bf16 rounding.

`MASKED` is decided at compile time: full tiles are read and written without masks.  Everything here runs in Triton's
interpreter as well: no libdevice, and what is inline assembly for a machine has a twin without.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl
from triton.language.target_info import current_target
from triton.runtime.jit import constexpr_function

INT_MIN = tl.constexpr(-(2**31))
INT_MAX = tl.constexpr(2**31 - 1)
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@constexpr_function
def machine():
    """What is compiled for: "cuda", "hip", or "" where that is unknown or Triton's interpreter runs."""
    target = None if INTERPRETED.value else current_target()
    return "" if target is None else target.backend


@triton.jit
def get(pointer, at, live, MASKED: tl.constexpr):
    """What lies at pointer + at; 0 in lanes that are not live."""
    if MASKED:
        out = tl.load(pointer + at, mask=live, other=0)
    else:
        out = tl.load(pointer + at)
    return out


@triton.jit
def put(pointer, at, value, live, MASKED: tl.constexpr):
    """Writes value at pointer + at in live lanes."""
    if MASKED:
        tl.store(pointer + at, value, mask=live)
    else:
        tl.store(pointer + at, value)


@triton.jit
def block_max(x, live, MASKED: tl.constexpr):
    """The largest int32 of each row of the tile; lanes that are not live do not count."""
    if MASKED:
        x = tl.where(live, x, INT_MIN)
    return tl.max(x, 1)


@triton.jit
def larger(a, b):
    """The larger float; NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def block_magnitude(x, live, MASKED: tl.constexpr):
    """The pattern of the largest |x| of each row of the tile, of a NaN where there is one."""
    # The interpreter reduces by a function of ours one element at a time; AMD's float maximum drops NaN, and to keep
    # it takes two more instructions.
    if INTERPRETED or machine() == "hip":
        out = block_max(tl.abs(x).to(tl.int32, bitcast=True), live, MASKED)
    else:
        size = tl.abs(x)
        if MASKED:
            size = tl.where(live, size, 0.0)
        out = tl.reduce(size, 1, larger).to(tl.int32, bitcast=True)
    return out


@triton.jit
def block_min(x, live, MASKED: tl.constexpr):
    """The smallest int32 of each row of the tile; lanes that are not live do not count."""
    if MASKED:
        x = tl.where(live, x, INT_MAX)
    return tl.min(x, 1)


@triton.jit
def pointer(entry, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer in a table entry; ALIGNED promises 16 bytes, which the host has checked."""
    out = tl.load(entry).to(tl.pointer_type(dtype))
    if ALIGNED:
        # Without the hint every access is one element wide: ten times the memory instructions.
        out = tl.multiple_of(out, 16)
    return out


@triton.jit
def reciprocal(x):
    """1 / x for x >= 0, within 3 ulp; of a subnormal it may be Inf, and subnormal results may be 0.

    An instruction within an ulp where the machine is known, else the square of its reciprocal root.  Triton's own
    division is seven instructions more, for divisors near the ends of the range.
    """
    if machine() == "cuda":
        out = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    elif machine() == "hip":
        out = tl.inline_asm_elementwise("v_rcp_f32 $0, $1", "=v,v", [x], tl.float32, is_pure=True, pack=1)
    else:
        root = tl.rsqrt(x)
        out = root * root
    return out


@triton.jit
def inverse(x):
    """1 / x for a positive finite x, within an ulp: a Newton step where `reciprocal` is a square."""
    out = reciprocal(x)
    if machine() == "":
        out = tl.fma(tl.fma(-x, out, 1.0), out, out)
    return out


@triton.jit
def minus(x):
    """-x, of zeros too; most instructions take it for nothing."""
    return (x.to(tl.int32, bitcast=True) ^ INT_MIN).to(tl.float32, bitcast=True)


@triton.jit
def rint(x):
    """The nearest integer, half to even, for |x| < 2^22: adding 1.5 * 2^23 leaves no bits below 1."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def rotl(x, k):
    """int32 rotated left by k bits, 0 < k < 32."""
    word = x.to(tl.uint32, bitcast=True)
    return ((word << k) | (word >> (32 - k))).to(tl.int32, bitcast=True)


@triton.jit
def sign(x):
    """-1, 0 or 1; a zero keeps its sign, NaN stays NaN."""
    one = ((x.to(tl.int32, bitcast=True) & INT_MIN) | 0x3F800000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) > 0, one, x)


# Bytes between words.  NVIDIA's compiler takes a shift or a mask and another instruction for what is one permutation
# each; the assembly works on four elements, which a lane holds in a word where they are bytes.


@triton.jit
def widened(x):
    """float32 of a float."""
    if machine() == "cuda" and x.dtype == tl.bfloat16:
        out = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;", "=f,=f,r", [x], tl.float32, is_pure=True, pack=2
        )
    else:
        out = x.to(tl.float32)
    return out


@triton.jit
def counter(x):
    """2^23 + x of bytes, float32: x below the exponent of 2^23."""
    if machine() == "cuda":
        out = tl.inline_asm_elementwise(
            """prmt.b32 $0, $4, 0x4B000000, 0x7650;
            prmt.b32 $1, $4, 0x4B000000, 0x7651;
            prmt.b32 $2, $4, 0x4B000000, 0x7652;
            prmt.b32 $3, $4, 0x4B000000, 0x7653;""",
            "=f,=f,=f,=f,r",
            [x],
            tl.float32,
            is_pure=True,
            pack=4,
        )
    else:
        out = (x.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
    return out


@triton.jit
def joined(high, low):
    """int32: the pattern of a bfloat16, a byte, and eight zeros."""
    if machine() == "cuda":
        # Bytes apart by zeros first, two to a word: a permutation reads two words.
        out = tl.inline_asm_elementwise(
            """{
            .reg .b32 even, odd;
            prmt.b32 even, $6, 0, 0x4140;
            prmt.b32 odd, $6, 0, 0x4342;
            prmt.b32 $0, even, $4, 0x5401;
            prmt.b32 $1, even, $4, 0x7621;
            prmt.b32 $2, odd, $5, 0x5401;
            prmt.b32 $3, odd, $5, 0x7621;
            }""",
            "=r,=r,=r,=r,r,r,r",
            [high, low],
            tl.int32,
            is_pure=True,
            pack=4,
        )
    else:
        out = high.to(tl.float32).to(tl.int32, bitcast=True) + (low.to(tl.int32) << 8)
    return out


@constexpr_function
def gather(k):
    """Assembly that makes a word of byte k of four words."""
    k = getattr(k, "value", k)
    return f"""{{
        .reg .b32 low, high;
        prmt.b32 low, $1, $2, {k + 16 * (k + 4)};
        prmt.b32 high, $3, $4, {k + 16 * (k + 4)};
        prmt.b32 $0, low, high, 0x5410;
        }}"""


@triton.jit
def byte(x, k: tl.constexpr):
    """uint8: byte k of an int32, 0 the lowest."""
    if machine() == "cuda":
        out = tl.inline_asm_elementwise(gather(k), "=r,r,r,r,r", [x], tl.uint8, is_pure=True, pack=4)
    else:
        out = (x >> 8 * k).to(tl.uint8)
    return out


@triton.jit
def opaque(x):
    """The int32 x, of which compilers know no more: a loop's counter, say, of which they make no running addresses."""
    if machine() == "cuda":
        out = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.int32, is_pure=True, pack=1)
    else:
        out = x
    return out
