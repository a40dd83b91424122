"""Every pass on text: tests/cases/passes/*.case hold a pass' name, ranges of scalars, the IR before and the IR after.

UPDATE_GOLDEN=1 writes what the passes now make; read the diff before you commit it.
"""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from optgen import passes
from optgen.ir.show import show
from optgen.ir.verify import verify
from optgen.lang.optimizer import CALLED
from optgen.ops.prims import PRIMS
from optgen.passes.name import RESERVED
from tests.harness import texts
from tests.ir_text import parse_program

CASES = sorted((Path(__file__).parent / "cases" / "passes").glob("*.case"))


def _sections(path: Path) -> tuple[str, str, str]:
    head, _, rest = path.read_text(encoding="utf-8").partition("[in]\n")
    before, _, after = rest.partition("[out]\n")
    return head, before, after


def _passes(head: str) -> list[str]:
    return head.splitlines()[0].removeprefix("[pass] ").split()


def _ranges(head: str) -> tuple[tuple[str, tuple[float, float]], ...]:
    """Read what the text form does not carry: lines `[range] beta2 0.0 0.999`."""
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
    for file in texts("imported names", "triton.py", plans=False):
        found = line.findall(file.read_text(encoding="utf-8"))
        assert found, file
        imported |= {name for names in found for name in re.findall(r"\w+", "".join(names))}
    # Kernels call these, and bind nothing.
    imported -= {"rounds", "walk"}
    assert imported
    assert imported <= RESERVED | PRIMS.keys()
    assert imported <= CALLED
