"""A spec: the signature as data, and the update rule as a function with several readers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

from optgen.base.errors import UserError, did_you_mean, insisted
from optgen.base.loc import Loc
from optgen.ir.node import Node, postorder
from optgen.ir.program import Let
from optgen.lang.declare import INPUT, Declaration, FlagDecl, HostStateDecl, HyperDecl, StateDecl, conditions
from optgen.lang.source import SpecSource
from optgen.lang.values import Absent, floor
from optgen.ops import spaces
from optgen.ops.dtypes import PRECISION
from optgen.runtime.records import by_shape, fed_name, seen

MatrixKind = Literal["last", "first", "heads"]
"""The matrix that a rule's rows and columns belong to, where a parameter has more than two dimensions."""


@dataclass(frozen=True)
class Trace:
    """One reading of a spec into IR, under one flag setting.

    Leaves: p, g and the states are f32 loads under their own names; hyper-parameter parts, `step` and host
    states are syms.  `lets` are the author's named statements in the order they ran; `states` and
    `host_states` the new values, without those that are off.
    """

    lets: tuple[Let, ...]
    p: Node
    states: dict[str, Node]
    host_states: dict[str, Node]
    places: dict[int, Loc]  # node uid -> the author's operation that made it
    sums: tuple[tuple[Node, Loc, int | None], ...]  # over the model, used or not: place and the rule's instruction

    @property
    def new(self) -> dict[str, Node]:
        """The new values by name: "p", the states, the host states."""
        return {"p": self.p, **self.states, **self.host_states}

    @property
    def inputs(self) -> set[str]:
        """The names of inputs and of the host states that say if they were fed."""
        return {x for name in self.new for x in (name, fed_name(name)) if fed_name(name) in self.new}

    @cached_property
    def reads(self) -> frozenset[str]:
        """The names whose value a new value, or a sum over the model, depends on; not a state that is handed on."""
        roots = [n for name, n in self.new.items() if n.attr != name] + [node for node, *_ in self.sums]
        return frozenset(str(n.attr) for n in postorder(roots) if n.op in ("sym", "load"))


@dataclass(frozen=True)
class Evaluation:
    """The weights that a model is evaluated with, as a function of p, states of elements, scalars and
    hyper-parameters.

    states  of elements and scalars
    text    its source, for generated code
    beside  whether they are kept relative to p, so that wrappers must not move p
    """

    states: tuple[str, ...]
    hypers: tuple[str, ...]
    text: str
    function: Callable[..., Any] = field(repr=False)
    beside: bool = False


LATE = 10**9
"""A step so late that what the first ones do differently is forgotten."""


@dataclass(frozen=True)
class Recurrence:
    """The dependence of a state on its own last value s.

    ema             decay * s + (something else), decay < 1 and free of s
    sum             s + (something else); also with a decay that is 1 by default
    max             max(decay * s, something else)
    min             min(decay * s, something else), decay 1 by default
    multiplicative  s times a factor that depends on the gradient
    constant        s itself
    previous        free of s
    residual        what a product of low rank leaves (compose.low_rank)
    other           none of these

    Of a state that goes on in one of several ways, as where(g == 0, s, decay * s + g) does, it is the way in which it
    moves least, but for standing still.

    decay  a SymPy expression of hyper-parameters, or a number; None where it has none
    """

    kind: Literal["ema", "sum", "max", "min", "previous", "multiplicative", "constant", "residual", "other"]
    decay: Any = None

    def decay_at(self, spec: Spec, **parts: float) -> float:
        """The decay as a number, late in training: at these hyper-parameter parts, the rest by default."""
        if self.decay is None:
            raise ValueError(f"a recurrence of kind {self.kind} has no decay")
        values = {part: v for h in spec.hypers for part, v in zip(h.parts, h.values, strict=True)} | parts
        values["step"] = LATE
        return float(self.decay.subs({s: values[s.name] for s in self.decay.free_symbols if s.name in values}))


class Readings(NamedTuple):
    """The functions that read a rule into IR and check all settings of its flags (tracing.py, check.py)."""

    trace: Callable[[Spec, tuple[tuple[str, bool], ...]], Trace]
    check: Callable[[Spec], None]


@dataclass(frozen=True, eq=False, repr=False)
class Spec:
    """An optimizer as its author states it."""

    name: str
    class_name: str
    doc: str
    cite: str
    like: str | None
    loc: Loc
    hypers: tuple[HyperDecl, ...]
    flags: tuple[FlagDecl, ...]
    states: tuple[StateDecl, ...]
    host_states: tuple[HostStateDecl, ...]
    takes_step: bool
    matrix: MatrixKind
    order: tuple[str, ...]  # what `return` lists: p, then states and host states as in the signature, without inputs
    function: Callable[..., Any]
    source: SpecSource
    readings: Readings
    evaluation: Evaluation | None = None
    blocks: bool = False  # whether rows are blocks of consecutive rows, as many as its user says of a parameter
    ascent: Spec | None = None  # the rule of a first step, which moves the weights before the gradient is taken again
    ascends: Mapping[str, str] = field(default_factory=dict)  # the ascent's options, and as what this rule has them

    def __repr__(self) -> str:
        return f"Spec({self.name!r}, {self.loc.short})"

    @property
    def kept(self) -> tuple[StateDecl | HostStateDecl, ...]:
        """All states, on the device and on the host."""
        return (*self.states, *self.host_states)

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(s.name for s in self.states if s.trait == INPUT)

    def waiting(self, trace: Trace) -> tuple[str, ...]:
        """The host states of inputs that a step does not read, so that what was fed waits for one that does."""
        return tuple(fed_name(name) for name in self.inputs if name not in trace.reads)

    # -- flags

    def settings(self) -> tuple[dict[str, bool], ...]:
        """Every flag setting that the constructor accepts, defaults first."""
        names = [f.name for f in self.flags]
        values = itertools.product(*((f.default, not f.default) for f in self.flags))
        return tuple(s for x in values if self._possible(s := dict(zip(names, x, strict=True))))

    def _possible(self, setting: Mapping[str, bool]) -> bool:
        """Return True if no flag is on that needs a hyper-parameter which another flag says is 0."""
        zero = {f.nonzero for f in self.flags if f.nonzero is not None and not setting[f.name]}
        return not any(setting[f.name] and f.needs in zero for f in self.flags)

    def flag_values(
        self, values: Mapping[str, Any], shape: tuple[int, ...] | None = None, step: Any = None
    ) -> dict[str, bool]:
        """Every flag from given flags and hyper-parameters (by constructor name); the rest by default.

        shape  that of the parameter, or (blocks, rows, columns) of one in blocks of 8 or more rows
        """
        out: dict[str, bool] = {}
        options = {**self.defaults, **values}
        for f in self.flags:
            if f.name in values:
                out[f.name] = bool(values[f.name])
            elif f.nonzero is not None:
                out[f.name] = bool(options[f.nonzero] != 0)
            elif f.every is not None:
                out[f.name] = step is not None and (step - f.first) % options[f.every] == 0
            elif f.first:
                out[f.name] = step == 1
            elif f.fed is not None:
                out[f.name] = f.all_fed(values)
            elif f.shape is not None and shape is not None:
                out[f.name] = f.holds(seen(shape) if self.matrix == "heads" else shape, options)
            else:
                out[f.name] = f.default
        return out

    def present(self, flags: Mapping[str, bool]) -> tuple[StateDecl, ...]:
        """The states that exist under these flags."""
        return tuple(s for s in self.states if self.holds(s.when, flags))

    def present_host(self, flags: Mapping[str, bool]) -> tuple[HostStateDecl, ...]:
        """The host states that exist under these flags."""
        return tuple(s for s in self.host_states if self.holds(s.when, flags))

    def absent(self, flags: Mapping[str, bool]) -> dict[str, Absent]:
        """Return what stands for the states that do not exist under these flags."""
        return {s.name: Absent(s.name, s.when) for s in self.kept if s.when and not self.holds(s.when, flags)}

    @staticmethod
    def holds(when: str | None, flags: Mapping[str, bool]) -> bool:
        wanted = conditions(when)
        return not wanted or any(all(flags[name] == on for name, on in part) for part in wanted)

    @property
    def defaults(self) -> dict[str, Any]:
        """The hyper-parameters' own values."""
        return {h.name: h.default for h in self.hypers}

    def hyper(self, name: str) -> HyperDecl:
        return next(h for h in self.hypers if h.name == name)

    def shape_text(self, flag: FlagDecl) -> str:
        """The source of a shape flag's function, for generated code; "" for other flags.

        Raises UserError E125 where it is not a lambda that stands in the signature and reads its argument only.
        """
        if flag.shape is None:
            return ""
        text = flag.text or self.source.lambda_of(flag.name)
        if text is None:
            raise UserError("E125", loc=flag.loc, name=flag.name)
        return text

    # -- readings

    def trace(self, flags: Mapping[str, bool] | None = None) -> Trace:
        """The rule as IR under these flags (the rest by default), checked; the same object every time."""
        settings = dict(flags or {})
        self._refuse_unknown(settings, self.flags, "flag")
        setting = {f.name: settings.get(f.name, f.default) for f in self.flags}
        return self.readings.trace(self, tuple(setting.items()))

    def unchanged(self, flags: Mapping[str, bool]) -> frozenset[str]:
        """The states that a step under these flags gives back as it found them."""
        states = self.trace(flags).states
        return frozenset(name for name, node in states.items() if node.op == "load" and node.attr == name)

    def at_steps(self, flags: Mapping[str, bool]) -> Iterator[dict[str, bool]]:
        """These flags (the rest by default), first as they are, then with every other setting of those that follow
        steps; flags of one hyper-parameter change together."""
        setting = {f.name: flags.get(f.name, f.default) for f in self.flags}
        yield setting
        clocks = {f.clock: setting[f.name] for f in self.flags if f.clock}
        for values in itertools.product(*((on, not on) for on in clocks.values())):
            on = dict(zip(clocks, values, strict=True))
            other = {**setting, **{f.name: on[f.clock] for f in self.flags if f.clock}}
            if other != setting:
                yield other

    def moving(self, flags: Mapping[str, bool], state: str) -> dict[str, bool]:
        """These flags (the rest by default), those that follow steps set so that the state changes, if it ever does."""
        settings = list(self.at_steps(flags))
        return next((setting for setting in settings if state not in self.unchanged(setting)), settings[0])

    def check(self) -> None:
        """Raise UserError for anything wrong with the spec, under every flag setting."""
        self.readings.check(self)

    def evaluate(
        self,
        p: Any,
        g: Any,
        t: Any,
        states: Mapping[str, Any] | None = None,
        host_states: Mapping[str, Any] | None = None,
        **hypers_and_flags: Any,
    ) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """One step on anything that `optgen.lang` reads: (new p, new states, new host states).

        With fp64 tensors this is the oracle.  p and g have the parameter's shape; t counts from 1; row states
        have a last dimension of 1, col states a last but one (of the view as a matrix, where p has one that is the
        first dimension against the rest).  States not given start from their init.
        """
        states, host_states = states or {}, host_states or {}
        self._refuse_unknown(hypers_and_flags, (*self.hypers, *self.flags), "hyper-parameter or flag")
        self._refuse_unknown(states, self.states, "state")
        self._refuse_unknown(host_states, self.host_states, "host state")
        shape, kept = tuple(getattr(p, "shape", ())), {**states, **host_states}
        flags = self.flag_values({**host_states, **hypers_and_flags}, shape if hasattr(p, "shape") else None, t)
        options = {**self.defaults, **hypers_and_flags, **flags}
        if len(shape) < 3 or (by_shape(shape) if self.matrix == "heads" else self.matrix) != "first":
            return self._stepped(p, g, t, kept, options)
        flat = (shape[0], math.prod(shape[1:]))
        elements = {s.name for s in self.states if s.space == spaces.elem}
        kept = {k: v.reshape(flat) if k in elements else v for k, v in kept.items()}
        p, after, host = self._stepped(p.reshape(flat), g.reshape(flat), t, kept, options)
        return p.reshape(shape), {k: v.reshape(shape) if k in elements else v for k, v in after.items()}, host

    def _stepped(
        self, p: Any, g: Any, t: Any, kept: Mapping[str, Any], options: Mapping[str, Any]
    ) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """`evaluate` of a parameter that is seen as the matrix that it is.

        kept     states and host states by name
        options  all hyper-parameters and flags
        """
        values = {**options, **self.absent(options)}
        for s in self.kept:
            if s.name not in values:
                values[s.name] = start(s, p, values) if kept.get(s.name) is None else kept[s.name]
        # A mean of ones and zeros, for instance, has no other operand to take its precision from.
        precision = PRECISION.set(getattr(p, "dtype", None))
        if getattr(p, "ndim", 0) > 2 and type(p).__module__.startswith("torch"):
            from optgen.lang.tensors import stacked

            p, g, values = stacked(p), stacked(g), {name: stacked(value) for name, value in values.items()}
        try:
            new = self.call(p, g, t, values)
        finally:
            PRECISION.reset(precision)
        if self.inputs:
            flags = {f.name: bool(options[f.name]) for f in self.flags}
            new |= {fed: values[fed] for fed in self.waiting(self.trace(flags))}
        states = {s.name: filled(s.space, p, new[s.name], _rank(s, values)) for s in self.present(options)}
        return filled(spaces.elem, p, new["p"]), states, {s.name: new[s.name] for s in self.present_host(options)}

    def call(self, p: Any, g: Any, t: Any, values: Mapping[str, Any]) -> dict[str, Any]:
        """Run the author's function on values by parameter name and return what it returned, by name."""
        first = (p, g, t) if self.takes_step else (p, g)
        fed = {name: fed_name(name) for name in self.inputs}
        # The author's own function has no parameters for these; that of a wrapper hands them on.
        hidden = set(fed.values()) if self.function.__code__ is self.source.code else set()
        # States before a `/` go by position.
        named, code = {name: x for name, x in values.items() if name not in hidden}, self.function.__code__
        before = [named.pop(name) for name in code.co_varnames[len(first) : code.co_posonlyargcount]]
        with insisted():
            result = self.function(*first, *before, **named)
        parts = result if isinstance(result, tuple) else (result,)
        if len(parts) != len(self.order):
            place = self.source.loc(self.source.returns[0][0])
            want, got = ", ".join(self.order), f"{len(parts)} values"
            raise UserError("E120", loc=place, name=self.name, want=want, got=got)
        new = dict(zip(self.order, parts, strict=True))
        for name, count in fed.items():
            new |= {name: values[name], count: values[count] * floor(0.5 * values[count])}  # 1 -> 0, 2 stays
        return new

    def _refuse_unknown(self, given: Mapping[str, Any], declared: Sequence[Declaration], kind: str) -> None:
        known = [d.name for d in declared]
        for name in given:
            if name not in known:
                hint = did_you_mean(name, known)
                raise UserError("E118", loc=self.loc, name=self.name, kind=kind, got=name, hint=hint)


def _rank(state: StateDecl, hypers: Mapping[str, Any]) -> Any:
    return state.rank if isinstance(state.rank, int) else hypers.get(state.rank)


def start(state: StateDecl | HostStateDecl, p: Any, hypers: Mapping[str, Any] | None = None) -> Any:
    """A state before the first step, for a parameter p; a plain number where p is no tensor."""
    if isinstance(state, HostStateDecl):
        return state.init
    if state.init == "param":
        return p.clone() if hasattr(p, "clone") else p
    rank = _rank(state, hypers or {})
    if state.init == "identity":
        zeros = filled(state.space, p, 0.0, rank)
        return zeros + zeros.new_ones(zeros.shape[-1]).diag() if hasattr(zeros, "new_ones") else 1.0
    value = (hypers or {})[state.init] if isinstance(state.init, str) else state.init
    return filled(state.space, p, value, rank)


def filled(space: spaces.Space, p: Any, value: Any, rank: Any = 1) -> Any:
    """A value of a space for a parameter p: a number, such as one of the sides of where(), as an entry for each place
    there, and one of a row or of the model as an entry for each element; the number itself where p is no tensor.

    rank  of a space of matrices of low rank
    """
    if not hasattr(p, "new_full"):
        return value
    if not isinstance(value, (int, float)):
        return value.expand(p.shape) if space == spaces.elem else value
    shapes = {
        "elem": tuple(p.shape),
        "row": (*p.shape[:-1], 1),
        "col": (*p.shape[:-2], 1, *p.shape[-1:]),
        "mat": (*p.shape[:-2], 1, 1),
        "tensor": (),
        "model": (),
    }
    if space != spaces.elem and (dims := spaces.dims(space)):
        sides = dict(zip("mnsl", (*p.shape[-2:], *sorted(p.shape[-2:])), strict=False))
        sides["r"] = min(int(rank or 1), *p.shape[-2:])
        return p.new_full((*p.shape[:-2], *(sides[d] for d in dims)), value)
    return p.new_full(shapes[space.name], value)
