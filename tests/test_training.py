"""What a plan does over many steps, in strict maths, beside fp64: the yardsticks that one step cannot show.

The same tests run the plan `flashoptim`, whose scales and roundings are known to fail them: a yardstick that does
not tell the two apart would measure nothing.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.product import Cell, Oracle, Run, build

ADAMW = Cell("adamw", "int8_split24")
FLASHOPTIM = Cell("adamw", "flashoptim")
LR = 1e-3


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# -- constant gradients

SIZES = tuple(10.0**-k for k in range(3, 10))


def displacement(cell: Cell, steps: int = 300) -> Tensor:
    """How far weights move under constant gradients of each size, over how far they should: (sizes,)."""
    draw = generator()
    rows = torch.tensor(SIZES).view(-1, 1)
    g = ((0.5 + torch.rand(len(SIZES), 512, generator=draw)) * rows).bfloat16()
    weight = 1 + torch.rand(g.shape, generator=draw)
    options = dict(lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    run, exact = Run(build(cell), weight, **options), Oracle(build(cell), weight, **options)
    start = exact.p
    for _ in range(steps):
        run.step(g)
        exact.step(g)
    return (run.decoded()["p"].double() - start).sum(1) / (exact.p - start).sum(1)


def test_constant_gradients_of_any_size_move_weights_as_far_as_in_fp64() -> None:
    """1e-3 ... 1e-9 for 300 steps, within 1 %: scales follow small gradients, and averages do not stick."""
    ratio = displacement(ADAMW)
    assert ((ratio - 1).abs() <= 0.01).all(), dict(zip(SIZES, ratio.tolist(), strict=True))


def test_fp16_scales_do_not() -> None:
    """The yardstick tells: FlashOptim's fp16 scales freeze the second moment of gradients of 1e-6."""
    ratio = dict(zip(SIZES, displacement(FLASHOPTIM).tolist(), strict=True))
    assert ratio[SIZES[3]] > 2, ratio


# -- weights whose gradient stops


def drift(plan: str, betas: tuple[float, float], warm: int = 300, after: int = 1000) -> tuple[float, float]:
    """rms movement, in lr, of weights whose gradient is exactly 0 after `warm` steps: (kept, fp64).

    One of eight elements in every block; the others go on as before, so that the block's scales stay.
    """
    cell, draw = Cell("adamw", plan, "float32"), generator()
    weight = torch.randn(2048, generator=draw)
    size = 1e-3 * torch.exp2(torch.randn(weight.shape, generator=draw))
    dead = torch.arange(len(weight)) % 8 == 5
    options = dict(lr=LR, betas=betas, weight_decay=0.0)
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
    return kept, true


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95)], ids=str)
def test_a_weight_without_gradient_comes_to_rest(betas: tuple[float, float]) -> None:
    """It drifts no more than 1.1 times as far as in fp64: no momentum code is stuck."""
    kept, true = drift("int8", betas)
    assert kept <= 1.1 * true


def test_nearest_rounding_keeps_it_moving() -> None:
    """The yardstick tells: under nearest rounding momentum codes get stuck, and what divides them decays."""
    kept, true = drift("flashoptim", (0.9, 0.95))
    assert kept > 1.1 * true


# -- updates far below the last place


def follow(cell: Cell, steps: int, count: int = 512) -> tuple[Tensor, float, float]:
    """Weights in [1, 2) under constant updates of 1e-3 bf16 ulp: (moved / true, weight by weight, d, its true size).

    d is the update in ulp of a 24-bit weight: bf16 with 8 more bits.
    """
    place, update = 2.0**-15, 1e-3 * 2.0**-7
    weight = 1 + 0.5 * torch.rand(count, generator=generator())
    run = Run(build(cell), weight, lr=1.0, weight_decay=0.0, momentum=0.0)
    start, g = run.decoded()["p"].double(), torch.full((count,), -update)
    for _ in range(steps):
        run.step(g)
    return (run.decoded()["p"].double() - start) / (steps * update), update / place, update


@pytest.mark.parametrize("steps", [5_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_24_bit_weight_follows_updates_of_a_thousandth_of_its_visible_place(steps: int) -> None:
    """Within 2 % after 1e5 updates; after fewer, within what their random walk allows.

    A step rounds d = 0.256 places up or not: its variance is d (1 - d).  fp32 rounds the sum to half of its own
    ulp, 2^-24, which is up to 0.8 % of the update.
    """
    moved, d, update = follow(Cell("sgd", "int8_split24"), steps)
    rounding = 2.0**-24 / update
    walk = math.sqrt(d * (1 - d) / steps) / d
    five = 5 * walk / math.sqrt(len(moved))
    assert abs(float(moved.mean()) - 1) <= rounding + five <= 0.02
    assert float((moved - 1).abs().max()) <= rounding + 6 * walk


def test_nearest_24_bits_do_not_move_at_all() -> None:
    moved, _, _ = follow(Cell("sgd", "int8_rn_split24"), 200, 64)
    assert not moved.any()


