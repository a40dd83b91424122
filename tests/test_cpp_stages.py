"""Steps of several sweeps: the C++ kernels give the eager reference's bits in strict maths."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import optgen
from optgen.runtime import native
from tests.harness import same_bits

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler")

SHAPES: list[tuple[int, ...]] = [
    (130, 150), (64, 2048), (200, 1100), (1, 300), (300, 1), (70, 3, 3, 3), (20000,), (), (0,), (3, 0), (3, 5, 128),
    (2, 70, 70),
]  # fmt: skip
ISAS = [isa.name for isa in native.ISAS if isa.needs <= native.cpu_flags() and isa.name != "avx512"]


def train(cls: Any, backend: str, dtype: torch.dtype, plan: str, shapes: list[tuple[int, ...]], steps: int = 3) -> Any:
    draw = torch.Generator().manual_seed(5)
    params = [torch.nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in shapes]
    opt = cls(params, backend=backend, plan=plan, lr=1e-2)
    for _ in range(steps):
        for p in params:
            scale = 10.0 ** float(torch.randint(-6, 3, (), generator=draw))
            p.grad = (torch.randn(p.shape, generator=draw) * scale).to(dtype)
        opt.step()
    return params, opt


def check(name: str, plan: str, dtype: torch.dtype, shapes: list[tuple[int, ...]]) -> None:
    cls = optgen.compile(name, plan, maths="strict")
    ours, one = train(cls, "reference", dtype, plan, shapes)
    theirs, two = train(cls, "cpp", dtype, plan, shapes)
    for shape, a, b in zip(shapes, ours, theirs, strict=True):
        for key, value in one.state[a].items():
            if isinstance(value, torch.Tensor):
                assert same_bits(value, two.state[b][key]), (shape, key)
        assert same_bits(a.detach(), b.detach()), shape


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("plan", ["fp32", "int8_split24", "bf16"])
@pytest.mark.parametrize("name", ["lamb", "came"])
def test_same_bits(name: str, plan: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTGEN_ISA", isa)
    check(name, plan, torch.float32 if plan == "fp32" else torch.bfloat16, SHAPES)
