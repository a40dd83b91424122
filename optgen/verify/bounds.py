"""What a format costs and how far it is off: derived from the format itself, never typed in.

- `one_step_bound` and `master_bound`: the worst error of storing a number once, as a closed form and a number;
- `steady_state`: what that error becomes when an average is stored again at every step;
- `prove`: a compander is increasing and its inverse undoes it, by SymPy.

Numbers come from the compander's own inverse read with floats, closed forms from the same function read with
SymPy; SymPy is imported only where a formula or a proof is asked for.  Every bound has its exact counterpart in
`optgen.verify.certificate`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

from optgen.base.errors import UserError
from optgen.formats import fp8
from optgen.formats.blocked import Blocked
from optgen.formats.codebook import Codebook
from optgen.formats.coded import HALF
from optgen.formats.companders import BELOW, Compander, linear
from optgen.formats.factored import LOWEST, Factored
from optgen.formats.floats import Float
from optgen.formats.format import Format, Master
from optgen.formats.fp8 import Fp8
from optgen.formats.logmax import LogMax
from optgen.formats.logminmax import LogMinMax
from optgen.formats.masters import Copy, Ecc8, Kahan, Native, Split
from optgen.formats.plan import Storage
from optgen.formats.rank1 import Rank1
from optgen.ops import dtypes
from optgen.ops.dtypes import DType
from optgen.ops.tables import CELL, EXACT

ROUNDOFF = 2.0**-24  # half an ulp of f32, relative


class UnknownBound(TypeError):
    """No bound can be derived: the format, or master weight, is none of this package's."""


@dataclass(frozen=True)
class Bound:
    """|decode(encode(x)) - x| <= (value + slack) * of, wherever `valid` holds.

    value    the error of the code, exact: attained
    of       what it is a multiple of: "scale", "largest" (the scale times the largest number under it), either
             "* root", "value", "root" (then of the root's error)
             value inf: there is no bound for a single element, and `valid` says what is kept
    valid    the range, in words
    slack    what f32 arithmetic may add to it
    """

    value: float
    of: str
    valid: str
    slack: float = 0.0
    make: Callable[[], Any] = field(default=lambda: None, compare=False, repr=False)

    @property
    def total(self) -> float:
        return self.value + self.slack

    def formula(self) -> Any:
        """The closed form as a SymPy expression; None where there is none (a curve that is not convex)."""
        return self.make()

    def latex(self) -> str:
        import sympy

        formula = self.formula()
        return "" if formula is None else str(sympy.latex(formula))

    def __str__(self) -> str:
        return f"{self.value:.3g} of the {self.of}, {self.valid}"


def stochastic(fmt: Format) -> bool:
    return fmt.noise_bits > 0


# -- one step


@lru_cache(maxsize=256)
def one_step_bound(fmt: Format, units: int | None = None) -> Bound:
    """The worst error of storing a value once.

    `units` is for LogMinMax only: how many of its units lie between the block's minimum and maximum; by default
    as many as it allows.
    """
    if isinstance(fmt, Float):
        return _float_bound(fmt.dtype, stochastic(fmt))
    if isinstance(fmt, Blocked):
        return _blocked_bound(fmt)
    if isinstance(fmt, (Codebook, Fp8)):
        return _table_bound(fmt)
    if isinstance(fmt, LogMinMax):
        return _log_bound(fmt, fmt.most if units is None else units)
    if isinstance(fmt, LogMax):
        return _grid_bound(fmt)
    if isinstance(fmt, Rank1):
        return _rank1_bound(fmt)
    if isinstance(fmt, Factored):
        least = f"2^{math.log2(LOWEST):g}"
        return Bound(
            math.inf,
            "value",
            f"the means of rows and columns are kept, to rounding: rows of at least {least} of the mean of all, "
            f"columns of at least {least}",
        )
    raise UnknownBound(f"no bound is known for {type(fmt).__name__}; derive one, or measure it by `certificate`")


def _float_bound(dtype: DType, random: bool) -> Bound:
    stored = {"f32": 23, "bf16": 7, "f16": 10}[dtype.name]
    if dtype.name == "f32":
        return Bound(0.0, "value", "every f32", make=lambda: _rational(0, 1))
    # Half an ulp above a power of two: 2^-(stored + 1) of 1 + 2^-(stored + 1); stochastically a whole one.
    half = 2.0 ** -(stored + 1)
    value = 2 * half if random else half / (1 + half)
    ranges = {
        "bf16": "2^-126 <= |x| < 2^128 (1 - 2^-9); absolute 2^-134 below",
        "f16": "2^-14 <= |x| < 65520; absolute 2^-25 below, Inf above",
    }
    return Bound(
        value,
        "value",
        ranges[dtype.name],
        make=lambda: _rational(2 if random else 1, 2 ** (stored + 1) + (0 if random else 1)),
    )


def _rational(p: int, q: int) -> Any:
    import sympy

    return sympy.Rational(p, q)


@lru_cache(maxsize=256)
def _blocked_bound(fmt: Blocked) -> Bound:
    scale = fmt.scale
    value = largest_error(fmt.compander, fmt.codes, random=stochastic(fmt), half=fmt.zero == "half" and not fmt.signed)
    unit = 1e-6
    steepest = (1.0 - _inverse(fmt.compander)(1.0 - unit)) / unit
    # Three roundings on the way to the code, as a fraction of the code; three on the way back, and what keeps the
    # last code below the scale.  Companders without a short form go through exp2 and log2: 2 ulp each of exponents
    # up to 2^7.
    roundings = 4 + BELOW / ROUNDOFF if fmt.compander.short_decode is not None else 2**9
    slack = (roundings * steepest + roundings) * ROUNDOFF
    if scale.literal:
        slack += scale.excess  # the decoder multiplies with another scale than the encoder divided by
    valid = f"scale <= max(largest |{_what(fmt)}| of the block, {scale.low:.3g}) * (1 + {scale.excess:.3g})"
    if scale.literal:
        valid = (
            f"scale = largest |{_what(fmt)}| of the block, in [{scale.low:.3g}, {scale.high:.6g}]; beyond it: no bound"
        )
    elif not scale.covers:
        valid += f", largest <= {scale.high:.3g}"
    return Bound(value, "scale * root" if fmt.relative else "scale", valid, slack, lambda: _blocked_formula(fmt))


@lru_cache(maxsize=256)
def _rank1_bound(fmt: Rank1) -> Bound:
    random, free = stochastic(fmt), fmt.zero == "free" and not fmt.signed
    half = fmt.zero == "half" and not fmt.signed
    g = _inverse(fmt.compander)
    value = largest_error(fmt.compander, fmt.codes, random=random, half=half, free=free)
    unit = 1e-6
    steepest = (1.0 - g(1.0 - unit)) / unit
    roundings = 4 if fmt.compander == linear else 4 + BELOW / ROUNDOFF if fmt.compander.short_decode else 2**9
    slack = (roundings * steepest + roundings) * ROUNDOFF
    if fmt.in_blocks:
        scale = f"the largest |{_what(fmt)}| of the block"
    else:
        scale = f"the smallest of the largest |{_what(fmt)}| that each of its indices has"
    valid = f"scale = {scale}, at least {fmt.lowest:.3g}"

    def formula() -> Any:
        import sympy

        outer = _compander_formula(fmt.compander, fmt.codes, random)
        if outer is None or not free:
            return outer
        y = sympy.Symbol("y", positive=True)
        return sympy.Max(outer, exactly(fmt.compander.inverse(y)).subs(y, sympy.Rational(1, fmt.codes)))

    return Bound(value, "scale * root" if fmt.relative else "scale", valid, slack, formula)


def readings(fmt: Codebook | Fp8) -> tuple[float, ...]:
    """What codes read as, rising, in units of the largest magnitude of the block."""
    if isinstance(fmt, Codebook):
        return fmt.table
    positive = [x / fmt.largest for x in fp8.numbers(fmt.kind)]
    return tuple([-x for x in positive[:0:-1]] + positive if fmt.signed else positive)


def _table_bound(fmt: Codebook | Fp8) -> Bound:
    """The widest gap, or half of it to nearest, and what lies beyond the first and the last number.

    Of what f32 arithmetic adds, fast maths takes most: ends of cells that are off by 2^-12 of a cell, and numbers that
    are off by 2^-20 of themselves (ops/tables.py).
    """
    values = readings(fmt)
    gap = max(b - a for a, b in itertools.pairwise(values))
    beyond = max(1 - values[-1], 1 + values[0] if fmt.signed else values[0])
    value = max(gap if stochastic(fmt) else gap / 2, beyond)
    slack = 2 * gap * CELL + EXACT + 8 * ROUNDOFF
    if isinstance(fmt, Fp8):
        slack += value * fmt.scale.excess  # the largest number may become less than the largest float
    # The scale of fp8 is that of its largest float: the error is a multiple of what the largest element counts as.
    of, low = ("largest", fmt.low * fmt.largest) if isinstance(fmt, Fp8) else ("scale", fmt.low)
    valid = f"{of} <= max(largest |{_what(fmt)}| of the block, {low:.3g}) * (1 + {fmt.scale.excess:.3g})"
    return Bound(value, f"{of} * root" if fmt.relative else of, valid, slack, lambda: exactly_rational(value))


def exactly_rational(value: float) -> Any:
    """A number that f32 arithmetic made, as the shortest fraction within f32's precision of it."""
    import sympy

    return sympy.nsimplify(value, rational=True, tolerance=2.0**-26)


def _what(fmt: Blocked | Codebook | Fp8 | Rank1) -> str:
    return "x / root" if fmt.relative else "root" if fmt.of == "sqrt" else "x"


def _inverse(compander: Compander) -> Callable[[float], float]:
    return lambda y: float(compander.inverse(y))


def largest_error(
    compander: Compander, codes: int, *, random: bool, half: bool = False, free: bool = False
) -> float:
    """The largest distance between a number in [0, 1] and what its code reads as.

    To nearest a code's cell reaches half a code to both sides, stochastically a whole one; `half`: code 0 reads
    as half a code; `free`: code 1 is the first, down to 0.  The last cell ends at 1, the first at 0: clamp cells are
    cells like others here.
    """
    g = _inverse(compander)
    reach = 1.0 if random else 0.5
    worst = 0.0
    for code in range(1 if free else 0, codes + 1):
        kept = g((HALF if half and code == 0 else code) / codes)
        least = 0.0 if free and code == 1 else max(code - reach, 0.0)
        low, high = g(least / codes), g(min(code + reach, codes) / codes)
        worst = max(worst, kept - low, high - kept)
    return worst


def _blocked_formula(fmt: Blocked) -> Any:
    return _compander_formula(fmt.compander, fmt.codes, stochastic(fmt))


def _compander_formula(compander: Compander, codes: int, random: bool) -> Any:
    """g(1) - g(1 - cell): where the inverse g is convex, the outermost cell is the largest."""
    import sympy

    y = sympy.Symbol("y", positive=True)
    g = exactly(compander.inverse(y))
    if not _nonnegative(sympy.diff(g, y, 2), y):
        return None
    cell = sympy.Rational(1, codes if random else 2 * codes)
    return sympy.simplify(g.subs(y, 1) - g.subs(y, 1 - cell))


def cells_per_unit(fmt: LogMinMax, units: int) -> int:
    """What LogMinMax cuts a unit into when a block spans `units` of them."""
    return min(255, (1 << fmt.bits) // units)


def margin(fmt: LogMinMax, units: int) -> float:
    """What LogMinMax keeps free, at most, at both ends of a block that spans `units` of its units; in units."""
    if not stochastic(fmt):
        return 0.0
    return 1 / 8 if fmt.bits == 8 else 0.5 / cells_per_unit(fmt, min(units + 2, fmt.most)) + 2.0**-20


def lowest_reading(fmt: LogMinMax, units: int) -> int:
    """How far above the start of the block's lowest unit, as a pattern, what lies under its first cell is read at most.

    To nearest that is the middle of the first cell, stochastically of the second: what is below is raised to half a
    cell above the start or a little more, and noise adds up to a cell.  A cell is off by half a pattern, or by one.
    """
    cell = (1 << fmt.unit) // cells_per_unit(fmt, units)
    return (cell + (cell >> 1) if stochastic(fmt) else cell >> 1) + 2


def log_span(fmt: LogMinMax, units: int) -> tuple[float, float]:
    """(octaves that a block may span and be counted as so many units, octaves under its maximum that everything below
    reads as at most), both cut to a tenth.

    A pattern counts octaves to within BEND.  A span of s units lies in floor(s + two margins) + 2 of them at most,
    however it falls on their ends, and the last one ends at most a unit and a margin above the maximum.
    """
    octaves, free = (0.5 if fmt.of == "sqrt" else 1.0), margin(fmt, units)
    span = (units - 1 - 2 * free) * octaves - BEND
    below = (units - 1 - free) * octaves - lowest_reading(fmt, units) / 2**23 - BEND
    return math.floor(10 * span) / 10, math.floor(10 * below) / 10


BEND = 1 - 1 / math.log(2) - math.log2(math.log(2))  # the largest log2(1 + f) - f of a mantissa 1 + f


def _least(fmt: LogMinMax) -> str:
    return "2^-126" if fmt.of == "value" else "2^-63"


def _log_bound(fmt: LogMinMax, units: int) -> Bound:
    k = cells_per_unit(fmt, units)
    octaves = 0.5 if fmt.of == "sqrt" else 1.0
    cell = octaves / k  # of a mantissa in [1, 2)
    # To nearest: from the left end of a binade's first cell to its middle.  Stochastically: from the middle of
    # that cell to the middle of the next; where a cell is half a binade, from the middle of the last cell to that of
    # the next binade's first, twice as wide, is further.
    value = max(cell / (1 + cell / 2), 1.5 * cell / (2 - cell / 2)) if stochastic(fmt) else cell / 2
    # The cell is a whole number of bit patterns, off by up to half a pattern per code.
    slack = 256 * 0.5 * 2.0**-23 * (2 if fmt.of == "value" else 1) + 4 * ROUNDOFF
    what = "root" if fmt.of == "sqrt" else "value"
    span, below = log_span(fmt, units)
    valid = (
        f"for a block whose {what}s span at most {span:g} octaves; what lies further below the block's maximum reads "
        f"as at most {below:g} octaves under it, what lies under {_least(fmt)} as at most 1.5 cells more than that"
    )

    def formula() -> Any:
        import sympy

        d = sympy.Rational(1, 2 * k if fmt.of == "sqrt" else k)
        return sympy.Max(d / (1 + d / 2), 3 * d / (4 - d)) if stochastic(fmt) else d / 2

    return Bound(value, what, valid, slack, formula)


def grid_span(fmt: LogMax) -> float:
    """Octaves under a block's maximum within which LogMax keeps what it promises, cut to a tenth.

    Up to a cell of the octaves that it spans may lie above the maximum.  A pattern counts octaves to within BEND.
    """
    return max(0.0, math.floor(10 * (fmt.octaves - fmt.octaves / fmt.codes - BEND)) / 10)


def _grid_bound(fmt: LogMax) -> Bound:
    cell = fmt.step / 2**23  # of a mantissa in [1, 2): a cell is widest, relative to the value, from a power of two up
    # To nearest the largest of a block decides the grid's end, by a hair's breadth later than the middle of a cell.
    slack = cell * ((fmt.codes + 2) * 4 * ROUNDOFF + 2.0**-12) + 4 * ROUNDOFF
    span = grid_span(fmt)
    valid = (
        f"for roots at most {span:g} octaves under their block's maximum; what lies further below it may read as "
        f"{span:g} octaves under it, what lies under 2^-63 as that"
    )
    exact = _rational(fmt.step, 2**23) if stochastic(fmt) else _rational(fmt.step, 2**24)
    return Bound(cell if stochastic(fmt) else cell / 2, "root", valid, slack, lambda: exact)


def master_bound(master: Master, param: DType) -> Bound:
    """The worst error of keeping a weight once."""
    if param.name == "f32" or isinstance(master, Copy):
        return _float_bound(dtypes.f32, False)
    if isinstance(master, Native):
        return _float_bound(param, master.noise_bits(param) > 0)
    stored = 7 if param.name == "bf16" else 10
    if isinstance(master, Split):
        if param.name == "bf16" and master.bits == 16:
            return Bound(0.0, "value", "every f32 but NaN, whose payload is lost", make=lambda: _rational(0, 1))
        kept = stored + master.bits
        random = master.noise_bits(param) > 0
        value = 0.0 if kept > 23 else (2.0**-kept if random else 2.0 ** -(kept + 1))
        lowest = -126 if param.name == "bf16" else -14
        step = lowest - kept - (0 if random else 1)
        top = "2^128 (1 - 2^-17)" if param.name == "bf16" else "2^16 (1 - 2^-20)"
        valid = f"2^{lowest} <= |x| < {top}; absolute 2^{max(step, -150)} below, Inf above"
        return Bound(value, "value", valid, make=lambda: _power_of_two(value))
    if isinstance(master, Kahan):
        value = 2.0 ** -(2 * stored + 3)  # half a place of what is under half a place
        return Bound(value, "value", "well above the smallest normal number", make=lambda: _power_of_two(value))
    if isinstance(master, Ecc8):
        # Half an ulp in 254 parts, rounded; just below a power of two the ulp is that of the binade above.
        value = 2.0 ** -(stored + 1) / 254
        slack = value * 2.0**-stored + 2 * ROUNDOFF
        return Bound(value, "value", "normal values", slack, lambda: _rational(1, 254 * 2 ** (stored + 1)))
    raise UnknownBound(f"no bound is known for {type(master).__name__}")


def _power_of_two(value: float) -> Any:
    return _rational(0, 1) if value == 0 else _rational(1, round(1 / value))


def storage_bytes(storage: Storage) -> dict[str, float]:
    """Bytes per parameter by what they store: "p", "weight_<suffix>", "<state>", "<state>_<suffix>"."""
    return {"p": storage.param.bytes} | {name: f.bytes_per_param for name, f in storage.fields().items()}


# -- stored again at every step


@dataclass(frozen=True)
class Steady:
    """Where an average s' = decay * s + (1 - decay) * x settles when it is stored at every step.

    A nonnegative state: kept / true lies in [low, high] (`of` is "factor").  A signed one: |kept - true| <= high
    times `of`.  `law` says where from.  Stochastic: `rms` is the expected size instead, low and high bound what a
    single worst sequence of draws could do.
    """

    low: float
    high: float
    of: str
    law: str
    rms: float | None = None

    def __str__(self) -> str:
        if self.rms is not None:
            return f"about {self.rms:.2g} of the {self.of} rms, unbiased ({self.law})"
        if self.of == "factor":
            top = "inf" if math.isinf(self.high) else f"{self.high:.3g}"
            return f"kept / true in [{self.low:.3g}, {top}] ({self.law})"
        return f"within {self.high:.3g} of the {self.of} ({self.law})"


def steady_state(fmt: Format, decay: float, *, units: int | None = None) -> Steady:
    """The effect of storing an exponential average with this decay in this format, over any number of steps."""
    bound = one_step_bound(fmt, units) if isinstance(fmt, LogMinMax) else one_step_bound(fmt)
    step = bound.total
    if math.isinf(step):
        return Steady(0.0, math.inf, "factor", "nothing is promised for an element")
    if bound.of in ("value", "root"):
        relative = (1 + step) ** 2 - 1 if bound.of == "root" else step
        low, high = _factor(decay, relative)
        if stochastic(fmt) and decay < 0:
            return Steady(low, high, "value", "independent errors", _spread(decay, relative))
        if stochastic(fmt):
            # A value on the grid moves by (1 - decay) of itself and is rounded over one cell: the noise of a step
            # is cell * movement, and 1 / (1 - decay) of them are remembered.
            return Steady(low, high, "value", "sqrt(cell / 2)", math.sqrt(relative / 2))
        return Steady(low, high, "factor", "geometric sum of relative errors")
    most = step / (1 - abs(decay))  # under a negative decay, of errors that alternate
    if stochastic(fmt):
        worst = most if decay < 0 else 2 * step
        return Steady(-worst, worst, bound.of, "independent errors", _spread(decay, step))
    return Steady(-most, most, bound.of, "geometric sum of errors")


def _spread(decay: float, cell: float) -> float:
    """The expected size of what independent errors add up to; the mean square of one is a sixth of a cell's."""
    return cell / math.sqrt(6 * (1 - decay * decay))


def _factor(decay: float, relative: float) -> tuple[float, float]:
    """The fixed points of f -> (decay * f + 1 - decay) * (1 -+ relative).

    Under a negative decay errors alternate: 1 -+ e with e = |decay| * e + relative * (1 + |decay| * e).
    """
    if decay < 0:
        growth = -decay * (1 + relative)
        error = math.inf if growth >= 1 else relative / (1 - growth)
        return 1 - error, 1 + error
    low = (1 - decay) * (1 - relative) / (1 - decay * (1 - relative))
    growth = decay * (1 + relative)
    high = math.inf if growth >= 1 else (1 - decay) * (1 + relative) / (1 - growth)
    return max(low, 0.0), high


# -- proofs


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


def _nonnegative(expression: Any, variable: Any) -> bool:
    """Whether SymPy can show an expression to be >= 0 for the variable in (0, 1)."""
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


@dataclass(frozen=True)
class Proof:
    """What was shown about a compander; `convex`: its inverse is, so that the outermost cell is the largest."""

    curve: str
    inverse: str
    convex: bool


@lru_cache(maxsize=256)
def prove(compander: Compander) -> Proof:
    """Shows that a compander is increasing from 0 to 1 and that its inverse undoes it.

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
        raise UserError(
            "E304",
            loc=compander.loc,
            name=compander.name,
            why=f"SymPy cannot show that its inverse undoes it: {around}",
        )
    if not _nonnegative(sympy.diff(g, y), y):
        raise UserError("E304", loc=compander.loc, name=compander.name, why="SymPy cannot show that it increases")
    return Proof(str(f), str(g), _nonnegative(sympy.diff(g, y, 2), y))


def _refute(compander: Compander) -> None:
    """Raises UserError with a place where the compander is wrong, if one of 1025 points is."""

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
