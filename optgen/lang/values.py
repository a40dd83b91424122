"""Values, and the functions over them: one language, several readers.

Every function here (`sqrt`, `where`, `block_max`, `bits` ...) and every operator works on

- `Value`        traces: builds an IR node (a spec or a format being compiled);
- torch tensors  computes, elementwise, in the tensors' own dtype (the oracle, the eager codecs);
- SymPy          builds the expression (LaTeX, proofs, derivatives);
- numbers        computes with `math`;
- anything with a `reader` attribute: another reading (intervals with error bounds, see verify/).

A reading is an object with one method per primitive; `reader_of` picks it from the operands.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from optgen.base import loc as locs
from optgen.base.errors import UserError
from optgen.base.loc import Loc
from optgen.ir import node as ir
from optgen.ir.node import Node
from optgen.lang import refusals
from optgen.ops import dtypes, spaces
from optgen.ops.dtypes import DType
from optgen.ops.prims import GATHERS, PRIMS, Prim, symbol
from optgen.ops.tables import Table

Num = Any  # Value | Tensor | sympy.Basic | float: whatever a reader reads


_ONE = "a spec states the rule for one element; reductions such as row_mean() reach others"


def author_loc() -> Loc:
    """The span of the operation in the innermost frame outside optgen.lang."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("optgen.lang"):
        frame = frame.f_back
    return locs.of_frame(frame)


class Value:
    """A traced value.  `record(node)` is called for every operation made, so that a tracer can name it."""

    __slots__ = ("node", "record")
    __hash__ = object.__hash__

    def __init__(self, node: Node, record: Callable[[Node], None] | None = None) -> None:
        self.node = node
        self.record = record

    # -- arithmetic
    def __add__(self, o: Num) -> Value:
        return _op("add", self, o)

    def __radd__(self, o: Num) -> Value:
        return _op("add", o, self)

    def __sub__(self, o: Num) -> Value:
        return _op("sub", self, o)

    def __rsub__(self, o: Num) -> Value:
        return _op("sub", o, self)

    def __mul__(self, o: Num) -> Value:
        return _op("mul", self, o)

    def __rmul__(self, o: Num) -> Value:
        return _op("mul", o, self)

    def __truediv__(self, o: Num) -> Value:
        return _op("div", self, o)

    def __rtruediv__(self, o: Num) -> Value:
        return _op("div", o, self)

    def __neg__(self) -> Value:
        return _op("neg", self)

    def __pos__(self) -> Value:
        return self

    def __abs__(self) -> Value:
        return _op("abs", self)

    def __pow__(self, e: Num) -> Any:
        if self.node.space == spaces.host or lift(e).space != spaces.host:
            return _op("pow", self, e)
        if not isinstance(e, (int, float)):
            return _op("power", self, e)
        if not math.isfinite(_float(e)):
            raise UserError("E104", loc=author_loc(), got=f"the exponent {e}", hint="an exponent is a finite number")
        return raised(self, e) if e else Value(ir.const(1.0), self.record)

    def __rpow__(self, b: Num) -> Value:
        return _op("pow", b, self)

    # -- i32 and bool
    def __and__(self, o: Num) -> Value:
        return _op("and", self, o)

    def __or__(self, o: Num) -> Value:
        return _op("or", self, o)

    def __xor__(self, o: Num) -> Value:
        return _op("xor", self, o)

    def __rand__(self, o: Num) -> Value:
        return _op("and", o, self)

    def __ror__(self, o: Num) -> Value:
        return _op("or", o, self)

    def __rxor__(self, o: Num) -> Value:
        return _op("xor", o, self)

    def __invert__(self) -> Value:
        return _op("not", self)

    def __lshift__(self, k: int) -> Value:
        return _op("shl", self, k)

    def __rshift__(self, k: int) -> Value:
        return _op("shr", self, k)

    # -- comparisons
    def __lt__(self, o: Num) -> Value:
        return _op("lt", self, o)

    def __le__(self, o: Num) -> Value:
        return _op("le", self, o)

    def __gt__(self, o: Num) -> Value:
        return _op("lt", o, self)

    def __ge__(self, o: Num) -> Value:
        return _op("le", o, self)

    # -- what a value refuses to do
    def __eq__(self, o: object) -> bool:
        raise refusals.compared(author_loc(), "==", self._asked if _is_zero(o) else "")

    def __ne__(self, o: object) -> bool:
        raise refusals.compared(author_loc(), "!=", self._asked if _is_zero(o) else "")

    def __bool__(self) -> bool:
        raise refusals.truth(author_loc(), self._asked, self.node.dtype is dtypes.boolean)

    @property
    def _asked(self) -> str:
        """The name of the hyper-parameter that this is, or is compared with 0; "" of anything else."""
        node = self.node
        if node.op == "lt" and ir.is_const(node.args[0], 0.0):
            node = node.args[1]
        return str(node.attr) if node.op == "sym" and node.attr != "step" else ""

    def __float__(self) -> float:
        raise refusals.number(author_loc(), "float()")

    def __int__(self) -> int:
        raise refusals.number(author_loc(), "int()")

    __index__ = __int__

    def __floordiv__(self, o: Num) -> Value:
        raise UserError("E102", loc=author_loc(), what="//", hint="use floor(a / b), floor from optgen.lang")

    __rfloordiv__ = __floordiv__

    def __mod__(self, o: Num) -> Value:
        raise UserError("E102", loc=author_loc(), what="%", hint="use a - b * floor(a / b), floor from optgen.lang")

    __rmod__ = __mod__

    def __round__(self, digits: int | None = None) -> Value:
        raise UserError("E102", loc=author_loc(), what="round()", hint="use rint(x) from optgen.lang")

    def __matmul__(self, o: object) -> Value:
        raise refusals.product(author_loc())

    __rmatmul__ = __matmul__

    def __len__(self) -> int:
        raise refusals.length(author_loc())

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **_: Any) -> Any:
        """NumPy's numbers are numbers where operators meet them; its arrays and functions are refused."""
        apply = _OPERATORS.get(ufunc.__name__)
        if apply is None or method != "__call__":
            raise refusals.foreign(author_loc())
        for x in inputs:
            if getattr(x, "shape", ()):
                raise UserError("E104", loc=author_loc(), got=f"an array of shape {x.shape}")
        return apply(*(x.item() if hasattr(x, "item") else x for x in inputs))

    def __array_function__(self, *_: Any) -> Any:
        raise refusals.foreign(author_loc())

    def __getitem__(self, key: object) -> Value:
        raise UserError("E102", loc=author_loc(), what="x[...]", hint=_ONE)

    def __setitem__(self, key: object, value: object) -> None:
        raise UserError("E102", loc=author_loc(), what="x[...] =", hint=_ONE)

    def __iter__(self) -> Any:
        raise refusals.iteration(author_loc())

    def __repr__(self) -> str:
        return f"Value({self.node!r})"


_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "divide": operator.truediv,
    "power": operator.pow, "less": operator.lt, "less_equal": operator.le, "greater": operator.gt,
    "greater_equal": operator.ge,
}  # fmt: skip
"""NumPy's names of what it makes of an operator."""


def _is_zero(x: object) -> bool:
    return isinstance(x, (int, float)) and x == 0


class AbsentReader:
    """What reads a state that is off: refuses every function of it."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def refuse(*args: Any, **_: Any) -> Any:
            raise next(a for a in args if isinstance(a, Absent)).refusal()

        return refuse


class Absent:
    """A state that is off under the flags of this trace: it may be carried to `return`, never computed with."""

    reader = AbsentReader()

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
    __pow__ = __rpow__ = __neg__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = refuse
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
        return ir.const(_float(x), dtypes.f32)
    text = repr(x).partition("\n")
    raise UserError("E104", loc=author_loc(), got=f"{type(x).__name__} {text[0]}{text[1] and ' ...'}")


def _float(x: float) -> float:
    try:
        return float(x)
    except OverflowError as error:  # a whole number of hundreds of digits: too long to be shown
        got, hint = f"a whole number of {int(x).bit_length()} bits", "1e308 is about the largest there is"
        raise UserError("E104", loc=author_loc(), got=got, note="host scalars are fp64", hint=hint) from error


def _check_numbers(nodes: list[Node]) -> None:
    """Raises UserError where a number that fp32 has not meets values that are computed in it."""
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
    """Raises UserError where an operation does not take such dtypes or spaces."""
    kinds = [n.dtype for n in nodes]
    got = " and ".join(dict.fromkeys(k.name for k in kinds))
    row = PRIMS[name]
    shown = row.spelled
    if name == "where" and kinds[0] is not dtypes.boolean:
        got, hint = kinds[0].name, "compare it: where(x > 0, a, b)"
        raise UserError("E103", loc=author_loc(), function=shown, want="a condition first", got=got, hint=hint)
    if row.arithmetic and dtypes.boolean in kinds:
        hint = "turn a condition into a number: where(c, 1.0, 0.0)"
        raise UserError("E103", loc=author_loc(), function=shown, want="numbers", got=got, hint=hint)
    if "c" in row.takes and any(k.is_float for k in kinds):
        hint = f"`{shown}` binds more tightly than a comparison: (a > 0) {shown} (b > 0)" if len(nodes) == 2 else ""
        raise UserError("E103", loc=author_loc(), function=shown, want="conditions or integers", got=got, hint=hint)
    if "f" in row.takes and any(k.is_int for k in kinds):
        raise UserError("E103", loc=author_loc(), function=shown, want="real numbers", got=got)
    if len({k.is_float for k in kinds if k is not dtypes.boolean}) > 1:
        raise UserError("E103", loc=author_loc(), function=shown, want="real numbers or integers, not both", got=got)
    if row.host == "only" and any(n.space != spaces.host for n in nodes):
        space = next(n.space for n in nodes if n.space != spaces.host)
        raise UserError("E202", loc=author_loc(), function=shown, got=space)
    # Keys of random bits are i32; constants alone are computed by whoever takes them.
    scalars = all(n.space == spaces.host and not n.dtype.is_int for n in nodes)
    if not row.host and scalars and any(n.op != "const" for n in nodes):
        raise UserError("E205", loc=author_loc(), function=shown)


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
    made = ir.op(name, *nodes, attr=attr)
    if record is not None:
        record(made)
    return Value(made, record)


# -- readers


class TraceReader:
    """Builds nodes."""

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
    """Computes with Python numbers, as the rows of ops/prims.py say."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        # A number is its own mean, sum and maximum.
        if name.endswith(("_sum", "_max", "_mean")) or name in GATHERS:
            return lambda x: x
        meaning = (PRIMS[name].number or PRIMS[name].operator) if name in PRIMS else None
        if meaning is None:
            raise AttributeError(name)
        return _overflowing(meaning)


PRECISION: ContextVar[Any] = ContextVar("PRECISION", default=None)
"""The torch dtype in which a spec is being evaluated, for numbers that meet no tensor; None elsewhere."""


TRACED: ContextVar[bool] = ContextVar("TRACED", default=False)
"""True while a spec is being traced, where a plain number is one that its author wrote."""


class TorchReader:
    """Computes with tensors, in their own dtype; integers are int32 and wrap."""

    def __getattr__(self, name: str) -> Any:
        import torch

        if name in PRIMS and PRIMS[name].tensor:
            return getattr(torch, PRIMS[name].tensor)
        if name in GATHERS:
            return lambda x: x  # the columns of a tensor of rows and columns are made of one dimension
        if name.split("_")[0] in ("row", "col", "mat", "tensor", "model"):
            return self.__reduction(name)
        plain = {
            "rsqrt": lambda x: 1 / self._sqrt(x), "rcp": lambda x: 1 / x, "pow": operator.pow, "eq": operator.eq,
            # A tensor read in blocks has shape (..., blocks, size).
            "block_max": lambda x, attr: x.amax(-1, keepdim=True),
            "block_min": lambda x, attr: x.amin(-1, keepdim=True),
        }  # fmt: skip
        return plain.get(name) or getattr(self, "_" + name)

    @staticmethod
    def _pair(a: Num, b: Num) -> tuple[Any, Any]:
        import torch

        t = a if isinstance(a, torch.Tensor) else b

        def make(x: Num) -> Any:
            return x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=t.dtype, device=t.device)

        return make(a), make(b)

    def _max(self, a: Num, b: Num) -> Any:
        import torch

        return torch.maximum(*self._pair(a, b))

    def _min(self, a: Num, b: Num) -> Any:
        import torch

        return torch.minimum(*self._pair(a, b))

    def _sqrt(self, x: Any) -> Any:
        import torch

        # torch's fp32 root on CPU is up to 1 ulp off; the fp64 root rounded once is exact.
        return x.double().sqrt().float() if x.dtype is torch.float32 else x.sqrt()

    def _sign(self, x: Any) -> Any:
        import torch

        return torch.where(x > 0, 1.0, torch.where(x < 0, -1.0, x)).to(x.dtype)

    def _cbrt(self, x: Any) -> Any:
        return x.sign() * x.abs() ** (1 / 3)

    def _where(self, c: Any, a: Num, b: Num) -> Any:
        import torch

        if isinstance(c, bool):
            return a if c else b
        if not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor):
            # A condition does not know what precision it came from.  Where nobody says, two numbers that f32 holds
            # exactly are given as f32, which any arithmetic widens without loss; others keep their fp64 value.
            exact = all(torch.tensor(x, dtype=torch.float32).item() == x for x in (a, b))
            dtype = PRECISION.get() or (torch.float32 if exact else torch.float64)
            a = torch.tensor(a, dtype=dtype, device=c.device)
        return torch.where(c, *self._pair(a, b))

    def _lshr(self, x: Any, k: int) -> Any:
        return (x >> k) & ((1 << (32 - k)) - 1)

    def _rotl(self, x: Any, k: Num) -> Any:
        low = 0xFFFFFFFF
        wide = x.long() & low
        return ((wide << k) | (wide >> (32 - k))).int()

    def _cast(self, x: Any, attr: DType) -> Any:
        import torch

        return x.to(getattr(torch, attr.torch))

    def _bitcast(self, x: Any, attr: DType) -> Any:
        import torch

        return x.view(getattr(torch, attr.torch))

    def _lookup(self, x: Any, attr: Table) -> Any:
        import torch

        return torch.tensor(attr.values, dtype=torch.float32, device=x.device)[x.long()]

    def _search(self, x: Any, attr: Table) -> Any:
        import torch

        entries = torch.tensor(attr.values, dtype=torch.float32, device=x.device)
        found = torch.searchsorted(entries, x.contiguous(), right=True, out_int32=True)
        return torch.where(x == x, found, 0)

    def __reduction(self, name: str) -> Callable[[Any], Any]:
        """row_sum, col_mean, tensor_max ...: the named dimensions, kept with length 1."""
        scope, kind = name.lstrip("_").split("_")
        dims = {"row": (-1,), "col": (-2,), "mat": (-2, -1)}.get(scope)

        def reduce(x: Any) -> Any:
            apply = {"sum": x.sum, "mean": x.mean, "max": x.amax}[kind]
            if dims is None:
                return apply()
            own = tuple(d for d in dims if -d <= x.dim())  # a vector is one row: its columns are its elements
            return apply(own, keepdim=True) if own else x

        return reduce


class SympyReader:
    """Builds SymPy expressions; honours `sympy.evaluate(False)`."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        import sympy

        return symbol(name, sympy)


_TRACE, _MATH, _TORCH, _SYMPY = TraceReader(), MathReader(), TorchReader(), SympyReader()


def reader_of(*args: Num) -> Any:
    """The reader for these operands: the first that is more than a number decides."""
    for a in args:
        if isinstance(a, Value):
            return _TRACE
        own = getattr(type(a), "reader", None)
        if own is not None:
            return own
        module = type(a).__module__
        if module.startswith("torch"):
            return _TORCH
        if module.startswith("sympy"):
            return _SYMPY
    return _MATH


def primitive(row: Prim, means: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Add a primitive of your own and return its function, which works on all that functions here work on.

    row    its row in the table of primitives.  Where it is `core`, spellings belong into the tables of the backends
    means  its definition over the functions of optgen.lang: what is compiled where it is not core, and what readings
           compute for which the row has no meaning
    """
    if means is not None and not row.core:
        row = replace(row, means=lambda *nodes: lift(means(*map(Value, nodes))))
    PRIMS[row.name] = row

    def function(*operands: Num) -> Num:
        reader = reader_of(*operands)
        stated = {_TRACE: True, _MATH: row.number, _TORCH: row.tensor, _SYMPY: row.symbol or means is None}
        if means is not None and not stated.get(reader):
            return means(*operands)
        return getattr(reader, row.name)(*operands)

    function.__name__, function.__doc__ = row.name, row.doc
    return function


# -- the functions


def sqrt(x: Num) -> Num:
    """The square root."""
    return reader_of(x).sqrt(x)


def rsqrt(x: Num) -> Num:
    """1 / sqrt(x)."""
    r = reader_of(x)
    return 1 / _op("sqrt", x) if r is _TRACE else r.rsqrt(x)


def cbrt(x: Num) -> Num:
    """The cube root, which has the sign of x."""
    return reader_of(x).cbrt(x)


def exp(x: Num) -> Num:
    """e ** x, host space only."""
    return reader_of(x).exp(x)


def log(x: Num) -> Num:
    """The natural logarithm, host space only."""
    return reader_of(x).log(x)


def exp2(x: Num) -> Num:
    """2 ** x."""
    return reader_of(x).exp2(x)


def log2(x: Num) -> Num:
    """The binary logarithm of x > 0."""
    return reader_of(x).log2(x)


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
    made: Num = None
    while True:
        if n & 1:
            made = x if made is None else made * x
        n >>= 1
        if not n:
            return made
        x = x * x


def sign(x: Num) -> Num:
    """-1, 0 or 1."""
    return reader_of(x).sign(x)


def maximum(a: Num, b: Num) -> Num:
    """The larger, elementwise; NaN if either is."""
    return reader_of(a, b).max(a, b)


def minimum(a: Num, b: Num) -> Num:
    """The smaller, elementwise; NaN if either is."""
    return reader_of(a, b).min(a, b)


def clip(x: Num, low: Num, high: Num) -> Num:
    """x limited to [low, high]; NaN stays NaN."""
    return minimum(maximum(x, low), high)


def square(x: Num) -> Num:
    """x * x."""
    return x * x


def where(c: Num, a: Num, b: Num) -> Num:
    """a where c holds, else b; both are computed."""
    return reader_of(c, a, b).where(c, a, b)


def equal(a: Num, b: Num) -> Num:
    """a == b, as a value."""
    return reader_of(a, b).eq(a, b)


def floor(x: Num) -> Num:
    """The integer at or below x."""
    return reader_of(x).floor(x)


def rint(x: Num) -> Num:
    """The nearest integer, half to even."""
    return reader_of(x).rint(x)


# integers, bits, conversions


def lshr(x: Num, k: int) -> Num:
    """Logical shift right of an i32 by a constant."""
    return reader_of(x).lshr(x, k)


def rotl(x: Num, k: Num) -> Num:
    """An i32 rotated left by k bits, 0 < k < 32."""
    return reader_of(x, k).rotl(x, k)


def cast(x: Num, dtype: DType) -> Num:
    """Value conversion; f32 -> i32 truncates toward zero, f32 -> bf16/f16 rounds half to even."""
    if isinstance(x, Value) and x.node.dtype == dtype:
        return x
    if isinstance(x, Value) and dtype is dtypes.bf16 and x.node.dtype is dtypes.f32:
        # By its bits, as formats round it (words.round_bf16): backends convert by value each in their own way.
        pattern = where(equal(x, x), bits(x) + ((bits(x) >> 16) & 1) + 0x7FFF, 0x7FC00000) >> 16
        return bitcast(cast(pattern, dtypes.i16), dtypes.bf16)
    return reader_of(x).cast(x, attr=dtype)


def bitcast(x: Num, dtype: DType) -> Num:
    """The same bits as another dtype of the same width."""
    return reader_of(x).bitcast(x, attr=dtype)


def bits(x: Num) -> Num:
    """The bit pattern of an f32 as i32."""
    return bitcast(x, dtypes.i32)


def from_bits(x: Num) -> Num:
    """The f32 with this i32 bit pattern."""
    return bitcast(x, dtypes.f32)


# tables


def lookup(x: Num, table: Table) -> Num:
    """The f32 entry number x (i32) of a table, 0 <= x < its length."""
    return reader_of(x).lookup(x, attr=table)


def search(x: Num, table: Table) -> Num:
    """i32: how many entries of a table are <= x (f32); 0 for a NaN."""
    return reader_of(x).search(x, attr=table)


def place(x: Num, table: Table) -> Num:
    """f32: the number of a table's entry x, with a fraction between two entries; the first or last one beyond them."""
    if isinstance(x, Value):
        return _op("place", x, attr=table)
    last = len(table.values) - 1
    below = search(x, table.following)
    low, high = lookup(below, table), lookup(minimum(below + 1, last), table)
    part = (x - low) / (high - low)
    return cast(below, dtypes.f32) + where(low < high, where(part > 0, part, 0.0), 0.0)


# reductions


def block_max(x: Num, size: int) -> Num:
    """The largest i32 of each storage block; a tensor is read in blocks along its last dimension."""
    return reader_of(x).block_max(x, attr=size)


def block_min(x: Num, size: int) -> Num:
    """The smallest i32 of each storage block."""
    return reader_of(x).block_min(x, attr=size)
