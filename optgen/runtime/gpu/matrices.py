"""Walk matrices panel by panel: the loops of every sweep that reads or sums values of rows, columns or matrices.

A panel is some rows and columns of a matrix: 64 rows of 16 storage blocks, or of 1024 columns where nothing is stored
in blocks, or fewer, so that there are enough panels (optgen.runtime.layout.workspace).  A program does one, a few rows
at a time, each in parts of eight columns for every thread.  Sums of columns stay in the registers of the threads that
hold the columns; those of rows cross threads once for all parts.

Where blocks do not lie in rows of the matrices, `walk_any` takes tiles of blocks along dimension 0 instead: they gather
the values of their rows and columns, and what is to be summed is stored densely, for kernels of the prelude.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from optgen.runtime.gpu.prelude import down, fold, joint, log2, missing, pointer, put
from optgen.runtime.gpu.walk import (
    KernelSweep,
    arguments,
    by_rows,
    coded,
    further,
    joined,
    numbering,
    pointers,
    walk_segments,
)


@dataclass(frozen=True, eq=False)
class Panels(KernelSweep):
    """A sweep over panels.

    matrices    the entry that is the number of matrices; their rows and columns follow
    part        columns of a part
    across      columns of a panel, whose rows are those of all tiles of a work item
    buffers     kinds are also "row", "col" and "mat"
    sums        (maximum, factors, entries of partial results of rows, of columns) of each term
    """

    matrices: int = 0
    part: int = 256
    across: int = 1024
    panels: bool = True

    def eights(self) -> bool:
        """Return True if the numbers of a row's elements begin with a multiple of 8."""
        return self.block > 1 or self.aligned

    def ordered(self, i: int) -> bool:
        """Return True if a term is reduced in the order that every backend has: a column has one value at any time."""
        return self.strict or bool(self.sums[i][0])


@triton.jit
def operand(terms, SWEEP: tl.constexpr, I: tl.constexpr):
    """Return the value that term I reduces."""
    out = terms[SWEEP.sums[I][1][0]]
    if len(SWEEP.sums[I][1]) == 2:
        out = out * terms[SWEEP.sums[I][1][1]]
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
                out = out + (joint(parts[j], terms[SWEEP.sums[I][1][0]], SWEEP.sums[I][0]),)
            else:
                out = out + (parts[j],)
    else:
        out = parts + (terms[SWEEP.sums[I][1][0]],)
    return out


@triton.jit
def _of_parts(parts, ROWS: tl.constexpr, SWEEP: tl.constexpr, I: tl.constexpr):
    """[ROWS]: the sums of rows."""
    for _ in tl.static_range(log2(len(parts))):
        half = ()
        for j in tl.static_range(len(parts) // 2):
            half = half + (joint(parts[j], parts[j + len(parts) // 2], SWEEP.sums[I][0]),)
        parts = half
    x = tl.reshape(parts[0], [ROWS, SWEEP.part])
    if SWEEP.ordered(I):
        out = fold(x, SWEEP.sums[I][0])
    else:
        out = tl.sum(x, 1)
    return out


@triton.jit
def _rows(
    start, totals, buffers, lanes, counts, edges, numbers, to_rows, given, tile: tl.constexpr, SWEEP: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Some rows of a panel, part by part; the totals of columns with these rows."""
    at, at_block, at_eight, at_row, row_of_block, block, eight, lane = lanes
    columns, blocks, eights = counts
    height, width, some = edges
    before, padded = numbers
    PART: tl.constexpr = SWEEP.part
    ROWS: tl.constexpr = SWEEP.tile
    COUNT: tl.constexpr = SWEEP.across // PART
    here = further(buffers, SWEEP, (start * columns, start * blocks, start * eights, start, 0, 0))
    if MASKED:
        live_row = at_row < height - start
        live_row_of_block = row_of_block < height - start
    new = ()
    of_rows = ()
    for _ in tl.static_range(len(SWEEP.sums)):
        of_rows = of_rows + ((),)
    for k in tl.static_range(COUNT):
        there = further(here, SWEEP, (k * PART, k * PART // SWEEP.block, k * PART // 8, 0, k * PART, 0))
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
            if SWEEP.eights():
                number = number | lane & 7
            index = (number,)
        terms = coded(there, where, live, index, given, tile, SWEEP, MASKED)
        if len(SWEEP.sums) > 0:
            parts = ()
            for i in tl.static_range(len(SWEEP.sums)):
                if len(SWEEP.sums[i][2]) > 0:
                    parts = parts + (_with_part(of_rows[i], terms, SWEEP, i, k, COUNT),)
                else:
                    parts = parts + ((),)
                if len(SWEEP.sums[i][3]) > 0:
                    total = totals[len(new)]
                    if SWEEP.ordered(i):
                        x = tl.reshape(terms[SWEEP.sums[i][1][0]], [ROWS, PART])
                        new = new + (down(total, x, SWEEP.sums[i][0]),)
                    else:
                        new = new + (joined(total, terms, SWEEP, i),)
            of_rows = parts
    which = start + tl.arange(0, ROWS)
    for i in tl.static_range(len(SWEEP.sums)):
        if len(SWEEP.sums[i][2]) > 0:
            total = _of_parts(of_rows[i], ROWS, SWEEP, i)
            for j in tl.static_range(len(SWEEP.sums[i][2])):
                put(to_rows[i][j], which, total, which < height, MASKED)
    return new


@triton.jit
def _lanes(columns, blocks, eights, SWEEP: tl.constexpr):
    """The offsets of a tile's elements, blocks and eights; the rows of elements and of blocks, and the blocks, eights
    and elements of a row.  Offsets of blocks have no dimension for elements."""
    if SWEEP.block > 1:
        block = tl.arange(0, SWEEP.part // SWEEP.block)[None, :]
        row_of_block = tl.arange(0, SWEEP.tile)[:, None]
        lane = block[:, :, None] * SWEEP.block + tl.arange(0, SWEEP.block)[None, None, :]
        at_row = row_of_block[:, :, None]
        eight = lane
        if SWEEP.packed():
            eight = block[:, :, None] * (SWEEP.block // 8) + tl.arange(0, SWEEP.block // 8)[None, None, :]
    else:
        lane = tl.arange(0, SWEEP.part)[None, :]
        at_row = tl.arange(0, SWEEP.tile)[:, None]
        row_of_block = at_row
        block = lane
        eight = lane
    at = at_row * columns.to(tl.int32) + lane
    at_block = row_of_block * blocks.to(tl.int32) + block
    at_eight = at_row * eights.to(tl.int32) + eight
    return at, at_block, at_eight, at_row, row_of_block, block, eight, lane


@triton.jit
def _results(row, of_row, of_column, SWEEP: tl.constexpr):
    """The addresses of the partial results of a panel's rows, and those of its columns, for each term."""
    to_rows = ()
    to_columns = ()
    for i in tl.static_range(len(SWEEP.sums)):
        these = ()
        for j in tl.static_range(len(SWEEP.sums[i][2])):
            these = these + (pointer(row + SWEEP.sums[i][2][j], tl.float32, SWEEP.aligned) + of_row,)
        to_rows = to_rows + (these,)
        these = ()
        for j in tl.static_range(len(SWEEP.sums[i][3])):
            these = these + (pointer(row + SWEEP.sums[i][3][j], tl.float32, SWEEP.aligned) + of_column,)
        to_columns = to_columns + (these,)
    return to_rows, to_columns


@triton.jit
def _nothing(shape: tl.constexpr, SWEEP: tl.constexpr):
    """The initial totals of columns.  In order, a column has one value; else a row's tile is added to that before."""
    totals = ()
    for _ in tl.static_range(SWEEP.across // SWEEP.part):
        for i in tl.static_range(len(SWEEP.sums)):
            if len(SWEEP.sums[i][3]) > 0:
                if SWEEP.ordered(i):
                    totals = totals + (tl.full([SWEEP.part], missing(SWEEP.sums[i][0]), tl.float32),)
                else:
                    totals = totals + (tl.full(shape, 0.0, tl.float32),)
    return totals


@triton.jit
def _store(totals, to_columns, width, SWEEP: tl.constexpr):
    """Store the totals of columns."""
    lane = tl.arange(0, SWEEP.part)
    seen = ()
    for k in tl.static_range(SWEEP.across // SWEEP.part):
        for i in tl.static_range(len(SWEEP.sums)):
            if len(SWEEP.sums[i][3]) > 0:
                total = totals[len(seen)]
                if not SWEEP.ordered(i):
                    total = tl.sum(tl.reshape(total, [SWEEP.tile, SWEEP.part]), 0)
                for j in tl.static_range(len(SWEEP.sums[i][3])):
                    to = to_columns[i][j] + k * SWEEP.part + lane
                    tl.store(to, total, mask=lane < width - k * SWEEP.part)
                seen = seen + (0,)


@triton.jit
def walk_panels(table, work, tile: tl.constexpr, SWEEP: tl.constexpr, scalars, step_key):
    """The panel of one work item; see optgen.runtime.gpu.stages for table and work."""
    ROWS: tl.constexpr = SWEEP.tile
    LINES: tl.constexpr = SWEEP.tile * SWEEP.tiles
    PANEL: tl.constexpr = SWEEP.across
    item = work + 2 * tl.program_id(0)
    row = table + SWEEP.width * tl.load(item).to(tl.int64)
    buffers = pointers(row, SWEEP)
    given = arguments(row, SWEEP, scalars, step_key)
    rows = tl.load(row + (SWEEP.matrices + 1))
    columns = tl.load(row + (SWEEP.matrices + 2))
    if SWEEP.aligned:
        columns = tl.multiple_of(columns, 16)
    number = tl.load(item + 1) // SWEEP.tiles
    panels = tl.cdiv(columns, PANEL).to(tl.int32)
    left = (number % panels).to(tl.int64) * PANEL
    stack = tl.cdiv(rows, LINES).to(tl.int32)  # of panels in each matrix
    matrix = (number // panels // stack).to(tl.int64)
    below = (number // panels % stack).to(tl.int64) * LINES
    top = matrix * rows + below
    height = tl.minimum(rows - below, LINES).to(tl.int32)
    width = tl.minimum(columns - left, PANEL).to(tl.int32)
    blocks = tl.cdiv(columns, SWEEP.block)
    eights = tl.cdiv(columns, 8)
    lanes = _lanes(columns, blocks, eights, SWEEP)
    # Addresses move to the panel once, in int64.
    block, eight = top * blocks + left // SWEEP.block, top * eights + left // 8
    buffers = further(buffers, SWEEP, (top * columns + left, block, eight, top, matrix * columns + left, matrix))
    of_row = number % panels * (rows * tl.load(row + SWEEP.matrices)) + top
    to_rows, to_columns = _results(row, of_row, (number // panels).to(tl.int64) * columns + left, SWEEP)
    numbers = 0, 0
    if SWEEP.counted:
        pace, begin = numbering(row, SWEEP)
        # Rows of matrices are those of dimension 0, or follow one another.
        of_grid = columns == tl.load(row + (SWEEP.numel + 1))
        padded = tl.where(of_grid, pace, blocks * SWEEP.block).to(tl.int32)
        before = begin.to(tl.int32) + top.to(tl.int32) * padded + left.to(tl.int32)
        # Eight neighbours share a hash: where rows begin with a multiple of 8, compilers are to know.
        if SWEEP.eights():
            before = before + (lanes[7] & -8)
        else:
            before = before + lanes[7]
        numbers = before, padded
    totals = _nothing(lanes[0].shape, SWEEP)
    counts = columns, blocks, eights
    edges = height, width, rows > 0
    # Tiles without masks, then the others.
    full = tl.where(width == PANEL, height // ROWS, 0)
    for k in range(full):
        totals = _rows(k * ROWS, totals, buffers, lanes, counts, edges, numbers, to_rows, given, tile, SWEEP, False)
    for k in range(full, tl.cdiv(height, ROWS)):
        totals = _rows(k * ROWS, totals, buffers, lanes, counts, edges, numbers, to_rows, given, tile, SWEEP, True)
    _store(totals, to_columns, width, SWEEP)


@triton.jit
def walk_any(table, work, tile: tl.constexpr, SWEEP: tl.constexpr, scalars, step_key):
    """Tiles of a tensor of any shape; what is to be summed is stored densely."""
    BLOCKS: tl.constexpr = max(256, SWEEP.block) // SWEEP.block
    item = work + 2 * tl.program_id(0)
    row = table + SWEEP.width * tl.load(item).to(tl.int64)
    buffers = pointers(row, SWEEP)
    given = arguments(row, SWEEP, scalars, step_key)
    height = tl.load(row + (SWEEP.matrices + 1))
    width = tl.load(row + (SWEEP.matrices + 2))
    numel = tl.load(row + SWEEP.numel)
    columns = tl.load(row + (SWEEP.numel + 1))
    first = tl.load(item + 1).to(tl.int64)
    numbers = numbering(row, SWEEP)
    blocks = numel // columns * tl.cdiv(columns, SWEEP.block)
    for k in range(first, tl.minimum(first + SWEEP.tiles, tl.cdiv(blocks, BLOCKS))):
        offsets, masks, index = by_rows(k, numel, columns, numbers, SWEEP, BLOCKS)
        at, at_block, at_eight = offsets
        live, live_block, live_eight = masks
        at_mat = at // (height * width)
        where = at, at_block, at_eight, at // width, at_mat * width + at % width, at_mat
        lives = live, live_block, live_eight, live, live, live
        terms = coded(buffers, where, lives, index, given, tile, SWEEP, True)
        for i in tl.static_range(len(SWEEP.sums)):
            to = pointer(row + (SWEEP.numel + 9 + i), tl.float32, False)
            put(to, at, operand(terms, SWEEP, i), live, True)


@triton.jit
def walk(table, work, tile: tl.constexpr, SWEEP: tl.constexpr, scalars, step_key):
    """One work item of any sweep; of panels `tile` rows at a time, or ragged: tiles of a tensor that no panels fit."""
    if not SWEEP.panels:
        walk_segments(table, work, tile, SWEEP, scalars, step_key)
    elif SWEEP.ragged:
        walk_any(table, work, tile, SWEEP, scalars, step_key)
    else:
        walk_panels(table, work, tile, SWEEP, scalars, step_key)
