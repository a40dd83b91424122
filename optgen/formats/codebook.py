"""Codes of 2 to 8 bits that stand for the entries of a table, under one scale per block."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from optgen.base.errors import UserError
from optgen.base.loc import Loc
from optgen.formats import narrow
from optgen.formats.check import check_block, check_words, is_number
from optgen.formats.coded import InBlocks, error_of_table, widest
from optgen.formats.format import Noise
from optgen.formats.scales import Scale, fp32
from optgen.lang.values import Num, lookup, search
from optgen.ops.dtypes import in_f32
from optgen.ops.tables import Book, book, cell_ends

Ties = Literal["down", "up"]


@dataclass(frozen=True)
class Codebook(InBlocks):
    """One code per element, one scale per block: x = scale * table[code], scale being the block's largest |x|.

    table       rising numbers in [-1, 1], at most 2^bits of them; unsigned where none is below 0; one of
                optgen.formats.codebooks, or your own
    bits        2 to 8; codes of fewer than 8 bits are packed (narrow.py)
    ties        where a number is as far from both entries: "down" takes the lower one (bitsandbytes), "up" the upper
                one (torchao).  Distances are rounded to f32, as theirs are

    Always to nearest, as the packages round whose states it keeps.  Encoding is idempotent where the table has the
    numbers of largest magnitude that it takes: 1, and -1.  A table without -1 shrinks every block whose largest
    magnitude is negative, at each store.  Of a table without 0 nothing becomes 0: a block of smaller
    numbers than `low` is kept as if that were its largest.  A block with an Inf decodes to NaN, all of it and nothing
    else; its codes are unspecified.  So is that of a NaN, which decodes to a number.
    """

    table: tuple[float, ...]
    bits: int = 8
    block: int = 256
    scale: Scale = fp32
    ties: Ties = "up"
    name: str = field(default="", init=False, compare=False)

    def __post_init__(self) -> None:
        check_block("Codebook", self.bits, self.block, self.loc, 2)
        check_words(self, ties=("down", "up"))
        self.refuse_scales("a Codebook")
        object.__setattr__(self, "name", getattr(self.table, "name", "codebook"))
        object.__setattr__(self, "table", _checked(self.table, self.bits, self.loc))

    def __str__(self) -> str:
        sign = "signed" if self.signed else "unsigned"
        return f"{self.bits}-bit {sign} blocks of {self.block}: {self.name}, {self.scale} scale, nearest"

    # -- what the table says

    @property
    def signed(self) -> bool:
        return self.table[0] < 0

    @property
    def fresh(self) -> int:
        return min(range(len(self.table)), key=lambda i: abs(self.table[i]))

    @property
    def positive(self) -> bool:
        return self.table[0] > 0

    @property
    def low(self) -> float:
        if not self.positive:
            return self.scale.low
        # In a table without 0 nothing becomes a subnormal number.
        return max(self.scale.low, 2.0 ** math.ceil(-126 - math.log2(self.table[0])))

    def code_of(self, value: Num, scale: Num, noise: Noise | None) -> Num:
        number = value / scale
        code = search(number, self._book.ends)
        return code

    def number_of(self, parts: Mapping[str, Num]) -> Num:
        code = narrow.joined(parts, self.bits)
        value = lookup(code, self._book.entries) * self.scale.decode(parts["scale"])
        return value

    @property
    def _book(self) -> Book:
        return book(self.table, self.bits, self.ties, self.name)

    # -- what is known of the error

    def errors(self) -> tuple[float, float]:
        return error_of_table(self.table, self.signed)

    def stuck(self, decay: float) -> tuple[int, float, str]:
        ends = (-1.0, *cell_ends(self.table, self.ties), math.inf)
        kept = [abs(x) for i, x in enumerate(self.table) if x and ends[i] <= decay * x < ends[i + 1]]
        return len(kept), max(kept, default=0.0), "scale"

    def cell(self) -> float:
        return self.ratio(widest(self.table))

    def keeps_zero(self) -> bool:
        return 0.0 in self.table


def _checked(table: Sequence[float], bits: int, loc: Loc | None) -> tuple[float, ...]:
    """The table as f32 numbers; UserError where it is none that a Codebook can have."""

    def refuse(what: str, want: str) -> UserError:
        return UserError("E311", loc=loc, what=what, want=want)

    if isinstance(table, (str, bytes)) or not isinstance(table, Sequence):
        raise refuse(f"a {type(table).__name__}", "a tuple of numbers, such as dynamic() or (-1.0, 0.0, 1.0)")
    for x in table:
        if not is_number(x) or not -1 <= x <= 1:
            raise refuse(f"{x!r} among its numbers", "numbers from -1 to 1: they are multiples of the block's largest")
    if not 2 <= len(table) <= 1 << bits:
        raise refuse(f"{len(table)} numbers", f"2 to {1 << bits} of them for codes of {bits} bits")
    values = tuple(in_f32(x) for x in table)
    for k, (a, b) in enumerate(itertools.pairwise(values)):
        if a >= b:
            what = "twice" if a == b else "above the next one"
            raise refuse(f"number {k}, {table[k]:g}, {what}", "rising numbers, all different as fp32")
    if not values[-1] > 0:
        raise refuse("no number above 0", "positive numbers too")
    return values
