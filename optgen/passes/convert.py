"""convert: numbers pass between i32 and f32 through the mantissa, and what intervals prove needless goes.  Fast maths.

A float in [2^23, 2^24) has its integer in the low bits of its pattern: conversions become an addition that fuses
with its neighbours, where the machine's own take a slow unit.  All rules are EXACT but the last; they run in fast
maths only because the text of strict maths should say what is meant.

rewrite (EXACT):
    cast<f32>(i), 0 <= i < 2^23    ->  bitcast<f32>(i | 0x4B000000) - 8388608.0
    cast<i32>(rint(x))             ->  bitcast<i32>(x + 12582912.0) - 0x4B400000      |x| < 2^22, as rint asks
    cast<i32>(floor(x)), x >= 0    ->  cast<i32>(x)
    b * max(2^23 + i - 2^23, c)    ->  max(fma(2^23 + i, b, b * -2^23), b * c) of patterns; b >= 0 per block, c >= 0:
                                       b * 2^23 is exact, so that the fma rounds b * i once, as the product does
    cast<u8>(i + c)                ->  cast<u8>(i), c = 0 mod 256; an even c goes into the constant above
    cast<i32>(cast<u8>(i))         ->  i, 0 <= i < 256
    where(i < j, x, y)             ->  x or y where the intervals of i and j are disjoint; max and min likewise, but no
                                       constant: the scale of a block that is known to be 0 is stored by block, too
rewrite (ROUNDS):
    reciprocal   x / y -> x * rcp(y) per block, y >= 0
    nan          where(x == x, bits(x) + i, NaN) -> min(bits(x), 0x7FC00000) + i, x of arithmetic, 0 <= i < 2^17:
                 what NVIDIA's arithmetic makes of any NaN is 0x7FFFFFFF, whose pattern i would carry over into
                 that of a number.  AMD's keeps sign and payload: negative NaNs up to 0xFFFDFFFF stay NaN without
                 help, and those above exist only in memory filled with ones: formats write NaN scales as 0x7FC00000.
                 A CPU's keeps them too, and there one instruction sees to all of them: C++ calls bits_or_nan.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from optgen.ir import node as ir
from optgen.ir.node import Node, Rewriter, is_const
from optgen.ir.program import Program
from optgen.ir.ranges import Intervals
from optgen.ops import dtypes, spaces
from optgen.passes.fold import exact

PATTERN = 0x4B000000  # of 2^23: the next 2^23 patterns are the integers above it
ROUND = 12582912.0  # 1.5 * 2^23: adding it rounds to integers of either sign
ROUND_PATTERN = 0x4B400000
INF = 0x7F800000
NAN = 0x7FC00000
ARITHMETIC = ("add", "sub", "mul", "div", "fma", "sqrt")


def _int(value: int) -> Node:
    return ir.const((value + (1 << 31)) % (1 << 32) - (1 << 31), dtypes.i32)


def _plus(x: Node, c: int) -> Node:
    """x + c, with the constants of x gathered in."""
    if x.op == "add" and x.args[1].op == "const":
        x, c = x.args[0], c + x.args[1].attr
    return x if c == 0 else ir.op("add", x, _int(c))


def _is_counter(x: Node) -> bool:
    """bitcast<f32>(i | 0x4B000000): 2^23 + i."""
    return x.op == "bitcast" and x.dtype is dtypes.f32 and x.args[0].op == "or" and is_const(x.args[0].args[1], PATTERN)


def _rounding(x: Node) -> Node | None:
    """y of bitcast<i32>(y + ROUND)."""
    if x.op == "bitcast" and x.args[0].op == "add" and is_const(x.args[0].args[1], ROUND):
        return x.args[0].args[0]
    return None


class Converter:
    """A rewriter of one node whose operands are done."""

    def __init__(self, intervals: Intervals, computed: Collection[str] = ()) -> None:
        self.intervals, self.computed = intervals, computed
        self.fired: set[str] = set()

    def __call__(self, node: Node) -> Node:
        if node.op == "cast":
            return self.cast(node)
        if node.dtype is dtypes.i32 and node.op in ("add", "sub", "max", "min"):
            return self.integer(node)
        if node.op in ("lt", "le", "eq") and node.args[0].dtype is dtypes.i32:
            return self.decided(node)
        if node.op == "where":
            return self.guard(exact(node))
        if node.op == "mul" and node.space == spaces.elem:
            for b, x in (node.args, node.args[::-1]):
                if b.space.name == "block" and (scaled := self.scaled(b, x)) is not None:
                    return scaled
        if node.op == "sub":
            x, c = node.args
            if c.op == "const" and x.op == "sub" and _is_counter(x.args[0]) and _small(c.attr + x.args[1].attr):
                return ir.op("sub", x.args[0], ir.const(c.attr + x.args[1].attr))
        if node.op == "div" and node.space.name == "block" and self.intervals(node.args[1])[0] >= 0:
            self.fired.add("reciprocal")
            by = node.args[1]
            inverse = ir.op("div", ir.const(1.0), by) if by.space == spaces.host else ir.op("rcp", by)
            return exact(ir.op("mul", node.args[0], inverse))
        return node

    def scaled(self, b: Node, x: Node) -> Node | None:
        """b * max(counter - 2^23, c) as one fma and a maximum of patterns, which orders floats >= 0 and keeps NaN."""
        if x.op != "max" or x.args[1].op != "const" or x.args[1].attr < 0 or x.args[0].op != "sub":
            return None
        counter, offset = x.args[0].args
        if not _is_counter(counter) or not is_const(offset, float(1 << 23)):
            return None
        if self.intervals(b)[0] < 0 or not self.largest(b) <= 2.0**100:
            return None
        code = ir.op("fma", counter, b, ir.op("mul", b, ir.const(-float(1 << 23))))
        least = ir.op("mul", b, x.args[1])
        patterns = (ir.op("bitcast", y, attr=dtypes.i32) for y in (code, least))
        return ir.op("bitcast", ir.op("max", *patterns), attr=dtypes.f32)

    def largest(self, x: Node) -> float:
        """The largest value of a float >= 0 that is not NaN, seen through the selection of a NaN's pattern."""
        if x.op == "mul":
            return self.largest(x.args[0]) * self.largest(x.args[1])
        if x.op == "bitcast" and x.args[0].op == "where":
            branches = [y for y in x.args[0].args[1:] if not (y.op == "const" and y.attr > INF)]
            return max((self.largest(ir.op("bitcast", y, attr=dtypes.f32)) for y in branches), default=0.0)
        return self.intervals(x)[1]

    def cast(self, node: Node) -> Node:
        (x,) = node.args
        if node.dtype is dtypes.i32:
            return self.whole(node, x)
        if node.dtype.is_int and node.dtype.bits < 32 and x.dtype is dtypes.i32:
            return self.narrow(node, x)
        low, high = self.intervals(x)
        widens = node.dtype is dtypes.f32 and x.dtype is dtypes.i32
        if widens and node.space == spaces.elem and low >= 0 and high < 1 << 23:
            counter = ir.op("bitcast", ir.op("or", x, _int(PATTERN)), attr=dtypes.f32)
            return ir.op("sub", counter, ir.const(float(1 << 23)))
        return node

    def whole(self, node: Node, x: Node) -> Node:
        """Return a cast of x to i32."""
        if x.op == "rint":
            rounded = ir.op("add", x.args[0], ir.const(ROUND))
            return _plus(ir.op("bitcast", rounded, attr=dtypes.i32), -ROUND_PATTERN)
        if x.op == "floor" and self.intervals(x.args[0])[0] >= 0:
            return ir.op("cast", x.args[0], attr=dtypes.i32)
        # The narrow type holds every value that went in: its interval was not cut.
        narrowed = x.op == "cast" and x.args[0].dtype is dtypes.i32 and x.dtype is not dtypes.i32
        if narrowed and self.intervals(x.args[0]) == self.intervals(x):
            return x.args[0]
        return node

    def narrow(self, node: Node, x: Node) -> Node:
        """Return a cast to a type that drops high bits of x."""
        modulus = 1 << node.dtype.bits
        if x.op == "and" and x.args[1].op == "const" and (x.args[1].attr + 1) % modulus == 0:
            return ir.op("cast", x.args[0], attr=node.dtype)
        if x.op == "add" and x.args[1].op == "const":
            inner, c = x.args[0], x.args[1].attr % modulus
            y = _rounding(inner)
            if c == 0:
                return ir.op("cast", inner, attr=node.dtype)
            if y is not None and c % 2 == 0 and c < 256:
                shifted = ir.op("add", y, ir.const(ROUND + c))
                return ir.op("cast", ir.op("bitcast", shifted, attr=dtypes.i32), attr=node.dtype)
        return node

    def guard(self, node: Node) -> Node:
        """Return where(x == x, bits(x) + i, NaN) as one minimum of integers."""
        if node.op != "where" or node.dtype is not dtypes.i32 or node.args[2].op != "const":
            return node
        same, y, other = node.args
        if same.op != "eq" or same.args[0] is not same.args[1] or not self._is_canonical(same.args[0]):
            return node
        for pattern, carry in (y.args, y.args[::-1]) if y.op == "add" else ((y, _int(0)),):
            low, high = self.intervals(carry)
            of_x = pattern.op == "bitcast" and pattern.args[0] is same.args[0]
            if of_x and low >= 0 and high < 1 << 17 and other.attr >= NAN:
                self.fired.add("nan")
                kept = ir.op("min", pattern, _int(NAN))
                return ir.op("add", kept, carry) if high else kept
        return node

    def _is_canonical(self, x: Node) -> bool:
        """Return True for results of arithmetic; a codec's value is one, or its NaN is made one (`Stage.picked`)."""
        return x.op in ARITHMETIC or (x.op == "load" and x.attr in self.computed)

    def integer(self, node: Node) -> Node:
        x, y = node.args
        if node.op == "add" and x.op == "const":
            x, y = y, x
        if node.op in ("add", "sub") and y.op == "const":
            return _plus(x, y.attr if node.op == "add" else -y.attr)
        a, b = self.intervals(x), self.intervals(y)
        kept = node
        if node.op == "max" and (a[0] >= b[1] or b[0] >= a[1]):
            kept = x if a[0] >= b[1] else y
        if node.op == "min" and (a[1] <= b[0] or b[1] <= a[0]):
            kept = x if a[1] <= b[0] else y
        return node if kept.op == "const" else kept

    def decided(self, node: Node) -> Node:
        a, b = (self.intervals(x) for x in node.args)
        strict = node.op != "le"
        if a[1] < b[0] or (not strict and a[1] == b[0]):
            return ir.const(node.op != "eq", dtypes.boolean)
        if b[1] < a[0] or (node.op == "lt" and b[1] == a[0]):
            return ir.const(False, dtypes.boolean)
        return node


def _small(value: float) -> bool:
    """Return True if 2^23 + i - value is exact for every byte i."""
    return value == int(value) and abs(value) < 1 << 24


def convert(program: Program) -> Program:
    """See the module's docstring."""
    if program.maths == "strict":
        return program
    computed = {b.name for b in program.buffers if b.role == "value"}
    rule = Converter(Intervals(dict(program.ranges)), computed)
    program = program.map(Rewriter(rule))
    return replace(program, rules=tuple(sorted({*program.rules, *rule.fired})))
