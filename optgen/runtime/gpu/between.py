"""Small work between two sweeps: values of rows, columns, matrices or the tensor, and sums of them.

A program takes matrices of one tensor through all rounds of a level, or through one of them: what a round sums over the
parts of a tensor, other ranks have parts of.  Reductions over matrices have LANES lanes for each of a few matrices at a
time, or 256 for one; what is reduced over the tensor has 256.  Entries that are missing in a power of two below 256
would only add zeros.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import triton
import triton.language as tl

from optgen.runtime.gpu.prelude import axis_max, axis_min, down, fold, get, missing, pointer, put, term

ENTRIES = tl.constexpr(2048)
"""Entries that a program takes at a time: 8 for each thread of eight warps."""

INDICES = tl.constexpr(32)
"""Indices of dimensions that a program takes at a time: of each it looks at as many columns together."""


@dataclass(frozen=True, eq=False)
class Round:
    """The work of one space.

    space    "row", "col", "axis", "mat", or "one": a value of the tensor or of the model
    reads    (entry, kind) of each value that its function takes: kind "" is one of its own space, "mat" one of the
             matrix, "one" one of the tensor; "axis_min" and "axis_max" gather
    stores   entries of what its function returns first, in order
    sums     (maximum, entries of sums over a matrix, entries of sums over the tensor) of each term that follows
    extents  entries of sizes of the logical tensor
    """

    space: str
    reads: tuple[tuple[int, str], ...]
    stores: tuple[int, ...] = ()
    sums: tuple[tuple[bool, tuple[int, ...], tuple[int, ...]], ...] = ()
    extents: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Level:
    """The rounds of a kernel between sweeps; see `walk.Sweep` for the table, `axes`: the entry of those of columns."""

    width: int
    matrices: int
    rounds: tuple[Round, ...]
    strict: bool = False
    axes: int = -1
    cache_key: str = field(init=False, default="")

    def __post_init__(self) -> None:
        object.__setattr__(self, "cache_key", repr(self))

    def space(self, k: int) -> str:
        """Return the space of a round."""
        return self.rounds[k].space

    def many(self, k: int, name: str) -> int:
        """Return how many `reads`, `stores`, `sums` or `extents` a round has."""
        return len(getattr(self.rounds[k], name))

    def read(self, k: int, i: int) -> int:
        """Return the entry of a value that a round reads."""
        return self.rounds[k].reads[i][0]

    def kind(self, k: int, i: int) -> str:
        """Return what the value is one of."""
        return self.rounds[k].reads[i][1]

    def store(self, k: int, i: int) -> int:
        """Return the entry of a value that a round stores."""
        return self.rounds[k].stores[i]

    def extent(self, k: int, i: int) -> int:
        """Return the entry of a size."""
        return self.rounds[k].extents[i]

    def largest(self, k: int, i: int) -> bool:
        """Return True if a term is reduced to its maximum."""
        return self.rounds[k].sums[i][0]

    def sums_to(self, k: int, i: int, whole: bool) -> int:
        """Return how many sums a term has, over matrices or over the tensor."""
        _, matrices, tensor = self.rounds[k].sums[i]
        return len(tensor if whole else matrices)

    def sum_to(self, k: int, i: int, whole: bool, j: int) -> int:
        """Return the entry of one of them."""
        _, matrices, tensor = self.rounds[k].sums[i]
        return (tensor if whole else matrices)[j]

    def reduces(self, k: int, whole: bool) -> bool:
        """Return True if a round reduces anything over matrices, or over the tensor."""
        return any(tensor if whole else matrices for _, matrices, tensor in self.rounds[k].sums)

    def of_matrix(self, k: int) -> bool:
        """Return True if a round of rows or columns reads values of matrices."""
        return any(kind == "mat" for _, kind in self.rounds[k].reads)


@triton.jit
def _some(
    row, at, live, at_mat, scalars, values: tl.constexpr, LEVEL: tl.constexpr, K: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    """Some values of a round; its terms.  STORED: the values are stored."""
    given = ()
    for i in tl.static_range(LEVEL.many(K, "reads")):
        of = pointer(row + LEVEL.read(K, i), tl.float32, False)
        if LEVEL.kind(K, i) == "one":
            x = tl.load(of)
        elif LEVEL.kind(K, i) == "mat":
            x = get(of, at_mat, live, True)
        elif LEVEL.kind(K, i) == "axis_min":
            x = axis_min(of, at, live, _axes(row, LEVEL), tl.load(row + (LEVEL.matrices + 2)))
        elif LEVEL.kind(K, i) == "axis_max":
            x = axis_max(of, at, live, _axes(row, LEVEL), tl.load(row + (LEVEL.matrices + 2)))
        else:
            x = get(of, at, live, True)
        given = given + (x,)
    for i in tl.static_range(LEVEL.many(K, "extents")):
        given = given + (tl.load(row + LEVEL.extent(K, i)).to(tl.float32),)
    made = values(*given, *scalars)
    if STORED:
        for i in tl.static_range(LEVEL.many(K, "stores")):
            to = pointer(row + LEVEL.store(K, i), tl.float32, False)
            if LEVEL.space(K) == "one":
                tl.store(to, made[i])
            else:
                put(to, at, made[i], live, True)
    terms = ()
    for i in tl.static_range(LEVEL.many(K, "sums")):
        terms = terms + (term(made[LEVEL.many(K, "stores") + i], at, live, True, LEVEL.largest(K, i)),)
    return terms


@triton.jit
def _axes(row, LEVEL: tl.constexpr):
    """The address of what columns are made of."""
    return tl.load(row + LEVEL.axes).to(tl.pointer_type(tl.int64))


@triton.jit
def _folded(x, LEVEL: tl.constexpr, MAX: tl.constexpr):
    """[r, n] -> [r]: what is left of each row of x; in strict maths in the order that every backend has."""
    if LEVEL.strict or MAX:
        out = fold(x, MAX)
    else:
        out = tl.sum(x, 1)
    return out


@triton.jit
def _lanes(
    row, base, count, number, scalars, values: tl.constexpr, LEVEL: tl.constexpr, K: tl.constexpr, WHOLE: tl.constexpr,
    STORED: tl.constexpr,
):  # fmt: skip
    """`count` entries from `base` in 256 lanes, several of a lane at a time; `number`: of what they are summed to."""
    size = _size(row, LEVEL, K)
    totals = ()
    for i in tl.static_range(LEVEL.many(K, "sums")):
        totals = totals + (tl.full([256], missing(LEVEL.largest(K, i)), tl.float32),)
    for start in range(0, count, ENTRIES):
        lane = start + tl.arange(0, ENTRIES // 256)[:, None] * 256 + tl.arange(0, 256)[None, :]
        at = base + lane
        terms = _some(row, at, lane < count, at // size, scalars, values, LEVEL, K, STORED)
        new = ()
        for i in tl.static_range(LEVEL.many(K, "sums")):
            if LEVEL.strict or LEVEL.largest(K, i):
                new = new + (down(totals[i], terms[i], LEVEL.largest(K, i)),)
            else:
                new = new + (totals[i] + tl.sum(terms[i], 0),)
        totals = new
    for i in tl.static_range(LEVEL.many(K, "sums")):
        for j in tl.static_range(LEVEL.sums_to(K, i, WHOLE)):
            to = pointer(row + LEVEL.sum_to(K, i, WHOLE, j), tl.float32, False)
            total = _folded(tl.reshape(totals[i], [1, 256]), LEVEL, LEVEL.largest(K, i))
            tl.store(to + number + tl.arange(0, 1), total)


@triton.jit
def _size(row, LEVEL: tl.constexpr, K: tl.constexpr):
    """Entries of a round's space in a matrix."""
    if LEVEL.space(K) == "row":
        out = tl.load(row + (LEVEL.matrices + 1))
    elif LEVEL.space(K) == "col":
        out = tl.load(row + (LEVEL.matrices + 2))
    elif LEVEL.space(K) == "axis":
        out = tl.load(_axes(row, LEVEL) + 1)
    else:
        out = tl.full([], 1, tl.int64)
    return out


@triton.jit
def _matrices(
    row, first, end, scalars, values: tl.constexpr, LEVEL: tl.constexpr, K: tl.constexpr, LANES: tl.constexpr,
    STORED: tl.constexpr,
):  # fmt: skip
    """Sums and maxima over matrices."""
    size = _size(row, LEVEL, K)
    if LANES == 256:
        for number in range(first, end):
            _lanes(row, number * size, size, number, scalars, values, LEVEL, K, False, STORED)
    else:
        for group in range(first, end, ENTRIES // LANES):
            number = group + tl.arange(0, ENTRIES // LANES)
            lane = tl.arange(0, LANES)[None, :]
            at = number[:, None] * size + lane
            live = (number < end)[:, None] & (lane < size)
            terms = _some(row, at, live, at // size, scalars, values, LEVEL, K, STORED)
            for i in tl.static_range(LEVEL.many(K, "sums")):
                for j in tl.static_range(LEVEL.sums_to(K, i, False)):
                    x = terms[i]
                    if LEVEL.strict and not LEVEL.largest(K, i):
                        x = x + 0.0  # lanes begin with 0, to which -0 adds nothing
                    to = pointer(row + LEVEL.sum_to(K, i, False, j), tl.float32, False)
                    tl.store(to + number, _folded(x, LEVEL, LEVEL.largest(K, i)), mask=number < end)


@triton.jit
def rounds(
    table, work, values: tl.constexpr, LEVEL: tl.constexpr, K: tl.constexpr, scalars, LANES: tl.constexpr,
    ROUND: tl.constexpr,
):  # fmt: skip
    """Round K of a level; ROUND: the only one that is done, -1: all are.

    values  (values that it reads..., sizes..., scalars...) -> what it stores, then its terms
    """
    if K > 0:
        tl.debug_barrier()  # what one round stores the next ones load
    if ROUND < 0 or ROUND == K:
        item = work + 3 * tl.program_id(0)
        row = table + LEVEL.width * tl.load(item).to(tl.int64)
        first = tl.load(item + 1).to(tl.int64)
        end = tl.load(item + 2).to(tl.int64)
        size = _size(row, LEVEL, K)
        # What is reduced twice, in two groupings, is computed twice from what was there before anything is stored.
        if LEVEL.reduces(K, False):
            _matrices(row, first, end, scalars, values, LEVEL, K, LANES, not LEVEL.reduces(K, True))
        if LEVEL.reduces(K, True):
            _lanes(row, 0, end * size, 0, scalars, values, LEVEL, K, True, True)
        if LEVEL.many(K, "sums") == 0:
            if LEVEL.space(K) == "one":
                _some(row, 0, True, 0, scalars, values, LEVEL, K, True)
            else:
                TOGETHER: tl.constexpr = INDICES if LEVEL.space(K) == "axis" else ENTRIES
                for start in range(first * size, end * size, TOGETHER):
                    at = start + tl.arange(0, TOGETHER)
                    _some(row, at, at < end * size, at // size, scalars, values, LEVEL, K, True)
