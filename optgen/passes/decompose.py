"""decompose: primitives that no backend spells become core ones, so that they give the same bits everywhere.

rewrite:
    exp2(x), log2(x), cbrt(x)  ->  polynomials and bit operations on f32 and i32
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from optgen.ir import node as ir
from optgen.ir.node import Node, Rewriter
from optgen.ir.program import Program
from optgen.ops import dtypes, spaces


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


def cbrt(x: Node) -> Node:
    """The cube root of x >= 0: a third of the exponent bits as a first guess (4 %), then three Newton steps."""
    b = ir.op("cast", ir.op("bitcast", x, attr=dtypes.i32), attr=dtypes.f32)
    third = ir.op("cast", ir.op("mul", b, _f(1 / 3)), attr=dtypes.i32)
    y = ir.op("bitcast", ir.op("add", third, _i(709921077)), attr=dtypes.f32)
    for _ in range(3):
        quotient = ir.op("div", x, ir.op("mul", y, y))
        # Not (2 y + x / y^2) / 3: fast maths would gather the thirds of two steps into 9 x, which may overflow.
        y = ir.op("sub", y, ir.op("mul", ir.op("sub", y, quotient), _f(1 / 3)))
    # 0 and Inf are their own roots; the quotient would make NaN of the latter.
    inside = ir.op("and", ir.op("lt", _f(0.0), x), ir.op("le", x, _f(float.fromhex("0x1.fffffep127"))))
    return ir.op("where", inside, y, x)


MEANS: dict[str, Callable[[Node], Node]] = {"exp2": exp2, "log2": log2, "cbrt": cbrt}


def decompose(program: Program) -> Program:
    """See the module's docstring."""

    def rule(node: Node) -> Node:
        if node.op in MEANS and node.space != spaces.host:
            return MEANS[node.op](*node.args)
        return node

    return replace(program.map(Rewriter(rule)))
