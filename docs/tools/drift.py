"""Measure how far rules under a plan get from the fp64 reading of their specs in one descent.

    python -m docs.tools.drift [--plan int8_split24] [--steps 1000] [--only muon soap]       rules of matrices
    python -m docs.tools.drift --elements [--only lion]            rules of elements under plans of fewer bits

The loss is tr(E' A E B) / 2, E = W - W*, of 64 x 64 matrices; A and B are symmetric with eigenvalues from 0.1 to 1.
Every run sees gradients at its own weights and the same noise, N(0, 0.05^2).  lr falls to 0 along a cosine.  A distance
is |W - W64| / |W64 - W0|, in Frobenius norms.  Prints the tables of docs/benchmarks/drift.md.
"""

from __future__ import annotations

import argparse
import importlib
import math
from typing import Any

import torch
from torch import Tensor, nn

from optgen import optim
from tools.prose import table

SIDE, NOISE, F64 = 64, 0.05, torch.float64
LOW: dict[str, Any] = {"lr": 0.1, "rank": 16}
RULES: dict[str, dict[str, Any]] = {
    "muon": {"lr": 0.1}, "low_rank_muon": {"lr": 0.1}, "normuon": {"lr": 0.06}, "adamuon": {"lr": 0.2},
    "polargrad": {"lr": 0.04}, "scion": {"lr": 0.06, "unconstrained": True}, "dion": {"lr": 0.3}, "dion2": {"lr": 0.5},
    "sinkgd": {"lr": 0.6}, "soap": {"lr": 0.1}, "soap_muon": {"lr": 0.1, "shampoo_beta": 0.99},
    "shampoo": {"lr": 0.04}, "kl_shampoo": {"lr": 0.02}, "psgd_kron": {"lr": 0.01}, "splus": {"lr": 4.0},
    "conda": {"lr": 0.2}, "galore": LOW, "apollo": LOW, "fira": LOW,
}  # fmt: skip
"""Rules by their specs, with options; at these rates 1,000 steps of most bring the loss below a thousandth.  SOAP-Muon
does not descend with its own shampoo_beta."""

ELEMENTS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 0.05}, "schedule_free_adamw": {"lr": 0.05}, "adan": {"lr": 0.05}, "ademamix": {"lr": 0.05},
    "rmsprop": {"lr": 0.02}, "adagrad": {"lr": 0.5}, "sgd": {"lr": 1.0, "momentum": 0.9}, "lamb": {"lr": 0.02},
    "lion": {"lr": 0.01}, "tiger": {"lr": 0.01}, "signum": {"lr": 0.01}, "madgrad": {"lr": 0.3},
    "prodigy": {"lr": 1.0, "d0": 1e-3}, "dadapt_adam": {"lr": 1.0, "d0": 1e-3},
}  # fmt: skip
FEWER = ("fp32", "int8_split24", "int6_split24", "int5_split24", "int4_split24")


class Descent:
    """The quadratic, and runs over it."""

    def __init__(self, steps: int, backend: str = "auto") -> None:
        draw = torch.Generator().manual_seed(0)
        turns = [torch.linalg.qr(torch.randn(SIDE, SIDE, generator=draw, dtype=F64)).Q for _ in range(2)]
        self.left, self.right = (q * torch.logspace(0, -1, SIDE, dtype=F64) @ q.mT for q in turns)
        self.start, self.end = torch.randn(2, SIDE, SIDE, generator=draw).bfloat16().double()
        self.steps, self.backend = steps, backend

    def gradient(self, w: Tensor, t: int) -> Tensor:
        noise = torch.randn(w.shape, generator=torch.Generator().manual_seed(t), dtype=F64)
        return self.left @ (w.double() - self.end) @ self.right + NOISE * noise

    def distances(self, name: str, plan: str) -> list[float]:
        """Return the distance of a plan's weights from those of the fp64 reading after each step but the first."""
        spec, found = getattr(importlib.import_module(f"specs.{name}"), name), []
        options = (RULES | ELEMENTS)[name]
        p = nn.Parameter(self.start.to(torch.float32 if plan == "fp32" else torch.bfloat16))
        p.grad_dtype = None
        opt = getattr(optim, spec.class_name)([p], plan=plan, backend=self.backend, **options)
        exact = kept = self.start
        states = host = None
        for t in range(1, self.steps + 1):
            lr = options["lr"] * (1 + math.cos(math.pi * (t - 1) / self.steps)) / 2
            exact, states, host = spec.evaluate(exact, self.gradient(exact, t), t, states, host, **options | {"lr": lr})
            p.grad, opt.param_groups[0]["lr"] = self.gradient(kept, t).float(), lr
            opt.step()
            (kept,) = opt.full_weights()
            found.append(float((kept - exact).norm() / (exact - self.start).norm().clamp(min=1e-30)))
        self.losses = self.loss(kept), self.loss(exact)
        return found[1:]

    def loss(self, w: Tensor) -> float:
        error = w.double() - self.end
        return float((error * (self.left @ error @ self.right)).sum() / 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default="int8_split24")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--elements", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in given.only or (ELEMENTS if given.elements else RULES):
        rows.append([f"`{name}`"])
        for plan in FEWER if given.elements else ("fp32", given.plan):
            run = Descent(given.steps)
            found = run.distances(name, plan)
            own, exact = run.losses
            if given.elements:
                rows[-1].append(f"{found[-1]:.1e} ({own / exact:.2f})")
            else:
                rows[-1] += [f"{max(found):.1e}", f"{found[-1]:.1e}"]
        print(*rows[-1], flush=True)
    head = [f"{plan}, {at}" for plan in ("fp32", given.plan) for at in ("farthest", "end")]
    print("\n".join(["", *table(["rule", *(FEWER if given.elements else head)], rows)]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
