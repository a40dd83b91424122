"""The part that formats of codes share: packing, rounding, and bounds in units of a scale."""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from optgen.formats import narrow
from optgen.formats.bound import ROUNDOFF, Bound
from optgen.formats.companders import BELOW, largest_error, steepest
from optgen.formats.format import HIGH, LOW, Format, FormatFinding, Rounding
from optgen.formats.scales import Scale
from optgen.lang.values import Num
from optgen.ops.tables import CELL, EXACT

NOISE_BITS = 12
"""Random bits that a code of 8 bits or fewer draws to be rounded stochastically."""


@dataclass(frozen=True)
class Packed(Format):
    """Codes of 8 bits or fewer; those of fewer than 8 are packed (narrow.py).  Subclasses have the fields

    bits      of a code
    rounding  to nearest, or stochastic
    """

    @property
    def bits(self) -> int:
        return 8

    def rounded(self, rounding: Rounding) -> Format:
        return self._with(rounding=rounding)

    def _with(self, **fields: object) -> Format:
        changed: Any = self  # the fields are those of a subclass
        made: Format = replace(changed, **fields)
        return made

    @property
    def noise_bits(self) -> int:
        return NOISE_BITS if self.rounding in ("stochastic", "auto") else 0

    def code(self, parts: Mapping[str, Num]) -> Num:
        return narrow.joined(parts, self.bits)


@dataclass(frozen=True)
class Coded(Packed):
    """Codes under a scale.  Which scale is the subclasses'; so are the fields

    of        "sqrt" keeps the root of a nonnegative value
    relative  keeps x / root, root being that of the rule's second moment as kept
    """

    def absolute(self) -> Format:
        return self._with(relative=False)

    @property
    def described(self) -> tuple[str, str]:
        """The counted quantity and the rounding, in words."""
        what = ("sqrt, " if self.of == "sqrt" else "") + ("relative, " if self.relative else "")
        return what, "stochastic" if self.noise_bits else "nearest"

    @abstractmethod
    def times_scale(self, parts: Mapping[str, Num]) -> Num:
        """Return the kept number that was divided by the scale, multiplied by it again."""

    def decode(self, parts: Mapping[str, Num], *, root: Num | None = None) -> Num:
        value = self.times_scale(parts)
        if self.of == "sqrt":
            return value * value
        return value * root if self.relative else value

    def decode_root(self, parts: Mapping[str, Num]) -> Num:
        return self.times_scale(parts) if self.of == "sqrt" else super().decode_root(parts)

    # -- what is known of the error

    @property
    def what(self) -> str:
        """Return the name in messages of the value that the scale divides."""
        return "x / root" if self.relative else "root" if self.of == "sqrt" else "x"

    def of_scale(self, value: float, of: str, valid: str, slack: float, **more: Any) -> Bound:
        """Return the bound of a multiple of the scale."""
        return Bound(value, f"{of} * root" if self.relative else of, valid, slack, **more)


@dataclass(frozen=True)
class Curved(Coded):
    """Codes 0 to N, or -N to N, that lie along a compander; subclasses have it as a field, and `zero`."""

    @property
    @abstractmethod
    def codes(self) -> int:
        """N, the largest code."""

    @property
    def zero(self) -> str:
        """Return how code 0 of an unsigned format is read: "half" a code, "keep" (0), or "free" (codes begin at 1)."""
        return "keep"

    def error_of_codes(self) -> tuple[float, float]:
        """Return what a bound states of the codes: the largest error, and what arithmetic adds."""
        random, unsigned = self.noise_bits > 0, not self.signed
        half, free = self.zero == "half" and unsigned, self.zero == "free" and unsigned
        value = largest_error(self.compander, self.codes, random, half, free)
        short = self.compander.short_decode is not None
        # Three roundings on the way to the code, as a fraction of the code; three on the way back, and what keeps the
        # last code below the scale.  Companders without a short form go through exp2 and log2: 2 ulp each of exponents
        # up to 2^7.
        roundings = (4 + self.below / ROUNDOFF) if short else 2**9
        return value, (roundings * steepest(self.compander) + roundings) * ROUNDOFF

    @property
    def below(self) -> float:
        """Return the relative distance from the scale down to its last code."""
        return BELOW

    def stuck(self, decay: float) -> tuple[int, float, str]:
        n, f, g = self.codes, self.compander.curve, self.compander.inverse
        kept = [c for c in range(1, n + 1) if n * float(f(decay * float(g(c / n)))) >= c - 0.5]
        return len(kept), float(g(max(kept) / n)) if kept else 0.0, "scale"

    def cell(self) -> float:
        g, n = self.compander.inverse, self.codes
        return self.ratio(float(g(2 / n)) / float(g(1 / n))) if n > 1 else math.inf

    def keeps_zero(self) -> bool:
        return self.signed or self.zero == "keep"


def error_of_table(readings: tuple[float, ...], signed: bool, random: bool) -> tuple[float, float]:
    """Return (the largest error, what arithmetic adds to it) of codes that read as these rising numbers: the widest
    gap, or half of it to nearest, and what lies beyond the first and the last number.

    Of what f32 arithmetic adds, fast maths takes most: ends of cells that are off by 2^-12 of a cell, and numbers that
    are off by 2^-20 of themselves (ops/tables.py).
    """
    gap = max(b - a for a, b in itertools.pairwise(readings))
    beyond = max(1 - readings[-1], 1 + readings[0] if signed else readings[0])
    return max(gap if random else gap / 2, beyond), 2 * gap * CELL + EXACT + 8 * ROUNDOFF


def widest(readings: tuple[float, ...], least: float = 0.0) -> float:
    """Return the largest ratio of two neighbours among the positive numbers from `least` on."""
    positive = [x for x in readings if x > 0]
    return max(b / a for a, b in itertools.pairwise(positive) if a >= least)


def of_scales(scale: Scale, low: float) -> list[FormatFinding]:
    """Return what speaks against scales: the smallest largest magnitude that they follow is `low`."""
    out: list[FormatFinding] = []
    if scale.high < HIGH or low > LOW:
        reason = f"its scales cover {low:.2g} to {scale.high:.3g} only: blocks beyond overflow or freeze"
        out.append(("L5", "error", reason))
    if scale.literal:
        reason = "its scales are rounded to nearest, and the encoder divides by other ones: they stick like codes do"
        out.append(("L6", "error", reason))
    return out


def of_zeros(fmt: Coded, nonneg: bool) -> list[FormatFinding]:
    """Return what speaks against a format whose codes may read as 0 for a nonnegative state."""
    if not nonneg or fmt.positive:
        return []
    reason = "what is small beside the largest of its block reads as 0, and the step is divided by eps alone"
    return [("L13", "warning", reason)]
