"""Values that all parameters share: sums over the model, and states with one value for all of it.

A rule that needs a sum over the model does its step in parts: each bucket runs until it needs the sum, then all of them
wait for it.  A state of the model stands in every parameter's state, so that it is saved and loaded like any other; all
of them are the same number.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from optgen.runtime import cpu, launch, plans, sums
from optgen.runtime.bucket import Bucket
from optgen.runtime.records import Variant
from optgen.runtime.staged import Runner


def runner(bucket: Bucket, tables: Any, scalars: Sequence[float], step_key: int) -> Runner:
    """The step of a bucket, in parts."""
    if tables is None:
        return reference_runner(bucket, scalars, step_key)
    if tables.table is not None:
        return cpu.runner(bucket, tables.table, scalars, step_key)
    return launch.runner(bucket, tables, scalars, step_key)


def reference_runner(bucket: Bucket, scalars: Sequence[float], step_key: int) -> Runner:
    """In eager torch, one parameter beside the other."""
    module = plans.part(bucket.plan, "reference")
    function: Callable[..., Generator[Tensor, Tensor, None]] = getattr(module, bucket.variant.step_name)
    names = bucket.variant.names
    parts = [
        function(p, g, *(s[name] for name in names), *scalars, step_key, stream)
        for p, g, s, stream in zip(bucket.params, bucket.grads, bucket.states, bucket.streams, strict=True)
    ]
    values = [next(part) for part in parts]
    while True:
        total = yield values
        values = []
        for part in parts:
            try:
                values.append(part.send(total.to(bucket.device)))
            except StopIteration:
                continue
        if not values:
            return


def run(runners: Iterable[Runner]) -> None:
    """All parts of all runners; sums are taken in the order of the parameters (see sums.py)."""
    waiting = [(r, next(r)) for r in runners]
    while waiting:
        device = waiting[0][1][0].device
        total = sums.in_lanes(torch.stack([v.to(device).reshape(()) for _, values in waiting for v in values]))
        after = []
        for r, _ in waiting:
            try:
                after.append((r, r.send(total)))
            except StopIteration:
                continue
        waiting = after


def _of_model(variant: Variant) -> list[str]:
    return [f.name for f in variant.fields if f.space == "model"]


def begin(states: Mapping[Any, Mapping[str, Any]], new: Sequence[dict[str, Any]], variants: Sequence[Variant]) -> None:
    """States that are made now take over what the model has come to."""
    names = {name for variant in variants for name in _of_model(variant)}
    if not names:
        return
    for made, variant in zip(new, variants, strict=True):
        for name in _of_model(variant):
            old = next((s[name] for s in states.values() if name in s and s.get("step")), None)
            if old is not None:
                made[name].copy_(old)


def spread(states: Mapping[Any, Mapping[str, Any]], buckets: Sequence[Bucket]) -> None:
    """Parameters that were not in the step, or have no elements, take over what the model has come to."""
    live = [(b.variant, s) for b in buckets for p, s in zip(b.params, b.states, strict=True) if p.numel()]
    stepped = {id(s) for _, s in live}
    values = {name: s[name] for variant, s in reversed(live) for name in _of_model(variant)}
    for s in states.values():
        if id(s) not in stepped:
            for name in values.keys() & s.keys():
                s[name].copy_(values[name])
