"""The exact worst error of a format, over every f32: what the derived bound is held against.

Encoding is monotone, so each code is taken by one interval of f32 patterns, and the error is largest at an end
of one.  Bisection on the patterns finds all ends of all codes at once, through the format's real encode and
decode; no sampling, no formula.  Stochastic formats are taken at both extremes of their noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from optgen.formats import LogMinMax
from optgen.formats.bound import Bound
from optgen.formats.format import Format, Noise
from optgen.ops.dtypes import of_pattern
from optgen.verify.bounds import one_step_bound

ONE = 0x3F800000  # the pattern of 1.0 in f32


@dataclass(frozen=True)
class Certificate:
    """The supremum of the error in units of `bound.of`, where it is attained, and supremum / bound."""

    supremum: float
    at: float
    bound: Bound

    @property
    def ratio(self) -> float:
        return self.supremum / self.bound.value if self.bound.value else 1.0


@dataclass(frozen=True)
class Line:
    """Numbers with the f32 patterns low .. high, kept in a format in a block whose first elements are `others`.

    relative  their errors count relative to them
    sign      1.0, or -1.0 for the negative numbers of these patterns
    """

    format: Format
    low: int
    high: int
    others: tuple[float, ...] = ()
    relative: bool = True
    sign: float = 1.0

    @property
    def rooted(self) -> bool:
        return self.format.of == "sqrt"

    def number(self, patterns: torch.Tensor) -> torch.Tensor:
        """f64 of the numbers whose error counts, for patterns of what is encoded."""
        x = self.sign * patterns.view(torch.float32).double()
        return x.sqrt() if self.rooted else x

    def ends(self) -> tuple[int, int]:
        """The patterns of what is encoded at both ends: of the square where the root is kept."""
        if not self.rooted:
            return self.low, self.high
        squares = torch.tensor([of_pattern(x) ** 2 for x in (self.low, self.high)]).view(torch.int32)
        return int(squares[0]), int(squares[1])

    def encode(self, patterns: torch.Tensor, word: int | None) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return the fields of a block for each of a vector of patterns, and what its last number reads as."""
        size = max(self.format.block, len(self.others) + 1)
        block, at = torch.full((len(patterns), 1, size), self.others[0] if self.others else 0.0), len(self.others)
        block[:, 0, :at] = torch.tensor(self.others)
        block[:, 0, at] = self.sign * patterns.view(torch.float32)
        noise = None
        if word is not None:
            noise = Noise(torch.full(block.shape, word, dtype=torch.int32), 0, self.format.noise_bits)
        root = torch.ones(()) if self.format.relative else None
        parts = self.format.encode(block, noise=noise, root=root)
        kept = self.format.decode_root(parts) if self.rooted else self.format.decode(parts, root=root)
        return parts, kept[:, 0, at]

    def store(self, patterns: torch.Tensor, word: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(codes as i32 that increase with the pattern, what they read as in f64) for a vector of patterns."""
        parts, kept = self.encode(patterns, word)
        shape = (len(patterns), 1, max(self.format.block, len(self.others) + 1))
        codes = self.format.code(parts).expand(shape)[:, 0, len(self.others)]
        if codes.dtype in (torch.bfloat16, torch.float16):
            codes = codes.view(torch.int16)
        return codes.int() * int(self.sign), kept.double()


def lines(fmt: Format, bound: Bound) -> list[Line]:
    """Return the numbers over which a format's worst error is looked for, in units of `bound.of`."""

    def number_of(pattern: int) -> float:
        return of_pattern(pattern) ** 2 if fmt.of == "sqrt" else of_pattern(pattern)

    if isinstance(fmt, LogMinMax):
        # The first and last unit hold the block's minimum and maximum; stochastically there is a margin to them.
        margin = 0
        if fmt.noise_bits:
            margin = 1 << (fmt.unit - 2) if fmt.bits == 8 else int(fmt.margin(fmt.most) * 2**fmt.unit) + (1 << 8)
        start = ONE - ((fmt.most // 2) << fmt.unit)
        low, high = start + margin, start + (fmt.most << fmt.unit) - max(margin, 1 << 8)
        return [Line(fmt, low, high, (number_of(low), number_of(high)))]
    if bound.of == "value":
        return [Line(fmt, ONE, ONE + (1 << 23) - 1)]
    # Scales are powers of two times 1 to the same relative error: one block stands for all.
    return [Line(fmt, 0, ONE, (1.0,), False, sign) for sign in ((1.0, -1.0) if fmt.signed else (1.0,))]


@lru_cache(maxsize=1024)
def starts(line: Line, word: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of the line and the first pattern of each, in rising order."""
    low, high = line.ends()
    first, last = (int(line.store(torch.tensor([p], dtype=torch.int32), word)[0]) for p in (low, high))
    codes = torch.arange(first, last + 1, dtype=torch.int32)
    below = torch.full_like(codes, low)
    above = torch.full_like(codes, high)
    while int((above - below).max()) > 1:
        middle = below + ((above - below) >> 1)
        reached = line.store(middle, word)[0] >= codes
        above, below = torch.where(reached, middle, above), torch.where(reached, below, middle)
    above[0] = low
    return codes, above


@lru_cache(maxsize=256)
def certify(fmt: Format) -> Certificate:
    """Return the supremum over all numbers of the format's lines."""
    bound = one_step_bound(fmt)
    fmt = fmt.of_vectors()  # the same codes under the same scales, one for a block
    words: list[int | None] = [0, (1 << fmt.noise_bits) - 1] if fmt.noise_bits else [None]
    supremum, at = 0.0, 0.0
    for line in lines(fmt, bound):
        for word in words:
            begins = starts(line, word)[1]
            patterns = torch.cat([begins, begins[1:] - 1, begins.new_tensor([line.ends()[1]])])
            number, kept = line.number(patterns), line.store(patterns, word)[1]
            error = (kept - number).abs()
            if line.relative:
                error = error / number.abs()
            worst = int(error.argmax())
            if float(error[worst]) > supremum:
                supremum, at = float(error[worst]), float(number[worst])
    return Certificate(supremum, at, bound)
