"""Statistics over rows, columns, matrices and whole tensors.

The matrix is the last two dimensions of a parameter; a row statistic has one value per row of it, a column
statistic one per column.  On torch tensors they keep their dimensions, so that they broadcast back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from optgen.base.errors import UserError
from optgen.ir import node as ir
from optgen.lang.values import TRACED, Num, Value, author_loc, reader_of, sqrt
from optgen.ops import spaces
from optgen.ops.spaces import Space

# Spaces of values that a reduction takes.
_BELOW = {"row": ("elem",), "col": ("elem",), "mat": ("elem", "row", "col"), "tensor": ("elem", "row", "col", "mat")}
_BELOW["model"] = (*_BELOW["tensor"], "tensor")

_OF_NUMBER = (
    "a number is the same for every element: its mean and maximum are the number itself, its sum is the number times "
    "columns(g), rows(g) or elements(g)"
)


def _check(x: Num, function: str, below: tuple[str, ...]) -> None:
    """Raise UserError for a value of another space than those in `below`, or a number where a rule is traced."""
    if isinstance(x, Value):
        space = x.node.space
    elif TRACED.get() and isinstance(x, (int, float)):
        space = spaces.host
    else:
        return
    if space.name in below or (function in ("mat_norm", "mat_max") and space.name in spaces.MATRICES):
        return
    hint = {"hint": _OF_NUMBER} if space == spaces.host else {}
    got = str(space) if isinstance(x, Value) else f"the number {x!r}"
    if space.name in spaces.MATRICES:
        hint = {"hint": "of these there are trace(x), mat_norm(x) and mat_max(x)"}
        got = f"a matrix of {spaces.shown(space)}"
    raise UserError("E201", loc=author_loc(), function=function, want=" or ".join(below), got=got, **hint)


def _reduced(op: str, x: Num, function: str) -> Any:
    _check(x, function, _BELOW[op.split("_")[0]])
    return getattr(reader_of(x), op)(x)


def _extent(x: Value, name: str) -> Value:
    return Value(ir.extent(name), x.record)


def _size(name: str, doc: str) -> Callable[[Num], Any]:
    """Return the function of that name: a size of the tensor that x has a value per element of."""

    def size(x: Num) -> Any:
        _check(x, name, ("elem",))
        if isinstance(x, Value):
            return _extent(x, name)
        shape = tuple(getattr(x, "shape", ()))
        return float(math.prod({"rows": shape[-2:-1], "columns": shape[-1:], "elements": shape}[name]))

    size.__name__ = size.__qualname__ = name
    size.__doc__ = doc
    return size


rows = _size("rows", "The number of rows of the matrix of x.")
columns = _size("columns", "The number of columns of the matrix of x: the terms of a row's sum.")
elements = _size("elements", "The number of elements of x.")


def _count(x: Value, target: Space) -> Value:
    """Return the number of entries of x that one result stands for."""
    space = x.node.space
    columns, rows, elements = (_extent(x, name) for name in ("columns", "rows", "elements"))
    if target == spaces.row:
        return columns
    if target == spaces.col:
        return rows
    if target == spaces.mat:
        return {"elem": rows * columns, "row": rows, "col": columns}[space.name]
    per = {"elem": None, "row": columns, "col": rows, "mat": rows * columns}[space.name]
    return elements if per is None else elements / per


def _mean(op: str, x: Num, target: Space, function: str) -> Any:
    _check(x, function, _BELOW[target.name])
    if isinstance(x, Value):
        return getattr(reader_of(x), op)(x) / _count(x, target)
    return getattr(reader_of(x), op.replace("_sum", "_mean"))(x)


def _statistic(function: str, op: str, doc: str, mean_of: Space | None = None) -> Callable[[Num], Any]:
    """Return the function of that name: a reduction, or the mean of a sum, which has a value for each of a space."""

    def statistic(x: Num) -> Any:
        return _reduced(op, x, function) if mean_of is None else _mean(op, x, mean_of, function)

    statistic.__name__ = statistic.__qualname__ = function
    statistic.__doc__ = doc
    return statistic


row_sum = _statistic("row_sum", "row_sum", "The sum of each row.")
col_sum = _statistic("col_sum", "col_sum", "The sum of each column.")
row_max = _statistic("row_max", "row_max", "The largest of each row.")
col_max = _statistic("col_max", "col_max", "The largest of each column.")
mat_max = _statistic("mat_max", "mat_max", "The largest of the last two dimensions, one per leading index.")
amax = _statistic("amax", "tensor_max", "The largest of the whole tensor.")
total = _statistic("total", "tensor_sum", "The sum over the whole tensor.")
row_mean = _statistic("row_mean", "row_sum", "The mean of each row.", spaces.row)
col_mean = _statistic("col_mean", "col_sum", "The mean of each column.", spaces.col)
mat_mean = _statistic(
    "mat_mean", "mat_sum", "The mean over the last two dimensions, one per leading index; of row statistics, over the "
    "rows.", spaces.mat,
)  # fmt: skip
mean = _statistic(
    "mean", "tensor_sum", "The mean over the whole tensor; of row or column statistics, over all of them.",
    spaces.tensor,
)  # fmt: skip
model_total = _statistic(
    "model_total", "model_sum", "The sum over all parameters that have a gradient, of every group of the optimizer."
)


def rms(x: Num) -> Num:
    """The root of the mean square over the whole tensor."""
    return sqrt(_mean("tensor_sum", x * x, spaces.tensor, "rms"))


def norm(x: Num) -> Num:
    """The Euclidean norm of the whole tensor."""
    return sqrt(_reduced("tensor_sum", x * x, "norm"))


def mat_norm(x: Num) -> Num:
    """The Frobenius norm of the last two dimensions, one per leading index."""
    return sqrt(_reduced("mat_sum", x * x, "mat_norm"))


def dot(a: Num, b: Num) -> Num:
    """The inner product over the whole tensor."""
    return _reduced("tensor_sum", a * b, "dot")


def model_norm(x: Num) -> Num:
    """The Euclidean norm over all parameters that have a gradient."""
    return sqrt(_reduced("model_sum", x * x, "model_norm"))


def model_dot(a: Num, b: Num) -> Num:
    """The inner product over all parameters that have a gradient."""
    return _reduced("model_sum", a * b, "model_dot")
