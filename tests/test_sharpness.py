"""Sharpness-aware steps around an optimizer, beside another package's."""

from typing import Any

import pytest
import pytorch_optimizer
import torch

from generated import AdamW
from optgen import SAM
from tests.harness import same_bits


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).double()


def closure_of(net: torch.nn.Module, opt: Any, t: int) -> Any:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(t), dtype=torch.float64)

    @torch.enable_grad()
    def closure() -> Any:
        opt.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("options", [{}, {"adaptive": True}, {"alpha": 0.3}], ids=str)
def test_steps_are_those_of_another_package(options: dict[str, Any]) -> None:
    """In fp64, but for their norms, which are in fp32: each moves weights by 2^-24 of rho or so."""
    ours, theirs = model(), model()
    base = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
    sam = SAM(base, rho=0.1, **options)
    if "alpha" in options:
        inner = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
        rho = type("Rho", (), {"step": lambda self: 0.1})()
        other = pytorch_optimizer.GSAM(theirs.parameters(), inner, theirs, rho, **options)
    else:
        other = pytorch_optimizer.SAM(theirs.parameters(), torch.optim.SGD, rho=0.1, lr=0.1, momentum=0.9, **options)
    for t in range(10):
        loss = sam.step(closure_of(ours, base, t))
        closure = closure_of(theirs, other, t)
        if "alpha" in options:
            other.step(lambda closure=closure: (None, closure()))
        else:
            first = closure()
            assert float(loss.detach()) == pytest.approx(float(first.detach()), rel=2.0**-20)
            other.step(closure)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2.0**-20, atol=0.1 * 2.0**-20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    """With the same gradient at moved weights the step is the optimizer's own."""
    start = torch.randn(40, 130, generator=torch.Generator().manual_seed(1)).to(dtype)
    p, q = (torch.nn.Parameter(start.clone()) for _ in range(2))
    plain, inner = (AdamW([("w", x)], lr=0.1, plan="int8_split24") for x in (p, q))
    sam = SAM(inner, rho=30.0)
    for t in range(3):
        g = torch.randn(40, 130, generator=torch.Generator().manual_seed(t)).to(dtype)
        p.grad, q.grad = g.clone(), g.clone()
        plain.step()
        before = q.detach().clone()
        sam.first_step()
        assert q.grad is None and (q != before).float().mean() > 0.5
        q.grad = g.clone()
        sam.second_step()
        assert same_bits(p.detach(), q.detach())


def test_steps_out_of_order_and_released_gradients_are_refused() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    opt = AdamW([p])
    sam = SAM(opt)
    with pytest.raises(RuntimeError, match="second_step"):
        sam.second_step()
    p.grad = torch.ones(3)
    sam.first_step()
    for step in (opt.step, sam.first_step):
        with pytest.raises(RuntimeError, match="the weights are moved"):
            step()
    p.grad = torch.ones(3)
    sam.second_step()
    handle = opt.release_gradients()
    with pytest.raises(RuntimeError, match="released"):
        sam.first_step()
    handle.remove()
    with pytest.raises(ValueError, match="rho"):
        SAM(opt, rho=-1.0)
