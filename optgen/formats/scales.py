"""Scales: one number per block that bounds the magnitude of its elements.

A scale is encoded from the largest magnitude of the block, as i32 bits (`top`): integer maxima are
associative.  A NaN counts as 0 (`words.block_top`) and gets any code.  Rules that all but the compatibility scale keep,
each for a measured reason:

- rounded *up*, and the encoder divides by the *decoded* scale: |x| / scale <= 1, no second source of error;
- the whole range of f32: there is no gradient that a scale cannot follow;
- a block with an Inf gets a NaN scale: all of it decodes to NaN, nothing outside it does.

The smallest scale of an encoded block is 2^-118, so that scale / 254 stays a normal number and reciprocals
stay finite; scale 0 is what a fresh state has and makes all of its block 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from optgen.base import loc as locs
from optgen.formats import words
from optgen.formats.check import check_number
from optgen.lang.values import Num, cast, equal, from_bits, maximum, minimum, where
from optgen.ops import dtypes
from optgen.ops.dtypes import DType, pattern_of

SMALLEST = 2.0**-118
LARGEST = dtypes.f32.largest
LARGEST_ROOT = float.fromhex("0x1.ffffe0p63")  # a little below 2^64: its square is finite
_LARGEST_ROOT_BITS = 0x5F7FFFF0
_ROOT_OFFSET = (127 - 63) << 23  # bits of 2^-63
_SMALLEST_BITS = (127 - 118) << 23


class Scale(ABC):
    """A way to store the scale of a block.

    name      as in plans
    dtype     of the stored field
    excess    the decoded scale is at most (1 + excess) * max(largest magnitude, SMALLEST)
    literal   whether the encoder divides by another number than the decoder multiplies with (compatibility)
    low, high the largest magnitudes that it can follow
    """

    name: str
    dtype: DType
    excess: float = 0.0
    literal: bool = False
    high: float = LARGEST

    @property
    def low(self) -> float:
        return SMALLEST

    @abstractmethod
    def encode(self, top: Num) -> tuple[Num, Num]:
        """(what is stored, the f32 that the encoder divides by) for the largest magnitude's bits."""

    @abstractmethod
    def decode(self, stored: Num) -> Num:
        """The f32 scale."""

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class PatternScale(Scale):
    """The f32 pattern without its sign and its last 15 bits, rounded up."""

    name = "ue8m8"
    dtype = dtypes.i16
    excess = 2.0**-8

    def encode(self, top: Num) -> tuple[Num, Num]:
        up = maximum(top, _SMALLEST_BITS) + 0x7FFF
        # A NaN of few bits: where machines keep payload and sign, its negative is far from the end of the integers.
        up = where(top < words.INF, up, words.NAN)
        # Codes under a NaN scale are unspecified, so what they are divided by may be any number.
        divisor = minimum(up & 0x7FFF8000, words.LARGEST)
        return cast(up >> 15, dtypes.i16), from_bits(divisor)

    def decode(self, stored: Num) -> Num:
        scale_bits = cast(stored, dtypes.i32) << 15
        scale_bits = scale_bits & 0x7FFFFFFF  # the load extended the pattern's top bit as a sign
        # The pattern of Inf is free: it stands for the largest f32, rounded up.
        return from_bits(where(equal(scale_bits, words.INF), words.LARGEST, scale_bits))


@dataclass(frozen=True)
class RootScale(Scale):
    """16 bits for roots of second moments: 7 bits of exponent suffice, which leaves 9 for the mantissa.

    So fine that the largest of 255 codes keeps the scale under nearest rounding: 255 / (1 + 2^-9) rounds to 255.
    Follows roots in [2^-54, 2^64): its smallest keeps half a code, squared, a normal f32.
    """

    name = "ue7m9"
    dtype = dtypes.i16
    excess = 2.0**-9
    low = 2.0**-54
    high = LARGEST_ROOT

    def encode(self, top: Num) -> tuple[Num, Num]:
        up = where(top < words.INF, maximum(top, (127 - 54) << 23) + 0x3FFF, (0xFFFF << 14) + _ROOT_OFFSET)
        # Codes under a NaN scale are unspecified, so what they are divided by may be any number.
        divisor = minimum(up & 0x7FFFC000, _LARGEST_ROOT_BITS)
        return cast((up - _ROOT_OFFSET) >> 14, dtypes.i16), from_bits(divisor)

    def decode(self, stored: Num) -> Num:
        return self._value(cast(stored, dtypes.i32) & 0xFFFF)

    def _value(self, pattern: Num) -> Num:
        scale_bits = minimum((pattern << 14) + _ROOT_OFFSET, _LARGEST_ROOT_BITS)
        scale_bits = where(equal(pattern, 0xFFFF), words.NAN, scale_bits)
        return from_bits(where(equal(pattern, 0), 0, scale_bits))


@dataclass(frozen=True)
class FloatScale(Scale):
    """The largest magnitude itself, in f32; smaller ones than `least`, a positive f32, count as that."""

    least: float = SMALLEST

    name = "fp32"
    dtype = dtypes.f32

    def __post_init__(self) -> None:
        want = "2^-118 <= least < 2^128"
        check_number(f"FloatScale(least={self.least!r})", self.least, SMALLEST, LARGEST, want, locs.here(2))

    def __str__(self) -> str:
        return self.name if self.least == SMALLEST else f"{self.name} (from {self.least:.3g})"

    @property
    def low(self) -> float:
        return self.least

    def encode(self, top: Num) -> tuple[Num, Num]:
        scale = from_bits(where(top < words.INF, maximum(top, pattern_of(self.least)), words.NAN))
        return scale, scale

    def decode(self, stored: Num) -> Num:
        return stored


@dataclass(frozen=True)
class HalfScale(Scale):
    """f16 rounded to nearest, the encoder dividing by the unrounded one: FlashOptim's, for compatibility only.

    A block whose largest magnitude is under 2^-25 decodes to 0, one above 65520 to Inf and NaN.
    """

    name = "fp16"
    dtype = dtypes.f16
    excess = 2.0**-11
    literal = True
    low = dtypes.f16.normal
    high = dtypes.f16.largest

    def encode(self, top: Num) -> tuple[Num, Num]:
        scale = maximum(from_bits(top), 1e-12)
        return cast(scale, dtypes.f16), scale

    def decode(self, stored: Num) -> Num:
        return cast(stored, dtypes.f32)


ue8m8 = PatternScale()
ue7m9 = RootScale()
fp32 = FloatScale()
fp16 = HalfScale()
