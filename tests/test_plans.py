"""Plans: what they store, in how many bytes, by which name; and what does not fit is refused."""

import re
import warnings

import pytest
import torch
from torch import nn

from optgen.base.errors import UserError
from optgen.formats import Blocked, Factored, LogMinMax, Plan, f32, floats
from optgen.lang.spec import Recurrence
from optgen.ops import dtypes
from optgen.optim import AdamW
from specs import plans
from specs.adamw import adamw

ALL = [p for p in vars(plans).values() if isinstance(p, Plan)]
STATES = adamw.present({f.name: False for f in adamw.flags})
EXPECTED = (
    "fp32 bf16 bf16_sr fp32_master split32 int8_split24 int6_split24 int5_split24 int4_split24 "
    "int8 int8_rn_split24 flashoptim bnb8 torchao8 torchao4 torchao_fp8 lpmm4 lpmm4_factor "
    "int4_factored_split24 int5_factored_split24"
).split()

each_plan = pytest.mark.parametrize("plan", ALL, ids=lambda p: p.name)


def test_every_plan_is_there_under_its_own_name() -> None:
    assert [p.name for p in ALL] == EXPECTED
    assert all(getattr(plans, p.name) is p for p in ALL)


@each_plan
def test_bytes_in_the_text_are_those_derived(plan: Plan) -> None:
    found = re.search(r"([\d.]+) bytes per (fp32 )?parameter", plan.doc)
    param = dtypes.f32 if found[2] else dtypes.bf16
    assert plan.storage(STATES, param, False).bytes_per_param == float(found[1])


@each_plan
def test_small_tensors_are_kept_in_fp32_where_blocks_are_used(plan: Plan) -> None:
    small = plan.storage(STATES, dtypes.bf16, True)
    blocked = plan.storage(STATES, dtypes.bf16, False).block > 1
    assert (plan.small_numel > 0) == (blocked and plan is not plans.flashoptim)
    assert all(f == f32 for f in small.states.values())


def test_but_replaces_parts_and_takes_the_new_name() -> None:
    base = plans.int8_split24
    wide = base.but("Blocks of 256.", signed=Blocked(8, 256), nonneg=LogMinMax(8, 256))
    assert (wide.name, wide.doc, base.name) == ("wide", "Blocks of 256.", "int8_split24")
    assert wide.master == base.master
    assert wide.storage(STATES, dtypes.bf16, False).bytes_per_param == 3 + 2 * (1 + 2 / 256)
    twice = wide.but(overrides={"a": f32}).but(overrides={"b": f32})
    assert set(twice.overrides) == {"a", "b"}
    assert Plan("Given a name.", name="given").name == "given"
    assert base.but(name="given").name == "given"
    for name in ("__init__", "__pycache__", "lambda", "two words", "1st", "a.b"):
        with pytest.raises(UserError, match="E309"):
            base.but(name=name)
    with pytest.raises(UserError, match="a number of elements, 0 or more, got True"):
        base.but(small_numel=True)
    assert wide.loc.file == __file__


def _warned(*shapes: tuple[int, ...], plan: str, **options: object) -> list[str]:
    """The warnings of constructing an optimizer, which must point here."""
    params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        AdamW(params, plan=plan, **options)
    assert {w.filename for w in caught} <= {__file__}
    return [str(w.message) for w in caught]


def test_constructing_an_optimizer_under_a_discouraged_plan_warns_once() -> None:
    (said,) = _warned((64, 64), (64, 128), plan="bf16")
    assert said.startswith("AdamW: plan 'bf16' is discouraged: `exp_avg_sq`: the average freezes")
    assert said.endswith("such as 'int8_split24'; `optgen check adamw` lists those without an error")
    assert not _warned((64, 64), plan="bf16_sr")


def test_a_discouraged_plan_warns_of_states_that_it_keeps_only() -> None:
    assert not _warned((4, 4), plan="bnb8")  # small tensors have fp32 states
    assert _warned((4, 4), (64, 64), plan="bnb8")
    assert not _warned((64, 64), plan="int8_split24", overrides={"numel < 9999": "int8_split24"})
    assert _warned((64, 64), plan="int8_split24", overrides={"numel < 9999": "bf16"})


def test_discouraged_plans_say_why_and_only_those_round_averages_to_nearest() -> None:
    slow = {"exp_avg": Recurrence("ema", 0.9), "exp_avg_sq": Recurrence("ema", 0.999)}
    for plan in ALL:
        kept = plan.storage(STATES, dtypes.bf16, False, slow).states.values()
        nearest = any(f.noise_bits == 0 and f != floats.f32 and not isinstance(f, Factored) for f in kept)
        assert nearest == bool(plan.discouraged), plan.name
