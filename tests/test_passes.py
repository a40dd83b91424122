"""Every pass on text: tests/cases/passes/*.case hold a pass' name, ranges of scalars, the IR before and the IR after.

UPDATE_GOLDEN=1 writes what the passes now make; read the diff before you commit it.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from optgen import passes
from optgen.ir import node as ir
from optgen.ir.program import Schedule
from optgen.ir.ranges import Intervals
from optgen.ir.show import show
from optgen.ir.verify import verify
from optgen.lang.optimizer import CALLED
from optgen.ops import dtypes, spaces
from optgen.ops.prims import PRIMS
from optgen.passes.convert import Converter
from optgen.passes.name import RESERVED
from tests.ir_text import parse_program

CASES = sorted((Path(__file__).parent / "cases" / "passes").glob("*.case"))


def _sections(path: Path) -> tuple[str, str, str]:
    head, _, rest = path.read_text(encoding="utf-8").partition("[in]\n")
    before, _, after = rest.partition("[out]\n")
    return head, before, after


def _passes(head: str) -> list[str]:
    return head.splitlines()[0].removeprefix("[pass] ").split()


def _ranges(head: str) -> tuple[tuple[str, tuple[float, float]], ...]:
    """What the text form does not carry: lines `[range] beta2 0.0 0.999`."""
    rows = [line.split()[1:] for line in head.splitlines() if line.startswith("[range] ")]
    return tuple((name, (float(low), float(high))) for name, low, high in rows)


@pytest.mark.parametrize("path", CASES, ids=lambda p: p.stem)
def test_case(path: Path) -> None:
    head, before, after = _sections(path)
    program = parse_program(before)
    assert show(program) == before, "the text form does not round-trip"
    verify(replace(program), after="parse")
    ir: object = replace(program, ranges=_ranges(head))
    for name in _passes(head):
        ir = getattr(passes, name)(ir)
    assert isinstance(ir, Schedule) or ir is not None
    got = show(ir)  # type: ignore[arg-type]
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(f"{head}[in]\n{before}[out]\n{got}", encoding="utf-8")
    else:
        assert got == after


def test_every_pass_has_a_case() -> None:
    covered = {name for path in CASES for name in _passes(_sections(path)[0])}
    wanted = {p.__name__ for p in (*passes.PROGRAM_PASSES, *passes.SCHEDULE_PASSES)}
    assert wanted <= covered


def test_names_that_kernels_import_are_no_names_of_values() -> None:
    """A let called like one of them would hide it, and so would a hyper-parameter."""
    imported: set[str] = set()
    line = re.compile(r"^from optgen\.runtime\.gpu\.\w+ import (?:\(([^)]*)\)|(.*))$", re.MULTILINE)
    folder = Path(__file__).parents[1] / "generated"
    for file in folder.rglob("triton.py"):
        found = line.findall(file.read_text(encoding="utf-8"))
        assert found, file
        imported |= {name for names in found for name in re.findall(r"\w+", "".join(names))}
    # Kernels call these, and bind nothing.
    imported -= {"rounds", "walk"}
    assert imported
    assert imported <= RESERVED | PRIMS.keys()
    assert imported <= CALLED


def test_the_nan_guard_of_fast_maths_keeps_what_arithmetic_makes_of_nan() -> None:
    """NVIDIA's NaN is 0x7FFFFFFF, to whose pattern a rounding would carry over; x86's and AMD's are quiet ones."""
    x = ir.op("add", ir.load("x", dtypes.f32, spaces.elem), ir.const(1.0))
    carry = ir.const(0x8080, dtypes.i32)
    pattern = ir.op("bitcast", x, attr=dtypes.i32)
    other = ir.const(0x7FC08000, dtypes.i32)
    guarded = ir.op("where", ir.op("eq", x, x), ir.op("add", pattern, carry), other)
    fast = Converter(Intervals({}))(guarded)
    assert fast is ir.op("add", ir.op("min", pattern, ir.const(0x7FC00000, dtypes.i32)), carry)
    for bits in (0x7FFFFFFF, 0x7FC00000, -0x400000, -0x20000, 0x7F800000, -0x800000, 0x3F800000, -1 << 31):
        stored = torch.tensor([min(bits, 0x7FC00000) + 0x8080], dtype=torch.int32) >> 16 << 16
        rounded, before = stored.view(torch.float32), torch.tensor([bits], dtype=torch.int32).view(torch.float32)
        assert rounded.isnan().equal(before.isnan())
        assert before.isnan() or rounded.equal(before)
