"""The codecs of matrix states in C++ (cpu/cpp/matrices.h), with the bits of those in torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from optgen.runtime.records import MATRIX_BLOCK
from optgen.runtime.reference.matrices import Rounding
from optgen.runtime.reference.matrix_codecs import CODECS, MatrixCodec

FOLDED = {"symmetric", "triangular"}


def codecs(library: ctypes.CDLL, threads: Callable[[int], int]) -> Mapping[str, MatrixCodec]:
    """Return the codec of each trait.

    threads  elements -> how many work on them
    """
    whole, pointer = ctypes.c_int64, ctypes.c_void_p
    function = library.optgen_matrices
    function.restype = None
    function.argtypes = (ctypes.c_int32,) * 2 + (whole,) * 3 + (pointer,) * 7 + (ctypes.c_int32,) * 2

    def run(trait: str, x: Tensor, kept: Sequence[Tensor], base: Sequence[Tensor], noise: Rounding | None = None,
            decode: bool = False) -> None:  # fmt: skip
        fields = [*kept, None] if len(kept) < 3 else kept  # no diagonal
        given = [x, *fields, *(base or (None, None)), noise and noise.stream.contiguous()]
        function(
            decode, list(CODECS).index(trait), x.shape[:-2].numel(), *x.shape[-2:],
            *(None if y is None else y.data_ptr() for y in given), noise.key if noise else 0, threads(x.numel()),
        )  # fmt: skip

    def encode(trait: str, x: Tensor, *base: Tensor, noise: Rounding | None = None) -> tuple[Tensor, ...]:
        x, (*lead, rows, _) = x.contiguous(), x.shape
        codes = x.new_empty((*lead, (rows + 1) // 2, rows - 1) if trait in FOLDED else x.shape, dtype=torch.int8)
        size = *lead, -(-codes.shape[-2:].numel() // MATRIX_BLOCK), 2 if trait == "low_rank_nonneg" else 1
        kept = codes, x.new_empty(size, dtype=torch.int16), *([x.new_empty(*lead, rows, 1)] if trait in FOLDED else [])
        run(trait, x, kept, [y.contiguous() for y in base], noise)
        return kept

    def decode(trait: str, *fields: Tensor) -> Tensor:
        fields = tuple(y.contiguous() for y in fields)
        count = 3 if trait in FOLDED else 2
        codes, rows = fields[0], fields[count - 1].shape[-2]
        x = torch.empty((*codes.shape[:-2], rows, rows) if trait in FOLDED else codes.shape)
        run(trait, x, fields[:count], fields[count:], decode=True)
        return x

    return {trait: MatrixCodec(partial(encode, trait), partial(decode, trait)) for trait in CODECS}
