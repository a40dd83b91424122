"""States kept as floats: f32, bf16, f16."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from optgen.formats import words
from optgen.formats.bound import Bound
from optgen.formats.check import Placed, check_words, refusal
from optgen.formats.format import Field, Format, FormatFinding, Noise, Rounding
from optgen.lang.values import Num
from optgen.ops import dtypes
from optgen.ops.dtypes import DType


@dataclass(frozen=True)
class Float(Placed, Format):
    """One float per element.

    Rounds half to even or stochastically; relative error 2^-8 (bf16), 2^-11 (f16, normal values) to nearest,
    twice that stochastically.  NaN and Inf stay in their element.  bf16 has the range of f32; f16 turns
    |x| >= 65520 into Inf and has an absolute step of 2^-24 below 2^-14.
    """

    dtype: DType
    rounding: Rounding = "nearest"

    still = True
    is_float = True

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, DType) or self.dtype not in (dtypes.f32, dtypes.bf16, dtypes.f16):
            raise refusal(self.loc, f"Float({self.dtype!r})", "floats.f32, floats.bf16 or floats.f16")
        check_words(self)

    def __str__(self) -> str:
        return self.dtype.name if self.noise_bits == 0 else f"{self.dtype.name}, stochastic"

    def rounded(self, rounding: Rounding) -> Format:
        return self if self.dtype is dtypes.f32 else replace(self, rounding=rounding)

    @property
    def noise_bits(self) -> int:
        return 0 if self.rounding == "nearest" else words.noise_bits(self.dtype)

    def fields(self) -> dict[str, Field]:
        return {"": Field(self.dtype)}

    def encode(self, x: Num, *, noise: Noise | None = None, root: Num | None = None) -> dict[str, Num]:
        return {"": words.narrow(x, self.dtype, noise)}

    def decode(self, parts: Mapping[str, Num], *, root: Num | None = None) -> Num:
        return words.widen(parts[""], self.dtype)

    # -- what is known of the error

    def bound(self) -> Bound:
        return rounding_to(self.dtype, self.noise_bits > 0)

    def stuck(self, decay: float) -> tuple[int, float, str]:
        # Stuck are mantissas m / 2^s, m in [2^s, 2^(s+1)), with (1 - decay) m <= 1/2.
        first = 1 << self.dtype.mantissa
        count = sum((1 - decay) * m <= 0.5 for m in range(first, 2 * first))
        return count, float(count > 0), "value"

    def cell(self) -> float:
        return 2.0**-self.dtype.mantissa

    def keeps_zero(self) -> bool:
        return True

    @property
    def exact(self) -> bool:
        return self.dtype is dtypes.f32

    def findings(self, nonneg: bool) -> list[FormatFinding]:
        if self.dtype is not dtypes.f16:
            return []
        return [("L5", "error", "f16 turns moments beyond 65504 into Inf and those under 2^-25 into 0")]


_RANGES = {
    "bf16": "2^-126 <= |x| < 2^128 (1 - 2^-9); absolute 2^-134 below",
    "f16": "2^-14 <= |x| < 65520; absolute 2^-25 below, Inf above",
}


def rounding_to(dtype: DType, random: bool) -> Bound:
    """Return the bound of rounding an f32 to a float type, half to even or stochastically."""
    if dtype is dtypes.f32:
        return Bound(0.0, "value", "every f32")
    # Half an ulp above a power of two: 2^-(stored + 1) of 1 + 2^-(stored + 1); stochastically a whole one.
    half = 2.0 ** -(dtype.mantissa + 1)
    return Bound(
        2 * half if random else half / (1 + half), "value", _RANGES[dtype.name],
        # Below the normal numbers the step stays what it is at the smallest of them.
        absolute=dtype.normal * (2 * half if random else half), largest=dtype.largest,
    )  # fmt: skip


f32 = Float(dtypes.f32)
bf16 = Float(dtypes.bf16)
f16 = Float(dtypes.f16)
bf16_auto = Float(dtypes.bf16, "auto")
