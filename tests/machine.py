"""A state machine of what a training script does between, around and within steps.

An optimizer is taken through drawn operations beside its twin, an optimizer of the same class that only makes steps:
where a scheduler sets a rate, the twin is given the number; where a weight is edited, its value; where a run goes on
from a checkpoint, nothing.  Weights, states and numbers of both have the same bits after every operation.

Hypothesis draws and shrinks the operations of `Machine`.  What it prints of a failure are calls of them; as a list of
(name, arguments) they are a row of REPLAYS in tests/test_machine.py.
"""

from __future__ import annotations

import copy
import inspect
import math
import pickle
import tempfile
import warnings
from collections import defaultdict
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
from torch.distributed import checkpoint as folders
from torch.distributed.checkpoint import state_dict as dcp
from torch.optim import lr_scheduler

import optgen
from optgen.by_name import class_of
from optgen.formats import SplitFp8
from optgen.runtime.layout.fp8_weight import OWN, Fp8Weight, exact
from optgen.runtime.modes import offload
from optgen.runtime.states.state import TRAINED
from specs import plans
from tests.harness import make_step
from tests.test_matrix_values import by_matrix
from tests.training import bits, through_file

SEVERAL: dict[str, Any] = {"^m": {"rule": "muon", "lr": 0.02}, "^v": "lion", "*": "adamw"}
SUMS = {"prodigy", "dadapt_adam", "clipped(adamw)"}  # over the model
SHAPES = {"m0": (66, 63), "m1": (7, 5), "v0": (9,), "v1": (9,), "s0": (), "x0": (3, 4, 6)}  # the first has codes
VIEWED = plans.int8_split24.but("With views.", name="viewed", views=("mxfp8_rows", "mxfp8_columns", "fp8"))
CODED = plans.int8_split24.but("Weights that show 8 bits.", name="coded", master=SplitFp8())
MADE = {plan.name: plan for plan in (VIEWED, CODED)}
LONG = {"m0": (96, 64), "m1": (7, 5), "v0": (9,), "s0": (), "x0": (3, 4, 6)}  # of these plans the first is another
SMALL = {"m0": (6, 5), "v0": (9,), "x0": (2, 3)}  # for kernels in Triton's interpreter
NUMBERS: dict[str, tuple[Any, ...]] = {
    "lr": (0.0, 1e-3, 0.0125), "weight_decay": (0.0, 0.25), "betas": ((0.75, 0.9), (0.9, 0.999)),
    "momentum": (0.5, 0.95), "eps": (1e-8, 1e-4), "adamw_lr": (0.0, 3e-3), "maximize": (True, False),
}  # fmt: skip
NUMBERED = {*NUMBERS, "own"}
FORMS: dict[str, Callable[[float], Any]] = {
    "float": float, "tensor": partial(torch.tensor, dtype=torch.float64), "numpy": np.float64,
}  # fmt: skip


def cycles(opt: Any) -> bool:
    return "betas" in opt.defaults or bool(opt.defaults.get("momentum"))


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "warm-up": lambda opt: lr_scheduler.LambdaLR(opt, lambda k: min(1.0, k / 3)),
    "restarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 3),
    "one cycle": lambda opt: lr_scheduler.OneCycleLR(opt, 0.02, total_steps=1000, cycle_momentum=cycles(opt)),
    "cyclic": lambda opt: lr_scheduler.CyclicLR(opt, 0.01, 0.1, step_size_up=2, cycle_momentum=cycles(opt)),
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
WAYS: dict[str, Callable[[Tensor, Tensor], object]] = {  # how a value gets into a weight
    "copy_": Tensor.copy_,
    "copy_ of fp64": lambda p, value: p.copy_(value.double()),
    "data": lambda p, value: setattr(p, "data", value.clone()),
    "data twice": lambda p, value: [setattr(p, "data", value.clone()) for _ in range(2)],
    "data.copy_": lambda p, value: p.data.copy_(value),
    "a view": lambda p, x: setattr(p, "data", torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape)),
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {  # of gradients, whose numbers are numbers of each dtype
    "plain": Tensor.clone,
    "transposed": lambda g: g.transpose(0, -1).contiguous().transpose(0, -1) if g.ndim else g,
    "sliced": lambda g: torch.stack([g, g], -1)[..., 1],
    "constant": lambda g: g.reshape(-1)[:1].reshape((1,) * g.ndim).expand(g.shape),
    "zeros": lambda g: torch._efficientzerotensor(g.shape, dtype=g.dtype),
    "a part of zeros": lambda g: torch._efficientzerotensor((2, *g.shape), dtype=g.dtype)[1],
    "float32": Tensor.float, "float64": Tensor.double, "float16": Tensor.half, "bfloat16": Tensor.bfloat16,
}  # fmt: skip


def loading(change: Callable[[Any], object]) -> Callable[[Any, Tensor], object]:
    def load(opt: Any, p: Tensor) -> None:
        saved = copy.deepcopy(opt.state_dict())
        change(saved)
        opt.load_state_dict(saved)

    return load


def misshape(saved: Any) -> None:
    for x in saved["state"].values():
        x.update({k: torch.zeros(3, 1, 2, dtype=torch.int32) for k in x if np.ndim(x[k])})


REFUSED: dict[str, Callable[[Any, Any], object]] = {
    "a rate of NaN": loading(lambda saved: saved["param_groups"][0].update(lr=math.nan)),
    "a group too many": loading(lambda saved: saved["param_groups"].append(saved["param_groups"][0])),
    "states of another shape": loading(misshape),
    "a parameter twice": lambda opt, p: opt.add_param_group({"params": [p]}),
    "a complex parameter": lambda opt, _: opt.add_param_group({"params": [nn.Parameter(torch.zeros(3) * 1j)]}),
    "a step at a rate below 0": lambda opt, _: ([g.update(lr=-1.0) for g in opt.param_groups], opt.step()),
    "a step of another shape": lambda opt, p: (setattr(p, "data", p.data.new_zeros(2, 2)), opt.step()),
    "a step of a sparse gradient": lambda opt, p: (setattr(p, "grad", p.grad.to_sparse()), opt.step()),
}


@dataclass(frozen=True)
class Cell:
    """The arguments of an optimizer."""

    rule: str
    plan: str = "fp32"
    dtype: str = "float32"
    backend: str = "reference"
    named: bool = True
    mixed: bool = False  # with another plan for single parameters


@dataclass
class Run:
    """A model, its optimizer, and the scheduler if there is one."""

    model: nn.ParameterDict
    opt: Any
    schedule: Any = None

    @property
    def evaluating(self) -> bool:
        return any(group.get("train_mode") is False for group in self.opt.param_groups)

    def parts(self) -> list[Any]:
        return [*getattr(self.opt, "parts", {0: self.opt}).values()]

    def state(self, p: Tensor) -> Any:
        return self.opt.state.get(p, {})

    def entries(self) -> Iterator[tuple[str, nn.Parameter, dict[str, Any]]]:
        """Yield names, parameters and their groups, in the order of the groups."""
        names = {id(p): name for name, p in self.model.items()}
        for group in self.opt.param_groups:
            yield from ((names[id(p)], p, group) for p in group["params"])

    def holds(self) -> dict[str, Any]:
        """Return weights of training, states and numbers by name, as bits; no state where a device has left out the
        first step."""
        found: dict[str, Any] = {}
        for name, p, group in self.entries():
            kept = self.state(p)
            weight = kept.get(TRAINED, p)
            of = weight.parts() if isinstance(weight, Fp8Weight) else {"weight": weight}
            found[name] = of | {k: plain(x) for k, x in group.items() if k in NUMBERED}
            own = (TRAINED, *(OWN if isinstance(weight, Fp8Weight) else ()))
            made = (k for k in kept if k not in own and kept.get("step", 1))
            found[name] |= {f"state {k}": plain(kept[k]) for k in made}
        return {name: bits(values) for name, values in found.items()}


@cache
def rule_class(name: str, plan: str = "") -> Any:
    return class_of(by_matrix if name == "by_matrix" else name, *([MADE[plan]] if plan in MADE else []))


def rounded(weight: Tensor) -> Tensor:
    """Return what MXFP8 makes of the rows of a finite weight: by fp64 and torch's cast."""
    of_blocks = weight.double().reshape(weight.shape[0], -1, 32)
    fraction, exponent = torch.frexp(of_blocks.abs().amax(-1, keepdim=True) / 448)
    exponent -= (fraction == 0.5).int()
    scale = torch.exp2(exponent.clamp(-126).double())
    codes = (of_blocks / scale).float().to(torch.float8_e4m3fn)
    return torch.where((fraction == 0) | (exponent < -126), 0.0, codes.double() * scale).view(weight.shape)


def plain(value: Any) -> Any:
    """Return numbers of any form as Python's."""
    if isinstance(value, (tuple, list)):
        return tuple(map(plain, value))
    number = value.item() if isinstance(value, (Tensor, np.generic)) and value.ndim == 0 else value
    return float(number) if isinstance(number, (int, float)) and not isinstance(number, bool) else number


def through_checkpoint(old: Run, new: Run, alone: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.pt"
        optgen.save_checkpoint(path, old.opt, None if alone else old.model, extra={"step": 3})
        assert optgen.load_checkpoint(path, new.opt, None if alone else new.model) == {"step": 3}


def distributed(old: Run, new: Run, flat: bool = False, saved: bool = False) -> None:
    """Go by the functions of torch.distributed.checkpoint, which make a step at lr = 0 to see which states there are,
    and ask a folder for these and the numbers of the new groups."""
    how = dcp.StateDictOptions(flatten_optimizer_state_dict=flat)
    take = partial(dcp.get_optimizer_state_dict, options=how)
    theirs = {name: group for name, _, group in new.entries()}
    for name, p, group in old.entries():
        numbers = theirs[name]
        numbers.update({k: torch.full_like(x, 0.5) for k, x in group.items() if isinstance(x, Tensor)})
        numbers.update({k: 0 for k in group if k == "own"})
        if "momentum" in group and any(key.startswith("momentum_buffer") for key in old.state(p)):
            numbers["momentum"] = 0.5
    found = copy.deepcopy(take(old.model, old.opt))
    if old.evaluating:
        take(new.model, new.opt)
        new.opt.eval()
    if saved:
        with tempfile.TemporaryDirectory() as folder:
            folders.save({"optimizer": found}, checkpoint_id=folder)
            found = take(new.model, new.opt)
            folders.load({"optimizer": found}, checkpoint_id=folder)
    dcp.set_optimizer_state_dict(new.model, new.opt, found, options=how)


LOADS: dict[str, Callable[[Run, Run], object]] = {
    "state dict": lambda old, new: new.opt.load_state_dict(old.opt.state_dict()),
    "file of a state dict": lambda old, new: new.opt.load_state_dict(through_file(old.opt.state_dict())),
    "dense state dict": lambda old, new: new.opt.load_state_dict(old.opt.dense_state_dict()),
    "checkpoint": partial(through_checkpoint, alone=False),
    "checkpoint of the optimizer": partial(through_checkpoint, alone=True),
    "distributed": distributed,
    "distributed, flat": partial(distributed, flat=True),
    "distributed, saved": partial(distributed, saved=True),
}


def reloaded(run: Run) -> Run:
    """Load the optimizer's own state dict into itself; it stays the caller's."""
    saved = run.opt.state_dict()
    run.opt.load_state_dict(saved)
    for x in (x for entry in saved["state"].values() for x in entry.values() if isinstance(x, Tensor)):
        x.zero_()
    return run


def assigned(run: Run) -> Run:
    run.opt.state, run.opt.param_groups = defaultdict(dict, run.opt.state), list(run.opt.param_groups)
    return run


COPIES: dict[str, Callable[[Run], Run]] = {
    "itself": reloaded,
    "assigned": assigned,
    "deepcopy": copy.deepcopy,
    "pickle": lambda run: pickle.loads(pickle.dumps(run)),
    "torch.save": partial(through_file, weights_only=False),
}

seeds = st.integers(0, 2**31 - 1)
masks = st.sampled_from([0, 0, 1, 2, 14])  # of parameters: bit by bit
parameters = st.integers(0, 5)


def trains(self: Machine) -> bool:
    return not self.subject.evaluating


def whole(self: Machine) -> bool:
    return not self.handles


def idle(self: Machine) -> bool:
    return trains(self) and whole(self)


def operation(when: Callable[[Any], bool] = lambda _: True, **drawn: Any) -> Callable[[Any], Any]:
    return lambda method: precondition(when)(rule(**drawn)(method))


class Machine(RuleBasedStateMachine):
    """One example: `subject` does what is drawn, `twin` makes steps."""

    cells: st.SearchStrategy[Cell]

    @initialize(data=st.data(), seed=seeds)
    def begin(self, data: Any, seed: int) -> None:
        self.start(data.draw(self.cells, label="cell"), seed)

    def start(self, cell: Cell, seed: int) -> None:
        """Make both of a cell; a replay begins with it."""
        self.cell, self.seed = cell, seed
        self.cls = None if cell.rule == "several" else rule_class(cell.rule, cell.plan)
        self.two, self.inputs = hasattr(self.cls, "first_step"), getattr(self.cls, "INPUTS", ())
        self.known = inspect.signature(self.cls or optgen.optim.AdamW).parameters
        self.viewed, self.coded = cell.plan == VIEWED.name, cell.plan == CODED.name
        given = SMALL if cell.backend == "triton" else LONG if cell.plan in MADE else SHAPES
        shapes = {name: s for name, s in given.items() if len(s) > 1 or cell.rule != "by_matrix"}
        second = {"lr": 0.025, "weight_decay": 0.25, "adamw": bool(seed % 2)}
        self.groups: list[dict[str, Any]] = [
            {"params": [name for name in shapes if name[0] == "m"], "lr": 0.0125},
            {"params": [name for name in shapes if name[0] != "m"]}
            | {key: x for key, x in second.items() if key in self.known},
        ]
        self.frozen, self.handles, self.bound, self.kind = set[str](), list[Any](), False, ""
        draw = torch.Generator().manual_seed(seed)
        values = {name: torch.randn(s, generator=draw).to(getattr(torch, cell.dtype)) for name, s in shapes.items()}
        self.twin, self.subject = self.made(values), self.made(values)

    def made(self, values: Mapping[str, Tensor], shuffled: int = 0, **options: Any) -> Run:
        """Make a model of these values and an optimizer; in another order of groups and names where asked."""
        order = torch.Generator().manual_seed(shuffled)

        def arranged(rows: Any) -> list[Any]:
            listed = list(rows)
            return [listed[i] for i in torch.randperm(len(listed), generator=order)] if shuffled else listed

        model = nn.ParameterDict({name: nn.Parameter(x.clone()) for name, x in values.items()})
        if self.coded:
            model["m0"] = nn.Parameter(Fp8Weight.of(exact(values["m0"]).float(), model["m0"].dtype))
        options |= {"backend": self.cell.backend, "plan": self.cell.plan, "seed": self.seed}
        options |= {"overrides": {"numel > 4000": "fp32"}} if self.cell.mixed and self.cls is not None else {}
        groups = [self.group(model, {**group, "params": arranged(group["params"])}) for group in arranged(self.groups)]
        if shuffled > 1 and self.cls is not None:  # names as a wrapper of modules gives them
            for group in groups:
                group["params"] = [(f"module.{name}", p) for name, p in group["params"]]
        if self.cls is not None:
            return Run(model, self.cls(groups, **{k: x for k, x in options.items() if k in self.known}))
        own = [(name, p) for name, p in arranged(model.items()) if name[0] != "n"]
        run = Run(model, optgen.make(SEVERAL, own, **{"lr": 0.0125} | options))
        for group in (group for group in groups if "rule" in group):
            run.opt.add_param_group(group)
        return run

    def group(self, model: Any, given: dict[str, Any]) -> dict[str, Any]:
        """Return a group with its parameters, named or not, in the place of their names."""
        named = self.cell.named or self.cls is None
        return {**given, "params": [(name, model[name]) if named else model[name] for name in given["params"]]}

    def check(self, stepped: Mapping[str, Tensor] | None = None) -> None:
        """Assert that both hold the same bits, and finite numbers; `stepped`: what a step has just updated."""
        mine, theirs = self.subject.holds(), self.twin.holds()
        assert mine.keys() == theirs.keys()
        for name, a in mine.items():
            differ = [k for k in {**a, **theirs[name]} if a.get(k) != theirs[name].get(k)]
            assert not differ, f"{name} differs from the twin's in {differ}"
        for name, p, _ in self.twin.entries():
            tensors = [p, *(x for x in self.twin.state(p).values() if isinstance(x, Tensor))]
            assert all(bool(x.isfinite().all()) for x in tensors if x.is_floating_point()), f"{name} is not finite"
        self.check_views(stepped or {})

    def check_views(self, stepped: Mapping[str, Tensor]) -> None:
        """Assert that layers which compute with views see the weight, at once where a step has made them."""
        for run in (self.subject, self.twin) if self.viewed and "m0" not in self.frozen else ():
            p = run.model["m0"]
            if "m0" not in stepped:
                run.opt.views(p)
            shown = {view: torch.ops.optgen.viewed(p, view, "m0") for view in VIEWED.views}
            scale = run.opt.views(p)["fp8"].scales
            codes = (p.detach().float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            along = {"mxfp8_rows": rounded(p.detach()), "mxfp8_columns": rounded(p.detach().t()).t()}
            for view, want in {**along, "fp8": codes.float() * scale}.items():
                assert torch.equal(shown[view], want.to(p.dtype)), f"{view} is not that of the weight"

    def refuses(self, action: Callable[[], Any], words: str | None = None) -> None:
        """Assert that something is refused, in these words, and changes nothing."""
        before = self.subject.holds()
        with pytest.raises((RuntimeError, ValueError, TypeError, KeyError, NotImplementedError), match=words):
            action()
        assert before == self.subject.holds(), "it has changed something"

    def mirror(self) -> None:
        """Set the twin's numbers as plain ones."""
        theirs = {name: group for name, _, group in self.twin.entries()}
        for name, _, group in self.subject.entries():
            theirs[name].update({k: plain(x) for k, x in group.items() if k in NUMBERS})

    def both(self, which: int) -> list[tuple[Run, str, nn.Parameter]]:
        name = [*self.twin.model][which % len(self.twin.model)]
        return [(run, name, run.model[name]) for run in (self.subject, self.twin)]

    def gradients(self, seed: int, lacking: int = 0) -> dict[str, Tensor]:
        """Draw numbers of bf16 and of fp16, in the parameters' dtype, for what is neither frozen nor lacking."""
        draw = torch.Generator().manual_seed(seed)
        found = {
            name: torch.randn(p.shape, generator=draw).half().bfloat16().to(p.dtype)
            for name, p in sorted(self.twin.model.items())
        }
        return {x: g for i, (x, g) in enumerate(found.items()) if x not in self.frozen and not lacking >> i & 1}

    def feed(self) -> None:
        """Give inputs to both, also of parameters that will not be stepped."""
        for run in (self.subject, self.twin) if not self.two else ():
            for name in self.inputs:
                run.opt.feed(**{name: {p: torch.full(p.shape, 0.5 + len(key)) for key, p in run.model.items()}})

    def give(self, run: Run, found: Mapping[str, Tensor], form: str = "plain") -> None:
        for name, p in run.model.items():
            p.grad_dtype = None  # type: ignore[attr-defined]  # gradients of any dtype
            p.grad = LAYOUTS[form](found[name]) if name in found else None

    def finish(self, *found: Mapping[str, Tensor]) -> None:
        """Make the twin's step of plain gradients, if there are any, let the scheduler follow, and compare."""
        if found:
            self.give(self.twin, found[0])
            if self.two:
                self.twin.opt.first_step()
                self.give(self.twin, found[1])
            (self.twin.opt.second_step if self.two else self.twin.opt.step)()
        if self.kind:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it saw no step of a copy
                self.subject.schedule.step(*[1.0] * (self.kind == "plateau"))
            self.mirror()
        for run in (self.subject, self.twin):
            run.opt.zero_grad()
        self.check(*found[-1:])

    @operation(trains, seed=seeds, form=st.sampled_from(sorted(LAYOUTS)), lacking=masks, closure=st.booleans())
    def step(self, seed: int, form: str = "plain", lacking: int = 0, closure: bool = False) -> None:
        """Make a step of gradients of any form."""
        found = [self.gradients(seed + i, lacking) for i in range(2)]
        values = [{x: torch.empty_like(g).copy_(LAYOUTS[form](g)) for x, g in part.items()} for part in found]
        calls = iter(found)

        def loss() -> float:
            assert torch.is_grad_enabled()
            self.give(self.subject, next(calls), form)
            return 2.5

        self.feed()
        if closure or self.two:
            with torch.no_grad():
                assert self.subject.opt.step(loss) == 2.5
        else:
            loss()
            self.subject.opt.step()
        self.finish(*values)

    @operation(trains, seed=seeds, count=st.integers(1, 4), lacking=masks)
    def train(self, seed: int, count: int = 1, lacking: int = 0) -> None:
        """Make steps of one kind, the last ones of which take the fast path."""
        for k in range(count):
            self.step(seed + k, lacking=lacking)

    @operation(lambda self: trains(self) and not self.two, seed=seeds, parts=st.integers(1, 3), lacking=masks)
    def backward(self, seed: int, parts: int = 1, lacking: int = 0) -> None:
        """Sum the gradients of micro-batches by torch's backward; where they are released, within it."""
        for handle in self.handles:
            handle._release.accumulate = parts
        pieces = [self.gradients(seed + part, lacking) for part in range(parts)]
        self.feed()
        for found in pieces if pieces[0] else ():
            sum((self.subject.model[name] * g).sum().float() for name, g in found.items()).backward()
        self.subject.opt.step()
        self.finish({name: sum((found[name] for found in pieces[1:]), g) for name, g in pieces[0].items()})

    @operation(
        lambda self: idle(self) and not self.two and self.cell.dtype != "float16",
        seed=seeds, power=st.integers(0, 6), infinite=st.booleans(), lacking=masks,
    )  # fmt: skip
    def scaled(self, seed: int, power: int = 2, infinite: bool = False, lacking: int = 0) -> None:
        """Make a step by a GradScaler, which leaves out one with an infinity."""
        found = self.gradients(seed, lacking)
        if not found or (infinite and self.inputs):
            return
        self.feed()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**power)
        scaler.scale(torch.ones(()))
        self.give(self.subject, {name: g * 2.0**power for name, g in found.items()})
        if infinite:
            self.subject.model[min(found)].grad.view(-1)[-1] = math.inf
        scaler.step(self.subject.opt)
        scaler.update()
        self.finish(*[found] * (not infinite))

    @operation(idle, seed=seeds, lacking=masks)
    def sam(self, seed: int, lacking: int = 0) -> None:
        """Make a step at weights that a first one has moved; SAM's hooks refuse released gradients ever after."""
        found = [self.gradients(seed + i, lacking) for i in range(2)]
        self.feed()
        self.bound |= not self.two
        sam = self.subject.opt if self.two else optgen.SAM(self.subject.opt)
        self.give(self.subject, found[0])
        sam.first_step()
        for action in (self.subject.opt.state_dict, self.subject.opt.eval, partial(copy.deepcopy, self.subject)):
            self.refuses(action)
        self.give(self.subject, found[1])
        sam.second_step()
        self.finish(*found[not self.two :])

    @operation(key=st.sampled_from([*NUMBERS]), form=st.sampled_from([*FORMS]), group=st.integers(0, 2), value=seeds)
    def set_number(self, key: str, form: str, group: int, value: int) -> None:
        groups = self.subject.opt.param_groups
        chosen, number = groups[group % len(groups)], NUMBERS[key][value % len(NUMBERS[key])]
        begins = key == "momentum" and not chosen.get(key)  # which is refused after a step
        if key in chosen and not begins and np.shape(plain(chosen[key])) == np.shape(number):
            chosen[key] = FORMS[form](number) if isinstance(number, float) else number
            self.mirror()

    @operation(whole, kind=st.sampled_from([*SCHEDULES, ""]))
    def scheduler(self, kind: str) -> None:
        """Let a scheduler write rates, or none any more."""
        for group in self.subject.opt.param_groups:
            group.pop("initial_lr", None)
        self.subject.schedule, self.kind = SCHEDULES[kind](self.subject.opt) if kind else None, kind
        self.mirror()

    @operation(lambda m: trains(m) and not m.kind and len(m.groups) < 4, seed=seeds, count=st.integers(1, 2))
    def add_group(self, seed: int, count: int) -> None:
        names = [f"n{len(self.groups)}{i}" for i in range(count)]
        self.groups.append({"params": names, "lr": 0.02} | ({} if self.cls else {"rule": "AdamW"}))
        for run in (self.subject, self.twin):
            draw = torch.Generator().manual_seed(seed)
            for i, name in enumerate(names):
                run.model[name] = nn.Parameter(torch.randn(5, 3 + i, generator=draw).to(run.model["m0"].dtype))
            run.opt.add_param_group(self.group(run.model, self.groups[-1]))
        self.check()

    @operation(lacking=st.integers(0, 63))
    def freeze(self, lacking: int) -> None:
        """Freeze these parameters and thaw the others."""
        self.frozen = {name for i, name in enumerate(sorted(self.subject.model)) if lacking >> i & 1}
        for run in (self.subject, self.twin)[: 1 + self.two]:  # whose first step feeds the second
            for name, p in run.model.items():
                p.requires_grad_(name not in self.frozen)

    @operation(which=parameters, seed=seeds)
    def own_key(self, which: int, seed: int) -> None:
        """Let the script keep something of its own in a group."""
        for run, _, p in self.both(which):
            next(group for _, q, group in run.entries() if q is p)["own"] = seed
        self.check()

    @operation(idle)
    def forget(self) -> None:
        """Begin anew from the weights."""
        for run in (self.subject, self.twin):
            run.opt.state.clear()
        self.check()

    @operation(trains, kind=st.sampled_from([*EDITS]), way=st.sampled_from([*WAYS]), which=parameters, seed=seeds)
    def edit(self, kind: str, way: str, which: int, seed: int) -> None:
        (_, _, mine), (_, _, theirs) = self.both(which)
        way = "copy_" if self.viewed and way == "data.copy_" else way  # which no view sees
        with torch.no_grad():
            value = EDITS[kind](theirs.detach(), torch.Generator().manual_seed(seed))
            WAYS[way](mine, value)
            theirs.copy_(value)
        self.check()

    @operation(lambda self: idle(self) and not self.bound and not self.coded)
    def to_another_dtype_and_back(self) -> None:
        """Move the model; a step in between is refused."""
        run, dtype = self.subject, getattr(torch, self.cell.dtype)
        run.model.to(torch.float64 if dtype == torch.float32 else torch.float32)
        for p in run.model.values():
            p.grad = torch.ones_like(p) if p.requires_grad else None
        if not self.two and len(self.frozen) < len(run.model):
            self.refuses(run.opt.step, r"'?\w+'? \(.*\) was \w+ when the optimizer was created")
        run.opt.zero_grad()
        run.model.to(dtype)
        self.check()

    @operation(idle, which=parameters, seed=seeds)
    def full_weights(self, which: int = 0, seed: int = 0) -> None:
        """Take the weights at full precision out, put them back, and scale rows of one, as the twin's are put back."""
        both = (self.subject, self.twin)
        try:
            full = [run.opt.master_state_dict(run.model) for run in both]
        except RuntimeError:  # an edited weight is no rounding of what the plan keeps: the edit wins, on both sides
            full = [run.model.state_dict() for run in both]
        assert bits(full[0]) == bits(full[1])
        exact = {name: x.float() for name, x in full[0].items()}
        for run in both:  # a number between two others may be kept as either and the rest
            run.opt.load_master_state_dict(run.model, exact)
            same = bits(run.opt.master_state_dict(run.model)) == bits(exact)
            assert same or self.cell.plan == "flashoptim"  # which has two codes of a number, with units of their own
        (mine, name, p), (theirs, _, q) = self.both(which)
        rows = torch.rand(p.shape[:1], generator=torch.Generator().manual_seed(seed))
        if not p.ndim or getattr(self.cls, "evaluation", None) or self.cell.rule in ("lookahead(adamw)", "prodigy"):
            self.refuses(partial(mine.opt.scale_rows, p, rows))
        elif "step" in theirs.state(q):  # bits that wait beside p are in no state dict
            mine.opt.scale_rows(p, rows)
            product = theirs.opt.master_state_dict(theirs.model)[name] * rows.view(-1, *[1] * (p.ndim - 1))
            theirs.opt.load_master_state_dict(theirs.model, {name: product}, strict=False)
        self.check()

    def replaced(self, new: Run, seed: int) -> None:
        """Go on with another model and optimizer; what the old one does then is nothing to it."""
        old, self.subject = self.subject, new
        for name, p in new.model.items():
            p.requires_grad_(name not in self.frozen)
        self.check()
        self.bound &= new is old
        if not self.inputs and new is not old:
            old.opt.train()
            self.give(old, self.gradients(seed))
            make_step(old.opt)
            self.check()

    @operation(whole, seed=seeds, way=st.sampled_from([*LOADS]), shuffled=st.integers(0, 3), late=st.booleans())
    def resume(self, seed: int, way: str, shuffled: int = 0, late: bool = False) -> None:
        """Load into a new model and optimizer of other values, whose names and groups may be in another order.

        In evaluation the model may be loaded after the optimizer, or not at all."""
        old = self.subject
        stepped = all(p.requires_grad and "step" in old.state(p) for p in old.model.values())
        if way.startswith("distributed") and not stepped:
            return  # torch refuses it
        if way == "distributed, saved" and len({frozenset(group) for group in old.opt.param_groups}) > 1:
            return  # torch asks the folder for a group's keys by its place, and groups may have been in another order
        if way == "dense state dict" and (self.cell.plan, self.cell.dtype) != ("fp32", "float32"):
            return  # of codes it is near
        if self.two or self.cell.rule in SUMS or not self.cell.named:  # sums have the order of the parameters
            shuffled = 0
        new = self.made({name: torch.full_like(p, 3.0).detach() for name, p in old.model.items()}, shuffled)
        if self.kind:
            new.schedule = SCHEDULES[self.kind](new.opt)
            new.schedule.load_state_dict(copy.deepcopy(old.schedule.state_dict()))
        for group in new.opt.param_groups:
            group["lr"] = 0.5
        shown = {name: p for name, p in old.model.items() if TRAINED not in old.state(p)}
        new.model.load_state_dict(shown, strict=False)
        LOADS[way](old, new)
        if late:
            new.model.load_state_dict(old.model.state_dict())
        self.replaced(new, seed)

    @operation(whole, seed=seeds, way=st.sampled_from([*COPIES]))
    def copied(self, seed: int, way: str) -> None:
        """Go on with a copy; classes made in memory and lambdas are not pickled."""
        in_memory = "(" in self.cell.rule or self.cell.rule == "by_matrix" or self.kind
        if not (way in ("pickle", "torch.save") and in_memory):
            self.replaced(COPIES[way](self.subject), seed)

    @operation(lambda self: trains(self) and not self.bound)
    def release(self) -> None:
        """Release gradients, or stop that; refused where the rule sums over the model."""
        parts = [x for x in self.subject.parts() if any(p.requires_grad for g in x.param_groups for p in g["params"])]
        if self.handles:
            for handle in self.handles:
                handle.remove()
            self.handles = []
        elif self.two or self.cell.rule in SUMS:
            self.refuses(self.subject.opt.release_gradients)
        elif len(self.frozen) < len(self.subject.model):
            self.handles = [part.release_gradients() for part in parts]
            self.refuses(parts[-1].release_gradients)
        self.check()

    @operation(lambda m: idle(m) and m.cell.backend == "cpp" and m.cell.plan not in MADE, on=st.integers(0, 15))
    def offloaded(self, on: int) -> None:
        """Let the CPU stand for a device whose states are in host memory, for some groups: bit by bit."""
        for part in self.subject.parts() if on and not self.bound else ():
            part._offload = offload.Offload(resident=())
        self.bound |= bool(on)
        for k, group in enumerate(self.subject.opt.param_groups):
            group["offload"] = bool(on >> k & 1)

    @operation(idle)
    def away(self) -> None:
        """Let states leave what stands for a device, and come back; a state dict has them meanwhile."""
        opt, resident = self.subject.opt, [part._offload.resident for part in self.subject.parts()]
        for part in self.subject.parts():
            part._offload.resident = ()
        before = bits(opt.state_dict())
        opt.offload_states()
        self.refuses(opt.step)
        assert bits(opt.state_dict()) == before
        opt.reload_states()
        for part, before in zip(self.subject.parts(), resident, strict=True):
            part._offload.resident = before
        self.check()

    @operation(whole)
    def evaluation(self) -> None:
        """Go to evaluation or back; a step is refused there."""
        opt, was = self.subject.opt, self.subject.evaluating
        opt.train() if was else opt.eval()
        assert self.subject.evaluating == (not was and getattr(self.cls, "evaluation", None) is not None)
        if self.subject.evaluating:
            self.give(self.subject, self.gradients(0))
            self.refuses(opt.step)
            opt.zero_grad()
        self.check()

    @operation(idle, what=st.sampled_from([*REFUSED]), seed=seeds)
    def refused(self, what: str, seed: int) -> None:
        """Ask for what is refused."""
        run, p = self.subject, self.subject.model["m0"]
        if what.startswith("a step") and (self.two or not p.requires_grad):
            return
        self.feed()  # else it is that which is refused
        states = [run.state(q) for q in run.model.values()]
        if what.startswith("states") and not any(np.ndim(x[k]) for x in states for k in x):
            return
        weight, rates = p.data, [group["lr"] for group in run.opt.param_groups]
        self.give(run, self.gradients(seed))
        words = {"a step at a rate below 0": r"lr.* must be >= 0, got -1", "a step of a sparse gradient": "sparse"}
        with pytest.raises((RuntimeError, ValueError, TypeError), match=words.get(what)):
            REFUSED[what](run.opt, p)
        p.data = weight
        for group, rate in zip(run.opt.param_groups, rates, strict=True):
            group["lr"] = rate
        run.opt.zero_grad()
        self.check()

    def teardown(self) -> None:
        """Make two more steps, in which what was done before shows."""
        if hasattr(self, "subject"):
            if self.subject.evaluating:
                self.evaluation()
            if self.handles:
                self.release()
            self.freeze(0)
            self.train(1, 2)
