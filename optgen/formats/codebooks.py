"""Tables for codebooks, made by the algorithms of the 8-bit and 4-bit papers; your own is a tuple of numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import lru_cache

from optgen.base import loc as locs
from optgen.base.errors import UserError
from optgen.base.loc import Loc
from optgen.formats.check import is_whole
from optgen.ops.dtypes import in_f32


class Numbers(tuple[float, ...]):
    """A tuple of f32 numbers with a name, which generated code and messages have."""

    name: str

    def __new__(cls, name: str, numbers: Iterable[float]) -> Numbers:
        made = super().__new__(cls, numbers)
        made.name = name
        return made


def dynamic(signed: bool = True, bits: int = 8) -> Numbers:
    """The dynamic map: decades, each cut into twice as many parts as the one below it (Dettmers, arXiv:1511.04561).

    A positive entry is the middle of a part of [0.1, 1] times a power of ten.  Further entries are 0, 1 and, signed,
    the mirror images of all but 1: a map of 2^bits entries, without a -1.  Every operation is rounded to f32 in the
    order in which torch rounds on CPUs with AVX2: these are the bits that bitsandbytes and torchao have there (on other
    machines torch's own `linspace`, and so their tables, differ in the last place of some entries).
    """
    _check_bits(bits, locs.here())
    if not isinstance(signed, bool):
        raise UserError("E311", loc=locs.here(), what=f"signed={signed!r}", want="True or False")
    return _dynamic(signed, bits)


def _check_bits(bits: int, loc: Loc) -> None:
    if not is_whole(bits) or not 2 <= bits <= 8:
        raise UserError("E311", loc=loc, what=f"{bits!r} bits", want="a whole number, 2 to 8")


@lru_cache
def _dynamic(signed: bool, bits: int) -> Numbers:
    exponents = bits - 1
    positive: list[float] = []
    low, step = in_f32(0.1), in_f32(1 - in_f32(0.1))
    for i in range(exponents):
        parts = 1 << (i + (0 if signed else 1))
        size = step / parts
        ends = [in_f32(low + size * k) if 2 * k < parts else in_f32(1 - size * (parts - k)) for k in range(parts + 1)]
        unit = in_f32(10.0 ** (i - exponents + 1))
        positive += [in_f32(unit * (in_f32(a + b) / 2)) for a, b in itertools.pairwise(ends)]
    negative = [-x for x in reversed(positive)] if signed else []
    return Numbers(f"{'' if signed else 'u'}dynamic{bits}", (*negative, 0.0, *positive, 1.0))


def linear_nozero(bits: int = 4) -> Numbers:
    """k / 2^bits, k from 1 on: unsigned, without 0 (Li et al., arXiv:2309.01507)."""
    _check_bits(bits, locs.here())
    n = 1 << bits
    return Numbers(f"linear{bits}_nozero", (in_f32(k / n) for k in range(1, n + 1)))
