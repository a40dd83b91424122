"""Walk matrices panel by panel: the loops of every sweep that reads or sums values of rows, columns or matrices.

A panel is 64 rows of some columns of a matrix: 16 storage blocks, or 1024 where nothing is stored in blocks.  A program
does one, a few rows at a time, each in parts of eight columns for every thread.  Sums of columns stay in the registers
of the threads that hold the columns; those of rows cross threads once for all parts.

Where blocks do not lie in rows of the matrices, `walk_any` takes tiles of blocks along dimension 0 instead: they gather
the values of their rows and columns, and what is to be summed is stored densely, for kernels of the prelude.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from optgen.runtime.gpu.prelude import down, fold, joint, log2, missing, pointer, put
from optgen.runtime.gpu.walk import Sweep, arguments, coded, joined, numbering, pointers


@dataclass(frozen=True, eq=False)
class Panels(Sweep):
    """A sweep over panels.

    matrices    the entry that is the number of matrices; their rows and columns follow
    part        columns of a part
    buffers     kinds are also "row", "col" and "mat"
    sums        (kind, entries of partial results of rows, of columns) of each term
    """

    matrices: int = 0
    part: int = 256

    def panel(self) -> int:
        """Return the columns of a panel."""
        return 1024 if self.block == 1 else 16 * self.block

    def lies(self, i: int, elements: Any, blocks: Any, eights: Any, row: Any, column: Any, matrix: Any) -> Any:
        """Return the one of these offsets that counts for a buffer."""
        found = {"": elements, "block": blocks, "eight": eights, "row": row, "col": column, "mat": matrix}
        return found.get(self.kind(i), 0)

    def of_rows(self, i: int) -> int:
        """Return how many partial results of rows a term has."""
        return len(self.sums[i][1])

    def of_row(self, i: int, j: int) -> int:
        """Return the entry of a partial result of rows."""
        return int(self.sums[i][1][j])

    def of_columns(self, i: int) -> int:
        """Return how many partial results of columns a term has."""
        return len(self.sums[i][2])

    def of_column(self, i: int, j: int) -> int:
        """Return the entry of a partial result of columns."""
        return int(self.sums[i][2][j])

    def ordered(self, i: int) -> bool:
        """Return True if a term is reduced in the order that every backend has: a column has one value at any time."""
        return self.strict or self.largest(i)


@triton.jit
def moved(buffers, SWEEP: tl.constexpr, elements, blocks, eights, row, column, matrix):
    """The addresses of what lies so much further on."""
    out = ()
    for i in tl.static_range(SWEEP.count()):
        out = out + (buffers[i] + SWEEP.lies(i, elements, blocks, eights, row, column, matrix),)
    return out


@triton.jit
def operand(terms, SWEEP: tl.constexpr, I: tl.constexpr):
    """Return the value that term I reduces."""
    if SWEEP.factors(I) == 2:
        out = terms[SWEEP.factor(I, 0)] * terms[SWEEP.factor(I, 1)]
    else:
        out = terms[SWEEP.factor(I, 0)]
    return out


@triton.jit
def _with_part(parts, terms, SWEEP: tl.constexpr, I: tl.constexpr, K: tl.constexpr, COUNT: tl.constexpr):
    """Fold part K of COUNT into the parts of a row so far: one value, or, in order, half as many values as parts.

    `fold` adds the upper half to the lower one, and begins with halves of parts.
    """
    if not SWEEP.ordered(I):
        if K == 0:
            out = (operand(terms, SWEEP, I),)
        else:
            out = (joined(parts[0], terms, SWEEP, I),)
    elif COUNT > 1 and K >= COUNT // 2:
        out = ()
        for j in tl.static_range(len(parts)):
            if j == K - COUNT // 2:
                out = out + (joint(parts[j], terms[SWEEP.factor(I, 0)], SWEEP.largest(I)),)
            else:
                out = out + (parts[j],)
    else:
        out = parts + (terms[SWEEP.factor(I, 0)],)
    return out


@triton.jit
def _halved(parts, MAX: tl.constexpr):
    """The upper half of some values added to the lower one."""
    out = ()
    for j in tl.static_range(len(parts) // 2):
        out = out + (joint(parts[j], parts[j + len(parts) // 2], MAX),)
    return out


@triton.jit
def _of_parts(parts, ROWS: tl.constexpr, SWEEP: tl.constexpr, I: tl.constexpr):
    """[ROWS]: the sums of rows."""
    for _ in tl.static_range(log2(len(parts))):
        parts = _halved(parts, SWEEP.largest(I))
    x = tl.reshape(parts[0], [ROWS, SWEEP.part])
    if SWEEP.ordered(I):
        out = fold(x, SWEEP.largest(I))
    else:
        out = tl.sum(x, 1)
    return out


@triton.jit
def _rows(
    start, totals, buffers, lanes, counts, edges, numbers, to_rows, given, tile: tl.constexpr, SWEEP: tl.constexpr,
    ROWS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Some rows of a panel, part by part; the totals of columns with these rows."""
    at, at_block, at_eight, at_row, row_of_block, block, eight, lane = lanes
    columns, blocks, eights = counts
    height, width, some = edges
    before, padded = numbers
    PART: tl.constexpr = SWEEP.part
    COUNT: tl.constexpr = SWEEP.panel() // PART
    here = moved(buffers, SWEEP, start * columns, start * blocks, start * eights, start, 0, 0)
    if MASKED:
        live_row = at_row < height - start
        live_row_of_block = row_of_block < height - start
    new = ()
    of_rows = ()
    for _ in tl.static_range(SWEEP.many("sums")):
        of_rows = of_rows + ((),)
    for k in tl.static_range(COUNT):
        there = moved(here, SWEEP, k * PART, k * PART // SWEEP.block, k * PART // 8, 0, k * PART, 0)
        where = at, at_block, at_eight, at_row, lane, 0
        live = at, at_block, at_eight, at_row, lane, some
        if MASKED:
            live_col = lane < width - k * PART
            live_block = live_row_of_block & (block * SWEEP.block < width - k * PART)
            live_eight = live_row & (eight * 8 < width - k * PART)
            live = live_row & live_col, live_block, live_eight, live_row, live_col, some
        index = ()
        if SWEEP.counted:
            number = before + k * PART + (start + at_row) * padded
            if SWEEP.block > 1:
                number = number | lane & 7
            index = (number,)
        terms = coded(there, where, live, index, given, tile, SWEEP, MASKED)
        if SWEEP.many("sums") > 0:
            parts = ()
            for i in tl.static_range(SWEEP.many("sums")):
                if SWEEP.of_rows(i) > 0:
                    parts = parts + (_with_part(of_rows[i], terms, SWEEP, i, k, COUNT),)
                else:
                    parts = parts + ((),)
                if SWEEP.of_columns(i) > 0:
                    total = totals[len(new)]
                    if SWEEP.ordered(i):
                        x = tl.reshape(terms[SWEEP.factor(i, 0)], [ROWS, SWEEP.part])
                        new = new + (down(total, x, SWEEP.largest(i)),)
                    else:
                        new = new + (joined(total, terms, SWEEP, i),)
            of_rows = parts
    which = start + tl.arange(0, ROWS)
    for i in tl.static_range(SWEEP.many("sums")):
        if SWEEP.of_rows(i) > 0:
            total = _of_parts(of_rows[i], ROWS, SWEEP, i)
            for j in tl.static_range(SWEEP.of_rows(i)):
                put(to_rows[i][j], which, total, which < height, MASKED)
    return new


@triton.jit
def walk_panels(
    table, work, tile: tl.constexpr, SWEEP: tl.constexpr, scalars, step_key, GRAD: tl.constexpr, ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """The panel of one work item; see optgen.runtime.gpu.stages for table and work."""
    BLOCK: tl.constexpr = SWEEP.block
    PANEL: tl.constexpr = SWEEP.panel()
    PART: tl.constexpr = SWEEP.part
    item = work + 2 * tl.program_id(0)
    row = table + SWEEP.width * tl.load(item).to(tl.int64)
    buffers = pointers(row, SWEEP, GRAD, ALIGNED)
    given = arguments(row, SWEEP, scalars, step_key)
    rows = tl.load(row + (SWEEP.matrices + 1))
    columns = tl.load(row + (SWEEP.matrices + 2))
    if ALIGNED:
        columns = tl.multiple_of(columns, 16)
    number = tl.load(item + 1)
    panels = tl.cdiv(columns, PANEL).to(tl.int32)
    left = (number % panels).to(tl.int64) * PANEL
    stack = tl.cdiv(rows, 64).to(tl.int32)  # of panels in each matrix
    matrix = (number // panels // stack).to(tl.int64)
    below = (number // panels % stack).to(tl.int64) * 64
    top = matrix * rows + below
    height = tl.minimum(rows - below, 64).to(tl.int32)
    width = tl.minimum(columns - left, PANEL).to(tl.int32)
    blocks = tl.cdiv(columns, BLOCK)
    eights = tl.cdiv(columns, 8)
    if BLOCK > 1:
        # Offsets of blocks have no dimension for elements.
        block = tl.arange(0, PART // BLOCK)[None, :]
        row_of_block = tl.arange(0, ROWS)[:, None]
        lane = tl.arange(0, PART // BLOCK)[None, :, None] * BLOCK + tl.arange(0, BLOCK)[None, None, :]
        at_row = tl.arange(0, ROWS)[:, None, None]
        eight = lane
        if SWEEP.packed():
            eight = tl.arange(0, PART // BLOCK)[None, :, None] * (BLOCK // 8) + tl.arange(0, BLOCK // 8)[None, None, :]
    else:
        lane = tl.arange(0, PART)[None, :]
        at_row = tl.arange(0, ROWS)[:, None]
        row_of_block = at_row
        block = lane
        eight = lane
    at = at_row * columns.to(tl.int32) + lane
    at_block = row_of_block * blocks.to(tl.int32) + block
    at_eight = at_row * eights.to(tl.int32) + eight
    # Addresses move to the panel once, in int64.
    buffers = moved(
        buffers, SWEEP, top * columns + left, top * blocks + left // BLOCK, top * eights + left // 8, top,
        matrix * columns + left, matrix,
    )  # fmt: skip
    to_rows = ()
    to_columns = ()
    for i in tl.static_range(SWEEP.many("sums")):
        these = ()
        for j in tl.static_range(SWEEP.of_rows(i)):
            first = pointer(row + SWEEP.of_row(i, j), tl.float32, ALIGNED)
            these = these + (first + (number % panels * (rows * tl.load(row + SWEEP.matrices)) + top),)
        to_rows = to_rows + (these,)
        these = ()
        for j in tl.static_range(SWEEP.of_columns(i)):
            first = pointer(row + SWEEP.of_column(i, j), tl.float32, ALIGNED)
            these = these + (first + ((number // panels).to(tl.int64) * columns + left),)
        to_columns = to_columns + (these,)
    numbers = 0, 0
    if SWEEP.counted:
        pace, begin = numbering(row, SWEEP)
        # Rows of matrices are those of dimension 0, or follow one another.
        padded = tl.where(columns == tl.load(row + (SWEEP.numel + 1)), pace, blocks * BLOCK).to(tl.int32)
        before = begin.to(tl.int32) + top.to(tl.int32) * padded + left.to(tl.int32)
        # Rows of blocks begin with a multiple of 8, of which compilers are to know.
        if BLOCK > 1:
            before = before + (lane & -8)
        else:
            before = before + lane
        numbers = before, padded
    # In order, a column has one value; else a row's tile is added to that before.
    totals = ()
    for _ in tl.static_range(PANEL // PART):
        for i in tl.static_range(SWEEP.many("sums")):
            if SWEEP.of_columns(i) > 0:
                if SWEEP.ordered(i):
                    totals = totals + (tl.full([PART], missing(SWEEP.largest(i)), tl.float32),)
                else:
                    totals = totals + (tl.full(at.shape, 0.0, tl.float32),)
    lanes = at, at_block, at_eight, at_row, row_of_block, block, eight, lane
    counts = columns, blocks, eights
    edges = height, width, rows > 0
    # Tiles without masks, then the others.
    full = tl.where(width == PANEL, height // ROWS, 0)
    for k in range(full):
        totals = _rows(
            k * ROWS, totals, buffers, lanes, counts, edges, numbers, to_rows, given, tile, SWEEP, ROWS, False,
        )  # fmt: skip
    for k in range(full, tl.cdiv(height, ROWS)):
        totals = _rows(
            k * ROWS, totals, buffers, lanes, counts, edges, numbers, to_rows, given, tile, SWEEP, ROWS, True,
        )  # fmt: skip
    lane = tl.arange(0, PART)
    seen = ()
    for k in tl.static_range(PANEL // PART):
        for i in tl.static_range(SWEEP.many("sums")):
            if SWEEP.of_columns(i) > 0:
                total = totals[len(seen)]
                if not SWEEP.ordered(i):
                    total = tl.sum(tl.reshape(total, [ROWS, PART]), 0)
                for j in tl.static_range(SWEEP.of_columns(i)):
                    tl.store(to_columns[i][j] + k * PART + lane, total, mask=lane < width - k * PART)
                seen = seen + (0,)


@triton.jit
def walk_any(
    table, work, tile: tl.constexpr, SWEEP: tl.constexpr, scalars, step_key, GRAD: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Tiles of a tensor of any shape; what is to be summed is stored densely."""
    BLOCK: tl.constexpr = SWEEP.block
    SIZE: tl.constexpr = max(256, SWEEP.block)
    item = work + 2 * tl.program_id(0)
    row = table + SWEEP.width * tl.load(item).to(tl.int64)
    buffers = pointers(row, SWEEP, GRAD, False)
    given = arguments(row, SWEEP, scalars, step_key)
    height = tl.load(row + (SWEEP.matrices + 1))
    width = tl.load(row + (SWEEP.matrices + 2))
    numel = tl.load(row + SWEEP.numel)
    columns = tl.load(row + (SWEEP.numel + 1))
    first = tl.load(item + 1).to(tl.int64)
    per_row = tl.cdiv(columns, BLOCK)
    tiles = tl.cdiv(numel, SIZE)
    if BLOCK > 1:
        blocks = numel // columns * per_row
        tiles = tl.cdiv(blocks, SIZE // BLOCK)
    if SWEEP.counted:
        pace, begin = numbering(row, SWEEP)
    for k in range(first, tl.minimum(first + TILES, tiles)):
        if BLOCK > 1:
            block = k * (SIZE // BLOCK) + tl.arange(0, SIZE // BLOCK)
            live_block = block < blocks
            # A dimension more, for elements.
            beside = k * (SIZE // BLOCK) + tl.arange(0, SIZE // BLOCK)[:, None]
            lane = beside % per_row * BLOCK + tl.arange(0, BLOCK)[None, :]
            at = beside // per_row * columns + lane
            live = (beside < blocks) & (lane < columns)
            at_eight = at
            live_eight = live
            if SWEEP.packed():
                eighth = beside % per_row * BLOCK + tl.arange(0, BLOCK // 8)[None, :] * 8
                at_eight = beside // per_row * tl.cdiv(columns, 8) + eighth // 8
                live_eight = (beside < blocks) & (eighth < columns)
            index = ()
            if SWEEP.counted:
                eights = begin + beside // per_row * pace + (lane & -8)
                index = (eights.to(tl.int32) | (lane & 7).to(tl.int32),)
        else:
            at = k * SIZE + tl.arange(0, SIZE)
            live = at < numel
            block = at
            live_block = live
            at_eight = at
            live_eight = live
            index = ()
            if SWEEP.counted:
                index = ((begin + at // columns * pace + at % columns).to(tl.int32),)
        at_mat = at // (height * width)
        where = at, block, at_eight, at // width, at_mat * width + at % width, at_mat
        masks = live, live_block, live_eight, live, live, live
        terms = coded(buffers, where, masks, index, given, tile, SWEEP, True)
        for i in tl.static_range(SWEEP.many("sums")):
            to = pointer(row + (SWEEP.numel + 9 + i), tl.float32, False)
            put(to, at, operand(terms, SWEEP, i), live, True)


@triton.jit
def walk_matrices(
    table, work, tile: tl.constexpr, SWEEP: tl.constexpr, scalars, step_key, GRAD: tl.constexpr, TILES: tl.constexpr,
    RAGGED: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One work item: TILE rows of a panel at a time, or RAGGED: TILES tiles of a tensor that no panels fit."""
    if RAGGED:
        walk_any(table, work, tile, SWEEP, scalars, step_key, GRAD, TILES)
    else:
        walk_panels(table, work, tile, SWEEP, scalars, step_key, GRAD, TILE, ALIGNED)
