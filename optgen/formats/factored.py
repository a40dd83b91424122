"""A nonnegative matrix kept as the means of its rows and columns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optgen.formats.bound import Bound
from optgen.formats.check import Placed, refusal
from optgen.formats.floats import f32
from optgen.formats.format import Field, Format, Noise, View
from optgen.lang.reductions import col_mean, mat_mean, row_mean
from optgen.lang.values import Num, maximum, minimum
from optgen.ops import dtypes

LOWEST = 2.0**-100  # what is kept of a row or column of zeros: fresh ones have 0
SMALLEST_NORMAL = 2.0**-126


@dataclass(frozen=True)
class Factored(Placed, Format):
    """One f32 per row and per column of the last two dimensions, leading ones a batch: x = row * column.

    A column's number is its mean, a row's is its mean over that of all rows.  No bytes per element, and no bound for
    one: what is kept, up to rounding, are the means of rows and columns, and the mean of an average is the average of
    the means.  Rows of less than 2^-100 of the mean of all are raised to that, columns to 2^-100, and what is read to
    2^-126: an encoded value is never 0.  A NaN, or a sum beyond the range of f32, makes its whole matrix NaN.

    The rule goes on with the new value as it computed it: an average has at least (1 - decay) * g^2 for every element,
    so that no gradient meets a root far smaller than itself.

    vectors  the format where a tensor has no rows and columns
    """

    vectors: Format = f32

    signed = False
    positive = True
    matrix = "last"

    def __post_init__(self) -> None:
        if not isinstance(self.vectors, Format) or self.vectors.matrix is not None:
            want = "a format that needs no rows and columns: it is for tensors that have none"
            raise refusal(self.loc, f"Factored(vectors={self.vectors})", want)

    def __str__(self) -> str:
        return "means of rows and columns, f32"

    def of_vectors(self) -> Format:
        return self.vectors

    def fields(self) -> dict[str, Field]:
        return {"row": Field(dtypes.f32, space="row", nonneg=True), "col": Field(dtypes.f32, space="col", nonneg=True)}

    def code(self, parts: Mapping[str, Num]) -> Num:
        return self.decode(parts)

    def encode(self, x: Num, *, noise: Noise | None = None, root: Num | None = None) -> dict[str, Num]:
        row_means = row_mean(x)
        row_factor = maximum(row_means / maximum(mat_mean(row_means), SMALLEST_NORMAL), LOWEST)
        col_factor = maximum(col_mean(x), LOWEST)
        return {"row": row_factor, "col": col_factor}

    def decode(self, parts: Mapping[str, Num], *, root: Num | None = None) -> Num:
        # 0 for a fresh state alone, whose rows are 0.
        least = minimum(parts["row"], SMALLEST_NORMAL)
        return maximum(parts["row"] * parts["col"], least)

    def bound(self) -> Bound:
        least = f"2^{math.log2(LOWEST):g}"
        return Bound(
            math.inf, "value",
            f"the means of rows and columns are kept, to rounding: rows of at least {least} of the mean of all, "
            f"columns of at least {least}",
        )  # fmt: skip

    def enclose(self, x: Any, view: View, root: Any = None) -> Any:
        return self.decode(self.encode(x))  # the same formulas, read on intervals
