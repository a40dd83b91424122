"""Steps at the ends of what formats hold: no step after a gradient without a square, every one that is small."""

import math
import os
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optgen.optim
from optgen.by_name import class_of
from tests import product
from tests.harness import plan_of, spec_of

RULES = ("AdamW", "Adam", "NAdam", "RMSprop", "AdaBelief", "Adagrad", "LaProp")
PLANS = ("int8", "int6_split24", "int5_split24", "int4_split24")
STEPS, LR = 4, 1e-3
AT = (3, 37)
CHOOSES = ("ftrl", "madgrad")
"""Rules of elements that compare a sum, and take a weight without it where the comparison with a NaN fails."""


def moves(rule: str, plan: str, size: float, backend: str) -> list[Tensor]:
    """Return how far each element moves at each step; at the second, one element has a gradient of `size`."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(64, 128))
    opt = getattr(optgen.optim, rule)([p], lr=LR, plan=plan, backend=backend)
    found = []
    for t in range(STEPS):
        before = p.detach().clone()
        p.grad = torch.full_like(p, 1e-2)
        if t == 1:
            p.grad[3, 5] = size
        opt.step()
        found.append((p.detach() - before).abs())
    return found


def drawn(backend: str, count: int) -> list[tuple[str, str, float, str]]:
    draw = random.Random(backend)
    rules, plans = ([x for _ in range(count) for x in draw.sample(of, len(of))] for of in (RULES, PLANS))
    return [(rules[i], plans[i], draw.choice((-1, 1)) * 10 ** draw.uniform(21, 38.5), backend) for i in range(count)]


@pytest.mark.parametrize(
    ("rule", "plan", "size", "backend"),
    [*drawn("reference", 14), ("AdamW", "int8", 1e30, "cpp"), pytest.param("AdamW", "int8", 1e30, "triton",
                                                                          marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_gradient_without_a_square_stops_its_block(rule: str, plan: str, size: float, backend: str) -> None:
    """An element whose step is 0 in fp32 moves by less than 2 lr, as a numerator is less than 2^128 and the divisor at
    least 2^127.  What shares its block moves no further, and nothing else changes.
    """
    if backend == "triton":
        pytest.importorskip("triton")
    got, plain = moves(rule, plan, size, backend), moves(rule, plan, 1e-2, backend)
    most = 2 * LR
    for with_it, without in zip(got, plain, strict=True):
        assert with_it.isfinite().all()
        assert float(with_it[3, 5]) <= max(most, float(without[3, 5]))
        assert torch.equal(with_it[:3], without[:3])
        assert torch.equal(with_it[4:], without[4:])
        assert torch.equal(with_it[3, 64:], without[3, 64:])
    for with_it, without in zip(got[1:], plain[1:], strict=True):
        assert (with_it[3, :64] <= torch.maximum(without[3, :64], torch.full((64,), most))).all()


SATURATED = ("int8_rn_split24", "flashoptim", "bnb8", "torchao8", "torchao4", "torchao_fp8")
"""Plans whose scales of squares have no infinity that the block reads as."""


@pytest.mark.parametrize("plan", SATURATED)
def test_scales_without_an_infinity_make_a_gradient_without_a_square_nan(plan: str) -> None:
    """For all of its block at the next step, and for nothing else."""
    *_, got = moves("AdamW", plan, 1e30, "reference")
    block = min(plan_of(plan).nonneg.block, 128)
    assert got[3, :block].isnan().all()
    got[3] = 0
    assert got.isfinite().all()


def test_scales_of_rows_and_columns_stop_the_element_of_a_gradient_without_a_square() -> None:
    got, plain = (moves("AdamW", "lpmm4", size, "reference") for size in (1e30, 1e-2))
    for with_it, without in zip(got[1:], plain[1:], strict=True):
        assert with_it.isfinite().all() and with_it[3, 5] < 0.1 * without[3, 5]


@pytest.mark.parametrize("rule", ["Adafactor", "AdafactorPaper", "CAME", "StableAdamW", "SGDP"])
def test_rules_that_divide_by_sums_of_squares_make_a_gradient_without_a_square_nan(rule: str) -> None:
    *_, got = moves(rule, "fp32", 1e30, "reference")
    assert (got[3] if rule == "SGDP" else got).isnan().all()


def beside_a_nan(rule: str, plan: str, backend: str, size: float, steps: int = STEPS) -> list[Tensor]:
    """Return the weights after each step; at the second, one element has a gradient of `size`.  It is neither the
    largest nor the smallest number of its block in any state."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.rand(64, 128) + 0.5)
    ends = (0, 4.0, 1.0), (1, 0.25, 1e-4)
    for column, weight, _ in ends:
        p.data[:, column::64] = weight
    opt = class_of(rule)([p], plan=plan, backend=backend)
    found = []
    for t in range(steps):
        p.grad = torch.randn_like(p) * 1e-2
        for column, _, gradient in ends:
            p.grad[:, column::64] = gradient
        p.grad[AT] = 1e-2 if t != 1 else size
        opt.step()
        found.append(p.detach().clone())
    return found


@pytest.mark.parametrize(
    ("backend", "number"),
    [*(("reference", k) for k in range(10)), ("cpp", 0), ("cpp", 1), pytest.param("triton", 0, marks=pytest.mark.slow)],
)
def test_a_nan_spoils_its_own_weight_alone(backend: str, number: int) -> None:
    """Under rules that compute with elements and plans whose scales are of blocks.  What shares its block has the bits
    that it has beside a number, up to the step that reads the states back.  Later the number that a state reads instead
    may be the largest of its block, which rounds the others in another way.
    """
    if backend == "triton":
        pytest.importorskip("triton")
    draw = random.Random(f"{os.environ['OPTGEN_SAMPLE_SEED']} {backend} {number}")
    rules = draw.sample(product.SPECS, len(product.SPECS))
    rule = next(x for x in rules if not product.reduces(x) and not spec_of(x).inputs)
    plan = draw.choice([x for x in product.PLANS if plan_of(x).signed.block > 1 and product.within_blocks(x)])
    plain, got = (beside_a_nan(rule, plan, backend, size) for size in (-8e-3, math.nan))
    others = torch.ones(64, 128, dtype=torch.bool)
    others[AT] = False
    for t in range(STEPS):
        assert got[t][others].isfinite().all(), (rule, plan)
        assert t > 2 or torch.equal(got[t][others], plain[t][others]), (rule, plan)
        assert bool(got[t][AT].isnan()) == (t > 0 and rule not in CHOOSES), (rule, plan)


def test_rules_that_forget_a_nan() -> None:
    """In fp32 those that compare a sum with it; in codes AdaShift, whose first ten steps move nothing."""
    torch.manual_seed(0)
    begun = (torch.rand(64, 128) + 0.5)[AT]
    zeros = [w[AT] for w in beside_a_nan("ftrl", "fp32", "reference", math.nan)]
    assert zeros[0] != 0 and zeros[1:] == [0, 0, 0]
    back = [float((w[AT] - begun).abs()) for w in beside_a_nan("madgrad", "fp32", "reference", math.nan)]
    assert back == sorted(back, reverse=True) and 0 < back[3] < back[0]
    after = beside_a_nan("adashift", "int8", "reference", math.nan, 14)
    assert all(w[AT].isfinite() for w in after) and after[-1][AT] != after[0][AT]


@pytest.mark.parametrize("plan", ["int8_split24", "split32"])
def test_small_steps_arrive(plan: str) -> None:
    """600 steps of 3e-6 from 1, within a place of what is kept, 2^-15 of the weight at most: a 59th of the way."""
    p = nn.Parameter(torch.ones(16, 128, dtype=torch.bfloat16))
    opt: Any = optgen.optim.SGD([p], lr=3e-6, plan=plan, backend="reference")
    for _ in range(600):
        p.grad = torch.ones_like(p)
        opt.step()
    way = (1 - opt.full_weights()[0].double()).mean() / 1.8e-3
    assert abs(float(way) - 1) < 1 / 50
