"""Rules of matrices beside the packages that users have them from, which `make setup` installs.

Packages step in fp64.  A spec in fp64, and its fp32 optimizer, take the same fifty steps with options drawn at random.
"""

from __future__ import annotations

import functools
import math
import random
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optgen import optim
from optgen.runtime.records import series
from optgen.runtime.reference import matrices
from tests.harness import spec_of
from tests.oracles import optional
from tests.test_low_rank import CASES, LR, drawn, gaussian, gradients

SHAPES = [(6, 10), (8, 8), (12, 5), (7,), (1, 7), (7, 1), (3, 9, 8), (16, 4), (4, 20), (2, 8, 12)]
"""Packages take no stacks: they are given each matrix of one as a parameter of its own."""
SLOPE = 500.0
"""The most by which an error of a matrix of norm 1 grows in five rounds, the products of their first coefficients: 485
of Jordan's."""
svd = torch.linalg.svd


def in_fp64(x: Tensor, steps: float, normalize: float, eps: float, *numbers: float) -> Tensor:
    """Rounds of Newton-Schulz, as optgen calls them, without roundings to bf16."""
    parts = [numbers[k : k + 3] for k in range(0, len(numbers), 3)]
    rounds = series.SEEN[int(numbers[0])] if len(numbers) == 1 else parts
    y = x.double()
    y = y / torch.linalg.matrix_norm(y, keepdim=True).clamp(min=eps)
    for k in range(int(steps)):
        a, b, c = rounds[min(k, len(rounds) - 1)]
        square = y @ y.mT
        y = a * y + (b * square + c * square @ square) @ y
    return y.to(x.dtype)


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


class Ours:
    """A rule in fp64, or its optimizer under plan fp32."""

    def __init__(self, rule: str, start: Tensor, backend: str, options: dict[str, Any]) -> None:
        self.spec, self.backend, self.options, self.t = spec_of(rule), backend, options, 0
        self.p, self.weight, self.states = nn.Parameter(start.clone()), start.double(), {}
        if backend != "fp64":
            cls = getattr(optim, self.spec.class_name)
            blocks = {"blocks": {"w": len(start)}} if start.ndim == 3 else {}
            self.opt = cls([("w", self.p)], plan="fp32", backend=backend, lr=LR, **blocks, **options)

    def step(self, g: Tensor) -> Tensor:
        self.t += 1
        if self.backend == "fp64":
            self.weight, self.states, _ = self.spec.evaluate(
                self.weight, g.double(), self.t, self.states, lr=LR, **self.options
            )
            return self.weight
        self.p.grad = g
        self.opt.step()
        self.states = self.opt.state[self.p]
        return self.p.detach().double()


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
    ours, others = Ours(name, start, backend, options), each_of(start)
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
        assert (ours.step(g) - other).abs().max() <= most, t
    assert (other - start).abs().max() > 0.02


def muon(ps: list[nn.Parameter], o: dict[str, Any]) -> Any:
    kept = {k: o[k] for k in ("momentum", "weight_decay", "nesterov")}
    group = {"params": ps, "use_muon": True, "use_adjusted_lr": o["match_rms_adamw"], **kept}
    return optional("pytorch_optimizer").Muon([group], lr=LR)


def normuon(ps: list[nn.Parameter], o: dict[str, Any]) -> Any:
    own = {"momentum": o["betas"][0], "beta2": o["betas"][1], "nesterov": False, "update_scale": "match_rms"}
    group = {"params": ps, "use_muon": True, "weight_decay": o["weight_decay"], "eps": o["eps"], **own}
    return optional("pytorch_optimizer").NorMuon([group], lr=LR)


def scion(ps: list[nn.Parameter], o: dict[str, Any]) -> Any:
    own = {"momentum": o["momentum"], "scale": o["scale"], "constraint": not o["unconstrained"]}
    return optional("pytorch_optimizer").SCION(ps, lr=LR, **own)


ORTHOGONAL: dict[str, tuple[Any, Callable[[random.Random], dict[str, Any]]]] = {
    "muon": (
        muon, lambda d: {"momentum": d.uniform(0.5, 0.95), "weight_decay": d.uniform(0, 0.2)}
        | {"nesterov": d.random() < 0.5, "match_rms_adamw": d.random() < 0.5},
    ),
    "normuon": (
        normuon,
        lambda d: {"betas": (d.uniform(0.5, 0.95), d.uniform(0.8, 0.95)), "weight_decay": d.uniform(0, 0.2)}
        | {"eps": 1e-16},
    ),
    "scion": (
        scion, lambda d: {"momentum": d.uniform(0.1, 0.9), "scale": d.uniform(0.5, 4)}
        | {"unconstrained": d.random() < 0.5},
    ),
}  # fmt: skip


NEWTON_SCHULZ = ("muon.base", "muon.normuon", "scion")
"""Modules of pytorch_optimizer that have Newton-Schulz."""


@pytest.mark.parametrize(("rule", "shape"), few(list(ORTHOGONAL)), ids=str)
def test_rules_of_newton_schulz_are_their_packages(
    rule: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rounds in fp64, each with its own: roundings of gradients of norm 15, relative to the momentum's norm, grow
    by SLOPE.  NorMuon divides rows by their mean size."""
    (make, given), draw = ORTHOGONAL[rule], settings(rule, shape)
    if len(shape) < 2 and rule != "scion":
        pytest.skip("packages take AdamW, in a group of its own")
    options, start = given(draw), drawn(*shape, seed=1)
    for module in NEWTON_SCHULZ:
        where = optional(f"pytorch_optimizer.optimizer.{module}")
        rounds = functools.partial(where.zero_power_via_newton_schulz_5, dtype=torch.float64)
        monkeypatch.setattr(where, "zero_power_via_newton_schulz_5", rounds)
    monkeypatch.setattr(matrices, "newton_schulz", in_fp64)
    ours, others = Ours(rule, start, "fp64", options), each_of(start)
    theirs, most, least = make(others, options), 0.0, 1.0
    for t, g in enumerate(gradients(shape), 1):
        weight, other = ours.step(g), take(theirs, others, g)
        sizes = ours.states["momentum_buffer"].reshape(len(others), -1).norm(dim=1)
        size = 15 / min(15.0, float(sizes.min()))
        if rule == "normuon":
            least = min(least, float(ours.states["row_sq"].min().sqrt()))
        factor = math.sqrt(max(shape)) * options.get("scale", 1.0) / least
        most += 2.0**-53 * (8 + LR * factor * SLOPE * 8 * size)
        assert (weight - other).abs().max() <= most, t
    assert (other - start).abs().max() > 0.02


def steady(size: int, steps: int = 50) -> list[Tensor]:
    """Square gradients whose singular values are nearly 1, 2, 3 ..., along directions that stay."""
    draw = torch.Generator().manual_seed(3)
    u, v = (torch.linalg.qr(torch.randn(size, size, generator=draw)).Q for _ in range(2))
    inner = torch.arange(size, 0, -1.0).diag()
    return [u @ (inner + 0.05 * torch.randn(size, size, generator=draw)) @ v.mT for _ in range(steps)]


def heavyballs_soap(p: nn.Parameter, o: dict[str, Any]) -> Any:
    usual = {"storage_dtype": "float64", "compile_step": False, "multi_tensor": False, "merge_dims": False}
    optional("heavyball").utils.compile_mode = None
    return optional("heavyball").SOAP([p], lr=LR, use_precond_schedule=False, **usual, **o)


def splus(p: nn.Parameter, o: dict[str, Any]) -> Any:
    own = {k: v for k, v in o.items() if k != "inverse_every"}
    return optional("pytorch_optimizer").SPlus([p], lr=LR, inverse_steps=o["inverse_every"], **own)


def conda(p: nn.Parameter, o: dict[str, Any]) -> Any:
    return optional("pytorch_optimizer").Conda([p], lr=LR, **o)


IN_BASES: dict[str, tuple[Callable[[nn.Parameter, dict[str, Any]], Any], dict[str, Any]]] = {
    "soap": (heavyballs_soap, {"precondition_frequency": 1, "weight_decay": 0.0, "eps": 1e-12}),
    "splus": (splus, {"inverse_every": 1, "ema_rate": 0.9}),
    "conda": (conda, {"update_proj_gap": 1, "scale": 0.25, "eps": 0.05}),
}


@pytest.mark.parametrize("size", [8, 5, 3])
@pytest.mark.parametrize("case", IN_BASES)
@pytest.mark.parametrize("backend", ["fp64", "reference"])
def test_rules_in_bases_are_their_packages(case: str, size: int, backend: str) -> None:
    """With new bases at every step, which heavyball takes in fp32: of errors as large as the largest eigenvalue,
    size**2, over the least distance of two, 3.  A step changes by eight of them at most, and what SPlus has near 0 by
    its sign; SOAP's divides those of elements, and eps, by their root mean squares."""
    (make, options), draw = IN_BASES[case], settings(case, (size, size))
    options = options | {"betas": (draw.uniform(0.5, 0.95), draw.uniform(0.8, 0.99))}
    options |= {"weight_decay": draw.uniform(0.0, 0.2)} if case != "soap" else {"shampoo_beta": draw.uniform(0.5, 0.95)}
    start = drawn(size, size, seed=1)
    ours, other = Ours(case, start, backend, options), nn.Parameter(start.double())
    theirs, most, error = make(other, options), 0.0, 8 * 2.0**-24 * size**3 / 3
    for t, g in enumerate(steady(size), 1):
        other.grad = g.double()
        theirs.step()
        weight = ours.step(g)
        if case == "splus":
            most += 2 * LR / size * int((ours.states["momentum"].abs() <= 2.0**-24 * size**3 / 3).sum())
        moved = error
        if case == "soap" and t > 1:
            moved = (error / size + options["eps"]) * float(ours.states["exp_avg_sq"].reciprocal().sum().sqrt())
        most += 8 * 2.0**-24 + LR * moved
        assert (weight - other).abs().max() <= most, t
    assert (other - start).abs().max() > 0.05
