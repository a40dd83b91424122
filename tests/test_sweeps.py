"""Specs that look at more than one element: they parse, type and are scheduled; their kernels are refused clearly."""

from __future__ import annotations

import pytest
from test_lang import came, lamb

from optgen import passes
from optgen.base.errors import UserError
from optgen.driver.emit import emit_plan
from optgen.ir.program import Schedule
from optgen.lang.spec import Spec
from optgen.lower import lower
from optgen.ops import dtypes
from specs import plans


def schedule(spec: Spec) -> Schedule:
    flags = {f.name: True if f.shape is not None else f.default for f in spec.flags}
    storage = plans.fp32_master.storage(spec.present(flags), dtypes.bf16, False)
    return passes.run(lower(spec, flags, storage), "strict")


def test_lamb_takes_two_sweeps() -> None:
    """Both norms need all of the tensor: one sweep leaves their partial sums, the next one applies the update."""
    first, last = schedule(lamb).sweeps
    assert [p.reduction for p in first.partials] == ["tensor_sum", "tensor_sum"]
    assert set(first.reads) == {"g", "weight_master", "m", "v"}
    assert not first.stores
    assert {s.buffer for s in last.stores} == {"p", "weight_master", "m", "v"}


def test_came_takes_four_sweeps() -> None:
    """Row and column means of g^2, then the clip's norm, then the residual's means, then the update."""
    s = schedule(came)
    assert len(s.sweeps) == 4
    kinds = [{p.reduction for p in sweep.partials} for sweep in s.sweeps]
    assert {"row_sum", "col_sum"} <= kinds[0]
    assert "tensor_sum" in kinds[1]
    assert {"row_sum", "col_sum"} <= kinds[2]
    assert kinds[3] == set()


def test_traffic_counts_every_sweep() -> None:
    s = schedule(lamb)
    read, written = s.traffic
    size = {b.name: b.bytes_per_param for b in s.program.buffers}
    assert read == sum(size[name] for sweep in s.sweeps for name in sweep.reads)
    assert read > 2 * size["g"]
    assert written == size["p"] + size["weight_master"] + size["m"] + size["v"]


def test_kernels_of_several_sweeps_are_refused_with_their_code() -> None:
    with pytest.raises(UserError) as caught:
        emit_plan(lamb, plans.fp32)
    assert caught.value.code == "E410"
