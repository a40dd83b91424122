"""What one optimizer step may be off by, and whether generated code keeps to it.

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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from optgen import passes
from optgen.formats.blocked import Blocked
from optgen.formats.codebook import Codebook
from optgen.formats.coded import Coded
from optgen.formats.factored import Factored
from optgen.formats.floats import Float
from optgen.formats.format import Format, Master
from optgen.formats.fp8 import Fp8
from optgen.formats.logmax import LogMax
from optgen.formats.logminmax import LogMinMax
from optgen.formats.masters import Copy, Ecc8, Kahan, Native, Split
from optgen.formats.plan import Storage
from optgen.formats.rank1 import Rank1
from optgen.formats.scales import LARGEST as LARGEST_SCALE
from optgen.ir.node import Node, postorder
from optgen.lang.spec import Spec, filled
from optgen.lang.values import equal, reader_of
from optgen.lower import lower, matrix_of, untouched
from optgen.ops import spaces
from optgen.ops.dtypes import FROM_TORCH, DType
from optgen.ops.prims import REDUCTIONS
from optgen.runtime import checkpoint, eager, layout
from optgen.verify import bounds
from optgen.verify.intervals import F32_UNIT, FAST_UNITS, STRICT, Interval, Model

SMALLEST_NORMAL = {"f32": 2.0**-126, "bf16": 2.0**-126, "f16": 2.0**-14}
MANTISSA = {"f32": 23, "bf16": 7, "f16": 10}
LARGEST = {"f32": (2 - 2.0**-23) * 2.0**127, "bf16": (2 - 2.0**-7) * 2.0**127, "f16": 65504.0}


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
        cls, values: Mapping[str, Tensor], host: Mapping[str, float], step: int, model: Model = STRICT
    ) -> Values:
        """From decoded tensors: "p" and the states by name.

        In fast maths a kernel decodes with roundings of its own: a code times its scale, one operation's worth.
        """
        points = {k: Interval.point(v, model) for k, v in values.items()}
        p = points.pop("p")
        if model.regroups:
            points = {k: x.widened(x.magnitude() * model.unit) for k, x in points.items()}
        return cls(p, points, host, step)


def oracle(
    spec: Spec, before: Mapping[str, Tensor], g: Tensor, step: int, host: Mapping[str, float], hypers: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Step number `step` + 1 in fp64, from decoded values: "p" and the states."""
    states = {k: v.double() for k, v in before.items() if k != "p"}
    p, new, _ = spec.evaluate(before["p"].double(), g.double(), step + 1, states, host, **hypers)
    return {"p": p, **new}


def reading(spec: Spec, before: Values, g: Tensor, hypers: Mapping[str, Any]) -> dict[str, Interval]:
    """What the rule makes of a step before anything is stored: "p" and the states; the oracle's values lie inside."""
    gradient = Interval.point(g.float(), before.p.model)
    p, new, _ = _evaluated(spec, before, gradient, hypers)
    return {"p": p, **new}


def _evaluated(spec: Spec, before: Values, gradient: Interval, hypers: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """The rule on intervals.  Step and hyper-parameters are numbers with a point: an exponent without one is the
    author's own, of which kernels make products (`Interval.__pow__`).
    """
    pointed = dict(hypers)
    for h in spec.hypers:
        if (given := hypers.get(h.name)) is not None:
            pointed[h.name] = tuple(map(float, given)) if isinstance(given, (tuple, list)) else float(given)
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
    dims: tuple[int, ...] | None = None,
) -> Values:
    """Everything that may be kept after one more step, the exact result included.

    hypers  constructor arguments (flags too); the gradient has any float dtype
    kept    decoded states after the step, where they are known: what a relative format divided by is then a
            number, not an interval
    dims    what the columns of a matrix are made of; None: one dimension
    """
    model = before.p.model
    shape = before.p.shape
    flags = spec.flag_values(hypers, tuple(shape), before.step + 1)
    seen = layout.matrix_shape(matrix_of(spec, flags, storage), shape)
    if seen != shape:
        hypers = {**hypers, **flags}
        views = kept and {k: v.reshape(seen) if v.shape == shape else v for k, v in kept.items()}
        dims = layout.column_dims("first", shape)
        after = enclose(spec, storage, before.reshaped(spec, seen), g.reshape(seen), hypers, views, dims)
        return after.reshaped(spec, shape)
    gradient = Interval.point(g.float(), model)
    p, states, host = _evaluated(spec, before, gradient, hypers)
    early = read_back(spec, storage, flags)
    still = untouched(spec, storage, flags)
    as_kept = tuple(name for name, fmt in storage.states.items() if fmt.as_kept and name not in still)
    if early or as_kept:
        both = (*early, *as_kept)
        p, states = _with_read_back(spec, storage, before, gradient, hypers, flags, both, kept, dims, still)
    new = {name: _kept(spec, storage, name, states, shape, kept, dims, still) for name in states}
    return Values(stored_weight(storage, p), new, host, before.step + 1)


def _kept(
    spec: Spec,
    storage: Storage,
    name: str,
    states: Mapping[str, Interval],
    shape: torch.Size,
    kept: Mapping[str, Tensor] | None,
    dims: tuple[int, ...] | None,
    still: Collection[str],
) -> Interval:
    """What a state may read as after its new value was stored; one that stays `still` is as it was."""
    if name in still:
        return states[name]
    decl, fmt, root = next(s for s in spec.states if s.name == name), storage.states[name], None
    if fmt.relative:
        base = decl.normalized_by
        assert base is not None
        if kept is None:
            root = _root(_kept(spec, storage, base, states, shape, None, dims, still))
        else:
            root = _root(Interval.point(kept[base], states[name].model))
    return stored(fmt, _full(states[name], layout.value_shape(decl.space.name, shape)), root, dims)


# -- values that are stored before the last sweep that needs them

_READ_BACK: dict[tuple[object, ...], tuple[str, ...]] = {}


def read_back(spec: Spec, storage: Storage, flags: Mapping[str, bool]) -> tuple[str, ...]:
    """The states (or "p") whose new value later sweeps of the same step take from where it was stored."""
    trace = spec.trace(flags)
    if not any(n.op in REDUCTIONS for n in postorder([trace.p, *trace.states.values()])):
        return ()
    formats = tuple((name, repr(fmt)) for name, fmt in storage.states.items())
    key = (spec, tuple(sorted(flags.items())), storage.param.name, repr(storage.master), formats)
    if key not in _READ_BACK:
        _READ_BACK[key] = passes.step(lower(spec, flags, storage), "strict").early
    return _READ_BACK[key]


def _with_read_back(
    spec: Spec,
    storage: Storage,
    before: Values,
    gradient: Interval,
    hypers: Mapping[str, Any],
    flags: Mapping[str, bool],
    early: tuple[str, ...],
    kept: Mapping[str, Tensor] | None,
    dims: tuple[int, ...] | None,
    still: Collection[str],
) -> tuple[Interval, dict[str, Interval]]:
    """New p and states, where what reads an early value may see it before it was stored or after; where its format says
    that the rule reads it as kept, after."""
    trace = spec.trace(flags)
    roots = {"p": trace.p, **trace.states}
    held = {"p": spaces.elem} | {s.name: s.space for s in spec.states}
    reading = Reading(before, gradient, _scalars(spec, before, hypers))
    order = [n.uid for n in postorder(roots.values())]
    for name in sorted(early, key=lambda name: order.index(roots[name].uid)):
        exact = {k: filled(held[k], before.p, reading(roots[k])) for k in roots}
        if kept is not None:
            again = Values.decoded({"p": kept["p"], name: kept[name]}, {}, 0, before.p.model)
            after = again.p if name == "p" else again.states[name]
        elif name == "p":
            after = stored_weight(storage, exact["p"])
        else:
            after = _kept(spec, storage, name, exact, before.p.shape, None, dims, still)
        # An unknown end stays one: NaN wins in minimum and maximum.
        lo, hi = torch.minimum(exact[name].lo, after.lo), torch.maximum(exact[name].hi, after.hi)
        if name != "p" and storage.states[name].as_kept:
            lo, hi = after.lo, after.hi
        reading = reading.replacing(roots[name], Interval(lo, hi, before.p.model))
    found = {name: filled(held[name], before.p, reading.before_replacing(node)) for name, node in roots.items()}
    return found.pop("p"), found


def _scalars(spec: Spec, before: Values, hypers: Mapping[str, Any]) -> dict[str, float]:
    """Hyper-parameters by part, host states and the step."""
    out: dict[str, float] = {**before.host, "step": before.step + 1}
    for h in spec.hypers:
        value = hypers.get(h.name, h.default)
        out |= dict(zip(h.parts, value if isinstance(value, tuple) else (value,), strict=True))
    return out | {h.name: before.host.get(h.name, h.init) for h in spec.host_states}


class Reading:
    """A trace's nodes read on intervals; host scalars are numbers."""

    _OPERATORS: ClassVar[Mapping[str, Callable[..., Any]]] = {
        "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv, "neg": operator.neg,
        "abs": abs, "lt": operator.lt, "le": operator.le, "and": operator.and_, "or": operator.or_,
        "xor": operator.xor, "not": lambda c: (not c) if isinstance(c, bool) else ~c,
        "ne": lambda a, b: ~equal(a, b),
    }  # fmt: skip

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
            sizes = {"rows": self.shape[-2:-1], "columns": self.shape[-1:], "elements": self.shape}
            return float(math.prod(sizes[node.attr]))
        parts = [self.memo[a.uid] if a.uid in self.memo else self(a) for a in node.args]
        if node.op in self._OPERATORS:
            return self._OPERATORS[node.op](*parts)
        return getattr(reader_of(*parts), node.op)(*parts)


def one_step_bound(
    spec: Spec,
    storage: Storage,
    before: Mapping[str, Tensor],
    g: Tensor,
    step: int,
    hypers: Mapping[str, Any],
    host: Mapping[str, float] | None = None,
    *,
    model: Model = STRICT,
    kept: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The largest distance of what is kept to the fp64 oracle, per element of "p" and of each state.

    before  decoded "p" and states, fp32; inf where nothing can be promised (overflow, division by 0, NaN)
    """
    start = Values.decoded(before, host or {}, step, model)
    after = enclose(spec, storage, start, g, hypers, kept)
    exact = oracle(spec, before, g, step, host or {}, hypers)
    return {k: x.distance(exact[k]) for k, x in {"p": after.p, **after.states}.items()}


# -- what storing adds


def _full(x: Interval, shape: Sequence[int]) -> Interval:
    return Interval(x.lo.expand(shape), x.hi.expand(shape), x.model)


def _root(x: Interval) -> Interval:
    """The root of a kept value as its format gives it: that of the exact square, not of the rounded one."""
    lo, hi = x.lo.clamp(min=0).sqrt(), x.hi.sqrt()
    return Interval(lo * (1 - 2 * F32_UNIT), hi * (1 + 2 * F32_UNIT), x.model)


def stored(
    fmt: Format, x: Interval, root: Interval | None = None, dims: tuple[int, ...] | None = None
) -> Interval:
    """What decode(encode(x)) may be, for every x in the interval; blocks run along the rows of the 2-D view.

    dims  what the columns of a matrix x are made of; None: one dimension
    """
    if isinstance(fmt, Float):
        return _stored_float(fmt.dtype, bounds.one_step_bound(fmt).total, fmt.noise_bits > 0, x)
    if isinstance(fmt, (Blocked, Codebook, Fp8)):
        return _stored_blocked(fmt, x, root)
    if isinstance(fmt, LogMinMax):
        return _stored_log(fmt, x)
    if isinstance(fmt, LogMax):
        return _stored_grid(fmt, x)
    if isinstance(fmt, Rank1):
        return _stored_rank1(fmt, x, root, dims)
    if isinstance(fmt, Factored):
        return fmt.decode(fmt.encode(x)) if x.lo.numel() else x  # the same formulas, read on intervals
    # A format from elsewhere: nothing is known about it.
    return Interval(torch.full_like(x.lo, math.nan), torch.full_like(x.lo, math.nan), x.model)


def _total(bound: bounds.Bound, model: Model) -> float:
    """The bound with what arithmetic adds; fast maths spends more roundings on the way to a code and back."""
    return bound.value + bound.slack * (FAST_UNITS if model.regroups else 1)


def _stored_float(dtype: DType, relative: float, random: bool, x: Interval) -> Interval:
    if dtype.name == "f32":
        return x
    # Below the normal numbers the step stays what it is at the smallest of them.
    absolute = SMALLEST_NORMAL[dtype.name] * 2.0 ** -(MANTISSA[dtype.name] + (0 if random else 1))
    return _saturated(x.widened(_error(relative, absolute, x)), LARGEST[dtype.name])


def _error(relative: float, absolute: float, x: Interval) -> Tensor:
    """|kept - x| <= relative * |x|, or `absolute` where that is more; NaN stays NaN."""
    error: Tensor = (x.magnitude() * relative).clamp(min=absolute)
    return torch.where(x.magnitude() == 0, 0.0, error)


def _saturated(x: Interval, largest: float) -> Interval:
    """Beyond the largest number a dtype has Inf."""
    lo = torch.where(x.lo < -largest, -torch.inf, x.lo.clamp(max=largest))
    hi = torch.where(x.hi > largest, torch.inf, x.hi.clamp(min=-largest))
    return Interval(lo, hi, x.model)


def stored_weight(storage: Storage, x: Interval) -> Interval:
    """What the weight may read as after it was kept."""
    master, param = storage.master, storage.param
    if param.name == "f32" or isinstance(master, Copy):
        return x
    relative = bounds.master_bound(master, param).total
    if isinstance(master, Kahan):
        relative += F32_UNIT  # weight and compensation are added again
    kept = x.widened(_error(relative, _absolute(master, param, relative), x))
    return _saturated(kept, LARGEST[param.name])


def _absolute(master: Master, param: DType, relative: float) -> float:
    """What a weight below the normal numbers of its dtype may be off by."""
    normal, mantissa = SMALLEST_NORMAL[param.name], MANTISSA[param.name]
    if isinstance(master, Native):
        return normal * 2.0 ** -(mantissa + (0 if master.noise_bits(param) else 1))
    if isinstance(master, Split):
        if param.name == "bf16" and master.bits == 16:
            return 0.0
        return float(normal * 2.0 ** -(mantissa + master.bits + (0 if master.noise_bits(param) else 1)))
    if isinstance(master, Kahan):
        return normal * 2.0 ** -(mantissa + 1)
    if isinstance(master, Ecc8):
        return relative * normal + 2.0**-148
    return normal * 2.0**-mantissa


class _Blocks:
    """Tensors of one shape as (rows, blocks, size), and back."""

    def __init__(self, shape: torch.Size, size: int) -> None:
        self.shape, self.size = shape, size
        self.rows, self.columns = layout.grid(shape)
        self.blocks = -(-self.columns // size)

    def split(self, x: Tensor, fill: float) -> Tensor:
        x = x.reshape(self.rows, self.columns)
        x = torch.nn.functional.pad(x, (0, self.blocks * self.size - self.columns), value=fill)
        return x.view(self.rows, self.blocks, self.size)

    def largest(self, x: Tensor) -> Tensor:
        """The largest of each block at each of its elements; NaN wins."""
        return self._spread(self.split(x, -math.inf).amax(-1, keepdim=True))

    def smallest(self, x: Tensor) -> Tensor:
        return self._spread(self.split(x, math.inf).amin(-1, keepdim=True))

    def _spread(self, x: Tensor) -> Tensor:
        x = x.expand(self.rows, self.blocks, self.size).reshape(self.rows, -1)
        return x[:, : self.columns].reshape(self.shape)


def _decoded(fmt: Coded, value: Interval, error: Tensor, root: Interval | None) -> Interval:
    """What is read where what was divided by the scale is kept with this error."""
    kept = Interval(value.lo - error, value.hi + error, value.model)
    if fmt.of == "sqrt":
        kept = Interval(kept.lo.clamp(min=0), kept.hi, value.model)
        return kept * kept
    return kept * root if root is not None else kept


def _stored_blocked(fmt: Blocked | Codebook | Fp8, x: Interval, root: Interval | None) -> Interval:
    """The error of the code times the largest scale that the block can have."""
    if x.lo.numel() == 0:
        return x
    value = fmt.counted(x, root)
    blocks = _Blocks(x.shape, fmt.block)
    top = blocks.largest(value.magnitude())
    scale = fmt.scale
    low, high = scale.low if isinstance(fmt, Blocked) else fmt.low, scale.high
    if isinstance(fmt, Fp8):
        low, high = low * fmt.largest, min(high * fmt.largest, LARGEST["f32"])
    decoded = top.clamp(min=low) * (1 + scale.excess) * (1 + F32_UNIT)
    error = _total(bounds.one_step_bound(fmt), x.model) * decoded
    if 0.0 in fmt.table if isinstance(fmt, Codebook) else fmt.signed or fmt.zero == "keep":
        error = torch.where(top == 0, 0.0, error)
    # Infinite or beyond what scales can follow: nothing is promised.
    lost = ~(top <= high)
    if scale.literal:
        lost |= (blocks.largest(_least_magnitude(value)) < low) & (top != 0)
    error = torch.where(lost, torch.nan, error)
    return _decoded(fmt, value, error, root)


def _stored_rank1(fmt: Rank1, x: Interval, root: Interval | None, dims: tuple[int, ...] | None) -> Interval:
    """The error of the code times the largest scale that the element can have."""
    if x.lo.numel() == 0:
        return x
    value = fmt.counted(x, root)
    magnitude = value.magnitude()
    if fmt.in_blocks:
        top = _Blocks(x.shape, fmt.vectors).largest(magnitude)
    else:
        columns = eager.axis_min(eager.axis_max(magnitude.amax(-2, keepdim=True), dims), dims)
        top = torch.minimum(magnitude.amax(-1, keepdim=True), columns)
    error = _total(bounds.one_step_bound(fmt), x.model) * top.clamp(min=fmt.lowest) * (1 + F32_UNIT)
    if fmt.signed or fmt.zero == "keep":
        error = torch.where(top == 0, 0.0, error)
    error = torch.where(top <= LARGEST_SCALE, error, torch.nan)
    return _decoded(fmt, value, error, root)


def _least_magnitude(x: Interval) -> Tensor:
    return abs(x).lo


def _stored_log(fmt: LogMinMax, x: Interval) -> Interval:
    """The relative error for as many units as the block can span; what is far below its maximum reads as more."""
    if x.lo.numel() == 0:
        return x
    value = x.reader.sqrt(x) if fmt.of == "sqrt" else x
    blocks = _Blocks(x.shape, fmt.block)

    def unit_of(t: Tensor, offset: Tensor | int) -> Tensor:
        """The unit in which an fp32 lies, as the encoder counts them."""
        pattern = t.float().clamp(min=0).view(torch.int32).long().clamp(fmt.lowest, fmt.highest)
        return (pattern + offset) >> fmt.unit

    lost = blocks.largest(value.magnitude()).isnan() | blocks.largest(value.magnitude()).isinf()
    lo, hi = torch.where(lost, 1.0, value.lo), torch.where(lost, 1.0, value.hi)
    down, up = torch.nextafter(lo.float(), torch.tensor(0.0)), torch.nextafter(hi.float(), torch.tensor(math.inf))
    counts = range(1, fmt.most + 1)
    # The margin of the widest block there may be; that of a narrower one is smaller, down to none.
    spanned = unit_of(blocks.largest(up), 0) + 1 - unit_of(blocks.smallest(down), 0)
    margins = _table([bounds.margin(fmt, k) * 2**fmt.unit for k in counts])
    margin = margins[spanned.clamp(max=fmt.most)].ceil().long()
    least = margin if fmt.bits == 8 else 0
    above = unit_of(blocks.largest(up), margin) + 1
    units = (above - unit_of(blocks.smallest(down), -margin)).clamp(1, fmt.most)
    relative = _table([_total(bounds.one_step_bound(fmt, k), x.model) for k in counts])[units]
    # The pattern at which the codes of the block start at the highest; what lies below is raised.
    start = torch.maximum(unit_of(blocks.smallest(up), -least), above - fmt.most).clamp(min=fmt.lowest >> fmt.unit)
    start = start << fmt.unit
    raised = start + _table([bounds.lowest_reading(fmt, k) for k in counts])[units].long()
    low = torch.minimum(lo, _of_pattern(torch.tensor(fmt.highest))) * (1 - relative)
    high = torch.maximum(hi * (1 + relative), _of_pattern(raised))
    low, high = torch.where(lost, torch.nan, low.clamp(min=0)), torch.where(lost, torch.nan, high)
    kept = Interval(low, high, x.model)
    return kept * kept if fmt.of == "sqrt" else kept


def _stored_grid(fmt: LogMax, x: Interval) -> Interval:
    """The relative error of a cell; what is far below its block's maximum reads as the grid's first point there."""
    if x.lo.numel() == 0:
        return x
    value = x.reader.sqrt(x)
    blocks = _Blocks(x.shape, fmt.block)
    lost = blocks.largest(value.magnitude()).isnan() | blocks.largest(value.magnitude()).isinf()
    lo, hi = torch.where(lost, 1.0, value.lo), torch.where(lost, 1.0, value.hi)
    top = blocks.largest(torch.nextafter(hi.float(), torch.tensor(math.inf)).clamp(min=0))
    largest = top.contiguous().view(torch.int32).long().clamp(fmt.lowest, fmt.highest)
    # The grid's last point is less than a cell above the maximum, and it begins at the lowest pattern at least.
    first = (largest - (fmt.codes - 1) * fmt.step).clamp(min=fmt.lowest)
    relative = _total(bounds.one_step_bound(fmt), x.model)
    low = torch.minimum(lo, _of_pattern(torch.tensor(fmt.highest))) * (1 - relative)
    high = torch.maximum(hi * (1 + relative), _of_pattern(first) * (1 + relative))
    low, high = torch.where(lost, torch.nan, low.clamp(min=0)), torch.where(lost, torch.nan, high)
    kept = Interval(low, high, x.model)
    return kept * kept


def _table(values: Sequence[float]) -> Tensor:
    """The values at 1, 2, ..."""
    return torch.tensor([0.0, *values], dtype=torch.float64)


def _of_pattern(pattern: Tensor) -> Tensor:
    """The positive fp32 with these bits, in fp64."""
    return pattern.to(torch.int32).view(torch.float32).double()


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

    broken   names of the values of which some element lies outside
    claimed  share of the elements about which something is promised
    """

    worst: Mapping[str, Worst]
    broken: tuple[str, ...]
    claimed: float

    @property
    def ok(self) -> bool:
        return not self.broken

    def join(self, other: Report) -> Report:
        """The worse of both, value by value."""
        worst = dict(self.worst)
        for name, w in other.worst.items():
            if name not in worst or not w.ratio <= worst[name].ratio:
                worst[name] = w
        broken = tuple(dict.fromkeys((*self.broken, *other.broken)))
        return Report(worst, broken, min(self.claimed, other.claimed))


def compare(
    after: Mapping[str, Tensor],
    inside: Values,
    exact: Mapping[str, Tensor],
    rule: Mapping[str, Interval] | None = None,
) -> Report:
    """Decoded values after a step, where they should lie, and the fp64 oracle.

    rule    what the rule makes on intervals of the oracle's own start (`reading`): where the oracle is a number outside
            of that, the bound is of other maths than the spec's, and what keeps to it is broken all the same
    """
    worst: dict[str, Worst] = {}
    broken: list[str] = []
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
        error = (got - wanted).abs()
        ratio = torch.where(error == 0, 0.0, error / bound).nan_to_num(nan=0.0)
        # Outside though no farther from the oracle than the other end, or not a number: past its bound all the same.
        ratio = torch.where(outside, torch.where(got.isfinite(), ratio.clamp(min=1 + 2.0**-52), torch.inf), ratio)
        k = int(ratio.argmax())
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(k), got.shape))
        at = [float(v.reshape(-1)[k]) for v in (ratio, error, bound, got, wanted)]
        worst[name] = Worst(name, at[0], at[1], at[2], at[3], at[4], index)
    return Report(worst, tuple(broken), claimed / elements if elements else 1.0)


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
        model: Model = STRICT,
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
        _, self.module, self.variant = checkpoint.select(type(self.optimizer), group, self.param, 0)
        self._start(states or {}, step)

    def _start(self, states: Mapping[str, Tensor], step: int) -> None:
        shape = self.param.shape
        flags = self.spec.flag_values(self.hypers, tuple(shape))
        values: dict[str, Tensor | float] = {}
        group = self.optimizer.param_groups[0]
        for s in self.spec.present(flags):
            start: Tensor | float = self.param.detach().float()
            if s.init != "param":
                start = float(group[s.init] if isinstance(s.init, str) else s.init)
            values[s.name] = states.get(s.name, start)
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
        """How the plan stores this parameter."""
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
        self.optimizer.step()

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

    def check_steps(self, storage: Storage, gradients: list[Tensor], *, carried: bool = False) -> Report:
        """Several steps; `carried`: against the enclosure and the oracle carried on from before the first one."""
        if not carried or not self.param.numel():
            report = self.check_step(storage, gradients[0])
            for g in gradients[1:]:
                report = report.join(self.check_step(storage, g))
            return report
        exact = {k: v.double() for k, v in self.decoded().items()}
        inside = Values.decoded(exact, self.host, self.step, self.model)
        reports = []
        for g in gradients:
            host, step = self.host, self.step
            self.run(g)
            signed = -g if self.maximize else g
            inside = enclose(self.spec, storage, replace(inside, host=host, step=step), signed, self.hypers)
            exact = oracle(self.spec, exact, signed.float(), step, host, self.hypers)
            reports.append(compare(self.decoded(), inside, exact))
        report = reports[0]
        for other in reports[1:]:
            report = report.join(other)
        return report
