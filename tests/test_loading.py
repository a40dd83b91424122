"""Kernels that fail to compile, that spill, or that fail while a step runs."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from triton.runtime import interpreter

import optgen.optim as optim
from optgen.runtime import Optimizer
from optgen.runtime.gpu import compiled
from optgen.runtime.layout import workspace
from optgen.runtime.step import launch
from tests.training import give, params_of


def made(backend: str, **options: Any) -> optim.AdamW:
    """Two buckets: of two dtypes."""
    draw = torch.Generator().manual_seed(5)
    a, b, c, d = (nn.Parameter(torch.randn(3, 5, generator=draw)) for _ in range(4))
    a.data = a.data.bfloat16()
    return optim.AdamW(zip("abcd", (a, b, c, d), strict=True), lr=0.1, plan="fp32_master", backend=backend, **options)


class Broken(Exception):
    """The error of a kernel here."""


def counts(opt: Optimizer) -> list[int]:
    return [int(opt.state[p]["step"]) for p in params_of(opt)]


class Compiler:
    """Triton's interpreter as if it compiled: what it compiles and launches, and what its compiler answers.

    Each is noted as (whether it is the kernel around another one, its limit of registers).
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Callable[[int | None], object]) -> None:
        self.tried: list[tuple[bool, int | None]] = []
        self.launched: list[tuple[bool, int | None]] = []
        start = interpreter.InterpretedFunction.run

        def warmup(jitted: Any, /, *args: Any, grid: Any, maxnreg: int | None = None, **options: Any) -> object:
            assert len(grid) == 1
            self.tried.append(("kernel" in options, maxnreg))
            return answer(maxnreg)

        def run(jitted: Any, /, *args: Any, maxnreg: int | None = None, **options: Any) -> Any:
            self.launched.append(("kernel" in options, maxnreg))
            return start(jitted, *args, **options)

        monkeypatch.setattr(interpreter.InterpretedFunction, "warmup", warmup, raising=False)
        monkeypatch.setattr(interpreter.InterpretedFunction, "run", run)
        monkeypatch.setattr(compiled, "_loaded", {})
        monkeypatch.setattr(compiled, "_roomier", {})


@pytest.mark.parametrize("numel", [8192, 8193])
def test_tables_that_a_driver_does_not_take_over_are_sent_from_pinned_memory(
    numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[int] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self.nbytes) or self)
    monkeypatch.setattr(torch, "empty_like", lambda x, **_: torch.zeros(x.shape, dtype=x.dtype))
    host = torch.arange(numel)
    made = workspace.sent(host, SimpleNamespace(type="cuda"))
    assert made.equal(host) and made is not host and pinned == [8 * numel] * (numel > 8192)


@pytest.mark.parametrize("capturable", [False, True])
def test_kernels_are_compiled_before_the_first_is_launched(monkeypatch: pytest.MonkeyPatch, capturable: bool) -> None:
    """A refusal of the compiler in the last bucket leaves the first as it was; and each is compiled once."""

    def answer(_: int | None) -> None:
        if len(compiler.tried) == 2:
            raise Broken("no registers left")

    compiler = Compiler(monkeypatch, answer)
    opt = made("triton", capturable=capturable)
    give(params_of(opt), 0)
    before = [p.detach().clone() for p in params_of(opt)]
    with pytest.raises(Broken):
        opt.step()
    assert not compiler.launched
    assert all(torch.equal(p, q) for p, q in zip(params_of(opt), before, strict=True))
    assert not any(int(entry["step"]) for entry in opt.state.values())
    for _ in range(3):
        opt.step()
    # The one that failed was tried again.
    assert [around for around, _ in compiler.tried] == [capturable] * 3
    assert counts(opt) == [3, 3, 3, 3]


@pytest.mark.parametrize("planned", [64, None])
@pytest.mark.parametrize("capturable", [False, True])
def test_a_kernel_that_spills_gets_more_registers(
    monkeypatch: pytest.MonkeyPatch, capturable: bool, planned: int | None
) -> None:
    """Compilers find out; what was found holds for every later step, and is looked for once.  Told no limit, they take
    fewer than there are, here 72."""

    def answer(limit: int | None) -> object:
        return SimpleNamespace(run=None, n_regs=limit or 72, n_spills=2 * ((limit or 72) < 90))

    compiler = Compiler(monkeypatch, answer)
    monkeypatch.setattr(launch, "_limits", lambda *_: {} if planned is None else {"maxnreg": planned})
    opt = made("triton", capturable=capturable)
    for step in range(2):
        give(params_of(opt), step)
        opt.step()
    limits = [planned, *([] if planned is None else [72]), 80, 88, 96]
    assert compiler.tried == [(capturable, limit) for limit in limits] * 2  # two kernels
    assert set(compiler.launched) == {(capturable, 96)} and len(compiler.launched) >= 4


@pytest.mark.parametrize("case", ["numbers", "a tensor"])
def test_what_the_host_may_count_is_compiled_before_the_first_step(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """A capturable optimizer's steps, outside of graphs too, launch the kernels that the first one compiled."""
    spills = lambda limit: SimpleNamespace(run=None, n_regs=limit, n_spills=2 * (limit < 70))  # noqa: E731
    compiler = Compiler(monkeypatch, spills)
    monkeypatch.setattr(launch, "_limits", lambda *_: {"maxnreg": 64})
    lr = torch.tensor(0.1) if case == "a tensor" else 0.1
    p = nn.Parameter(torch.ones(3, 5))
    opt = optim.AdamW([p], lr=lr, plan="fp32", backend="triton", capturable=True)
    for step in range(3):
        give(params_of(opt), step)
        opt.step()
        assert compiler.tried == [(True, 64), (True, 72)]
    assert compiler.launched == [(True, 72)] * 3


def test_tables_are_kept_from_step_to_step_while_nothing_moves() -> None:
    opt, kept = made("triton"), []
    give(params_of(opt), 0)
    for _ in range(2):
        opt.step()
        kept.append(list(map(id, opt._stepper.launcher.used.values())))
        opt._stepper.forget_step()
    assert kept[0] == kept[1]


def test_a_kernel_that_spills_whatever_it_is_told_is_told_nothing() -> None:
    tried: list[object] = []

    def spills(options: Mapping[str, Any]) -> int:
        tried.append(options.get("maxnreg"))
        return options.get("maxnreg", 255)

    assert compiled.without_spills({"maxnreg": 208, "num_warps": 1}, spills, 1) == {"num_warps": 1}
    assert tried == [208, 224, 240, None]
    assert compiled.without_spills({"num_warps": 1}, spills, 1) == {"num_warps": 1}
    assert compiled.without_spills({"maxnreg": 64}, lambda options: 0, 1) == {"maxnreg": 64}
    # 144 registers for each of 512 threads are more than a processor has: such a program cannot be launched.
    tried.clear()
    assert compiled.without_spills({"maxnreg": 112}, spills, 16) == {} and tried == [112, 120, 128, None]
    # Many more at a time may be too many: a kernel of LAMB's spills below 208 registers and from 224 on.
    tried.clear()
    assert compiled.without_spills({"maxnreg": 120}, lambda o: spills(o) * (o["maxnreg"] not in (208, 216)), 1) == {
        "maxnreg": 208
    }
    assert tried == [120, 128, 144, 160, 176, 192, 208]
    # What a compiler takes by itself is where the search begins, and what is left of a search that finds nothing.
    tried.clear()
    assert compiled.without_spills({}, lambda options: spills({"maxnreg": 200} | options), 1) == {}
    assert tried == [200, 208, 224, 240, 200]
