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
    others_live  whether one of these is referred to by something else: a model, not only the optimizer
    places       positions of trainable parameters without one that nothing but the optimizer refers to
    """

    trained: int = 0
    others_live: bool = False
    places: set[int] = field(default_factory=set)


def look(groups: Sequence[Mapping[str, Any]], known: Collection[int], state: Mapping[Any, Any]) -> Found:
    """known   ids of parameters that the optimizer holds once more"""
    found = Found()
    position = -1
    for group in groups:
        params = group["params"]
        for i in range(len(params)):  # a loop over the parameters themselves would refer to them
            position += 1
            without = params[i].grad is None
            if without and not params[i].requires_grad:
                continue
            if not without:
                found.trained += 1
                if found.others_live:
                    continue
            # the list, the argument, and what the optimizer notes of it
            alone = sys.getrefcount(params[i]) <= 2 + (id(params[i]) in known) + (params[i] in state)
            if not without:
                found.others_live = not alone
            elif alone:
                found.places.add(position)
    return found


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
