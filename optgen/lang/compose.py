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
from optgen.lang.declare import FlagDecl, HyperDecl, StateDecl
from optgen.lang.reductions import model_norm
from optgen.lang.spec import Spec
from optgen.lang.values import minimum
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
        hypers=(*inner.hypers, *hypers),
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
