"""Walk the elements of a tensor tile by tile: the loops of every sweep that touches neither rows nor columns.

A kernel is a tile function, which computes one tile, and a `Sweep`, which says what lies in memory and what is summed.
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
from optgen.runtime.gpu.codecs import Kept, Plan
from optgen.runtime.gpu.prelude import down, fold, larger, missing, numbered, opaque, pointer, term, within
from optgen.runtime.records.keys import PLACE, WINDOW, Word, salt, signed


@dataclass(frozen=True, eq=False)
class Sweep:
    """The layout of a row of a kernel's table, and the terms that the kernel sums.

    width       entries of a row
    numel       the entry that is the number of elements; columns, the stream key and the place in the logical tensor
                (row, column, columns) follow
    buffers     (entry, dtype, kind) of each buffer: kind "" is one value per element, "block" one per block, "eight"
                one word for eight packed codes, "one" one value per tensor; dtype None is the gradient's
    block       elements of a storage block, 1: nothing is stored in blocks
    parts       parts of a full tile that a masked tile has
    counted     elements are numbered, for random bits
    drawn       the tile function takes words of random bits
    tables      entries of tables of numbers in memory
    extents     entries of sizes of the logical tensor
    sums        (kind, entries of partial results) of each term: the "sum" or "max" of a value, the sum of its
                "square" or of a "product" of two
    strict      lanes and tiles are added in the order that every backend has
    values      how a plan keeps the values of a rule: those that its tile function takes come first, in its order
    taken       how many these are
    stores      (position in `values`, in what the tile function returns) of what is stored, in order
    returned    how many new values the tile function returns; terms follow
    anchor      the buffer whose threads compute the numbers of elements (see `within` of the prelude); -1: any
    words       the recipes of words of random bits (optgen.runtime.keys.Word)
    """

    width: int
    numel: int
    buffers: tuple[tuple[Any, ...], ...]
    block: int = 1
    parts: int = 1
    counted: bool = False
    drawn: bool = False
    tables: tuple[int, ...] = ()
    extents: tuple[int, ...] = ()
    sums: tuple[tuple[Any, ...], ...] = ()
    strict: bool = False
    values: tuple[Kept, ...] = ()
    taken: int = 0
    stores: tuple[tuple[int, int], ...] = ()
    returned: int = 0
    anchor: int = -1
    words: tuple[Word, ...] = ()

    @cached_property
    def cache_key(self) -> str:
        """The record's part of the name under which Triton keeps a compiled kernel."""
        return " ".join([repr(self), *(x.cache_key for x in self.values)])

    def plan(self) -> Plan:
        """Return the values by their names."""
        return Plan(self.values)

    def kept(self, i: int) -> Kept:
        """Return how a value is kept."""
        return self.values[i]

    def inputs(self) -> int:
        """Return how many values the tile function takes."""
        return self.taken

    def store(self, i: int, k: int) -> int:
        """Return the position of what is stored i-th: 0: among the values, 1: among the tile function's results."""
        return self.stores[i][k]

    def bits(self, i: int) -> int:
        """Return the bits of a buffer's packed codes: eight are a word."""
        return int(self.buffers[i][1].primitive_bitwidth) // 8

    def anew(self, k: int) -> bool:
        """Return True if each step hashes a word anew."""
        return self.words[k][2]

    def salt(self, k: int) -> int:
        """Return what sets a word apart."""
        return signed(salt(k))

    def spread(self, k: int) -> int:
        """Return the factor of the step's place."""
        return signed(self.words[k][0])

    def narrow(self, k: int) -> int:
        """Return how many fields of a word have no room for all of the step's place."""
        return len(self.words[k][1])

    def narrow_mask(self, k: int, i: int) -> int:
        """Return the bits of the place that such a field takes."""
        return WINDOW - 1 & -(1 << PLACE - self.words[k][1][i][1])

    def narrow_up(self, k: int, i: int) -> int:
        """Return how far up they move."""
        shift, bits = self.words[k][1][i]
        return shift + bits - PLACE

    def count(self) -> int:
        """Return how many buffers there are."""
        return len(self.buffers)

    def entry(self, i: int) -> int:
        """Return the table entry of a buffer."""
        return int(self.buffers[i][0])

    def dtype(self, i: int, grad: Any) -> Any:
        """Return the dtype of a buffer's values."""
        return grad if self.buffers[i][1] is None else self.buffers[i][1]

    def kind(self, i: int) -> str:
        """Return what a buffer has one value for."""
        return self.buffers[i][2] if len(self.buffers[i]) > 2 else ""

    def slot(self, i: int) -> int:
        """Return the position of a buffer's offsets among those of a tile."""
        return ("", "block", "eight", "row", "col", "mat").index(self.kind(i))

    def of(self, i: int, elements: Any, blocks: Any, eights: Any) -> Any:
        """Return the one of these offsets that counts for a buffer."""
        return {"": elements, "block": blocks, "eight": eights, "one": 0}[self.kind(i)]

    def packed(self) -> bool:
        """Return True if codes share bytes."""
        return any(self.kind(i) == "eight" for i in range(self.count()))

    def many(self, name: str) -> int:
        """Return how many `tables`, `extents` or `sums` there are."""
        return len(getattr(self, name))

    def place(self, name: str, i: int) -> int:
        """Return the entry of one of `tables` or `extents`."""
        return int(getattr(self, name)[i])

    def factors(self, i: int) -> int:
        """Return how many factors a term has, 1: it is no product."""
        return 2 if self.sums[i][0] in ("square", "product") else 1

    def factor(self, i: int, k: int) -> int:
        """Return the position of a term's factor in what the tile function returns."""
        before = sum(2 if kind == "product" else 1 for kind, *_ in self.sums[:i])
        return before + (k if self.sums[i][0] == "product" else 0)

    def summands(self) -> int:
        """Return how many factors of terms the tile function returns."""
        return sum(2 if kind == "product" else 1 for kind, *_ in self.sums)

    def greatest(self, k: int) -> bool:
        """Return True if factor k is of a term that is reduced to its maximum."""
        return any(kind == "max" and self.factor(i, 0) == k for i, (kind, *_) in enumerate(self.sums))

    def largest(self, i: int) -> bool:
        """Return True if a term is reduced to its maximum."""
        return bool(self.sums[i][0] == "max")

    def results(self, i: int) -> int:
        """Return how many partial results a term has."""
        return len(self.sums[i][1])

    def result(self, i: int, j: int) -> int:
        """Return the entry of a partial result."""
        return int(self.sums[i][1][j])


@triton.jit
def pointers(row, SWEEP: tl.constexpr, GRAD: tl.constexpr, ALIGNED: tl.constexpr):
    """The addresses of a tensor's buffers."""
    out = ()
    for i in tl.static_range(SWEEP.count()):
        out = out + (pointer(row + SWEEP.entry(i), SWEEP.dtype(i, GRAD), ALIGNED),)
    return out


@triton.jit
def sizes(row, SWEEP: tl.constexpr):
    """The sizes of the logical tensor that the tile function computes with, as fp32."""
    out = ()
    for i in tl.static_range(SWEEP.many("extents")):
        out = out + (tl.load(row + SWEEP.place("extents", i)).to(tl.float32),)
    return out


@triton.jit
def arguments(row, SWEEP: tl.constexpr, scalars, step_key):
    """The tile function's last arguments, the keys of random bits, and the addresses of tables of numbers."""
    keys = ()
    if SWEEP.counted:
        keys = (step_key, tl.load(row + (SWEEP.numel + 2)).to(tl.int32))
    tables = ()
    for i in tl.static_range(SWEEP.many("tables")):
        tables = tables + (pointer(row + SWEEP.place("tables", i), tl.float32, True),)
    return sizes(row, SWEEP) + scalars, keys, tables


@triton.jit
def numbering(row, SWEEP: tl.constexpr):
    """Return the numbering of elements, each row in whole blocks: rows are `pace` apart, the first element is `begin`.

    Compilers see that the numbers of blocks, and those of a tensor that is not ragged, begin with a multiple of 8: so
    they hash once for eight elements.
    """
    pace = tl.load(row + (SWEEP.numel + 5))
    lane = tl.load(row + (SWEEP.numel + 4))
    if SWEEP.block > 1:
        pace = (pace + (SWEEP.block - 1)) // SWEEP.block * SWEEP.block
        lane = lane // SWEEP.block * SWEEP.block
    return pace, tl.load(row + (SWEEP.numel + 3)) * pace + lane


@triton.jit
def further(buffers, SWEEP: tl.constexpr, elements, blocks):
    """The addresses of what lies so many elements, or blocks, further on."""
    out = ()
    for i in tl.static_range(SWEEP.count()):
        out = out + (buffers[i] + SWEEP.of(i, elements, blocks, elements // 8),)
    return out


@triton.jit
def joined(total, terms, SWEEP: tl.constexpr, I: tl.constexpr):
    """A total and term I of a tile as one."""
    x = terms[SWEEP.factor(I, 0)]
    if SWEEP.factors(I) == 2:
        out = tl.fma(x, terms[SWEEP.factor(I, 1)], total)
    elif SWEEP.largest(I):
        out = larger(total, x)
    else:
        out = total + x
    return out


@triton.jit
def walk(
    table, work, tile: tl.constexpr, SWEEP: tl.constexpr, scalars, step_key, GRAD: tl.constexpr, TILES: tl.constexpr,
    RAGGED: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The tiles of one work item."""
    item = work + 2 * tl.program_id(0)
    row = table + SWEEP.width * tl.load(item).to(tl.int64)
    first = tl.load(item + 1).to(tl.int64)
    buffers = pointers(row, SWEEP, GRAD, ALIGNED)
    given = arguments(row, SWEEP, scalars, step_key)
    if SWEEP.block == 1:
        sums = _elements(row, first, buffers, given, tile, SWEEP, TILES, RAGGED, TILE)
    else:
        sums = _blocks(row, first, buffers, given, tile, SWEEP, TILES, RAGGED, TILE)
    for i in tl.static_range(SWEEP.many("sums")):
        if SWEEP.strict:
            total = fold(tl.reshape(sums[i], [1, 256]), SWEEP.largest(i))
        else:
            total = _of_lanes(sums[i], SWEEP.largest(i))
            rest = _of_lanes(sums[SWEEP.many("sums") + i], SWEEP.largest(i))
            if SWEEP.largest(i):
                total = larger(total, rest)
            else:
                total = total + rest
        for j in tl.static_range(SWEEP.results(i)):
            to = pointer(row + SWEEP.result(i, j), tl.float32, ALIGNED)
            tl.store(to + first // TILES + tl.arange(0, 1), total)


@triton.jit
def _of_lanes(x, MAX: tl.constexpr):
    """[1]: the sum of all values, or the largest."""
    if MAX:
        out = fold(tl.reshape(x, [1, x.numel]), True)
    else:
        out = tl.sum(tl.reshape(x, [1, x.numel]), 1)
    return out


@triton.jit
def _nothing(SWEEP: tl.constexpr, full: tl.constexpr, few: tl.constexpr):
    """Return the initial sums; in fast maths masked tiles, of shape `few`, have sums of their own."""
    out = ()
    for i in tl.static_range(SWEEP.many("sums")):
        if SWEEP.strict:
            out = out + (tl.full([256], missing(SWEEP.largest(i)), tl.float32),)
        else:
            out = out + (tl.full(full, missing(SWEEP.largest(i)), tl.float32),)
    if not SWEEP.strict:
        for i in tl.static_range(SWEEP.many("sums")):
            out = out + (tl.full(few, missing(SWEEP.largest(i)), tl.float32),)
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
            x = terms[SWEEP.factor(i, 0)]
            out = out + (down(sums[i], tl.reshape(x, [x.numel // 256, 256]), SWEEP.largest(i)),)
        elif (i >= SWEEP.many("sums")) == MASKED:
            out = out + (joined(sums[i], terms, SWEEP, i % SWEEP.many("sums")),)
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
    if SWEEP.drawn:
        draws = _drawn(buffers, where, live, index, keys, SWEEP, MASKED)
        made = tile(SWEEP.plan(), *values, *scalars, draws, live[0], MASKED)
    else:
        made = tile(SWEEP.plan(), *values, *scalars, live[0], MASKED)
        draws = _drawn(buffers, where, live, index, keys, SWEEP, MASKED)
    roots = ()
    for i in tl.static_range(SWEEP.many("stores")):
        x = made[SWEEP.store(i, 1)]
        roots = roots + codecs.put_value(
            buffers, where, live, tables, x, roots, draws, SWEEP, SWEEP.kept(SWEEP.store(i, 0)), MASKED
        )
    terms = ()
    for k in tl.static_range(SWEEP.summands()):
        terms = terms + (term(made[SWEEP.returned + k], where[0], live[0], MASKED, SWEEP.greatest(k)),)
    return terms


@triton.jit
def _elements(
    row, first, buffers, given, tile: tl.constexpr, SWEEP: tl.constexpr, TILES: tl.constexpr, RAGGED: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The tiles of an item where nothing is stored in blocks."""
    LESS: tl.constexpr = TILE // SWEEP.parts
    few = tl.arange(0, LESS)
    numel = tl.load(row + SWEEP.numel)
    sums = _nothing(SWEEP, [TILE], [LESS])
    if SWEEP.counted:
        pace, begin = numbering(row, SWEEP)
    if SWEEP.counted and RAGGED:
        # Rows are parts of longer ones, or begin within eight elements: every access is masked.
        columns = tl.load(row + (SWEEP.numel + 1))
        end = tl.minimum((first + TILES) * (TILE // LESS), tl.cdiv(numel, LESS))
        for k in range(first * (TILE // LESS), end):
            where = k * LESS + few
            index = ((begin + where // columns * pace + where % columns).to(tl.int32),)
            sums = _done(sums, buffers, (where,), (where < numel,), index, given, tile, SWEEP, True)
    else:
        at = tl.arange(0, TILE)
        # Addresses move to the item's first tile once, in int64; from there int32 offsets reach.
        origin = first * TILE
        buffers = further(buffers, SWEEP, origin, origin)
        count = tl.minimum(numel - origin, TILES * TILE).to(tl.int32)
        if SWEEP.counted:
            before = (begin // 8 * 8 + origin).to(tl.int32)
        # Pairs are unrolled here, not by the compiler: what is known to lie a tile further on needs no address.
        for pair in range(count // (2 * TILE)):
            start = opaque(pair) * (2 * TILE)
            for odd in tl.static_range(2):
                index = ()
                if SWEEP.counted:
                    index = (numbered(before + start + odd * TILE, at),)
                here = further(further(buffers, SWEEP, start, start), SWEEP, odd * TILE, 0)
                sums = _done(sums, here, (at,), (at,), index, given, tile, SWEEP, False)
        # What is left, a last full tile too, by one more copy of the tile: the time of Triton's Coalesce pass grows
        # with the cube of the copies, and was three quarters of what compiling took when there were five.
        full = count // (2 * TILE) * 2
        for part in range(tl.cdiv(count - full * TILE, LESS)):
            # Addresses carried around the loop, one for every element, would spill.
            start = full * TILE + opaque(part) * LESS
            index = ()
            if SWEEP.counted:
                index = (numbered(before + start, few),)
            here = further(buffers, SWEEP, start, start)
            sums = _done(sums, here, (few,), (few < count - start,), index, given, tile, SWEEP, True)
    return sums


@triton.jit
def _blocks(
    row, first, buffers, given, tile: tl.constexpr, SWEEP: tl.constexpr, TILES: tl.constexpr, RAGGED: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The tiles of an item of whole blocks."""
    BLOCK: tl.constexpr = SWEEP.block
    BLOCKS: tl.constexpr = TILE // BLOCK
    FEW: tl.constexpr = (BLOCKS + SWEEP.parts - 1) // SWEEP.parts
    few_blocks = tl.arange(0, FEW)
    lanes = tl.arange(0, BLOCK)[None, :]
    numel = tl.load(row + SWEEP.numel)
    sums = _nothing(SWEEP, [BLOCKS, BLOCK], [FEW, BLOCK])
    if SWEEP.counted:
        pace, begin = numbering(row, SWEEP)
    if RAGGED:
        # Rows end within a block: tiles count blocks row by row, every access is masked.
        columns = tl.load(row + (SWEEP.numel + 1))
        per_row = (columns + (BLOCK - 1)) // BLOCK
        blocks = numel // columns * per_row
        end = tl.minimum((first + TILES) * (BLOCKS // FEW), tl.cdiv(blocks, FEW))
        for k in range(first * (BLOCKS // FEW), end):
            block = k * FEW + few_blocks
            lane = (block % per_row * BLOCK)[:, None] + lanes
            live_block = block < blocks
            where = (block // per_row * columns)[:, None] + lane, block
            live = (lane < columns) & live_block[:, None], live_block
            if SWEEP.packed():
                lane = (block % per_row * BLOCK)[:, None] + tl.arange(0, BLOCK // 8)[None, :] * 8
                where = where + ((block // per_row * ((columns + 7) // 8))[:, None] + lane // 8,)
                live = live + ((lane < columns) & live_block[:, None],)
            index = ()
            if SWEEP.counted:
                number = (begin + block // per_row * pace + block % per_row * BLOCK).to(tl.int32)
                index = (number[:, None] + lanes,)
            sums = _done(sums, buffers, where, live, index, given, tile, SWEEP, True)
    else:
        at_block = tl.arange(0, BLOCKS)
        at = at_block[:, None] * BLOCK + lanes
        few = few_blocks[:, None] * BLOCK + lanes
        places = at, at_block
        few_places = few, few_blocks
        if SWEEP.packed():
            eights = tl.arange(0, BLOCK // 8)[None, :]
            places = places + (at_block[:, None] * (BLOCK // 8) + eights,)
            few_eights = few_blocks[:, None] * (BLOCK // 8) + eights
            few_places = few_places + (few_eights,)
        origin = first * TILE
        buffers = further(buffers, SWEEP, origin, first * BLOCKS)
        count = tl.minimum(numel - origin, TILES * TILE).to(tl.int32)
        if SWEEP.counted:
            before = (begin + origin).to(tl.int32)
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
                    index = (numbered(before + start + odd * TILE, at),)
                here = further(further(buffers, SWEEP, start, which), SWEEP, odd * TILE, odd * BLOCKS)
                sums = _done(sums, here, places, places, index, given, tile, SWEEP, False)
        full = count // (2 * TILE) * 2
        for part in range(tl.cdiv(count - full * TILE, FEW * BLOCK)):
            part = opaque(part)
            start = full * TILE + part * (FEW * BLOCK)
            live = few < count - start, few_blocks * BLOCK < count - start
            if SWEEP.packed():
                live = live + (few_eights * 8 < count - start,)
            index = ()
            if SWEEP.counted:
                index = (numbered(before + start, few),)
            here = further(buffers, SWEEP, start, full * BLOCKS + part * FEW)
            sums = _done(sums, here, few_places, live, index, given, tile, SWEEP, True)
    return sums
