"""A state that is never negative may still be -0; formats that order values by bit pattern must not see it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import optgen
from optgen.lang import hyper, maximum, minimum, nonneg, optimizer, state, tensor_state, total
from specs import plans
from tests import harness


@optimizer()
def negative_part(p, g, below=state(nonneg), *, lr=hyper(1e-3, ge=0)):
    """Keeps the size of the negative part of the gradient: -0 where that is 0."""
    below = -minimum(g, 0.0)
    p = p - lr * below
    return p, below


def test_minus_zero_decodes_as_the_smallest(tmp_path: Path) -> None:
    pair = harness.Pair(
        negative_part, harness.schedule(negative_part, plans.int8_split24, "float32", "strict"), tmp_path
    )
    g = torch.linspace(-1.0, 1.0, 64)  # one block: sizes from 1 down to 0, then -0
    kept = [pair.buffers((64,), torch.zeros(64)) for _ in range(2)]
    pair.run_reference(kept[0], g, 1, 0, 0)
    pair.run_triton(kept[1], g, 1, 0, 0)
    for name in kept[0]:
        assert harness.same_bits(kept[0][name], kept[1][name])
    codes = kept[0]["below_codes"]
    assert codes[:32].min() > codes[32:].max(), "-0 was taken for a number"


@optimizer()
def of_two_zeros(
    p, g, t, low=state(), high=state(), least=state(), most=state(), low_of_all=tensor_state(),
    high_of_all=tensor_state(), by_rate=state(), *, lr=hyper(0.0, ge=0), scale=hyper(0.0),
):  # fmt: skip
    """Zeros of both signs, in both orders: of elements and constants, of a tensor's values, on the host."""
    p = p + lr * (high + least + most + by_rate)
    low, high = minimum(g, low), maximum(low, g)
    least, most = minimum(g, 0.0), maximum(g, 0.0)
    low_of_all = minimum(lr * total(abs(g)), -low_of_all)
    high_of_all = maximum(-lr * total(abs(g)), high_of_all)
    by_rate = minimum(scale, -scale / t) * (2 + g)  # on the host the first of the two, whatever the backend
    return p, low, high, least, most, low_of_all, high_of_all, by_rate


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
def test_of_two_zeros_the_minimum_is_the_negative_one(backend: str) -> None:
    """As min.NaN.f32 has it, in strict maths; 37 elements, since torch's own depends on the place in a vector."""
    p = torch.nn.Parameter(torch.ones(37))
    opt = optgen.compile(of_two_zeros, plan="fp32", maths="strict")([p], backend=backend)
    p.grad = torch.where(torch.arange(37) % 2 == 0, -0.0, 0.0)
    opt.step()
    kept = opt.state[p]
    for name in ("low", "least"):
        assert torch.equal(torch.signbit(kept[name]), torch.signbit(p.grad)), name
    for name in ("high", "most"):
        assert not torch.signbit(kept[name]).any(), name
    assert not torch.signbit(kept["by_rate"]).any()
    assert math.copysign(1, kept["low_of_all"]) == -1
    assert math.copysign(1, kept["high_of_all"]) == 1
    opt.step()
    assert torch.equal(torch.signbit(kept["low"]), torch.signbit(p.grad))
    p.grad.fill_(math.nan)
    opt.step()
    assert all(kept[name].isnan().all() for name in ("low", "high", "least", "most", "low_of_all"))
