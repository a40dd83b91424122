"""Intervals of nodes: what the storage dtypes, masks, squares and the hyper-parameters' ranges imply.

A backend asks them where a cheaper spelling needs a sign: a reciprocal as the square of a reciprocal root
wants a divisor >= 0.  NaN is outside every interval; intervals say nothing about it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping

from optgen.ir.node import Node
from optgen.ops import dtypes, spaces

Interval = tuple[float, float]
ANY: Interval = (-math.inf, math.inf)

_STORED: Mapping[str, Interval] = {"u8": (0, 255), "i8": (-128, 127), "i16": (-32768, 32767)}
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


def _float_bits(a: Interval) -> Interval:
    """f32 values of i32 bit patterns in a: monotone from 0 up to +inf."""
    if a[0] >= 0 and a[1] <= 0x7F800000:
        low, high = (struct.unpack("<f", struct.pack("<i", int(x)))[0] for x in a)
        return low, high
    return (0.0, math.inf) if a[0] >= 0 else ANY


def _bits_of(x: float) -> int:
    """The i32 pattern of the f32 nearest to x >= 0."""
    return int(struct.unpack("<i", struct.pack("<f", x))[0]) if x < 3.4e38 else 0x7F800000


def _wrap(a: Interval) -> Interval:
    return a if a[0] >= _INT[0] and a[1] <= _INT[1] else _INT


class Intervals:
    """node -> interval, computed on demand and kept; `scalars` gives those of host names."""

    def __init__(self, scalars: Mapping[str, Interval]) -> None:
        self.scalars = scalars
        self.known: dict[int, Interval] = {}

    def __call__(self, node: Node) -> Interval:
        stack = [node]
        while stack:
            top = stack[-1]
            missing = [a for a in top.args if a.uid not in self.known]
            if missing:
                stack += missing
                continue
            stack.pop()
            if top.uid not in self.known:
                self.known[top.uid] = _of(top, [self.known[a.uid] for a in top.args], self.scalars)
        return self.known[node.uid]


def ranges(roots: list[Node], scalars: Mapping[str, Interval]) -> dict[int, Interval]:
    """Node uid -> interval, for everything below the roots."""
    find = Intervals(scalars)
    for root in roots:
        find(root)
    return find.known


def _of(node: Node, a: list[Interval], scalars: Mapping[str, Interval]) -> Interval:
    op, args = node.op, node.args
    if op == "const":
        return float(node.attr), float(node.attr)
    if op == "sym":
        return scalars.get(node.attr, ANY)
    if op == "load":
        return _STORED.get(node.dtype.name, _INT if node.dtype.is_int else ANY)
    if op in ("add", "sub"):
        y = a[1] if op == "add" else (-a[1][1], -a[1][0])
        got = a[0][0] + y[0], a[0][1] + y[1]
        got = (-math.inf if got[0] != got[0] else got[0], math.inf if got[1] != got[1] else got[1])
        return _wrap(got) if node.dtype is dtypes.i32 else got
    if op == "mul":
        if args[0] is args[1] and node.dtype is dtypes.f32:
            top = max(abs(a[0][0]), abs(a[0][1]))
            return 0.0, top * top
        got = _product(a[0], a[1])
        return _wrap(got) if node.dtype is dtypes.i32 else got
    if op == "fma":
        product = (0.0, math.inf) if args[0] is args[1] else _product(a[0], a[1])
        low, high = product[0] + a[2][0], product[1] + a[2][1]
        return (low if low == low else -math.inf), (high if high == high else math.inf)
    if op == "div":
        return _quotient(a[0], a[1])
    if op == "rcp":
        return _quotient((1.0, 1.0), a[0])
    if op == "sqrt":
        return math.sqrt(max(a[0][0], 0.0)), math.sqrt(max(a[0][1], 0.0))
    if op == "pow" and a[0][0] >= 0 and a[1][0] >= 0:
        return (0.0, max(1.0, a[0][1])) if a[0][1] <= 1 else (0.0, math.inf)
    if op == "neg":
        return -a[0][1], -a[0][0]
    if op == "abs":
        low = 0.0 if a[0][0] <= 0 <= a[0][1] else min(abs(a[0][0]), abs(a[0][1]))
        return low, max(abs(a[0][0]), abs(a[0][1]))
    if op == "max":
        return max(a[0][0], a[1][0]), max(a[0][1], a[1][1])
    if op == "min":
        return min(a[0][0], a[1][0]), min(a[0][1], a[1][1])
    if op == "where":
        return min(a[1][0], a[2][0]), max(a[1][1], a[2][1])
    if op in ("floor", "rint"):
        whole = math.floor if op == "floor" else round
        return tuple(float(whole(x)) if math.isfinite(x) else x for x in a[0])  # type: ignore[return-value]
    if op == "cast":
        if node.dtype.is_float:
            return a[0]
        held = _STORED.get(node.dtype.name, _INT)
        low, high = (x if math.isinf(x) else math.trunc(x) for x in a[0])  # floats are cut towards 0
        return (low, high) if held[0] <= low and high <= held[1] else held
    if op == "bitcast" and node.dtype is dtypes.f32:
        return _float_bits(a[0])
    if op == "bitcast" and node.dtype is dtypes.i32 and a[0][0] >= 0:
        return (_bits_of(a[0][0]), _bits_of(a[0][1])) if a[0][1] < math.inf else (0, _INT[1])
    if op == "and" and node.dtype is dtypes.i32:
        masks = [x.attr for x in args if x.op == "const" and x.attr >= 0]
        return (0, min(masks)) if masks else _INT
    if op == "or" and node.dtype is dtypes.i32 and a[0][0] >= 0 and a[1][0] >= 0:
        for x, y in (a, a[::-1]):
            if y[0] == y[1] and x[1] < int(y[0]) & -int(y[0]):
                return x[0] + y[0], x[1] + y[0]  # below the constant's lowest bit: a sum
        # No bit above the highest of either side.
        return max(a[0][0], a[1][0]), (1 << int(max(a[0][1], a[1][1])).bit_length()) - 1
    if op == "lshr":
        return 0, (1 << (32 - args[1].attr)) - 1
    if op == "shr":
        k = args[1].attr
        return math.floor(a[0][0] / 2**k), math.floor(a[0][1] / 2**k)
    if op == "shl":
        k = args[1].attr
        return _wrap((a[0][0] * 2**k, a[0][1] * 2**k))
    if op in ("block_max", "block_min"):
        return a[0]
    return _INT if node.dtype.is_int else ANY


def never_zero(node: Node) -> bool:
    """Whether a host value is nonzero under every legal setting: constants, bias corrections 1 - beta**step, and
    their roots, products and quotients."""
    op, a = node.op, node.args
    if op == "const":
        return bool(node.attr != 0)
    if op == "sub":
        return a[0].op == "const" and a[0].attr == 1 and a[1].op == "pow" and a[1].args[1].attr == "step"
    if op in ("sqrt", "neg"):
        return never_zero(a[0])
    return op in ("mul", "div") and never_zero(a[0]) and never_zero(a[1])


def is_plus(node: Node) -> bool:
    """Whether a value that is never negative is never -0 either, by its structure; False where that is not seen."""
    op, a = node.op, node.args
    if node.space == spaces.host or op == "const":
        return op != "neg" and not (op == "const" and math.copysign(1, node.attr) < 0)
    if op == "abs" or (op == "mul" and a[0] is a[1]):
        return True
    if op == "add":
        return is_plus(a[0]) or is_plus(a[1])
    if op in ("mul", "div", "max", "min"):
        return is_plus(a[0]) and is_plus(a[1])
    if op == "where":
        return is_plus(a[1]) and is_plus(a[2])
    return op == "sqrt" and is_plus(a[0])
