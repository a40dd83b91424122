"""Walk the elements of a tensor tile by tile: the loops of every sweep that touches neither rows nor columns.

A kernel is a tile function, which computes one tile, and a `KernelSweep`, which says what lies in memory and what is
summed.
A program does the tiles of one work item (see optgen.runtime.step.launch for `table` and `work`): pairs of full tiles
without masks, then what is left.  Where rows end within a block, tiles count blocks row by row and every access is
masked; where rows are parts of longer ones, elements are numbered row by row.

A tile function takes values, sizes of the logical tensor and scalars; it returns a tuple of new values, then of what is
summed.  Codecs load and store the values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import triton
import triton.language as tl

from optgen.runtime.gpu import codecs
from optgen.runtime.gpu.codecs import StoredValue, StoredView, ValuesByName
from optgen.runtime.gpu.prelude import down, fold, joint, missing, numbered, opaque, pointer, term, within
from optgen.runtime.records.keys import Recipe, Word, recipes


@dataclass(frozen=True, eq=False)
class KernelSweep:
    """The layout of a row of a kernel's table, the terms that the kernel sums, and how it is launched.

    width     entries of a row (42)
    numel     position of the entry that is the number of elements (32); columns, the stream key and the place in the
              logical tensor (row, column, columns) follow
    buffers   (entry, dtype, kind) of each buffer ((3, tl.int16, "block")): kind "" is one value per element, "block"
              one per block, "eight" one word for eight packed codes, "one" one value per tensor, "row", "col" and "mat"
              one for each of these; dtype None is the gradient's
    block     elements of a storage block (64), 1 if nothing is stored in blocks
    parts     parts of a full tile that a masked tile has (2)
    counted   True if elements are numbered, for random bits
    tables    entries of tables of numbers in memory
    extents   entries of sizes of the logical tensor
    sums      (maximum, factors, entries of partial results) of each term ((False, (0, 0), (27,))): the sum, or the
              maximum, of one of the tile function's results behind the new values, by position, or the sum of the
              products of two
    strict    True if lanes and tiles are added in the order that every backend has
    values    the rule's values, as the plan keeps them: those that its tile function takes come first, in its order
    taken     the number of these (4)
    views     the views of the weight that it stores with it
    stores    (position in `values`, in what the tile function returns) of what is stored, in order
    summed    position, in what the tile function returns, of each factor of terms
    anchor    the buffer whose threads compute the numbers of elements (see `within` of the prelude); -1: any
    words     recipes of words of random bits (`records.keys.Word`)
    grad      dtype of gradients
    tiles     tiles of a work item (4)
    tile      elements of a tile (256)
    ragged    True if blocks, or numbers of elements, are counted row by row
    aligned   True if all addresses are multiples of 16 bytes
    panels    True if matrices are walked panel by panel (matrices.py)
    """

    width: int
    numel: int
    buffers: tuple[tuple[Any, ...], ...]
    block: int = 1
    parts: int = 1
    counted: bool = False
    tables: tuple[int, ...] = ()
    extents: tuple[int, ...] = ()
    sums: tuple[tuple[Any, ...], ...] = ()
    strict: bool = False
    values: tuple[StoredValue, ...] = ()
    taken: int = 0
    stores: tuple[tuple[int, int], ...] = ()
    views: tuple[StoredView, ...] = ()
    summed: tuple[int, ...] = ()
    anchor: int = -1
    words: tuple[Word, ...] = ()
    grad: Any = None
    tiles: int = 1
    tile: int = 256
    ragged: bool = False
    aligned: bool = False
    panels: bool = False

    @cached_property
    def cache_key(self) -> str:
        """The record's part of the name under which Triton keeps a compiled kernel."""
        return " ".join([repr(self), *(x.cache_key for x in self.values), *(x.cache_key for x in self.views)])

    def plan(self) -> ValuesByName:
        """Return the values by their names."""
        return ValuesByName(self.values)

    # Triton makes constants of what methods return, and not of attributes.

    def inputs(self) -> int:
        """Return how many values the tile function takes."""
        return self.taken

    def kept(self, i: int) -> StoredValue:
        """Return how a value is kept."""
        return self.values[i]

    def view(self, i: int) -> StoredView:
        """Return a view of the weight."""
        return self.views[i]

    def bits(self, i: int) -> int:
        """Return the bits of a buffer's packed codes: eight are a word."""
        return int(self.buffers[i][1].primitive_bitwidth) // 8

    @cached_property
    def recipes(self) -> tuple[Recipe, ...]:
        """Return how each word of random bits is made."""
        return recipes(self.words)

    def dtype(self, i: int) -> Any:
        """Return the dtype of a buffer's values."""
        return self.grad if self.buffers[i][1] is None else self.buffers[i][1]

    def kind(self, i: int) -> str:
        """Return what a buffer has one value for."""
        return self.buffers[i][2] if len(self.buffers[i]) > 2 else ""

    def slot(self, i: int) -> int:
        """Return the position of a buffer's offsets among those of a tile; -1: it has one value."""
        return {"": 0, "block": 1, "eight": 2, "row": 3, "col": 4, "mat": 5, "one": -1}[self.kind(i)]

    def packed(self) -> bool:
        """Return True if codes share bytes."""
        return any(self.kind(i) == "eight" for i in range(len(self.buffers)))

    def greatest(self, k: int) -> bool:
        """Return True if factor k is of a term that is reduced to its maximum."""
        return any(largest and k in factors for largest, factors, *_ in self.sums)


@triton.jit
def pointers(row, SWEEP: tl.constexpr):
    """The addresses of a tensor's buffers."""
    out = ()
    for i in tl.static_range(len(SWEEP.buffers)):
        out = out + (pointer(row + SWEEP.buffers[i][0], SWEEP.dtype(i), SWEEP.aligned),)
    return out


@triton.jit
def arguments(row, SWEEP: tl.constexpr, scalars, step_key):
    """The tile function's last arguments (sizes of the logical tensor, as fp32, and scalars), the keys of random bits,
    and the addresses of tables of numbers."""
    sizes = ()
    for i in tl.static_range(len(SWEEP.extents)):
        sizes = sizes + (tl.load(row + SWEEP.extents[i]).to(tl.float32),)
    keys = ()
    if SWEEP.counted:
        keys = (step_key, tl.load(row + (SWEEP.numel + 2)).to(tl.int32))
    tables = ()
    for i in tl.static_range(len(SWEEP.tables)):
        tables = tables + (pointer(row + SWEEP.tables[i], tl.float32, True),)
    return sizes + scalars, keys, tables


@triton.jit
def numbering(row, SWEEP: tl.constexpr):
    """Return the numbering of elements, each row in whole blocks: rows are `pace` apart, the first element is `begin`.

    Compilers see that the numbers of blocks, and those of a tensor that is not ragged, begin with a multiple of 8: so
    they hash once for eight elements.
    """
    pace = tl.load(row + (SWEEP.numel + 5))
    lane = tl.load(row + (SWEEP.numel + 4))
    top = tl.load(row + (SWEEP.numel + 3))
    if SWEEP.block > 1:
        pace = (pace + (SWEEP.block - 1)) // SWEEP.block * SWEEP.block
        lane = lane // SWEEP.block * SWEEP.block
    return pace, top * pace + lane


@triton.jit
def further(buffers, SWEEP: tl.constexpr, by):
    """The addresses of what lies so much further on: by so many elements, blocks, eights ..., as `slot` counts them."""
    out = ()
    for i in tl.static_range(len(SWEEP.buffers)):
        if SWEEP.slot(i) < 0:
            out = out + (buffers[i],)
        else:
            out = out + (buffers[i] + by[SWEEP.slot(i)],)
    return out


@triton.jit
def joined(total, terms, SWEEP: tl.constexpr, I: tl.constexpr):
    """A total and term I of a tile as one."""
    x = terms[SWEEP.sums[I][1][0]]
    if len(SWEEP.sums[I][1]) == 2:
        out = tl.fma(x, terms[SWEEP.sums[I][1][1]], total)
    else:
        out = joint(total, x, SWEEP.sums[I][0])
    return out


@triton.jit
def walk_segments(table, work, tile: tl.constexpr, SWEEP: tl.constexpr, scalars, step_key):
    """The tiles of one work item."""
    item = work + 2 * tl.program_id(0)
    row = table + SWEEP.width * tl.load(item).to(tl.int64)
    first = tl.load(item + 1).to(tl.int64)
    buffers = pointers(row, SWEEP)
    given = arguments(row, SWEEP, scalars, step_key)
    if SWEEP.ragged and (SWEEP.counted or SWEEP.block > 1):
        sums = _ragged(row, first, buffers, given, tile, SWEEP)
    else:
        sums = _flat(row, first, buffers, given, tile, SWEEP)
    for i in tl.static_range(len(SWEEP.sums)):
        if SWEEP.strict:
            total = fold(tl.reshape(sums[i], [1, 256]), SWEEP.sums[i][0])
        else:
            rest = _of_lanes(sums[len(SWEEP.sums) + i], SWEEP.sums[i][0])
            total = joint(_of_lanes(sums[i], SWEEP.sums[i][0]), rest, SWEEP.sums[i][0])
        for j in tl.static_range(len(SWEEP.sums[i][2])):
            to = pointer(row + SWEEP.sums[i][2][j], tl.float32, SWEEP.aligned)
            tl.store(to + first // SWEEP.tiles + tl.arange(0, 1), total)


@triton.jit
def _of_lanes(x, MAX: tl.constexpr):
    """[1]: the sum of all values, or the largest."""
    if MAX:
        out = fold(tl.reshape(x, [1, x.numel]), True)
    else:
        out = tl.sum(tl.reshape(x, [1, x.numel]), 1)
    return out


@triton.jit
def _nothing(SWEEP: tl.constexpr, full, few):
    """Return the initial sums; in fast maths masked tiles, of the shape of `few`, have sums of their own."""
    out = ()
    for i in tl.static_range(len(SWEEP.sums)):
        if SWEEP.strict:
            out = out + (tl.full([256], missing(SWEEP.sums[i][0]), tl.float32),)
        else:
            out = out + (tl.full(full.shape, missing(SWEEP.sums[i][0]), tl.float32),)
    if not SWEEP.strict:
        for i in tl.static_range(len(SWEEP.sums)):
            out = out + (tl.full(few.shape, missing(SWEEP.sums[i][0]), tl.float32),)
    return out


@triton.jit
def _done(
    sums, buffers, where, live, index, given, tile: tl.constexpr, SWEEP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Do one tile; the sums with its terms."""
    terms = coded(buffers, where, live, index, given, tile, SWEEP, MASKED)
    out = ()
    for i in tl.static_range(len(sums)):
        if SWEEP.strict:
            x = terms[SWEEP.sums[i][1][0]]
            out = out + (down(sums[i], tl.reshape(x, [x.numel // 256, 256]), SWEEP.sums[i][0]),)
        elif (i >= len(SWEEP.sums)) == MASKED:
            out = out + (joined(sums[i], terms, SWEEP, i % len(SWEEP.sums)),)
        else:
            out = out + (sums[i],)
    return out


@triton.jit
def _drawn(buffers, where, live, index, keys, SWEEP: tl.constexpr, MASKED: tl.constexpr):
    """The words of random bits of a tile."""
    draws = ()
    if SWEEP.counted:
        number = index[0]
        if SWEEP.anchor >= 0:
            beside = codecs.loaded(buffers[SWEEP.anchor], where, live, SWEEP, SWEEP.anchor, MASKED)
            if beside.dtype.primitive_bitwidth <= 16:
                number = within(number, beside)
        draws = codecs.words(number, keys[0], keys[1], SWEEP)
    return draws


@triton.jit
def coded(
    buffers, where, live, index, given, tile: tl.constexpr, SWEEP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Do one tile, whose values codecs load and store; the factors of its terms."""
    scalars, keys, tables = given
    values = ()
    for i in tl.static_range(SWEEP.inputs()):
        values = values + (codecs.given(buffers, where, live, tables, SWEEP, SWEEP.kept(i), MASKED),)
    made = tile(SWEEP.plan(), *values, *scalars, live[0], MASKED)
    draws = _drawn(buffers, where, live, index, keys, SWEEP, MASKED)
    roots = ()
    for i in tl.static_range(len(SWEEP.stores)):
        roots = roots + codecs.put_value(
            buffers, where, live, tables, made[SWEEP.stores[i][1]], roots, draws, SWEEP,
            SWEEP.kept(SWEEP.stores[i][0]), MASKED,
        )  # fmt: skip
    terms = ()
    for k in tl.static_range(len(SWEEP.summed)):
        terms = terms + (term(made[SWEEP.summed[k]], where[0], live[0], MASKED, SWEEP.greatest(k)),)
    return terms


@triton.jit
def places(SWEEP: tl.constexpr, BLOCKS: tl.constexpr):
    """The offsets of the elements, blocks and eights of a tile of so many blocks; those of blocks have no dimension for
    elements."""
    block = tl.arange(0, BLOCKS)
    if SWEEP.block == 1:
        out = block, block, block
    else:
        at = block[:, None] * SWEEP.block + tl.arange(0, SWEEP.block)[None, :]
        eights = at
        if SWEEP.packed():
            eights = block[:, None] * (SWEEP.block // 8) + tl.arange(0, SWEEP.block // 8)[None, :]
        out = at, block, eights
    return out


@triton.jit
def by_rows(k, numel, columns, numbers, SWEEP: tl.constexpr, BLOCKS: tl.constexpr):
    """The offsets of masked tile k of so many blocks, counted row by row, the lanes that are live, and the numbers of
    elements, or none."""
    pace, begin = numbers
    block = k * BLOCKS + tl.arange(0, BLOCKS)
    index = ()
    if SWEEP.block == 1:
        live = block < numel
        where = block, block, block
        masks = live, live, live
        if SWEEP.counted:
            index = ((begin + block // columns * pace + block % columns).to(tl.int32),)
    else:
        per_row = (columns + (SWEEP.block - 1)) // SWEEP.block
        live_block = block < numel // columns * per_row
        row = block // per_row
        start = block % per_row * SWEEP.block
        lanes = tl.arange(0, SWEEP.block)[None, :]
        lane = start[:, None] + lanes
        at = (row * columns)[:, None] + lane
        live = (lane < columns) & live_block[:, None]
        eights = at
        live_eights = live
        if SWEEP.packed():
            eighth = start[:, None] + tl.arange(0, SWEEP.block // 8)[None, :] * 8
            eights = (row * ((columns + 7) // 8))[:, None] + eighth // 8
            live_eights = (eighth < columns) & live_block[:, None]
        where = at, block, eights
        masks = live, live_block, live_eights
        if SWEEP.counted:
            index = ((begin + row * pace + start).to(tl.int32)[:, None] + lanes,)
    return where, masks, index


@triton.jit
def _ragged(row, first, buffers, given, tile: tl.constexpr, SWEEP: tl.constexpr):
    """The tiles of an item where rows are parts of longer ones, or end within eight elements or a block."""
    BLOCKS: tl.constexpr = SWEEP.tile // SWEEP.block
    FEW: tl.constexpr = (BLOCKS + SWEEP.parts - 1) // SWEEP.parts
    numel = tl.load(row + SWEEP.numel)
    columns = tl.load(row + (SWEEP.numel + 1))
    numbers = numbering(row, SWEEP)
    sums = _nothing(SWEEP, places(SWEEP, BLOCKS)[0], places(SWEEP, FEW)[0])
    blocks = numel // columns * ((columns + (SWEEP.block - 1)) // SWEEP.block)
    end = tl.minimum((first + SWEEP.tiles) * (BLOCKS // FEW), tl.cdiv(blocks, FEW))
    for k in range(first * (BLOCKS // FEW), end):
        where, live, index = by_rows(k, numel, columns, numbers, SWEEP, FEW)
        sums = _done(sums, buffers, where, live, index, given, tile, SWEEP, True)
    return sums


@triton.jit
def _flat(row, first, buffers, given, tile: tl.constexpr, SWEEP: tl.constexpr):
    """The tiles of an item whose blocks follow one another in memory."""
    TILE: tl.constexpr = SWEEP.tile
    BLOCK: tl.constexpr = SWEEP.block
    BLOCKS: tl.constexpr = TILE // BLOCK
    FEW: tl.constexpr = (BLOCKS + SWEEP.parts - 1) // SWEEP.parts
    at = places(SWEEP, BLOCKS)
    few = places(SWEEP, FEW)
    sums = _nothing(SWEEP, at[0], few[0])
    # Addresses move to the item's first tile once, in int64; from there int32 offsets reach.
    origin = first * TILE
    buffers = further(buffers, SWEEP, (origin, first * BLOCKS, origin // 8))
    count = tl.minimum(tl.load(row + SWEEP.numel) - origin, SWEEP.tiles * TILE).to(tl.int32)
    if SWEEP.counted:
        before = (numbering(row, SWEEP)[1] // 8 * 8 + origin).to(tl.int32)
    # Pairs are unrolled here, not by the compiler: what is known to lie a tile further on needs no address.
    for pair in range(count // (2 * TILE)):
        # Addresses carried around the loop, two registers each, are what 64 registers have no room for beside the
        # values; those of blocks have, where no random numbers are drawn.
        now = opaque(pair)
        start = now * (2 * TILE)
        which = pair * (2 * BLOCKS)
        if SWEEP.counted:
            which = now * (2 * BLOCKS)
        for odd in tl.static_range(2):
            index = ()
            if SWEEP.counted:
                index = (numbered(before + start + odd * TILE, at[0], BLOCK),)
            here = further(buffers, SWEEP, (start, which, start // 8))
            here = further(here, SWEEP, (odd * TILE, odd * BLOCKS, odd * TILE // 8))
            sums = _done(sums, here, at, at, index, given, tile, SWEEP, False)
    # What is left, a last full tile too, by one more copy of the tile: the time of Triton's Coalesce pass grows with
    # the cube of the copies, and was three quarters of what compiling took when there were five.
    full = count // (2 * TILE) * 2
    for part in range(tl.cdiv(count - full * TILE, FEW * BLOCK)):
        part = opaque(part)
        start = full * TILE + part * (FEW * BLOCK)
        rest = count - start
        index = ()
        if SWEEP.counted:
            index = (numbered(before + start, few[0], BLOCK),)
        here = further(buffers, SWEEP, (start, full * BLOCKS + part * FEW, start // 8))
        live = few[0] < rest, few[1] * BLOCK < rest, few[2] * 8 < rest
        sums = _done(sums, here, few, live, index, given, tile, SWEEP, True)
    return sums
