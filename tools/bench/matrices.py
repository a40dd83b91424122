"""Time steps of Muon and SOAP beside the matrix products that they consist of, and beside other packages.

The matrices are those of GPT-2's hidden layers (Radford et al. 2019), fp32. "products" are the same products in torch
by themselves, in batches of one shape, without momentum, statistics or weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from optgen.optim import SOAP, Muon
from optgen.runtime.reference import matrices
from optgen.runtime.reference.matrices import newton_schulz
from tools.bench.race import Race, gpt2, installed, run_races

HIDDEN = [shape for shape in gpt2(layers=1) if len(shape) == 2 and shape[0] not in (50257, 1024)]
QUIET: dict[str, Any] = {"precondition_frequency": 10**6}
"""SOAP is timed between two refreshes of its bases."""


SQUARES = ((1024, 1024), (2048, 2048), (4096, 1024))


def muon_products(layers: int) -> Callable[[], object]:
    """Newton-Schulz of all matrices of one shape at a time."""
    stacks = [torch.randn(layers, *shape) for shape in HIDDEN]
    return lambda: [newton_schulz(x, 5, 1.0, 1e-7, 3.4445, -4.7750, 2.0315) for x in stacks]


def soap_products(layers: int) -> Callable[[], object]:
    """The six products of a step between two refreshes, for all matrices of one shape at a time."""
    made = [(torch.randn(layers, m, n), torch.randn(layers, m, m), torch.randn(layers, n, n)) for m, n in HIDDEN]

    def products() -> list[Tensor]:
        out = []
        for x, left, right in made:
            turned = left.mT @ x @ right
            out += [turned @ turned.mT, turned.mT @ turned, left @ turned @ right.mT]
        return out

    return products


def by_blocks(rows: int) -> Callable[[Tensor], object]:
    """Newton-Schulz whose symmetric products are computed by blocks from so many rows on."""

    def products(x: Tensor) -> object:
        with patch.object(matrices, "LARGE", rows):
            return newton_schulz(x, 5, 1.0, 1e-7, 3.4445, -4.7750, 2.0315)

    return products


def stepping(make: Callable[[list[nn.Parameter]], Any], layers: int) -> Callable[[], object]:
    """Return the step of an optimizer, which has made two: its first compiles and makes states."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in HIDDEN * layers]
    gradients, opt = [torch.randn(p.shape, generator=generator) for p in params], make(params)

    def step() -> None:
        for p, g in zip(params, gradients, strict=True):
            p.grad = g  # heavyball takes it away
        opt.step()

    step()
    step()
    return step


def races(asked: argparse.Namespace) -> Iterator[Race]:
    makes: dict[str, dict[str, Callable[[list[nn.Parameter]], Any]]] = {
        "Muon": {
            "optgen, int8_split24": lambda ps: Muon(ps, plan="int8_split24"),
            "optgen, fp32": lambda ps: Muon(ps, plan="fp32"),
            "torch.optim.Muon": lambda ps: torch.optim.Muon(ps, lr=1e-3),
        },
        "SOAP": {
            "optgen, int8_split24": lambda ps: SOAP(ps, plan="int8_split24", **QUIET),
            "optgen, fp32": lambda ps: SOAP(ps, plan="fp32", **QUIET),
        },
    }
    if installed("pytorch-optimizer"):
        import pytorch_optimizer as po

        makes["Muon"]["pytorch-optimizer"] = lambda ps: po.Muon([{"params": ps, "use_muon": True}])
        makes["SOAP"]["pytorch-optimizer"] = lambda ps: po.SOAP(ps, **QUIET)
    if installed("heavyball"):
        import heavyball

        heavyball.utils.compile_mode = None  # else torch compiles each shape for minutes
        limits = {"merge_dims": False, "max_precond_dim": 10000, "use_precond_schedule": False, **QUIET}
        makes["Muon"]["heavyball"] = heavyball.Muon
        makes["SOAP"]["heavyball"] = lambda ps: heavyball.SOAP(ps, **limits)
    for x in [torch.randn(shape) for shape in SQUARES]:
        runs = {"whole products": by_blocks(10**9), "symmetric ones by blocks": by_blocks(0)}
        title = f"Newton-Schulz, {x.shape[0]} x {x.shape[1]}"
        yield Race(title, {name: partial(products, x) for name, products in runs.items()})
    for (rule, listed), products in zip(makes.items(), (muon_products, soap_products), strict=True):
        steps = {name: stepping(make, asked.layers) for name, make in listed.items()}
        yield Race(f"{rule}, {asked.layers} layers", {"products": products(asked.layers), **steps})


def main(given: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Steps of matrix rules beside their products")
    parser.add_argument("--layers", type=int, default=2)
    return run_races(races, parser, given)
