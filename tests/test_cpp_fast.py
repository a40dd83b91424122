"""Fast maths: the C++ kernel keeps the bound of fast maths, and a code differs from strict by one at most."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from optgen.runtime.cpu import native
from optgen.runtime.records.keys import step_key
from tests import harness
from tests.product import Cell
from tests.test_properties import _trained, build, draws, gradient, hold_fast

pytestmark = [
    pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler"),
    pytest.mark.usefixtures("optimized"),
]

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
    pair = harness.Pair(built.spec, built.case, tmp_path, "fast")
    run, _ = _trained(built, (9, 256), 9)
    draw = draws(cell, 10)
    users = isa == ISAS[0] or (cell.spec, cell.plan) == ("adamw", "int8_split24")
    for _ in range(3):
        g = gradient(run.buffers["p"], 1e-2, draw, cell.param)
        fast, step = run.copy(), run.steps + 1
        items = [(fast.buffers, g, run.stream)]
        with nullcontext() if users else harness.unoptimized():
            pair.run_cpp(items, step, step_key(run.seed, step), isa, 2, **fast.hypers, **fast.host_states)
        hold_fast(built, run, fast, g)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("plan", ["int8_split24", "int8_rn_split24", "bf16_sr", "fp32_master"])
def test_no_nan_turns_into_a_number(plan: str, isa: str, tmp_path: Path) -> None:
    """NaNs of either sign, with any payload: no carry of rounding may turn their pattern into a number's."""
    built = build(Cell("adamw", plan))
    pair = harness.Pair(built.spec, built.case, tmp_path, "fast")
    run, _ = _trained(built, (9, 256), 9)
    patterns = [0x7F800001, 0x7FC00000, 0x7FFFFFFF, -0x7FFFFF, -0x400000, -0x8100, -1]
    short = [sign | 0x7F80 | payload for sign in (0, -0x8000) for payload in range(1, 128)]
    for kind, bits, odd in ((torch.float32, torch.int32, patterns), (torch.bfloat16, torch.int16, short)):
        taken = run.copy()
        g = torch.zeros_like(taken.buffers["p"], dtype=kind)
        g.view(bits).view(-1)[: len(odd)] = torch.tensor(odd, dtype=bits)
        items = [(taken.buffers, g, taken.stream)]
        key = step_key(run.seed, run.steps + 1)
        with nullcontext() if kind is torch.float32 else harness.unoptimized():
            pair.run_cpp(items, run.steps + 1, key, isa, 1, **run.hypers, **run.host_states)
        assert taken.buffers["p"].view(-1)[: len(odd)].isnan().all(), kind
