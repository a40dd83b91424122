"""The alphabet: one row per primitive, read by every reader.

`core` primitives are the ones every backend spells.  Every other row is decomposed into core ones (`means`, or
passes/decompose.py), and backends that have a faster form may spell it themselves (fast maths only).

To add one, put a row into PRIMS (`optgen.lang.values.primitive`) and, where it is core, a spelling into the tables of
the backends.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from optgen.ops.dtypes import DType, boolean, f32, i32


@dataclass(frozen=True)
class Prim:
    """One operation.

    takes     a letter per operand.  n: a number and x: anything, all of one dtype; f: f32; i: i32; b: a condition;
              c: a condition or i32; k: an i32 constant; h: host space; *: any
    dtype     of the result; None: of the last operand; "attr": the attribute
    space     of the result: "" joins the operands'; "block": blocks of so many as the attribute says; "first": that of
              the first operand; "product", "transposed": of matrices
    combine   of a reduction: the primitive that joins two partial results
    core      whether every backend spells it
    host      whether host scalars are made with it: backends/host.py spells it
    infix     for formulas: (sign, how tightly it binds, whether an equal on the right needs parentheses)
    shown     in messages, if not by its sign or name
    operator  its meaning by Python's operators, for every reading whose values have them
    number    its meaning on Python's floats; may raise where it has no value
    tensor    the function of torch, if one means the same; other meanings are in lang/tensors.py
    symbol    (sympy, operands) -> expression, or the name of SymPy's function; ("" for none)
    rises     per operand: + where the result rises with it, - where it falls; "" for neither
    ulps      None: exact, or of integers; else how far off fast maths may be beside the rounding (ir/ranges.py)
    means     its definition in core primitives, over the functions of optgen.lang; None: passes/decompose.py or
              lang/elementary.py has it
    """

    name: str
    takes: str
    doc: str = ""
    dtype: DType | str | None = None
    space: str = ""
    combine: str = ""
    core: bool = True
    host: bool = False
    infix: tuple[str, int, bool] | None = None
    shown: str = ""
    operator: Callable[..., Any] | None = None
    number: Callable[..., Any] | None = None
    tensor: str = ""
    symbol: str | Callable[..., Any] = ""
    rises: str = ""
    ulps: int | None = None
    means: Callable[..., Any] | None = None

    @property
    def arity(self) -> int:
        """The number of operands; -1: any."""
        return -1 if "*" in self.takes else len(self.takes)

    @property
    def arithmetic(self) -> bool:
        """True if it takes numbers and no conditions."""
        return "n" in self.takes or "f" in self.takes

    @property
    def spelled(self) -> str:
        """Return its name in messages."""
        return self.shown or (self.infix[0] if self.infix else f"{self.name}()")


def _whole(f: Callable[[float], int]) -> Callable[[float], float]:
    return lambda x: float(f(x)) if math.isfinite(x) else x


def holds(c: Any) -> bool:
    """Return the truth of a condition of numbers, of which Python's ~ makes -2 and -1."""
    return bool(c & 1 if isinstance(c, int) else c)


def _minus(m: Any, x: Any) -> Any:
    """-x; of a number the negative number, so that t - 1 does not read t - 1 * 1."""
    if not x.is_Number:
        return m.Mul(-1, x)
    return m.Integer(-int(x)) if x == int(x) and abs(x) < 1e15 else m.Float(repr(-float(x)))


def _power(x: float, e: float) -> float:
    out: Any = float(x) ** e
    return math.nan if isinstance(out, complex) else float(out)


def _exp(x: float) -> float:
    return math.exp(x) if not x > 709.0 else math.inf


def _sigmoid(x: float) -> float:
    e = _exp(-abs(x))
    return (e if x < 0 else 1.0) / (1.0 + e)


FAST_ULP = 4  # units in the last place, of 2^-23: 3 of a fast division, reciprocal or root, 1 for the unit's own size

_ROWS = (
    # f32 and i32
    Prim("add", "nn", "x + y; i32 wraps", host=True, infix=("+", 5, True), operator=operator.add, symbol="Add",
         rises="++", ulps=0),
    Prim("sub", "nn", "x - y; i32 wraps", host=True, infix=("-", 5, True), operator=operator.sub,
         symbol=lambda m, x, y: m.Add(x, _minus(m, y)), rises="+-", ulps=0),
    Prim("mul", "nn", "x * y; i32 wraps", host=True, infix=("*", 6, True), operator=operator.mul, symbol="Mul", ulps=0),
    Prim("neg", "n", "-x", host=True, shown="-", operator=operator.neg, symbol=lambda m, x: m.Mul(-1, x), rises="-"),
    Prim("min", "nn", "the smaller; NaN if either is NaN", host=True, shown="minimum", number=min, symbol="Min",
         rises="++"),
    Prim("max", "nn", "the larger; NaN if either is NaN", host=True, shown="maximum", number=max, symbol="Max",
         rises="++"),
    Prim("abs", "n", "|x|", host=True, operator=abs, tensor="abs", symbol="Abs"),
    # f32
    Prim("div", "ff", "x / y; correctly rounded in strict mode", host=True, infix=("/", 6, True),
         operator=operator.truediv, symbol=lambda m, x, y: m.Mul(x, m.Pow(y, -1)), ulps=FAST_ULP),
    Prim("sqrt", "f", "square root; correctly rounded in strict mode", host=True, number=math.sqrt,
         symbol=lambda m, x: m.Pow(x, m.Rational(1, 2)), ulps=FAST_ULP),
    Prim("fma", "fff", "x * y + z in one rounding; made by passes in fast mode only", number=lambda x, y, z: x * y + z,
         ulps=0),
    Prim("sign", "n", "-1, 0 or 1; sign(NaN) is NaN", host=True, symbol="sign", rises="+",
         number=lambda x: float((x > 0) - (x < 0)) if x == x else x),
    Prim("floor", "f", "the integer at or below x, as f32", host=True, number=_whole(math.floor), tensor="floor",
         symbol="floor", rises="+"),
    Prim("rint", "f", "nearest integer, half to even, as f32; |x| < 2^22", host=True, number=_whole(round),
         tensor="round", rises="+"),
    # comparisons and selection; as in Python, comparisons bind less than & and |
    Prim("lt", "nn", dtype=boolean, host=True, infix=("<", 1, True), operator=operator.lt, symbol="StrictLessThan"),
    Prim("le", "nn", dtype=boolean, host=True, infix=("<=", 1, True), operator=operator.le, symbol="LessThan"),
    Prim("eq", "xx", dtype=boolean, host=True, infix=("==", 1, True), shown="equal", number=operator.eq, symbol="Eq"),
    Prim("ne", "xx", dtype=boolean, host=True, infix=("!=", 1, True), number=operator.ne, symbol="Ne"),
    Prim("and", "cc", "of bools, or of the bits of i32", host=True, infix=("&", 4, False), operator=operator.and_,
         symbol="And"),
    Prim("or", "cc", "of bools, or of the bits of i32", host=True, infix=("|", 2, False), operator=operator.or_,
         symbol="Or"),
    Prim("xor", "cc", "of bools, or of the bits of i32", host=True, infix=("^", 3, True), operator=operator.xor,
         symbol="Xor"),
    Prim("not", "c", dtype=boolean, host=True, shown="~", tensor="logical_not", symbol="Not",
         operator=lambda x: (not x) if isinstance(x, bool) else ~x),
    Prim("where", "bxx", "where(c, x, y): both sides are computed", host=True,
         number=lambda c, x, y: x if holds(c) else y, symbol=lambda m, c, x, y: m.Piecewise((x, c), (y, True))),
    # i32
    Prim("shl", "ik", "x << constant", shown="<<", operator=operator.lshift),
    Prim("shr", "ik", "x >> constant, arithmetic", shown=">>", operator=operator.rshift),
    Prim("lshr", "ik", "x >> constant, logical"),
    # conversions; attr is the target dtype
    Prim("cast", "x", "value conversion; f32 -> i32 truncates, f32 -> bf16/f16 rounds to nearest even", "attr"),
    Prim("bitcast", "x", "same bits, another dtype of the same width", "attr"),
    Prim("narrow", "iii", "z, the code of the nearest float of the kind that attr names, to the magnitude of the f32 "
         "whose bits are y, with the sign of x: some machines have an instruction for it"),
    # tables (ops/tables.py): attr is the table
    Prim("lookup", "i", "the table's entry number x, 0 <= x < its length", f32),
    Prim("search", "f", "how many of the table's entries are <= x; 0 for a NaN", i32),
    # reductions over a block: attr is the block size
    Prim("block_max", "i", "largest of the block", space="block"),
    Prim("block_min", "i", "smallest of the block", space="block"),
    # reductions over larger scopes
    *(Prim(f"{scope}_sum", "n", space=scope, combine="add") for scope in ("row", "col", "mat", "tensor")),
    *(Prim(f"{scope}_max", "n", space=scope, combine="max") for scope in ("row", "col", "mat", "tensor")),
    Prim("model_sum", "n", "over all parameters that have a gradient", space="model", combine="add"),
    # of whole matrices, which no kernel computes
    Prim("matmul", "ff", "product of two matrices", f32, "product", infix=("@", 6, True)),
    Prim("transpose", "f", "rows and columns changed over", f32, "transposed"),
    Prim("zero_product", "ff", "zeros in the shape of a product of two matrices", f32, "product"),
    Prim("to_wide", "f", "the matrix, or its transpose, that has more columns than rows", f32, "sl"),
    Prim("call", "f*", "attr: a function in optgen.runtime.reference.matrices, of a matrix, whose shape the result "
         "has, of CALLS[attr] - 1 further ones, then of host scalars", f32, "first"),
    # decomposed (passes/decompose.py, lang/elementary.py); all but rsqrt and rcp give the same bits on every backend
    Prim("pow", "hf", "x ** y of a host scalar x, above 0 where y is none", core=False, host=True,
         shown="x ** y with a variable exponent", number=_power, symbol="Pow"),
    Prim("exp", "f", "e ** x", core=False, host=True, number=_exp, tensor="exp", symbol="exp", rises="+", ulps=2),
    Prim("log", "f", "natural logarithm: -Inf at 0, NaN below", core=False, host=True, tensor="log", symbol="log",
         rises="+", ulps=2, number=lambda x: math.log(x) if x > 0 else -math.inf if x == 0 else math.nan),
    Prim("tanh", "f", "hyperbolic tangent", core=False, host=True, number=math.tanh, tensor="tanh", symbol="tanh",
         rises="+", ulps=FAST_ULP),
    Prim("sigmoid", "f", "1 / (1 + exp(-x))", core=False, host=True, number=_sigmoid, tensor="sigmoid",
         symbol=lambda m, x: m.Pow(m.Add(1, m.exp(m.Mul(-1, x))), -1), rises="+", ulps=6),
    Prim("atan2", "ff", "atan2(y, x): angle of the point (x, y), from -pi to pi", core=False, host=True,
         number=math.atan2, symbol="atan2", ulps=6),
    Prim("rsqrt", "f", "1 / sqrt(x)", core=False, number=lambda x: 1 / math.sqrt(x),
         symbol=lambda m, x: m.Pow(x, m.Rational(-1, 2))),
    Prim("rcp", "f", "1 / x", core=False, number=lambda x: 1 / x, symbol=lambda m, x: m.Pow(x, -1), ulps=FAST_ULP),
    Prim("exp2", "f", "2 ** x, x clamped to [-126, 127], |error| <= 2 ulp; Inf and NaN stay", core=False,
         number=math.exp2, tensor="exp2", symbol=lambda m, x: m.Pow(2, x)),
    Prim("log2", "f", "log2(x) of a positive normal x; Inf and NaN stay", core=False, number=math.log2, tensor="log2",
         symbol=lambda m, x: m.log(x) / m.log(2)),
    Prim("cbrt", "f", "cube root of x >= 0; Inf and NaN stay", core=False, host=True, number=math.cbrt,
         symbol=lambda m, x: m.Pow(x, m.Rational(1, 3))),
    Prim("cbrt_signed", "f", "cube root of any x: what lower makes of cbrt where x may be negative", core=False),
    Prim("power", "fh", "x ** y of x >= 0 and a y of host space; a subnormal x counts as 0", core=False, number=_power,
         symbol="Pow"),
    Prim("power_signed", "fh", "the same of any x; NaN below 0 where y is no whole number", core=False),
)  # fmt: skip

PRIMS: dict[str, Prim] = {p.name: p for p in _ROWS}

CALLS = {
    "newton_schulz": 1, "qr": 1, "eigenvectors": 1, "sorting": 1, "inverse_root": 1, "orthogonal_iteration": 2,
    "solve_triangular": 2, "triangle": 1, "identity": 1, "unwide": 2, "singular_vectors": 2, "column_norms": 2,
    "normal": 1, "top_rows": 1, "newton_schulz_of_rows": 1, "finite": 2, "bjorck": 1,
    "norm_lower_bound": 1,
}  # fmt: skip
"""Function of whole matrices -> how many of its operands are matrices."""

MATRIX_OPS = frozenset({"matmul", "transpose", "to_wide", "zero_product", "call"})

REDUCTIONS = {p.name: (p.space, p.combine) for p in _ROWS if p.combine}
"""op -> (space of the result, combine)."""

SCOPES: dict[str, tuple[int, ...] | None] = {
    "row": (-1,), "col": (-2,), "mat": (-2, -1), "tensor": None, "model": None,
}  # fmt: skip
"""The first word of a reduction's name -> the dimensions that it takes of a tensor; None: all."""


def symbol(name: str, sympy: Any) -> Callable[..., Any]:
    """Return the function that makes a primitive's expression in SymPy; by default an unknown function of its name."""
    meaning = PRIMS[name].symbol if name in PRIMS else ""
    if callable(meaning):
        return lambda *operands: meaning(sympy, *operands)
    function: Callable[..., Any] = getattr(sympy, meaning) if meaning else sympy.Function(name)
    return function
