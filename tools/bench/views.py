"""Time steps that write views beside steps with the quantizers of torch and torchao after them.

AdamW, int8_split24, bf16.  --instructions counts those of the Triton kernels, per parameter, in the place of times.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

import optgen
import specs.plans
from optgen.formats.views import VIEWS
from tools.bench.race import Race, run_races

SIZE, COUNT = 2048, 4


def quantizers() -> Mapping[str, Callable[[Tensor], object]]:
    """Return name of a view -> what quantizes a weight so after a step, eagerly, under the tensor's present scale."""
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    return {
        "mxfp8_rows": lambda p: to_mx(p, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL),
        "mxfp8_columns": lambda p: to_mx(p.t().contiguous(), torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL),
        "fp8": lambda p: (p.float() * (448 / p.abs().amax().float())).clamp(-448, 448).to(torch.float8_e4m3fn),
        "nvfp4": lambda p: nvfp4_quantize(p, 16, per_tensor_amax_to_scale(p.abs().amax())),
    }


def races(asked: argparse.Namespace) -> Iterator[Race]:
    for view, quantize in quantizers().items():
        plain = specs.plans.int8_split24
        viewed = plain.but("With a view of the weight.", views=(view,), name=f"with_{view}")
        made = []
        for plan in (plain, viewed):
            torch.manual_seed(0)
            params = [torch.nn.Parameter((0.02 * torch.randn(SIZE, SIZE)).bfloat16()) for _ in range(COUNT)]
            for p in params:
                p.grad = torch.randn_like(p)
            opt = optgen.compile("adamw", plan=plan)(params, lr=1e-4, backend="cpp")
            opt.step()
            made.append(opt)
        weights = [p.detach() for p in made[0].param_groups[0]["params"]]

        def both(opt: torch.optim.Optimizer = made[0], weights: list[Tensor] = weights, how=quantize) -> None:
            opt.step()
            for p in weights:
                how(p)

        runs = {f"step with {view}": made[1].step, "step": made[0].step, "step, then quantizer": both}
        yield Race(f"{view}, {COUNT * SIZE**2:,} parameters", runs)


def instructions(targets: Sequence[str]) -> None:
    """Print the instructions of a step's kernel per parameter, and registers."""
    from tools import kernel_stats

    for view in ("", *VIEWS):
        name = f"with_{view}" if view else "int8_split24"
        if view:
            plan = specs.plans.int8_split24.but("With a view of the weight.", views=(view,), name=name)
            setattr(specs.plans, name, plan)
        job = next(iter(kernel_stats.of_one_sweep("adamw", name, "bfloat16")))
        for target in targets:
            found = kernel_stats.count(job, target)
            print(f"{name:<16} {target:<8} {found.per_element:.1f} per parameter, {found.registers} registers")


def main(given: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="The cost of views")
    parser.add_argument("--instructions", nargs="+", metavar="TARGET", help="such as sm_90 sm_100")
    asked, _ = parser.parse_known_args(given)
    if asked.instructions:
        instructions(asked.instructions)
        return 0
    return run_races(races, parser, given)
