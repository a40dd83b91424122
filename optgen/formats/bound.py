"""The error that a format states."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from optgen.lang.values import where
from optgen.ops.dtypes import f32

ROUNDOFF = 2.0**-24  # half an ulp of f32, relative


@dataclass(frozen=True)
class Bound:
    """|decode(encode(x)) - x| <= (value + slack) * of, wherever `valid` holds.

    value     the error of the code, exact: attained; infinite: nothing is known of a single element, and `valid` says
              what is kept
    of        what it is a multiple of: "scale", "largest" (the scale times the largest number under it), either
              "* root", "value", "root" (then of the root's error)
    valid     the range, in words
    slack     what f32 arithmetic may add to it

    The rest is what an enclosure needs (`Format.enclose`).  Of a multiple of the value:

    absolute  the error of small values
    largest   values beyond it read as infinities

    Of a multiple of the scale, or of the largest number under it:

    low       a largest magnitude below it counts as this one; `strict`: nothing is known of it
    high      of a block with a larger magnitude nothing is known
    excess    the decoded scale is at most (1 + excess) times the one that the block needs
    """

    value: float
    of: str
    valid: str
    slack: float = 0.0
    absolute: float = 0.0
    largest: float = math.inf
    low: float = 0.0
    high: float = f32.largest
    excess: float = 0.0
    strict: bool = False

    @property
    def total(self) -> float:
        return self.value + self.slack

    def __str__(self) -> str:
        return f"{self.value:.3g} of the {self.of}, {self.valid}"

    def within(self, x: Any) -> float:
        """Return the bound under the rounding model of the interval x: fast maths spends more roundings on a code."""
        return self.value + self.slack * float(x.model.roundings)

    def around(self, x: Any, relative: float) -> Any:
        """Return the interval of what x, an interval, may read as where errors are relative."""
        size = x.magnitude()
        return x.widened(where(size == 0, 0.0, (size * relative).clamp(min=self.absolute))).saturated(self.largest)
