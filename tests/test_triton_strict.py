"""Strict maths: the Triton kernel, in the interpreter, gives the eager reference's bits: codes, scales, weights."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch

from tests import harness

SHAPES = [(), (1,), (63,), (64,), (257,), (16, 64), (5, 70), (3, 7, 11), (3, 320), (2048,)]
CASES = [
    *(("adamw", plan, "bfloat16", {}) for plan in ("fp32", "bf16", "bf16_sr", "bf16_kahan", "fp32_master", "split32")),
    *(("adamw", plan, "bfloat16", {}) for plan in ("int8_split24", "int8_rn_split24", "flashoptim")),
    *(("adamw", plan, "bfloat16", {}) for plan in ("int6_split24", "int5_split24", "int4_split24")),
    ("adamw", "int5_int3_split24", "bfloat16", {}),
    ("adamw", "int8", "float32", {}),
    ("adamw", "int8_split24", "float16", {}),
    ("adamw", "int8_split24", "bfloat16", {"amsgrad": True}),
    ("lion", "int8_split24", "bfloat16", {}),
    ("sgd", "int8_split24", "bfloat16", {"has_momentum": True}),
    ("sgd", "int8_rn_split24", "bfloat16", {"has_momentum": True, "nesterov": True}),
]


@pytest.mark.parametrize(("name", "plan", "param", "flags"), CASES, ids=lambda x: str(x))
def test_same_bits(name: str, plan: str, param: str, flags: dict[str, bool], tmp_path: Path) -> None:
    spec = harness.spec_of(name)
    pair = harness.Pair(spec, harness.schedule(spec, harness.plan_of(plan), param, "strict", flags), tmp_path)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {plan}".encode()))
    for shape in SHAPES:
        weight = torch.randn(shape, generator=generator)
        ours, theirs = pair.buffers(shape, weight), pair.buffers(shape, weight)
        for step in range(1, 4):
            scale = 10.0 ** float(torch.randint(-8, 3, (), generator=generator))
            g = (torch.randn(shape, generator=generator) * scale).to(getattr(torch, param))
            if step == 2:
                g.view(-1)[::3] = 0
            pair.run_reference(ours, g, step, 0x1234567 * step, 99, lr=1e-2)
            pair.run_triton(theirs, g, step, 0x1234567 * step, 99, lr=1e-2)
            for key in ours:
                assert harness.same_bits(ours[key], theirs[key]), (shape, step, key)
