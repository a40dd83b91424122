"""`optgen fuzz` follows every kind of rule: what it draws is allowed, what it compares is there."""

from itertools import islice
from typing import Any

import pytest

from optgen.driver import fuzz
from optgen.driver.compile import compile as compiled
from optgen.driver.fuzz import Example, examples
from optgen.driver.load import find_spec

from optgen.lang import (  # isort: skip
    Spec, amax, hyper, lookahead, mean, model_norm, model_state, newton_schulz, nonneg, optimizer, row, row_mean,
    row_sum, scalar, shape_flag, sqrt, state, where,
)  # fmt: skip
from optgen.verify.differential import Report
from specs import plans
from specs.adamp import adamp
from specs.muon import muon


@optimizer()
def lagged(p, g, t, change=state(), before=state(), *, lr=hyper(1e-2, ge=0)):
    change = where(t > 1, 0.9 * change + (g - before), 0.0)
    before = g
    p = p - lr * (g + change)
    return p, change, before


@optimizer()
def lagged_mean(p, g, t, change=state(), *, lr=hyper(1e-2, ge=0)):
    change = where(t > 1, 0.9 * change + g, 0.5)
    p = p - lr * change * mean(change)
    return p, change


@optimizer()
def distance(p, g, t, start=state(init="param"), radius=model_state(nonneg), *, lr=hyper(1.0, ge=0)):
    radius = where(t > 1, radius, 1e-4) + model_norm(p - start)
    p = p - lr * radius * g / (amax(abs(g)) + 1e-8)
    return p, start, radius


@optimizer()
def by_rows(p, g, m=state(), size=row(nonneg), *, lr=hyper(1e-3, ge=0), beta=hyper(0.9, ge=0, lt=1)):
    m = beta * m + (1 - beta) * g
    size = beta * size + (1 - beta) * row_mean(g * g)
    p = p - lr * m / (sqrt(size) + 1e-8)
    return p, m, size


@optimizer(matrix="first")
def fading(p, g, s=scalar(1.0, when="wide"), *, lr=hyper(1e-2, ge=0), wide=shape_flag(lambda shape: len(shape) >= 2)):
    if wide:
        s = 0.9 * s
        g = s * newton_schulz(g) / (1 + abs(row_sum(g)))
    p = p - lr * g
    return p, s


def ran(spec: Spec, example: Example, plan: Any = plans.fp32) -> Report:
    return fuzz.run(spec, plan, compiled(spec, plan), example, backend="reference", maths="fast")


CASES = [
    (muon, Example(shape=(1, 4099))),
    (muon, Example(shape=(3, 5, 7, 41), steps=2)),
    (lookahead(muon), Example(shape=(3, 5, 7, 41), hypers={"lookahead_k": 1.0})),
    (lookahead(adamp), Example(shape=(65, 65), hypers={"lookahead_k": 10.0}, start=9)),
    (lagged, Example(shape=(65,), steps=3)),
    (lagged, Example(shape=(4159,), steps=3), plans.int8_split24),  # a step whose state is a number
    (lagged_mean, Example(shape=(65,), steps=3)),
    (fading, Example(shape=(33, 129), start=9, steps=2)),
    (fading, Example(shape=(3, 5, 7, 41), start=1)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].name)
def test_a_step_is_within_its_bound(case: tuple[Any, ...]) -> None:
    assert ran(*case).ok


@pytest.mark.parametrize("shape", [(0,), (0, 7), (7, 0), (0, 3, 4), (3, 0, 4)], ids=str)
@pytest.mark.parametrize("spec", [distance, lagged_mean, fading, muon], ids=lambda s: s.name)
def test_a_parameter_without_elements_is_no_alarm(spec: Spec, shape: tuple[int, ...]) -> None:
    assert ran(spec, Example(shape=shape, start=1, steps=2)).ok


def test_of_a_function_of_whole_matrices_nothing_is_claimed_and_of_the_rest_all() -> None:
    report = ran(muon, Example(shape=(64, 64)))
    assert report.worst["p"].bound == float("inf")
    assert report.claimed == 0.5
    assert 0 < report.worst["momentum_buffer"].bound < 1e-6


def drawn(spec: Spec) -> list[Example]:
    """Some examples of a rule."""
    return [*islice(examples(spec, steps=1), 50)]


def test_vectors_are_drawn_where_a_rule_takes_them_only() -> None:
    """One of rows without a shape flag refuses them."""
    vectors = {spec.name: any(len(x.shape) < 2 for x in drawn(spec)) for spec in (by_rows, muon, distance)}
    assert vectors == {"by_rows": False, "muon": True, "distance": True}
    assert fuzz.fuzz(by_rows, plans.int8_split24, count=20, steps=1).failure is None


@pytest.mark.parametrize("name", ["apollo", "dion", "fira", "galore", "psgd_kron"])
def test_states_of_low_rank_are_drawn_with_their_rank(name: str) -> None:
    """The rank is a number, or a hyper-parameter that an example may change."""
    spec = find_spec(name)
    assert fuzz.fuzz(spec, plans.int8_split24, count=5, steps=1).failure is None
    assert fuzz.fuzz(spec, plans.fp32, case=Example(shape=(33, 65), state_scale=0), count=1, steps=1).failure is None
