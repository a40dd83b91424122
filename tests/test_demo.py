"""The demo's own parts: the same text, batches and start for everybody, and an honest sentence at the end."""

import json
import math
from typing import Any

import pytest
import torch

from docs.tools import evidence, train_rules
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


def test_what_is_returned_between_backward_and_step_is_called_in_its_place(text: Corpus) -> None:
    seen: list[int] = []

    def between(model: torch.nn.Module, optimizer: object, step: int, x: torch.Tensor, y: torch.Tensor) -> object:
        assert all(p.grad is not None for p in model.parameters())
        return None if step < 2 else lambda: seen.append(step)

    run = train(text, torch.float32, 0, 5, between=between)
    plain = train(text, torch.float32, 0, 5)
    assert seen == [2, 3, 4] and [loss for _, loss in run.validation[:2]] == [loss for _, loss in plain.validation[:2]]
    assert run.validation[2][1] == run.validation[3][1] != plain.validation[2][1]


@pytest.mark.parametrize(("dtype", "bytes_each"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_the_model_learns_and_its_bytes_are_counted(text: Corpus, dtype: torch.dtype, bytes_each: int) -> None:
    run = train(text, dtype, 0)
    # The made-up text repeats: the next byte is certain, while a guess among its 7 values costs log 7.
    assert run.final < math.log(7)
    assert run.weight_bytes == bytes_each * run.parameters
    assert run.state_bytes == 2 * bytes_each * run.parameters


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


def test_a_learning_rate_is_found_between_two_worse_ones() -> None:
    """A loss with its minimum at 2^5 times the default, NaN beyond: tried one by one, then run with all seeds."""
    found: train_rules.Found = {}
    rules = {rule.name: rule for rule in train_rules.TUNED}
    soap, rounds = rules["SOAP"], 0
    wanted = train_rules.missing((soap,), found, 3)
    while all(key[1:3] == ("fp32", 0) for key in wanted):
        for key in wanted:
            k = math.log2(key[3] / soap.options["lr"])
            found[train_rules.key_of(*key)] = (abs(k - 5) if k < 6 else math.nan, 42.0)
        wanted, rounds = train_rules.missing((soap,), found, 3), rounds + 1
    assert rounds == 6 and len(found) == 8  # -1, 0 and 1; then 2 to 6
    best = 32 * soap.options["lr"]
    runs = {(p, s, best) for p in ("fp32", *soap.plans) for s in range(3)}
    assert {key[1:] for key in wanted} == runs - {("fp32", 0, best)}
    control = train_rules.missing((rules["SOAP, control"],), found, 3)
    assert control == [("SOAP, control", "fp32", s, best) for s in range(3)]
    found |= {train_rules.key_of(*key): (5.5, 40.0) for key in (*wanted, *control)}
    assert [v.rule for v in train_rules.tuned(found, 3)] == [*(f"SOAP, {p}" for p in soap.plans), "SOAP, control"]


def test_the_page_of_evidence_has_the_results_that_were_measured() -> None:
    kept = json.loads(evidence.RECORD.read_text(encoding="utf-8"))
    assert evidence.PAGE.read_text(encoding="utf-8").endswith(evidence.results(kept)), "run docs.tools.evidence --page"
    assert {task.name: task.steps for task in evidence.TASKS}.items() <= kept["made"].items(), "of other tasks"


def test_evidence_searches_for_rates_and_compares_with_fp32_by_seed() -> None:
    """Made-up losses, least at AdamW's 0.004; int4 loses a tenth of every seed's, which lie further apart."""
    found: evidence.Found = {}
    while wanted := list(evidence.missing(found)):
        assert all(run[1:3] == ("fp32", evidence.TUNING) for run in wanted) or wanted[-1][2] == evidence.SEEDS[-1]
        for rule, plan, seed, lr in wanted:
            if rule.aside and seed != evidence.TUNING:
                assert rule.options["adamw_lr"] == 4e-3
            loss = (2 + abs(math.log2(lr / (4e-3 if rule.name == "AdamW" else rule.options["lr"]))) + seed / 2) * 0.1
            found[evidence.key_of(rule.name, plan, seed, lr)] = loss * (1.1 if "int4" in plan else 1), 0.5, 4.0, 1.0
    verdicts = {v.rule: v for v in evidence.compared(found)}
    assert len(verdicts) == 14 and verdicts["AdamW, int4_split24"].lr == 4e-3
    for name, v in verdicts.items():
        assert v.gap[0] == pytest.approx(0.1 * 0.35 if "int4" in name else 0), name  # a tenth of the mean of all seeds
        row = evidence.over_tasks((v,) * len(evidence.TASKS))
        assert row[1:] == (["+9.5 ± 0.0", "; ".join(t.name for t in evidence.TASKS), ""] if "int4" in name
                           else ["+0.0 ± 0.0", "", ""])  # fmt: skip
    x, y = evidence.lists(1, 1)[1][0]
    assert torch.equal(x[:, : evidence.ITEMS].sort(1).values, y) and torch.equal(x[:, evidence.ITEMS + 1 :], y[:, :-1])
