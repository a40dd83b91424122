"""Blocks of nonnegative values between their own minimum and maximum, evenly on the scale of a pseudo-logarithm.

The bit pattern of a positive f32, read as an integer, is a piecewise linear logarithm.  A block keeps the
unit (half an octave of the root) in which its smallest element lies, and into how many cells each unit is cut; a code
counts cells from there and reads as the middle of its cell.  All of it is
integer arithmetic on the pattern: the same bits on every backend, no logarithm, no division per element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from optgen.formats import narrow, words
from optgen.formats.bound import ROUNDOFF, Bound
from optgen.formats.check import check_block, check_words
from optgen.formats.coded import Coded
from optgen.formats.format import Field, Format, Noise, Rounding, View
from optgen.lang.values import Num, bits, cast, equal, floor, from_bits, lshr, maximum, minimum, rint, sqrt, where
from optgen.ops.dtypes import f32, i16, i32, of_pattern

_BEYOND = (127 + 127) << 23
"""The pattern from which on roots of a block with an infinity are read: 2^127."""

_INFINITE = "; all of a block with an Inf reads as Inf, so that all of its steps become 0, in fp32 those of one element"
_BEND = 1 - 1 / math.log(2) - math.log2(math.log(2))
"""The largest log2(1 + f) - f of a mantissa 1 + f: a pattern counts octaves to within it."""


@dataclass(frozen=True)
class LogMinMax(Coded):
    """Codes of b bits and a 16-bit header per block: first unit (8 bits), cells per unit k (8 bits).

    With w units between minimum and maximum, k = min(255, floor(2^b / w)), the relative error of the root
    is at most 1 / (4 k) to nearest and twice that stochastically.  Never decodes to 0:
    what lies more than 64 units (2^b, if that is fewer) below the block's maximum, or under 2^-126, reads as the
    lowest code, which is larger.  Above 2^127.8 (2^127.5 for fewer than 7 bits) it saturates; NaN reads as some value
    within the range of its block.  A block of roots with an Inf has a first unit beyond all of them in its header, and
    all of it reads as roots from 2^127 on: the squares are Inf.  Only a fresh state, header 0, decodes to 0.

    Unit boundaries are cell boundaries, and a code reads as the middle of its cell: to nearest, minimum and
    maximum stay within their units, the header stays, and encoding again changes nothing.  Stochastically
    they may move half a cell out of their units, for which a margin is kept: an eighth of a unit, which holds
    half a cell of any block of 8-bit codes; of fewer bits half a cell of the block, were it two units wider.
    """

    bits: int = 8
    block: int = 64
    rounding: Rounding = "auto"

    of = "sqrt"
    signed = False
    plus_zero = True
    positive = True
    unrounded = True
    still = True  # cells move only where a block comes to span another number of units, a few times in a run at most

    unit = 22
    """log2 of a unit, half an octave of a root, as an integer pattern."""

    UNITS = 64  # at most: of 8-bit codes four cells per unit are left then, and half a cell fits the margin

    def __post_init__(self) -> None:
        check_block("LogMinMax", self.bits, self.block, self.loc, 4)
        check_words(self)

    def __str__(self) -> str:
        how = "stochastic" if self.noise_bits else "nearest"
        return f"{self.bits}-bit unsigned blocks of {self.block}: sqrt between minimum and maximum, pseudo-log, {how}"

    def rounded(self, rounding: Rounding) -> Format:
        return replace(self, rounding=rounding)

    @property
    def most(self) -> int:
        """Units that a block may span."""
        return min(self.UNITS, 1 << self.bits)

    def cells(self, units: Num) -> Num:
        """Cells per unit where a block spans that many, i32."""
        # + 1/2: floor(2^b / w) for every w, with room for a reciprocal that is not correctly rounded.
        return minimum(cast(floor(((1 << self.bits) + 0.5) / cast(units, f32)), i32), 255)

    def step(self, cells: Num) -> Num:
        """The width of a cell as an integer pattern: 2^unit / cells.

        2^22 / k and 2^21 / k are at least three f32 ulps away from a tie for every k that occurs, so that a reciprocal
        with an error of an ulp rounds to the same integer on every backend; and under 2^22, as `rint` asks.
        """
        fine = 22 if self.bits == 8 else 21
        step = cast(rint(float(1 << fine) / cast(cells, f32)), i32)
        return step << (self.unit - fine) if self.unit > fine else step

    @property
    def lowest(self) -> int:
        """The pattern of the smallest root that is told from smaller ones: that of 2^-126."""
        return (127 - 63) << 23

    @property
    def highest(self) -> int:
        """The pattern of the largest: a quarter of a unit below the root of 2^128; half, where cells may be units."""
        return ((127 + 64) << 23) - (1 << (self.unit - 2) if self.bits > 6 else (1 << (self.unit - 1)) + 2)

    def fields(self) -> dict[str, Field]:
        return narrow.fields(self.bits) | {"range": Field(i16, self.block)}

    def encode(self, x: Num, *, noise: Noise | None = None, root: Num | None = None) -> dict[str, Num]:
        return self._encode(x, noise)[0]

    def encode_root(self, x: Num, noise: Noise | None = None) -> tuple[dict[str, Num], *tuple[Num, ...]]:
        parts, cells, start, code, lost = self._encode(x, noise)
        step = self.step(cells)
        value = from_bits(start + (step >> 1) + code * step)
        # What is beside an Inf is read as 2^127 and more: a quotient by less would be read as an Inf.
        least = where(lost, of_pattern(_BEYOND), of_pattern(self.lowest))
        return parts, value, maximum(sqrt(x), least)

    def _encode(self, x: Num, noise: Noise | None) -> tuple[dict[str, Num], Num, Num, Num, Num]:
        """Return the stored parts; the cells per unit, the pattern of the first unit and the code, all i32; and where
        blocks have an Inf.

        x >= +0 (see `plus_zero`): the pattern of -0 is the least of all integers, and wraps.
        """
        unit = self.unit
        pattern = bits(sqrt(x))
        top, bottom = words.block_top(pattern, self.block), words.block_bottom(pattern, self.block)
        largest = minimum(maximum(top, self.lowest), self.highest)
        # The middle of the last unit that a header can name, and that no root of a finite number reaches.
        beyond, lost = self.lowest + (255 << unit) + (1 << (unit - 1)), equal(top, words.INF)
        largest, bottom = where(lost, beyond, largest), where(lost, beyond, bottom)
        margin: Num = 0
        if noise:
            margin = 1 << (unit - 3) if self.bits == 8 else self._margin(largest, bottom)
        above = ((largest + margin) >> unit) + 1
        below = (bottom - margin) >> unit
        units = minimum(maximum(above - maximum(below, self.lowest >> unit), 1), self.most)
        first = above - units
        cells = self.cells(units)
        start = first << unit
        # Cells above the base, in units of 2^-24 cells: the code is the top byte, and unsigned.
        scale = cells << (24 - unit)
        if noise:
            # Down by half a cell, up by 0 to 1 cells: the middle of a cell stays in it.  Below the base, where noise
            # could take what is not there, is half a cell: 256 / (units * cells) < 5/4 times units / 256 of a unit.
            half = units * (5 << (unit - 11)) if self.bits == 8 else (self.step(cells) >> 1) + 1
            base = start + half
            offset = noise.fraction(24) + (half * scale - (1 << 23))
        else:
            base, offset = start, 0
        # Sum, minimum and maximum with 0 are one instruction on sm_90.
        position = maximum(minimum(pattern - base, largest - base), 0) * scale + offset
        code = lshr(position, 24)
        header = ((first - (self.lowest >> unit)) << 8) | cells
        start = where(lost, _BEYOND, start)  # as it is read
        return narrow.cut(code, self.bits) | {"range": cast(header, i16)}, cells, start, code, lost

    def _margin(self, top: Num, bottom: Num) -> Num:
        """Half a cell, as a pattern, of a block whose ends reach into the next units."""
        unit = self.unit
        # Above the highest all are one: an infinity has a unit of its own there, which the block does not span.
        units = maximum((top >> unit) - maximum(bottom >> unit, self.lowest >> unit), 0) + 3
        return (self.step(self.cells(minimum(units, self.most))) >> 1) + 1

    def number_of(self, parts: Mapping[str, Num]) -> Num:
        header = cast(parts["range"], i32)
        cells = maximum(header & 0xFF, (1 << self.bits) // self.most)
        step = self.step(cells)
        first = header & 0xFF00
        start = (first << (self.unit - 8)) + self.lowest
        start = where(equal(first, 0xFF00), _BEYOND, start)
        middle = where(equal(header, 0), 0, start + (step >> 1))
        return from_bits(middle + narrow.joined(parts, self.bits) * step)

    # -- what is known of the error, of a block that spans so many units; by default as many as it may

    def stuck(self, decay: float) -> tuple[int, float, str]:
        return 1 << self.bits, 1.0, "value"  # unsigned: never a signed average's format

    def keeps_zero(self) -> bool:
        return False

    def cells_of(self, units: int) -> int:
        """Return how many cells a unit is cut into."""
        return min(255, (1 << self.bits) // units)

    def margin(self, units: int) -> float:
        """Return what is kept free, at most, at both ends of the block, in units."""
        if not self.noise_bits:
            return 0.0
        return 1 / 8 if self.bits == 8 else 0.5 / self.cells_of(min(units + 2, self.most)) + 2.0**-20

    def lowest_reading(self, units: int) -> int:
        """Return how far above the start of the lowest unit, as a pattern, what lies under its first cell is read at
        most.

        To nearest that is the middle of the first cell, stochastically of the second: what is below is raised to half a
        cell above the start or a little more, and noise adds up to a cell.  A cell is off by half a pattern, or by one.
        """
        cell = (1 << self.unit) // self.cells_of(units)
        return (cell + (cell >> 1) if self.noise_bits else cell >> 1) + 2

    def span(self, units: int) -> tuple[float, float]:
        """Return (octaves that a block may span and be counted as so many units, octaves under its maximum that
        everything below reads as at most), both cut to a tenth.

        A span of s units lies in floor(s + two margins) + 2 of them at most, however it falls on their ends, and the
        last one ends at most a unit and a margin above the maximum.
        """
        free = self.margin(units)
        below = (units - 1 - free) * 0.5 - self.lowest_reading(units) / 2**23 - _BEND
        return _tenths((units - 1 - 2 * free) * 0.5 - _BEND), _tenths(below)

    def bound(self, units: int = 0) -> Bound:
        units = units or self.most
        k, random = self.cells_of(units), self.noise_bits > 0
        cell = 0.5 / k  # of a mantissa in [1, 2)
        # To nearest: from the left end of a binade's first cell to its middle.  Stochastically: from the middle of
        # that cell to the middle of the next; where a cell is half a binade, from the middle of the last cell to that
        # of the next binade's first, twice as wide, is further.
        value = max(cell / (1 + cell / 2), 1.5 * cell / (2 - cell / 2)) if random else cell / 2
        # The cell is a whole number of bit patterns, off by up to half a pattern per code.
        slack = 256 * 0.5 * 2.0**-23 + 4 * ROUNDOFF
        span, below = self.span(units)
        valid = (
            f"for a block whose roots span at most {span:g} octaves; what lies further below the block's maximum "
            f"reads as at most {below:g} octaves under it, what lies under 2^-63 as at most 1.5 cells more than that"
            f"{_INFINITE}"
        )
        return Bound(value, "root", valid, slack)

    def enclose(self, x: Any, view: View, root: Any = None) -> Any:
        """The relative error for as many units as the block can span; what is far below its maximum reads as more."""
        import torch

        value = self.counted(x, root)
        lost = ~(view.largest(value.magnitude(), self.block) < math.inf)
        value = value.spanning(where(lost, 1.0, value.lo), where(lost, 1.0, value.hi))
        down = torch.nextafter(value.lo.float(), torch.tensor(0.0))
        up = torch.nextafter(value.hi.float(), torch.tensor(math.inf))
        top, bottom = view.largest(up, self.block), view.smallest(down, self.block)

        def unit_of(t: Any, offset: Any) -> Any:
            """Return the unit in which an f32 lies, as the encoder counts them."""
            pattern = t.float().clamp(min=0).view(torch.int32).long().clamp(self.lowest, self.highest)
            return (pattern + offset) >> self.unit

        def table(f: Callable[[int], float]) -> Any:
            return torch.tensor([0.0, *map(f, range(1, self.most + 1))], dtype=torch.float64)

        # The margin of the widest block there may be; that of a narrower one is smaller, down to none.
        spanned = unit_of(top, 0) + 1 - unit_of(bottom, 0)
        margin = table(lambda k: self.margin(k) * 2**self.unit)[spanned.clamp(max=self.most)].ceil().long()
        least = margin if self.bits == 8 else 0
        above = unit_of(top, margin) + 1
        units = (above - unit_of(bottom, -margin)).clamp(1, self.most)
        relative = table(lambda k: self.bound(k).within(x))[units]
        # The pattern at which the codes of the block start at the highest; what lies below is raised.
        start = torch.maximum(unit_of(bottom, -least), above - self.most).clamp(min=self.lowest >> self.unit)
        raised = (start << self.unit) + table(self.lowest_reading)[units].long()
        low = minimum(value.lo, of_pattern(self.highest)) * (1 - relative)
        high = maximum(value.hi * (1 + relative), raised.int().view(torch.float32).double())
        kept = value.spanning(where(lost, math.nan, low.clamp(min=0)), where(lost, math.nan, high))
        return kept * kept

    def cell(self) -> float:
        return (1 + 0.5 / self.cells_of(self.most)) ** 2 - 1


def _tenths(octaves: float) -> float:
    """Return a number of octaves cut to a tenth."""
    return math.floor(10 * octaves) / 10
