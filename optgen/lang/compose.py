"""Rules made of other rules: a wrapper around any optimizer.

from optgen.lang import lookahead
from specs.adamw import adamw

lookahead_adamw = lookahead(adamw)
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from optgen.base import loc as locs
from optgen.base.errors import UserError
from optgen.base.names import camel
from optgen.lang.declare import FlagDecl, HyperDecl, StateDecl, low_rank_state
from optgen.lang.matrices import qr
from optgen.lang.reductions import model_norm
from optgen.lang.spec import Spec
from optgen.lang.values import Absent, minimum
from optgen.ops import spaces


def _made(
    inner: Spec, name: str, doc: str, cite: str, hypers: tuple[HyperDecl, ...], flags: tuple[FlagDecl, ...],
    states: tuple[StateDecl, ...], rule: Callable[..., Any],
) -> Spec:  # fmt: skip
    """inner with more hyper-parameters, flags and states, and another function."""
    taken = _names(inner)
    place = locs.of_frame(sys._getframe(2))
    for own in [x.name for xs in (hypers, flags, states) for x in xs]:
        if own in taken:
            why, hint = f"{inner.name} has something of that name already", f"rename `{own}` in {inner.name}"
            raise UserError("E115", loc=place, name=own, why=why, hint=hint)
    at = len(inner.states) + 1  # states of the device stand before those of the host
    order = (*inner.order[:at], *(s.name for s in states), *inner.order[at:])
    return replace(
        inner,
        name=f"{name}_{inner.name}",
        class_name=f"{camel(name)}{inner.class_name}",
        doc=doc,
        cite=cite,
        like=None,
        loc=place,
        hypers=(*inner.hypers, *(replace(h, loc=place) for h in hypers)),
        flags=(*inner.flags, *flags),
        states=(*inner.states, *states),
        order=order,
        function=rule,
    )


def _names(spec: Spec) -> set[str]:
    """The names of its hyper-parameters and their parts, flags and states."""
    found = {x.name for xs in (spec.hypers, spec.flags, spec.kept) for x in xs}
    return found | {part for h in spec.hypers for part in h.parts}


def _free(inner: Spec, wrapper: str, name: str) -> str:
    """The name, with that of the wrapper before it where the rule has something of that name."""
    return f"{wrapper}_{name}" if name in _names(inner) else name


def lookahead(inner: Spec) -> Spec:
    """Any rule with slow weights: every k steps they go alpha of the way to p, and p begins again from there.

    alpha is called lookahead_alpha where the rule has an alpha of its own.

    The slow weights are a state, stored under the plan's format for states that start as the weight; the steps in
    between neither read nor write it.  Zhang et al. 2019, arXiv:1907.08610, algorithm 1.
    """
    kept, alpha_name = len(inner.states), _free(inner, "lookahead", "alpha")

    def rule(*given: Any, sync: bool, **options: Any) -> Any:
        options.pop("lookahead_k")
        alpha = options.pop(alpha_name)
        first = len(given) - len(inner.kept) - 1
        states, slow, host = given[first:][:kept], given[first + kept], given[first + kept + 1 :]
        result = inner.function(*given[:first], *states, *host, **options)
        p, *new = result if isinstance(result, tuple) else (result,)
        if sync:
            slow = slow + alpha * (p - slow)
            p = slow
        return (p, *new[:kept], slow, *new[kept:])

    hypers = (
        HyperDecl("lookahead_k", 5.0, ge=1, parts=("lookahead_k",)),
        HyperDecl(alpha_name, 0.5, ge=0, le=1, parts=(alpha_name,)),
    )
    way = f"every lookahead_k steps slow weights go {alpha_name} of the way to p, and p begins again there"
    doc = f"Lookahead around {inner.class_name}: {way}."
    return _made(
        inner, "lookahead", doc, "Zhang et al. 2019, arXiv:1907.08610", hypers,
        (FlagDecl("sync", every="lookahead_k"),), (StateDecl("slow", spaces.elem, False, None, "param"),), rule,
    )  # fmt: skip


def clipped(inner: Spec) -> Spec:
    """Any rule with its gradients clipped by their norm over the whole model, as clip_grad_norm_ does, in its kernels.

    g becomes g * min(1, max_norm / (norm + 1e-6)); the gradients in memory stay as they are.  max_norm is called
    clipped_max_norm where the rule has one of its own.
    Pascanu et al. 2013, arXiv:1211.5063.
    """
    name = _free(inner, "clipped", "max_norm")

    def rule(p: Any, g: Any, *given: Any, **options: Any) -> Any:
        max_norm = options.pop(name)
        g = g * minimum(1.0, max_norm / (model_norm(g) + 1e-6))
        return inner.function(p, g, *given, **options)

    clip = f"g * min(1, {name} / (norm + 1e-6))"
    doc = f"{inner.class_name} with gradients clipped by their norm over all parameters: {clip}."
    hypers = (HyperDecl(name, 1.0, gt=0, parts=(name,)),)
    return _made(inner, "clipped", doc, "Pascanu et al. 2013, arXiv:1211.5063", hypers, (), (), rule)


def low_rank(inner: Spec, state: str, *, when: str, rank: int = 8, **fixed: bool) -> Spec:
    """Any rule with an element-wise state x kept as left @ right + residual, of which plans keep the residual alone in
    few bits, to nearest; the other two, of rank r, are fp32.

    state  its name; of either sign, 0 before the first step
    when   the flags under which it is kept so, "matrix and not adamw": of matrices only
    fixed  values of flags that the new rule does not have
    Each step takes left = qr(x @ right.T), one power iteration from the step before, and right = left.T @ x.  Elements
    of gradients count as 1e14 at most, so that fp32 has these products.
    """
    words = when.split(" and ")
    plain = {s.name for s in inner.states if replace(s, loc=None) == StateDecl(s.name, spaces.elem)}
    flags = {f.name for f in inner.flags}
    for what, got, known in (
        ("a signed state of elements that is always there and starts at 0", {state}, plain),
        ('flags in when=, such as "matrix and not adamw"', {word.removeprefix("not ") for word in words}, flags),
        ("flags to be fixed", set(fixed), flags),
    ):
        if got - known:
            hint = f"{inner.name} has {', '.join(sorted(known)) or 'none'}"
            refused = f"low_rank takes {what}, got {', '.join(sorted(got - known))}"
            raise UserError("E113", loc=locs.of_frame(sys._getframe(1)), what=refused, hint=hint)
    kept, rank_name = len(inner.states), _free(inner, "low_rank", "rank")
    at = [s.name for s in inner.states].index(state)
    parts = [f"{state}_{x}" for x in ("residual", "left", "right")]

    def rule(*given: Any, **options: Any) -> Any:
        options.pop(rank_name)
        first = len(given) - len(inner.kept) - 3
        states, (residual, left, right), host = (
            list(given[first:][:kept]), given[first + kept :][:3], given[first + kept + 3 :]
        )  # fmt: skip
        factored = not isinstance(residual, Absent)
        if factored:
            states[at] = left @ right + residual
            p, g, *rest = given[:first]
            given = (p, g * minimum(1e14 / abs(g), 1), *rest, *given[first:])
        p, *new = inner.function(*given[:first], *states, *host, **options, **fixed)
        if factored:
            x, new[at] = new[at], given[first + at]
            left = qr(x @ right.T)
            right = left.T @ x
            residual = x - left @ right
        return (p, *new[:kept], residual, left, right, *new[kept:])

    unless = " or ".join(word[4:] if word.startswith("not ") else f"not {word}" for word in words)
    changed = replace(
        inner,
        states=tuple(replace(s, when=unless) if s.name == state else s for s in inner.states),
        flags=tuple(f for f in inner.flags if f.name not in fixed),
    )
    sides = [low_rank_state(side, rank=rank_name, when=when) for side in ("rows", "columns")]
    added = (StateDecl("", spaces.elem, False, when, 0.0, trait="residual"), *sides)
    hypers = (HyperDecl(rank_name, float(rank), ge=1, whole=True, parts=(rank_name,)),)
    doc = f"{inner.class_name} with `{state}` kept as a product of rank {rank_name} and a residual."
    return _made(
        changed, "low_rank", doc, inner.cite, hypers, (),
        tuple(replace(s, name=name) for s, name in zip(added, parts, strict=True)), rule,
    )  # fmt: skip
