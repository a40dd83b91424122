"""The order in which sums are taken: the same bits for every tiling, number of threads and backend in strict maths.

Floating-point addition is not associative, so the order is part of what a sum is.  A matrix is the last two
dimensions; all orders depend on the shape alone.

    row of a matrix       panels of W columns (W = 16 storage blocks; 1024 where nothing is in blocks), each folded;
                          then panel after panel
    column of a matrix    panels of 64 rows, row after row; then panel after panel
    tensor                segments of 16384 elements, each in 256 lanes; then the segments' sums in 256 lanes
    few values            (rows of a matrix, matrices of a tensor ...) in 256 lanes

`fold` adds the upper half of a vector to the lower one until one value is left; *in 256 lanes* means that lane j adds
values j, j + 256, j + 512 ... one after the other and the lanes are folded.  What is missing counts as 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

LANES = 256
SEGMENT = 64 * LANES
"""Elements whose sum is one partial of a tensor's."""

PANEL_ROWS = 64
"""Rows of a matrix whose sum is one partial of a column's."""


def panel_columns(block: int) -> int:
    """Columns of a matrix whose sum is one partial of a row's."""
    return 1024 if block == 1 else 16 * block


def fold(x: Tensor) -> Tensor:
    """Halves added until one value is left, along the last dimension (a power of two)."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def _padded(x: Tensor, multiple: int) -> Tensor:
    """x with zeros behind it along the last dimension."""
    missing = -x.shape[-1] % multiple
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def _cut(x: Tensor, size: int) -> Tensor:
    """The last dimension, a multiple of size, as (..., parts, size)."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def in_order(x: Tensor, dim: int) -> Tensor:
    """Add the entries along a dimension one after the other, beginning with 0."""
    total = torch.zeros_like(x.select(dim, 0)) if x.shape[dim] else x.sum(dim)
    for part in x.unbind(dim):
        total = total + part
    return total


def in_lanes(x: Tensor) -> Tensor:
    """The last dimension in 256 lanes."""
    x = _padded(x, LANES)
    return fold(in_order(_cut(x, LANES), -2))


def rows(x: Tensor, panel: int) -> Tensor:
    """Sums of the rows of (..., rows, columns): (..., rows, 1)."""
    x = _padded(x, panel)
    return in_order(fold(_cut(x, panel)), -1).unsqueeze(-1)


def columns(x: Tensor) -> Tensor:
    """Sums of the columns of (..., rows, columns): (..., 1, columns)."""
    x = _padded(x.mT, PANEL_ROWS)
    return in_order(in_order(_cut(x, PANEL_ROWS), -1), -1).unsqueeze(-2)


def tensor(x: Tensor) -> Tensor:
    """The sum of a flat tensor: ()."""
    x = _padded(x, SEGMENT)
    return in_lanes(in_lanes(_cut(x, SEGMENT)))
