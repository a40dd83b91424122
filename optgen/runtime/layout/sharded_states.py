"""A DTensor parameter and its states in a step: this rank's parts, and how they are kept.

Cuts that kernels cannot follow are refused here, and vectors whose parts cut storage blocks are gathered.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from optgen.runtime.layout import layout, sharding
from optgen.runtime.layout.messages import full, gather
from optgen.runtime.layout.sharding import Cuts, Layout, field_layout, local, part_of, wrapped
from optgen.runtime.records import MATRICES, Field, Heads, Variant, dtype_name
from optgen.runtime.records.join import Pair

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class ShardedStates:
    """A DTensor parameter and its states, as parts and as they are kept.

    variant    the kernel, whose fields are the states
    layout     of the parameter over the ranks
    gathered   True if all ranks keep all of the states
    """

    variant: Variant
    layout: Layout
    gathered: bool

    @classmethod
    def of(cls, p: Any, variant: Variant) -> ShardedStates:
        """ValueError where the parts are none that kernels can update."""
        found = sharding.layout_of(p)
        return cls(variant, found, is_gathered(variant, found))

    def field(self, f: Field) -> Layout:
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
                own.append(dense if not self.gathered else dense.of_all(dense.shape))
            out[name] = _part_here(name, value, own) if own and isinstance(value, Tensor) else value
        return out

    def assembled(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The states among those that are encoded only as a whole, whole: all ranks of the mesh have to ask."""
        coded = self.variant.eager.matrices
        own = {f.owner: self.field(f.of_values) if f.owner in coded else self.layout for f in self.variant.fields
               if f.owner in coded or (f.wide and self.variant.of_whole)}  # fmt: skip
        wanted = {name: (own[name], value) for name, value in values.items() if name in own}
        return dict(zip(wanted, gather(list(wanted.values())), strict=True))

    def beside(self, name: str, value: Tensor) -> Tensor:
        """Return the part of a tensor of the parameter's shape, whole or a DTensor, that belongs to `weight`.

        Raises ValueError if it has another shape or mesh.
        """
        return _part_here(name, value, [self.layout.of_all(self.layout.shape) if self.gathered else self.layout])


def _part_here(name: str, value: Tensor, own: Sequence[Layout]) -> Tensor:
    """This rank's part of a whole tensor, or of a DTensor, in the first of these layouts that has its shape."""
    of = next((x for x in own if x.shape == value.shape), None)
    if of is None:
        shapes = " or ".join(str(list(x.shape)) for x in own)
        raise ValueError(f"{name}: expected a tensor of shape {shapes} over all ranks, got {list(value.shape)}")
    if not sharding.is_sharded(value):
        return part_of(value, of)
    kept: Any = value
    if kept.device_mesh != of.mesh:
        raise ValueError(f"{name}: expected a tensor over {of.mesh}, got one over another mesh")
    if tuple(kept.placements) != of.placements:
        kept = kept.to(torch.int32) if kept.dtype == torch.int16 else kept  # no backend sends 16-bit integers
        kept = kept.redistribute(placements=of.placements)
    part: Tensor = local(kept).to(value.dtype)
    return part


def decode(
    plan: Pair, variant: Variant, p: Tensor, entry: Mapping[str, Any], wanted: Collection[str]
) -> dict[str, Tensor]:
    """layout.decode; of a DTensor: DTensors that lie as it does, or as the fields do that hold few values."""
    if not sharding.is_sharded(p):
        return layout.decode(plan, variant, p, entry, wanted)
    parts = ShardedStates.of(p, variant)
    coded, here = variant.eager.matrices, sharding.locals_of(entry)
    needed = {x for name in wanted if name in coded for x in variant.coded(name)}
    fields = [f for f in variant.fields if f.name in needed]
    whole = gather([(parts.field(f), here[f.name]) for f in fields])
    here |= {f.name: x for f, x in zip(fields, whole, strict=True)}
    made = layout.decode(plan, variant, parts.weight(p), here, wanted)
    few = {f.owner: f.of_values for f in variant.fields if not f.wide}
    out: dict[str, Tensor] = {}
    for name, value in made.items():
        of = parts.field(few[name]) if name in few else parts.layout
        whole_here = name in coded if name in few else parts.gathered
        out[name] = wrapped(part_of(value, of).contiguous() if whole_here else value, of)
    return out


@functools.lru_cache(maxsize=65536)
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
    _refuse_dimensions(variant, of, bool(blocks))
    sharding.largest_part(of)  # ValueError where parts are in pieces
    return not all(_keeps_blocks(of, *block) for block in blocks)


@functools.lru_cache(maxsize=65536)
def _check_blocks(shape: torch.Size, mesh: tuple[int, ...], cuts: Cuts, height: int) -> None:
    """`is_gathered` of one of which `height` consecutive rows are one row, or all rows, of the rule's matrix."""
    if {cut[0] for cut in cuts if cut is not None} - {0}:
        raise ValueError(
            "it is cut along another dimension than the first, and `blocks` puts rows of it together: shard it along "
            "dimension 0, or leave it out of `blocks`"
        )
    ranks = sharding.ranks_along(mesh, cuts, 0)
    for coordinate in sharding.coordinates(mesh, cuts):
        top, bottom = sharding.region(shape, mesh, coordinate, cuts)[0]
        if top != bottom and (top % height or bottom % height):
            raise ValueError(
                f"a rank holds rows [{top}, {bottom}) of its {shape[0]}, which cuts a block of {height} rows: give it "
                f"a number of `blocks` that is a multiple of the {ranks} ranks over which its rows lie, or leave it "
                f"out of `blocks`"
            )


def _refuse_dimensions(variant: Variant, of: Layout, in_blocks: bool) -> None:
    """Raise ValueError for a cut that leaves no stretch of what the variant sums over, keeps in blocks or numbers."""
    dims = {cut[0] for cut in of.cuts if cut is not None}
    if len(of.shape) < 3 or dims <= {0}:
        return
    refused = bool(dims - {0, 1}) and (in_blocks or variant.stochastic)
    if variant.matrix == "last":
        refused |= variant.stochastic and variant.sums_by_matrix
    elif variant.needs_matrix:
        uneven = of.shape[1] % sharding.ranks_along(of.mesh_shape, of.cuts, 1) != 0
        refused |= bool(dims - {0, 1}) or uneven
    if refused:
        raise ValueError(
            f"it is cut along dimension {max(dims)} of {len(of.shape)}, so that ranks hold no stretch of the rows or "
            f"columns that this rule and plan sum over, put into blocks or count for random bits: shard it along "
            f"dimension 0"
        )


def _keeps_blocks(of: Layout, block: int, width: int) -> bool:
    """Return True if all parts hold whole blocks of columns, and DTensor cuts the blocks' own tensor, of `width`
    entries for each, likewise.  Raises ValueError if those of a matrix do not."""
    shape, vector = of.shape, len(of.shape) < 2
    rows, columns = layout.grid(shape)
    behind = math.prod(shape[2:])
    own = torch.Size((rows, -(-columns // block) * width))
    cuts = tuple(None if c is None else (1 if vector else min(c[0], 1), c[1]) for c in of.cuts)
    for coordinate in of.coordinates() if of.dims() else ():
        left, right = (x * behind for x in of.at(coordinate)[0 if vector else 1])
        begin, end = sharding.region(own, of.mesh_shape, coordinate, cuts)[1]
        if left == right and begin == end:
            continue
        whole = left % block == 0 and (right % block == 0 or right == columns)
        if whole and (begin, end) == (left // block * width, -(-right // block) * width):
            continue
        if vector:
            return False
        raise ValueError(
            f"a rank holds columns [{left}, {right}) of its {columns}, which cuts or shifts the blocks of "
            f"{block} columns that this plan stores: shard it along dimension 0, make its columns a multiple "
            f"of {sharding.ranks_along(of.mesh_shape, of.cuts, 1)} x {block}, or use a plan without blocks (fp32, "
            f"bf16_sr, split32)"
        )
    return True


@dataclass(slots=True)
class ShardedParameter:
    """A DTensor parameter in a bucket.

    layout    of the parameter over the ranks
    position  the parameter's number over all groups, in the order of which ranks send: 3
    owner     the state as the optimizer keeps it: {"exp_avg": DTensor, ..., "step": 7}
    parts     the layout of its states
    whole     True if kernels see the whole logical tensor, and this rank keeps its part of the result
    """

    p: DTensor
    layout: Layout
    position: int
    owner: dict[str, Any]
    parts: ShardedStates
    whole: bool = False

    @property
    def gathered(self) -> bool:
        return self.parts.gathered


def pair(p: DTensor, g: Any) -> tuple[Tensor, Tensor]:
    """The parts of a parameter and its gradient on this rank, laid out alike; TypeError for a gradient that is a plain
    tensor, RuntimeError where a part is of another dtype than its DTensor says, or the two are of different shapes."""
    if not sharding.is_sharded(g):
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
