"""Blocks of rows: `AdamMini(model.named_parameters(), blocks={"*.q_proj.weight": 32, "*.k_proj.weight": 8})`.

A rule of `matrix="blocks"` has a statistic for each row of a matrix, unless its user says into how many blocks of
consecutive rows a parameter falls (attention heads, say): then each block is one row.  A parameter of shape
(rows, ...) in n blocks is seen as (n, elements of a block) by kernels, formats and random bits alike, so that it takes
the steps of a parameter of that shape.  Under a rule of matrix="heads" each block is a matrix: a block of one index of
a tensor of three dimensions (an expert of a stack) one of the other two, any other one of its rows against the rest.
More blocks than a stack has matrices are heads of each of them.  Numbers of rows, as of queries, keys and values that
share a matrix, make each a matrix of its own: a step takes views of the parameter and its states for parameters
(`Bucket.divide`).

What is asked for is decided once, when a parameter comes into the optimizer, and is recorded in its group under
"blocks", by name (by position over all groups where parameters have no names).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from optgen.runtime.layout import plans
from optgen.runtime.layout.layout import matrix_shape
from optgen.runtime.options import overrides
from optgen.runtime.records import Heads, Matrix, Variant, as_int, by_shape, in_blocks, keys

Count = int | tuple[int, ...]
"""A number of equal blocks of rows, or the number of rows of each of them."""

Recorded = tuple[tuple[plans.Label, Count], ...]
"""Into how many blocks single parameters fall."""

def _equal(rows: Sequence[int]) -> str:
    """Return what to do instead of blocks of these rows."""
    size = math.gcd(*rows)
    return f"as heads these are {sum(rows) // size} of {size} rows; otherwise make them parameters of their own"


class BlockOverrides(overrides.Overrides):
    """All entries of `blocks`."""

    OPTION: ClassVar[str] = "blocks"
    EXAMPLE: ClassVar[str] = "{'*.q_proj.weight': 32}"
    VALUE: ClassVar[str] = "number of blocks"

    @classmethod
    def checked(cls, owner: Any, value: Any, where: str) -> Count:
        count = None if isinstance(value, bool) else as_int(value)
        rows = [0 if isinstance(x, bool) else as_int(x) or 0 for x in value] if isinstance(value, (tuple, list)) else ()
        if rows and min(rows) > 0:
            if owner.BLOCKS == "heads":
                return tuple(rows)
            raise ValueError(f"{where}: blocks have equal numbers of rows, got {value!r:.80}: {_equal(rows)}")
        if count is None:
            more = ", or the rows of each" if owner.BLOCKS == "heads" else ""
            raise TypeError(f"{where}: expected a number of blocks{more}, got {value!r:.80}")
        if count < 1:
            raise ValueError(f"{where}: expected 1 block or more, got {count}")
        return count


def decided(
    cls: Any, own: BlockOverrides, given: Any, tensors: Sequence[Tensor], labels: Sequence[plans.Label]
) -> dict[str, Recorded]:
    """Return {"blocks": those of single parameters in a new group}, or {}; arguments as in `Overrides.asked`.

    Raises ValueError for a parameter that cannot fall into so many blocks.
    """
    found, exact = [], {*(rule.pattern for rule in own.rules), *(given if isinstance(given, Mapping) else ())}
    for p, label, count in zip(tensors, labels, own.asked(cls, given, tensors, labels), strict=True):
        # A pattern may name biases, too.
        if count is not None and (p.ndim > 1 or cls.BLOCKS != "heads" or (count != 1 and label in exact)):
            try:
                height(p.shape, count, cls.BLOCKS == "heads")
            except ValueError as error:
                raise ValueError(f"{own.where}: parameter {label!r} {error}") from None
            found.append((label, count))
    return {"blocks": tuple(found)} if found else {}


def height(shape: torch.Size, count: Count, heads: bool) -> int:
    """Return the rows of each of so many blocks of a parameter of that shape, of all if they are not equal.

    Raises ValueError if there are no such.
    heads  each block is a matrix, also one of some rows of each matrix of a stack
    """
    if len(shape) < 2:
        raise ValueError(
            f"of shape {list(shape)} has no rows, and is one block as it is: name matrices only, as '*.weight' does"
        )
    if isinstance(count, tuple):
        if heads and len(shape) == 3 and by_shape(shape) == "last":
            raise ValueError(f"of shape {list(shape)} is a stack of matrices, which take a number of equal blocks")
        if sum(count) != shape[0]:
            raise ValueError(f"of shape {list(shape)} has {shape[0]} rows, not {' + '.join(map(str, count))}")
        return shape[0]
    if heads and len(shape) == 3 and count > shape[0] and not count % shape[0] and not math.prod(shape[:2]) % count:
        return math.prod(shape[:2]) // count
    if shape[0] % count:
        raise ValueError(f"of shape {list(shape)} has {shape[0]} rows, which do not fall into {count} equal blocks")
    return shape[0] // count


def of(cls: Any, group: Mapping[str, Any]) -> Mapping[plans.Label, Count]:
    """Return the numbers of blocks of single parameters of a group.  TypeError for what is no record."""
    return keys.table(group.get("blocks") if cls.BLOCKS else None, functools.partial(BlockOverrides.recorded, cls))


def shape(cls: Any, p: Tensor, count: Count | None) -> tuple[int, ...]:
    """Return the shape that flags see of a parameter in so many blocks: (..., rows, columns) of its matrices under a
    rule of matrix="heads", else its own.  ValueError as of `height`."""
    heads = cls.BLOCKS == "heads"
    matrix = _matrix("heads" if heads else "first", p, count if p.ndim > 1 else None)
    return tuple(matrix_shape(matrix, p.shape) if heads else p.shape)


def seen(
    cls: Any, variant: Variant, p: Tensor, count: Count | None, group: Mapping[str, Any], name: plans.Label | None
) -> Variant:
    """Return the variant for a parameter in so many blocks; None: in those that its rule has.  ValueError as of
    `height`, and for unequal blocks that cannot be parameters of their own in a step."""
    if isinstance(count, tuple) and (why := _inseparable(cls, variant, p, count, group)):
        raise ValueError(
            f"{cls.__name__}: blocks: parameter {name!r} of shape {list(p.shape)} is no {len(count)} matrices of "
            f"{', '.join(map(str, count))} rows: {why}; {_equal(count)}"
        )
    matrix = _matrix(variant.matrix, p, count if variant.needs_matrix else None)
    rank = next((int(group[f.rank]) for f in variant.fields if isinstance(f.rank, str)), 0)
    return variant if matrix == variant.matrix and not rank else in_blocks(variant, matrix, rank)


def _inseparable(cls: Any, variant: Variant, p: Tensor, rows: tuple[int, ...], group: Mapping[str, Any]) -> str:
    """Return why a step cannot take views of so many rows of a parameter for parameters; "" if it can."""
    shapes = [(n, math.prod(p.shape[1:])) for n in (p.shape[0], *rows)]
    for flag in cls.FLAGS:
        if flag.shape is not None and len({flag.holds(x, group) for x in shapes}) > 1:
            return f"{flag.name} holds for some of them only"
    return undivided(variant) if variant.needs_matrix else ""


def undivided(variant: Variant) -> str:
    """Return why the rows of a matrix cannot be parameters of their own in a step; "" if they can."""
    for f in variant.fields:
        if f.space not in ("elem", "row"):
            return f"{f.owner} is kept for all rows together, not for each"
    summed = any(t.space in ("tensor", "model") and t.reduction for t in variant.temps)
    return "the rule sums over the whole parameter" if summed else ""


def _matrix(own: Matrix, p: Tensor, count: Count | None) -> Matrix:
    heads = own == "heads"
    if isinstance(count, tuple):
        height(p.shape, count, heads)
        count = 1
    if count is None or not p.numel() or (heads and count == 1 and p.ndim == 2):
        return by_shape(p.shape) if heads else own
    rows = height(p.shape, count, heads)
    if heads:
        of_stack = p.ndim == 3 and count >= p.shape[0] > 1
        whole = "first" if count == 1 else "last" if of_stack and count == p.shape[0] else None
        return whole or Heads(rows, of_stack)
    return own if rows == 1 else rows
