"""Steps of several sweeps: where they are cut, what crosses a cut, and what is read back rather than computed again."""

from __future__ import annotations

import re
from types import ModuleType

import pytest
from test_lang import lamb

from optgen import passes
from optgen.backends import triton_stages
from optgen.driver import explain, load
from optgen.driver.explain import why_last
from optgen.formats import Blocked, LogMinMax
from optgen.ir.program import Step
from optgen.lang.spec import Spec
from optgen.lower import lower
from optgen.ops import dtypes
from optgen.runtime.step import launch
from specs import plans
from specs.came import came
from specs.sm3 import sm3


def step(spec: Spec, plan: str = "fp32_master") -> Step:
    flags = {f.name: f.default for f in spec.flags}
    storage = getattr(plans, plan).storage(spec.present(flags), dtypes.bf16, False)
    return passes.step(lower(spec, flags, storage), "strict")


def reductions(s: Step) -> list[set[str]]:
    return [{b.reduction for b in stage.schedule.partials} for stage in s.sweeps]


def test_lamb_takes_two_sweeps() -> None:
    """Both norms need all of the tensor: one sweep leaves their partial sums, the next one applies the update."""
    s = step(lamb)
    first, last = s.sweeps
    assert reductions(s) == [{"tensor_sum"}, set()]
    assert len(first.schedule.partials) == 2
    assert set(first.schedule.sweep.reads) == {"g", "weight_master", "m", "v"}
    assert {b.buffer for b in last.schedule.sweep.stores} == {"p", "weight_master"}


def test_moments_that_later_sweeps_need_are_stored_early_where_that_moves_fewer_bytes() -> None:
    """Reading a stored moment costs 1 byte where computing it again costs the gradient's 2 and the old moment's 1."""
    s = step(lamb, "int8_split24")
    first, last = s.sweeps
    assert s.early == ("m", "v")
    assert {"m_codes", "v_codes"} <= {b.buffer for b in first.schedule.sweep.stores}
    assert "g" not in last.schedule.sweep.reads
    assert sum(s.traffic) == pytest.approx(17.1875)


def test_came_takes_four_sweeps() -> None:
    """Row and column means of g^2, then the clip's norm, then the residual's means, then the update."""
    s = step(came)
    assert reductions(s) == [{"row_sum", "col_sum"}, {"row_sum"}, {"row_sum", "col_sum"}, set()]
    assert [stage.level for stage in s.sweeps] == [0, 2, 4, 6]
    assert all(stage.level % 2 == 1 for stage in s.stages if not stage.is_sweep)


@pytest.mark.parametrize(("spec", "most"), [(lamb, 17.5), (came, 15.5)], ids=["lamb", "came"])
def test_traffic_counts_every_sweep(spec: Spec, most: float) -> None:
    s = step(spec, "int8_split24")
    size = {b.name: b.bytes_per_param for b in s.program.buffers}
    read = sum(size.get(name, 0.0) for stage in s.sweeps for name in stage.schedule.sweep.reads)
    written = sum(size.get(x.buffer, 0.0) for stage in s.sweeps for x in stage.schedule.sweep.stores)
    assert s.traffic == (read, written)
    assert sum(s.traffic) <= most


def moved(text: str, function: str, s: Step) -> float:
    """Bytes per parameter that the printed kernels of a step load and store, counted in their tile functions."""
    size = {b.name: b.bytes_per_param for stage in s.stages for b in stage.schedule.program.buffers}
    total = 0.0
    for k, stage in enumerate(s.stages, 1):
        if stage.is_sweep:
            (body,) = re.findall(rf"^def {function}_{k}_tile\(.*?(?=\n\n\n|\Z)", text, re.M | re.S)
            touched = re.findall(r"\b(get|put)\((\w+)_ptr\b", body)
            assert len(touched) == len(set(touched)), "nothing is loaded or stored twice"
            total += sum(size[name] for _, name in touched)
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
def test_printed_kernels_move_what_explain_says(name: str, flags: dict[str, bool], most: float) -> None:
    """bf16 weights and gradients under int8_split24."""
    spec = load.find_spec(name)
    said = explain.explain(spec, plans.int8_split24, "bfloat16", flags)
    case = explain.case_of(spec, plans.int8_split24, "bfloat16", flags)
    s = passes.step(lower(spec, case.flags, case.storage), "fast")
    lines = triton_stages.kernels(s, "f").lines
    assert moved("\n".join(lines), "f", s) == pytest.approx(said.traffic)
    assert said.traffic <= most
    assert len(said.sweeps) == 1 or all(let in said.sweeps[-1].why for let in said.sweeps[0].why.split(", ")[:1])


def test_explain_names_the_lines_that_need_all_elements() -> None:
    """Each statistic once, at the line that takes it first; means of few values need no sweep."""
    why = why_last(step(came))
    for name, op in [("exp_avg_sq_row", "row_sum"), ("exp_avg_sq_col", "col_sum"), ("update", "tensor_sum")]:
        assert why.count(f"{name} (") == 1
        assert f"needs {op}" in why
    assert why.startswith("4 sweeps: exp_avg_sq_row (")
    assert "mat_sum" not in why
    assert "1 sweep and work on what it reduces: accumulator_row (" in why_last(step(sm3))


def kernels_of_wide_blocks(block: int) -> triton_stages.Kernels:
    """CAME's."""
    plan = plans.int8_split24.but(signed=Blocked(8, block), nonneg=LogMinMax(8, block, of="sqrt"), name="wide")
    flags = {f.name: f.default for f in came.flags}
    whole = passes.step(lower(came, flags, plan.storage(came.present(flags), dtypes.bf16, False)), "fast")
    return triton_stages.kernels(whole, "f")


@pytest.mark.parametrize("block", [64, 1024, 2048])
def test_a_panel_takes_no_more_warps_than_a_device_runs_together(block: int) -> None:
    """A panel is 16 blocks wide: where they are of 2048 elements, each of 1024 threads takes 32."""
    assert max(kernels_of_wide_blocks(block).warps.values()) == min(16 * block // 1024, 32)


@pytest.mark.parametrize(("block", "registers"), [(64, 136), (1024, 128), (2048, 64)])
def test_no_kernel_is_left_more_registers_than_its_warps_can_start_with(block: int, registers: int) -> None:
    """A processor of NVIDIA's has 65,536: 64 for each of 1024 threads, whatever the plan and the device say."""
    made, module = kernels_of_wide_blocks(block), ModuleType("kernels")
    options = {name: {"maxnreg": limit} for name, limit in made.limits.items() if limit}
    vars(module).update(OPTIONS=options, WARPS=made.warps)
    told = {name: launch.limits(module, name, 10)["maxnreg"] for name in options}
    assert max(told.values()) == registers
    for name, limit in told.items():
        assert limit * 32 * made.warps.get(name, 1) <= 65536
