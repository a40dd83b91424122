"""Matrix states in 8 bits, one codec for each trait, shared by all plans: torch encodes and decodes them, in batches.

Codes are int8 under one scale for 64 neighbours, to nearest: x = code scale / 127.  A scale is bf16 without its sign
and with one more bit, rounded up but for 15 units in the last place of fp32, so that the largest of its block has code
127 and encoding what was read gives the same codes and scales.  A rule itself makes a basis orthogonal before it is
written: on each reading two products would cost more than all other work of a step of SOAP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from optgen.runtime.records import MATRIX_BLOCK

_LAST, _TINY = 127.0, 2.0**-126
NAN = -128
"""A scale that reads as NaN."""
AT_ONCE = 2**17
"""Numbers that are worked on at a time on a CPU."""


class MatrixCodec(NamedTuple):
    """encode   x (..., k, k), fp32 -> the fields of a state, in the order of `join.MATRICES`
    decode   these fields -> x
    """

    encode: Callable[[Tensor], tuple[Tensor, ...]]
    decode: Callable[..., Tensor]


def panels(x: Tensor, rows: int) -> Iterator[tuple[int, int]]:
    """Yield the ends of stretches of rows like those of x (..., rows, columns): on a CPU what is made of one stays in
    its caches, while each new tensor of the size of a matrix costs page faults, 9 ms for 3072 x 3072."""
    each = x.shape[:-2].numel() * x.shape[-1]
    size = max(AT_ONCE // max(each, 1), 1) if x.device.type == "cpu" else max(rows, 1)
    return ((a, min(a + size, rows)) for a in range(0, rows, size))


def _blocks(x: Tensor) -> Tensor:
    """Return x (..., rows, columns) as (..., blocks, 64): row after row, filled up with zeros."""
    flat = x.reshape(*x.shape[:-2], x.shape[-2:].numel())
    more = -flat.shape[-1] % MATRIX_BLOCK
    flat = torch.nn.functional.pad(flat, (0, more)) if more else flat
    return flat.view(*x.shape[:-2], flat.shape[-1] // MATRIX_BLOCK, MATRIX_BLOCK)


def _coded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes (..., rows, columns) of x and the scales (..., blocks, 1) of its neighbours, row after row."""
    flat = _blocks(x)
    codes = torch.empty_like(flat, dtype=torch.int8)
    scale = torch.empty_like(flat[..., :1], dtype=torch.int16)
    for a, b in panels(flat, flat.shape[-2]):
        some = flat[..., a:b, :]
        top = some.abs().amax(-1, keepdim=True).view(torch.int32)
        up = torch.where(top < 0x7F800000, (top + 0x7FF0).clamp(max=0x7F7F8000), 0x7FC00000)
        scale[..., a:b, :] = up >> 15
        codes[..., a:b, :] = (some / _scales(scale[..., a:b, :]).clamp(min=_TINY)).mul_(_LAST).round_()
    return codes.flatten(-2)[..., : x.shape[-2:].numel()].reshape(x.shape), scale


def _scales(scale: Tensor) -> Tensor:
    return (scale.to(torch.int32) << 15 & 0x7FFFFFFF).view(torch.float32)


def _read(codes: Tensor, scale: Tensor) -> Tensor:
    """Return what codes read as, in their shape.  The product has 15 bits, so that code 127 reads as the scale."""
    flat = _blocks(codes)
    out = torch.empty(flat.shape, dtype=torch.float32, device=flat.device)
    for a, b in panels(flat, flat.shape[-2]):
        torch.mul(flat[..., a:b, :], _scales(scale[..., a:b, :]), out=out[..., a:b, :]).div_(_LAST)
    return out.flatten(-2)[..., : codes.shape[-2:].numel()].reshape(codes.shape)


def _roots(diagonal: Tensor) -> Tensor:
    """Return what divides rows and columns (..., k, 1): roots of the diagonal, 1 for 0; of a positive matrix they leave
    |x| <= 1."""
    root = diagonal.abs().sqrt()
    return torch.where(root == 0, 1.0, root)


def _encode_symmetric(x: Tensor) -> tuple[Tensor, ...]:
    """Fold the strict lower triangle of x (..., k, k) to (..., (k + 1) // 2, k - 1): row k - 1, then row 0 backwards,
    row k - 2, then row 1 backwards, and so on; for an odd k the middle row is followed by zeros."""
    k = x.shape[-1]
    half, width = k + 1 >> 1, k - 1
    diagonal = x.diagonal(dim1=-2, dim2=-1)[..., None].contiguous()
    root, at = _roots(diagonal), torch.arange(k, device=x.device)
    folded = x.new_empty(*x.shape[:-2], half, width)
    for a, b in panels(x, half):
        both = (slice(k - b, k - a), slice(a, b))
        long, short = (x[..., i, :width] / root[..., i, :] / root.mT[..., :width] for i in both)
        torch.where(at[a:b, None] + at[:width] < width, long.flip(-2), short.flip(-1), out=folded[..., a:b, :])
    folded[..., k >> 1 :, k >> 1 :] = 0
    return *_coded(folded), diagonal


def _decode_symmetric(codes: Tensor, scale: Tensor, diagonal: Tensor) -> Tensor:
    k = diagonal.shape[-2]
    root, folded = _roots(diagonal), _read(codes, scale)
    x = folded.new_empty(*diagonal.shape[:-1], k)
    for a, b in panels(x, k + 1 >> 1):
        x[..., k - b : k - a, : k - 1] = folded[..., a:b, :].flip(-2)
        x[..., a : min(b, k >> 1), : k - 1] = folded[..., a : min(b, k >> 1), :].flip(-1)
    for a, b in panels(x, k):
        rows = x[..., a:b, :b].mul_(root[..., a:b, :]).mul_(root.mT[..., :b])
        x[..., :a, a:b] = rows[..., :a].mT
        square = rows[..., a:].tril(-1)
        torch.add(square, square.mT, out=rows[..., a:])
    x.diagonal(dim1=-2, dim2=-1).copy_(diagonal[..., 0])
    return x


CODECS: Mapping[str, MatrixCodec] = {
    "symmetric": MatrixCodec(_encode_symmetric, _decode_symmetric),
    "orthogonal": MatrixCodec(_coded, _read),
}
"""Trait of a matrix state -> its codec."""
