"""The demo's own parts: the same text, batches and start for everybody, and an honest sentence at the end."""

import json
import math
from typing import Any

import pytest
import torch

from docs.tools import evidence
from tools import demo, demo_model
from tools.demo_model import Corpus, Size

SMALL = Size(layers=1, width=16, heads=2, context=16, batch=4)


@pytest.fixture(scope="module")
def text() -> Corpus:
    """A made-up text of two pieces."""
    data = torch.arange(4096, dtype=torch.int64).remainder(7).to(torch.uint8)
    return Corpus(data, data.clone(), 1, "made up")


def train(text: Corpus, dtype: torch.dtype, seed: int, steps: int = 30, **options: Any) -> demo_model.Run:
    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    return demo_model.train(text, SMALL, make, dtype=dtype, steps=steps, seed=seed, peak=1e-2, **options)


def test_a_run_depends_on_its_seed_alone(text: Corpus) -> None:
    assert train(text, torch.float32, 0).validation == train(text, torch.float32, 0).validation
    assert train(text, torch.float32, 0).validation != train(text, torch.float32, 1).validation


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


def test_the_page_of_evidence_has_the_results_that_were_measured() -> None:
    kept = json.loads(evidence.RECORD.read_text(encoding="utf-8"))
    assert evidence.PAGE.read_text(encoding="utf-8").endswith(evidence.results(kept)), "run docs.tools.evidence --page"
    assert {task.name: task.steps for task in evidence.TASKS}.items() <= kept["made"].items(), "of other tasks"
