"""Statistics over rows, columns, matrices and whole tensors.

The matrix is the last two dimensions of a parameter; a row statistic has one value per row of it, a column
statistic one per column.  On torch tensors they keep their dimensions, so that they broadcast back.
"""

from __future__ import annotations

import math
from typing import Any

from optgen.base.errors import UserError
from optgen.ir import node as ir
from optgen.lang.values import TRACED, Num, Value, author_loc, reader_of, sqrt
from optgen.ops import spaces
from optgen.ops.spaces import Space

# What a reduction may be given, and how many entries of it fall on one result: products of extents.
_BELOW = {"row": ("elem",), "col": ("elem",), "mat": ("elem", "row", "col"), "tensor": ("elem", "row", "col", "mat")}
_BELOW["axis"] = ("col",)
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
    if space.name in below:
        return
    hint = {"hint": _OF_NUMBER} if space == spaces.host else {}
    got = space if isinstance(x, Value) else f"the number {x!r}"
    raise UserError("E201", loc=author_loc(), function=function, want=" or ".join(below), got=got, **hint)


def _reduce(op: str, x: Num, function: str) -> Any:
    _check(x, function, _BELOW[op.split("_")[0]])
    return getattr(reader_of(x), op)(x)


def _extent(x: Value, name: str) -> Value:
    return Value(ir.extent(name), x.record)


def _size(x: Num, name: str) -> Any:
    """How many rows, columns or elements the tensor has that x has a value per element of."""
    _check(x, name, ("elem",))
    if isinstance(x, Value):
        return _extent(x, name)
    shape = tuple(getattr(x, "shape", ()))
    return float(math.prod({"rows": shape[-2:-1], "columns": shape[-1:], "elements": shape}[name]))


def rows(x: Num) -> Num:
    """How many rows the matrix of x has."""
    return _size(x, "rows")


def columns(x: Num) -> Num:
    """How many columns the matrix of x has: the terms of a row's sum."""
    return _size(x, "columns")


def elements(x: Num) -> Num:
    """How many elements x has."""
    return _size(x, "elements")


def _count(x: Value, target: Space) -> Value:
    """How many entries of x one result stands for."""
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


def row_sum(x: Num) -> Num:
    """The sum of each row."""
    return _reduce("row_sum", x, "row_sum")


def col_sum(x: Num) -> Num:
    """The sum of each column."""
    return _reduce("col_sum", x, "col_sum")


def row_max(x: Num) -> Num:
    """The largest of each row."""
    return _reduce("row_max", x, "row_max")


def col_max(x: Num) -> Num:
    """The largest of each column."""
    return _reduce("col_max", x, "col_max")


def axis_max(x: Num) -> Num:
    """Of column statistics, for each index of a dimension that columns are made of the largest of the columns that have
    it; on tensors and numbers, whose columns are made of one, x itself."""
    return _reduce("axis_max", x, "axis_max")


def axis_min(x: Num) -> Num:
    """For each column the smallest of what its indices have: goes back from `axis_max` to columns."""
    _check(x, "axis_min", ("axis",))
    return reader_of(x).axis_min(x)


def amax(x: Num) -> Num:
    """The largest of the whole tensor."""
    return _reduce("tensor_max", x, "amax")


def total(x: Num) -> Num:
    """The sum over the whole tensor."""
    return _reduce("tensor_sum", x, "total")


def row_mean(x: Num) -> Num:
    """The mean of each row."""
    return _mean("row_sum", x, spaces.row, "row_mean")


def col_mean(x: Num) -> Num:
    """The mean of each column."""
    return _mean("col_sum", x, spaces.col, "col_mean")


def mat_mean(x: Num) -> Num:
    """The mean over the last two dimensions, one per leading index; of row statistics, over the rows."""
    return _mean("mat_sum", x, spaces.mat, "mat_mean")


def mean(x: Num) -> Num:
    """The mean over the whole tensor; of row or column statistics, over all of them."""
    return _mean("tensor_sum", x, spaces.tensor, "mean")


def rms(x: Num) -> Num:
    """The root of the mean square over the whole tensor."""
    return sqrt(_mean("tensor_sum", x * x, spaces.tensor, "rms"))


def norm(x: Num) -> Num:
    """The Euclidean norm of the whole tensor."""
    return sqrt(_reduce("tensor_sum", x * x, "norm"))


def dot(a: Num, b: Num) -> Num:
    """The inner product over the whole tensor."""
    return _reduce("tensor_sum", a * b, "dot")


def model_total(x: Num) -> Num:
    """The sum over all parameters that have a gradient, of every group of the optimizer."""
    return _reduce("model_sum", x, "model_total")


def model_norm(x: Num) -> Num:
    """The Euclidean norm over all parameters that have a gradient."""
    return sqrt(_reduce("model_sum", x * x, "model_norm"))


def model_dot(a: Num, b: Num) -> Num:
    """The inner product over all parameters that have a gradient."""
    return _reduce("model_sum", a * b, "model_dot")
