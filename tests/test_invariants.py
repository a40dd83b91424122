"""Invariants of every rule under every plan: rates and gradients of 0, dead rows and columns, the loss's unit, order.

A daily run draws rules and plans (OPTGEN_SAMPLE_SEED repeats it); `full` has all of both.  The tables name the rules
that are made otherwise, with the reason.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import random
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from optgen.by_name import class_of, list_rules
from optgen.formats import Plan
from optgen.ir.node import postorder
from optgen.lang.spec import Spec
from optgen.runtime.records.series import Series
from specs import plans
from tests.harness import ROOT, param_dtype, plan_of, same_bits, spec_of

pytestmark = pytest.mark.filterwarnings("ignore")  # of plans that round slow averages to nearest

RULES = list_rules()
PLANS = [name for name, value in vars(plans).items() if isinstance(value, Plan)]
BASES = "apollo conda dion fira galore kl_shampoo psgd_kron shampoo soap soap_muon splus".split()
"""Rules that keep bases, roots or projectors of matrices."""
SHAPES = {"w": (70, 64), "v": (70,)}
"""A matrix whose states have few bits, and a vector."""

GOES_ON = {
    "a2grad": "p is a point between two sequences",
    "accsgd": "p is a point between two sequences",
    "asgd": "a step has the rate that the one before left, as in torch",
    "innaprop": "the momentum is a velocity, which has the rate in it",
    "lars": "the momentum has the rate in it",
    "lookahead_adamw": "every k-th step goes to slow weights",
    "madgrad": "p comes nearer to what the sums say",
    "schedule_free_adamw": "p comes nearer to the average",
    "schedule_free_sgd": "p comes nearer to the average",
    "soap_muon": "p is ahead of the weights by an average of their changes, which decays",
    "srsgd": "p is a point between two sequences",
}
"""Rules whose later steps at lr = 0 move weights; docs/contract.md names them."""

READ_AS_OTHERS = {"flashoptim": "half an ulp below a power of two is written in units of the ulp above it"}
"""Plans whose codes of a weight may be others than those it was read from."""

DRIFTS = {
    "ftrl": "a weight without gradients is 0",
    "nero": "centres rows and divides them by their norms",
}
"""Rules that move weights without gradients."""

DECAYS = {"asgd": "lambd", "scion": "lr is the part of the way to a weight of its own norm"}
"""Rules that decay without an option weight_decay."""

HAS_ZEROS = {"bnb8", "torchao8", "torchao_fp8"}
"""Plans of other packages whose small second moments are codes of 0 beside first ones that are not: steps are those
over eps."""

LAWLESS = {
    "a2grad": "its rate is of the gradients' differences, beside a constant",
    "acprop": "the first step is SGD's",
    "adabound": "it ends as SGD",
    "adamg": "the numerator is a power of the second moment",
    "adai": "eps bounds a decay",
    "adatam": "eps is beside a root and a number without a unit",
    "adasmooth": "eps is beside squares of gradients and lengths of steps",
    "aida": "eps is beside a square and a root",
    "asgd": "decay by lambd goes with the rate",
    "dadapt_adagrad": "the sum of squares begins with a constant",
    "diffgrad": "the sigmoid of a change of the gradient",
    "dual_adam": "a share of the step is multiplied by the root that another is divided by",
    "exadam": "eps is beside squares and a root",
    "kl_shampoo": "eigenvalues begin at init_factor",
    "lion_k": "e is a bound of the momentum",
    "madgrad": "the divisor is a cube root",
    "padam": "the divisor is a power of the second moment",
    "polargrad": "matrices have steps as SGD's, vectors as AdamW's",
    "psgd_kron": "factors begin with 1",
    "racs": "means of columns begin with 1",
    "sadam": "sharpness is of the root of the second moment",
    "vsgd": "the prior's strength is beside squares of gradients",
    "yogi": "the second moment begins with a constant",
}
"""Rules whose steps have no power of the gradients' unit."""


COARSE = {
    "int4_split24", "int4_factored_split24", "int5_factored_split24", "lpmm4", "lpmm4_factor",
    "torchao4",
}  # fmt: skip
"""Plans that keep a moment in 4 bits or fewer, or the second one as factors."""

FACTORED = {"int4_factored_split24", "int5_factored_split24", "lpmm4_factor"}
"""Those of factors."""

LONG = {
    "acprop": ({"flashoptim"}, "divides by the root of before, which may read as 0"),
    "adadelta": ({"int4_split24", "int5_split24", "int6_split24"}, "steps grow by what rounding adds to their mean"),
    "adahessian": ({"flashoptim"}, "divides by the root of the input's squares, which may read as 0"),
    "adai": (FACTORED, "divides by an average that begins at 0, which these keep as factors"),
    "dadapt_adagrad": (COARSE, "the weight is a sum over a root and has the noise of the sum"),
    "ftrl": (set(PLANS), "the weight is a sum over a root and has the noise of the sum"),
    "grokfast_adamw": ({"torchao4"}, "adds twice an average of gradients that is rounded to 16 codes: 2.51"),
    "prodigy": ({"flashoptim"}, "squares of 1e-6 of a gradient are below what fp16 scales hold"),
    "rprop": (COARSE, "a rate goes up to the next code"),
}
"""Rules that step further in few bits than in fp32 under some plans, and why."""

NOT_IN_FEW_BITS = {"swats": "when it turns to SGD depends on errors of codes"}
"""Rules that few bits may send another way by what their noise decides."""


@cache
def spaces(rule: str) -> set[str]:
    """The spaces of a rule's values."""
    trace = spec_of(rule).trace()
    return {str(node.space) for node in postorder([*trace.states.values(), trace.p])}


def cells(count: int, rules: Sequence[str] = RULES) -> Any:
    """Rules and plans of a test: so many of these every day, each under a drawn plan; `full` has all of both."""
    draw = random.Random(f"{os.environ['OPTGEN_SAMPLE_SEED']} {count} {rules}")
    some = [(rule, draw.choice(PLANS)) for rule in draw.sample(rules, count)]
    daily = [pytest.param(rule, [plan], id=f"{rule}-{plan}") for rule, plan in some]
    full = [pytest.param(rule, PLANS, id=rule, marks=pytest.mark.full) for rule in rules]
    return pytest.mark.parametrize(("rule", "names"), daily + full)


def longest(rule: str, plan: str) -> float:
    """Return the factor by which a rule's largest step may be longer under a plan than in fp32."""
    if plan in HAS_ZEROS or plan in LONG.get(rule, ((), ""))[0]:
        return math.inf
    return 2.5 if plan in COARSE and rule not in BASES else 2


def normal(*key: object) -> Tensor:
    """Normal numbers in the shape of a parameter, by its name and a further key."""
    draw = torch.Generator().manual_seed(random.Random(repr(key)).getrandbits(40))
    return torch.randn(SHAPES[str(key[0])], generator=draw)


class Run:
    """A rule under a plan, with drawn weights and gradients; in fp32, or in bf16 under a plan for that."""

    def __init__(
        self, rule: str, plan: str, order: Sequence[str] = tuple(SHAPES), groups: bool = False, full: bool = False,
        **options: Any,
    ) -> None:
        dtype = torch.float32 if full else param_dtype(plan)
        self.spec: Spec = spec_of(rule)
        self.weights = {k: nn.Parameter(normal(k, "weight").mul(0.1).to(dtype)) for k in SHAPES}
        named = [(k, self.weights[k]) for k in order]
        hypers = {h.name for h in self.spec.hypers}
        given = [{"params": [pair]} for pair in named] if groups else named
        options = {k: v for k, v in options.items() if k in hypers}
        self.opt = class_of(rule)(given, plan=plan, backend="reference", **options)
        self.rate = self.opt.param_groups[0]["lr"]
        self.order = order

    def step(self, t: int, change: Callable[[str, Tensor], Tensor] = lambda k, g: g, rate: float = 1.0) -> None:
        for group in self.opt.param_groups:
            group["lr"] = rate * self.rate
        for k, p in self.weights.items():
            p.grad = change(k, normal(k, t)).to(p.dtype)
        for x in self.spec.inputs:
            self.opt.feed(**{x: {p: change(k, normal(k, f"{t} fed")).to(p.dtype) for k, p in self.weights.items()}})
        self.opt.step()

    def full(self) -> dict[str, Tensor]:
        return dict(zip(self.order, [x.clone() for x in self.opt.full_weights()], strict=True))

    def stored(self) -> dict[str, Tensor]:
        return {k: p.detach().clone() for k, p in self.weights.items()}

    def largest(self, before: dict[str, Tensor]) -> float:
        return max(float((p.detach() - before[k]).abs().max()) for k, p in self.weights.items())


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(same_bits(a[k], b[k]) for k in a)


@cells(10)
def test_a_rate_of_0_moves_nothing(rule: str, names: list[str]) -> None:
    """Bits of the weights: at the first step, as torch.distributed.checkpoint takes one, and later."""
    for plan in names:
        run = Run(rule, plan)
        before = run.stored()
        run.step(0, rate=0.0)
        assert same(run.stored(), before), plan
        run = Run(rule, plan)
        for t in range(3):
            run.step(t)
        known = run.full()
        run.step(3, rate=0.0)
        assert rule in GOES_ON or plan in READ_AS_OTHERS or same(run.full(), known), plan


def test_the_page_names_the_rules_whose_later_steps_go_on_at_a_rate_of_0() -> None:
    text = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")
    said = text.partition("**A step at `lr=0`**")[2].partition("\n- **")[0]
    assert sorted({*re.findall(r"`(\w+)`", said)} & {*RULES}) == sorted(GOES_ON)


def other(x: float, hyper: Any) -> float | None:
    """Return another number in the range of a hyper-parameter, or None."""
    return next((y for y in (0.75 * x, 1.25 * x, 0.01) if y != x and hyper.allows(y)), None)


NUMBERS: tuple[Callable[[float], Any], ...] = (float, np.float64, lambda x: torch.tensor([x], dtype=torch.float64))


@cells(6)
def test_numbers_of_any_kind_are_read_again_at_each_step(rule: str, names: list[str]) -> None:
    """One that is changed in the group makes the step of an optimizer that was made with it and has the same states.
    Of lr tests/test_rates.py asks that, of series tests/test_matrices.py; whole numbers stay, and so do zeros that a
    flag goes by."""
    draw, cls = random.Random(f"{os.environ['OPTGEN_SAMPLE_SEED']} {rule}"), class_of(rule)
    fixed = {"lr", *(h.name for h in cls.HYPERS if isinstance(h, Series)), *(flag.every for flag in cls.FLAGS)}
    for plan in names:
        begun = Run(rule, plan)
        for t in range(2):
            begun.step(t)
        for h in cls.HYPERS:
            if h.name in fixed or h.whole or isinstance(h.default, bool):
                continue
            parts = h.default if isinstance(h.default, tuple) else (h.default,)
            new = [other(x, h) for x in parts]
            if None in new or (0 in parts and any(flag.nonzero == h.name for flag in cls.FLAGS)):
                continue
            kind = draw.choice(NUMBERS)
            value, given = (tuple(map(f, new)) if isinstance(h.default, tuple) else f(new[0]) for f in (float, kind))
            runs = Run(rule, plan), Run(rule, plan, **{h.name: value})
            runs[0].opt.param_groups[0][h.name] = given
            for run in runs:
                for k, p in run.weights.items():
                    p.data.copy_(begun.weights[k].data)
                    run.opt.state[p] = copy.deepcopy(dict(begun.opt.state[begun.weights[k]]))
                run.step(2)
            assert same(runs[0].full(), runs[1].full()), (plan, h.name, given)


@cells(8)
def test_without_gradients_weights_decay_at_most(rule: str, names: list[str]) -> None:
    """And a gradient that comes later makes a step."""
    for plan in names:
        run = Run(rule, plan, weight_decay=0.0)
        before = run.stored()
        for t in range(3):
            run.step(t, lambda k, g: 0 * g)
        assert rule in DRIFTS | DECAYS or same(run.stored(), before), plan
        run = Run(rule, plan)
        for t in range(3):
            run.step(t, lambda k, g: 0 * g)
        now = run.stored()
        shrunk = [(x.abs() <= before[k].abs()) & (x * before[k] >= 0) for k, x in now.items()]
        assert rule in DRIFTS or all(x.all() for x in shrunk), plan
        run.step(3)
        run.step(4)
        assert all(x.isfinite().all() for x in run.full().values()), plan


@cells(5)
def test_dead_rows_and_columns(rule: str, names: list[str]) -> None:
    """Few bits move no element further in a step than twice as far as fp32, 2.5 times in coarse plans, 3 by factors."""
    for plan in names:
        draw = random.Random(f"{os.environ['OPTGEN_SAMPLE_SEED']} {rule} {plan}")
        rows, columns = (draw.sample(range(n), draw.randint(1, 6)) for n in SHAPES["w"])
        size = 10.0 ** draw.uniform(-3, 3)

        def dead(k: str, g: Tensor, rows: list[int] = rows, columns: list[int] = columns, size: float = size) -> Tensor:
            g = g * size
            g[rows] = 0
            if g.ndim == 2:
                g[:, columns] = 0
            return g

        found = []
        for name in ("fp32", plan):
            run, steps = Run(rule, name, full=True, weight_decay=0.0), []
            for t in range(24):
                before = run.stored()
                run.step(t, dead)
                steps.append(run.largest(before))
            found.append(max(steps))
        most, few = found
        # A factored second moment is a mean of a row's and of a column's: of 4,480 normal gradients the largest is 3.7
        # times its root, where fp32's first step is the rate for each.
        allowed = longest(rule, plan) * (1.2 if plan in FACTORED else 1)
        assert few <= allowed * most, (plan, few, most)


def scaled(rule: str, plan: str, unit: float, power: int, of_eps: int) -> tuple[dict[str, Tensor], float]:
    """The weights after gradients times a unit, rates divided by a power of it and eps times one; how far they went."""
    of = {h.name: h.default for h in spec_of(rule).hypers}
    eps = of.get("eps", 0.0)
    new = tuple(x * unit**of_eps for x in eps) if isinstance(eps, tuple) else eps * unit**of_eps
    run = Run(rule, plan, full=True, weight_decay=0.0, eps=new)
    begun = run.full()
    for t in range(4):
        run.step(t, lambda k, g: g * unit, rate=unit**-power)
    found = run.full()
    return found, max(float((found[k] - x).abs().max()) for k, x in begun.items())


def off(rule: str, plan: str, power: int, of_eps: int) -> float:
    """Return the distance of a rule from a law, as a part of its way, where the unit of the loss is 2^-8."""
    (one, way), (other, _) = (scaled(rule, plan, unit, power, of_eps) for unit in (1.0, 256.0))
    return max(float((other[k] - x).abs().max()) for k, x in one.items()) / max(way, 1e-30)


@cells(6)
def test_steps_have_a_power_of_the_losss_unit(rule: str, names: list[str]) -> None:
    """The 0th, as Adam's, the first, as SGD's, or the inverse, with eps in that unit, its square, or without one.  A
    power of 2 changes no bit then but in powers, and sums in bf16 beside an eps; few bits have the same law."""
    if rule in LAWLESS:
        return
    law = min(itertools.product((0, 1, -1), (1, 0, 2)), key=lambda x: off(rule, "fp32", *x))
    assert off(rule, "fp32", *law) <= 2**-16, "name it in LAWLESS with the reason, or mend it"
    for plan in names:
        if plan in ("bf16_sr", "split32", "int8", "int8_split24", "int4_split24"):
            assert rule in NOT_IN_FEW_BITS or off(rule, plan, *law) <= 2**-16, plan


@cells(8)
def test_order_is_no_matter(rule: str, names: list[str]) -> None:
    """Permute parameters and groups under all plans, and in fp32 rows of a rule whose elements know of no other."""
    for plan in names:
        runs = [Run(rule, plan), Run(rule, plan, order=("v", "w"), groups=True)]
        for run, t in itertools.product(runs, range(3)):
            run.step(t)
        first, second = (run.full() for run in runs)
        close = all(torch.allclose(second[k].float(), x.float(), rtol=1e-3, atol=1e-6) for k, x in first.items())
        assert close if "model" in spaces(rule) else same(first, second), plan
    if spaces(rule) <= {"host", "elem"} and rule not in DRIFTS:
        order, runs = torch.randperm(70, generator=torch.Generator().manual_seed(0)), [Run(rule, "fp32") for _ in "ab"]
        for p in runs[1].weights.values():
            p.data = p.data[order]
        for t in range(3):
            runs[0].step(t)
            runs[1].step(t, lambda k, g: g[order])
        assert same({k: x[order] for k, x in runs[0].full().items()}, runs[1].full())


@cells(0)
def test_few_bits_step_as_far_as_fp32_in_a_network_with_dead_units(rule: str, names: list[str]) -> None:
    """At most twice as far, 2.5 times in coarse plans, in 200 steps of two layers of whose 192 units 3 are dead."""

    def largest(plan: str) -> float:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 192), nn.ReLU(), nn.Linear(192, 8))
        nn.init.constant_(net[0].bias[[5, 17, 100]], -1e3)
        teacher, data = torch.randn(64, 8) / 8, torch.Generator().manual_seed(1)
        opt, most = class_of(rule)(net.named_parameters(), plan=plan, backend="reference"), 0.0
        for _ in range(200):
            x = torch.randn(32, 64, generator=data)
            before = [p.detach().clone() for p in net.parameters()]
            opt.zero_grad()
            loss = (net(x) - torch.tanh(x @ teacher)).square().mean()
            loss.backward()
            for k in spec_of(rule).inputs:
                opt.feed(**{k: {p: p.grad.square() for p in net.parameters()}})
            opt.step()
            now = zip(net.parameters(), before, strict=True)
            most = max(most, *(float((p.detach() - b).abs().max()) for p, b in now))
        return most

    right, known = largest("fp32"), set[object]()
    for plan in names:
        kept = plan_of(plan)
        alike = kept.signed, kept.nonneg, kept.initial, kept.small
        if plan in HAS_ZEROS or alike in known:  # which have no bound, or keep the states of fp32 weights alike
            continue
        known.add(alike)
        assert largest(plan) <= longest(rule, plan) * right, (plan, right)
