"""The tool that runs the whole product: its order, what it keeps between runs, and what its report says."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from tests.product import PARAMS, Cell

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
