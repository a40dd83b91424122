"""Rules of several sweeps, and packed codes, on a device: strict maths, each bit beside eager torch on the same device.

Their fast kernels have no derived distance here: a sum of many elements carries its rounding into every one.  Strict
kernels have the same launches, walks and barriers, and every bit of theirs is known.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from gpu import catalog
from gpu.machine import in_words

FIRST = ("came", "lamb", "adafactor", "sm3", "prodigy", "muon")
"""Specs that are checked before the others: together they have every kind of stage."""

SHAPES = (
    (64, 2048), (200, 1100), (130, 150), (5000,), (40000,), (1, 300), (300, 1), (66, 3, 3, 3), (4, 128, 64), (), (0,),
)  # fmt: skip
STEPS = 3


@dataclass
class Staged:
    """What became of one setting."""

    case: str
    problems: list[str] = field(default_factory=list)
    elements: int = 0
    seconds: float = 0.0


def settings() -> list[tuple[str, str, str]]:
    """(spec, plan, parameter dtype) of rules that take several stages and of packed plans, the most telling first."""
    found = []
    for name in catalog.names():
        cls = catalog.generated_class(name)
        listed = catalog.plan_module(cls, cls.PLANS[0]).VARIANTS
        if any(v.stages for v in listed):
            found += [(cls.SPEC, "int8_split24", "bfloat16"), (cls.SPEC, "fp32", "float32")]
        packed = [plan for plan in cls.PLANS if catalog.is_packed(catalog.plan_module(cls, plan).VARIANTS)]
        found += [(cls.SPEC, plan, "bfloat16") for plan in packed]
    return sorted(found, key=lambda s: (FIRST.index(s[0]) if s[0] in FIRST else len(FIRST), s))


def check_one(spec: str, plan: str, param: str, device: torch.device, shapes: Any = SHAPES) -> Staged:
    """Two optimizers of one strict class, Triton and eager, through the same steps."""
    import optgen

    out, began = Staged(".".join([spec, plan, param])), time.monotonic()
    try:
        cls = optgen.compile(spec, plan=plan, maths="strict")
        draw = torch.Generator().manual_seed(1)
        dtype = getattr(torch, param)
        start = [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]
        sides = {}
        for backend in ("triton", "reference"):
            params = [torch.nn.Parameter(w.to(device, copy=True)) for w in start]
            sides[backend] = params, cls(params, plan=plan, backend=backend)
        for step in range(1, STEPS + 1):
            grads = [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]
            for params, opt in sides.values():
                for p, g in zip(params, grads, strict=True):
                    p.grad = g.to(device, copy=True)
                opt.step()
            out.problems += _differences(sides, step)
            if out.problems:
                break
        out.elements = STEPS * sum(w.numel() for w in start)
    except Exception as error:  # a kernel that does not run is a finding, not the end of the others
        out.problems.append(in_words(error))
    out.seconds = round(time.monotonic() - began, 1)
    return out


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)  # a tensor of no dimension has no bytes to view


def _differences(sides: dict[str, Any], step: int) -> Iterator[str]:
    (triton, fast), (eager, slow) = sides["triton"], sides["reference"]
    for k, (p, q) in enumerate(zip(triton, eager, strict=True)):
        pairs = {"p": (p.detach(), q.detach())} | {
            name: (value, slow.state[q][name]) for name, value in fast.state[p].items() if torch.is_tensor(value)
        }
        for name, (a, b) in pairs.items():
            if not torch.equal(_bytes(a), _bytes(b)):
                count = int((a != b).sum())
                yield f"step {step}, tensor {k} {tuple(p.shape)}, {name}: {count} of {a.numel()} values differ"
