"""Time steps that write views beside steps with the quantizers of torch and torchao after them.

AdamW, int8_split24, bf16.  --instructions counts those of the Triton kernels, per parameter, in the place of times.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import optgen
import specs.plans
from optgen.formats import fp8
from optgen.formats.views import VIEWS
from tools import roofline
from tools.bench.race import Race, run_races

SIZE, COUNT = 2048, 4

CARDS = {"sm_90": roofline.CARDS["H200"], "sm_100": roofline.Card(148, 1.85e9, 7.17e12)}
"""Devices of the model: an H200, and a B200 with rates of an H200's processor, of which nothing was measured."""


def quantizers() -> Mapping[str, Callable[[Tensor], object]]:
    """Return name of a view -> what quantizes a weight so after a step, eagerly, under the tensor's present scale."""
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    return {
        "mxfp8_rows": lambda p: to_mx(p, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL),
        "mxfp8_columns": lambda p: to_mx(p.t().contiguous(), torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL),
        "fp8": lambda p: (p.float() * (448 / p.abs().amax().float())).clamp(-448, 448).to(torch.float8_e4m3fn),
        "fp8_e5m2": lambda p: (p.float() * (57344 / p.abs().amax().float())).clamp(-57344, 57344).to(torch.float8_e5m2),
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


def jobs(view: str, name: str) -> Iterator[Any]:
    """Yield the kernels of a step with a view, or with none: the sweep, and that of columns."""
    from optgen.driver import triton_text
    from optgen.runtime.gpu.codecs import ACROSS, ROWS, encode_columns
    from tools import kernel_stats

    plan = specs.plans.int8_split24.but("With a view of the weight.", views=(view,) if view else (), name=name)
    setattr(specs.plans, name, plan)
    yield next(x for x in kernel_stats.of_one_sweep("adamw", name, "bfloat16") if "sm_90" in x.targets)
    if view == "mxfp8_columns":
        spec, _ = kernel_stats.named("adamw", name)
        _, module = triton_text.joined(spec, plan, "fast", kernel_stats._module)
        constants = {**module.CONSTANTS["adamw_bfloat16_columns"], "ALIGNED": True}
        given, grain = {"table": "*i64", "work": "*i32"}, (ROWS.value, ACROSS.value)
        how: dict[str, Any] = dict(aligned=tuple(given), bytes=2 + VIEWS[view].bytes_per_param, grain=grain)
        yield kernel_stats.Job(name, encode_columns, given, constants, grain[0] * grain[1], **how)


def modelled(view: str, name: str, target: str) -> tuple[float, float, float]:
    """Return instructions and bytes per parameter of a step with a view, and the bytes that a copy moves meanwhile."""
    from tools import kernel_stats

    roofline.TARGET, instructions, moved, took = target, 0.0, 0.0, 0.0
    for job in jobs(view, name):
        found = kernel_stats.count(job, target)
        assert found.cost is not None
        instructions, moved = instructions + found.per_element, moved + job.bytes
        took += job.bytes / found.cost.share(CARDS[target], job.bytes)
    return instructions, moved, took


def instructions(targets: Sequence[str]) -> None:
    """Print what the model of pipes (tools/roofline.py) says of a step with each view, and of quantizers after it that
    memory alone limits: one kernel, or two of which the first finds the largest number."""
    for target in targets:
        _, _, plain = modelled("", "without", target)
        for view in ("", *VIEWS):
            count, moved, took = modelled(view, f"with_{view}", target)
            written = VIEWS[view].bytes_per_param if view else 0.0
            times = [(plain + after + written) / took for after in (2, 4)] if view else []
            rest = "".join(f", {x:.2f}" for x in times)
            with patch.object(fp8, "narrow", lambda x, y, code, kind: code):
                arithmetic = modelled(view, f"arithmetic_{view}", target)[0]
            print(
                f"{view:<14} {target:<7} {count:.1f} instructions, {arithmetic:.1f} if arithmetic rounds; "
                f"{moved:.2f} bytes, {moved / took:.2f} of copy; with one and two kernels after the step{rest} as long"
            )


def main(given: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="The cost of views")
    parser.add_argument("--instructions", nargs="+", metavar="TARGET", help="such as sm_90 sm_100")
    asked, _ = parser.parse_known_args(given)
    if asked.instructions:
        instructions(asked.instructions)
        return 0
    return run_races(races, parser, given)
