"""A step of several stages as the host sees it: stretches of kernels, and what it does itself between them.

That is functions of whole matrices, which torch computes, and sums over the model, for which all buckets wait.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from optgen.runtime import layout, matrices
from optgen.runtime.bucket import Bucket
from optgen.runtime.control import Control
from optgen.runtime.records import Stage, Variant
from optgen.runtime.workspace import Workspace

Runner = Generator[list[Tensor], Tensor, None]
"""Yields what each of its tensors adds to a sum (0-dim, fp32); is sent the sum."""


@dataclass(frozen=True)
class Part:
    """kernels: stages [begin, end), functions of matrices not counted; call: one of those; sum: temps of the model."""

    kind: Literal["kernels", "call", "sum"]
    begin: int = 0
    end: int = 0
    stage: Stage | None = None
    temps: tuple[str, ...] = ()


def parts(variant: Variant) -> tuple[Part, ...]:
    """The parts of a step, in order."""
    sums = set(variant.model_temps)
    out: list[Part] = []
    begin = end = 0
    for k, stage in enumerate(variant.stages):
        following = variant.stages[k + 1] if k + 1 < len(variant.stages) else None
        if stage.space == "call":
            if end > begin:
                out.append(Part("kernels", begin, end))
            out.append(Part("call", stage=stage))
            begin = end
            continue
        end += 1
        if following is None or following.level != stage.level:
            level = [s for s in variant.stages if s.level == stage.level]
            wanted = tuple(t for s in level for t in s.temps if t in sums)
            if wanted:
                out += [Part("kernels", begin, end), Part("sum", temps=wanted)]
                begin = end
    if end > begin:
        out.append(Part("kernels", begin, end))
    return tuple(out)


def drive(
    bucket: Bucket, room: Workspace, scalars: Sequence[float] | Control, kernels: Callable[[int, int], None]
) -> Runner:
    """The step of a bucket; `kernels(begin, end)` runs those stages over all its tensors."""
    variant = bucket.variant
    position = {t.name: k for k, t in enumerate(variant.temps)}
    for part in parts(variant):
        if part.kind == "kernels":
            kernels(part.begin, part.end)
        elif part.kind == "call":
            assert part.stage is not None
            _call(bucket, room, part.stage, position[part.stage.temps[0]], scalars)
        else:
            for name in part.temps:
                at = [k for _, k in _with_elements(bucket, room.offsets[position[name]])]
                total = yield [room.memory[k] for k in at]
                for k in at:
                    room.memory[k] = total


def run(runner: Runner) -> None:
    """To the end, where nothing is summed over the model."""
    for _ in runner:
        raise AssertionError("a sum over the model is taken together with the other buckets")


def _with_elements(bucket: Bucket, column: Sequence[int]) -> list[tuple[Tensor, int]]:
    """Parameters that have elements, each with its entry of a column of the room, which may leave out the others.

    Nothing is computed for a tensor without elements: its room would hold the total of the step before.
    """
    live = [p for p in bucket.params if p.numel()]
    if len(column) == len(live):
        return list(zip(live, column, strict=True))
    return [(p, at) for p, at in zip(bucket.params, column, strict=True) if p.numel()]


def _call(bucket: Bucket, room: Workspace, stage: Stage, temp: int, scalars: Sequence[float] | Control) -> None:
    """A function of whole matrices of every tensor, in place."""
    numbers = scalars.rounded if isinstance(scalars, Control) else scalars.__getitem__
    function: Callable[..., Tensor] = getattr(matrices, stage.kernel)
    names = bucket.variant.scalars if bucket.variant.kernel_scalars is None else bucket.variant.kernel_scalars
    given = [numbers(names.index(x)) if isinstance(x, str) else x for x in stage.given]
    for p, at in _with_elements(bucket, room.offsets[temp]):
        x = room.memory[at : at + -(-p.numel() // 2)].view(torch.bfloat16)[: p.numel()]
        x = x.view(layout.matrix_shape(bucket.variant.matrix, p.shape))
        x.copy_(function(x, *given))
