"""Rules of low rank beside the packages that users have them from, which `make setup` installs.

Packages step in fp64.  A spec in fp64, and its fp32 optimizer, take the same fifty steps with options drawn at random.
"""

from __future__ import annotations

import math
import random
import zlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.oracles import optional
from tests.test_against_papers import Steps
from tests.test_low_rank import CASES, LR, drawn, gaussian, gradients

SHAPES = [(6, 10), (8, 8), (12, 5), (7,), (1, 7), (7, 1), (3, 9, 8), (16, 4), (4, 20), (2, 8, 12)]
"""Packages take no stacks: they are given each matrix of one as a parameter of its own."""
svd = torch.linalg.svd


def signed_svd(x: Tensor, full_matrices: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """torch's in fp64, whose vectors of the shorter side have their largest entry above 0; packages leave that open."""
    u, s, vh = svd(x.double(), full_matrices=False)
    short = u if x.shape[0] < x.shape[1] else vh.mT
    sign = short.gather(0, short.abs().argmax(0, keepdim=True)).sign()
    return u * sign, s, vh * sign.mT


def each_of(start: Tensor) -> list[nn.Parameter]:
    """fp64 parameters for a package."""
    return [nn.Parameter(x.clone()) for x in (start.double().unbind() if start.ndim == 3 else [start.double()])]


def take(theirs: torch.optim.Optimizer, ps: list[nn.Parameter], g: Tensor) -> Tensor:
    """Make a package's step; return its weights in the shape of the gradient."""
    for p, x in zip(ps, g.double().view(len(ps), *ps[0].shape), strict=True):
        p.grad = x
    theirs.step()
    return torch.stack(list(ps)).view(g.shape)


def low_rank(case: str, ps: list[nn.Parameter], options: dict[str, Any]) -> torch.optim.Optimizer:
    """A package's optimizer, whose groups of low rank have options of their own; vectors are in a usual one."""
    names, more = ("rank", "update_proj_gap", "scale"), {"scale": options.get("alpha")} | options
    own = {k: more[k] for k in names} | {"projection_type": "std", "proj_type": "std", "proj": "random"}
    own["scale_type"] = "tensor" if case == "apollo_mini" else "channel"
    cls = optional(PACKAGES[case][0]).__dict__[PACKAGES[case][1]]
    usual = {k: options[k] for k in ("betas", "eps", "weight_decay")}
    return cls([{"params": ps, **(own if ps[0].ndim > 1 else {})}], lr=LR, **usual)


PACKAGES = {
    "galore": ("galore_torch", "GaLoreAdamW"),
    "apollo": ("apollo_torch", "APOLLOAdamW"),
    "apollo_mini": ("apollo_torch", "APOLLOAdamW"),
    "fira": ("pytorch_optimizer", "Fira"),
}


def settings(case: str, shape: tuple[int, ...]) -> random.Random:
    return random.Random(zlib.crc32(f"{case} {shape}".encode()))


def few(cases: list[str]) -> list[Any]:
    """(case, shape): every day two shapes of each case in turn, the others marked `full`."""
    return [
        pytest.param(case, shape, marks=() if (at - 2 * i) % len(SHAPES) < 2 else pytest.mark.full)
        for i, case in enumerate(cases)
        for at, shape in enumerate(SHAPES)
    ]


@pytest.mark.parametrize(("case", "shape"), few(list(PACKAGES)), ids=str)
@pytest.mark.parametrize("backend", ["fp64", "reference"])
@pytest.mark.filterwarnings("ignore:This implementation of AdamW")
def test_rules_of_low_rank_are_their_packages(
    case: str, shape: tuple[int, ...], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given the same signs of singular vectors and random numbers, within the bound of test_low_rank."""
    (name, slope, options), draw = CASES[case], settings(case, shape)
    if len(shape) > 2 and case != "galore":
        pytest.skip("the matrices of a stack share the norm that limits their steps: see test_low_rank")
    options = options | {"betas": (draw.uniform(0.5, 0.95), draw.uniform(0.8, 0.99)), "eps": draw.uniform(0.05, 0.1)}
    options |= {"weight_decay": draw.uniform(0.0, 0.2), "update_proj_gap": draw.choice([5, 7, 11])}
    if case == "fira":  # theirs renews at the multiples of the period, not after them
        options["update_proj_gap"] = draw.choice([1, 60])
    elif len(shape) > 1 and case != "apollo_mini":  # vectors of no singular value are arbitrary: of a batch other ones
        options["rank"] = draw.randint(1, min(shape) if len(shape) == 2 else 4)
    start = drawn(*shape, seed=1)
    ours, others = Steps(name, backend, start, LR, options), each_of(start)
    theirs, unit = low_rank(case, others, options), 2.0**-53 if backend == "fp64" else 2.0**-24
    for t, g in enumerate(gradients(shape), 1):

        def numbers(of: tuple[int, int], t: int = t, **_: Any) -> Tensor:
            tall = shape[0] >= shape[1]
            label = 0 if backend == "fp64" else "w"
            x = torch.from_numpy(gaussian(of[::-1] if tall else of, label, 0, (t - 1) // options["update_proj_gap"]))
            return x.mT if tall else x

        with monkeypatch.context() as patch:
            patch.setattr(torch.linalg, "svd", signed_svd)
            if case.startswith("apollo"):
                patch.setattr(optional("apollo_torch.random_projector"), "stable_randn", numbers)
            other = take(theirs, others, g)
        most = t * unit * (8 + LR * slope * 15 * 15 / 0.5 * math.sqrt(sum(shape)))
        ours(g, t, LR)
        assert ours.distance(other).max() <= most, t
    assert (other - start).abs().max() > 0.02
