"""States set back to their first values, while a run goes on: `reset_states`."""

from __future__ import annotations

import fnmatch
import math
import operator
from collections.abc import Callable, Collection
from typing import Any

import torch

from optgen.runtime.checkpoint import checkpoint, weights
from optgen.runtime.layout import sharded_states, sharding
from optgen.runtime.options import options, overrides
from optgen.runtime.options.entries import Entry
from optgen.runtime.records import fed_name
from optgen.runtime.states import state

Rows = list[tuple[Any, Entry]]


def _noting(answer: Callable[[float, float], bool]) -> Any:
    """Return a comparison that notes if its answer at the first step is another one than late in a run."""

    def compare(count: _Count, other: float) -> bool:
        count.begins |= answer(1.0, other) != answer(math.inf, other)
        return answer(float(count), other)

    return compare


class _Count(float):
    """A count of steps; `begins`: a rule compared it whose first steps are of another kind."""

    begins = False
    __lt__, __le__, __gt__, __ge__ = map(_noting, (operator.lt, operator.le, operator.gt, operator.ge))


@torch.no_grad()
def reset_states(self: Any, patterns: str | Collection[str] | None = None, keep: Collection[str] = ("step",)) -> None:
    """Set what the rule keeps of its parameters to its first values, in place; weights stay, to their last bit.

    patterns  only of parameters or modules of these names ("*.lm_head"), as in `overrides`; None: of all
    keep      states that stay, by the rule's names ("exp_avg"); "step": the count of steps and the numbers that follow
              from it.  () begins anew, with the corrections of a first step

    Inputs, and where some parameters are reset the values that the whole model shares, stay.  ValueError, before
    anything changes, for a name that nothing has, and where a rule whose first steps are of another kind is to keep the
    count.
    """
    self._refuse_midway("reset_states()")
    self._refuse_unready("reset_states()")
    what, keep = f"{type(self).__name__}.reset_states", {keep} if isinstance(keep, str) else set(keep)
    rows = [(one, entry) for one, entry, _ in self._matched() if state.of(one.state, entry.p)]
    if patterns is not None:
        rows = _called(what, rows, [patterns] if isinstance(patterns, str) else patterns)
    _refuse(what, rows, keep)
    for one, entry in rows:
        _reset(one, entry, keep, patterns is None)
    if patterns is None and "step" not in keep:
        for group in self.param_groups:
            group.pop(options.SUMS, None)


def _refuse(what: str, rows: Rows, keep: set[str]) -> None:
    """Raise ValueError for a name of no state, and for a count that cannot stay."""
    variants = [checkpoint.select(type(one), e.group, e.p, e.name)[2] for one, e in rows]
    known = {"step"}.union(*(variant.states for variant in variants))
    if rows and (extra := sorted(keep - known)):
        raise ValueError(f"{what}: keep: no state is called {extra[0]!r}; there are {', '.join(sorted(known))}")
    for (one, entry), variant in zip(rows, variants, strict=True):
        count, hypers = _Count(9), options.hypers_of(type(one), entry.group)
        variant.host[0](count, 1.0, **hypers, **dict(variant.host_states))
        if "step" in keep and (count.begins or any(flag.first for flag in one.FLAGS)):
            raise ValueError(f"{what}: {type(one).__name__} has first steps of another kind: call it with keep=()")


def _called(what: str, rows: Rows, patterns: Collection[str]) -> Rows:
    """Return the rows of parameters whose names match; ValueError for a pattern that none does."""
    names = [overrides.names_of(str(entry.name)) for _, entry in rows]
    for pattern in patterns:
        if not any(fnmatch.filter(own, pattern) for own in names):
            raise ValueError(f"{what}: {pattern!r} matches no parameter that has states")
    return [row for row, own in zip(rows, names, strict=True) if any(fnmatch.filter(own, x) for x in patterns)]


def _reset(one: Any, entry: Entry, keep: Collection[str], everywhere: bool) -> None:
    _, plan, variant = checkpoint.select(type(one), entry.group, entry.p, entry.name)
    p, kept = entry.p, one.state[entry.p]
    state.check(variant, p, kept, entry.name)
    stay = {f.name for f in variant.fields if f.owner in {"p", *keep, *one.INPUTS}}
    stay |= set() if everywhere else set(variant.of_model)
    if "param" in variant.init.values():
        p = weights.of_entry(one, entry)
    parts = None
    if sharding.is_sharded(entry.p):
        parts = sharded_states.ShardedStates.of(entry.p, variant)
        p = parts.beside("its weight", p)
    made = state.create(plan, variant, p, {name: kept[name] for name in stay}, entry.group, None, 0, parts)
    for name in set(variant.names) - stay:
        sharding.local(kept[name]).copy_(made[name])
    if "step" not in keep:
        fed = set(map(fed_name, one.INPUTS))
        kept.update({"step": 0, **{name: value for name, value in variant.host_states if name not in fed}})
