"""Steps of several sweeps through Triton: in strict maths, interpreted, they give eager torch's bits.

Tensors of all kinds of shapes lie in one bucket: matrices that fill panels and that do not, rows longer and shorter
than a panel, more than two dimensions with blocks that straddle rows and that do not, vectors, a scalar, and nothing.
"""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from optgen import optim
from optgen.driver import emit
from optgen.formats import Blocked, LogMinMax, Plan, Split, scales, softsign

from optgen.lang import (  # isort: skip
    Spec, amax, col, col_max, dot, hyper, mat_mean, maximum, mean, nonneg, optimizer, row, row_max, row_mean, sqrt,
    state, tensor_state,
)  # fmt: skip
from optgen.runtime.gpu import stages
from optgen.runtime.layout import plans as loaded
from optgen.runtime.layout import workspace
from optgen.runtime.step import backends
from specs import plans
from specs.came import came
from specs.lamb import lamb

# The interpreter computes in lanes that hold nothing, too.
from tests.harness import package
from tests.test_kernel_stats import assert_within_budget, counted
from tests.training import different, trained

Shapes = Sequence[tuple[int, ...]]


def coded(block: int) -> Plan:
    """int8_split24 in other blocks, for tensors of any size."""
    return Plan(
        "8-bit states.",
        name=f"blocks{block}",
        master=Split(8, "stochastic"),
        signed=Blocked(8, block, softsign(1), scales.ue8m8, relative=True),
        nonneg=LogMinMax(8, block),
        small_numel=0,
    )


PLANS = {"fp32": plans.fp32, "bf16_sr": plans.bf16_sr, "int8_split24": plans.int8_split24}
PLANS |= {f"blocks{b}": coded(b) for b in (16, 512)}


@optimizer()
def extremes(
    p, g, m=state(), top=row(nonneg), side=col(nonneg), all_time=tensor_state(nonneg), *,
    lr=hyper(1e-2, ge=0), beta=hyper(0.9, ge=0, lt=1),
):  # fmt: skip
    """Maxima of rows, columns and the tensor, means of matrices, and the dot product of two moments."""
    m = beta * m + (1 - beta) * g
    top = maximum(beta * top, row_max(abs(g)))
    side = maximum(beta * side, col_max(abs(g)))
    level = mat_mean(top) + mat_mean(side)
    all_time = maximum(all_time, amax(-g))
    turn = dot(m, g) / (1 + mean(side) + row_mean(m * m))
    p = p - lr * (m / (level + sqrt(top * side) + all_time + 1e-8) + 0.01 * turn * g)
    return p, m, top, side, all_time


@cache
def built(spec: Spec, plan: Plan, maths: str, folder: Path) -> Any:
    """The optimizer's class, from a package of its own."""
    name = f"stages_{spec.name}_{plan.name}_{maths}"
    return getattr(package(folder, name, spec.name, emit.emit_package(spec, plan, maths=maths)), spec.class_name)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    folder = tmp_path_factory.mktemp("packages")
    return lambda spec, plan, maths="strict": built(spec, PLANS[plan], maths, folder)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of kernels that each step of several stages launched: 0 where eager torch stepped in silently."""
    counts: list[int] = []
    stretch = stages.stretch

    def counting(plan: stages.Launches, *rest: int) -> Any:
        counts.append(len(plan.calls))
        return stretch(plan, *rest)

    monkeypatch.setattr(stages, "stretch", counting)
    return counts


def case(spec: Spec, plan: str, shapes: Shapes) -> Any:
    """A case of the test below."""
    dtype = torch.float32 if plan == "fp32" else torch.bfloat16
    name = f"{spec.name}-{plan}-{'-'.join('x'.join(map(str, s)) or 'scalar' for s in shapes)}"
    return pytest.param(spec, plan, dtype, shapes, id=name)


CASES = [
    case(lamb, "fp32", [(7, 150), (5, 3, 70), (17000,), (), (300,), (0,)]),
    case(lamb, "blocks16", [(5, 70), (3, 128), (300,), ()]),
    case(lamb, "blocks512", [(3, 1030), (700,)]),
    case(lamb, "bf16_sr", [(5, 70), (300,)]),
    case(came, "fp32", [(66, 150), (3, 1030), (1, 300), (66, 1), (2, 3, 70), (3, 5, 2, 9), (0, 5), (), (300,)]),
    case(came, "blocks16", [(66, 70), (3, 300), (1, 300), (66, 1), (2, 3, 70), (3, 5, 2, 9), (0, 5), ()]),
    case(came, "blocks16", [(2, 65, 64)]),
    case(came, "bf16_sr", [(66, 150), (2, 3, 70), (300,)]),
    case(extremes, "fp32", [(66, 150), (3, 1030), (1, 300), (66, 1), (2, 3, 70), (3, 5, 2, 9), (0, 5)]),
    case(extremes, "blocks16", [(3, 300), (66, 1), (2, 3, 70), (2, 64, 64)]),
    case(extremes, "blocks512", [(2, 3, 70)]),
]


@pytest.mark.parametrize(("spec", "plan", "dtype", "shapes"), CASES)
def test_strict_kernels_give_the_bits_of_eager_torch(
    spec: Spec, plan: str, dtype: torch.dtype, shapes: Shapes, build: Callable[..., Any], launches: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(stages, "ROWS", 8)  # which are fewer tiles for the interpreter
    made = build(spec, plan)
    how: dict[str, Any] = dict(dtype=dtype, seed=len(shapes), sizes=(-3, 2), lr=1e-2)
    eager = trained(made, "reference", shapes, **how)
    assert not launches
    assert not different(eager, trained(made, "triton", shapes, **how))
    assert len(launches) >= 3
    assert all(launches)


def test_a_model_of_nothing_is_stepped() -> None:
    """Sums over the model are those of no elements."""
    p = torch.nn.Parameter(torch.zeros(0, 5))
    p.grad = torch.zeros(0, 5)
    opt = optim.Prodigy([p], backend="triton", plan="fp32")
    opt.step()
    assert opt.state[p]["step"] == 1


# The relative error of a rounding, and of a quotient, a root or a reciprocal in fast maths: 4 units of 2^-23.
ROUNDING, APPROXIMATE = 2.0**-24, 4 * 2.0**-23


def test_a_tensor_of_few_segments_is_summed_by_smaller_ones_in_fast_maths(
    build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """LAMB's two norms, of 5000 squares: 81 roundings each in segments of 16384, fewer in those of 4096."""
    draw, found = torch.Generator().manual_seed(2), []
    weight, g = torch.randn(2, 5000, generator=draw)
    for few in (workspace.FEW, 0):
        monkeypatch.setattr(workspace, "FEW", few)
        p = torch.nn.Parameter(weight.clone())
        p.grad, opt = g, build(lamb, "fp32", "fast")([p], lr=1e-2, backend="triton")
        opt.step()
        (kernels,) = opt._stepper.launcher.used.values()
        found.append((p.data.double(), kernels.launches.calls[0].work.shape[0]))
    (small, items), (large, one) = found
    assert (items, one) == (2, 1)
    assert ((small - large).abs() <= 2 * 81 * ROUNDING * (large - weight).abs() + 2 * ROUNDING * weight.abs()).all()
    assert (large != weight).any()


def test_without_kernels_for_its_stages_a_variant_steps_in_eager_torch(
    build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = loaded.load(build(lamb, "fp32"), "fp32")
    variant = plan.variants[0]
    assert backends.able("triton", plan, variant) == "triton"
    monkeypatch.setattr(backends.compiled, "kernels", lambda _: ModuleType("empty"))
    assert backends.able("triton", plan, variant) == "reference"
    assert backends.able("cpp", plan, variant) == "cpp"  # whose kernels are another file


# Compiled, without a GPU ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_sweep_stays_within_what_memory_leaves_time_for(compiling: dict[str, str]) -> None:
    found = counted(compiling, "--sweeps", "--target", "sm_90")
    assert len({kernel.split(".")[0] for kernel, _ in found}) >= 15
    assert_within_budget(found)


def test_the_sweeps_of_came_stay_within_what_memory_leaves_time_for(compiling: dict[str, str]) -> None:
    """The first reads the gradient, a conversion, and a square into two sums: 4.0 were counted."""
    found = counted(compiling, "--sweeps", "--target", "sm_90", "came.int8_split24")
    assert len(found) == 8  # each is counted with smaller panels too
    assert_within_budget(found)
    first = found["came.int8_split24.1", "sm_90"]
    assert first["per_element"] <= 5
    assert set(first["loads"]) == {"128"}
