"""One table of modes: each makes the bits of ordinary steps, or is refused by name before anything changes.

A cell is a mode, a rule, a plan and a backend.  Every day has each mode with each kind of rule on the eager reference,
under a drawn plan (OPTGEN_SAMPLE_SEED), and some on the others; `full` has all rules under all of PLANS on all.
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
import pickle
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optgen
from optgen.by_name import class_of, list_rules
from optgen.driver.checkpoints import verify
from optgen.runtime.files import load_checkpoint, save_checkpoint
from optgen.runtime.modes import offload
from tests.harness import daily, param_dtype
from tests.product import OF_MATRICES, refusal
from tests.test_invariants import spaces
from tests.test_offload import moved
from tests.training import bits, keep_no_plan, through_file

pytestmark = pytest.mark.filterwarnings("ignore")

KINDS = {
    "adamw": "one sweep", "nadam": "a number of the host's", "lion": "no second moment", "lamb": "norms of tensors",
    "came": "rows and columns", "muon": "products of matrices, and vectors beside them", "soap": "bases",
    "prodigy": "sums over the model", "adahessian": "an input",
    "adadelta": "averages of its own steps", "schedule_free_adamw": "other weights for evaluation",
}  # fmt: skip
"""A rule of each kind."""

OPTIONS: dict[str, dict[str, Any]] = {"soap": {"precondition_frequency": 2, "stagger": True}}
"""Options of rules: bases change within the steps, each in its turn."""

PLANS = ("fp32", "split32", "int8_split24", "int4_factored_split24", "flashoptim")
BACKENDS = ("reference", "cpp", "triton")
STEPS = 3
SHAPES = {"large": (66, 63), "matrix": (7, 6), "stack": (2, 3, 4), "vector": (9,), "number": ()}
SMALL = {"matrix": (7, 6), "vector": (9,)}  # for kernels in Triton's interpreter


@dataclass(frozen=True)
class Cell:
    mode: str
    rule: str
    plan: str
    backend: str

    def __str__(self) -> str:
        return f"{self.mode}, {self.rule} {self.plan} {self.backend}"


class Net(nn.ParameterDict):
    """Parameters whose gradients are drawn by the number of the step."""

    def loss(self, step: int, scale: float = 1.0) -> Tensor:
        draw = torch.Generator().manual_seed(step)
        given = [scale * torch.randn(p.shape, generator=draw).to(p.dtype) for p in self.values()]
        return torch.stack([(p * g).sum() for p, g in zip(self.values(), given, strict=True)]).sum()


class Run:
    """A model and its optimizer, which `step` takes through one step."""

    def __init__(self, cell: Cell, tmp_path: Path, **options: Any) -> None:
        self.cell, self.folder = cell, tmp_path
        self.net, self.opt = self.made(**options)

    def made(self, names: bool = True, **options: Any) -> tuple[Net, Any]:
        draw, cell = torch.Generator().manual_seed(7), self.cell
        shapes = SMALL if cell.backend == "triton" else SHAPES
        shapes = {name: s for name, s in shapes.items() if len(s) > 1 or cell.rule != "came"}
        values = {name: torch.randn(s, generator=draw).to(param_dtype(cell.plan)) for name, s in shapes.items()}
        net = Net({name: nn.Parameter(x) for name, x in values.items()})
        if cell.backend != "triton":
            options |= OPTIONS.get(cell.rule, {})
        params = net.named_parameters() if names else net.parameters()
        opt = class_of(cell.rule)(params, plan=cell.plan, backend=cell.backend, seed=3, **options)
        return net, opt

    def backward(self, step: int, scale: float = 1.0) -> None:
        for group in self.opt.param_groups:
            group["lr"] = 0.01 * 0.9**step
        if inputs := getattr(self.opt, "INPUTS", ()):
            self.opt.feed(keep=True, **dict.fromkeys(inputs, torch.ones_like))
        self.net.loss(step, scale).backward()

    def step(self, step: int) -> None:
        self.backward(step)
        self.opt.step()
        self.opt.zero_grad()

    def bits(self) -> Any:
        """Numbers are numbers, whether they are kept as tensors or not."""

        def plain(x: Any) -> Any:
            return x.item() if isinstance(x, Tensor) and x.ndim == 0 and x.dtype in (torch.int64, torch.float64) else x

        states = [{k: plain(x) for k, x in sorted(self.opt.state.get(p, {}).items())} for p in self.net.values()]
        return bits([list(self.net.values()), states])


# -- the modes


def halves(run: Run, step: int) -> None:
    for _ in range(2):
        run.backward(step, 0.5)
    run.opt.step()
    run.opt.zero_grad()


def by_closure(run: Run, step: int) -> None:
    run.opt.zero_grad()
    run.opt.step(lambda: run.backward(step))
    run.opt.zero_grad()


def scaled(run: Run, step: int) -> None:
    """By a scale that is a power of 2, after a step that the scaler skips."""
    scaler = run.__dict__.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000))
    for bad in (True, False):
        scaler.scale(torch.zeros(()))
        run.backward(step, torch.inf if bad else scaler.get_scale())
        scaler.step(run.opt)
        scaler.update()
        run.opt.zero_grad()


def around(run: Run, step: int) -> None:
    """SAM, whose second gradient is the first one."""
    sam = run.__dict__.setdefault("sam", optgen.SAM(run.opt))
    run.backward(step)
    sam.first_step()
    run.opt.zero_grad()
    run.backward(step)
    sam.second_step()
    run.opt.zero_grad()


def going_on(change: Callable[[Run], object]) -> Callable[[Run, int], None]:
    """Make a change before each step but the first."""

    def step(run: Run, k: int) -> None:
        if k:
            change(run)
        Run.step(run, k)

    return step


def copied(run: Run) -> None:
    run.net, run.opt = copy.deepcopy((run.net, run.opt))


def pickled(run: Run) -> None:
    run.net, run.opt = pickle.loads(pickle.dumps((run.net, run.opt)))


def loaded(run: Run) -> None:
    saved = through_file([run.net.state_dict(), run.opt.state_dict()])
    run.net, run.opt = run.made()
    run.net.load_state_dict(saved[0])
    run.opt.load_state_dict(saved[1])


def loaded_released(run: Run) -> None:
    loaded(run)
    run.opt.release_gradients(run.net)


def from_a_file(run: Run) -> None:
    save_checkpoint(run.folder / "run.pt", run.opt, run.net)
    assert not verify(str(run.folder / "run.pt"))["findings"]
    run.net, run.opt = run.made()
    load_checkpoint(run.folder / "run.pt", run.opt, run.net)


@dataclass(frozen=True)
class Mode:
    """A way to make the same steps.

    begin    done once
    step     in place of Run.step
    options  of the optimizer
    refused  a kind of rule (a space that it sums over, or its name), or a backend, or both -> words of the error
    """

    begin: Callable[[Run], object] = lambda run: None
    step: Callable[[Run, int], None] = Run.step
    options: dict[str, Any] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


SUMS = {"model": "needs sums over the whole model"}
ON_DEVICES = {"triton": "offload=True updates on the host"}
MODES: dict[str, Mode] = {
    "micro-batches": Mode(step=halves),
    "a closure": Mode(step=by_closure),
    "a scaler": Mode(step=scaled),
    "released": Mode(lambda run: run.opt.release_gradients(run.net), refused=SUMS),
    "released, micro-batches": Mode(lambda run: run.opt.release_gradients(run.net, accumulate=2), halves, refused=SUMS),
    "released, nameless": Mode(lambda run: run.opt.release_gradients(run.net), options={"names": False}, refused=SUMS),
    "released, sums": Mode(lambda run: run.opt.release_gradients(run.net, sums="previous")),
    "released, state dict": Mode(
        lambda run: run.opt.release_gradients(run.net), going_on(loaded_released), refused=SUMS
    ),
    "offloaded": Mode(lambda run: moved(run.opt), refused=SUMS | ON_DEVICES),
    "offloaded, released": Mode(lambda run: moved(run.opt).release_gradients(run.net), refused=SUMS | ON_DEVICES),
    "capturable": Mode(
        options={"capturable": True},
        refused={"soap": "makes some of its steps different", "soap_muon, triton": "a number that depends on the step"},
    ),
    "watched": Mode(lambda run: run.opt.watch(1, to=lambda step, rows: None)),
    "compiled": Mode(lambda run: setattr(run.opt, "step", torch.compile(run.opt.step))),
    "small workspace": Mode(options={"workspace": 1}),
    "SAM": Mode(step=around),
    "planned anew": Mode(lambda run: keep_no_plan(run.opt)),
    "evaluated between steps": Mode(step=going_on(lambda run: (run.opt.eval(), run.opt.train()))),
    "copied": Mode(step=going_on(copied)),
    "pickled": Mode(step=going_on(pickled)),
    "state dict": Mode(step=going_on(loaded)),
    "checkpoint file": Mode(step=going_on(from_a_file)),
}


def modes_of(rule: str) -> list[str]:
    """Return all but dynamo's, a second for each, and released gradients of rules that take their own sums at once."""
    late = "model" not in spaces(rule) or rule.startswith(("dadapt", "avagrad"))
    but = {"compiled": rule in ("adamw", "soap"), "released, sums": late}
    return [mode for mode in MODES if but.get(mode, True)]


def of_every_day() -> set[Cell]:
    draw, plan = random.Random(os.environ["OPTGEN_SAMPLE_SEED"]), "int8_split24"
    some = {Cell(mode, rule, draw.choice(PLANS), "reference") for rule in KINDS for mode in modes_of(rule)}
    some |= {Cell("released", rule, plan, "reference") for rule in list_rules() if daily(rule, "release")}
    some |= {Cell(mode, rule, plan, "cpp") for mode in MODES for rule in ("adamw", "soap")}
    some |= {Cell("released, sums", "dadapt_adam", plan, backend) for backend in BACKENDS}
    kinds, modes = ("lamb", "came", "muon", "prodigy"), ("released", "released, nameless", "offloaded")
    some |= {Cell(mode, rule, plan, "cpp") for mode in modes for rule in kinds}
    return some | {Cell(mode, "adamw", plan, "triton") for mode in draw.sample(sorted(MODES), 3)}


def cells_of(rule: str) -> list[Cell]:
    return [Cell(mode, rule, plan, by) for plan, by, mode in itertools.product(PLANS, BACKENDS, modes_of(rule))]


@functools.cache
def plainly(rule: str, plan: str, backend: str, names: bool) -> Any:
    """Return the bits of ordinary steps, or why there are none."""
    run = Run(Cell("", rule, plan, backend), Path(), names=names)
    for step in range(STEPS):
        run.step(step)
    return run.bits()


def check(cell: Cell, folder: Path) -> None:
    """Assert that a mode has the bits of ordinary steps, or is refused, before anything changes, in its words."""
    mode = MODES[cell.mode]
    kinds = {cell.rule, cell.backend, f"{cell.rule}, {cell.backend}", *spaces(cell.rule)}
    words = next((text for kind, text in mode.refused.items() if kind in kinds), "")
    run = Run(cell, folder)
    before = run.bits()
    with pytest.raises((ValueError, RuntimeError), match=words) if words else nullcontext():
        run.net, run.opt = run.made(**mode.options)
        mode.begin(run)
        mode.step(run, 0)
    for step in range(1, 0 if words else STEPS):
        mode.step(run, step)
    if words:  # a step may have made states, as they are before the first one
        (weights, states), made = run.bits(), [entry for entry in run.opt.state.values() if entry.get("step")]
        assert not made and weights == before[0] and (states == before[1] or cell.backend == "triton"), cell
        return
    names = mode.options.get("names", True)
    assert run.bits() == plainly(cell.rule, cell.plan, cell.backend, names), cell


@pytest.mark.parametrize(
    "cells",
    [pytest.param([cell], id=str(cell)) for cell in sorted(of_every_day(), key=str)]
    + [pytest.param(cells_of(rule), id=rule, marks=pytest.mark.full) for rule in list_rules()],
)
def test_a_mode_keeps_the_bits_or_is_refused(
    cells: list[Cell], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan that does not fit the rule has no modes."""
    monkeypatch.setattr(offload, "CHUNK", 5_000)
    for cell in cells:
        if cell.rule not in OF_MATRICES or not refusal(cell.rule, cell.plan):
            check(cell, tmp_path)
