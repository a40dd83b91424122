"""What formats share whose codes count in units of a scale."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from optgen.formats import narrow
from optgen.formats.format import Format, Rounding
from optgen.lang.values import Num, sqrt

NOISE_BITS = 12
"""What a code of 8 bits or fewer draws where it is rounded stochastically."""

HALF = 0.5 - 2.0**-10
"""What code 0 reads as where it must not be 0: safely on its own side of the next code."""


@dataclass(frozen=True)
class Coded(Format):
    """Codes of 8 bits or fewer under a scale.  Which scale is the subclasses'; so are the fields

    bits      of a code; codes of fewer than 8 are packed (narrow.py)
    of        "sqrt" keeps the root of a nonnegative value
    relative  keeps x / root, root being that of the rule's second moment as kept
    rounding  to nearest, or stochastic
    """

    @property
    def bits(self) -> int:
        return 8

    @property
    def of(self) -> Literal["value", "sqrt"]:
        return "value"

    def rounded(self, rounding: Rounding) -> Format:
        return self._with(rounding=rounding)

    def absolute(self) -> Format:
        return self._with(relative=False)

    def _with(self, **fields: object) -> Format:
        changed: Any = self  # the fields are those of a subclass
        made: Format = replace(changed, **fields)
        return made

    @property
    def noise_bits(self) -> int:
        return NOISE_BITS if self.rounding in ("stochastic", "auto") else 0

    @property
    def described(self) -> tuple[str, str]:
        """What of a value is counted, and how it is rounded, in words."""
        what = ("sqrt, " if self.of == "sqrt" else "") + ("relative, " if self.relative else "")
        return what, "stochastic" if self.noise_bits else "nearest"

    def code(self, parts: Mapping[str, Num]) -> Num:
        return narrow.joined(parts, self.bits)

    def counted(self, x: Num, root: Num | None) -> Num:
        """What of x is divided by the scale."""
        if self.of == "sqrt":
            return sqrt(x / root if self.relative else x)
        return x / root if self.relative else x

    @abstractmethod
    def times_scale(self, parts: Mapping[str, Num]) -> Num:
        """What was divided by the scale, as it is kept."""

    def decode(self, parts: Mapping[str, Num], *, root: Num | None = None) -> Num:
        value = self.times_scale(parts)
        if self.of == "sqrt":
            return value * value
        return value * root if self.relative else value

    def decode_root(self, parts: Mapping[str, Num]) -> Num:
        return self.times_scale(parts) if self.of == "sqrt" else super().decode_root(parts)


__all__ = ["HALF", "NOISE_BITS", "Coded"]
