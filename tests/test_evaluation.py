"""Weights for evaluation: checkpoints taken while the model holds them."""

import copy
import io
import os
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import optgen
from optgen.convert.files import convert
from tests.machine import EDITS, WAYS
from tests.training import bits, train

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def fresh(rule: Any, plan: str, backend: str = "reference", dtype: torch.dtype | None = None) -> tuple[nn.Module, Any]:
    draw = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(72, 64), nn.Linear(64, 3))
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=draw)
    model.to(dtype or (torch.float32 if plan == "fp32" else torch.bfloat16))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of plans that round to nearest
        return model, optgen.make(rule, model, plan=plan, backend=backend)


def held(run: tuple[nn.Module, Any]) -> Any:
    """All that a run holds, as bits."""
    model, opt = run
    return bits([list(model.parameters()), [opt.state[p] for p in model.parameters()]])


def dumped(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


@pytest.mark.parametrize("plan", ["int8_split24", "bf16_sr", "fp32"])
@pytest.mark.parametrize("rule", ["ema(adamw)", "schedule_free_adamw"])
def test_full_weights_of_evaluation_and_dense_states_go_to_another_plan(rule: str, plan: str) -> None:
    """The model has the average, in fp32; train() puts the full weights of training into it."""
    model, opt = fresh(rule, plan)
    train(opt, range(3))
    full, trained = bits(opt.full_weights()), bits(list(model.parameters()))
    opt.eval()
    for other, loaded in (fresh(rule, "fp32", dtype=torch.float32), fresh(rule, plan)):
        exact = opt.master_state_dict(model)
        assert bits([x.to(next(model.parameters()).dtype) for x in exact.values()]) == bits(list(model.parameters()))
        other.load_state_dict(exact)
        loaded.load_state_dict(dumped(opt.dense_state_dict()))
        loaded.train()
        assert bits(loaded.full_weights()) == full
    assert bits(list(other.parameters())) == trained


def test_a_momentum_that_began_since_the_last_step_is_refused() -> None:
    model, opt = fresh("ema(sgd)", "int8_split24")
    opt.param_groups[0]["momentum"] = 0.0
    train(opt, range(2))
    before = held((model, opt))
    opt.param_groups[0]["momentum"] = 0.9
    with pytest.raises(RuntimeError, match=r"momentum_buffer_codes: expected .* it is missing"):
        opt.eval()
    assert held((model, opt)) == before


def test_what_does_not_fit_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    model, opt = fresh("ema(adamw)", "int8_split24")
    train(opt, range(3))
    of_training = copy.deepcopy(opt.state_dict())
    opt.eval()
    before, saved = held((model, opt)), copy.deepcopy(opt.state_dict())
    with pytest.raises(RuntimeError, match="one that was taken in training in evaluation: call train"):
        opt.load_state_dict(of_training)
    for act in (opt.release_gradients, lambda: opt.load_master_state_dict(model, model.state_dict())):
        with pytest.raises(RuntimeError, match=r"in evaluation: call train\(\) first"):
            act()
    assert held((model, opt)) == before
    other, loaded = fresh("ema(adamw)", "int8_split24")
    states = saved["state"].items()
    cut = {**saved, "state": {k: {n: x for n, x in s.items() if n != "trained_weight"} for k, s in states}}
    wide = {**saved, "state": {k: {**s, "trained_weight": s["trained_weight"].float()} for k, s in states}}
    for damaged, says in ((cut, "trained_weight: it is missing"), (wide, "trained_weight: expected bfloat16")):
        empty = held((other, loaded))
        with pytest.raises(ValueError, match=says):
            loaded.load_state_dict(damaged)
        assert held((other, loaded)) == empty
    with pytest.raises(ValueError, match="trained_weight: not expected"):
        fresh("adamw", "int8_split24")[1].load_state_dict(saved)
    # torch asks a folder for what the new optimizer has, which is in training.
    other, loaded = fresh("ema(adamw)", "int8_split24")
    dcp.save(get_optimizer_state_dict(model, opt), checkpoint_id=tmp_path, no_dist=True)
    asked = get_optimizer_state_dict(other, loaded)
    dcp.load(asked, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(ValueError, match=r"make the states by get_optimizer_state_dict, call eval\(\), and load once"):
        set_optimizer_state_dict(other, loaded, asked)


def test_a_conversion_keeps_both_weights(tmp_path: Path) -> None:
    model, opt = fresh("schedule_free_adamw", "int8_split24")
    train(opt, range(3))
    full = bits(opt.full_weights())
    opt.eval()
    optgen.save_checkpoint(tmp_path / "a.pt", opt, model)
    convert(str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), to="fp32", param="float32", find=lambda _: type(opt))
    other, loaded = fresh("schedule_free_adamw", "fp32")
    optgen.load_checkpoint(tmp_path / "b.pt", loaded, other)
    assert bits([p.bfloat16() for p in other.parameters()]) == bits(list(model.parameters()))
    loaded.train()
    assert bits(list(other.parameters())) == full


# -- averages of weights that others change between steps ------------------------------------------------------------


SHOWING = ("fp32", "int8", "int8_split24", "int4_split24", "split32", "bf16_sr", "torchao8")
"""Plans under which a step begins with the weight at hand, as docs/checkpoints.md says."""


@pytest.mark.parametrize("number", [*range(7), *(pytest.param(i, marks=pytest.mark.full) for i in range(7, 90))])
def test_the_average_is_that_of_the_weights_at_hand(number: int) -> None:
    """torch's AveragedModel that is told of the full weights after each edit, in fp64.

    Each step rounds a difference and the new average, of numbers below twice the largest weight, and eval() does once
    more: 3 roundings of fp32 a step, which later steps do not raise.
    """
    draw = random.Random(int(os.environ["OPTGEN_SAMPLE_SEED"]) * 1000 + number)
    rule = draw.choice(["ema", "averaged"]) + draw.choice(["(adamw)", "(lion)", "(cautious(sgd))"])
    plan, backend, edit = draw.choice(SHOWING), draw.choice(["reference", "cpp"]), [*EDITS][number % len(EDITS)]
    start, decay = draw.choice([0, 2]), draw.choice([0.5, 0.99])
    options = {"ema_decay": decay, "ema_start": start} if "ema" in rule else {"average_start": start}
    p = nn.Parameter(torch.randn(70, 65, generator=torch.Generator().manual_seed(number)))
    p.data = p.data.to(torch.float32 if plan in ("fp32", "int8") else torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opt = optgen.make(rule, [("p", p)], plan=plan, backend=backend, lr=1e-2, **options)
    average, seen, largest = (
        torch.optim.swa_utils.get_ema_avg_fn(decay) if "ema" in rule else None,
        nn.Linear(1, 1),
        0.0,
    )
    for t in range(1, 9):
        train(opt, [t])
        if draw.random() < 0.7:
            with torch.no_grad():
                value = EDITS[edit](p.detach(), torch.Generator().manual_seed(t))
                WAYS[draw.choice([*WAYS])](p, value)
        seen.weight = nn.Parameter(opt.full_weights()[0].double())
        if t <= start + 1:
            shown = torch.optim.swa_utils.AveragedModel(seen, avg_fn=average)
        shown.update_parameters(seen)
        largest = max(largest, float(seen.weight.detach().abs().max()))
        if draw.random() < 0.3:
            opt.eval()
            opt.train()
    opt.eval()
    off = (opt.full_weights()[0] - shown.module.weight.detach()).abs().max()
    assert off <= 8 * 3 * max(2 * largest * 2.0**-24, 2.0**-150), (rule, plan, backend, edit, off)


@pytest.mark.parametrize("rule", ["gpa(adamw)", "schedule_free(adamw)", "ema_nesterov(adamw)", "soap_muon"])
def test_distances_from_the_weight_follow_its_edits(rule: str) -> None:
    """z, and the average of changes, are kept relative to p: an edit moves p and the weights for evaluation alike."""
    p = nn.Parameter(torch.randn(16, 16, generator=torch.Generator().manual_seed(0)))
    opt = optgen.make(rule, [("p", p)], plan="fp32", backend="reference")
    train(opt, range(3))
    shown = []
    for far in (0.0, 1.0):
        with torch.no_grad():
            p.add_(far)
        opt.eval()
        shown.append(p.detach().clone())
        opt.train()
    torch.testing.assert_close(shown[1], shown[0] + 1.0)
