"""The agreement of ranks on who has gradients, before they wait for one another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from optgen.runtime.layout import messages, plans, sharded_states, sharding
from optgen.runtime.options.entries import Entry
from optgen.runtime.step.sort import GroupChoices
from optgen.runtime.work import counting
from optgen.runtime.work.workers import Stack


def gradients_elsewhere(cls: Any, sending: Iterable[Any]) -> dict[Tensor, Tensor]:
    """Return zeros for each of `senders` that has a gradient on other ranks only, which wait for this one."""
    if not sending:
        return {}
    if counting.capturing():
        raise RuntimeError(
            f"{cls.__name__}: a CUDA graph is being captured, but ranks agree on who has gradients at each "
            f"step of this rule over parts of tensors, for which the host waits: leave step() out of the graph"
        )
    found = messages.agreed(list(sending))
    return {p: torch.zeros_like(p) for p, has in zip(sending, found, strict=True) if has and p.grad is None}


def senders(cls: Any, listed: Sequence[Entry]) -> dict[Any, list[Stack]]:
    """Return the trainable parameters in whose step, this or another one, ranks send one another something; and their
    matrices.

    Which step this is follows from how many were made, so that ranks have to count alike.
    """
    sharded = sharding.kind()
    if sharded is None:
        return {}
    found: dict[Any, list[Stack]] = {}
    number, choices = -1, None
    for entry in listed:
        if not isinstance(entry.p, sharded) or not entry.p.requires_grad:
            continue
        if choices is None or entry.number != number:
            number, choices = entry.number, GroupChoices(cls, entry.group)
        choice = choices.find(entry)
        variant = choice.variant
        of = sharding.layout_of(entry.p)
        if not of.dims():
            continue
        steps = list(plans.at_steps(choice.plan, variant, cls.FLAGS))
        if any(v.stages for v in steps) or sharded_states.is_gathered(variant, of):
            found[entry.p] = Stack.of(of, steps, choice.rows)
    return found
