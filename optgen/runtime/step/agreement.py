"""The agreement of ranks on who has gradients, before they wait for one another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from optgen.runtime.layout import messages, plans, sharded_states, sharding
from optgen.runtime.options import entries
from optgen.runtime.options.entries import Entry, Owner
from optgen.runtime.records import Variant
from optgen.runtime.states import state
from optgen.runtime.step.sort import Choice, GroupChoices
from optgen.runtime.work import counting
from optgen.runtime.work.workers import Sending, Stack


def gradients_elsewhere(owner: Owner, given: Sending, compared: set[int]) -> dict[Tensor, Tensor]:
    """Return zeros for each of `given` that has a gradient on other ranks only, which wait for this one.

    compared   parameters that all ranks hold and were found to have with equal states; those of this step come in
    Raises ValueError, on all ranks, where these differ on one, or their gradients do.
    """
    if not given:
        return {}
    if counting.capturing():
        raise RuntimeError(
            f"{owner.cls.__name__}: a CUDA graph is being captured, but ranks agree on who has gradients at each "
            f"step of this rule over parts of tensors, for which the host waits: leave step() out of the graph"
        )
    whole = {p: of for p, (of, _) in given.items() if not of.dims()}
    for mesh in dict.fromkeys(of.mesh for of in whole.values()):
        _compare(owner, mesh, [p for p, of in whole.items() if of.mesh == mesh], compared)
    sending = {p: of.mesh for p, (of, _) in given.items() if of.dims()}
    found = messages.agreed(list(sending.items()))
    return {p: torch.zeros_like(p) for p, has in zip(sending, found, strict=True) if has and p.grad is None}


def _compare(owner: Owner, mesh: Any, params: Sequence[Tensor], compared: set[int]) -> None:
    """Raise ValueError if ranks that hold the same parameters have other gradients of them, or other weights or states
    to begin with: one rank's results would become those of all."""
    sums = []
    for p in params:
        new = [] if id(p) in compared else [p, *owner.states.get(p, {}).values()]
        for some in ([] if p.grad is None else [p.grad], new):
            here = [sharding.local(x).detach() for x in some if isinstance(x, Tensor)]
            sums.append(messages.checksum(here, sharding.local(p).device) + len(here))
    wrong = messages.unlike(mesh, sums)
    if True in wrong:
        at, of_state = divmod(wrong.index(True), 2)
        name = next(e.name for e in entries.of(owner.groups) if e.p is params[at])
        what = ("gradient is", "weight or its states are")[of_state]
        raise ValueError(
            f"{owner.cls.__name__}: {state.label(params[at], name)} is to be the same on {mesh.size()} ranks, which "
            f"share the work on its matrices, but its {what} not: average gradients over these ranks before step(), "
            f"and begin from one checkpoint; optimizers of ranks that train apart are made without `replicas`"
        )
    compared |= set(map(id, params))


def _can_share(choice: Choice, steps: Sequence[Variant]) -> bool:
    """Return True if ranks that hold a parameter whole share work on its matrices; not where its steps may be part of a
    graph, which waits for no host."""
    return not (choice.counted or choice.sent) and any(stage.on_host for v in steps for stage in v.stages)


def senders(owner: Owner, listed: Sequence[Entry]) -> Sending:
    """Return the trainable parameters in whose step, this or another one, ranks send one another something; and their
    matrices.

    Which step this is follows from how many were made, so that ranks have to count alike.
    """
    found: Sending = {}
    if sharding.kind() is None:
        return found
    number, choices = -1, None
    for entry in listed:
        of = sharding.layout_over(entry.p, owner.replicas) if entry.p.requires_grad else None
        if of is None or of.mesh.size() == 1 or of.coordinate is None:
            continue
        if choices is None or entry.number != number:
            number, choices = entry.number, GroupChoices(owner.cls, entry.group)
        choice = choices.find(entry)
        variant = choice.variant
        steps = list(plans.at_steps(choice.plan, variant, owner.cls.FLAGS))
        if not (of.dims() or _can_share(choice, steps)):
            continue
        if any(v.stages for v in steps) or sharded_states.is_gathered(variant, of):
            found[entry.p] = of, Stack.of(of, steps, choice.rows)
    return found
