"""Fast maths: the C++ kernel keeps the bound of fast maths, and a code differs from strict by one at most."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from optgen.formats import Float
from optgen.runtime import native
from optgen.runtime.keys import step_key
from optgen.verify.intervals import FAST
from tests import harness, product
from tests.product import Cell
from tests.test_properties import _trained, build, code_distance, draws, gradient

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler")

ISAS = [isa.name for isa in native.ISAS if isa.needs <= native.cpu_flags() and isa.name != "avx512"]
CELLS = [
    *(Cell("adamw", plan) for plan in ("fp32", "int8_split24", "int8_rn_split24", "flashoptim", "bf16_sr")),
    Cell("adamw", "int8_split24", "float16"),
    Cell("lion", "int8_split24"),
    *(Cell(name, "int8_split24") for name in ("adagrad", "adamax", "adan", "radam", "yogi")),
]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_within_its_bound_of_the_oracle_and_a_code_of_strict(cell: Cell, isa: str, tmp_path: Path) -> None:
    """From strict's state and random bits: only a value beside a threshold takes another code."""
    built = build(cell)
    pair = harness.Pair(built.spec, built.compiled.strict, tmp_path, kernels=built.compiled.fast)
    run, _ = _trained(built, (9, 256), 9)
    draw = draws(cell, 10)
    for _ in range(3):
        g = gradient(run.buffers["p"], 1e-2, draw, cell.param)
        fast, step = run.copy(), run.steps + 1
        items = [(fast.buffers, g, run.stream)]
        pair.run_cpp(items, step, step_key(run.seed, step), isa, 2, **fast.hypers, **fast.host_states)
        after = fast.decoded()
        inside = built.enclose(run.enclosed(FAST), g, run.options, kept=after)
        report = product.differential.compare(after, inside, run.oracle(g))
        assert report.ok, [report.worst[name] for name in report.broken]
        assert report.claimed == 1 or cell.plan == "flashoptim"
        run.step(g)
        for name, fmt in built.storage.states.items():
            if not isinstance(fmt, Float):
                assert code_distance(name, fmt, run.buffers, fast.buffers) <= 1, name


RECIPROCALS = """
#include "optgen.h"
namespace {
template <class Grad>
struct f {
    static constexpr int BLOCK = 1, TILE = 1024;
    static constexpr Column COLUMNS[] = {{4, false, false}, {4, false, true}, {4, false, true}};
    static void tile(char *const *at, int count, const int *, int32_t, const float *, int32_t, int32_t) {
        for (int i = 0; i < count; i += W) {
            const F x = load((const float *)at[0] + i);
            store((float *)at[1] + i, reciprocal_of_normal(x));
            store((float *)at[2] + i, reciprocal(x));
        }
    }
};
}
OPTGEN_EXPORT
"""


@pytest.mark.parametrize("isa", ISAS)
def test_reciprocals_are_within_the_units_that_fast_maths_allows(isa: str) -> None:
    """Every 64th mantissa in three binades, and the ends of the range; `FAST` counts 5.4 half ulp for one."""
    library = harness.compiled(RECIPROCALS, "float32", isa)
    mantissa = torch.arange(0, 2**23, 64, dtype=torch.int32)
    x = torch.cat([(mantissa + (e << 23)).view(torch.float32) for e in (1, 127, 251)])
    normal, any_ = torch.empty_like(x), torch.empty_like(x)
    run(library, x, normal, any_)
    unit = 2.0**-24
    for got in (normal, any_):
        assert ((got.double() * x.double() - 1).abs().max() / unit) <= 5.4
    special = torch.tensor([0.0, float("inf"), float("nan"), 2.0**-126, 2.0**125])
    out = torch.empty_like(special)
    run(library, special, torch.empty_like(special), out)
    assert out[0] == float("inf") and out[1] == 0 and out[2].isnan()
    assert torch.allclose(out[3:], 1 / special[3:], rtol=5.4 * unit, atol=0)


def run(library: object, *columns: torch.Tensor) -> None:
    import ctypes

    numel = columns[0].numel()
    table = torch.tensor([*(c.data_ptr() for c in columns), numel, numel, 0])
    pointer, whole = ctypes.c_void_p, ctypes.c_int64
    step = library.optgen_step  # type: ignore[attr-defined]
    assert step(pointer(table.data_ptr()), whole(1), None, ctypes.c_int32(0), ctypes.c_int32(1)) == 0
