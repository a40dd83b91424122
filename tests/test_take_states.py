"""States of AdamW that another rule goes on with."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import optgen
from optgen.optim import SOAP, AdamW, Lion, Muon, SOAPMuon

SHAPES = ((24, 16), (16,))
OPTIONS = {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def stepped(opt: Any, steps: int, seed: int = 0) -> None:
    made = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for group in opt.param_groups:
            for p in group["params"]:
                p.grad = torch.randn(p.shape, generator=made).to(p.dtype)
        opt.step()


def weights(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    made = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, generator=made).to(dtype)) for shape in SHAPES]


@pytest.mark.parametrize(
    ("cls", "groups", "anew"),
    [
        (Muon, {"adamw_lr": 2e-3, "adamw_betas": (0.9, 0.95), "weight_decay": 0.1}, []),
        (SOAP, {"lr": 2e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}, [0]),
        (SOAPMuon, {"adamw_lr": 2e-3, "adamw_betas": (0.9, 0.95), "weight_decay": 0.1, "lookahead": 0.0}, [0]),
    ],
)
def test_vectors_go_on_as_under_adamw(cls: Any, groups: dict[str, Any], anew: list[int]) -> None:
    """The oracle is torch's AdamW going on."""
    ours, theirs = weights(), weights()
    old, oracle = torch.optim.AdamW(ours, **OPTIONS), torch.optim.AdamW(theirs, **OPTIONS)
    stepped(old, 3)
    stepped(oracle, 3)
    new = cls(ours, plan="fp32", **groups)
    if anew:
        with pytest.warns(UserWarning, match="anew"):
            assert optgen.take_states(new, old) == anew
    else:
        assert optgen.take_states(new, old) == anew
        assert torch.equal(new.state[ours[0]]["momentum_buffer"], old.state[ours[0]]["exp_avg"])
    stepped(new, 3, seed=2)
    stepped(oracle, 3, seed=2)
    # Each text rounds the weight twice a step, to half an ulp; the roundings of lr times the update add less than one.
    assert (ours[1] - theirs[1]).abs().max() <= (2 * 2 * 3 + 1) * 2**-24 * ours[1].abs().max()


def test_low_bits_of_weights_stay() -> None:
    ps = weights(torch.bfloat16)
    old = AdamW(ps, plan="int8_split24")
    stepped(old, 3)
    full = [x.clone() for x in old.full_weights()]
    new = Muon(ps, plan="int8_split24")
    assert optgen.take_states(new, old) == []
    for x, y, p in zip(new.full_weights(), full, ps, strict=True):
        assert torch.equal(x, y), p.shape


@pytest.mark.parametrize(
    ("made", "error", "words"),
    [
        (lambda ps: (Muon(ps), Lion(ps)), ValueError, "expected AdamW or Adam without amsgrad, got Lion"),
        (lambda ps: (torch.optim.SGD(ps), AdamW(ps)), TypeError, "expected an optimizer of optgen, got SGD"),
    ],
)
def test_others_are_refused(made: Callable[[Any], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        optgen.take_states(*made(weights()))


@pytest.mark.parametrize("plan", ["fp32", "int8_split24"])
def test_the_refusal_of_its_checkpoint_names_the_function(plan: str) -> None:
    old = AdamW(weights(), plan=plan)
    stepped(old, 1)
    with pytest.raises(ValueError, match=r"Muon\.load_state_dict: .*\(optgen\.take_states\(new, old\) goes on"):
        Muon(weights(), plan="fp32").load_state_dict(old.state_dict())
