"""The recurrences of states, found by differentiating a rule with SymPy."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import sympy
from sympy.core.function import AppliedUndef

from optgen.ir.node import Node, postorder, waiting
from optgen.lang.spec import LATE, Recurrence, Spec
from optgen.ops import spaces
from optgen.ops.prims import MATRIX_OPS, symbol


def _number(x: float | bool) -> sympy.Basic:
    if isinstance(x, bool):
        return sympy.true if x else sympy.false
    return sympy.Integer(int(x)) if x == int(x) and abs(x) < 1e15 else sympy.Float(repr(x))


def expression(root: Node, known: Mapping[Node, sympy.Expr]) -> Any:
    """Return the SymPy tree of a node; `known` gives the symbols of nodes that have a name."""
    memo: dict[Node, Any] = {node: x for node, x in known.items() if node is not root or not node.args}
    for node in waiting(root, memo):
        if node.op == "const":
            memo[node] = _number(node.attr)
        elif not node.args:
            memo[node] = sympy.Symbol(str(node.attr or node.op))
        elif node.attr == "finite":
            memo[node] = memo[node.args[0]]  # as long as nothing is amiss
        else:
            args = [memo[a] for a in node.args]
            # SymPy would compare operands symbolically, for seconds.
            given = {"evaluate": False} if node.op in ("min", "max") and any(x.free_symbols for x in args) else {}
            memo[node] = symbol(node.op, sympy)(*args, **given)
    return memo[root]


_STEP = sympy.Symbol("step", positive=True)
_CHOICES = 4  # conditions of a state's new value that are looked at one by one


def recurrence(spec: Spec, flags: Mapping[str, bool] | None, state: str) -> Recurrence:
    """Return the recurrence of a state under these flags, found by differentiating its new value by the old one."""
    return _recurrence(spec, tuple(sorted((flags or {}).items())), state)


@lru_cache(maxsize=4096)
def _recurrence(spec: Spec, flags: tuple[tuple[str, bool], ...], state: str) -> Recurrence:
    decl = next(d for d in spec.states if d.name == state)
    if decl.space == spaces.model:
        return Recurrence("other")  # kept in fp32, whatever it does
    if decl.trait == "residual":
        return Recurrence("residual")
    new = spec.trace(dict(flags)).states[state]
    if decl.trait == "symmetric":
        new = _unturned(new)
    s = sympy.Symbol(state, real=True)
    known = _symbols(new, s)
    # Everything per-element varies from step to step; only host scalars may be part of a decay.
    others = {x for node, x in known.items() if node.op != "sym" and isinstance(x, sympy.Symbol)} - {s}
    try:
        late = _after_first_step(expression(new, known))
        above = {
            mark: expression(node.args[1], known) - expression(node.args[0], known)
            for node, mark in known.items()
            if node.op in ("lt", "le")
        }
        return _classify(_Update(spec, late, s, others, above))
    except Exception:  # SymPy's own, of many kinds: conditions that it cannot decide, comparisons with NaN
        return Recurrence("other")


def _symbols(new: Node, s: sympy.Symbol) -> dict[Node, Any]:
    """Return what stands for the leaves, products and conditions of the new value of the state s."""
    known: dict[Node, Any] = {}
    moved: set[Node] = set()  # nodes that depend on the state
    for node in postorder([new]):
        if node.attr == s.name if node.op == "load" else not moved.isdisjoint(node.args):
            moved.add(node)
        if node.op in ("load", "sym"):
            known[node] = sympy.Symbol(node.attr, **{"real" if node.op == "load" else "positive": True})
        elif node.op in MATRIX_OPS and node.attr != "finite":
            # An unknown function of the state alone: SymPy would differentiate its operands, for seconds.
            name = f"_product_{node.uid}"
            known[node] = sympy.Function(name)(s) if node in moved else sympy.Symbol(name)
        elif node.op in ("lt", "le", "eq", "ne") and node.space != spaces.host:
            # Opaque to SymPy, which takes minutes to put some comparisons into a form that nobody needs.
            known[node] = sympy.Symbol(f"_condition_{node.uid}")
    return known


def _unturned(x: Node) -> Node:
    """Return the matrix of which x = q' matrix q is the same in another basis: that moves no eigenvalue."""
    if x.op == "matmul" and x.args[0].op == "matmul":
        (turned, inner), q = x.args[0].args, x.args[1]
        turn_of = q.args[0] if q.attr == "finite" else q
        if turned.op == "transpose" and turned.args[0] is q and turn_of.attr in ("orthogonal_iteration", "qr"):
            return _unturned(inner)
    return _unturned(x.args[0]) if x.attr == "finite" else x


def _after_first_step(expr: sympy.Expr) -> sympy.Expr:
    """The expression for a large t: what the first step does differently says nothing about the recurrence.

    Host branches on t alone, like Piecewise((a, t > 1), (b, True)), are decided at t = 10^9.
    """

    def decide(piece: sympy.Piecewise) -> sympy.Expr:
        for value, condition in piece.args:
            if condition.free_symbols <= {_STEP}:
                if bool(condition.subs(_STEP, LATE)):
                    return value
            else:
                return piece
        return piece

    return expr.replace(lambda e: isinstance(e, sympy.Piecewise), decide)


class _Update(NamedTuple):
    """The new value of a state.

    new      SymPy's expression: beta*s + (1 - beta)*g
    s        the symbol of the state
    others   symbols of what varies from step to step, conditions too: {g, _condition_17}
    above    conditions -> what is not negative where they hold: {_condition_17: g - s}
    choices  how many more conditions may be looked at one by one
    """

    spec: Spec
    new: sympy.Expr
    s: sympy.Symbol
    others: set[sympy.Symbol]
    above: Mapping[sympy.Symbol, sympy.Expr]
    choices: int = _CHOICES


def _classify(update: _Update) -> Recurrence:
    """Return the recurrence of a state with such an update."""
    if not update.new.has(update.s):
        return Recurrence("previous")
    if update.new == update.s:
        return Recurrence("constant")
    update = update._replace(new=_extreme(update.new, update.above))
    if isinstance(update.new, (sympy.Max, sympy.Min)):
        return _of_extreme(update)
    # sign() is flat almost everywhere, so its argument does not count.
    signs: dict[sympy.Expr, sympy.Symbol] = {}
    flat = update.new.replace(sympy.sign, lambda x: signs.setdefault(x, sympy.Symbol(f"_sign_{len(signs)}", real=True)))
    opaque = any(sums.has(update.s) for sums in flat.atoms(AppliedUndef)) and not flat.has(sympy.Piecewise)
    if opaque or not flat.has(update.s):
        return Recurrence("other")  # of opaque ones SymPy would take seconds to find a slope that depends on s
    return _of_slope(update._replace(new=flat, others=update.others | set(signs.values())))


def _of_extreme(update: _Update) -> Recurrence:
    """Return the recurrence of a state that becomes a maximum or a minimum."""
    spec, new, s, others, *_ = update
    inside = [a for a in new.args if a.has(s)]
    if len(inside) != 1:
        return Recurrence("other")
    if not any(a.free_symbols & others for a in new.args if not a.has(s)):
        return _classify(update._replace(new=inside[0]))  # a clip to fixed limits
    decay = sympy.factor_terms(inside[0] / s)
    recurrence = Recurrence("max" if isinstance(new, sympy.Max) else "min", decay)
    free = not decay.free_symbols & (others | {s})
    return recurrence if free and (recurrence.kind == "max" or recurrence.decay_at(spec) == 1) else Recurrence("other")


def _of_slope(update: _Update) -> Recurrence:
    """Return the recurrence of a state by the derivative of its new value."""
    spec, new, s, others, _, choices = update
    derivative = sympy.diff(new, s)
    slope = sympy.factor_terms(derivative)
    if slope in (0, 1):
        return Recurrence("sum", sympy.Integer(1)) if slope == 1 else Recurrence("previous")
    if slope.free_symbols & (others | {s}):
        if not slope.has(s) and new.subs(s, 0) == 0:
            return Recurrence("multiplicative")
        if ways := _ways(new, derivative, s, others) if choices else []:
            return _slowest(spec, [_classify(update._replace(new=way, choices=choices - 1)) for way in ways])
        if slope.has(s):
            return Recurrence("other")
        # The input may depend on the state too (Adadelta's steps); this is its decay without any input.
        slope = sympy.factor_terms(slope.subs({sympy.Symbol(name, real=True): 0 for name in ("g", "p")}))
        if slope.free_symbols & others:
            return Recurrence("other")
    recurrence = Recurrence("ema", slope)
    decay = recurrence.decay_at(spec)
    if decay == 1:
        return Recurrence("sum", slope)
    return recurrence if abs(decay) < 1 else Recurrence("other", slope)


def _extreme(new: sympy.Expr, above: Mapping[sympy.Symbol, sympy.Expr]) -> sympy.Expr:
    """where(a > b, a, b) as the maximum that it is, where(a < b, a, b) as the minimum."""
    if isinstance(new, sympy.Piecewise) and len(new.args) == 2 and new.args[1][1] == sympy.true:
        (a, condition), (b, _) = new.args
        if condition in above:
            for difference, extreme in ((a - b, sympy.Max), (b - a, sympy.Min)):
                if sympy.factor_terms(above[condition] / difference).is_positive:
                    return extreme(a, b)
    return new


def _ways(new: sympy.Expr, derivative: sympy.Expr, s: sympy.Symbol, others: set[sympy.Symbol]) -> list[sympy.Expr]:
    """The new value where the first condition that decides about s holds, and where it does not; [] without one."""
    for piece in sorted(new.atoms(sympy.Piecewise), key=sympy.default_sort_key):
        if not (piece.has(s) or derivative.has(piece)):
            continue
        for _, condition in piece.args:
            if condition.free_symbols & others:
                sides = ((sympy.true, sympy.false), (sympy.false, sympy.true))
                return [new.xreplace({condition: holds, sympy.Not(condition): fails}) for holds, fails in sides]
    return []


def _slowest(spec: Spec, found: list[Recurrence]) -> Recurrence:
    """The recurrence of a state that goes on in one of these ways at each step."""
    moving = [r for r in found if r.kind != "constant"]
    kinds = {r.kind for r in moving}
    if "sum" in kinds and kinds <= {"sum", "ema", "previous"}:
        return next(r for r in moving if r.kind == "sum")
    if kinds in ({"ema"}, {"ema", "previous"}, {"max"}, {"min"}):
        return max((r for r in moving if r.decay is not None), key=lambda r: abs(r.decay_at(spec)))
    return moving[0] if kinds == {"multiplicative"} else Recurrence("other")
