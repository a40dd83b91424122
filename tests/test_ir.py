"""The IR: hash-consing, the text form and its parser, the verifier, intervals."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optgen.ir import node as ir
from optgen.ir.program import Buffer, Program, Store
from optgen.ir.ranges import is_plus, ranges
from optgen.ir.show import parse, text
from optgen.ir.verify import BrokenIR, verify
from optgen.ops import dtypes, spaces

X = ir.load("x", dtypes.f32, spaces.elem)
CODE = ir.load("code", dtypes.u8, spaces.elem)
SCALE = ir.load("scale", dtypes.i16, spaces.block(64))


def floats() -> st.SearchStrategy[ir.Node]:
    leaves = st.one_of(
        st.just(X),
        st.just(ir.sym("lr")),
        st.floats(allow_nan=False, width=32).map(ir.const),
        st.just(ir.op("cast", CODE, attr=dtypes.f32)),
        st.just(ir.op("cast", SCALE, attr=dtypes.f32)),
    )

    def grow(children: st.SearchStrategy[ir.Node]) -> st.SearchStrategy[ir.Node]:
        binary = st.builds(
            lambda o, a, b: ir.op(o, a, b),
            st.sampled_from(["add", "sub", "mul", "div", "max", "min"]),
            children,
            children,
        )
        unary = st.builds(lambda o, a: ir.op(o, a), st.sampled_from(["neg", "abs", "sqrt", "floor"]), children)
        where = st.builds(lambda a, b, c: ir.op("where", ir.op("lt", a, b), b, c), children, children, children)
        return st.one_of(binary, unary, where)

    return st.recursive(leaves, grow, max_leaves=12)


@given(floats())
def test_text_round_trips_to_the_same_node(node: ir.Node) -> None:
    assert parse(text(node)) is node


def test_equal_nodes_are_identical_and_signed_zero_is_kept_apart() -> None:
    assert ir.op("add", X, ir.const(1.0)) is ir.op("add", X, ir.const(1.0))
    assert ir.const(0.0) is not ir.const(-0.0)
    assert ir.const(1.0) is not ir.const(1, dtypes.i32)


def test_nodes_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        X.op = "y"  # type: ignore[misc]


def _program(node: ir.Node) -> Program:
    x = Buffer("x", dtypes.f32, spaces.elem, "state", "x")
    code = Buffer("code", dtypes.u8, spaces.elem, "state", "code")
    return Program("t", (x, code), (), (), (Store("x", node),))


@pytest.mark.parametrize(
    ("node", "fault"),
    [
        (ir.op("cast", X, attr=dtypes.i32), "store of i32 to x"),
        (ir.op("add", X, ir.op("cast", ir.op("abs", CODE), attr=dtypes.f32)), "abs computes in storage dtype u8"),
        (ir.load("y", dtypes.f32, spaces.elem), "load of y"),
        (ir.op("exp", X), "exp outside host space"),
        (ir.op("bitcast", CODE, attr=dtypes.f32), "bitcast u8 -> f32"),
    ],
)
def test_the_verifier_names_what_is_broken(node: ir.Node, fault: str) -> None:
    with pytest.raises(BrokenIR, match=fault):
        verify(_program(node), after="a test")


def _evaluate(node: ir.Node, x: float, code: int) -> float:
    """A small independent interpreter in Python floats."""
    a = [_evaluate(n, x, code) for n in node.args]
    match node.op:
        case "const":
            return float(node.attr)
        case "load":
            return {"x": x, "code": float(code), "scale": -5.0}[node.attr]
        case "sym":
            return 0.25
        case "cast":
            return a[0]
        case "add":
            return a[0] + a[1]
        case "sub":
            return a[0] - a[1]
        case "mul":
            return a[0] * a[1]
        case "div":
            return a[0] / a[1] if a[1] else float("nan")
        case "max":
            return max(a)
        case "min":
            return min(a)
        case "neg":
            return -a[0]
        case "abs":
            return abs(a[0])
        case "sqrt":
            return a[0] ** 0.5 if a[0] >= 0 else float("nan")
        case "floor":
            return float(a[0] // 1)
        case "lt":
            return float(a[0] < a[1])
        case "where":
            return a[1] if a[0] else a[2]
    raise AssertionError(node.op)


@given(floats(), st.floats(-1e3, 1e3), st.integers(0, 255))
def test_a_value_lies_in_its_interval(node: ir.Node, x: float, code: int) -> None:
    got = _evaluate(node, x, code)
    low, high = ranges([node], {"lr": (0.0, 1.0)})[node.uid]
    if got == got:
        slack = 1e-9 * abs(got)
        assert low - slack <= got <= high + slack


def test_bits_of_a_masked_integer_are_a_nonnegative_float() -> None:
    scale = ir.op(
        "shl",
        ir.op("and", ir.op("cast", SCALE, attr=dtypes.i32), ir.const(0xFFFF, dtypes.i32)),
        ir.const(15, dtypes.i32),
    )
    value = ir.op("bitcast", ir.op("and", scale, ir.const(0x7FFF8000, dtypes.i32)), attr=dtypes.f32)
    low, high = ranges([value], {})[value.uid]
    assert low == 0.0
    assert high >= struct.unpack("<f", struct.pack("<i", 0x7F7F8000))[0]


@pytest.mark.parametrize(("low", "high", "want"), [(-5.7, -0.5, (-5, 0)), (0.3, 5.7, (0, 5)), (-0.9, 300.2, (0, 300))])
def test_a_float_cast_to_an_integer_is_cut_towards_zero(low: float, high: float, want: tuple[int, int]) -> None:
    cut = ir.op("cast", ir.op("mul", ir.sym("x"), ir.const(1.0)), attr=dtypes.i32)
    assert ranges([cut], {"x": (low, high)})[cut.uid] == want


def test_a_second_moment_is_seen_to_be_plus_zero_and_a_negation_is_not() -> None:
    square = ir.op("mul", X, X)
    average = ir.op("add", ir.op("mul", ir.sym("beta"), square), ir.op("mul", ir.op("mul", ir.sym("rest"), X), X))
    assert is_plus(average)
    assert is_plus(ir.op("sqrt", average))
    assert not is_plus(ir.op("neg", ir.op("min", X, ir.const(0.0))))
    assert not is_plus(ir.op("mul", ir.op("abs", X), X))
    assert not is_plus(ir.const(-0.0))
