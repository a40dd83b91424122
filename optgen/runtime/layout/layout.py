"""The view of a parameter's tensor as rows of columns, with blocks along each row.

ndim >= 2: rows = shape[0], columns = all the rest flattened; ndim <= 1: one row.  Blocks of B columns never
cross a row; the last block of a row may be short.  This is a property of the logical tensor: memory layout,
sharding along dim 0 and grouping do not change it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from optgen.runtime.layout import plans
from optgen.runtime.layout.fp8_weight import exact, kept_with, memory
from optgen.runtime.records import MATRICES, MATRIX_BLOCK, Field, Heads, Matrix, Variant, by_shape, dtype_name
from optgen.runtime.records.join import Pair
from optgen.runtime.reference.matrix_codecs import CODECS

CHUNK = 2**24
"""Elements that encode and decode work on at a time, or 32 rows: bounds their fp32 temporaries to 64 MiB each."""

VIEW_ROWS = 32
"""Rows of a matrix whose elements in a column share a scale of a view."""


@functools.lru_cache(maxsize=65536)
def grid(shape: torch.Size) -> tuple[int, int]:
    """(rows, columns) of the 2-D view of a tensor of that shape."""
    if len(shape) >= 2:
        return shape[0], math.prod(shape[1:])
    return 1, math.prod(shape)


class Place(NamedTuple):
    """The place of a tensor in the logical tensor that it is a part of, itself if nothing is sharded.

    row, column    of its first element, in the 2-D view of the logical tensor: 48, 0 for the second of two ranks
    width          columns of that view: 130 of a tensor (97, 130)
    rows, columns  of the matrices of the logical tensor: 97, 130
    numel          of the logical tensor: 12610
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
    """Shape of a field's tensor for a parameter of that shape; (0, 0) of a view that it has none of."""
    if field.space == "transposed":
        rows, columns = shape if len(shape) == 2 and shape[0] % VIEW_ROWS == 0 else (0, 0)
        return columns, rows // field.per
    if field.space != "elem":
        found = small_shape(field.space, matrix_shape(field.matrix, shape), field.rank)
        return _part_shape(field.part, found) if field.part else found
    if field.per == 1:
        return tuple(shape)
    rows, columns = grid(matrix_shape(field.matrix, shape))
    return rows, -(-columns // field.per) * field.width


def _part_shape(part: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a part of a matrix state (..., k, k), see Field."""
    *lead, rows, width = shape
    if part == "diagonal":
        return *lead, width, 1
    if part.startswith("lower"):
        rows, width = (rows + 1) // 2, width - 1
    return (*lead, rows, width) if part == "lower" else (*lead, -(-rows * width // MATRIX_BLOCK), 1 + (part == "ends"))


@functools.lru_cache(maxsize=65536)
def matrix_shape(matrix: Matrix, shape: torch.Size) -> torch.Size:
    """The shape whose last two dimensions are the rows and columns of a rule.

    matrix  "last": those of the parameter; "first": dimension 0 against the rest, as blocks are laid; a number: so many
            rows of that put together; Heads: blocks of so many rows beside one another.  ValueError where they do not
            come out even
    """
    shape = torch.Size(shape)  # of equal tuples one result is kept
    matrix = by_shape(shape) if matrix == "heads" else matrix
    if matrix == "last" or len(shape) < 2:
        return shape
    if isinstance(matrix, str):
        return torch.Size(grid(shape)) if len(shape) > 2 else shape
    rows, columns = grid(shape)
    if isinstance(matrix, Heads) and matrix.stacked:
        rows, columns = shape[:-1].numel(), shape[-1]
    height = matrix.rows if isinstance(matrix, Heads) else matrix
    if rows % height:
        raise ValueError(f"{rows} rows are no whole number of blocks of {height}")
    return torch.Size((rows // height, *((height, columns) if isinstance(matrix, Heads) else (height * columns,))))


def value_shape(space: str, shape: torch.Size, matrix: Matrix = "last", rank: int = 0) -> tuple[int, ...]:
    """Shape of the fp32 values of a state in that space, for a parameter of that shape."""
    return tuple(shape) if space == "elem" else small_shape(space, matrix_shape(matrix, shape), rank)


def small_shape(space: str, shape: torch.Size, rank: str | int = 0) -> tuple[int, ...]:
    """Shape of one value per row, column or matrix of the last two dimensions, or per tensor: it broadcasts; or of a
    matrix beside each matrix, such as "mm" (..., rows, rows)."""
    if space in ("tensor", "model"):
        return ()
    if len(shape) < 2:
        raise ValueError(f"a tensor of shape {list(shape)} has no rows and columns")
    *lead, rows, columns = shape
    if space in MATRICES:
        short, long = sorted((rows, columns))
        if "r" in space and not isinstance(rank, int):
            raise TypeError(f"the rank of a state is that of a group, which says {rank}")
        sides = {"m": rows, "n": columns, "s": short, "l": long, "r": min(int(rank), short)}
        return *lead, *(sides[side] for side in space)
    return {"row": (*lead, rows, 1), "col": (*lead, 1, columns), "mat": (*lead, 1, 1)}[space]


class _Part:
    """The part of a tensor that a variant's functions encode or decode at a time.

    rows    of its 2-D view; None: all of it, because statistics of the whole tensor are stored
    """

    def __init__(self, variant: Variant, shape: torch.Size, rows: slice | None) -> None:
        self.seen, self.rows = matrix_shape(variant.matrix, shape), rows

    def of(self, t: Tensor, field: Field | None = None) -> Tensor:
        """Return the view of a tensor of the parameter's shape, or of a field's tensor."""
        if field is not None and field.space == "transposed" and self.rows is not None:
            return t[:, self.rows.start // field.per : self.rows.stop // field.per]
        elements = field is None or (field.space == "elem" and field.per == 1)
        if self.rows is None:
            return t.reshape(self.seen) if elements else t
        return (t.reshape(grid(self.seen)) if elements else t)[self.rows]

    def decoded(
        self, function: Callable[..., Mapping[str, Tensor]], variant: Variant, p: Tensor, state: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """Return the values that a variant's decoder gives; fields may be in host memory."""
        stored = [self.of(state[f.name], f).to(p.device).contiguous() for f in variant.fields if f.wide]
        return function(self.of(p).contiguous(), *stored)


def _parts(variant: Variant, shape: torch.Size) -> Iterator[_Part]:
    """Yield the parts of a tensor of that shape, none if it has no elements."""
    if math.prod(shape):
        seen = matrix_shape(variant.matrix, shape)
        rows, columns = grid(seen)
        height = max(VIEW_ROWS, CHUNK // columns // VIEW_ROWS * VIEW_ROWS)
        for part in (None,) if variant.of_whole else (slice(k, k + height) for k in range(0, rows, height)):
            yield _Part(variant, shape, part)


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
    p, weight = exact(p), None if weight is None else exact(weight)
    own = [Field("p", dtype_name(p.dtype))] if "p" in wanted else []
    fields = own + [f for f in variant.fields if f.name in wanted]
    out = {f.name: _tensor(f, p, room or {}) for f in fields}
    _write_few(variant, [f for f in fields if not f.wide], values, p, out)
    fields = [f for f in fields if f.wide]
    if fields:
        _write_elements(plan, variant, fields, values, p if weight is None else weight, out)
    return out


def _tensor(field: Field, p: Tensor, room: Mapping[str, Tensor]) -> Tensor:
    """Return the tensor that a field is written into, a new one unless there is room for it."""
    if field.name in room:
        return room[field.name]
    return torch.empty(field_shape(field, p.shape), dtype=field.torch_dtype, device=p.device)


def write_views(plan: Pair, variant: Variant, p: Tensor, out: Mapping[str, Tensor]) -> None:
    """Write the views of a weight, as it is, into their tensors, by name."""
    function = plans.storage(plan, variant).shown
    for part in _parts(replace(variant, fields=()), p.shape):
        for name, made in function(part.of(p.detach()).contiguous(), out).items():
            part.of(out[name], variant.stored[name]).copy_(made)


def _write_elements(
    plan: Pair, variant: Variant, fields: Sequence[Field], values: Mapping[str, Tensor | float], weight: Tensor,
    out: Mapping[str, Tensor],
) -> None:  # fmt: skip
    """Write fields of states of elements, and of the weight."""
    few = {f.owner for f in variant.fields if not f.wide}
    dense = {"p": weight.detach().contiguous()}
    for name, value in values.items():
        if name in few:
            continue
        if isinstance(value, Tensor):
            dense[name] = value.contiguous()
        else:  # the memory of one number
            dense[name] = torch.full((), value, dtype=torch.float32, device=weight.device).expand(weight.shape)
    if variant.of_whole and not weight.numel():
        for f in fields:
            out[f.name].zero_()
    function = plans.storage(plan, variant).encode
    for part in _parts(variant, weight.shape):
        made = function({name: part.of(x).to(torch.float32).contiguous() for name, x in dense.items()})
        for f in fields:
            written = part.of(out[f.name], f)
            written.copy_(made[f.name].reshape(written.shape))


def _write_few(
    variant: Variant, fields: Sequence[Field], values: Mapping[str, Tensor | float], p: Tensor,
    out: Mapping[str, Tensor],
) -> None:  # fmt: skip
    """Write fields that hold no element each: matrix states by their codecs, others as they are, in the field's
    dtype."""
    coded: dict[str, Tensor] = {}
    for owner in dict.fromkeys(f.owner for f in fields if f.owner in variant.eager.matrices):
        coded |= matrix_fields(variant, owner, values, p.shape, p.device)
    for f in fields:
        value = coded[f.name] if f.name in coded else values[f.owner]
        out[f.name].copy_(value) if isinstance(value, Tensor) else out[f.name].fill_(value)


def decode(
    plan: Pair, variant: Variant, p: Tensor, state: Mapping[str, Tensor], wanted: Collection[str]
) -> dict[str, Tensor]:
    """fp32 tensors of p's shape for the wanted values: "p" (the full weight) or names of states."""
    function = plans.storage(plan, variant).decode
    few = {f.owner: f.name for f in variant.fields if not f.wide}
    elements = [name for name in wanted if name not in few]
    out = {name: torch.empty(p.shape, dtype=torch.float32, device=p.device) for name in elements}
    of = variant.eager.matrices
    for name in (x for x in few if x in wanted):
        fields = [state[x] for x in variant.coded(name)]
        coded = name in of
        out[name] = CODECS[of[name]].decode(*fields) if coded else fields[0].to(torch.float32, copy=True)
    weight = memory(p).detach().contiguous()
    for part in _parts(variant, p.shape) if elements else ():
        made = part.decoded(function, variant, weight, kept_with(p, state))
        for name in elements:
            written = part.of(out[name])
            written.copy_(made[name].reshape(written.shape))
    return out


def matrix_fields(
    variant: Variant, name: str, values: Mapping[str, Tensor | float | str], shape: torch.Size, device: torch.device
) -> dict[str, Tensor]:
    """Return the fields of a matrix state, to nearest: of values, of one number in every place, or of the "identity".

    values  of the state, and of the one that it is kept relative to
    """
    value, base = values[name], variant.eager.over.get(name)
    field = next(f.of_values for f in variant.fields if f.owner == name)
    x = torch.empty(field_shape(field, shape), dtype=torch.float32, device=device)
    if isinstance(value, str):
        x.zero_().diagonal(dim1=-2, dim2=-1).fill_(1)
    else:
        x = x.copy_(value) if isinstance(value, Tensor) else x.fill_(value)
    over = matrix_fields(variant, base, values, shape, device).values() if base else ()
    return dict(zip(variant.owned(name), CODECS[variant.eager.matrices[name]].encode(x, *over), strict=True))


def first(
    plan: Pair, variant: Variant, p: Tensor, state: Mapping[str, Tensor], wanted: Collection[str], least: int
) -> dict[str, Tensor]:
    """The first values that `decode` gives for element-wise states of p, which has elements: 1-D, `least` or a row."""
    part = _Part(variant, p.shape, None if variant.of_whole else slice(0, 1))
    made = part.decoded(plans.storage(plan, variant).decode, variant, memory(p).detach(), kept_with(p, state))
    return {name: made[name].reshape(-1)[:least] for name in wanted}
