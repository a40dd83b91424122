"""Blocks of codes of 2 to 8 bits under one scale."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from optgen.formats import narrow, words
from optgen.formats.bound import ROUNDOFF
from optgen.formats.check import A_COMPANDER, A_SCALE, check_block, check_part, check_words, refusal
from optgen.formats.coded import InBlocks
from optgen.formats.companders import BELOW, HALF, Compander, largest_error, softsign
from optgen.formats.format import Format, Noise, Rounding
from optgen.formats.scales import LARGEST, Scale, ue8m8
from optgen.lang.values import Num, cast, floor, maximum, rint
from optgen.ops import dtypes


@dataclass(frozen=True)
class Blocked(InBlocks):
    """One code of b bits per element, one scale per block: x = scale * inverse(code / N).

    bits        b, 2 to 8; codes of fewer than 8 bits are packed (narrow.py)
    signed      N = 2^(b-1) - 1, stored as code + 2^(b-1), 0 exactly; unsigned: N = 2^b - 1, and the codes are those
                of the root of a nonnegative value, whose square has their range squared.  Code 0 reads as half a code,
                so that no second moment becomes 0, within the same half cell; under the fp16 scale as 0 (FlashOptim)
    relative    keeps x / root, the root of the rule's second moment (`Format.encode`), and reads it times that as kept
    rounding    stochastic: E[code] = N * curve(x / scale); a value on the grid stays, 0 stays 0

    Nearest encoding is idempotent, codes and all, where the largest element gets the last code and so keeps the
    scale: 127 / (1 + 2^-8) rounds to 127, for N = 255 the scale must be ue7m9 (or fp32).
    A block with an Inf decodes to NaN, all of it and nothing else; its codes are unspecified.  So is that of a NaN,
    which decodes to a number.
    """

    bits: int = 8
    block: int = 64
    compander: Compander = field(default_factory=softsign)
    scale: Scale = ue8m8
    signed: bool = True
    relative: bool = False
    rounding: Rounding = "auto"

    def __post_init__(self) -> None:
        check_block("Blocked", self.bits, self.block, self.loc, 2)
        check_words(self)
        check_part(self, "compander", Compander, A_COMPANDER)
        check_part(self, "scale", Scale, A_SCALE)
        if self.signed and self.scale.high < LARGEST and not self.scale.literal:
            raise refusal(self.loc, f"a {self.scale} scale over values", "it with signed=False")
        if self.relative and not self.signed:
            raise refusal(self.loc, "Blocked(signed=False, relative=True)", "one of both: a root is kept as it is")

    def __str__(self) -> str:
        what = "relative, " if self.relative else "" if self.signed else "sqrt, "
        how = "stochastic" if self.noise_bits else "nearest"
        sign = "signed" if self.signed else "unsigned"
        return f"{self.bits}-bit {sign} blocks of {self.block}: {what}{self.compander}, {self.scale} scale, {how}"

    @property
    def of(self) -> Literal["value", "sqrt"]:
        return "value" if self.signed else "sqrt"

    def rounded(self, rounding: Rounding) -> Format:
        return replace(self, rounding=rounding)

    @property
    def codes(self) -> int:
        """N, the largest code."""
        return (1 << (self.bits - 1)) - 1 if self.signed else (1 << self.bits) - 1

    @property
    def fresh(self) -> int:
        """The number that is added to a code where it is stored."""
        return 1 << (self.bits - 1) if self.signed else 0

    @property
    def positive(self) -> bool:
        if self.keeps_zero():
            return False
        least = self.scale.low * float(self.compander.inverse(HALF / self.codes))
        return least * least >= 2.0**-126

    def code_of(self, value: Num, scale: Num, noise: Noise | None) -> Num:
        bias = self.fresh
        if self.scale.literal and noise is None:
            # The library's own order of operations and its ties, so that its numbers come out bit for bit.
            return cast(floor(self.compander.curve(value / scale) * float(self.codes) + 0.5), dtypes.i32) + bias
        exact = self.compander.encode(value, scale, self.codes)
        if noise is None:
            return cast(rint(exact), dtypes.i32) + bias
        return words.dithered(exact, noise, bias)

    def number_of(self, parts: Mapping[str, Num]) -> Num:
        scale = self.scale.decode(parts["scale"])
        code = cast(narrow.joined(parts, self.bits), dtypes.f32)
        if self.signed:
            code = code - float(self.fresh)
            if self.bits == 2:
                code = maximum(code, -1.0)  # a NaN may be code -2, which is a pole of softsign
        elif not self.scale.literal:
            code = maximum(code, HALF)
        if self.scale.literal:
            return self.compander.inverse(code / float(self.codes)) * scale
        return self.compander.decode(code, scale, self.codes)

    def absolute(self) -> Format:
        return replace(self, relative=False)

    # -- what is known of the error

    def errors(self) -> tuple[float, float]:
        value = largest_error(self.compander, self.codes, self.noise_bits > 0, not self.keeps_zero())
        # Three roundings on the way to the code, as a fraction of the code; three on the way back, and what keeps the
        # last code below the scale.  The inverse is steepest at 1: 1 + k.
        return value, (4 + BELOW / ROUNDOFF) * (2 + self.compander.k) * ROUNDOFF

    def stuck(self, decay: float) -> tuple[int, float, str]:
        n, f, g = self.codes, self.compander.curve, self.compander.inverse
        kept = [c for c in range(1, n + 1) if n * float(f(decay * float(g(c / n)))) >= c - 0.5]
        return len(kept), float(g(max(kept) / n)) if kept else 0.0, "scale"

    def cell(self) -> float:
        g, n = self.compander.inverse, self.codes
        return self.ratio(float(g(2 / n)) / float(g(1 / n))) if n > 1 else math.inf

    def keeps_zero(self) -> bool:
        return self.signed or self.scale.literal
