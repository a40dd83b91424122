"""What formats share whose codes count in units of a scale."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from optgen.base.errors import UserError
from optgen.base.loc import Loc
from optgen.formats import narrow
from optgen.formats.format import Format, Rounding
from optgen.lang.values import Num, sqrt

BLOCKS = (16, 32, 64, 128, 256, 512, 1024, 2048)
"""Elements that a scale may be for."""

NOISE_BITS = 12
"""What a code of 8 bits or fewer draws where it is rounded stochastically."""

HALF = 0.5 - 2.0**-10
"""What code 0 reads as where it must not be 0: safely on its own side of the next code."""


def check_block(name: str, bits: int, block: int, loc: Loc | None, least: int) -> None:
    """Raises UserError for a width or block size that no kernel has."""
    if not isinstance(bits, int) or bits not in range(least, 9):
        raise UserError("E305", loc=loc, what=f"{name} of {bits} bits", want=f"{least} to 8 bits")
    if not isinstance(block, int) or block not in BLOCKS:
        raise UserError(
            "E305", loc=loc, what=f"{name} with blocks of {block}", want=f"a power of two, 16 to {BLOCKS[-1]}"
        )


def check_words(fmt: Any, **more: tuple[str, ...]) -> None:
    """Raises UserError for a word that a format does not know, and for a relative one of roots.

    fmt   the format, with its `rounding` and what else it has
    more  field -> the words that it may be
    """
    name = type(fmt).__name__
    for key, known in ({"rounding": ("nearest", "stochastic", "auto")} | more).items():
        value = getattr(fmt, key)
        if value not in known:
            want = ", ".join(f'"{word}"' for word in known)
            raise UserError("E305", loc=fmt.loc, what=f"{name}({key}={value!r})", want=want)
    if getattr(fmt, "relative", False) and fmt.of == "sqrt":
        raise UserError(
            "E305", loc=fmt.loc, what=f'{name}(relative=True, of="sqrt")', want="one of both: a root is kept as it is"
        )


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


__all__ = ["BLOCKS", "HALF", "NOISE_BITS", "Coded", "check_block", "check_words"]
