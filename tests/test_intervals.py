"""Running error analysis: fp32 results and exact ones lie inside, and not by a wide margin.

Tolerances are none: an enclosure holds or it does not.  That it is worth something is tested by its width.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import optgen
from optgen.driver import load, targets
from optgen.lang import cbrt, clip, maximum, minimum, sign, sqrt, where
from optgen.lang.reductions import col_mean, dot, mean, norm, rms, row_max, row_sum
from optgen.runtime.records import sums
from optgen.verify.differential import Trial, Values, compare, enclose, oracle
from optgen.verify.intervals import F32_LARGEST, F32_TINY, F32_UNIT, Interval
from tests import product

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
triples = st.lists(st.tuples(finite, finite, finite), min_size=1, max_size=8)

Formula = Callable[[Any, Any, Any], Any]
FORMULAS: dict[str, Formula] = {
    "sum": lambda x, y, z: x + y + z,
    "difference": lambda x, y, z: x - y * z,
    "average": lambda x, y, z: 0.9 * x + (1 - 0.9) * y,
    "product": lambda x, y, z: x * y * z,
    "quotient": lambda x, y, z: x / (abs(y) + 1e-8),
    "reciprocal": lambda x, y, z: 1 / (y * y + 0.25),
    "root": lambda x, y, z: sqrt(x * x + 0.1) - sqrt(abs(y)),
    "normalized": lambda x, y, z: 1e-3 * x / (sqrt(abs(y)) / 0.3 + 1e-8),
    "limits": lambda x, y, z: clip(maximum(x, y), -2.5, 0.1) + minimum(z, x),
    "choice": lambda x, y, z: where(x > y, x * z, y),
    "branches": lambda x, y, z: where((x >= 0) & ~(y < z) | (x <= -1), 0.0, x),
    "sign": lambda x, y, z: sign(0.1 * x + y) * z,
    "powers": lambda x, y, z: x**3 - y**2 * 2.0**-5,
    "numbers": lambda x, y, z: 3 - x * 0.7 / (2 + abs(z)),
}


def columns(rows: list[tuple[float, float, float]]) -> tuple[Tensor, Tensor, Tensor]:
    x, y, z = torch.tensor(rows, dtype=torch.float32).T.contiguous()
    return x, y, z


@pytest.mark.parametrize("name", FORMULAS)
@given(rows=triples)
def test_fp32_and_exact_results_lie_inside(name: str, rows: list[tuple[float, float, float]]) -> None:
    args = columns(rows)
    rounded = FORMULAS[name](*args)
    exact = FORMULAS[name](*(a.double() for a in args))
    inside = FORMULAS[name](*(Interval.point(a) for a in args))
    assert inside.contains(rounded).all()
    assert inside.contains(exact).all()


ENDS = (-math.inf, -F32_LARGEST, -1.5, -F32_TINY, 0.0, F32_TINY, 2.0**-126, 1.5, F32_LARGEST, math.inf)


@pytest.mark.parametrize("operation", [operator.add, operator.sub, operator.mul, operator.truediv])
def test_results_lie_inside_whatever_the_ends_and_whatever_else_is_computed(operation: Callable[..., Any]) -> None:
    """Also for intervals that end in infinities; the others have the same result beside those and alone."""
    lo, hi = torch.tensor([(a, b) for a in ENDS for b in ENDS if a <= b]).T.contiguous()
    inner = torch.zeros_like(lo).clamp(lo, hi)  # 0 times an infinity is NaN, also where no end is 0
    of_rows, of_columns = (Interval(lo.double().view(shape), hi.double().view(shape)) for shape in ((-1, 1), (1, -1)))
    both = operation(of_rows, of_columns)
    for x, y in itertools.product((lo, hi, inner), repeat=2):
        assert both.contains(operation(x[:, None], y)).all()
        assert both.contains(operation(x[:, None].double(), y.double())).all()
    plain = lo.isfinite() & hi.isfinite()
    few = lo[plain].double(), hi[plain].double()
    alone = operation(Interval(*(x[:, None] for x in few)), Interval(*few))
    for end, other in ((both.lo, alone.lo), (both.hi, alone.hi)):
        torch.testing.assert_close(end[plain][:, plain], other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "broken",
    [
        lambda x: x / (x - x),
        lambda x: sqrt(-x),
        lambda x: (x * 3e38 * 3e38) - (x * 3e38 * 3e38),
        lambda x: (x * 3e38 * 3e38) * (x - x),
        lambda x: x + math.nan,
        lambda x: cbrt(x * 3e38 * 3e38),
    ],
)
def test_what_may_be_nan_claims_nothing(broken: Callable[[Any], Any]) -> None:
    x = torch.tensor([1.0, 2.0])
    out = broken(Interval.point(x))
    assert not out.known.any()
    assert out.distance(x).isinf().all()
    assert out.contains(torch.tensor([math.nan, 5.0])).all()


def test_reductions() -> None:
    torch.manual_seed(0)
    x = torch.randn(37, 53)
    for f in (row_sum, col_mean, mean, rms, norm, row_max):
        inside = f(Interval.point(x))
        assert inside.contains(f(x)).all()
        assert inside.contains(f(x.double())).all()
        assert inside.lo.shape == f(x).shape
        # At most one rounding per term of the sum of magnitudes.
        assert (inside.hi - inside.lo).max() <= 4 * x.numel() * F32_UNIT * x.abs().double().sum()


@pytest.mark.parametrize("size", [1, 2, 255, 20_000])
def test_sums_lie_inside_in_any_order(size: int) -> None:
    """One after the other, backwards, sorted, and in the order of the runtime; of numbers that nearly cancel, too."""
    torch.manual_seed(size)
    for spread in (0.0, 8.0):
        x = torch.randn(size) * torch.exp2(spread * torch.randn(size))
        x[size // 2 :] = -x[: size - size // 2].flip(0)
        inside = dot(Interval.point(x), Interval.point(torch.ones(size)))
        orders = [x, x.flip(0), x.sort().values, x[x.abs().argsort(descending=True)]]
        found = [order.cumsum(0)[-1] for order in orders]
        found += [torch.from_numpy(order.numpy().cumsum()[-1:])[0] for order in orders]  # float32, in sequence
        found += [sums.tensor(x), sums.rows(x.view(1, -1), 64).squeeze(), x.double().sum()]
        for total in found:
            assert inside.contains(total.double())
        assert math.isfinite(float(inside.hi)) and inside.lo < inside.hi


def test_sums_of_one_sign_keep_it_and_overflow_claims_nothing() -> None:
    tiny = torch.full((1000,), 2.0**-149)
    inside = dot(Interval.point(tiny), Interval.point(torch.ones(1000)))
    assert inside.lo >= 0
    assert inside.contains(sums.tensor(tiny).double())
    assert dot(-Interval.point(tiny), Interval.point(torch.ones(1000))).hi <= 0
    huge = Interval.point(torch.full((4,), 2.0**126))
    assert not dot(huge, Interval.point(torch.ones(4))).known
    assert dot(huge, Interval.point(torch.tensor([1.0, 0.0, 0.0, 0.5]))).known


# -- specs


# -- storage and generated code
def trial(plan: str, dtype: torch.dtype, seed: int = 0, **options: Any) -> tuple[Trial, Any]:
    spec = load.find_spec("adamw")
    chosen = load.find_plan(plan)
    torch.manual_seed(seed)
    t = Trial(
        optgen.compile(spec, chosen), spec, torch.randn(70, 100), dtype=dtype, plan=plan, seed=seed, options=options
    )
    return t, t.storage(chosen, targets.recurrences_of(spec, tuple(sorted(t.flags.items()))))


@pytest.mark.parametrize(
    ("plan", "dtype"),
    [
        ("fp32", torch.float32), ("bf16_sr", torch.bfloat16), ("split32", torch.float16),
        ("int8_split24", torch.bfloat16), ("int8_rn_split24", torch.float16), ("flashoptim", torch.bfloat16),
    ],
)  # fmt: skip
def test_adamw_keeps_to_its_composed_bound(plan: str, dtype: torch.dtype) -> None:
    t, storage = trial(plan, dtype)
    report = t.check_steps(storage, [torch.randn(70, 100) for _ in range(3)])
    assert report.ok, report
    assert report.claimed == 1.0
    # The bound is attained nearly: its worst elements are past half of it.
    assert all(w.ratio > 0.5 for w in report.worst.values()), report


@pytest.mark.parametrize("wrong", [{"lr": 1.01e-3}, {"betas": (0.9, 0.99)}, {"weight_decay": 0.011}])
def test_a_wrong_rule_is_caught(wrong: dict[str, Any]) -> None:
    t, storage = trial("fp32", torch.float32)
    t.run(torch.randn(70, 100))
    t.hypers |= wrong  # what the generated optimizer does not know
    assert not t.check_step(storage, torch.randn(70, 100)).ok


def test_one_wrong_element_is_caught() -> None:
    t, storage = trial("int8_split24", torch.bfloat16)
    g = torch.randn(70, 100)
    before, step, host = t.decoded(), t.step, t.host
    t.run(g)
    after = t.decoded()
    inside = enclose(t.spec, storage, Values.decoded(before, host, step), g, t.hypers, kept=after)
    exact = oracle(t.spec, before, g, step, host, t.hypers)
    bound = product.allowed_distance(t.spec, storage, before, g, step, t.hypers, host, kept=after)
    assert compare(after, inside, exact).ok
    for name in after:
        for bad in (float(exact[name][3, 7] + 1.5 * bound[name][3, 7]), math.nan, math.inf):
            changed = {k: v.clone() for k, v in after.items()}
            changed[name][3, 7] = bad
            report = compare(changed, inside, exact)
            assert report.broken == (name,)
            assert report.worst[name].index == (3, 7)
            assert report.worst[name].ratio > 1


def _around(x: Tensor, radius: Tensor) -> Interval:
    """Return x within radius, both ends widened by the fp64 rounding."""
    return Interval.point(x).widened(radius * (1 + 2.0**-50) + x.abs() * 2.0**-52)


@pytest.mark.parametrize("e", [9, 13.0, -3, -11.0, 64, 65, 70.0, 1.5, -0.5, 0.5, 0, 0.0])
@given(rows=triples)
def test_powers_hold_the_maths_of_either_sign(e: float, rows: list[tuple[float, float, float]]) -> None:
    """Points and intervals around them, against PyTorch's fp64 power wherever that is finite."""
    x = columns(rows)[0].double()
    for radius in (0.0, 1e-3, 2.0):
        inside = _around(x, radius * x.abs().clamp(min=1e-3)) ** e
        exact = x**e
        assert (inside.contains(exact) | ~exact.isfinite()).all()
        roots = cbrt(_around(x, radius * x.abs()))
        assert roots.contains(x.sign() * x.abs() ** (1 / 3)).all()
