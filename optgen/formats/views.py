"""Views: write-only encodings of the new weight, made by the sweep that stores it; along columns right after it.

A view is a function of the parameter as the step leaves it, not of the further bits that are hidden beside it: its bits
are those that a quantizer makes of the parameter, and it is made again from the parameter alone.

A view with the field `top` has a scale per tensor, too, a power of two.  Its format encodes the weight divided by that
scale.  A sweep knows the tensor's largest magnitude only at its end, so the scale is made before the step, of what
`top` says of the weight then: its largest magnitude is within half of the view's range.  What more than doubles in a
step saturates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from optgen.formats import fp8, words
from optgen.formats.bound import Bound
from optgen.formats.format import Field, Format, Noise
from optgen.lang.values import Num, bits, block_max, cast, equal, from_bits, maximum, minimum, where
from optgen.ops.dtypes import i32, pattern_of, u4, u8

NO_SCALE = 255  # of E8M0: NaN


def power(top: Num, largest: float) -> Num:
    """Return the E8M0 of the smallest power of two under which a magnitude, a pattern, is not beyond `largest`.

    That of Inf is 254, that of a NaN 255.
    """
    pattern = pattern_of(largest)
    above = (1 << 23) - 1 - (pattern & 0x7FFFFF)  # carries into the exponent what is more than that times a power
    scale = maximum(((top + above) >> 23) - ((pattern >> 23) - 127), 0)
    return where(top < words.INF, scale, NO_SCALE - cast(equal(top, words.INF), i32))


@dataclass(frozen=True)
class MxFp8(Format):
    """MXFP8: e4m3 numbers, 32 of which share a power of two (E8M0), as torch and torchao have them.

    columns  of the transposed weight, so that the numbers of a block are 32 neighbours of a column

    The scale is the smallest power of two under which no number is beyond 448, as cuBLAS and TransformerEngine define
    it (torchao: ScaleCalculationMode.RCEIL).  Numbers round half to even.  A block whose scale would be below 2^-126
    becomes 0.  A NaN makes its block NaN; an Inf becomes 448 under the largest scale, 2^127.
    """

    columns: bool = False

    def __str__(self) -> str:
        return f"e4m3 in blocks of 32 along {'columns' if self.columns else 'rows'}: E8M0 scale, nearest"

    def fields(self) -> dict[str, Field]:
        return {"": Field(u8), "scale": Field(u8, per=32, nonneg=True)}

    def encode(self, x: Num, *, noise: Noise | None = None, root: Num | None = None) -> dict[str, Num]:
        scale = power(block_max(bits(abs(x)), 32), 448.0)  # of integers: a NaN is larger than Inf
        # 2^(127 - scale); 2^-127 is no normal number.  Of the smallest scale 1, under which its numbers are 0.
        inverse = where(equal(scale, 0), 127 << 23, maximum((254 - scale) << 23, 1 << 22))
        inverse = where(equal(scale, NO_SCALE), words.NAN, inverse)
        return {"": cast(fp8.code("e4m3", x, abs(x) * from_bits(inverse)), u8), "scale": cast(scale, u8)}

    def decode(self, parts: Mapping[str, Num], *, root: Num | None = None) -> Num:
        scale = cast(parts["scale"], i32)
        power = where(equal(scale, NO_SCALE), words.NAN, maximum(scale << 23, 1 << 22))
        return fp8.widen("e4m3", cast(parts[""], i32)) * from_bits(power)

    def bound(self) -> Bound:
        # Half of the widest gap, 32; a scale is less than twice the one that the block needs.
        valid = "largest < 2 * max(largest |x| of the block, 2^-114); |x| <= 240 * 2^120"
        return Bound(16 / 448, "largest", valid, low=2.0**-114, high=240 * 2.0**120, excess=1.0)


@dataclass(frozen=True)
class TensorFp8(Format):
    """FP8 under one scale per tensor, rounded as torch does: half to even, saturating; a NaN stays."""

    kind: fp8.FloatKind = "e4m3"

    def __str__(self) -> str:
        return f"{self.kind}: one scale per tensor, nearest"

    def fields(self) -> dict[str, Field]:
        return {"": Field(u8), "top": Field(u8, per=32)}

    def encode(self, x: Num, *, noise: Noise | None = None, root: Num | None = None) -> dict[str, Num]:
        top = power(block_max(bits(abs(x)), 32), fp8.numbers(self.kind)[-1] / 2)
        return {"": cast(fp8.code(self.kind, x, abs(x)), u8), "top": cast(top, u8)}

    def decode(self, parts: Mapping[str, Num], *, root: Num | None = None) -> Num:
        return fp8.widen(self.kind, cast(parts[""], i32))

    def bound(self) -> Bound:
        if self.kind == "e5m2":
            return Bound(1 / 9, "value", "2^-14 * scale <= |x| <= 57344 * scale")
        return Bound(1 / 17, "value", "2^-6 * scale <= |x| <= 448 * scale")


@dataclass(frozen=True)
class NvFp4(Format):
    """NVFP4: e2m1 numbers, 16 of which share an e4m3 scale under that of the tensor, as torchao's quantizer has them.

    The scale of a block is a sixth of its largest magnitude, at least 2^-6.  A NaN makes its block NaN.
    """

    def __str__(self) -> str:
        return "e2m1 in blocks of 16 along rows: e4m3 scale, one scale per tensor, nearest"

    def fields(self) -> dict[str, Field]:
        return {"": Field(u4), "scale": Field(u8, per=16), "top": Field(u8, per=16)}

    def encode(self, x: Num, *, noise: Noise | None = None, root: Num | None = None) -> dict[str, Num]:
        top = block_max(bits(abs(x)), 16)
        share = minimum(maximum(from_bits(top) / 6.0, 2.0**-6), 448.0)
        scale = where(top <= words.INF, fp8.nearest("e4m3", share), 0x7F)
        number = abs(x) * (1.0 / fp8.widen("e4m3", scale))
        code = fp8.nearest("e2m1", minimum(number, 6.0)) | ((bits(x) >> 28) & 8)
        return {"": cast(code & 15, u4), "scale": cast(scale, u8), "top": cast(power(top, 448.0 * 6 / 2), u8)}

    def decode(self, parts: Mapping[str, Num], *, root: Num | None = None) -> Num:
        pattern = cast(parts[""], i32)
        number = fp8.widen("e2m1", (pattern & 7) | ((pattern & 8) << 4))
        scale = cast(parts["scale"], i32)
        return number * from_bits(where(equal(scale, 0x7F), words.NAN, bits(fp8.widen("e4m3", scale))))

    def bound(self) -> Bound:
        # Half of the widest gap, 2 of 6; a scale is rounded to 4 bits.
        valid = "6 * 2^-6 * scale <= largest |x| of the block <= 6 * 448 * scale"
        return Bound(1 / 6, "largest", valid, excess=1 / 16)


COLUMNS = MxFp8(columns=True)
VIEWS: Mapping[str, Format] = {
    "mxfp8_rows": MxFp8(),
    "mxfp8_columns": COLUMNS,
    "fp8": TensorFp8(),
    "fp8_e5m2": TensorFp8("e5m2"),
    "nvfp4": NvFp4(),
}
"""Name, as in `Plan(views=...)` -> how it encodes the weight."""
