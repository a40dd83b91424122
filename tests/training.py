"""Training as many tests need it: gradients drawn by number, and all that an optimizer holds as bits."""

from __future__ import annotations

import functools
import io
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optgen

from optgen.lang import (  # isort: skip
    hyper, low_rank_state, normal, optimizer, shape_flag, unwide, wide, zero_product,
)  # fmt: skip
from optgen.runtime import Optimizer
from optgen.runtime.step import plan
from tests import harness

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def parameters(
    shapes: Iterable[Sequence[int]], dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[nn.Parameter]:
    """Draw parameters of these shapes."""
    draw = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(tuple(shape), generator=draw).to(dtype)) for shape in shapes]


def params_of(opt: torch.optim.Optimizer) -> list[nn.Parameter]:
    """List the parameters of all groups."""
    return [p for group in opt.param_groups for p in group["params"]]


def copies(opt: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Make parameters of the same values."""
    return [nn.Parameter(p.detach().clone()) for p in params_of(opt)]


def give(params: Iterable[nn.Parameter], step: int, scale: float = 1.0) -> None:
    """Draw the gradients of a step, for all but frozen parameters."""
    for i, p in enumerate(params):
        if not p.requires_grad:
            continue
        draw = torch.Generator().manual_seed(100 * step + i)
        p.grad = (torch.randn(p.shape, generator=draw) * scale).to(p.dtype)


def give_in_place(params: Iterable[nn.Parameter], step: int, scale: float = 1.0) -> None:
    """Draw the gradients of a step into the memory that is there, as CUDA graphs need it."""
    draw = torch.Generator().manual_seed(100 + step)
    for p in params:
        g = torch.randn(p.shape, generator=draw).to(p.dtype) * scale
        if p.grad is None or p.grad.dtype != p.dtype:
            p.grad = g
        else:
            p.grad.copy_(g)


def train(opt: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    """Make the steps of these numbers."""
    for step in steps:
        give(params_of(opt), step)
        opt.step()


def trained(
    cls: Any, backend: str, shapes: Iterable[Sequence[int]], dtype: torch.dtype = torch.float32, *, steps: int = 3,
    seed: int = 5, sizes: tuple[int, int] = (-6, 3), grad: torch.dtype | None = None, odd: float | None = None,
    fed: Sequence[str] = (), **options: Any,
) -> Any:  # fmt: skip
    """Return an optimizer of drawn parameters after some steps.

    sizes  exponents of 10 of the gradients' sizes, from and below which they are drawn
    odd    a number that stands in the middle of the last gradients
    fed    inputs that are fed at each step
    """
    draw = torch.Generator().manual_seed(seed)
    params = [nn.Parameter(torch.randn(tuple(shape), generator=draw).to(dtype)) for shape in shapes]
    opt = cls(params, backend=backend, **options)
    for step in range(steps):
        for p in params:
            if grad:
                p.grad_dtype = None
            size = 10.0 ** float(torch.randint(*sizes, (), generator=draw))
            p.grad = (torch.randn(p.shape, generator=draw) * size).to(dtype).to(grad or dtype)
            if step == steps - 1 and odd is not None and p.numel():
                p.grad.view(-1)[p.numel() // 2] = odd
        if fed:
            opt.feed(**{name: [torch.rand(p.shape, generator=draw) for p in params] for name in fed})
        harness.make_step(opt)
    return opt


def different(ours: Any, theirs: Any, exact: bool = False) -> list[str]:
    """Name what two optimizers keep with other bits; a NaN is a NaN, unless `exact`."""
    found, same = [], (lambda x, y: bits(x) == bits(y)) if exact else harness.same
    for p, q in zip(params_of(ours), params_of(theirs), strict=True):
        a, b = {"p": p.detach(), **ours.state[p]}, {"p": q.detach(), **theirs.state[q]}
        assert a.keys() == b.keys()
        found += [f"{name} of {list(p.shape)}" for name in a if not same(a[name], b[name])]
    return found


def has_plan(opt: Any) -> bool:
    """Return True if an optimizer has kept the plan of a step."""
    return bool(opt._stepper.plans.kept)


def keep_no_plan(opt: Any) -> None:
    """Let an optimizer plan each step anew."""
    opt._stepper.plans.keep = lambda *_: None


def planned_steps(patch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that gets, for each step of an optimizer with a plan, whether it was made by one that was kept."""
    found, find = list[bool](), plan.Plans.find

    def note(self: Any, *given: Any) -> Any:
        kept, made = bool(self.kept), find(self, *given)
        found.extend([made is not None] * kept)
        return made

    patch.setattr(plan.Plans, "find", note)
    return found


def bits(value: Any) -> Any:
    """Return a form of a tensor, a number or any nest of them whose == means the same bits."""
    if isinstance(value, Tensor):
        flat = value.detach().contiguous().reshape(-1)
        return value.dtype, tuple(value.shape), flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    if isinstance(value, dict):
        return {key: bits(part) for key, part in value.items()}
    return [bits(part) for part in value] if isinstance(value, (list, tuple)) else value


def alike(a: Any, b: Any) -> bool:
    """Return True for the same bits."""
    return bool(bits(a) == bits(b))


def everything(opt: Any, model: nn.Module | None = None) -> Any:
    """Return the bits of parameters, states and groups; of a model also its buffers and what waits beside weights."""
    beside = [] if model is None else [model.state_dict(), [vars(p) for p in model.parameters()]]
    return bits([params_of(opt), opt.state_dict(), *beside])


def states(opt: Any) -> Any:
    """Return the bits of the states, in the order of the parameters."""
    return bits([opt.state.get(p, {}) for p in params_of(opt)])


@functools.cache
def nadam() -> type[Any]:
    """Return a rule with a number of the host's among its states, in strict maths: all backends give the same bits."""
    return optgen.compile("nadam", "fp32", maths="strict")


def through_file(value: Any, weights_only: bool = True) -> Any:
    """Save and load."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def same(a: nn.Module, b: nn.Module, opt_a: Optimizer, opt_b: Optimizer) -> None:
    """Assert that two models have the same weights and states, bit for bit."""
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert bits(p) == bits(q), name
        kept, other = bits(opt_a.state.get(p, {})), bits(opt_b.state.get(q, {}))
        assert kept.keys() == other.keys(), name
        assert kept == other, (name, [key for key in kept if kept[key] != other[key]])


@optimizer(cite="nobody", matrix="heads")
def sketched(
    p, g, t,
    low=low_rank_state("long", rank="rank", when="is_matrix"),
    *,
    lr=hyper(1.0, ge=0),
    rank=hyper(4, ge=1, whole=True),
    is_matrix=shape_flag(lambda shape: len(shape) >= 2),
):  # fmt: skip
    if not is_matrix:
        p = p - lr * g
        return p, low
    full = wide(g)
    sketch = normal(zero_product(full, low.T), t)
    low = low + sketch.T @ full + normal(low, t + 7)
    p = p - lr * unwide(g, sketch @ low)
    return p, low
