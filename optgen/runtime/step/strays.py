"""Parameters that an optimizer has and no model: steps that train nothing, said once instead of never.

A model that is sharded, wrapped, rebuilt or filled by assignment after its optimizer was made has other Parameter
objects.  The optimizer's own then never get a gradient again, which looks like a frozen part of a model.  They differ
from it in that nothing else refers to them.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

IDLE = 2
"""Steps in a row without any gradient after which something is said: one may be there for a scheduler."""


@dataclass
class Found:
    """What a step finds before it begins.

    trained      how many parameters have a gradient
    others_live  whether one of these is referred to by something else: a model, not only the optimizer; asked only
                 where there are such places
    places       positions of trainable parameters without one that nothing but the optimizer refers to
    """

    trained: int = 0
    others_live: bool = False
    places: set[int] = field(default_factory=set)


def look(groups: Sequence[Mapping[str, Any]], known: Collection[int], state: Mapping[Any, Any]) -> Found:
    """known   ids of parameters that the optimizer holds once more"""
    found, lacking = Found(), []
    for group in groups:  # at every step that is made the long way: first only what is cheap
        lacking.append([i for i, p in enumerate(group["params"]) if p.grad is None])
        found.trained += len(group["params"]) - len(lacking[-1])
    if not any(lacking):
        return found
    start = 0
    for group, places in zip(groups, lacking, strict=True):
        params = group["params"]
        found.places.update(start + i for i in places if params[i].requires_grad and _alone(params, i, known, state))
        start += len(params)
    if found.places:
        found.others_live = any(
            params[i].grad is not None and not _alone(params, i, known, state)
            for params in (group["params"] for group in groups)
            for i in range(len(params))
        )
    return found


def _alone(params: Sequence[Any], i: int, known: Collection[int], state: Mapping[Any, Any]) -> bool:
    """Whether nothing but the optimizer refers to a parameter; a variable that held it would."""
    # the list, the argument, and what the optimizer notes of it
    return sys.getrefcount(params[i]) <= 2 + (id(params[i]) in known) + (params[i] in state)


def nothing_refers(owner: str, labels: Sequence[str], trained: int) -> str:
    """What is said of such parameters; `trained`: how many others had a gradient."""
    which = f"{labels[0]}" + (f" and {len(labels) - 1} more" if len(labels) > 1 else "")
    return (
        f"{owner}: nothing but this optimizer refers to {which}, and no gradient can come"
        + (f" ({trained} other parameters had one)" if trained else "; this step changed nothing")
        + ".  The model was sharded, wrapped, rebuilt or filled by assignment after the optimizer was made, and has "
        "other parameters now: make the optimizer from the model as it is (and load the old one's state_dict() into it)"
    )


def never_a_gradient(owner: str, count: int) -> str:
    return (
        f"{owner}: {IDLE} steps, and none of its {count} parameters has had a gradient yet: these steps changed "
        f"nothing.  Is backward() called before step(), and zero_grad() after it?  Does the loss depend on these very "
        f"parameters, or on a copy of the model, or on one that was sharded or rebuilt after the optimizer was made?"
    )
