"""States that leave the device and come back, begin anew, or stay behind where weights alone are sent."""

import copy
import gc
import os
import random
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optgen
from optgen.accumulate import accumulator
from optgen.by_name import list_rules
from tests.harness import sampled
from tests.test_modes import KINDS, PLANS, Cell, Run
from tests.training import bits, through_file

DRAW = random.Random(os.environ["OPTGEN_SAMPLE_SEED"])


def run_of(rule: str, plan: str, folder: Path) -> Run:
    """Two steps, on a CPU that stands for a device."""
    run = Run(Cell("", rule, plan, "reference"), folder)
    for step in range(2):
        run.step(step)
    run.opt._offload.resident = ()
    return run


def tensors(opt: Any) -> list[Tensor]:
    return [x for kept in opt.state.values() for x in kept.values() if isinstance(x, Tensor)]


@pytest.mark.parametrize("rule", sorted(KINDS))
def test_what_is_away_is_elsewhere_and_reads_as_before(rule: str, tmp_path: Path) -> None:
    """Schedule-Free leaves in evaluation, with the weights of training."""
    run, plain = (run_of(rule, plan, tmp_path) for plan in [DRAW.choice(PLANS)] * 2)
    if rule == "schedule_free_adamw":
        run.opt.eval()
    reads = (run.opt.state_dict, run.opt.dense_state_dict, run.opt.full_weights, run.bits)
    before, gone = bits([read() for read in reads]), [weakref.ref(x) for x in tensors(run.opt)]
    run.opt.offload_states(pin=False, non_blocking=False)
    run.opt.offload_states()
    gc.collect()
    assert gone and not any(x() is not None for x in gone)
    assert bits([read() for read in reads]) == before
    for wrong in (run.opt.step, run.opt.reset_states, run.opt.release_gradients):
        with pytest.raises(RuntimeError, match=r"call (reload_states|train)\(\) first"):
            wrong()
    run.net, run.opt = copy.deepcopy((run.net, run.opt))
    run.opt.load_state_dict(through_file(run.opt.state_dict()))
    assert run.opt._offload.away
    run.opt.train()
    for _ in range(2):
        run.opt.reload_states()
    for one in (run, plain):
        one.step(2)
    assert run.bits() == plain.bits()


def test_bits_of_a_cast_and_sums_of_gradients_leave_with_the_states() -> None:
    def trained(away: bool) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(70, 66), nn.Linear(66, 5))
        optgen.cast_model(model, torch.bfloat16)
        opt = optgen.make("adamw", model, plan="int8_split24", lr=0.01)
        opt._offload.resident = ()
        opt.release_gradients(model, accumulate=2, accumulator=accumulator("int8"))
        for k in range(4):
            x = torch.randn(8, 70, generator=torch.Generator().manual_seed(k)).bfloat16()
            if away:
                opt.offload_states()
                with pytest.raises(RuntimeError, match=r"backward\(\) with released gradients while its states"):
                    model(x).sum().backward()
                for p in model.parameters():
                    p.grad = None
                opt.reload_states()
            model(x).float().square().mean().backward()
        return bits([list(model.parameters()), [opt.state[p] for p in model.parameters()]])

    assert trained(True) == trained(False)


def test_a_captured_step_is_refused_by_name(tmp_path: Path) -> None:
    run = run_of("adamw", "fp32", tmp_path)
    run.opt._stepper.launcher.captured.append(())  # as a CUDA graph leaves it
    with pytest.raises(RuntimeError, match=r"captured step\(\).*offload_states\(recapture=True\).*capture again"):
        run.opt.offload_states()
    assert not run.opt._offload.away
    run.opt.offload_states(recapture=True)
    assert run.opt._offload.away and not run.opt._stepper.launcher.captured


def test_memory_says_where_bytes_lie() -> None:
    p = nn.Parameter(torch.zeros(128, 64, dtype=torch.bfloat16, device="meta"))
    memory = optgen.make("adamw", [("w", p)], plan="int8_split24").memory
    assert memory().places == {"meta": memory().total}
    vars(p)["_optgen_home"] = torch.device("cpu")
    assert memory().places == {"meta": 2 * p.numel(), "cpu": sum(memory().states.values())}
    assert "on cpu" in repr(memory())


@pytest.mark.parametrize("rule", [*sorted(KINDS), "mars", "adashift", "dion", "ema(adamw)"])
def test_what_is_reset_is_as_new(rule: str, tmp_path: Path) -> None:
    """With keep=() a run goes on as a new optimizer of the same full weights does."""
    run, new = run_of(rule, plan := DRAW.choice(PLANS), tmp_path), Run(Cell("", rule, plan, "reference"), tmp_path)
    weights = run.opt.master_state_dict(run.net)
    run.opt.reset_states(keep=())
    new.opt.load_master_state_dict(new.net, weights)
    for one in (run, new):
        assert bits(one.opt.master_state_dict(one.net)) == bits(weights)
        for step in range(2):
            one.step(step)
    assert run.bits() == new.bits()


def test_some_states_are_reset_where_they_lie_and_the_rest_stays(tmp_path: Path) -> None:
    run = run_of("adamw", "int8_split24", tmp_path)
    before, places = copy.deepcopy([*run.opt.state.values()]), [x.data_ptr() for x in tensors(run.opt)]
    run.opt.reset_states(["mat*", "vector"], keep=["step", "exp_avg_sq"])
    assert [x.data_ptr() for x in tensors(run.opt)] == places
    for name, kept, old in zip(run.net, run.opt.state.values(), before, strict=True):
        changed = {key for key in kept if bits(kept[key]) != bits(old[key])}
        assert changed == ({"exp_avg"} if name in ("matrix", "vector") else set()), name
    for given, words in (({"patterns": "embed*"}, r"'embed\*' matches no"), ({"keep": ["exp"]}, "called 'exp'")):
        with pytest.raises(ValueError, match=words):
            run.opt.reset_states(**given)


FIRST: Any = [("novograd", {}), ("shampoo", {}), ("spam", {}), ("stable_spam", {}), ("ademamix", {"beta3_warmup": 9})]


@pytest.mark.parametrize(("rule", "options"), [
    *sampled("reset", [(name, {}) for name in list_rules() if name not in dict(FIRST)]), *FIRST, ("ademamix", {}),
])  # fmt: skip
def test_a_reset_keeps_the_count_or_is_refused(rule: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Steps that follow are those of first states at that count; rules that tell a first step are refused."""
    run, new = (run_of(rule, "fp32", tmp_path) for _ in range(2))
    for group in run.opt.param_groups:
        group.update(options)
    before, states = run.bits(), new.opt.state.values()
    host = [{name: x for name, x in kept.items() if not isinstance(x, Tensor)} for kept in states]
    try:
        run.opt.reset_states()
    except ValueError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert "first steps of another kind: call it with keep=()" in refusal
        assert run.bits() == before and (rule, options) != ("ademamix", {})
        return
    assert (rule, options) not in FIRST
    new.opt.reset_states(keep=())
    for kept, numbers in zip(states, host, strict=True):
        kept.update(numbers)
    for one in (run, new):
        for step in range(2, 4):
            one.step(step)
    assert run.bits() == new.bits()


SEVERAL = {"^m|^large": {"rule": "muon", "lr": 0.01}, "*": "lion"}
SENT = (("adamw", "int8_split24"), ("adamw", "fp32_master"), (SEVERAL, "split32"), ("ema(lion)", "split32"))


@pytest.mark.parametrize(("rule", "plan"), SENT)
def test_weights_alone_make_the_full_weights_and_change_nothing_else(rule: Any, plan: str, tmp_path: Path) -> None:
    sender, new, begun = (Run(Cell("", "adamw", plan, "reference"), tmp_path) for _ in range(3))
    sender.net["vector"].requires_grad_(False)  # it has no bits there
    for run, steps in ((sender, 3), (new, 0), (begun, 1)):
        run.opt = optgen.make(rule, run.net, plan=plan, backend="reference")
        for step in range(steps):
            run.step(step)
    sent = through_file([sender.net.state_dict(), sender.opt.state_dict(weights_only=True)])
    own = {key for kept in sent[1]["state"].values() for key in kept}

    def rest(run: Run) -> Any:
        found = run.opt.state_dict()
        states = [[x for key, x in kept.items() if key not in own] for kept in found["state"].values()]
        return bits([states, found["param_groups"]])

    before = rest(begun)
    for run in (begun, new):
        run.net.load_state_dict(sent[0])
        run.opt.load_state_dict(sent[1])
        assert bits(run.opt.full_weights()) == bits(sender.opt.full_weights())
    assert rest(begun) == before and not own & {"exp_avg", "exp_avg_codes", "step"}
    new.step(4)
    if isinstance(rule, str):
        with pytest.raises(ValueError, match="does not fit, nothing was loaded"):
            optgen.make(rule, new.net, plan="bf16_sr").load_state_dict(sent[1])
    optgen.cast_model(model := nn.Linear(64, 66), torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"'weight'.* wait for a first step: make one, or take master_state_dict"):
        optgen.make("adamw", model, plan="split32").state_dict(weights_only=True)
