"""The tracer: runs a spec's function on traced values and names what it computed."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from types import FrameType
from typing import Any

from optgen.base.errors import UserError, did_you_mean, insisted, said
from optgen.base.loc import Loc, of_frame
from optgen.ir import node as ir
from optgen.ir.node import Node
from optgen.ir.program import Let
from optgen.lang.declare import HyperDecl
from optgen.lang.source import SpecSource, Statement
from optgen.lang.spec import Spec, Trace
from optgen.lang.values import LIBRARIES, TRACED, Absent, Value, author_loc
from optgen.ops import dtypes, spaces


class Tracer:
    """A watch on every operation; a statement is over when the next one makes something.

    A statement's name goes to the node that its name is bound to, if the statement made that node.
    """

    def __init__(self, source: SpecSource, marks: Iterable[int | None]) -> None:
        self.source, self.marks = source, iter(marks)  # attributes that keep sums apart which are equal by chance
        self.lets: list[Let] = []
        self.places: dict[int, Loc] = {}
        self.sums: list[tuple[Node, Loc, int | None]] = []  # see Trace
        self.frame: FrameType | None = None
        self.statement: Statement | None = None
        self.lasti = -1
        self.made: set[int] = set()  # uids of the nodes made by the running statement

    def record(self, node: Node) -> Node:
        place, frame = author_loc(), self._spec_frame()
        if node.op == "model_sum":
            node = ir.op(node.op, *node.args, attr=next(self.marks, None))
            self.sums.append((node, place, frame and frame.f_lasti))
        self.places.setdefault(node.uid, place)
        if frame is None:
            return node
        statement = self.source.statement_at(frame.f_lasti)
        if statement is not self.statement or frame.f_lasti < self.lasti or self._bound():
            self.finish()
        self.frame, self.statement, self.lasti = frame, statement, frame.f_lasti
        self.made.add(node.uid)
        return node

    def _spec_frame(self) -> FrameType | None:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code is not self.source.code:
            frame = frame.f_back
        return frame

    def _bound(self) -> list[tuple[str, Node]]:
        """The running statement's names that are bound to something it made."""
        if self.frame is None or self.statement is None:
            return []
        values = ((name, self.frame.f_locals.get(name)) for name in self.statement.names)
        return [(name, v.node) for name, v in values if isinstance(v, Value) and v.node.uid in self.made]

    def finish(self) -> None:
        for name, node in self._bound():
            assert self.statement is not None
            place = Loc(self.source.file, *self.statement.span, self.source.name)
            self.lets.append(Let(name, node, "update", place, self.statement.text))
        self.statement, self.lasti = None, -1
        self.made.clear()


def run(spec: Spec, flags: Mapping[str, bool]) -> Trace:
    """The trace of a spec under a complete flag setting; sums over the model are one if they are under all settings."""
    trace = _read(spec, flags)
    if len(trace.sums) < 2:
        return trace
    alike = [other for other in (trace, *unmarked(spec)) if len(other.sums) == len(trace.sums)]
    each = list(zip(*([node for node, *_ in other.sums] for other in alike), strict=True))
    return _read(spec, flags, [each.index(nodes) or None for nodes in each])


@lru_cache(maxsize=4096)
def unmarked(spec: Spec) -> tuple[Trace, ...]:
    """Return the traces of a spec under its flag settings, in which equal sums over the model are one."""
    return tuple([_read(spec, setting) for setting in spec.settings()])


def _read(spec: Spec, flags: Mapping[str, bool], marks: Iterable[int | None] = ()) -> Trace:
    """The trace of a spec with these marks, see Tracer."""
    tracer = Tracer(spec.source, marks)

    def value(node: Node) -> Value:
        return Value(node, tracer.record)

    def load(name: str, space: spaces.Space = spaces.elem) -> Value:
        return value(ir.load(name, dtypes.f32, space))

    values = {**flags, **_option_values(spec.hypers, value)}
    values |= {s.name: load(s.name, s.space) for s in spec.states}
    values |= {s.name: value(ir.sym(s.name)) for s in spec.host_states}
    values |= spec.absent(flags)
    traced = TRACED.set(True)
    try:
        new = spec.call(load("p"), load("g"), value(ir.sym("step")), values)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        text = next(iter(said(error).splitlines()), "")
        hint = {"hint": _name_meant(error.name, spec)} if isinstance(error, NameError) and error.name else {}
        place = _raised_at(error, spec.loc)
        raise UserError("E131", loc=place, kind=type(error).__name__, text=text, **hint) from error
    finally:
        TRACED.reset(traced)
    tracer.finish()
    places = {name: loc for _, parts in spec.source.returns for name, loc in parts}
    for name, given in values.items():
        if isinstance(given, Absent) and not isinstance(new[name], Absent):
            raise UserError("E105", loc=places[name], name=name, when=given.when)
    trace = Trace(
        tuple(tracer.lets),
        _returned("p", new, spaces.elem, places),
        {s.name: _returned(s.name, new, s.space, places) for s in spec.present(flags)},
        {s.name: _returned(s.name, new, spaces.host, places) for s in spec.present_host(flags)},
        tracer.places,
        tuple(tracer.sums),
    )
    return replace(trace, host_states=trace.host_states | {fed: ir.sym(fed) for fed in spec.waiting(trace)})


def _option_values(hypers: Iterable[HyperDecl], value: Callable[[Node], Value]) -> dict[str, Any]:
    """Return hyper-parameters as values, by name; a tuple of those of its parts."""
    options: dict[str, Any] = {}
    for h in hypers:
        options[h.name] = tuple(value(ir.sym(part)) for part in h.parts) if h.divided else value(ir.sym(h.name))
    return options


def _returned(name: str, new: Mapping[str, Any], space: spaces.Space, places: Mapping[str | None, Loc]) -> Node:
    """Return the node of what a rule returned as `name`; raise UserError unless it is one fp32 number per entry."""
    got = new[name]
    node = got.node if isinstance(got, Value) else None
    if node is None or node.space != space or node.dtype is not dtypes.f32:
        shown = f"{type(got).__name__} {got!r}" if node is None else f"{spaces.shown(node.space)} of {node.dtype}"
        raise UserError("E124", loc=places[name], name=name, got=shown, want=f"{spaces.shown(space)} of f32")
    return node


def check_weights(
    function: Callable[..., Any], source: SpecSource, states: Mapping[str, bool], hypers: Iterable[HyperDecl]
) -> None:
    """Read the function of the weights to evaluate with on values; raise UserError unless it is arithmetic of them.

    states  those that it takes, and if they are of elements, not scalars
    """
    loads = {"p": True, **states}
    kept = [Value(ir.load(x, dtypes.f32, spaces.elem) if elem else ir.sym(x)) for x, elem in loads.items()]
    try:
        with insisted():
            weights = function(*kept, **_option_values(hypers, Value))
    except (Exception, SystemExit) as error:
        place, text = _raised_at(error, source.head), next(iter(said(error).splitlines()), "")
        raise UserError("E127", loc=place, name=source.name, why=text.partition("]: ")[2] or text) from error
    node = weights.node if isinstance(weights, Value) else None
    if node is None or node.space != spaces.elem or node.dtype is not dtypes.f32:
        why = f"it returns {type(weights).__name__ if node is None else node.space}, not one number per element"
        raise UserError("E127", loc=source.head, name=source.name, why=why)


def _name_meant(name: str, spec: Spec) -> str:
    """Return a hint at what to write instead of a name that stands for nothing."""
    ours = sys.modules["optgen.lang"].__dict__["__all__"]
    if name in ours:
        return f"from optgen.lang import {name}"
    if name in ("t", "step"):
        return f"the step is a parameter of the spec: def {spec.name}(p, g, t, ...)"
    options = [*(h.name for h in spec.hypers), *(f.name for f in spec.flags)]
    near = did_you_mean(name, [*spec.order, "g", *options, *ours])
    if near.startswith("did you mean"):
        return near
    return f"what the caller chooses is declared after the `*` of the signature: {name}=hyper(...)"


def _raised_at(error: BaseException, default: Loc) -> Loc:
    """The innermost place of the traceback in a spec file or a helper that the author wrote."""
    place = default
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        foreign = module.startswith("optgen.") or frame.f_code.co_filename.startswith(LIBRARIES)
        if module.startswith("optgen._specs") or not foreign:
            place = of_frame(frame)
    return place
