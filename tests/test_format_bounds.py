"""The tables of docs/benchmarks/bounds.md are what the tool writes today, and say what they must."""

import math

import pytest

from docs.tools import format_bounds as tool


def test_the_document_is_current_and_no_bound_is_exceeded() -> None:
    assert tool.main(["--check"]) == 0, "run docs/tools/format_bounds.py"
    states, weights = tool.rows()
    assert "| none | value | - | - |" in tool.DOCUMENT.read_text(encoding="utf-8")  # of means of rows and columns
    for row in (*states, *weights):
        found = [x for x in (row.fuzzed, row.supremum) if x is not None]
        assert bool(found) == math.isfinite(row.bound), row
        assert all(0 <= x <= 1 for x in found), row
        if 0 < row.bound < math.inf:  # a bound that is never nearly reached says little
            assert max(found) >= 0.75, row
    from specs import plans

    names = {name for row in states for name in row.plans}
    assert names == {name for name, plan in vars(plans).items() if type(plan).__name__ == "Plan"}


def test_errors_beyond_a_bound_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random blocks find a code that is one too far, which one block under one scale might not show."""
    from optgen.formats import Blocked, linear, scales

    fmt = Blocked(8, 64, linear, scales.ue8m8, rounding="nearest")
    assert tool.fuzzed(fmt) <= 1
    read = Blocked.decode

    def shifted(self, parts, *, root=None):
        x = read(self, parts, root=root)
        return x * 1.005  # half a cell at the upper end is 0.004

    monkeypatch.setattr(Blocked, "decode", shifted)
    assert tool.fuzzed(fmt) > 1
