"""Matrix states in 8 bits, one codec for each trait, shared by all plans: torch encodes and decodes them, in batches.

Codes are int8 under one scale for 64 neighbours.  Symmetric and orthogonal matrices are rounded to nearest, x = code
scale / 127; triangular factors and averages of low rank, which move by less than half a code, stochastically, with
codes twice as dense at 0, x = code scale / (254 - |code|).  A scale is bf16 without its sign and with one more bit,
rounded up but for 15 units in the last place of fp32, so that the largest of its block has code 127 and encoding what
was read gives the same codes and scales.  A rule itself makes a basis orthogonal before it is written: on each reading
two products would cost more than all other work of a step of SOAP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from optgen.runtime.records import MATRIX_BLOCK
from optgen.runtime.reference.eager import sqrt

_LAST, _TINY = 127.0, 2.0**-126
_LEAST, _MOST, _OCTAVES = 0x20000000, 0x5F700000, 32 << 8
"""The range of a root, 2^-63 to 2^63.9, as fp32 patterns, and the widest of a block, in units of 2^15 of a pattern."""
NAN = -128
"""A scale that reads as NaN."""

Noise = Callable[[int, int], Tensor]
"""(start, stop) -> uniform numbers in [0, 1), fp32 (..., stop - start, 64), of the blocks of a state."""


class MatrixCodec(NamedTuple):
    """encode   (x (..., rows, columns), fp32, fields of the state that it is relative to, noise) -> the fields of a
             state, in the order of `join.MATRICES`; without noise to nearest
    decode   these fields, and those of the other state -> x
    """

    encode: Callable[..., tuple[Tensor, ...]]
    decode: Callable[..., Tensor]


def _blocks(x: Tensor) -> Tensor:
    """Return x (..., rows, columns) as (..., blocks, 64): row after row, filled up with the last number."""
    flat = x.reshape(*x.shape[:-2], x.shape[-2:].numel())
    more = -flat.shape[-1] % MATRIX_BLOCK
    flat = torch.cat([flat, flat[..., -1:].expand(*flat.shape[:-1], more)], -1) if more else flat
    return flat.view(*x.shape[:-2], flat.shape[-1] // MATRIX_BLOCK, MATRIX_BLOCK)


def _coded(x: Tensor, noise: Noise | None = None, dense: bool = False) -> tuple[Tensor, Tensor]:
    """Return the codes (..., rows, columns) of x and the scales (..., blocks, 1) of its neighbours, row after row.

    dense  twice as many codes near 0, softsign's
    """
    flat = _blocks(x)
    size = flat.abs()
    top = size.amax(-1, keepdim=True).view(torch.int32)
    scale = torch.where(top < 0x7F800000, (top + 0x7FF0).clamp(max=0x7F7F8000), 0x7FC00000) >> 15
    by = _scales(scale).clamp(min=_TINY)
    place = (flat * 2 / (size + by) if dense else flat / by) * _LAST
    return _rounded(place, noise, -_LAST, x.shape), scale.to(torch.int16)


def _rounded(place: Tensor, noise: Noise | None, least: float, shape: torch.Size) -> Tensor:
    """Return the codes of blocks in the shape of their matrices, to nearest without noise."""
    place = place.round() if noise is None else (place + noise(0, place.shape[-2])).floor()
    return place.clamp(least, _LAST).to(torch.int8).flatten(-2)[..., : shape[-2:].numel()].reshape(shape)


def _scales(scale: Tensor) -> Tensor:
    return (scale.to(torch.int32) << 15 & 0x7FFFFFFF).view(torch.float32)


def _read(codes: Tensor, scale: Tensor, dense: bool = False) -> Tensor:
    """Return what codes read as, in their shape.  The product has 15 bits, so that code 127 reads as the scale."""
    flat = _blocks(codes).float()
    read = flat * _scales(scale) / (2 * _LAST - flat.abs() if dense else _LAST)
    return read.flatten(-2)[..., : codes.shape[-2:].numel()].reshape(codes.shape)


def _sizes(diagonal: Tensor) -> Tensor:
    """Return what rows or columns are over (..., k, 1): the diagonal's magnitudes, 1 for 0 and subnormal ones; over the
    roots of both, a positive matrix has |x| <= 1."""
    return torch.where(diagonal.abs() < _TINY, 1.0, diagonal.abs())


def _folded(x: Tensor, down: Tensor, across: Tensor) -> Tensor:
    """Fold the strict lower triangle of x (..., k, k) to (..., (k + 1) // 2, k - 1): row k - 1, then row 0 backwards,
    row k - 2, then row 1 backwards, and so on; for an odd k the middle row is followed by zeros.

    down, across  (..., k, 1): what divides rows and columns
    """
    k = x.shape[-1]
    half, width = k + 1 >> 1, k - 1
    at = torch.arange(k, device=x.device)
    x = (x / down / across.mT)[..., :width]
    long, short = x[..., k - half :, :].flip(-2), x[..., :half, :].flip(-1)
    folded = torch.where(at[:half, None] + at[:width] < width, long, short)
    folded[..., k >> 1 :, k >> 1 :] = 0
    return folded


def _unfolded(folded: Tensor, k: int) -> Tensor:
    """Return (..., k, k) whose strict lower triangle was folded; nothing else of it is defined."""
    x = folded.new_empty(*folded.shape[:-2], k, k)
    x[..., k >> 1 :, : k - 1] = folded.flip(-2)
    x[..., : k >> 1, : k - 1] = folded[..., : k >> 1, :].flip(-1)
    return x


def _diagonal(x: Tensor) -> Tensor:
    return x.diagonal(dim1=-2, dim2=-1)[..., None].contiguous()


def _encode_symmetric(x: Tensor, noise: Noise | None = None) -> tuple[Tensor, ...]:
    root = sqrt(_sizes(diagonal := _diagonal(x)))
    return *_coded(_folded(x, root, root)), diagonal


def _decode_symmetric(codes: Tensor, scale: Tensor, diagonal: Tensor) -> Tensor:
    k, root = diagonal.shape[-2], sqrt(_sizes(diagonal))
    x = _unfolded(_read(codes, scale), k)
    x = x.mul_(root).mul_(root.mT).tril_(-1)
    x = x + x.mT
    x.diagonal(dim1=-2, dim2=-1).copy_(diagonal[..., 0])
    return x


def _encode_triangular(x: Tensor, noise: Noise | None = None) -> tuple[Tensor, ...]:
    """Keep of an upper triangular x the diagonal, and what is above it over the diagonal entry of its row."""
    size = _sizes(diagonal := _diagonal(x))
    return *_coded(_folded(x.mT, torch.ones_like(size), size), noise, dense=True), diagonal


def _decode_triangular(codes: Tensor, scale: Tensor, diagonal: Tensor) -> Tensor:
    x = _unfolded(_read(codes, scale, dense=True), diagonal.shape[-2]).mT.triu(1).mul_(_sizes(diagonal))
    x.diagonal(dim1=-2, dim2=-1).copy_(diagonal[..., 0])
    return x


def _encode_nonneg(x: Tensor, noise: Noise | None = None) -> tuple[Tensor, Tensor]:
    """Keep roots by 256 evenly spread fp32 patterns between the smallest and the largest of 64 neighbours.

    Both are kept in 16 bits, rounded down and up (..., blocks, 2); what is further than 32 octaves below the largest
    counts as so far below.
    """
    flat = _blocks(sqrt(x + 0.0)).view(torch.int32)
    least, most = flat.amin(-1, keepdim=True), flat.amax(-1, keepdim=True)
    high = (most.clamp(_LEAST, _MOST) >> 15) + 1
    low = torch.maximum(least.clamp(_LEAST, _MOST) >> 15, high - _OCTAVES)
    ends = torch.cat([low, high], -1).where((most < 0x7F800000) & (least >= 0), NAN)
    place = flat.clamp_(_LEAST, _MOST).sub_(low << 15).float().div_((high - low << 15) // 255)
    return _rounded(place.clamp_(min=0).sub_(_LAST + 1), noise, -_LAST - 1, x.shape), ends.to(torch.int16)


def _root(codes: Tensor, ends: Tensor) -> Tensor:
    """Return the root of what `_encode_nonneg` keeps; 0 of fields of zeros, before the first step."""
    low, high = (x[..., None] for x in (ends.to(torch.int32) & 0xFFFF).unbind(-1))
    flat: Tensor = (_blocks(codes).to(torch.int32) + 128).mul_((high - low << 15) // 255).add_(low << 15)
    return flat.view(torch.float32).flatten(-2)[..., : codes.shape[-2:].numel()].reshape(codes.shape)


CODECS: Mapping[str, MatrixCodec] = {
    "symmetric": MatrixCodec(_encode_symmetric, _decode_symmetric),
    "triangular": MatrixCodec(_encode_triangular, _decode_triangular),
    "orthogonal": MatrixCodec(lambda x, noise=None: _coded(x), _read),
    "low_rank": MatrixCodec(  # over the root of a second moment as that reads: what it is divided by later, too
        lambda x, *base, noise=None: _coded(x / _root(*base) if base else x, noise, dense=True),
        lambda codes, scale, *base: _read(codes, scale, dense=True).mul_(_root(*base) if base else 1),
    ),
    "low_rank_nonneg": MatrixCodec(_encode_nonneg, lambda *fields: _root(*fields).square_()),
}
"""Trait of a matrix state -> its codec."""
