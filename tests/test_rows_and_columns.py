"""Formats that keep statistics of rows and columns: Rank1 and Factored, and the 4-bit paper's plans made of them."""

import math
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from optgen.driver.compile import compile as compiled
from optgen.formats import Blocked, Factored, LogMinMax, Plan, Rank1, Split, scales, softsign
from optgen.formats.bound import ROUNDOFF
from optgen.formats.factored import LOWEST, SMALLEST_NORMAL
from optgen.formats.scales import SMALLEST
from optgen.lang import flag, hyper, nonneg, optimizer, row_mean, sqrt, state
from optgen.lower import matrix_of
from optgen.ops import dtypes
from optgen.runtime.checkpoint import checkpoint
from optgen.runtime.cpu import native
from optgen.runtime.layout import layout
from optgen.verify.bounds import one_step_bound
from specs.adamw import adamw
from tests import harness
from tests.training import different, params_of, trained

NEAREST = Rank1(4)


def random(*shape: int, seed: int = 0) -> Tensor:
    """Nonnegative numbers of many sizes."""
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=draw) * 10 ** (8 * torch.rand(shape, generator=draw) - 8)


def one_huge() -> Tensor:
    x = random(9, 20)
    x[4, 7] = 1e30
    return x


def zero_lines() -> Tensor:
    x = random(9, 20)
    x[3] = 0
    x[:, 5] = 0
    return x


MATRICES = {
    "random": random(33, 70),
    "row": random(1, 45),
    "column": random(45, 1),
    "one": random(1, 1),
    "huge": one_huge(),
    "zero lines": zero_lines(),
    "grid": torch.arange(1, 17).repeat(4, 1) / 16,
    "ties": (torch.arange(0, 16).repeat(4, 1) + torch.tensor([0.5])) / 16 + torch.eye(4, 16) * 0,
}


UNSIGNED_MAP = np.arange(1, 17, dtype=np.float32) / 16


def codes_of_the_paper(x: Tensor, read: Tensor) -> np.ndarray:
    """The codes of a matrix by Li et al. 2023, arXiv:2309.01507, after a look at what is read of ours.

    x / scale and the middles between two entries are taken in f32 by either; where the paper divides 0 by 0, ours is
    the lowest code of the lowest scale."""
    scale, kept = np.minimum(x.numpy().max(0, keepdims=True), x.numpy().max(1, keepdims=True)), read.numpy()
    dead = scale == 0
    quotient = np.divide(x.numpy(), scale, where=~dead, out=np.zeros_like(scale))
    codes = np.searchsorted((UNSIGNED_MAP[1:] + UNSIGNED_MAP[:-1]) / 2, quotient)  # a tie goes to the lower one
    wanted = UNSIGNED_MAP[codes] * scale
    assert np.array_equal(kept[~dead], wanted[~dead])
    assert (kept[dead] <= SMALLEST).all()
    assert (kept > 0).all()
    return codes


@pytest.mark.parametrize("name", MATRICES)
def test_codes_are_those_of_the_paper(name: str) -> None:
    x = MATRICES[name]
    parts = NEAREST.encode(x)
    assert np.array_equal(parts[""].numpy(), codes_of_the_paper(x, NEAREST.decode(parts)))


def test_of_more_dimensions_codes_are_those_of_the_first_against_the_rest() -> None:
    x = random(9, 4, 3, 3)
    p = torch.nn.Parameter(torch.zeros(x.shape))
    cls = compiled(adamw, RANK1, "strict")
    options = cls([p], plan=RANK1.name, backend="reference").param_groups[0]
    _, module, variant = checkpoint.select(cls, options, p)
    stored = layout.encode(module, variant, p, {"exp_avg": 0.0, "exp_avg_sq": x}, variant.names)
    kept = layout.decode(module, variant, p, stored, ["exp_avg_sq"])["exp_avg_sq"]
    codes = codes_of_the_paper(x.view(9, 36), kept.view(9, 36))
    assert np.array_equal(nibbles(stored["exp_avg_sq_codes"])[:, :36], codes)
    assert stored["exp_avg_sq_row"].shape == (9, 1) and stored["exp_avg_sq_col"].shape == (1, 36)


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("fmt", [NEAREST, replace(NEAREST, bits=6)], ids=str)
def test_storing_is_within_its_bound_and_storing_twice_is_storing_once(fmt: Rank1, name: str) -> None:
    x = MATRICES[name]
    parts = fmt.encode(x)
    scale = torch.minimum(x.amax(-1, True), x.amax(-2, True)).clamp(min=SMALLEST)
    kept = fmt.decode(parts)
    assert ((kept - x).abs() <= one_step_bound(fmt).total * scale).all()
    again = fmt.encode(fmt.decode(parts))
    assert torch.equal(fmt.code(again), fmt.code(parts))


def test_not_a_number_stays_in_its_row_and_column_and_an_infinity_in_its_element() -> None:
    x = random(6, 10)
    x[2, 3] = math.nan
    kept = NEAREST.decode(NEAREST.encode(x))
    lost = torch.zeros(6, 10, dtype=torch.bool)
    lost[2], lost[:, 3] = True, True
    assert torch.equal(kept.isnan(), lost)
    x[2, 3] = math.inf
    kept = NEAREST.decode(NEAREST.encode(x))
    assert torch.equal(kept.isinf(), x.isinf())
    assert not kept.isnan().any()


# -- Factored
@pytest.mark.parametrize("name", MATRICES)
def test_means_of_rows_and_columns_are_kept(name: str) -> None:
    """But for what is raised, to far less than any number here; a fresh state reads as 0."""
    x, fmt = MATRICES[name], Factored()
    kept = fmt.decode(fmt.encode(x)).double()
    exact = x.double()
    few = (x.shape[0] + x.shape[1] + 8) * ROUNDOFF  # additions in any order, and the quotients around them
    for dim in (-1, -2):
        mean = exact.mean(dim)
        raised = LOWEST * float(exact.mean(0).max()) + LOWEST * exact.shape[0] + SMALLEST_NORMAL
        assert ((kept.mean(dim) - mean).abs() <= 2 * few * mean + 2 * raised).all()
    assert (kept > 0).all()
    assert not fmt.decode({"row": torch.zeros(3, 1), "col": torch.zeros(1, 4)}).any()


def test_a_matrix_of_zeros_is_kept_as_the_least_numbers() -> None:
    """As at a gradient of zeros: the mean of all rows, by which a row's is divided, is 0."""
    parts = Factored().encode(torch.zeros(3, 4))
    assert torch.equal(parts["row"], torch.full((3, 1), LOWEST))
    assert torch.equal(Factored().decode(parts), torch.full((3, 4), SMALLEST_NORMAL))


def test_a_stack_is_factored_matrix_by_matrix() -> None:
    x, fmt = random(3, 8, 9), Factored()
    parts = fmt.encode(x)
    assert parts["row"].shape == (3, 8, 1)
    assert parts["col"].shape == (3, 1, 9)
    for one, whole in zip(x, fmt.decode(parts), strict=True):
        assert torch.allclose(whole, fmt.decode(fmt.encode(one)), rtol=1e-5)


def nibbles(x: Tensor) -> np.ndarray:
    """Two codes a byte, the first in the lower half."""
    return torch.stack([x & 15, x >> 4], -1).flatten(1).numpy()


# -- every backend

# Of any size; codes of 4 and 6 bits, with blocks and without, stochastic and to nearest, absolute and relative.
DRAGGED = "AMSGrad's maxima follow their scales (L9), by the same bits on every backend"
RANK1 = Plan(
    "Rank-1 second moments.",
    name="rank1",
    signed=Blocked(4, 32, softsign(0.5), relative=True),
    nonneg=Rank1(4, vectors=32),
    small_numel=0,
    discouraged=DRAGGED,
)
ROOTED = Plan(
    "Rank-1 moments.",
    name="rooted",
    signed=Blocked(6, 32, softsign(1)),
    nonneg=Rank1(6, vectors=32),
    small_numel=0,
    discouraged=DRAGGED,
)
FACTORED = Plan(
    "Factored second moments.",
    name="factored",
    master=Split(8, "stochastic"),
    signed=Blocked(4, 32, softsign(0.5), scales.ue8m8, relative=True),
    nonneg=Factored(vectors=LogMinMax(4, 32)),
    small_numel=0,
)
TWO = [(7, 70), (2, 3, 5, 14)]
SHAPES = [(7, 70), (66, 40), (2, 3, 70), (3, 4, 1, 9), (66, 2, 5, 2), (300,), (0, 5), (0, 5, 3), ()]


CPP = pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")


@pytest.mark.parametrize(
    ("rule", "backend", "plan"),
    [
        *(pytest.param("adamw", "cpp", plan, marks=CPP) for plan in (RANK1, ROOTED, FACTORED)),
        ("adamw", "triton", RANK1), pytest.param("adamw", "triton", ROOTED, marks=pytest.mark.slow),
        ("adamw", "triton", FACTORED),
        # It has a norm of the tensor too, whose sum goes by rows where a state is kept as a whole.
        ("lamb", "triton", RANK1), pytest.param("lamb", "triton", FACTORED, marks=pytest.mark.slow),
    ],
    ids=lambda x: getattr(x, "name", x),
)  # fmt: skip
def test_kernels_give_the_bits_of_eager_torch(rule: str, backend: str, plan: Plan) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    cls, shapes = compiled(harness.spec_of(rule), plan, "strict"), SHAPES if backend == "cpp" else TWO
    with harness.optimized() if (backend, plan) == ("cpp", RANK1) else nullcontext():
        sides = [trained(cls, x, shapes, torch.bfloat16, plan=plan.name, lr=1e-2) for x in ("reference", backend)]
    assert not different(*sides)
    assert all(p.isfinite().all() for p in params_of(sides[0]))


# -- vectors, states and their forms
def test_vectors_take_blocks_and_small_tensors_what_the_plan_says() -> None:
    cls = compiled(adamw, "lpmm4")
    params = [torch.nn.Parameter(torch.ones(s)) for s in ((4096,), (64, 70), (4095,), (8, 600, 2))]
    opt = cls(params, plan="lpmm4", backend="reference")
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    shapes = [{k: tuple(x.shape) for k, x in opt.state[p].items() if "sq" in k} for p in params]
    assert shapes == [
        {"exp_avg_sq_codes": (1, 2048), "exp_avg_sq_scale": (1, 32)},
        {"exp_avg_sq_codes": (64, 36), "exp_avg_sq_row": (64, 1), "exp_avg_sq_col": (1, 70)},
        {"exp_avg_sq": (4095,)},
        {"exp_avg_sq_codes": (8, 600), "exp_avg_sq_row": (8, 1), "exp_avg_sq_col": (1, 1200)},
    ]


def test_a_rules_own_matrix_goes_before_that_of_the_formats() -> None:
    adamp = harness.spec_of("adamp")
    storage = harness.plan_of("int4_factored_split24").storage(adamp.states, dtypes.bf16, False)
    assert storage.matrix == "last"
    assert matrix_of(adamp, adamp.flag_values({}, (4, 3, 3)), storage) == "first"


# -- what is refused, and what is said
@optimizer(cite="nobody", matrix="first", name="AtTimes")
def at_times(
    p, g, m=state(), v=state(nonneg), *,
    lr=hyper(1e-2, ge=0), beta=hyper(0.9, ge=0, lt=1), k=hyper(2, ge=1), now=flag(every="k")
):  # fmt: skip
    """Rows are looked at in every k-th step only."""
    m = beta * m + (1 - beta) * g
    v = beta * v + (1 - beta) * g * g
    p = p - lr * m / (sqrt(v) + (sqrt(row_mean(g * g)) if now else 0) + 1e-8)
    return p, m, v


@pytest.mark.parametrize("plan", ["int4_factored_split24", "lpmm4_factor"])
def test_rows_are_the_same_at_the_steps_that_do_not_look_at_them(plan: str) -> None:
    p = torch.nn.Parameter(torch.randn(16, 8, 8, 8).bfloat16())
    opt = compiled(at_times, plan=plan)([p], plan=plan, backend="reference")
    for _ in range(4):
        p.grad = torch.randn_like(p)
        opt.step()
        rows, columns = (opt.state[p][f"v_{name}"] for name in ("row", "col"))
        assert (rows.numel(), columns.numel()) == (16, 8 * 8 * 8)  # as the rule counts them
