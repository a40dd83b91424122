"""Values, and the functions over them: one language, several readers.

Every function here (`sqrt`, `where`, `block_max`, `bits` ...) and every operator works on

- `Value`        traces: builds an IR node (a spec or a format being compiled);
- torch tensors  computes, elementwise, in the tensors' own dtype (the oracle, the eager codecs);
- SymPy          builds the expression (derivatives);
- numbers        computes with `math`;
- anything with a `reader` attribute: another reading (intervals with error bounds, see verify/).

A reading is an object with one method per primitive; `reader_of` picks it from the operands.
"""

from __future__ import annotations

import math
import sys
import sysconfig
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from optgen.base import loc as locs
from optgen.base.errors import UserError
from optgen.base.loc import Loc
from optgen.ir import node as ir
from optgen.ir.node import Node
from optgen.ops import dtypes, spaces
from optgen.ops.dtypes import DType
from optgen.ops.prims import PRIMS, Prim, symbol

Num = Any  # Value | Tensor | sympy.Basic | float: whatever a reader reads


def author_loc() -> Loc:
    """The span of the operation in the innermost frame outside optgen.lang and installed packages, such as SymPy."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_globals.get("__name__", "").startswith("optgen.lang")
        or frame.f_code.co_filename.startswith(LIBRARIES)
        and not frame.f_globals.get("__name__", "").startswith("optgen._specs")
    ):
        frame = frame.f_back
    return locs.of_frame(frame)


LIBRARIES = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib"))
"""The folders of Python and of installed packages: an error inside of them has its place where the author calls in."""


def _operator(op: str, swapped: bool = False) -> Callable[..., Value]:
    """Return a method of `Value` that makes this operation of it and what stands on its other side."""

    def method(self: Value, *other: Num) -> Value:
        return _op(op, *other, self) if swapped else _op(op, self, *other)

    return method


def _refused(what: str, instead: str = "", code: str = "E102") -> Callable[..., Any]:
    """Return a method that raises the error for something of Python's that values do not have.

    instead  what to write; by default the hint of the code
    """
    hint = {"hint": instead} if instead else {}

    def method(self: Value, *_: object, **__: object) -> Any:
        raise UserError(code, loc=author_loc(), what=what, **hint)

    return method


class Value:
    """A traced value.  `record(node)` is called for every operation made, so that a tracer can name it, and
    returns the node to go on with."""

    __slots__ = ("node", "record")
    __hash__ = object.__hash__

    def __init__(self, node: Node, record: Callable[[Node], Node] | None = None) -> None:
        self.node = node
        self.record = record

    __add__, __radd__ = _operator("add"), _operator("add", swapped=True)
    __sub__, __rsub__ = _operator("sub"), _operator("sub", swapped=True)
    __mul__, __rmul__ = _operator("mul"), _operator("mul", swapped=True)
    __truediv__, __rtruediv__ = _operator("div"), _operator("div", swapped=True)
    __neg__, __abs__, __invert__ = _operator("neg"), _operator("abs"), _operator("not")
    __and__, __rand__ = _operator("and"), _operator("and", swapped=True)
    __or__, __ror__ = _operator("or"), _operator("or", swapped=True)
    __xor__, __rxor__ = _operator("xor"), _operator("xor", swapped=True)
    __lshift__, __rshift__ = _operator("shl"), _operator("shr")
    __lt__, __gt__ = _operator("lt"), _operator("lt", swapped=True)
    __le__, __ge__ = _operator("le"), _operator("le", swapped=True)
    __rpow__ = _operator("pow", swapped=True)

    def __pos__(self) -> Value:
        return self

    __matmul__, __rmatmul__ = _operator("matmul"), _operator("matmul", swapped=True)

    @property
    def T(self) -> Value:  # noqa: N802 - as torch and NumPy have it
        """The transposed matrix."""
        node = self.node
        return Value(node.args[0], self.record) if node.op == "transpose" else _op("transpose", self)

    def __pow__(self, e: Num) -> Any:
        if self.node.space == spaces.host or lift(e).space != spaces.host:
            return _op("pow", self, e)
        if not isinstance(e, (int, float)):
            return _op("power", self, e)
        if not math.isfinite(e):
            raise UserError("E104", loc=author_loc(), got=f"the exponent {e}", hint="an exponent is a finite number")
        return raised(self, e) if e else Value(ir.const(1.0), self.record)

    # -- what a value refuses to do
    __bool__ = _refused("a condition", code="E101")
    __eq__, __ne__ = _refused("==", "equal(a, b) of optgen.lang"), _refused("!=", "~equal(a, b), equal of optgen.lang")
    __float__ = __int__ = __index__ = _refused("a function of numbers")
    __floordiv__ = __rfloordiv__ = _refused("//", "floor(a / b), floor of optgen.lang")
    __mod__ = __rmod__ = _refused("%", "a - b * floor(a / b), floor of optgen.lang")
    __round__ = _refused("round()", "rint(x) of optgen.lang")
    __getitem__ = __setitem__ = __len__ = __iter__ = _refused("an index, a loop or a length")
    __array_ufunc__ = None  # numbers of NumPy leave operators to values
    __array_function__ = __array__ = _refused("a function of NumPy")

    def __repr__(self) -> str:
        return f"Value({self.node!r})"


class Absent:
    """A state that is off under the flags of this trace: it may be carried to `return`, never computed with."""

    def __init__(self, name: str, when: str) -> None:
        self.name = name
        self.when = when

    def refusal(self) -> UserError:
        return UserError("E105", loc=author_loc(), name=self.name, when=self.when)

    def refuse(self, *_: object, **__: object) -> Any:
        raise self.refusal()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.refuse

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = refuse
    __pow__ = __rpow__ = __neg__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = __matmul__ = __rmatmul__ = refuse
    __bool__ = __float__ = __int__ = __iter__ = refuse


def lift(x: Num, like: DType = dtypes.f32) -> Node:
    """The node of a value or a number; numbers take the dtype of what they meet."""
    if isinstance(x, Value):
        return x.node
    if isinstance(x, Absent):
        raise x.refusal()
    if isinstance(x, bool):
        return ir.const(x, dtypes.boolean)
    if isinstance(x, (int, float)):
        if like.is_int:
            return ir.const(int(x), like)
        return ir.const(float(x), dtypes.f32)
    raise UserError("E104", loc=author_loc(), got=f"a {type(x).__name__}")


def _check_numbers(nodes: list[Node]) -> None:
    """Raise UserError where a number that fp32 has not meets values that are computed in it."""
    if all(n.space == spaces.host for n in nodes):
        return
    for n in nodes:
        if n.op == "const" and n.dtype is dtypes.f32 and math.isfinite(n.attr) and math.isinf(dtypes.in_f32(n.attr)):
            raise UserError(
                "E104", loc=author_loc(), got=f"{n.attr:g}, which fp32 does not reach",
                note="all but host scalars is computed in fp32, whose largest number is about 3.4e38",
                hint="a smaller number; where(), or no bound at all, where it stands for infinity",
            )  # fmt: skip


def _check_operands(name: str, nodes: list[Node]) -> None:
    """Raise UserError where an operation does not take such dtypes or spaces."""
    row = PRIMS[name]
    _check_dtypes(row, [n.dtype for n in nodes])
    _check_matrices(name, nodes)
    if name == "pow" and nodes[0].space != spaces.host:
        raise UserError("E202", loc=author_loc(), function=row.spelled, got=nodes[0].space)
    # Keys of random bits are i32.  Expressions of constants alone are folded by the caller.
    scalars = all(n.space == spaces.host and not n.dtype.is_int for n in nodes)
    if not row.host and scalars and any(n.op != "const" for n in nodes):
        raise UserError("E205", loc=author_loc(), function=row.spelled)


def _check_dtypes(row: Prim, kinds: list[DType]) -> None:
    """Raise UserError E103 where an operation does not take such dtypes."""
    shown = row.spelled
    tightly = f"`{shown}` binds more tightly than a comparison: (a > 0) {shown} (b > 0)" if len(kinds) == 2 else ""
    unconditional = row.name == "where" and kinds[0] is not dtypes.boolean
    mixed = len({k.is_float for k in kinds if k is not dtypes.boolean}) > 1
    for refused, want, hint in (
        (unconditional, "a condition first", "compare it: where(x > 0, a, b)"),
        (row.arithmetic and dtypes.boolean in kinds, "numbers", "turn a condition into a number: where(c, 1.0, 0.0)"),
        ("c" in row.takes and any(k.is_float for k in kinds), "conditions or integers", tightly),
        ("f" in row.takes and any(k.is_int for k in kinds), "real numbers", ""),
        (mixed, "real numbers or integers, not both", ""),
    ):
        if refused:
            got = " and ".join(dict.fromkeys(k.name for k in (kinds[:1] if unconditional else kinds)))
            raise UserError("E103", loc=author_loc(), function=shown, want=want, got=got, hint=hint)


_OF_MATRICES = frozenset("add sub mul div neg abs sqrt max min sign where lt le mat_sum mat_max".split())
"""Primitives of arithmetic that whole matrices beside those of elements have, too."""


def _check_matrices(name: str, nodes: list[Node]) -> None:
    """Raise UserError E206 where the shapes of whole matrices do not fit together."""
    shapes = " and ".join(spaces.shown(n.space) for n in nodes)
    shown = PRIMS[name].spelled
    if name in ("matmul", "zero_product", "transpose"):
        dims = [spaces.dims(n.space) for n in nodes]
        if not all(dims):
            raise UserError("E206", loc=author_loc(), function=shown, want="matrices", got=shapes, hint="")
        if len(dims) == 2 and dims[0][1] != dims[1][0]:
            hint = "g @ g.T is (rows, rows), g.T @ g is (columns, columns); elem is (rows, columns)"
            raise UserError("E206", loc=author_loc(), function=shown, want="(a, b) and (b, c)", got=shapes, hint=hint)
    elif any(n.space.name in spaces.MATRICES for n in nodes):
        among = {n.space for n in nodes if n.space.name not in ("host", "model", "tensor", "mat")}
        if len(among) > 1 or name not in _OF_MATRICES:
            want = "matrices of one shape" if len(among) > 1 else "values of elements, not whole matrices"
            hint = "matrices have + - * / @ .T, sqrt, abs, maximum, minimum, sign and where"
            raise UserError("E206", loc=author_loc(), function=shown, want=want, got=shapes, hint=hint)


def _op(name: str, *args: Num, attr: Any = None) -> Value:
    values = [a for a in args if isinstance(a, Value)]
    # For where(c, x, y) the dtype comes from the branches, not from the condition.
    if PRIMS[name].arithmetic:
        args = tuple(float(a) if isinstance(a, bool) else a for a in args)  # flags count as 0 and 1
    branch = args[1:] if name == "where" else args
    like = next((a.node.dtype for a in branch if isinstance(a, Value)), dtypes.f32)
    nodes = [lift(a, like) for a in args]
    _check_operands(name, nodes)
    _check_numbers(nodes)
    record = next((v.record for v in values if v.record is not None), None)
    node = ir.op(name, *nodes, attr=attr)
    return Value(record(node) if record else node, record)


# -- readers


class TraceReader:
    """The reader that builds nodes."""

    def __getattr__(self, name: str) -> Callable[..., Value]:
        return lambda *args, attr=None: _op(name, *args, attr=attr)


def _overflowing(f: Callable[..., float]) -> Callable[..., float]:
    """f with an infinity where it overflows, as host scalars have it: a negative one for an odd power of x < 0."""

    def safe(x: float, *rest: float) -> float:
        try:
            return f(x, *rest)
        except OverflowError:
            return -math.inf if rest and x < 0 and rest[0] % 2 == 1 else math.inf

    return safe


class MathReader:
    """The reader that computes with Python numbers, as the rows of ops/prims.py say."""

    column = "number"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        # A number is its own mean, sum and maximum.
        if name.endswith(("_sum", "_max", "_mean")):
            return lambda x: x
        meaning = (PRIMS[name].number or PRIMS[name].operator) if name in PRIMS else None
        if meaning is None:
            raise AttributeError(name)
        return _overflowing(meaning)


TRACED: ContextVar[bool] = ContextVar("TRACED", default=False)
"""True while a spec is being traced, where a plain number is one that its author wrote."""


class SympyReader:
    """The reader that builds SymPy expressions; honours `sympy.evaluate(False)`."""

    column = "symbol"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        import sympy

        return symbol(name, sympy)


_TRACE, _MATH, _SYMPY = TraceReader(), MathReader(), SympyReader()


def reader_of(*args: Num) -> Any:
    """The reader for these operands: the first that is more than a number decides."""
    for a in args:
        if isinstance(a, Value):
            return _TRACE
        if isinstance(a, Absent):
            raise a.refusal()
        reader = getattr(type(a), "reader", None)
        if reader is not None:
            return reader
        module = type(a).__module__
        if module.startswith("torch"):
            from optgen.lang.tensors import READER

            return READER
        if module.startswith("sympy"):
            return _SYMPY
    return _MATH


def _function(name: str) -> Callable[..., Any]:
    """Return the function of a primitive; what it is given beyond its operands is its attribute."""
    takes = len(PRIMS[name].takes)

    def function(*given: Num) -> Num:
        attributes = {"attr": given[takes]} if len(given) > takes else {}
        return getattr(reader_of(*given[:takes]), name)(*given[:takes], **attributes)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = PRIMS[name].doc
    return function


def primitive(row: Prim, means: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Add a primitive of your own and return its function, which works on all that functions here work on.

    row    its row in the table of primitives.  Where it is `core`, spellings belong into the tables of the backends
    means  its definition over the functions of optgen.lang: what is compiled where it is not core, and what readings
           compute for which the row has no meaning
    """
    if means is not None and not row.core:
        row = replace(row, means=lambda *nodes: lift(means(*map(Value, nodes))))
    PRIMS[row.name] = row
    read = _function(row.name)

    def function(*operands: Num) -> Num:
        reader = reader_of(*operands)
        stated = reader is _TRACE or getattr(row, getattr(reader, "column", ""), None)
        return read(*operands) if means is None or stated else means(*operands)

    function.__name__ = function.__qualname__ = row.name
    function.__doc__ = row.doc
    return function


# -- the functions


sqrt, cbrt, exp, log, exp2, log2 = map(_function, ("sqrt", "cbrt", "exp", "log", "exp2", "log2"))
tanh, sigmoid, atan2 = map(_function, ("tanh", "sigmoid", "atan2"))
sign, floor, rint = map(_function, ("sign", "floor", "rint"))
maximum, minimum, where, equal = map(_function, ("max", "min", "where", "eq"))
lshr, bitcast, lookup, search, narrow = map(_function, ("lshr", "bitcast", "lookup", "search", "narrow"))
block_max, block_min = map(_function, ("block_max", "block_min"))


def rsqrt(x: Num) -> Num:
    """1 / sqrt(x)."""
    r = reader_of(x)
    return 1 / _op("sqrt", x) if r is _TRACE else r.rsqrt(x)


def power(x: Num, e: Num) -> Num:
    """x ** e of a real exponent, a number or a host scalar: NaN where x < 0, unless e is a whole number."""
    r = reader_of(x, e)
    return r.power(x, e) if r is _MATH else x**e


MOST_PRODUCTS = 64
"""The largest whole exponent of which products are made."""


def raised(x: Num, e: float) -> Num:
    """x ** e of a number e != 0, as traced values and intervals have it: products, a root, or the reader's power."""
    size = abs(e)
    if size != 0.5 and not (float(e).is_integer() and size <= MOST_PRODUCTS):
        return reader_of(x).power(x, e)
    out = sqrt(x) if size == 0.5 else _product(x, int(size))
    return out if e > 0 else 1.0 / out


def _product(x: Num, n: int) -> Num:
    """x ** n, n >= 1: the author's products one after the other where they are few, else those of squares."""
    if n <= 8:
        out = x
        for _ in range(n - 1):
            out = out * x
        return out
    product: Num = None
    while True:
        if n & 1:
            product = x if product is None else product * x
        n >>= 1
        if not n:
            return product
        x = x * x


def clip(x: Num, low: Num, high: Num) -> Num:
    """x limited to [low, high]; NaN stays NaN."""
    return minimum(maximum(x, low), high)


def capped(x: Num, size: Num) -> Num:
    """x, but with a magnitude of `size` at most; an infinity becomes NaN."""
    return x * minimum(size / abs(x), 1)


def square(x: Num) -> Num:
    """x * x."""
    return x * x


# integers, bits, conversions


def cast(x: Num, dtype: DType) -> Num:
    """Value conversion; f32 -> i32 truncates toward zero, f32 -> bf16/f16 rounds half to even."""
    if isinstance(x, Value) and x.node.dtype == dtype:
        return x
    if isinstance(x, Value) and dtypes.i32 not in (x.node.dtype, dtype) and x.node.dtype.is_float != dtype.is_float:
        return cast(cast(x, dtypes.i32), dtype)  # backends convert between floats and i32 only
    if isinstance(x, Value) and dtype is dtypes.bf16 and x.node.dtype is dtypes.f32:
        # By its bits, as formats round it (words.round_bf16): backends convert by value each in their own way.
        pattern = where(equal(x, x), bits(x) + ((bits(x) >> 16) & 1) + 0x7FFF, 0x7FC00000) >> 16
        return bitcast(cast(pattern, dtypes.i16), dtypes.bf16)
    return reader_of(x).cast(x, attr=dtype)


def bits(x: Num) -> Num:
    """The bit pattern of an f32 as i32."""
    return bitcast(x, dtypes.i32)


def from_bits(x: Num) -> Num:
    """The f32 with this i32 bit pattern."""
    return bitcast(x, dtypes.f32)
