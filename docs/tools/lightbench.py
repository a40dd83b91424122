"""Run LightBench's tasks by five rules under nine storages: which are passed, and in how many steps.

    python -m docs.tools.lightbench          cells that docs/benchmarks/lightbench.json lacks, then a table of all

Needs lightbench 0.1.1 (`pip install --no-deps lightbench typer`) and bitsandbytes, but not heavyball and optuna, which
LightBench's runner has, nor a GPU.
"""

from __future__ import annotations

import importlib
import json
import math
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tools.bench.race import cpu_model
from tools.prose import packed, table

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "docs/benchmarks/lightbench.json"
SEED = 0
BF16 = ("int8_split24", "int6_split24", "int4_split24", "flashoptim", "bf16")
PLANS = ("fp32", "int8", *BF16, "bnb8", "bitsandbytes")
"""Storages: weights are bf16 under those of BF16, and else fp32; the last one is the package itself."""


LARGE, SMALL = (1e-1, 3e-2, 3e-1, 1e-2, 1.0), (3e-2, 1e-2, 1e-1, 3e-3, 3e-1)
RULES = {"AdamW": LARGE, "Lion": SMALL, "Muon": LARGE, "SOAP": LARGE, "CAME": SMALL}
"""Rules, and their learning rates in the order in which they are tried."""

OF_PACKAGE = ("AdamW", "Lion")
NEAR, TWICE = 0.95, " in twice the steps"
"""A level that fp32 passes in more than this share of the steps is run again with twice as many."""


class Task(NamedTuple):
    """A module of LightBench, the levels that are run, and how."""

    name: str
    levels: tuple[str, ...]
    ease: float = 1.0  # LightBench's win_condition_multiplier
    falls: float = 1.0  # what a learning rate falls to, geometrically, over all steps
    steps: int = 1000
    rates: float = 1.0  # times those of RULES


FALLS = 1e-4
TASKS = (
    Task("quadratic_varying_scale", ("hard", "medium"), 1e3, FALLS),
    Task("dynamic_landscape", ("medium", "easy", "extreme"), steps=400),
    Task("gradient_noise_scale_white", ("medium", "hard"), 30, FALLS),
    Task("layer_wise_scale", ("medium", "extreme"), 1, FALLS),
    Task("ill_conditioned", ("medium", "extreme"), 1, FALLS),
    Task("quadratic_varying_target", ("hard", "medium"), 1e4, FALLS),
    Task("absolute_varying_scale", ("hard",), 1e3, FALLS),
    Task("batch_size_scaling", ("medium", "extreme"), 1e4, FALLS),
    Task("adversarial_gradient", ("medium", "hard"), 10, FALLS),
    Task("momentum_utilization", ("medium",)),
    Task("gradient_delay", ("medium",), 1, FALLS),
    Task("scale_invariant", ("trivial",), 1, FALLS),
    Task("discontinuous_gradient", ("trivial",), 10, FALLS),
    Task("parameter_scale", ("easy",), 1, FALLS),
    Task("xor_digit", ("trivial",), 10, steps=400, rates=0.1),
    Task("quadratic_quantized_gradient", ("trivial",), 1e3, FALLS),
    Task("non_markovian", ("medium",), 100, FALLS),
    Task("sparse_gradient", ("easy",), steps=400),
    Task("sparse_parameters", ("easy",), steps=400),
    Task("quadratic_outliers", ("medium",), 1e3, FALLS),
    Task("xor_sequence", ("trivial",), 10, steps=400, rates=0.1),
    Task("xor_spot", ("trivial",), 10, steps=400, rates=0.1),
)


class Problem(NamedTuple):
    """The first arguments of LightBench's `trial`."""

    model: nn.Module
    data: Callable[[], tuple[Any, Any]] | None
    loss_fn: Callable[..., Tensor] | None
    win: Callable[[nn.Module, float], tuple[bool, Any]]


class OnCpu(TorchFunctionMode):
    """Keep on the CPU what asks for CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return args[0] if func is Tensor.cuda else func(*args, **kwargs)


class Absent(ModuleType):
    """A package that only LightBench's runner needs. Its names are classes that do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        inner = sys.modules.get(f"{self.__name__}.{name}")
        return inner or type(name, (), {"__init__": lambda self, *args, **options: None})


def problem_of(task: Task, level: str) -> Problem:
    """Return what the task's own `main` makes at a level, from SEED."""
    for name in ("heavyball", "heavyball.utils", "heavyball.helpers", "heavyball.chainable", "optuna"):
        sys.modules.setdefault(name, Absent(name))
    module: Any = importlib.import_module(f"lightbench.{task.name}")
    torch.manual_seed(SEED), random.seed(SEED)
    made: list[Problem] = []
    module.trial = lambda *args, **options: made.append(Problem(*args[:4]))
    with OnCpu():
        module.main(config=level, steps=task.steps, dtype="float32", opt="", win_condition_multiplier=task.ease)
    return made[0]._replace(model=made[0].model.float())


@cache
def class_of(rule: str, plan: str) -> Any:
    """Return the class of a rule all of whose states are stored as the plan says, however few elements they have."""
    import optgen
    from specs import plans

    if plan == "bitsandbytes":
        import bitsandbytes

        return partial(getattr(bitsandbytes.optim, f"{rule}8bit"), min_8bit_size=0)
    return optgen.compile(rule.lower(), plan=getattr(plans, plan).but(small_numel=0, name=f"{plan}_all"))


def steps_to_pass(task: Task, level: str, rule: str, plan: str, lr: float, limit: int) -> int:
    """Train until the task is passed, and return the steps; 0 if the loss is not finite or `limit` is reached.

    The model computes in fp32 on copies of the stored weights, and the condition judges those copies.  Gradients have
    the dtype of the weights.  If all parameters of a model are vectors, they are stored as the squarest matrices.
    """
    problem = problem_of(task, level)
    params = [p for p in problem.model.parameters() if p.requires_grad]
    flat, dtype = all(p.ndim == 1 for p in params), torch.bfloat16 if plan in BF16 else torch.float32
    shapes = [(1 << (p.numel().bit_length() - 1) // 2, -1) if flat else p.shape for p in params]
    pairs = [(p, p.detach().to(dtype, copy=True).view(s)) for p, s in zip(params, shapes, strict=True)]
    options = {"match_rms_adamw": True} if rule == "Muon" else {}
    optimizer = class_of(rule, plan)([s.requires_grad_() for _, s in pairs], lr=lr, weight_decay=0.0, **options)

    def show() -> None:
        for p, s in pairs:
            p.data.copy_(s.data.view(p.shape))

    show()
    for step in range(limit):
        with OnCpu():
            x, y = problem.data() if problem.data else (None, None)
            out = problem.model() if x is None else problem.model(x)
            loss = problem.loss_fn(out, y) if problem.loss_fn else out
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            continue  # a step of gradient_delay in which no parameter takes part
        loss.backward()
        for p, s in pairs:
            s.grad = None if p.grad is None else p.grad.to(dtype).view(s.shape)
            p.grad = None
        for group in optimizer.param_groups:
            group["lr"] = lr * task.falls ** (step / task.steps)
        optimizer.step()
        show()
        value = loss.item()
        if not math.isfinite(value):
            return 0
        if problem.win(problem.model, value)[0]:
            return step + 1
    return 0


Cell = tuple[int, float, float]  # steps to pass or 0, the rate, CPU seconds
Cells = dict[str, Cell]  # by key_of


def cell(task: Task, level: str, rule: str, plan: str, rate: float = 0.0) -> Cell:
    """Return the fewest steps to pass at the rule's rates, or at `rate` and at the others until one passes."""
    began, best, at = time.process_time(), 0, 0.0
    for lr in sorted((lr * task.rates for lr in RULES[rule]), key=lambda lr: lr != rate):
        if best and rate:
            break
        steps = steps_to_pass(task, level, rule, plan, lr, best - 1 if best else task.steps)
        best, at = (steps, lr) if steps else (best, at)
    return best, at, round(time.process_time() - began, 2)


def key_of(task: str, level: str, rule: str, plan: str) -> str:
    return f"{task}-{level}, {rule}, {plan}"


def levels(found: Cells) -> Iterator[tuple[Task, str, str, str]]:
    """Yield (task, level, rule, storage): all, then those again, with twice the steps, that are near the limit."""
    storages = [(plan, rule) for plan, rule in product(PLANS, RULES) if plan != PLANS[-1] or rule in OF_PACKAGE]
    for task in TASKS:
        yield from ((task, level, rule, plan) for level, (plan, rule) in product(task.levels, storages))
    for task in TASKS:
        for level, (plan, rule) in product(task.levels, storages):
            if found[key_of(task.name, level, rule, "fp32")][0] > NEAR * task.steps:
                yield task._replace(steps=2 * task.steps), f"{level}{TWICE}", rule, plan


def run(path: Path) -> Cells:
    """Run what the file lacks, and write it after each cell.

    fp32 takes the best of five rates.  Others begin at that rate, and are not run where fp32 passes at none.
    """
    found: Cells = json.loads(path.read_text(encoding="utf-8"))["cells"] if path.exists() else {}
    made = {name: version(name) for name in ("lightbench", "torch", "bitsandbytes")} | {"processor": cpu_model()}
    for task, level, rule, plan in levels(found):
        key, base = (key_of(task.name, level, rule, name) for name in (plan, "fp32"))
        if key not in found and (plan == "fp32" or found[base][0]):
            found[key] = cell(task, level.removesuffix(TWICE), rule, plan, 0.0 if plan == "fp32" else found[base][1])
            path.with_suffix(".part").write_text(packed({"made": made, "cells": found}), encoding="utf-8")
            path.with_suffix(".part").replace(path)
            print(key, *found[key], flush=True)
    return found


def passed(found: Cells) -> Iterator[list[object]]:
    """Yield a row for each storage: its cells by how they are passed, and steps over fp32's at the same rate."""
    for plan in PLANS[1:]:
        mine = {key: cell for key, cell in found.items() if key.endswith(f", {plan}") and TWICE not in key}
        pairs = [(found[key.removesuffix(plan) + "fp32"], cell) for key, cell in mine.items()]
        times = sorted(b[0] / a[0] for a, b in pairs if a[1] == b[1])
        failed = sum(not b[0] for _, b in pairs)
        spread = f"{statistics.median(times):.2f} ({times[0]:.2f} to {times[-1]:.2f})"
        yield [plan, len(times), len(pairs) - len(times) - failed, failed, spread]


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", r"\w+: plan '\w+' is discouraged")
    cells = run(Path(sys.argv[1]) if sys.argv[1:] else RECORD)
    head = "", "passed at fp32's rate", "at another rate", "not passed", "steps over fp32's"
    print("\n".join(table(head, passed(cells))))
    print(*(f"{key}: {steps or 'not passed'}" for key, (steps, *_) in cells.items() if TWICE in key), sep="\n")
