"""Running error analysis: a spec read on intervals that enclose both its exact value and what fp32 computes.

    lo, hi = spec.evaluate(Interval.point(p), Interval.point(g), t, ...)[0]

Every operation is done exactly on the ends (in fp64) and then widened by one rounding of the machine:
`unit * |x| + tiny`.  Numbers that meet an interval are host scalars or constants: exact, then rounded once
to fp32.  So whatever a kernel rounds, in whichever direction, its result lies inside, and the distance to
the fp64 oracle is at most the distance to the farther end.

NaN ends mean that nothing is claimed: the operands may overflow to Inf - Inf, divide by 0, or were NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Union

import torch
from torch import Tensor

from optgen.lang.values import clip, exp2, log2, maximum, raised, reader_of, where
from optgen.ops.dtypes import F32_UNIT, f32
from optgen.ops.prims import PRIMS, SCOPES, Prim, holds

F32_TINY = 2.0**-149  # twice half the smallest subnormal step
F32_LARGEST, F32_NORMAL = f32.largest, f32.normal

# Errors of the decomposed functions (passes/decompose.py) in units of half an ulp, counted from their operations:
# exp2  truncated series 2.8 (at f = -1/2), last addition 1, products before it less than 1 together
# log2  of the mantissa's series, which is at most 1/2: 5 coefficients, one quotient of two sums
# cbrt  last Newton step: square 1/3, quotient 1/3, last difference 1; the other roundings are of a small correction
EXP2_UNITS, LOG2_UNITS, CBRT_UNITS = 6.0, 8.0, 4.0


@dataclass(frozen=True)
class Rounding:
    """The rounding of a machine: relative `unit`, absolute `tiny`; `regroups`: quotients are products with 1 / y, and
    the factors of products and roots come in any order."""

    unit: float = F32_UNIT
    tiny: float = F32_TINY
    regroups: bool = False
    roundings: int = 1  # half-ulp roundings that one operation of the author may become


STRICT = Rounding()
FAST_UNITS = 8
FAST = Rounding(FAST_UNITS * F32_UNIT, F32_NORMAL, regroups=True, roundings=FAST_UNITS)
"""Fast maths: one operation of the author may become up to `FAST_UNITS` half-ulp roundings of the result.

The ROUNDS rules change products, quotients, roots and the order of their factors only, so errors stay
relative to the same results; the most expensive rule is a quotient by a sum under a common factor:
a / (h * x + e) costs the author 3 roundings; it becomes (a / h) * rcp(x + e / h) with a / h and e / h
rounded on the host (2), the sum (1), the reciprocal as the square of a reciprocal root (2.2 units each by the
GPU's approximation, doubled by squaring, 1 more for the square), and 2 products: 5.4 + 2 + 1 + 2 < 3 * 8.  A
root of a product costs the author 1.5 and becomes rsqrt, two products and a host factor: 2.2 + 3 < 1.5 * 8.
A lone quotient costs 1 and becomes 5.4 + 1 < 8.  Subnormal results may be flushed to 0: tiny is 2^-126, times what
the factors that are still to come may make of it.  Where some order of the factors overflows, nothing is claimed.
"""

Ends = Union["Interval", float, int]


class Condition:
    """An elementwise condition: surely true, surely false, or neither."""

    __slots__ = ("no", "yes")

    def __init__(self, yes: Tensor, no: Tensor) -> None:
        self.yes, self.no = yes, no

    def __and__(self, o: Condition | bool) -> Condition:
        o = _truth(o, self)
        return Condition(self.yes & o.yes, self.no | o.no)

    def __or__(self, o: Condition | bool) -> Condition:
        o = _truth(o, self)
        return Condition(self.yes | o.yes, self.no & o.no)

    def __xor__(self, o: Condition | bool) -> Condition:
        o = _truth(o, self)
        return Condition((self.yes & o.no) | (self.no & o.yes), (self.yes & o.yes) | (self.no & o.no))

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    def __invert__(self) -> Condition:
        return Condition(self.no, self.yes)

    reader: ClassVar[_Reader]


def _truth(c: Condition | bool, like: Condition) -> Condition:
    if isinstance(c, Condition):
        return c
    yes = torch.full_like(like.yes, holds(c))
    return Condition(yes, ~yes)


class Interval:
    """[lo, hi], fp64 tensors of one shape; NaN where nothing is known.

    factors  of a product, where they may be regrouped: the products of all those above 1 and of all those below
    """

    __slots__ = ("factors", "hi", "lo", "model")

    def __init__(
        self, lo: Tensor, hi: Tensor, model: Rounding = STRICT, factors: tuple[Tensor, Tensor] | None = None
    ) -> None:
        self.lo, self.hi, self.model, self.factors = lo, hi, model, factors

    @classmethod
    def point(cls, x: Tensor, model: Rounding = STRICT) -> Interval:
        """Exactly x: a value that fp32 holds, such as a decoded state."""
        x = x.to(torch.float64)
        return cls(x, x, model)

    reader: ClassVar[_Reader]  # optgen.lang's functions ask the type for it

    @property
    def shape(self) -> torch.Size:
        return self.lo.shape

    @property
    def T(self) -> Interval:  # noqa: N802 - as torch and NumPy have it
        return Interval(self.lo.mT, self.hi.mT, self.model)

    mT = T  # noqa: N815 - likewise

    def __matmul__(self, other: Interval) -> Interval:
        """A product of whole matrices: nothing is claimed."""
        return Interval(self.lo @ other.lo, self.hi @ other.hi, self.model).unknown()

    def reshape(self, shape: Sequence[int]) -> Interval:
        return Interval(self.lo.reshape(shape), self.hi.reshape(shape), self.model)

    def expand(self, shape: Sequence[int]) -> Interval:
        return Interval(self.lo.expand(shape), self.hi.expand(shape), self.model)

    def clone(self) -> Interval:
        return self._under(self.model)

    def new_full(self, shape: tuple[int, ...], value: float) -> Interval:
        one = _lift(value, self)
        return Interval(one.lo.expand(shape), one.hi.expand(shape), self.model)

    # -- what a caller asks

    @property
    def known(self) -> Tensor:
        """The mask of the elements of which anything is claimed."""
        return ~(self.lo.isnan() | self.hi.isnan())

    def distance(self, x: Tensor) -> Tensor:
        """The largest distance of a value inside to x; inf where nothing is claimed."""
        x = x.to(torch.float64)
        far = torch.maximum(self.hi - x, x - self.lo)
        return torch.where(far.isnan(), torch.inf, far)

    def contains(self, x: Tensor) -> Tensor:
        """Return the mask of the elements where x lies inside; True where nothing is claimed."""
        x = x.to(torch.float64)
        return ~self.known | ((self.lo <= x) & (x <= self.hi))

    def magnitude(self) -> Tensor:
        """The largest |x| inside."""
        return torch.maximum(self.lo.abs(), self.hi.abs())

    def widened(self, radius: Tensor) -> Interval:
        return Interval(self.lo - radius, self.hi + radius, self.model)

    def spanning(self, lo: Tensor, hi: Tensor) -> Interval:
        """Return [lo, hi] under the model of this one."""
        return Interval(lo, hi, self.model)

    def unknown(self) -> Interval:
        """Return an interval of this shape of which nothing is claimed."""
        nothing = torch.full_like(self.lo, torch.nan)
        return Interval(nothing, nothing, self.model)

    def saturated(self, largest: float) -> Interval:
        """Return the interval of what numbers beyond the largest of a dtype, which become infinities, may be."""
        lo = torch.where(self.lo < -largest, -torch.inf, self.lo.clamp(max=largest))
        return Interval(lo, torch.where(self.hi > largest, torch.inf, self.hi.clamp(min=-largest)), self.model)

    def _under(self, model: Rounding) -> Interval:
        return Interval(self.lo, self.hi, model)

    # -- arithmetic

    def __add__(self, o: Ends) -> Interval:
        y = _lift(o, self)
        lo, hi = self.lo + y.lo, self.hi + y.hi
        if not _finite(hi - lo):
            opposite = (self.hi + y.lo).isnan() | (self.lo + y.hi).isnan()  # Inf - Inf
            lo, hi = _unknown(opposite, lo, hi)
        return _rounded(lo, hi, self.model)

    def __mul__(self, o: Ends) -> Interval:
        y = _lift(o, self)
        ends = _product(self, y)
        if not self.model.regroups:
            return _rounded(*ends, self.model)
        (above, below), (more, less) = _factors(self), _factors(y)
        return _regrouped(*ends, self.model, (above * more, below * less))

    def __truediv__(self, o: Ends) -> Interval:
        y = _lift(o, self)
        if self.model.regroups:
            return self * y.rcp()
        zero = (y.lo <= 0) & (y.hi >= 0)
        ends = [a / b for a in (self.lo, self.hi) for b in (y.lo, y.hi)]
        return _rounded(*_unknown(zero, *_hull(ends)), self.model)

    def rcp(self) -> Interval:
        """1 / x; where products are regrouped, nothing is claimed if it may overflow."""
        smallest = F32_NORMAL if self.model.regroups else 0.0
        near_zero = (self.lo <= smallest) & (self.hi >= -smallest)
        ends = _unknown(near_zero, *_hull([1 / self.lo, 1 / self.hi]))
        if not self.model.regroups:
            return _rounded(*ends, self.model)
        above, below = _factors(self)
        return _regrouped(*ends, self.model, (1 / below, 1 / above))

    def __neg__(self) -> Interval:
        return Interval(-self.hi, -self.lo, self.model, self.factors)

    def __pos__(self) -> Interval:
        return self

    def __abs__(self) -> Interval:
        across = (self.lo < 0) & (self.hi > 0)
        a, b = self.lo.abs(), self.hi.abs()
        return Interval(torch.where(across, 0.0, torch.minimum(a, b)), torch.maximum(a, b), self.model)

    def __sub__(self, o: Ends) -> Interval:
        return self + (-_lift(o, self))

    def __rsub__(self, o: Ends) -> Interval:
        return _lift(o, self) + (-self)

    def __rtruediv__(self, o: Ends) -> Interval:
        return _lift(o, self) / self

    __radd__, __rmul__ = __add__, __mul__

    def __pow__(self, e: float) -> Interval:
        """Raise to a power as traced values do: products for whole exponents, else the reader's power.

        Kernels have either for a number with a point, which may be the author's or a hyper-parameter's value.
        """
        out: Interval = raised(self, e) if e else self.new_full(tuple(self.shape), 1.0)
        return _around(out, self.reader.power(self, e)) if isinstance(e, float) else out

    def __rpow__(self, base: float) -> Interval:
        return self.reader.pow(base, self)

    # -- comparisons

    def __lt__(self, o: Ends) -> Condition:
        y = _lift(o, self)
        return Condition(self.hi < y.lo, self.lo >= y.hi)

    def __le__(self, o: Ends) -> Condition:
        y = _lift(o, self)
        return Condition(self.hi <= y.lo, self.lo > y.hi)

    def __gt__(self, o: Ends) -> Condition:
        return _lift(o, self) < self

    def __ge__(self, o: Ends) -> Condition:
        return _lift(o, self) <= self

    def __repr__(self) -> str:
        return f"Interval({self.lo!r}, {self.hi!r})"


def _lift(x: Ends, like: Interval) -> Interval:
    """A number beside an interval: a host scalar in fp64, rounded once to fp32 (exact if fp32 holds it)."""
    if isinstance(x, Interval):
        return x
    return _of_number(float(x), math.copysign(1.0, x), like.lo.device)._under(like.model)


@lru_cache(maxsize=4096)
def _of_number(x: float, sign: float, device: torch.device) -> Interval:
    """`sign` keeps 0 and -0 apart.  The same number is met by every block and step: most are in the cache."""
    value = torch.tensor(x, dtype=torch.float64, device=device)
    return Interval(value, value) if value.float().double() == value else _rounded(value, value, STRICT)


def _factors(x: Interval) -> tuple[Tensor, Tensor]:
    """(product of the factors above 1, of those below 1): what partial products lie between."""
    return x.factors or (x.magnitude().clamp(min=1), abs(x).lo.clamp(max=1))


def _regrouped(lo: Tensor, hi: Tensor, model: Rounding, factors: tuple[Tensor, Tensor]) -> Interval:
    """A product, quotient or root of which the factors may come in any order, rounded."""
    above, _ = factors
    out = _rounded(*_unknown(above > F32_LARGEST, lo, hi), model, model.tiny * above)
    return Interval(out.lo, out.hi, model, factors)


def _rounded(lo: Tensor, hi: Tensor, model: Rounding, tiny: Tensor | float | None = None) -> Interval:
    """The interval after one rounding, which crosses neither 0 nor, without becoming Inf, the largest fp32."""
    # Both ends at once, as upper ones of x and -x: of small tensors the number of calls decides.
    ends = torch.stack((-lo, hi))
    out = ends.abs().mul_(model.unit).add_(model.tiny if tiny is None else tiny).add_(ends)
    out.masked_fill_((ends <= 0) & (out > 0), 0.0).masked_fill_(out > F32_LARGEST, torch.inf)
    # hi = -inf: the fp32 value is -Inf, the exact one may be any larger than the largest fp32.
    below, high = out.masked_fill_(ends == -torch.inf, -F32_LARGEST).unbind()
    return Interval(-below, high, model)


def _hull(ends: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Smallest and largest; NaN if any is NaN."""
    lo = hi = ends[0]
    for x in ends[1:]:
        lo, hi = torch.minimum(lo, x), torch.maximum(hi, x)
    return lo, hi


def _around(x: Interval, y: Interval) -> Interval:
    """The smallest interval that holds both."""
    return Interval(torch.minimum(x.lo, y.lo), torch.maximum(x.hi, y.hi), x.model)


def _finite(x: Tensor) -> bool:
    """Return True if all of x is finite: nearly always, and then nothing else need be asked."""
    return bool(x.isfinite().all())


def _unknown(where_: Tensor, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
    return lo.masked_fill(where_, torch.nan), hi.masked_fill(where_, torch.nan)


def _product(x: Interval, y: Interval) -> tuple[Tensor, Tensor]:
    if x is y:
        lo, hi = _hull([x.lo * x.lo, x.hi * x.hi])
        return torch.where((x.lo < 0) & (x.hi > 0), 0.0, lo), hi
    ends = _hull([a * b for a in (x.lo, x.hi) for b in (y.lo, y.hi)])
    if _finite((x.hi - x.lo) + (y.hi - y.lo)):
        return ends
    undefined = [(a.lo <= 0) & (a.hi >= 0) & (b.lo.isinf() | b.hi.isinf()) for a, b in ((x, y), (y, x))]  # 0 * Inf
    return _unknown(undefined[0] | undefined[1], *ends)


class _Reader:
    """The functions of optgen.lang on intervals; those that rise or fall with their operands as their rows say."""

    def __getattr__(self, name: str) -> Callable[..., Interval]:
        if name.split("_")[0] in SCOPES:
            return _reduction(name)
        row = PRIMS.get(name)
        if row is None or not row.rises:
            raise AttributeError(name)
        return lambda *operands: _rising(row, operands)

    def sqrt(self, x: Interval) -> Interval:
        ends = _unknown(x.lo < 0, x.lo.sqrt(), x.hi.sqrt())
        if not x.model.regroups:
            return _rounded(*ends, x.model)
        above, below = _factors(x)
        return _regrouped(*ends, x.model, (above.sqrt(), below.sqrt()))

    def rsqrt(self, x: Interval) -> Interval:
        return 1 / self.sqrt(x)

    def rcp(self, x: Interval) -> Interval:
        return 1 / x

    def abs(self, x: Interval) -> Interval:
        return abs(x)

    def where(self, c: Condition | bool, a: Ends, b: Ends) -> Interval | float | int:
        if not isinstance(c, Condition):
            return a if holds(c) else b
        model = next((v.model for v in (a, b) if isinstance(v, Interval)), STRICT)
        like = Interval(torch.zeros_like(c.yes, dtype=torch.float64), torch.zeros(()), model)
        x, y = _lift(a, like), _lift(b, like)
        # Whether the condition holds decides alone: a branch not taken may be anything, NaN too.
        lo = torch.where(c.yes, x.lo, torch.where(c.no, y.lo, torch.minimum(x.lo, y.lo)))
        hi = torch.where(c.yes, x.hi, torch.where(c.no, y.hi, torch.maximum(x.hi, y.hi)))
        return Interval(lo, hi, model)

    def eq(self, a: Ends, b: Ends) -> Condition:
        like: Any = a if isinstance(a, Interval) else b
        x, y = _lift(a, like), _lift(b, like)
        same = (x.lo == x.hi) & (y.lo == y.hi) & (x.lo == y.lo)
        return Condition(same, (x.hi < y.lo) | (y.hi < x.lo))

    def exp2(self, x: Interval) -> Interval:
        units = Rounding(max(x.model.unit, F32_UNIT) * EXP2_UNITS, x.model.tiny)
        # Kernels limit x; what it is exactly lies beyond.
        both = [_rounded(torch.exp2(i.lo), torch.exp2(i.hi), units) for i in (x, clip(x, -126.0, 127.0))]
        return _around(*both)._under(x.model)

    def log2(self, x: Interval) -> Interval:
        lo, hi = _unknown(x.lo <= 0, x.lo.log2(), x.hi.log2())

        def error(t: Tensor) -> Tensor:  # the sum's own rounding, and the mantissa's series, at most 1/2
            return x.model.unit * (t.abs() + LOG2_UNITS * t.abs().clamp(max=0.5)) + x.model.tiny

        return Interval(lo - error(lo), hi + error(hi), x.model)

    def log(self, x: Interval) -> Interval:
        if x.model.regroups:  # a subnormal number may count as 0
            x = Interval(torch.where((x.lo > 0) & (x.lo < F32_NORMAL), 0.0, x.lo), x.hi, x.model)
        return _rising(PRIMS["log"], (x,))

    def pow(self, base: float, x: Interval) -> Interval:
        """base ** x of a number: 2 ** (x * log2(base)), whose own error is below 3 units."""
        y = x * math.log2(base) if base > 0 else x.unknown()
        units = Rounding(y.model.unit * 3, y.model.tiny)
        return _rounded(torch.exp2(y.lo), torch.exp2(y.hi), units)._under(x.model)

    def atan2(self, y: Ends, x: Ends) -> Interval:
        """The hull of the corners' angles; all angles where the negative half axis, 0 among it, may be met."""
        like: Any = y if isinstance(y, Interval) else x
        b, a = _lift(y, like), _lift(x, like)
        # Fast maths takes 0, of either sign, for a subnormal number.
        tiny = F32_NORMAL if like.model.regroups else 0.0
        b, a = (Interval(i.lo - tiny, i.hi + tiny) for i in (b, a))
        lo, hi = _hull([torch.atan2(s, c) for s in (b.lo, b.hi) for c in (a.lo, a.hi)])
        any_ = (a.lo <= 0) & (b.lo <= 0) & (b.hi >= 0)
        units = Rounding(like.model.unit * (1 + 2 * (PRIMS["atan2"].ulps or 0)), like.model.tiny)
        return _rounded(lo.masked_fill(any_, -math.pi), hi.masked_fill(any_, math.pi), units)._under(like.model)

    def cbrt(self, x: Interval) -> Interval:
        units = Rounding(x.model.unit * CBRT_UNITS, x.model.tiny)
        # The steps make NaN of Inf.
        lo, hi = (t.sign() * t.abs() ** (1 / 3) for t in (x.lo, x.hi))
        out = _rounded(*_unknown(x.magnitude().isinf(), lo, hi), units)
        # Below the normal numbers the first guess is far above the root: three steps bring it down, not there.
        high = torch.where((x.lo < F32_NORMAL) & (x.hi > 0), torch.clamp(out.hi, min=2.0**-42), out.hi)
        low = torch.where((x.hi > -F32_NORMAL) & (x.lo < 0), torch.clamp(out.lo, max=-(2.0**-42)), out.lo)
        return Interval(low, high, x.model)

    def power(self, x: Interval, e: float) -> Interval:
        """exp2(e * log2(|x|)) with what it is exactly, beyond the limits of exp2 and under the normal numbers too."""
        size = abs(x)
        none = 0.0**e if e >= 0 else math.inf
        kernel: Interval = where(size < F32_NORMAL, none, exp2(e * log2(maximum(size, F32_NORMAL))))
        exact = _rounded(*_hull([size.lo**e, size.hi**e]), x.model)
        out = _around(kernel, exact)
        if not float(e).is_integer():
            return Interval(*_unknown(x.lo < 0, out.lo, out.hi), x.model)
        if e % 2 == 0:
            return out
        # An odd one has the sign of x; where x may have either, so may the power.
        low = torch.where(x.lo >= 0, out.lo, -out.hi)
        high = torch.where(x.hi < 0, -out.lo, out.hi)
        return Interval(low, high, x.model)

    def call(self, x: Interval, *_: float) -> Interval:
        """A function of whole matrices: every element depends on all, through products in bf16; nothing is claimed."""
        return x.unknown()


def _reduction(name: str) -> Callable[[Interval], Interval]:
    """row_sum, col_mean, tensor_max ...: dimensions stay, as on tensors; a vector is one row, the model one tensor."""
    scope, kind = name.split("_")
    scoped = SCOPES[scope]

    def reduce(x: Interval) -> Interval:
        dims = tuple(d for d in scoped or range(-x.lo.ndim, 0) if -d <= x.lo.ndim)
        if kind == "max":
            lo, hi = (t.amax(dims, keepdim=True) if dims else t for t in (x.lo, x.hi))
            out = Interval(lo, hi, x.model)
        else:
            out = _sum(x, dims)
            out = out / math.prod(x.shape[d] for d in dims) if kind == "mean" else out
        return out if scoped else Interval(out.lo.reshape(()), out.hi.reshape(()), x.model)

    return reduce


def _rising(row: Prim, operands: Sequence[Ends]) -> Interval:
    like = next(x for x in operands if isinstance(x, Interval))
    ends = zip((_lift(x, like) for x in operands), row.rises, strict=True)
    sides = [(x.lo, x.hi) if side == "+" else (x.hi, x.lo) for x, side in ends]
    lo, hi = (getattr(reader_of(like.lo), row.name)(*(side[k] for side in sides)) for k in (0, 1))
    if row.ulps is None:
        return Interval(lo, hi, like.model)
    return _rounded(lo, hi, Rounding(like.model.unit * (1 + 2 * row.ulps), like.model.tiny))._under(like.model)


def _sum(x: Interval, dims: tuple[int, ...]) -> Interval:
    """A sum in any order: at most n roundings of partial sums, none of which exceeds the sum of the magnitudes.

    Terms that are all of one sign have a sum of that sign, however it is rounded.
    """
    if not dims:
        return x
    terms = math.prod(x.shape[d] for d in dims)
    size = x.magnitude().sum(dims, keepdim=True)
    # n units are the first order of (1 + unit)^n - 1, which they exceed by less than this for any n below 2^23.
    error = size * (terms * x.model.unit) * (1 + terms * x.model.unit) + terms * x.model.tiny
    lo, hi = x.lo.sum(dims, keepdim=True), x.hi.sum(dims, keepdim=True)
    low, high = torch.where(lo >= 0, (lo - error).clamp(min=0), lo - error), hi + error
    high = torch.where(hi <= 0, high.clamp(max=0), high)
    # Where a partial sum may overflow, the result may be Inf of either sign, or NaN.
    return Interval(*_unknown(size + error > F32_LARGEST, low, high), x.model)


Interval.reader = Condition.reader = _Reader()
