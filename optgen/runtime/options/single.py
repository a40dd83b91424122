"""The options of single parameters: plans from `overrides`, numbers of blocks from `blocks`, marks of modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from optgen.runtime.layout import plans
from optgen.runtime.layout.plans import Label, PlanOption, Recorded
from optgen.runtime.options import blocks, entries, overrides
from optgen.runtime.options.entries import Entry, Owner
from optgen.runtime.records import marks
from optgen.runtime.records.warn import warn
from optgen.runtime.states import state


def names(tensors: Sequence[Tensor], params: Any, kept: Any, first: int) -> list[Label]:
    """Return what the parameters of a group that is to come will be called.

    params   the group's "params": names are those of (name, parameter) pairs
    kept     its "param_names", as the group of another optimizer has them
    first    the position of its first parameter over all groups
    """
    given = params if isinstance(params, list) else []
    found = {id(p[1]): str(p[0]) for p in given if isinstance(p, tuple)}
    if not found and isinstance(kept, (list, tuple)) and len(kept) == len(tensors):
        return list(kept)
    return [found.get(id(p), first + i) for i, p in enumerate(tensors)]


def decided_plans(
    cls: Any, own: overrides.Rules | None, given: Any, plan: PlanOption, tensors: list[Tensor], labels: list[Label]
) -> dict[str, Recorded]:
    """Return {"overrides": the plans of single parameters in a group that is to come}, or {}.

    own     rules of the optimizer
    given   the group's own: rules, or what another optimizer recorded in it.  Rules of the optimizer and marks of
            modules follow
    """
    asked = _requested(cls, overrides.Rules, overrides.recorded, own, given, tensors, labels)
    marked = marks.parameters()
    asked = [a or (overrides.FP32 if id(p) in marked else None) for a, p in zip(asked, tensors, strict=True)]
    decided = overrides.decided(cls, plan, tensors, labels, asked)
    return {"overrides": decided} if decided else {}


def decided_blocks(
    cls: Any, own: blocks.Rules | None, given: Any, tensors: list[Tensor], labels: list[Label]
) -> dict[str, blocks.Recorded]:
    """Return {"blocks": those of single parameters in a group that is to come}, or {}; arguments as above."""
    if not cls.BLOCKS:
        return {}
    asked = _requested(cls, blocks.Rules, blocks.recorded, own, given, tensors, labels)
    decided = blocks.decided(cls, tensors, labels, asked)
    return {"blocks": decided} if decided else {}


def _requested(
    cls: Any,
    kind: type[overrides.Rules],
    read: Callable[[type, Any], Sequence[tuple[Label, Any]]],
    own: overrides.Rules | None,
    given: Any,
    tensors: list[Tensor],
    labels: list[Label],
) -> list[Any]:
    """Return what a group says of each of its parameters, else what rules of the optimizer say, else None.

    read   checks what another optimizer recorded in a group
    """
    recorded: Mapping[Label, Any] = {}
    of_group = kind(cls)
    if isinstance(given, Mapping):
        of_group = kind(cls, given, None if own is None else own.model)
        of_group.tables = None if own is None else own.tables
    elif given is not None:
        recorded = dict(read(cls, given))
        extra = [label for label in recorded if label not in labels]
        if extra:
            raise ValueError(
                f"{cls.__name__}: {kind.OPTION} of a group: it has no parameter {extra[0]!r} (positions are counted "
                f"over all groups)"
            )
    asked = [recorded.get(label) for label in labels]
    for found in (of_group, own):
        if found is not None and found.rules:
            members = found.members(tensors, labels)
            asked = [a or b for a, b in zip(asked, found.apply(members), strict=True)]
            if found is of_group:
                found.refuse_unused(members)
    return asked


def take_marks(owner: Owner, since: int) -> int:
    """Record fp32 states for parameters of modules that were marked since, up to their first step.

    since   the number of the newest mark that was seen; returns that of the newest one
    """
    newest = marks.newest()
    if newest == since:
        return since
    marked, late = marks.parameters(since=since), list[Entry]()  # copies of marked modules count as such
    added: dict[int, list[Entry]] = {}
    for entry in entries.of(owner.groups):
        if id(entry.p) in marked and entry.name not in plans.own(entry.group):
            stepped = state.of(owner.states, entry.p)
            (late if stepped else added.setdefault(entry.number, [])).append(entry)
    found: list[tuple[dict[str, Any], Recorded]] = []
    for number, some in added.items():
        group = owner.groups[number]
        fp32 = [overrides.FP32] * len(some)
        found.append(
            (group, overrides.decided(owner.cls, group["plan"], [e.p for e in some], [e.name for e in some], fp32))
        )
    for group, decided in found:
        if decided:
            group["overrides"] = (*group.get("overrides", ()), *decided)
    if late:
        warn(
            f"{owner.cls.__name__}: {state.label(late[0].p, late[0].name)}"
            + (f" and {len(late) - 1} more" if len(late) > 1 else "")
            + " had made steps when keep_states_fp32 was called for its module: its states stay as they are.  Call "
            "it before the first step",
            owner.cls,
        )
    return newest
