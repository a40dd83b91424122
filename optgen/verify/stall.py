"""Predict, before a run, which share of weights and states rounding to nearest keeps where they are.

Weights N(0, weight_std^2) take steps of the rule's own fp64 reading with gradients N(0, gradient_std^2), independent
from step to step.  Every value is rounded to one dtype, second moments after their decay and again after their
addition, as torch.optim's eager steps do.  docs/frozen.md has the formulas of AdamW.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from optgen.lang.spec import Spec

SIDE, LAST = 64, 8
"""The side of the matrix of weights, and the steps at the end over which shares are taken."""


def predict(
    spec: Spec, dtype: torch.dtype, options: Mapping[str, Any], *,
    weight_std: float = 0.02, gradient_std: float = 1e-3, steps: int = 1000, seed: int = 0,
) -> dict[str, float]:  # fmt: skip
    """Return the shares that stay, after so many steps with these hyper-parameters: of the "weights" that a step would
    change, and of each state of elements what a gradient of 0 would."""
    draw = torch.Generator().manual_seed(seed)
    p = (torch.randn(SIDE, SIDE, generator=draw) * weight_std).to(dtype).double()
    states: dict[str, Tensor] = {}
    host: dict[str, Any] = {}
    found: dict[str, list[float]] = {}
    second = {s.name for s in spec.states if s.nonneg}
    for t in range(1, steps + 1):
        g = torch.randn(SIDE, SIDE, generator=draw).double() * gradient_std
        idle = spec.evaluate(p, torch.zeros_like(g), t, states, host, **options)[1]
        new, after, host = spec.evaluate(p, g, t, states, host, **options)
        if t > steps - LAST:
            kept = ((name, states[name], idle[name]) for name in states)
            for name, before, x in [("weights", p, new), *kept]:
                moving = x != before
                if x.shape == p.shape and bool(moving.any()):
                    found.setdefault(name, []).append(float((x.to(dtype) == before)[moving].double().mean()))
        for name, x in after.items():
            apart = idle[name].to(dtype) + (x - idle[name]) if name in second else x
            states[name] = apart.to(dtype).double()
        p = new.to(dtype).double()
    return {name: sum(shares) / len(shares) for name, shares in found.items()}
