"""Ways of stepping on a pretended device (tests/ptx/pretended.py), in a process that tests/test_pretended.py starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optgen import optim
from tests.harness import same_bits
from tests.ptx import pretended
from tools.bench.race import _HandOver

SHAPES, STEPS = ((48, 80), (5, 70)), 4


def made(name: str, device: str, **options: Any) -> tuple[list[nn.Parameter], Any]:
    draw, plan = torch.Generator().manual_seed(0), "fp32" if name == "Prodigy" else "int8_split24"
    dtype = torch.float32 if plan == "fp32" else torch.bfloat16
    params = [nn.Parameter(torch.randn(s, generator=draw).to(device, dtype)) for s in SHAPES]
    named = [(f"tensor{k}", p) for k, p in enumerate(params)]
    return params, getattr(optim, name)(named, plan=plan, backend="triton", seed=1, **options)


def stepped(
    name: str, device: str = "cuda:0", around: Callable[[int], Any] = lambda step: nullcontext(),
    step_of: Callable[[Any, Sequence[Tensor], Sequence[Tensor]], None] | None = None, **options: Any,
) -> list[Tensor]:  # fmt: skip
    """Return what steps store; from the third one on the host waits for nothing.

    around   the context of a step
    step_of  makes a step of (optimizer, parameters, gradients)
    """
    params, opt = made(name, device, **options)
    if step_of is handed:
        opt.release_gradients()
    pretended.launches.clear()
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(100 + step)
        grads = [torch.randn(p.shape, generator=draw).to(device, p.dtype) for p in params]
        pretended.waits.clear()
        with around(step):
            (step_of or usual)(opt, params, grads)
        assert step < 2 or not pretended.waits, pretended.waits
    assert {where for _, where, _ in pretended.launches} == {torch.device(device).index} and not pretended.errors
    kept = [v for p in params for v in opt.state[p].values() if isinstance(v, Tensor) and v.ndim]
    return [x.detach().cpu() for x in (*params, *kept)]


def usual(opt: Any, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    opt.step()


def handed(opt: Any, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Step within the backward pass that makes the gradients."""
    _HandOver.apply(grads, *params).backward()


def scaled(opt: Any, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Step as under GradScaler, which leaves a scale and what it found on the device."""
    opt.grad_scale, opt.found_inf = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
    usual(opt, params, grads)
    del opt.grad_scale, opt.found_inf


@pytest.mark.parametrize("name", ["AdamW", "Lion", "SGD", "CAME", "LAMB", "Adafactor", "SM3", "Prodigy", "Muon"])
def test_every_way_of_stepping_has_the_same_bits(name: str) -> None:
    first = stepped(name)

    def same(**how: Any) -> None:
        assert all(same_bits(a, b) for a, b in zip(first, stepped(name, **how), strict=True)), how

    same(device="cuda:1")  # while the other one is current
    stream = pretended.Stream()
    same(around=lambda step: torch.cuda.stream(stream) if step == 1 else nullcontext())
    assert stream.cuda_stream in {s for _, _, s in pretended.launches} and 0 in {s for _, _, s in pretended.launches}
    same(around=lambda step: pretended.capturing() if step == STEPS - 1 else nullcontext(), capturable=True)
    same(step_of=scaled, fused=True)
    if name != "Prodigy":  # its sums are over the whole model
        same(step_of=handed)


def test_what_cuda_refuses_is_refused() -> None:
    here, there, host = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1"), torch.ones(3)
    for other in (there, host):
        with pytest.raises(RuntimeError, match="add: tensors on"):
            torch.add(here, other)
    for call in (here.sum().item, here.cpu, lambda: here.copy_(host)):
        with pytest.raises(RuntimeError, match="stream is capturing"), pretended.capturing():
            call()
    assert (here + here).device == torch.device("cuda:0") and here.reshape(3, 1).T.is_cuda
