"""Strict maths: the Triton kernel, in the interpreter, gives the eager reference's bits: codes, scales, weights."""

import zlib
from pathlib import Path

import pytest
import torch

from optgen.lang import floor, hyper, optimizer
from tests import harness

SHAPES = [(), (1,), (63,), (64,), (257,), (16, 64), (5, 70), (3, 7, 11), (3, 320), (2048,)]
CASES = [
    *(("adamw", plan, "bfloat16", {}) for plan in ("fp32", "bf16", "bf16_sr", "fp32_master", "split32")),
    *(("adamw", plan, "bfloat16", {}) for plan in ("int8_split24", "int8_rn_split24", "flashoptim", "bnb8")),
    *(("adamw", plan, "bfloat16", {}) for plan in ("int6_split24", "int5_split24", "int4_split24")),
    ("adamw", "int8", "float32", {}),
    ("adamw", "int8_split24", "float16", {}),
    ("adamw", "int8_split24", "bfloat16", {"amsgrad": True}),
    ("lion", "int8_split24", "bfloat16", {}),
    ("sgd", "int8_split24", "bfloat16", {"has_momentum": True}),
    ("sgd", "int8_rn_split24", "bfloat16", {"has_momentum": True, "nesterov": True}),
]


@pytest.mark.parametrize(
    ("name", "plan", "param", "flags"),
    [pytest.param(*case, marks=pytest.mark.full if k < 12 and k % 2 else ()) for k, case in enumerate(CASES)],
    ids=lambda x: str(x),
)
def test_same_bits(name: str, plan: str, param: str, flags: dict[str, bool], tmp_path: Path) -> None:
    pair = harness.strict(name, plan, tmp_path, param, flags)
    draw = torch.Generator().manual_seed(zlib.crc32(f"{name} {plan}".encode()))
    weights = [torch.randn(shape, generator=draw) for shape in SHAPES]
    gradients = harness.of_many_sizes(SHAPES, getattr(torch, param), draw)
    assert not pair.differing(weights, gradients, pair.run_together, lr=1e-2)


@optimizer()
def stepped(p, g, *, lr=hyper(1e-2, ge=0)):
    p = p - lr * floor(g)
    return p


def test_floor_of_subnormals(tmp_path: Path) -> None:
    pair = harness.Pair(stepped, harness.case_of(stepped, harness.plan_of("fp32"), "float32"), tmp_path)
    g = torch.tensor([-1e-40, 1e-40, -0.0, -1.5, 2.0, -(2.0**-126), 3e38])
    ours, theirs = pair.buffers(g.shape, torch.zeros(7)), pair.buffers(g.shape, torch.zeros(7))
    pair.run_reference(ours, g, 1, 0, 0, lr=1.0)
    pair.run_triton(theirs, g, 1, 0, 0, lr=1.0)
    assert harness.same_bits(ours["p"], theirs["p"])
    assert ours["p"].tolist() == (-torch.floor(g)).tolist()
