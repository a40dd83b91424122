"""Companders: curves of [0, 1] that decide where codes lie, dense at 0 or evenly.

A curve is encoded and decoded with as few operations as possible: the scale folded in with the number of codes, per
block; one division per element.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from optgen.base import loc as locs
from optgen.formats.check import check_number
from optgen.lang.values import Num

# The last code reads as a hair less than the scale, whatever rounds on the way: encoded again it must not exceed
# the scale, which would then be rounded up to the next one.  Four roundings for a root that was squared.
BELOW = 2.0**-22

# How much denser than those of `linear` codes may lie at 0.
STEEPEST = 2.0**16

HALF = 0.5 - 2.0**-10
"""The value of code 0 in formats that never decode to 0: less than half of the next code."""


@dataclass(frozen=True)
class Compander:
    """n -> (1 + k) n / (1 + k n): codes (1 + k) times denser at 0, (1 + k) times sparser at 1; k = 0: evenly."""

    k: float

    def __str__(self) -> str:
        return "linear" if self.k == 0 else "softsign" if self.k == 1 else f"softsign({self.k:g})"

    def curve(self, n: Num) -> Num:
        """Return the place of n among codes from -1 to 1."""
        return (1 + self.k) * n / (1 + self.k * abs(n)) if self.k else n

    def inverse(self, y: Num) -> Num:
        """Return the number whose place is y."""
        return y / ((1 + self.k) - self.k * abs(y)) if self.k else y

    def encode(self, x: Num, scale: Num, codes: int) -> Num:
        """N * curve(x / scale) for |x| <= scale, f32, before rounding; N = `codes`."""
        if not self.k:
            return x * (float(codes) / scale)
        per_code = 1.0 / (codes * (1 + self.k))
        return x / (scale * per_code + abs(x) * (self.k * per_code))

    def decode(self, code: Num, scale: Num, codes: int) -> Num:
        """scale * inverse(code / N), f32."""
        if not self.k:
            return code * (scale * ((1 - BELOW) / codes))
        bend = abs(code) if self.k == 1 else abs(code) * float(self.k)
        return scale * (code / (float(codes * (1 + self.k)) - bend))


linear = Compander(0)


def softsign(k: float = 1.0) -> Compander:
    """Return the curve n -> (1 + k) n / (1 + k n), 2^-16 <= k <= 2^16."""
    check_number(f"softsign({k!r})", k, 1 / STEEPEST, STEEPEST, "2^-16 <= k <= 2^16", locs.here())
    return Compander(int(k) if float(k).is_integer() else k)


@lru_cache(maxsize=256)
def largest_error(compander: Compander, codes: int, random: bool, half: bool = False) -> float:
    """Return the largest distance between a number in [0, 1] and what its code reads as.

    To nearest a code's cell reaches half a code to both sides, `random` a whole one.  `half`: code 0 reads as half
    a code.  The first cell begins at 0, the last one ends at 1.
    """
    reach, worst = (1.0 if random else 0.5), 0.0
    for code in range(codes + 1):
        kept = float(compander.inverse((HALF if half and code == 0 else code) / codes))
        ends = max(code - reach, 0.0), min(code + reach, codes)
        low, high = (float(compander.inverse(end / codes)) for end in ends)
        worst = max(worst, kept - low, high - kept)
    return worst
