"""The short way through steps of Triton kernels (interpreted): taken where nothing is new, and the same bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from optgen.optim import AdamW
from optgen.runtime import Optimizer
from optgen.runtime.layout import workspace
from tests.test_fast_path import CHANGES as OF_CPP
from tests.training import everything, has_plan, keep_no_plan, params_of, planned_steps
from tests.training import give_in_place as give

SHAPES = [(3, 5), (7,), (), (0,), (4, 6)]


def trained(cls: type[Optimizer], backend: str = "triton", short: bool = True, **options: Any) -> Optimizer:
    draw = torch.Generator().manual_seed(5)
    params = [nn.Parameter(torch.randn(shape, generator=draw)) for shape in SHAPES]
    groups = [{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.0}]
    opt = cls(groups, lr=0.1, plan="fp32", backend=backend, **options)
    if not short:
        keep_no_plan(opt)
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


def unaligned(x: Tensor) -> Tensor:
    """A bucket takes another kernel for it."""
    return torch.cat([torch.zeros(1), x.flatten()])[1:].view(x.shape)


CHANGES: dict[str, Callable[[Optimizer], object]] = {
    **{key: OF_CPP[key] for key in ("nothing", "lr", "maximize", "no_gradient", "gradient_half")},
    **{key: OF_CPP[key] for key in ("add_group", "new_field")},
    "tensor_rate": lambda opt: opt.param_groups[1].update(lr=torch.tensor(0.03)),
    "gradient_elsewhere": lambda opt: setattr(first(opt), "grad", opt.__dict__.setdefault("kept", first(opt).grad) + 0),
    "gradients_elsewhere": gradients_elsewhere,
    "gradient_unaligned": lambda opt: setattr(first(opt), "grad", unaligned(first(opt).grad)),
    "another_step": lambda opt: opt.state[first(opt)].update(step=opt.state[first(opt)]["step"] + 40),
    "option": lambda opt: opt.param_groups[0].update(amsgrad=False, comment=1),
}
SHORT = {"nothing", "lr", "tensor_rate", "maximize", "gradient_elsewhere", "gradients_elsewhere"}


@pytest.mark.parametrize("options", [{}, {"capturable": True}], ids=["", "capturable"])
@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_is_seen(change: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    opt, long = trained(AdamW, **options), trained(AdamW, short=False, **options)
    assert has_plan(opt) and not has_plan(long)
    taken = planned_steps(monkeypatch)
    for one in (opt, long):
        CHANGES[change](one)
        one.step()
        give(params_of(one), 7)
        one.step()
    assert everything(opt) == everything(long)
    assert taken[0] == (change in SHORT)


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
