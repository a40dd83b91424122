"""Single steps of the compiler that look for patterns: they find them whichever way the operands stand."""

from types import SimpleNamespace
from typing import Any

import pytest

from optgen.backends import cpp, idioms, triton
from optgen.ir import node as ir
from optgen.ir.node import Node, postorder
from optgen.ops import dtypes, spaces
from optgen.passes.convert import Converter
from optgen.passes.fold import exact

A, B = (ir.load(name, dtypes.i32, spaces.elem) for name in "ab")


def within(**limits: tuple[float, float]) -> Any:
    """The interval of a load by its buffer; a constant's own; anything else from 0 to 2."""
    return lambda n: (n.attr, n.attr) if n.op == "const" else limits.get(str(n.attr), (0, 2))


@pytest.mark.parametrize(
    ("b", "kept"), [((0, 3), A), ((4, 9), B), ((3, 9), ir.op("max", A, B)), ((1, 2), ir.op("max", A, B))]
)
def test_a_maximum_is_decided_where_no_value_of_one_is_above_the_other(b: tuple[int, int], kept: Node) -> None:
    a = (3, 4) if kept is A or kept is B else (0, 5)
    assert Converter(within(a=a, b=b))(ir.op("max", A, B)) is kept


@pytest.mark.parametrize("turned", [False, True])
def test_the_pattern_of_a_nan_is_guarded_by_a_minimum(turned: bool) -> None:
    x = ir.op("mul", *(ir.load(name, dtypes.f32, spaces.elem) for name in "xy"))
    terms = ir.op("bitcast", x, attr=dtypes.i32), ir.load("carry", dtypes.i32, spaces.elem)
    nan = ir.const(0x7FC00000, dtypes.i32)
    node = ir.op("where", ir.op("eq", x, x), ir.op("add", *(terms[::-1] if turned else terms)), nan)
    assert Converter(within(carry=(0, 1)))(node) is ir.op("add", ir.op("min", terms[0], nan), terms[1])


@pytest.mark.parametrize("turned", [False, True])
def test_a_product_with_a_reciprocal_is_a_division(turned: bool) -> None:
    factors = ir.sym("a"), ir.op("rcp", ir.sym("b"))
    printer: Any = SimpleNamespace(names={}, text=lambda n, *_: str(n.attr))
    assert cpp._mul(printer, ir.op("mul", *(factors[::-1] if turned else factors)))[0] == "a / b"


def test_a_table_of_constants_is_a_balanced_tree() -> None:
    assert triton._tree("abcd", ("x", "y")) == "tl.where(x, tl.where(y, d, c), tl.where(y, b, a))"


def test_a_logical_shift_stays_under_a_mask_that_is_no_constant() -> None:
    shifted = ir.op("lshr", A, ir.const(3, dtypes.i32))
    assert exact(ir.op("and", shifted, B)) is ir.op("and", shifted, B)
    assert exact(ir.op("and", shifted, ir.const(7, dtypes.i32))).args[0].op == "shr"


def test_bytes_between_bytes_are_one_permutation() -> None:
    node = ir.op("cast", ir.op("lshr", A, ir.const(12, dtypes.i32)), attr=dtypes.u8)
    assert idioms.lanes(node) == idioms.Idiom("bits", (A,), (12,))


@pytest.mark.parametrize("turned", [False, True])
def test_a_code_times_its_scale_is_one_fused_operation(turned: bool) -> None:
    counter = ir.op("bitcast", ir.op("or", A, ir.const(0x4B000000, dtypes.i32)), attr=dtypes.f32)
    code = ir.op("max", ir.op("sub", counter, ir.const(2.0**23)), ir.const(0.5))
    factors = code, ir.load("scale", dtypes.f32, spaces.block(64))
    found = Converter(within(scale=(0, 1)))(ir.op("mul", *(factors[::-1] if turned else factors)))
    assert {n.op for n in postorder([found])} >= {"fma", "max", "bitcast"}
