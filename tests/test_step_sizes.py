"""Steps at the ends of what formats hold: no step after a gradient without a square, every one that is small."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optgen.optim

RULES = ("AdamW", "Adam", "NAdam", "RMSprop", "AdaBelief", "Adagrad", "LaProp")
PLANS = ("int8", "int6_split24", "int5_split24", "int4_split24", "int5_int3_split24")
STEPS, LR = 4, 1e-3


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
    least 2^127; 2.5 octaves less under `LogMax`.  What shares its block moves no further, and nothing else changes.
    """
    if backend == "triton":
        pytest.importorskip("triton")
    got, plain = moves(rule, plan, size, backend), moves(rule, plan, 1e-2, backend)
    most = LR * (2 if plan != "int5_int3_split24" else 12)
    for with_it, without in zip(got, plain, strict=True):
        assert with_it.isfinite().all()
        assert float(with_it[3, 5]) <= max(most, float(without[3, 5]))
        assert torch.equal(with_it[:3], without[:3])
        assert torch.equal(with_it[4:], without[4:])
        assert torch.equal(with_it[3, 64:], without[3, 64:])
    for with_it, without in zip(got[1:], plain[1:], strict=True):
        assert (with_it[3, :64] <= torch.maximum(without[3, :64], torch.full((64,), most))).all()


@pytest.mark.parametrize(
    ("rule", "plan", "backend"),
    [("AdamW", "int8", "reference"), ("Adan", "int4_split24", "reference"), ("Lion", "int5_int3_split24", "reference"),
     ("RMSprop", "int8_rn_split24", "reference"), ("LaProp", "int6_split24", "reference"), ("AdamW", "int8", "cpp")],
)  # fmt: skip
def test_a_nan_takes_its_block_one_step_later(rule: str, plan: str, backend: str) -> None:
    draw = random.Random(f"{rule} {plan}")
    row, column = draw.randrange(64), draw.randrange(128)
    block = slice(column // 64 * 64, column // 64 * 64 + 64)
    kept = []
    for bad in (False, True):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(64, 128))
        opt: Any = getattr(optgen.optim, rule)([p], plan=plan, backend=backend)
        for t in range(STEPS):
            p.grad = torch.randn_like(p)
            if bad and t == 1:
                p.grad[row, column] = float("nan")
            opt.step()
            kept.append(p.detach().clone())
    for plain, got, t in zip(kept[:STEPS], kept[STEPS:], range(STEPS), strict=True):
        wanted = plain.clone()
        if t == 1:
            wanted[row, column] = float("nan")
        elif t > 1:
            wanted[row, block] = float("nan")
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("plan", ["int8_split24", "bf16_kahan"])
def test_small_steps_arrive(plan: str) -> None:
    """600 steps of 3e-6 from 1, within a place of what is kept, 2^-15 of the weight at most: a 59th of the way."""
    p = nn.Parameter(torch.ones(16, 128, dtype=torch.bfloat16))
    opt: Any = optgen.optim.SGD([p], lr=3e-6, plan=plan, backend="reference")
    for _ in range(600):
        p.grad = torch.ones_like(p)
        opt.step()
    way = (1 - opt.full_weights()[0].double()).mean() / 1.8e-3
    assert abs(float(way) - 1) < 1 / 50
