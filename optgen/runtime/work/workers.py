"""The matrices of DTensors, each worked on by one rank: by which, and how parts come there and results go back.

A function of whole matrices costs more than to send them.  All ranks find the same workers, from names, shapes and
placements.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optgen.runtime.layout import layout
from optgen.runtime.layout.sharding import Cuts, Exchange, Layout, Move, Span, region
from optgen.runtime.records import Heads, Matrix, Variant
from optgen.runtime.reference.matrices import FLOPS, products
from optgen.runtime.reference.matrix_codecs import NAN
from optgen.runtime.work.bucket import Bucket

Key = tuple[int, int]
"""A matrix: the number of its tensor, and its index in the stack that the tensor is."""

Kept = dict[tuple[int, int, str], Tensor]
"""Values that workers keep during a step for its next functions: by tensor, matrix and name."""

Shapes = Sequence[tuple[int, ...]]

Work = Callable[[Sequence[Key], Sequence[list[Tensor]], Sequence[Shapes]], Sequence[list[Tensor]]]
"""A function of whole matrices: of the operands of each, and the shapes of its results, it makes the results."""

Piece = tuple[int, int, int, tuple[slice, ...], bool]
"""The part of a value of a matrix that a rank has: the rank that holds it, or its worker; the tensor; the value; its
indices in the value, or in the part; False if another replica sends it to the worker."""


class Stack(NamedTuple):
    """The matrices of a tensor, how it is cut over a mesh, and the cost of a step of each matrix, in any unit."""

    shape: torch.Size
    cuts: Cuts
    matrix: Matrix
    flops: int

    @classmethod
    def of(cls, where: Layout, variants: Iterable[Variant], rows: Sequence[int] = ()) -> list[Stack]:
        """Return that of a parameter, or one of each of its matrices of unequal numbers of rows, which all ranks have;
        the cost is 0 where none of the variants of its steps calls a function."""
        if rows:
            own = [where.of_all((size, *where.shape[1:])) for size in rows]
            return [stack for x in own for stack in cls.of(x, variants)]
        calls = [(v, s.kernel) for v in variants for s in v.stages if s.on_host]
        flops = [0]
        for v, f in calls:
            other = functools.partial(products, spaces={x.space for x in v.fields})
            flops.append(FLOPS.get(f, other)(*layout.matrix_shape(v.matrix, where.shape)[-2:]))
        return [cls(where.shape, where.cuts, calls[0][0].matrix if calls else "last", max(flops))]

    @property
    def matrices(self) -> int:
        """The number of its matrices."""
        return math.prod(layout.matrix_shape(self.matrix, self.shape)[:-2]) if self.shape.numel() else 0

    def holders(self, mesh: tuple[int, ...]) -> Mapping[int, list[int]]:
        """Return the ranks that hold all of a matrix, if it is cut along the first dimension of a stack alone."""
        found: dict[int, list[int]] = {}
        if len(layout.matrix_shape(self.matrix, self.shape)) > 2 and {c[0] for c in self.cuts if c} == {0}:
            for rank, (_, ((start, stop), *_)) in enumerate(_regions(self.shape, mesh, self.cuts)):
                for e in range(start * self.matrices // self.shape[0], stop * self.matrices // self.shape[0]):
                    found.setdefault(e, []).append(rank)
        return found


@functools.lru_cache(maxsize=65536)
def assign(stacks: tuple[Stack, ...], mesh: tuple[int, ...], start: int = 0) -> list[tuple[int, ...]]:
    """Return the worker of each matrix of each tensor: a rank, as the mesh lists them.

    The most costly matrices come first, each to the rank that has least to do (of equal ones the next after `start`).
    A rank that holds all of a matrix has it before others, up to the mean cost or that of the largest matrix.
    """
    ranks, found = math.prod(mesh), [[0] * x.matrices for x in stacks]
    units = [(x.flops, k, e) for k, x in enumerate(stacks) for e in range(x.matrices)]
    units.sort(key=lambda unit: -unit[0])
    limit = max(-(-sum(flops for flops, _, _ in units) // ranks), units[0][0] if units else 0)
    loads, holders = [0] * ranks, [x.holders(mesh) for x in stacks]
    least = [(0, k, (start + k) % ranks) for k in range(ranks)]  # a heap
    for flops, k, e in units:
        near = [(loads[r], (r - start) % ranks, r) for r in holders[k].get(e, ()) if loads[r] + flops <= limit]
        while least[0][0] != loads[least[0][2]]:
            heapq.heappop(least)
        _, turn, worker = min(near, default=least[0])
        found[k][e] = worker
        loads[worker] += flops
        heapq.heappush(least, (loads[worker], turn, worker))
    return list(map(tuple, found))


def share(buckets: Sequence[Bucket], known: Mapping[Any, Sequence[Stack]], start: int) -> None:
    """Give shards the workers of their matrices.

    known   the trainable DTensors of all steps, whose work over a mesh is shared at once: a worker stays the same,
            whichever parameters have gradients
    """
    stacks = {p: found for p, found in known.items() if any(stack.flops for stack in found)}
    calling = [b for b in buckets if any(stage.on_host for stage in b.variant.stages)]
    shards = [(b, i, x) for b in calling for i, x in enumerate(b.shards) if x is not None and x.layout.dims()]
    for b, i, shard in shards:  # frozen ones may have a gradient
        if shard.p not in stacks:
            stacks[shard.p] = Stack.of(shard.layout, [b.variant], b.pieces[i][1] if i in b.pieces else ())
    for mesh in dict.fromkeys(shard.layout.mesh for *_, shard in shards):
        some = [(p, stack) for p, found in stacks.items() if p.device_mesh == mesh for stack in found]
        workers: dict[Any, tuple[int, ...]] = {}
        for (p, _), found in zip(some, assign(tuple(x for _, x in some), tuple(mesh.shape), start), strict=True):
            workers[p] = (*workers.get(p, ()), *found)
        for *_, shard in shards:
            if shard.layout.mesh == mesh:
                shard.workers = workers[shard.p]


class Parted(NamedTuple):
    """A tensor in parts whose matrices are worked on whole.

    workers   the rank of each matrix, as `assign` has them
    values    this rank's parts of what is read, `reads` in number, and of the results, which are written
    layouts   of the values; those of another shape than the tensor have its matrices along their first dimensions
    known     positions in `values` and names of what workers have of earlier functions: nobody sends that
    wanted    positions in `values` and names of what workers keep for later functions
    """

    number: int
    layout: Layout
    matrix: Matrix
    workers: tuple[int, ...]
    values: list[Tensor]
    layouts: tuple[Layout, ...]
    reads: int
    known: Mapping[int, str] = {}
    wanted: Mapping[int, str] = {}


def run(
    parted: Sequence[Parted], work: Work, room: int, kept: Kept | None = None
) -> Generator[Exchange, Tensor | None, Exception | None]:
    """Work on each matrix on its worker, in rounds.

    The operands of a round are under way while the one before is worked on, and so are the results of the one before
    that, in the same messages.

    room   bytes of operands that a rank puts together for a round
    kept   values of earlier functions of the step
    Returns the first error of `work`, for which its results are NaN: other ranks wait for them, and for the rest of the
    step.
    """
    failure: Exception | None = None
    kept = {} if kept is None else kept
    for mesh in dict.fromkeys(x.layout.mesh for x in parted):
        some = [x for x in parted if x.layout.mesh == mesh]
        sizes = [tuple(y.itemsize for y in x.values[: x.reads]) for x in some]
        sent = [{*range(x.reads)} - {*x.known} for x in some]
        kinds = tuple((x.layout, x.matrix, x.workers, x.layouts, n) for x, n in zip(some, sizes, strict=True))
        rounds, returned = _rounds(kinds, room), list[Move]()
        for n, (held, tasks) in enumerate(rounds):
            if n == 0:
                following, moves = _operands(some, sent, rounds[0], mesh, kept)
                yield Exchange(moves=moves)
            whole = following
            if n + 1 < len(rounds):
                following, moves = _operands(some, sent, rounds[n + 1], mesh, kept)
                yield Exchange(moves=[*returned, *moves], ahead=True)
            elif n:
                yield Exchange(moves=returned, ahead=True)
            after = [slice(some[task.tensor].reads, None) for task in tasks]
            keys = [(some[task.tensor].number, task.matrix) for task in tasks]
            try:
                results = work(keys, whole, [task.shapes[rest] for task, rest in zip(tasks, after, strict=True)])
            except Exception as error:
                failure = failure or error
                made = [_made(some[task.tensor], task, rest) for task, rest in zip(tasks, after, strict=True)]
                results = [[y.fill_(math.nan if y.is_floating_point() else NAN) for y in ys] for ys in made]
            for key, task, xs, ys in zip(keys, tasks, whole, results, strict=True):
                kept |= {(*key, name): (*xs, *ys)[j] for j, name in some[task.tensor].wanted.items()}
            found = [(p, ys) for task, ys in zip(tasks, results, strict=True) for p in task.pieces]
            sends = [(rank, ys[j - some[k].reads][at]) for (rank, k, j, at, _), ys in found if j >= some[k].reads]
            receives = [(rank, some[k].values[j][at]) for rank, k, j, at, _ in held if j >= some[k].reads]
            returned = [Move(mesh, sends, receives)]
        if returned:
            yield Exchange(moves=returned)
    return failure


def _operands(
    some: Sequence[Parted], sent: Sequence[set[int]], one: _Round, mesh: Any, kept: Kept
) -> tuple[list[list[Tensor]], list[Move]]:
    """Return new tensors for the operands of this rank's matrices in a round, and how their pieces come there.

    sent   positions of the values of each tensor that are sent; the others are kept
    """
    held, tasks = one
    whole = [_made(some[task.tensor], task, slice(some[task.tensor].reads)) for task in tasks]
    for task, xs in zip(tasks, whole, strict=True):
        for j, name in some[task.tensor].known.items():
            if j < len(xs):
                xs[j] = kept[some[task.tensor].number, task.matrix, name]
    pieces = [(piece, xs) for task, xs in zip(tasks, whole, strict=True) for piece in task.pieces]
    sends = [(rank, some[k].values[j][at]) for rank, k, j, at, near in held if near and j in sent[k]]
    receives = [(rank, xs[j][at]) for (rank, k, j, at, near), xs in pieces if near and j in sent[k]]
    return whole, [Move(mesh, sends, receives)]


class _Task(NamedTuple):
    """A matrix that this rank works on, the shapes of its values, and their pieces on all ranks."""

    tensor: int
    matrix: int
    shapes: list[tuple[int, ...]]
    pieces: list[Piece]


_Round = tuple[list[Piece], list[_Task]]
"""A part that is worked on at one time: (this rank's pieces, its matrices)."""


def _made(x: Parted, task: _Task, which: slice) -> list[Tensor]:
    """Return new tensors for some of the values of a matrix."""
    return [y.new_empty(shape) for y, shape in zip(x.values[which], task.shapes[which], strict=True)]


@functools.lru_cache(maxsize=65536)
def _rounds(
    parted: tuple[tuple[Layout, Matrix, tuple[int, ...], tuple[Layout, ...], tuple[int, ...]], ...], room: int
) -> list[_Round]:
    """Return the rounds.

    parted   layout, matrix, workers, layouts of the values, and bytes of an element of each operand
    In each round every worker puts `room` bytes together, one matrix at least.
    """
    rounds: list[_Round] = []
    filled: dict[int, tuple[int, int]] = {}
    for k, (of, matrix, workers, layouts, sizes) in enumerate(parted):
        views, lead = [_View.of_layout(x) for x in layouts], len(layout.matrix_shape(matrix, of.shape)) - 2
        for e, worker in enumerate(workers):
            boxes = [_box(x.shape, matrix, e) if x.shape == of.shape else _at(x.shape, lead, e) for x in layouts]
            shapes = [tuple(b - a for a, b in box) for box in boxes]
            taken = sum(size * math.prod(shape) for size, shape in zip(sizes, shapes, strict=False))
            number, before = filled.get(worker, (0, 0))
            if before and before + taken > room:
                number, before = number + 1, 0
            filled[worker] = number, before + taken
            rounds += [([], []) for _ in range(number + 1 - len(rounds))]
            held, tasks = rounds[number]
            own: list[Piece] = []
            for j, (view, box) in enumerate(zip(views, boxes, strict=True)):
                here = view.of.here
                assert here is not None
                if at := _common(here, box, here):
                    held.append((worker, k, j, at, view.replicas[view.rank] == view.replicas[worker]))
                if worker == view.rank:
                    parts = [(rank, _common(part, box, box)) for rank, part in enumerate(view.parts)]
                    own += [(r, k, j, at, view.replicas[r] == view.replicas[worker]) for r, at in parts if at]
            if views[0].rank == worker:
                tasks.append(_Task(k, e, shapes, own))
    return rounds


class _View(NamedTuple):
    """A value of all ranks: its layout, this rank, the index ranges of each rank, and which ranks hold the same, by
    their coordinates along the mesh dimensions that cut nothing."""

    of: Layout
    rank: int
    parts: list[tuple[Span, ...]]
    replicas: list[list[int]]

    @classmethod
    def of_layout(cls, of: Layout) -> _View:
        found = _regions(of.shape, of.mesh_shape, of.cuts)
        uncut = [m for m, cut in enumerate(of.cuts) if cut is None]
        rank = next(r for r, (coordinate, _) in enumerate(found) if coordinate == of.coordinate)
        return cls(of, rank, [part for _, part in found], [[c[m] for m in uncut] for c, _ in found])


@functools.lru_cache(maxsize=4096)
def _regions(shape: torch.Size, mesh: tuple[int, ...], cuts: Cuts) -> list[tuple[tuple[int, ...], tuple[Span, ...]]]:
    """Return the coordinate and the index ranges of each rank, as the mesh lists them."""
    return [(c, region(shape, mesh, c, cuts)) for c in itertools.product(*map(range, mesh))]


def _common(part: Sequence[Span], box: Sequence[Span], origin: Sequence[Span]) -> tuple[slice, ...]:
    """Return the indices, counted from an origin, of what a part has of a matrix; () for nothing."""
    spans = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(part, box, strict=True)]
    found = tuple(slice(a - first, b - first) for (a, b), (first, _) in zip(spans, origin, strict=True))
    return found if all(a < b for a, b in spans) else ()


@functools.lru_cache(maxsize=65536)
def _box(shape: torch.Size, matrix: Matrix, index: int) -> list[Span]:
    """Return the index ranges of a matrix of a tensor."""
    if isinstance(matrix, Heads):
        return [(index * matrix.rows, (index + 1) * matrix.rows), *((0, size) for size in shape[1:])]
    return _at(shape, len(layout.matrix_shape(matrix, shape)) - 2, index)


def _at(shape: torch.Size, lead: int, index: int) -> list[Span]:
    """Return the index ranges of the part of a tensor that belongs to a matrix; `lead` dimensions count matrices."""
    found = [(0, size) for size in shape[lead:]]
    for size in reversed(shape[:lead]):
        index, at = divmod(index, size)
        found.insert(0, (at, at + 1))
    return found
