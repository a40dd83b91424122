"""Functions of whole matrices between two sweeps: the matrices of one shape and the same numbers in a bucket are a
batch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Generator, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from optgen.runtime.layout import layout, plans
from optgen.runtime.layout.messages import Exchange
from optgen.runtime.layout.sharding import Layout, field_layout
from optgen.runtime.layout.workspace import Workspace
from optgen.runtime.records import Field, Stage, Variant
from optgen.runtime.records.warn import warn
from optgen.runtime.reference import matrices as functions
from optgen.runtime.states import state
from optgen.runtime.work import counting, workers
from optgen.runtime.work.bucket import Bucket
from optgen.runtime.work.counting import Control, HostScalars

LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]

_WARNED = WeakTensorKeyDictionary()
"""States of parameters that a warning named: tensors that stay from step to step, as parts of DTensors do not."""

LARGE = 2**16
"""Elements from which matrices on a CPU are taken one at a time."""

SMALLEST = 2.0**-126
"""The smallest factor with which BLAS is called: by 0 it does not multiply, and so loses a NaN."""

WHOLE = ("tensor", "model")
"""Spaces of one value for all matrices."""

Tensors = Sequence[tuple[int, int, torch.Size, list[Tensor]]]
"""Tensors of a bucket, or matrices of these: the number, that of the first matrix, the shape as matrices, and what is
read and stored."""


@functools.lru_cache(maxsize=4096)
def replaceable(variant: Variant) -> Mapping[str, Stage]:
    """Return the sweeps in whose place functions of matrices can read gradients, or add the last product of a step to
    fp32 weights, by the temp that each stores or adds."""
    found, temps = dict[str, Stage](), {t.name for t in variant.temps}
    adds = variant.param == "float32" and not variant.views
    for stage in variant.stages:
        for name in temps.intersection((*stage.reads, *stage.stores)) if stage.linear else ():
            others = [s for s in variant.stages if s is not stage and name in (*s.reads, *s.stores)]
            fits = len(stage.linear) == 1 or (adds and (*others, stage) == variant.stages[-2:])
            if fits and all(s.space == "whole" for s in others):
                found[name] = stage
    return found


def direct(bucket: Bucket, scalars: HostScalars | Control) -> dict[str, Stage]:
    """Return the sweeps that a step of C++ kernels leaves to functions of matrices, as `replaceable` does.

    Gradients are copied where they are scaled.  Several ranks make all sweeps, and so does a step under
    torch.use_deterministic_algorithms, which has the same bits on any number of them.
    """
    if bucket.backend != "cpp" or bucket.cut or bucket.workers or torch.are_deterministic_algorithms_enabled():
        return {}
    plain, lines = bucket.grad_dtype is torch.float32, range(len(bucket.lines))
    return {
        name: s
        for name, s in replaceable(bucket.variant).items()
        if len(s.linear) == 2 or (plain and all(scalars.rounded(k, *s.linear) == 1 for k in lines))
    }


def work(
    bucket: Bucket, room: Workspace, stage: Stage, scalars: HostScalars | Control, kept: workers.Kept,
    direct: Mapping[str, Stage],
) -> Generator[Exchange, Tensor | None, Exception | None]:  # fmt: skip
    """Call the function of a stage for every matrix, and keep what it returns: temps, and states in place.

    States in 8 bits are decoded before and encoded after it; what a step leaves as it is, no stage stores.

    kept     what this rank has as a worker from earlier functions of the step
    direct   the sweeps that it replaces
    Of a tensor that lies over several ranks each matrix is worked on by one of them; returns its error.
    """
    variant, live, function = bucket.variant, bucket.live, _Function(bucket, stage, scalars, direct)
    values = function.values
    shapes = [layout.matrix_shape(variant.matrix, bucket.params[i].shape) for i in live]
    columns = {name: _column(bucket, room, name, live, shapes) for name in dict.fromkeys(values.names)}
    for name in direct.keys() & columns.keys():
        some = bucket.params if name in stage.stores else bucket.grads
        columns[name] = [some[i].detach().view(shape) for i, shape in zip(live, shapes, strict=True)]
    own: list[tuple[int, int, torch.Size, list[Tensor]]] = []
    parted: list[workers.Parted] = []
    rows = zip(*map(columns.__getitem__, values.names), strict=True)
    for i, shape, row in zip(live, shapes, rows, strict=True):
        tensors, found = list(row), _shared(bucket, i) if bucket.workers else None
        if found is None:
            own.append((i, 0, shape, tensors))
        else:
            over, chosen = found
            layouts = tuple(_layout(bucket, over, name) for name in values.names)
            like = bucket.params[i].shape
            tensors = [x.view(like) if of is over else x for x, of in zip(tensors, layouts, strict=True)]
            kind = over, variant.matrix, chosen
            parted.append(workers.Parted(i, *kind, tensors, layouts, values.reads, values.cached, values.to_cache))
    function.apply(own)
    by_number = {x.number: x for x in parted}

    def call(
        keys: Sequence[workers.Key], operands: Sequence[list[Tensor]], shapes: Sequence[workers.Shapes]
    ) -> list[list[Tensor]]:
        found, results = [], []
        for (i, k), xs, made in zip(keys, operands, shapes, strict=True):
            x = by_number[i]
            results.append([y.new_empty(shape) for y, shape in zip(x.values[x.reads :], made, strict=True)])
            elements = layout.matrix_shape(variant.matrix, x.layout.shape)[-2:]
            pairs = zip((*xs, *results[-1]), x.layouts, strict=True)
            found.append((i, k, elements, [y.view(-1, *elements) if of is x.layout else y for y, of in pairs]))
        function.apply(found)
        return results

    return (yield from workers.run(parted, call, function.at_once, kept))


def _shared(bucket: Bucket, i: int) -> tuple[Layout, tuple[int, ...]] | None:
    """Return the layout and the workers of a parameter each of whose matrices is worked on by one rank; None if each
    rank works on all of them, as on parts that it has put together."""
    found, shard = bucket.workers.get(i), bucket.shards[i]
    return None if found is None or (shard is not None and shard.whole and found[0].dims()) else found


class _Values(NamedTuple):
    """The fields and temps of a function.

    names      of operands, then of results: ("basis", "g_whole", "turned")
    reads      the number of operands: 2
    cached     by position, those that workers have from earlier functions of a step: {0: "basis"}
    to_cache   by position, those that later functions read
    """

    names: tuple[str, ...]
    reads: int
    cached: Mapping[int, str] = {}
    to_cache: Mapping[int, str] = {}


@functools.lru_cache(maxsize=4096)
def _values(variant: Variant, stage: Stage) -> _Values:
    if stage.space == "call":  # of a temp, in place
        return _Values((*stage.temps, *stage.temps), 1)
    reads = _operands(variant, stage)
    names = (*reads, *_columns(variant, stage.stores))
    k, earlier = variant.stages.index(stage), set[str]()
    for x in variant.stages[:k]:
        if x.space == "whole":
            earlier |= {*_operands(variant, x), *_columns(variant, x.stores)}
        else:
            earlier -= {*_columns(variant, x.stores), *x.temps}
    later = {y for x in variant.stages[k + 1 :] if x.space == "whole" for y in _operands(variant, x)}
    cached, to_cache = ({j: name for j, name in enumerate(names) if name in some} for some in (earlier, later))
    return _Values(names, len(reads), cached, to_cache)


class _Function:
    """The function of a stage, between how values are stored and how they are computed with.

    given          of each line of the bucket: the scalars, and the step key if something is drawn, else 0
    takes, makes   the states and temps of its operands and results
    drawn          True if it, or a result that is rounded, takes the streams of random numbers
    at_once        bytes of matrices in one batch, in fp32 or, in place, in bf16
    """

    def __init__(
        self, bucket: Bucket, stage: Stage, scalars: HostScalars | Control, direct: Mapping[str, Stage]
    ) -> None:
        self.scalars, self.direct = scalars, direct
        self.bucket, self.stage, self.values = bucket, stage, _values(bucket.variant, stage)
        self.in_place, self.eager, self.at_once = stage.space == "call", bucket.variant.eager, bucket.workspace // 2
        self.takes, self.makes, self.drawn = stage.reads, stage.stores, False
        if self.in_place:
            self.takes = self.makes = stage.temps
            self.function = getattr(functions, stage.kernel)
        else:
            self.function = plans.matrix_function(bucket.plan, stage.kernel)
            self.drawn = "stream" in stage.extents or not self.eager.random.isdisjoint(stage.stores)
        self.given: list[tuple[tuple[float, ...], int]] = []
        for line in range(len(bucket.lines)):
            found, positions = [], iter(stage.scalars)
            for x in stage.given if self.in_place else itertools.repeat(None, len(stage.scalars)):
                found.append(scalars.rounded(line, next(positions)) if x is None else x)
            key = scalars.keys[line] if self.drawn and not isinstance(scalars, Control) else 0
            self.given.append((tuple(found), key))

    def apply(self, tensors: Tensors) -> None:
        """Write the results for the matrices of tensors, in batches of one shape.

        A batch has the bits of its matrices one at a time where torch multiplies each by itself, as on CPUs; under
        torch.use_deterministic_algorithms, which is for the same bits in every run, matrices are taken one at a time,
        and so are large ones there: to put them together costs more than it saves.
        """
        alone, size = torch.are_deterministic_algorithms_enabled(), 2 if self.in_place else 4
        for ((rows, columns, *extents), given), found in self._alike(tensors).items():
            large = rows * columns >= LARGE and self.bucket.device.type == "cpu"
            most = 1 if alone or large else max(self.at_once // (size * rows * columns), 1)
            for start in range(0, len(found), most):
                self._call(found[start : start + most], extents, *given)

    def _alike(self, tensors: Tensors) -> Alike:
        """Return the matrices of each shape, extents and given numbers."""
        found = Alike()
        for i, k, shape, values in tensors:
            size: tuple[int, ...] = tuple(shape[-2:])
            if self.stage.extents:
                sizes = {"rows": shape[-2], "columns": shape[-1], "elements": self.bucket.numel(i), "stream": 0}
                size += tuple(sizes[x] for x in self.stage.extents)
            if self.drawn:
                streams = functions.streams(self.bucket.streams[i], shape[:-2], self.bucket.device, k)
                values.insert(self.values.reads, streams)
            each = []  # in a loop: a comprehension is a call, of which a usual step has few
            for x in values:
                each.append(x.reshape(x.shape[:-2].numel(), *x.shape[-2:]).unbind())
            matrices = list(zip(*each, strict=True))
            alike = size, self.given[self.bucket.line_of[i]]
            found.setdefault(alike, []).extend(zip([i] * len(matrices), matrices, strict=True))
        return found

    def _call(
        self, batch: Sequence[tuple[int, tuple[Tensor, ...]]], extents: Sequence[int],
        scalars: tuple[float, ...], key: int,
    ) -> None:  # fmt: skip
        """Write the results for matrices of one shape and line of `given`."""
        names, reads = self.values.names, self.values.reads
        some = list(zip(*map(itemgetter(1), batch), strict=True))
        count, stacked = reads + self.drawn, []
        for x in some[:count]:
            stacked.append(x[0] if len(x) == 1 else torch.stack(x))
        fields, streams = dict(zip(names[:reads], stacked, strict=False)), stacked[-1]
        memory = dict(zip(names[reads:], some[count:], strict=True))
        if self.in_place:
            fields[self.makes[0]] = self.function(*stacked, *scalars)
        else:
            self._compute(batch, fields, memory, streams, extents, scalars, key)
        for name, kept in memory.items():
            if fields[name].data_ptr() != kept[0].data_ptr():
                torch._foreach_copy_(list(kept), fields[name].unbind() if len(kept) > 1 else [fields[name]])

    def _compute(
        self, batch: Sequence[tuple[int, tuple[Tensor, ...]]], fields: dict[str, Tensor],
        memory: Mapping[str, Sequence[Tensor]], streams: Tensor, extents: Sequence[int],
        scalars: tuple[float, ...], key: int,
    ) -> None:  # fmt: skip
        """Put the results into `fields`, as they are stored."""
        numbers, sizes = [i for i, _ in batch], zip(self.stage.extents, extents, strict=True)
        last = [streams if x == "stream" else float(size) for x, size in sizes]
        try:
            with Noting(self.bucket, numbers):
                taken = map(self._decoded, self.takes, itertools.repeat(fields))
                made = self.function(*taken, *scalars, *last)
        except LinAlgError as error:
            count = self.values.reads + self.drawn
            bad = [i for i, x in batch if not all(y.isfinite().all() for y in x[:count])]
            raise failure(error, self.bucket, bad or numbers) from error
        results = zip(self.makes, [made] if len(self.makes) == 1 else made, strict=True)
        computed = {name: self._computed(name, x, numbers, memory.get(name, ())) for name, x in results}
        self._encode(computed, fields, streams, key)

    def _computed(
        self, name: str, x: Tensor | functions.Product, numbers: Sequence[int], memory: Sequence[Tensor]
    ) -> Tensor:
        """Return a result; make a * (b * x + p) of the weights p in its memory in the place of their last sweep."""
        if name not in self.direct:
            return x.computed(memory) if isinstance(x, functions.Product) else x
        for k, (i, p) in enumerate(zip(numbers, memory, strict=True)):
            a, b = (self.scalars.rounded(self.bucket.line_of[i], n) for n in self.direct[name].linear)
            some = [y if len(memory) == 1 else y[k] for y in (x if isinstance(x, functions.Product) else [x])]
            if len(some) == 2 and min(abs(a), abs(a * b)) >= SMALLEST:
                torch.addmm(p, *some, beta=a, alpha=a * b, out=p)
            else:
                p.add_(some[0] @ some[1] if len(some) == 2 else some[0], alpha=b).mul_(a)
        return memory[0]

    def _decoded(self, name: str, fields: Mapping[str, Tensor]) -> Tensor:
        """Return an operand in fp32, or as it is."""
        if name not in self.eager.matrices:
            return fields[name]
        codec = self.bucket.codecs[self.eager.matrices[name]]
        return codec.decode(*map(fields.__getitem__, self.bucket.variant.coded(name)))

    def _encode(self, named: Mapping[str, Tensor], fields: dict[str, Tensor], streams: Tensor, key: int) -> None:
        """Put the results into `fields`, as they are stored; what others are relative to comes first."""
        variant, traits = self.bucket.variant, self.eager.matrices
        for name in sorted(self.makes, key=self.eager.over.__contains__):
            new: tuple[Tensor, ...] = (named[name],)
            if name in traits:
                noise = functions.rounding(name, key, streams) if name in self.eager.random else None
                base = [fields[x] for x in variant.owned(self.eager.over.get(name, ""))]
                new = self.bucket.codecs[traits[name]].encode(*new, *base, noise=noise)
            fields |= zip(_columns(variant, [name]), new, strict=True)


Alike = dict[tuple[tuple[int, ...], tuple[tuple[float, ...], int]], list[tuple[int, tuple[Tensor, ...]]]]
"""By shape, extents and given numbers, matrices: the number of the tensor, operands, streams and results."""


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
            step = bucket.lines.steps[bucket.line_of[i]] + 1
            warn(
                f"step {step}, {state.label(bucket.params[i], bucket.names[i])}: a matrix that the rule "
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


def _column(
    bucket: Bucket, room: Workspace, name: str, live: Sequence[int], shapes: Sequence[torch.Size]
) -> list[Tensor]:
    """Return a state or a temp of the parameters that have elements, as matrices (..., rows, columns)."""
    names = list(map(attrgetter("name"), bucket.variant.temps))
    if name not in names:
        kept = [bucket.states[i][name] for i in live]
        return [x if x.ndim else x.expand(*shape[:-2], 1, 1) for x, shape in zip(kept, shapes, strict=True)]
    k = names.index(name)
    temp, column = bucket.variant.temps[k], room.offsets[k]
    found = room.values(temp, column if len(column) == len(live) else [column[i] for i in live], shapes)
    if temp.space in WHOLE:  # for every matrix
        return [x.view(1, 1).expand(*shape[:-2], 1, 1) for x, shape in zip(found, shapes, strict=True)]
    return found


def _layout(bucket: Bucket, over: Layout, name: str) -> Layout:
    """Return how a state or a temp of a parameter lies over the ranks."""
    variant = bucket.variant
    found = next((f for f in variant.fields if f.name == name), None)
    if found is None:
        space = next(t.space for t in variant.temps if t.name == name)
        found = Field(name, "float32", space="mat" if space in WHOLE else space, matrix=variant.matrix)
    return field_layout(found, over)
