"""The matrices of DTensors, each worked on by one rank: which one, and how parts come to it and results go back.

A function of whole matrices costs far more than to send them.  So each matrix of a tensor that lies over several ranks
is put together on its worker alone, and the other ranks get their parts of the results.  All ranks find the same
workers from names, shapes and placements.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from optgen.runtime.layout import layout
from optgen.runtime.layout.sharding import Cuts, Exchange, Layout, Move, Span, region
from optgen.runtime.records import Heads, Matrix

Key = tuple[int, int]
"""A matrix: the number of its tensor, and its index in the stack that the tensor is."""

Work = Callable[[Sequence[Key], Sequence[list[Tensor]]], Sequence[list[Tensor]]]
"""A function of whole matrices: of the operands of each it makes the results of each."""

At = tuple[slice, ...]


class Stack(NamedTuple):
    """The matrices of a tensor.

    cuts    how its parts lie over the mesh
    flops   the cost of each matrix, in any unit
    """

    shape: torch.Size
    cuts: Cuts
    matrix: Matrix
    flops: int


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


@functools.lru_cache(maxsize=65536)
def assign(stacks: tuple[Stack, ...], mesh: tuple[int, ...], start: int = 0) -> tuple[tuple[int, ...], ...]:
    """Return the worker of each matrix of each tensor, a rank as the mesh lists them.

    The most costly matrices come first, each to the rank that has least to do (of equal ones the next after `start`).
    But a rank that holds all of a matrix works on it itself, up to the mean cost or that of the largest matrix.
    """
    ranks = math.prod(mesh)
    units = [(x.flops, k, e) for k, x in enumerate(stacks) for e in range(_count(x.shape, x.matrix))]
    if not units:
        return tuple(() for _ in stacks)
    limit = max(-(-sum(flops for flops, _, _ in units) // ranks), max(units)[0])
    loads = [0] * ranks
    least = [(0, (rank - start) % ranks, rank) for rank in range(ranks)]
    heapq.heapify(least)
    holders = [_holders(x.shape, x.cuts, x.matrix, mesh) for x in stacks]
    found = [[0] * _count(x.shape, x.matrix) for x in stacks]
    for flops, k, e in sorted(units, key=lambda unit: -unit[0]):
        near = [(loads[r], (r - start) % ranks, r) for r in holders[k].get(e, ()) if loads[r] + flops <= limit]
        while least[0][0] != loads[least[0][2]]:
            heapq.heappop(least)
        worker = min(near)[2] if near else least[0][2]
        found[k][e] = worker
        loads[worker] += flops
        heapq.heappush(least, (loads[worker], (worker - start) % ranks, worker))
    return tuple(map(tuple, found))


def run(parted: Sequence[Parted], work: Work, room: int) -> Generator[Exchange, Tensor | None, None]:
    """Work on each matrix on its worker.

    room   bytes of operands that a rank puts together at a time
    Raises what `work` raises, after other ranks have got NaN in place of its results: they wait for something.
    """
    failure: Exception | None = None
    for mesh in dict.fromkeys(x.layout.mesh for x in parted):
        some = [x for x in parted if x.layout.mesh == mesh]
        kinds = tuple((x.layout, x.matrix, x.workers, sum(y.element_size() for y in x.operands)) for x in some)
        for this in _rounds(kinds, room):
            operands = [[x.new_empty(task.shape) for x in some[task.tensor].operands] for task in this.tasks]
            sends = [(rank, x[at]) for rank, k, at in this.gives for x in some[k].operands]
            given = zip(this.tasks, operands, strict=True)
            receives = [(rank, x[at]) for task, xs in given for rank, at in task.sources for x in xs]
            yield Exchange(moves=[Move(mesh, sends, receives)])
            try:
                results = work([(some[t.tensor].number, t.matrix) for t in this.tasks], operands)
            except Exception as error:
                failure = failure or error
                results = [[x.new_full(t.shape, math.nan) for x in some[t.tensor].results] for t in this.tasks]
            made = zip(this.tasks, results, strict=True)
            sends = [(rank, x[at]) for task, xs in made for rank, at in task.targets for x in xs]
            receives = [(rank, x[at]) for rank, k, at in this.takes for x in some[k].results]
            yield Exchange(moves=[Move(mesh, sends, receives)])
    if failure is not None:
        raise failure


class _Task(NamedTuple):
    """A matrix that this rank works on.

    shape     of the matrix as part of the tensor
    sources   ranks that send pieces of it, with the indices of these; targets: those that get pieces of the results
    """

    tensor: int
    matrix: int
    shape: tuple[int, ...]
    sources: list[tuple[int, At]]
    targets: list[tuple[int, At]]


class _Round(NamedTuple):
    """The matrices that all ranks work on at one time, as this rank sees them.

    gives, takes   pieces of its parts, operands and results: (worker, tensor, indices); one of several replicas gives
    """

    gives: list[tuple[int, int, At]]
    takes: list[tuple[int, int, At]]
    tasks: list[_Task]


@functools.lru_cache(maxsize=65536)
def _rounds(parted: tuple[tuple[Layout, Matrix, tuple[int, ...], int], ...], room: int) -> list[_Round]:
    """Share out tensors (layout, matrix, workers, bytes of an element's operands), so that every worker puts `room`
    bytes together in each round, one matrix at least."""
    rounds: list[_Round] = []
    filled: dict[int, tuple[int, int]] = {}
    for k, (of, matrix, workers, size) in enumerate(parted):
        assert of.coordinate is not None and of.here is not None
        uncut = [m for m, cut in enumerate(of.cuts) if cut is None]
        mine = [of.coordinate[m] for m in uncut]
        for e, worker in enumerate(workers):
            box = _box(of.shape, matrix, e)
            number, before = filled.get(worker, (0, 0))
            nbytes = size * math.prod(b - a for a, b in box)
            if before and before + nbytes > room:
                number, before = number + 1, 0
            filled[worker] = number, before + nbytes
            rounds += [_Round([], [], []) for _ in range(number + 1 - len(rounds))]
            of_worker, _ = _regions(of.shape, of.mesh_shape, of.cuts)[worker]
            near = [of_worker[m] for m in uncut]
            at = _common(of.here, box, of.here)
            if at is not None:
                rounds[number].takes.append((worker, k, at))
                if mine == near:
                    rounds[number].gives.append((worker, k, at))
            if of_worker == of.coordinate:
                task = _Task(k, e, tuple(b - a for a, b in box), [], [])
                for rank, (coordinate, part) in enumerate(_regions(of.shape, of.mesh_shape, of.cuts)):
                    at = _common(part, box, box)
                    if at is not None:
                        task.targets.append((rank, at))
                        if [coordinate[m] for m in uncut] == near:
                            task.sources.append((rank, at))
                rounds[number].tasks.append(task)
    return rounds


@functools.lru_cache(maxsize=4096)
def _regions(
    shape: torch.Size, mesh: tuple[int, ...], cuts: Cuts
) -> tuple[tuple[tuple[int, ...], tuple[Span, ...]], ...]:
    """Return the coordinate and the index ranges of each rank, as the mesh lists them."""
    return tuple((c, region(shape, mesh, c, cuts)) for c in itertools.product(*map(range, mesh)))


def _common(part: Sequence[Span], box: Sequence[Span], origin: Sequence[Span]) -> At | None:
    """Return what a part has of a matrix, as indices that count from an origin; None: nothing."""
    spans = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(part, box, strict=True)]
    if any(a >= b for a, b in spans):
        return None
    return tuple(slice(a - first, b - first) for (a, b), (first, _) in zip(spans, origin, strict=True))


def _count(shape: torch.Size, matrix: Matrix) -> int:
    return math.prod(layout.matrix_shape(matrix, shape)[:-2]) if shape.numel() else 0


@functools.lru_cache(maxsize=65536)
def _box(shape: torch.Size, matrix: Matrix, index: int) -> tuple[Span, ...]:
    """Return the index ranges of a matrix of a tensor."""
    lead = layout.matrix_shape(matrix, shape)[:-2]
    if isinstance(matrix, Heads):
        return (index * matrix.rows, (index + 1) * matrix.rows), *((0, size) for size in shape[1:])
    found: list[Span] = []
    for size in reversed(lead):
        index, at = divmod(index, size)
        found.insert(0, (at, at + 1))
    return *found, *((0, size) for size in shape[len(lead) :])


def _holders(shape: torch.Size, cuts: Cuts, matrix: Matrix, mesh: tuple[int, ...]) -> dict[int, list[int]]:
    """Return the ranks that hold all of a matrix, of a stack that is cut along dimension 0 alone."""
    count, found = _count(shape, matrix), dict[int, list[int]]()
    if len(layout.matrix_shape(matrix, shape)) > 2 and {cut[0] for cut in cuts if cut is not None} == {0}:
        for rank, (_, part) in enumerate(_regions(shape, mesh, cuts)):
            for e in range(part[0][0] * count // shape[0], part[0][1] * count // shape[0]):
                found.setdefault(e, []).append(rank)
    return found
