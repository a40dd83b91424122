"""The language: what a signature declares, what a trace says, and that all readings of a rule agree."""

from __future__ import annotations

import doctest
import math
import time
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import sympy
import torch

from optgen.base import names
from optgen.base.errors import UserError
from optgen.driver import record_text
from optgen.ir import node as ir
from optgen.ir.node import postorder
from optgen.ir.spell import name_for

from optgen.lang import (  # isort: skip
    Spec, cbrt, clip, dot, equal, exp, flag, gram, hyper,
    log, maximum, mean, minimum, model_norm, nonneg, optimizer, row,
    row_mean, rsqrt, scalar, sigmoid, sign, sqrt, state, tanh, tensor_state, total, where,
)  # fmt: skip
from optgen.lang.plain import plain_formulas
from optgen.lang.spec import start
from optgen.lang.symbolic import expression, recurrence
from optgen.ops.prims import MATRIX_OPS, REDUCTIONS
from optgen.runtime.records import fed_name
from optgen.verify.intervals import Interval
from specs.came import came
from tests.harness import daily, python, spec_of

SPECS = Path(__file__).parent.parent / "specs"
NAMES = sorted(f.stem for f in SPECS.glob("*.py") if f.stem not in ("__init__", "plans"))


SETTINGS = [(name, setting) for name in NAMES for setting in spec_of(name).settings()]


def setting_id(case: tuple[str, dict[str, bool]]) -> str:
    return "-".join([case[0], *(k for k, on in case[1].items() if on)])


# -- specs that are only here
def smooth(old: Any, new: Any, beta: Any) -> Any:
    kept = beta * old
    added = (1 - beta) * new
    return kept + added


def both(a: Any, b: Any) -> Any:
    """The first value is not the last that is computed."""
    first = a + b
    second = a - b
    return first, second


def unchanged(x: Any) -> Any:
    """Computes, and gives back what it was given."""
    _ = x * x
    return x


@optimizer(cite="nobody")
def many_ways(
    p, g, t,
    m=state(),
    v=state(nonneg),
    best=state(when="tracked"),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper((0.9, 0.99), ge=0, lt=1),
    pair=hyper((1.0, 2.0)),
    tracked=flag(False),
):  # fmt: skip
    """Every way in which a statement can name a value."""
    beta1, beta2 = betas
    m = smooth(m, g, beta1)  # a helper's last operation
    v = smooth(v, g * g, beta2)
    total, gap = both(m, g)
    half, third = m / 2, m / 3
    half += third
    same = unchanged(half)
    alias = same
    if tracked:
        best = best + m
    chosen = best if tracked else (
        m
        * 2
    )  # fmt: skip
    noted: Any = chosen * pair[0]
    for _ in range(3):
        noted = noted * 0.5
    parts = [noted * k for k in (1.0, 2.0)]
    u = (inner := parts[0] + parts[1]) * pair[1]
    m = m + 0 * t
    p = p - lr * (u + inner + alias + total + gap)
    return p, m, v, best


@optimizer()
def tensor_wise(p, g, scale=tensor_state(nonneg), mu=scalar(1.0), *, lr=hyper(0.1), decay=hyper(0.5)):
    scale = decay * scale + mean(g * g)
    mu = mu * decay
    p = p - lr * mu * g / (1 + scale) - 0 * dot(p, g)
    return p, scale, mu


# -- names
def names_of(spec: Spec, **flags: bool) -> list[str]:
    return [let.name for let in spec.trace(flags).lets]


def let(spec: Spec, name: str, k: int = -1, **flags: bool) -> Any:
    return [x for x in spec.trace(flags).lets if x.name == name][k]


def test_a_let_for_each_named_statement_in_order() -> None:
    assert names_of(many_ways) == [
        "m", "v", "total", "gap", "half", "third", "half", "chosen", "noted", "noted", "noted", "noted", "inner", "u",
        "m", "p",
    ]  # fmt: skip
    assert "best" in names_of(many_ways, tracked=True)
    assert "chosen" not in names_of(many_ways, tracked=True)  # `best if tracked` makes nothing


def test_a_let_carries_the_authors_line_and_place() -> None:
    lines = Path(__file__).read_text().splitlines()
    for x in many_ways.trace().lets:
        assert x.loc.file == __file__
        assert x.loc.function == "many_ways"
        text = " ".join(" ".join(lines[x.loc.line - 1 : x.loc.end_line]).split())
        assert text.split("  #")[0].startswith(x.line)
    assert let(many_ways, "m", 0).line == "m = smooth(m, g, beta1)"
    assert let(many_ways, "chosen").line == "chosen = best if tracked else ( m * 2 )"


def test_every_operation_has_a_place_in_the_spec_or_its_helpers() -> None:
    trace = many_ways.trace()
    for node in postorder([trace.p, *trace.states.values()]):
        if node.args:
            assert trace.places[node.uid].file == __file__


def test_spelling_of_names() -> None:
    assert doctest.testmod(names).failed == 0


# -- declarations
FEW = ("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_res_row", "exp_avg_res_col")


def test_parts_of_tuples_take_the_authors_names() -> None:
    assert many_ways.hyper("betas").parts == ("beta1", "beta2")
    assert many_ways.hyper("pair").parts == ("pair_0", "pair_1")
    assert many_ways.hyper("lr").parts == ("lr",)
    trace = many_ways.trace()
    leaves = {n.attr for n in postorder([trace.p, trace.states["m"]]) if n.op == "sym"}
    assert {"beta1", "pair_0", "pair_1", "lr", "step"} <= leaves


@pytest.mark.parametrize(
    ("value", "fits"), [(0.0, True), (0.999, True), (1.0, False), (-1e-9, False), (math.nan, False), (math.inf, False)]
)
def test_ranges(value: float, fits: bool) -> None:
    assert many_ways.hyper("betas").allows(value) is fits


def test_docs_and_names() -> None:
    assert many_ways.class_name == "ManyWays"
    assert came.class_name == "CAME"
    assert many_ways.doc == "Every way in which a statement can name a value."
    assert tensor_wise.doc == __doc__  # without one of its own, the module's
    assert many_ways.loc.line == many_ways.function.__code__.co_firstlineno + 1




def test_states_that_are_off_are_missing() -> None:
    assert set(many_ways.trace().states) == {"m", "v"}
    assert set(many_ways.trace({"tracked": True}).states) == {"m", "v", "best"}
    assert set(came.trace({"factored": True}).states) == {"exp_avg", *FEW}
    assert set(came.trace({"factored": False}).states) == {"exp_avg", "exp_avg_sq"}




def test_shape_flags_follow_the_shape() -> None:
    assert came.flag_values({}, (3, 4)) == {"factored": True}
    assert came.flag_values({}, (3,)) == {"factored": False}
    _, states, _ = came.evaluate(torch.ones(3), torch.ones(3), 1)
    assert set(states) == {"exp_avg", "exp_avg_sq"}
    _, states, _ = came.evaluate(torch.ones(2, 3, 4), torch.ones(2, 3, 4), 1)
    shapes = {k: tuple(v.shape) for k, v in states.items()}
    assert shapes == {"exp_avg": (2, 3, 4)} | {k: (2, 3, 1) if k.endswith("row") else (2, 1, 4) for k in FEW}


# -- readings agree
def random_scalars(spec: Spec, setting: dict[str, bool]) -> dict[str, Any]:
    """Hyper-parameters by constructor name, consistent with the derived flags."""
    out = {h.name: h.default for h in spec.hypers}
    for f in spec.flags:
        if f.nonzero:
            out[f.nonzero] = 0.7 if setting[f.name] else 0.0
        if f.every:
            out[f.every] = 5
    if "weight_decay" in out:
        out["weight_decay"] = 0.05
    return out


def by_part(spec: Spec, hypers: dict[str, Any]) -> dict[str, float]:
    out: dict[str, float] = {}
    for h in spec.hypers:
        value = hypers[h.name]
        out |= dict(zip(h.parts, h.numbers(value), strict=True))
    return out


def random_states(spec: Spec, setting: dict[str, bool], shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(7)
    out = {}
    for s in spec.present(setting):
        size = start(s, torch.zeros(shape), {h.name: h.default for h in spec.hypers}).shape
        x = torch.randn(size, dtype=torch.float64, generator=made)
        out[s.name] = x * x + 0.01 if s.nonneg else 0.1 * x
        if s.nonneg and s.init == 1.0:  # a product of numbers below 1
            out[s.name] = out[s.name] / (1 + out[s.name])
    return out


def steps_of(spec: Spec, setting: dict[str, bool]) -> tuple[int, ...]:
    """Return some steps at which flags of intervals, of 5 by default, and of the first step are as the setting says."""
    if any(f.every and setting[f.name] for f in spec.flags):
        return 5, 10, 1000
    first = [setting[f.name] for f in spec.flags if f.first and not f.every]
    return (1,) if any(first) else (2, 12, 1001) if first else (1, 2, 12, 1001)


def shape_of(spec: Spec, setting: dict[str, bool]) -> tuple[int, ...] | None:
    """Return a shape of one element that has these shape flags."""
    flags = [f for f in spec.flags if f.shape is not None]
    shapes = [(1,), (1, 1), (1, 1, 1)]
    return next((s for s in shapes if all(f.holds(s, spec.defaults) == setting[f.name] for f in flags)), None)


# Products of matrices are tried in test_whole_model.py and test_bases.py.
ELEMENTS = [
    c for c in SETTINGS
    if shape_of(spec_of(c[0]), c[1]) and all(n.op not in MATRIX_OPS for n in postorder([spec_of(c[0]).trace(c[1]).p]))
]  # fmt: skip
FORMULAS = [pytest.param(c, marks=() if daily(c[0], "formulas") else pytest.mark.full) for c in ELEMENTS]


@optimizer()
def starts_late(p, g, t, m=state(), r=row(), /, *, lr=hyper(1e-2, ge=0)):
    r = where(t > 2, row_mean(g * g), 0.5 * lr)
    m = where(t > 1, 0.9 * m + g * sqrt(r), 0.0)
    p = where(t > 1, p - lr * m, 1.0)
    return p, m, r


def test_what_a_rule_makes_a_number_is_a_tensor_of_its_shape_and_precision() -> None:
    """A choice by the step gives one of its sides, which may be a plain number."""
    p, g = torch.zeros(3, 4), torch.ones(3, 4)
    p, states, _ = starts_late.evaluate(p, g, 1)
    assert (p.shape, states["m"].shape, states["r"].shape) == ((3, 4), (3, 4), (3, 1))
    assert {x.dtype for x in (p, *states.values())} == {torch.float32}
    p, states, _ = starts_late.evaluate(p, g, 2, states)
    torch.testing.assert_close(p, torch.full((3, 4), 1 - 1e-2 * math.sqrt(0.005)))
    assert starts_late.evaluate(0.0, 1.0, 1)[0] == 1.0


@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 1, 9)])
@pytest.mark.parametrize("exact", [True, False])
def test_an_element_wise_state_may_become_a_number_of_the_model(shape: tuple[int, ...], exact: bool) -> None:
    @optimizer(matrix="first")
    def follows(p: Any, g: Any, t: Any, s: Any = state(), *, lr: Any = hyper(1e-2)) -> Any:
        s = where(t > 1, s, model_norm(g))
        p = p - lr * s
        return p, s

    x = torch.ones(shape, dtype=torch.float64)
    p, g = (x, 2 * x) if exact else (Interval.point(x), Interval.point(2 * x))
    p, states, _ = follows.evaluate(p, g, 1)
    assert p.shape == states["s"].shape == shape


# Formulas are tried on one element, which is its own sum and maximum.
ONE_ELEMENT = dict.fromkeys(REDUCTIONS, lambda x: x)
ALONE = {"rows": 1.0, "columns": 1.0, "elements": 1.0}


PLAIN = {name: getattr(math, name) for name in ("sqrt", "cbrt", "exp", "log", "tanh", "atan2")}
PLAIN |= {"floor": math.floor, "sign": lambda x: (x > 0) - (x < 0), "sigmoid": lambda x: 1 / (1 + math.exp(-x))}


@pytest.mark.parametrize("case", FORMULAS, ids=setting_id)
def test_both_kinds_of_formulas_compute_what_the_function_does(case: tuple[str, dict[str, bool]]) -> None:
    """SymPy's expressions of the new values and the lines of `optgen explain` against the author's function in fp64.

    The latter are Python but for x', x[t] and x[t-1].
    """
    spec, setting = spec_of(case[0]), case[1]
    shape, trace, hypers = shape_of(spec, setting), spec.trace(setting), random_scalars(spec, setting)
    assert shape
    states, host = random_states(spec, setting, shape), {s.name: 0.3 for s in spec.present_host(setting)}
    host |= {fed_name(f.fed): float(setting[f.name]) for f in spec.flags if f.fed}
    free = {f.name: setting[f.name] for f in spec.flags if not f.derived}
    p, g = (torch.full(shape, x, dtype=torch.float64) for x in (0.4, -0.7))
    t = steps_of(spec, setting)[-2:][0]
    new, news, hosts = spec.evaluate(p, g, t, states, host, **hypers, **free)
    expected = {key: float(value) for key, value in {"p": new, **news, **hosts}.items()}
    old = {key: value.item() for key, value in {"p": p, **states}.items()} | host
    numbers: dict[str, Any] = by_part(spec, hypers) | {"g": g.item()} | ALONE
    known = numbers | {"step": float(t)} | old
    for key, node in trace.new.items():
        expr = expression(node, {})
        symbols = sorted(expr.free_symbols, key=lambda s: s.name)
        compute = sympy.lambdify(symbols, expr, [ONE_ELEMENT, "math"])
        assert float(compute(*(known[s.name] for s in symbols))) == pytest.approx(expected[key], rel=1e-13)
    plain = numbers | {"t": float(t)} | {f"{key}_old": value for key, value in old.items()}
    fed = {s.name for s in spec.states} - set(spec.order)
    plain |= {name: old[name] for name in fed}
    for line in plain_formulas(spec, setting):
        text = line.replace("[t-1]", "_old").replace("[t]", "_new").replace("'", "_")
        exec(text, PLAIN | ONE_ELEMENT | {"__builtins__": {"max": max, "min": min, "abs": abs}}, plain)
    for key in expected.keys() - fed - set(map(fed_name, fed)):
        assert plain[f"{key}_new"] == pytest.approx(expected[key], rel=1e-13)


def squared(x: Any) -> Any:
    return x * x


@optimizer()
def recurring(p, g, *, lr=hyper(0.1)):
    x1 = lr * 2
    p = p - squared((g - x1 * p) / (abs(g) + x1))
    return p


def test_unnamed_values_that_recur_have_lines_of_their_own() -> None:
    assert plain_formulas(recurring) == [
        "x1 = lr * 2", "x2 = (g - x1 * p[t-1]) / (abs(g) + x1)", "p[t] = p[t-1] - x2 * x2",
    ]  # fmt: skip
    assert max(map(len, plain_formulas(spec_of("soap_muon")))) < 250  # inlined, its norms are 20,000 characters


# -- recurrences
EMA, SUM, MAX, MIN, PREVIOUS = "ema", "sum", "max", "min", "previous"
LATE_DECAY = 1 - (10.0**9) ** -0.8  # Adafactor's, late in training
# One rule of each kind; those of several_ways are of more.
RECURRENCES = {
    "adamw": {"exp_avg": (EMA, 0.9), "exp_avg_sq": (EMA, 0.999), "max_exp_avg_sq": (MAX, 1.0)},
    "adafactor": {"row_var": (EMA, LATE_DECAY), "col_var": (EMA, LATE_DECAY), "variance": (EMA, LATE_DECAY)},
    "adamax": {"exp_avg": (EMA, 0.9), "exp_inf": (MAX, 0.999)},
    "madgrad": {"grad_sum_sq": (SUM, 1.0), "s": (SUM, 1.0), "x0": ("constant",)},
    "mars": {"exp_avg": (EMA, 0.95), "exp_avg_sq": (EMA, 0.99), "last_grad": (PREVIOUS,)},
    "muon": {"momentum_buffer": [(EMA, 0.95), (EMA, 0.9)], "exp_avg_sq": (EMA, 0.95)},
    "prodigy": {"exp_avg": (EMA, 0.9), "exp_avg_sq": (EMA, 0.999), "s": (EMA, 0.999**0.5), "p0": ("constant",)}
    | dict.fromkeys(("d", "d_max", "d_numerator"), ("other",)),
    "rprop": {"prev": (PREVIOUS,), "step_size": ("multiplicative",)},
    "schedule_free_adamw": {"z": (SUM, 1.0), "z_offset": ("other",), "exp_avg_sq": (EMA, 0.999)},
    "sgd": {"momentum_buffer": (EMA, 0.7)},
    # The largest of a row of minima: no decay, and no one old value that it could be one of.
    "sm3": {"accumulator": (SUM, 1.0), "accumulator_row": ("other",), "accumulator_col": ("other",),
            "momentum_buffer": (EMA, 0.7)},
    "yogi": {"exp_avg": (EMA, 0.9), "exp_avg_sq": (SUM, 1.0)},
}  # fmt: skip


@pytest.mark.parametrize("name", RECURRENCES)
def test_recurrences(name: str) -> None:
    spec = spec_of(name)
    for setting in spec.settings():
        parts = {f.nonzero: 0.7 for f in spec.flags if f.nonzero and setting[f.name]}
        for s in spec.present(setting):
            r = recurrence(spec, setting, s.name)
            decay = () if r.decay is None else (pytest.approx(r.decay_at(spec, **parts)),)
            expected = RECURRENCES[name][s.name]
            assert (r.kind, *decay) in (expected if isinstance(expected, list) else [expected])


@optimizer()
def several_ways(
    p, g, sum_of_one=state(nonneg), growing=state(), lazy=state(nonneg), gated=state(), kept_in_part=state(nonneg),
    two_speeds=state(), restarted=state(), masked_sum=state(nonneg), signs_agree=state(), top=state(nonneg),
    top_below=state(nonneg), top_of_decayed=state(nonneg), top_by_difference=state(nonneg), masked_top=state(nonneg),
    low=state(nonneg), low_by_where=state(nonneg), low_of_decayed=state(nonneg), latched=state(), by_itself=state(),
    scaled=state(nonneg), *,
    lr=hyper(0.1, ge=0), rho=hyper(1.0, ge=0), rate=hyper(1.25, gt=0), beta=hyper(0.9, ge=0, lt=1),
    slow=hyper(0.99, ge=0, lt=1),
):  # fmt: skip
    sum_of_one = rho * sum_of_one + g * g
    growing = rate * growing + g
    lazy = where(equal(g, 0.0), lazy, beta * lazy + (1 - beta) * g * g)
    gated = where(abs(g) > 1e-6, beta * gated + (1 - beta) * g, gated)
    keep = where(p > 0, beta, 1.0)
    kept_in_part = keep * kept_in_part + (1 - keep) * g * g
    two_speeds = where(g > p, beta * two_speeds + g, slow * two_speeds + p)
    restarted = where(g > p, beta * restarted + g, p)
    masked_sum = where(g > p, masked_sum + g * g, masked_sum)
    signs_agree = where(equal(sign(g), sign(signs_agree)), beta * signs_agree + g, slow * signs_agree + g)
    top = where(abs(g) > top, abs(g), top)
    top_below = where(top_below >= abs(g), top_below, abs(g))
    top_of_decayed = where(g * g < beta * top_of_decayed, beta * top_of_decayed, g * g)
    top_by_difference = where(2 * (g * g - top_by_difference) > 0, g * g, top_by_difference)
    masked_top = where(p > 0, maximum(masked_top, abs(g)), masked_top)
    low = minimum(low, abs(g))
    low_by_where = where(abs(g) < low_by_where, abs(g), low_by_where)
    low_of_decayed = minimum(beta * low_of_decayed, abs(g))
    latched = where(p > 0, g, latched)
    by_itself = where(by_itself > 1, beta * by_itself + g, g)
    scaled = scaled * where(g > p, 1.2, 0.5)
    p = p - lr * g
    return (
        p, sum_of_one, growing, lazy, gated, kept_in_part, two_speeds, restarted, masked_sum, signs_agree, top,
        top_below, top_of_decayed, top_by_difference, masked_top, low, low_by_where, low_of_decayed, latched,
        by_itself, scaled,
    )  # fmt: skip


WAYS = {
    "sum_of_one": (SUM, 1.0), "growing": ("other", 1.25), "lazy": (EMA, 0.9), "gated": (EMA, 0.9),
    "kept_in_part": (EMA, 0.9), "two_speeds": (EMA, 0.99), "restarted": (EMA, 0.9), "masked_sum": (SUM, 1.0),
    "signs_agree": (EMA, 0.99), "top": (MAX, 1.0), "top_below": (MAX, 1.0), "top_of_decayed": (MAX, 0.9),
    "top_by_difference": (MAX, 1.0), "masked_top": (MAX, 1.0), "low": (MIN, 1.0), "low_by_where": (MIN, 1.0),
    "low_of_decayed": ("other",), "latched": ("other",), "by_itself": (EMA, 0.9), "scaled": ("multiplicative",),
}  # fmt: skip


@pytest.mark.parametrize("name", WAYS)
def test_a_state_of_several_ways_recurs_by_the_one_in_which_it_moves_least(name: str) -> None:
    """But for standing still; a choice of the larger is a maximum, and a decay that is 1 by default makes a sum."""
    found = recurrence(several_ways, None, name)
    decay = () if found.decay is None else (found.decay_at(several_ways),)
    assert (found.kind, *decay) == WAYS[name]


@optimizer()
def compared_with_nan(p, g, avg=state(), size=state(nonneg), *, lr=hyper(1e-3, ge=0), eps=hyper(1e-8, gt=0)):
    x = clip(g / maximum(size, eps), 0.5, 5.0)
    avg = x - avg
    size = where(size > avg, size, abs(g))
    p = p - lr * avg
    return p, avg, size


@optimizer()
def of_comparisons(p, g, avg=state(), size=state(), *, lr=hyper(1e-3, ge=0), beta=hyper(0.9, ge=0, lt=1)):
    x = maximum(g * g * total(abs(p)), beta * (0.5 * avg) + (1 - beta) * maximum(avg, g))
    y = (2.0 - x) / (where(g < avg, x, size) + 1e-8) / (abs(total(x)) + 1e-8)
    avg = where(x - size > where(equal(y, 0.75), size, p), minimum(y, x), sqrt(abs(avg)))
    size = beta * size + where(equal(y, 0.75), size - p, cbrt(total(p)))
    p = p - lr * avg
    return p, avg, size


@optimizer(matrix="last")
def with_products(p, g, along=state(), within=state(), *, lr=hyper(1e-3, ge=0), beta=hyper(0.9, ge=0, lt=1)):
    along = beta * along + (1 - beta) * (gram(g + within) @ g)
    within = beta * within + (1 - beta) * (gram(within) @ g)
    p = p - lr * along
    return p, along, within


def test_a_product_is_an_input_of_a_state_or_hides_how_it_recurs() -> None:
    along, within = (recurrence(with_products, None, s.name) for s in with_products.states)
    assert (along.kind, along.decay_at(with_products), within.kind) == ("ema", 0.9, "other")


@pytest.mark.parametrize("spec", [compared_with_nan, of_comparisons], ids=lambda spec: spec.name)
def test_what_sympy_cannot_read_is_of_no_known_kind_and_takes_no_time(spec: Spec) -> None:
    began = time.process_time()
    assert [recurrence(spec, None, s.name).kind for s in spec.states] == ["other", "other"]
    assert time.process_time() - began < 2


# -- soundness
def test_a_spec_needs_no_torch_and_no_sympy() -> None:
    python("""
        import sys
        from specs.adamw import adamw
        adamw.check()
        assert not {"torch", "sympy", "numpy"} & set(sys.modules), set(sys.modules)
    """)


def test_matrices_are_not_checked_by_numbers_where_there_is_no_torch() -> None:
    said = python("""
        import sys, warnings
        sys.modules["torch"] = None
        from specs.soap import soap
        with warnings.catch_warnings(record=True) as found:
            soap.check()
        print(*sorted({str(x.message) for x in found}), sep=", ")
    """)
    assert said == "torch is not installed: traits and halves of matrices are not checked by numbers\n"


def test_records_are_generated_where_there_is_no_torch() -> None:
    lines = dedent("""
        from optgen.driver import load, record_text
        for name in ("adamw", "lamb"):
            print(record_text.rule_lines(load.find_spec(name), "fast"))
    """)
    assert python('import sys\nsys.modules["torch"] = None\n' + lines) == python(lines)


def test_settings_that_a_needed_hyper_parameter_rules_out_do_not_exist() -> None:
    both = [(s["nesterov"], s["has_momentum"]) for s in spec_of("sgd").settings()]
    assert sorted(both) == [(False, False), (False, True), (True, True)]


# -- rules that must not become optimizers
def refused(spec: Spec) -> UserError:
    with pytest.raises(UserError) as caught:
        spec.check()
    return caught.value


@pytest.mark.parametrize(
    ("eps", "code"), [(1e-30, ""), (1.2e-38, ""), (1.1e-38, "E140"), (1e-44, "E140"), (1e-60, "E140")]
)  # the smallest normal number of fp32 is 1.18e-38; fast maths may take what is below it for 0
def test_a_guard_counts_as_fp32_has_it(eps: float, code: str) -> None:
    @optimizer(cite="nobody")
    def guarded(p, g, *, lr=hyper(1e-3, ge=0), eps=hyper(eps, ge=0)):
        p = p - lr * g / (abs(g) + eps)
        return p

    if code:
        assert refused(guarded).code == code
    else:
        guarded.check()


@pytest.mark.parametrize(
    ("far", "code"),
    [
        (lambda x: 1 / (1 - sigmoid(x)), "E140"), (lambda x: rsqrt(1 - tanh(x)), "E140"),
        (lambda x: x / (1 - tanh(x) + 1e-6), ""), (lambda x: 1 / (1 - sigmoid(clip(x, -9.0, 9.0))), ""),
        (lambda x: where(abs(x) < 9, 1 / (1 - tanh(x / 9)), 0.0), ""), (lambda x: exp(x) * tanh(x), ""),
        (lambda x: log(exp(-x * x)), "E140"), (lambda x: 1 / exp(-9 * abs(x)), "E140"),
        (lambda x: log(1 + exp(-x)), ""),
    ],
)  # fmt: skip
def test_constants_far_out_divide_nothing(far: Any, code: str) -> None:
    @optimizer(cite="nobody")
    def reaching(p, g, m=state(), *, lr=hyper(1e-3, ge=0)):
        m = 0.9 * m + 0.1 * g
        p = p - lr * far(m)
        return p, m

    if code:
        assert refused(reaching).code == code
    else:
        reaching.check()


def test_rules_of_long_chains_and_towers_are_checked_and_never_read_as_a_tree() -> None:
    @optimizer(cite="nobody")
    def long(p, g, *, lr=hyper(1e-3, ge=0)):
        for _ in range(1200):
            g = g * 0.9 + lr
        for _ in range(40):
            g = sigmoid(g) * tanh(g)  # two readings of each would be 2^40
        p = p - lr * g
        return p

    long.check()
    assert "lr" in record_text.rule_text(long, "fast")


def test_long_chains_and_towers_have_short_names() -> None:
    chain = tower = ir.sym("lr")
    for _ in range(1200):
        chain = ir.op("add", ir.op("mul", chain, ir.const(0.99)), ir.sym("lr"))
    for _ in range(60):
        tower = ir.op("mul", tower, tower)  # two readings of each would be 2^60
    assert name_for(chain, "named") == name_for(tower, "named") == "named"
    assert name_for(ir.op("neg", ir.op("mul", ir.sym("lr"), ir.sym("wd"))), "named") == "minus_lr_times_wd"
