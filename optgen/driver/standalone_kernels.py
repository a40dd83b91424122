"""The optimizer class, the eager tiles and the Triton kernel of a standalone file for a rule of one sweep.

`driver/standalone.py` copies what such a file needs of this module.  A function that calls no other is the text of
both: a kernel calls it compiled, eager tiles call its `fn`.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace as Record
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import current_target
from triton.runtime.jit import constexpr_function

from optgen.driver.standalone_class import SingleFile
from optgen.runtime.gpu.prelude import reciprocal
from optgen.runtime.records.keys import stream_key
from optgen.runtime.reference.eager import scalars


@dataclass(frozen=True, eq=False)
class Value:
    """A value of a rule: its codec, the value whose root it is divided by, its random bits, what is made sure of."""

    name: str
    codec: Any
    base: int = -1
    word: int = -1
    shift: int = 0
    plus: bool = False
    guarded: bool = False

    def fields(self) -> list[tuple[Any, ...]]:
        """(name, dtype, elements per entry, entry that decodes to 0, or "p" for a copy of p) of its tensors."""
        prefix = "weight" if self.name == "p" else self.name
        return [(f"{prefix}_{x[0]}" if x[0] else self.name, *x[1:]) for x in self.codec.fields]


@dataclass(frozen=True, eq=False)
class Variant:
    """The step for parameters of one dtype; `words`: (salt, factor of the step's place) of each of random bits."""

    param: str
    made: Any
    values: tuple[Value, ...]
    words: tuple[tuple[int, int], ...] = ()
    small: bool = False
    vector: bool = False
    block: int = 1
    flags: Mapping[str, bool] = field(default_factory=dict)
    host_states: tuple[tuple[str, float], ...] = ()

    @property
    def states(self) -> list[str]:
        return [x[0] for v in self.values for x in v.fields() if x[0] not in ("p", "g")]

    def named(self, name: str) -> Value:
        return next(v for v in self.values if v.name == name)

    def column(self, i: int) -> int:
        """The first column of a value in the table."""
        return sum(len(v.codec.fields) for v in self.values[:i])

    def dtype(self, i: int, j: int, grad: Any) -> Any:
        """The dtype of a field."""
        return grad if i == 1 else getattr(tl, self.param if i == j == 0 else self.values[i].codec.fields[j][1])

    def root(self, i: int) -> int:
        """The position of a value among those stored that have roots."""
        return [k for k, _ in self.made.stores if self.values[k].codec.root is not None].index(i)

    @property
    def cache_key(self) -> str:
        """The text of its functions, for the cache of compiled kernels."""
        used = [self.made.tile, *(f for v in self.values for f in (v.codec.decode, v.codec.encode, v.codec.root))]
        return " ".join([repr(self), *(getattr(f, "cache_key", "") for f in used)])


# -- both


@triton.jit
def random_word(index, step_key, stream_key, salt, spread):
    """32 random bits of each element, int32, from its number; those of 256 steps are evenly spread."""
    x = (index >> 3 & 0x1FFFFFFF ^ stream_key ^ step_key & -256 ^ salt) * 0x7FEB352D
    x = (x ^ x >> 16 & 0xFFFF) * -0x7B935975
    x = x ^ x >> 15 & 0x1FFFF
    y = (x ^ x >> 16 & 0xFFFF) * -0x61C8864F
    y = (y ^ y >> 15 & 0x1FFFF) * 0x7FEB352D
    y = y ^ y >> 16 & 0xFFFF
    lane = index & 7
    k = (lane * (lane + 1) >> 1) + 1
    return x ^ (step_key & 255) * spread ^ (y << k | y >> 32 - k & (1 << k) - 1)


@triton.jit
def integer(draws, SHIFT: tl.constexpr, BITS: tl.constexpr):
    """int32, uniform on 0 .. 2^BITS - 1: bits of a word, from SHIFT on."""
    return draws if BITS == 32 else draws >> SHIFT & (1 << BITS) - 1


@triton.jit
def fraction(draws, SHIFT: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """int32, uniform on 0 .. 2^WIDTH - 1: the own bits on top, below them the next of the word, or half a cell."""
    if SHIFT + BITS == 32:
        out = draws >> 32 - WIDTH & (1 << WIDTH) - 1
    else:
        out = (draws >> SHIFT & (1 << BITS) - 1) << WIDTH - BITS | (1 << WIDTH - BITS) >> 1
    return out


@triton.jit
def middle(draws, SHIFT: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """int32, the midpoints of 2^BITS cells of 0 .. 2^WIDTH."""
    return (draws >> SHIFT & (1 << BITS) - 1) << WIDTH - BITS | (1 << WIDTH - BITS) >> 1


# -- kernels


@constexpr_function
def machine():
    """Return the target of the compiler: "cuda" or "hip"; "" in Triton's interpreter."""
    target = None if os.environ.get("TRITON_INTERPRET") == "1" else current_target()
    return "" if target is None else target.backend


@triton.jit
def beside(x):
    return x[:, None]


@triton.jit
def block_max(x, live, MASKED: tl.constexpr):
    return tl.max(tl.where(live, x, -2147483648), 1)


@triton.jit
def block_min(x, live, MASKED: tl.constexpr):
    return tl.min(tl.where(live, x, 2147483647), 1)


@triton.jit
def block_magnitude(x, live, MASKED: tl.constexpr):
    """The pattern of the largest |x|, NaN left out, plus 2^23 - 1."""
    return tl.max(tl.where(live, tl.abs(x), 0.0), 1).to(tl.int32, bitcast=True) + 8388607


@triton.jit
def block_least(x, live, MASKED: tl.constexpr):
    """The pattern of the smallest |x|, NaN left out."""
    return tl.min(tl.where(live, tl.abs(x), float("inf")), 1).to(tl.int32, bitcast=True)


@triton.jit
def rounded(pattern, noise, k: tl.constexpr):
    """uint8: bits 12 to 19 of an int32 and 12 bits of noise, those from k on."""
    return (pattern + (noise >> k & 4095) >> 12).to(tl.uint8)


@triton.jit
def plain_decode(c, x):
    return c, x.to(tl.float32)


@triton.jit
def plain_encode(x, live, MASKED: tl.constexpr):
    return (x,)


@triton.jit
def times(c, x, VALUE: tl.constexpr):
    """c * x; x is the root that the value is divided by, and its fields."""
    a, b = VALUE.codec.decode(c, *x[1])
    if VALUE.base >= 0:
        b = b * x[0]
    return a * b


@triton.jit
def plus(c, x, y, VALUE: tl.constexpr):
    """c * x + y, rounded once where c * x is one product of an element."""
    a, b = VALUE.codec.decode(c, *x[1])
    if VALUE.base >= 0:
        b = b * x[0]
    return tl.fma(a, b, y)


@triton.jit
def read(x, VALUE: tl.constexpr):
    return times(tl.full([], 1.0, tl.float32), x, VALUE)


@triton.jit
def encoded(x, roots, draws, live, VARIANT: tl.constexpr, VALUE: tl.constexpr):
    """The fields of a new value, and its root."""
    if VALUE.guarded:
        x = tl.where(x == x, x, float("nan"))
    if VALUE.base >= 0:
        x = x * reciprocal(roots[VARIANT.root(VALUE.base)])
    if VALUE.plus:
        x = x + 0.0
    bits = (draws[VALUE.word], VALUE.shift) if VALUE.word >= 0 else ()
    return VALUE.codec.encode(x, live, True, *bits)


@triton.jit(do_not_specialize=["step_key"])
def sweep(
    table, work, scalars, step_key: tl.int32, VARIANT: tl.constexpr, GRAD: tl.constexpr, RAGGED: tl.constexpr,
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
    for i in tl.static_range(len(VARIANT.values)):
        pointers, fields = (), ()
        for j in tl.static_range(len(VARIANT.values[i].codec.fields)):
            pointer = tl.load(row + VARIANT.column(i) + j).to(tl.pointer_type(VARIANT.dtype(i, j, GRAD)))
            pointer = pointer if RAGGED else tl.multiple_of(pointer, 16)
            few: tl.constexpr = VARIANT.values[i].codec.fields[j][2] > 1
            pointers = pointers + (pointer + places[few],)
            fields = fields + (tl.load(pointer + places[few], mask=masks[few], other=0),)
        buffers = buffers + (pointers,)
        stored = stored + (fields,)
    draws = ()
    for k in tl.static_range(len(VARIANT.words)):
        stream = tl.load(row + WIDTH - 1).to(tl.int32)
        draws = draws + (random_word(index, step_key, stream, VARIANT.words[k][0], VARIANT.words[k][1]),)
    values = ()
    for i in tl.static_range(len(VARIANT.values)):
        x = (0, stored[i])
        if VARIANT.values[i].base >= 0:
            x = (VARIANT.values[VARIANT.values[i].base].codec.root(*stored[VARIANT.values[i].base]), stored[i])
        values = values + (read(x, VARIANT.values[i]) if i < 2 else x,)
    results = VARIANT.made.tile(VARIANT, *values, *scalars, live, True)
    roots = ()
    for k in tl.static_range(len(VARIANT.made.stores)):
        to: tl.constexpr = VARIANT.made.stores[k][0]
        new = encoded(results[VARIANT.made.stores[k][1]], roots, draws, live, VARIANT, VARIANT.values[to])
        for j in tl.static_range(len(VARIANT.values[to].codec.fields)):
            tl.store(buffers[to][j], new[j], mask=masks[VARIANT.values[to].codec.fields[j][2] > 1])
        roots = roots + new[len(VARIANT.values[to].codec.fields) :]


# -- eager


def highest(x: Tensor, live: Tensor) -> Tensor:
    return torch.where(live, x, -(2**31)).amax(-1, keepdim=True)


def lowest(x: Tensor, live: Tensor) -> Tensor:
    return torch.where(live, x, 2**31 - 1).amin(-1, keepdim=True)


class Tile:
    """A parameter in one eager step: `tensors` read and written as (rows, blocks, elements of a block)."""

    def __init__(self, variant: Variant, tensors: Mapping[str, Tensor], step_key: int, stream_key: int) -> None:
        self.variant, self.tensors, self.roots = variant, tensors, {}
        p = tensors["p"]
        self.shape, (self.rows, self.columns) = p.shape, grid(p.shape)
        self.in_blocks = self.rows, -(-self.columns // variant.block), variant.block
        index = torch.arange(math.prod(self.in_blocks), device=p.device).to(torch.int32).view(self.in_blocks)
        self.live = index[:1] < self.columns
        step = torch.tensor(step_key, dtype=torch.int32, device=p.device)
        self.draws = [random_word.fn(index, step, stream_key, *x) for x in variant.words]

    def elements(self, x: Tensor) -> Tensor:
        padding = self.in_blocks[1] * self.in_blocks[2] - self.columns
        return torch.nn.functional.pad(x.reshape(self.rows, -1), (0, padding)).view(self.in_blocks)

    def per_block(self, x: Tensor) -> Tensor:
        return x.view(*self.in_blocks[:2], 1)

    def flat(self, x: Tensor) -> Tensor:
        return x.expand(self.in_blocks).reshape(self.rows, -1)[:, : self.columns].reshape(self.shape)

    def flat_per_block(self, x: Tensor) -> Tensor:
        return x.expand(*self.in_blocks[:2], 1).reshape(self.in_blocks[:2])

    def _read(self, value: Value, function: Callable[..., Tensor]) -> Tensor:
        return function(self, *(self.tensors[x[0]] for x in value.fields()))

    def load(self, name: str) -> Tensor:
        """A value, fp32."""
        value = self.variant.named(name)
        x = self._read(value, value.codec.eager[0]).float()
        base = self.variant.values[value.base]
        return x * self._read(base, base.codec.eager[2]) if value.base >= 0 else x

    def store(self, name: str, x: Tensor) -> None:
        """Write a new value."""
        value = self.variant.named(name)
        if value.base >= 0:
            x = x / self.roots[self.variant.values[value.base].name]
        new = value.codec.eager[1](self, x, *((self.draws[value.word], value.shift) if value.word >= 0 else ()))
        for (to, *_), made in zip(value.fields(), new, strict=False):
            self.tensors[to].copy_(made)
        self.roots[name] = new[-1]


FULL = Record(
    fields=(("", "float32", 1, 0),), eager=(Tile.elements, lambda b, x: (b.flat(x),)),
    decode=plain_decode, encode=plain_encode, root=None,
)  # fmt: skip


# -- the optimizer


def grid(shape: torch.Size) -> tuple[int, int]:
    """The rows and columns that blocks are laid along."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))


@functools.lru_cache(maxsize=64)
def launch_tables(rows: tuple[tuple[int, ...], ...], blocks: int, device: torch.device) -> list[Tensor]:
    """A row of addresses and sizes per tensor, int64; the (row, tile) that each program does, int32."""
    tiles = enumerate(-(-row[-2] // blocks) for row in rows)
    work = [torch.stack([torch.full((n,), i), torch.arange(n)], 1) for i, n in tiles]
    return [torch.tensor(rows).to(device), torch.cat(work).to(torch.int32).to(device)]


class Fused(SingleFile):
    """Steps on a GPU are Triton kernels, one launch for all tensors of a dtype; others are eager, in strict maths."""

    KERNELS = os.environ.get("TRITON_INTERPRET") == "1"  # on a CPU too, in Triton's interpreter

    def _create(self, variant: Variant, p: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = {"step": 0, **dict(variant.host_states)}
        rows, columns = grid(p.shape)
        for name, dtype, per, zero in (x for v in variant.values for x in v.fields()):
            shape = p.shape if per == 1 else (rows, -(-columns // per))
            if name in variant.states:
                start = p.detach() if zero == "p" else torch.full(shape, zero, device=p.device)
                state[name] = start.to(getattr(torch, dtype), copy=True).contiguous()
        return state

    def _run(self, group: Mapping[str, Any], hypers: Mapping[str, Any], jobs: Sequence[tuple[Any, ...]]) -> None:
        launches: dict[tuple[Any, ...], list[tuple[int, ...]]] = {}
        held = []
        for variant, name, p, state in jobs:
            kernels = hasattr(tl, "load") and (p.is_cuda or self.KERNELS)
            host = variant.made.tile_host if kernels else variant.made.host
            numbers, step = self._advance(variant, host, group, hypers, state)
            tensors = {**state, "p": p.detach().contiguous(), "g": p.grad.contiguous()}
            held.append((p, tensors))
            if not kernels and p.numel():
                variant.made.eager(Tile(variant, tensors, step, stream_key(name)), *scalars(p, *numbers))
            elif p.numel():
                size, columns = (variant.block, grid(p.shape)[1]) if variant.block > 1 else (64, p.numel())
                row = [tensors[x[0]].data_ptr() for v in variant.values for x in v.fields()]
                ragged = columns % size > 0 or any(x % 16 for x in row)
                row += [columns, p.numel() // columns * -(-columns // size), stream_key(name)]
                numbers = tuple(torch.tensor(numbers, dtype=torch.float64).float().tolist())
                key = variant, numbers, step, tensors["g"].dtype, p.device, ragged, size
                launches.setdefault(key, []).append(tuple(row))
        for (variant, numbers, step, dtype, device, ragged, size), rows in launches.items():
            blocks = max(1024 // size, 1)
            table, work = launch_tables(tuple(rows), blocks, device)
            grad = getattr(tl, str(dtype)[6:])
            sweep[(len(work),)](table, work, numbers, step, variant, grad, ragged, size, blocks, len(rows[0]))
        for p, tensors in held:
            if tensors["p"].data_ptr() != p.data_ptr():
                p.copy_(tensors["p"])
