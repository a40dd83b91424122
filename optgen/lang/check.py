"""The checks of a spec beyond its signature: nothing unused, nothing that divides by zero."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from optgen.base.errors import UserError
from optgen.base.loc import Loc
from optgen.ir.node import Node, postorder
from optgen.ir.ranges import Intervals
from optgen.lang import matrices
from optgen.lang.declare import Declaration, StateDecl, flags_in
from optgen.lang.probe import probe
from optgen.lang.spec import Spec, Trace, start
from optgen.lang.tracing import run, unmarked
from optgen.ops import spaces
from optgen.ops.prims import CALLS, MATRIX_OPS, PRIMS, REDUCTIONS


@lru_cache(maxsize=4096)
def trace(spec: Spec, setting: tuple[tuple[str, bool], ...]) -> Trace:
    """Return the trace of a spec under a flag setting, checked; the same object every time: functions of matrices stand
    where they are right, three steps on small numbers stay finite, and nonneg states nonneg."""
    flags = dict(setting)
    traced = run(spec, flags)
    whole: set[int] = set()  # of one value per matrix or more
    for node in postorder([traced.p, *traced.states.values()]):
        if node.op in MATRIX_OPS:
            _check_call(spec, node, traced)
        from_whole = any(a.uid in whole and a.space != spaces.elem for a in node.args)
        if node.op in MATRIX_OPS or node.space.name in spaces.MATRICES or node.space == spaces.mat and from_whole:
            whole.add(node.uid)
        elif node.op in REDUCTIONS and from_whole:
            why = "its operand is made of whole matrices, each of which is worked on by itself"
            remedy = "reduce values of elements, which may have it as a term: mean(trace(x) + 0 * g)"
            place = traced.places.get(node.uid, spec.loc)
            raise UserError("E129", loc=place, function="a reduction", why=why, remedy=remedy)
    probe(spec, flags, traced)
    return traced


def _check_call(spec: Spec, node: Node, trace: Trace) -> None:
    """Raise UserError E129 for functions of whole matrices where rows are blocks, and E103 for what they take beside
    matrices and is no host scalar."""
    place = trace.places.get(node.uid, spec.loc)
    if spec.blocks and spec.matrix != "heads":
        why = 'matrix="blocks" divides rows into blocks, and it takes the whole matrix'
        remedy = 'write matrix="heads", under which each block of rows is a matrix, or matrix="first"'
        raise UserError("E129", loc=place, function=_called(node), why=why, remedy=remedy)
    scalars = node.args[CALLS[node.attr] :] if node.op == "call" else ()
    if node.attr in ("normal", "bjorck") and not _is_whole(spec, scalars[0]):
        hint = "floor(x) is whole, and a hyper-parameter with whole=True"
        raise UserError("E103", loc=place, function=_called(node), want="a whole number", got="another", hint=hint)
    if (least := _LEAST.get(str(node.attr))) and scalars:
        ranges = {part: h.interval for h in spec.hypers for part in h.parts}
        low, _ = Intervals(ranges | {"step": (1.0, math.inf)})(scalars[0])
        if not low >= least[0]:
            hint = f"a hyper-parameter says so with {least[1]}"
            raise UserError("E103", loc=place, function=_called(node), want=least[2], got=f"{low:g}", hint=hint)
    for x in scalars:
        if x.space != spaces.host and x.op != "extent":
            want, hint = "host scalars beside its matrices", "host scalars depend on hyper-parameters and t only"
            raise UserError("E103", loc=place, function=_called(node), want=want, got=spaces.shown(x.space), hint=hint)


def _is_whole(spec: Spec, x: Node) -> bool:
    """Return True if a number has no fraction, whatever the hyper-parameters are; of host states if they begin so."""
    if x.op == "sym":
        whole = {part for h in spec.hypers if h.whole for part in h.parts}
        return x.attr in {"step", *whole, *(s.name for s in spec.host_states if s.init.is_integer())}
    if x.op == "const":
        return float(x.attr).is_integer()
    terms = x.args[1:] if x.op == "where" else x.args
    return x.op in ("floor", "rint", "extent") or x.op in _WHOLE and all(_is_whole(spec, a) for a in terms)


_LEAST = {"inverse_root": (math.ulp(0.0), "gt=0", "an order above 0"), "bjorck": (1.0, "ge=1", "1 step or more")}
"""The least first scalar of functions of whole matrices, and how declarations and messages say it."""

_WHOLE = frozenset("add sub mul neg abs min max where".split())


def _called(node: Node) -> str:
    """Return the name of a function of whole matrices in messages."""
    name = str(node.attr).replace("_of_rows", "")
    return f"{name}()" if node.op == "call" else PRIMS[node.op].spelled


def _check_vectors(spec: Spec, flags: Mapping[str, bool], trace: Trace) -> None:
    """Raise UserError E129 for functions of whole matrices under a flag setting that vectors have, too."""
    if any(f.shape is not None and f.holds((1024,), spec.defaults) != flags[f.name] for f in spec.flags):
        return
    for node in postorder([trace.p, *trace.states.values()]):
        if node.op in MATRIX_OPS:
            why = "a vector, which has no rows and columns, would come here, too"
            remedy = "write is_matrix=shape_flag(lambda shape: len(shape) >= 2) after the `*`, and a step of vectors "
            remedy += "under `if not is_matrix:`"
            place = trace.places.get(node.uid, spec.loc)
            raise UserError("E129", loc=place, function=_called(node), why=why, remedy=remedy)


_LACKS: dict[str, Callable[[Any], Any]] = {
    "symmetric": lambda x: x - x.mT,
    "orthogonal": lambda x: x @ x.mT - x.new_ones(len(x)).diag(),
    "triangular": lambda x: x.tril(-1),
}
"""Functions of a square matrix that are zero where it has a trait, by name of the trait."""


def _lacks(state: StateDecl, x: Any) -> Any:
    """Return what is zero where a matrix state has its trait; of low rank it is orthogonal, or nearly, if its vectors
    have length 1."""
    if not state.rank:
        return _LACKS[state.trait](x)
    return x.square().sum(-2 if state.space.name[1] == "r" else -1) - 1


def _check_traits(spec: Spec, flags: Mapping[str, bool], trace: Trace) -> None:
    """Raise UserError E143 for a matrix state that loses its trait in two steps in fp64, from random values with it,
    and E129 for operands of functions that take a trait for granted.

    What newton_schulz takes part in is rounded to bf16 and not judged.
    """
    halves = [n for n in postorder([trace.p, *trace.states.values()]) if n.attr in matrices.HALVES]
    checked = bool(halves) and all(map(_is_exact, halves))
    of_sides = [s for s in spec.present(flags) if s.trait in _LACKS]
    judged = [(s, new) for s in of_sides if (new := trace.states[s.name]).op != "load" and _is_exact(new)]
    for step, kept in _two_steps(spec, flags, of_sides, checked) if judged or checked else ():
        for s, new in judged:
            if off := _off(_lacks(s, kept[s.name]), kept[s.name]):
                place = trace.places.get(new.uid, s.loc)
                raise UserError("E143", loc=place, name=s.name, trait=s.trait, step=step, off=off)


def _off(lacks: Any, x: Any) -> str:
    """Return how far a matrix is from having a trait, as text; "" where that is rounding."""
    off = lacks.abs().max()
    return f"{float(off):.2g}" if off > 1e-6 * x.abs().max() else ""


def _is_exact(node: Node) -> bool:
    return all(n.attr not in ("newton_schulz", "newton_schulz_of_rows") for n in postorder([node]))


def _two_steps(
    spec: Spec, flags: Mapping[str, bool], of_sides: Sequence[StateDecl], checked: bool
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the states of two steps of a random matrix from random states that have their traits; fewer
    where a decomposition fails, none without torch, with a warning. Operands of matrix functions are `checked`."""
    try:
        import torch
    except ModuleNotFoundError:
        warnings.warn("torch is not installed: traits and halves of matrices are not checked by numbers", stacklevel=2)
        return

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    generator, hypers = torch.Generator().manual_seed(0), {h.name: h.default for h in spec.hypers}
    p, host = drawn(5, 7), None
    has: dict[str, Callable[[Any], Any]]
    has = {"symmetric": lambda x: x + x.mT, "triangular": torch.triu}
    has["orthogonal"] = lambda x: (lambda u, _, v: u @ v)(*torch.linalg.svd(x, full_matrices=False))
    kept = {s.name: has[s.trait](drawn(*start(s, p, hypers).shape)) for s in of_sides}
    for step in (1, 2):
        around = matrices.CHECKED.set(checked)
        try:
            p, kept, host = spec.evaluate(p, drawn(5, 7), step, kept, host, **flags)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            return
        finally:
            matrices.CHECKED.reset(around)
        yield step, kept


def _check_pairs(spec: Spec, trace: Trace) -> None:
    """Raise UserError for a state of low rank that a step changes without the one by whose root it is divided, or that
    it keeps while that one changes: its codes are relative to it."""
    moved = {name for name, node in trace.states.items() if node.op != "load"}
    for s in spec.states:
        if s.rank and s.normalized_by and (s.name in moved) != (s.normalized_by in moved):
            what = f"`{s.name}`, which is of low rank and normalized by `{s.normalized_by}`, changes at the same steps"
            raise UserError("E113", loc=s.loc, what=what, hint="declare it without normalized_by=")


def _check_inputs(spec: Spec, flags: Mapping[str, bool], trace: Trace) -> None:
    """Raise UserError E106 for an input that is read where no flag says that it was fed, if there is one for it."""
    on = [f for f in spec.flags if flags[f.name]]
    fed = {name for f in on for name in f.inputs}
    if any(f.inputs and f not in on and fed.issuperset(f.inputs) for f in spec.flags):
        return  # no step has this setting
    for name in sorted(trace.reads.intersection(spec.inputs) - fed):
        if known := [f.name for f in spec.flags if name in f.inputs]:
            place, setting = _first_use(spec, trace, name), ", ".join(f.name for f in on) or "none"
            raise UserError("E106", loc=place, name=name, flags=" or ".join(known), on=setting)


def _first_use(spec: Spec, trace: Trace, name: str) -> Loc:
    """Return the place of the first operation that takes a state or an input."""
    nodes = postorder([*trace.new.values(), *(node for node, *_ in trace.sums)])
    users = (n.uid for n in nodes if any(a.op == "load" and a.attr == name for a in n.args))
    return next((trace.places[uid] for uid in users if uid in trace.places), spec.loc)


def _check_sums(spec: Spec) -> None:
    """Raise UserError E129 if parameters of other shapes take a sum over the model elsewhere in the rule."""
    first: dict[tuple[int | bool, ...], Trace] = {}
    for setting, trace in zip(spec.settings(), unmarked(spec), strict=True):
        rest = (len(trace.sums), *(setting[f.name] for f in spec.flags if f.shape is None))
        for (_, node, at), (_, other, here) in zip(first.setdefault(rest, trace).sums, trace.sums, strict=True):
            if (node, at) != (other, here):
                why = f"parameters of other shapes take a sum at {node.short} instead, and all are added up to one"
                remedy = "choose its operand in the branches of `if`, and take the sum behind them"
                raise UserError("E129", loc=other, function="a sum over the model", why=why, remedy=remedy)


@lru_cache(maxsize=4096)
def check(spec: Spec) -> None:
    """Check a spec over all its flag settings; raise UserError for the first fault."""
    if spec.ascent is not None:
        spec.ascent.check()
    traces = [(setting, spec.trace(setting)) for setting in spec.settings()]
    for setting, trace in traces:
        _check_repeats(spec, setting, trace)
        _check_vectors(spec, setting, trace)
        _check_traits(spec, setting, trace)
        _check_pairs(spec, trace)
        _check_inputs(spec, setting, trace)
    if any(trace.sums for _, trace in traces):
        _check_sums(spec)
    _check_used(spec, traces)


def _check_used(spec: Spec, traces: Sequence[tuple[dict[str, bool], Trace]]) -> None:
    """Raise UserError E116 for a state, a hyper-parameter or a flag that makes no difference."""
    read, named = set().union(*(_reads(trace) for _, trace in traces)), _named(spec)
    asked = {name for s in spec.kept for name in flags_in(s.when)}
    for s in spec.kept:
        _refuse_idle(s, "state", s.name, s.name in read)
    for h in spec.hypers:
        for part in h.parts:
            _refuse_idle(h, "hyper-parameter", part, part in read or h.name in named)
    for f in spec.flags:
        _refuse_idle(f, "flag", f.name, f.name in asked or _switches(f.name, traces))


def _refuse_idle(d: Declaration, kind: str, name: str, used: bool) -> None:
    if not used:
        remedy = "drop it, or branch on it with `if`" if kind == "flag" else "drop it, or use it in the rule"
        raise UserError("E116", loc=d.loc, kind=kind, name=name, remedy=remedy)


def _named(spec: Spec) -> set[Any]:
    """Return the names of hyper-parameters that other declarations refer to."""
    of_flags = {name for f in spec.flags for name in (f.nonzero, f.every, *f.limits)}
    return of_flags | {name for s in spec.states for name in (s.init, s.rank)} | {*spec.ascends.values()}


def _check_repeats(spec: Spec, flags: Mapping[str, bool], trace: Trace) -> None:
    """Read the spec once more: a rule that depends on what an earlier reading left behind is no function."""
    first, second = trace.new, run(spec, flags).new
    for name, value in first.items():
        if second[name] is not value:
            places = [loc for _, parts in spec.source.returns for named, loc in parts if named == name]
            raise UserError("E128", loc=places[0] if places else spec.loc, name=name)


def _reads(trace: Trace) -> set[str]:
    """Return the names whose value some new value depends on; a state that is only handed on is not read."""
    roots = [n for name, n in trace.new.items() if n.attr != name]
    return {n.attr for n in postorder(roots) if n.op in ("sym", "load")}


def _switches(flag: str, traces: Sequence[tuple[dict[str, bool], Trace]]) -> bool:
    """Return True if the rule differs between the two settings of a flag, everything else equal."""
    by_rest: dict[tuple[tuple[str, bool], ...], Trace] = {}
    for setting, trace in traces:
        rest = tuple((k, v) for k, v in setting.items() if k != flag)
        other = by_rest.setdefault(rest, trace)
        if other.new != trace.new:
            return True
    return False
