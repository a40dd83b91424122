"""Blocks of nonnegative values on a fixed logarithmic grid, a few octaves of it under the block's maximum.

The bit pattern of a positive f32, read as an integer, is a piecewise linear logarithm.  Its grid points lie a fixed
number of patterns apart, the same for all blocks and all steps; a block keeps the number of the point of its maximum,
and each element how many points it lies under that.  Since the grid itself never moves, a value
on it stays on it whatever its neighbours do: of few bits that is worth more than a grid that fits each block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from optgen.formats import narrow, words
from optgen.formats.bound import ROUNDOFF, Bound
from optgen.formats.check import check_block, check_words, is_number, refusal
from optgen.formats.format import Field, Format, FormatFinding, Noise, Rounding, View
from optgen.formats.pseudolog import BEND, INFINITE, PseudoLog, tenths
from optgen.lang.values import Num, bits, cast, equal, floor, from_bits, maximum, minimum, rint, sqrt, where
from optgen.ops.dtypes import f32, i16, i32

# A maximum on the grid, or a rounding above it, is not lifted to the next point.
CLOSE = 2.0**-10


@dataclass(frozen=True)
class LogMax(PseudoLog):
    """Codes of b bits and 16 bits per block: the number of the grid point of the block's largest root.

    That is the point at or above it stochastically, the nearest one to nearest.

    With N = 2^b - 1 and a cell of octaves / N octaves, the relative error of the root is at most half a cell to nearest
    and a cell stochastically.  Stochastically the square of the root has the mean that it should, to second order in
    a cell: an average of squares that is stored at each step would grow otherwise.  A value more than `octaves` less
    a cell below the block's maximum may read as the lowest code, which is larger; so does a value under 2^-126.
    Never decodes to 0: only a fresh state, number 0, does.  Values above 2^128 less two cells saturate, NaN reads as
    some value within the range of its block.  A block with an Inf reads as roots near 2^127, all of it: the squares are
    Inf.

    A decoded block is encoded to the same codes to nearest.  The largest value is never cut: stochastically it
    rises by a cell as any other, and the block's range with it.
    """

    bits: int = 3
    block: int = 64
    octaves: float = 2.5
    rounding: Rounding = "auto"

    def __post_init__(self) -> None:
        check_block("LogMax", self.bits, self.block, self.loc, 2)
        check_words(self)
        least, most = self.codes / 128, self.codes / 2
        if not is_number(self.octaves) or not least <= self.octaves <= most:
            want = f"{least:.3g} to {most:g} octaves: cells of 1/128 to 1/2 octave"
            raise refusal(self.loc, f"LogMax of {self.bits} bits over {self.octaves!r} octaves", want)

    def __str__(self) -> str:
        how = "stochastic" if self.noise_bits else "nearest"
        what = f"sqrt to {self.octaves:g} octaves under the maximum"
        return f"{self.bits}-bit unsigned blocks of {self.block}: {what}, pseudo-log, {how}"

    def rounded(self, rounding: Rounding) -> Format:
        return replace(self, rounding=rounding)

    @property
    def codes(self) -> int:
        """N, the largest code."""
        return (1 << self.bits) - 1

    @property
    def step(self) -> int:
        """The distance of neighbouring grid points, as an integer pattern."""
        return round(self.octaves * 2**23 / self.codes)

    @property
    def lean(self) -> float:
        """The share by which a root is rounded up less often than by its distance, so that its square keeps its mean.

        Between a and b the square does where the upper one has probability f (2 a + f (b - a)) / (a + b), which is
        f - f (1 - f) (b - a) / (a + b).
        """
        ratio: float = 2.0 ** (self.octaves / self.codes)
        return (ratio - 1) / (ratio + 1)

    @property
    def lowest(self) -> int:
        """The pattern of the first grid point, 2^-63: its square is the smallest normal number."""
        return (127 - 63) << 23

    @property
    def highest(self) -> int:
        """The pattern of the largest root that is told from larger ones: the point above it has a finite square."""
        return ((127 + 64) << 23) - self.step - 1

    @property
    def infinite(self) -> int:
        """The pattern that Inf counts as: a root far beyond those of finite numbers, whose square is Inf."""
        return (255 << 23) - 2 * self.step

    def fields(self) -> dict[str, Field]:
        return narrow.fields(self.bits) | {"peak": Field(i16, self.block)}

    def encode_root(self, x: Num, noise: Noise | None = None) -> tuple[dict[str, Num], Num]:
        parts, start, code = self._encode(x, noise)
        return parts, from_bits(start + (code & self.codes) * self.step)

    def _encode(self, x: Num, noise: Noise | None) -> tuple[dict[str, Num], Num, Num]:
        """Return the stored parts, the pattern that code 0 stands for and the code (its last bits), all i32.

        x >= +0 (see `plus_zero`): the pattern of -0 is the least of all integers, and wraps.
        """
        per_step = 1.0 / self.step
        pattern = bits(sqrt(x))
        top_pattern = words.block_top(pattern, self.block)
        largest = minimum(maximum(top_pattern, self.lowest), self.highest)
        largest = where(equal(top_pattern, words.INF), self.infinite, largest)
        place = cast(largest - self.lowest, f32) * per_step
        if noise is None:
            # In integers, with a margin for the roundings of `exact` below: the largest gets the last code, for sure.
            point = cast(floor(place), i32)
            rest = largest - self.lowest - point * self.step
            point = point + cast(rest > (self.step >> 1) + (self.step >> 13), i32)
        else:
            point = -cast(floor(CLOSE - place), i32)  # noise may lift the largest to the point above it
        top = maximum(point, self.codes)
        start = (top - self.codes) * self.step + self.lowest
        under = cast(maximum(minimum(pattern, largest) - start, 0), f32)
        exact = minimum(under * per_step, float(self.codes))
        if noise is None:
            code = cast(rint(exact), i32)
        else:
            rest = exact - floor(exact)
            exact = exact - self.lean * rest * (1.0 - rest)
            # As in `words.dithered`: the pattern ends with `noise.bits` bits of fraction, the code right above them.
            code = (bits(exact + 1.5 * 2.0 ** (23 - noise.bits)) + noise.integer()) >> noise.bits
        return narrow.cut(code, self.bits) | {"peak": cast(top, i16)}, start, code

    def number_of(self, parts: Mapping[str, Num]) -> Num:
        top = cast(parts["peak"], i32)
        start = where(equal(top, 0), 0, (top - self.codes) * self.step + self.lowest)
        return from_bits(start + narrow.joined(parts, self.bits) * self.step)

    # -- what is known of the error

    def span(self) -> float:
        """Return the octaves under a block's maximum within which errors are bounded, cut to a tenth.

        Up to a cell of the octaves that it spans may lie above the maximum.
        """
        return max(0.0, tenths(self.octaves - self.octaves / self.codes - BEND))

    def findings(self, nonneg: bool) -> list[FormatFinding]:
        if self.octaves > 4:
            return []
        reason = (
            f"roots more than {self.span():g} octaves under their block's largest may read as larger ones; d octaves "
            f"under it, steps are up to 2^(d - {self.span():g}) times too short. Where blocks span more, take a plan "
            "with LogMinMax"
        )
        return [("L21", "note", reason)]

    def bound(self) -> Bound:
        cell = self.step / 2**23  # of a mantissa in [1, 2): widest, relative to the value, from a power of two up
        # To nearest the largest of a block decides the grid's end, by a hair's breadth later than the middle of a cell.
        slack = cell * ((self.codes + 2) * 4 * ROUNDOFF + 2.0**-12) + 4 * ROUNDOFF
        span = self.span()
        valid = (
            f"for roots at most {span:g} octaves under their block's maximum; what lies further below it may read as "
            f"{span:g} octaves under it, what lies under 2^-63 as that{INFINITE}"
        )
        halves = 1 if self.noise_bits else 2
        return Bound(cell / halves, "root", valid, slack)

    def enclose(self, x: Any, view: View, root: Any = None) -> Any:
        """The relative error of a cell; what is far below its block's maximum reads as the grid's first point there."""
        import torch

        lost, value = self.finite(self.counted(x, root), view)
        top = view.largest(torch.nextafter(value.hi.float(), torch.tensor(math.inf)).clamp(min=0), self.block)
        largest = top.contiguous().view(torch.int32).long().clamp(self.lowest, self.highest)
        # The grid's last point is less than a cell above the maximum, and it begins at the lowest pattern at least.
        first = (largest - (self.codes - 1) * self.step).clamp(min=self.lowest).int().view(torch.float32).double()
        relative = self.bound().within(x)
        return self.spread(value, lost, relative, first * (1 + relative))

    def cell(self) -> float:
        return (1 + self.step / 2**23) ** 2 - 1
