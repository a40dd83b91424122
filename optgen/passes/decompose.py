"""decompose: primitives that no backend spells become core ones, so that they give the same bits everywhere.

rewrite:
    exp2(x), log2(x), cbrt(x), power(x, y)  ->  polynomials and bit operations on f32 and i32
    place(x)  ->  search and lookup, in tables without a law or in strict maths
rewrite (ROUNDS):
    table   lookup(x), search(x), place(x) of a table with a law  ->  the largest, or smallest, of a few straight lines:
            entries within 2^-20 of the table's, ends of cells within 2^-12 of a cell
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from optgen.ir import node as ir
from optgen.ir.node import Node, Rewriter, postorder
from optgen.ir.program import Program
from optgen.ops import dtypes, spaces
from optgen.ops.prims import PRIMS
from optgen.ops.tables import Law, Line, Table, through


def _f(x: float) -> Node:
    return ir.const(x)


def _i(x: int) -> Node:
    return ir.const(x, dtypes.i32)


def _horner(x: Node, coefficients: tuple[float, ...]) -> Node:
    out = _f(coefficients[0])
    for c in coefficients[1:]:
        out = ir.op("add", ir.op("mul", out, x), _f(c))
    return out


# Taylor coefficients of 2**f, highest first: ln(2)**k / k!; |f| <= 1/2 leaves 5e-9 after the seventh power.
_EXP2 = (1.5252734e-5, 1.540353e-4, 1.3333558e-3, 9.618129e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0)


def _finite(x: Node, value: Node) -> Node:
    """value where x is a number below infinity; there x itself: what reads the bits would take them for a number."""
    return ir.op("where", ir.op("le", x, _f(float.fromhex("0x1.fffffep127"))), value, x)


def exp2(given: Node) -> Node:
    """2**x for -126 <= x <= 127, clamped to that range: 2**rint(x) from the exponent bits times 2**f."""
    x = ir.op("min", ir.op("max", given, _f(-126.0)), _f(127.0))
    n = ir.op("rint", x)
    mantissa = _horner(ir.op("sub", x, n), _EXP2)
    exponent = ir.op("shl", ir.op("cast", n, attr=dtypes.i32), _i(23))
    whole = ir.op("add", ir.op("bitcast", mantissa, attr=dtypes.i32), exponent)
    return _finite(given, ir.op("bitcast", whole, attr=dtypes.f32))


_SQRT_HALF_BITS = 0x3F3504F3
# log2(m) = 2 / ln(2) * atanh(s), s = (m - 1) / (m + 1), |s| <= 0.1716: s**11 is below 1e-9.
_LOG2 = (2.885390 / 9, 2.885390 / 7, 2.885390 / 5, 2.885390 / 3, 2.8853900817779268)


def log2(x: Node) -> Node:
    """log2(x) of a positive normal x: the exponent, and the series of the mantissa in [sqrt(1/2), sqrt(2))."""
    b = ir.op("bitcast", x, attr=dtypes.i32)
    e = ir.op("shr", ir.op("sub", b, _i(_SQRT_HALF_BITS)), _i(23))
    m = ir.op("bitcast", ir.op("sub", b, ir.op("shl", e, _i(23))), attr=dtypes.f32)
    s = ir.op("div", ir.op("sub", m, _f(1.0)), ir.op("add", m, _f(1.0)))
    series = ir.op("mul", _horner(ir.op("mul", s, s), _LOG2), s)
    return _finite(x, ir.op("add", ir.op("cast", e, attr=dtypes.f32), series))


def _cube_root(x: Node) -> Node:
    """Of a positive number: a third of the exponent bits as a first guess (4 %), then three Newton steps."""
    b = ir.op("cast", ir.op("bitcast", x, attr=dtypes.i32), attr=dtypes.f32)
    third = ir.op("cast", ir.op("mul", b, _f(1 / 3)), attr=dtypes.i32)
    y = ir.op("bitcast", ir.op("add", third, _i(709921077)), attr=dtypes.f32)
    for _ in range(3):
        quotient = ir.op("div", x, ir.op("mul", y, y))
        # Not (2 y + x / y^2) / 3: fast maths would gather the thirds of two steps into 9 x, which may overflow.
        y = ir.op("sub", y, ir.op("mul", ir.op("sub", y, quotient), _f(1 / 3)))
    return y


def _rooted(x: Node, size: Node, root: Node) -> Node:
    """The root where |x| = size is positive and finite, else x: 0, Inf and NaN are their own roots."""
    # The quotient of a Newton step would make NaN of Inf.
    inside = ir.op("and", ir.op("lt", _f(0.0), size), ir.op("le", size, _f(float.fromhex("0x1.fffffep127"))))
    return ir.op("where", inside, root, x)


def cbrt(x: Node) -> Node:
    """The cube root of x >= 0."""
    return _rooted(x, x, _cube_root(x))


def cbrt_signed(x: Node) -> Node:
    """The cube root of any x, -0 included: that of |x| with the sign of x."""
    size = ir.op("abs", x)
    root = _cube_root(size)
    return _rooted(x, size, ir.op("where", ir.op("lt", x, _f(0.0)), ir.op("neg", root), root))


def power(x: Node, y: Node) -> Node:
    """x ** y of x >= 0: 2 ** (y * log2(x)); below the normal numbers 0 ** y, which the host computes."""
    tiny = _f(2.0**-126)
    none = _f(0.0) if y.op == "const" and y.attr > 0 else ir.op("pow", _f(0.0), y)
    raised = exp2(ir.op("mul", y, log2(ir.op("max", x, tiny))))
    return ir.op("where", ir.op("lt", x, tiny), none, raised)


def power_signed(x: Node, y: Node) -> Node:
    """x ** y of any x: |x| ** y, below 0 times (-1) ** y, which the host computes: 1, -1 or NaN."""
    raised = power(ir.op("abs", x), y)
    negative = ir.op("mul", ir.op("pow", _f(-1.0), y), raised)
    return ir.op("where", ir.op("lt", x, _f(0.0)), negative, raised)


MEANS: dict[str, Callable[..., Node]] = {
    "exp2": exp2, "log2": log2, "cbrt": cbrt, "cbrt_signed": cbrt_signed, "power": power, "power_signed": power_signed,
}  # fmt: skip


def _lines(x: Node, lines: tuple[Line, ...], pick: str) -> Node:
    """The smallest or largest (`pick`) of slope * x + offset."""
    values = [ir.op("add", ir.op("mul", x, _f(a)), _f(b)) if b else ir.op("mul", x, _f(a)) for a, b in lines]
    while len(values) > 1:  # pairs of pairs: the chain is as short as can be
        pairs = zip(values[::2], values[1::2], strict=False)
        values = [ir.op(pick, a, b) for a, b in pairs] + values[len(values) & ~1 :]
    return values[0]


def _size(x: Node, law: Law) -> Node:
    """|x|: no product, or the slopes, some of them 10^6, would be gathered with the reciprocal of a tiny scale."""
    return ir.op("abs", x) if law.signed else ir.op("max", x, _f(0.0))


def lookup(x: Node, law: Law) -> Node:
    """The entry number x of a table with a law."""
    k = ir.op("cast", ir.op("sub", x, _i(law.zero)), attr=dtypes.f32)
    size = _lines(ir.op("abs", k) if law.signed else k, law.lookup, "max")
    if law.zero >= 0:
        size = ir.op("max", size, _f(0.0))
    if law.top is not None:
        size = ir.op("min", size, _f(law.cap))
    return ir.op("where", ir.op("lt", k, _f(0.0)), ir.op("neg", size), size) if law.signed else size


def search(x: Node, law: Law) -> Node:
    """The code of x in a table with a law."""
    size = _lines(_size(x, law), law.search, "min")
    if law.least:
        size = ir.op("max", size, _f(float(law.least)))
    k = ir.op("rint", ir.op("min", size, _f(float(law.most))))
    if law.signed:
        k = ir.op("where", ir.op("lt", x, _f(0.0)), ir.op("neg", k), k)
    if law.top is not None:
        k = ir.op("where", ir.op("lt", x, _f(law.top)), k, _f(law.most + 1.0))
    return ir.op("cast", ir.op("add", k, _f(float(law.zero))), attr=dtypes.i32)


def place_by_law(x: Node, law: Law) -> Node:
    """The place of x among the entries of a table with a law."""
    y = _lines(_size(x, law), law.place, "min")
    if law.least:
        y = ir.op("max", y, _f(float(law.least)))
    y = ir.op("min", y, _f(float(law.most)))
    if law.signed:
        y = ir.op("where", ir.op("lt", x, _f(0.0)), ir.op("neg", y), y)
    if law.top is not None:
        slope, offset = through((law.last, float(law.most)), (law.cap, law.most + 1.0))
        # A quotient may be a place above 1, and the line steep: beyond the last entry would be the first code.
        above = ir.op("min", ir.op("add", ir.op("mul", x, _f(slope)), _f(offset)), _f(law.most + 1.0))
        y = ir.op("where", ir.op("lt", _f(law.last), x), above, y)
    return ir.op("add", y, _f(float(law.zero)))


def place(x: Node, table: Table) -> Node:
    """The place of x among the entries of any table, as optgen.lang.values has it."""
    last = _i(len(table.values) - 1)
    below = ir.op("search", x, attr=table.following)
    low = ir.op("lookup", below, attr=table)
    high = ir.op("lookup", ir.op("min", ir.op("add", below, _i(1)), last), attr=table)
    part = ir.op("div", ir.op("sub", x, low), ir.op("sub", high, low))
    part = ir.op("where", ir.op("lt", _f(0.0), part), part, _f(0.0))
    return ir.op("add", ir.op("cast", below, attr=dtypes.f32), ir.op("where", ir.op("lt", low, high), part, _f(0.0)))


LAWS: dict[str, Callable[[Node, Law], Node]] = {"lookup": lookup, "search": search, "place": place_by_law}


def _has_law(node: Node) -> bool:
    return node.op in LAWS and node.attr.law is not None


def _rewriter(fast: bool) -> Rewriter:
    def rule(node: Node) -> Node:
        if fast and _has_law(node):
            return LAWS[node.op](node.args[0], node.attr.law)
        if node.op == "place":
            return place(node.args[0], node.attr)
        if not node.args or node.space == spaces.host:
            return node
        if node.op in MEANS:
            return MEANS[node.op](*node.args)
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
