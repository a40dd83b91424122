"""Weights that other code changes between steps: the next step starts from half a place beside the new value, at most.

Low bits are then foreign to the weight: every pair of a high and a low part must decode to a number beside the high.
The oracle of a step is a copy of the optimizer that was told the new weight (`load_master_state_dict`).
"""

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optgen.optim
from optgen.formats import Split
from optgen.ops.dtypes import DType, bf16, f16

EDITS: dict[str, Callable[[nn.Parameter, Tensor], Any]] = {
    "zero": lambda p, at: p.masked_fill_(at, 0.0),
    "mask": lambda p, at: p.mul_(~at),  # makes -0 of negative weights
    "negative zero": lambda p, at: p.masked_fill_(at, -0.0),
    "subnormal": lambda p, at: p.masked_fill_(at, -1e-40 if p.dtype == torch.bfloat16 else 3e-7),
    "clamp": lambda p, at: p.clamp_(0.0, 0.5),
    "scale": lambda p, at: p.mul_(-0.37),
    "copy": lambda p, at: p.copy_(torch.where(at, 0.0, p.float() * 3 + 1e-3)),
    "data": lambda p, at: setattr(p, "data", torch.where(at, 0.0, -p).to(p.dtype)),
}
RULES = ("AdamW", "Adafactor", "LAMB", "Lion", "SGD")
PLANS = ("int8_split24", "int8_rn_split24", "split32", "flashoptim", "bf16", "bf16_sr")


def half_place(p: Tensor) -> Tensor:
    """Half of the last place of 16-bit weights, as fp64."""
    mantissa, smallest = (7, -126) if p.dtype == torch.bfloat16 else (10, -14)
    _, exponent = torch.frexp(p.double())
    return torch.exp2((exponent - 1).clamp(min=smallest).double() - mantissa - 1)


@pytest.mark.parametrize("param", [bf16, f16], ids=str)
@pytest.mark.parametrize("bits", [8, 16])
def test_every_low_part_fits_every_weight(bits: int, param: DType) -> None:
    """Under 8 bits all pairs, under 16 the ends and a stride of the low part."""
    dtype = torch.bfloat16 if param is bf16 else torch.float16
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    high = high[high.isfinite()]
    lows = range(256) if bits == 8 else (-(2**15), -(2**15) + 1, -1, 0, 1, 2**15 - 1, *range(-(2**15), 2**15, 997))
    for low in lows:
        stored = torch.full(high.shape, low, dtype=torch.uint8 if bits == 8 else torch.int16)
        got = Split(bits).decode({"": high, "low": stored}, param)  # type: ignore[arg-type,dict-item]
        assert ((got.double() - high.double()).abs() <= half_place(high)).all(), low


def settled(rule: str, plan: str, dtype: torch.dtype, backend: str, seed: int) -> tuple[nn.Module, Any]:
    """Return a matrix whose low bits are those of two steps, and its optimizer."""
    torch.manual_seed(seed)
    model = nn.Linear(64, 66 if backend != "triton" else 4, bias=False).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of plans that exist for comparison
        opt = getattr(optgen.optim, rule)(model.named_parameters(), lr=1e-2, plan=plan, backend=backend)
    for _ in range(2):
        model.weight.grad = torch.randn(model.weight.shape).to(dtype)
        opt.step()
    return model, opt


def check(rule: str, plan: str, dtype: torch.dtype, backend: str, edit: str, seed: int) -> None:
    model, opt = settled(rule, plan, dtype, backend, seed)
    p = model.weight
    at = torch.rand(p.shape) < 0.3
    with torch.no_grad():
        EDITS[edit](p, at)
    new = p.detach().clone()
    told, oracle = copy.deepcopy((model, opt))
    oracle.load_master_state_dict(told, told.state_dict())
    started = opt.full_weights()[0]
    assert ((started.double() - new.double()).abs() <= half_place(new)).all()
    gradient = torch.randn(p.shape).to(dtype)
    for each, one in ((model, opt), (told, oracle)):
        each.weight.grad = gradient.clone()
        one.step()
    got, wanted = opt.full_weights()[0].double(), oracle.full_weights()[0].double()
    moved = (wanted - new.double()).abs()
    # Steps that have the norm of all weights as a factor follow it: weights are off by a half of 2^-7 (bf16) at most.
    # What is stored once more is off by a place of what is kept: less than the weight's own.
    stored = 2 * half_place(torch.maximum(got.abs(), wanted.abs()).to(dtype)) if plan in ("bf16", "bf16_sr") else 0
    bound = half_place(new) + moved * 2.0**-7 + wanted.abs() * 2.0**-14 + stored
    assert ((got - wanted).abs() <= bound).all()


def drawn(backend: str, count: int) -> list[tuple[str, str, torch.dtype, str, str, int]]:
    """Draw cells such that each edit occurs, and each rule, plan and dtype where there are enough of them."""
    draw = random.Random(backend)
    columns = [RULES, PLANS, (torch.bfloat16, torch.bfloat16, torch.float16), tuple(EDITS)]
    rule, plan, dtype, edit = ([x for _ in range(count) for x in draw.sample(of, len(of))] for of in columns)
    return [(rule[i], plan[i], dtype[i], backend, edit[i], i) for i in range(count)]


@pytest.mark.parametrize("cell", drawn("reference", 40), ids=lambda c: "-".join(map(str, c)))
def test_a_step_starts_from_the_edited_weight(cell: tuple[Any, ...]) -> None:
    check(*cell)


@pytest.mark.parametrize("rule", RULES)
def test_a_copy_does_not_start_from_the_edited_weight(rule: str) -> None:
    """The copy of fp32_master loses the edit."""
    model, opt = settled(rule, "fp32_master", torch.bfloat16, "reference", 0)
    other, oracle = copy.deepcopy((model, opt))
    with torch.no_grad():
        model.weight.mul_(-4.0)
    gradient = torch.randn(model.weight.shape).bfloat16()
    for each, one in ((model, opt), (other, oracle)):
        each.weight.grad = gradient.clone()
        one.step()
    assert torch.equal(opt.full_weights()[0], oracle.full_weights()[0])


@pytest.mark.parametrize("edit", ["zero", "mask"])
@pytest.mark.parametrize("plan", ["int8_split24", "split32"])
@pytest.mark.parametrize("backend", ["cpp", "triton"])
def test_kernels_start_from_the_edited_weight(backend: str, plan: str, edit: str) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    check("SGD", plan, torch.bfloat16, backend, edit, 0)
