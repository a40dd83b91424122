"""Launches in Triton's interpreter; run as a script with TRITON_INTERPRET=1, prints "ok" after each check."""

from __future__ import annotations

import math

import pytest
import torch

from optgen.runtime.records import keys
from optgen.runtime.step import launch
from runtime_standin import AdamW

SHAPES = [
    (),
    (1,),
    (31,),
    (32,),
    (33,),
    (127,),
    (128,),
    (129,),
    (0,),
    (3, 0),
    (5, 8),
    (5, 7),
    (3, 9),
    (7, 1),
    (2, 3, 5),
    (40, 17),
]


def parameter(shape: tuple[int, ...], unaligned: bool = False) -> torch.nn.Parameter:
    values = torch.randn(math.prod(shape) + 4)
    return torch.nn.Parameter(values[1 if unaligned else 0 :][: math.prod(shape)].view(shape))


def every_element_once() -> None:
    """Flat, ragged, aligned, unaligned: each element and block is visited once per step, with its own key."""
    params = [parameter(shape, unaligned) for shape in SHAPES for unaligned in (False, True)]
    start = [p.detach().clone() for p in params]
    opt = AdamW([(f"p{i}", p) for i, p in enumerate(params)], plan="probe", backend="triton")
    for p in params:
        p.grad = torch.ones(p.shape)
    versions = [p._version for p in params]
    for step in (1, 2):
        opt.step()
        for i, (p, first) in enumerate(zip(params, start, strict=True)):
            state = opt.state[p]
            assert state["step"] == step
            assert (state["visits"] == step).all(), (i, p.shape)
            assert (state["seen"] == step).all(), (i, p.shape)
            assert (state["stream"] == keys.stream_key(f"p{i}")).all()
            assert torch.equal(p, first + 1 + 1 if step == 2 else first + 1)
            assert torch.equal(state["x0"], first)
    parts = [part for tables in opt._stepper.launcher._used.values() for part in tables.launches]
    assert {(part.aligned, part.ragged) for part in parts} == {(a, r) for a in (False, True) for r in (False, True)}
    for part in parts:
        assert ((part.table[:, :-6] % 16 == 0).all(dim=1) == part.aligned).all()
        assert ((part.table[:, -5] % 8 != 0) & (part.table[:, -5] != part.table[:, -6]) == part.ragged).all()
    assert all(p._version > v for p, v in zip(params, versions, strict=True) if p.numel())


def strides_and_dtypes() -> None:
    """Layouts of memory and gradient dtypes change nothing; gradients stay as they are."""
    logical = torch.randn(2, 6, 4, 4)
    grad = torch.randn(2, 6, 4, 4).bfloat16()
    made = []
    for layout in range(5):
        p, g = logical.clone(), grad.clone()
        if layout == 1:
            p = p.to(memory_format=torch.channels_last)
        if layout == 2:
            g = g.to(memory_format=torch.channels_last)
        if layout == 3:
            p = torch.stack([p, p], dim=-1)[..., 0]
        if layout == 4:
            g = g.float().transpose(0, 1).contiguous().transpose(0, 1).double()
        p = torch.nn.Parameter(p)
        p.grad_dtype = None
        p.grad = g
        stride, version, before = p.stride(), p.grad._version, p.grad.clone()
        opt = AdamW([p], plan="probe", backend="triton")
        opt.step()
        assert p.stride() == stride
        assert p.grad._version == version
        assert torch.equal(p.grad, before)
        assert opt.state[p]["x0"].is_contiguous()
        assert torch.equal(opt.state[p]["x0"], logical)
        made.append(p.detach())
    for p in made:
        assert torch.equal(p, logical + grad.float())


def tables_are_kept() -> None:
    """Tables are built once, again when a state moves, follow gradients that move, and never serve another tensor."""
    params = [parameter((40, 8)), parameter((9,)), parameter((3, 5))]
    opt = AdamW(params, plan="probe", backend="triton")
    built = []
    build = launch.Launcher._build

    def spy(self, *args):  # type: ignore[no-untyped-def]
        built.append(1)
        return build(self, *args)

    launch.Launcher._build = spy
    try:
        for p in params:
            p.grad = torch.ones_like(p)
        for _ in range(3):
            opt.step()
        assert len(built) == 1, built
        kept = next(iter(opt._stepper.launcher._used.values()))
        works = [part.work for part in kept.launches]
        grads = [p.grad for p in params]  # kept alive, so that the new ones lie elsewhere
        for p in params:
            p.grad = torch.zeros_like(p)
        opt.step()
        assert len(built) == 1
        kept = next(iter(opt._stepper.launcher._used.values()))
        assert all(part.work is old for part, old in zip(kept.launches, works, strict=True))
        assert all(bool((opt.state[p]["visits"] == 4).all()) for p in params)
        old = opt.state[params[0]]["visits"]
        opt.state[params[0]]["visits"] = old.clone()
        opt.step()
        assert len(built) == 2
        assert (opt.state[params[0]]["visits"] == 5).all()
        assert (old == 4).all()
        params[1].grad = None
        opt.step()
        assert (opt.state[params[1]]["visits"] == 5).all()
        assert (opt.state[params[0]]["visits"] == 6).all()
        opt.state[params[2]]["seen"] = torch.zeros(3, 2, dtype=torch.int32)
        with pytest.raises(RuntimeError, match=r"expected int32 \[3, 1\], got int32 \[3, 2\]"):
            opt.step()
        assert (opt.state[params[0]]["visits"] == 6).all()
        del grads
    finally:
        launch.Launcher._build = build


def agrees_with_reference() -> None:
    """The fp32 kernel and the eager reference take the same steps, up to the rounding of fused operations."""
    torch.manual_seed(1)
    shapes = [(65,), (3, 43), (200,), ()]
    one = [parameter(shape) for shape in shapes]
    two = [torch.nn.Parameter(p.detach().clone()) for p in one]
    lr = 1e-2
    fast = AdamW(one, lr=lr, plan="fp32", backend="triton")
    slow = AdamW(two, lr=lr, plan="fp32", backend="reference")
    for step in range(1, 6):
        for p, q in zip(one, two, strict=True):
            p.grad = torch.randn(p.shape)
            q.grad = p.grad.clone()
        fast.step()
        slow.step()
        for p, q in zip(one, two, strict=True):
            # per step: 2 roundings of p and about 8 relative roundings of an update of at most 2 lr
            assert ((p - q).abs() <= step * 2**-24 * (2 * q.abs() + 16 * lr)).all()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for check in (every_element_once, strides_and_dtypes, tables_are_kept, agrees_with_reference):
        check()
        print(check.__name__, "ok")
