"""Tables for codebooks, made by the algorithms of the 8-bit and 4-bit papers; your own is a tuple of numbers."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable
from functools import lru_cache

from optgen.base import loc as locs
from optgen.base.errors import UserError
from optgen.base.loc import Loc
from optgen.formats.check import is_number, is_whole
from optgen.ops.dtypes import in_f32


class Numbers(tuple[float, ...]):
    """A tuple of f32 numbers with a name, which generated code and messages have."""

    name: str

    def __new__(cls, name: str, numbers: Iterable[float]) -> Numbers:
        made = super().__new__(cls, numbers)
        made.name = name
        return made


def dynamic(signed: bool = True, bits: int = 8, *, zero: bool = True, one: bool = True) -> Numbers:
    """The dynamic map: decades, each cut into twice as many parts as the one below it (Dettmers, arXiv:1511.04561).

    A positive entry is the middle of a part of [0.1, 1] times a power of ten.  Further entries are 0, 1 and, signed,
    the mirror images of all but 1: a map of 2^bits entries, without a -1.  Every operation is rounded to f32 in the
    order in which torch rounds on CPUs with AVX2: these are the bits that bitsandbytes and torchao have there (on other
    machines torch's own `linspace`, and so their tables, differ in the last place of some entries).

    zero=False  without 0, for second moments (one entry less)
    one=False   repaired: no 1 beside the map, which is stretched until its outermost entries are 1 and -1 (by 0.7 %
                with 8 bits, 13 % with 4), so that the largest element of a block keeps its magnitude whatever its sign
                (one entry less)
    """
    _check_bits(bits, locs.here())
    for option, value in (("signed", signed), ("zero", zero), ("one", one)):
        if not isinstance(value, bool):
            raise UserError("E311", loc=locs.here(), what=f"{option}={value!r}", want="True or False")
    return _dynamic(signed, bits, zero, one)


def _check_bits(bits: int, loc: Loc) -> None:
    if not is_whole(bits) or not 2 <= bits <= 8:
        raise UserError("E311", loc=loc, what=f"{bits!r} bits", want="a whole number, 2 to 8")


@lru_cache
def _dynamic(signed: bool, bits: int, zero: bool, one: bool) -> Numbers:
    exponents = bits - 1
    positive: list[float] = []
    low, step = in_f32(0.1), in_f32(1 - in_f32(0.1))
    for i in range(exponents):
        parts = 1 << (i + (0 if signed else 1))
        size = step / parts
        ends = [in_f32(low + size * k) if 2 * k < parts else in_f32(1 - size * (parts - k)) for k in range(parts + 1)]
        unit = in_f32(10.0 ** (i - exponents + 1))
        positive += [in_f32(unit * (in_f32(a + b) / 2)) for a, b in itertools.pairwise(ends)]
    if not one:
        positive = [in_f32(x / positive[-1]) for x in positive]
    negative = [-x for x in reversed(positive)] if signed else []
    name = f"{'' if signed else 'u'}dynamic{bits}{'' if zero else '_nozero'}{'' if one else '_symmetric'}"
    return Numbers(name, (*negative, *([0.0] if zero else []), *positive, *([1.0] if one else [])))


def powers(p: float = 1, bits: int = 4) -> Numbers:
    """(k / 2^bits)^p, k from 1 on: unsigned, without 0 (Li et al., arXiv:2309.01507).  0 < p <= 16."""
    place = locs.here()
    _check_bits(bits, place)
    if not is_number(p) or not 0 < p <= 16:
        raise UserError("E311", loc=place, what=f"the power {p!r}", want="0 < p <= 16")
    return _powers(p, bits)


def linear_nozero(bits: int = 4) -> Numbers:
    """k / 2^bits, k from 1 on: unsigned, without 0."""
    _check_bits(bits, locs.here())
    return _powers(1, bits)


@lru_cache
def _powers(p: float, bits: int) -> Numbers:
    n = 1 << bits
    # Another p is another name, and every name is part of one of Python's: 1e-05 has a sign.
    text = str(int(p) if p == int(p) else float(p)).replace(".", "_").replace("-", "m")
    name = f"power{text}_{bits}" if p != 1 else f"linear{bits}_nozero"
    return Numbers(name, (in_f32((k / n) ** p) for k in range(1, n + 1)))


@lru_cache
def nf4() -> Numbers:
    """NormalFloat of 4 bits (Dettmers et al., arXiv:2305.14314): quantiles of the normal distribution, and 0, -1, 1.

    Positive entries are the quantiles of 8 probabilities from 1/2 to the outermost one, negative ones of 7, evenly
    spaced; the outermost is the mean of 1 - 1/32 and 1 - 1/30; all are divided by its quantile.  bitsandbytes and
    QLoRA use the numbers that SciPy gave in f32: entries agree within 3e-7.
    """
    normal = statistics.NormalDist()
    most = ((1 - 1 / 32) + (1 - 1 / 30)) / 2
    top = normal.inv_cdf(most)
    up = [normal.inv_cdf(0.5 + (most - 0.5) * k / 8) / top for k in range(1, 9)]
    down = [-normal.inv_cdf(0.5 + (most - 0.5) * k / 7) / top for k in range(7, 0, -1)]
    return Numbers("nf4", (in_f32(x) for x in (*down, 0.0, *up)))
