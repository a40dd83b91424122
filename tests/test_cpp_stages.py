"""Steps of several stages: C++ kernels give the eager reference's bits in strict maths, and keep fast maths' bound."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

import optgen
from optgen.formats import Blocked

from optgen.lang import (  # isort: skip
    amax, col, col_max, col_mean, hyper, mat_mean, maximum, mean, nonneg, norm, optimizer, row, row_max, row_mean,
    rsqrt, state,
)  # fmt: skip
from optgen.runtime.cpu import cpu, native
from specs import plans
from tests.harness import optimized
from tests.training import different, has_plan, trained

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler")

# Of each way to walk: panels with ragged, short and several panels, bands with and without a rest, flat, matrices in a
# stack that begin on blocks and that do not, several rows to a tile; without elements.
SHAPES = [
    (130, 150), (64, 2048), (200, 1100), (1, 300), (300, 1), (70, 3, 3, 3), (20000,), (), (0,), (3, 0), (3, 5, 128),
    (2, 70, 70), (65, 512), (200, 64), (70, 65), (3, 70, 64), (1000, 8),
]  # fmt: skip
ISAS = [isa.name for isa in native.ISAS if isa.needs <= native.cpu_flags() and isa.name != "avx512"]


@optimizer(cite="none", name="Statistics")
def statistics(
    p, g, m=state(), r=row(nonneg), c=col(nonneg), s=row(nonneg), *, lr=hyper(1e-2, ge=0), eps=hyper(1e-3, gt=0)
):  # fmt: skip
    """Sums and maxima of one value, of rows, columns, matrices and the tensor; few values reduced again."""
    square = g * g + eps
    r = 0.5 * r + row_mean(square)
    s = maximum(s, row_max(square))
    c = 0.5 * c + maximum(col_mean(square), 0.1 * col_max(square))
    update = g * rsqrt(r / mat_mean(r) + s / mean(s)) * rsqrt(c + amax(square))
    m = 0.9 * m + 0.1 * update
    p = p - lr * m / maximum(1.0, norm(update) / 10.0) - lr * mat_mean(m) * row_max(-m)
    return p, m, r, c, s


def dtype_for(plan: str) -> torch.dtype:
    return torch.float32 if plan == "fp32" else torch.bfloat16


@pytest.mark.parametrize(("name", "plan", "isas"), [
    ("lamb", "fp32", ISAS[:1]), ("lamb", "int8_split24", ISAS[-1:]), ("came", "bf16", ISAS[:1]),
    ("came", "int8_split24", ISAS),
])  # fmt: skip
def test_same_bits(name: str, plan: str, isas: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second and third step are made by the plan of the first."""
    cls = optgen.compile(name, plan, maths="strict")
    ours = trained(cls, "reference", SHAPES, dtype_for(plan), plan=plan, lr=1e-2)
    for isa in isas:
        monkeypatch.setenv("OPTGEN_ISA", isa)
        with optimized() if (plan, isa) == ("int8_split24", ISAS[0]) else nullcontext():
            theirs = trained(cls, "cpp", SHAPES, dtype_for(plan), plan=plan, lr=1e-2)
        assert not different(ours, theirs), isa
        assert has_plan(theirs)


@pytest.mark.parametrize(
    ("name", "plan", "grad"),
    [
        ("came", "fp32", torch.float16), ("came", "int8_split24", torch.float32),
        ("lamb", "int4_factored_split24", None), ("adamp", "int4_factored_split24", None), ("adamw", "lpmm4", None),
        ("dadapt_adam", "lpmm4_factor", None),  # its sweep has sums of its own, which the walk before it leaves
        ("adabelief", "lpmm4_factor", None),  # that walk reads a state in blocks of 128, and sums rows by panels of it
    ],
)  # fmt: skip
def test_same_bits_for_other_gradients_and_where_the_plan_divides_the_step(
    name: str, plan: str, grad: torch.dtype | None
) -> None:
    """A plan's rows and columns turn the rule's sums over the tensor into sums of rows."""
    cls = optgen.compile(name, plan, maths="strict")
    sides = [trained(cls, x, SHAPES, dtype_for(plan), plan=plan, lr=1e-2, grad=grad) for x in ("reference", "cpp")]
    assert not different(*sides)


MATRICES = [shape for shape in SHAPES if len(shape) > 1]


@pytest.mark.parametrize("odd", [None, float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("block", [1, 16, 128])
def test_sums_and_maxima_of_one_value(block: int, odd: float | None) -> None:
    """Narrow and wide panels; a NaN wins every maximum."""
    plan = plans.fp32 if block == 1 else plans.int8_split24.but(f"blocks_of_{block}", signed=Blocked(8, block))
    cls = optgen.compile(statistics, plan, maths="strict")
    dtype = dtype_for(plan.name)
    with optimized() if block == 16 else nullcontext():
        sides = [trained(cls, x, MATRICES, dtype, plan=plan.name, lr=1e-2, odd=odd) for x in ("reference", "cpp")]
    assert not different(*sides)


@pytest.mark.parametrize("maths", ["strict", "fast"])
@pytest.mark.parametrize(("name", "plan"), [("lamb", "int8_split24"), ("came", "int8_split24")])
def test_any_number_of_threads_gives_the_same_bits(
    name: str, plan: str, maths: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = optgen.compile(name, plan, maths=maths)
    found = []
    for threads in (1, 2, 7):
        monkeypatch.setattr(cpu, "threads", lambda elements, threads=threads: threads)
        found.append(trained(cls, "cpp", SHAPES, dtype_for(plan), plan=plan, lr=1e-2))
    assert not different(found[0], found[1]) + different(found[0], found[2])
