"""What formats share that count cells of a pseudo-logarithm: the bit pattern of a positive f32, read as an integer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from optgen.formats.coded import NOISE_BITS
from optgen.formats.format import Format, Rounding


@dataclass(frozen=True)
class PseudoLog(Format):
    """Codes of nonnegative values, which are encoded from +0 on and never read as 0; subclasses have a `rounding`."""

    @property
    def signed(self) -> bool:
        return False

    @property
    def plus_zero(self) -> bool:
        return True

    @property
    def positive(self) -> bool:
        return True

    @property
    def still(self) -> bool:
        # Cells move only where a block comes to span another number of units, a few times in a run at most.
        return True

    def rounded(self, rounding: Rounding) -> Format:
        changed: Any = self  # the field is a subclass's
        made: Format = replace(changed, rounding=rounding)
        return made

    @property
    def noise_bits(self) -> int:
        return NOISE_BITS if self.rounding in ("stochastic", "auto") else 0


__all__ = ["PseudoLog"]
