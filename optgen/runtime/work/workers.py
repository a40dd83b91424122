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
from optgen.runtime.work.bucket import Bucket

Key = tuple[int, int]
"""A matrix: the number of its tensor, and its index in the stack that the tensor is."""

Work = Callable[[Sequence[Key], Sequence[list[Tensor]]], Sequence[list[Tensor]]]
"""A function of whole matrices: of the operands of each it makes the results of each."""

Piece = tuple[int, int, tuple[slice, ...], bool]
"""What a rank's part has of a matrix: the rank that holds it, or its worker; the tensor; its indices in the matrix, or
in the part; False if another replica sends it to the worker."""


class Stack(NamedTuple):
    """The matrices of a tensor, how it is cut over a mesh, and the cost of a step of each matrix, in any unit."""

    shape: torch.Size
    cuts: Cuts
    matrix: Matrix
    flops: int

    @classmethod
    def of(cls, where: Layout, variants: Iterable[Variant]) -> Stack:
        """Return that of a parameter; its cost is 0 where none of the variants of its steps calls a function."""
        calls = [(v.matrix, s.kernel) for v in variants for s in v.stages if s.on_host]
        flops = [FLOPS.get(f, products)(*layout.matrix_shape(matrix, where.shape)[-2:]) for matrix, f in calls]
        return cls(where.shape, where.cuts, calls[0][0] if calls else "last", max(flops, default=0))

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


def share(buckets: Sequence[Bucket], known: Mapping[Any, Stack], start: int) -> None:
    """Give shards the workers of their matrices.

    known   the trainable DTensors of all steps, whose work over a mesh is shared at once: a worker stays the same,
            whichever parameters have gradients
    """
    stacks = {p: stack for p, stack in known.items() if stack.flops}
    calling = [b for b in buckets if any(stage.on_host for stage in b.variant.stages)]
    shards = [(b, shard) for b in calling for shard in b.shards if shard is not None and shard.layout.dims()]
    for b, shard in shards:  # frozen ones may have a gradient
        stacks.setdefault(shard.p, Stack.of(shard.layout, [b.variant]))
    for mesh in dict.fromkeys(shard.layout.mesh for _, shard in shards):
        some = {p: stack for p, stack in stacks.items() if p.device_mesh == mesh}
        workers = dict(zip(some, assign(tuple(some.values()), tuple(mesh.shape), start), strict=True))
        for _, shard in shards:
            if shard.layout.mesh == mesh:
                shard.workers = workers[shard.p]


class Parted(NamedTuple):
    """A tensor in parts whose matrices are worked on whole.

    workers             the rank of each matrix, as `assign` has them
    operands, results   this rank's parts; those of the results are written
    """

    number: int
    layout: Layout
    matrix: Matrix
    workers: tuple[int, ...]
    operands: list[Tensor]
    results: list[Tensor]


def run(parted: Sequence[Parted], work: Work, room: int) -> Generator[Exchange, Tensor | None, Exception | None]:
    """Work on each matrix on its worker.

    room   bytes of operands that a rank puts together at a time
    Returns the first error of `work`, for which its results are NaN: other ranks wait for them, and for the rest of the
    step.
    """
    failure: Exception | None = None
    for mesh in dict.fromkeys(x.layout.mesh for x in parted):
        some = [x for x in parted if x.layout.mesh == mesh]
        kinds = tuple((x.layout, x.matrix, x.workers, sum(y.element_size() for y in x.operands)) for x in some)
        for held, tasks in _rounds(kinds, room):
            operands = [[x.new_empty(task.shape) for x in some[task.tensor].operands] for task in tasks]
            sends = [(rank, x[at]) for rank, k, at, near in held if near for x in some[k].operands]
            pieces = [(piece, xs) for task, xs in zip(tasks, operands, strict=True) for piece in task.pieces]
            receives = [(rank, x[at]) for (rank, _, at, near), xs in pieces if near for x in xs]
            yield Exchange(moves=[Move(mesh, sends, receives)])
            try:
                results = work([(some[task.tensor].number, task.matrix) for task in tasks], operands)
            except Exception as error:
                failure = failure or error
                results = [[x.new_full(task.shape, math.nan) for x in some[task.tensor].results] for task in tasks]
            pieces = [(piece, xs) for task, xs in zip(tasks, results, strict=True) for piece in task.pieces]
            sends = [(rank, x[at]) for (rank, _, at, _), xs in pieces for x in xs]
            receives = [(rank, x[at]) for rank, k, at, _ in held for x in some[k].results]
            yield Exchange(moves=[Move(mesh, sends, receives)])
    return failure


class _Task(NamedTuple):
    """A matrix that this rank works on, its shape as part of the tensor, and its pieces on all ranks."""

    tensor: int
    matrix: int
    shape: tuple[int, ...]
    pieces: list[Piece]


@functools.lru_cache(maxsize=65536)
def _rounds(
    parted: tuple[tuple[Layout, Matrix, tuple[int, ...], int], ...], room: int
) -> list[tuple[list[Piece], list[_Task]]]:
    """Return what is worked on at one time: this rank's pieces, and its matrices.

    parted   layout, matrix, workers, and bytes of the operands of an element
    In each round every worker puts `room` bytes together, one matrix at least.
    """
    rounds: list[tuple[list[Piece], list[_Task]]] = []
    filled: dict[int, tuple[int, int]] = {}
    for k, (of, matrix, workers, size) in enumerate(parted):
        assert of.coordinate is not None and of.here is not None
        uncut = [m for m, cut in enumerate(of.cuts) if cut is None]
        regions = _regions(of.shape, of.mesh_shape, of.cuts)
        replicas = [[coordinate[m] for m in uncut] for coordinate, _ in regions]
        for e, worker in enumerate(workers):
            box = _box(of.shape, matrix, e)
            shape = tuple(b - a for a, b in box)
            number, before = filled.get(worker, (0, 0))
            if before and before + size * math.prod(shape) > room:
                number, before = number + 1, 0
            filled[worker] = number, before + size * math.prod(shape)
            rounds += [([], []) for _ in range(number + 1 - len(rounds))]
            held, tasks = rounds[number]
            if at := _common(of.here, box, of.here):
                held.append((worker, k, at, [of.coordinate[m] for m in uncut] == replicas[worker]))
            if regions[worker][0] == of.coordinate:
                parts = [(rank, _common(part, box, box)) for rank, (_, part) in enumerate(regions)]
                pieces = [(rank, k, at, replicas[rank] == replicas[worker]) for rank, at in parts if at]
                tasks.append(_Task(k, e, shape, pieces))
    return rounds


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
    lead = layout.matrix_shape(matrix, shape)[:-2]
    found = [(0, size) for size in shape[len(lead) :]]
    for size in reversed(lead):
        index, at = divmod(index, size)
        found.insert(0, (at, at + 1))
    return found
