"""The generated fp32 optimizers beside torch.optim's own over 100 steps.

torch in fp64 says what is exact.  The bound is the enclosure that the spec, read on intervals, carries from the first
step to the last (optgen.verify): every rounding of every operation in fp32, at its worst.  The generated optimizer must
end inside it, and so must torch's fp64 path: the enclosure holds the exact path of the rule as it is written here, so
that torch's rule is the same one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import generated
from optgen.verify.intervals import Interval
from tests.harness import spec_of
from tests.product import SPECS, Cell, Run, build

STEPS = 100

SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 1e-2}),
    ("SGD", {"lr": 1e-2, "momentum": 0.9, "weight_decay": 1e-2}),
    ("SGD", {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3}),
    ("SGD", {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    ("Adam", {"lr": 1e-3, "weight_decay": 1e-2}),
    ("Adam", {"lr": 1e-3, "amsgrad": True}),
    ("Adam", {"lr": 1e-3, "weight_decay": 1e-1, "decoupled_weight_decay": True}),
    ("AdamW", {"lr": 1e-3}),
    ("AdamW", {"lr": 1e-3, "amsgrad": True, "betas": (0.8, 0.95)}),
    ("RMSprop", {"lr": 1e-3}),
    ("RMSprop", {"lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-2}),
    ("Adagrad", {"lr": 1e-2, "lr_decay": 1e-2, "initial_accumulator_value": 0.1}),
    ("Adadelta", {"lr": 1.0}),
    ("Adamax", {"lr": 2e-3, "weight_decay": 1e-2}),
    ("NAdam", {"lr": 2e-3}),
    ("NAdam", {"lr": 2e-3, "weight_decay": 1e-1, "decoupled_weight_decay": True}),
    ("RAdam", {"lr": 1e-3}),
    ("RAdam", {"lr": 1e-3, "weight_decay": 1e-1, "decoupled_weight_decay": True}),
    ("Rprop", {"lr": 1e-3}),
]


def run(cls: Any, start: Tensor, grads: list[Tensor], **options: Any) -> Tensor:
    """The last weight, in fp64."""
    p = torch.nn.Parameter(start.clone())
    opt = cls([p], **options)
    for g in grads:
        p.grad = g.to(p.dtype)
        opt.step()
    return p.detach().double()


def enclosure(name: str, start: Tensor, grads: list[Tensor], options: dict[str, Any]) -> Interval:
    """Where the last weight of the rule lies, however its fp32 operations round."""
    spec = next(s for s in map(spec_of, SPECS) if s.class_name == name)
    flags = spec.flag_values(options)
    built = build(Cell(spec.name, "fp32", "float32", tuple(flags.items())))
    hypers = {h.name: options.get(h.name, h.default) for h in spec.hypers} | flags
    inside = Run(built, start, **options).enclosed()
    for g in grads:
        inside = built.enclose(inside, g, hypers)
    return inside.p


@pytest.mark.parametrize(
    ("name", "options", "maximize"), [(*setting, k % 2 == 1) for k, setting in enumerate(SETTINGS)], ids=str
)
def test_follows_torch(name: str, options: dict[str, Any], maximize: bool) -> None:
    generator = torch.Generator().manual_seed(7)
    start = torch.randn(40, 50, generator=generator)
    size = [10 ** float(torch.randn((), generator=generator)) for _ in range(STEPS)]
    grads = [torch.randn(40, 50, generator=generator) * s for s in size]
    inside = enclosure(name, start, [-g for g in grads] if maximize else grads, options)
    exact = run(getattr(torch.optim, name), start.double(), grads, foreach=False, maximize=maximize, **options)
    ours = run(getattr(generated, name), start, grads, plan="fp32", maximize=maximize, **options)
    assert inside.known.all()
    assert inside.contains(ours).all()
    assert inside.contains(exact).all()
    # Narrow enough to tell one rule from another: a small part of the way that the weights have gone.
    assert float((inside.hi - inside.lo).median()) < 0.01 * float((exact - start).abs().median())
