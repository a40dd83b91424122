"""Infinities and NaNs through the functions that are made of bit operations, and past branches that are not taken."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from optgen.lang import Spec, cbrt, hyper, maximum, optimizer, state
from optgen.lang.values import exp2, log2
from tests import harness

# Quiet NaNs: of x86, of NVIDIA's arithmetic, with a payload, negative ones.
NANS = torch.tensor([0x7FC00000, 0x7FFFFFFF, 0x7FC12345, -0x400000, -1], dtype=torch.int32).view(torch.float32)
MODES = [("strict", "reference"), ("strict", "triton"), ("fast", "triton")]
NUMBERS = torch.tensor([math.inf, -math.inf, 0.0, -0.0, 2.0**-149, 2.0**-126, 1.0, 3.0, -200.0, 200.0, 3e38])


@optimizer(cite="a test")
def decomposed(p, g, raised=state(), logged=state(), rooted=state(), powered=state(), *, lr=hyper(1e-3)):
    raised = raised + exp2(g)
    logged = logged + log2(maximum(abs(g), 2.0**-126))
    rooted = rooted + cbrt(abs(g))
    powered = powered + abs(g) ** 0.3
    p = p - lr * g
    return p, raised, logged, rooted, powered


def kept_by(
    spec: Spec, maths: str, backend: str, g: Tensor, folder: Path, steps: int = 1, **hypers: float
) -> dict[str, Tensor]:
    """What that many steps of one gradient keep under the plan fp32."""
    schedules = [harness.schedule(spec, harness.plan_of("fp32"), "float32", m) for m in ("strict", maths)]
    pair = harness.Pair(spec, schedules[0], folder, kernels=schedules[1])
    buffers = pair.buffers(tuple(g.shape), torch.zeros_like(g))
    run = pair.run_triton if backend == "triton" else pair.run_reference
    for step in range(1, steps + 1):
        run(buffers, g, step, 1, 1, **hypers)
    return buffers


@pytest.mark.parametrize(("maths", "backend"), MODES)
def test_decomposed_functions_keep_what_is_not_finite(maths: str, backend: str, tmp_path: Path) -> None:
    g = torch.cat([NANS, NUMBERS])
    kept = kept_by(decomposed, maths, backend, g, tmp_path)
    for name in ("raised", "logged", "rooted", "powered"):
        assert torch.equal(kept[name].isnan(), g.isnan()), name
    x = NUMBERS.double()
    exact = {
        "raised": torch.where(x == math.inf, math.inf, x.clamp(-126, 127).exp2()),
        "logged": x.abs().clamp(min=2.0**-126).log2(),
        "powered": torch.where(x.abs() < 2.0**-126, 0.0, x.abs() ** 0.3),
    }
    for name, wanted in exact.items():
        # Beyond the functions' own errors, of some ulp, stands the one of the exponent 0.3 * log2(x), at most 39.
        torch.testing.assert_close(kept[name][len(NANS) :].double(), wanted, rtol=39 * 2.0**-22, atol=2.0**-22)
    normal = (x.abs() >= 2.0**-126) | (x == 0)
    roots = kept["rooted"][len(NANS) :].double()
    torch.testing.assert_close(roots[normal], (x.abs() ** (1 / 3))[normal], rtol=2.0**-21, atol=0.0)


@pytest.mark.parametrize(("maths", "backend"), MODES)
def test_radam_steps_without_its_second_moment_where_that_overflows(maths: str, backend: str, tmp_path: Path) -> None:
    """Five steps with rho <= 5, as torch makes them: the second moment of these gradients is infinite."""
    g = torch.tensor([1e20, -3e25, 1e30, 1.0])
    kept = kept_by(harness.spec_of("radam"), maths, backend, g, tmp_path, 5)
    weight = torch.nn.Parameter(torch.zeros_like(g))
    theirs = torch.optim.RAdam([weight], foreach=False)
    for _ in range(5):
        weight.grad = g
        theirs.step()
    assert kept["exp_avg_sq"].isinf().any()
    # Five sums of a product and a sum each, of numbers that grow: some ulp of the last.
    torch.testing.assert_close(kept["p"], weight.detach(), rtol=5 * 4 * 2.0**-24, atol=0.0)


@pytest.mark.parametrize(("maths", "backend"), MODES)
def test_adan_has_no_change_to_average_at_the_first_step(maths: str, backend: str, tmp_path: Path) -> None:
    g = torch.tensor([math.inf, -math.inf, math.nan, 1.0])
    kept = kept_by(harness.spec_of("adan"), maths, backend, g, tmp_path, 1)
    assert torch.equal(kept["exp_avg_diff"], torch.zeros(4))


@pytest.mark.parametrize(("maths", "backend"), MODES)
def test_a_second_moment_overflows_no_earlier_than_it_is_written(maths: str, backend: str, tmp_path: Path) -> None:
    """g * g is infinite here, (1 - beta2) * g * g is not."""
    g = torch.tensor([2e19, -1e20, 5e20])
    kept = kept_by(harness.spec_of("adamw"), maths, backend, g, tmp_path)
    exact = (1 - 0.999) * g.double() ** 2
    assert (exact < torch.finfo(torch.float32).max).all()
    assert (g * g).isinf().all()
    # 1 - beta2 and two products, of fp32 numbers.
    torch.testing.assert_close(kept["exp_avg_sq"].double(), exact, rtol=3 * 2.0**-24, atol=0.0)


@pytest.mark.parametrize(("maths", "backend"), MODES)
def test_without_a_learning_rate_nothing_moves_even_where_a_moment_is_infinite(
    maths: str, backend: str, tmp_path: Path
) -> None:
    g = torch.tensor([1e30, -1e30, 1.0, 0.0])
    for name in ("adamw", "radam", "adamax", "nadam"):
        kept = kept_by(harness.spec_of(name), maths, backend, g, tmp_path, 8, lr=0.0, weight_decay=0.0)
        assert torch.equal(kept["p"], torch.zeros(4)), name
        assert "exp_avg_sq" not in kept or kept["exp_avg_sq"].isinf().any()


@pytest.mark.parametrize(("maths", "backend"), MODES)
def test_zero_over_zero_is_nan_in_strict_maths_and_no_step_in_fast(maths: str, backend: str, tmp_path: Path) -> None:
    """As docs/language.md says."""
    kept = kept_by(harness.spec_of("adamw"), maths, backend, torch.zeros(4), tmp_path, eps=0.0)
    assert kept["p"].isnan().all() if maths == "strict" else torch.equal(kept["p"], torch.zeros(4))
