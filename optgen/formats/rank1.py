"""Codes under one scale per element: the smaller of the largest magnitudes of its row and its column."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from optgen.formats import narrow, words
from optgen.formats.bound import ROUNDOFF, Bound
from optgen.formats.check import check_block, check_words
from optgen.formats.coded import Coded
from optgen.formats.format import Field, Format, Noise, View
from optgen.formats.scales import LARGEST, SMALLEST
from optgen.lang.reductions import col_max, row_max
from optgen.lang.spec import MatrixKind
from optgen.lang.values import Num, bits, cast, clip, floor, from_bits, maximum, minimum
from optgen.ops import dtypes


@dataclass(frozen=True)
class Rank1(Coded):
    """One code of b bits per element of a nonnegative state, one f32 per row and column: the smaller of an element's
    is its scale.  x = scale * code / N, with codes 1 to N = 2^b: what is below the first one reads as it.

    A row's or column's number is the largest of its elements, so that no element exceeds its scale.  It is known only
    after all of the tensor was read: one more sweep.

    bits      b, 2 to 8; codes of fewer than 8 bits are packed (narrow.py)
    vectors   block size: a tensor without rows and columns has one f32 scale for as many neighbours

    A tensor of more than two dimensions is the matrix of its first dimension against the rest.  In a rule that has rows
    and columns of its own, and beside factored states, it is a stack of matrices, each with rows and columns of its
    own.  An element that is NaN makes NaN of its row and column.  An infinite one stays infinite or becomes NaN, and no
    other with it, but where rows and columns of several infinite ones meet.
    """

    bits: int = 4
    vectors: int = 128
    in_blocks: bool = False  # of a tensor without rows and columns

    signed = False
    positive = True

    def __post_init__(self) -> None:
        check_block("Rank1", self.bits, self.vectors, self.loc, 2)
        check_words(self)

    def __str__(self) -> str:
        scale = f"blocks of {self.vectors}" if self.in_blocks else "under the smaller of its row's and column's maxima"
        return f"{self.bits}-bit unsigned {scale}: linear, no zero, fp32 scale, nearest"

    @property
    def codes(self) -> int:
        """N, what the scale itself is stored as, plus 1."""
        return 1 << self.bits

    @property
    def matrix(self) -> MatrixKind | None:
        return None if self.in_blocks else "first"

    def of_vectors(self) -> Format:
        return replace(self, in_blocks=True)

    @property
    def block(self) -> int:
        return self.vectors if self.in_blocks else 1

    def fields(self) -> dict[str, Field]:
        codes = narrow.fields(self.bits)
        if self.in_blocks:
            return codes | {"scale": Field(dtypes.f32, self.vectors, nonneg=True)}
        row = Field(dtypes.f32, space="row", nonneg=True)
        return codes | {"row": row, "col": Field(dtypes.f32, space="col", nonneg=True)}

    def encode(self, x: Num, *, noise: Noise | None = None, root: Num | None = None) -> dict[str, Num]:
        if self.in_blocks:
            top = maximum(from_bits(words.block_top(bits(abs(x)), self.vectors)), SMALLEST)
            scales = {"scale": top}
        else:
            row_top = maximum(row_max(x), SMALLEST)
            col_top = maximum(col_max(x), SMALLEST)
            scales = {"row": row_top, "col": col_top}
        return narrow.cut(self._code(x, self._scale(scales)), self.bits) | scales

    def _scale(self, parts: Mapping[str, Num]) -> Num:
        return parts["scale"] if self.in_blocks else minimum(parts["row"], parts["col"])

    def _code(self, value: Num, scale: Num) -> Num:
        """The rounded code as it is stored, i32."""
        # Where an infinity meets itself it gets the last code; a NaN gets any.
        divisor = minimum(scale, LARGEST)
        exact = (value / divisor) * float(self.codes)
        exact = clip(exact, 1.0, float(self.codes))
        return -1 - cast(floor(0.5 - exact), dtypes.i32)  # a tie goes to the lower code, as in the paper

    def number_of(self, parts: Mapping[str, Num]) -> Num:
        scale = self._scale(parts)
        code = cast(narrow.joined(parts, self.bits), dtypes.f32)
        code = code + 1.0
        # The last code is the scale itself, exactly: no second rounding makes a maximum grow.
        return (code * (1.0 / self.codes)) * scale

    # -- what is known of the error

    def bound(self) -> Bound:
        if self.in_blocks:
            scale = "the largest |x| of the block"
        else:
            scale = "the smaller of the largest |x| of its row and its column"
        valid = f"scale = {scale}, at least {SMALLEST:.3g}"
        # Down to 0 is a whole code; three roundings on the way there, three on the way back.
        return Bound(1 / self.codes, "scale", valid, 8 * ROUNDOFF, low=SMALLEST)

    def top(self, magnitude: Any, view: View) -> Any:
        return super().top(magnitude, view) if self.in_blocks else view.of_lines(magnitude)

    def stuck(self, decay: float) -> tuple[int, float, str]:
        kept = [c for c in range(1, self.codes + 1) if c == 1 or decay * c > c - 0.5]  # a tie goes to the lower code
        return len(kept), max(kept, default=0) / self.codes, "scale"

    def cell(self) -> float:
        return 1.0

    def keeps_zero(self) -> bool:
        return False
