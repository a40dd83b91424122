"""decompose: primitives that no backend spells become core ones, so that they give the same bits everywhere.

rewrite:
    exp2(x), log2(x), cbrt(x), power(x, y)  ->  polynomials and bit operations on f32 and i32
    exp(x), log(x), tanh(x), sigmoid(x), atan2(y, x), c ** x  ->  likewise (lang/elementary.py)
rewrite (ROUNDS):
    table   lookup(x), search(x) of a table with a law  ->  the largest, or smallest, of a few straight lines:
            entries within 2^-20 of the table's, ends of cells within 2^-12 of a cell
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from optgen.ir import node as ir
from optgen.ir.node import Node, Rewriter, postorder
from optgen.ir.program import Program
from optgen.lang import elementary
from optgen.lang.elementary import finite, horner
from optgen.lang.values import Num, Value, bits, cast, from_bits, maximum, minimum, rint, where
from optgen.ops import spaces
from optgen.ops.dtypes import f32, i32
from optgen.ops.prims import PRIMS
from optgen.ops.tables import StraightLine, StraightLines

# Taylor coefficients of 2**f, highest first: ln(2)**k / k!; |f| <= 1/2 leaves 5e-9 after the seventh power.
_EXP2 = (1.5252734e-5, 1.540353e-4, 1.3333558e-3, 9.618129e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0)


def exp2(given: Num) -> Num:
    """2**x for -126 <= x <= 127, clamped to that range: 2**rint(x) from the exponent bits times 2**f."""
    x = minimum(maximum(given, -126.0), 127.0)
    n = rint(x)
    return finite(given, from_bits(bits(horner(x - n, _EXP2)) + (cast(n, i32) << 23)))


_SQRT_HALF_BITS = 0x3F3504F3
# log2(m) = 2 / ln(2) * atanh(s), s = (m - 1) / (m + 1), |s| <= 0.1716: s**11 is below 1e-9.
_LOG2 = (2.885390 / 9, 2.885390 / 7, 2.885390 / 5, 2.885390 / 3, 2.8853900817779268)


def log2(x: Num) -> Num:
    """log2(x) of a positive normal x: the exponent, and the series of the mantissa in [sqrt(1/2), sqrt(2))."""
    e = (bits(x) - _SQRT_HALF_BITS) >> 23
    m = from_bits(bits(x) - (e << 23))
    s = (m - 1.0) / (m + 1.0)
    return finite(x, cast(e, f32) + horner(s * s, _LOG2) * s)


def _cube_root(x: Num) -> Num:
    """The root of a positive number: a third of the exponent bits as a first guess (4 %), then three Newton steps."""
    y = from_bits(cast(cast(bits(x), f32) * (1 / 3), i32) + 709921077)
    for _ in range(3):
        # Not (2 y + x / y^2) / 3: fast maths would gather the thirds of two steps into 9 x, which may overflow.
        y = y - (y - x / (y * y)) * (1 / 3)
    return y


def _rooted(x: Num, size: Num, root: Num) -> Num:
    """The root where |x| = size is positive and finite, else x: 0, Inf and NaN are their own roots."""
    # The quotient of a Newton step would make NaN of Inf.
    return where((size > 0.0) & (size <= f32.largest), root, x)


def cbrt(x: Num) -> Num:
    """The cube root of x >= 0."""
    return _rooted(x, x, _cube_root(x))


def cbrt_signed(x: Num) -> Num:
    """The cube root of any x, -0 included: that of |x| with the sign of x."""
    size = abs(x)
    root = _cube_root(size)
    return _rooted(x, size, where(x < 0.0, -root, root))


def power(x: Num, y: Num) -> Num:
    """x ** y of x >= 0: 2 ** (y * log2(x)); below the normal numbers 0 ** y, which the host computes."""
    none = 0.0 if y.node.op == "const" and y.node.attr > 0 else 0.0**y
    return where(x < f32.normal, none, exp2(y * log2(maximum(x, f32.normal))))


def power_signed(x: Num, y: Num) -> Num:
    """x ** y of any x: |x| ** y, below 0 times (-1) ** y, which the host computes: 1, -1 or NaN."""
    raised = power(abs(x), y)
    return where(x < 0.0, (-1.0) ** y * raised, raised)


MEANS: dict[str, Callable[..., Num]] = {
    **elementary.DEFINITIONS,
    "exp2": exp2, "log2": log2, "cbrt": cbrt, "cbrt_signed": cbrt_signed, "power": power, "power_signed": power_signed,
}  # fmt: skip


def _lines(x: Num, lines: tuple[StraightLine, ...], pick: Callable[[Num, Num], Num]) -> Num:
    """The smallest or largest (`pick`) of slope * x + offset."""
    found = [x * a + b if b else x * a for a, b in lines]
    while len(found) > 1:  # pairs of pairs: the chain is as short as can be
        pairs = zip(found[::2], found[1::2], strict=False)
        found = [pick(a, b) for a, b in pairs] + found[len(found) & ~1 :]
    return found[0]


def lookup(x: Num, law: StraightLines) -> Num:
    """The entry number x of a table with a law."""
    k = cast(x - law.zero, f32)
    size = _lines(abs(k) if law.signed else k, law.lookup, maximum)
    if law.zero >= 0:
        size = maximum(size, 0.0)
    if law.top is not None:
        size = minimum(size, law.cap)
    return where(k < 0.0, -size, size) if law.signed else size


def search(x: Num, law: StraightLines) -> Num:
    """The code of x in a table with a law."""
    # |x|: no product, or the slopes, some of them 10^6, would be gathered with the reciprocal of a tiny scale.
    size = _lines(abs(x) if law.signed else maximum(x, 0.0), law.search, minimum)
    if law.least:
        size = maximum(size, float(law.least))
    k = rint(minimum(size, float(law.most)))
    if law.signed:
        k = where(x < 0.0, -k, k)
    if law.top is not None:
        k = where(x < law.top, k, law.most + 1.0)
    return cast(k + float(law.zero), i32)


LAWS: dict[str, Callable[[Num, StraightLines], Num]] = {"lookup": lookup, "search": search}


def _nodes(means: Callable[..., Num], *given: Any) -> Node:
    """Return the node of a definition over the language for operands that are nodes."""
    made: Node = means(*(Value(x) if isinstance(x, Node) else x for x in given)).node
    return made


def _has_law(node: Node) -> bool:
    return node.op in LAWS and node.attr.law is not None


def _rewriter(fast: bool) -> Rewriter:
    def rule(node: Node) -> Node:
        if fast and _has_law(node):
            return _nodes(LAWS[node.op], node.args[0], node.attr.law)
        if not node.args or node.space == spaces.host:
            return node
        if node.op == "atan2":  # whose definition takes the bits of both: of a host scalar, among elements
            (of, *_) = (a for a in node.args if a.space != spaces.host)
            lifted = (ir.op("where", ir.op("eq", of, of), a, a) if a.space == spaces.host else a for a in node.args)
            node = ir.op("atan2", *lifted)
        if node.op in MEANS:
            return _nodes(MEANS[node.op], *node.args)
        means = PRIMS[node.op].means
        return node if means is None else made(means(*node.args))

    made = Rewriter(rule)
    return made


# Nodes never change: what was made of one is kept.
_REWRITE = {"strict": _rewriter(False), "fast": _rewriter(True)}


def decompose(program: Program) -> Program:
    """See the module's docstring."""
    new = program.map(_REWRITE[program.maths])
    if program.maths == "fast" and any(_has_law(n) for n in postorder(program.roots())):
        new = replace(new, rules=tuple(sorted({*new.rules, "table"})))
    return new
