"""Room for what the stages of a step leave for one another: fp32 values, few beside the elements.

For each temp of a variant and each tensor there is a vector of one value per row, column, matrix or tensor; for each
temp that a sweep reduces, also its partial results (see sums.py): one value per row and panel of columns, per panel
of rows and column, or per segment of the tensor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from optgen.runtime.layout import layout
from optgen.runtime.records import Stage, Temp, Variant, sums
from optgen.runtime.reference.run import few_shape

ALIGNMENT = 64
"""Bytes to which every vector is aligned."""


def matrices(shape: torch.Size) -> tuple[int, int, int]:
    """(matrices, rows, columns) of the last two dimensions; a tensor of fewer is one matrix of one row."""
    if len(shape) < 2:
        return 1, 1, math.prod(shape)
    return math.prod(shape[:-2]), shape[-2], shape[-1]


@functools.lru_cache(maxsize=4096)
def entries(space: str, shape: torch.Size, wide: bool = False) -> int:
    """fp32 values of a small space in a tensor of that shape; of one bf16 value per element, as many as hold them."""
    if space == "elem":
        return math.prod(shape) if wide else -(-math.prod(shape) // 2)
    count, rows, columns = matrices(shape)
    few = {"row": count * rows, "col": count * columns, "mat": count, "tensor": 1, "model": 1}
    return few[space]


TAKEN_OVER = 65536
"""Bytes of pageable memory that CUDA's driver takes over when a copy begins; with more, the host waits for the stream.
"""


def sent(host: Tensor, device: torch.device) -> Tensor:
    """Return a copy in new memory of the device: launches under way may still read an earlier one, and nobody waits."""
    if device.type == "cuda" and host.nbytes > TAKEN_OVER:
        host = host.pin_memory()  # torch's own pinned memory, which it gives out again once the copy is made
    return torch.empty_like(host, device=device, pin_memory=False).copy_(host, non_blocking=True)


FEW = 1024
"""Panels of a matrix below which sweeps with sums take smaller ones in fast maths: one takes a warp 10 to 190 us."""


SMALL_SEGMENT = 4096
"""Elements of a segment in fast maths where a tensor has few, and one warp takes each (20 to 50 us for 16384)."""


def panel(variant: Variant, stage: Stage, shape: torch.Size) -> tuple[int, int]:
    """Rows and columns of the panels in which a program of a sweep takes a matrix, and in which sums are partial.

    They are those of `sums` where sums of columns are in order, or there are many; of the rest no bit depends on rows.
    """
    _, rows, columns = matrices(shape)
    wide, summed = sums.panel_columns(stage.block), {t.space for t in variant.reduced if t.name in stage.temps}
    few = wide == 1024 and len(shape) <= 2 and -(-rows // sums.PANEL_ROWS) * -(-columns // wide) < FEW
    few = few and not (variant.rule and variant.rule.strict)
    if "col" not in summed:  # two states and sums of rows of four parts at a time take 222 registers (AdamP)
        crowded = few and summed and len({*variant.states} & {*variant.owners_in(stage)}) > 1
        return (16, 256) if crowded else (8, wide // 2 if few else wide)  # compilers load two parts at once, not four
    return (16, 256) if few else (sums.PANEL_ROWS, wide)


def reducing(variant: Variant, temp: Temp) -> Stage:
    """Return the sweep that reduces to a temp."""
    return next(s for s in variant.stages if s.space == "elem" and temp.name in s.temps)


def partials(variant: Variant, temp: Temp, shape: torch.Size) -> int:
    """Partial results of a temp that a sweep reduces; those of a tensor are at most so many."""
    count, rows, columns = matrices(shape)
    stage = reducing(variant, temp)
    if temp.space == "row":
        return count * rows * -(-columns // panel(variant, stage, shape)[1])
    if temp.space == "col":
        return count * -(-rows // panel(variant, stage, shape)[0]) * columns
    grid_rows, grid_columns = layout.grid(shape)
    return -(-grid_rows * -(-grid_columns // stage.block) * stage.block // SMALL_SEGMENT)


USUAL = 2**29
"""The usual `workspace` of a group: bytes of one bucket's values of elements, of a rule with functions of whole
matrices.  Further matrices are another bucket, which comes after it and has the same memory."""


class Pool:
    """The memory of an optimizer's buckets, of which one after the other makes its whole step.

    grown   whether there was too little
    """

    def __init__(self) -> None:
        self._memory: dict[torch.device, Tensor] = {}
        self.grown = False

    def take(self, size: int, device: torch.device) -> Tensor:
        """Return as many fp32 values or more, the same each time unless they are too few."""
        found = self._memory.get(device)
        if found is None or found.numel() < size:
            self.grown |= found is not None
            found = self._memory[device] = torch.empty(size, dtype=torch.float32, device=device)
        return found


@dataclass(frozen=True, slots=True)
class Workspace:
    """Room for the tensors of a bucket.

    memory    one fp32 tensor
    columns   an address for each tensor, a list for each temp and then for each that a sweep reduces
    offsets   the same as positions in `memory`: [[0, 64], [128, 144]]
    dense     further memory that `columns` point into
    numbers   tables of numbers that kernels look things up in
    """

    memory: Tensor
    columns: list[list[int]]
    offsets: list[list[int]]
    dense: Tensor | None = None
    numbers: tuple[Tensor, ...] = ()

    def values(self, temp: Temp, offsets: Sequence[int], shapes: Sequence[torch.Size]) -> list[Tensor]:
        """Return the values of a temp of tensors of those shapes, from these positions in `memory` on."""
        out = []
        for at, shape in zip(offsets, shapes, strict=True):
            found = self.memory[at : at + entries(temp.space, shape, temp.wide)]
            if temp.space == "elem":
                out.append((found if temp.wide else found.view(torch.bfloat16)[: shape.numel()]).view(shape))
            else:
                out.append(found.view(few_shape(temp.space, shape)))
        return out


def make(
    variant: Variant, shapes: Sequence[torch.Size], device: torch.device, pool: Pool | None = None
) -> Workspace:
    """Room on a device; pool: where to take it from."""
    unit = ALIGNMENT // 4
    offsets: list[list[int]] = []
    end = 0
    for sizes in (
        *([entries(t.space, shape, t.wide) for shape in shapes] for t in variant.temps),
        *([partials(variant, t, shape) for shape in shapes] for t in variant.reduced),
    ):
        offsets.append([])
        for size in sizes:
            offsets[-1].append(end)
            end += -(-size // unit) * unit
    memory = (pool or Pool()).take(end + unit, device)
    first = -(-memory.data_ptr() // ALIGNMENT) * ALIGNMENT
    shift = (first - memory.data_ptr()) // 4
    columns = [[first + 4 * offset for offset in column] for column in offsets]
    offsets = [[offset + shift for offset in column] for column in offsets]
    return Workspace(memory, columns, offsets)


Places = Sequence[layout.Place] | None
"""The place of each tensor; None: each is all of its logical tensor."""


def rows(
    columns: Sequence[Sequence[int]], room: Workspace, shapes: Sequence[torch.Size], streams: Sequence[int],
    places: Places, staged: bool,
) -> list[list[int]]:  # fmt: skip
    """Return a kernel's table, a row per tensor: addresses (`columns`: p, g, the fields; the temps and partials of a
    workspace, its tables of numbers); numel, columns, stream key; then where it lies in the
    logical tensor: row and column of its first element, columns of that (layout.Place).

    staged   of a step of several stages: the number of matrices, their rows and columns stand before numel; at the end,
             rows and columns of the matrices of the logical tensor, and its numel
    """
    tables = [[table.data_ptr()] * len(shapes) for table in room.numbers]
    addresses = [*columns, *room.columns, *tables]
    out = []
    for *line, shape, stream, place in zip(
        *addresses, shapes, streams, places or map(layout.place, shapes), strict=True
    ):
        sizes = math.prod(shape), layout.grid(shape)[1], stream
        out.append([*line, *matrices(shape), *sizes, *place] if staged else [*line, *sizes, *place[:3]])
    return out


def numbers(kernels: ModuleType, variant: Variant, device: torch.device) -> tuple[Tensor, ...]:
    """The tables of numbers that a variant's kernels read from memory, fp32, made once for a device."""
    named: dict[str, tuple[tuple[float, ...], ...]] = getattr(kernels, "NUMBERS", {})
    return tuple(_on(device, table) for table in named.get(variant.function, ()))


@functools.lru_cache(maxsize=256)
def _on(device: torch.device, table: tuple[float, ...]) -> Tensor:
    return torch.tensor(table, dtype=torch.float32, device=device)
