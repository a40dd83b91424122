"""A state machine of what a training script does between, around and within steps.

An optimizer is taken through drawn operations beside its twin, an optimizer of the same class that only makes steps:
where a scheduler sets a rate, the twin is given the number; where a weight is edited, its value; where a run goes on
from a checkpoint, nothing.  Weights, states and numbers of both have the same bits after every operation.  Under fp32
some rules have torch.optim as a third one beside them, from whose step theirs differs by roundings.

Hypothesis draws and shrinks the operations.  What it prints of a failure are calls of `Machine`; as a list of
(name, arguments) they are a row of REPLAYS in tests/test_machine.py.
"""

from __future__ import annotations

import copy
import inspect
import math
import pickle
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.optim import lr_scheduler

import optgen
from optgen.by_name import class_of
from optgen.runtime.modes import offload
from optgen.runtime.states.state import TRAINED
from tests.harness import make_step
from tests.training import bits, through_file

SEVERAL: dict[str, Any] = {"^m": {"rule": "muon", "lr": 0.02}, "^v": "lion", "*": "adamw"}
"""The rule called "several": matrices, vectors, and the rest."""

SUMS = {"prodigy", "dadapt_adam", "clipped(adamw)"}
"""Rules that sum over the model."""

SHAPES = {"m0": (66, 63), "m1": (7, 5), "v0": (9,), "s0": (), "x0": (3, 4, 6)}
"""Parameters by name; the first is large enough for codes."""

SMALL = {"m0": (6, 5), "v0": (9,), "x0": (2, 3)}
"""The same for kernels in Triton's interpreter."""

NUMBERS: dict[str, tuple[Any, ...]] = {
    "lr": (0.0, 1e-3, 0.0125), "weight_decay": (0.0, 0.25), "betas": ((0.75, 0.9), (0.9, 0.999)),
    "momentum": (0.5, 0.95), "eps": (1e-8, 1e-4), "maximize": (True, False),
}  # fmt: skip
"""What a script sets by hand, and to what."""

FORMS: dict[str, Callable[[float], Any]] = {
    "float": float, "tensor": partial(torch.tensor, dtype=torch.float64), "numpy": np.float64,
}  # fmt: skip

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "warm-up": lambda opt: lr_scheduler.LambdaLR(opt, lambda k: min(1.0, k / 3)),
    "restarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 3),
    "one cycle": lambda opt: lr_scheduler.OneCycleLR(
        opt, max_lr=0.02, total_steps=1000, cycle_momentum=not {"momentum", "betas"}.isdisjoint(opt.defaults)
    ),
    "plateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=0, factor=0.5),
}

EDITS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "zeros": lambda w, _: torch.zeros_like(w),
    "negative zeros": lambda w, _: -torch.zeros_like(w),
    "subnormal": lambda w, _: torch.full_like(w, 2.0**-20 if w.dtype == torch.float16 else 2.0**-130),
    "mask": lambda w, draw: w * (torch.rand(w.shape, generator=draw) > 0.5).to(w.dtype),
    "clamp": lambda w, _: w.clamp(-0.5, 0.5),
    "scale": lambda w, _: w * 0.75,
    "draw": lambda w, draw: torch.randn(w.shape, generator=draw).to(w.dtype),
}

WAYS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "copy_": Tensor.copy_,
    "copy_ of fp64": lambda p, value: p.copy_(value.double()),
    "data": lambda p, value: setattr(p, "data", value.clone()),
    "data.copy_": lambda p, value: p.data.copy_(value),
    "a view": lambda p, x: setattr(p, "data", torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape)),
}
"""How a value gets into a weight."""


def _constant(g: Tensor) -> Tensor:
    return g.reshape(-1)[:1].reshape((1,) * g.ndim).expand(g.shape)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": Tensor.clone,
    "transposed": lambda g: g.transpose(0, -1).contiguous().transpose(0, -1) if g.ndim else g,
    "sliced": lambda g: torch.stack([g, g], -1)[..., 1],
    "constant": _constant,
    "zeros": lambda g: torch._efficientzerotensor(g.shape, dtype=g.dtype),
    "float32": Tensor.float, "float64": Tensor.double, "float16": Tensor.half, "bfloat16": Tensor.bfloat16,
}  # fmt: skip
"""Forms of a gradient; the numbers that are drawn are numbers of each dtype."""

VALUES: dict[str, Callable[[Tensor], Tensor]] = {"constant": lambda g: _constant(g).clone(), "zeros": torch.zeros_like}
"""What the twin gets where a form has other values than were drawn."""

REFUSED = (
    "a rate of NaN is loaded", "a group too many is loaded", "a state of another shape is loaded", "a parameter twice",
    "a complex parameter", "a rate below 0", "a weight of another shape", "a sparse gradient",
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """The arguments of an optimizer; `fused` is given to the subject alone."""

    rule: str
    plan: str = "fp32"
    dtype: str = "float32"
    backend: str = "reference"
    named: bool = True
    fused: bool = False


@dataclass
class Run:
    """A model, its optimizer, and the scheduler if there is one."""

    model: nn.ParameterDict
    opt: Any
    schedule: Any = None

    def entries(self) -> Iterator[tuple[str, nn.Parameter, dict[str, Any]]]:
        """Yield names, parameters and their groups, in the order of the groups."""
        names = {id(p): name for name, p in self.model.items()}
        for group in self.opt.param_groups:
            yield from ((names[id(p)], p, group) for p in group["params"])

    def holds(self) -> dict[str, dict[str, Any]]:
        """Return weights, states and numbers by name, as bits; no state where a device has left out the first step."""
        found = {}
        for name, p, group in self.entries():
            state = self.opt.state.get(p, {})
            state = {} if not state.get("step", 1) else state
            numbers = {k: x for k, x in group.items() if k in NUMBERS}
            parts = {
                "weight": p,
                "state": {k: plain(x) for k, x in state.items() if k != TRAINED},
                "numbers": plain(numbers),
            }
            found[name] = {part: bits(value) for part, value in parts.items()}
        return found


@cache
def rule_class(name: str) -> Any:
    return class_of(name)


def plain(value: Any) -> Any:
    """Return numbers of any form as Python's."""
    if isinstance(value, dict):
        return {key: plain(x) for key, x in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(map(plain, value))
    number = value.item() if isinstance(value, (Tensor, np.generic)) and value.ndim == 0 else value
    return float(number) if isinstance(number, (int, float)) and not isinstance(number, bool) else number


def through_checkpoint(old: Run, new: Run, alone: bool) -> None:
    """Save a file and load it; `alone`: of the optimizer."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.pt"
        optgen.save_checkpoint(path, old.opt, None if alone else old.model, extra={"step": 3})
        assert optgen.load_checkpoint(path, new.opt, None if alone else new.model) == {"step": 3}


def distributed(old: Run, new: Run, flat: bool) -> None:
    """Go by the functions of torch.distributed.checkpoint, which make a step at lr = 0 to see which states there are:
    with a momentum where the old optimizer has one."""
    how = dcp.StateDictOptions(flatten_optimizer_state_dict=flat)
    for (_, p, _), (_, _, group) in zip(old.entries(), new.entries(), strict=True):
        if "momentum" in group and any(key.startswith("momentum_buffer") for key in old.opt.state[p]):
            group["momentum"] = 0.5
    saved = copy.deepcopy(dcp.get_optimizer_state_dict(old.model, old.opt, options=how))
    dcp.set_optimizer_state_dict(new.model, new.opt, saved, options=how)


LOADS: dict[str, Callable[[Run, Run], object]] = {
    "state dict": lambda old, new: new.opt.load_state_dict(old.opt.state_dict()),
    "file of a state dict": lambda old, new: new.opt.load_state_dict(through_file(old.opt.state_dict())),
    "checkpoint": partial(through_checkpoint, alone=False),
    "checkpoint of the optimizer": partial(through_checkpoint, alone=True),
    "distributed": partial(distributed, flat=False),
    "distributed, flat": partial(distributed, flat=True),
}
"""How a new optimizer takes over the states of an old one."""

COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "torch.save": partial(through_file, weights_only=False),
}

seeds = st.integers(0, 2**31 - 1)
masks = st.sampled_from([0, 0, 1, 2, 6])  # of parameters: bit by bit


def trains(self: Machine) -> bool:
    return not self.evaluating


def idle(self: Machine) -> bool:
    """Return True where the optimizer may be copied and exchanged."""
    return not self.evaluating and self.handle is None


class Machine(RuleBasedStateMachine):
    """One example: `subject` does what is drawn, `twin` makes steps."""

    cells: st.SearchStrategy[Cell]
    examples = steps = 0
    """Counts over all examples."""

    # -- making ----------------------------------------------------------------------------------------

    @initialize(data=st.data(), seed=seeds)
    def begin(self, data: Any, seed: int) -> None:
        self.start(data.draw(self.cells, label="cell"), seed)

    def start(self, cell: Cell, seed: int) -> None:
        """Make both of a cell; a replay begins with it."""
        Machine.examples += 1
        self.cell, self.seed = cell, seed
        self.cls = None if cell.rule == "several" else rule_class(cell.rule)
        self.two, self.inputs = hasattr(self.cls, "first_step"), getattr(self.cls, "INPUTS", ())
        shapes = SMALL if cell.backend == "triton" else SHAPES
        self.groups = [[name for name in shapes if name[0] == "m"], [name for name in shapes if name[0] != "m"]]
        self.frozen: set[str] = set()
        self.evaluating, self.handle, self.moved, self.kind = False, None, False, ""
        draw = torch.Generator().manual_seed(seed)
        values = {name: torch.randn(s, generator=draw).to(getattr(torch, cell.dtype)) for name, s in shapes.items()}
        self.twin, self.subject = self.made(values), self.made(values, fused=cell.fused or None)

    def made(self, values: Mapping[str, Tensor], shuffled: int = 0, **options: Any) -> Run:
        """Make a model of these values and an optimizer; in another order of groups and names where asked."""
        order = torch.Generator().manual_seed(shuffled)

        def arranged(rows: Any) -> list[Any]:
            listed = list(rows)
            return [listed[i] for i in torch.randperm(len(listed), generator=order)] if shuffled else listed

        model = nn.ParameterDict({name: nn.Parameter(x.clone()) for name, x in values.items()})
        options |= {"backend": self.cell.backend, "plan": self.cell.plan, "seed": self.seed}
        if self.cls is None:
            return Run(model, optgen.make(SEVERAL, arranged(model.items()), **{"lr": 0.0125} | options))
        groups, known = [], inspect.signature(self.cls).parameters
        for number in arranged(range(len(self.groups))):
            names = arranged(self.groups[number])
            params: list[Any] = [(name, model[name]) if self.cell.named else model[name] for name in names]
            groups.append(
                {"params": params, "lr": 0.0125 * (1 + number)}
                | ({"weight_decay": 0.25} if number == 1 and "weight_decay" in known else {})
            )
        return Run(model, self.cls(groups, **{k: x for k, x in options.items() if k in known}))

    # -- comparing -------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert that both hold the same bits, and finite numbers."""
        mine, theirs = self.subject.holds(), self.twin.holds()
        assert mine.keys() == theirs.keys()
        for name in mine:
            for part in ("state", "numbers", "weight")[: 2 + (not self.evaluating)]:
                a, b = mine[name][part], theirs[name][part]
                keys = [k for k in {**a, **b} if a.get(k) != b.get(k)] if isinstance(a, dict) else []
                assert a == b, f"{part} of {name} differs from the twin's {keys}"
        for name, p, _ in self.twin.entries():
            tensors = [p, *(x for x in self.twin.opt.state.get(p, {}).values() if isinstance(x, Tensor))]
            assert all(bool(x.isfinite().all()) for x in tensors if x.is_floating_point()), f"{name} is not finite"

    def refuses(self, action: Callable[[], Any]) -> None:
        """Assert that something is refused and changes nothing."""
        run = self.subject
        before = run.holds(), [sorted(group) for group in run.opt.param_groups]
        with pytest.raises((RuntimeError, ValueError, TypeError, KeyError, NotImplementedError)):
            action()
        assert before == (run.holds(), [sorted(group) for group in run.opt.param_groups]), "it has changed something"

    def mirror(self) -> None:
        """Set the twin's numbers as plain ones."""
        theirs = {name: group for name, _, group in self.twin.entries()}
        for name, _, group in self.subject.entries():
            theirs[name].update({k: plain(x) for k, x in group.items() if k in NUMBERS})

    # -- steps -----------------------------------------------------------------------------------------

    def gradients(self, seed: int, lacking: int = 0) -> dict[str, Tensor]:
        """Draw numbers of bf16 and of fp16, in the parameters' dtype, for what is neither frozen nor lacking."""
        draw = torch.Generator().manual_seed(seed)
        found = {
            name: torch.randn(p.shape, generator=draw).half().bfloat16().to(p.dtype)
            for name, p in sorted(self.twin.model.items())
        }
        there = [name for i, name in enumerate(found) if name not in self.frozen and not lacking >> i & 1]
        return {name: found[name] for name in there}

    def feed(self) -> None:
        """Give inputs to both, also of parameters that will not be stepped."""
        for run in (self.subject, self.twin) if not self.two else ():
            for name in self.inputs:
                run.opt.feed(**{name: {p: torch.full(p.shape, 0.5 + len(key)) for key, p in run.model.items()}})

    def give(self, run: Run, found: Mapping[str, Tensor], form: str = "plain") -> None:
        for name, p in run.model.items():
            p.grad_dtype = None  # type: ignore[attr-defined]  # gradients of any dtype
            p.grad = LAYOUTS[form](found[name]) if name in found else None

    def twin_steps(self, *found: Mapping[str, Tensor]) -> None:
        """Make the twin's step of plain gradients."""
        Machine.steps += 1
        self.give(self.twin, found[0])
        if self.two:
            self.twin.opt.first_step()
            self.give(self.twin, found[1])
            self.twin.opt.second_step()
        else:
            self.twin.opt.step()

    def after_step(self) -> None:
        """Let the scheduler follow, and compare."""
        if self.kind:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it saw no step of a copy
                self.subject.schedule.step(*[1.0] * (self.kind == "plateau"))
            self.mirror()
        for run in (self.subject, self.twin):
            run.opt.zero_grad()
        self.check()

    @precondition(trains)
    @rule(seed=seeds, form=st.sampled_from(sorted(LAYOUTS)), lacking=masks, closure=st.booleans())
    def step(self, seed: int, form: str = "plain", lacking: int = 0, closure: bool = False) -> None:
        """Make a step of gradients of any form."""
        found = [self.gradients(seed + i, lacking) for i in range(2)]
        values = [{name: VALUES.get(form, Tensor.clone)(g) for name, g in part.items()} for part in found]
        calls = iter(found)

        def loss() -> float:
            assert torch.is_grad_enabled()
            self.give(self.subject, next(calls), form)
            return 2.5

        self.feed()
        peer = None if self.handle else Peer.of(self, values[0])
        if closure or self.two:
            with torch.no_grad():
                assert self.subject.opt.step(loss) == 2.5
        else:
            loss()
            self.subject.opt.step()
        self.twin_steps(*values)
        if peer is not None:
            peer.compare(self.subject)
        self.after_step()

    @precondition(trains)
    @rule(seed=seeds, count=st.integers(1, 4), lacking=masks)
    def train(self, seed: int, count: int = 1, lacking: int = 0) -> None:
        """Make steps of one kind, the last ones of which take the fast path."""
        for k in range(count):
            self.step(seed + k, lacking=lacking)

    @precondition(lambda self: trains(self) and not self.two)
    @rule(seed=seeds, parts=st.integers(1, 3), lacking=masks)
    def backward(self, seed: int, parts: int = 1, lacking: int = 0) -> None:
        """Sum the gradients of micro-batches by torch's backward; where they are released, within it."""
        if self.handle is not None:
            self.handle.accumulate = parts
        pieces = [self.gradients(seed + part, lacking) for part in range(parts)]
        self.feed()
        for found in pieces if pieces[0] else ():
            sum((self.subject.model[name] * g).sum().float() for name, g in found.items()).backward()
        self.subject.opt.step()
        total = pieces[0]
        for found in pieces[1:]:
            total = {name: g + found[name] for name, g in total.items()}
        self.twin_steps(total)
        self.after_step()

    @precondition(lambda self: idle(self) and not self.two and self.cell.dtype != "float16")
    @rule(seed=seeds, power=st.integers(0, 6), infinite=st.booleans(), lacking=masks)
    def scaled(self, seed: int, power: int = 2, infinite: bool = False, lacking: int = 0) -> None:
        """Make a step by a GradScaler, which leaves out one with an infinity."""
        found = self.gradients(seed, lacking)
        if not found or (infinite and self.inputs) or (self.moved and self.cell.fused):
            return
        self.feed()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**power)
        scaler.scale(torch.ones(()))
        self.give(self.subject, {name: g * 2.0**power for name, g in found.items()})
        if infinite:
            self.subject.model[min(found)].grad.view(-1)[-1] = math.inf
        scaler.step(self.subject.opt)
        scaler.update()
        if not infinite:
            self.twin_steps(found)
        self.after_step()

    # -- numbers and groups ----------------------------------------------------------------------------

    @rule(key=st.sampled_from([*NUMBERS]), form=st.sampled_from([*FORMS]), group=st.integers(0, 2), value=seeds)
    def set_number(self, key: str, form: str, group: int, value: int) -> None:
        groups = self.subject.opt.param_groups
        chosen, number = groups[group % len(groups)], NUMBERS[key][value % len(NUMBERS[key])]
        if key in chosen and np.shape(plain(chosen[key])) == np.shape(number):
            chosen[key] = FORMS[form](number) if isinstance(number, float) else number
            self.mirror()

    @precondition(idle)
    @rule(kind=st.sampled_from([*SCHEDULES, ""]))
    def scheduler(self, kind: str) -> None:
        """Let a scheduler write rates, or none any more."""
        for group in self.subject.opt.param_groups:
            group.pop("initial_lr", None)
        self.subject.schedule, self.kind = SCHEDULES[kind](self.subject.opt) if kind else None, kind
        self.mirror()

    @precondition(lambda self: trains(self) and self.cls is not None and not self.kind and len(self.groups) < 4)
    @rule(seed=seeds, count=st.integers(1, 2))
    def add_group(self, seed: int, count: int) -> None:
        names = [f"n{len(self.groups)}{i}" for i in range(count)]
        self.groups.append(names)
        for run in (self.subject, self.twin):
            draw = torch.Generator().manual_seed(seed)
            for i, name in enumerate(names):
                value = torch.randn(5, 3 + i, generator=draw).to(getattr(torch, self.cell.dtype))
                run.model[name] = nn.Parameter(value)
            params = [(name, run.model[name]) if self.cell.named else run.model[name] for name in names]
            run.opt.add_param_group({"params": params, "lr": 0.02})
        self.check()

    @rule(lacking=st.integers(0, 31))
    def freeze(self, lacking: int) -> None:
        """Freeze these parameters and thaw the others."""
        self.frozen = {name for i, name in enumerate(sorted(self.subject.model)) if lacking >> i & 1}
        for run in (self.subject, self.twin)[: 1 + self.two]:  # whose first step feeds the second
            for name, p in run.model.items():
                p.requires_grad_(name not in self.frozen)

    # -- weights ---------------------------------------------------------------------------------------

    @precondition(trains)
    @rule(kind=st.sampled_from([*EDITS]), way=st.sampled_from([*WAYS]), which=st.integers(0, 4), seed=seeds)
    def edit(self, kind: str, way: str, which: int, seed: int) -> None:
        name, draw = [*self.twin.model][which % len(self.twin.model)], torch.Generator().manual_seed(seed)
        with torch.no_grad():
            value = EDITS[kind](self.twin.model[name].detach(), draw)
            WAYS[way](self.subject.model[name], value)
            self.twin.model[name].copy_(value)
        self.check()

    @precondition(lambda self: idle(self) and not self.moved)
    @rule()
    def to_another_dtype_and_back(self) -> None:
        """Move the model; a step in between is refused."""
        run, dtype = self.subject, getattr(torch, self.cell.dtype)
        run.model.to(torch.float64 if dtype == torch.float32 else torch.float32)
        for p in run.model.values():
            p.grad = torch.ones_like(p) if p.requires_grad else None
        if not self.two and len(self.frozen) < len(run.model):
            self.refuses(run.opt.step)
        run.opt.zero_grad()
        run.model.to(dtype)
        self.check()

    @precondition(idle)
    @rule()
    def full_weights(self) -> None:
        """Take the weights at full precision out and put them back."""
        both = (self.subject, self.twin)
        try:
            full = [run.opt.master_state_dict(run.model) for run in both]
        except RuntimeError:  # an edited weight is no rounding of what the plan keeps: the edit wins, on both sides
            full = [run.model.state_dict() for run in both]
        assert bits(full[0]) == bits(full[1])
        full[0] = {name: x.float() for name, x in full[0].items()}
        for run in both:  # a number between two others may be kept as either and the rest
            run.opt.load_master_state_dict(run.model, full[0])
            same = bits(run.opt.master_state_dict(run.model)) == bits(full[0])
            assert same or self.cell.plan == "flashoptim"  # which has two codes of a number, with units of their own
        self.check()

    # -- checkpoints -----------------------------------------------------------------------------------

    def replaced(self, new: Run, seed: int) -> None:
        """Go on with another model and optimizer; what the old one does then is nothing to it."""
        old, self.subject, self.moved = self.subject, new, False
        for name, p in new.model.items():
            p.requires_grad_(name not in self.frozen)
        self.check()
        if not self.inputs:
            self.give(old, self.gradients(seed))
            make_step(old.opt)
        self.check()

    @precondition(idle)
    @rule()
    def reload(self) -> None:
        """Load the optimizer's own state dict into itself; it stays the caller's."""
        saved = self.subject.opt.state_dict()
        self.subject.opt.load_state_dict(saved)
        for x in (x for entry in saved["state"].values() for x in entry.values() if isinstance(x, Tensor)):
            x.zero_()
        self.check()

    @precondition(idle)
    @rule(seed=seeds, way=st.sampled_from([*LOADS]), shuffled=st.integers(0, 3))
    def resume(self, seed: int, way: str, shuffled: int = 0) -> None:
        """Load into a new model and optimizer of other values, whose names and groups may be in another order."""
        old, far = self.subject, way.startswith("distributed")
        if far and not all(p.requires_grad and "step" in old.opt.state.get(p, ()) for p in old.model.values()):
            return  # torch refuses it
        if self.two or self.cell.rule in SUMS or not self.cell.named:  # sums have the order of the parameters
            shuffled = 0
        new = self.made({name: torch.full_like(p, 3.0).detach() for name, p in self.twin.model.items()}, shuffled)
        if self.kind:
            new.schedule = SCHEDULES[self.kind](new.opt)
            new.schedule.load_state_dict(copy.deepcopy(old.schedule.state_dict()))
        for group in new.opt.param_groups:
            group["lr"] = 0.5
        new.model.load_state_dict(old.model.state_dict())
        LOADS[way](old, new)
        self.replaced(new, seed)

    @precondition(idle)
    @rule(seed=seeds, way=st.sampled_from([*COPIES]))
    def copied(self, seed: int, way: str) -> None:
        """Go on with a copy; classes made in memory and lambdas are not pickled."""
        run = self.subject
        if way == "deepcopy" or not ("(" in self.cell.rule or self.kind):
            self.replaced(Run(*COPIES[way]((run.model, run.opt, run.schedule))), seed)

    # -- modes -----------------------------------------------------------------------------------------

    @precondition(lambda self: trains(self) and self.cls is not None and not self.moved)
    @rule()
    def release(self) -> None:
        """Release gradients, or stop that; refused where the rule sums over the model."""
        if self.handle is not None:
            self.handle.remove()
            self.handle = None
        elif self.two or self.cell.rule in SUMS:
            self.refuses(self.subject.opt.release_gradients)
        elif len(self.frozen) < len(self.subject.model):
            self.handle = self.subject.opt.release_gradients(self.subject.model)
            self.refuses(self.subject.opt.release_gradients)
        self.check()

    @precondition(lambda self: idle(self) and self.cls is not None and self.cell.backend == "cpp")
    @rule(on=st.booleans())
    def offloaded(self, on: bool) -> None:
        """Let the CPU stand for a device whose states are in host memory."""
        if on and not self.moved:
            self.subject.opt._offload = offload.Offload(lambda _: offload.Mover(), resident=())
        self.moved = self.moved or on
        for group in self.subject.opt.param_groups:
            group["offload"] = on

    @precondition(lambda self: self.handle is None)
    @rule()
    def evaluation(self) -> None:
        """Go to evaluation or back; a step is refused there."""
        opt, was = self.subject.opt, self.evaluating
        opt.train() if was else opt.eval()
        self.evaluating = not was and getattr(self.cls, "evaluation", None) is not None
        if self.evaluating:
            self.give(self.subject, self.gradients(0))
            self.refuses(opt.step)
            opt.zero_grad()
        self.check()

    @precondition(idle)
    @rule(what=st.sampled_from(REFUSED), seed=seeds)
    def refused(self, what: str, seed: int) -> None:
        """Ask for what is refused."""
        opt, p = self.subject.opt, self.subject.model["m0"]
        group = next(group for _, q, group in self.subject.entries() if q is p)
        before, saved = (p.data, group["lr"]), copy.deepcopy(opt.state_dict())
        action = partial(opt.load_state_dict, saved)
        if what == "a rate of NaN is loaded":
            saved["param_groups"][0]["lr"] = math.nan
        elif what == "a group too many is loaded":
            saved["param_groups"].append(copy.deepcopy(saved["param_groups"][0]))
        elif what == "a state of another shape is loaded":
            tensors = [(state, k) for state in saved["state"].values() for k, x in state.items() if np.ndim(x)]
            if not tensors:
                return
            tensors[0][0][tensors[0][1]] = torch.zeros(3, 1, 2, dtype=torch.int32)
        elif what == "a parameter twice":
            action = partial(opt.add_param_group, {"params": [p]})
        elif what == "a complex parameter":
            action = partial(opt.add_param_group, {"params": [nn.Parameter(torch.zeros(3, dtype=torch.complex64))]})
        elif self.two or not p.requires_grad:
            return
        else:
            self.give(self.subject, self.gradients(seed))
            action = opt.step
            if what == "a rate below 0":
                group["lr"] = -1.0
            elif what == "a weight of another shape":
                p.data = p.data.new_zeros(2, 2)
            else:
                p.grad = p.grad.to_sparse()
        try:
            self.refuses(action)
        finally:
            p.data, group["lr"] = before
            opt.zero_grad()
        self.check()

    def teardown(self) -> None:
        """Make two more steps, in which what was done before shows."""
        if hasattr(self, "subject"):
            if self.evaluating:
                self.evaluation()
            if self.handle is not None:
                self.release()
            self.freeze(0)
            self.train(1, 2)


class Peer:
    """A step that torch.optim makes in fp64 from the subject's dense states, with a majorant of its roundings.

    The majorant is the same step of the sizes of weights, moments and gradients.  Fewer than 64 roundings, each of a
    number no larger than there, are between the two steps: second moments are sums of squares, so that no cancellation
    makes their relative errors larger.  Weight decay within the gradient could, under rules that divide by them.
    """

    RULES: Mapping[str, Any] = {
        "adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD, "nadam": torch.optim.NAdam,
        "rmsprop": torch.optim.RMSprop,
    }  # fmt: skip

    def __init__(self, machine: Machine, found: Mapping[str, Tensor]) -> None:
        run, cls = machine.subject, self.RULES[machine.cell.rule]
        dense, self.names, self.made = run.opt.dense_state_dict(), [name for name, _, _ in run.entries()], []
        self.before = [machine.twin.model[name].detach().double() for name in self.names]
        for sized in (Tensor.clone, Tensor.abs):
            params = [nn.Parameter(sized(x)) for x in self.before]
            opt = cls([{"params": [params[k] for k in g["params"]]} for g in dense["param_groups"]], lr=0.1)
            opt.load_state_dict(copy.deepcopy(dense))
            for group in opt.param_groups:
                group.update({k: plain(x) for k, x in group.items() if k in NUMBERS}, foreach=False, fused=None)
                group["maximize"] &= sized is Tensor.clone
            for name, p in zip(self.names, params, strict=True):
                opt.state[p].update({k: sized(x) for k, x in opt.state[p].items() if isinstance(x, Tensor)})
                p.grad = sized(found[name].double()) if name in found else None
            opt.step()
            self.made.append((params, [opt.state[p] for p in params]))

    @classmethod
    def of(cls, machine: Machine, found: Mapping[str, Tensor]) -> Peer | None:
        cell, groups = machine.cell, machine.subject.opt.param_groups
        coupled = cell.rule not in ("adamw", "sgd") and any(g["weight_decay"] for g in groups)
        coupled |= cell.rule == "rmsprop" and any(g["momentum"] for g in groups)  # torch takes none that begins late
        fits = cell.rule in cls.RULES and cell.plan == "fp32" and cell.dtype == "float32" and found and not coupled
        return cls(machine, found) if fits else None

    def compare(self, run: Run) -> None:
        """Assert that weights and states are as near as that."""
        (values, states), (sizes, majorants) = self.made
        dense = run.opt.dense_state_dict()["state"]
        for i, (name, old) in enumerate(zip(self.names, self.before, strict=True)):
            pairs = {"weight": (run.model[name] - values[i], old.abs() + (sizes[i] - old.abs()).abs())}
            for key, x in states[i].items():
                if isinstance(x, Tensor) and x.ndim + (key != "step"):  # SGD keeps a count that it is given
                    pairs[key] = dense[i][key] - x, majorants[i][key].abs()
            for key, (off, most) in pairs.items():
                assert bool((off.abs() <= 64 * 2.0**-24 * most + 2.0**-126).all()), f"{name}: {key} of torch.optim"
