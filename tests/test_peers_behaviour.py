"""Questions of the suites of FlashOptim, torchao.optim, bitsandbytes and optimi, and of users in issues, as far as they
concern a claim of this project and are not asked in a test of its own subject."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optgen
import optgen.optim as optim
from optgen.optim import AdamW
from optgen.runtime import Optimizer
from tests.harness import sampled


def gradients(shape: tuple[int, ...], steps: int, scale: float = 1.0) -> list[Tensor]:
    source = torch.Generator().manual_seed(11)
    return [torch.randn(shape, generator=source) * scale for _ in range(steps)]


def stepped(opt: Optimizer, p: nn.Parameter, grads: list[Tensor]) -> None:
    for g in grads:
        p.grad = g.to(p.dtype)
        opt.step()


def tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}


# -- what is kept ------------------------------------------------------------------------------------------------
SHAPES: list[tuple[int, ...]] = [
    (4095,), (4096,), (4097,), (63, 65), (64, 64), (65, 64), (1, 4097), (4097, 1), (2, 1, 2048), (0,), (0, 7), (), (1,),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_states_are_quantized_from_4096_elements_on_and_take_the_bytes_that_are_promised(
    shape: tuple[int, ...],
) -> None:
    """bitsandbytes' min_8bit_size and torchao's default: smaller tensors keep fp32 states."""
    p = nn.Parameter(torch.ones(shape, dtype=torch.bfloat16))
    opt = AdamW([("p", p)], plan="int8_split24")
    stepped(opt, p, gradients(shape, 2))
    kept = tensors(opt.state[p])
    large = p.numel() >= 4096
    codes = "_codes" if large else ""
    assert kept[f"exp_avg{codes}"].dtype is (torch.uint8 if large else torch.float32)
    assert kept[f"exp_avg_sq{codes}"].dtype is (torch.uint8 if large else torch.float32)
    assert kept[f"exp_avg{codes}"].shape == p.shape and kept["weight_low"].dtype is torch.uint8
    (found,) = opt.memory().parameters
    assert found.states == {key: value.numel() * value.element_size() for key, value in kept.items()}
    rows, columns = (shape[0], p.numel() // max(shape[0], 1)) if len(shape) > 1 else (1, p.numel())
    if large:  # one scale of 16 bits for 64 elements of a row, two numbers for the nonnegative state
        blocks = rows * -(-columns // 64)
        assert sum(found.states.values()) == 3 * p.numel() + 4 * blocks
    assert torch.isfinite(p).all()


# -- what a step does --------------------------------------------------------------------------------------------
def test_more_bits_of_the_weight_follow_fp32_more_closely() -> None:
    """FlashOptim: error correction increases precision.  With states in fp32, and without decay, updates are those of
    fp32, so what differs is only how weights are stored: at most one place of 24 bits (2^-15 of the weight) a step."""
    steps = 60
    start = torch.linspace(1, 2, 64 * 80).reshape(64, 80)
    grads = [g.bfloat16() for g in gradients((64, 80), steps)]

    def trained(plan: str, overrides: dict[Any, str] | None = None) -> Tensor:
        p = nn.Parameter(start.clone())
        p.grad_dtype = None  # gradients of any dtype
        model = nn.ParameterDict({"p": p})
        if plan != "fp32":
            optgen.cast_model(model, torch.bfloat16)
        opt = AdamW([("p", p)], lr=2e-4, weight_decay=0.0, plan=plan, overrides=overrides)
        for g in grads:
            p.grad = g.clone()
            opt.step()
        return opt.full_weights()[0]

    exact = trained("fp32")
    error = {plan: (trained(plan) - exact).abs() for plan in ("fp32_master", "bf16")}
    error["split24"] = (trained("int8_split24", {"p": "fp32"}) - exact).abs()
    assert error["fp32_master"].max() == 0
    assert 0 < error["split24"].max() <= (steps + 1) * 2.0**-15 * exact.max()
    # On average far less: independent errors with a deviation of at most half a place each.  bf16 shows 8 bits at best.
    assert error["split24"].mean() < (steps + 1) ** 0.5 * 2.0**-15 / 2 < 2.0**-7 / 8 < error["bf16"].mean()


# -- arguments ---------------------------------------------------------------------------------------------------
ACTIVE: dict[str, dict[str, Any]] = {
    "A2Grad": {"exponential": True},
    "AdaShift": {"keep_num": 2},
    "Sophia": {"eps": 1.0},
    **{name: {"momentum": 0.5} for name in ("SGD", "SGDW", "OrthoGrad")},
    **{name: {"warmup_steps": 9.0} for name in ("ScheduleFreeAdamW", "ScheduleFreeSGD")},
    "Amos": {"lr": 0.5},
    "KourkoutasBeta": {"amsgrad": True},
    "Adai": {"dampened": True},
    "LaProp": {"centered": True, "steps_before_using_centered": 3.0, "betas": (0.9, 0.5)},
    "StableSPAM": {"total_T": 9.0},
    "FSGDM": {"n_stages": 20, "sigma": 60},
    "DAdaptSGD": {"weight_decay": 3.0},
    "DAdaptAdaGrad": {"weight_decay": 3.0},
    "DAdaptAdan": {"lr": 100.0, "betas": (0.98, 0.92, 0.9), "eps": 1.0},
    "DAdaptLion": {"d0": 1.0},
    "FAdam": {"eps": 1.0},
    "Prodigy": {"lr": 0.5, "d_coef": 100.0},
    "SimplifiedAdEMAMix": {"beta1_warmup": 9.0},
    "SPAM": {"update_proj_gap": 4, "grad_accu_steps": 1.0, "threshold": 1.0},
    "AdafactorPaper": {"lr": 1.0},
    "ASGD": {"lr": 0.5, "lambd": 0.1},
    "Shampoo": {"precondition_frequency": 3},
}
"""The settings without which other arguments of a rule do nothing: no dampening without a momentum, no safeguard
against a rate that is 1, nor before the estimate has grown, no relative step while lr is less, no power
of ASGD's rate while lr * lambd is small, no factors before the first roots, no limit of an estimate that
stays.  Every rule that can decay weights does."""


def outcome(cls: Any, options: dict[str, Any]) -> Tensor | None:
    """All weights after some steps, of which one has a large gradient, and those to evaluate; None for options out of
    their range."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(12, 10))]
    if any(flag.shape is not None for flag in cls.FLAGS):
        params.append(nn.Parameter(torch.randn(7)))
    source = torch.Generator().manual_seed(1)
    try:
        opt = cls(params, plan="fp32", **options)
        for k in range(6):
            for p in params:
                p.grad = torch.randn(p.shape, generator=source) * (4.0 if k == 2 else 1.0)
            opt.feed(**{x: [1e4 * torch.rand(p.shape, generator=source) for p in params] for x in cls.INPUTS})
            opt.step()
    except ValueError:
        return None
    trained = [p.detach().flatten().clone() for p in params]
    opt.eval()
    return torch.cat([*trained, *(p.detach().flatten() for p in params)])


def others(value: Any) -> Iterator[Any]:
    if isinstance(value, (bool, str)):
        yield "cubic" if isinstance(value, str) else not value
        return
    if isinstance(value, tuple):  # a round of a series
        yield tuple(x * 0.5 for x in value)
        return
    yield from (x for x in (value * 0.5, 0.1, 2.0, value * 3 + 1, -1.0, 3e-3, 100.0) if x != value)


@pytest.mark.parametrize("name", sampled("arguments", dir(optim)))
def test_no_argument_is_without_effect(name: str) -> None:
    """bitsandbytes took max_unorm, amsgrad and optim_bits of some optimizers, and used none of them."""
    cls = getattr(optim, name)
    base = {h.name: h.default or 0.1 for h in cls.HYPERS if h.name == "weight_decay"} | ACTIVE.get(name, {})
    usual = outcome(cls, base)
    assert usual is not None
    for hyper in cls.HYPERS:
        # What has no rank is kept beside it, in fp32 all of it.  No step reads ASGD's average.
        if (name, hyper.name) in (("LowRankMuon", "rank"), ("ASGD", "t0")):
            continue
        given = base.get(hyper.name, hyper.default)
        parts = given if isinstance(given, tuple) else (given,)
        for i, part in enumerate(parts):
            for value in others(part):
                new = tuple(value if j == i else x for j, x in enumerate(parts)) if isinstance(given, tuple) else value
                found = outcome(cls, {**base, hyper.name: new})
                if found is not None and not torch.equal(found, usual):
                    break
            else:
                pytest.fail(f"{name}: {hyper.name}[{i}] changes nothing")
    for flag in cls.FLAGS:
        if not flag.derived and (name, flag.name) != ("AdamC", "normalized"):  # which shows under a schedule
            found = outcome(cls, {**base, flag.name: not base.get(flag.name, flag.default)})
            assert found is not None and not torch.equal(found, usual), flag.name
