"""The steps of a bucket in eager torch: the strict tiles, one parameter after the other, on any device."""

from __future__ import annotations

from optgen.runtime.layout import layout, plans, workspace
from optgen.runtime.layout.workspace import Workspace
from optgen.runtime.reference.eager import scalars as on_device
from optgen.runtime.reference.run import Tensors
from optgen.runtime.work import staged
from optgen.runtime.work.bucket import Bucket
from optgen.runtime.work.counting import HostScalars
from optgen.runtime.work.staged import Runner


def runner(bucket: Bucket, scalars: HostScalars) -> Runner:
    """Make the step of a bucket whose variant has a step in strict maths."""
    variant = bucket.variant
    step = plans.reference(bucket.plan, variant)
    shapes = [layout.matrix_shape(variant.matrix, p.shape) for p in bucket.params]
    room = workspace.make(variant, shapes, bucket.device, bucket.pool)
    found = [_tensors(bucket, i, room) for i in bucket.live]
    lines = [on_device(bucket.params[0], *scalars.of(k)) if scalars.values else () for k in range(len(bucket.lines))]

    def kernels(begin: int, end: int) -> None:
        for i, x in zip(bucket.live, found, strict=True):
            k = bucket.line_of[i]
            step.run(begin, end, x, lines[k], scalars.keys[k])

    if variant.stages:
        yield from staged.drive(bucket, room, scalars, kernels)
    else:
        kernels(0, 1)


def _tensors(bucket: Bucket, i: int, room: Workspace) -> Tensors:
    """Return a parameter with its gradient, states and temps, seen as matrices."""
    variant, p = bucket.variant, bucket.params[i]
    shape = layout.matrix_shape(variant.matrix, p.shape)
    wide = {f.name for f in variant.stored.values() if f.per == 1 and f.space == "elem"}
    fields = {name: bucket.states[i][name] for name in variant.names} | bucket.views(i)
    x = Tensors(
        p.view(shape),
        bucket.grads[i].view(shape),
        {name: t.view(shape) if name in wide else t for name, t in fields.items()},
        place=None if bucket.places is None else bucket.places[i][:3],
        stream=bucket.streams[i],
    )
    x.temps = {t.name: room.values(t, [at[i]], [shape])[0] for t, at in zip(variant.temps, room.offsets, strict=False)}
    return x
