"""The format of a matrix state in 8 bits: torch encodes and decodes it around functions of whole matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optgen.formats.bound import ROUNDOFF, Bound
from optgen.formats.format import Field, Format, Noise, View
from optgen.lang.values import Num
from optgen.ops import dtypes

BLOCK = 64  # as optgen.runtime.records.MATRIX_BLOCK


@dataclass(frozen=True)
class OfMatrix(Format):
    """A symmetric or orthogonal matrix in 8-bit blocks of 64, to nearest (runtime/reference/matrix_codecs.py).

    No kernel reads one: programs see fp32.

    trait  "symmetric": the diagonal is fp32; entries below it over the roots of both diagonal ones.
           "orthogonal": every entry is coded
    """

    trait: str

    def __str__(self) -> str:
        what = ", over roots of an fp32 diagonal" if self.trait == "symmetric" else ""
        return f"8-bit signed blocks of {BLOCK}: linear, ue8m8 scale{what}, nearest"

    @property
    def bytes_per_param(self) -> float:
        """The bytes of an entry of a large matrix."""
        return (1 + 2 / BLOCK) * (0.5 if self.trait == "symmetric" else 1)

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
            "orthogonal": "of a code; |Q'Q - I| = 0.017 measured, 64 to 3072 columns",
        }
        return Bound(0.5 / ((1 << 7) - 1), "scale", more[self.trait], slack=8 * ROUNDOFF)

    def enclose(self, x: Any, view: View, root: Any = None) -> Any:
        return x.unknown()


MATRICES = {trait: OfMatrix(trait) for trait in ("symmetric", "orthogonal")}
"""Trait of a matrix state -> its format in 8 bits; others are fp32."""
