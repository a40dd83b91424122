"""The demo's own parts: an honest sentence at the end, and the pages of evidence."""

import json
import math

import pytest

from docs.tools import evidence, language_model, train_rules
from tools import demo, demo_model


def test_the_sentence_follows_the_numbers() -> None:
    def runs(*finals: float) -> list[demo_model.Run]:
        return [demo_model.Run([(1, loss)], 0, 0, 1, 0.0, 0.0) for loss in finals]

    base = runs(1.0, 2.0, 3.0)
    near = demo.difference(runs(1.01, 1.99, 3.0), base)
    assert near.mean == pytest.approx(0)
    assert near.noise == pytest.approx(1)
    assert near.half_width == pytest.approx(4.303 * 0.01 / math.sqrt(3))
    assert "no difference that these seeds can show" in near.sentence("x")
    assert "measurably worse" in demo.difference(runs(1.1, 2.1, 3.101), base).sentence("x")
    assert "measurably better" in demo.difference(runs(0.9, 1.9, 2.899), base).sentence("x")
    assert "more seeds are needed" in demo.difference(runs(1.1), runs(1.0)).sentence("x")


def test_pages_have_the_results_that_were_measured() -> None:
    for tool in (tool for tool in (language_model, train_rules, evidence) if tool.RECORD.exists()):
        kept, text = json.loads(tool.RECORD.read_text(encoding="utf-8")), tool.PAGE.read_text(encoding="utf-8")
        assert text == tool.page(kept, text), f"run {tool.__name__} --page"
    assert {task.name: task.steps for task in evidence.TASKS}.items() <= kept["made"].items(), "of other tasks"
