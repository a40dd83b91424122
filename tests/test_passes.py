"""Every pass on text: tests/cases/passes/*.case hold a pass' name, the IR before and the IR after.

UPDATE_GOLDEN=1 writes what the passes now make; read the diff before you commit it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from optgen import passes
from optgen.ir.program import Schedule
from optgen.ir.show import parse_program, show
from optgen.ir.verify import verify

CASES = sorted((Path(__file__).parent / "cases" / "passes").glob("*.case"))


def _sections(path: Path) -> tuple[str, str, str]:
    head, _, rest = path.read_text(encoding="utf-8").partition("[in]\n")
    before, _, after = rest.partition("[out]\n")
    return head.strip().removeprefix("[pass] "), before, after


@pytest.mark.parametrize("path", CASES, ids=lambda p: p.stem)
def test_case(path: Path) -> None:
    names, before, after = _sections(path)
    program = parse_program(before)
    assert show(program) == before, "the text form does not round-trip"
    verify(replace(program), after="parse")
    ir: object = program
    for name in names.split():
        ir = getattr(passes, name)(ir)
    assert isinstance(ir, Schedule) or ir is not None
    got = show(ir)  # type: ignore[arg-type]
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(f"[pass] {names}\n[in]\n{before}[out]\n{got}", encoding="utf-8")
    else:
        assert got == after


def test_every_pass_has_a_case() -> None:
    covered = {name for path in CASES for name in _sections(path)[0].split()}
    wanted = {p.__name__ for p in (*passes.PROGRAM_PASSES, passes.sweeps, *passes.SCHEDULE_PASSES)}
    assert wanted <= covered
