"""Proofs about companders by SymPy, and the fractions that floats stand for."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

from optgen.base.errors import UserError


def exactly(expression: Any) -> Any:
    """The expression with its floats as the rationals that they stand for: 0.81 is 81/100, 0.333... is 1/3."""
    import sympy

    def rational(x: float) -> Any:
        found = meant(x)
        return sympy.Rational(found.numerator, found.denominator)

    return expression.xreplace({f: rational(float(f)) for f in expression.atoms(sympy.Float)})


FEW_DIGITS = 12
"""A quotient or product that fp64 rounds has so few digits once in 10^4."""


def meant(x: float) -> Fraction:
    """The fraction that a float was written or computed for: a decimal of few digits, else a fraction of denominator
    10^6 at most within 1e-14 of x, else the decimal."""
    written = Decimal(repr(x))
    decimal = Fraction(written)
    if len(written.normalize().as_tuple().digits) <= FEW_DIGITS:
        return decimal
    near = decimal.limit_denominator(10**6)
    return near if abs(near - decimal) <= abs(decimal) * Fraction(1, 10**14) else decimal


def nonnegative(expression: Any, variable: Any) -> bool:
    """Return True if SymPy can show an expression to be >= 0 for the variable in (0, 1)."""
    import sympy

    if expression.is_nonnegative:
        return True
    # On (0, 1) the variable is 1 / (1 + t) for a positive t: signs of polynomials in t are read off.
    t = sympy.Symbol("t", positive=True)
    moved = sympy.factor(sympy.simplify(expression.subs(variable, 1 / (1 + t))))
    if moved.is_nonnegative:
        return True
    numerator, denominator = sympy.fraction(sympy.together(moved))
    if sympy.expand(numerator).is_nonnegative and sympy.expand(denominator).is_positive:
        return True
    try:
        least = sympy.calculus.util.minimum(expression, variable, sympy.Interval.open(0, 1))
    except (NotImplementedError, ValueError, TypeError):
        return False
    return bool(least.is_nonnegative)


@lru_cache(maxsize=256)
def prove(compander: Any) -> None:
    """Show that a compander is increasing from 0 to 1 and that its inverse undoes it.

    A counterexample is looked for with floats first, so that a wrong one is told where it is wrong; then SymPy
    must prove it.  Raises UserError where either fails.
    """
    _refute(compander)
    import sympy

    n, y = sympy.Symbol("n", positive=True), sympy.Symbol("y", positive=True)
    f, g = (exactly(sympy.sympify(x)) for x in (compander.curve(n), compander.inverse(y)))
    ends = [sympy.simplify(e) for e in (f.subs(n, 0), f.subs(n, 1) - 1, g.subs(y, 0), g.subs(y, 1) - 1)]
    if any(e != 0 for e in ends):
        raise UserError("E304", loc=compander.loc, name=compander.name, why="SymPy cannot show that 0 -> 0 and 1 -> 1")
    around = sympy.simplify(sympy.expand_log(sympy.simplify(g.subs(y, f)), force=True) - n)
    if around != 0:
        # Written in t > 0 with n = 1 / (1 + t), 1 - n is seen to be positive and roots of its square open.
        t = sympy.Symbol("t", positive=True)
        around = sympy.simplify(g.subs(y, sympy.factor(sympy.together(f.subs(n, 1 / (1 + t))))) - 1 / (1 + t))
    if around != 0:
        why = f"SymPy cannot show that its inverse undoes it: {around}"
        raise UserError("E304", loc=compander.loc, name=compander.name, why=why)
    if not nonnegative(sympy.diff(g, y), y):
        raise UserError("E304", loc=compander.loc, name=compander.name, why="SymPy cannot show that it increases")


def _refute(compander: Any) -> None:
    """Raise UserError with a place where the compander is wrong, if one of 1025 points is."""

    def wrong(why: str) -> UserError:
        return UserError("E304", loc=compander.loc, name=compander.name, why=why)

    last = -1.0
    for i in range(1025):
        n = i / 1024
        code = float(compander.curve(n))
        back = float(compander.inverse(code))
        if not code > last:
            raise wrong(f"the curve does not increase at {n:g}: curve = {code:g} after {last:g}")
        if not abs(back - n) <= 1e-9:
            raise wrong(f"inverse(curve({n:g})) = {back:g}, not {n:g}")
        if i in (0, 1024) and not abs(code - n) <= 1e-12:
            raise wrong(f"curve({n:g}) = {code:g}, not {n:g}")
        last = code
