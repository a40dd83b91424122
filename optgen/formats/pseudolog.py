"""The part that formats share which count cells of a pseudo-logarithm: the bit pattern of a positive f32, read as an
integer."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from optgen.formats.coded import Coded
from optgen.formats.format import Noise, View
from optgen.lang.values import Num, maximum, minimum, where
from optgen.ops.dtypes import of_pattern

INFINITE = "; all of a block with an Inf reads as Inf, so that all of its steps become 0, in fp32 those of one element"


@dataclass(frozen=True)
class PseudoLog(Coded):
    """Codes of the roots of nonnegative values, which are encoded from +0 on and never read as 0."""

    of = "sqrt"
    signed = False
    plus_zero = True
    positive = True
    still = True  # cells move only where a block comes to span another number of units, a few times in a run at most

    @abstractmethod
    def _encode(self, x: Num, noise: Noise | None) -> tuple[dict[str, Num], *tuple[Num, ...]]:
        """Return the fields' contents, and what else `encode_root` needs."""

    def encode(self, x: Num, *, noise: Noise | None = None, root: Num | None = None) -> dict[str, Num]:
        return self._encode(x, noise)[0]

    # -- what is known of the error

    def stuck(self, decay: float) -> tuple[int, float, str]:
        return 1 << self.bits, 1.0, "value"  # unsigned: never a signed average's format

    def keeps_zero(self) -> bool:
        return False

    @property
    @abstractmethod
    def highest(self) -> int:
        """The pattern of the largest kept number that is told from larger ones."""

    def finite(self, x: Any, view: View) -> tuple[Any, Any]:
        """Return where a block of the interval x is not finite, and x with ones there."""
        top = view.largest(x.magnitude(), self.block)
        lost = ~(top < math.inf)
        return lost, x.spanning(where(lost, 1.0, x.lo), where(lost, 1.0, x.hi))

    def spread(self, x: Any, lost: Any, relative: Any, least: Any) -> Any:
        """Return the interval of what the kept numbers x may read as, off by `relative` and at most raised to `least`;
        nothing is known where they are `lost`."""
        low = minimum(x.lo, of_pattern(self.highest)) * (1 - relative)
        high = maximum(x.hi * (1 + relative), least)
        kept = x.spanning(where(lost, math.nan, low.clamp(min=0)), where(lost, math.nan, high))
        return kept * kept


BEND = 1 - 1 / math.log(2) - math.log2(math.log(2))
"""The largest log2(1 + f) - f of a mantissa 1 + f: a pattern counts octaves to within it."""


def tenths(octaves: float) -> float:
    """Return a number of octaves cut to a tenth."""
    return math.floor(10 * octaves) / 10
