"""Floats of 8 bits under one scale per block."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from optgen.formats import words
from optgen.formats.check import check_block, check_words
from optgen.formats.coded import InBlocks, error_of_table, widest
from optgen.formats.format import Noise
from optgen.formats.scales import LARGEST, Scale, fp32
from optgen.lang.values import Num, bits, cast, clip, equal, from_bits, minimum, narrow, where
from optgen.ops import dtypes
from optgen.ops.dtypes import pattern_of

FloatKind = Literal["e4m3", "e5m2"]
AnyKind = Literal["e4m3", "e5m2", "e2m1"]

# Mantissa bits, exponent bias, and the largest code that is a number.
_KINDS: Mapping[str, tuple[int, int, int]] = {
    "e4m3": (3, 7, 0x7E),  # float8_e4m3fn: no infinities, one NaN
    "e5m2": (2, 15, 0x7B),  # as IEEE floats
    "e2m1": (1, 1, 7),  # of NVFP4, in 4 bits: all are numbers
}


@dataclass(frozen=True)
class Fp8(InBlocks):
    """One 8-bit float per element, one scale per block: x = scale * float, scale = largest |x| / largest float.

    kind        "e4m3" or "e5m2", torch's float8_e4m3fn and float8_e5m2, stored as their patterns in uint8

    Rounding, to nearest half to even, and widening are integer arithmetic: every target and Triton's interpreter do the
    same.  The block's largest element becomes the largest float and keeps the scale: encoding is idempotent.  A block
    with an Inf decodes to NaN, all of it and nothing else; its codes are unspecified.  So is that of a NaN, which
    decodes to a number.
    """

    kind: FloatKind = "e4m3"
    block: int = 256
    scale: Scale = fp32

    unit = "largest"

    def __post_init__(self) -> None:
        check_block("Fp8", 8, self.block, self.loc, 2)
        check_words(self, kind=get_args(FloatKind))
        self.refuse_scales("Fp8")

    def __str__(self) -> str:
        return f"{self.kind} blocks of {self.block}: {self.scale} scale, nearest"

    @property
    def normal(self) -> float:
        """The smallest float with a full mantissa."""
        return 2.0 ** (1 - _KINDS[self.kind][1])

    @property
    def largest(self) -> float:
        return numbers(self.kind)[-1]

    def code(self, parts: Mapping[str, Num]) -> Num:
        pattern = cast(parts[""], dtypes.i32)
        return where(pattern < 128, pattern, 128 - pattern)

    def top_of(self, top: Num) -> Num:
        share = bits(from_bits(top) / self.largest)
        return where(top < words.INF, share, words.NAN)

    def code_of(self, value: Num, scale: Num, noise: Noise | None) -> Num:
        number = value / scale
        return nearest(self.kind, abs(number)) | ((bits(number) >> 24) & 0x80)

    def number_of(self, parts: Mapping[str, Num]) -> Num:
        number = widen(self.kind, cast(parts[""], dtypes.i32))
        value = number * self.scale.decode(parts["scale"])
        # The largest float times a scale that was rounded up may lie beyond the block's largest, and the range of f32.
        return clip(value, -LARGEST, LARGEST) if self.scale.excess else value

    # -- what is known of the error

    @property
    def readings(self) -> tuple[float, ...]:
        """Return the values of the codes in rising order, in units of the largest magnitude of the block."""
        positive = [x / self.largest for x in numbers(self.kind)]
        return tuple([-x for x in positive[:0:-1]] + positive)

    def errors(self) -> tuple[float, float]:
        value, slack = error_of_table(self.readings, True)
        return value, slack + value * self.scale.excess  # the largest number may become less than the largest float

    def stuck(self, decay: float) -> tuple[int, float, str]:
        # Half of a gap is rounded to the even code, which is the number's own in every second gap.
        pairs = enumerate(itertools.pairwise(numbers(self.kind)), 1)
        apart = [(2 * decay * x - (below + x), code, x / self.largest) for code, (below, x) in pairs]
        kept = [x for above, code, x in apart if above > 0 or above == 0 and code % 2 == 0]
        return len(kept), max(kept, default=0.0), "block's maximum"

    def cell(self) -> float:
        return self.ratio(widest(self.readings, self.normal / self.largest))

    def keeps_zero(self) -> bool:
        return True


def nearest(kind: AnyKind, size: Num) -> Num:
    """The code of a number >= 0, i32, rounded half to even."""
    mantissa, bias, most = _KINDS[kind]
    least, normal_from = 2.0 ** (1 - bias - mantissa), 2.0 ** (1 - bias)
    drop = 23 - mantissa
    word = bits(size)
    carry = ((word >> drop) & 1) + ((1 << (drop - 1)) - 1)
    normal = ((word + carry) >> drop) - ((127 - bias) << mantissa)
    # The sum's last place is the smallest float: adding rounds half to even.
    unit = least * 2.0**23
    small = bits(minimum(size, normal_from) + unit) - pattern_of(unit)
    return minimum(where(size < normal_from, small, normal), most)


def code(kind: FloatKind, x: Num, size: Num) -> Num:
    """The code of a number with the sign of x and the magnitude `size`, i32, rounded half to even; of a NaN 0x7F."""
    made = where(equal(size, size), nearest(kind, size), 0x7F) | ((bits(x) >> 24) & 0x80)
    return narrow(bits(x), bits(size), made, kind)


def widen(kind: AnyKind, pattern: Num) -> Num:
    """The f32 of a code with its sign; a NaN of e4m3 reads as 480."""
    mantissa, bias, _ = _KINDS[kind]
    size = pattern & 0x7F
    count = cast(size, dtypes.f32)
    normal = from_bits((size << (23 - mantissa)) + ((127 - bias) << 23))
    number = where(size < (1 << mantissa), count * 2.0 ** (1 - bias - mantissa), normal)
    return from_bits(bits(number) | ((pattern & 0x80) << 24))


@lru_cache
def numbers(kind: FloatKind) -> tuple[float, ...]:
    """The numbers >= 0 of a kind, by code."""
    mantissa, bias, most = _KINDS[kind]
    out = []
    for code in range(most + 1):
        exponent, fraction = code >> mantissa, code & ((1 << mantissa) - 1)
        unit = 2.0 ** (max(exponent, 1) - bias - mantissa)
        out.append(unit * (fraction + ((1 << mantissa) if exponent else 0)))
    return tuple(out)
