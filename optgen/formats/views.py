"""Views: write-only encodings of the new weight, made by the sweep that stores it.

A view is a function of the parameter as the step leaves it, not of the further bits that are hidden beside it: its bits
are those that a quantizer makes of the parameter, and it is made again from the parameter alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from optgen.formats import fp8, words
from optgen.formats.bound import Bound
from optgen.formats.format import Field, Format, Noise
from optgen.lang.values import Num, bits, block_max, cast, equal, from_bits, maximum, minimum, where
from optgen.ops.dtypes import i32, u8

NO_SCALE = 255  # of E8M0: NaN


@dataclass(frozen=True)
class MxFp8(Format):
    """MXFP8 along rows: e4m3 numbers, 32 of which share a power of two (E8M0), as torch and torchao have them.

    The scale is the smallest power of two under which no number is beyond 448, as cuBLAS and TransformerEngine define
    it (torchao: ScaleCalculationMode.RCEIL).  Numbers round half to even.  A block whose scale would be below 2^-126
    becomes 0.  A NaN makes its block NaN; an Inf becomes 448 under the largest scale, 2^127.
    """

    def __str__(self) -> str:
        return "e4m3 in blocks of 32 along rows: E8M0 scale, nearest"

    def fields(self) -> dict[str, Field]:
        return {"": Field(u8), "scale": Field(u8, per=32, nonneg=True)}

    def encode(self, x: Num, *, noise: Noise | None = None, root: Num | None = None) -> dict[str, Num]:
        top = block_max(bits(abs(x)), 32)  # of integers: a NaN is larger than Inf
        above = (1 << 23) - 1 - 0x600000  # carries into the exponent what is more than 448 times a power of two
        scale = maximum(((top + above) >> 23) - 8, 0)
        scale = where(top < words.INF, scale, NO_SCALE - cast(equal(top, words.INF), i32))
        # 2^(127 - scale); 2^-127 is no normal number.  Of the smallest scale 1, under which its numbers are 0.
        inverse = where(equal(scale, 0), 127 << 23, maximum((254 - scale) << 23, 1 << 22))
        size = fp8.nearest("e4m3", minimum(abs(x) * from_bits(inverse), 448.0))
        code = where(equal(scale, NO_SCALE), 0x7F, size) | ((bits(x) >> 24) & 0x80)
        return {"": cast(code, u8), "scale": cast(scale, u8)}

    def decode(self, parts: Mapping[str, Num], *, root: Num | None = None) -> Num:
        scale = cast(parts["scale"], i32)
        power = where(equal(scale, NO_SCALE), words.NAN, maximum(scale << 23, 1 << 22))
        return fp8.widen("e4m3", cast(parts[""], i32)) * from_bits(power)

    def bound(self) -> Bound:
        # Half of the widest gap, 32; a scale is less than twice the one that the block needs.
        valid = "largest < 2 * max(largest |x| of the block, 2^-114); |x| <= 240 * 2^120"
        return Bound(16 / 448, "largest", valid, low=2.0**-114, high=240 * 2.0**120, excess=1.0)


VIEWS: Mapping[str, Format] = {"mxfp8_rows": MxFp8()}
"""Name, as in `Plan(views=...)` -> how it encodes the weight."""
