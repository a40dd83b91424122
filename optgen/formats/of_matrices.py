"""The format of a matrix state in 8 bits: torch encodes and decodes it around functions of whole matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optgen.formats.bound import ROUNDOFF, Bound
from optgen.formats.companders import Compander, largest_error, linear, softsign
from optgen.formats.format import Field, Format, Noise, Rounding, View
from optgen.lang.values import Num
from optgen.ops import dtypes

OCTAVES = 32
"""Octaves over which the roots of a block may lie (runtime/reference/matrix_codecs.py)."""

BLOCK = 64  # as optgen.runtime.records.MATRIX_BLOCK


@dataclass(frozen=True)
class OfMatrix(Format):
    """A matrix of a trait, or of low rank, in 8-bit blocks of 64 (runtime/reference/matrix_codecs.py).

    No kernel reads one: programs see fp32.

    trait  "symmetric": the diagonal is fp32; entries below it over the roots of both diagonal ones.
           "triangular": the diagonal is fp32; entries above it over that of their row.
           "orthogonal": every entry is coded.
           "low_rank": of either sign, over the root of the second moment that the state is normalized by, if any.
           "low_rank_nonneg": the second moment
    """

    trait: str
    rounding: Rounding = "nearest"

    def __str__(self) -> str:
        if self.trait == "low_rank_nonneg":
            return f"8-bit unsigned blocks of {BLOCK}: sqrt between 16-bit minimum and maximum, pseudo-log, stochastic"
        over = {"symmetric": "roots of an fp32 diagonal", "triangular": "its row's fp32 diagonal entry",
                "low_rank": "root of its second moment, if it has one"}  # fmt: skip
        what = f", over {over[self.trait]}" if self.trait in over else ""
        return f"8-bit signed blocks of {BLOCK}: {self.curve}, ue8m8 scale{what}, {self.rounding}"

    @property
    def curve(self) -> Compander:
        """The curve that signed codes follow."""
        return linear if self.trait in ("symmetric", "orthogonal") else softsign(1)

    @property
    def bytes_per_param(self) -> float:
        """The bytes of an entry of a large matrix."""
        half = self.trait in ("symmetric", "triangular")
        return (1 + (4 if self.trait == "low_rank_nonneg" else 2) / BLOCK) * (0.5 if half else 1)

    def fields(self) -> dict[str, Field]:
        return {"": Field(dtypes.f32)}

    def encode(self, x: Num, *, noise: Noise | None = None, root: Num | None = None) -> dict[str, Num]:
        return {"": x}

    def decode(self, parts: Mapping[str, Num], *, root: Num | None = None) -> Num:
        return parts[""]

    def keeps_zero(self) -> bool:
        return True

    def bound(self) -> Bound:
        more = {
            "symmetric": "times the roots of both diagonal entries, which are exact; scale <= 1.004 if it is positive",
            "triangular": "times the diagonal entry of the row, which is exact",
            "orthogonal": "of a code; |Q'Q - I| = 0.017 measured, 64 to 3072 columns",
            "low_rank": "times the root of the second moment as it reads, where there is one",
        }
        if self.trait == "low_rank_nonneg":
            valid = f"for a block whose roots span {OCTAVES} octaves, less for fewer; what is further below the largest"
            return Bound(OCTAVES / 255, "root", f"{valid}, or below 2^-63, reads as that", slack=2.0**-15)
        value = largest_error(self.curve, (1 << 7) - 1, self.rounding == "stochastic")
        return Bound(value, "scale", more[self.trait], slack=8 * ROUNDOFF)

    def enclose(self, x: Any, view: View, root: Any = None) -> Any:
        return x.unknown()


NEAREST = {trait: OfMatrix(trait) for trait in ("symmetric", "triangular", "orthogonal")}
"""Trait of a matrix state -> its format in 8 bits under plans that round to nearest; others are fp32: to nearest,
averages of low rank would stand still."""

MATRICES = NEAREST | {x: OfMatrix(x, "stochastic") for x in ("triangular", "low_rank", "low_rank_nonneg")}
"""The same under other plans."""
