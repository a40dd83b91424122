"""Enclosures of one optimizer step, and the check that generated code keeps to them.

The step of an optimizer is decode, update, encode.  Decoding is exact; the update is enclosed by reading the
spec on intervals (verify/intervals.py); encoding adds the format's own bound (verify/bounds.py) times the scale
that the block can have.  Put together, that encloses what the kernel keeps and the fp64 oracle alike, element
by element, from nothing but the spec, the plan and the values before the step.

    trial = Trial(AdamW, spec, p, states, plan="int8_split24", dtype=torch.bfloat16)
    report = trial.check_step(g)                # one step against the fp64 oracle started from what was kept
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from typing import Any

import torch
from torch import Tensor

from optgen import passes
from optgen.formats.format import Format
from optgen.formats.plan import Storage
from optgen.ir.node import Node, postorder
from optgen.lang.matrices import transpose, wide, zero_product
from optgen.lang.spec import Spec, filled, start
from optgen.lang.values import equal, reader_of
from optgen.lower import lower_rule, matrix_of, relative, untouched
from optgen.ops import spaces
from optgen.ops.dtypes import F32_UNIT, FROM_TORCH
from optgen.ops.prims import MATRIX_OPS, PRIMS, REDUCTIONS
from optgen.runtime.checkpoint import checkpoint
from optgen.runtime.layout import layout
from optgen.runtime.optimizer import Optimizer
from optgen.runtime.options.options import hypers_of
from optgen.runtime.records.join import settled
from optgen.verify.intervals import STRICT, Interval, Rounding
from optgen.verify.lint import cancelling


@dataclass(frozen=True)
class Values:
    """A parameter between two steps, as enclosures: points where the decoded values are known.

    p, states   of the parameter's shape, or of one value per row, column or tensor; only the states that are on
    host        host states; step: how many steps were made
    """

    p: Interval
    states: Mapping[str, Interval]
    host: Mapping[str, float] = field(default_factory=dict)
    step: int = 0

    def reshaped(self, spec: Spec, shape: torch.Size) -> Values:
        """Seen as another shape of as many elements; what is kept per row, column or tensor stays as it is."""
        wide = {s.name for s in spec.states if s.space == spaces.elem}
        states = {k: v.reshape(shape) if k in wide else v for k, v in self.states.items()}
        return Values(self.p.reshape(shape), states, self.host, self.step)

    @classmethod
    def decoded(
        cls, values: Mapping[str, Tensor], host: Mapping[str, float], step: int, model: Rounding = STRICT,
        roundings: Mapping[str, int] | None = None,
    ) -> Values:  # fmt: skip
        """Return the values of decoded tensors: "p" and the states by name.

        In fast maths a kernel decodes with roundings of its own: a code times its scale, one operation's worth, or as
        many as `roundings` says of a state.
        """
        points = {k: Interval.point(v, model) for k, v in values.items()}
        p = points.pop("p")
        if model.regroups:
            points = {
                k: x.widened(x.magnitude() * (model.unit * (roundings or {}).get(k, 1))) for k, x in points.items()
            }
        return cls(p, points, host, step)


def oracle(
    spec: Spec, before: Mapping[str, Tensor], g: Tensor, step: int, host: Mapping[str, float], hypers: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Step number `step` + 1 in fp64, from decoded values: "p" and the states."""
    states = {k: v.double() for k, v in before.items()}
    p, new, _ = spec.evaluate(states.pop("p"), g.double(), step + 1, states, host, **hypers)
    return {"p": p, **new}


def reading(spec: Spec, before: Values, g: Tensor, hypers: Mapping[str, Any]) -> dict[str, Interval]:
    """Read the rule of a step on intervals, before anything is stored: "p" and the states; the oracle's values lie
    inside."""
    p, new, _ = _evaluated(spec, before, Interval.point(g.float(), before.p.model), hypers)
    return {"p": p, **new}


def _evaluated(spec: Spec, before: Values, gradient: Interval, hypers: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """The rule on intervals.  Step and hyper-parameters are numbers with a point: an exponent without one is the
    author's own, of which kernels make products (`Interval.__pow__`).
    """
    pointed = dict(hypers)
    for h in spec.hypers:
        if (given := hypers.get(h.name)) is not None:
            pointed[h.name] = given if h.series else h.numbers(given) if h.divided else float(given)
    step = float(before.step + 1)
    found: tuple[Any, Any, Any] = spec.evaluate(before.p, gradient, step, before.states, before.host, **pointed)
    return found


def enclose(
    spec: Spec,
    storage: Storage,
    before: Values,
    g: Tensor,
    hypers: Mapping[str, Any],
    kept: Mapping[str, Tensor] | None = None,
) -> Values:
    """Everything that may be kept after one more step, the exact result included.

    hypers  constructor arguments (flags too); the gradient has any float dtype
    kept    decoded states after the step, where they are known: what a relative format divided by is then a
            number, not an interval
    """
    shape = before.p.shape
    flags = spec.flag_values({**before.host, **hypers}, tuple(shape), before.step + 1)
    seen = layout.matrix_shape(matrix_of(spec, flags, storage), shape)
    if seen != shape:
        hypers = {**hypers, **flags}
        views = kept and {k: v.reshape(seen) if v.shape == shape else v for k, v in kept.items()}
        after = enclose(spec, storage, before.reshaped(spec, seen), g.reshape(seen), hypers, views)
        return after.reshaped(spec, shape)
    gradient = Interval.point(g.float(), before.p.model)
    p, states, host = _evaluated(spec, before, gradient, hypers)
    still = untouched(spec, storage, flags)
    cancels = {x for x in cancelling(spec, tuple(flags.items())) if x in storage.states and storage.states[x].unrounded}
    step = StoredStep(spec, storage, before, kept, still, cancels)
    if early := [name for name in read_back(spec, storage, flags) if name not in still]:
        trace = spec.trace(flags)
        p, states = step.read_back({"p": trace.p, **trace.states}, gradient, _scalars(spec, before, hypers), early)
    new = {name: step.kept_state(name, states) for name in states}
    return Values(stored_weight(storage, p), new, host, before.step + 1)


@dataclass(frozen=True)
class StoredStep:
    """One step of a rule under a plan, whose new values are stored; arguments as in `enclose`.

    still    states that the step leaves as they are kept
    cancels  states that others are divided by with the root before it is rounded
    """

    spec: Spec
    storage: Storage
    before: Values
    kept: Mapping[str, Tensor] | None
    still: Collection[str]
    cancels: Collection[str]

    def kept_state(self, name: str, states: Mapping[str, Interval]) -> Interval:
        """Return what a state may read as after its new value was stored."""
        if name in self.still:
            return states[name]
        fmt, root, x = self.storage.states[name], None, states[name]
        if fmt.relative:
            base = next(s for s in self.spec.states if s.name == name).normalized_by
            assert base is not None
            given = self.kept and Interval.point(self.kept[base], states[name].model)
            root = _root(given or self.kept_state(base, states))
            if base in self.cancels:
                x = x * (root / _unrounded(states[base], root))
        lo, hi = (end.expand(self.before.states[name].shape) for end in (x.lo, x.hi))
        return stored(fmt, x.spanning(lo, hi), root)

    def read_back(
        self, roots: Mapping[str, Node], gradient: Interval, scalars: Mapping[str, float], early: Collection[str]
    ) -> tuple[Interval, dict[str, Interval]]:
        """Return new p and states, where what reads a value of `early` may see it before it was stored or after.

        roots    the new values ("p" and states) as nodes of the rule
        scalars  hyper-parameters by part, host states and the step
        """
        before = self.before
        held = {"p": spaces.elem} | {s.name: s.space for s in self.spec.states}
        reading = Reading(before, gradient, scalars)
        order = [n.uid for n in postorder(roots.values())]
        for name in sorted(early, key=lambda name: order.index(roots[name].uid)):
            exact = {k: filled(held[k], before.p, reading(roots[k])) for k in roots}
            if self.kept is not None:
                again = Values.decoded({"p": self.kept["p"], name: self.kept[name]}, {}, 0, before.p.model)
                after = again.p if name == "p" else again.states[name]
            elif name == "p":
                after = stored_weight(self.storage, exact["p"])
            else:
                after = self.kept_state(name, exact)
            # An unknown end stays one: NaN wins in minimum and maximum.
            lo, hi = torch.minimum(exact[name].lo, after.lo), torch.maximum(exact[name].hi, after.hi)
            reading = reading.replacing(roots[name], Interval(lo, hi, before.p.model))
        found = {name: filled(held[name], before.p, reading.before_replacing(node)) for name, node in roots.items()}
        return found.pop("p"), found


# -- values that are stored before the last sweep that needs them


@lru_cache(maxsize=1024)
def _early(spec: Spec, flags: tuple[tuple[str, bool], ...]) -> tuple[str, ...]:
    return passes.step(lower_rule(spec, dict(flags)), "strict").early


def read_back(spec: Spec, storage: Storage, flags: Mapping[str, bool]) -> tuple[str, ...]:
    """The states (or "p") whose new value later sweeps of the same step take from where it was stored.

    None is where one of them is kept as a whole, or relative to a state that is not among them.
    """
    trace = spec.trace(flags)
    if not any(n.op in REDUCTIONS or n.op in MATRIX_OPS for n in postorder([trace.p, *trace.states.values()])):
        return ()
    early = _early(spec, tuple(sorted(flags.items())))
    whole = any(storage.states[x].matrix is not None for x in early if x in storage.states)
    return () if whole or set(settled(early, relative(spec, storage))) != {*early} else early


def _scalars(spec: Spec, before: Values, hypers: Mapping[str, Any]) -> dict[str, float]:
    """Return the hyper-parameters by part, the host states and the step."""
    out: dict[str, float] = {**before.host, "step": before.step + 1}
    for h in spec.hypers:
        out |= dict(zip(h.parts, h.numbers(hypers.get(h.name, h.default)), strict=True))
    return out | {h.name: before.host.get(h.name, h.init) for h in spec.host_states}


_OF_MATRICES: Mapping[str, Callable[..., Any]] = {
    "matmul": operator.matmul, "transpose": transpose, "to_wide": wide, "zero_product": zero_product,
}  # fmt: skip


class Reading:
    """A trace's nodes read on intervals; host scalars are numbers."""

    def __init__(self, before: Values, gradient: Interval, scalars: Mapping[str, float]) -> None:
        self.loads = {"p": before.p, "g": gradient, **before.states}
        self.scalars = scalars
        self.shape = before.p.shape
        self.replaced: dict[int, Interval] = {}
        self.memo: dict[int, Any] = {}

    def replacing(self, node: Node, value: Interval) -> Reading:
        """The same, where what reads the node sees this value."""
        other = Reading.__new__(Reading)
        other.__dict__ |= self.__dict__
        other.replaced, other.memo = {**self.replaced, node.uid: value}, {}
        return other

    def __call__(self, root: Node) -> Any:
        for node in postorder([root]):
            if node.uid not in self.memo:
                self.memo[node.uid] = self.replaced.get(node.uid) or self.before_replacing(node)
        return self.memo[root.uid]

    def before_replacing(self, node: Node) -> Any:
        """The node's own value, its operands replaced or not."""
        if node.op == "load":
            return self.loads[node.attr]
        if node.op == "sym":
            return self.scalars[node.attr]
        if node.op == "const":
            return node.attr
        if node.op == "extent":
            sizes = {"rows": self.shape[-2:-1], "columns": self.shape[-1:], "elements": self.shape, "stream": (0,)}
            return float(math.prod(sizes[node.attr]))
        parts = [self.memo[a.uid] if a.uid in self.memo else self(a) for a in node.args]
        meaning = _OF_MATRICES.get(node.op, PRIMS[node.op].operator)
        if meaning is not None:
            return meaning(*parts)
        if node.op == "ne":
            return ~equal(*parts)
        return getattr(reader_of(*parts), node.op)(*parts)


# -- what storing adds


def _root(x: Interval) -> Interval:
    """The root of a kept value as its format gives it: that of the exact square, not of the rounded one."""
    lo, hi = x.lo.clamp(min=0).sqrt(), x.hi.sqrt()
    return Interval(lo * (1 - 2 * F32_UNIT), hi * (1 + 2 * F32_UNIT), x.model)


def _unrounded(x: Interval, read: Interval) -> Interval:
    """The root of a new value that others are divided by: at least 2^-63, or beside an Inf 2^127, which is read so."""
    lo, hi = (torch.where(end < 2.0**127, 2.0**-63, 2.0**127) for end in (read.lo, read.hi))
    return Interval(torch.maximum(_root(x).lo, lo), torch.maximum(_root(x).hi, hi), x.model)


def stored(fmt: Format, x: Interval, root: Interval | None = None) -> Interval:
    """Return the interval of decode(encode(x)) for every x in the interval."""
    return fmt.enclose(x, BlockView(x.shape), root) if x.lo.numel() else x


def stored_weight(storage: Storage, x: Interval) -> Interval:
    """Return the interval of what the weight may read as after it was kept."""
    found: Interval = storage.master.enclose(x, storage.param)
    return found


class BlockView:
    """The blocks, along rows of the 2-D view, and lines of tensors of one shape (`optgen.formats.format.View`)."""

    def __init__(self, shape: torch.Size) -> None:
        self.shape = shape
        self.rows, self.columns = layout.grid(shape)

    def largest(self, x: Tensor, size: int) -> Tensor:
        return self._spread(self._split(x, size, -math.inf).amax(-1, keepdim=True), size)

    def smallest(self, x: Tensor, size: int) -> Tensor:
        return self._spread(self._split(x, size, math.inf).amin(-1, keepdim=True), size)

    def of_lines(self, x: Tensor) -> Tensor:
        return torch.minimum(x.amax(-1, keepdim=True), x.amax(-2, keepdim=True))

    def _split(self, x: Tensor, size: int, fill: float) -> Tensor:
        x = x.reshape(self.rows, self.columns)
        return torch.nn.functional.pad(x, (0, -self.columns % size), value=fill).view(self.rows, -1, size)

    def _spread(self, x: Tensor, size: int) -> Tensor:
        return x.expand(*x.shape[:-1], size).reshape(self.rows, -1)[:, : self.columns].reshape(self.shape)


# -- generated code against it


@dataclass(frozen=True)
class Worst:
    """The element of one value that comes closest to its bound, or breaks it."""

    name: str
    ratio: float  # error / bound
    error: float
    bound: float
    got: float
    exact: float
    index: tuple[int, ...]


@dataclass(frozen=True)
class Report:
    """One step of generated code beside its enclosure.

    broken     names of the values of which some element lies outside
    claimed    share of the elements about which something is promised
    unbounded  by value: how many of its elements have no finite bound, and how many there are
    unknown    states in formats of which no bound is known, and these formats
    """

    worst: Mapping[str, Worst]
    broken: tuple[str, ...]
    claimed: float
    unbounded: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.broken

    def join(self, other: Report) -> Report:
        """The worse of both, value by value."""
        worst, counts = dict(self.worst), dict(self.unbounded)
        for name, w in other.worst.items():
            if name not in worst or not w.ratio <= worst[name].ratio:
                worst[name] = w
        for name, (part, of) in other.unbounded.items():
            before = counts.get(name, (0, 0))
            counts[name] = (before[0] + part, before[1] + of)
        broken = tuple(dict.fromkeys((*self.broken, *other.broken)))
        return Report(worst, broken, min(self.claimed, other.claimed), counts, {**self.unknown, **other.unknown})


def compare(
    after: Mapping[str, Tensor], inside: Values, exact: Mapping[str, Tensor], rule: Mapping[str, Interval] | None = None
) -> Report:
    """Decoded values after a step, where they should lie, and the fp64 oracle.

    rule    what the rule makes on intervals of the oracle's own start (`reading`): where the oracle is a number outside
            of that, the bound is of other maths than the spec's, and what keeps to it is broken all the same
    """
    worst: dict[str, Worst] = {}
    broken: list[str] = []
    unbounded: dict[str, tuple[int, int]] = {}
    claimed, elements = 0, 0
    for name, enclosure in {"p": inside.p, **inside.states}.items():
        got, wanted = after[name].double(), exact[name].expand(after[name].shape)
        if got.numel() == 0:
            continue
        elements += got.numel()
        claimed += int(enclosure.known.sum())
        outside = ~enclosure.contains(got)
        if rule is not None:
            outside |= (exact[name].isfinite() & ~rule[name].contains(exact[name])).expand(got.shape)
        if outside.any():
            broken.append(name)
        bound = enclosure.distance(wanted)
        unbounded[name] = (int((~bound.isfinite()).sum()), got.numel())
        error = (got - wanted).abs()
        ratio = torch.where(error == 0, 0.0, error / bound).nan_to_num(nan=0.0)
        # Outside though no farther from the oracle than the other end, or not a number: past its bound all the same.
        ratio = torch.where(outside, torch.where(got.isfinite(), ratio.clamp(min=1 + 2.0**-52), torch.inf), ratio)
        k = int(ratio.argmax())
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(k), got.shape))
        at = [float(v.reshape(-1)[k]) for v in (ratio, error, bound, got, wanted)]
        worst[name] = Worst(name, at[0], at[1], at[2], at[3], at[4], index)
    return Report(worst, tuple(broken), claimed / elements if elements else 1.0, unbounded)


class Trial:
    """One parameter under a generated optimizer, stepped and watched.

    cls      the generated class; spec, storage: what it was made from
    p        fp32 values of the weight, any shape; kept in `dtype`
    states   fp32 values of states before the first step (the rest start as the spec says); `step`: steps made
    options  hyper-parameters and flags by constructor name
    """

    def __init__(
        self,
        cls: Any,
        spec: Spec,
        p: Tensor,
        states: Mapping[str, Tensor] | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        plan: str,
        backend: str = "reference",
        seed: int = 0,
        step: int = 0,
        model: Rounding = STRICT,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.spec, self.model = spec, model
        self.options = dict(options or {})
        self.maximize = bool(self.options.get("maximize", False))
        self.hypers = {k: v for k, v in self.options.items() if k != "maximize"}
        self.param = torch.nn.Parameter(p.to(dtype))
        self.param.grad_dtype = None  # gradients of any dtype
        self.optimizer = cls([self.param], plan=plan, backend=backend, seed=seed, **self.options)
        group = self.optimizer.param_groups[0]
        taken = hypers_of(type(self.optimizer), group)  # scheduled ones are the rule's as a step takes them
        self.hypers |= {h.name: taken[h.name] for h in spec.hypers if h.scheduled}
        _, self.module, self.variant = checkpoint.select(type(self.optimizer), group, self.param, 0)
        self._start(states or {}, step)

    def _start(self, states: Mapping[str, Tensor], step: int) -> None:
        shape = self.param.shape
        flags = self.spec.flag_values(self.hypers, tuple(shape))
        values: dict[str, Tensor | float] = {}
        group = self.optimizer.param_groups[0]
        for s in self.spec.present(flags):
            weight = self.param.detach().float()
            begin: Tensor | float = weight
            if s.init == "identity":
                begin = start(s, weight.view(layout.matrix_shape(self.variant.matrix, shape)), group)
            elif s.init != "param":
                begin = float(group[s.init] if isinstance(s.init, str) else s.init)
            values[s.name] = states.get(s.name, begin)
        fields = {f.name for f in self.variant.fields}
        made: dict[str, Any] = layout.encode(self.module, self.variant, self.param, values, fields)
        host = {h.name: h.init for h in self.spec.present_host(flags)}
        # One element at least: a mean of none, on the way to p, would be refused.
        nothing = torch.zeros([max(n, 1) for n in shape], dtype=torch.float64)
        for t in range(1, step + 1 if host else 1):  # host states depend on hyper-parameters and t alone
            _, _, host = self.spec.evaluate(nothing, nothing, t, None, host, **self.hypers)
        self.optimizer.state[self.param] = {"step": step, **made, **host}
        self.flags = flags

    def storage(self, plan: Any, recurrences: Mapping[str, Any]) -> Storage:
        """Return the storage of this parameter under the plan."""
        param = FROM_TORCH[str(self.param.dtype).removeprefix("torch.")]
        found: Storage = plan.storage(
            self.spec.present(self.flags), param, self.variant.small, recurrences, vector=self.variant.vector
        )
        return found

    @property
    def step(self) -> int:
        return int(self.optimizer.state[self.param]["step"])

    @property
    def host(self) -> dict[str, float]:
        state = self.optimizer.state[self.param]
        return {name: float(state[name]) for name in self.variant.host_names}

    def decoded(self) -> dict[str, Tensor]:
        """fp32 "p" and states, as kept."""
        state = self.optimizer.state[self.param]
        names = ["p", *(s.name for s in self.spec.present(self.flags))]
        return layout.decode(self.module, self.variant, self.param, state, names)

    def run(self, g: Tensor) -> None:
        """One step along the gradient g, of any float dtype."""
        self.param.grad = g.clone()
        Optimizer.step(self.optimizer)  # also of a rule whose own step() takes a closure

    def check_step(self, storage: Storage, g: Tensor) -> Report:
        """One step, against the enclosure and the oracle that start from what is kept now.

        Of a parameter without elements nothing is compared: no kernel runs, so that states which have one value per
        tensor stay as they are, whatever the rule makes of them.
        """
        before, host, step = self.decoded(), self.host, self.step
        self.run(g)
        if not self.param.numel():
            return Report({}, (), 1.0)
        after = self.decoded()
        signed = -g if self.maximize else g
        start = Values.decoded(before, host, step, self.model)
        inside = enclose(self.spec, storage, start, signed, self.hypers, kept=after)
        exact = oracle(self.spec, before, signed.float(), step, host, self.hypers)
        return compare(after, inside, exact, reading(self.spec, start, signed, self.hypers))

    def check_steps(self, storage: Storage, gradients: Iterable[Tensor]) -> Report:
        """Several steps, each from what the one before kept."""
        return reduce(Report.join, (self.check_step(storage, g) for g in gradients))
