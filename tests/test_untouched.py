"""States that a step gives back as it found them: it does not store them, nor read them for nothing."""

import pytest
import torch

import optgen
from optgen.driver import record_text, targets
from optgen.formats import Plan
from optgen.lang import Spec, flag, hyper, nonneg, optimizer, sqrt, state
from optgen.lower import lower_rule, untouched
from optgen.ops import dtypes
from optgen.verify.differential import Trial
from specs import plans
from tests import harness

DAILY = ("fp32", "bf16_sr", "split32", "int8_split24", "int4_split24", "flashoptim", "lpmm4", "torchao4")
"""Plans of formats of every kind; the rest is asked by `make test-full`."""
PLANS = [
    pytest.param(name, marks=[] if name in DAILY else pytest.mark.full)
    for name in sorted(name for name, value in vars(plans).items() if isinstance(value, Plan))
]


@optimizer(cite="none", name="Resting")
def resting(
    p, g, m=state(normalized_by="v"), v=state(nonneg), n=state(), start=state(init="param"), *,
    lr=hyper(1e-2, ge=0), beta=hyper(0.9, ge=0, lt=1), k=hyper(3, ge=1), now=flag(every="k")
):  # fmt: skip
    """Two moments of every k-th gradient, and the weight as it began."""
    if now:
        m = beta * m + (1 - beta) * g
        v = beta * v + (1 - beta) * g * g
    n = beta * n + (1 - beta) * g
    p = p - lr * (n + m + (p - start))
    return p, m, v, n, start


@optimizer(cite="none", name="Relative")
def relative(
    p, g, m=state(normalized_by="v"), v=state(nonneg), *,
    lr=hyper(1e-2, ge=0), beta=hyper(0.9, ge=0, lt=1), k=hyper(2, ge=1), now=flag(every="k")
):  # fmt: skip
    """Moments in turns: the first one of every k-th gradient, the second of the others."""
    if now:
        m = beta * m + (1 - beta) * g
    else:
        v = beta * v + (1 - beta) * g * g
    p = p - lr * m / (sqrt(v) + 1e-8)
    return p, m, v


def stored(spec: Spec, plan: str, flags: dict[str, bool]) -> set[str]:
    """The values that a step of bf16 weights stores, by the records and by the lowering alike."""
    case = harness.case_of(spec, harness.plan_of(plan), "bfloat16", flags)
    known = record_text.variants(spec, case.storage.plan)
    variant = next(x for x in known if x.function == targets.case_name(spec, case))
    assert set(variant.eager.still) == untouched(spec, case.storage, flags)
    rule = lower_rule(spec, flags)
    assert {b.name for b in rule.buffers if b.writes} == {store.buffer for store in rule.stores}
    return {"p", *variant.states} - {*variant.eager.still}


@pytest.mark.parametrize("plan", PLANS)
def test_between_its_steps_a_state_keeps_every_bit(plan: str) -> None:
    """Codes and scales, of the state that another is kept relative to as well."""
    cls = optgen.compile(resting, plan=plan)
    p = torch.nn.Parameter(torch.randn(70, 90).bfloat16())
    opt = cls([p], plan=plan, backend="reference")
    before: dict[str, torch.Tensor] = {}
    for t in range(1, 7):
        p.grad = torch.randn_like(p)
        opt.step()
        now = {k: x.clone() for k, x in opt.state[p].items() if isinstance(x, torch.Tensor)}
        changed = {k.split("_")[0] for k in before if not harness.same_bits(before[k], now[k])}
        if t > 1:
            assert changed - {"weight"} == ({"m", "v", "n"} if t % 3 == 0 else {"n"}), t
        before = now


def test_a_state_is_stored_again_where_what_it_is_kept_relative_to_changes() -> None:
    assert stored(relative, "int8_split24", {"now": False}) == {"p", "m", "v"}
    assert stored(relative, "int8_split24", {"now": True}) == {"p", "m", "v"}
    assert stored(relative, "bf16_sr", {"now": True}) == {"p", "m"}
    assert stored(relative, "bf16_sr", {"now": False}) == {"p", "v"}
    assert stored(resting, "int8_split24", {"now": False}) == {"p", "n"}


@pytest.mark.parametrize("plan", ["bf16_sr", "int8_split24", "int5_split24"])
@pytest.mark.parametrize("spec", [resting, relative], ids=lambda s: s.name)
def test_steps_of_both_kinds_keep_to_their_bounds(spec: Spec, plan: str) -> None:
    cls = optgen.compile(spec, plan=plan)
    found = Trial(cls, spec, torch.randn(44, 96), dtype=torch.bfloat16, plan=plan)  # large enough for codes
    storage = found.storage(harness.plan_of(plan), targets.recurrences_of(spec, (("now", False),)))
    for _ in range(7):
        report = found.check_step(storage, torch.randn(44, 96).bfloat16())
        assert report.ok, [report.worst[name] for name in report.broken]


@optimizer(cite="none", name="FreshBase")
def fresh_base(
    p, g, m=state(normalized_by="v"), v=state(nonneg), *,
    lr=hyper(1e-2, ge=0), beta=hyper(0.9, ge=0, lt=1), k=hyper(3, ge=1), now=flag(every="k")
):  # fmt: skip
    """A momentum of every gradient, kept relative to squares of every k-th."""
    m = beta * m + (1 - beta) * g
    if now:
        v = beta * v + (1 - beta) * g * g
    p = p - lr * m
    return p, m, v


@pytest.mark.parametrize("plan", ["int8_split24", "int4_split24"])
def test_what_a_moving_state_is_kept_relative_to_is_stored_with_it(plan: str) -> None:
    """As it began, its scale reads as 0, by which the other was divided; encoded, as the smallest there is."""
    held = getattr(plans, plan)
    off, on = ({"now": now} for now in (False, True))
    storage = held.storage(fresh_base.present(off), dtypes.bf16, False)
    assert untouched(fresh_base, storage, off) == untouched(fresh_base, storage, on) == set()
    p = torch.nn.Parameter(torch.ones(8, 128).bfloat16())
    opt = optgen.compile(fresh_base, plan=held)([p], backend="reference")
    for step in range(5):
        p.grad = torch.full_like(p, 1.0 + step)
        opt.step()
        assert p.isfinite().all()
    assert (p < 1).all()
