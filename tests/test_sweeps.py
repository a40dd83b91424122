"""Steps of several sweeps: where they are cut, what crosses a cut, and what is read back rather than computed again."""

from __future__ import annotations

import pytest
from test_lang import lamb

from optgen import passes
from optgen.driver.explain import why_last
from optgen.ir.program import Step
from optgen.lang.spec import Spec
from optgen.lower import lower
from optgen.ops import dtypes
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
    assert {"m", "v"} <= {b.buffer for b in first.schedule.sweep.stores}
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


def test_explain_names_the_lines_that_need_all_elements() -> None:
    """Each statistic once, at the line that takes it first; means of few values need no sweep."""
    why = why_last(step(came))
    for name, op in [("exp_avg_sq_row", "row_sum"), ("exp_avg_sq_col", "col_sum"), ("update", "tensor_sum")]:
        assert why.count(f"{name} (") == 1
        assert f"needs {op}" in why
    assert why.startswith("4 sweeps: exp_avg_sq_row (")
    assert "mat_sum" not in why
    assert "1 sweep and work on what it reduces: accumulator_row (" in why_last(step(sm3))
