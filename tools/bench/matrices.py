"""Time steps of rules of matrices beside the matrix products that they consist of, and beside other packages.

The matrices are those of GPT-2's hidden layers (Radford et al. 2019), fp32. "products" are the same products in torch
by themselves, in batches of one shape, without momentum, statistics or weights.  SOAP and Shampoo are timed between two
refreshes of their bases and roots, GaLore between two of its spaces; Kron refreshes its factors in each step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from optgen import optim
from optgen.runtime.reference import matrices
from optgen.runtime.reference.matrices import newton_schulz
from tools.bench.race import Race, Shapes, gpt2, installed, run_races

QUIET: dict[str, Any] = {"precondition_frequency": 10**6}
RANK = 128

SQUARES = ((1024, 1024), (2048, 2048), (4096, 1024))


def muon_products(x: Tensor) -> object:
    return newton_schulz(x, 5, 1.0, 1e-7, 3.4445, -4.7750, 2.0315)


def soap_products(x: Tensor, left: Tensor, right: Tensor) -> object:
    turned = left.mT @ x @ right
    return turned @ turned.mT, turned.mT @ turned, left @ turned @ right.mT


def shampoo_products(x: Tensor, left: Tensor, right: Tensor) -> object:
    return x @ x.mT, x.mT @ x, left @ x @ right


def kron_products(x: Tensor, left: Tensor, right: Tensor) -> object:
    """The products of a refresh, two of them solutions with triangular factors, and of the step itself."""
    solve = partial(torch.linalg.solve_triangular, upper=False)
    a, b = left @ x @ right.mT, solve(right.mT, solve(left.mT, x).mT).mT
    grams = [(y @ y.mT - z @ z.mT) @ q for y, z, q in ((a, b, left), (a.mT, b.mT, right))]
    return grams, left.mT @ (left @ x @ right.mT) @ right


def galore_products(x: Tensor, left: Tensor, right: Tensor) -> object:
    """The gradient into the space of the shorter side, and the step back."""
    x, basis = (x, left) if x.shape[-2] < x.shape[-1] else (x.mT, right)
    basis = basis[..., :RANK]
    return basis @ (basis.mT @ x)


def all_products(one: Callable[..., object], shapes: Shapes, layers: int) -> Callable[[], object]:
    """Return the products of a step, of all matrices of one shape at a time."""
    sizes = [((m, n), (m, m), (n, n)) if one is not muon_products else ((m, n),) for m, n in shapes]
    made = [[torch.randn(layers, *size).triu(0 if k else -size[0]) for k, size in enumerate(x)] for x in sizes]
    for _, left, right in made if one is kron_products else ():
        for q in (left, right):  # whose solutions are finite
            q.mul_(1e-3).diagonal(dim1=-2, dim2=-1).fill_(1.0)
    return lambda: [one(*x) for x in made]


def by_blocks(rows: int) -> Callable[[Tensor], object]:
    """Newton-Schulz whose symmetric products are computed by blocks from so many rows on."""

    def products(x: Tensor) -> object:
        with patch.object(matrices, "LARGE", rows):
            return muon_products(x)

    return products


def stepping(make: Callable[[list[nn.Parameter]], Any], shapes: Shapes) -> Callable[[], object]:
    """Return the step of an optimizer, which has made two: its first compiles and makes states."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    gradients, opt = [torch.randn(p.shape, generator=generator) for p in params], make(params)

    def step() -> None:
        for p, g in zip(params, gradients, strict=True):
            p.grad = g  # heavyball takes it away
        opt.step()

    step()
    step()
    return step


Products = Callable[..., object]
RULES: dict[str, tuple[Products, dict[str, Any]]] = {
    "Muon": (muon_products, {}),
    "NorMuon": (muon_products, {}),
    "SOAP": (soap_products, QUIET),
    "Shampoo": (shampoo_products, QUIET),
    "Kron": (kron_products, {}),
    "GaLore": (galore_products, {"rank": RANK}),
}
"""Rule -> the products of a step, and its options."""


def others() -> dict[str, dict[str, Callable[[list[nn.Parameter]], Any]]]:
    """Return rule -> name -> optimizers of other packages."""
    found: dict[str, dict[str, Callable[[list[nn.Parameter]], Any]]] = {rule: {} for rule in RULES}
    found["Muon"]["torch.optim.Muon"] = lambda ps: torch.optim.Muon(ps, lr=1e-3)
    if installed("pytorch-optimizer"):
        import pytorch_optimizer as po

        name = "pytorch-optimizer"
        found["Muon"][name] = lambda ps: po.Muon([{"params": ps, "use_muon": True}])
        found["SOAP"][name] = lambda ps: po.SOAP(ps, **QUIET)
        found["Shampoo"][name] = lambda ps: po.Shampoo(ps, preconditioning_compute_steps=10**6)
        if torch.backends.opt_einsum.is_available():  # else it makes outer products of whole matrices
            found["Kron"][name] = lambda ps: po.Kron(ps, pre_conditioner_update_probability=1.0)
        group = {"rank": RANK, "update_proj_gap": 10**6, "scale": 0.25, "projection_type": "std"}
        found["GaLore"][name] = lambda ps: po.GaLore([{"params": ps, **group}])
    if installed("heavyball"):
        import heavyball

        heavyball.utils.compile_mode = None  # else torch compiles each shape for minutes
        limits = {"merge_dims": False, "max_precond_dim": 10000, "use_precond_schedule": False, **QUIET}
        found["Muon"]["heavyball"] = heavyball.Muon
        found["SOAP"]["heavyball"] = lambda ps: heavyball.SOAP(ps, **limits)
    return found


def races(asked: argparse.Namespace) -> Iterator[Race]:
    for x in [torch.randn(shape) for shape in SQUARES] if asked.blocks else ():
        runs = {"whole products": by_blocks(10**9), "symmetric ones by blocks": by_blocks(0)}
        title = f"Newton-Schulz, {x.shape[0]} x {x.shape[1]}"
        yield Race(title, {name: partial(products, x) for name, products in runs.items()})
    shapes = [x for x in gpt2(asked.width, 1) if len(x) == 2][2:]
    peers = others()
    for rule in asked.rules:
        products, options = RULES[rule]
        cls = getattr(optim, rule)
        runs = {"products": all_products(products, shapes, asked.layers)}
        makes = {f"optgen, {plan}": partial(cls, plan=plan, **options) for plan in ("int8_split24", "fp32")}
        for name, make in (makes | peers[rule]).items():
            runs[name] = stepping(make, shapes * asked.layers)
        yield Race(f"{rule}, width {asked.width}, layers: {asked.layers}", runs)


def main(given: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Steps of matrix rules beside their products")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--blocks", action="store_true", help="first Newton-Schulz by blocks and as whole products")
    return run_races(races, parser, given)
