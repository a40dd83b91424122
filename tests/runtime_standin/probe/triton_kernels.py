"""visits += 1 and stream = the key at every element, seen += 1 at every block; p += gradient."""

import triton
import triton.language as tl

TILE = {"probe": 32}


@triton.jit(do_not_specialize=["step_key"])
def probe(
    table, work, two: tl.float32, tenth: tl.float32, step_key,
    GRAD: tl.constexpr, TILES: tl.constexpr, RAGGED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0)
    row = table + tl.load(work + 2 * item) * 12
    first = tl.load(work + 2 * item + 1)
    p_at = tl.load(row).to(tl.pointer_type(tl.float32))
    g_at = tl.load(row + 1).to(tl.pointer_type(GRAD))
    visits_at = tl.load(row + 2).to(tl.pointer_type(tl.int32))
    stream_at = tl.load(row + 3).to(tl.pointer_type(tl.int32))
    seen_at = tl.load(row + 4).to(tl.pointer_type(tl.int32))
    numel = tl.load(row + 6)
    columns = tl.load(row + 7)
    stream = tl.load(row + 8).to(tl.int32)
    for i in range(TILES):
        block = (first + i).to(tl.int64) * 4 + tl.arange(0, 4)[:, None]
        if RAGGED:
            per_row = (columns + 7) // 8
            column = block % per_row * 8 + tl.arange(0, 8)[None, :]
            at = block // per_row * columns + column
            live = (column < columns) & (at < numel)
        else:
            at = block * 8 + tl.arange(0, 8)[None, :]
            live = at < numel
        head = live & (tl.arange(0, 8)[None, :] == 0)
        blocks = tl.broadcast_to(block, (4, 8))
        p = tl.load(p_at + at, mask=live, other=0.0)
        g = tl.load(g_at + at, mask=live, other=0.0).to(tl.float32)
        tl.store(p_at + at, p + g * (two - 1.0), mask=live)
        tl.store(visits_at + at, tl.load(visits_at + at, mask=live, other=0) + 1, mask=live)
        tl.store(stream_at + at, tl.zeros((4, 8), tl.int32) + stream, mask=live)
        tl.store(seen_at + blocks, tl.load(seen_at + blocks, mask=head, other=0) + 1, mask=head)
