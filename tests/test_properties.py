"""Properties of every rule under every plan: what one step and many may be off by, and what must never happen.

Nothing here knows a tolerance: bounds are composed from the formats' closed forms and from interval arithmetic
on the spec (optgen.verify), or derived where they are used.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from optgen.formats.format import Format
from optgen.formats.logminmax import LogMinMax
from optgen.formats.plan import field_names
from optgen.runtime.layout import layout
from optgen.runtime.records import Field
from optgen.runtime.records.keys import step_key
from optgen.runtime.reference.eager import Blocks
from optgen.verify import bounds
from optgen.verify.intervals import FAST
from tests import harness, product
from tests.product import DEFAULT, PARAMS, PLANS, SPECS, Built, Cell, Oracle, Run, build

SHAPES = ((), (1,), (63,), (64,), (65,), (127,), (3, 100), (2, 64), (5, 7, 3))


def of_pairs(test: str, holds: Callable[[str], bool] = lambda spec: True, within_blocks: bool = False) -> list[Any]:
    """Every pair whose rule is as asked for, as a cell; those beyond the daily ones of a test are marked `full`.

    `within_blocks`: of plans under which nothing reaches further than a storage block.
    """
    daily = product.daily_pairs()
    cells = [
        pytest.param(cell, id=str(cell), marks=() if (cell.spec, cell.plan) in daily else pytest.mark.full)
        for cell in (Cell(s, p) for s, p in product.pairs() if holds(s))
        if product.within_blocks(cell.plan) or not within_blocks
    ]
    return harness.sampled(test, cells)


def elementwise(spec: str) -> bool:
    """Return True if each element goes its own way, but for the block that it is stored in."""
    return not product.reduces(spec)


def flat(spec: str) -> bool:
    """Return True if a rule gives rows and columns no meaning."""
    return not product.spaces_of(spec) & {"row", "col", "mat"}


def draws(cell: Cell, salt: int = 0) -> torch.Generator:
    """Random numbers that belong to a cell."""
    return torch.Generator().manual_seed(zlib.crc32(f"{cell} {salt}".encode()))


def gradient(like: Tensor, size: float, draw: torch.Generator, param: str, octaves: float = 2.0) -> Tensor:
    """Normal numbers whose sizes are spread by some octaves, of a parameter's dtype."""
    spread = torch.exp2(octaves * torch.randn(like.shape, generator=draw))
    return (torch.randn(like.shape, generator=draw) * spread * size).to(getattr(torch, param))


def examples(share: float) -> settings:
    """A share of the profile's examples: a test over many cells needs few of each."""
    return settings(max_examples=max(2, round(settings.default.max_examples * share)))


# -- 1. within the derived bound

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
sizes = st.integers(-30, 10).map(lambda e: 2.0**e)


@pytest.mark.parametrize("cell", of_pairs("step"))
@given(
    shape=st.sampled_from(SHAPES),
    seed=st.integers(0, 2**31 - 1),
    steps=st.lists(sizes, min_size=1, max_size=4),
    special=st.lists(finite, max_size=3),
    param=st.sampled_from(PARAMS),
)
@examples(0.04)
@example(shape=(3, 100), seed=0, steps=[1e-2, 1e-2, 1e-2], special=[], param="bfloat16")
# Blocks wider than a range has cells for: their lowest values are raised (LogMinMax.lowest_reading).
@example(shape=(63,), seed=0, steps=[1.0] * 4, special=[1.4863318443360256e16], param="float32")
@example(shape=(65,), seed=0, steps=[1.0] * 2, special=[385828448.0], param="float32")
# A second moment that overflows, alone in its block: an infinity has a unit of its own.
@example(shape=(), seed=0, steps=[1.0], special=[5.83337256353209e20], param="float32")
def test_one_step_is_within_its_bound(
    cell: Cell, shape: tuple[int, ...], seed: int, steps: list[float], special: list[float], param: str
) -> None:
    """From any reachable state; `special` are odd numbers among the gradient's."""
    cell = product.at_shape(Cell(cell.spec, cell.plan, param), shape)
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=draw) * torch.exp2(4 * torch.randn(shape, generator=draw)).clamp(max=1e3)
    run = Run(build(cell), weight, seed=seed, lr=1e-2, weight_decay=1e-2)
    for size in steps:
        g = gradient(weight, size, draw, param)
        odd = torch.tensor(special[: g.numel()]).to(g.dtype)
        g.view(-1)[: len(odd)] = torch.where(odd.isfinite(), odd, 1.0)
        report = run.checked(g)
        assert report.ok, [report.worst[name] for name in report.broken]


@pytest.mark.parametrize("cell", of_pairs("steps"))
def test_many_steps_are_within_their_bounds(cell: Cell) -> None:
    """Within enclosures that are carried on from the first step, never told what was kept in between, and every fifth
    by itself, from what was kept before it."""
    draw, shape, steps = draws(cell), (2, 100), 10 if settings.default.max_examples <= 50 else 20
    steps = 50 if cell == Cell("adamw", DEFAULT) else steps
    run = Run(build(cell), torch.randn(shape, generator=draw), lr=1e-3)
    reports = run.chained([gradient(torch.empty(shape), 1e-2, draw, cell.param) for _ in range(steps)])
    for k, report in enumerate(reports):
        assert report.ok, (k, [report.worst[name] for name in report.broken])
    # A second moment that is rounded to nearest may read as 0, and one of 4 bits or 3 be off by half of itself; a rule
    # that reads states back has no bound then.
    coarse = cell.plan in (
        "int8_rn_split24", "int4_split24", "bnb8", "torchao4", "torchao8", "torchao_fp8",
    ) and build(cell).variant.eager.early  # fmt: skip
    assert reports[0].claimed == 1 or coarse or cell.plan == "flashoptim", "the bound promises nothing for one step"


# -- stochastic rounding: unbiased (codes of states: tests/test_formats.py), by index and keys only
@pytest.mark.parametrize(
    "cell",
    [Cell("adamw", plan, param) for plan in (DEFAULT, "bf16_sr") for param in ("bfloat16", "float16")]
    + [Cell("lion", DEFAULT), Cell("adagrad", DEFAULT), Cell("adan", DEFAULT), Cell("laprop", DEFAULT)],
    ids=str,
)
def test_stochastic_rounding_of_weights_is_unbiased(cell: Cell) -> None:
    """One step of 2048 equal rows, whose random words differ: the mean of what is kept is what was to be kept.

    By Bernstein's inequality the mean of n errors, each at most a cell, is off by more than 6 deviations / sqrt(n) +
    12 cells / n once in 3e7 times. fp32 leaves what is to be kept uncertain by 8 half ulps.
    """
    built, draw, rows = build(cell), draws(cell), 2048
    row = torch.randn(1, 64, generator=draw)
    run = Run(built, row.expand(rows, 64).contiguous(), lr=1e-2, weight_decay=0.0)
    g = gradient(row, 1e-3, draw, cell.param).expand(rows, 64).contiguous()
    exact = run.oracle(g)["p"]
    run.step(g)
    error = run.decoded()["p"].double() - exact
    cells = bounds.master_bound(built.storage.master, built.storage.param).total * exact.abs().amax(0)
    allowed = 6 * error.std(0) / rows**0.5 + 12 * cells / rows + 8 * 2.0**-24 * exact.abs().amax(0)
    assert (error.mean(0).abs() <= allowed).all()
    assert (error.std(0) > 0.05 * cells).double().mean() > 0.5, "nothing is rounded at random"


KERNELS = [("adamw", DEFAULT), ("lion", DEFAULT), ("adamw", "bf16_sr"), ("adamw", "int8_rn_split24")]


def _trained(built: Built, shape: tuple[int, ...], salt: int, stream: int = 7) -> tuple[Run, Tensor]:
    """A run two steps on, and a gradient for the third."""
    draw = draws(built.cell, salt)
    run = Run(built, torch.randn(shape, generator=draw), stream=stream, lr=1e-2)
    for _ in range(2):
        run.step(gradient(torch.empty(shape), 1e-2, draw, built.cell.param))
    return run, gradient(torch.empty(shape), 1e-2, draw, built.cell.param)


@pytest.mark.parametrize(("spec", "plan"), KERNELS)
@pytest.mark.parametrize("shape", [(2311,), (5, 7, 61)], ids=str)
def test_tiling_changes_nothing(spec: str, plan: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    """1, 4 and 16 tiles per program: element and keys alone decide the random bits."""
    built = build(Cell(spec, plan))
    pair = harness.Pair(built.spec, built.case, tmp_path)
    run, g = _trained(built, shape, 2)
    results = []
    for tiles in (1, 4, 16):
        buffers = {k: v.clone() for k, v in run.buffers.items()}
        pair.run_triton(buffers, g, 3, 0x51ED270B, 7, tiles=tiles, **run.hypers)
        results.append(buffers)
    assert product.same_bits(results[0], results[1])
    assert product.same_bits(results[0], results[2])


@pytest.mark.parametrize("cell", of_pairs("rows", flat, within_blocks=True))
def test_rows_of_whole_blocks_are_the_flat_tensor(cell: Cell) -> None:
    """Blocks and random bits belong to the position in the logical tensor, whatever its shape."""
    built, draw = build(cell), draws(cell, 3)
    row = max(built.storage.block, 64)
    weight = torch.randn(4 * row, generator=draw)
    shapes = ((4 * row,), (2, 2 * row), (4, row), (1, 2, 2 * row))
    runs = [Run(built, weight.view(shape), lr=1e-2) for shape in shapes]
    for _ in range(3):
        g = gradient(weight, 1e-2, draw, cell.param)
        for run, shape in zip(runs, shapes, strict=True):
            run.step(g.view(shape))
    first, *others = ({k: v.reshape(-1) for k, v in run.buffers.items()} for run in runs)
    assert all(product.same_bits(first, other) for other in others)


@pytest.mark.parametrize("plan", [p for p in PLANS if product.within_blocks(p)])
@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 127, 331])
def test_a_tail_leaves_the_blocks_before_it_alone(plan: str, size: int) -> None:
    """A tensor cut anywhere: all blocks before the cut are what they are in the longer tensor, bit for bit."""
    built = build(Cell("adamw", plan))
    block, draw = built.storage.block, draws(built.cell, 4)
    weight = torch.randn(400, generator=draw)
    long, short = Run(built, weight, lr=1e-2), Run(built, weight[:size].clone(), lr=1e-2)
    for _ in range(3):
        g = gradient(weight, 1e-2, draw, built.cell.param)
        long.step(g)
        short.step(g[:size].clone())
    whole = size // block * block
    for f in (Field("p", built.cell.param), *built.variant.fields):
        count = whole // (f.per if f.width == 1 else 1)
        left, right = (
            harness.by_element(run.buffers[f.name], f, run.buffers["p"].shape)[:count] for run in (long, short)
        )
        assert harness.same_bits(left, right), f.name


# -- 2. nothing comes of nothing
def assert_at_rest(cell: Cell, step: Callable[[Run, Tensor], None]) -> None:
    """Assert that a weight keeps its bits; of -0.0 only the value: -0.0 - lr * -0.0 is 0.0."""
    param = getattr(torch, cell.param)
    weight = torch.randn(3, 70, generator=draws(cell)) * 2.0 ** torch.linspace(-35, 13, 70)
    weight = torch.where(weight.to(param) == 0, 0.0, weight)
    run = Run(build(cell), weight, weight_decay=0.0, lambd=0.0)
    before = {k: v.clone() for k, v in run.buffers.items() if k == "p" or k.startswith("weight_")}
    for _ in range(3):
        step(run, torch.zeros(weight.shape, dtype=param))
        assert product.same_bits({k: run.buffers[k] for k in before}, before)


# -- 4. the whole range of gradients
RANGE = tuple(10.0**e for e in range(-38, 39, 4))


def assert_finite(cell: Cell, step: Callable[[Run, Tensor], None] = Run.step, steps: int = 6) -> None:
    """Rows of 64 whose gradients are 1e-38 ... 1e38: a format that is finite for finite values loses none."""
    built, exact = build(cell), build(Cell(cell.spec, "fp32"))
    draw = draws(built.cell)
    # What overflows in one row reaches all of the tensor where a rule reduces.
    sizes = [s for s in RANGE if elementwise(cell.spec) or s < 1e17]
    weight = torch.randn(len(sizes), 64, generator=draw)
    run, fp32 = (Run(b, weight, weight_decay=0.0, lr=1e-4) for b in (built, exact))
    for _ in range(steps):
        unit = torch.randn(weight.shape, generator=draw).clamp(-3, 3)
        g = (unit * torch.tensor(sizes).view(-1, 1)).bfloat16()
        step(run, g)
        fp32.step(g)
        kept, true = run.decoded(), fp32.decoded()
        for name, value in kept.items():
            # A block is finite where all of its fp32 values are.
            fine = torch.stack([v.isfinite().expand(weight.shape).all(1) for v in true.values()]).all(0)
            value = value.expand(weight.shape)
            assert value[fine].isfinite().all(), (name, value[fine][~value[fine].isfinite()][:3])


@pytest.mark.parametrize(
    ("spec", "plan"),
    harness.sampled("finite", [(s, p) for s in SPECS for p in (DEFAULT, "split32", "bf16_sr", "int8_rn_split24")
     if p == DEFAULT or s in ("adamw", "lion", "madgrad", "radam", "rprop", "adadelta", "came", "lamb")]),
)  # fmt: skip
def test_states_stay_finite_wherever_fp32_does(spec: str, plan: str) -> None:
    assert_finite(Cell(spec, plan))


# -- 7. what is not finite stays where it is
def assert_kept_apart(cell: Cell, step: Callable[[Run, Tensor], None] = Run.step) -> None:
    """Three elements of one step, each in a block of its own: the rest is, bit for bit, what it is without them.

    The rest: all but the elements, and under blocked formats all but their blocks.
    """
    built, draw = build(cell), draws(cell, 5)
    block, at = built.storage.block, {70: math.nan, 200: math.inf, 330: -math.inf}
    weight = torch.randn(450, generator=draw)
    clean = Run(built, weight, lr=1e-2)
    dirty = clean.copy()
    for k in range(3):
        g = gradient(weight, 1e-2, draw, cell.param)
        step(clean, g)
        g = g.clone()
        for index, bad in at.items():
            g[index] = bad if k == 1 else g[index]
        step(dirty, g)
    inside = torch.stack([torch.arange(len(weight)) // block == index // block for index in at]).any(0)
    for f in (Field("p", cell.param), *built.variant.fields):
        keep = ~inside[:: f.per if f.width == 1 else 1]
        left, right = (harness.by_element(run.buffers[f.name], f, weight.shape)[keep] for run in (clean, dirty))
        assert harness.same_bits(left, right), f.name


@pytest.mark.parametrize("cell", of_pairs("apart", elementwise, within_blocks=True))
def test_what_is_not_finite_stays_in_its_block(cell: Cell) -> None:
    assert_kept_apart(cell)


# The same through fast Triton kernels in the interpreter (strict ones have the reference's bits), of the rules that are
# known to be hard and a few more.  RMSprop's centered variance and Adadelta's quotient are differences and ratios of
# what overflows; RAdam and Adan choose branches; Adamax divides by a maximum; Rprop multiplies gradients.

HARD = [(s, DEFAULT) for s in ("adamw", "radam", "adamax", "adan", "rprop", "adadelta")]
HARD += [("adamw", "fp32"), ("madgrad", "fp32"), ("adamw", "int8_rn_split24"), ("lion", "bf16_sr")]
THROUGH_KERNELS = [
    Cell(spec, plan)
    for spec, plan in [
        *HARD,
        *random.Random(20260).sample(
            [p for p in product.pairs() if p not in HARD and elementwise(p[0]) and product.within_blocks(p[1])], 4
        ),
    ]
]


def fast_kernel(built: Built, folder: Path) -> Callable[[Run, Tensor], None]:
    """A step of a run by the Triton kernel of fast maths, in place of the reference."""
    pair = harness.Pair(built.spec, built.case, folder, "fast")

    def step(run: Run, g: Tensor) -> None:
        key = step_key(run.seed, run.steps + 1)
        pair.run_triton(run.buffers, g, run.steps + 1, key, run.stream, **run.hypers, **run.host_states)
        count = built.variant.host[1]
        run.host_states = dict(zip(run.host_states, run.scalars()[count:], strict=True))
        run.steps += 1

    return step


@pytest.mark.parametrize("cell", THROUGH_KERNELS, ids=str)
def test_fast_kernels_keep_what_is_not_finite_apart_and_the_rest_finite(cell: Cell, tmp_path: Path) -> None:
    """As the reference does above; and without gradient, state and decay a weight keeps its bits."""
    step = fast_kernel(build(cell), tmp_path)
    assert_kept_apart(cell, step)
    if cell.plan != "flashoptim":  # whose scales alone do not reach as far
        assert_finite(cell, step, 4)
    assert_at_rest(cell, step)


# -- 9. fast maths beside strict
def codes_of(name: str, fmt: Format, buffers: dict[str, Tensor]) -> Tensor:
    """The codes of a state, element by element, i32."""
    shape, parts = buffers["p"].shape, {}
    for suffix, f in fmt.fields().items():
        if f.per == 1:
            stored = buffers[field_names(name, fmt.fields())[suffix]]
            rows, columns = layout.grid(shape)
            if f.dtype.packed:
                stored = Blocks(buffers["p"], 64).codes(stored, f.dtype.bits).reshape(rows, -1)[:, :columns]
            parts[suffix] = stored.reshape(rows, columns)
    return torch.as_tensor(fmt.code(parts)).int()


def code_distance(name: str, fmt: Format, a: dict[str, Tensor], b: dict[str, Tensor]) -> int:
    """The largest difference of codes in blocks whose scales agree."""
    suffix = "range" if isinstance(fmt, LogMinMax) else "scale"
    same = a[f"{name}_{suffix}"] == b[f"{name}_{suffix}"]
    rows = a[f"{name}_{suffix}"].shape[0]
    difference = (codes_of(name, fmt, a) - codes_of(name, fmt, b)).abs().view(rows, -1)
    same = same.repeat_interleave(fmt.block, 1)[:, : difference.shape[1]]
    return int(difference[same].max()) if same.any() else 0


def hold_fast(built: Built, run: Run, fast: Run, g: Tensor) -> None:
    """Hold a fast step of a run's copy to its bound, and its codes to those of strict or one beside."""
    after = fast.decoded()
    inside = run.enclose(run.enclosed(FAST), g, kept=after)
    report = product.differential.compare(after, inside, run.oracle(g))
    assert report.ok, [report.worst[name] for name in report.broken]
    assert report.claimed == 1 or built.cell.plan == "flashoptim"
    run.step(g)
    for name, fmt in built.storage.states.items():
        if fmt.fields().keys() - {""}:  # a float's cells are as fine as what is left of a difference
            assert code_distance(name, fmt, run.buffers, fast.buffers) <= 1, name


@pytest.mark.parametrize("cell", of_pairs("fast", elementwise, within_blocks=True))
def test_fast_maths_is_within_its_bound_of_the_oracle_and_a_code_of_strict(cell: Cell, tmp_path: Path) -> None:
    """The fast kernel, in the interpreter, from the same state as the strict reference.

    Both read the same random bits, so that a code can differ only where the two values lie on both sides of one
    threshold: by 1.
    """
    built = build(cell)
    pair = harness.Pair(built.spec, built.case, tmp_path, "fast")
    run, _ = _trained(built, (3, 256), 9)
    draw = draws(cell, 10)
    for _ in range(3):
        g = gradient(run.buffers["p"], 1e-2, draw, cell.param)
        fast = run.copy()
        key = step_key(run.seed, run.steps + 1)
        pair.run_triton(fast.buffers, g, run.steps + 1, key, run.stream, **fast.hypers, **fast.host_states)
        hold_fast(built, run, fast, g)


# -- many steps beside fp64: the yardsticks that one step cannot show, and that the plan `flashoptim` is known to fail
LR = 1e-3
def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_weight_without_gradient_comes_to_rest() -> None:
    """It drifts no more than 1.1 times as far as in fp64 when its gradient has stopped: no momentum code is stuck.

    One of eight elements in every block; the others go on as before, so that the block's scales stay.
    """
    cell, draw, warm, after = Cell("adamw", "int8", "float32"), seeded(), 300, 1000
    weight = torch.randn(2048, generator=draw)
    size = 1e-3 * torch.exp2(torch.randn(weight.shape, generator=draw))
    dead = torch.arange(len(weight)) % 8 == 5
    options = dict(lr=LR, betas=(0.9, 0.999), weight_decay=0.0)
    run, exact = Run(build(cell), weight, **options), Oracle(build(cell), weight, **options)
    start = weight.double()
    for k in range(warm + after):
        g = torch.randn(weight.shape, generator=draw) * size
        if k == warm:
            start = torch.stack([run.decoded()["p"].double(), exact.p])
        run.step(g.masked_fill(dead, 0.0) if k >= warm else g)
        exact.step(g.masked_fill(dead, 0.0) if k >= warm else g)
    moved = (torch.stack([run.decoded()["p"].double(), exact.p]) - start)[:, dead] / LR
    kept, true = moved.square().mean(1).sqrt().tolist()
    assert kept <= 1.1 * true


@pytest.mark.parametrize("steps", [5_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_24_bit_weight_follows_updates_of_a_thousandth_of_its_visible_place(steps: int) -> None:
    """Weights in [1, 2) under constant updates of 1e-3 bf16 ulp: within 2 % after 1e5 of them; after fewer, within what
    their random walk allows.

    A step rounds d = 0.256 places of a 24-bit weight up or not: its variance is d (1 - d).  fp32 rounds the sum to half
    of its own ulp, 2^-24, which is up to 0.8 % of the update.
    """
    place, update, count = 2.0**-15, 1e-3 * 2.0**-7, 512
    weight = 1 + 0.5 * torch.rand(count, generator=seeded())
    run = Run(build(Cell("sgd", DEFAULT)), weight, lr=1.0, weight_decay=0.0, momentum=0.0)
    start, g = run.decoded()["p"].double(), torch.full((count,), -update)
    for _ in range(steps):
        run.step(g)
    moved, d = (run.decoded()["p"].double() - start) / (steps * update), update / place
    rounding = 2.0**-24 / update
    walk = math.sqrt(d * (1 - d) / steps) / d
    five = 5 * walk / math.sqrt(count)
    assert abs(float(moved.mean()) - 1) <= rounding + five <= 0.02
    assert float((moved - 1).abs().max()) <= rounding + 6 * walk
