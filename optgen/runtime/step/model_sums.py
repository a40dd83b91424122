"""Values that all parameters share: sums over the model, and states with one value for all of it.

A rule that needs a sum over the model does its step in parts: each bucket runs until it needs the sum, then all of them
wait for it.  A state of the model stands in every parameter's state, so that it is saved and loaded like any other; all
of them are the same number.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from optgen.runtime.layout import messages, sharding
from optgen.runtime.records import sums
from optgen.runtime.states import state
from optgen.runtime.step.plan import PreparedBucket
from optgen.runtime.work.bucket import Bucket
from optgen.runtime.work.staged import Runner


def check(buckets: Iterable[Bucket]) -> None:
    """Raise RuntimeError if parameters of one step need different sums over the model, or not in one order."""
    kinds = {b.variant.model_temps: b for b in buckets}
    if len(kinds) > 1:
        first, second = sorted(kinds.values(), key=lambda b: not b.variant.model_temps)[:2]
        raise RuntimeError(
            f"{state.label(first.params[0], first.names[0])} needs the sums over the model "
            f"{', '.join(first.variant.model_temps)}, but {state.label(second.params[0], second.names[0])} needs "
            f"{', '.join(second.variant.model_temps) or 'none'}: all groups need the same, since each is over every "
            f"parameter that has a gradient; take it outside of `if` in the rule, on its own line, or set the flags "
            f"that change it alike"
        )


Parts = Sequence[tuple[Bucket, list[Tensor]]]
"""Buckets, each with the numbers that its tensors add to a sum."""


def total(values: Sequence[Tensor]) -> Tensor:
    """Return a sum, in order."""
    if not values:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    return sums.in_lanes(torch.stack([v.to(values[0].device).reshape(()) for v in values]))


class ModelSums:
    """The sums over the model of a step, and the states that are made of them."""

    def total(self, parts: Parts) -> Tensor:
        """Return the sum, in the order of the lines."""
        placed: list[tuple[int, Tensor]] = []
        for bucket, values in parts:
            placed += zip([bucket.lines.firsts[bucket.line_of[i]] for i in bucket.live], values, strict=True)
        return total([value for _, value in sorted(placed, key=itemgetter(0))])

    def spread(self, states: Mapping[Any, Any], buckets: Sequence[Bucket]) -> None:
        """Give all parameters the values of the model's states: those of the first one in the step.

        Others may have missed the step, have no elements, have made another number of steps, or stand in a group with
        hyper-parameters of its own; a state of the model is one number all the same.
        """
        live = [(b.variant, b.states[i]) for b in buckets for i in b.live]
        values = {name: s[name] for variant, s in reversed(live) for name in variant.of_model}
        for s in state.of_parameters(states):
            for name in values.keys() & s.keys():
                if s[name] is not values[name]:
                    sharding.local(s[name]).copy_(values[name])


def run(waiting: Sequence[PreparedBucket], of: ModelSums) -> None:
    """Make the steps of buckets that wait for one another, those of one turn after the other.

    After an error the other runners go on, for which other ranks wait; the first error is raised at the end.
    """
    failures: list[Exception] = []
    with torch.no_grad():
        for turn in sorted({one.bucket.turn for one in waiting}):
            _run([one for one in waiting if one.bucket.turn == turn], of, failures)
    if failures:
        raise failures[0]
    for one in waiting:
        one.bucket.finish(one.counted.after)


def _run(ready: Sequence[PreparedBucket], of: ModelSums, failures: list[Exception]) -> None:
    """Run the buckets of a turn; sums are taken in the order of the parameters (see sums.py), group by group.

    What runners need of other ranks comes first, in one message for all of them: a sum over the model is one that all
    wait for.
    """
    runners = {one.runner(): one.bucket for one in ready}
    waiting = _on([(r, None) for r in runners], failures)
    while waiting:
        exchanges = {id(r): request for r, request in waiting if isinstance(request, messages.Exchange)}
        if exchanges:
            messages.serve(exchanges.values())
            served = _on([(r, None) for r, _ in waiting if id(r) in exchanges], failures)
            following = {id(r): (r, request) for r, request in served}
            waiting = [following.get(id(r), (r, x)) for r, x in waiting if id(r) in following or id(r) not in exchanges]
        else:
            answer = of.total([(runners[r], values) for r, values in waiting])
            waiting = _on([(r, answer) for r, _ in waiting], failures)


def _on(runners: Iterable[tuple[Runner, Tensor | None]], failures: list[Exception]) -> list[tuple[Runner, Any]]:
    """Send each runner the answer that it waits for; return those that ask for more, with their requests."""
    after = []
    for r, answer in runners:
        try:
            after.append((r, r.send(answer)))
        except StopIteration:
            pass
        except Exception as error:
            failures.append(error)
    return after


def begin(
    states: Mapping[Any, Any],
    new: Sequence[dict[str, Any]],
    fresh: Sequence[tuple[Bucket, int]],
    groups: Sequence[Mapping[str, Any]],
) -> None:
    """Give states that are made now the values of the model's states.

    fresh   their parameters: bucket, and position in it
    Raises RuntimeError if the model has none yet, and groups would have it begin with different numbers.
    """
    for name in dict.fromkeys(name for b, _ in fresh for name in b.variant.of_model):
        theirs = [(made, b, i) for made, (b, i) in zip(new, fresh, strict=True) if name in b.variant.of_model]
        if (old := value_of(states, name)) is None:
            _refuse_unequal(name, [(b, i) for _, b, i in theirs], groups)
            continue
        for made, _, _ in theirs:
            made[name].copy_(old)


def value_of(states: Mapping[Any, Any], name: str) -> Tensor | None:
    """Return the value of a state of the model; None before the first step."""
    made = (s for s in state.of_parameters(states) if name in s)
    return next((sharding.local(s[name]) for s in made if isinstance(s["step"], Tensor) or s["step"]), None)


def _refuse_unequal(name: str, fresh: Sequence[tuple[Bucket, int]], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise RuntimeError if a state of the model begins with a hyper-parameter in which groups differ."""
    starts: dict[tuple[str, float], tuple[Bucket, int]] = {}
    for b, i in fresh:
        hyper = b.variant.init.get(name)
        if isinstance(hyper, str):
            group = groups[b.lines.groups[b.line_of[i]]]
            starts.setdefault((hyper, ctypes.c_float(float(group[hyper])).value), (b, i))
    if len(starts) > 1:
        (one, (a, i)), (other, (b, j)) = list(starts.items())[:2]
        raise RuntimeError(
            f"{state.label(a.params[i], a.names[i])} begins {name} with {one[0]}={one[1]:g}, but "
            f"{state.label(b.params[j], b.names[j])} with {other[0]}={other[1]:g}: {name} is one value of the whole "
            f"model, so groups that begin together need the same {one[0]}"
        )
