"""A step of several stages as the host sees it: stretches of kernels, and what it does itself between them.

That is functions of whole matrices, which torch computes, and sums over the model, for which all buckets wait.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from torch import Tensor

from optgen.runtime.layout import layout, messages, sharding
from optgen.runtime.layout.workspace import Workspace, entries
from optgen.runtime.records import Stage, Temp, Variant
from optgen.runtime.work import matrices, workers
from optgen.runtime.work.bucket import Bucket
from optgen.runtime.work.counting import Control, HostScalars

Runner = Generator[list[Tensor] | messages.Exchange, Tensor | None, None]
"""Yields what each of its tensors adds to a sum (0-dim, fp32), and is sent the sum; or what it needs of other ranks."""


@dataclass(frozen=True)
class Stretch:
    """A part of a step: kernels, or what the host does between them.

    kind         "kernels"; "call" of a function of matrices; "sum" over the model; "ranks": sums over ranks
    begin, end   of kernels: the stages, those on the host not counted: 0, 2
    stage        of a call
    temps        the values that are summed: ("norm",)
    """

    kind: Literal["kernels", "call", "sum", "ranks"]
    begin: int = 0
    end: int = 0
    stage: Stage | None = None
    temps: tuple[str, ...] = ()


# Spaces whose values a stage may read.
_SEEN = {
    "row": {"row", "mat", "tensor", "model"},
    "col": {"col", "mat", "tensor", "model"},
    "mat": {"mat", "tensor", "model"},
    "tensor": {"tensor", "model"},
    "model": {"tensor", "model"},
}


@functools.lru_cache(maxsize=4096)
def parts(
    variant: Variant, cut: frozenset[str] = frozenset(), without: frozenset[str] = frozenset()
) -> tuple[Stretch, ...]:
    """The parts of a step, in order.

    cut      what of the tensors lies over several ranks: what is summed over that is summed over ranks as late as can
             be, together with what else then waits
    without  kernels that do not run
    """
    temps = {t.name: t for t in variant.temps}
    out: list[Stretch] = []
    waiting: list[str] = []
    begin = end = 0
    for k, stage in enumerate(variant.stages):
        seen = _SEEN.get(stage.space)
        between: list[Stretch] = []
        if waiting and (seen is None or any(temps[name].space in seen for name in waiting)):
            between, waiting = [Stretch("ranks", temps=tuple(waiting))], []
        if stage.on_host:
            between.append(Stretch("call", stage=stage))
        if between:
            out += [Stretch("kernels", begin, end)] * (end > begin) + between
            begin = end
        if not stage.on_host:
            if stage.kernel in without:
                out += [Stretch("kernels", begin, end)] * (end > begin)
                begin = end + 1
            end += 1
            waiting += [name for name in stage.temps if _is_over_ranks(temps[name], cut)]
        if wanted := _summed_after(variant, k):
            out += [Stretch("kernels", begin, end)] * (end > begin) + [Stretch("sum", temps=wanted)]
            begin = end
    return (*out, Stretch("kernels", begin, end)) if end > begin else tuple(out)


def _is_over_ranks(temp: Temp, cut: frozenset[str]) -> bool:
    """Return True for what is summed over a dimension of which ranks have parts."""
    return bool(temp.reduction) and temp.space != "model" and bool(sharding.reduced(temp.space, temp.source) & cut)


def _summed_after(variant: Variant, k: int) -> tuple[str, ...]:
    """Return what a level of stages adds to sums over the model, if stage k is its last one."""
    level, sums = variant.stages[k].level, set(variant.model_temps)
    if any(stage.level == level for stage in variant.stages[k + 1 : k + 2]):
        return ()
    return tuple(t for stage in variant.stages if stage.level == level for t in stage.temps if t in sums)


def drive(
    bucket: Bucket, room: Workspace, scalars: HostScalars | Control, kernels: Callable[[int, int], None]
) -> Runner:
    """The step of a bucket; `kernels(begin, end)` runs those stages over all its tensors.

    An error of a function of matrices is raised at the end, since other ranks take part in the rest.
    """
    variant, failure = bucket.variant, None
    position = {t.name: k for k, t in enumerate(variant.temps)}
    kept: workers.Kept = {}
    direct = matrices.direct(bucket, scalars) if matrices.replaceable(variant) else {}
    for part in parts(variant, bucket.cut, frozenset(map(attrgetter("kernel"), direct.values()))):
        if part.kind == "kernels":
            kernels(part.begin, part.end)
        elif part.kind == "call":
            assert part.stage is not None
            error = yield from matrices.work(bucket, room, part.stage, scalars, kept, direct)
            failure = failure or error
        elif part.kind == "ranks":
            yield messages.Exchange(sums=_over_ranks(bucket, room, part.temps))
        else:
            for name in part.temps:
                at = [k for _, k in _with_elements(bucket, room.offsets[position[name]])]
                total = yield [room.memory[k] for k in at]
                assert total is not None
                for k in at:
                    room.memory[k] = total
    if failure is not None:
        raise failure


def run(runner: Runner) -> None:
    """Run to the end; for steps in which nothing is summed over the model or over ranks."""
    for request in runner:
        if isinstance(request, list) or request.sums or request.moves:
            raise AssertionError("a sum over the model is taken together with the other buckets")


def _with_elements(bucket: Bucket, column: Sequence[int]) -> list[tuple[int, int]]:
    """Numbers of parameters that have elements, on any rank, each with its entry of a column of the room, which may
    leave out the others.

    Nothing is computed for a tensor without elements: its room would hold the total of the step before.
    """
    live = bucket.live
    if len(column) == len(live):
        return list(zip(live, column, strict=True))
    return [(i, column[i]) for i in live]


def _over_ranks(bucket: Bucket, room: Workspace, names: Sequence[str]) -> list[messages.Sum]:
    """Return the sums of values of which other ranks have parts, too."""
    found = []
    for k, temp in enumerate(bucket.variant.temps):
        if temp.name not in names:
            continue
        over = sharding.reduced(temp.space, temp.source)
        for i, at in _with_elements(bucket, room.offsets[k]):
            shard = bucket.shards[i]
            if shard is None or shard.whole:
                continue
            of, matrix = shard.layout, bucket.variant.matrix
            groups = [(of.mesh, m) for m in of.groups(over, matrix)]
            size = entries(temp.space, layout.matrix_shape(matrix, bucket.params[i].shape))
            if groups:
                value = room.memory[at : at + size]
                found.append(messages.Sum(shard.position, groups, temp.reduction.endswith("max"), value))
    return found
