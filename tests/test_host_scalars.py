"""Host scalars never raise in the middle of a training run: what overflows is an infinity."""

import itertools
import math

import pytest
import torch

import optgen
from optgen.backends.host import HostPrinter
from optgen.base.errors import UserError
from optgen.ir import node as ir
from optgen.ir.program import Program
from optgen.lang import Spec, clip, equal, exp, floor, hyper, maximum, optimizer, power, rint, scalar, sign, where
from optgen.lang.values import Value, _op
from optgen.ops import dtypes
from optgen.ops.prims import PRIMS
from optgen.runtime.layout import plans
from optgen.runtime.records import scalars


@pytest.mark.parametrize(
    ("got", "wanted"),
    [
        (scalars.divide(1.0, 0.0), math.inf), (scalars.divide(-1.0, 0.0), -math.inf),
        (scalars.divide(-1.0, -0.0), math.inf), (scalars.power(0.5, -2000.0), math.inf),
        (scalars.power(0.0, -1.0), math.inf), (scalars.power(2, 1024), math.inf),
        (scalars.power(-2, 1025), -math.inf), (scalars.power(-2, 1026), math.inf), (scalars.power(3, 2), 9.0),
        (scalars.power(2.0, 0.5), math.sqrt(2)), (scalars.cube_root(-1.0), -1.0),
        (scalars.cube_root(-math.inf), -math.inf), (scalars.exp(1e4), math.inf), (scalars.log(0.0), -math.inf),
        (scalars.floor(-0.5), -1.0), (scalars.floor(math.inf), math.inf), (scalars.rint(2.5), 2.0),
        (scalars.rint(-math.inf), -math.inf), (scalars.sign(-3), -1.0), (scalars.root(4.0), 2.0),
        (scalars.divide(0.0, 0.0), math.nan), (scalars.power(-2.0, 0.5), math.nan), (scalars.log(-1.0), math.nan),
        (scalars.root(-1.0), math.nan), (scalars.sign(math.nan), math.nan), (scalars.rint(math.nan), math.nan),
    ],
)  # fmt: skip
def test_ieee(got: float, wanted: float) -> None:
    assert got == wanted or (math.isnan(got) and math.isnan(wanted))


# -- every primitive
NUMBERS = (-math.inf, -3.0, -2.5, -1.0, -0.0, 0.0, 0.3, 1.0, 2.0, 2.5, 1024.0, 1e4, 1e308, math.inf, math.nan)
LOGICAL = ("and", "or", "xor", "not")


def operands(name: str) -> list[Value]:
    """One host scalar for each operand of a primitive."""
    count = max(PRIMS[name].arity, 1)
    conditions = count if name in LOGICAL else int(name == "where")
    syms = [ir.sym(letter) for letter in "abc"[:count]]
    return [Value(ir.op("lt", ir.const(0.0), s) if k < conditions else s) for k, s in enumerate(syms)]


ON_HOST = {name for name, row in PRIMS.items() if row.host}


@pytest.mark.parametrize("name", sorted(set(PRIMS) - ON_HOST))
def test_what_the_host_does_not_spell_is_refused(name: str) -> None:
    with pytest.raises(UserError) as caught:
        _op(name, *operands(name), attr=dtypes.f32 if PRIMS[name].dtype == "attr" else None)
    assert caught.value.code in ("E103", "E205", "E206")  # the last of functions of matrices


@pytest.mark.parametrize("name", sorted(ON_HOST))
def test_a_host_scalar_is_the_same_of_numbers_and_of_tensors(name: str) -> None:
    """All operands tensors, or one of them a number."""
    node = _op(name, *operands(name)).node
    text = HostPrinter(Program("none", (), (), (), ())).text(node)
    compute = eval(f"lambda a, b, c: {text}", vars(scalars))
    count = len(operands(name))
    # The C library's powers and torch's may differ in the last place, and so do torch's roots, which are MKL's on some
    # CPUs; a third is rounded, times 709 at most.
    rounding = {"cbrt": 709 * 2.0**-55 + 2.0**-51, "sqrt": 2.0**-52, **dict.fromkeys(("pow", "exp", "log"), 2.0**-51)}
    rounding |= dict.fromkeys(("tanh", "sigmoid", "atan2"), 2.0**-50)
    for given in itertools.product(*[NUMBERS] * count, *[(1.0,)] * (3 - count)):
        wanted = compute(*given)
        tensors = [torch.tensor(x, dtype=torch.float64) for x in given]
        for number in range(count if count > 1 else 0, -1, -1):
            mixed = [x if k == number - 1 else y for k, (x, y) in enumerate(zip(given, tensors, strict=True))]
            got = compute(*mixed)
            assert got.shape == () and got.dtype == (torch.bool if node.dtype is dtypes.boolean else torch.float64)
            assert got.item() == pytest.approx(wanted, rel=rounding.get(name, 0.0), abs=0, nan_ok=True), (text, given)
            if name != "pow" and not math.isnan(wanted):
                assert math.copysign(1, got.item()) == math.copysign(1, wanted), (text, given)


@pytest.mark.parametrize("name", sorted(ON_HOST))
def test_a_host_scalar_of_several_lines_has_the_bits_of_each(name: str) -> None:
    """All operands tensors, or one of them a number."""
    text = HostPrinter(Program("none", (), (), (), ())).text(_op(name, *operands(name)).node)
    compute = eval(f"lambda a, b, c: {text}", vars(scalars))
    given = [x for x in itertools.product(NUMBERS, NUMBERS, (1.0, -2.5, math.nan)) if name != "where" or x[0] == x[0]]
    columns = [torch.tensor(x, dtype=torch.float64) for x in zip(*given, strict=True)]
    for number in range(-1, 3 if len(operands(name)) > 1 else 0):
        mixed = [x[7].item() if k == number else x for k, x in enumerate(columns)]
        got = compute(*mixed)
        rows = zip(*(x.tolist() if isinstance(x, torch.Tensor) else [x] * len(given) for x in mixed), strict=True)
        wanted = [compute(*row) for row in rows]
        got = got.tolist() if isinstance(got, torch.Tensor) else [got] * len(given)
        assert list(map(repr, map(float, got))) == list(map(repr, map(float, wanted))), (text, number)


@optimizer()
def stepwise(p, g, t, s=scalar(2.0), *, lr=hyper(1e-2, ge=0), k=hyper(3.0, ge=1)):
    s = where(equal(t, 2), s, 1.5 * s)
    larger = rint(t / k) + sign(t - 2)
    rising = where(t > 1, larger > 1, lr > 1.0)
    p = p - lr * (clip(larger, 0.0, 4.0) + floor(s) * maximum(larger, 1.0) + where(rising, 1.0, 0.5)) * g
    return p, s


@optimizer()
def overflowing(p, g, t, *, lr=hyper(1e-2, ge=0)):
    p = p - lr * (1 / exp(t) + 1 / (1 + power(2, t)) + 1 / (1 + 3**t)) * g
    return p


@pytest.mark.parametrize("spec", [stepwise, overflowing], ids=lambda s: s.name)
def test_a_rule_of_the_step_goes_on_late_in_training(spec: Spec) -> None:
    """On the host and on a device the same, and no step raises."""
    spec.check()
    host = plans.load(optgen.compile(spec, plan="fp32"), "fp32").variants[0].host[0]
    options = {h.name: h.default for h in spec.hypers} | ({"s": 2.0} if spec.host_states else {})
    for t in (*range(1, 9), 645, 646, 709, 710, 1023, 1024, 5000):
        one = [float(x) for x in host(t, 1.0, **options)]
        other = [float(x) for x in host(torch.tensor(float(t), dtype=torch.float64), 1.0, **options)]
        assert one == pytest.approx(other, rel=2.0**-50)
        assert all(map(math.isfinite, one))


def test_numbers_of_a_spec_overflow_to_infinities_too() -> None:
    assert overflowing.evaluate(0.0, 1.0, 2000)[0] == 0.0
    assert (exp(1e4), power(-2.0, 1025), power(2, 1024)) == (math.inf, -math.inf, math.inf)
