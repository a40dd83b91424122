"""The recurrences of states, found by differentiating a rule with SymPy."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

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
            memo[node] = symbol(node.op, sympy)(*(memo[a] for a in node.args))
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
    # Everything per-element varies from step to step; only host scalars may be part of a decay.
    varying = {state: s}
    known: dict[Node, sympy.Expr] = {}
    conditions: dict[sympy.Symbol, Node] = {}
    moved: set[Node] = set()  # nodes that depend on the state
    for node in postorder([new]):
        if node.attr == state if node.op == "load" else not moved.isdisjoint(node.args):
            moved.add(node)
        if node.op == "load":
            known[node] = varying.setdefault(node.attr, sympy.Symbol(node.attr, real=True))
        elif node.op == "sym":
            known[node] = sympy.Symbol(node.attr, positive=True)
        elif node.op in MATRIX_OPS and node.attr != "finite":
            # An unknown function of the state alone: SymPy would differentiate its operands, for seconds.
            name = f"_product_{node.uid}"
            known[node] = sympy.Function(name)(s) if node in moved else varying.setdefault(name, sympy.Symbol(name))
        elif node.op in ("lt", "le", "eq", "ne") and node.space != spaces.host:
            # Opaque to SymPy, which takes minutes to put some comparisons into a form that nobody needs.
            known[node] = sympy.Symbol(f"_condition_{node.uid}")
            conditions[known[node]] = node
    others = (set(varying.values()) | set(conditions)) - {s}
    try:
        late = _after_first_step(expression(new, known))
        above = {
            mark: expression(node.args[1], known) - expression(node.args[0], known)
            for mark, node in conditions.items()
            if node.op in ("lt", "le")
        }
        return _classify(spec, late, s, others, above)
    except Exception:  # SymPy's own, of many kinds: conditions that it cannot decide, comparisons with NaN
        return Recurrence("other")


def _unturned(x: Node) -> Node:
    """Return the matrix of which x = q' matrix q is the same in another basis: that moves no eigenvalue."""
    if x.op == "matmul" and x.args[0].op == "matmul":
        (turned, inner), q = x.args[0].args, x.args[1]
        made = q.args[0] if q.attr == "finite" else q
        if turned.op == "transpose" and turned.args[0] is q and made.attr in ("orthogonal_iteration", "qr"):
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


def _classify(
    spec: Spec,
    new: sympy.Expr,
    s: sympy.Symbol,
    others: set[sympy.Symbol],
    above: Mapping[sympy.Symbol, sympy.Expr],
    choices: int = _CHOICES,
) -> Recurrence:
    """Return the recurrence of a state `s` that becomes `new`.

    others  symbols of what varies from step to step, conditions too
    above   conditions that hold where something is not negative, and what
    """
    if not new.has(s):
        return Recurrence("previous")
    if new == s:
        return Recurrence("constant")
    new = _extreme(new, above)
    if isinstance(new, (sympy.Max, sympy.Min)):
        inside = [a for a in new.args if a.has(s)]
        rest = [a for a in new.args if not a.has(s)]
        varies = any(a.free_symbols & others for a in rest)
        if len(inside) == 1 and not varies:
            return _classify(spec, inside[0], s, others, above, choices)  # a clip to fixed limits
        decay = sympy.factor_terms(inside[0] / s)
        if len(inside) == 1 and not decay.free_symbols & (others | {s}):
            found = Recurrence("max" if isinstance(new, sympy.Max) else "min", decay)
            if found.kind == "max" or found.decay_at(spec) == 1:
                return found
        return Recurrence("other")
    # sign() is flat almost everywhere, so its argument does not count.
    signs: dict[sympy.Expr, sympy.Symbol] = {}
    flat = new.replace(sympy.sign, lambda x: signs.setdefault(x, sympy.Symbol(f"_sign_{len(signs)}", real=True)))
    others = others | set(signs.values())
    if not flat.has(s):
        return Recurrence("other")
    if any(sums.has(s) for sums in flat.atoms(AppliedUndef)) and not flat.has(sympy.Piecewise):
        return Recurrence("other")  # SymPy would take seconds to find a slope that depends on s
    derivative = sympy.diff(flat, s)
    slope = sympy.factor_terms(derivative)
    if slope == 0:
        return Recurrence("previous")
    if slope == 1:
        return Recurrence("sum", sympy.Integer(1))
    if slope.free_symbols & (others | {s}):
        if not slope.has(s) and flat.subs(s, 0) == 0:
            return Recurrence("multiplicative")
        ways = _ways(flat, derivative, s, others) if choices else []
        if ways:
            return _slowest(spec, [_classify(spec, way, s, others, above, choices - 1) for way in ways])
        if slope.has(s):
            return Recurrence("other")
        # The input may depend on the state too (Adadelta's steps); this is its decay without any input.
        slope = sympy.factor_terms(slope.subs({sympy.Symbol(name, real=True): 0 for name in ("g", "p")}))
        if slope.free_symbols & others:
            return Recurrence("other")
    found = Recurrence("ema", slope)
    decay = found.decay_at(spec)
    if decay == 1:
        return Recurrence("sum", slope)
    return found if abs(decay) < 1 else Recurrence("other", slope)


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
