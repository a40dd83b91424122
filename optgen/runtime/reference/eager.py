"""Functions of the eager reference: tensors read in storage blocks, the element counter, and exact arithmetic.

The 2-D view of a tensor: ndim >= 2: rows = shape[0], columns = numel / rows; ndim <= 1: one row.  Blocks
run along the columns of a row and never across rows; the last block of a row may be short.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from optgen.runtime.records import sums


def rows_and_columns(shape: torch.Size) -> tuple[int, int]:
    """(rows, columns) of the 2-D view that blocks are laid along."""
    if len(shape) < 2:
        return 1, math.prod(shape)
    return shape[0], math.prod(shape[1:])


class Blocks:
    """A tensor of `p`'s shape read as (rows, blocks, size); with size 1 it is left as it is.

    `live` is None where every block is full, else a bool tensor (1, blocks, size) that is False in the
    lanes past the end of a row.  `place` says where it lies in the logical tensor that it is a part of (row and column
    of its first element, columns of that tensor); None: it is all of it.
    """

    def __init__(self, p: Tensor, size: int, place: tuple[int, int, int] | None = None) -> None:
        self.shape: torch.Size = p.shape
        self.device: torch.device = p.device
        self.size, self.place = size, place
        self.rows, self.columns = rows_and_columns(p.shape)
        self.blocks = -(-self.columns // size)
        self.padding = self.blocks * size - self.columns
        self.live: Tensor | None = None
        if size > 1 and self.padding:
            lane = torch.arange(self.blocks * size, device=p.device)
            self.live = (lane < self.columns).view(1, self.blocks, size)

    def elements(self, x: Tensor) -> Tensor:
        """x (shape of the parameter) as (rows, blocks, size), padded with zeros."""
        if self.size == 1:
            return x
        x = x.reshape(self.rows, self.columns)
        if self.padding:
            x = torch.nn.functional.pad(x, (0, self.padding))
        return x.view(self.rows, self.blocks, self.size)

    def codes(self, x: Tensor, bits: int) -> Tensor:
        """Packed codes (rows, bytes) as (rows, blocks, size): a byte holds neighbours, the first in its lowest bits."""
        x = torch.stack([x >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], -1).flatten(1)
        missing = self.blocks * self.size - x.shape[1]
        return torch.nn.functional.pad(x, (0, missing)).view(self.rows, self.blocks, self.size)

    def index(self) -> Tensor:
        """The element's number, row by row, where each row fills whole blocks; int32, wraps past 2^31.

        Counted so, eight elements that share a hash never straddle two blocks.
        """
        across = self.blocks * self.size
        row, column, width = self.place or (0, 0, self.columns)
        pace = -(-width // self.size) * self.size
        down = (torch.arange(self.rows, device=self.device) + row) * pace + column
        flat = (down[:, None] + torch.arange(across, device=self.device)).to(torch.int32)
        return flat.view(self.shape if self.size == 1 else (self.rows, self.blocks, self.size))

    def flat(self, x: Tensor) -> Tensor:
        """Values read by `elements`, or that broadcast to them, in the parameter's shape; contiguous, for bits of
        products of matrices depend on strides."""
        if self.size == 1:
            return x.expand(self.shape)
        x = x.expand(self.rows, self.blocks, self.size).reshape(self.rows, -1)[:, : self.columns]
        return x.reshape(self.shape).contiguous()

    def flat_codes(self, x: Tensor, bits: int) -> Tensor:
        """Codes packed as `codes` reads them, (rows, bytes of whole eights); 0 past the end of a row."""
        x = x.expand(self.rows, self.blocks, self.size)
        x = x if self.live is None else torch.where(self.live, x, 0)
        eights = -(-self.columns // 8)
        x = x.reshape(self.rows, -1)[:, : 8 * eights].reshape(self.rows, eights * bits, 8 // bits)
        return sum((x[..., k] << shift for k, shift in enumerate(range(0, 8, bits))), torch.zeros_like(x[..., 0]))

    def spread(self, x: Tensor) -> Tensor:
        """One value per row, column, matrix or tensor (shape (..., rows, 1) and so on) beside the elements."""
        return x if self.size == 1 or x.ndim == 0 else self.elements(x.expand(self.shape))

    def extent(self, name: str) -> Tensor:
        """`rows` or `columns` of the matrix of the last two dimensions, or all `elements`, as fp32."""
        found = {"rows": self.shape[-2:-1], "columns": self.shape[-1:], "elements": self.shape}[name]
        return torch.tensor(math.prod(found), dtype=torch.float32, device=self.device)

    def row_sum(self, x: Tensor) -> Tensor:
        """Sums of the rows of elements: (..., rows, 1)."""
        return sums.rows(self.flat(x), sums.panel_columns(self.size))

    def col_sum(self, x: Tensor) -> Tensor:
        """Sums of the columns of elements: (..., 1, columns)."""
        return sums.columns(self.flat(x))

    def tensor_sum(self, x: Tensor) -> Tensor:
        """The sum of all elements, in the order in which `index` counts them: ()."""
        if self.size > 1:
            x = x.expand(self.rows, self.blocks, self.size)
            x = x if self.live is None else torch.where(self.live, x, 0.0)
        return sums.tensor(x.expand(self.shape if self.size == 1 else x.shape).reshape(-1))

    def row_max(self, x: Tensor) -> Tensor:
        """Largest of each row of elements: (..., rows, 1); NaN where any is."""
        return (self.flat(x) + 0.0).amax(-1, keepdim=True)

    def col_max(self, x: Tensor) -> Tensor:
        """Largest of each column of elements: (..., 1, columns); NaN where any is."""
        return (self.flat(x) + 0.0).amax(-2, keepdim=True)

    def tensor_max(self, x: Tensor) -> Tensor:
        """Largest of all elements: (); NaN where any is."""
        return (self.flat(x) + 0.0).amax()


def few_sum(x: Tensor, space: str) -> Tensor:
    """The sum of few values, one per row, column or matrix, over a matrix (..., 1, 1) or a tensor ()."""
    if space == "tensor":
        return sums.in_lanes(x.reshape(-1))
    return sums.in_lanes(x.flatten(-2))[..., None, None]


def few_max(x: Tensor, space: str) -> Tensor:
    """The largest of few values, likewise; NaN where any is."""
    return (x + 0.0).amax() if space == "tensor" else (x + 0.0).amax((-2, -1), keepdim=True)


def choose(condition: Tensor, x: float, y: float) -> Tensor:
    """x where the condition holds, else y: fp32, or int32 where they are ints; torch's own is of the default dtype."""
    dtype = torch.float32 if isinstance(x, float) else torch.int32
    return torch.where(condition, torch.full((), x, dtype=dtype, device=condition.device), y)


@lru_cache(maxsize=256)
def entries(table: tuple[float, ...], device: torch.device) -> Tensor:
    """Return a table of numbers on a device, fp32."""
    return torch.tensor(table, dtype=torch.float32, device=device)


def scalars(p: Tensor, *values: float) -> tuple[Tensor, ...]:
    """Host scalars as fp32 tensors on p's device: arithmetic with them is then IEEE on every device.

    A Python number as divisor or dividend would not be: torch multiplies by its reciprocal.
    """
    return torch.tensor(values, dtype=torch.float64, device="cpu").to(torch.float32).to(p.device).unbind()


def rotl(x: Tensor, k: Tensor) -> Tensor:
    """int32 rotated left by k % 32 bits."""
    wide = x.long() & 0xFFFFFFFF
    return (wide << (k & 31) | wide >> (-k & 31)).int()


def quotient(x: Tensor | float, y: Tensor | float) -> Tensor:
    """x / y, correctly rounded also where one of them is a Python number.

    A dividend that is one torch multiplies with a reciprocal, on every device; and CUDA multiplies with the reciprocal
    of any divisor that lies on the host, a 0-dim tensor as well.  So both become tensors on the device, by kernels:
    nothing is copied there, which a CUDA graph could not hold.
    """
    if isinstance(y, Tensor):
        return (x if isinstance(x, Tensor) else torch.full_like(y, x)) / y
    assert isinstance(x, Tensor)
    return x / torch.full((), y, dtype=x.dtype, device=x.device)


def larger(x: Tensor, y: Tensor | float) -> Tensor:
    """The larger of two fp32 values, NaN if either is, +0 of two zeros of either sign: as GPUs have it.

    torch's own gives one zero or the other, by the place of an element in its tensor.
    """
    y = y if isinstance(y, Tensor) else torch.full_like(x, y)
    both = (x.view(torch.int32) & y.view(torch.int32)).view(torch.float32)
    return torch.where(x == y, both, torch.maximum(x, y))


def smaller(x: Tensor, y: Tensor | float) -> Tensor:
    """The smaller of two fp32 values, NaN if either is, -0 of two zeros of either sign."""
    y = y if isinstance(y, Tensor) else torch.full_like(x, y)
    either = (x.view(torch.int32) | y.view(torch.int32)).view(torch.float32)
    return torch.where(x == y, either, torch.minimum(x, y))


def sqrt(x: Tensor) -> Tensor:
    """The correctly rounded fp32 square root.

    torch's own on CPU is not (a vector library's: 17 % of fp32 inputs are 1 ulp off); the fp64 root rounded
    to fp32 is, because 53 bits are more than twice 24.
    """
    return x.double().sqrt().float()
