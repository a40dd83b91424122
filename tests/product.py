"""The product of rules, plans, parameter dtypes and flags, and one cell of it built in memory and run.

A `Cell` names one (spec, plan, parameter dtype, flags, size class); `build` compiles it through the same functions
as `optgen build`; a `Run` trains one tensor with its strict reference, and can be asked for the decoded state.
"""

from __future__ import annotations

import itertools
import random
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from optgen.base.errors import UserError
from optgen.driver import emit, judge, targets
from optgen.driver.targets import Case
from optgen.formats.plan import Plan, Storage
from optgen.ir.node import postorder
from optgen.lang.spec import Spec
from optgen.lower import needs_matrix
from optgen.ops import dtypes
from optgen.runtime import records
from optgen.runtime.cpu import native
from optgen.runtime.layout import layout
from optgen.runtime.records import join, sums
from optgen.runtime.records.keys import step_key, stream_key
from optgen.runtime.states import state
from optgen.runtime.step import backends
from optgen.verify import differential
from optgen.verify.differential import Report, Values
from optgen.verify.intervals import STRICT, Rounding
from tests import harness, training
from tests.harness import Pair, package, plan_of, spec_of

ROOT = Path(__file__).parents[1]


def multiplies(spec: str) -> bool:
    """Return True if a rule takes products of matrices."""
    found = spec_of(spec)  # of which few are traced here
    ops = {n.op for n in postorder([*found.trace().states.values(), found.trace().p])} if found.matrix != "last" else ()
    return not {"call", "matmul"}.isdisjoint(ops)


_RULES = sorted(p.stem for p in (ROOT / "specs").glob("[!_]*.py") if p.stem != "plans")
# No enclosure of a product of matrices is worth having: rules that take one are held to theirs in test_whole_model.py.
OF_MATRICES = tuple(filter(multiplies, _RULES))
SPECS = tuple(spec for spec in _RULES if spec not in OF_MATRICES)
WITH_MATRICES = (*SPECS, *OF_MATRICES)
PLANS = tuple(name for name, value in vars(__import__("specs.plans").plans).items() if isinstance(value, Plan))
PARAMS = ("float32", "bfloat16", "float16")
SHAPES = ((331,), (3, 70))  # more than one tile with a tail; rows that end within a block
REDUCED = ((2, 3, 35), (4, 3, 3, 3))  # also for rules that reduce: matrices and rows that end within a block
DEFAULT = "int8_split24"


@dataclass(frozen=True)
class Cell:
    """One setting of one pair; its text is the test's id."""

    spec: str
    plan: str
    param: str = "bfloat16"
    flags: tuple[tuple[str, bool], ...] = ()
    small: bool = False
    vector: bool = False

    def __str__(self) -> str:
        words = [self.spec, self.plan, self.param, *(name if on else f"no_{name}" for name, on in self.flags)]
        return "-".join(words + ["small"] * self.small + ["vector"] * self.vector)


def spaces_of(spec: str) -> set[str]:
    """The names of all spaces in which a rule computes, under any flags."""
    found = spec_of(spec)
    traces = [found.trace(setting) for setting in found.settings()]
    return {n.space.name for t in traces for n in postorder([t.p, *t.states.values()])}


@cache
def reduces(spec: str) -> bool:
    """Return True if a rule's values reach further than their element: its step takes several kernels."""
    return not spaces_of(spec) <= {"host", "elem"}


def settings_of(spec: str) -> list[tuple[tuple[str, bool], ...]]:
    """Every flag setting of a spec as what differs from the defaults; () first."""
    found = spec_of(spec)
    defaults = {f.name: f.default for f in found.flags}
    return [tuple((k, v) for k, v in s.items() if v != defaults[k]) for s in found.settings()]


@cache
def refusal(spec: str, plan: str) -> str:
    """Why a plan does not fit a rule; "" where it does."""
    try:
        judge.judge(spec_of(spec), plan_of(plan))
    except UserError as error:
        return str(error)
    return ""


def pairs(specs: Iterable[str] = SPECS) -> Iterator[tuple[str, str]]:
    """Every (spec, plan) that fits.

    Every plan fits the rules of SPECS, which a test holds to: to judge all of them takes 9 s at each collection.
    """
    return ((s, p) for s, p in itertools.product(specs, PLANS) if s in SPECS or not refusal(s, p))


def daily_pairs(specs: Iterable[str] = SPECS) -> list[tuple[str, str]]:
    """Every rule under the default plan, and every plan under AdamW."""
    return [(s, p) for s, p in pairs(specs) if p == DEFAULT or s == "adamw"]


def cells_of(spec: str, plan: str) -> Iterator[Cell]:
    """All cells of a pair, also those that no tensor falls into (`is_met`)."""
    for flags, param in itertools.product(settings_of(spec), PARAMS):
        yield Cell(spec, plan, param, flags)
        small = Cell(spec, plan, param, flags, small=True)
        if has_small(small):
            yield small
        vector = Cell(spec, plan, param, flags, vector=True)
        if has_vector(vector):
            yield vector


def is_met(cell: Cell) -> bool:
    """Return True if a tensor falls into the cell: shapes decide flags, and which tensors are vectors for a plan."""
    return not any(f.shape for f in spec_of(cell.spec).flags) or bool(fitting(cell, SHAPES + REDUCED))


def has_small(cell: Cell) -> bool:
    """Return True if small tensors of this cell are stored in another way than large ones."""
    spec, plan = spec_of(cell.spec), plan_of(cell.plan)
    flags = flags_of(cell)
    present = spec.present(flags)
    recurrences = targets.recurrences_of(spec, tuple(sorted(flags.items())))
    storages = [plan.storage(present, dtypes.FROM_TORCH[cell.param], small, recurrences) for small in (False, True)]
    return bool(plan.small_numel and present and storages[0].states != storages[1].states)


def within_blocks(plan: str) -> bool:
    """Return True if no state of the plan depends on more than its storage block: on its row or column."""
    found = plan_of(plan)
    return all(fmt.matrix is None for fmt in (found.signed, found.nonneg, *found.overrides.values()))


def has_vector(cell: Cell) -> bool:
    """Return True if tensors without rows and columns are stored in another way than those that have them."""
    spec, flags = spec_of(cell.spec), flags_of(cell)
    storage = plan_of(cell.plan).storage(spec.present(flags), dtypes.FROM_TORCH[cell.param], False)
    return storage.matrix is not None and not needs_matrix(spec, flags)


def sample(count: int, seed: int, besides: Iterable[Cell] = ()) -> list[Cell]:
    """A cell of each of `count` pairs, drawn by seed; none of `besides`.  Every rule has to fit every plan."""
    draw, left = random.Random(seed), set(besides)
    drawn = []
    for spec, plan in draw.sample(list(itertools.product(SPECS, PLANS)), count):
        rest = [cell for cell in cells_of(spec, plan) if cell not in left and is_met(cell)]
        drawn += [draw.choice(rest)] if rest else []
    return drawn


def flags_of(cell: Cell) -> dict[str, bool]:
    return {f.name: f.default for f in spec_of(cell.spec).flags} | dict(cell.flags)


def at_shape(cell: Cell, shape: Sequence[int]) -> Cell:
    """The cell that a tensor of that shape falls into: its shape flags as the shape says."""
    spec, flags = spec_of(cell.spec), dict(flags_of(cell))
    flags |= {f.name: f.holds(tuple(shape), spec.defaults) for f in spec.flags if f.shape is not None}
    cell = replace(cell, flags=tuple((f.name, flags[f.name]) for f in spec.flags if flags[f.name] != f.default))
    return replace(cell, vector=len(shape) < 2 and not cell.small and has_vector(cell))


def hypers_of(cell: Cell, **wanted: Any) -> dict[str, Any]:
    """Hyper-parameters under which the cell's derived flags are what the cell says; `wanted` where they exist."""
    spec, flags = spec_of(cell.spec), flags_of(cell)
    out = {h.name: h.default for h in spec.hypers}
    out |= {k: v for k, v in wanted.items() if k in out}
    for f in spec.flags:
        if f.nonzero:
            out[f.nonzero] = (out[f.nonzero] or 0.9) if flags[f.name] else 0.0
    return out


@dataclass(frozen=True)
class Built:
    """A cell, compiled: its functions as `optgen build` prints them, in strict maths."""

    cell: Cell
    spec: Spec
    case: Case
    pair: join.Pair
    variant: records.Variant

    @property
    def storage(self) -> Storage:
        return self.case.storage

    @property
    def in_stages(self) -> bool:
        """Return True if a step takes several kernels, or one that knows rows, columns or sizes."""
        return self.variant.single is None


@lru_cache(maxsize=256)
def build(cell: Cell) -> Built:
    """The cell through lowering, passes and the reference backend."""
    spec, plan = spec_of(cell.spec), plan_of(cell.plan)
    case = harness.case_of(spec, plan, cell.param, flags_of(cell), cell.small, cell.vector)
    return Built(cell, spec, case, harness.loaded(spec, plan), harness.variant_of(spec, case))


class Run:
    """One tensor trained by the strict reference, from a fresh state.

    `buffers` holds what is stored, by field name, the parameter under "p"; `host_states` what the host keeps.
    """

    def __init__(
        self, built: Built, weight: Tensor, *, seed: int = 0, stream: int | None = None, **hypers: Any
    ) -> None:
        self.built, self.seed, self.steps = built, seed, 0
        self.stream = stream_key(0) if stream is None else stream
        self.hypers = hypers_of(built.cell, **hypers)
        self.host_states = dict(built.variant.host_states)
        p = weight.to(getattr(torch, built.cell.param), copy=True)
        made = state.create(built.pair, built.variant, p, {}, self.hypers)
        self.buffers = {"p": p} | {f.name: made[f.name] for f in built.variant.fields}

    def copy(self) -> Run:
        """The same run at the same step, on buffers of its own."""
        other = Run.__new__(Run)
        other.__dict__ |= self.__dict__
        other.host_states = dict(self.host_states)
        other.buffers = {k: v.clone() for k, v in self.buffers.items()}
        return other

    def scalars(self) -> tuple[float, ...]:
        """The next step's host scalars, and then the new host states."""
        return self.built.variant.host[0](self.steps + 1, 1.0, **self.hypers, **self.host_states)

    def step(self, g: Tensor) -> None:
        """One step in place."""
        values, count = self.scalars(), self.built.variant.host[1]
        self.steps += 1
        keys, built = (step_key(self.seed, self.steps), self.stream), self.built
        done = harness.eager_step(built.spec, built.case, self.buffers, g, values[:count], *keys)
        with suppress(StopIteration):
            total = next(done)
            while True:  # what it yields is summed over the model: here it is all of it
                total = done.send(sums.in_lanes(total[0].reshape(1)))
        self.host_states = dict(zip(self.host_states, values[count:], strict=True))

    def decoded(self) -> dict[str, Tensor]:
        """The fp32 weight under "p" and the fp32 states."""
        pair, variant = self.built.pair, self.built.variant
        return layout.decode(pair, variant, self.buffers["p"], self.buffers, ("p", *variant.states))

    @property
    def options(self) -> dict[str, Any]:
        """Hyper-parameters and flags."""
        return self.hypers | flags_of(self.built.cell)

    def oracle(self, g: Tensor) -> dict[str, Tensor]:
        """The next step in fp64 from the decoded state: "p" and the states."""
        spec, before = self.built.spec, self.decoded()
        return differential.oracle(spec, before, g.float(), self.steps, self.host_states, self.options)

    def enclosed(self, model: Rounding = STRICT) -> Values:
        """Return the kept values as points, the start of a chain of enclosures."""
        return Values.decoded(self.decoded(), self.host_states, self.steps, model)

    def enclose(self, before: Values, g: Tensor, kept: Mapping[str, Tensor] | None = None) -> Values:
        """Enclose the values after the next step."""
        return differential.enclose(self.built.spec, self.built.storage, before, g.float(), self.options, kept)

    def checked(self, g: Tensor) -> Report:
        """One step in place, against the derived enclosure and the fp64 oracle from what was kept before it."""
        start, exact = self.enclosed(), self.oracle(g)
        self.step(g)
        after = self.decoded()
        return differential.compare(after, self.enclose(start, g, kept=after), exact)

    def chained(self, gradients: Sequence[Tensor]) -> list[Report]:
        """Steps in place, each against the enclosure and the oracle carried on from before the first; every fifth one
        against those from what was kept before it, too."""
        inside, exact, reports = self.enclosed(), self.decoded(), []
        for k, g in enumerate(gradients):
            host, step = dict(self.host_states), self.steps
            if k % 5 == 4:
                reports.append(self.checked(g))
            else:
                self.step(g)
            inside = self.enclose(replace(inside, host=host, step=step), g)
            exact = differential.oracle(self.built.spec, exact, g.float(), step, host, self.options)
            reports.append(differential.compare(self.decoded(), inside, exact))
        return reports


class Oracle:
    """The author's function in fp64 from the same start, never rounded."""

    def __init__(self, built: Built, weight: Tensor, **hypers: Any) -> None:
        self.built, self.steps = built, 0
        self.p = weight.to(getattr(torch, built.cell.param)).double()
        self.states: dict[str, Tensor] = {}
        self.host_states: dict[str, Any] = {}
        self.hypers = hypers_of(built.cell, **hypers) | flags_of(built.cell)

    def step(self, g: Tensor) -> None:
        self.steps += 1
        self.p, self.states, self.host_states = self.built.spec.evaluate(
            self.p, g.double(), self.steps, self.states, self.host_states, **self.hypers
        )


def optimizer_class(cell: Cell, folder: Path) -> Any:
    """The optimizer of one cell in strict maths, from a package of its own."""
    spec, name = spec_of(cell.spec), "cell_" + re.sub(r"\W", "_", str(cell))
    plan = plan_of(cell.plan) if cell.small else plan_of(cell.plan).but(name=cell.plan, small_numel=0)
    return getattr(package(folder, name, spec.name, emit.emit_package(spec, plan, maths="strict")), spec.class_name)


def differing(
    cell: Cell, folder: Path, steps: int = 2, others: Sequence[str] = ("triton", "cpp"),
    shapes: Sequence[tuple[int, ...]] = SHAPES + REDUCED,
) -> list[str]:  # fmt: skip
    """Name the values in which the strict kernels of other backends differ from the eager reference.

    All shapes are trained together, through the runtime.  Needs a process that interprets or emulates Triton kernels.
    """
    made, spec, flags = optimizer_class(cell, folder), spec_of(cell.spec), flags_of(cell)
    options = hypers_of(cell, lr=1e-2, weight_decay=1e-2) | {f.name: flags[f.name] for f in spec.flags if not f.derived}
    fed = [name for name in made.INPUTS if all(flags[f.name] for f in spec.flags if f.fed == name)]
    how: dict[str, Any] = dict(steps=steps, sizes=(-6, 1), fed=fed, plan=cell.plan, **options)
    kept = {}
    for backend in ("reference", *(b for b in others if b != "cpp" or native.compiler() is not None)):
        with mock.patch.object(backends, "able", wraps=backends.able) as asked:
            seed, dtype = zlib.crc32(str(cell).encode()), getattr(torch, cell.param)
            kept[backend] = training.trained(made, backend, fitting(cell, shapes), dtype, seed=seed, **how)
        used = {backends.able(*call.args) for call in asked.call_args_list}
        assert used == {backend}, f"{cell}: {used} in the place of {backend}"
    exact = partial(training.different, kept["reference"], exact=True)
    return [f"{x} by {backend}" for backend, opt in kept.items() for x in exact(opt)]


def same_bits(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Return True if two sets of buffers hold the same bits."""
    return a.keys() == b.keys() and all(a[k].shape == b[k].shape and harness.same_bits(a[k], b[k]) for k in a)


def fitting(cell: Cell, shapes: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The shapes of which a tensor falls into the cell."""
    return [shape for shape in shapes if at_shape(cell, shape) == cell]


def check(cell: Cell, folder: Path, shapes: Iterable[tuple[int, ...]] = (), steps: int = 2) -> list[Report]:
    """Compiles a cell and runs it: strict kernels and reference bit for bit, each step against its bound.

    Asserts the first and returns the reports of the second.  Needs a process that interprets Triton kernels.  A step
    of several stages is run by the reference alone.
    """
    built = build(cell)
    several = built.in_stages
    pair = None if several else Pair(built.spec, built.case, folder)
    draw = torch.Generator().manual_seed(zlib.crc32(str(cell).encode()))
    reports = []
    shapes = tuple(shapes) or fitting(cell, SHAPES + REDUCED * several)
    assert shapes, f"no tensor falls into {cell}"
    for shape in shapes:
        run = Run(built, torch.randn(shape, generator=draw), lr=1e-2, weight_decay=1e-2)
        for _ in range(steps):
            size = 10.0 ** float(torch.randint(-6, 1, (), generator=draw))
            g = (torch.randn(shape, generator=draw) * size).to(getattr(torch, cell.param))
            step, key, options = run.steps + 1, step_key(run.seed, run.steps + 1), run.hypers | run.host_states
            twins = {}
            if pair is not None:
                twins["triton"] = run.copy().buffers
                pair.run_triton(twins["triton"], g, step, key, run.stream, **options)
            if pair is not None and native.compiler() is not None:
                twins["cpp"] = run.copy().buffers
                pair.run_cpp([(twins["cpp"], g, run.stream)], step, key, **options)
            reports.append(run.checked(g))
            for backend, buffers in twins.items():
                different = [name for name, kept in run.buffers.items() if not harness.same_bits(kept, buffers[name])]
                assert not different, f"{cell}: {backend} and reference differ in {different}: step {step}, {shape}"
    return reports


def allowed_distance(
    spec: Spec, storage: Storage, before: Mapping[str, Tensor], g: Tensor, step: int, hypers: Mapping[str, Any],
    host: Mapping[str, float] | None = None, *, model: Rounding = STRICT, kept: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """The largest distance of what is kept to the fp64 oracle, per element of "p" and of each state.

    before  decoded "p" and states, fp32; inf where nothing can be promised (overflow, division by 0, NaN)
    """
    start = Values.decoded(before, host or {}, step, model)
    after = differential.enclose(spec, storage, start, g, hypers, kept)
    exact = differential.oracle(spec, before, g, step, host or {}, hypers)
    return {k: x.distance(exact[k]) for k, x in {"p": after.p, **after.states}.items()}
