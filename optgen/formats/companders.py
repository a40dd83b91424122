"""Companders: monotone curves of [0, 1] onto itself that say where the codes lie.

A magnitude n = |x| / scale is stored as round(N * curve(n)) and read back as inverse(code / N): where the
curve is steep, codes are dense.  A compander is two functions over `optgen.lang`; `optgen.verify.bounds`
derives the error bound from them, and `check` sees to it that they rise and undo each other.

The well-known ones also say how to encode and decode with as few operations as possible: the scale folded in
with the number of codes, per block; one division per element.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from optgen.base import loc as locs
from optgen.base.errors import UserError
from optgen.base.loc import Loc
from optgen.formats.check import check_line, check_number, refusal
from optgen.lang.values import Num, Value, minimum, where

Curve = Callable[[Num], Num]

# The last code reads as a hair less than the scale, whatever rounds on the way: encoded again it must not exceed
# the scale, which would then be rounded up to the next one.  Four roundings for a root that was squared.
BELOW = 2.0**-22

# How much denser than those of `linear` codes may lie at 0.
STEEPEST = 2.0**16


@dataclass(frozen=True)
class _Asked:
    """An author's function, whose failures are E304: it runs wherever a plan is shown, before it is checked."""

    function: Callable[..., Num]
    key: str = field(compare=False)
    name: str = field(compare=False)
    loc: Loc | None = field(compare=False)

    def __call__(self, x: Num, *more: Any) -> Num:
        try:
            return self._value(x, self.function(x, *more))  # in no assignment: a value is named by the caller's
        except UserError:
            raise
        except Exception as error:
            given = f"({x:g})" if isinstance(x, (int, float)) else ""
            raise self._wrong(f"{self.key}{given} fails: {type(error).__name__}: {error}") from error

    def _value(self, x: Num, got: Num) -> Num:
        number = isinstance(x, (int, float))
        if got is None or number and not hasattr(got, "__float__"):
            raise self._wrong(f"{self.key} gives {got!r}, which is no number")
        if isinstance(x, Value) and not isinstance(got, (Value, int, float)):
            raise self._wrong(f"{self.key} gives {got!r}, which is no value")
        if number:
            float(got)
        return got

    def _wrong(self, why: str) -> UserError:
        return UserError("E304", loc=self.loc, name=self.name, why=why)


@dataclass(frozen=True)
class Compander:
    """curve: [0, 1] -> [0, 1], increasing, curve(0) = 0, curve(1) = 1; `inverse` undoes it.

    short_encode  (x, scale, N) -> N * curve(x / scale), the sign with it, for |x| <= scale; None: by the curve
    short_decode  (code, scale, N) -> scale * inverse(code / N)
    """

    name: str
    curve: Curve = field(repr=False)
    inverse: Curve = field(repr=False)
    short_encode: Callable[[Num, Num, int], Num] | None = field(default=None, compare=False, repr=False)
    short_decode: Callable[[Num, Num, int], Num] | None = field(default=None, compare=False, repr=False)
    loc: Loc | None = field(default_factory=lambda: locs.here(2), compare=False, repr=False)

    def __post_init__(self) -> None:
        check_line(f"a compander named {self.name!r}", self.name, self.loc)
        for key in ("curve", "inverse"):
            value = getattr(self, key)
            if not callable(value) or isinstance(value, (type, Compander)):
                want = "a function of one value, such as lambda n: n * (2 - n)"
                raise refusal(self.loc, f"{key}={value!r} of compander {self.name}", want)
        for key in ("curve", "inverse", "short_encode", "short_decode"):
            value = getattr(self, key)
            if callable(value) and not isinstance(value, _Asked):
                object.__setattr__(self, key, _Asked(value, key, self.name, self.loc))

    def __str__(self) -> str:
        return self.name

    def encode(self, x: Num, scale: Num, codes: int, *, signed: bool) -> Num:
        """N * curve(x / scale), f32, before rounding; N = `codes`."""
        if self.short_encode is not None:
            return self.short_encode(x, scale, codes)
        return self.both_signs(self.curve, x / scale, signed) * float(codes)

    def decode(self, code: Num, scale: Num, codes: int, *, signed: bool) -> Num:
        """scale * inverse(code / N), f32."""
        if self.short_decode is not None:
            return self.short_decode(code, scale, codes)
        return self.both_signs(self.inverse, code * (1.0 / codes), signed) * (scale * (1 - 4 * BELOW))

    def both_signs(self, curve: Curve, x: Num, signed: bool) -> Num:
        """curve(|x|) with the sign of x; curves of companders with a short form are odd, and defined above 1."""
        if self.short_encode is not None:
            return curve(x)
        # In fast maths code / N of the last code may be a hair above 1, where an inverse may have no value.
        magnitude = curve(minimum(abs(x) if signed else x, 1.0))
        return where(x < 0, -magnitude, magnitude) if signed else magnitude


@lru_cache(maxsize=256)
def check(compander: Compander) -> None:
    """Raise UserError with a place where a compander does not rise from 0 to 1 or its inverse does not undo it, if one
    of 1025 points is such a place, or one of the ends of 8-bit codes' cells."""

    def wrong(why: str) -> UserError:
        return UserError("E304", loc=compander.loc, name=compander.name, why=why)

    last = -1.0
    for i in range(1025):
        n = i / 1024
        code = float(compander.curve(n))
        back = float(compander.inverse(code))
        if not code > last:
            raise wrong(f"the curve does not increase at {n:g}: curve = {code:g} after {last:g}")
        if not abs(back - n) <= 1e-9:
            raise wrong(f"inverse(curve({n:g})) = {back:g}, not {n:g}")
        if i in (0, 1024) and not abs(code - n) <= 1e-12:
            raise wrong(f"curve({n:g}) = {code:g}, not {n:g}")
        last = code
    ends = [float(compander.inverse(i / 510)) for i in range(511)]
    for i, (low, high) in enumerate(itertools.pairwise(ends), 1):
        if not high > low:
            raise wrong(f"the inverse does not increase at {i / 510:g}: inverse = {high:g} after {low:g}")


HALF = 0.5 - 2.0**-10
"""The value of code 0 in formats that never decode to 0: less than half of the next code."""


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


@lru_cache(maxsize=256)
def steepest(compander: Compander) -> float:
    """Return the slope of the inverse at 1, where it is steepest if it is convex."""
    unit = 1e-6
    return (1.0 - float(compander.inverse(1.0 - unit))) / unit


linear = Compander(
    "linear",
    lambda n: n,
    lambda y: y,
    short_encode=lambda x, scale, codes: x * (float(codes) / scale),
    short_decode=lambda code, scale, codes: code * (scale * ((1 - BELOW) / codes)),
)


def softsign(k: float = 1.0) -> Compander:
    """n -> (1 + k) n / (1 + k n): codes (1 + k) times denser at 0, (1 + k) times sparser at 1; 2^-16 <= k <= 2^16."""
    check_number(f"softsign({k!r})", k, 1 / STEEPEST, STEEPEST, "2^-16 <= k <= 2^16", locs.here())
    return _softsign(k)


@lru_cache
def _softsign(k: float) -> Compander:
    # A number that is a whole one stays exact in SymPy.
    k = int(k) if float(k).is_integer() else k

    def short_encode(x: Num, scale: Num, codes: int) -> Num:
        per_code = 1.0 / (codes * (1 + k))
        return x / (scale * per_code + abs(x) * (k * per_code))

    def short_decode(code: Num, scale: Num, codes: int) -> Num:
        bend = abs(code) if k == 1 else abs(code) * float(k)
        return scale * (code / (float(codes * (1 + k)) - bend))

    return Compander(
        f"softsign({k:g})" if k != 1 else "softsign",
        lambda n: (1 + k) * n / (1 + k * abs(n)),
        lambda y: y / ((1 + k) - k * abs(y)),
        short_encode=short_encode,
        short_decode=short_decode,
    )


def compander(name: str, curve: Curve, inverse: Curve) -> Compander:
    """Your own: `compander("cosine", lambda n: ..., lambda y: ...)`, checked before it is used."""
    return Compander(name, curve, inverse, loc=locs.here())
