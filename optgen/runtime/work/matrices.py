"""Functions of whole matrices between two sweeps: the matrices of one shape in a bucket are a batch."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from optgen.runtime.layout import layout, plans
from optgen.runtime.layout.sharding import Exchange
from optgen.runtime.layout.workspace import Workspace, entries
from optgen.runtime.records import Stage
from optgen.runtime.reference import matrices as functions
from optgen.runtime.work import workers
from optgen.runtime.work.bucket import Bucket
from optgen.runtime.work.counting import Control

Tensors = Sequence[tuple[int, int, torch.Size, list[Tensor]]]
"""Tensors of a bucket, or matrices of these: the number, that of the first matrix, the shape as matrices, and what is
read and stored."""


def work(
    bucket: Bucket, room: Workspace, stage: Stage, scalars: Sequence[float] | Control, at_once: int
) -> Generator[Exchange, Tensor | None, Exception | None]:
    """Call the function of a stage for every matrix, and keep what it returns: temps, and states in place.

    at_once   bytes of fp32 matrices in one batch
    Of a tensor that lies over several ranks each matrix is worked on by one of them; returns its error.
    """
    matrix, count = bucket.variant.matrix, len(stage.reads)
    live = [i for i in range(len(bucket.params)) if bucket.numel(i)]
    own: list[tuple[int, int, torch.Size, list[Tensor]]] = []
    parted: list[workers.Parted] = []
    for n, i in enumerate(live):
        p, shard = bucket.params[i], bucket.shards[i] if bucket.shards else None
        shape = layout.matrix_shape(matrix, p.shape)
        values = [_value(bucket, room, name, i, n, shape) for name in (*stage.reads, *stage.stores)]
        if shard is None or shard.whole or not shard.layout.dims():
            own.append((i, 0, shape, values))
        else:
            values = [x.view(p.shape) for x in values]  # of elements: see sharding.mode
            parted.append(workers.Parted(i, shard.layout, matrix, shard.workers, values[:count], values[count:]))
    _call(bucket, stage, scalars, at_once, own)
    kept = {x.number: x.results for x in parted}

    def call(keys: Sequence[workers.Key], operands: Sequence[list[Tensor]]) -> list[list[Tensor]]:
        results = [[y.new_empty(xs[0].shape) for y in kept[i]] for (i, _), xs in zip(keys, operands, strict=True)]
        shapes = [layout.matrix_shape(matrix, xs[0].shape) for xs in operands]
        found = [
            (i, k, shape, [x.view(shape) for x in (*xs, *ys)])
            for (i, k), shape, xs, ys in zip(keys, shapes, operands, results, strict=True)
        ]
        _call(bucket, stage, scalars, at_once, found)
        return results

    return (yield from workers.run(parted, call, at_once))


def _call(bucket: Bucket, stage: Stage, scalars: Sequence[float] | Control, at_once: int, tensors: Tensors) -> None:
    """Call the function of a stage for the matrices of tensors, in batches of one shape."""
    variant = bucket.variant
    function = getattr(plans.reference(bucket.plan, variant).module, stage.kernel)
    numbers = scalars.rounded if isinstance(scalars, Control) else scalars.__getitem__
    given = [numbers(k) for k in stage.scalars]
    alike: dict[tuple[int, ...], list[list[Tensor]]] = {}
    drawn = "stream" in stage.extents
    for i, k, shape, values in tensors:
        sizes = {"rows": shape[-2], "columns": shape[-1], "elements": bucket.numel(i), "stream": 0}
        if drawn:
            values.insert(len(stage.reads), functions.streams(bucket.streams[i], values[-1], k))
        key = (*shape[-2:], *(sizes[x] for x in stage.extents))
        each = (x.reshape(-1, *x.shape[-2:]).unbind() for x in values)
        alike.setdefault(key, []).extend(map(list, zip(*each, strict=True)))
    alone = torch.are_deterministic_algorithms_enabled()
    count = len(stage.reads) + drawn
    for (rows, columns, *extents), found in alike.items():
        most = 1 if alone else max(at_once // (4 * rows * columns), 1)
        for start in range(0, len(found), most):
            some = list(zip(*found[start : start + most], strict=True))
            taken = [torch.stack(x) if len(x) > 1 else x[0] for x in some[:count]]
            streams = taken.pop() if drawn else None
            sizes_of = zip(stage.extents, extents, strict=True)
            made = function(*taken, *given, *(streams if x == "stream" else float(size) for x, size in sizes_of))
            for kept, new in zip(some[count:], [made] if isinstance(made, Tensor) else made, strict=True):
                torch._foreach_copy_(list(kept), list(new.unbind()) if len(kept) > 1 else [new])


def _value(bucket: Bucket, room: Workspace, name: str, i: int, n: int, shape: torch.Size) -> Tensor:
    """Return a state or a temp of a parameter, the n-th that has elements, as matrices (..., rows, columns)."""
    variant = bucket.variant
    for k, temp in enumerate(variant.temps):
        if temp.name == name:
            size, column = entries(temp.space, shape, temp.wide), room.offsets[k]
            at = column[i if len(column) == len(bucket.params) else n]
            return room.memory[at : at + size].view(layout.value_shape(temp.space, shape))
    value: Tensor = bucket.states[i][name]
    return value
