"""The IR: equal nodes, the text form and its parser, the verifier, intervals."""

import itertools
import math
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from optgen.ir import node as ir
from optgen.ir.program import Buffer, Program, Store
from optgen.ir.ranges import Intervals, is_plus, never_zero
from optgen.ir.show import text
from optgen.ir.verify import BrokenIR, verify
from optgen.ops import dtypes, spaces
from optgen.ops.prims import PRIMS
from tests.ir_text import parse

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
        (ir.op("power", X, X), "power takes in host space, got f32"),
        (ir.op("bitcast", CODE, attr=dtypes.f32), "bitcast u8 -> f32"),
    ],
)
def test_the_verifier_names_what_is_broken(node: ir.Node, fault: str) -> None:
    with pytest.raises(BrokenIR, match=fault):
        verify(_program(node), after="a test")


def _evaluate(node: ir.Node, leaves: dict[str, float], off: Callable[[], int]) -> np.floating:
    """A small independent interpreter: fp64 on the host, fp32 elsewhere, where divisions and roots are off by `off`."""
    kind = np.float64 if node.space == spaces.host else np.float32
    if not node.args:
        return kind(node.attr if node.op == "const" else leaves[node.attr])
    made = MEANINGS[node.op](*(kind(_evaluate(n, leaves, off)) for n in node.args))
    return _off(made, off()) if node.op in ("div", "sqrt") else kind(made)


MEANINGS: dict[str, Callable[..., np.floating]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "max": np.maximum, "min": np.minimum,
    "neg": np.negative, "abs": np.abs, "sqrt": np.sqrt, "floor": np.floor, "lt": np.less, "cast": np.positive,
    "where": lambda c, a, b: a if c else b,
}  # fmt: skip


def _off(x: np.floating, ulps: int) -> np.floating:
    """An fp32 x some ulp from where it is, of its own sign: what an approximation makes of it."""
    for _ in range(abs(ulps) if x.dtype == np.float32 else 0):
        moved = np.nextafter(x, np.float32(np.inf if ulps > 0 else -np.inf))
        if not np.isfinite(moved) or np.sign(moved) != np.sign(x):
            break
        x = moved
    return x


@given(floats(), st.floats(width=32), st.integers(0, 255), st.floats(0, 1), st.lists(st.integers(-3, 3), min_size=8))
@example(ir.op("min", X, ir.const(0.1)), 1.0, 0, 1.0, [0] * 8)  # 0.1 in fp32 is above 0.1
@example(ir.op("min", ir.op("mul", ir.op("abs", X), ir.op("abs", X)), ir.const(1e-40)), 1.0, 0, 0.0, [0] * 8)
@example(ir.op("div", ir.const(1.0), ir.op("mul", X, ir.op("abs", X))), -0.0, 0, 0.0, [0] * 8)
@example(ir.op("div", ir.const(1.0), ir.op("max", ir.op("neg", ir.op("abs", X)), ir.const(0.0))), 0.0, 0, 0.0, [0] * 8)
def test_what_fp32_computes_lies_in_its_interval(node: ir.Node, x: float, code: int, lr: float, off: list[int]) -> None:
    """Also where divisions and roots are off by 3 ulp, as fast maths may be; NaN lies outside all intervals."""
    turns = itertools.cycle(off)
    with np.errstate(all="ignore"):
        got = _evaluate(node, {"x": x, "code": code, "scale": -5, "lr": lr}, lambda: next(turns))
    low, high = Intervals({"lr": (0.0, 1.0)})(node)
    assert np.isnan(got) or low <= float(got) <= high


def random_expression(draw: random.Random, depth: int) -> ir.Node:
    """Operations on scalars of narrow ranges, whose intervals are narrow too, so that roundings reach their ends."""
    if depth == 0:
        return ir.op("mul", X, ir.const(0.0)) if draw.random() < 0.1 else draw.choice(SCALARS)
    name = draw.choice(["add", "sub", "mul", "div", "sqrt", "max", "neg"])
    return ir.op(name, *(random_expression(draw, depth - 1) for _ in range(PRIMS[name].arity)))


SCALARS = [ir.op("max", ir.sym(name), ir.op("cast", CODE, attr=dtypes.f32)) for name in ("a", "b", "c")]


@pytest.mark.parametrize("seed", range(200))
def test_narrow_intervals_hold_what_fp32_rounds(seed: int) -> None:
    """Scalars of one value: an interval of exact arithmetic is a point, and fp32 lies beside it."""
    draw = random.Random(seed)
    node = random_expression(draw, 4)
    values = {name: draw.uniform(256, 257) * 2.0 ** draw.choice([0, 60, 100]) for name in "abc"}
    turns = itertools.cycle([draw.randint(-3, 3) for _ in range(16)])
    with np.errstate(all="ignore"):
        got = _evaluate(node, values | {"code": 7.0, "x": 3.0}, lambda: next(turns))
    low, high = Intervals({name: (v, v) for name, v in values.items()})(node)
    assert np.isnan(got) or low <= float(got) <= high


@pytest.mark.parametrize(("low", "high", "want"), [(-5.7, -0.5, (-5, 0)), (0.3, 5.7, (0, 5)), (-0.9, 300.2, (0, 300))])
def test_a_float_cast_to_an_integer_is_cut_towards_zero(low: float, high: float, want: tuple[int, int]) -> None:
    cut = ir.op("cast", ir.op("mul", ir.sym("x"), ir.const(1.0)), attr=dtypes.i32)
    assert Intervals({"x": (low, high)})(cut) == want


def test_a_second_moment_is_seen_to_be_plus_zero_and_a_negation_is_not() -> None:
    square = ir.op("mul", X, X)
    average = ir.op("add", ir.op("mul", ir.sym("beta"), square), ir.op("mul", ir.op("mul", ir.sym("rest"), X), X))
    assert is_plus(average)
    assert is_plus(ir.op("sqrt", average))
    assert not is_plus(ir.op("neg", ir.op("min", X, ir.const(0.0))))
    assert not is_plus(ir.op("mul", ir.op("abs", X), X))
    assert not is_plus(ir.const(-0.0))


@pytest.mark.parametrize(
    ("high", "nonzero"), [(math.nextafter(1.0, 0.0), True), (1.0, False), (math.inf, False)], ids=str
)
def test_a_bias_correction_is_nonzero_for_bases_below_1_only(high: float, nonzero: bool) -> None:
    correction = ir.op("sub", ir.const(1.0), ir.op("pow", ir.sym("beta"), ir.sym("step")))
    intervals = Intervals({"beta": (0.0, high), "step": (1.0, math.inf)})
    assert never_zero(ir.op("sqrt", correction), intervals) is nonzero
