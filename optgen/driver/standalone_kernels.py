"""The Triton kernel of a standalone file for a rule of one sweep, and the optimizer class that launches it.

`driver/standalone.py` copies what such a file needs of this module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from optgen.driver.standalone_class import SingleFile
from optgen.runtime.gpu.codecs import Codec, encoded, read, words
from optgen.runtime.gpu.prelude import INTERPRETED
from optgen.runtime.records.keys import Recipe, Word, recipes, stream_key
from optgen.runtime.reference.eager import rows_and_columns


@dataclass(frozen=True, eq=False)
class Value:
    """A value of a rule: (tensor, dtype, elements per entry) of its fields, the value whose root it is divided by, the
    place of that one's new root, its random bits, what is made sure of."""

    name: str
    codec: Codec
    fields: tuple[tuple[str, str, int], ...]
    base: int = -1
    root: int = -1
    word: int = -1
    shift: int = 0
    plus: bool = False
    guarded: bool = False


@dataclass(frozen=True, eq=False)
class Kernel:
    """The sweep for parameters of one dtype; `stores`: (place in `values`, in what the tile function returns)."""

    tile: Any
    host: Callable[..., tuple[float, ...]]
    values: tuple[Value, ...]
    stores: tuple[tuple[int, int], ...]
    words: tuple[Word, ...] = ()
    block: int = 1

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """The way in which each word of random bits is made."""
        return recipes(self.words)

    def named(self, name: str) -> Value:
        return next(v for v in self.values if v.name == name)

    def column(self, i: int) -> int:
        """The first column of a value in the table."""
        return sum(len(v.fields) for v in self.values[:i])

    def dtype(self, i: int, j: int, grad: Any) -> Any:
        """The dtype of a field."""
        return grad if i == 1 else getattr(tl, self.values[i].fields[j][1])

    @property
    def cache_key(self) -> str:
        """The text of its functions, for the cache of compiled kernels."""
        return " ".join([repr(self), self.tile.cache_key, *(v.codec.cache_key for v in self.values)])


@triton.jit(do_not_specialize=["step_key"])
def sweep(
    table, work, scalars, step_key: tl.int32, KERNEL: tl.constexpr, GRAD: tl.constexpr, RAGGED: tl.constexpr,
    SIZE: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One step of some blocks of a tensor; RAGGED: rows end within a block, or addresses are odd."""
    row = table + WIDTH * tl.load(work + 2 * tl.program_id(0)).to(tl.int64)
    block = tl.load(work + 2 * tl.program_id(0) + 1).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    lane = tl.arange(0, SIZE)[None, :]
    live_block = block < tl.load(row + WIDTH - 2)
    at = block[:, None] * SIZE + lane
    index = at.to(tl.int32)
    live = live_block[:, None] & (lane >= 0)
    if RAGGED:
        columns = tl.load(row + WIDTH - 3)
        per_row = tl.cdiv(columns, SIZE)
        lane = (block % per_row * SIZE)[:, None] + lane
        at = (block // per_row * columns)[:, None] + lane
        live = live & (lane < columns)
    places, masks = (at, block), (live, live_block)
    buffers, stored = (), ()
    for i in tl.static_range(len(KERNEL.values)):
        pointers, fields = (), ()
        for j in tl.static_range(len(KERNEL.values[i].fields)):
            pointer = tl.load(row + KERNEL.column(i) + j).to(tl.pointer_type(KERNEL.dtype(i, j, GRAD)))
            pointer = pointer if RAGGED else tl.multiple_of(pointer, 16)
            few: tl.constexpr = KERNEL.values[i].fields[j][2] > 1
            pointers = pointers + (pointer + places[few],)
            fields = fields + (tl.load(pointer + places[few], mask=masks[few], other=0),)
        buffers = buffers + (pointers,)
        stored = stored + (fields,)
    draws = words(index, step_key, tl.load(row + WIDTH - 1).to(tl.int32), KERNEL)
    values = ()
    for i in tl.static_range(len(KERNEL.values)):
        x = (0, stored[i])
        if KERNEL.values[i].base >= 0:
            x = (KERNEL.values[KERNEL.values[i].base].codec.root(*stored[KERNEL.values[i].base]), stored[i])
        values = values + (read(x, KERNEL.values[i]) if i < 2 else x,)
    results = KERNEL.tile(KERNEL, *values, *scalars, live, True)
    roots = ()
    for k in tl.static_range(len(KERNEL.stores)):
        to: tl.constexpr = KERNEL.stores[k][0]
        new = encoded(results[KERNEL.stores[k][1]], roots, draws, (live,), (), KERNEL.values[to], True)
        for j in tl.static_range(len(KERNEL.values[to].fields)):
            tl.store(buffers[to][j], new[j], mask=masks[KERNEL.values[to].fields[j][2] > 1])
        roots = roots + new[len(KERNEL.values[to].fields) :]


@functools.lru_cache(maxsize=64)
def launch_tables(rows: tuple[tuple[int, ...], ...], blocks: int, device: torch.device) -> list[Tensor]:
    """A row of addresses and sizes per tensor, int64; the (row, tile) that each program does, int32."""
    tiles = enumerate(-(-row[-2] // blocks) for row in rows)
    work = [torch.stack([torch.full((n,), i), torch.arange(n)], 1) for i, n in tiles]
    return [torch.tensor(rows).to(device), torch.cat(work).to(torch.int32).to(device)]


class Fused(SingleFile):
    """Steps on a GPU are Triton kernels, one launch for all tensors of a dtype; others are eager, in strict maths."""

    KERNELS: Mapping[str, Kernel]  # by the names of variants
    ON_CPU = bool(INTERPRETED)  # kernels on a CPU too, in Triton's interpreter

    def _run(self, group: Mapping[str, Any], hypers: Mapping[str, Any], jobs: Sequence[tuple[Any, ...]]) -> None:
        launches: dict[tuple[Any, ...], list[tuple[int, ...]]] = {}
        held = []
        for job in jobs:
            variant, name, p, state = job
            if not hasattr(tl, "load") or not (p.is_cuda or self.ON_CPU):
                super()._run(group, hypers, [job])
                continue
            kernel = self.KERNELS[variant.function]
            numbers, step = self._advance(variant, kernel.host, group, hypers, state)
            if not p.numel():
                continue
            tensors = {**state, "p": p.detach().contiguous(), "g": p.grad.contiguous()}
            held.append((p, tensors))
            size, columns = (kernel.block, rows_and_columns(p.shape)[1]) if kernel.block > 1 else (64, p.numel())
            row = [tensors[x].data_ptr() for v in kernel.values for x, *_ in v.fields]
            ragged = columns % size > 0 or any(x % 16 for x in row)
            row += [columns, p.numel() // columns * -(-columns // size), stream_key(name)]
            numbers = tuple(torch.tensor(numbers, dtype=torch.float64).float().tolist())
            key = kernel, numbers, step, tensors["g"].dtype, p.device, ragged, size
            launches.setdefault(key, []).append(tuple(row))
        for (kernel, numbers, step, dtype, device, ragged, size), rows in launches.items():
            blocks = max(1024 // size, 1)
            table, work = launch_tables(tuple(rows), blocks, device)
            grad = getattr(tl, str(dtype)[6:])
            sweep[(len(work),)](table, work, numbers, step, kernel, grad, ragged, size, blocks, len(rows[0]))
        for p, tensors in held:
            if tensors["p"].data_ptr() != p.data_ptr():
                p.copy_(tensors["p"])
