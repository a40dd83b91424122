"""The matrices of several ranks, each worked on by one: by which, and how parts come there and results go back.

A function of whole matrices costs more than to send them.  All ranks find the same workers, from names, shapes and
placements.  Of a matrix that all ranks hold whole the worker has what it reads, and sends results alone.
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
from optgen.runtime.layout.messages import Exchange, Move
from optgen.runtime.layout.sharding import Cuts, Layout, Span, region
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


class MatrixPiece(NamedTuple):
    """The part of a value of a matrix that a rank has.

    rank    the rank that holds it, or its worker
    tensor  the number of the tensor in a list of Parted
    value   the position of the value
    at      indices in the value, or in the part
    near    False if another replica sends it to the worker
    """

    rank: int
    tensor: int
    value: int
    at: tuple[slice, ...]
    near: bool


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


Sending = dict[Any, tuple[Layout, list[Stack]]]
"""The trainable parameters in whose step ranks send one another something: their layout, and their matrices."""


def share(buckets: Iterable[Bucket], trained: Sending, start: int) -> None:
    """Give parameters the workers of their matrices.

    trained   those of all steps, whose work over a mesh is shared at once: a worker stays the same, whichever
              parameters have gradients
    """
    calling = _calling(buckets)
    stacks = {p: found for p, found in trained.items() if any(stack.flops for stack in found[1])}
    stacks |= {p: _frozen(b, i) for b, i, p in calling if p not in stacks and b.shards[i] and b.cut}
    for mesh in dict.fromkeys(stacks[p][0].mesh for *_, p in calling if p in stacks):
        workers = _workers({p: found for p, (of, found) in stacks.items() if of.mesh == mesh}, mesh, start)
        for b, i, p in calling:
            if p in workers:
                b.workers[i] = stacks[p][0], workers[p]


def _workers(some: Mapping[Any, list[Stack]], mesh: Any, start: int) -> dict[Any, tuple[int, ...]]:
    """Return the workers of the matrices of each parameter over a mesh."""
    chosen = iter(assign(tuple(itertools.chain(*some.values())), tuple(mesh.shape), start))
    return {p: tuple(itertools.chain(*itertools.islice(chosen, len(found)))) for p, found in some.items()}


def _calling(buckets: Iterable[Bucket]) -> list[tuple[Bucket, int, Any]]:
    """Return the parameters, as the user has them, whose step calls a function of whole matrices."""
    calling = [b for b in buckets if any(stage.on_host for stage in b.variant.stages)]
    each = [(b, i, x) for b in calling for i, x in enumerate(b.shards)]
    return [(b, i, b.params[i] if x is None else x.p) for b, i, x in each]


def _frozen(b: Bucket, i: int) -> tuple[Layout, list[Stack]]:
    """Return the layout and matrices of a DTensor that is frozen, and has a gradient all the same."""
    shard = b.shards[i]
    assert shard is not None
    return shard.layout, Stack.of(shard.layout, [b.variant], b.pieces[i][1] if i in b.pieces else ())


Kind = tuple[Layout, Matrix, tuple[int, ...], tuple[Layout, ...], tuple[int, ...]]
"""The facts that decide the rounds of a tensor: layout, matrix, workers, layouts of the values, and bytes of an element
of each operand."""


class Parted(NamedTuple):
    """A tensor in parts whose matrices are worked on whole.

    workers   the rank of each matrix, as `assign` has them
    values    this rank's parts of what is read, `reads` in number, and of the results, which are written
    layouts   of the values; those of another shape than the tensor have its matrices along their first dimensions
    cached    positions in `values` and names of what workers have from earlier functions: nobody sends that
    to_cache  positions in `values` and names of what workers keep for later functions
    """

    number: int
    layout: Layout
    matrix: Matrix
    workers: tuple[int, ...]
    values: list[Tensor]
    layouts: tuple[Layout, ...]
    reads: int
    cached: Mapping[int, str] = {}
    to_cache: Mapping[int, str] = {}

    @property
    def kind(self) -> Kind:
        sizes = tuple(x.itemsize for x in self.values[: self.reads])
        return self.layout, self.matrix, self.workers, self.layouts, sizes


def run(
    parted: Sequence[Parted], work: Work, room: int, kept: Kept | None = None
) -> Generator[Exchange, Tensor | None, Exception | None]:
    """Work on each matrix on its worker, in rounds: operands come to workers, and results go back.

    room   bytes of operands that a rank puts together for a round
    kept   values of earlier functions of the step
    Returns the first error of `work`, for which its results are NaN: other ranks wait for them, and for the rest of the
    step.
    """
    failure: Exception | None = None
    kept = {} if kept is None else kept
    for mesh in dict.fromkeys(x.layout.mesh for x in parted):
        some = _Work(mesh, [x for x in parted if x.layout.mesh == mesh], work, room, kept)
        for n in range(len(some.rounds)):
            operands, move = some.operands(n)
            yield Exchange(moves=[move])
            yield Exchange(moves=[some.results(n, operands)])
        failure = failure or some.failure
    return failure


class _Work:
    """Tensors over one mesh, and the rounds in which their matrices are worked on.

    failure   the first error of the function
    """

    def __init__(self, mesh: Any, parted: Sequence[Parted], function: Work, room: int, kept: Kept) -> None:
        self.mesh, self.parted, self.function, self.kept = mesh, parted, function, kept
        self.rounds = _rounds(tuple(x.kind for x in parted), room)
        self.failure: Exception | None = None

    def operands(self, n: int) -> tuple[list[list[Tensor]], Move]:
        """Return new tensors for the operands of this rank's matrices in a round, and how their pieces come there."""
        held, tasks = self.rounds[n]
        operands = [self._operands(task) for task in tasks]
        pieces = [(y, xs) for task, xs in zip(tasks, operands, strict=True) for y in task.pieces if self._is_sent(y)]
        sends = [(y.rank, self._part(y)) for y in held if self._is_sent(y)]
        return operands, Move(self.mesh, sends, [(y.rank, xs[y.value][y.at]) for y, xs in pieces])

    def _part(self, piece: MatrixPiece) -> Tensor:
        return self.parted[piece.tensor].values[piece.value][piece.at]

    def _is_sent(self, piece: MatrixPiece) -> bool:
        """Return True for a piece of an operand that workers get."""
        x = self.parted[piece.tensor]
        return piece.near and piece.value < x.reads and piece.value not in x.cached

    def _operands(self, task: _Task) -> list[Tensor]:
        x = self.parted[task.tensor]
        return [
            self.kept[x.number, task.matrix, x.cached[j]] if j in x.cached else value.new_empty(shape)
            for j, (value, shape) in enumerate(zip(x.values[: x.reads], task.shapes, strict=False))
        ]

    def results(self, n: int, operands: Sequence[list[Tensor]]) -> Move:
        """Work on this rank's matrices of a round; return how the pieces of their results go to other ranks."""
        held, tasks = self.rounds[n]
        own = [self.parted[task.tensor] for task in tasks]
        keys = [(x.number, task.matrix) for x, task in zip(own, tasks, strict=True)]
        shapes = [task.shapes[x.reads :] for x, task in zip(own, tasks, strict=True)]
        try:
            results = self.function(keys, operands, shapes)
        except Exception as error:
            self.failure = self.failure or error
            results = [_failed(x, some) for x, some in zip(own, shapes, strict=True)]
        sends = []
        for x, key, task, xs, ys in zip(own, keys, tasks, operands, results, strict=True):
            values = [*xs, *ys]
            self.kept |= {(*key, name): values[j] for j, name in x.to_cache.items()}
            sends += [(y.rank, values[y.value][y.at]) for y in task.pieces if y.value >= x.reads]
        receives = [(y.rank, self._part(y)) for y in held if y.value >= self.parted[y.tensor].reads]
        return Move(self.mesh, sends, receives)


def _failed(x: Parted, shapes: Shapes) -> list[Tensor]:
    """Return NaN for the results of a matrix."""
    made = [y.new_empty(shape) for y, shape in zip(x.values[x.reads :], shapes, strict=True)]
    return [y.fill_(math.nan if y.is_floating_point() else NAN) for y in made]


class _Task(NamedTuple):
    """A matrix that this rank works on, the shapes of its values, and their pieces on all ranks."""

    tensor: int
    matrix: int
    shapes: list[tuple[int, ...]]
    pieces: list[MatrixPiece]


_Round = tuple[list[MatrixPiece], list[_Task]]
"""A part that is worked on at one time: (this rank's pieces, its matrices)."""


@functools.lru_cache(maxsize=65536)
def _rounds(kinds: tuple[Kind, ...], room: int) -> list[_Round]:
    """Return the rounds: in each every worker puts `room` bytes together, one matrix at least."""
    rounds: list[_Round] = []
    filled: dict[int, tuple[int, int]] = {}
    for k, (of, matrix, workers, layouts, sizes) in enumerate(kinds):
        views = [_View.of_layout(x) for x in layouts]
        for e, worker in enumerate(workers):
            boxes = [_box(x.shape, of.shape, matrix, e) for x in layouts]
            shapes = [tuple(b - a for a, b in box) for box in boxes]
            taken = sum(size * math.prod(shape) for size, shape in zip(sizes, shapes, strict=False))
            number, before = filled.get(worker, (0, 0))
            if before and before + taken > room:
                number, before = number + 1, 0
            filled[worker] = number, before + taken
            rounds += [([], []) for _ in range(number + 1 - len(rounds))]
            held, tasks = rounds[number]
            for j, view in enumerate(views):
                held += view.held(k, j, boxes[j], worker)
            if views[0].rank == worker:
                pieces = [piece for j, view in enumerate(views) for piece in view.pieces(k, j, boxes[j])]
                tasks.append(_Task(k, e, shapes, pieces))
    return rounds


class _View(NamedTuple):
    """A value of all ranks: this rank, the index ranges of each rank, and which ranks hold the same, by their
    coordinates along the mesh dimensions that cut nothing."""

    rank: int
    parts: list[tuple[Span, ...]]
    replicas: list[list[int]]

    @classmethod
    def of_layout(cls, of: Layout) -> _View:
        found = _regions(of.shape, of.mesh_shape, of.cuts)
        uncut = [m for m, cut in enumerate(of.cuts) if cut is None]
        rank = next(r for r, (coordinate, _) in enumerate(found) if coordinate == of.coordinate)
        return cls(rank, [part for _, part in found], [[c[m] for m in uncut] for c, _ in found])

    def held(self, tensor: int, value: int, box: Sequence[Span], worker: int) -> list[MatrixPiece]:
        """Return the piece of a worker's matrix that this rank holds, if any; `box`: the matrix's index ranges."""
        here = self.parts[self.rank]
        at = _common(here, box, here)
        return [MatrixPiece(worker, tensor, value, at, self.replicas[self.rank] == self.replicas[worker])] if at else []

    def pieces(self, tensor: int, value: int, box: Sequence[Span]) -> list[MatrixPiece]:
        """Return the pieces of a matrix that this rank works on."""
        found = [(rank, _common(part, box, box)) for rank, part in enumerate(self.parts)]
        own = self.replicas[self.rank]
        return [MatrixPiece(rank, tensor, value, at, self.replicas[rank] == own) for rank, at in found if at]


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
def _box(shape: torch.Size, own: torch.Size, matrix: Matrix, index: int) -> list[Span]:
    """Return the index ranges, in a value of that shape, of a matrix of a tensor of shape `own`."""
    if isinstance(matrix, Heads) and shape == own:
        return [(index * matrix.rows, (index + 1) * matrix.rows), *((0, size) for size in shape[1:])]
    lead = len(layout.matrix_shape(matrix, own)) - 2
    found = [(0, size) for size in shape[lead:]]
    for size in reversed(shape[:lead]):
        index, at = divmod(index, size)
        found.insert(0, (at, at + 1))
    return found
