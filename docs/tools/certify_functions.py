"""The exact worst error of each function of elements: every fp32 argument, against fp64 and, the worst, against mpmath.

    python -m docs.tools.certify_functions [--part 64] [--rest 257] [exp log ...]

The definitions (lang/elementary.py) are evaluated on torch tensors, whose operations round as those of strict kernels.
Errors are in units in the last place of the exact result, 2^-149 at least.  `--part n` takes one argument in n, and
`--rest n` one in n outside of RANGES, where the result is a constant, x, or that of the next binade by a power of two.
atan2 has two operands: 10^8 drawn pairs of bit patterns, and as many near one another, and every pair of specials.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from optgen.lang import elementary

CHUNK = 1 << 16
INF = 0x7F800000
RANGES = {"exp": (2.0**-27, 105.0), "exp2": (2.0**-27, 152.0), "log": (0.0, math.inf), "tanh": (2.0**-14, 10.0),
          "sigmoid": (2.0**-27, 105.0)}  # fmt: skip
"""Magnitudes between which each argument is a case of its own."""
PAIRS = 10**8
WORST = 10**5
EXACT: dict[str, Callable[..., Tensor]] = {
    "exp": torch.exp, "log": torch.log, "tanh": torch.tanh, "sigmoid": torch.sigmoid,
    "atan2": torch.atan2, "exp2": torch.exp2,
}  # fmt: skip
OURS: dict[str, Callable[..., Any]] = {**elementary.DEFINITIONS, "exp2": lambda x: elementary.raised(2.0, x)}
SPECIALS = torch.tensor(
    [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 2.0**-149, -(2.0**-149), 2.0**-126, 3e38, -3e38]
)


def ulp(exact: Tensor) -> Tensor:
    """The distance of fp32 numbers about an fp64 one."""
    return torch.exp2((torch.frexp(exact.abs().clamp(2.0**-126, 2.0**127))[1] - 24).double())


@dataclass
class Certificate:
    """The largest error of a function in ulp, and how often it misses a special value or falls where it should rise."""

    name: str
    largest: float = 0.0
    at: tuple[float, ...] = ()
    wrong: int = 0  # another NaN, infinity or sign than the exact result rounded to fp32
    falls: int = 0
    count: int = 0
    last: float = -math.inf
    worst: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # errors and their arguments

    def see(self, *x: Tensor) -> None:
        """Take the errors at these arguments, in rising order if there is one operand."""
        got, exact = OURS[self.name](*x), EXACT[self.name](*(a.double() for a in x))
        rounded = exact.float()
        error = ((got.double() - exact).abs() / ulp(exact)).where(rounded.isfinite() & got.isfinite(), 0.0)
        near = rounded.isinf() & got.isfinite() | got.isinf() & rounded.isfinite()  # about the largest number
        error = torch.where(near, ((got.double().clamp(-(2.0**128), 2.0**128) - exact).abs() / 2.0**104), error)
        other = (got.isnan() != rounded.isnan()) | ((got.signbit() != rounded.signbit()) & ~got.isnan())
        self.wrong += int((other | (near & (error > 4))).sum())
        self.count += got.numel()
        if len(x) == 1:
            self.falls += int((got[1:] < got[:-1]).sum()) + int(got[0] < self.last)
            self.last = float(got[-1])
        most, k = error.max(0)
        if float(most) > self.largest:
            self.largest, self.at = float(most), tuple(float(a[k]) for a in x)
        found = error >= 0.8 * self.largest
        if found.any():
            self.worst.append((error[found], torch.stack([a[found] for a in x])))

    def by_mpmath(self, most: int = WORST) -> float:
        """Return the largest error among the worst arguments, against mpmath."""
        import mpmath

        mpmath.mp.prec = 120
        functions = {"sigmoid": lambda a: 1 / (1 + mpmath.exp(-a)), "exp2": lambda a: mpmath.mpf(2) ** a}
        exact = functions.get(self.name) or getattr(mpmath, self.name)
        errors, arguments = torch.cat([e for e, _ in self.worst]), torch.cat([a for _, a in self.worst], 1)
        taken = arguments[:, errors.topk(min(most, len(errors)))[1]]
        got = OURS[self.name](*taken).double()
        largest = 0.0
        for value, size, given in zip(got.tolist(), ulp(got).tolist(), taken.T.double().tolist(), strict=True):
            if math.isfinite(value):
                largest = max(largest, float(abs(value - exact(*map(mpmath.mpf, given))) / size))
        return largest


def _spans(name: str, part: int, rest: int) -> Iterator[tuple[int, int, int]]:
    """Yield the patterns (start, stop, step) of the magnitudes at which a function is evaluated, without gaps."""
    low, high = (int(torch.tensor(x).view(torch.int32)) for x in RANGES[name])
    for start, stop, step in ((0, low, rest), (low, high, part), (high, INF + 1, rest)):
        yield from ((k, min(k + CHUNK * step, stop), step) for k in range(start, stop, CHUNK * step))


def arguments(name: str, part: int, rest: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield the arguments of a function, of one operand those from -Inf to Inf in rising order."""
    if name != "atan2":
        spans = list(_spans(name, part, rest))
        negative = ((-torch.arange(*span).int().view(torch.float32).flip(0),) for span in reversed(spans))
        yield from negative
        yield from ((torch.arange(*span).int().view(torch.float32),) for span in spans)
        return
    yield tuple(a.flatten().contiguous() for a in torch.meshgrid(SPECIALS, SPECIALS, indexing="ij"))
    draw = torch.Generator().manual_seed(0)
    for k in range(2 * PAIRS // part // CHUNK + 1):
        y, x = (torch.randint(-(2**31), 2**31, (CHUNK,), generator=draw).int() for _ in range(2))
        if k % 2:  # exponents within 32 of one another
            x = (y & 0x7FFFFFFF) + (x >> 4).clamp(-(1 << 28), 1 << 28) & 0x7F7FFFFF | x & -(2**31)
        yield y.view(torch.float32), x.view(torch.float32)


def certify(name: str, part: int = 1, rest: int = 257) -> Certificate:
    """Return the certificate of a function."""
    made = Certificate(name)
    for given in arguments(name, part, max(part, rest)):
        made.see(*given)
        if sum(len(e) for e, _ in made.worst) > 40 * WORST:
            errors, found = torch.cat([e for e, _ in made.worst]), torch.cat([a for _, a in made.worst], 1)
            kept, at = errors.topk(WORST)
            made.worst = [(kept, found[:, at])]
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("functions", nargs="*", default=list(EXACT))
    parser.add_argument("--part", type=int, default=1, help="take one argument in so many")
    parser.add_argument("--rest", type=int, default=257, help="and one in so many outside of RANGES")
    asked = parser.parse_args()
    for name in asked.functions:
        begin = time.time()
        made = certify(name, asked.part, asked.rest)
        print(
            f"{name:8} {made.count:>11} arguments  largest error {made.largest:.3f} ulp at {made.at}, by mpmath "
            f"{made.by_mpmath():.3f}; wrong specials {made.wrong}; falls {made.falls}; {time.time() - begin:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
