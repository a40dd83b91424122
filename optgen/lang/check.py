"""The checks of a spec beyond its signature: nothing unused, nothing that divides by zero."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from optgen.base.errors import UserError
from optgen.base.loc import Loc
from optgen.ir.node import Node, postorder
from optgen.ir.ranges import Intervals
from optgen.lang import matrices
from optgen.lang.declare import StateDecl, flags_in
from optgen.lang.probe import probe
from optgen.lang.spec import Spec, Trace, start
from optgen.lang.tracing import run, unmarked
from optgen.lang.values import author_loc
from optgen.ops import spaces
from optgen.ops.prims import CALLS, MATRIX_OPS, PRIMS, REDUCTIONS


@lru_cache(maxsize=4096)
def trace(spec: Spec, setting: tuple[tuple[str, bool], ...]) -> Trace:
    """Return the trace of a spec under a flag setting, checked; the same object every time: functions of matrices stand
    where they are right, three steps on small numbers stay finite, and nonneg states nonneg."""
    flags = dict(setting)
    made = run(spec, flags)
    whole: set[int] = set()  # of one value per matrix or more
    for node in postorder([made.p, *made.states.values()]):
        if node.op in MATRIX_OPS:
            _check_call(spec, node, made)
        from_whole = any(a.uid in whole and a.space != spaces.elem for a in node.args)
        if node.op in MATRIX_OPS or node.space.name in spaces.MATRICES or node.space == spaces.mat and from_whole:
            whole.add(node.uid)
        elif node.op in REDUCTIONS and from_whole:
            why = "its operand is made of whole matrices, each of which is worked on by itself"
            remedy = "reduce values of elements, which may have it as a term: mean(trace(x) + 0 * g)"
            place = made.places.get(node.uid, spec.loc)
            raise UserError("E129", loc=place, function="a reduction", why=why, remedy=remedy)
    probe(spec, flags, made)
    return made


def _check_call(spec: Spec, node: Node, trace: Trace) -> None:
    """Raise UserError E129 for functions of whole matrices where rows are blocks, and for newton_schulz of its own
    result, scaled, transposed or in part."""
    place = trace.places.get(node.uid, spec.loc)
    if spec.blocks and spec.matrix != "heads":
        why = 'matrix="blocks" divides rows into blocks, and it takes the whole matrix'
        remedy = 'write matrix="heads", under which each block of rows is a matrix, or matrix="first"'
        raise UserError("E129", loc=place, function=_called(node), why=why, remedy=remedy)
    if node.op == "call":
        _check_scalars(spec, node, place)
    normalizes = {"newton_schulz": 2, "newton_schulz_of_rows": 3}.get(node.attr)
    if normalizes is None or node.args[normalizes].attr == 0:
        return
    if inner := _orthogonal_by(spec, node.args[0]):
        why = f"its operand is a result of {_called(inner)}, orthogonal already, which it would divide by its "
        places = (place, trace.places.get(inner.uid, spec.loc))
        remedy = "one call: newton_schulz(x, coefficients=[(a, b, c), ...]), or more steps, newton_schulz(x, 10)"
        raise UserError("E129", loc=places, function=_called(node), why=f"{why}Frobenius norm", remedy=remedy)


def _orthogonal_by(spec: Spec, x: Node) -> Node | None:
    """Return the call of newton_schulz whose result x is, scaled, transposed, chosen from such, in part, or multiplied
    by states that are orthogonal."""
    if x.attr in ("newton_schulz", "newton_schulz_of_rows"):
        return x
    of = [a for a in x.args if spaces.dims(a.space)] if x.op in _TURNED else []
    if x.attr in ("finite", "top_rows", "unwide"):
        of = [x.args[x.attr == "unwide"]]
    elif x.op == "where" and (not spaces.dims(x.args[0].space) or x.args[1] is x.args[2]):
        of = [*x.args[1:]]
    elif x.op == "matmul":
        bases = {s.name for s in spec.states if s.trait == "orthogonal"}
        of = [a for a in x.args if (a.args[0] if a.op == "transpose" else a).attr not in bases]
    made = [_orthogonal_by(spec, a) for a in of]
    several = x.op in ("where", "matmul")
    return made[0] if made and None not in made and (several or len(made) == 1) else None


_TURNED = frozenset("mul div neg transpose to_wide".split())


def _check_scalars(spec: Spec, node: Node, place: Loc | None) -> None:
    """Raise UserError E103 for what a function of whole matrices takes beside them and is no host scalar, for a key
    that may have a fraction, and for an order of a root or a number of rounds that may be too small."""
    scalars, want, hint = node.args[CALLS[node.attr] :], "", ""
    wrong = next((x for x in scalars if x.space != spaces.host and x.op != "extent"), None)
    if wrong is not None:
        want, got = "host scalars beside its matrices", spaces.shown(wrong.space)
        hint = "host scalars depend on hyper-parameters and t only"
    elif (part := _WHOLES.get(node.attr, "")) and not _is_whole(spec, scalars[0]):
        want, got = f"a whole number for its {part}", "one that may have a fraction"
        hint = "floor(x) is whole, and a hyper-parameter with whole=True"
    elif node.attr in _LEAST:
        least, wanted, says = _LEAST[node.attr]
        ranges = {part: h.interval for h in spec.hypers for part in h.parts}
        low, high = Intervals(ranges | {"step": (1.0, math.inf)})(scalars[0])
        if not low >= least:
            want, got = wanted, f"a number from {low:g} to {high:g}" if low < high else f"{low:g}"
            hint = f"a hyper-parameter says so with {says}"
    if want:
        raise UserError("E103", loc=place, function=_called(node), want=want, got=got, hint=hint)


_WHOLES = {"normal": "key", "uniform": "key", "bjorck": "steps"}
"""The first scalar of functions of whole matrices where it is a whole number."""

_LEAST = {
    "inverse_root": (math.ulp(0.0), "p above 0", "gt=0; of symmetric x, inverse_root(x, 2) is x ** (-1 / 2)"),
    "bjorck": (1.0, "1 or more steps", "ge=1"),
}
"""The least number that functions of whole matrices take as their first scalar, and how messages say it."""

_WHOLE = frozenset("add sub mul pow neg abs min max where".split())


def _is_whole(spec: Spec, x: Node) -> bool:
    """Return True if a number has no fraction, whatever the hyper-parameters are; of host states if they begin so."""
    if x.op == "const":
        return float(x.attr).is_integer()
    if x.op == "sym":
        begins = any(x.attr == s.name and s.init.is_integer() for s in spec.host_states)
        return begins or x.attr == "step" or any(x.attr in h.parts and h.whole for h in spec.hypers)
    if x.op in ("floor", "rint", "extent"):
        return True
    if x.op == "pow" and not (x.args[1].op == "const" and x.args[1].attr >= 0):
        return False
    terms = x.args[1:] if x.op == "where" else x.args
    return x.op in _WHOLE and all(_is_whole(spec, a) for a in terms)


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


_HALVES = {
    **dict.fromkeys(("eigenvectors", "inverse_root", "norm_lower_bound"), (0, "symmetric")),
    "orthogonal_iteration": (0, "symmetric"), "solve_triangular": (1, "triangular"),
}  # fmt: skip
"""The operand of which functions of whole matrices read one half alone, or as if it had a trait, and the trait."""

_WITH = {
    "symmetric": "(x + x.T) / 2 is symmetric, and so is gram(x)",
    "triangular": "triangle(x) is upper triangular, and with upper=False it takes triangle(x).T",
}


def _check_operand(name: str, operands: Sequence[Any], numbers: Sequence[Any]) -> None:
    """Raise UserError E129 for a function that reads one half of a matrix, of which the other half differs."""
    position, trait = _HALVES.get(name, (0, ""))
    if not trait:
        return
    x = operands[position]
    off = _LACKS[trait](x.mT if name == "solve_triangular" and not numbers[0] else x).abs().max()
    if off > 1e-6 * x.abs().max():
        why = f"its operand is not {trait}: of random values it is off by {float(off):.2g}"
        raise UserError("E129", loc=author_loc(), function=f"{name}()", why=why, remedy=_WITH[trait])


def _check_traits(spec: Spec, flags: Mapping[str, bool], trace: Trace) -> None:
    """Raise UserError E143 for a matrix state that loses its trait in two steps in fp64, from random values with it,
    and E129 for operands of functions that take one for granted.

    What newton_schulz takes part in is rounded to bf16 and not judged.
    """

    def exact(nodes: list[Node]) -> bool:
        return all(n.attr not in ("newton_schulz", "newton_schulz_of_rows") for n in postorder(nodes))

    of_sides = [s for s in spec.present(flags) if s.trait in _LACKS]
    judged = [s for s in of_sides if trace.states[s.name].op != "load"]
    judged = [s for s in judged if exact([trace.states[s.name]])]
    roots = [trace.p, *trace.states.values()]
    halves = [n.args[_HALVES[n.attr][0]] for n in postorder(roots) if n.op == "call" and n.attr in _HALVES]
    watch = halves and exact(halves)
    if not judged and not watch:
        return
    import torch

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    generator, hypers = torch.Generator().manual_seed(0), {h.name: h.default for h in spec.hypers}
    p, host = drawn(5, 7), None
    has: dict[str, Callable[[Any], Any]]
    has = {"symmetric": lambda x: x + x.mT, "triangular": torch.triu}
    has["orthogonal"] = lambda x: (lambda u, _, v: u @ v)(*torch.linalg.svd(x, full_matrices=False))
    kept = {s.name: has[s.trait](drawn(*start(s, p, hypers).shape)) for s in of_sides}
    for step in (1, 2):
        watched = matrices.WATCHED.set(_check_operand if watch else None)
        try:
            p, kept, host = spec.evaluate(p, drawn(5, 7), step, kept, host, **flags)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            return
        finally:
            matrices.WATCHED.reset(watched)
        for s in judged:
            x = kept[s.name]
            off = _lacks(s, x).abs().max()
            if off > 1e-6 * x.abs().max():
                place = trace.places.get(trace.states[s.name].uid, s.loc)
                raise UserError("E143", loc=place, name=s.name, trait=s.trait, step=step, off=f"{float(off):.2g}")


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
    fed = {name for f in spec.flags if flags[f.name] for name in f.inputs}
    if any(f.inputs and not flags[f.name] and fed.issuperset(f.inputs) for f in spec.flags):
        return  # no step has this setting
    for name in spec.inputs:
        known = [f.name for f in spec.flags if name in f.inputs]
        if name in trace.reads and known and name not in fed:
            nodes = postorder([*trace.new.values(), *(node for node, *_ in trace.sums)])
            users = (n for n in nodes if any(a.op == "load" and a.attr == name for a in n.args))
            place = next((trace.places[n.uid] for n in users if n.uid in trace.places), spec.loc)
            on = ", ".join(f.name for f in spec.flags if flags[f.name]) or "none"
            raise UserError("E106", loc=place, name=name, flags=" or ".join(known), on=on)


def _check_sums(spec: Spec) -> None:
    """Raise UserError E129 if parameters of other shapes take a sum over the model elsewhere in the rule."""
    first: dict[tuple[int | bool, ...], Trace] = {}
    for setting, made in zip(spec.settings(), unmarked(spec), strict=True):
        rest = (len(made.sums), *(setting[f.name] for f in spec.flags if f.shape is None))
        for (_, one, at), (_, other, here) in zip(first.setdefault(rest, made).sums, made.sums, strict=True):
            if (one, at) != (other, here):
                why = f"parameters of other shapes take a sum at {one.short} instead, and all are added up to one"
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
    read = set().union(*(_reads(trace) for _, trace in traces))
    for s in spec.kept:
        if s.name not in read:
            raise UserError("E116", loc=s.loc, kind="state", name=s.name, remedy="drop it, or use it in the rule")
    switches = {name for f in spec.flags for name in (f.nonzero, f.every, *f.limits)} | {s.init for s in spec.states}
    others = {s.rank for s in spec.states} | {*spec.ascends.values()}
    for h in spec.hypers:
        for part in h.parts:
            if part not in read and h.name not in switches | others:
                remedy = "drop it, or use it in the rule"
                raise UserError("E116", loc=h.loc, kind="hyper-parameter", name=part, remedy=remedy)
    asked = {name for s in spec.kept for name in flags_in(s.when)}
    for f in spec.flags:
        if f.name not in asked and not _switches(f.name, traces):
            raise UserError("E116", loc=f.loc, kind="flag", name=f.name, remedy="drop it, or branch on it with `if`")


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


def _switches(flag: str, traces: list[tuple[dict[str, bool], Trace]]) -> bool:
    """Return True if the rule differs between the two settings of a flag, everything else equal."""
    by_rest: dict[tuple[tuple[str, bool], ...], Trace] = {}
    for setting, trace in traces:
        rest = tuple((k, v) for k, v in setting.items() if k != flag)
        other = by_rest.setdefault(rest, trace)
        if other.new != trace.new:
            return True
    return False
