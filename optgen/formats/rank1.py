"""Codes under one scale per element: the smallest of the largest magnitudes that its indices have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from optgen.base import loc as locs
from optgen.base.loc import Loc
from optgen.formats import narrow
from optgen.formats.bound import Bound
from optgen.formats.check import A_COMPANDER, check_block, check_part, check_words
from optgen.formats.coded import Curved
from optgen.formats.companders import HALF, Compander, linear
from optgen.formats.format import Field, Format, Noise, Rounding, View
from optgen.formats.scales import LARGEST, SMALLEST
from optgen.lang.reductions import axis_max, axis_min, col_max, row_max
from optgen.lang.spec import MatrixKind
from optgen.lang.values import Num, bits, block_max, cast, clip, floor, from_bits, maximum, minimum, rint
from optgen.ops import dtypes

SMALLEST_ROOT = 2.0**-54  # half a code of it, squared, is a normal f32


@dataclass(frozen=True)
class Rank1(Curved):
    """One code of b bits per element, one f32 per index of each dimension: the smallest of an element's is its scale.

    An index's number is the largest magnitude of the elements that have it (of a matrix, of a row or a column), so that
    no element exceeds its scale.  It is known only after all of the tensor was read: one more sweep.

    bits      b, 2 to 8; codes of fewer than 8 bits are packed (narrow.py)
    signed    N = 2^(b-1) - 1, stored as code + 2^(b-1), 0 exactly; unsigned: see `zero`
    of        "sqrt" keeps the root of a nonnegative value
    relative  keeps x / root, root being that of the rule's second moment as kept
    rounding  stochastic: E[code] = N * curve(x / scale), but below the lowest code of "free"
    zero      unsigned only.  "free": codes 1 to N = 2^b, none of them 0: what is below the first one reads as it;
              "half": codes 0 to N = 2^b - 1, and 0 reads as half a code; "keep": as 0
    vectors   block size: a tensor without rows and columns has one f32 scale for as many neighbours

    Stored are `row`, the numbers of dimension 0, and `col`, those of all others side by side; dimensions of one index
    have none.  In a rule that has rows and columns of its own, and beside factored states, a tensor of more than two
    dimensions is a stack of matrices, each with rows and columns of its own.  An element that is NaN makes NaN of all
    that shares an index with it.  An infinite one stays infinite or becomes NaN, and no other with it, but where
    indices of several infinite ones meet.
    """

    bits: int = 4
    compander: Compander = linear
    signed: bool = False
    of: Literal["value", "sqrt"] = "value"
    relative: bool = False
    rounding: Rounding = "auto"
    zero: Literal["free", "half", "keep"] = "free"
    vectors: int = 128
    in_blocks: bool = False  # of a tensor without rows and columns
    loc: Loc | None = field(default_factory=lambda: locs.here(2), compare=False, repr=False)

    def __post_init__(self) -> None:
        check_block("Rank1", self.bits, self.vectors, self.loc, 2)
        check_words(self, of=("value", "sqrt"), zero=("free", "half", "keep"))
        check_part(self, "compander", Compander, A_COMPANDER)

    def __str__(self) -> str:
        what, how = self.described
        sign = "signed" if self.signed else "unsigned"
        scale = f"blocks of {self.vectors}" if self.in_blocks else "under the smallest of its indices' maxima"
        free = ", no zero" if self._free else ""
        return f"{self.bits}-bit {sign} {scale}: {what}{self.compander}{free}, fp32 scale, {how}"

    @property
    def codes(self) -> int:
        """N, what the scale itself is stored as."""
        if self.signed:
            return (1 << (self.bits - 1)) - 1
        return (1 << self.bits) - (0 if self._free else 1)

    @property
    def bias(self) -> int:
        """The number that is added to a code where it is stored."""
        if self.signed:
            return 1 << (self.bits - 1)
        return -1 if self._free else 0

    @property
    def _free(self) -> bool:
        return self.zero == "free" and not self.signed

    @property
    def lowest(self) -> float:
        """The smallest scale of an encoded tensor."""
        return SMALLEST_ROOT if self.of == "sqrt" else SMALLEST

    @property
    def positive(self) -> bool:
        if self.signed or self.zero == "keep":
            return False
        least = self.lowest * float(self.compander.inverse((1 if self._free else HALF) / self.codes))
        return (least * least if self.of == "sqrt" else least) >= 2.0**-126

    @property
    def matrix(self) -> MatrixKind | None:
        return None if self.in_blocks else "first"

    def of_vectors(self) -> Format:
        return replace(self, in_blocks=True)

    @property
    def block(self) -> int:
        return self.vectors if self.in_blocks else 1

    def fields(self) -> dict[str, Field]:
        codes = narrow.fields(self.bits, max(self.bias, 0))
        if self.in_blocks:
            return codes | {"scale": Field(dtypes.f32, self.vectors, nonneg=True)}
        row = Field(dtypes.f32, space="row", nonneg=True)
        return codes | {"row": row, "col": Field(dtypes.f32, space="axis", nonneg=True)}

    def encode(self, x: Num, *, noise: Noise | None = None, root: Num | None = None) -> dict[str, Num]:
        value = self.counted(x, root)
        magnitude = abs(value) if self.signed or self.in_blocks else value
        if self.in_blocks:
            top = maximum(from_bits(block_max(bits(magnitude), self.vectors)), self.lowest)
            scales = {"scale": top}
        else:
            row_top = maximum(row_max(magnitude), self.lowest)
            col_top = maximum(axis_max(col_max(magnitude)), self.lowest)
            scales = {"row": row_top, "col": col_top}
        return narrow.cut(self._code(value, self._scale(scales), noise), self.bits) | scales

    def _scale(self, parts: Mapping[str, Num]) -> Num:
        return parts["scale"] if self.in_blocks else minimum(parts["row"], axis_min(parts["col"]))

    def _code(self, value: Num, scale: Num, noise: Noise | None) -> Num:
        """The rounded code as it is stored, i32."""
        # Where an infinity meets itself it gets the last code; a NaN gets any.
        divisor = minimum(scale, LARGEST)
        if self.compander == linear:
            exact = (value / divisor) * float(self.codes)
        else:
            exact = self.compander.encode(value, divisor, self.codes, signed=self.signed)
        least = -float(self.codes) if self.signed else 1.0 if self._free else 0.0
        exact = clip(exact, least, float(self.codes))
        if noise is None and self._free:
            return self.bias - cast(floor(0.5 - exact), dtypes.i32)  # a tie goes to the lower code, as in the paper
        if noise is None:
            return cast(rint(exact), dtypes.i32) + self.bias
        # As in Blocked: n bits of fraction at the end of the pattern, where the noise is added.
        pattern = bits(exact + (1.5 * 2.0 ** (23 - noise.bits) + self.bias))
        return (pattern + noise.integer()) >> noise.bits

    def times_scale(self, parts: Mapping[str, Num]) -> Num:
        scale = self._scale(parts)
        code = cast(narrow.joined(parts, self.bits), dtypes.f32)
        if self.signed:
            code = code - float(self.bias)
        elif self._free:
            code = code + 1.0
        elif self.zero == "half":
            code = maximum(code, HALF)
        if self.compander == linear:
            # The last code is the scale itself, exactly: no second rounding makes a maximum grow.
            return (code * (1.0 / self.codes)) * scale
        return self.compander.decode(code, scale, self.codes, signed=self.signed)

    # -- what is known of the error

    @property
    def below(self) -> float:
        return 0.0 if self.compander == linear else super().below

    def bound(self) -> Bound:
        value, slack = self.error_of_codes()
        if self.in_blocks:
            scale = f"the largest |{self.what}| of the block"
        else:
            scale = f"the smallest of the largest |{self.what}| that each of its indices has"
        valid = f"scale = {scale}, at least {self.lowest:.3g}"
        return self.of_scale(value, "scale", valid, slack, low=self.lowest)

    def top(self, magnitude: Any, view: View) -> Any:
        return super().top(magnitude, view) if self.in_blocks else view.of_indices(magnitude)
