"""Sums over the model while gradients are released: the step of a parameter takes those of the step before.

What it adds to the sums of this one is noted.  The gradient of the smallest parameter that has come waits for `step()`,
which so knows the sums of this step: they are what that parameter takes, and what states of the whole model are made
of, such as Prodigy's d.  While no sums are known, as at the first step, all gradients wait; and at the second one where
sums of the first are of other things, as DoG's are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from optgen.runtime.options import options
from optgen.runtime.options.entries import Entry, Owner
from optgen.runtime.records import Variant
from optgen.runtime.states import state
from optgen.runtime.step.model_sums import ModelSums, Parts, total, value_of
from optgen.runtime.work.bucket import Bucket


class PreviousSums(ModelSums):
    """The sums of the parameters that wait for `step()`, with those of the others.

    wanted  False where rules that need sums are refused, so that there are none
    noted   of each parameter that made its step, by position: the key of its bucket, and what it adds to each sum
    waits   the parameter whose gradient waits
    former  the sums of the step before
    found   those of this one
    before  the states of the model before it
    """

    def __init__(self, title: str, sums: str | None) -> None:
        if sums not in (None, "previous"):
            raise ValueError(f"{title}: sums must be 'previous' or None, got {sums!r}")
        self.title, self.wanted = title, sums is not None
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self.noted: dict[int, tuple[object, list[list[Tensor]]]] = {}
        self.waits: Any = None
        self.former: Tensor | None = None
        self.found: list[Tensor] = []
        self.before: dict[str, Tensor] = {}

    def refuse_again(self, e: Entry) -> None:
        """Raise RuntimeError for a parameter that has its gradient of this step."""
        if e.position in self.noted or (self.waits is not None and self.waits.p is e.p):
            raise RuntimeError(
                f"{self.title}: {state.label(e.p, e.name)} has a gradient again before step(), which ends a step of "
                f"sums='previous': call it after each backward, or give accumulate="
            )

    def due(self, one: Any, owner: Owner) -> Any:
        """Return the parameter that makes its step now that `one` has its gradient; None if none does."""
        if not (one.variant.model_temps or one.variant.of_model):
            return one
        if not self._serves(one, owner):
            return None
        if self.waits is None or self.waits.p.grad is None:
            self.waits = one
            return None
        if (one.p.numel() or math.inf) < (self.waits.p.numel() or math.inf):
            one, self.waits = self.waits, one
        return one

    def _serves(self, one: Any, owner: Owner) -> bool:
        """Return True if sums and states of the step before are known, and of what the parameter needs now."""
        # A checkpoint may have had its groups in another order.
        self.former = next((group[options.SUMS] for group in owner.groups if options.SUMS in group), None)
        if self.former is None or len(self.former) != len(one.variant.model_temps):
            return False
        if not self.before:
            values = {name: value_of(owner.states, name) for name in one.variant.of_model}
            self.before = {name: value.clone() for name, value in values.items() if value is not None}
        made = state.step_count(owner.states.get(one.p, {}).get("step", 0))
        begins = made == 1 and _begins_otherwise(one.variant, options.hypers_of(owner.cls, one.entry.group))
        return len(self.before) == len(one.variant.of_model) and not begins

    def total(self, parts: Parts) -> Tensor:
        """Return the sum in the order of an ordinary step: bucket after bucket."""
        every = {position: (key, values[len(self.found)]) for position, (key, values) in self.noted.items()}
        for bucket, values in parts:
            lines = [bucket.line_of[i] for i in bucket.live]
            several = len(values) != len(bucket.positions)
            places = [bucket.lines.firsts[k] for k in lines] if several else bucket.positions
            for place, line, x in zip(places, lines, values, strict=True):
                every.setdefault(place, (_key(bucket, line, bucket.lines.groups[line]), []))[1].append(x)
        buckets: dict[object, list[Tensor]] = {}
        for _, (key, values) in sorted(every.items(), key=lambda item: item[0]):
            buckets.setdefault(key, []).extend(values)
        self.found.append(total([x for values in buckets.values() for x in values]))
        return self.found[-1]

    def end(self, groups: list[dict[str, Any]]) -> None:
        """End a step, whose sums are used at the next one; where one is no number, the one before."""
        if self.found:
            now = torch.stack(self.found)
            former = now if self.former is None or len(self.former) != len(now) else self.former.to(now.device)
            for group in groups[1:]:
                group.pop(options.SUMS, None)
            groups[0][options.SUMS] = torch.where(now.isfinite(), now, former)
        self.begin()


class OfOne(ModelSums):
    """The sums of a parameter that makes its step within backward."""

    def __init__(self, sums: PreviousSums, number: int) -> None:
        self.sums, self.number = sums, number

    def total(self, parts: Parts) -> Tensor:
        """Note what the parameter adds, and return the sum of the step before."""
        ((bucket, values),) = parts
        _, noted = self.sums.noted.setdefault(bucket.positions[0], (_key(bucket, 0, self.number), []))
        noted.append([x.clone() for x in values])
        assert self.sums.former is not None
        return self.sums.former[len(noted) - 1]

    def spread(self, states: Mapping[Any, Any], buckets: Sequence[Bucket]) -> None:
        """Set the states of the model back to what they were before the step: its own sums are not known yet."""
        for s in (s for bucket in buckets for s in bucket.states):
            for name, value in self.sums.before.items():
                s[name].copy_(value)


def _begins_otherwise(variant: Variant, hypers: Mapping[str, Any]) -> bool:
    """Return True if numbers that the sums are made with are others at a parameter's first step than at the second."""
    last = max((stage.level for stage in variant.stages if {*stage.temps} & {*variant.model_temps}), default=-1)
    first, second = (variant.host[0](step, 1.0, **hypers, **dict(variant.host_states)) for step in (1, 2))
    return any(first[k] != second[k] for stage in variant.stages if stage.level <= last for k in stage.scalars)


def _key(bucket: Bucket, line: int, number: int) -> object:
    """Return what tells lines of an ordinary step apart; number: of the group."""
    return (number, *bucket.kind, bucket.lines.steps[line], *bucket.lines.hosts[line])
