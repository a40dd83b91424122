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
