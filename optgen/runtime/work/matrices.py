"""Functions of whole matrices between two sweeps: the matrices of one shape in a bucket are a batch."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from optgen.runtime.layout import layout, plans
from optgen.runtime.layout.messages import Exchange
from optgen.runtime.layout.sharded_states import Shard
from optgen.runtime.layout.sharding import Layout, field_layout
from optgen.runtime.layout.workspace import Workspace, entries
from optgen.runtime.records import Field, Stage, Variant
from optgen.runtime.records.warn import warn
from optgen.runtime.reference import matrices as functions
from optgen.runtime.reference.matrix_codecs import CODECS
from optgen.runtime.states import state
from optgen.runtime.work import counting, workers
from optgen.runtime.work.bucket import Bucket
from optgen.runtime.work.counting import Control

LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]

_WARNED = WeakTensorKeyDictionary()
"""States of parameters that a warning named: tensors that stay from step to step, as parts of DTensors do not."""

WHOLE = ("tensor", "model")
"""Spaces of one value for all matrices."""

Tensors = Sequence[tuple[int, int, torch.Size, list[Tensor]]]
"""Tensors of a bucket, or matrices of these: the number, that of the first matrix, the shape as matrices, and what is
read and stored."""


def work(
    bucket: Bucket, room: Workspace, stage: Stage, scalars: Sequence[float] | Control, key: int, kept: workers.Kept
) -> Generator[Exchange, Tensor | None, Exception | None]:
    """Call the function of a stage for every matrix, and keep what it returns: temps, and states in place.

    States in 8 bits are decoded before and encoded after it; what a step leaves as it is, no stage stores.

    kept   what this rank has as a worker from earlier functions of the step
    Of a tensor that lies over several ranks each matrix is worked on by one of them; returns its error.
    """
    at_once = bucket.workspace // 2  # bytes of fp32 matrices in one batch
    matrix, reads = bucket.variant.matrix, _operands(bucket.variant, stage)
    names, count = [*reads, *_columns(bucket.variant, stage.stores)], len(reads)
    known, wanted = ({j: x for j, x in enumerate(names) if x in some} for some in _around(bucket.variant, stage))
    own: list[tuple[int, int, torch.Size, list[Tensor]]] = []
    parted: list[workers.Parted] = []
    for n, i in enumerate(bucket.live):
        p, shard = bucket.params[i], bucket.shards[i] if bucket.shards else None
        shape = layout.matrix_shape(matrix, p.shape)
        values = [_value(bucket, room, name, i, n, shape) for name in names]
        if shard is None or not shard.shared:
            own.append((i, 0, shape, values))
        else:
            layouts = tuple(_layout(bucket, shard, name) for name in names)
            values = [x.view(p.shape) if of is shard.layout else x for x, of in zip(values, layouts, strict=True)]
            parted.append(workers.Parted(i, shard.layout, matrix, shard.workers, values, layouts, count, known, wanted))
    _call(bucket, stage, scalars, key, at_once, own)
    tensors = {x.number: x for x in parted}

    def call(
        keys: Sequence[workers.Key], operands: Sequence[list[Tensor]], shapes: Sequence[workers.Shapes]
    ) -> list[list[Tensor]]:
        found, results = [], []
        for (i, k), xs, made in zip(keys, operands, shapes, strict=True):
            x = tensors[i]
            results.append([y.new_empty(shape) for y, shape in zip(x.values[count:], made, strict=True)])
            elements = layout.matrix_shape(matrix, x.layout.shape)[-2:]
            values = zip((*xs, *results[-1]), x.layouts, strict=True)
            found.append((i, k, elements, [y.view(-1, *elements) if of is x.layout else y for y, of in values]))
        _call(bucket, stage, scalars, key, at_once, found)
        return results

    return (yield from workers.run(parted, call, at_once, kept))


def _around(variant: Variant, stage: Stage) -> tuple[set[str], set[str]]:
    """Return the fields that workers have from earlier functions of a step, and those that later ones read."""
    k, seen = variant.stages.index(stage), set[str]()
    for x in variant.stages[:k]:
        of = {*_operands(variant, x), *_columns(variant, x.stores)} if x.space == "whole" else set[str]()
        seen = seen | of if of else seen - {*_columns(variant, x.stores), *x.temps}
    return seen, {y for x in variant.stages[k + 1 :] if x.space == "whole" for y in _operands(variant, x)}


def _call(
    bucket: Bucket, stage: Stage, scalars: Sequence[float] | Control, key: int, at_once: int, tensors: Tensors
) -> None:
    """Call the function of a stage for the matrices of tensors, in batches of one shape."""
    function = _Function(bucket, stage, scalars, key)
    alone = torch.are_deterministic_algorithms_enabled()
    for (rows, columns, *extents), found in function.alike(tensors).items():
        most = 1 if alone else max(at_once // (4 * rows * columns), 1)
        for start in range(0, len(found), most):
            function.call(found[start : start + most], extents)


class _Function:
    """The function of a stage with its scalars, between how values are stored and how they are computed with.

    reads, stores  the fields and temps of its operands and results
    drawn          whether it, or a result that is rounded, takes the streams of random numbers
    """

    def __init__(self, bucket: Bucket, stage: Stage, scalars: Sequence[float] | Control, key: int) -> None:
        self.bucket, self.stage, self.key, self.eager = bucket, stage, key, bucket.variant.eager
        self.function = plans.matrix_function(bucket.plan, stage.kernel)
        numbers = scalars.rounded if isinstance(scalars, Control) else scalars.__getitem__
        self.given = [numbers(k) for k in stage.scalars]
        self.reads, self.stores = _operands(bucket.variant, stage), _columns(bucket.variant, stage.stores)
        self.drawn = "stream" in stage.extents or not self.eager.random.isdisjoint(stage.stores)

    def alike(self, tensors: Tensors) -> dict[tuple[int, ...], list[tuple[int, tuple[Tensor, ...]]]]:
        """Return the matrices of each shape and extents: the number of the tensor, operands, streams and results."""
        found: dict[tuple[int, ...], list[tuple[int, tuple[Tensor, ...]]]] = {}
        for i, k, shape, values in tensors:
            sizes = {"rows": shape[-2], "columns": shape[-1], "elements": self.bucket.numel(i), "stream": 0}
            if self.drawn:
                streams = functions.streams(self.bucket.streams[i], shape[:-2], self.bucket.device, k)
                values.insert(len(self.reads), streams)
            size = (*shape[-2:], *(sizes[x] for x in self.stage.extents))
            each = (x.reshape(x.shape[:-2].numel(), *x.shape[-2:]).unbind() for x in values)
            found.setdefault(size, []).extend((i, x) for x in zip(*each, strict=True))
        return found

    def call(self, batch: Sequence[tuple[int, tuple[Tensor, ...]]], extents: Sequence[int]) -> None:
        """Write the results for matrices of one shape."""
        some = list(zip(*(x for _, x in batch), strict=True))
        count = len(self.reads) + self.drawn
        stacked = [torch.stack(x) if len(x) > 1 else x[0] for x in some[:count]]
        fields, streams = dict(zip(self.reads, stacked, strict=False)), stacked[-1]
        try:
            results = self._results(batch, fields, streams, extents)
        except LinAlgError as error:
            bad = [i for i, x in batch if not all(y.isfinite().all() for y in x[:count])]
            raise failure(error, self.bucket, bad or [i for i, _ in batch]) from error
        self._encode(results, fields, streams)
        for kept, name in zip(some[count:], self.stores, strict=True):
            torch._foreach_copy_(list(kept), list(fields[name].unbind()) if len(kept) > 1 else [fields[name]])

    def _results(
        self, batch: Sequence[tuple[int, object]], fields: Mapping[str, Tensor], streams: Tensor, extents: Sequence[int]
    ) -> Sequence[Tensor]:
        taken = [self._decoded(x, fields) for x in self.stage.reads]
        sizes = zip(self.stage.extents, extents, strict=True)
        last = [streams if x == "stream" else float(size) for x, size in sizes]
        with Noting(self.bucket, [i for i, _ in batch]):
            made = self.function(*taken, *self.given, *last)
        return [made] if isinstance(made, Tensor) else made

    def _decoded(self, name: str, fields: Mapping[str, Tensor]) -> Tensor:
        """Return an operand in fp32, or as it is."""
        if name not in self.eager.matrices:
            return fields[name]
        return CODECS[self.eager.matrices[name]].decode(*map(fields.__getitem__, self.bucket.variant.coded(name)))

    def _encode(self, results: Sequence[Tensor], fields: dict[str, Tensor], streams: Tensor) -> None:
        """Put the results into `fields`, as they are stored; what others are relative to comes first."""
        variant, traits = self.bucket.variant, self.eager.matrices
        named = dict(zip(self.stage.stores, results, strict=True))
        for name in sorted(self.stage.stores, key=self.eager.over.__contains__):
            new: tuple[Tensor, ...] = (named[name],)
            if name in traits:
                noise = functions.rounding(name, self.key, streams) if name in self.eager.random else None
                base = [fields[x] for x in variant.owned(self.eager.over.get(name, ""))]
                new = CODECS[traits[name]].encode(*new, *base, noise=noise)
            fields |= zip(_columns(variant, [name]), new, strict=True)


class Noting:
    """A warning, once for each, of parameters whose matrices `finite` replaces inside.  Waits for the device then.

    numbers  of the parameters in the bucket: one for each matrix of a batch, or one for all
    """

    def __init__(self, bucket: Bucket, numbers: Sequence[int]) -> None:
        self.bucket, self.numbers, self.noted = bucket, numbers, list[Tensor]()

    def __enter__(self) -> None:
        self.token = functions.NOTED.set(self.noted)

    def __exit__(self, *_: object) -> None:
        functions.NOTED.reset(self.token)
        if not self.noted or counting.capturing():
            return
        bucket, several = self.bucket, len(self.numbers) > 1
        found = torch.stack([x if several else x.any()[None] for x in self.noted]).any(0).tolist()
        for i in dict.fromkeys(itertools.compress(self.numbers, found)):
            known = next(x for x in bucket.wholes.get(i, bucket.states[i]).values() if isinstance(x, Tensor))
            if known in _WARNED:
                continue
            _WARNED[known] = True
            warn(
                f"step {bucket.step + 1}, {state.label(bucket.params[i], bucket.names[i])}: a matrix that the rule "
                f"makes of gradients is not finite, and the rule goes on with what it has in its place, such as the "
                f"basis of the step before.  Clip gradients; a NaN in one makes the weight NaN, too: load a "
                f"checkpoint. Further steps say nothing of this parameter"
            )


def failure(error: Exception, bucket: Bucket, numbers: Sequence[int]) -> Exception:
    """Return an error of torch.linalg with the parameters of a bucket in which it came up."""
    labels = dict.fromkeys(state.label(bucket.params[i], bucket.names[i]) for i in numbers)
    return LinAlgError(f"{', '.join(labels)}: {error}")


def _operands(variant: Variant, stage: Stage) -> list[str]:
    """Return the fields and temps that a stage reads, with those that what it reads and stores is relative to."""
    bases = [variant.eager.over[x] for x in (*stage.reads, *stage.stores) if x in variant.eager.over]
    return _columns(variant, list(dict.fromkeys([*stage.reads, *bases])))


def _columns(variant: Variant, names: Sequence[str]) -> list[str]:
    """Return the fields of states, and temps as they are."""
    return [x for name in names for x in variant.owned(name) or (name,)]


def _value(bucket: Bucket, room: Workspace, name: str, i: int, n: int, shape: torch.Size) -> Tensor:
    """Return a state or a temp of a parameter, the n-th that has elements, as matrices (..., rows, columns)."""
    variant = bucket.variant
    for k, temp in enumerate(variant.temps):
        if temp.name == name:
            size, column = entries(temp.space, shape, temp.wide), room.offsets[k]
            at = column[i if len(column) == len(bucket.params) else n]
            value = room.memory[at : at + size]
            if temp.space in WHOLE:  # which every matrix is given
                return value.view(1, 1).expand(*shape[:-2], 1, 1)
            return value.view(layout.value_shape(temp.space, shape))
    kept: Tensor = bucket.states[i][name]
    return kept if kept.ndim else kept.expand(*shape[:-2], 1, 1)


def _layout(bucket: Bucket, shard: Shard, name: str) -> Layout:
    """Return how a state or a temp of a parameter lies over the ranks."""
    variant = bucket.variant
    found = next((f for f in variant.fields if f.name == name), None)
    if found is None:
        space = next(t.space for t in variant.temps if t.name == name)
        found = Field(name, "float32", space="mat" if space in WHOLE else space, matrix=variant.matrix)
    return field_layout(found, shard.layout)
