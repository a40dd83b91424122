"""Ctrl-C or an error at any line of a step: the step is made for every parameter, with its states, or for none, or the
optimizer refuses to go on without a checkpoint."""

import copy
import linecache
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from optgen import optim
from optgen.runtime.cpu import native
from optgen.runtime.records.uninterrupted import Uninterrupted
from optgen.runtime.several import Several
from tests.training import bits

SHAPES = ((10, 70), (300,), (33,), (3, 4))
RULES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("AdamW", "int8_split24", {}),
    ("LAMB", "fp32", {}),
    ("Muon", "int8_split24", {}),
    ("Prodigy", "int4_split24", {}),
    ("AdamW", "flashoptim", {"offload": True}),
    ("Several", "int8_split24", {}),
)


def made(rule: str, plan: str, options: dict[str, Any], backend: str) -> Any:
    torch.manual_seed(0)
    dtypes = (torch.bfloat16, torch.float32)
    named = [(f"{shape} {dtype}", nn.Parameter(torch.randn(shape).to(dtype))) for shape in SHAPES for dtype in dtypes]
    groups = [{"params": named[:4], "lr": 1e-2}, {"params": named[4:], "lr": 1e-3}]
    options = {**options, "plan": plan, "backend": backend}
    if rule == "Several":
        return Several({"a": optim.Lion(groups[:1], **options), "b": optim.AdamW(groups[1:], **options)})
    return getattr(optim, rule)(groups, **options)


def params(opt: Any) -> dict[str, nn.Parameter]:
    pairs = [zip(group["param_names"], group["params"], strict=True) for group in opt.param_groups]
    return {name: p for group in pairs for name, p in group}


def grade(opt: Any, k: int) -> None:
    draw = torch.Generator().manual_seed(k)
    grads = {p: torch.randn(p.shape, generator=draw).to(p.dtype) for p in params(opt).values()}
    for p, g in grads.items():  # all lie elsewhere than before: each run has the same lines
        p.grad = g


def facts(opt: Any) -> dict[str, Any]:
    return {name: bits([p, opt.state.get(p, {})]) for name, p in params(opt).items()}


def kept(opt: Any) -> tuple[dict[str, torch.Tensor], Any]:
    return {n: p.detach().clone() for n, p in params(opt).items()}, copy.deepcopy(opt.state_dict())


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def fail() -> None:
    raise MemoryError


def at_line(step: Callable[[], Any], number: int = 0, does: Callable[[], None] = press) -> int:
    """Step; something happens before the line of that number, counted over optgen's files.  Return the lines seen.

    It does not fail in what holds Ctrl-C back, nor at a `with` of it, which is a line of its end, too, but at the next
    line after it.
    """
    seen = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal seen, number
        if "optgen" not in frame.f_code.co_filename:
            return None
        if event == "line":
            seen += 1
            file = frame.f_code.co_filename
            here = does is press or "uninterrupted" not in file + linecache.getline(file, frame.f_lineno)
            if number and seen >= number and here:
                number = 0
                does()
        return trace

    sys.settrace(trace)
    try:
        step()
    finally:
        sys.settrace(None)
    return seen


@pytest.fixture(autouse=True)
def handled() -> Iterator[None]:
    """Give SIGINT Python's own handler: processes that a shell starts in the background ignore it.

    What comes between the end of a `with torch.no_grad()` and its exit leaves gradients off, in any Python code.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
    torch.set_grad_enabled(True)


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize(("rule", "plan", "options"), RULES, ids=lambda x: str(x))
def test_a_step_is_whole_or_not_there(rule: str, plan: str, options: dict[str, Any], backend: str) -> None:
    """The first step, which makes states; the second; and the third, which may repeat the second's launches."""
    if backend == "cpp" and native.compiler() is None:
        pytest.skip("no C++ compiler")
    for _ in range(2):  # a first step has lines that later ones of the process have not
        opt = made(rule, plan, options, backend)
        lines, wanted, saved = [], [facts(opt)], [kept(opt)]
        for k in range(3):
            grade(opt, k)
            lines.append(at_line(opt.step))
            wanted.append(facts(opt))
            saved.append(kept(opt))
    draw = torch.Generator().manual_seed(len(rule) + len(plan))
    for does in (press, fail) * 6:
        opt = made(rule, plan, options, backend)
        done = int(torch.randint(3, (), generator=draw))
        for k in range(done):
            grade(opt, k)
            opt.step()
        grade(opt, done)
        with pytest.raises((KeyboardInterrupt, MemoryError)):
            at_line(opt.step, 1 + int(torch.randint(lines[done], (), generator=draw)), does)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        now, torn = facts(opt), set(opt._uninterrupted.torn)
        if torn:
            assert does is fail and torn >= {name for name in now if now[name][0] != wanted[done][name][0]}
            for action in (opt.step, opt.state_dict, partial(copy.deepcopy, opt), partial(pickle.dumps, opt)):
                with pytest.raises(RuntimeError, match=r"broken off the last step.*load a checkpoint"):
                    action()
            assert facts(opt) == now
            with torch.no_grad():
                for name, p in params(opt).items():
                    p.copy_(saved[done][0][name])
            opt.load_state_dict(saved[done][1])
            now = facts(opt)
        if now != wanted[done + 1]:  # the step can be made now
            opt.step()
            now = facts(opt)
        assert now == wanted[done + 1]


def pressed(whole: Uninterrupted, passed: list[int], held: bool) -> None:
    """Press twice inside a step, or once inside a chunk of one and go on."""
    with whole as begun:
        begun.append("p")
        if held:
            signal.raise_signal(signal.SIGINT)
            passed.append(1)
            signal.raise_signal(signal.SIGINT)
            passed.append(2)
        with whole, Uninterrupted():
            signal.raise_signal(signal.SIGINT)
            passed.append(3)
        passed.append(4)
    passed.append(5)


@pytest.mark.parametrize(("held", "wanted", "torn"), [(True, [1], ["p"]), (False, [3, 4], [])])
def test_a_second_press_interrupts_at_once(held: bool, wanted: list[int], torn: list[str]) -> None:
    """The step that it leaves is torn; after one press the step is whole."""
    passed: list[int] = []
    whole = Uninterrupted()
    with pytest.raises(KeyboardInterrupt):
        pressed(whole, passed, held)
    assert (passed, whole.torn) == (wanted, torn)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
