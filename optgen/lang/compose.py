"""Rules made of other rules: `@wrapper` makes a function that goes around any optimizer.

@wrapper(cite="...")
def slowed(rule, p, g, *, share=hyper(0.5, ge=0, le=1)):
    before, step = rule.split(p, g)
    return before - share * step

slowed_adamw = slowed(adamw)
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import wraps
from typing import Any

from optgen.base import loc as locs
from optgen.base.errors import UserError
from optgen.base.loc import Loc
from optgen.base.names import camel
from optgen.lang.declare import INPUT, Declaration, FlagDecl, HyperDecl, StateDecl, low_rank_state, schema, usual
from optgen.lang.matrices import qr
from optgen.lang.optimizer import check_declarations, declaration_of, evaluation_of
from optgen.lang.policies import DECAYED
from optgen.lang.source import SpecSource
from optgen.lang.spec import Evaluation, MatrixKind, Spec
from optgen.lang.values import Absent, Num, Value, capped
from optgen.ops import spaces

Wrapper = Callable[[Spec], Spec]


class InnerRule:
    """The rule inside a wrapper, at one step of a parameter.

    options  its hyper-parameters and flags by name
    states   its states by name, which each step replaces by new ones
    """

    def __init__(self, spec: Spec, t: Num, values: Mapping[str, Any]) -> None:
        self.spec, self.t = spec, t
        self.states = {s.name: values[s.name] for s in spec.kept}
        self.went: tuple[Num, Num] = (None, None)  # p before and after the rule's step
        options = [*(h.name for h in spec.hypers), *(f.name for f in spec.flags)]
        self.options = {name: values[name] for name in options if name in values}

    def __call__(self, p: Num, g: Num, t: Num = None, **changed: Any) -> Num:
        """Take the rule's step from p and return the new weight, with other values of t and of options where given."""
        new = self.spec.call(p, g, self.t if t is None else t, {**self.states, **self.options, **changed})
        self.went = p, new.pop("p")
        self.states = new
        return self.went[1]

    def split(self, p: Num, g: Num, t: Num = None, **changed: Any) -> tuple[Num, Num]:
        """Take the rule's step from p and return (p after decoupled weight decay, what is subtracted from that).

        Decay is decoupled where a function of `policies` applies it to p first; other decay is part of the step.  In a
        trace the step is the rule's own expression, not a difference.  UserError E113 for a rule that follows p itself.
        """
        marks = DECAYED.get()
        marks = [] if marks is None else marks
        starts, around = self.states, DECAYED.set(marks)
        try:
            new = self(p, g, t, **changed)
        finally:
            DECAYED.reset(around)
        follows = [s.name for s in self.spec.states if s.init == "param" and self.states[s.name] is not starts[s.name]]
        if self.spec.evaluation is not None or follows:
            raise _beside(self.spec)
        before = next((after for of, after in reversed(marks) if of is p), p)
        if isinstance(new, Value) and isinstance(before, Value) and new.node.op in ("sub", "add"):
            left, right = new.node.args
            if left is before.node:
                return before, Value(right, new.record) if new.node.op == "sub" else -Value(right, new.record)
        return before, before - new

    def option(self, names: str) -> Num:
        """Return the first part of the first of some hyper-parameters ("betas or momentum") that the rule has."""
        value = next(self.options[name] for name in names.split(" or ") if name in self.options)
        return value[0] if isinstance(value, tuple) else value


def _beside(spec: Spec) -> UserError:
    what = f"{spec.name} keeps other weights beside p, which this wrapper would move alone"
    return UserError("E113", loc=spec.loc, what=what, hint="put this wrapper inside of the other one")


def _names(spec: Spec) -> set[str]:
    """The names of its hyper-parameters and their parts, flags and states."""
    names = {x.name for xs in (spec.hypers, spec.flags, spec.kept) for x in xs}
    return names | {part for h in spec.hypers for part in h.parts}


def _free(inner: Spec, wrapper: str, name: str) -> str:
    """The name, with that of the wrapper before it where the rule has something of that name."""
    return f"{wrapper}_{name}" if name in _names(inner) and not name.startswith(f"{wrapper}_") else name


def _composed(
    inner: Spec, name: str, doc: str, cite: str, declared: Sequence[Declaration], place: Loc,
    step: Callable[..., tuple[Any, ...]], *, inside: Spec | None = None, t: bool = False,
    evaluation: Evaluation | None = None,
) -> Spec:  # fmt: skip
    """inner with more hyper-parameters, flags and states, and another function.

    step    (rule, p, g, t, values by name) -> (new p, the new states of its own ...)
    inside  the rule that step takes, where inner has already other states or flags than it
    t       whether step takes the number of the step
    """
    declared = [replace(d, loc=d.loc or place) for d in declared]
    for d in declared:
        if d.name in _names(inner):
            why, hint = f"{inner.name} has something of that name already", f"rename `{d.name}` in {inner.name}"
            raise UserError("E115", loc=place, name=d.name, why=why, hint=hint)
    added = schema(declared)
    order, takes_step = (*inner.order, *added.order), t or inner.takes_step

    def function(p: Any, g: Any, *t: Any, **values: Any) -> tuple[Any, ...]:
        number = t[0] if takes_step else None
        rule = InnerRule(inside or inner, number, values)
        came, (p, *new) = p, step(rule, p, g, number, values)
        moved = rule.went[0] is not came or rule.went[1] is not p
        if moved and inner.evaluation is not None and inner.evaluation.beside:
            raise _beside(inner)
        if len(new) != len(added.order):
            want, got = ", ".join(("p", *added.order)), f"{1 + len(new)} values"
            raise UserError("E120", loc=place, name=name, want=want, got=got)
        after = {**values, **rule.states, **dict(zip(added.order, new, strict=True))}
        return (p, *(after[state] for state in order[1:]))

    spec = replace(
        inner,
        name=f"{name}_{inner.name}",
        class_name=f"{camel(name)}{inner.class_name}",
        doc=doc,
        cite=cite,
        like=None,
        loc=place,
        hypers=(*inner.hypers, *added.hypers),
        flags=(*inner.flags, *added.flags),
        states=(*inner.states, *added.states),
        host_states=(*inner.host_states, *added.host_states),
        takes_step=takes_step,
        order=order,
        function=function,
        evaluation=evaluation or inner.evaluation,
    )
    check_declarations(spec)
    return spec


def wrapper(
    *, cite: str = "", needs: Sequence[str] = (), evaluate: Callable[..., Any] | None = None,
    matrix: MatrixKind = "last", ascent: Spec | None = None,
) -> Callable[[Callable[..., Any]], Wrapper]:  # fmt: skip
    """Make a function of a rule, which returns a new rule, of a function (rule, p, g[, t], states..., *,
    hyper-parameters and flags...) that returns the new weight and states.

    cite      the paper
    needs     what the rule must have: names of hyper-parameters and states, "betas or momentum" for one of them
    evaluate  the weights that a model is evaluated with, as of `optimizer`
    matrix    the matrix of a tensor, as of `optimizer`, where the rule has no states of rows and columns
    ascent    a rule without states and flags, whose step moves the weights to where the gradient is taken once more:
              the optimizer has first_step() and second_step(), and feeds the first gradient to an input `first_grad`

    The function calls rule(p, g), or rule.split(p, g), once.  The first paragraph of its docstring is that of the new
    rule, whose name stands for "a rule" there.  An option or a state whose name the rule has already gets the
    wrapper's name before it.  UserError E113 for a rule that lacks what is needed, or has weights for evaluation too.
    """
    if ascent is not None and (ascent.kept or ascent.flags):
        what = f"the ascent {ascent.name} has states or flags"
        raise UserError("E113", loc=ascent.loc, what=what, hint="hyper-parameters are all that an ascent may have")

    def make(function: Callable[..., Any]) -> Wrapper:
        source, name = SpecSource(function), function.__name__
        parameters = list(inspect.signature(function).parameters.values())
        bare = [p.name for p in parameters if p.default is p.empty]
        if bare not in (["rule", "p", "g"], ["rule", "p", "g", "t"]):
            what = f"a wrapper's first parameters are `rule, p, g` or `rule, p, g, t`, got {', '.join(bare) or 'none'}"
            raise UserError("E113", loc=source.head, what=what, hint="every other parameter has a declaration")
        declared = [declaration_of(p, source) for p in parameters[len(bare) :]]
        for k, d in enumerate(declared):
            if isinstance(d, FlagDecl) and d.shape is not None:
                declared[k] = replace(usual(d, {}), text=source.lambda_of(d.name) or "")
        own_weights = None
        if evaluate is not None:
            own_weights = replace(evaluation_of(evaluate, schema(declared)), beside=True)
        names = [d.name for d in declared]
        declared += ascent.hypers if ascent is not None else ()

        @wraps(function)
        def around(inner: Any, *, loc: Loc | None = None) -> Spec:
            place = loc or locs.of_frame(sys._getframe(1))
            if not isinstance(inner, Spec):
                called = getattr(inner, "__name__", repr(inner))
                raise UserError("E113", loc=place, what=f"{name} goes around a rule, got {called}", hint="a Spec")
            _refuse_misfit(name, inner, place, needs, own_weights, ascent)
            named = {d.name: _free(inner, name, d.name) for d in declared}
            if own_weights is not None:  # its text has these names
                named |= {x: x for x in (*own_weights.states, *own_weights.hypers)}
            first = inspect.cleandoc(function.__doc__ or "").split("\n\n")[0].replace("\n", " ")
            doc = _renamed(re.sub(r"\b[Aa] rule\b", inner.class_name, first, count=1), named)

            def step(rule: InnerRule, p: Any, g: Any, t: Any, values: Mapping[str, Any]) -> tuple[Any, ...]:
                number = (t,) if "t" in bare else ()
                result = function(rule, p, g, *number, **{name: values[named[name]] for name in names})
                return result if isinstance(result, tuple) else (result,)

            mine = [_declared_as(d, named) for d in declared]
            if inner.matrix == "last" and not any(s.space.name in ("row", "col", "mat") for s in inner.states):
                inner = replace(inner, matrix=matrix)
            if ascent is not None:
                given = {x.name for x in declared if isinstance(x, StateDecl) and x.trait == INPUT} & {"first_grad"}
                ascends = {x: named[x] for x in (*(h.name for h in ascent.hypers), *given)}
                inner = replace(inner, ascent=ascent, ascends=ascends)
            return _composed(inner, name, doc, cite, mine, place, step, t="t" in bare, evaluation=own_weights)

        return around

    return make


def _refuse_misfit(
    name: str, inner: Spec, place: Loc, needs: Sequence[str], weights: Evaluation | None, ascent: Spec | None
) -> None:
    """Raise UserError E113 for a rule without what a wrapper needs, or with what only one of the two may have."""
    has = _names(inner)
    for need in needs:
        if has.isdisjoint(need.split(" or ")):
            what, hint = f"{name} is for rules with {need}", f"{inner.name} has {', '.join(sorted(has))}"
            raise UserError("E113", loc=place, what=what, hint=hint)
    for mine, other, both in (
        (weights, inner.evaluation, "choose the weights that a model is evaluated with"),
        (ascent, inner.ascent, "have a first step"),
    ):
        if mine is not None and other is not None:
            raise UserError("E113", loc=place, what=f"{name} and {inner.name} both {both}", hint="take one of the two")


def _renamed(text: str, named: Mapping[str, str]) -> str:
    """A text with other names in it."""
    return re.sub(r"\w+", lambda word: named.get(word[0], word[0]), text)


def _declared_as(d: Declaration, named: Mapping[str, str]) -> Any:
    """A declaration with other names, its own and those that it refers to."""
    values = {f.name: getattr(d, f.name) for f in fields(d) if f.name not in ("text", "trait")}
    changed: dict[str, Any] = {key: _renamed(x, named) for key, x in values.items() if isinstance(x, str)}
    if isinstance(d, HyperDecl):
        changed["parts"] = tuple(_renamed(part, named) for part in d.parts)
    return replace(d, **changed)


def low_rank(inner: Spec, state: str, *, when: str, rank: int = 8, **fixed: bool) -> Spec:
    """Any rule with an element-wise state x kept as left @ right + residual, of which plans keep the residual alone in
    few bits, to nearest; the other two, of rank r, are fp32.

    state  its name; of either sign, 0 before the first step
    when   the flags under which it is kept so, "matrix and not adamw": of matrices only
    fixed  values of flags that the new rule does not have
    Each step takes left = qr(x @ right.T), one power iteration from the step before, and right = left.T @ x.  Elements
    of gradients count as 1e14 at most, so that fp32 has these products.
    """
    place, words = locs.of_frame(sys._getframe(1)), when.split(" and ")
    _refuse_low_rank(inner, place, {state}, {word.removeprefix("not ") for word in words}, {*fixed})
    rank_name = _free(inner, "low_rank", "rank")
    parts = [f"{state}_{x}" for x in ("residual", "left", "right")]

    def step(rule: InnerRule, p: Any, g: Any, t: Any, values: Mapping[str, Any]) -> tuple[Any, ...]:
        (residual, left, right), unused = (values[x] for x in parts), rule.states[state]
        if isinstance(residual, Absent):
            return rule(p, g, **fixed), residual, left, right
        rule.states[state] = left @ right + residual
        p = rule(p, capped(g, 1e14), **fixed)
        x, rule.states[state] = rule.states[state], unused
        left = qr(x @ right.T)
        right = left.T @ x
        return p, x - left @ right, left, right

    unless = " or ".join(word[4:] if word.startswith("not ") else f"not {word}" for word in words)
    changed = replace(
        inner,
        states=tuple(replace(s, when=unless) if s.name == state else s for s in inner.states),
        flags=tuple(f for f in inner.flags if f.name not in fixed),
    )
    sides = [low_rank_state(side, rank=rank_name, when=when) for side in ("rows", "columns")]
    added = (StateDecl("", spaces.elem, False, when, 0.0, trait="residual"), *sides)
    doc = f"the rank of the product that keeps a part of {state}"
    hyper = HyperDecl(rank_name, float(rank), ge=1, whole=True, parts=(rank_name,), doc=doc)
    doc = f"{inner.class_name} with `{state}` kept as a product of rank {rank_name} and a residual."
    declared = (hyper, *(replace(s, name=name) for s, name in zip(added, parts, strict=True)))
    return _composed(changed, "low_rank", doc, inner.cite, declared, place, step, inside=inner)


def _refuse_low_rank(inner: Spec, place: Loc, states: set[str], flags: set[str], fixed: set[str]) -> None:
    """Raise UserError E113 where `low_rank` is given other states and flags than it can take of a rule."""
    plain = {s.name for s in inner.states if replace(s, loc=None, normalized_by=None) == StateDecl(s.name, spaces.elem)}
    known = {f.name for f in inner.flags}
    for what, got, there in (
        ("a signed state of elements that is always there and starts at 0", states, plain),
        ('flags in when=, such as "matrix and not adamw"', flags, known),
        ("flags to be fixed", fixed, known),
    ):
        if got - there:
            hint = f"{inner.name} has {', '.join(sorted(there)) or 'none'}"
            refused = f"low_rank takes {what}, got {', '.join(sorted(got - there))}"
            raise UserError("E113", loc=place, what=refused, hint=hint)
