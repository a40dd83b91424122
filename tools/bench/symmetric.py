"""Symmetric products of matrices by one triangle each, in one launch for matrices of any shapes: a candidate for the
rounds of Newton-Schulz, timed beside torch by tools/gpu_check.py.

    python -m tools.bench.symmetric     counts of its loop, and of Emerging-Optimizers' if installed, without a GPU

`products` gives beta z + alpha x x' in bf16, each entry with its mirror image once, so that results are symmetric in
every bit.  No optimizer calls it: whether half of the products outweighs the tensor cores' wait for the level 2 cache
is not known before it has run on a device.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.benchmark import Timer

from optgen.runtime.layout.workspace import sent
from optgen.runtime.reference import matrices
from tools import kernel_stats

TILE, ACROSS, PART = 128, 256, 64
"""Rows and columns of the result that a program makes, and the columns of x that it loads at a time."""

LAUNCH = {"num_warps": 8, "num_stages": 3}


@triton.jit
def triangles(
    table, work, alpha: tl.float32, beta: tl.float32, TILE: tl.constexpr, ACROSS: tl.constexpr, PART: tl.constexpr,
    WHOLE: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """One tile of a result, on or above its diagonal, and its mirror image.

    table   (x, result, z, rows of x, columns of x) of each matrix
    work    (matrix, tile of rows, tile of columns) of each program
    WHOLE   True if the columns of every x are a multiple of PART
    ADDS    True if z is added
    """
    item = work + 3 * tl.program_id(0)
    matrix = table + 5 * tl.load(item).to(tl.int64)
    x = tl.multiple_of(tl.load(matrix).to(tl.pointer_type(tl.bfloat16)), 16)
    to = tl.multiple_of(tl.load(matrix + 1).to(tl.pointer_type(tl.bfloat16)), 16)
    size = tl.multiple_of(tl.load(matrix + 3).to(tl.int32), 8)
    inner = tl.multiple_of(tl.load(matrix + 4).to(tl.int32), 8)
    top, left = tl.load(item + 1) * TILE, tl.load(item + 2) * ACROSS
    rows, columns, lane = top + tl.arange(0, TILE), left + tl.arange(0, ACROSS), tl.arange(0, PART)
    # Rows behind the last one are read as the last one, and not stored: the loop has no masks.
    a = tl.minimum(rows, size - 1)[:, None] * inner + lane[None, :]
    b = tl.minimum(columns, size - 1)[:, None] * inner + lane[None, :]
    total = tl.zeros([TILE, ACROSS], tl.float32)
    for k in range(tl.cdiv(inner, PART)):
        if WHOLE:
            total = tl.dot(tl.load(x + a), tl.load(x + b).T, total)
        else:
            live = lane[None, :] < inner - k * PART
            total = tl.dot(tl.load(x + a, mask=live, other=0), tl.load(x + b, mask=live, other=0).T, total)
        x += PART
    inside = (rows[:, None] < size) & (columns[None, :] < size)
    here = rows[:, None] * size + columns[None, :]
    total = alpha * total
    if ADDS:
        z = tl.multiple_of(tl.load(matrix + 2).to(tl.pointer_type(tl.bfloat16)), 16)
        total += beta * tl.load(z + here, mask=inside, other=0).to(tl.float32)
    made = total.to(tl.bfloat16)
    there = columns[:, None] * size + rows[None, :]
    beside = (columns[:, None] < size) & (rows[None, :] < size)
    if left >= top + TILE:
        tl.store(to + here, made, mask=inside)
        tl.store(to + there, made.T, mask=beside)
    else:  # the diagonal passes through it
        tl.store(to + here, made, mask=inside & (columns[None, :] >= rows[:, None]))
        tl.store(to + there, made.T, mask=beside & (columns[:, None] > rows[None, :]))


@functools.cache
def _programs(shapes: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """Return the work of the programs: tiles that the diagonal passes through, or above it."""
    found = []
    for k, (size, _) in enumerate(shapes):
        tiles = itertools.product(range(-(-size // TILE)), range(-(-size // ACROSS)))
        found += [(k, i, j) for i, j in tiles if (j + 1) * ACROSS > i * TILE]
    return torch.tensor(found, dtype=torch.int32, device=device)


def products(xs: Sequence[Tensor], alpha: float = 1.0, zs: Sequence[Tensor] = (), beta: float = 0.0) -> list[Tensor]:
    """Return alpha x x' (+ beta z, which is symmetric) of each x.

    All are contiguous, in bf16, of multiples of 8 rows and columns and fewer than 2^31 entries.
    """
    made = [x.new_empty(x.shape[0], x.shape[0]) for x in xs]
    rows = [[*(t.data_ptr() for t in some), *some[0].shape] for some in zip(xs, made, zs or made, strict=True)]
    table, work = sent(torch.tensor(rows), xs[0].device), _programs(tuple(x.shape for x in xs), xs[0].device)
    whole = all(x.shape[1] % PART == 0 for x in xs)
    triangles[(len(work),)](table, work, alpha, beta, TILE, ACROSS, PART, whole, bool(zs), **LAUNCH)
    return made


def newton_schulz(xs: Sequence[Tensor], rounds: Sequence[Sequence[float]]) -> list[Tensor]:
    """Return each x after rounds a x + (b x x' + c (x x')^2) x."""
    for a, b, c in rounds:
        squares = products(xs)
        xs = [torch.addmm(x, y, x, beta=a) for x, y in zip(xs, products(squares, c, squares, b), strict=True)]
    return list(xs)


def race(shapes: Sequence[tuple[int, int]], device: str, turns: int) -> dict[str, Any]:
    """Time five rounds of both for matrices of these shapes, in turns."""
    draw = torch.Generator(device).manual_seed(0)
    xs = [torch.randn(shape, generator=draw, device=device) for shape in sorted(shapes)]
    xs = [(x / x.norm()).bfloat16() for x in xs]
    batches = [torch.stack(list(some)) for _, some in itertools.groupby(xs, lambda x: x.shape)]
    rounds = [(3.4445, -4.775, 2.0315)] * 5
    ways = {
        "torch": lambda: [y for x in batches for y in matrices.newton_schulz(x, 5, 0.0, 0.0, *rounds[0]).unbind()],
        "triangles": lambda: newton_schulz(xs, rounds),
    }
    made = [way() for way in ways.values()]
    apart = max(((a - b).float().norm() / a.float().norm()).item() for a, b in zip(*made, strict=True))
    timers = [Timer("way()", globals={"way": way}) for way in ways.values()]
    seconds = [[timer.timeit(3).median for timer in timers] for _ in range(turns)]
    median = [statistics.median(x) for x in zip(*seconds, strict=True)]
    return {"matrices": len(xs), "largest": list(max(shapes)), "apart": apart, **dict(zip(ways, median, strict=True))}


MACS = 2048
"""Products of bf16 of a processor's tensor cores in a cycle, on sm_90."""


def count(name: str, fn: Any, signature: Mapping[str, str], sizes: Mapping[str, Any], aligned: Sequence[str]) -> str:
    """Return what a part of the sum costs a warp."""
    made = kernel_stats.compile_for(fn, signature, sizes, kernel_stats.TARGETS["sm_90"], **LAUNCH, aligned=aligned)
    code = kernel_stats.read_sass(made.listing)
    loops = [[code.instructions[k].opcode for k in loop] for loop in code.loops()]
    loop = min((x for x in loops if any(o.startswith("HGMMA") for o in x)), key=len)
    return f"{name}: {sum(o != 'NOP' for o in loop)} instructions, {made.registers} registers, {made.stack} B spilled"


def main() -> None:
    cycles = TILE * ACROSS * PART // MACS
    print(f"{TILE} x {ACROSS} x {PART}: {cycles} cycles, {2 * PART * (TILE + ACROSS) / cycles:.0f} bytes in each")
    sizes = {"TILE": TILE, "ACROSS": ACROSS, "PART": PART, "WHOLE": True, "ADDS": True}
    signature = {"table": "*i64", "work": "*i32", "alpha": "fp32", "beta": "fp32"}
    print(count("triangles", triangles, signature, sizes, ("table", "work")))
    with suppress(ImportError):
        peer = importlib.import_module("emerging_optimizers.triton_kernels.syrk").syrk_kernel_bf16.fn
        tile, part, mirror, beside = (TILE, ACROSS), (TILE, PART), (ACROSS, TILE), (ACROSS, PART)
        blocks = {"d": tile, "c": tile, "d_t": mirror, "a": part, "a_t": beside}
        signature = {f"{name}_desc": f"tensordesc<bf16[{a},{b}]>" for name, (a, b) in blocks.items()}
        sizes = {"N": 4096, "K": 4096, "TILE_M": TILE, "TILE_N": ACROSS, "TILE_K": PART, "GROUP_SIZE_M": 8}
        sizes |= {"alpha": 0.3, "beta": -0.5, "SKIP_UPPER_TRIANGLE": False, "TRANS": False, "WARP_SPECIALIZE": False}
        print(count("Emerging-Optimizers", peer, signature, sizes, ()))


if __name__ == "__main__":
    main()
