"""Rules that the C++ printer must not trip over: its own names, values that outlive a loop, zeros of either sign."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from optgen.formats import Float
from optgen.lang import hyper, nonneg, optimizer, sqrt, state
from optgen.ops import dtypes
from optgen.runtime.cpu import native
from tests import harness

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler")


@optimizer(cite="none", name="Late")
def late(p, g, t, m=state(), v=state(nonneg), h=state(), *, lr=hyper(1e-2, ge=0)):
    """The weight reads what `h` held before, in more operations than a loop of its own needs."""
    m = 0.9 * m + 0.1 * g
    v = 0.9 * v + 0.1 * g * g
    p = p - lr * (m + h) / (sqrt(v) + 1e-8) * (1.0 + abs(h))
    h = g
    return p, m, v, h


@optimizer
def words(
    p, g, t, first=state(), typename=state(nonneg), L=state(), *,
    i=hyper(0.01, ge=0), end=hyper(0.9, ge=0, lt=1), count=hyper(1e-2, ge=0), union=hyper(0.5, ge=0),
    lane=hyper(2.0, ge=0), first_at=hyper(0.25, ge=0), nan=hyper(0.5, ge=0), w=hyper(0.5, ge=0),
    double=hyper(1.0, ge=0),
):  # fmt: skip
    """Names of the printer, of its headers and of C++; upper case, and @optimizer without parentheses."""
    first_kept = end * first + i * g
    constexpr = end * typename + g * g * union
    xor = sqrt(constexpr) + lane
    bits = first_kept * first_at + nan * w * double
    at = bits / xor
    blocks = count * at
    L = 0.5 * L + first_kept
    MASKED = union * L
    TILE = blocks + MASKED
    p = p - TILE
    first, typename = first_kept, constexpr
    return p, first, typename, L


def check(spec: Any, plan: Any, param: str, folder: Path, isa: str, **hypers: float) -> None:
    """Three strict steps beside the reference, bit for bit."""
    pair = harness.Pair(spec, harness.case_of(spec, plan, param), folder)
    draw = torch.Generator().manual_seed(1)
    grads = [torch.randn((9, 130), generator=draw).to(getattr(torch, param)) for _ in range(3)]
    for g in grads:
        g[:, ::5] = 0.0
        g[:, 1::5] = -0.0
    run = partial(pair.run_cpp, isa=isa, threads=2)
    assert not pair.differing([torch.randn((9, 130), generator=draw)], [[g] for g in grads], run, **hypers)


ISAS = [isa.name for isa in native.ISAS if isa.needs <= native.cpu_flags() and isa.name != "avx512"]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("param", ["float32", "bfloat16"])
def test_a_loop_of_its_own_reads_nothing_that_was_overwritten(param: str, isa: str, tmp_path: Path) -> None:
    """Found by review: `h` was stored by the first loop and loaded again by the second."""
    plan = harness.plan_of("int8_split24").but("kept_h", overrides={"h": Float(dtypes.f32)})
    check(late, plan, param, tmp_path, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("plan", ["fp32", "int8_split24", "int8_rn_split24"])
def test_an_author_may_use_any_name(plan: str, isa: str, tmp_path: Path) -> None:
    """Found by review: a hyper-parameter `i` was the loop's counter, silently."""
    check(words, harness.plan_of(plan), "bfloat16", tmp_path, isa)
