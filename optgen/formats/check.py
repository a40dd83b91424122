"""Checks of what constructors of formats are given: types, words, ranges.  Errors have the place of the call."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeGuard

from optgen.base import loc as locs
from optgen.base.errors import UserError
from optgen.base.loc import Loc

BLOCKS = (16, 32, 64, 128, 256, 512, 1024, 2048)
"""Elements that a scale may be for."""

ROUNDINGS = ("nearest", "stochastic", "auto")
A_SCALE = "one of optgen.formats.scales, such as ue8m8 or fp32"
A_COMPANDER = "one such as linear or softsign()"


@dataclass(frozen=True)
class Placed:
    """A part of a plan that knows the place of the call that made it."""

    _: KW_ONLY
    loc: Loc | None = field(default_factory=lambda: locs.here(2), compare=False, repr=False)


def refusal(loc: Any, what: str, want: str, hint: str = "") -> UserError:
    """Return the error for `what` is no format, or no part of one, at a place; `want` says what to use."""
    return UserError("E305", loc=loc, what=what, want=want, hint=hint)


def is_whole(x: object) -> TypeGuard[int]:
    """Return True for an integer other than True and False."""
    return isinstance(x, int) and not isinstance(x, bool)


def is_number(x: object) -> TypeGuard[int | float]:
    """Return True for a finite int or float other than True and False."""
    return isinstance(x, (int, float)) and not isinstance(x, bool) and abs(x) < math.inf


def check_block(name: str, bits: int, block: int, loc: Loc | None, least: int) -> None:
    """Raise UserError for a width or block size that no kernel has."""
    if not is_whole(bits) or not least <= bits <= 8:
        raise refusal(loc, f"{name} of {bits!r} bits", f"a whole number, {least} to 8 bits")
    if not is_whole(block) or block not in BLOCKS:
        want = f"a power of two, {BLOCKS[0]} to {BLOCKS[-1]}"
        raise refusal(loc, f"{name} with blocks of {block!r}", want)


def check_words(fmt: Any, **more: tuple[str, ...]) -> None:
    """Raise UserError for a word that a format does not know.

    fmt   the format, with its `rounding` and what else it has
    more  field -> the words that it may be
    """
    name = type(fmt).__name__
    for key, known in ({"rounding": ROUNDINGS} | more).items():
        value = getattr(fmt, key)
        if not isinstance(value, str) or value not in known:
            want = ", ".join(f'"{word}"' for word in known)
            raise refusal(fmt.loc, f"{name}({key}={value!r})", want)
    for key in ("signed", "relative", "in_blocks"):
        value = vars(fmt).get(key, False)
        if not isinstance(value, bool):
            raise refusal(fmt.loc, f"{name}({key}={value!r})", "True or False")


def check_part(fmt: Any, key: str, kind: type, want: str) -> None:
    """Raise UserError where a format's part is not of its kind: `want` names some that are."""
    value = getattr(fmt, key)
    if not isinstance(value, kind):
        got = value.__name__ if isinstance(value, type) or callable(value) else repr(value)
        raise refusal(fmt.loc, f"{type(fmt).__name__}({key}={got})", want)


def check_number(what: str, value: object, low: float, high: float, want: str, loc: Loc | None) -> None:
    """Raise UserError unless low <= value <= high, a finite number."""
    if not is_number(value) or not low <= value <= high:
        raise refusal(loc, what, want)
