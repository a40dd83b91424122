"""The part that formats of codes share: packing, rounding, and bounds in units of a scale."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from optgen.formats import narrow, words
from optgen.formats.bound import ROUNDOFF, Bound
from optgen.formats.check import A_SCALE, Placed, check_part, refusal
from optgen.formats.format import HIGH, LOW, Field, Format, FormatFinding, Noise
from optgen.formats.scales import LARGEST, Scale
from optgen.lang.values import Num, bits, maximum
from optgen.ops.dtypes import pattern_of
from optgen.ops.tables import CELL, EXACT

NOISE_BITS = 12
"""Random bits that a code of 8 bits or fewer draws to be rounded stochastically."""


@dataclass(frozen=True)
class Coded(Placed, Format):
    """Codes of 8 bits or fewer; those of fewer than 8 are packed (narrow.py).  Subclasses may have the fields

    bits      of a code
    rounding  to nearest, or stochastic
    """

    @property
    def bits(self) -> int:
        return 8

    @property
    def noise_bits(self) -> int:
        return NOISE_BITS if self.rounding in ("stochastic", "auto") else 0

    def code(self, parts: Mapping[str, Num]) -> Num:
        return narrow.joined(parts, self.bits)

    @abstractmethod
    def number_of(self, parts: Mapping[str, Num]) -> Num:
        """Return the kept number: a value, its root or its quotient by another root."""

    def decode(self, parts: Mapping[str, Num], *, root: Num | None = None) -> Num:
        value = self.number_of(parts)
        if self.of == "sqrt":
            return value * value
        return value * root if self.relative else value

    def decode_root(self, parts: Mapping[str, Num]) -> Num:
        return self.number_of(parts) if self.of == "sqrt" else super().decode_root(parts)

    # -- what is known of the error

    @property
    def what(self) -> str:
        """Return the name in messages of the value that the scale divides."""
        return "x / root" if self.relative else "root" if self.of == "sqrt" else "x"


@dataclass(frozen=True)
class InBlocks(Coded):
    """Codes under one scale per block; subclasses have the fields `block` and `scale`, and below what else differs."""

    unit = "scale"  # `of` of the bound

    @property
    @abstractmethod
    def scale(self) -> Scale:
        """The format of the scale."""

    @property
    def largest(self) -> float:
        """The number that the largest magnitude of a block becomes, divided by its scale."""
        return 1.0

    @property
    def fresh(self) -> int:
        """The code of 0, or of the smallest magnitude: what a fresh state has, under a scale of 0."""
        return 0

    @property
    def low(self) -> float:
        """The scale that smaller ones count as."""
        return self.scale.low

    def top_of(self, top: Num) -> Num:
        """The bits of what the scale is for, given those of the largest magnitude."""
        return maximum(top, pattern_of(self.low)) if self.low > self.scale.low else top

    @abstractmethod
    def code_of(self, value: Num, scale: Num, noise: Noise | None) -> Num:
        """The rounded code as it is stored, i32."""

    @abstractmethod
    def errors(self) -> tuple[float, float]:
        """Return what a bound states of the codes: the largest error, and what arithmetic adds."""

    def refuse_scales(self, what: str) -> None:
        """Raise UserError for a scale that is none, or that another number is divided by than is multiplied with."""
        check_part(self, "scale", Scale, A_SCALE)
        if self.scale.literal:
            want = "one that no element exceeds, such as scales.fp32 or ue8m8"
            raise refusal(self.loc, f"{what} under a {self.scale} scale", want)

    def fields(self) -> dict[str, Field]:
        return narrow.fields(self.bits, self.fresh) | {"scale": Field(self.scale.dtype, self.block, nonneg=True)}

    def encode(self, x: Num, *, noise: Noise | None = None, root: Num | None = None) -> dict[str, Num]:
        value = self.counted(x, root)
        top = words.block_top(bits(abs(value)), self.block)
        stored_scale, scale = self.scale.encode(self.top_of(top))
        return narrow.cut(self.code_of(value, scale, noise), self.bits) | {"scale": stored_scale}

    # -- what is known of the error

    def bound(self) -> Bound:
        scale, low = self.scale, self.low * self.largest
        value, slack = self.errors()
        valid = f"{self.unit} <= max(largest |{self.what}| of the block, {low:.3g}) * (1 + {scale.excess:.3g})"
        if scale.literal:
            slack += scale.excess  # the decoder multiplies with another scale than the encoder divided by
            span = f"[{low:.3g}, {scale.high:.6g}]"
            valid = f"scale = largest |{self.what}| of the block, in {span}; beyond it: no bound"
        of = f"{self.unit} * root" if self.relative else self.unit
        high = min(scale.high * self.largest, LARGEST)
        return Bound(value, of, valid, slack, low=low, high=high, excess=scale.excess, strict=scale.literal)

    def findings(self, nonneg: bool) -> list[FormatFinding]:
        out: list[FormatFinding] = []
        low, high = self.low * self.largest, self.scale.high
        if high < HIGH or low > LOW:
            reason = f"its scales cover {low:.2g} to {high:.3g} only: blocks beyond overflow or freeze"
            out.append(("L5", "error", reason))
        if self.scale.literal:
            why = "its scales are rounded to nearest, and the encoder divides by other ones: they stick like codes do"
            out.append(("L6", "error", why))
        return out


def error_of_table(readings: tuple[float, ...], signed: bool) -> tuple[float, float]:
    """Return (the largest error to nearest, what arithmetic adds to it) of codes that read as these rising numbers:
    half of the widest gap, or what lies beyond the first and the last number.

    Of what f32 arithmetic adds, fast maths takes most: ends of cells that are off by 2^-12 of a cell, and numbers that
    are off by 2^-20 of themselves (ops/tables.py).
    """
    gap = max(b - a for a, b in itertools.pairwise(readings))
    beyond = max(1 - readings[-1], 1 + readings[0] if signed else readings[0])
    return max(gap / 2, beyond), 2 * gap * CELL + EXACT + 8 * ROUNDOFF


def widest(readings: tuple[float, ...], least: float = 0.0) -> float:
    """Return the largest ratio of two neighbours among the positive numbers from `least` on."""
    positive = [x for x in readings if x > 0]
    return max(b / a for a, b in itertools.pairwise(positive) if a >= least)
