"""Released gradients of rules with sums over the model, which take those of the step before."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import optgen
from optgen.accumulate import accumulator
from optgen.by_name import class_of
from optgen.runtime.options.options import SUMS as KEY
from tests.test_release import Net, net, train
from tests.training import same

SMALL_EPS = {"eps": 1e-30}
"""The only use that Prodigy has of a step's own sums within it is d * eps, which is so below every ulp of a root."""


def made(
    rule: str, plan: str = "fp32", release: Any = (), options: Any = (), backend: str = "reference"
) -> tuple[Net, Any]:
    model = net(torch.float32 if plan == "fp32" else torch.bfloat16)
    opt = class_of(rule)(model.named_parameters(), plan=plan, backend=backend, **dict(options))
    if release is not None:
        opt.release_gradients(model, sums="previous", **dict(release))
    return model, opt


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("dadapt_adam", {}), ("dadapt_sgd", {}), ("dadapt_lion", {}), ("avagrad", {}), ("prodigy", SMALL_EPS),
        ("ema(prodigy)", SMALL_EPS), ("schedule_free(prodigy)", SMALL_EPS), ("lookahead(dadapt_adan)", {}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("plan", ["fp32", "int8_split24"])
def test_sums_that_only_the_next_step_takes_leave_its_bits(rule: str, options: dict[str, Any], plan: str) -> None:
    """A rule whose weights follow from the states of the model before the step, as D-Adaptation's do, is such a one."""
    backend = "cpp" if (rule, plan) == ("prodigy", "int8_split24") else "reference"
    (a, usual), (b, opt) = (made(rule, plan, release, options, backend) for release in (None, ()))
    for model, one in ((a, usual), (b, opt)):
        train(one, model, 5)  # half of the batches leave a parameter without a gradient
    same(a, b, usual, opt)
    if one.evaluation is not None:
        usual.eval(), opt.eval()
        same(a, b, usual, opt)


def test_windows_and_changes_are_those_of_ordinary_steps() -> None:
    """Micro-batches, also too few, a parameter that is frozen, one that comes, a rate of a group."""
    (a, usual), (b, opt) = (
        made("dadapt_adam", release=None),
        made("dadapt_adam", release={"accumulate": 2, "accumulator": accumulator("fp32")}),
    )
    for model, one in ((a, usual), (b, opt)):
        train(one, model, 2, every=2)
        model.outer.weight.requires_grad_(False)
        train(one, model, 1, every=1, start=9)
        one.param_groups[0].pop("initial_lr")
        model.outer.weight.requires_grad_(True)
        torch.manual_seed(1)
        model.extra = nn.Linear(64, 64, bias=False)
        model.inner.register_forward_pre_hook(lambda _, given, extra=model.extra: (given[0] + extra(given[0]),))
        one.add_param_group({"params": [("extra.weight", model.extra.weight)], "lr": 0.5})
        train(one, model, 3, every=2, start=5)
    same(a, b, usual, opt)


def waiting(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.grad is not None]


def test_all_wait_at_the_first_step_and_the_smallest_at_others() -> None:
    model, opt = made("prodigy", "int8_split24")
    model.loss(1).backward()
    assert len(waiting(model)) == 5 and not opt.state
    opt.step()
    assert not waiting(model) and opt.param_groups[0][KEY].shape == (2,)
    for k in (2, 3):
        model.loss(k).backward()
        assert waiting(model) == ["inner.bias"]
        assert opt.state[model.inner.bias]["step"] == k - 1 and opt.state[model.table.weight]["step"] == k
        opt.step()
        assert not waiting(model) and len({float(s["d"]) for s in opt.state.values()}) == 1


@pytest.mark.parametrize(("rule", "counts"), [("clipped(adamw)", [5, 1, 1]), ("dog", [5, 5, 1])])
def test_sums_of_other_things_at_a_first_step_are_not_taken_at_the_second(rule: str, counts: list[int]) -> None:
    """DoG sums weights at its first step, and then distances, which are far smaller."""
    model, opt = made(rule)
    for k, count in enumerate(counts):
        model.loss(2 * k + 1).backward()
        assert len(waiting(model)) == count
        opt.step()


def clipped_by_hand(model: Net, before: torch.Tensor | None, lr: float, limit: float) -> torch.Tensor:
    """Make a step of SGD, clipped by the norm of the step before but for the smallest parameter's; return the norm."""
    found = {name: p for name, p in model.named_parameters() if p.grad is not None}
    norm = nn.utils.get_total_norm([p.grad for p in found.values()])
    for name, p in found.items():
        by = norm if before is None or name == "inner.bias" else before
        p.data -= lr * p.grad * torch.clamp(limit / (by + 1e-6), max=1.0)
        p.grad = None
    return norm


def test_clipping_takes_the_norm_of_the_step_before() -> None:
    a = net(torch.float32)
    b, opt = made("clipped(sgd)", options={"lr": 1e-2, "max_norm": 2.0, "weight_decay": 0.0, "momentum": 0.0})
    norm = None
    for k in range(5):
        a.loss(k).backward()
        norm = clipped_by_hand(a, norm, 1e-2, 2.0)
        b.loss(k).backward()
        opt.step()
        assert norm > 4.0
        for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
            # The roundings of a sum of squares and of a root move a factor by some ulps.
            assert (p - q).abs().max() <= (k + 1) * (2.0**-23 * p.abs().max() + 2.0**-18 * 1e-2 * 2.0), name


@pytest.mark.parametrize(
    ("rule", "plan"), [("prodigy", "int8_split24"), ("clipped(adamw)", "bf16_sr"), ("ema(dog)", "fp32")]
)
def test_a_run_that_goes_on_is_the_run_that_was_not_broken_off(rule: str, plan: str, tmp_path: Path) -> None:
    """The sums are in the checkpoint, whether gradients are released before it is loaded or after."""
    a, whole = made(rule, plan)
    train(whole, a, 6)
    b, opt = made(rule, plan)
    train(opt, b, 3)
    optgen.save_checkpoint(tmp_path / "run.pt", opt, b)
    for release in ((), None):
        c, other = made(rule, plan, release)
        optgen.load_checkpoint(tmp_path / "run.pt", other, c)
        if release is None:
            other.release_gradients(c, sums="previous")
        other.param_groups[0].pop("initial_lr")
        train(other, c, 3, start=3)
        same(a, c, whole, other)
        assert torch.equal(whole.param_groups[0][KEY], other.param_groups[0][KEY])


def test_sums_are_found_in_any_order_of_groups_and_go_with_a_reset() -> None:
    def in_order(turn: int) -> tuple[Net, Any]:
        named = list((model := net(torch.float32)).named_parameters())
        opt = class_of("clipped(adamw)")([{"params": named[:1]}, {"params": named[1:]}][::turn], plan="fp32")
        opt.release_gradients(model, sums="previous")
        return model, opt

    model, opt = in_order(1)
    train(opt, model, 2)
    for turn in (-1, 1):
        saved, (model, opt) = opt.state_dict(), in_order(turn)
        opt.load_state_dict(saved)
        model.loss(1).backward()
        assert waiting(model) == ["inner.bias"]
        opt.step()
        assert [KEY in group for group in opt.param_groups] == [True, False]
    opt.reset_states(keep=())
    model.loss(1).backward()
    assert len(waiting(model)) == 5


def test_parameters_outside_the_model_are_in_the_sums() -> None:
    (a, usual), (b, opt) = (made("dadapt_adam", release=None) for _ in range(2))
    opt.release_gradients(b.inner, sums="previous")
    train(usual, a, 4)
    train(opt, b, 4)
    same(a, b, usual, opt)


def test_an_infinite_sum_is_not_used() -> None:
    model, opt = made("clipped(sgd)", options={"lr": 1e-2})
    train(opt, model, 1)
    before = opt.param_groups[0][KEY]
    model.rare.weight.grad = torch.full((64, 64), torch.inf)
    model.loss(0).backward()
    opt.step()
    assert torch.equal(opt.param_groups[0][KEY], before) and torch.isfinite(model.table.weight).all()


REFUSED: dict[str, Callable[[Net, Any], object]] = {
    r"state_dict\(\) before the end of a step": lambda model, opt: opt.state_dict(),
    "'outer.weight'.*has a gradient again before step": lambda model, opt: model.loss(2).backward(),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_step_that_has_begun_is_ended_by_step(message: str) -> None:
    model, opt = made("prodigy")
    train(opt, model, 1)
    model.loss(1).backward()
    with pytest.raises(RuntimeError, match=message):
        REFUSED[message](model, opt)
    opt.step()
    opt.state_dict()
    model.loss(2).backward()
    opt.zero_grad()  # what waits is given up; the others have made their step
    model.loss(3).backward()
