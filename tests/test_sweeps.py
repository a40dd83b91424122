"""Steps of several sweeps: where they are cut, what crosses a cut, and what is read back rather than computed again."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from optgen.driver import explain, load, targets, triton_text
from optgen.driver.explain import Pass
from optgen.driver.targets import Case
from optgen.formats import Blocked, LogMinMax, Plan
from optgen.lang import elements, hyper, nonneg, norm, optimizer, sqrt, state, tensor_state
from optgen.lang.spec import Spec
from optgen.runtime.gpu.walk import KernelSweep
from optgen.runtime.records import Variant
from optgen.runtime.step import launch
from specs import plans
from specs.came import came
from specs.lamb import lamb
from tests import harness


def sweeps(spec: Spec, plan: str = "fp32_master") -> tuple[Pass, ...]:
    """The sweeps of bf16 weights, flags by default."""
    return explain.explain(spec, getattr(plans, plan)).sweeps


def test_lamb_takes_two_sweeps() -> None:
    """Both norms need all of the tensor: one sweep leaves their partial sums, the next one applies the update."""
    first, last = sweeps(lamb)
    assert [kind.split()[0] for kind in first.reduces] == ["tensor_sum"] * 2
    assert last.reduces == ()
    assert set(first.reads) == {"p", "weight_master", "g", "exp_avg", "exp_avg_sq"}
    assert set(last.writes) == {"p", "weight_master"}


def test_moments_that_later_sweeps_need_are_stored_early_where_that_moves_fewer_bytes() -> None:
    """Reading a stored moment costs 1 byte where computing it again costs the gradient's 2 and the old moment's 1."""
    first, last = sweeps(lamb, "int8_split24")
    assert {"exp_avg_codes", "exp_avg_sq_codes"} <= first.writes.keys()
    assert "g" not in last.reads
    assert first.bytes + last.bytes == pytest.approx(17.1875)


@optimizer()
def sized(p, g, idle=state(), *, lr=hyper(1e-2, ge=0)):
    p = p - lr * g / elements(p)
    return p, idle


@optimizer()
def rated(p, g, rate=tensor_state(init=0.5), idle=state(), *, lr=hyper(1e-2, ge=0)):
    p = p * (1 - lr) - rate * g
    return p, rate, idle


@optimizer()
def scaled(p, g, m=state(), *, lr=hyper(1e-2, ge=0)):
    m = lr * g
    p = p - m * norm(g)
    return p, m


@optimizer()
def rooted(p, g, v=state(nonneg), *, lr=hyper(1e-2, ge=0)):
    v = 0.9 * v + 0.1 * g * g
    p = p - lr * norm(g * norm(g)) * sqrt(v)
    return p, v


@pytest.mark.parametrize(
    ("rule", "plan", "buffers"),
    [
        (sized, "fp32", ["p", "g"]), (rated, "fp32", ["p", "g"]), (scaled, "fp32", ["g", "m"]),
        (rooted, "lpmm4", ["g"]),
    ],
    ids=lambda x: getattr(x, "name", None),
)  # fmt: skip
def test_a_sweep_lists_what_it_touches_and_reads_back_no_gradient_and_no_means(
    rule: Spec, plan: str, buffers: list[str]
) -> None:
    made = sweeps(rule, plan)
    assert [*(made[0].reads | made[0].writes)] == buffers


def moved(record: KernelSweep) -> float:
    """Bytes per parameter that a sweep loads and stores; gradients are bf16."""
    values = record.values
    taken = {*range(record.taken)}
    taken |= {values[i].base for i in taken if values[i].base >= 0}
    touched = [i for k in taken for i in values[k].fields] + [i for k, _ in record.stores for i in values[k].fields]
    total = 0.0
    for i in touched:
        bits = 16 if record.buffers[i][1] is None else record.buffers[i][1].primitive_bitwidth
        of = {"": 1, "block": record.block, "eight": 8}.get(record.kind(i))
        total += bits / 8 / of if of else 0
    return total


@pytest.mark.parametrize(
    ("name", "flags", "most"),
    [
        ("lamb", {}, 17.5),
        ("came", {}, 15.5),
        ("stable_adamw", {}, 14.5),
        ("adafactor_paper", {"scale_parameter": False, "relative_step": False}, 12.0),
        ("adafactor", {}, 15.0),  # with the size of the weight at every step, which is 3 bytes more
        ("sm3", {}, 14.5),
        ("muon", {}, 14.1),
    ],
)
def test_kernels_move_what_explain_says(name: str, flags: dict[str, bool], most: float, tmp_path: Path) -> None:
    """bf16 weights and gradients under int8_split24."""
    spec = load.find_spec(name)
    said = explain.explain(spec, plans.int8_split24, "bfloat16", flags)
    case = explain.case_of(spec, plans.int8_split24, "bfloat16", flags)
    variant, kernels = compiled(spec, plans.int8_split24, case, tmp_path)
    sweeps = [kernels.CONSTANTS[s.kernel]["SWEEP"] for s in variant.stages if s.space == "elem"]
    assert sum(map(moved, sweeps)) == pytest.approx(said.traffic)
    assert said.traffic <= most


def compiled(spec: Spec, plan: Plan, case: Case, folder: Path) -> tuple[Variant, Any]:
    """The variant of a case, and the kernels of its pair."""
    load_module = partial(harness.module, folder)
    pair, kernels = triton_text.joined(spec, plan, "fast", load_module)
    return next(v for v in pair.variants if v.function == targets.case_name(spec, case)), kernels


def kernels_of_wide_blocks(block: int, folder: Path) -> Any:
    """CAME's."""
    plan = plans.int8_split24.but(signed=Blocked(8, block), nonneg=LogMinMax(8, block), name="wide")
    return compiled(came, plan, next(targets.cases(came, plan)), folder)[1]


@pytest.mark.parametrize(("block", "registers"), [(64, 144), (1024, 128), (2048, 64)])
def test_no_kernel_is_left_more_registers_than_its_warps_can_start_with(
    block: int, registers: int, tmp_path: Path
) -> None:
    """A processor of NVIDIA's has 65,536: 64 for each of 1024 threads, whatever the plan and the device say."""
    made = kernels_of_wide_blocks(block, tmp_path)
    told = {name: launch.limits(made, name, 10)["maxnreg"] for name in made.OPTIONS}
    assert {told[name] for name in told if name.endswith("_10")} == {registers}  # those that walk panels
    for name, limit in told.items():
        assert limit * 32 * made.WARPS.get(name, 1) <= 65536
