"""The alphabet: one row per primitive.

`core` primitives are the ones every backend spells; every other row has `means`, its definition in core
primitives, and backends that have a faster native form may spell it themselves (fast maths only, unless
the row is `exact`).  `arity` counts operands; `result` says the dtype: "same" as the operands, "bool", "attr",
"branch" or a named dtype.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Prim:
    name: str
    arity: int
    result: str = "same"
    core: bool = True
    doc: str = ""


_ROWS = (
    # f32 and i32
    Prim("add", 2, doc="x + y; i32 wraps"),
    Prim("sub", 2, doc="x - y; i32 wraps"),
    Prim("mul", 2, doc="x * y; i32 wraps"),
    Prim("neg", 1, doc="-x"),
    Prim("min", 2, doc="the smaller; NaN if either is NaN"),
    Prim("max", 2, doc="the larger; NaN if either is NaN"),
    Prim("abs", 1, doc="|x|"),
    # f32
    Prim("div", 2, doc="x / y; correctly rounded in strict mode"),
    Prim("sqrt", 1, doc="square root; correctly rounded in strict mode"),
    Prim("fma", 3, doc="x * y + z in one rounding; made by passes in fast mode only"),
    Prim("sign", 1, doc="-1, 0 or 1; sign(NaN) is NaN"),
    Prim("floor", 1, doc="the integer at or below x, as f32"),
    Prim("rint", 1, doc="nearest integer, half to even, as f32; |x| < 2^22"),
    # comparisons and selection
    Prim("lt", 2, "bool"),
    Prim("le", 2, "bool"),
    Prim("eq", 2, "bool"),
    Prim("ne", 2, "bool"),
    Prim("and", 2, doc="of bools, or of the bits of i32"),
    Prim("or", 2, doc="of bools, or of the bits of i32"),
    Prim("xor", 2, doc="of bools, or of the bits of i32"),
    Prim("not", 1, "bool"),
    Prim("where", 3, "branch", doc="where(c, x, y): both sides are computed"),
    # i32
    Prim("shl", 2, doc="x << constant"),
    Prim("shr", 2, doc="x >> constant, arithmetic"),
    Prim("lshr", 2, doc="x >> constant, logical"),
    Prim("rotl", 2, doc="x rotated left by y bits, 0 < y < 32"),
    # conversions; attr is the target dtype
    Prim("cast", 1, "attr", doc="value conversion; f32 -> i32 truncates, f32 -> bf16/f16 rounds to nearest even"),
    Prim("bitcast", 1, "attr", doc="same bits, another dtype of the same width"),
    # tables (ops/tables.py): attr is the table
    Prim("lookup", 1, "f32", doc="the table's entry number x, 0 <= x < its length"),
    Prim("search", 1, "i32", doc="how many of the table's entries are <= x; 0 for a NaN"),
    # reductions over a block: attr is the block size
    Prim("block_max", 1, doc="largest of the block; NaN if any is NaN"),
    Prim("block_min", 1, doc="smallest of the block; NaN if any is NaN"),
    # reductions over larger scopes: parsed, typed and scheduled; attr unused
    Prim("row_sum", 1),
    Prim("col_sum", 1),
    Prim("mat_sum", 1),
    Prim("tensor_sum", 1),
    Prim("row_max", 1),
    Prim("col_max", 1),
    Prim("tensor_max", 1),
    Prim("model_sum", 1, doc="over all parameters that have a gradient"),
    # between columns and the indices of the dimensions that they are made of
    Prim("axis_max", 1, doc="of columns: for each index of a dimension the largest of the columns that have it"),
    Prim("axis_min", 1, doc="of indices: for each column the smallest among its own"),
    # a function of whole matrices that no kernel computes: attr is its name in optgen.runtime.matrices; the operands
    # after the first are host scalars
    Prim("call", -1, doc="one value per element of a function of the whole matrix"),
    # host space only, fp64
    Prim("pow", 2, doc="x ** y"),
    Prim("exp", 1),
    Prim("log", 1),
    # decomposed; all but the first two give the same bits on every backend
    Prim("rsqrt", 1, core=False, doc="1 / sqrt(x)"),
    Prim("rcp", 1, core=False, doc="1 / x"),
    Prim("exp2", 1, core=False, doc="2 ** x, x clamped to [-126, 127], |error| <= 2 ulp; Inf and NaN stay"),
    Prim("log2", 1, core=False, doc="log2(x) of a positive normal x; Inf and NaN stay"),
    Prim("place", 1, "f32", core=False, doc="number of the table's entry x, with a fraction between two"),
    Prim("cbrt", 1, core=False, doc="cube root of x >= 0; Inf and NaN stay"),
    Prim("cbrt_signed", 1, core=False, doc="cube root of any x: what lower makes of cbrt where x may be negative"),
    Prim("power", 2, core=False, doc="x ** y of x >= 0 and a y of host space; a subnormal x counts as 0"),
    Prim("power_signed", 2, core=False, doc="the same of any x; NaN below 0 where y is no whole number"),
)

PRIMS: dict[str, Prim] = {p.name: p for p in _ROWS}

ON_HOST = frozenset(
    "add sub mul neg min max abs div sqrt sign floor rint lt le eq ne and or xor not where pow exp log cbrt".split()
)
"""What host scalars are made with: each has a spelling of its own in Python (backends/host.py), in fp64."""

REDUCTIONS = {
    # op -> (space of the operand's result, combine)
    "row_sum": ("row", "add"),
    "col_sum": ("col", "add"),
    "mat_sum": ("mat", "add"),
    "tensor_sum": ("tensor", "add"),
    "row_max": ("row", "max"),
    "col_max": ("col", "max"),
    "tensor_max": ("tensor", "max"),
    "model_sum": ("model", "add"),
}
GATHERS = {"axis_max": "axis", "axis_min": "col"}
"""Of values of another small space, several for each result: op -> the space of the result."""

COMMUTATIVE = {"add", "mul", "min", "max", "and", "or", "xor", "eq", "ne"}
