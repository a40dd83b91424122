"""Tables of numbers, and the straight lines that say the same in fast maths.

Primitives read a table: `lookup` gives its entry of that number, `search` counts how many entries do not exceed a
value.  Every backend can do both exactly.  Where the entries of either sign lie on few straight lines, as those of the
dynamic maps do (each decade is one), fast maths computes the entry as the largest of these lines, and the number as the
smallest of others: a product and a sum for each line instead of a comparison for each entry.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from optgen.ops.dtypes import f32, in_f32, of_pattern, pattern_of

StraightLine = tuple[float, float]
"""(slope, offset), both f32."""

Close = Callable[[StraightLine, tuple[float, float]], bool]
"""A test of a line that passes close to a point."""

NEVER = f32.largest  # what no number reaches that was divided by its block's largest
EXACT = 2.0**-20  # how far a line may be from an entry, relative to it
CELL = 2.0**-12  # how far a line may be from the end of a cell, in cells


def after(x: float, by: int = 1) -> float:
    """The f32 that many places after x."""
    return _at(_place(x) + by)


@dataclass(frozen=True)
class StraightLines:
    """The straight lines that stand for a table of codes in fast maths.  k = code - zero numbers the entries, 0 where
    they are 0.

    search  |k| = rint(max(min over the lines of slope * |x| + offset, least)), at most `most`
    lookup  |entry| = min(max over the lines of slope * |k| + offset, or 0), cap)
    top     where the cell of the entry after `most` begins, which only positive numbers have; None: there is none
    signed  whether entries below `zero` mirror those above
    """

    zero: int
    most: int
    search: tuple[StraightLine, ...]
    lookup: tuple[StraightLine, ...]
    top: float | None
    cap: float
    signed: bool

    @property
    def least(self) -> int:
        return 1 if self.zero < 0 else 0


@dataclass(frozen=True)
class Table:
    """Rising numbers, all of them f32; `law` is left out where there is none."""

    name: str
    values: tuple[float, ...]
    law: StraightLines | None = field(default=None, compare=False)

    def __str__(self) -> str:
        """A name that no other table has."""
        return f"{self.name}_{zlib.crc32(struct.pack(f'<{len(self.values)}f', *self.values)):08x}"

    __repr__ = __str__


@dataclass(frozen=True)
class Book:
    """A codebook of b bits: `entries` has 2^b, the last one repeated; `ends` the 2^b - 1 ends of their cells."""

    entries: Table
    ends: Table


@lru_cache(maxsize=256)
def book(values: tuple[float, ...], bits: int, ties: str, name: str) -> Book:
    """The tables that a codebook of at most 2^bits rising numbers needs."""
    ends = cell_ends(values, ties)
    lines, missing = law(values, ends), (1 << bits) - len(values)
    entries = Table(name, (*values, *[values[-1]] * missing), lines)
    return Book(entries, Table(f"{name}_ends", (*ends, *[NEVER] * missing), lines))


def _runs(points: Sequence[tuple[float, float]], close: Close) -> list[StraightLine]:
    """The line through each two neighbours, once for neighbours of neighbours that lie on it too."""
    out: list[StraightLine] = []
    i = 0
    while i + 1 < len(points):
        j, best = i + 1, through(points[i], points[i + 1])
        while j + 1 < len(points):
            longer = through(points[i], points[j + 1])
            if not all(close(longer, p) for p in points[i : j + 2]):
                break
            j, best = j + 1, longer
        out.append(best)
        i = j
    return out


def through(p: tuple[float, float], q: tuple[float, float]) -> StraightLine:
    """The line through two points."""
    slope = in_f32((q[1] - p[1]) / (q[0] - p[0]))
    return slope, in_f32(p[1] - slope * p[0])


def envelope(points: Sequence[tuple[float, float]], close: Close, *, lowest: bool) -> tuple[StraightLine, ...]:
    """Few lines whose smallest (largest) value goes through all the points; () where there are none."""
    if len(points) == 1:
        ((x, y),) = points
        return ((in_f32(y / x), 0.0),)
    side = -1 if lowest else 1
    lines = [
        (a, b)
        for a, b in _runs(points, close)
        if all(close((a, b), p) or side * (a * p[0] + b - p[1]) < 0 for p in points)
    ]
    left = set(range(len(points)))
    out: list[StraightLine] = []
    while left and lines:
        best = max(lines, key=lambda line: sum(close(line, points[i]) for i in left))
        touched = {i for i in left if close(best, points[i])}
        if not touched:
            return ()
        out.append(best)
        left -= touched
    return () if left else tuple(sorted(out, reverse=True))


def law(values: Sequence[float], ends: Sequence[float]) -> StraightLines | None:
    """The law of a table whose code c takes numbers from ends[c - 1] on; None where it would not be shorter.

    values  rising; the negative ones mirror the positive ones, but perhaps for the last of these
    """
    below = sum(v < 0 for v in values)
    zero = below if values[below] == 0 else -1
    entries, starts = values[zero + 1 :], ends[max(zero, 0) :]
    if below == 0:
        return _law(zero, entries, starts, False, False) or _law(zero, entries, starts, False, True)
    if zero < 0 or [-v for v in reversed(values[:below])] != [*entries[:below]]:
        return None
    return _law(zero, entries, starts, True, len(entries) > below) if 0 <= len(entries) - below <= 1 else None


def _law(
    zero: int, entries: Sequence[float], starts: Sequence[float], signed: bool, last: bool
) -> StraightLines | None:
    """Return the law of the entries above `zero`, given where their cells start; `last`: the last entry is treated by
    itself."""
    most = len(entries) - last
    first = int(zero < 0)  # without a 0 the first entry has no lower end
    cells = [(start, k + 0.5 + first) for k, start in enumerate(starts[: most - first])]
    if len(cells) < 2:
        return None
    search = envelope(cells, lambda line, p: _off(line, p) <= CELL, lowest=True)
    numbered = [(float(k), v) for k, v in enumerate(entries[:most], 1)]
    lookup = envelope(numbered, lambda line, p: _off(line, p) <= EXACT * p[1], lowest=False)
    if not (search and lookup) or len(search) + len(lookup) > len(entries) // (2 - signed):
        return None
    if not first and any(offset > 0 for _, offset in lookup):
        return None
    return StraightLines(zero, most, search, lookup, starts[-1] if last else None, max(entries), signed)


def _off(line: StraightLine, point: tuple[float, float]) -> float:
    """Return how far a point lies above or below a line."""
    return abs(line[0] * point[0] + line[1] - point[1])


def cell_ends(values: Sequence[float], ties: str) -> tuple[float, ...]:
    """The smallest f32 of each entry's cell but the first: numbers nearer to it than to the one before.

    ties  "down": where the two distances, each rounded to f32, are equal, the lower entry (the first of the smallest,
          as bitsandbytes has it); "up": where the distance from below is not less than half of the gap, both rounded to
          f32, the upper one (torchao)
    """
    out = []
    for low, high in itertools.pairwise(values):
        below, above = _place(low), _place(high)
        while above - below > 1:
            middle = (below + above) // 2
            if _above(_at(middle), low, high, ties):
                above = middle
            else:
                below = middle
        out.append(_at(above))
    return tuple(out)


def _place(x: float) -> int:
    """The number of an f32 in their order; both zeros are 0."""
    pattern = pattern_of(x)
    return pattern if pattern >= 0 else -(pattern & 0x7FFFFFFF)


def _at(place: int) -> float:
    return of_pattern(abs(place)) * (-1 if place < 0 else 1)


def _above(x: float, low: float, high: float, ties: str) -> bool:
    if ties == "down":
        return in_f32(high - x) < in_f32(x - low)
    return in_f32(x - low) >= in_f32(in_f32(high - low) * 0.5)
