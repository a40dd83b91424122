"""The short way through steps of Triton kernels (interpreted): taken where nothing is new, and the same bits."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from generated import LAMB, Adafactor, AdamW
from optgen.runtime import Optimizer
from optgen.runtime.layout import workspace
from optgen.runtime.step import fast_path, launch
from tests.training import bits, everything, params_of

SHAPES = [(3, 5), (7,), (), (0,), (4, 6)]


def give(params: list[nn.Parameter], step: int) -> None:
    draw = torch.Generator().manual_seed(step)
    for p in params:
        g = torch.randn(p.shape, generator=draw)
        if p.grad is None or p.grad.dtype is not torch.float32:
            p.grad = g
        else:
            p.grad.copy_(g)


def trained(cls: type[Optimizer], backend: str = "triton", short: bool = True, **options: Any) -> Optimizer:
    draw = torch.Generator().manual_seed(5)
    params = [nn.Parameter(torch.randn(shape, generator=draw)) for shape in SHAPES]
    groups = [{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.0}]
    opt = cls(groups, lr=0.1, plan="fp32", backend=backend, **options)
    if not short:
        opt._stepper.fast_path.keep = lambda *_: None  # type: ignore[method-assign]
    for step in range(2):
        give(params, step)
        opt.step()
    return opt


def first(opt: Optimizer) -> Any:
    return params_of(opt)[0]


def gradients_elsewhere(opt: Optimizer) -> None:
    opt.kept = [p.grad for p in params_of(opt)]  # type: ignore[attr-defined]  # alive, so that new ones lie elsewhere
    for p in params_of(opt):
        p.grad = p.grad * 2


def gradient_of_another_dtype(opt: Optimizer) -> None:
    first(opt).grad_dtype = None
    first(opt).grad = first(opt).grad.bfloat16()


def unaligned(x: Tensor) -> Tensor:
    """A bucket takes another kernel for it."""
    return torch.cat([torch.zeros(1), x.flatten()])[1:].view(x.shape)


def add_group(opt: Optimizer) -> None:
    new = [nn.Parameter(torch.ones(5, 2))]
    give(new, 3)
    opt.add_param_group({"params": new})


def tune(opt: Optimizer) -> None:
    with launch.tuned(launch.Tuning(tiles=1)):
        opt.step()


CHANGES: dict[str, Callable[[Optimizer], object]] = {
    "nothing": lambda opt: None,
    "rate": lambda opt: opt.param_groups[0].update(lr=0.03),
    "tensor_rate": lambda opt: opt.param_groups[1].update(lr=torch.tensor(0.03)),
    "maximize": lambda opt: opt.param_groups[0].update(maximize=True),
    "gradient_elsewhere": lambda opt: setattr(first(opt), "grad", opt.__dict__.setdefault("kept", first(opt).grad) + 0),
    "gradients_elsewhere": gradients_elsewhere,
    "gradient_unaligned": lambda opt: setattr(first(opt), "grad", unaligned(first(opt).grad)),
    "gradient_of_another_dtype": gradient_of_another_dtype,
    "no_gradient": lambda opt: setattr(params_of(opt)[4], "grad", None),
    "new_field": lambda opt: opt.state[first(opt)].update(exp_avg=opt.state[first(opt)]["exp_avg"] * 2),
    "another_step": lambda opt: opt.state[first(opt)].update(step=opt.state[first(opt)]["step"] + 40),
    "option": lambda opt: opt.param_groups[0].update(amsgrad=False, comment=1),
    "add_group": add_group,
    "tune": tune,
}
SHORT = {"nothing", "rate", "tensor_rate", "maximize", "gradient_elsewhere", "gradients_elsewhere"}


@pytest.mark.parametrize("options", [{}, {"capturable": True}], ids=["", "capturable"])
@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_is_seen(change: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    opt, long = trained(AdamW, **options), trained(AdamW, short=False, **options)
    assert opt._stepper.fast_path.last is not None
    assert long._stepper.fast_path.last is None
    taken: list[bool] = []
    again = fast_path.CachedStep.run
    monkeypatch.setattr(fast_path.CachedStep, "run", lambda *args: taken.append(again(*args)) or taken[-1])
    for one in (opt, long):
        CHANGES[change](one)
        one.step()
        give(params_of(one), 7)
        one.step()
    assert everything(opt) == everything(long)
    assert taken[0] == (change in SHORT)


KINDS = (None, torch.float32, torch.bfloat16)


@pytest.mark.parametrize(("rule", "backend"), [(AdamW, "cpp"), (LAMB, "cpp"), (Adafactor, "cpp"), (AdamW, "triton")])
def test_gradients_that_come_go_and_change_their_dtype(
    rule: type[Optimizer], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside an optimizer that never takes the short way."""
    taken: list[bool] = []
    again = fast_path.CachedStep.run
    monkeypatch.setattr(fast_path.CachedStep, "run", lambda *args: taken.append(again(*args)) or taken[-1])
    draws = 3 if backend == "triton" else 6
    for seed in range(draws):
        draw, kinds = random.Random(seed), list[torch.dtype | None]([torch.float32] * len(SHAPES))
        twins = [trained(rule, backend), trained(rule, backend, short=False)]
        for step in range(12):
            if draw.random() < 0.4:
                kinds[draw.randrange(len(kinds))] = draw.choice(KINDS)
            for one in twins:
                one.zero_grad()
                give(params_of(one), step)
                for p, kind in zip(params_of(one), kinds, strict=True):
                    p.grad_dtype = None
                    p.grad = p.grad.to(kind) if kind else None
                one.step()
            assert everything(twins[0]) == everything(twins[1])
    assert sum(taken) > 3 * draws < 3 * taken.count(False)


@pytest.mark.parametrize("options", [{}, {"capturable": True}], ids=["", "capturable"])
def test_steps_of_several_stages(options: dict[str, Any]) -> None:
    opt, long = trained(LAMB, **options), trained(LAMB, short=False, **options)
    kept, taken = opt._stepper.fast_path.last, []
    for step in range(4):
        for one in (opt, long):
            taken.append([p.grad for p in params_of(one)])  # alive, so that the new ones lie elsewhere
            if step > 1:
                one.zero_grad()
            give(params_of(one), step)
            one.step()
        assert opt._stepper.fast_path.last is kept is not None
    assert everything(opt) == everything(long)


def test_a_step_that_broke_off_while_tables_followed_is_made_right_the_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step that finds no memory for a table is made by the next call, once there is some."""
    opt, other = trained(AdamW), trained(AdamW)
    kept = [p.grad for p in params_of(opt)]  # alive, so that the new ones lie elsewhere
    for one in (opt, other):
        one.zero_grad()
        give(params_of(one), 9)
    with monkeypatch.context() as patch:
        patch.setattr(workspace, "sent", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
        before = everything(opt)
        with pytest.raises(torch.OutOfMemoryError, match="full"):
            opt.step()
        assert everything(opt) == before
    for one in (opt, other):
        one.step()
    assert everything(opt) == everything(other)
    del kept


@pytest.mark.parametrize("backend", ["triton", "cpp"])
def test_under_a_scaler(backend: str) -> None:
    """The short way divides and skips, too."""
    opt, plain = trained(AdamW, backend, fused=True), trained(AdamW, backend)
    for step, found in enumerate([0.0, 0.0, 1.0, 0.0]):
        give(params_of(opt), step)
        for p in params_of(opt):
            p.grad.mul_(8.0)
        opt.grad_scale, opt.found_inf = torch.tensor(8.0), torch.tensor(found)  # type: ignore[attr-defined]
        opt.step()
        assert opt._stepper.fast_path.last is not None
        if not found:
            give(params_of(plain), step)
            plain.step()
    values = [
        [(bits(p), {k: bits(x) if k != "step" else int(x) for k, x in one.state[p].items()}) for p in params_of(one)]
        for one in (opt, plain)
    ]
    assert values[0] == values[1]
