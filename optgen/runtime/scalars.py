"""Arithmetic of host scalars with IEEE answers where Python would raise."""

from __future__ import annotations

import math


def divide(a: float, b: float) -> float:
    """a / b; x / 0 is an infinity and 0 / 0 is NaN."""
    try:
        return a / b
    except ZeroDivisionError:
        return math.nan if a == 0 or a != a else math.copysign(math.inf, a) * math.copysign(1.0, b)


def root(x: float) -> float:
    """The square root; NaN below 0."""
    return math.sqrt(x) if x >= 0 else math.nan


def power(base: float, exponent: float) -> float:
    """base ** exponent; overflow is an infinity, 0 to a negative power too, and what would be complex is NaN."""
    try:
        out = base**exponent
    except OverflowError:
        return math.inf
    except ZeroDivisionError:
        return math.inf
    return math.nan if isinstance(out, complex) else out


def exp(x: float) -> float:
    """e ** x; overflow is an infinity."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def log(x: float) -> float:
    """The natural logarithm; -Inf at 0, NaN below."""
    return math.log(x) if x > 0 else -math.inf if x == 0 else math.nan


def floor(x: float) -> float:
    """The integer at or below x, as a float; infinities and NaN stay."""
    return float(math.floor(x)) if math.isfinite(x) else x
