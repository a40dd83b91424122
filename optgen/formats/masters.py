"""Weights: the parameter in its own dtype, and what else it takes to lose no update.

fp32 parameters are their own master under every plan (`Plan.storage`).  For bf16 and f16 parameters the visible weight
is always a rounding of the kept one, so that the model computes with the nearest value it can.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from optgen.formats import fp8, words
from optgen.formats.bound import ROUNDOFF, Bound
from optgen.formats.check import Placed, check_words, is_whole, refusal
from optgen.formats.floats import rounding_to
from optgen.formats.format import Field, FormatFinding, Master, Noise, Rounding
from optgen.formats.views import NO_SCALE, power
from optgen.lang.values import Num, bits, block_max, cast, clip, equal, floor, from_bits, maximum, minimum, where
from optgen.ops.dtypes import DType, bf16, f16, f32, i8, i16, i32, u8

SHARING = 64
"""Neighbours of a row that share the scale of 8-bit weights."""


@dataclass(frozen=True)
class Native(Placed, Master):
    """The parameter alone.  Under nearest rounding updates below half an ulp are lost."""

    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        check_words(self)

    def __str__(self) -> str:
        return f"the parameter itself, {'nearest' if self.rounding == 'nearest' else 'stochastic'}"

    def noise_bits(self, param: DType) -> int:
        return 0 if self.rounding == "nearest" else words.noise_bits(param)

    def fields(self, param: DType) -> dict[str, Field]:
        return {"": Field(param)}

    def encode(self, x: Num, param: DType, *, noise: Noise | None = None) -> dict[str, Num]:
        return {"": words.narrow(x, param, noise)}

    def decode(self, parts: Mapping[str, Num], param: DType) -> Num:
        return words.widen(parts[""], param)

    def describe(self, param: DType) -> str:
        return param.name if param is f32 else f"{param.name}, {'stochastic' if self.noise_bits(param) else 'nearest'}"

    def bound(self, param: DType) -> Bound:
        return rounding_to(param, self.noise_bits(param) > 0)

    def findings(self, param: DType) -> list[FormatFinding]:
        if self.noise_bits(param):
            return []
        reason = (
            f"late in training, when steps are smaller than 2^-{param.mantissa + 1} of a weight, a {param.name} "
            "parameter no longer moves: it is rounded to nearest; master=Split(8) or Native('stochastic') keeps it "
            "moving"
        )
        return [("L11", "warning", reason)]


@dataclass(frozen=True)
class Copy(Master):
    """A full copy in fp32: exact."""

    def __str__(self) -> str:
        return "and an fp32 copy"

    def fields(self, param: DType) -> dict[str, Field]:
        return {"": Field(param), "master": Field(f32)}

    def encode(self, x: Num, param: DType, *, noise: Noise | None = None) -> dict[str, Num]:
        return {"": words.narrow(x, param), "master": x}

    def decode(self, parts: Mapping[str, Num], param: DType) -> Num:
        return parts["master"]

    def bound(self, param: DType) -> Bound:
        return rounding_to(f32, False)


@dataclass(frozen=True)
class Split(Placed, Master):
    """The pattern of the weight cut in two: the parameter holds the high bits, rounded, a second field the rest.

    bf16: f32's own pattern.  16 low bits are exact for every f32 that is not NaN; 8 keep 24 bits of it (relative
    error 2^-16, 2^-15 stochastically).  f16: 5 exponent and 10 + `bits` mantissa bits; 8 keep 2^-19 of normal
    values and 2^-33 absolute below 2^-14, 16 every normal value exactly and 2^-41 below.

    Every low part fits every weight, also one that was changed since: the pair reads as half a place from the high part
    at most.

    The high part rounds half up, because the pair could not be exact otherwise: each even bf16 has 65537
    patterns that round to it half to even.  All of it is integer arithmetic; encoding what was decoded changes
    nothing, stochastically either.  NaN is selected explicitly and stays NaN, Inf stays Inf.  Where the high part
    rounds up to Inf the pair still gives the finite weight back, except for what 8 low bits round up to 2^128
    (2^16 for f16): that becomes Inf.
    """

    bits: Literal[8, 16] = 8
    rounding: Rounding = "stochastic"

    def __post_init__(self) -> None:
        if not is_whole(self.bits) or self.bits not in (8, 16):
            hint = "SplitFp8() is for weights of which layers see 8 bits, and views= for copies of them (docs/views.md)"
            hint = hint if isinstance(self.bits, str) else ""
            raise refusal(self.loc, f"Split({self.bits!r})", "8 or 16 further bits", hint)
        check_words(self)

    def __str__(self) -> str:
        how = "" if self.bits == 16 else ", stochastic" if self.rounding != "nearest" else ", nearest"
        return f"and {self.bits} more bits{how}"

    def noise_bits(self, param: DType) -> int:
        return 8 if self.bits == 8 and self.rounding != "nearest" else 0

    def fields(self, param: DType) -> dict[str, Field]:
        return {"": Field(param), "low": Field(u8, zero=128) if self.bits == 8 else Field(i16)}

    def encode(self, x: Num, param: DType, *, noise: Noise | None = None) -> dict[str, Num]:
        return self._encode_bf16(x, noise) if param is bf16 else self._encode_f16(x, noise)

    def _encode_bf16(self, x: Num, noise: Noise | None) -> dict[str, Num]:
        half = 0x8000  # half of the high part's last place: the low part is stored above it
        if self.bits == 16:
            word = where(equal(x, x), bits(x) + half, words.NAN + half)
            low = cast((word & 0xFFFF) - half, i16)
        else:
            carry = noise.integer() + half if noise else half + 0x80
            word = where(equal(x, x), bits(x) + carry, words.NAN + half)
            low = cast((word >> 8) & 0xFF, u8)
        return {"": words.stored(word >> 16, bf16), "low": low}

    def _encode_f16(self, x: Num, noise: Noise | None) -> dict[str, Num]:
        half = 1 << (self.bits - 1)
        wide = words.wide_f16(x, self.bits, noise)
        word = where(equal(x, x), wide, 0x7E00 << self.bits) + half
        sign = (bits(x) >> 16) & 0x8000
        low = word & ((1 << self.bits) - 1)
        kept = cast(low - half, i16) if self.bits == 16 else cast(low, u8)
        return {"": words.stored(sign | (word >> self.bits), f16), "low": kept}

    def decode(self, parts: Mapping[str, Num], param: DType) -> Num:
        low = cast(parts["low"], i32)
        if param is bf16:
            high = bits(cast(parts[""], f32))
            # From a zero that somebody wrote, a low part below the middle would borrow from the sign: a NaN.
            if self.bits == 16:
                return from_bits(high + where(equal(high & 0x7FFF0000, 0), maximum(low, 0), low))
            word = high + (low << 8)
            return from_bits(where(equal(word & 0x7FFF8000, 0), word, word - 0x8000))
        high = words.pattern(parts[""])
        offset = low if self.bits == 16 else low - 128
        wide = ((high & 0x7FFF) << self.bits) + offset
        return from_bits(bits(words.narrow_f16(wide, self.bits)) | ((high & 0x8000) << 16))

    def bound(self, param: DType) -> Bound:
        if param is bf16 and self.bits == 16:
            valid = "every f32 but NaN, whose payload is lost"
            return Bound(0.0, "value", valid, largest=param.largest)
        kept, random = param.mantissa + self.bits, self.noise_bits(param) > 0
        value = 0.0 if kept > 23 else 2.0 ** -(kept if random else kept + 1)
        step = param.lowest - kept - (0 if random else 1)
        top = "2^128 (1 - 2^-17)" if param is bf16 else "2^16 (1 - 2^-20)"
        valid = f"2^{param.lowest} <= |x| < {top}; absolute 2^{max(step, -150)} below, Inf above"
        return Bound(value, "value", valid, absolute=2.0**step, largest=param.largest)

    def findings(self, param: DType) -> list[FormatFinding]:
        return [] if self.bits == 16 or self.noise_bits(param) else _smallest_steps(param)


def _smallest_steps(param: DType) -> list[FormatFinding]:
    """Return the note about the smallest steps that a weight of 8 further bits makes."""
    least = f"2^-{param.mantissa + 9}"
    return [("L11", "note", f"steps smaller than about {least} of a weight do not move it; fp32 itself stops at 2^-24")]


@dataclass(frozen=True)
class SplitFp8(Placed, Master):
    """Weights of which layers see 8 bits, under a power of two per 64 neighbours of a row, and 16 more bits of each.

    For parameters that `optgen.fp8_weights` has made.  The code is the nearest, half away from 0; the further bits are
    what the magnitude is above its, in 2^-16 of its last place.  All are made anew of the new weight, so a scale that
    moves changes no weight: encoding what was decoded gives the same number.  Other 16-bit parameters are kept as by
    Split(16).

    kind  "e4m3" or "e5m2"
    """

    kind: fp8.FloatKind = "e4m3"
    rounding = "nearest"

    def __post_init__(self) -> None:
        check_words(self, kind=get_args(fp8.FloatKind))

    def __str__(self) -> str:
        return "and 16 more bits"

    @property
    def params(self) -> tuple[DType, ...]:
        return bf16, f16, self.codes

    @property
    def codes(self) -> DType:
        """The dtype that stands for these parameters: of one byte, another one for each kind."""
        return u8 if self.kind == "e4m3" else i8

    def fields(self, param: DType) -> dict[str, Field]:
        if param is not self.codes:
            return Split(16).fields(param)
        return {"": Field(param), "scale": Field(u8, per=SHARING, nonneg=True), "low": Field(i16)}

    def encode(self, x: Num, param: DType, *, noise: Noise | None = None) -> dict[str, Num]:
        if param is not self.codes:
            return Split(16).encode(x, param)
        largest = fp8.numbers(self.kind)[-1]
        scale = power(block_max(bits(abs(x)), SHARING), largest)  # of integers: a NaN is larger than Inf
        inverse = from_bits(maximum((254 - scale) << 23, 1 << 22))  # 2^(127 - scale); 2^-127 is no normal number
        size = minimum(abs(x) * inverse, largest)
        made = fp8.code(self.kind, x, from_bits(bits(size) + 1))  # halves, made a place larger, are rounded up
        code = where(equal(scale, NO_SCALE), 0x7F, made)
        visible = fp8.widen(self.kind, made & 0x7F)
        units = (size - visible) / from_bits(self._unit(visible))
        low = where(equal(scale, NO_SCALE), 0, cast(floor(clip(units, -32768.0, 32767.0) + 0.5), i32))
        return {"": cast(code, param), "scale": cast(scale, u8), "low": cast(low, i16)}

    def decode(self, parts: Mapping[str, Num], param: DType) -> Num:
        if param is not self.codes:
            return Split(16).decode(parts, param)
        scale, code = cast(parts["scale"], i32), cast(parts[""], i32)
        visible = fp8.widen(self.kind, code & 0x7F)
        power = where(equal(scale, NO_SCALE), words.NAN, maximum(scale << 23, 1 << 22))
        low = cast(cast(parts["low"], i32), f32)
        size = (visible + low * from_bits(self._unit(visible))) * from_bits(power)
        return from_bits(bits(size) | ((code & 0x80) << 24))

    def _unit(self, visible: Num) -> Num:
        """Return the pattern of 2^-16 of the last place of a float of 8 bits."""
        mantissa, lowest = (3, -6) if self.kind == "e4m3" else (2, -14)
        return (maximum((bits(visible) >> 23) & 0xFF, 127 + lowest) - (mantissa + 16)) << 23

    def bound(self, param: DType) -> Bound | None:
        if param is not self.codes:
            return Split(16).bound(param)
        largest = fp8.numbers(self.kind)[-1]
        place = largest - fp8.numbers(self.kind)[-2]
        valid = f"largest |x| of {SHARING} neighbours of a row at least {largest:g} * 2^-126"
        low, high = largest * 2.0**-126, 0.875 * 2.0**128
        return Bound(place * 2.0**-16 / largest, "largest", valid, low=low, high=high, excess=1.0)

    def describe(self, param: DType) -> str:
        return f"{self.kind if param is self.codes else param.name} {self}"

    def enclose(self, x: Any, param: DType) -> Any:
        return x.unknown() if param is self.codes else super().enclose(x, param)


@dataclass(frozen=True)
class Ecc8(Master):
    """FlashOptim's 24-bit weight: round-to-nearest and the error in 1/127 of half an ulp, as code + 128.

    For its checkpoints and results only: not idempotent, and updates under 2^-9 ulp are lost.
    """

    def __str__(self) -> str:
        return "and its rounding error in 1/254 ulp (FlashOptim)"

    def fields(self, param: DType) -> dict[str, Field]:
        return {"": Field(param), "low": Field(u8, zero=128)}

    @staticmethod
    def _exponent(weight: Num, param: DType) -> Num:
        """log2 of half an ulp of the weight, i32."""
        smallest = 1 if param is bf16 else 127 - 14
        biased = maximum((bits(weight) >> 23) & 0xFF, smallest)
        return biased - (127 + (7 if param is bf16 else 10) + 1)

    @staticmethod
    def _scaled(x: Num, exponent: Num) -> Num:
        """x * 2^exponent, in two steps that neither overflow nor underflow."""
        part = exponent >> 1
        return x * from_bits((part + 127) << 23) * from_bits((exponent - part + 127) << 23)

    def encode(self, x: Num, param: DType, *, noise: Noise | None = None) -> dict[str, Num]:
        kept = words.narrow(x, param)
        weight = words.widen(kept, param)
        error = x - weight
        error = where(equal(error, error), error, 0.0)  # Inf - Inf
        units = clip(self._scaled(error, 0 - self._exponent(weight, param)), -1.0, 1.0) * 127.0
        size = floor(abs(units) + 0.5)
        code = cast(where(units < 0, -size, size), i32)
        return {"": kept, "low": cast(code + 128, u8)}

    def decode(self, parts: Mapping[str, Num], param: DType) -> Num:
        weight = words.widen(parts[""], param)
        code = cast(cast(parts["low"], i32), f32) - 128.0
        return weight + self._scaled(code / 127.0, self._exponent(weight, param))

    def bound(self, param: DType) -> Bound:
        # Half an ulp in 254 parts, rounded; just below a power of two the ulp is that of the binade above.
        value = 2.0 ** -(param.mantissa + 1) / 254
        slack = value * 2.0**-param.mantissa + 2 * ROUNDOFF
        least = (value + slack) * param.normal + 2.0**-148
        return Bound(value, "value", "normal values", slack, absolute=least, largest=param.largest)

    def findings(self, param: DType) -> list[FormatFinding]:
        return _smallest_steps(param)
