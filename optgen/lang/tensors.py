"""The meanings of primitives on torch tensors, in the tensors' own dtype; integers are int32 and wrap."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from optgen.ops.dtypes import PRECISION, DType
from optgen.ops.prims import PRIMS, SCOPES, holds
from optgen.ops.tables import Table

Operand = Any  # Tensor | float


class Matrices(torch.Tensor):
    """A tensor of matrices (..., rows, columns), whose T is each of them transposed."""

    __module__ = "torch"  # by which readings are told apart

    @property
    def T(self) -> Any:  # type: ignore[override]  # noqa: N802 - as torch and NumPy have it
        return self.mT


def stacked(x: Any) -> Any:
    """x as Matrices, if it is a tensor."""
    return x.as_subclass(Matrices) if isinstance(x, torch.Tensor) else x


def _both(a: Operand, b: Operand) -> tuple[Any, Any]:
    """Return two operands, one of them a tensor at least, as tensors of its dtype and device."""
    like = a if isinstance(a, torch.Tensor) else b

    def made(x: Operand) -> Any:
        return x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=like.dtype, device=like.device)

    return made(a), made(b)


def _sqrt(x: Any) -> Any:
    # torch's fp32 root on CPU is up to 1 ulp off; the fp64 root rounded once is exact.
    return x.double().sqrt().float() if x.dtype is torch.float32 else x.sqrt()


def _where(c: Any, a: Operand, b: Operand) -> Any:
    if not isinstance(c, torch.Tensor):
        return a if holds(c) else b
    c = c if c.dtype is torch.bool else (c & 1).bool()  # of one that met ~ of a condition of numbers
    if not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor):
        # A condition does not know the precision that it came from.  By default two numbers that f32 holds
        # exactly are given as f32, which any arithmetic widens without loss; others keep their fp64 value.
        exact = all(torch.tensor(x, dtype=torch.float32).item() == x for x in (a, b))
        dtype = PRECISION.get() or (torch.float32 if exact else torch.float64)
        a = torch.tensor(a, dtype=dtype, device=c.device)
    return torch.where(c, *_both(a, b))


def _entries(table: Table, x: Any) -> Any:
    return torch.tensor(table.values, dtype=torch.float32, device=x.device)


def _search(x: Any, attr: Table) -> Any:
    count = torch.searchsorted(_entries(attr, x), x.contiguous(), right=True, out_int32=True)
    return torch.where(x == x, count, 0)


def _dtype(dtype: DType) -> torch.dtype:
    torch_dtype: torch.dtype = getattr(torch, dtype.torch)
    return torch_dtype


_MEANINGS: dict[str, Callable[..., Any]] = {
    "sqrt": _sqrt, "where": _where, "search": _search, "pow": operator.pow, "eq": operator.eq,
    "max": lambda a, b: torch.maximum(*_both(a, b)),
    "min": lambda a, b: torch.minimum(*_both(a, b)),
    "sign": lambda x: torch.where(x > 0, 1.0, torch.where(x < 0, -1.0, x)).to(x.dtype),
    "atan2": lambda y, x: torch.atan2(*_both(y, x)),
    "cbrt": lambda x: x.sign() * x.abs() ** (1 / 3),
    "rsqrt": lambda x: 1 / _sqrt(x),
    "rcp": lambda x: 1 / x,
    "lshr": lambda x, k: (x >> k) & ((1 << (32 - k)) - 1),
    "narrow": lambda x, y, z, attr: z,
    "cast": lambda x, attr: x.to(_dtype(attr)),
    "bitcast": lambda x, attr: x.view(_dtype(attr)),
    "lookup": lambda x, attr: _entries(attr, x)[x.long()],
    # A tensor read in blocks has shape (..., blocks, size).
    "block_max": lambda x, attr: x.amax(-1, keepdim=True),
    "block_min": lambda x, attr: x.amin(-1, keepdim=True),
}  # fmt: skip
"""The meanings of primitives that are no function of torch (`Prim.tensor`)."""


def _reduction(name: str) -> Callable[[Any], Any]:
    """Return row_sum, col_mean, tensor_max ...: the named dimensions are kept with length 1."""
    scope, kind = name.split("_")
    dims = SCOPES[scope]

    def reduce(x: Any) -> Any:
        apply = {"sum": x.sum, "mean": x.mean, "max": x.amax}[kind]
        if dims is None:
            return apply()
        reduced = tuple(d for d in dims if -d <= x.dim())  # a vector is one row: its columns are its elements
        return apply(reduced, keepdim=True) if reduced else x

    return reduce


class TensorReader:
    """The reader that computes with tensors."""

    column = "tensor"

    def __getattr__(self, name: str) -> Any:
        if name in PRIMS and PRIMS[name].tensor:
            return getattr(torch, PRIMS[name].tensor)
        if name.split("_")[0] in SCOPES:
            return _reduction(name)
        if name not in _MEANINGS:
            raise AttributeError(name)
        return _MEANINGS[name]


READER = TensorReader()
