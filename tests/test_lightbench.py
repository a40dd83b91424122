"""The driver of LightBench's tasks, on a module like theirs."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from docs.tools import lightbench

LEAST = {"easy": 0.002, "never": -1.0}


def toy(config: str, win_condition_multiplier: float, **given: Any) -> None:
    eye, least = torch.eye(64, device="cuda"), LEAST[config] * win_condition_multiplier
    win = lambda model, loss: (bool(model.weight.square().mean() < least), {})  # noqa: E731
    made = nn.Linear(64, 64, False).cuda().double(), lambda: (eye, 0 * eye), nn.functional.mse_loss, win
    sys.modules["lightbench.toy"].__dict__["trial"](*made, given["steps"])


def test_others_run_at_the_best_rate_of_fp32_and_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightbench", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "lightbench.toy", SimpleNamespace(main=toy))
    monkeypatch.setattr(lightbench, "version", str)
    monkeypatch.setattr(lightbench, "PLANS", ("fp32", "int8_split24"))
    monkeypatch.setattr(lightbench, "RULES", {"AdamW": (1e-5, 1e-3, 3e-3)})
    monkeypatch.setattr(lightbench, "TASKS", (lightbench.Task("toy", ("easy", "never"), steps=60),))
    torch.manual_seed(lightbench.SEED)
    p, steps = nn.Linear(64, 64, False).weight, 0
    optimizer = torch.optim.AdamW([p], 3e-3, weight_decay=0)
    while p.square().mean() >= LEAST["easy"]:
        p.grad, steps = 2 * p.detach() / p.numel(), steps + 1
        optimizer.step()
    first, other, never = "toy-easy, AdamW, fp32", "toy-easy, AdamW, int8_split24", "toy-never, AdamW, fp32"
    found = lightbench.run(path := tmp_path / "cells.json")
    near = {first: (steps, 3e-3), other: (pytest.approx(steps, abs=1), 3e-3), never: (0, 0)}
    assert {key: cell[:2] for key, cell in found.items()} == near
    kept = json.loads(path.read_text())
    del kept["cells"][other]
    path.write_text(json.dumps(kept))
    again = lightbench.run(path)  # the seconds of `first` are those of the run before
    assert (again[first], again[other][:2]) == (kept["cells"][first], found[other][:2])
