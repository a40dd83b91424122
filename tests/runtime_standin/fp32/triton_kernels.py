import triton
import triton.language as tl

TILE = {"adamw_float32": 64}
TILES = {"adamw_float32": 2}


@triton.jit(do_not_specialize=["step_key"])
def adamw_float32(
    table, work, sign: tl.float32, decay: tl.float32, weight1: tl.float32, beta2: tl.float32, weight2: tl.float32,
    root: tl.float32, eps: tl.float32, size: tl.float32, step_key,
    GRAD: tl.constexpr, TILES: tl.constexpr, RAGGED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0)
    row = table + tl.load(work + 2 * item) * 10
    first = tl.load(work + 2 * item + 1)
    p_at = tl.load(row).to(tl.pointer_type(tl.float32))
    g_at = tl.load(row + 1).to(tl.pointer_type(GRAD))
    m_at = tl.load(row + 2).to(tl.pointer_type(tl.float32))
    v_at = tl.load(row + 3).to(tl.pointer_type(tl.float32))
    numel = tl.load(row + 4)
    for i in range(TILES):
        at = (first + i).to(tl.int64) * 64 + tl.arange(0, 64)
        live = at < numel
        p = tl.load(p_at + at, mask=live, other=0.0) * decay
        g = tl.load(g_at + at, mask=live, other=0.0).to(tl.float32) * sign
        m = tl.load(m_at + at, mask=live, other=0.0)
        v = tl.load(v_at + at, mask=live, other=0.0)
        m = m + weight1 * (g - m)
        v = beta2 * v + weight2 * g * g
        tl.store(p_at + at, p - size * m / (tl.sqrt(v) / root + eps), mask=live)
        tl.store(m_at + at, m, mask=live)
        tl.store(v_at + at, v, mask=live)
