"""Device functions that generated kernels share: masked access, block reductions, bf16 rounding.

`MASKED` is decided at compile time: pairs of full tiles are read and written without masks.  Everything here runs
in Triton's interpreter as well: no libdevice, and what is inline assembly for a machine has a twin without.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl
from triton.language.target_info import current_target
from triton.runtime.jit import constexpr_function

INT_MIN = tl.constexpr(-(2**31))
INT_MAX = tl.constexpr(2**31 - 1)
NAN_LAST = tl.constexpr(0x007FFFFF)  # optgen.ops.dtypes
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
KEEPS_LAYOUTS = tl.constexpr(tuple(int(x) for x in triton.__version__.split(".")[:2]) >= (3, 8))


@constexpr_function
def machine():
    """Return the target of the compiler: "cuda", "hip", or "" where that is unknown or Triton's interpreter runs."""
    target = None if INTERPRETED.value else current_target()
    return "" if target is None else target.backend


@triton.jit
def get(pointer, at, live, MASKED: tl.constexpr):
    """Load from pointer + at; 0 in lanes that are not live."""
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
def unpacked(words, BITS: tl.constexpr):
    """Words of eight codes, (..., n), as codes (..., 8 n): the first one is in the lowest bits."""
    codes = tl.expand_dims(words.to(tl.int32), len(words.shape)) >> (tl.arange(0, 8) * BITS) & (2**BITS - 1)
    if len(words.shape) == 2:
        out = tl.reshape(codes, [words.shape[0], words.shape[1] * 8])
    else:
        out = tl.reshape(codes, [words.shape[0], words.shape[1], words.shape[2] * 8])
    return out


@triton.jit
def eights(x):
    """(..., n) as (..., n / 8, 8), or (..., 1, n) where n is less."""
    n: tl.constexpr = x.shape[len(x.shape) - 1]
    few: tl.constexpr = 8 if n % 8 == 0 else n
    if len(x.shape) == 2:
        out = tl.reshape(x, [x.shape[0], n // few, few])
    else:
        out = tl.reshape(x, [x.shape[0], x.shape[1], n // few, few])
    return out


@triton.jit
def packed(codes, live, MASKED: tl.constexpr, BITS: tl.constexpr):
    """Codes (..., 8 n) as words of eight, (..., n); 0 in lanes that are not live."""
    codes = codes.to(tl.int32) & (2**BITS - 1)  # they may come with the bits above theirs
    if MASKED:
        codes = tl.where(live, codes, 0)
    return tl.sum(eights(codes) << (tl.arange(0, 8) * BITS), len(codes.shape))


@triton.jit
def block_max(x, live, MASKED: tl.constexpr):
    """The largest int32 along the last dimension; lanes that are not live do not count."""
    if MASKED:
        x = tl.where(live, x, INT_MIN)
    return tl.max(x, len(x.shape) - 1)


@triton.jit
def larger(a, b):
    """The larger float; NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def block_magnitude(x, live, MASKED: tl.constexpr):
    """The pattern of the largest |x| along the last dimension, NaN left out, plus NAN_LAST."""
    size = tl.abs(x)
    if MASKED:
        size = tl.where(live, size, 0.0)
    # Floats within a thread, where |x| is free; integers between threads, which take one instruction.
    parts = tl.max(eights(size), len(x.shape)).to(tl.int32, bitcast=True) + NAN_LAST
    return tl.max(parts, len(x.shape) - 1)


@triton.jit
def block_least(x, live, MASKED: tl.constexpr):
    """The pattern of the smallest |x| along the last dimension, NaN left out."""
    size = tl.abs(x)
    if MASKED:
        size = tl.where(live, size, float("inf"))
    return tl.min(tl.min(eights(size), len(x.shape)).to(tl.int32, bitcast=True), len(x.shape) - 1)


@triton.jit
def block_min(x, live, MASKED: tl.constexpr):
    """The smallest int32 along the last dimension; lanes that are not live do not count."""
    if MASKED:
        x = tl.where(live, x, INT_MAX)
    return tl.min(x, len(x.shape) - 1)


@triton.jit
def pointer(entry, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer in a table entry; ALIGNED promises 16 bytes, which the host has checked."""
    out = tl.load(entry).to(tl.pointer_type(dtype))
    if ALIGNED:
        # Without the hint every access is one element wide: ten times the memory instructions.
        out = tl.multiple_of(out, 16)
    return out


@triton.jit
def within(x, loaded):
    """The int32 x.  Triton computes with it in the threads that hold `loaded`, of 8 or 16 bits each.

    A number that nothing else ties to a place is computed one element after the other across the threads and moved
    where it is needed: eight neighbours then share no hash.  What is added is 0, which the machine's compiler sees.
    """
    bits: tl.constexpr = loaded.dtype.primitive_bitwidth
    word = loaded.to(tl.uint8 if bits == 8 else tl.uint16, bitcast=True)
    return x | (word.to(tl.int32) >> bits)


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
def floor(x):
    """The largest integer that is not above x, a float32; Triton's own takes negative subnormals for 0 on NVIDIA's."""
    if machine() == "cuda":
        out = tl.inline_asm_elementwise("cvt.rmi.f32.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        out = tl.floor(x)
    return out


@triton.jit
def rotl(x, k):
    """int32 rotated left by k % 32 bits."""
    # One operation: the more a hash takes, the sooner Triton leaves it in a layout of its own (see `numbered`).
    if machine() == "cuda":
        out = tl.inline_asm_elementwise(
            "shf.l.wrap.b32 $0, $1, $1, $2;", "=r,r,r", [x, k], tl.int32, is_pure=True, pack=1
        )  # fmt: skip
    elif machine() == "hip":
        out = tl.inline_asm_elementwise(
            "v_alignbit_b32 $0, $1, $1, $2", "=v,v,v", [x, -k], tl.int32, is_pure=True, pack=1
        )  # fmt: skip
    else:
        word = x.to(tl.uint32, bitcast=True)
        out = ((word << (k & 31)) | (word >> (-k & 31))).to(tl.int32, bitcast=True)
    return out


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
            "=f,=f,=f,=f,r", [x], tl.float32, is_pure=True, pack=4,
        )  # fmt: skip
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
            "=r,=r,=r,=r,r,r,r", [high, low], tl.int32, is_pure=True, pack=4,
        )  # fmt: skip
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


@constexpr_function
def between(k):
    """The selector of v_perm_b32 for two words: byte k of the second one, a zero, byte k of the first one, a zero."""
    k = getattr(k, "value", k)
    return 0x0C040C00 + 0x10001 * k


@triton.jit
def byte(x, k: tl.constexpr):
    """uint8: byte k of an int32, 0 the lowest."""
    if machine() == "cuda":
        out = tl.inline_asm_elementwise(gather(k), "=r,r,r,r,r", [x], tl.uint8, is_pure=True, pack=4)
    elif machine() == "hip":
        # Before Triton 3.9 LLVM makes a shift and two unions of two bytes that are stored side by side.
        out = tl.inline_asm_elementwise(
            "v_perm_b32 $0, $2, $1, $3", "=v,v,v,s,s", [x, between(k)], tl.int16, is_pure=True, pack=2
        ).to(tl.uint8)
    else:
        out = (x >> 8 * k).to(tl.uint8)
    return out


@triton.jit
def apart(x):
    """int32 of bytes."""
    if machine() == "cuda":
        out = tl.inline_asm_elementwise(
            """prmt.b32 $0, $4, 0, 0x4440;
            prmt.b32 $1, $4, 0, 0x4441;
            prmt.b32 $2, $4, 0, 0x4442;
            prmt.b32 $3, $4, 0, 0x4443;""",
            "=r,=r,=r,=r,r", [x], tl.int32, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        out = x.to(tl.int32)
    return out


@constexpr_function
def halves(k):
    """Assembly that makes a word of bits k to k + 7 of four words; k % 8 is 4."""
    k = getattr(k, "value", k)
    low = k // 8
    pick = low | (low + 1) << 4 | (low + 4) << 8 | (low + 5) << 12
    # Two bytes of each of two words, which one shift moves together.
    return f"""{{
        .reg .b32 one, other;
        prmt.b32 one, $1, $2, {pick};
        prmt.b32 other, $3, $4, {pick};
        shr.u32 one, one, 4;
        shr.u32 other, other, 4;
        prmt.b32 $0, one, other, 0x6420;
        }}"""


@triton.jit
def bits(x, k: tl.constexpr):
    """uint8: bits k to k + 7 of an int32; k is 4, 12 or 20."""
    if machine() == "cuda":
        out = tl.inline_asm_elementwise(halves(k), "=r,r,r,r,r", [x], tl.uint8, is_pure=True, pack=4)
    else:
        out = (x >> k).to(tl.uint8)
    return out


@triton.jit
def narrow(x, size, code, KIND: tl.constexpr):
    """uint8: `code`, of a magnitude with the sign of x, both float32 as int32; by the machine where it converts."""
    if machine() == "cuda" and current_target().arch >= 89:
        asm: tl.constexpr = f"""{{
            .reg .b16 one, other;
            .reg .b32 low, high;
            cvt.rn.satfinite.{KIND}x2.f32 one, $6, $5;
            cvt.rn.satfinite.{KIND}x2.f32 other, $8, $7;
            mov.b32 $0, {{one, other}};
            prmt.b32 low, $1, $2, 0x73;
            prmt.b32 high, $3, $4, 0x73;
            prmt.b32 low, low, high, 0x5410;
            and.b32 low, low, 0x80808080;
            or.b32 $0, $0, low;
            }}"""
        out = tl.inline_asm_elementwise(asm, "=r,r,r,r,r,r,r,r,r", [x, size], tl.uint8, is_pure=True, pack=4)
    else:
        out = code
    return out


@triton.jit
def rounded(pattern, noise, k: tl.constexpr):
    """uint8: bits 12 to 19 of an int32 and 12 bits of noise, those from k on; k is at most 20."""
    if k == 20:
        out = bits(pattern + (noise.to(tl.uint32, bitcast=True) >> 20).to(tl.int32, bitcast=True), 12)
    elif k == 8 and machine() == "cuda":
        # The mask joins the operations that made the noise; a shift would stand behind them.
        out = bits((pattern << 8) + (noise & 0xFFF00), 20)
    else:
        out = bits(pattern + (noise >> k & 4095), 12)
    return out


@triton.jit
def numbered(before, at, BLOCK: tl.constexpr):
    """before + at, int32; `before` is a multiple of 8, which compilers are to see: eight neighbours share a hash.

    Where `at` says so, every eighth of a thread's elements is seen (StableAdamW's first sweep: 46 instructions, else
    54; AdamW bf16_sr: 33, else 65).  But the more operations an index takes, the sooner Triton leaves the hash in a
    layout of its own and moves it through shared memory: before 3.8 where there are blocks (AdamW int8_split24: 84
    instructions instead of 61), later too where two values read it and not one.
    """
    if KEEPS_LAYOUTS or BLOCK == 1:
        out = before + (at - (at & 7)) | at & 7
    else:
        out = before // 8 * 8 + at
    return out


@triton.jit
def opaque(x):
    """The int32 x, of which compilers know no more: a loop's counter, say, of which they make no running addresses."""
    if machine() == "cuda":
        out = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.int32, is_pure=True, pack=1)
    else:
        out = x
    return out


# Sums and maxima over more than a block, in the order of optgen.runtime.records.sums.  MAX: the largest, NaN if any is;
# what is missing counts as -inf then, else as 0.


@constexpr_function
def log2(n):
    """k of n = 2^k."""
    return getattr(n, "value", n).bit_length() - 1


@constexpr_function
def missing(MAX):
    """The number that is added, or compared, where there is nothing."""
    return float("-inf") if getattr(MAX, "value", MAX) else 0.0


@triton.jit
def joint(a, b, MAX: tl.constexpr):
    """a + b, or the larger."""
    if MAX:
        out = larger(a, b)
    else:
        out = a + b
    return out


@triton.jit
def term(x, at, live, MASKED: tl.constexpr, MAX: tl.constexpr = False):
    """x for each of the elements `at`; what is missing in lanes that are not live."""
    x = tl.broadcast_to(x, at.shape)
    if MAX:
        x = x + 0.0  # of two zeros the larger is +0
    if MASKED:
        x = tl.where(live, x, missing(MAX))
    return x


@triton.jit
def fold(x, MAX: tl.constexpr = False):
    """[r, n] -> [r]: the upper half of each row added to the lower one, until one value is left; n a power of two."""
    # The largest is the same in any order; the interpreter reduces by a function of ours one element at a time.
    if MAX and not INTERPRETED:
        out = tl.reduce(x, 1, larger)
    else:
        for _ in tl.static_range(log2(x.shape[1])):
            low, high = tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))
            x = joint(low, high, MAX)
        out = tl.reshape(x, [x.shape[0]])
    return out


@triton.jit
def down(total, x, MAX: tl.constexpr = False):
    """total [n] and the rows of x [r, n], one after the other; r is a power of two."""
    if MAX and not INTERPRETED:
        total = larger(total, tl.reduce(x, 0, larger))
    elif x.shape[0] == 1:
        total = joint(total, tl.reshape(x, [x.shape[1]]), MAX)
    else:
        low, high = tl.split(tl.permute(tl.reshape(x, [2, x.shape[0] // 2, x.shape[1]]), (1, 2, 0)))
        total = down(down(total, low, MAX), high, MAX)
    return total


DEEP = tl.constexpr(32)
"""Partial results that a thread of `finish` loads together."""


@triton.jit
def finish(table, work, MAX: tl.constexpr, LANES: tl.constexpr):
    """Partial results become values, 256 of one vector a program.

    table  int64 (vectors, 5): the address of the partial results and of the values, both fp32; then outer, count,
           inner: value [o, i] is made of the partials [o, 0], [o, 1] ... [o, count - 1] of [outer, count, inner], one
           after the other; outer 0: the one value of a tensor is made of `count` partials in 256 lanes
    work   int32 (programs, 2): vector, first value / 256
    """
    item = work + 2 * tl.program_id(0)
    row = table + 5 * tl.load(item).to(tl.int64)
    partials = tl.load(row).to(tl.pointer_type(tl.float32))
    values = tl.load(row + 1).to(tl.pointer_type(tl.float32))
    outer = tl.load(row + 2)
    count = tl.load(row + 3).to(tl.int32)
    inner = tl.load(row + 4)
    lane = tl.arange(0, LANES)
    total = tl.full([LANES], missing(MAX), tl.float32)
    if outer > 0:
        at = tl.load(item + 1).to(tl.int64) * LANES + lane
        live = at < outer * inner
        first = at // inner * (count * inner) + at % inner
        # Few threads have all the work, and it is waiting: many loads are under way together.
        for k in range(0, count // DEEP * DEEP, DEEP):
            some = ()
            for j in tl.static_range(DEEP):
                some = some + (tl.load(partials + first + (k + j) * inner, mask=live, other=0.0),)
            for j in tl.static_range(DEEP):
                total = joint(total, some[j], MAX)
        for k in range(count // DEEP * DEEP, count):
            total = joint(total, tl.load(partials + first + k * inner, mask=live, other=0.0), MAX)
        tl.store(values + at, total, mask=live)
    else:
        for k in range(0, count, LANES):
            total = joint(total, tl.load(partials + k + lane, mask=lane < count - k, other=missing(MAX)), MAX)
        tl.store(values + tl.arange(0, 1), fold(tl.reshape(total, [1, LANES]), MAX))


@triton.jit
def _operands(table, work):
    """The addresses of the operands and of the partial results of a work item, the number of matrices, their rows and
    columns, and the item's number."""
    item = work + 2 * tl.program_id(0)
    row = table + 5 * tl.load(item).to(tl.int64)
    operands = tl.load(row).to(tl.pointer_type(tl.float32))
    partials = tl.load(row + 1).to(tl.pointer_type(tl.float32))
    number = tl.load(item + 1).to(tl.int64)
    return operands, partials, tl.load(row + 2), tl.load(row + 3), tl.load(row + 4), number


@triton.jit
def row_partials(table, work, PANEL: tl.constexpr, LANES: tl.constexpr, MAX: tl.constexpr, ROWS: tl.constexpr):
    """Partial results of rows, from operands that lie densely in memory: a panel of a few rows a program.

    table  int64 (tensors, 5): the address of the operands and of the partial results, both fp32; then the number of
           matrices, their rows and columns
    work   int32 (programs, 2): tensor, panels of columns * (rows of all matrices / ROWS) + panel
    LANES  a power of two that covers a panel, or the columns where they are fewer
    """
    operands, partials, matrices, height, columns, number = _operands(table, work)
    rows = matrices * height
    panels = tl.cdiv(columns, PANEL)
    panel = number % panels
    top = number // panels * ROWS + tl.arange(0, ROWS)
    at = panel * PANEL + tl.arange(0, LANES)
    live = (top < rows)[:, None] & (at < columns)[None, :]
    x = tl.load(operands + (top[:, None] * columns + at[None, :]), mask=live, other=missing(MAX))
    tl.store(partials + panel * rows + top, fold(x, MAX), mask=top < rows)


@triton.jit
def col_partials(table, work, LANES: tl.constexpr, MAX: tl.constexpr, PANEL: tl.constexpr):
    """Partial results of columns, likewise: LANES columns of a panel of 64 rows a program.

    work   int32 (programs, 2): tensor, chunks of LANES columns * (panels of all matrices) + chunk
    """
    operands, partials, _, rows, columns, number = _operands(table, work)
    chunks = tl.cdiv(columns, LANES)
    panels = tl.cdiv(rows, PANEL)
    panel = number // chunks
    top = panel % panels * PANEL
    at = number % chunks * LANES + tl.arange(0, LANES)
    start = (panel // panels * rows + top) * columns + at
    total = tl.full([LANES], missing(MAX), tl.float32)
    for k in range(tl.minimum(rows - top, PANEL).to(tl.int32)):
        total = joint(total, tl.load(operands + start + k * columns, mask=at < columns, other=0.0), MAX)
    tl.store(partials + panel * columns + at, total, mask=at < columns)
