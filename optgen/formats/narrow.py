"""Codes of fewer than 8 bits: cut into fields of 4, 2 and 1 bits, of which 2, 4 and 8 share a byte."""

from __future__ import annotations

from collections.abc import Mapping

from optgen.formats.format import Field
from optgen.lang.values import Num, cast
from optgen.ops.dtypes import DType, i32, u1, u2, u4, u8

PIECES: Mapping[int, tuple[tuple[str, DType], ...]] = {
    8: (("", u8),),
    7: (("", u4), ("high", u2), ("top", u1)),
    6: (("", u4), ("high", u2)),
    5: (("", u4), ("high", u1)),
    4: (("", u4),),
    3: (("", u2), ("high", u1)),
    2: (("", u2),),
}
"""Bits of a code -> (suffix, dtype) of its fields, the lowest bits first."""


def fields(bits: int, zero: int = 0) -> dict[str, Field]:
    """The fields of codes of that many bits; `zero` is the code that a fresh state has."""
    out, shift = {}, 0
    for suffix, dtype in PIECES[bits]:
        out[suffix] = Field(dtype, zero=(zero >> shift) & ((1 << dtype.bits) - 1))
        shift += dtype.bits
    return out


def cut(code: Num, bits: int) -> dict[str, Num]:
    """Return the contents of the fields for a code (i32, 0 <= code < 2^bits)."""
    if bits == 8:
        return {"": cast(code, u8)}
    out, shift = {}, 0
    for suffix, dtype in PIECES[bits]:
        piece = code >> shift if shift else code
        # The top bits too: the code of a block with a NaN may be any number, and its neighbours share the byte.
        out[suffix] = cast(piece & ((1 << dtype.bits) - 1), dtype)
        shift += dtype.bits
    return out


def joined(parts: Mapping[str, Num], bits: int) -> Num:
    """The code, i32, of what the fields hold."""
    code, shift = None, 0
    for suffix, dtype in PIECES[bits]:
        piece = cast(parts[suffix], i32)
        code = piece if code is None else code | (piece << shift)
        shift += dtype.bits
    assert code is not None
    return code
