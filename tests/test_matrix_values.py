"""States of one value per matrix: the same bits on every backend, as computed by hand, saved and loaded."""

import os
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import optgen
from optgen.driver import fuzz
from optgen.lang import hyper, mat, mat_norm, mean, nonneg, optimizer, state
from specs import plans
from tests.training import bits

OTHERS = ("int8_split24", "int4_split24", "flashoptim")
DRAWN = OTHERS[int(os.environ["OPTGEN_SAMPLE_SEED"]) % 3]
PLANS = ["fp32", *(pytest.param(x, marks=[] if x == DRAWN else pytest.mark.full) for x in OTHERS)]
"""Every day fp32 and one other: the C++ kernels of each take four seconds to compile."""
SHAPES = [(66, 70), (3, 5, 7, 9), (1, 30), (30, 1), (0, 5), (3, 0, 4)]


@optimizer()
def by_matrix(
    p, g, m=state(), size=mat(nonneg), last=mat(init=0.5), *, lr=hyper(1e-2, ge=0), beta=hyper(0.9, ge=0, lt=1),
):  # fmt: skip
    """The running norm of each matrix, the one before it, and their mean over a stack."""
    p = p - lr * last * g
    last = size
    size = beta * size + (1 - beta) * mat_norm(g)
    m = beta * m + (1 - beta) * g / (size + 1e-8)
    p = p - lr * m / (1 + mean(size))
    return p, m, size, last


@cache
def compiled(plan: str) -> Any:
    return optgen.compile(by_matrix, plan, maths="strict")


def made(plan: str, backend: str) -> tuple[list[torch.nn.Parameter], Any]:
    draw, dtype = torch.Generator().manual_seed(1), torch.float32 if plan == "fp32" else torch.bfloat16
    params = [torch.nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in SHAPES]
    return params, compiled(plan)(params, plan=plan, backend=backend)


def gradients(plan: str, steps: int = 3) -> list[list[Tensor]]:
    """Gradients of each step, each matrix of which has another size."""
    draw, dtype = torch.Generator().manual_seed(2), torch.float32 if plan == "fp32" else torch.bfloat16
    sizes = [torch.rand(*shape[:-2], 1, 1, generator=draw) for shape in SHAPES]
    return [
        [(torch.randn(shape, generator=draw) * size).to(dtype) for shape, size in zip(SHAPES, sizes, strict=True)]
        for _ in range(steps)
    ]


def train(opt: Any, params: list[torch.nn.Parameter], steps: list[list[Tensor]]) -> list[dict[str, Any]]:
    for grads in steps:
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        opt.step()
    return [bits({"p": p.data, **opt.state[p]}) for p in params]


@pytest.mark.parametrize("plan", PLANS)
def test_cpp_has_the_bits_of_eager_torch(plan: str) -> None:
    hold(plan, "cpp")


@pytest.mark.parametrize("plan", ["fp32", *(pytest.param(x, marks=pytest.mark.slow) for x in OTHERS)])
def test_triton_has_the_bits_of_eager_torch(plan: str) -> None:
    pytest.importorskip("triton")
    hold(plan, "triton")


def hold(plan: str, backend: str) -> None:
    params, opt = made(plan, "reference")
    others, theirs = made(plan, backend)
    assert train(opt, params, gradients(plan, 2)) == train(theirs, others, gradients(plan, 2))


def test_a_vector_has_no_matrix() -> None:
    with pytest.raises(ValueError, match="no rows and columns"):
        compiled("fp32")([torch.nn.Parameter(torch.zeros(9))])


@pytest.mark.parametrize("plan", ["fp32", "int8_split24"])
def test_steps_are_within_their_bounds(plan: str) -> None:
    assert fuzz.fuzz(by_matrix, getattr(plans, plan), count=10, steps=1).failure is None
