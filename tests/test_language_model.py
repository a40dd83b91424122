"""The language model's runs: stopped ones go on bit for bit, and the queue asks for each run once."""

from pathlib import Path
from typing import Any

import pytest
import torch

from docs.tools import language_model
from docs.tools.train_rules import key_of
from tools.demo_model import Corpus, Size


@pytest.mark.parametrize("plan", ["int8_split24", language_model.CONTROL])
def test_a_run_that_is_stopped_goes_on_bit_for_bit(plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language_model, "SAVE_SECONDS", 0)
    monkeypatch.setattr(language_model, "EVERY", 8)
    tokens, size = torch.arange(4000).pow(2) % 127, Size(1, 64, 2, 8, 4, 128)
    given = (language_model.RULES[0], plan, 1, 1e-2, 32, Corpus(tokens, tokens[:500], 1, "x"), size)

    def stop(step: int, loss: float) -> None:
        assert step < 21

    with pytest.raises(AssertionError):
        language_model.one_run(*given, tmp_path / "stopped", stop)
    assert list(tmp_path.iterdir())
    runs = [language_model.one_run(*given, tmp_path / name) | {"seconds": 0} for name in ("stopped", "whole")]
    assert runs[0] == runs[1] and (len(runs[0]["train"]), len(runs[0]["validation"])) == (2, 4)
    assert not list(tmp_path.iterdir())


def test_the_queue_asks_for_each_run_once() -> None:
    kept: dict[str, Any] = {"rates": {}, "runs": {}}
    while run := language_model.next_run(kept):
        part, rule, plan, seed, lr, _ = run
        kept[part][key_of(rule.name, plan, seed, lr)] = [abs(lr - rule.options["lr"])]  # the first rate is the best
    assert len(kept["rates"]) == 3 and len(kept["runs"]) == 20
    assert [key.split(",")[0] for key in kept["runs"]][:4] == ["AdamW", "AdamW", "Muon", "Muon"]
