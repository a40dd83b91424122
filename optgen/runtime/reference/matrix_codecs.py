"""Matrix states in 8 bits, one codec for each trait, shared by all plans: torch encodes and decodes them, in batches.

Codes are int8 under one scale for 64 neighbours, to nearest: x = code scale / 127.  A scale is bf16 without its sign
and with one more bit, rounded up but for 15 units in the last place of fp32, so that the largest of its block has code
127 and encoding what was read gives the same codes and scales.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from optgen.runtime.records import MATRIX_BLOCK

_LAST, _TINY = 127.0, 2.0**-126
NAN = -128
"""A scale that reads as NaN."""


class MatrixCodec(NamedTuple):
    """encode   x (..., k, k), fp32 -> the fields of a state, in the order of `join.MATRICES`
    decode   these fields -> x
    """

    encode: Callable[[Tensor], tuple[Tensor, ...]]
    decode: Callable[..., Tensor]


def _coded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes (..., rows, columns) of x and the scales (..., blocks, 1) of its neighbours, row after row."""
    count = x.shape[-2] * x.shape[-1]
    blocks = -(-count // MATRIX_BLOCK)
    flat = x.reshape(*x.shape[:-2], count)
    flat = torch.nn.functional.pad(flat, (0, blocks * MATRIX_BLOCK - count))
    flat = flat.view(*x.shape[:-2], blocks, MATRIX_BLOCK)
    top = flat.abs().amax(-1, keepdim=True).view(torch.int32)
    up = torch.where(top < 0x7F800000, (top + 0x7FF0).clamp(max=0x7F7F8000), 0x7FC00000)
    scale = (up >> 15).to(torch.int16)
    codes = (flat / _scales(scale).clamp(min=_TINY) * _LAST).round().to(torch.int8)
    return codes.flatten(-2)[..., :count].reshape(x.shape), scale


def _scales(scale: Tensor) -> Tensor:
    return (scale.to(torch.int32) << 15 & 0x7FFFFFFF).view(torch.float32)


def _read(codes: Tensor, scale: Tensor) -> Tensor:
    """Return what codes read as, in their shape.  The product has 15 bits, so that code 127 reads as the scale."""
    count = codes.shape[-2] * codes.shape[-1]
    scales = _scales(scale).expand(*scale.shape[:-1], MATRIX_BLOCK).flatten(-2)[..., :count].reshape(codes.shape)
    return codes * scales / _LAST


def _folded(x: Tensor) -> Tensor:
    """Return the strict lower triangle of x (..., k, k) as (..., (k + 1) // 2, k - 1): row k - 1, then row 0 backwards,
    row k - 2, then row 1 backwards, and so on; for an odd k the middle row is followed by zeros."""
    k = x.shape[-1]
    half, width = k + 1 >> 1, k - 1
    long, short = x[..., -half:, :width].flip(-2), x[..., : k >> 1, :width].flip(-1)
    short = torch.nn.functional.pad(short, (0, 0, 0, k & 1))
    return torch.where(_is_long(half, width, x.device), long, short)


def _is_long(half: int, width: int, device: torch.device) -> Tensor:
    at = torch.arange(max(half, width), device=device)
    return at[:half, None] + at[:width] < width


def _unfolded(x: Tensor, k: int) -> Tensor:
    """Return the strict lower triangle that was folded, zeros elsewhere."""
    rows = torch.cat([x[..., : k - x.shape[-2], :].flip(-1), x.flip(-2)], -2)
    return torch.nn.functional.pad(rows, (0, 1)).tril(-1)


def _roots(diagonal: Tensor) -> Tensor:
    """Return what divides rows and columns (..., k, 1): roots of the diagonal, 1 for 0; of a positive matrix they leave
    |x| <= 1."""
    root = diagonal.abs().sqrt()
    return torch.where(root == 0, 1.0, root)


def _encode_symmetric(x: Tensor) -> tuple[Tensor, ...]:
    diagonal = x.diagonal(dim1=-2, dim2=-1)[..., None].contiguous()
    root = _roots(diagonal)
    return *_coded(_folded(x / root / root.mT)), diagonal


def _decode_symmetric(codes: Tensor, scale: Tensor, diagonal: Tensor) -> Tensor:
    root = _roots(diagonal)
    lower = _unfolded(_read(codes, scale), diagonal.shape[-2]) * root * root.mT
    return lower + lower.mT + diagonal[..., 0].diag_embed()


def _decode_orthogonal(codes: Tensor, scale: Tensor) -> Tensor:
    """Take one step towards the nearest orthogonal matrix (Bjoerck and Bowie 1971): the eigenvalues 1 + e of q' q
    become 1 - 3/4 e^2 + 1/4 e^3."""
    q = _read(codes, scale)
    return 1.5 * q - 0.5 * (q @ (q.mT @ q))


CODECS: Mapping[str, MatrixCodec] = {
    "symmetric": MatrixCodec(_encode_symmetric, _decode_symmetric),
    "orthogonal": MatrixCodec(_coded, _decode_orthogonal),
}
"""Trait of a matrix state -> its codec."""
