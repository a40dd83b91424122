"""Functions of whole matrices between two sweeps: the matrices of one shape in a bucket are a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from optgen.runtime.layout import layout, plans
from optgen.runtime.layout.workspace import Workspace, entries
from optgen.runtime.records import Stage
from optgen.runtime.work.bucket import Bucket
from optgen.runtime.work.counting import Control


def work(bucket: Bucket, room: Workspace, stage: Stage, scalars: Sequence[float] | Control, at_once: int) -> None:
    """Call the function of a stage for every matrix, and keep what it returns: temps, and states in place.

    at_once   bytes of fp32 matrices in one batch
    """
    variant = bucket.variant
    function = getattr(plans.reference(bucket.plan, variant).module, stage.kernel)
    numbers = scalars.rounded if isinstance(scalars, Control) else scalars.__getitem__
    given = [numbers(k) for k in stage.scalars]
    alike: dict[tuple[int, ...], list[list[Tensor]]] = {}
    for i, p in enumerate(bucket.params):
        if p.numel():
            shape = layout.matrix_shape(variant.matrix, p.shape)
            sizes = {"rows": shape[-2], "columns": shape[-1], "elements": p.numel()}
            values = [_value(bucket, room, name, i, shape) for name in (*stage.reads, *stage.stores)]
            key = (*shape[-2:], *(sizes[x] for x in stage.extents))
            alike.setdefault(key, []).extend(map(list, zip(*values, strict=True)))
    alone = torch.are_deterministic_algorithms_enabled()
    count = len(stage.reads)
    for (rows, columns, *extents), found in alike.items():
        most = 1 if alone else max(at_once // (4 * rows * columns), 1)
        for start in range(0, len(found), most):
            some = list(zip(*found[start : start + most], strict=True))
            taken = [torch.stack(x) if len(x) > 1 else x[0] for x in some[:count]]
            made = function(*taken, *given, *map(float, extents))
            for kept, new in zip(some[count:], [made] if isinstance(made, Tensor) else made, strict=True):
                torch._foreach_copy_(list(kept), list(new.unbind()) if len(kept) > 1 else [new])


def _value(bucket: Bucket, room: Workspace, name: str, i: int, shape: torch.Size) -> tuple[Tensor, ...]:
    """Return a state or a temp of a parameter as its matrices (rows, columns), one after the other."""
    variant = bucket.variant
    for k, temp in enumerate(variant.temps):
        if temp.name == name:
            size = entries(temp.space, shape, temp.wide)
            at = room.offsets[k][sum(x.numel() > 0 for x in bucket.params[:i])]
            found = room.memory[at : at + size].view(layout.value_shape(temp.space, shape))
            break
    else:
        found = bucket.states[i][name]
    return found.reshape(-1, *found.shape[-2:]).unbind()
