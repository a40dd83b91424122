"""The view of a parameter's tensor as rows of columns, with blocks along each row.

ndim >= 2: rows = shape[0], columns = all the rest flattened; ndim <= 1: one row.  Blocks of B columns never
cross a row; the last block of a row may be short.  This is a property of the logical tensor: memory layout,
sharding along dim 0 and grouping do not change it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from optgen.runtime.layout import plans
from optgen.runtime.records import Field, Matrix, Variant, dtype_name
from optgen.runtime.records.join import Pair

CHUNK = 2**24
"""Elements that encode and decode work on at a time: bounds their fp32 temporaries to 64 MiB each."""


@functools.lru_cache(maxsize=65536)
def grid(shape: torch.Size) -> tuple[int, int]:
    """(rows, columns) of the 2-D view of a tensor of that shape."""
    if len(shape) >= 2:
        return shape[0], math.prod(shape[1:])
    return 1, math.prod(shape)


class Place(NamedTuple):
    """The place of a tensor in the logical tensor that it is a part of, itself if nothing is sharded.

    row, column    of its first element, in the 2-D view of the logical tensor
    width          columns of that view
    rows, columns  of the matrices of the logical tensor
    numel          of the logical tensor
    """

    row: int
    column: int
    width: int
    rows: int
    columns: int
    numel: int


@functools.lru_cache(maxsize=65536)
def place(shape: torch.Size) -> Place:
    """The place of a tensor that is no part of another one."""
    rows, columns = (1, math.prod(shape)) if len(shape) < 2 else shape[-2:]
    return Place(0, 0, grid(shape)[1], rows, columns, math.prod(shape))


def field_shape(field: Field, shape: torch.Size) -> tuple[int, ...]:
    """Shape of a field's tensor for a parameter of that shape."""
    if field.space == "axis":
        return (*matrix_shape(field.matrix, shape)[:-2], 1, sum(column_dims(field.matrix, shape)))
    if field.space != "elem":
        return small_shape(field.space, matrix_shape(field.matrix, shape))
    if field.per == 1:
        return tuple(shape)
    rows, columns = grid(matrix_shape(field.matrix, shape))
    return rows, -(-columns // field.per) * field.width


def matrix_shape(matrix: Matrix, shape: torch.Size) -> torch.Size:
    """The shape whose last two dimensions are the rows and columns of a rule.

    matrix  "last": those of the parameter; "first": dimension 0 against the rest, as blocks are laid; a number: so many
            rows of that put together.  ValueError where they do not come out even
    """
    if matrix == "last" or len(shape) < 2:
        return shape
    if isinstance(matrix, int):
        rows, columns = grid(shape)
        if rows % matrix:
            raise ValueError(f"{rows} rows are no whole number of blocks of {matrix}")
        return torch.Size((rows // matrix, columns * matrix))
    return torch.Size(grid(shape)) if len(shape) > 2 else shape


@functools.lru_cache(maxsize=65536)
def column_dims(matrix: Matrix, shape: torch.Size) -> tuple[int, ...]:
    """The dimensions that the columns of a parameter of that shape are made of, without those of one index; columns are
    numbered along them from left to right.

    matrix  as in `matrix_shape`
    """
    if len(shape) < 2:
        raise ValueError(f"a tensor of shape {list(shape)} has no rows and columns")
    dims = shape[-1:] if matrix == "last" else shape[1:] if matrix == "first" else (int(matrix), *shape[1:])
    return tuple(size for size in dims if size != 1) or (1,)


def value_shape(space: str, shape: torch.Size, matrix: Matrix = "last") -> tuple[int, ...]:
    """Shape of the fp32 values of a state in that space, for a parameter of that shape."""
    return tuple(shape) if space == "elem" else small_shape(space, matrix_shape(matrix, shape))


def small_shape(space: str, shape: torch.Size) -> tuple[int, ...]:
    """Shape of one value per row, column or matrix of the last two dimensions, or per tensor: it broadcasts."""
    if space in ("tensor", "model"):
        return ()
    if len(shape) < 2:
        raise ValueError(f"a tensor of shape {list(shape)} has no rows and columns")
    *lead, rows, columns = shape
    return {"row": (*lead, rows, 1), "col": (*lead, 1, columns), "mat": (*lead, 1, 1)}[space]


class Piece(NamedTuple):
    """Rows [top, bottom) x columns [left, right) of the 2-D view; `flat`: one row, seen as a 1-D tensor."""

    top: int
    bottom: int
    left: int
    right: int
    flat: bool

    def of(self, tensor: Tensor, shape: torch.Size, per: int = 1, width: int = 1) -> Tensor:
        """The piece of a parameter-shaped (per = 1) tensor, or of one with `width` entries per block; a view."""
        rows, columns = grid(shape)
        if per > 1:
            return tensor[self.top : self.bottom, self.left // per * width : -(-self.right // per) * width]
        view = tensor.reshape(rows, columns)[self.top : self.bottom, self.left : self.right]
        return view[0] if self.flat else view


def pieces(shape: torch.Size, block: int) -> Iterator[Piece]:
    """Pieces of about CHUNK elements: whole rows, or whole blocks of one row; none where there is nothing."""
    rows, columns = grid(shape)
    if rows == 0 or columns == 0:
        return
    if len(shape) >= 2 and columns <= CHUNK:
        height = max(1, CHUNK // columns)
        for top in range(0, rows, height):
            yield Piece(top, min(top + height, rows), 0, columns, False)
        return
    width = max(CHUNK // block, 1) * block
    for row in range(rows):
        for left in range(0, columns, width):
            yield Piece(row, row + 1, left, min(left + width, columns), True)


def empty_field(field: Field, shape: torch.Size, device: torch.device) -> Tensor:
    return torch.empty(field_shape(field, shape), dtype=field.torch_dtype, device=device)


def encode(
    plan: Pair,
    variant: Variant,
    p: Tensor,
    values: Mapping[str, Tensor | float],
    wanted: Collection[str],
    room: Mapping[str, Tensor] | None = None,
    weight: Tensor | None = None,
) -> dict[str, Tensor]:
    """The wanted fields for a weight and its states; "p" among them: the parameter itself, of its dtype and shape.

    p       the parameter (its own dtype, any layout): gives shape, device and the weight
    values  fp values of every state: tensors of p's shape, or one number for all elements
    room    tensors to write them into; without it they are allocated
    weight  the full weight (fp32, p's shape and device) where p is a rounding of it
    """
    shape, device = p.shape, p.device
    function = plans.reference(plan, variant).encode
    own = [Field("p", dtype_name(p.dtype))] if "p" in wanted else []
    fields = own + [f for f in variant.fields if f.name in wanted]
    out = {f.name: room[f.name] if room and f.name in room else empty_field(f, shape, device) for f in fields}
    for f in fields:
        if not f.wide:  # as it is, in the field's dtype
            value = values[f.owner]
            out[f.name].copy_(value) if isinstance(value, Tensor) else out[f.name].fill_(value)
    fields = [f for f in fields if f.wide]
    few = {f.owner for f in variant.fields if not f.wide}
    values = {name: value for name, value in values.items() if name not in few}
    if not fields:
        return out
    weight = (p.detach() if weight is None else weight).contiguous()
    dense = {name: v.contiguous() if isinstance(v, Tensor) else v for name, v in values.items()}
    if variant.of_whole:
        return _encode_whole(variant, function, weight, dense, fields, out)
    seen = matrix_shape(variant.matrix, shape)
    for piece in pieces(seen, variant.block):
        part = piece.of(weight, seen, 1).to(torch.float32).contiguous()
        arguments = {"p": part}
        for name, value in dense.items():
            arguments[name] = (
                piece.of(value, seen, 1).to(torch.float32).contiguous()
                if isinstance(value, Tensor)
                else torch.full_like(part, value)
            )
        made = function(arguments)
        for f in fields:
            piece.of(out[f.name], seen, f.per, f.width).copy_(made[f.name])
    return out


def _encode_whole(
    variant: Variant,
    function: Callable[..., Mapping[str, Tensor]],
    weight: Tensor,
    values: Mapping[str, Tensor | float],
    fields: Collection[Field],
    out: dict[str, Tensor],
) -> dict[str, Tensor]:
    """`encode` where statistics of the whole tensor are stored: all of it at a time."""
    if not weight.numel():
        return {name: t.zero_() if name != "p" else t for name, t in out.items()}
    seen = matrix_shape(variant.matrix, weight.shape)
    arguments = {"p": weight.to(torch.float32).view(seen)}
    for name, value in values.items():
        if isinstance(value, Tensor):
            arguments[name] = value.to(torch.float32).view(seen)
        else:
            arguments[name] = torch.full_like(arguments["p"], value)
    made = function(arguments, **_dims(variant, weight.shape))
    for f in fields:
        out[f.name].copy_(made[f.name].view(out[f.name].shape))
    return out


def _dims(variant: Variant, shape: torch.Size) -> dict[str, tuple[int, ...]]:
    """Return the arguments about columns of a function over all of a tensor."""
    return {"dims": column_dims(variant.matrix, shape)} if variant.has_axes else {}


def _decode_whole(
    variant: Variant, function: Callable[..., Mapping[str, Tensor]], p: Tensor, state: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """Return the values of a variant's decoder for all of a tensor that has elements."""
    seen = matrix_shape(variant.matrix, p.shape)
    stored = []
    for f in variant.fields:
        if f.wide:
            field = state[f.name].to(p.device).contiguous()
            stored.append(field.view(seen) if f.space == "elem" and f.per == 1 else field)
    return function(p.detach().contiguous().view(seen), *stored, **_dims(variant, p.shape))


def decode(
    plan: Pair, variant: Variant, p: Tensor, state: Mapping[str, Tensor], wanted: Collection[str]
) -> dict[str, Tensor]:
    """fp32 tensors of p's shape for the wanted values: "p" (the full weight) or names of states."""
    shape = p.shape
    function = plans.reference(plan, variant).decode
    few = {f.owner: state[f.name].to(torch.float32, copy=True) for f in variant.fields if not f.wide}
    elements = [name for name in wanted if name not in few]
    out = {name: torch.empty(shape, dtype=torch.float32, device=p.device) for name in elements}
    out |= {name: value for name, value in few.items() if name in wanted}
    if not elements:
        return out
    if variant.of_whole:
        if p.numel():
            made = _decode_whole(variant, function, p, state)
            for name in elements:
                out[name].copy_(made[name].view(shape))
        return out
    weight, seen = p.detach().contiguous(), matrix_shape(variant.matrix, shape)
    for piece in pieces(seen, variant.block):
        fields = [f for f in variant.fields if f.space == "elem"]
        stored = [piece.of(state[f.name], seen, f.per, f.width) for f in fields]
        stored = [field.to(p.device).contiguous() for field in stored]  # they may be in host memory
        made = function(piece.of(weight, seen, 1).contiguous(), *stored)
        for name in elements:
            piece.of(out[name], seen, 1).copy_(made[name])
    return out


def first(
    plan: Pair, variant: Variant, p: Tensor, state: Mapping[str, Tensor], wanted: Collection[str], least: int
) -> dict[str, Tensor]:
    """The first values of what `decode` gives for element-wise states: 1-D, whole blocks of the first row that make up
    `least` elements, or the row.  For p with elements."""
    function = plans.reference(plan, variant).decode
    if variant.of_whole:
        made = _decode_whole(variant, function, p, state)
        return {name: made[name].reshape(-1)[:least] for name in wanted}
    seen = matrix_shape(variant.matrix, p.shape)
    piece = Piece(0, 1, 0, min(grid(seen)[1], -(-least // variant.block) * variant.block), True)
    fields = [f for f in variant.fields if f.space == "elem"]
    stored = [piece.of(state[f.name], seen, f.per, f.width) for f in fields]
    stored = [field.to(p.device).contiguous() for field in stored]  # they may be in host memory
    made = function(piece.of(p.detach(), seen, 1).contiguous(), *stored)
    return {name: made[name] for name in wanted}
