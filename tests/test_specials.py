"""Infinities and NaNs through the functions that are made of bit operations, and past branches that are not taken."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import optgen
from optgen.formats import Blocked, Plan, floats, linear
from optgen.formats.format import Field, Format, Noise

from optgen.lang import (  # isort: skip
    Spec, cbrt, flag, hyper, maximum, minimum, nonneg, optimizer, power, sqrt, state, tensor_state, total,
)  # fmt: skip
from optgen.lang.values import Num, cast, clip, rint
from optgen.ops import dtypes
from optgen.ops.dtypes import DType
from optgen.runtime.cpu import native
from specs import plans
from tests import harness

# Quiet NaNs: of x86, of NVIDIA's arithmetic, with a payload, negative ones.
NANS = torch.tensor([0x7FC00000, 0x7FFFFFFF, 0x7FC12345, -0x400000, -1], dtype=torch.int32).view(torch.float32)
MODES = [("strict", "reference"), ("strict", "triton"), ("fast", "triton")]
pytestmark = pytest.mark.usefixtures("optimized")  # what a compiler may do with NaNs is to be seen

NUMBERS = torch.tensor([math.inf, -math.inf, 0.0, -0.0, 2.0**-149, 2.0**-126, 1.0, 3.0, -200.0, 200.0, 3e38])


def kept_by(
    spec: Spec, maths: str, backend: str, g: Tensor, folder: Path, steps: int = 1, **hypers: float
) -> dict[str, Tensor]:
    """Return what that many steps of one gradient keep under the plan fp32."""
    pair = harness.Pair(spec, harness.case_of(spec, harness.plan_of("fp32"), "float32"), folder, maths)
    buffers = pair.buffers(tuple(g.shape), torch.zeros_like(g))
    run = pair.run_triton if backend == "triton" else pair.run_reference
    for step in range(1, steps + 1):
        run(buffers, g, step, 1, 1, **hypers)
    return buffers


@optimizer(cite="a test")
def of_either_sign(
    p, g, rooted=state(), ninth=state(), inverse=state(), far=state(), even=state(), chosen=state(),
    *, lr=hyper(1.0), part=hyper(3.0),
):  # fmt: skip
    rooted = 0.0 * rooted + cbrt(g)
    ninth = 0.0 * ninth + g**9
    inverse = 0.0 * inverse + (g + 2.0**-20) ** -11
    far = 0.0 * far + g**65
    even = 0.0 * even + g**70.0
    chosen = 0.0 * chosen + power(g, part)
    p = p - lr * cbrt(g)
    return p, rooted, ninth, inverse, far, even, chosen


def of_a_power(x: Tensor, e: float) -> Tensor:
    """Half-ulp roundings of 2 ** (e * log2(|x|)): those of e, of the logarithm (8 of its mantissa's part, at most 1/2,
    and its own) and of the product are of the exponent, then come 6 of exp2 and one of the sign."""
    t = (e * x.abs().log2()).abs()
    return math.log(2) * (3 * t + 8 * abs(e) / 2) + 7


@pytest.mark.parametrize(("maths", "backend"), MODES)
@pytest.mark.parametrize("part", [3.0, 2.0, 1.7, -5.0])
def test_roots_and_powers_of_negative_numbers_are_those_of_the_maths(
    maths: str, backend: str, part: float, tmp_path: Path
) -> None:
    """Against NumPy's fp64: the sign of odd roots and powers, whatever their size; NaN where there is no real one."""
    torch.manual_seed(0)
    g = torch.randn(2000) * 10.0 ** (torch.rand(2000) * 1.6 - 1)
    g = g[(g.abs() > 0.3) & (g.abs() < 3.0)]  # x**70 and x**-11 stay within fp32's normal numbers
    kept = kept_by(of_either_sign, maths, backend, g, tmp_path, part=part)
    x, spread = g.double(), 8 if maths == "fast" else 1  # fast maths: 8 roundings for one (verify/intervals.py)
    shifted = (g + 2.0**-20).double()
    with np.errstate(invalid="ignore"):
        chosen = torch.from_numpy(np.power(x.numpy(), np.float64(part)))
    wanted = {
        "rooted": (torch.from_numpy(np.cbrt(x.numpy())), torch.tensor(4.0)),
        "ninth": (x**9, torch.tensor(9.0)),
        "inverse": (shifted**-11, torch.tensor(12.0)),
        "far": (x**65, of_a_power(x, 65)),
        "even": (x**70, of_a_power(x, 70)),
        "chosen": (chosen, of_a_power(x, part)),
    }
    assert torch.equal(kept["chosen"].isnan(), chosen.isnan())
    assert bool(chosen.isnan().any()) == (part == 1.7)
    for name, (exact, units) in wanted.items():
        error = (kept[name].double() - exact).abs().nan_to_num()
        assert (error <= units * spread * 2.0**-24 * (1 + 2.0**-10) * exact.abs().nan_to_num()).all(), name
    assert (kept["p"] + kept["rooted"]).abs().max() == 0


@pytest.mark.parametrize(("maths", "backend"), MODES)
def test_odd_roots_and_powers_keep_zeros_infinities_and_nans(maths: str, backend: str, tmp_path: Path) -> None:
    g = torch.cat([NANS, torch.tensor([0.0, -0.0, math.inf, -math.inf])])
    kept = kept_by(of_either_sign, maths, backend, g, tmp_path)
    for name in ("rooted", "ninth", "far", "chosen"):
        assert torch.equal(kept[name].isnan(), g.isnan()), name
        assert torch.equal(kept[name][len(NANS) :], g[len(NANS) :]), name
    assert kept["even"][len(NANS) :].tolist() == [0.0, 0.0, math.inf, math.inf]
    assert torch.equal(kept["p"][len(NANS) : -2], torch.zeros(2))


@pytest.mark.parametrize(("maths", "backend"), MODES)
def test_zero_over_zero_is_nan_in_strict_maths_and_no_step_in_fast(maths: str, backend: str, tmp_path: Path) -> None:
    """As docs/language.md says."""
    kept = kept_by(harness.spec_of("adamw"), maths, backend, torch.zeros(4), tmp_path, eps=0.0)
    assert kept["p"].isnan().all() if maths == "strict" else torch.equal(kept["p"], torch.zeros(4))


def fast_beside_strict(
    spec: Spec, plan: Plan, gradients: Sequence[Tensor], backend: str, folder: Path
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what a step for each gradient keeps: the strict reference's buffers and the fast kernel's."""
    if backend == "cpp" and native.compiler() is None:
        pytest.skip("there is no C++ compiler")
    pair = harness.Pair(spec, harness.case_of(spec, plan, "float32"), folder, "fast")
    strict, fast = (pair.buffers(tuple(gradients[0].shape), torch.zeros_like(gradients[0])) for _ in range(2))
    for step, g in enumerate(gradients, start=1):
        pair.run_reference(strict, g, step, 1, 1)
        if backend == "triton":
            pair.run_triton(fast, g, step, 1, 1)
        else:
            pair.run_cpp([(fast, g, 1)], step, 1)
    return strict, fast


@optimizer(cite="a test")
def lagged(
    p, g, prev=state(), older=state(), square=state(), scaled=state(), product=state(), around=state(), *,
    lr=hyper(1.0), beta=hyper(0.5, ge=0, lt=1)
):  # fmt: skip
    """Products of what was kept in blocks before."""
    square = beta * square + (1 - beta) * prev * prev
    scaled = g * prev * prev
    product = beta * prev * older
    around = g * prev * g
    prev, older = g, lr * g
    p = p - older
    return p, prev, older, square, scaled, product, around


@pytest.mark.parametrize("backend", ["triton", "cpp"])
@pytest.mark.parametrize(("large", "small", "now"), [(3e19, 1e18, 1e-20), (2e-24, 3e-25, 1e20), (1e19, 0.0, 1e13)])
@pytest.mark.parametrize("fmt", [Blocked(rounding="nearest"), Blocked(rounding="nearest", compander=linear)], ids=str)
def test_elements_that_are_finite_stay_so_beside_the_largest_of_their_block(
    fmt: Blocked, large: float, small: float, now: float, backend: str, tmp_path: Path
) -> None:
    """The square of the block's scale is infinite, or 0, here; what the rule makes of an element is as in strict."""
    names = ("square", "scaled", "product", "around")
    plan = Plan("a test", signed=fmt, small_numel=0, overrides=dict.fromkeys(names, floats.f32))
    first, then = torch.full((128,), small), torch.full((128,), now)
    first[::64] = large
    strict, fast = fast_beside_strict(lagged, plan, [first, then], backend, tmp_path)
    for name in names:
        assert not strict[name].isnan().any(), name
        # Each has a decoded value or two, of 4 roundings each, and three products.
        torch.testing.assert_close(fast[name], strict[name], rtol=11 * 2.0**-23, atol=2.0**-126)


@optimizer(cite="a test")
def rooted(p, g, v=state(nonneg), size=state(), *, lr=hyper(1.0)):
    """The root of what is kept as a root."""
    size = sqrt(v)
    v = g * g
    p = p - lr * g
    return p, v, size


@pytest.mark.parametrize("backend", ["triton", "cpp"])
@pytest.mark.parametrize("gradient", [1e18, 1e-18])
def test_the_root_of_a_kept_square_is_taken_without_the_square(gradient: float, backend: str, tmp_path: Path) -> None:
    """A code of 255 times its scale has a square of 65025 times the value, which leaves fp32's range first."""
    kept = plans.int8_rn_split24.nonneg
    plan = Plan("a test", nonneg=kept, small_numel=0, overrides={"size": floats.f32}, discouraged="a test")
    strict, fast = fast_beside_strict(rooted, plan, [torch.full((128,), gradient)] * 2, backend, tmp_path)
    assert (strict["size"] > 0.99 * gradient).all()
    # A scale times a code times 1/255, a square and a root of it: 5 roundings on both sides.
    torch.testing.assert_close(fast["size"], strict["size"], rtol=10 * 2.0**-23, atol=0.0)


@dataclass(frozen=True)
class ByValue(Format):
    """A format of one's own that converts by value, in the words of the language."""

    dtype: DType = dtypes.bf16

    def fields(self) -> dict[str, Field]:
        return {"": Field(self.dtype)}

    def encode(self, x: Num, *, noise: Noise | None = None, root: Num | None = None) -> dict[str, Num]:
        return {"": cast(x, self.dtype)}

    def decode(self, parts: Mapping[str, Num], *, root: Num | None = None) -> Num:
        return cast(parts[""], dtypes.f32)


@optimizer(cite="a test")
def keeping(p, g, kept=state(), *, lr=hyper(1.0)):
    kept = 0.0 * kept + g
    p = p - lr * kept
    return p, kept


@pytest.mark.parametrize("dtype", [dtypes.bf16, dtypes.f16])
def test_conversions_by_value_round_alike_on_every_backend(dtype: DType, tmp_path: Path) -> None:
    """Half to even, as PyTorch's, though compilers and Triton's interpreter each convert in a way of their own."""
    patterns = torch.arange(-70000, 70000, 7, dtype=torch.int32)
    g = torch.cat([(0x3F800000 + patterns).view(torch.float32), abs(patterns).view(torch.float32), NUMBERS])
    g = torch.cat([g, -g])
    plan = Plan("By value.", name="by_value", signed=ByValue(dtype))
    pair = harness.Pair(keeping, harness.case_of(keeping, plan, "float32"), tmp_path)
    wanted = (0.0 + g).to(getattr(torch, dtype.torch))
    found = {name: pair.buffers(tuple(g.shape), torch.zeros_like(g)) for name in ("reference", "triton", "cpp")}
    pair.run_reference(found["reference"], g, 1, 1, 1, lr=1.0)
    pair.run_triton(found["triton"], g, 1, 1, 1, lr=1.0)
    pair.run_cpp([(found["cpp"], g, 1)], 1, 1, lr=1.0)
    for name, buffers in found.items():
        assert torch.equal(buffers["kept"].view(torch.int16), wanted.view(torch.int16)), name


@optimizer(cite="a test", name="Restarted")
def restarted(
    p, g, m=state(), v=state(nonneg), *,
    lr=hyper(1e-2, ge=0), beta=hyper(0.9, ge=0, lt=1), k=hyper(2, ge=1), now=flag(every="k")
):  # fmt: skip
    """Moments that begin again at every k-th step."""
    m = beta * m + (1 - beta) * g
    v = beta * v + (1 - beta) * g * g
    p = p - lr * m / (sqrt(v) + 1e-8)
    if now:
        m = 0 * m
        v = 0 * v
    return p, m, v


@pytest.mark.parametrize("plan", ["int8_split24", "bnb8"])
def test_states_that_are_known_to_be_zero_are_stored_so(plan: str) -> None:
    """The scale of their blocks is a number then that intervals find: fast maths stores it by block all the same."""
    made = optgen.compile(restarted, plan=plan)
    stored = []
    for backend in ("triton", "reference"):
        p = torch.nn.Parameter(torch.linspace(-1, 1, 64 * 66).reshape(64, 66).bfloat16())
        opt = made([p], plan=plan, backend=backend)
        for _ in range(2):
            p.grad = torch.linspace(-2, 1, 64 * 66).reshape(64, 66).bfloat16()
            opt.step()
        stored.append({k: x for k, x in opt.state[p].items() if k.split("_")[0] in "mv"})
        (kept,) = opt.dense_state_dict()["state"].values()
        assert not kept["m"].any()  # formats of what is never negative may have no code for 0
    assert len(stored[0]) >= 2
    for name, x in stored[1].items():
        assert harness.same_bits(stored[0][name], x), name


@dataclass(frozen=True)
class Counts(ByValue):
    """Whole numbers from 0 to 100, stored with an odd bias."""

    def fields(self) -> dict[str, Field]:
        return {"": Field(dtypes.u8, zero=1)}

    def encode(self, x: Num, *, noise: Noise | None = None, root: Num | None = None) -> dict[str, Num]:
        return {"": cast(cast(rint(clip(x, 0.0, 100.0)), dtypes.i32) + 1, dtypes.u8)}

    def decode(self, parts: Mapping[str, Num], *, root: Num | None = None) -> Num:
        return cast(cast(parts[""], dtypes.i32) - 1, dtypes.f32)


def test_ties_go_to_even_numbers_before_an_odd_bias_is_added(tmp_path: Path) -> None:
    """Fast maths may round and add in one where that keeps which numbers are even."""
    plan, g = Plan("a test", name="counts", signed=Counts(), small_numel=0), torch.arange(64) / 2
    _, found = fast_beside_strict(keeping, plan, [g], "triton", tmp_path)
    assert torch.equal(found["kept_codes"], g.round().to(torch.uint8) + 1)


@optimizer(cite="a test")
def shifted(p, g, kept=state(), *, lr=hyper(0.5, ge=0), scale=hyper(1.0, ge=0), shift=hyper(-2.0)):
    kept = 0.5 * kept + g
    p = p - lr * kept / (scale * (kept * kept) + shift)
    return p, kept


@pytest.mark.parametrize(("shift", "scale"), [(-2.0, 1.0), (-0.25, 1.0), (0.5, 1.0), (0.5, 0.0)])
def test_a_number_that_may_be_negative_or_0_stays_in_its_denominator(
    shift: float, scale: float, tmp_path: Path
) -> None:
    """A rate that moves into the denominator divides what is added there, which counts as 2^-126 where it is 0; a
    factor that moves out of it divides the rest."""
    g = torch.linspace(-3, 3, 64)
    found = kept_by(shifted, "fast", "triton", g, tmp_path, shift=shift, scale=scale)
    exact = -0.5 * g.double() / (scale * g.double().square() + shift)
    torch.testing.assert_close(found["p"].double(), exact, rtol=1e-5, atol=0.0)


# -- zeros of both signs
@optimizer()
def negative_part(p, g, below=state(nonneg), *, lr=hyper(1e-3, ge=0)):
    """Keeps the size of the negative part of the gradient: -0 where that is 0."""
    below = -minimum(g, 0.0)
    p = p - lr * below
    return p, below


def test_minus_zero_decodes_as_the_smallest(tmp_path: Path) -> None:
    pair = harness.Pair(negative_part, harness.case_of(negative_part, plans.int8_split24, "float32"), tmp_path)
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
