"""Small work between two sweeps: values of rows, columns, matrices or the tensor, and sums of them.

A program takes matrices of one tensor through all rounds of a level, or through one of them: what a round sums over the
parts of a tensor, other ranks have parts of.  Reductions over matrices have LANES lanes for each of a few matrices at a
time, or 256 for one; what is reduced over the tensor has 256.  Entries that are missing in a power of two below 256
would only add zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import triton
import triton.language as tl

from optgen.runtime.gpu.prelude import down, fold, get, missing, pointer, put, term

ENTRIES = tl.constexpr(2048)
"""Entries that a program takes at a time: 8 for each thread of eight warps."""


@dataclass(frozen=True)
class Round:
    """The work of one space.

    space     "row", "col", "mat", or "one": a value of the tensor or of the model
    reads     (entry, kind) of each value that its function takes: kind "" is one of its own space, "mat" one of the
              matrix, "one" one of the tensor
    stores    entries of what its function returns first, in order
    sums      (maximum, entries of sums over a matrix, entries of sums over the tensor) of each term that follows
    extents   entries of sizes of the logical tensor
    matrices  the entry that is the number of matrices; their rows and columns follow
    values    its function; None where the kernel names it
    strict    sums are in the order that every backend has
    """

    space: str
    reads: tuple[tuple[int, str], ...]
    stores: tuple[int, ...] = ()
    sums: tuple[tuple[bool, tuple[int, ...], tuple[int, ...]], ...] = ()
    extents: tuple[int, ...] = ()
    matrices: int = -1
    strict: bool = False
    values: Any = None

    def reduces(self, whole: int) -> bool:
        """Return True if a round reduces anything over matrices (0), or over the tensor (1)."""
        return any(term[1 + whole] for term in self.sums)


@dataclass(frozen=True, eq=False)
class Level:
    """The rounds of a kernel between sweeps, and how it is launched.

    width  entries of a row of the table; see `walk.KernelSweep`
    lanes  lanes for each matrix that a round reduces
    only   the one round that is done, -1: all are
    """

    width: int
    rounds: tuple[Round, ...]
    lanes: int = 256
    only: int = -1

    @cached_property
    def cache_key(self) -> str:
        """The record's part of the name under which Triton keeps a compiled kernel."""
        return " ".join([repr(self), *(getattr(x.values, "cache_key", "") for x in self.rounds)])

    def count(self) -> int:
        """Return the number of rounds."""
        return len(self.rounds)

    def round(self, k: int) -> Round:
        """Return one of the rounds; Triton makes constants of what methods return, and not of attributes."""
        return self.rounds[k]


@triton.jit
def _some(
    row, at, live, at_mat, scalars, values: tl.constexpr, ROUND: tl.constexpr, STORED: tl.constexpr
):  # fmt: skip
    """Some values of a round; its terms.  STORED: the values are stored."""
    given = ()
    for i in tl.static_range(len(ROUND.reads)):
        of = pointer(row + ROUND.reads[i][0], tl.float32, False)
        if ROUND.reads[i][1] == "one":
            x = tl.load(of)
        elif ROUND.reads[i][1] == "mat":
            x = get(of, at_mat, live, True)
        else:
            x = get(of, at, live, True)
        given = given + (x,)
    for i in tl.static_range(len(ROUND.extents)):
        given = given + (tl.load(row + ROUND.extents[i]).to(tl.float32),)
    made = values(*given, *scalars)
    if ROUND.space == "one":
        tl.debug_barrier()  # every warp loads what one thread stores in its place
    if STORED:
        for i in tl.static_range(len(ROUND.stores)):
            to = pointer(row + ROUND.stores[i], tl.float32, False)
            if ROUND.space == "one":
                tl.store(to, made[i])
            else:
                put(to, at, made[i], live, True)
    terms = ()
    for i in tl.static_range(len(ROUND.sums)):
        terms = terms + (term(made[len(ROUND.stores) + i], at, live, True, ROUND.sums[i][0]),)
    return terms


@triton.jit
def _folded(x, ROUND: tl.constexpr, MAX: tl.constexpr):
    """[r, n] -> [r]: what is left of each row of x; in strict maths in the order that every backend has."""
    if ROUND.strict or MAX:
        out = fold(x, MAX)
    else:
        out = tl.sum(x, 1)
    return out


@triton.jit
def _lanes(
    row, base, count, number, scalars, values: tl.constexpr, ROUND: tl.constexpr, WHOLE: tl.constexpr,
    STORED: tl.constexpr,
):  # fmt: skip
    """`count` entries from `base` in 256 lanes, several of a lane at a time; `number`: of what they are summed to."""
    size = _size(row, ROUND)
    totals = ()
    for i in tl.static_range(len(ROUND.sums)):
        totals = totals + (tl.full([256], missing(ROUND.sums[i][0]), tl.float32),)
    for start in range(0, count, ENTRIES):
        lane = start + tl.arange(0, ENTRIES // 256)[:, None] * 256 + tl.arange(0, 256)[None, :]
        at = base + lane
        terms = _some(row, at, lane < count, at // size, scalars, values, ROUND, STORED)
        new = ()
        for i in tl.static_range(len(ROUND.sums)):
            if ROUND.strict or ROUND.sums[i][0]:
                new = new + (down(totals[i], terms[i], ROUND.sums[i][0]),)
            else:
                new = new + (totals[i] + tl.sum(terms[i], 0),)
        totals = new
    for i in tl.static_range(len(ROUND.sums)):
        for j in tl.static_range(len(ROUND.sums[i][1 + WHOLE])):
            to = pointer(row + ROUND.sums[i][1 + WHOLE][j], tl.float32, False)
            total = _folded(tl.reshape(totals[i], [1, 256]), ROUND, ROUND.sums[i][0])
            tl.store(to + number + tl.arange(0, 1), total)


@triton.jit
def _size(row, ROUND: tl.constexpr):
    """Entries of a round's space in a matrix."""
    if ROUND.space == "row":
        out = tl.load(row + (ROUND.matrices + 1))
    elif ROUND.space == "col":
        out = tl.load(row + (ROUND.matrices + 2))
    else:
        out = tl.full([], 1, tl.int64)
    return out


@triton.jit
def _matrices(
    row, first, end, scalars, values: tl.constexpr, ROUND: tl.constexpr, LANES: tl.constexpr, STORED: tl.constexpr
):  # fmt: skip
    """Sums and maxima over matrices."""
    size = _size(row, ROUND)
    if LANES == 256:
        for number in range(first, end):
            _lanes(row, number * size, size, number, scalars, values, ROUND, 0, STORED)
    else:
        for group in range(first, end, ENTRIES // LANES):
            number = group + tl.arange(0, ENTRIES // LANES)
            lane = tl.arange(0, LANES)[None, :]
            at = number[:, None] * size + lane
            live = (number < end)[:, None] & (lane < size)
            terms = _some(row, at, live, at // size, scalars, values, ROUND, STORED)
            for i in tl.static_range(len(ROUND.sums)):
                for j in tl.static_range(len(ROUND.sums[i][1])):
                    x = terms[i]
                    if ROUND.strict and not ROUND.sums[i][0]:
                        x = x + 0.0  # lanes begin with 0, to which -0 adds nothing
                    to = pointer(row + ROUND.sums[i][1][j], tl.float32, False)
                    tl.store(to + number, _folded(x, ROUND, ROUND.sums[i][0]), mask=number < end)


@triton.jit
def rounds(table, work, values: tl.constexpr, LEVEL: tl.constexpr, K: tl.constexpr, scalars):
    """Round K of a level.

    values  (values that it reads..., sizes..., scalars...) -> what it stores, then its terms
    """
    if K > 0:
        tl.debug_barrier()  # what one round stores the next ones load
    if LEVEL.only < 0 or LEVEL.only == K:
        item = work + 3 * tl.program_id(0)
        row = table + LEVEL.width * tl.load(item).to(tl.int64)
        first = tl.load(item + 1).to(tl.int64)
        _round(row, first, tl.load(item + 2).to(tl.int64), scalars, values, LEVEL.round(K), LEVEL.lanes)


@triton.jit
def of_states(table, work, LEVEL: tl.constexpr):
    """The work of a level for states that are kept as a whole."""
    for k in tl.static_range(LEVEL.count()):
        rounds(table, work, LEVEL.round(k).values, LEVEL, k, ())


@triton.jit
def copy(x):
    """x, to be stored or reduced as it is."""
    return (x,)


@triton.jit
def _round(row, first, end, scalars, values: tl.constexpr, ROUND: tl.constexpr, LANES: tl.constexpr):
    """The matrices [first, end) of a tensor."""
    size = _size(row, ROUND)
    # What is reduced twice, in two groupings, is computed twice from what was there before anything is stored.
    if ROUND.reduces(0):
        _matrices(row, first, end, scalars, values, ROUND, LANES, not ROUND.reduces(1))
    if ROUND.reduces(1):
        _lanes(row, 0, end * size, 0, scalars, values, ROUND, 1, True)
    if len(ROUND.sums) == 0:
        if ROUND.space == "one":
            _some(row, 0, True, 0, scalars, values, ROUND, True)
        else:
            for start in range(first * size, end * size, ENTRIES):
                at = start + tl.arange(0, ENTRIES)
                _some(row, at, at < end * size, at // size, scalars, values, ROUND, True)
