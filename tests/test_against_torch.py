"""The generated fp32 optimizers beside torch.optim's own over 100 steps; torch in fp64 says what is exact.

What is stated: a generated optimizer strays from the exact path no further than torch's own fp32 one does, give
or take FACTOR and SLACK units in the last place of fp32, the unit taken at the largest magnitude that the weight
had on its way.  Both round every operation once; they differ in the order of a few products (torch folds the
bias correction into the step size, we into the scalars), so neither is always the nearer one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import generated

STEPS = 100
FACTOR = 2.0
SLACK = 4.0

SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 1e-2}),
    ("SGD", {"lr": 1e-2, "momentum": 0.9, "weight_decay": 1e-2}),
    ("SGD", {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3}),
    ("SGD", {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    ("Adam", {"lr": 1e-3, "weight_decay": 1e-2}),
    ("Adam", {"lr": 1e-3, "amsgrad": True}),
    ("AdamW", {"lr": 1e-3}),
    ("AdamW", {"lr": 1e-3, "amsgrad": True, "betas": (0.8, 0.95)}),
    ("RMSprop", {"lr": 1e-3}),
    ("RMSprop", {"lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-2}),
    ("Adagrad", {"lr": 1e-2, "lr_decay": 1e-2, "initial_accumulator_value": 0.1}),
    ("Adadelta", {"lr": 1.0}),
    ("Adamax", {"lr": 2e-3, "weight_decay": 1e-2}),
    ("NAdam", {"lr": 2e-3}),
    ("RAdam", {"lr": 1e-3}),
    ("Rprop", {"lr": 1e-3}),
]


def run(cls: Any, start: torch.Tensor, grads: list[torch.Tensor], **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(the last weight, the largest magnitude on the way), both fp64."""
    p = torch.nn.Parameter(start.clone())
    opt = cls([p], **options)
    largest = p.detach().double().abs()
    for g in grads:
        p.grad = g.to(p.dtype)
        opt.step()
        largest = torch.maximum(largest, p.detach().double().abs())
    return p.detach().double(), largest


@pytest.mark.parametrize(("name", "options"), SETTINGS, ids=lambda x: str(x))
@pytest.mark.parametrize("maximize", [False, True], ids=["min", "max"])
def test_follows_torch(name: str, options: dict[str, Any], maximize: bool) -> None:
    generator = torch.Generator().manual_seed(7)
    start = torch.randn(40, 50, generator=generator)
    size = [10 ** float(torch.randn((), generator=generator)) for _ in range(STEPS)]
    grads = [torch.randn(40, 50, generator=generator) * s for s in size]
    theirs = getattr(torch.optim, name)
    options = {**options, "maximize": maximize}
    exact, largest = run(theirs, start.double(), grads, foreach=False, **options)
    unit = 2.0 ** (torch.frexp(largest).exponent.double() - 24)
    ours, _ = run(getattr(generated, name), start, grads, plan="fp32", **options)
    torchs, _ = run(theirs, start, grads, foreach=False, **options)
    strayed, allowed = (((x - exact).abs() / unit) for x in (ours, torchs))
    assert float(strayed.max()) <= FACTOR * float(allowed.max()) + SLACK
