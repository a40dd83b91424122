"""Ctrl-C at any line of a step: the step is made for every parameter, with its states, or for none."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from optgen import optim
from optgen.runtime.cpu import native
from optgen.runtime.step.uninterrupted import Uninterrupted

SHAPES = ((70, 64), (5000,), (33,), (3, 4))
RULES = (
    ("AdamW", "int8_split24", {}),
    ("LAMB", "fp32", {}),
    ("Muon", "int8_split24", {}),
    ("Prodigy", "int4_split24", {}),
    ("AdamW", "flashoptim", {"offload": True}),
)


def made(rule: str, plan: str, options: dict[str, Any], backend: str) -> Any:
    torch.manual_seed(0)
    dtypes = (torch.bfloat16, torch.float32)
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES for dtype in dtypes]
    groups = [{"params": params[:4], "lr": 1e-2}, {"params": params[4:], "lr": 1e-3}]
    return getattr(optim, rule)(groups, plan=plan, backend=backend, **options)


def params(opt: Any) -> list[nn.Parameter]:
    return [p for group in opt.param_groups for p in group["params"]]


def grade(opt: Any, k: int) -> None:
    draw = torch.Generator().manual_seed(k)
    for p in params(opt):
        p.grad = torch.randn(p.shape, generator=draw).to(p.dtype)


def facts(opt: Any) -> list[Any]:
    def bits(x: Any) -> Any:
        return x.detach().contiguous().view(torch.uint8).tolist() if torch.is_tensor(x) and x.dim() else float(x)

    return [[bits(p), {k: bits(v) for k, v in opt.state.get(p, {}).items()}] for p in params(opt)]


def at_line(step: Callable[[], Any], number: int) -> int:
    """Step; the signal comes before the line of that number, counted over optgen's files. Return the lines seen."""
    seen = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal seen
        if "optgen" not in frame.f_code.co_filename:
            return None
        if event == "line":
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        step()
    finally:
        sys.settrace(None)
    return seen


@pytest.fixture(autouse=True)
def handled() -> Iterator[None]:
    """Give SIGINT Python's own handler: processes that a shell starts in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize(("rule", "plan", "options"), RULES, ids=lambda x: str(x))
def test_a_step_is_whole_or_not_there(rule: str, plan: str, options: dict[str, Any], backend: str) -> None:
    """The first step, which makes states; the second; and the third, which may repeat the second's launches."""
    if backend == "cpp" and native.compiler() is None:
        pytest.skip("no C++ compiler")
    lines, wanted, opt = [], [], made(rule, plan, options, backend)
    wanted.append(facts(opt))
    for k in range(3):
        grade(opt, k)
        lines.append(at_line(opt.step, -1))
        wanted.append(facts(opt))
    draw = torch.Generator().manual_seed(len(rule) + len(plan))
    interrupted = 0
    for _ in range(12):
        opt = made(rule, plan, options, backend)
        done = int(torch.randint(3, (), generator=draw))
        for k in range(done):
            grade(opt, k)
            opt.step()
        grade(opt, done)
        try:
            at_line(opt.step, 1 + int(torch.randint(lines[done], (), generator=draw)))
        except KeyboardInterrupt:
            interrupted += 1
        now = facts(opt)
        if now == wanted[done]:  # and the step can be made now
            opt.step()
            now = facts(opt)
        assert now == wanted[done + 1]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert interrupted > 6  # a first step has lines that later ones of the process have not


def press(passed: list[int], held: bool) -> None:
    """Press twice inside a step, or once inside a chunk of one and go on."""
    with Uninterrupted():
        if held:
            signal.raise_signal(signal.SIGINT)
            passed.append(1)
            signal.raise_signal(signal.SIGINT)
            passed.append(2)
        with Uninterrupted():
            signal.raise_signal(signal.SIGINT)
            passed.append(3)
        passed.append(4)
    passed.append(5)


@pytest.mark.parametrize(("held", "wanted"), [(True, [1]), (False, [3, 4])])
def test_a_second_press_interrupts_at_once(held: bool, wanted: list[int]) -> None:
    passed: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        press(passed, held)
    assert passed == wanted
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
