"""Parameters that lie over several ranks: DTensors, as fully_shard and tensor parallelism make them.

Blocks, random bits and statistics belong to the logical tensor.  Each rank runs the ordinary kernels over its own part,
and is told where that lies (layout.Place); states are DTensors of the parameter's mesh, placed as their shape allows.
What a rule sums over a tensor is summed over the part first, then over the ranks that hold other parts.

What ranks send one another follows from what all of them know: shapes, meshes, placements, plans, and who has a
gradient, which is agreed on first wherever something will be sent.  So no rank waits for one that does not come.

The geometry is that of torch.chunk, in which DTensor cuts a dimension: parts of equal size, the last ones shorter or
empty.  Several mesh dimensions may cut one dimension, each what the one before it left.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from optgen.runtime.layout import layout
from optgen.runtime.records import MATRICES, Field, Heads, Matrix, Variant, dtype_name
from optgen.runtime.records.join import Pair

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

Span = tuple[int, int]
"""Indices [start, stop) of one dimension."""

Cuts = tuple[tuple[int, int] | None, ...]
"""Per mesh dimension: (dimension that it cuts, pieces into which that falls first); None: all ranks have all."""

ALIGNMENT = 64
"""Bytes to which tensors are aligned in what ranks send one another."""


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


def _within(spans: Sequence[Span], start: int, stop: int) -> Iterator[Span]:
    """Yield the spans covered by positions [start, stop) of the concatenated spans."""
    begin = 0
    for a, b in spans:
        low, high = max(start - begin, 0), min(stop - begin, b - a)
        if low < high:
            yield a + low, a + high
        begin += b - a


def _cut(spans: Sequence[Span], ranks: int, rank: int, pieces: int) -> list[Span]:
    """Return the part of the spans that a rank gets: of each of `pieces` equal parts of them."""
    size = sum(b - a for a, b in spans)
    found: list[Span] = []
    for k in range(pieces):
        start, stop = chunk(size, pieces, k)
        low, high = chunk(stop - start, ranks, rank)
        for a, b in _within(spans, start + low, start + high):
            if found and found[-1][1] == a:
                found[-1] = found[-1][0], b
            else:
                found.append((a, b))
    return found


@functools.lru_cache(maxsize=65536)
def region(shape: torch.Size, mesh: tuple[int, ...], coordinate: tuple[int, ...], cuts: Cuts) -> tuple[Span, ...]:
    """Return the index range of each dimension held by the rank at `coordinate`.

    Raises ValueError if a range is not contiguous.
    """
    spans = [[(0, size)] for size in shape]
    for ranks, rank, cut in zip(mesh, coordinate, cuts, strict=True):
        if cut is not None:
            dim, pieces = cut
            spans[dim] = _cut(spans[dim], ranks, rank, pieces)
    if any(len(found) > 1 for found in spans):
        raise ValueError(
            f"a tensor of shape {list(shape)} is cut unevenly by several mesh dimensions, so that ranks hold stretches "
            f"of it that are apart: make the dimension a multiple of the ranks that share it"
        )
    return tuple(found[0] if found else (size, size) for found, size in zip(spans, shape, strict=True))


def _coordinates(mesh: tuple[int, ...], cuts: Cuts) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(n) if c else (0,) for n, c in zip(mesh, cuts, strict=True)))


def _ranks(mesh: tuple[int, ...], cuts: Cuts, dim: int) -> int:
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
    "axis": frozenset({"lead", "col"}),
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
        """Yield a coordinate for each part: 0 along mesh dimensions whose ranks all hold the same."""
        return _coordinates(self.mesh_shape, self.cuts)

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
    """Return the layout of a DTensor."""
    return _layout(x.device_mesh, tuple(x.placements), x.shape)


@functools.lru_cache(maxsize=65536)
def field_layout(field: Field, of: Layout, gathered: bool = False) -> Layout:
    """Return the layout of a parameter's field; gathered: all ranks have all of it.

    A matrix beside those of elements is cut along its first dimension by each mesh dimension that cuts the parameter.
    """
    shape = torch.Size(layout.field_shape(field, of.shape))
    ndim = len(of.shape)

    def dim(cut: int) -> int | None:
        if gathered:
            return None
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
    """The DTensor whose part on this rank is `part`."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(of.shape, device="meta").stride()
    return DTensor.from_local(part, of.mesh, of.placements, run_check=False, shape=of.shape, stride=stride)


@dataclass(frozen=True)
class Parts:
    """A DTensor parameter and its states, as parts and as they are kept.

    gathered   whether all ranks keep all of the states
    """

    variant: Variant
    layout: Layout
    gathered: bool

    @classmethod
    def of(cls, p: Any, variant: Variant) -> Parts:
        """ValueError where the parts are none that kernels can update."""
        found = layout_of(p)
        return cls(variant, found, is_gathered(variant, found))

    def field(self, f: Field) -> Layout:
        """Return the layout of a field."""
        return field_layout(f, self.layout, self.gathered)

    def shape(self, f: Field, p: Tensor) -> tuple[int, ...]:
        """Return the shape of this rank's part of a field, for a `weight` p."""
        if f.space not in MATRICES:
            return layout.field_shape(f, p.shape)
        here = self.field(f).here
        assert here is not None
        return tuple(b - a for a, b in here)

    def weight(self, p: Any) -> Tensor:
        """The weight that stands beside this rank's states: its part of it, or all of it."""
        part: Tensor = (full if self.gathered else local)(p)
        return part.detach()

    def wrapped(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """A state made for `weight`, as it is kept: DTensors."""
        fields = {f.name: f for f in self.variant.fields}
        return {
            name: wrapped(value, self.field(fields[name])) if name in fields else value for name, value in entry.items()
        }

    def taken(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a saved state, of DTensors that lie as its own and of whole tensors; dense values
        of states, too.  Raises ValueError if one fits neither."""
        fields = {f.name: f for f in self.variant.fields}
        few = {f.owner: f.of_values for f in self.variant.fields if not f.wide}
        out = {}
        for name, value in entry.items():
            own = [self.field(fields[name])] if name in fields else []
            if name in self.variant.states:
                dense = self.layout if name not in few else self.field(few[name])
                own.append(dense if not self.gathered else _everywhere(dense))
            out[name] = _part_here(name, value, own) if own and isinstance(value, Tensor) else value
        return out

    def assembled(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The states among those that are encoded only as a whole, whole: all ranks of the mesh have to ask."""
        coded = self.variant.eager.matrices
        own = {f.owner: self.field(f.of_values) if f.owner in coded else self.layout for f in self.variant.fields
               if f.owner in coded or (f.wide and self.variant.of_whole)}  # fmt: skip
        wanted = {name: Whole(own[name], value) for name, value in values.items() if name in own}
        gather(list(wanted.values()))
        return {name: item.found for name, item in wanted.items() if item.found is not None}

    def beside(self, name: str, value: Tensor) -> Tensor:
        """Return the part of a tensor of the parameter's shape, whole or a DTensor, that belongs to `weight`.

        Raises ValueError if it has another shape or mesh.
        """
        return _part_here(name, value, [_everywhere(self.layout) if self.gathered else self.layout])


def _part_here(name: str, value: Tensor, own: Sequence[Layout]) -> Tensor:
    """This rank's part of a whole tensor, or of a DTensor, in the first of these layouts that has its shape."""
    of = next((x for x in own if x.shape == value.shape), None)
    if of is None:
        shapes = " or ".join(str(list(x.shape)) for x in own)
        raise ValueError(f"{name}: expected a tensor of shape {shapes} over all ranks, got {list(value.shape)}")
    if not is_sharded(value):
        return part_of(value, of)
    kept: Any = value
    if kept.device_mesh != of.mesh:
        raise ValueError(f"{name}: expected a tensor over {of.mesh}, got one over another mesh")
    if tuple(kept.placements) != of.placements:
        kept = kept.to(torch.int32) if kept.dtype == torch.int16 else kept  # no backend sends 16-bit integers
        kept = kept.redistribute(placements=of.placements)
    part: Tensor = local(kept).to(value.dtype)
    return part


def _everywhere(of: Layout) -> Layout:
    """Return the layout of the same tensor if all ranks have all of it."""
    return _layout(of.mesh, tuple(_moved(placement, None) for placement in of.placements), of.shape)


def decode(
    plan: Pair, variant: Variant, p: Tensor, entry: Mapping[str, Any], wanted: Collection[str]
) -> dict[str, Tensor]:
    """layout.decode; of a DTensor: DTensors that lie as it does, or as the fields do that hold few values."""
    if not is_sharded(p):
        return layout.decode(plan, variant, p, entry, wanted)
    parts = Parts.of(p, variant)
    coded, here = variant.eager.matrices, locals_of(entry)
    needed = {x for name in wanted if name in coded for x in variant.coded(name)}
    whole = {f.name: Whole(parts.field(f), here[f.name]) for f in variant.fields if f.name in needed}
    gather(list(whole.values()))
    here = {**here, **{name: item.found for name, item in whole.items()}}
    made = layout.decode(plan, variant, parts.weight(p), here, wanted)
    few = {f.owner: f.of_values for f in variant.fields if not f.wide}
    out: dict[str, Tensor] = {}
    for name, value in made.items():
        of = parts.field(few[name]) if name in few else parts.layout
        whole_here = name in coded if name in few else parts.gathered
        out[name] = wrapped(part_of(value, of).contiguous() if whole_here else value, of)
    return out


def is_gathered(variant: Variant, of: Layout) -> bool:
    """Return True for vectors whose parts cut storage blocks: every rank steps the whole, with states that all
    ranks have.  Other parameters are stepped in parts.  Raises ValueError, saying what to do, if neither can be."""
    matrix = variant.matrix
    if isinstance(matrix, Heads) and matrix.stacked and of.dims():
        raise ValueError("it lies over several ranks, and `blocks` divides each matrix of a stack: keep it whole")
    if not isinstance(matrix, str):
        height = matrix.rows if isinstance(matrix, Heads) else matrix
        _check_blocks(of.shape, of.mesh_shape, of.cuts, height)
        return False
    blocks = {(f.per, f.width) for f in variant.fields if f.per > 1}
    blocks |= {(s.block, 1) for s in variant.stages if s.block > 1}
    stacked = variant.sums_by_matrix and variant.stochastic and matrix == "last"
    first = variant.needs_matrix and matrix == "first"
    return _cuts_blocks(
        of.shape, of.mesh_shape, of.cuts, frozenset(blocks), variant.stochastic, stacked, first, variant.has_axes
    )


@functools.lru_cache(maxsize=65536)
def _check_blocks(shape: torch.Size, mesh: tuple[int, ...], cuts: Cuts, height: int) -> None:
    """`is_gathered` of one of which `height` consecutive rows are one row, or all rows, of the rule's matrix."""
    if {cut[0] for cut in cuts if cut is not None} - {0}:
        raise ValueError(
            "it is cut along another dimension than the first, and `blocks` puts rows of it together: shard it along "
            "dimension 0, or leave it out of `blocks`"
        )
    ranks = _ranks(mesh, cuts, 0)
    for coordinate in _coordinates(mesh, cuts):
        top, bottom = region(shape, mesh, coordinate, cuts)[0]
        if top != bottom and (top % height or bottom % height):
            raise ValueError(
                f"a rank holds rows [{top}, {bottom}) of its {shape[0]}, which cuts a block of {height} rows: give it "
                f"a number of `blocks` that is a multiple of the {ranks} ranks over which its rows lie, or leave it "
                f"out of `blocks`"
            )


@functools.lru_cache(maxsize=65536)
def _cuts_blocks(
    shape: torch.Size, mesh: tuple[int, ...], cuts: Cuts, blocks: frozenset[tuple[int, int]], counted: bool,
    stacked: bool, first: bool, axes: bool,
) -> bool:  # fmt: skip
    dims = {cut[0] for cut in cuts if cut is not None}
    uneven = first and 1 in dims and shape[1] % _ranks(mesh, cuts, 1) != 0
    if len(shape) > 2 and (
        uneven
        or (dims - {0} and (stacked or (first and axes and len(layout.column_dims("first", shape)) > 1)))
        or (dims - {0, 1} and (blocks or counted or first))
    ):
        raise ValueError(
            f"it is cut along dimension {max(dims)} of {len(shape)}, so that ranks hold no stretch of the rows or "
            f"columns that this rule and plan sum over, put into blocks or count for random bits: shard it along "
            f"dimension 0"
        )
    rows, columns = layout.grid(shape)
    behind = math.prod(shape[2:])
    for coordinate in _coordinates(mesh, cuts):
        here = region(shape, mesh, coordinate, cuts)
        if len(shape) < 2 and not here:
            continue
        left, right = here[0] if len(shape) < 2 else (here[1][0] * behind, here[1][1] * behind)
        for block, width in blocks:
            whole = left == right or (left % block == 0 and (right % block == 0 or right == columns))
            if whole:
                # DTensor cuts the blocks' own tensor by itself: it has to come to the same parts.
                own = (1 if len(shape) < 2 else rows, -(-columns // block) * width)
                moved = tuple(None if c is None else (1 if len(shape) < 2 else min(c[0], 1), c[1]) for c in cuts)
                found = region(torch.Size(own), mesh, coordinate, moved)[1]
                whole = found == (left // block * width, -(-right // block) * width) or (
                    left == right and found[0] == found[1]
                )
            if not whole and len(shape) < 2:
                return True
            if not whole:
                raise ValueError(
                    f"a rank holds columns [{left}, {right}) of its {columns}, which cuts or shifts the blocks of "
                    f"{block} columns that this plan stores: shard it along dimension 0, make its columns a multiple "
                    f"of {_ranks(mesh, cuts, 1)} x {block}, or use a plan without blocks (fp32, bf16_sr, split32)"
                )
    return False


# -- what a bucket knows of a parameter of several ranks -------------------------------------------------


@dataclass(slots=True)
class Shard:
    """A DTensor parameter in a bucket.

    position  over all groups: the order in which ranks send
    owner     the state that the optimizer keeps, of DTensors
    whole     whether the kernels of this step see the whole logical tensor, and this rank keeps its part of the result
    workers   for each of its matrices the rank that works on it, if a function of whole matrices is called (workers.py)
    """

    p: DTensor
    layout: Layout
    position: int
    owner: dict[str, Any]
    parts: Parts
    whole: bool = False
    workers: tuple[int, ...] = ()

    @property
    def gathered(self) -> bool:
        return self.parts.gathered

    @property
    def shared(self) -> bool:
        """True if each of its matrices is worked on by one rank: of its parts, or of a matrix that all ranks have."""
        return bool(self.workers) and self.whole != bool(self.layout.dims())

    def piece(self, shape: torch.Size, worker: int) -> Shard:
        """Return that of one of its matrices, which all ranks have."""
        return replace(self, layout=self.layout.of_all(shape), workers=(worker,))


def pair(p: DTensor, g: Any) -> tuple[Tensor, Tensor]:
    """The parts of a parameter and its gradient on this rank, laid out alike; TypeError for a gradient that is a plain
    tensor, RuntimeError where a part is of another dtype than its DTensor says, or the two are of different shapes."""
    if not is_sharded(g):
        raise TypeError("it is a DTensor, but its gradient is not")
    if g.device_mesh != p.device_mesh:
        raise ValueError(f"it lies over {p.device_mesh}, its gradient over {g.device_mesh}")
    if tuple(g.placements) != tuple(p.placements):
        with torch.no_grad():
            g = g.redistribute(placements=p.placements)
    here: Tensor = local(p)
    found: Tensor = local(g)
    for which, whole, part in (("it", p, here), ("its gradient", g, found)):
        if part.dtype is not whole.dtype:
            raise RuntimeError(
                f"{which} is a DTensor of {dtype_name(whole.dtype)}, but its part on this rank is "
                f"{dtype_name(part.dtype)}: its .data was set, which changes the DTensor and not the part; convert "
                f"models of DTensors with model.to(dtype), or before they are sharded"
            )
    if here.shape != found.shape or here.device != found.device:
        raise RuntimeError(
            f"its part on this rank is of shape {list(here.shape)} on {here.device}, that of its gradient of shape "
            f"{list(found.shape)} on {found.device}: it was given other memory after backward"
        )
    return here, found


# -- what ranks send one another -------------------------------------------------------------------------


@dataclass(slots=True)
class Sum:
    """Values of a part that become those of the tensor.

    groups    (mesh, mesh dimension) of the ranks that hold the other parts
    largest   whether the largest is wanted, not the sum
    value     fp32, contiguous; written
    """

    position: int
    groups: list[tuple[DeviceMesh, int]]
    largest: bool
    value: Tensor


@dataclass(slots=True)
class Whole:
    """A part that is wanted whole: `found` is the tensor of all parts."""

    layout: Layout
    value: Tensor
    found: Tensor | None = None


Pieces = Sequence[tuple[int, Tensor]]
"""Views that are sent to ranks of a mesh, or received from them; ranks are numbered as the mesh lists them."""


@dataclass(slots=True)
class Move:
    """Pieces of tensors that change ranks.  Two ranks list the pieces that go from one to the other in one order."""

    mesh: DeviceMesh
    sends: Pieces
    receives: Pieces


@dataclass(slots=True)
class Exchange:
    """The requests of a step to other ranks: sums, and pieces of tensors.

    ahead   whether the pieces are needed at the next request of the same step only, and may be under way until then
    """

    sums: list[Sum] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    ahead: bool = False


def serve(exchanges: Iterable[Exchange]) -> Callable[[], None]:
    """Send one message per group of ranks for all sums, one for all maxima, one for all pieces between two ranks.

    Returns what is to be called before the next messages: where all exchanges are ahead, it waits for the pieces.
    """
    found = list(exchanges)
    reduce([s for e in found for s in e.sums])
    arrive = move([m for e in found for m in e.moves])
    if all(e.ahead for e in found):
        return arrive
    arrive()
    return lambda: None


def reduce(items: Sequence[Sum]) -> None:
    """Adds up (or takes the largest of) what all ranks have; in place."""
    import torch.distributed as dist

    items = sorted(items, key=lambda item: item.position)
    for depth in range(max((len(item.groups) for item in items), default=0)):
        together: dict[tuple[str, bool, torch.device], tuple[Any, list[Tensor]]] = {}
        for item in items:
            if depth < len(item.groups):
                mesh, dim = item.groups[depth]
                group = mesh.get_group(dim)
                key = group.group_name, item.largest, _sent_from(mesh, item.value.device)
                together.setdefault(key, (group, []))[1].append(item.value)
        for (_, largest, device), (group, values) in together.items():
            flat = torch.cat([value.reshape(-1) for value in values]).to(device)
            if largest:
                ordered = _ordered(flat)
                dist.all_reduce(ordered, dist.ReduceOp.MAX, group=group)
                size = ordered.abs().view(torch.float32)
                flat = torch.where(ordered < 0, -size, size)
            else:
                dist.all_reduce(flat, group=group)
            for value, new in zip(values, torch.split(flat, [value.numel() for value in values]), strict=True):
                value.copy_(new.view(value.shape))


def _sent_from(mesh: DeviceMesh, device: torch.device) -> torch.device:
    """Return the device that a tensor is sent from: the mesh's, because its ranks may have no way between others (NCCL
    has none between CPUs, where states that are offloaded lie); what has no memory stays so."""
    return device if device.type in ("meta", mesh.device_type) else torch.device(mesh.device_type)


def _ordered(x: Tensor) -> Tensor:
    """fp32 as int32 in the same order, NaN above all: what is largest is then the same for every way of sending."""
    bits = torch.where(x.isnan(), torch.nan, x).abs().view(torch.int32)
    return torch.where((x < 0) & ~x.isnan(), -bits, bits)


def gather(items: Sequence[Whole]) -> None:
    """Make the tensors of all parts."""
    import torch.distributed as dist

    send = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # named anew in torch 2.13
    together: dict[tuple[Any, tuple[int, ...], torch.device], list[Whole]] = {}
    for item in items:
        dims = tuple(item.layout.dims())
        device = _sent_from(item.layout.mesh, item.value.device)
        together.setdefault((item.layout.mesh, dims, device), []).append(item)
    for (mesh, dims, device), some in together.items():
        room = [-(-largest_part(x.layout) * x.value.element_size() // ALIGNMENT) * ALIGNMENT for x in some]
        packed = torch.zeros(sum(room), dtype=torch.uint8, device=device)
        for item, piece in zip(some, torch.split(packed, room), strict=True):
            data = item.value.contiguous().reshape(-1).view(torch.uint8)
            piece[: data.numel()].copy_(data)
        for dim in dims:
            group = mesh.get_group(dim)
            out = torch.empty(mesh.size(dim) * packed.numel(), dtype=torch.uint8, device=device)
            send(out, packed, group=group)
            packed = out
        pieces = packed.view(*(mesh.size(dim) for dim in reversed(dims)), sum(room))
        begin = 0
        for item, size in zip(some, room, strict=True):
            item.found = torch.empty(item.layout.shape, dtype=item.value.dtype, device=item.value.device)
            if len(dims) == 1 and item.layout.cuts[dims[0]] == (0, 1):
                # Equal parts one after the other, but for the last one: no need to look at each.
                data = pieces[:, begin : begin + largest_part(item.layout) * item.value.element_size()].reshape(-1)
                data = data[: item.found.numel() * item.value.element_size()].view(item.value.dtype)
                item.found.copy_(data.view(item.found.shape))
                begin += size
                continue
            for coordinate in item.layout.coordinates():
                spans = item.layout.at(coordinate)
                shape = [b - a for a, b in spans]
                data = pieces[tuple(coordinate[dim] for dim in reversed(dims))][begin : begin + size]
                data = data[: math.prod(shape) * item.value.element_size()].view(item.value.dtype).view(shape)
                item.found[tuple(slice(a, b) for a, b in spans)] = data
            begin += size


def full(x: Any) -> Any:
    """Return all of a DTensor, for which all ranks of its mesh ask; anything else as it is."""
    if not is_sharded(x):
        return x
    wanted = Whole(layout_of(x), local(x).detach())
    gather([wanted])
    return wanted.found


def move(items: Sequence[Move]) -> Callable[[], None]:
    """Start to bring pieces of tensors to the ranks that receive them; return what waits for them, and takes them."""
    import torch.distributed as dist

    under_way: list[tuple[Any, list[Tensor], list[Tensor], Tensor]] = []
    for mesh in dict.fromkeys(item.mesh for item in items):
        group, order = _all_ranks(mesh, dist.group.WORLD)
        some = [item for item in items if item.mesh == mesh]
        read, packed, out, sizes = _buffer(mesh, order, [piece for item in some for piece in item.sends])
        written, arrived, into, expected = _buffer(mesh, order, [piece for item in some for piece in item.receives])
        if read:
            torch._foreach_copy_(packed, read)
        request = dist.all_to_all_single(into, out, expected, sizes, group=group, async_op=True)
        under_way.append((request, written, arrived, out))

    def arrive() -> None:
        for request, written, arrived, _ in under_way:
            request.wait()
            if written:
                torch._foreach_copy_(written, arrived)

    return arrive


def _buffer(
    mesh: DeviceMesh, order: Sequence[int], pieces: Pieces
) -> tuple[list[Tensor], list[Tensor], Tensor, list[int]]:
    """Return pieces by rank, their places in a buffer, it, and how many of its bytes are each rank's."""
    found = [x for _, x in sorted(pieces, key=lambda piece: order[piece[0]])]
    room = [-(-x.nbytes // 8) * 8 for x in found]  # any dtype may begin there
    sizes = [0] * len(order)
    for rank, x in pieces:
        sizes[order[rank]] += -(-x.nbytes // 8) * 8
    device = _sent_from(mesh, found[0].device) if found else mesh.device_type
    flat = torch.empty(sum(room), dtype=torch.uint8, device=device)
    places = [y[: x.nbytes].view(x.dtype).view(x.shape) for x, y in zip(found, torch.split(flat, room), strict=True)]
    return found, places, flat, sizes


@functools.lru_cache(maxsize=64)
def _all_ranks(mesh: DeviceMesh, world: Any) -> tuple[Any, tuple[int, ...]]:
    """Return the group of all ranks of a mesh, made if there is none, and the place of each in it.

    world   the default group: a new one has new groups
    """
    import torch.distributed as dist

    ranks = mesh.mesh.flatten().tolist()
    if mesh.ndim == 1:
        group = mesh.get_group()
    elif len(ranks) == dist.get_world_size():
        group = world
    else:
        group = dist.new_group(ranks, use_local_synchronization=True)
    return group, tuple(dist.get_group_rank(group, rank) for rank in ranks)


@functools.lru_cache(maxsize=65536)
def largest_part(of: Layout) -> int:
    """Return the elements of the largest part."""
    return max(math.prod(b - a for a, b in of.at(c)) for c in of.coordinates())


def part_of(whole: Tensor, of: Layout) -> Tensor:
    """This rank's part of a whole tensor; a view."""
    assert of.here is not None
    return whole[tuple(slice(a, b) for a, b in of.here)]


def agreed(params: Sequence[DTensor]) -> list[bool]:
    """Return, for each parameter, True if any rank of its mesh has a gradient of it.

    One byte for each parameter goes around each mesh dimension, and the host waits for it.
    """
    found = [p.grad is not None for p in params]
    for mesh in dict.fromkeys(p.device_mesh for p in params):
        own = [i for i, p in enumerate(params) if p.device_mesh == mesh]
        for i, has in zip(own, _on_any_rank(mesh, [found[i] for i in own]), strict=True):
            found[i] = has
    return found


def anywhere(found: bool, params: Iterable[Any]) -> bool:
    """Return True if it was found on any rank of the meshes over which these parameters lie, all of which ask."""
    for mesh in dict.fromkeys(p.device_mesh for p in params if is_sharded(p)):
        (found,) = _on_any_rank(mesh, [found])
    return found


def _on_any_rank(mesh: DeviceMesh, found: list[bool]) -> list[bool]:
    """Return, for each value, True if it is True on any rank of the mesh; on ranks outside of it, the values."""
    import torch.distributed as dist

    if mesh.get_coordinate() is None:
        return found
    have = torch.tensor(found, dtype=torch.uint8, device="cpu").to(mesh.device_type)
    for dim in range(mesh.ndim):
        if mesh.size(dim) > 1:
            dist.all_reduce(have, dist.ReduceOp.MAX, group=mesh.get_group(dim))
    return list(map(bool, have.tolist()))
