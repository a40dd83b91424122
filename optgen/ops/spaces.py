"""The spaces in which values live: host < model < tensor < mat < row, col < block < elem.

`host` is computed once per step on the host in fp64; `model` has one value for all parameters together, on the
device; `tensor` has one value per parameter tensor, `mat` one per leading index of an ndim > 2 tensor, `row` and `col`
one per row and column of the last two dimensions, `block` one per storage block (`size` neighbours along the last
dimension) and `elem` one per element.  Arithmetic joins spaces upward
(`row * col -> elem`); reductions go down.

Whole matrices beside those of elements have spaces named by their two dimensions, m rows of the parameter's matrix, n
columns, the shorter of these s, the longer l, or a low rank r: `mm` (m, m), `nm` (n, m), `rn` (r, n) and so on; `elem`
is (m, n).  No kernel knows them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

_known: dict[tuple[str, int], Space] = {}


@dataclass(frozen=True, eq=False, init=False)
class Space:
    """A space; `size` is the block size of a `block` space and 0 elsewhere."""

    name: str
    size: int = 0

    @property
    def rank(self) -> int:
        return RANK[self.name]

    def __repr__(self) -> str:
        return f"{self.name}:{self.size}" if self.size else self.name

    def __new__(cls, name: str, size: int = 0) -> Space:
        """The one object of that name and size, so that comparing spaces is comparing identities."""
        space = super().__new__(cls)
        object.__setattr__(space, "name", name)
        object.__setattr__(space, "size", size)
        return _known.setdefault((name, size), space)

    def __reduce__(self) -> tuple[type[Space], tuple[str, int]]:
        return Space, (self.name, self.size)


RANK = {"host": 0, "model": 1, "tensor": 2, "mat": 3, "row": 4, "col": 4, "block": 5, "elem": 6}
MATRICES = frozenset(a + b for a in "mnslr" for b in "mnslr") - {"mn"}
RANK |= dict.fromkeys(MATRICES, 7)
SMALL = frozenset({"model", "tensor", "mat", "row", "col"})
"""Few values beside elements: kept in fp32 between sweeps."""

host = Space("host")
model = Space("model")
tensor = Space("tensor")
mat = Space("mat")
row = Space("row")
col = Space("col")
elem = Space("elem")
whole = Space("whole")  # of a stage: what torch does with whole matrices


def block(size: int) -> Space:
    return Space("block", size)


def dims(space: Space) -> str:
    """Return the two dimensions of a space of whole matrices, "mn" of elements; "" of any other space."""
    return "mn" if space is elem else space.name if space.name in MATRICES else ""


def of_dims(rows: str, columns: str) -> Space:
    """Return the space of matrices with these dimensions."""
    return elem if rows + columns == "mn" else Space(rows + columns)


def shown(space: Space) -> str:
    """Return a space as errors say it: (rows, rank) for `mr`."""
    words = {"m": "rows", "n": "columns", "r": "rank", "s": "shorter side", "l": "longer side"}
    return f"({', '.join(words[d] for d in dims(space))})" if dims(space) else str(space)


@cache  # of the few spaces that there are; asked for each operand of each node
def join(a: Space, b: Space) -> Space:
    """The smallest space in which both a and b can be read by index.

    >>> join(host, row), join(row, col), join(block(64), elem)
    (row, elem, elem)
    """
    if a is b:
        return a
    low, high = (a, b) if a.rank <= b.rank else (b, a)
    # Blocks run along dimension 0 against the rest, matrices are the last two dimensions: neither lies in the other.
    if low.rank < high.rank and not (high.name == "block" and low.name in ("mat", "row", "col")):
        return high
    return elem


def join_all(spaces: list[Space]) -> Space:
    out = host
    for s in spaces:
        if s is not out:
            out = join(out, s)
    return out
