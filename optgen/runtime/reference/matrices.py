"""Functions of whole matrices, which torch computes between two sweeps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

from optgen.runtime.records import keys, series

LARGE = 1024
"""Rows from which symmetric products are worth blocks on a CPU, in bf16; a fourth of them in fp32."""


def newton_schulz(x: Tensor, steps: float, normalize: float, eps: float, *coefficients: float) -> Tensor:
    """x (rows, columns), its singular values brought near 1: bf16; leading dimensions are a batch.

    In bf16 throughout, with the operations of torch.optim.Muon in its order, so that it gives the same bits.

    normalize     unless 0, divide by the Frobenius norm first, which is eps at least
    coefficients  a, b and c of each round, or one number that stands for them (series.number); those of the last round
                  are those of all further ones
    """
    if x.ndim > 3:
        return newton_schulz(x.flatten(0, -3), steps, normalize, eps, *coefficients).view(x.shape)
    x = x.to(torch.bfloat16)
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    if normalize:
        x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    if len(coefficients) == 1:
        coefficients = tuple(x for t in series.SEEN[int(coefficients[0])] for x in t)
    triples = [coefficients[k : k + 3] for k in range(0, len(coefficients), 3)]
    rounds = [triples[min(k, len(triples) - 1)] for k in range(int(steps))]
    large = x.device.type == "cpu" and x.shape[-2] >= LARGE
    for a, b, c in rounds:
        square = gram(x) if large else x @ x.mT
        x = _sum(a, x, 1.0, (_symmetric if large else _sum)(b, square, c, square, square) if c else b * square, x)
    return x if wide else x.mT


def _largest(x: Tensor, fraction: float) -> tuple[Tensor, int]:
    """The numbers of the rows of largest l1 norm, of equal ones the first, and their dimension, -2; of columns, and -1,
    where there are fewer.  Fractions come rounded to fp32, so that a whole number of rows may be a little more."""
    dim = -2 if x.shape[-2] <= x.shape[-1] else -1
    count = max(1, math.ceil(fraction * x.shape[dim] * (1 - 2**-22)))
    order = x.abs().sum(-3 - dim).argsort(dim=-1, descending=True, stable=True)
    return order[..., :count].sort().values.unsqueeze(-3 - dim), dim


def top_rows(x: Tensor, fraction: float) -> Tensor:
    """x with zeros outside of that fraction of its rows (columns, where there are fewer), those of largest l1 norm."""
    order, dim = _largest(x, fraction)
    rows = torch.zeros_like(x.narrow(-3 - dim, 0, 1), dtype=torch.bool)
    return x.where(rows.scatter(dim, order, True), 0.0)


def newton_schulz_of_rows(x: Tensor, fraction: float, *numbers: float) -> Tensor:
    """newton_schulz of the rows (columns, where there are fewer) that `top_rows` takes of x, alone; zeros elsewhere."""
    order, dim = _largest(x, fraction)
    some = torch.take_along_dim(x, order, dim)
    made = newton_schulz(some, *numbers).to(x.dtype)
    return torch.zeros_like(x).scatter(dim, order.expand_as(some), made)


NOTED: ContextVar[list[Tensor] | None] = ContextVar("NOTED", default=None)
"""The list to which `finite` adds a tensor of bool per batch, True for a matrix that is not; None if nobody asks."""


def finite(x: Tensor, other: Tensor | float) -> Tensor:
    """x (..., rows, columns), but `other` in place of each matrix that has a NaN or an infinity."""
    good = x.amax((-2, -1), keepdim=True).isfinite() & x.amin((-2, -1), keepdim=True).isfinite()
    if (noted := NOTED.get()) is not None:
        noted.append(~good.flatten())
    return x if x.device.type == "cpu" and bool(good.all()) else torch.where(good, x, other)


FLOPS: Mapping[str, Callable[[int, int], int]] = {
    "newton_schulz": lambda m, n: 4 * min(m, n) ** 2 * max(m, n) + 2 * min(m, n) ** 3,  # a round
}
"""The cost of a function for a matrix of m rows and n columns, in a unit of its own: ranks share work by it."""


def products(m: int, n: int, spaces: Collection[str] = ()) -> int:
    """Return the cost of other functions: of products with the factors of these spaces, or of both sides if none is."""
    return m * n * (sum(k for k, space in ((m, "mm"), (n, "nn"), (min(m, n), "ss")) if space in spaces) or m + n)


def _sum(beta: float, x: Tensor, alpha: float, left: Tensor, right: Tensor) -> Tensor:
    """beta x + alpha left right."""
    return (torch.baddbmm if x.ndim == 3 else torch.addmm)(x, left, right, beta=beta, alpha=alpha)


def _symmetric(beta: float, x: Tensor | None, alpha: float, left: Tensor, right: Tensor) -> Tensor:
    """beta x + alpha left right, which is symmetric, by blocks, each with its mirror image once.  The bits are those of
    one product, whose entries are sums in the order of `left`'s columns."""
    if left.ndim > 2:
        each = zip(left, right, itertools.repeat(None) if x is None else x, strict=False)
        return torch.stack([_symmetric(beta, y, alpha, a, b) for a, b, y in each])
    size = left.shape[-2]
    whole = left.new_empty(size, size)
    for a, b in itertools.pairwise(size * k // 8 for k in range(9)):
        rows, columns = left[a:b], right[:, a:]
        whole[a:b, a:] = made = rows @ columns if x is None else _sum(beta, x[a:b, a:], alpha, rows, columns)
        whole[b:, a:b] = made[:, b - a :].mT
    return whole


def gram(x: Tensor) -> Tensor:
    """x @ x.mT."""
    large = x.device.type == "cpu" and x.shape[-2] >= (LARGE if x.dtype == torch.bfloat16 else LARGE // 4)
    return _symmetric(0.0, None, 1.0, x, x.mT) if large else x @ x.mT


class Product(NamedTuple):
    """The product left @ right, before it is computed."""

    left: Tensor
    right: Tensor

    def computed(self, out: Sequence[Tensor] = ()) -> Tensor:
        """Return the product: in `out` if that is memory of one matrix of its dtype."""
        fits = len(out) == 1 and out[0].dtype == self.left.dtype
        return torch.matmul(*self, out=out[0] if fits else None)


def qr(x: Tensor) -> Tensor:
    """The orthogonal factor of x = q r (..., rows, columns), of the shape of x."""
    q: Tensor = torch.linalg.qr(x).Q
    return q


def _factors(function: Callable[[Tensor], Sequence[Tensor]], x: Tensor) -> list[Tensor]:
    """A decomposition of matrices: of all in fp64 where fp32 does not converge for one of them (MKL's LAPACK may then
    return NaN and no error), and NaN where that does not, or where a matrix is not finite: LAPACK raises for all."""
    good = x.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    x = torch.where(good, x, 0.0)
    for dtype in (x.dtype, torch.float64):
        try:
            found = [y.to(x.dtype) for y in function(x.to(dtype))]
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            continue
        if all(y.isfinite().all() for y in found):
            break
    else:
        if x.ndim > 2:
            each = zip(*(_factors(function, one) for one in x.flatten(0, -3)), strict=True)
            # By columns, as LAPACK returns a batch: products of another layout round otherwise.
            stacked = (torch.stack([y.mT for y in ys]).mT if ys[0].ndim > 1 else torch.stack(ys) for ys in each)
            return [y.view(*x.shape[:-2], *y.shape[1:]) for y in stacked]
        found, good = list(function(torch.zeros_like(x))), torch.zeros_like(good)
    return [torch.where(good if y.ndim == x.ndim else good[..., 0], y, math.nan) for y in found]


def eigenvectors(x: Tensor) -> Tensor:
    """The eigenvectors of a symmetric x, as columns, those of the largest eigenvalues first."""
    return _factors(torch.linalg.eigh, x)[1].flip(-1)


def orthogonal_iteration(x: Tensor, basis: Tensor) -> Tensor:
    """The orthogonal factor of x times basis; the eigenvectors of x where basis is 0, as before the first step."""
    new, fresh = qr(x @ basis), (basis == 0).all(-1).all(-1)
    return torch.where(fresh[..., None, None], eigenvectors(x), new) if bool(fresh.any()) else new


def sorting(x: Tensor) -> Tensor:
    """The permutation matrix s for which s' x s has its diagonal in falling order."""
    order = x.diagonal(dim1=-2, dim2=-1).argsort(dim=-1, descending=True, stable=True)
    return torch.nn.functional.one_hot(order, x.shape[-1]).mT.to(x.dtype)


def inverse_root(x: Tensor, p: float, eps: float = 0.0) -> Tensor:
    """(x + eps I) ** (-1 / p) of a symmetric x whose eigenvalues are not negative; eps relative to the largest one."""
    values, vectors = _factors(torch.linalg.eigh, x)
    values = values.clamp(min=0)
    values = values + eps * values[..., -1:]
    root: Tensor = vectors * values.clamp(min=torch.finfo(x.dtype).tiny).pow(-1 / p)[..., None, :] @ vectors.mT
    return root


def bjorck(x: Tensor, steps: float) -> Tensor:
    """x after rounds of 1.5 x - .5 x x' x, which bring singular values near 1 to 1."""
    for _ in range(int(steps)):
        half = 0.5 * x
        x = 1.5 * x - (half @ (x.mT @ x) if x.shape[-2] >= x.shape[-1] else half @ x.mT @ x)
    return x


def solve_triangular(b: Tensor, a: Tensor, upper: float) -> Tensor:
    """The solution x of a x = b for a triangular a."""
    x: Tensor = torch.linalg.solve_triangular(a, b, upper=bool(upper))
    return x


def triangle(x: Tensor) -> Tensor:
    """x with zeros below its diagonal."""
    return x.triu()


def norm_lower_bound(x: Tensor) -> Tensor:
    """A lower bound of the spectral norm of a symmetric x, in every place: of x y for y along x times its longest
    column, the bound of Li's psgd_torch."""
    tiny = torch.finfo(x.dtype).tiny
    top = x.amax((-2, -1), keepdim=True).maximum(-x.amin((-2, -1), keepdim=True))
    x = x / top.clamp(min=tiny)
    longest = x.norm(dim=-1, keepdim=True).argmax(-2, keepdim=True)
    y = x @ x.gather(-1, longest.expand(*x.shape[:-1], 1))
    y = x @ (y / y.norm(dim=-2, keepdim=True).clamp(min=tiny))
    bound: Tensor = y.norm(dim=-2, keepdim=True) * top
    return bound.expand_as(x)


def identity(x: Tensor) -> Tensor:
    """The identity matrix of the shape of a square x."""
    return torch.eye(x.shape[-1], dtype=x.dtype, device=x.device).expand_as(x)


def wide(x: Tensor) -> Tensor:
    """x (..., rows, columns), or its transpose where it has no more columns than rows."""
    return x if x.shape[-2] < x.shape[-1] else x.mT


def unwide(like: Tensor, x: Tensor | Product) -> Tensor | Product:
    """The inverse of `wide` for an x that was `like`, or has its shape."""
    if like.shape[-2] < like.shape[-1]:
        return x
    return Product(x.right.mT, x.left.mT) if isinstance(x, Product) else x.mT


def zero_product(a: Tensor, b: Tensor) -> Tensor:
    """Zeros in the shape of a @ b."""
    return a.new_zeros(()).expand(*a.shape[:-1], b.shape[-1])


def singular_vectors(like: Tensor, x: Tensor) -> Tensor:
    """The first left singular vectors of x, as many as `like` has columns; NaN where x is not finite.

    The entry of largest magnitude of each is positive.
    """
    u = _factors(lambda y: torch.linalg.svd(y, full_matrices=False)[::2], x)[0][..., : like.shape[-1]]
    return u * u.gather(-2, u.abs().argmax(-2, keepdim=True)).sign()


def column_norms(like: Tensor, x: Tensor) -> Tensor:
    """The Euclidean norm of each column of x, for every row of `like`."""
    norms: Tensor = x.norm(dim=-2, keepdim=True)
    return norms.expand_as(like)


def streams(stream: int, lead: Sequence[int], device: torch.device, first: int = 0) -> Tensor:
    """The stream keys of a parameter's matrices, which have these leading dimensions: int64 (*lead, 1, 1).

    first  number of the first one in the parameter
    """
    return ((stream + torch.arange(first, first + math.prod(lead), device=device) * keys.M3) % 2**32).view(*lead, 1, 1)


def normal(like: Tensor, key: float, stream: Tensor) -> Tensor:
    """Standard normal numbers in the shape of `like`, of two uniform ones each (Box & Muller 1958), in fp64.

    On a CPU they are made of as many rows at a time as fit into its caches: each new tensor of the size of a matrix
    costs page faults, 9 ms for 3072 x 3072.
    """
    whole, (rows, columns) = like.new_empty(like.shape), like.shape[-2:]
    each = max(2**16 * rows // max(like.numel(), 1), 1) if like.device.type == "cpu" else max(rows, 1)
    for start in range(0, rows, each):
        stop = min(start + each, rows)
        words = (_words(start, stop, columns, int(key), stream, k) for k in (0, 1))
        a, b = (x.double().add_(0.5) / 2**24 for x in words)
        whole[..., start:stop, :] = a.log_().mul_(-2).sqrt_().mul_(b.mul_(2 * math.pi).cos_())
    return whole


class Rounding(NamedTuple):
    """The noise by which a step rounds a matrix state: uniform numbers in [0, 1) of blocks of 64.

    key     of the step and the state
    stream  keys of the matrices (..., 1, 1)
    """

    key: int
    stream: Tensor

    def __call__(self, start: int, stop: int) -> Tensor:
        return _words(start, stop, 64, self.key, self.stream).to(torch.float32).mul_(2**-24)


def rounding(name: str, step_key: int, stream: Tensor) -> Rounding:
    """Return the noise of a matrix state by this name."""
    return Rounding(keys.signed(step_key ^ keys.stream_key(name)), stream)


def _words(start: int, stop: int, columns: int, key: int, stream: Tensor, which: int | None = None) -> Tensor:
    """24 random bits for each place in some rows, as int32: `which` of two, or the only ones.  Hashes of places and of
    keys are mixed before they meet, so that no two parameters have the same numbers in another order."""
    place = torch.arange(start * columns, stop * columns, device=stream.device).to(torch.int32).view(-1, columns)
    of_place = _mixed(place if which is None else 2 * place + which)
    of_key = _mixed(torch.full_like(stream, keys.signed(key), dtype=torch.int32))
    return _mixed(of_place + _mixed(stream.to(torch.int32) + of_key)) >> 8 & 2**24 - 1


def _mixed(x: Tensor) -> Tensor:
    """A bijection of 32 bits that avalanches (Wellons 2018, lowbias32), on int32."""
    x = (x ^ x >> 16 & 0xFFFF).mul_(keys.M1)
    x ^= x >> 15 & 0x1FFFF
    x *= keys.M2 - 2**32
    x ^= x >> 16 & 0xFFFF
    return x
