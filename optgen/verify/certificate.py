"""The exact worst error of a format, over every f32: what the derived bound is held against.

Encoding is monotone, so each code is taken by one interval of f32 patterns, and the error is largest at an end
of one.  Bisection on the patterns finds all ends of all codes at once, through the format's real encode and
decode; no sampling, no formula.  Stochastic formats are taken at both extremes of their noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from optgen.formats.blocked import Blocked
from optgen.formats.codebook import Codebook
from optgen.formats.floats import Float
from optgen.formats.format import Format, Noise
from optgen.formats.fp8 import Fp8
from optgen.formats.logmax import LogMax
from optgen.formats.logminmax import LogMinMax
from optgen.formats.rank1 import Rank1
from optgen.verify import bounds
from optgen.verify.bounds import Bound, one_step_bound

ONE = 0x3F800000  # the pattern of 1.0


@dataclass(frozen=True)
class Certificate:
    """The supremum of the error in units of `bound.of`, where it is attained, and supremum / bound."""

    supremum: float
    at: float
    bound: Bound

    @property
    def ratio(self) -> float:
        return self.supremum / self.bound.value if self.bound.value else 1.0


@lru_cache(maxsize=256)
def certify(fmt: Format, units: int | None = None) -> Certificate:
    """The supremum over all f32 in a block whose scale is 1 (of a binade for floats; between minimum and maximum).

    Scales are powers of two times 1 to the same relative error, so one block stands for all.
    """
    if isinstance(fmt, Float):
        return _worst([_Line(fmt, ONE, ONE + (1 << 23) - 1, (), relative=True)], fmt, one_step_bound(fmt))
    if isinstance(fmt, Rank1):
        fmt = fmt.of_vectors()  # the same codes under the same scales, one for a block
    if isinstance(fmt, (Blocked, Codebook, Fp8, Rank1)):
        lines = [_Line(fmt, 0, ONE, (1.0,), relative=False)]
        if fmt.signed:
            lines.append(_Line(fmt, 0, ONE, (1.0,), relative=False, sign=-1.0))
        return _worst(lines, fmt, one_step_bound(fmt))
    if isinstance(fmt, LogMinMax):
        span = fmt.most if units is None else units
        # The first and last unit hold the block's minimum and maximum; stochastically there is a margin to them.
        margin = 0
        if fmt.noise_bits:
            margin = 1 << (fmt.unit - 2) if fmt.bits == 8 else int(bounds.margin(fmt, span) * 2**fmt.unit) + (1 << 8)
        low = ONE - ((span // 2) << fmt.unit) + margin
        high = ONE - ((span // 2) << fmt.unit) + (span << fmt.unit) - max(margin, 1 << 8)
        ends = (_kept(fmt, low), _kept(fmt, high))
        return _worst([_Line(fmt, low, high, ends, relative=True)], fmt, one_step_bound(fmt, span))
    if isinstance(fmt, LogMax):
        # The grid lies otherwise in each octave; a cell is widest, relative to the value, above a power of two.
        tops = [ONE + (octave << 23) + (1 << 22) for octave in range(8)]
        lines = [_Line(fmt, top - (fmt.codes - 1) * fmt.step, top, (_square(top),), relative=True) for top in tops]
        return _worst(lines, fmt, one_step_bound(fmt))
    raise TypeError(f"no certificate for {type(fmt).__name__}")


def _float(pattern: int) -> float:
    return float(torch.tensor(pattern, dtype=torch.int32).view(torch.float32))


def _square(pattern: int) -> float:
    x = _float(pattern)
    return x * x


def _kept(fmt: LogMinMax, pattern: int) -> float:
    """The value whose kept number has this pattern."""
    return _square(pattern) if fmt.of == "sqrt" else _float(pattern)


@dataclass(frozen=True)
class _Line:
    """Kept numbers with patterns low .. high, in a block whose first elements are `others`."""

    format: Format
    low: int
    high: int
    others: tuple[float, ...]
    relative: bool
    sign: float = 1.0

    @property
    def rooted(self) -> bool:
        return getattr(self.format, "of", "value") == "sqrt"

    def number(self, patterns: torch.Tensor) -> torch.Tensor:
        """f64 of the numbers whose error counts, for patterns of what is encoded."""
        x = self.sign * patterns.view(torch.float32).double()
        return x.sqrt() if self.rooted else x

    def ends(self) -> tuple[int, int]:
        """The patterns of what is encoded at both ends: of the square where the root is kept."""
        if not self.rooted:
            return self.low, self.high
        squares = torch.tensor([_float(self.low) ** 2, _float(self.high) ** 2], dtype=torch.float32).view(torch.int32)
        return int(squares[0]), int(squares[1])

    def store(self, patterns: torch.Tensor, word: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(codes as i32 that increase with the pattern, what they read as in f64) for a vector of patterns."""
        size = max(self.format.block, len(self.others) + 1)
        block = torch.full((len(patterns), 1, size), self.others[0] if self.others else 0.0)
        for i, other in enumerate(self.others):
            block[:, 0, i] = other
        at = len(self.others)
        block[:, 0, at] = self.sign * patterns.view(torch.float32)
        noise = None
        if word is not None:
            noise = Noise(torch.full(block.shape, word, dtype=torch.int32), 0, self.format.noise_bits)
        root = torch.ones(()) if self.format.relative else None
        parts = self.format.encode(block, noise=noise, root=root)
        kept = self.format.decode_root(parts) if self.rooted else self.format.decode(parts, root=root)
        codes = self.format.code(parts).expand(block.shape)[:, 0, at]
        if codes.dtype in (torch.bfloat16, torch.float16):
            codes = codes.view(torch.int16)
        return codes.int() * int(self.sign), kept[:, 0, at].double()


def _code_ends(line: _Line, word: int | None) -> torch.Tensor:
    """Every pattern at which the code changes, the ones before, and both ends of the line."""
    low, high = line.ends()
    first, last = (int(line.store(torch.tensor([p], dtype=torch.int32), word)[0]) for p in (low, high))
    codes = torch.arange(first + 1, last + 1, dtype=torch.int32)
    below = torch.full_like(codes, low)
    above = torch.full_like(codes, high)
    while len(codes) and int((above - below).max()) > 1:
        middle = below + ((above - below) >> 1)
        reached = line.store(middle, word)[0] >= codes
        above, below = torch.where(reached, middle, above), torch.where(reached, below, middle)
    return torch.cat([below, above, torch.tensor([low, high], dtype=torch.int32)])


def _worst(lines: list[_Line], fmt: Format, bound: Bound) -> Certificate:
    words: list[int | None] = [0, (1 << fmt.noise_bits) - 1] if fmt.noise_bits else [None]
    supremum, at = 0.0, 0.0
    for line in lines:
        for word in words:
            patterns = _code_ends(line, word)
            number, kept = line.number(patterns), line.store(patterns, word)[1]
            error = (kept - number).abs()
            if line.relative:
                error = error / number.abs()
            worst = int(error.argmax())
            if float(error[worst]) > supremum:
                supremum, at = float(error[worst]), float(number[worst])
    return Certificate(supremum, at, bound)
