"""Floats of 8 bits under one scale per block."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from optgen.base import loc as locs
from optgen.base.loc import Loc
from optgen.formats import words
from optgen.formats.bound import Bound
from optgen.formats.check import A_SCALE, check_block, check_part, check_words, refusal
from optgen.formats.coded import Coded, error_of_table, of_scales, of_zeros, widest
from optgen.formats.companders import HALF
from optgen.formats.format import Field, FormatFinding, Noise, Rounding
from optgen.formats.scales import LARGEST, LARGEST_ROOT, Scale, fp32, least_scale
from optgen.lang.values import Num, bits, block_max, cast, clip, floor, from_bits, maximum, minimum, where
from optgen.ops import dtypes
from optgen.ops.dtypes import pattern_of

FloatKind = Literal["e4m3", "e5m2", "ue4m4", "ue5m3"]

# Mantissa bits, exponent bias, and the largest code that is a number.
_KINDS: Mapping[str, tuple[int, int, int]] = {
    "e4m3": (3, 7, 0x7E),  # float8_e4m3fn: no infinities, one NaN
    "e5m2": (2, 15, 0x7B),  # as IEEE floats
    "ue4m4": (4, 7, 0xFF),  # without a sign and without NaN: all codes are numbers
    "ue5m3": (3, 15, 0xFF),
}


@dataclass(frozen=True)
class Fp8(Coded):
    """One 8-bit float per element, one scale per block: x = scale * float, scale = largest |x| / largest float.

    kind        "e4m3" or "e5m2", torch's float8_e4m3fn and float8_e5m2, stored as their patterns in uint8; "ue4m4" or
                "ue5m3" for nonnegative values: the sign bit belongs to the mantissa, and every code is a number
    of          "sqrt" keeps the root of a nonnegative value (kinds without a sign)
    relative    keeps x / root, root being that of the rule's second moment as kept
    rounding    to nearest half to even, or stochastic: unbiased
    zero        kinds without a sign.  "half": code 0 reads as half the smallest float, so that no second moment becomes
                0; "keep": as 0

    Rounding and widening are integer arithmetic: every target and Triton's interpreter do the same.  The block's
    largest element becomes the largest float and keeps the scale: nearest encoding is idempotent.  A block with an Inf
    or NaN decodes to NaN, all of it and nothing else; its codes are unspecified.
    """

    kind: FloatKind = "e4m3"
    block: int = 256
    scale: Scale = fp32
    of: Literal["value", "sqrt"] = "value"
    rounding: Rounding = "auto"
    relative: bool = False
    zero: Literal["half", "keep"] = "half"
    loc: Loc | None = field(default_factory=lambda: locs.here(2), compare=False, repr=False)

    def __post_init__(self) -> None:
        check_block("Fp8", 8, self.block, self.loc, 2)
        check_words(self, kind=tuple(_KINDS), of=("value", "sqrt"), zero=("half", "keep"))
        check_part(self, "scale", Scale, A_SCALE)
        if self.of == "sqrt" and self.signed:
            raise refusal(self.loc, f'Fp8({self.kind!r}, of="sqrt")', '"ue4m4" with a root')
        if self.scale.literal or not self.scale.covers:
            want = "one that no element exceeds, such as scales.fp32 or ue8m8"
            raise refusal(self.loc, f"Fp8 under a {self.scale} scale", want)

    def __str__(self) -> str:
        what, how = self.described
        return f"{self.kind} blocks of {self.block}: {what}{self.scale} scale, {how}"

    @property
    def signed(self) -> bool:
        return not self.kind.startswith("u")

    @property
    def mantissa(self) -> int:
        """Mantissa bits."""
        return _KINDS[self.kind][0]

    @property
    def most(self) -> int:
        """The code of the largest float."""
        return _KINDS[self.kind][2]

    @property
    def least(self) -> float:
        """The smallest float above 0, and what is between two below 2 * normal."""
        return 2.0 ** (1 - _KINDS[self.kind][1] - self.mantissa)

    @property
    def normal(self) -> float:
        """The smallest float with a full mantissa."""
        return 2.0 ** (1 - _KINDS[self.kind][1])

    @property
    def largest(self) -> float:
        return numbers(self.kind)[-1]

    @property
    def positive(self) -> bool:
        return not self.signed and self.zero == "half"

    @property
    def low(self) -> float:
        """The scale that smaller ones count as: where 0 reads as half a float, that does not become subnormal."""
        return least_scale(self.scale, self.least * HALF if self.positive else 0.0, self.of == "sqrt")

    def fields(self) -> dict[str, Field]:
        return {"": Field(dtypes.u8), "scale": Field(self.scale.dtype, self.block, nonneg=True)}

    def code(self, parts: Mapping[str, Num]) -> Num:
        pattern = cast(parts[""], dtypes.i32)
        return where(pattern < 128, pattern, 128 - pattern) if self.signed else pattern

    def encode(self, x: Num, *, noise: Noise | None = None, root: Num | None = None) -> dict[str, Num]:
        value = self.counted(x, root)
        top = block_max(bits(abs(value)), self.block)
        share = bits(from_bits(top) / self.largest)
        if self.low > self.scale.low:
            share = maximum(share, pattern_of(self.low))
        stored_scale, scale = self.scale.encode(where(top < words.INF, share, words.NAN))
        number = value / scale
        pattern = self._pattern(abs(number) if self.signed else number, noise)
        if self.signed:
            pattern = pattern | ((bits(number) >> 24) & 0x80)
        return {"": cast(pattern, dtypes.u8), "scale": stored_scale}

    def _pattern(self, size: Num, noise: Noise | None) -> Num:
        """The code of a number >= 0, i32."""
        drop = 23 - self.mantissa
        word = bits(size)
        carry = noise.fraction(drop) if noise else ((word >> drop) & 1) + ((1 << (drop - 1)) - 1)
        normal = ((word + carry) >> drop) - ((127 - _KINDS[self.kind][1]) << self.mantissa)
        if noise:
            small = cast(floor(minimum(size, self.normal) * (1 / self.least) + noise.unit()), dtypes.i32)
        else:
            # The sum's last place is the smallest float: adding rounds half to even.
            unit = self.least * 2.0**23
            small = bits(minimum(size, self.normal) + unit) - pattern_of(unit)
        return minimum(where(size < self.normal, small, normal), self.most)

    def times_scale(self, parts: Mapping[str, Num]) -> Num:
        pattern = cast(parts[""], dtypes.i32)
        size = pattern & 0x7F if self.signed else pattern
        count = cast(size, dtypes.f32)
        if not self.signed and self.zero == "half":
            count = maximum(count, HALF)
        normal = from_bits((size << (23 - self.mantissa)) + ((127 - _KINDS[self.kind][1]) << 23))
        number = where(size < (1 << self.mantissa), count * self.least, normal)
        if self.signed:
            number = from_bits(bits(number) | ((pattern & 0x80) << 24))
        value = number * self.scale.decode(parts["scale"])
        # The largest float times a scale that was rounded up may lie beyond the block's largest, and the range of f32.
        if self.of == "sqrt":
            return minimum(value, LARGEST_ROOT)
        return clip(value, -LARGEST, LARGEST) if self.scale.excess else value

    # -- what is known of the error

    @property
    def readings(self) -> tuple[float, ...]:
        """Return the values of the codes in rising order, in units of the largest magnitude of the block."""
        positive = [x / self.largest for x in numbers(self.kind)]
        return tuple([-x for x in positive[:0:-1]] + positive if self.signed else positive)

    def bound(self) -> Bound:
        scale, low = self.scale, self.low * self.largest
        value, slack = error_of_table(self.readings, self.signed, self.noise_bits > 0)
        slack += value * scale.excess  # the largest number may become less than the largest float
        # The scale is that of the largest float: the error is a multiple of what the largest element counts as.
        valid = f"largest <= max(largest |{self.what}| of the block, {low:.3g}) * (1 + {scale.excess:.3g})"
        high = min(scale.high * self.largest, LARGEST)
        return self.of_scale(value, "largest", valid, slack, low=low, high=high, excess=scale.excess)

    def stuck(self, decay: float) -> tuple[int, float, str]:
        # Half of a gap is rounded to the even code, which is the number's own in every second gap.
        pairs = enumerate(itertools.pairwise(numbers(self.kind)), 1)
        apart = [(2 * decay * x - (below + x), code, x / self.largest) for code, (below, x) in pairs]
        kept = [x for above, code, x in apart if above > 0 or above == 0 and code % 2 == 0]
        return len(kept), max(kept, default=0.0), "block's maximum"

    def cell(self) -> float:
        return self.ratio(widest(self.readings, self.normal / self.largest))

    def keeps_zero(self) -> bool:
        return self.signed or self.zero == "keep"

    def findings(self, nonneg: bool) -> list[FormatFinding]:
        return of_zeros(self, nonneg) + of_scales(self.scale, self.low * self.largest)


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
