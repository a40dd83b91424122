"""Intervals of nodes: what the storage dtypes, masks, squares and the hyper-parameters' ranges imply.

A backend asks them where a cheaper spelling needs a sign: a reciprocal as the square of a reciprocal root
wants a divisor >= 0.  NaN is outside every interval; intervals say nothing about it.

An interval holds what is computed, not what would be: outside host space every f32 result is rounded outward to
f32 (directed rounding of the ends holds what any rounding of a value between them gives), divisions and roots by
what fast maths is off besides, and subnormal ends reach to 0, which fast maths may flush them to.  Host values are
fp64 and become f32 where a kernel's arithmetic takes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping

from optgen.ir.node import Node, is_const, waiting
from optgen.ops import dtypes, spaces
from optgen.ops.dtypes import DType
from optgen.ops.prims import PRIMS

Interval = tuple[float, float]
ANY: Interval = (-math.inf, math.inf)

NORMAL = dtypes.f32.normal
RECIPROCAL_REACHES = 2.0**126  # the reciprocal of what is larger is subnormal: fast maths may make 0 of it

_STORED: Mapping[str, Interval] = {
    "u8": (0, 255), "u4": (0, 15), "u2": (0, 3), "u1": (0, 1), "i8": (-128, 127), "i16": (-32768, 32767),
}  # fmt: skip
_INT = (-(2**31), 2**31 - 1)


def _product(a: Interval, b: Interval) -> Interval:
    ends = [0.0 if 0 in (x, y) else x * y for x in a for y in b]
    return min(ends), max(ends)


def _quotient(a: Interval, b: Interval) -> Interval:
    if b[0] <= 0 <= b[1] and not (b[0] == 0 and a[0] >= 0):
        return ANY
    ends = [_over(x, y) for x in a for y in b]
    return min(ends), max(ends)


def _over(x: float, y: float) -> float:
    if y == 0:
        return math.inf if x > 0 else 0.0
    return 0.0 if math.isinf(y) else x / y


def _outward(x: float, up: bool, dtype: DType = dtypes.f32) -> float:
    """The number of a float type next to x on one side; x itself where the type has it."""
    if not math.isfinite(x):
        return x
    step = math.ldexp(1.0, max(math.frexp(x)[1] - 1, dtype.lowest) - dtype.mantissa)
    out = (math.ceil if up else math.floor)(x / step) * step
    if abs(out) <= dtype.largest:
        return out
    beyond = math.inf if up == (out > 0) else dtype.largest
    return math.copysign(beyond, out)


def _flushed(a: Interval) -> Interval:
    """The interval and 0 where an end is subnormal."""
    return (0.0 if 0 < a[0] < NORMAL else a[0]), (0.0 if -NORMAL < a[1] < 0 else a[1])


def rounded(a: Interval, ulps: int = 0) -> Interval:
    """Return the interval of the values in a after rounding to f32, a few units in the last place besides; it crosses
    no zero."""
    low, high = (x - side * abs(x) * ulps * 2.0**-23 if ulps else x for side, x in zip((1, -1), a, strict=True))
    return _flushed((_outward(low, False), _outward(high, True)))


def _divisor(a: Interval) -> Interval:
    """Return the interval of a divisor as fast maths may take it: a subnormal one for 0, a very large one for an
    infinity."""
    low, high = _flushed(a)
    return (-math.inf if low < -RECIPROCAL_REACHES else low), (math.inf if high > RECIPROCAL_REACHES else high)


def _wrap(a: Interval) -> Interval:
    return a if a[0] >= _INT[0] and a[1] <= _INT[1] else _INT


class Intervals:
    """node -> interval, computed on demand and kept; `scalars` gives those of host names."""

    def __init__(self, scalars: Mapping[str, Interval]) -> None:
        self.scalars = scalars
        self.known: dict[Node, Interval] = {}

    def __call__(self, node: Node) -> Interval:
        for waits in waiting(node, self.known):
            self.known[waits] = self._rounded(waits)
        return self.known[node]

    def _rounded(self, node: Node) -> Interval:
        """The interval of a node's results, rounded as they are."""
        a = [self.known[x] for x in node.args]
        if node.space == spaces.host:
            return self._of(node, a)
        # Host scalars, constants too, are rounded to f32 on their way.
        floats = (x.space == spaces.host and x.dtype is dtypes.f32 for x in node.args)
        got = self._of(node, [rounded(x) if host else x for x, host in zip(a, floats, strict=True)])
        if node.op == "cast" and node.dtype.is_float and node.dtype is not dtypes.f64:
            return _outward(got[0], False, node.dtype), _outward(got[1], True, node.dtype)
        row = PRIMS.get(node.op)
        if node.dtype is not dtypes.f32 or row is None or row.ulps is None:
            return got
        return rounded(got, row.ulps)

    def _of(self, node: Node, a: list[Interval]) -> Interval:
        """Return the interval of the exact results: by the operation's rule, or as its row says that it rises."""
        if node.op == "sym":
            return self.scalars.get(node.attr, ANY)
        if node.op in ("mul", "fma"):
            product = self._product(node, a)
            return product if node.op == "mul" else _open(product[0] + a[2][0], product[1] + a[2][1])
        if node.op in _RULES:
            return _RULES[node.op](node, a)
        row = PRIMS.get(node.op)
        if row is None or not row.rises:
            return _anything(node)
        meaning = row.number or row.operator
        assert meaning is not None
        ends = [(x if side == "+" else x[::-1]) for x, side in zip(a, row.rises, strict=True)]
        got = _open(meaning(*(x[0] for x in ends)), meaning(*(x[1] for x in ends)))
        return _wrap(got) if node.dtype is dtypes.i32 and node.op in ("add", "sub") else got

    def _product(self, node: Node, a: list[Interval]) -> Interval:
        """The interval of x * y, which is not negative where it is a square, or h * x * x of an h that is not."""
        product, (x, y) = _product(a[0], a[1]), node.args[:2]
        if node.dtype is not dtypes.f32:
            return _wrap(product)
        square = x is y
        for scaled, other in ((x, y), (y, x)):
            if scaled.op == "mul" and other in scaled.args:
                rest = scaled.args[1] if scaled.args[0] is other else scaled.args[0]
                square = square or self.known[rest][0] >= 0
        return (max(product[0], 0.0), product[1]) if square else product


def _open(low: float, high: float) -> Interval:
    """The interval, open to a side on which infinities of either sign met."""
    return (low if low == low else -math.inf), (high if high == high else math.inf)


RangeRule = Callable[[Node, list[Interval]], Interval]


def _anything(node: Node) -> Interval:
    return _INT if node.dtype.is_int else ANY


def _cast(node: Node, a: list[Interval]) -> Interval:
    if node.dtype.is_float:
        return a[0]
    range_of = _STORED.get(node.dtype.name, _INT)
    low, high = (x if math.isinf(x) else math.trunc(x) for x in a[0])  # floats are cut towards 0
    return (low, high) if range_of[0] <= low and high <= range_of[1] else range_of


def _bitcast(node: Node, a: list[Interval]) -> Interval:
    low, high = a[0]
    if node.dtype is dtypes.f32 and low >= 0 and high <= 0x7F800000:  # the patterns of 0 to +inf are in their order
        return dtypes.of_pattern(int(low)), dtypes.of_pattern(int(high))
    if node.dtype is dtypes.i32 and low >= 0:
        return (dtypes.pattern_of(low), dtypes.pattern_of(high)) if high < math.inf else (0, _INT[1])
    return (0.0, math.inf) if node.dtype is dtypes.f32 and low >= 0 else _anything(node)


def _and(node: Node, a: list[Interval]) -> Interval:
    if node.dtype is not dtypes.i32:
        return ANY
    masks = [x.attr for x in node.args if x.op == "const" and x.attr >= 0]
    return (0, min(masks)) if masks else _INT


def _or(node: Node, a: list[Interval]) -> Interval:
    if node.dtype is not dtypes.i32 or a[0][0] < 0 or a[1][0] < 0:
        return _anything(node)
    for x, y in (a, a[::-1]):
        if y[0] == y[1] and x[1] < int(y[0]) & -int(y[0]):
            return x[0] + y[0], x[1] + y[0]  # below the constant's lowest bit: a sum
    # No bit above the highest of either side.
    return max(a[0][0], a[1][0]), (1 << int(max(a[0][1], a[1][1])).bit_length()) - 1


def _root(node: Node, a: list[Interval]) -> Interval:
    return (0.0, math.inf) if a[0][0] >= 0 else ANY


def _pow(node: Node, a: list[Interval]) -> Interval:
    if a[0][0] < 0 or a[1][0] < 0:
        return ANY
    return (0.0, max(1.0, a[0][1])) if a[0][1] <= 1 else (0.0, math.inf)


_RULES: Mapping[str, RangeRule] = {
    "const": lambda n, a: (float(n.attr), float(n.attr)),
    "load": lambda n, a: _STORED.get(n.dtype.name, _anything(n)),
    "abs": lambda n, a: (max(0.0, a[0][0], -a[0][1]), max(a[0][1], -a[0][0])),
    "cast": _cast, "bitcast": _bitcast, "and": _and, "or": _or, "pow": _pow,
    "div": lambda n, a: _over_node(a[0], a[1], n.args[1], n),
    "rcp": lambda n, a: _over_node((1.0, 1.0), a[0], n.args[0], n),
    "sqrt": lambda n, a: (math.sqrt(max(a[0][0], 0.0)), math.sqrt(max(a[0][1], 0.0))),
    "cbrt": _root, "power": _root,
    "shr": lambda n, a: (math.floor(a[0][0] / 2 ** n.args[1].attr), math.floor(a[0][1] / 2 ** n.args[1].attr)),
    "draw": lambda n, a: (0, (1 << n.attr[2]) - 1),
    "where": lambda n, a: (min(a[1][0], a[2][0]), max(a[1][1], a[2][1])),
    "lshr": lambda n, a: (0, (1 << (32 - n.args[1].attr)) - 1),
    "shl": lambda n, a: _wrap((a[0][0] * 2 ** n.args[1].attr, a[0][1] * 2 ** n.args[1].attr)),
    **dict.fromkeys(("block_max", "block_min"), lambda n, a: a[0]),
    "lookup": lambda n, a: (min(n.attr.values), max(n.attr.values)),
    "search": lambda n, a: (0, len(n.attr.values)),
}  # fmt: skip
"""Rules for operations whose intervals do not follow from the ends of their operands alone."""


def _over_node(x: Interval, y: Interval, divisor: Node, node: Node) -> Interval:
    """x / y; of a divisor that may be -0 nothing is known."""
    y = y if node.space == spaces.host else _divisor(y)
    return ANY if y[0] == 0 and not is_plus(divisor) else _quotient(x, y)


def never_zero(node: Node, intervals: Intervals) -> bool:
    """Return True if a host value is nonzero under every legal setting: constants, bias corrections 1 - base**step of a
    base below 1, and their roots, products and quotients."""
    op, a = node.op, node.args
    if op == "const":
        return bool(node.attr != 0)
    if op == "sub":
        if not is_correction(node) or (a[1].args[1].op, a[1].args[1].attr) != ("sym", "step"):
            return False
        low, high = intervals(a[1].args[0])
        return low > -1 and high < 1
    if op in ("sqrt", "neg"):
        return never_zero(a[0], intervals)
    return op in ("mul", "div") and all(never_zero(x, intervals) for x in a)


def is_correction(node: Node) -> bool:
    """Return True if a host value is 1 - base**exponent."""
    return node.op == "sub" and is_const(node.args[0], 1.0) and node.args[1].op == "pow"


def corrections(node: Node) -> Iterator[Node]:
    """The factors 1 - base**exponent of a host value, under roots too: where one is 0, the value is."""
    if is_correction(node):
        yield node
    elif node.op in ("sqrt", "neg", "mul"):
        for x in node.args:
            yield from corrections(x)
    elif node.op == "div":
        yield from corrections(node.args[0])


def is_plus(node: Node, loads: Collection[str] = ()) -> bool:
    """Return True if a value that is never negative is shown by its structure never to be -0 either.

    loads  buffers that hold no -0
    """
    op, a = node.op, node.args
    if op in ("load", "const"):
        return node.attr in loads if op == "load" else math.copysign(1, node.attr) > 0
    if node.space == spaces.host:
        return op != "neg"
    if op == "abs" or op in ("mul", "fma") and a[0] is a[1]:
        return True
    each = (is_plus(x, loads) for x in (a[1:] if op == "where" else a[:2]))
    if op in ("add", "fma"):
        return any(each) if op == "add" else is_plus(a[2], loads) or all(each)
    return op in ("mul", "div", "max", "min", "where", "sqrt") and all(each)
