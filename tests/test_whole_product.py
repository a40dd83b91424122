"""The tool that runs the whole product: its order, what it keeps between runs, and what its report says."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from optgen.driver import emit, targets
from tests.product import PARAMS, Cell, plan_of, spec_of

ROOT = Path(__file__).parents[1]
CELLS = [Cell(spec, plan, param) for spec in ("adamw", "lion") for plan in ("fp32", "int8") for param in PARAMS]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    found = importlib.util.spec_from_file_location("whole_product", ROOT / "tools" / "test_full.py")
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    sys.modules["whole_product"] = module
    found.loader.exec_module(module)
    return module


def test_every_pair_comes_before_any_comes_again(tool: ModuleType) -> None:
    order = tool.drawn(CELLS, 7)
    assert Counter(order) == Counter(CELLS)
    assert order == tool.drawn(CELLS, 7) != tool.drawn(CELLS, 8)
    for begin in (0, 4, 8):
        assert len({(c.spec, c.plan) for c in order[begin : begin + 4]}) == 4


def test_a_run_that_was_killed_goes_on(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a line at the end is passed over and closed; what other sources gave is not taken."""
    path = tmp_path / "build" / "kept.jsonl"
    tool.Kept(path, fresh=False).add("one", {"weight": 0.5})
    with path.open("a") as file:
        file.write('{"digest": "')
    tool.Kept(path, fresh=False).add("two", {"weight": 0.25})
    assert tool.Kept(path, fresh=False).found == {"one": {"weight": 0.5}, "two": {"weight": 0.25}}
    assert tool.Kept(path, fresh=True).found == {}
    monkeypatch.setattr(tool, "digest", lambda: "other sources")
    assert tool.Kept(path, fresh=False).found == {}


def test_the_report_says_what_was_run_and_what_fails(tool: ModuleType) -> None:
    good, bad = Cell("adamw", "fp32"), Cell("lamb", "fp32")
    outcomes = [tool.Outcome(good, 0.5, 0.25), tool.Outcome(bad, failure="outside the bound: p\nmore", stages=True)]
    text = tool.report(outcomes, [], tool.Extent(1000, 3, False))
    assert "This is a sample: 2 of 1000 cells" in text and "drawn by seed\n3:" in text
    assert "**1 of 2 cells are right**" in text
    assert f"- {bad}: outside the bound: p\n" in text
    assert "sample" not in tool.report(outcomes, [], tool.Extent(2, 3, False))


def test_every_kernel_of_a_pair_is_compiled_for_every_target(tool: ModuleType, tmp_path: Path) -> None:
    """Those that walk panels and those between sweeps too: all that has a table and a list of work to go through."""
    pytest.importorskip("triton")
    spec, plan = spec_of("adamw"), plan_of("lpmm4")
    cases = [c for c in targets.cases(spec, plan) if c.storage.param.torch == "bfloat16" and not c.small]
    text = emit.emit_plan(spec, plan, cases=[next(c for c in cases if c.vector == v) for v in (False, True)])
    module = tool._module(tmp_path / "kernels.py", text["triton_kernels.py"])
    import kernel_stats

    jobs = kernel_stats.of_module("adamw.lpmm4", module)
    made = [(job.fn.__name__, target) for job in jobs for target in job.targets]
    kernels = re.findall(r"^def (\w+)\(\s*table, work", text["triton_kernels.py"], re.M)
    assert {name.removeprefix("adamw_bfloat16_") for name in kernels} >= {"1", "2", "2_flat", "3", "6", "7", "vector"}
    assert sorted(made) == sorted((name, target) for name in kernels for target in tool.TARGETS)
