"""Parameters that lie over several ranks: DTensors, as fully_shard and tensor parallelism make them.

Blocks, random bits and statistics belong to the logical tensor.  Each rank runs the ordinary kernels over its own part,
and is told where that lies (layout.Place); states are DTensors of the parameter's mesh, placed as their shape allows.
What a rule sums over a tensor is summed over the part first, then over the ranks that hold other parts.

The geometry is that of torch.chunk, in which DTensor cuts a dimension: parts of equal size, the last ones shorter or
empty.  Several mesh dimensions may cut one dimension, each what the one before it left.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from optgen.runtime.layout import layout
from optgen.runtime.records import MATRICES, Field, Heads, Matrix

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

Span = tuple[int, int]
"""Indices [start, stop) of one dimension."""

Cuts = tuple[tuple[int, int] | None, ...]
"""Per mesh dimension: (dimension that it cuts, parts into which later mesh dimensions have cut that before; 1: it comes
in its turn); None: all ranks have all."""


def kind() -> type[DTensor] | None:
    """The class of sharded tensors; None as long as nobody has imported it, so that there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", None)


def is_sharded(x: object) -> bool:
    """Return True for a DTensor."""
    found = kind()
    return found is not None and isinstance(x, found)


def local(x: Any) -> Any:
    """The part of a DTensor that is on this rank, without autograd; anything else as it is."""
    if not is_sharded(x):
        return x
    with torch.no_grad():
        return waited(x.to_local())


def waited(x: Any) -> Any:
    """The result of a collective that may still be under way, which has no memory until then; all else as it is."""
    wait = getattr(x, "wait", None)
    return x if wait is None else wait()


def locals_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A state, with the parts of its tensors that are on this rank."""
    return {name: local(value) for name, value in entry.items()}


# -- geometry --------------------------------------------------------------------------------------------


def chunk(size: int, ranks: int, rank: int) -> Span:
    """The part of `size` things that a rank gets.

    >>> [chunk(7, 4, k) for k in range(4)], [chunk(5, 4, k) for k in range(4)]
    ([(0, 2), (2, 4), (4, 6), (6, 7)], [(0, 2), (2, 4), (4, 5), (5, 5)])
    """
    width = -(-size // ranks)
    start = min(rank * width, size)
    return start, min(start + width, size)


@functools.lru_cache(maxsize=65536)
def region(shape: torch.Size, mesh: tuple[int, ...], coordinate: tuple[int, ...], cuts: Cuts) -> tuple[Span, ...]:
    """Return the index range of each dimension held by the rank at `coordinate`.

    Raises ValueError for a cut that does not come right after those that it names: ranges would not be contiguous.
    """
    found, parts = [(0, size) for size in shape], [1 for _ in shape]
    for (dim, before), ranks, rank in sorted(
        ((cut, n, k) for cut, n, k in zip(cuts, mesh, coordinate, strict=True) if cut), key=lambda x: x[0][1]
    ):
        if before > 1 and before != parts[dim]:
            raise ValueError(
                f"a tensor of shape {list(shape)} has a strided placement of factor {before} where other mesh "
                f"dimensions cut dimension {dim} into {parts[dim]}, so that ranks hold stretches of it that are apart: "
                f"redistribute it"
            )
        start, stop = found[dim]
        low, high = chunk(stop - start, ranks, rank)
        found[dim], parts[dim] = (start + low, start + high), parts[dim] * ranks
    return tuple(found)


def coordinates(mesh: tuple[int, ...], cuts: Cuts) -> Iterator[tuple[int, ...]]:
    """Yield a coordinate for each part: 0 along mesh dimensions whose ranks all hold the same."""
    return itertools.product(*(range(n) if c else (0,) for n, c in zip(mesh, cuts, strict=True)))


def ranks_along(mesh: tuple[int, ...], cuts: Cuts, dim: int) -> int:
    """Return the number of parts into which a dimension is cut."""
    return math.prod(n for n, c in zip(mesh, cuts, strict=True) if c and c[0] == dim)


def cuts_of(mesh: DeviceMesh, placements: Sequence[Any], ndim: int) -> Cuts:
    """Return the cuts of placements.  Raises ValueError if ranks hold summands."""
    found: list[tuple[int, int] | None] = []
    for ranks, placement in zip(mesh.shape, placements, strict=True):
        if placement.is_partial():
            raise ValueError(
                f"its placement {placement} says that every rank holds a summand of it: redistribute it first"
            )
        dim = None if placement.is_replicate() or ranks == 1 else getattr(placement, "dim", None)
        found.append(None if dim is None else (dim % ndim, int(getattr(placement, "split_factor", 1))))
    return tuple(found)


def _moved(placement: Any, dim: int | None) -> Any:
    """The placement along another dimension; None: everywhere the same."""
    from torch.distributed.tensor import Replicate, Shard

    if dim is None:
        return Replicate()
    split = getattr(placement, "split_factor", None)
    return Shard(dim) if split is None else type(placement)(dim, split_factor=split)


# Dimensions of the logical tensor that a value of a space has.
_DIMS: Mapping[str, frozenset[str]] = {
    "elem": frozenset({"lead", "row", "col"}),
    "row": frozenset({"lead", "row"}),
    "col": frozenset({"lead", "col"}),
    "mat": frozenset({"lead"}),
    "tensor": frozenset(),
    "model": frozenset(),
}


def role(dim: int, shape: torch.Size, matrix: Matrix) -> str:
    """Return what a dimension counts: rows of a rule's matrices ("row"), columns ("col") or matrices ("lead")."""
    if len(shape) < 2:
        return "col"
    if isinstance(matrix, Heads):
        return "lead" if dim == 0 else "col"
    if matrix != "last":
        return "row" if dim == 0 else "col"
    return {len(shape) - 2: "row", len(shape) - 1: "col"}.get(dim, "lead")


def reduced(space: str, source: str) -> frozenset[str]:
    """The dimensions over which a value of a space sums those of another."""
    return _DIMS[source] - _DIMS[space]


class Layout:
    """The layout of a logical tensor over a mesh.

    shape       of the logical tensor
    here        what this rank holds of each dimension; None: it is not in the mesh
    """

    def __init__(self, mesh: DeviceMesh, placements: tuple[Any, ...], shape: torch.Size) -> None:
        self.mesh, self.placements, self.shape = mesh, placements, shape
        self.cuts = cuts_of(mesh, placements, max(len(shape), 1))
        self.mesh_shape = tuple(mesh.shape)
        found = mesh.get_coordinate()
        self.coordinate = None if found is None else tuple(found)
        self.here = None if self.coordinate is None else self.at(self.coordinate)

    def at(self, coordinate: tuple[int, ...]) -> tuple[Span, ...]:
        """Return the index ranges held by the rank at a coordinate."""
        return region(self.shape, self.mesh_shape, coordinate, self.cuts)

    def of_all(self, shape: Sequence[int]) -> Layout:
        """Return the layout of a tensor that all ranks of the mesh have."""
        return _layout(self.mesh, (_moved(None, None),) * len(self.cuts), torch.Size(shape))

    def dims(self) -> list[int]:
        """The mesh dimensions that cut the tensor."""
        return [m for m, cut in enumerate(self.cuts) if cut is not None]

    def coordinates(self) -> Iterator[tuple[int, ...]]:
        """Yield a coordinate for each part."""
        return coordinates(self.mesh_shape, self.cuts)

    def roles(self, matrix: Matrix) -> frozenset[str]:
        """Return which roles of dimensions are cut: rows, columns or matrices."""
        return frozenset(role(cut[0], self.shape, matrix) for cut in self.cuts if cut is not None)

    def groups(self, over: frozenset[str], matrix: Matrix) -> list[int]:
        """The mesh dimensions whose ranks hold other parts of what is summed over those dimensions."""
        return [m for m, c in enumerate(self.cuts) if c is not None and role(c[0], self.shape, matrix) in over]

    def place(self, matrix: Matrix) -> layout.Place:
        """Return the place of this rank's part in the 2-D view."""
        assert self.here is not None
        whole = layout.place(layout.matrix_shape(matrix, self.shape))
        if len(self.shape) < 2:
            return whole._replace(column=self.here[0][0] if self.here else 0)
        (top, _), *rest = self.here
        (left, _), *deeper = rest
        if not isinstance(matrix, str):  # whole blocks, of all columns: see mode
            return whole._replace(row=top // (matrix.rows if isinstance(matrix, Heads) else matrix))
        behind = math.prod(self.shape[2:])
        if any(span != (0, size) for span, size in zip(deeper, self.shape[2:], strict=True)):
            return whole._replace(row=top, width=math.prod(b - a for a, b in rest))  # nothing is numbered: see problem
        return whole._replace(row=top, column=left * behind)


@functools.lru_cache(maxsize=65536)
def _layout(mesh: DeviceMesh, placements: tuple[Any, ...], shape: torch.Size) -> Layout:
    return Layout(mesh, placements, shape)


def layout_of(x: DTensor) -> Layout:
    return _layout(x.device_mesh, tuple(x.placements), x.shape)


def layout_over(x: Any, replicas: DeviceMesh | None) -> Layout | None:
    """Return the layout of a DTensor, or of a tensor that all ranks of `replicas` hold whole; None for any other."""
    if is_sharded(x):
        return layout_of(x)
    return None if replicas is None else _layout(replicas, (_moved(None, None),), x.shape)


def mesh_of(group: Any, device: torch.device) -> DeviceMesh | None:
    """Return the mesh of a process group, None of one rank.  Raises TypeError if it is no group of this rank's."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"replicas must be a process group of this rank's, as ddp.process_group, got {group!r:.80}")
    return DeviceMesh.from_group(group, device.type) if group.size() > 1 else None


@functools.lru_cache(maxsize=65536)
def field_layout(field: Field, of: Layout, gathered: bool = False) -> Layout:
    """Return the layout of a parameter's field; gathered: all ranks have all of it.

    A matrix beside those of elements is cut along its first dimension by each mesh dimension that cuts the parameter.
    """
    shape = torch.Size(layout.field_shape(field, of.shape))
    ndim = len(of.shape)
    if gathered:
        return of.of_all(shape)

    def dim(cut: int) -> int | None:
        if field.space in MATRICES:
            return 0
        if field.space == "elem":
            if field.per == 1:
                return cut
            return 0 if ndim >= 2 and cut == 0 else 1
        kept = role(cut, of.shape, field.matrix)
        if kept not in _DIMS[field.space]:
            return None
        return cut if field.matrix == "last" or ndim <= 2 else min(cut, 1)

    cuts = [getattr(placement, "dim", None) for placement in of.placements]
    moved = [None if cut is None else dim(cut % max(ndim, 1)) for cut in cuts]
    own = [None if field.space in MATRICES else x for x in of.placements]  # strided by one dimension, not by another
    return _layout(of.mesh, tuple(map(_moved, own, moved)), shape)


def wrapped(part: Tensor, of: Layout) -> DTensor:
    """The DTensor whose part on this rank is `part`, which stays where it lies: `from_local` moves it."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(of.shape, torch.empty(of.shape, device="meta").stride(), part.dtype)
    made: Any = DTensor
    found: DTensor = made(part, DTensorSpec(of.mesh, of.placements, tensor_meta=meta), requires_grad=False)
    return found


@functools.lru_cache(maxsize=65536)
def largest_part(of: Layout) -> int:
    """Return the elements of the largest part."""
    return max(math.prod(b - a for a, b in of.at(c)) for c in of.coordinates())


def part_of(whole: Tensor, of: Layout) -> Tensor:
    """This rank's part of a whole tensor; a view."""
    assert of.here is not None
    return whole[tuple(slice(a, b) for a, b in of.here)]
