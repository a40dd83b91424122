"""Time steps of Muon and SOAP on this machine's CPU beside the matrix products that they consist of, and beside peers.

    .venv/bin/python tools/bench_matrices.py [--layers 2] [--rounds 7] [--cpu-time]

The matrices are those of GPT-2's hidden layers (Radford et al. 2019), fp32. Contenders take turns in every round; a
ratio is the median of the rounds' own ratios. "products" are the same products in torch by themselves, in batches of
one shape, without momentum, statistics or weights. `--cpu-time` measures the CPU time of one thread, which
other work on the machine disturbs less than wall time. Prints a table for docs/benchmarks/matrices.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from optgen.optim import SOAP, Muon  # noqa: E402
from optgen.runtime.reference.matrices import newton_schulz  # noqa: E402
from tools import benchmark  # noqa: E402
from tools.prose import table  # noqa: E402

HIDDEN = [shape for shape in benchmark.gpt2(layers=1) if len(shape) == 2 and shape[0] < 50000 and shape[0] != 1024]
FREQUENCY = 10
"""Steps between two refreshes of SOAP's bases, its default; timed are those between them."""


def params(layers: int) -> list[nn.Parameter]:
    """Return the matrices of some layers, with gradients."""
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in HIDDEN * layers]
    for p in made:
        p.grad = torch.randn(p.shape, generator=generator)
    return made


def muon_products(layers: int) -> Callable[[], object]:
    """Newton-Schulz of all matrices of one shape at a time."""
    stacks = [torch.randn(layers, *shape) for shape in HIDDEN]
    return lambda: [newton_schulz(x, 5, 1.0, 0.0, 1e-7, 3.4445, -4.7750, 2.0315) for x in stacks]


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


def stepping(make: Callable[[list[nn.Parameter]], Any], layers: int) -> Callable[[], object]:
    """Return the step of an optimizer, which has made two: its first compiles and makes states."""
    made = params(layers)
    gradients, opt = [p.grad for p in made], make(made)

    def step() -> None:
        for p, g in zip(made, gradients, strict=True):
            p.grad = g  # heavyball takes it away
        opt.step()

    step()
    step()
    return step


def contenders(layers: int) -> dict[str, dict[str, Callable[[], object]]]:
    """Rule -> name -> what is timed; the first one of a rule is its products."""
    quiet: dict[str, Any] = {"precondition_frequency": 10**6}
    found = {
        "Muon": {
            "products": muon_products(layers),
            "optgen, int8_split24": stepping(lambda ps: Muon(ps, plan="int8_split24"), layers),
            "optgen, fp32": stepping(lambda ps: Muon(ps, plan="fp32"), layers),
            "torch.optim.Muon": stepping(lambda ps: torch.optim.Muon(ps, lr=1e-3), layers),
        },
        "SOAP": {
            "products": soap_products(layers),
            "optgen, int8_split24": stepping(lambda ps: SOAP(ps, plan="int8_split24", **quiet), layers),
            "optgen, fp32": stepping(lambda ps: SOAP(ps, plan="fp32", **quiet), layers),
        },
    }
    if benchmark.installed("pytorch-optimizer"):
        import pytorch_optimizer as po

        found["Muon"]["pytorch-optimizer"] = stepping(lambda ps: po.Muon([{"params": ps, "use_muon": True}]), layers)
        found["SOAP"]["pytorch-optimizer"] = stepping(lambda ps: po.SOAP(ps, **quiet), layers)
    if benchmark.installed("heavyball"):
        import heavyball

        heavyball.utils.compile_mode = None  # else torch compiles each shape for minutes
        limits = {"merge_dims": False, "max_precond_dim": 10000, "use_precond_schedule": False, **quiet}
        found["Muon"]["heavyball"] = stepping(heavyball.Muon, layers)
        found["SOAP"]["heavyball"] = stepping(lambda ps: heavyball.SOAP(ps, **limits), layers)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cpu-time", action="store_true")
    given = parser.parse_args()
    clock = time.process_time if given.cpu_time else time.perf_counter
    if given.cpu_time:
        torch.set_num_threads(1)
    lines = []
    for rule, racing in contenders(given.layers).items():
        times: dict[str, list[float]] = {name: [] for name in racing}
        for _ in range(given.rounds):
            for name, run in racing.items():
                begun = clock()
                run()
                times[name].append(clock() - begun)
        for name in list(racing)[1:]:
            ratios = [a / b for a, b in zip(times[name], times["products"], strict=True)]
            low, *_, high = statistics.quantiles(ratios, n=4)
            lines.append([rule, name, f"{statistics.median(ratios):.2f}", f"{low:.2f} to {high:.2f}"])
    cpu = f"{benchmark.cpu_model()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    print(f"{len(HIDDEN)} shapes x {given.layers} layers, {given.rounds} rounds; {cpu}\n")
    print("\n".join(table(["rule", "step", "times its products", "quartiles"], lines)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
