"""Kernels that fail after others of their step have run, and interrupts: errors that say what has been stepped."""

from __future__ import annotations

import itertools
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from triton.runtime import interpreter

import optgen.optim as optim
from optgen import cast_model
from optgen.runtime import Optimizer
from optgen.runtime.checkpoint import weights
from optgen.runtime.cpu import cpu
from optgen.runtime.gpu import compiled
from optgen.runtime.modes import offload
from optgen.runtime.step import launch
from optgen.runtime.work import counting, staged
from tests.test_offload import moved
from tests.training import everything, params_of

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value", "ignore:overflow")


def made(backend: str, **options: Any) -> optim.AdamW:
    """Three buckets: of two dtypes in one group, and of a second group."""
    draw = torch.Generator().manual_seed(5)
    a, b, c, d = (nn.Parameter(torch.randn(3, 5, generator=draw)) for _ in range(4))
    a.data = a.data.bfloat16()
    groups = [{"params": [("a", a), ("b", b)]}, {"params": [("c", c), ("d", d)], "weight_decay": 0.0}]
    return optim.AdamW(groups, lr=0.1, plan={"bfloat16": "fp32_master", "float32": "fp32"}, backend=backend, **options)


def give(opt: Optimizer, step: int) -> None:
    draw = torch.Generator().manual_seed(step)
    for p in params_of(opt):
        p.grad = torch.randn(p.shape, generator=draw).to(p.dtype)


class Broken(Exception):
    """What a kernel raises here."""


LAUNCHES: Mapping[str, tuple[Any, str]] = {
    "reference": (staged, "run"), "cpp": (cpu, "call"), "triton": (compiled, "start"),
}  # fmt: skip


@contextmanager
def launching(
    backend: str, before: Callable[[int], object] = int, after: Callable[[int], object] = int
) -> Iterator[None]:
    """Call something before and after each launch, with its number."""
    module, name = LAUNCHES[backend]
    real, numbers = getattr(module, name), itertools.count()

    def launch(*args: Any, **options: Any) -> None:
        number = next(numbers)
        before(number)
        real(*args, **options)
        after(number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, launch)
        yield


def failing(backend: str, at: int) -> AbstractContextManager[None]:
    """The launch of that number fails."""

    def fail(number: int) -> None:
        if number == at:
            raise Broken("injected") from OSError("the cause")

    return launching(backend, before=fail)


def interrupting(backend: str, times: int = 1) -> AbstractContextManager[None]:
    """Ctrl-C is pressed while the first kernels run."""
    return launching(backend, after=lambda number: number < times and signal.raise_signal(signal.SIGINT))


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
@pytest.mark.parametrize("before", [0, 3], ids=["the long way", "the short way"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_error_says_what_has_been_stepped(backend: str, before: int, at: int) -> None:
    whole, opt = made(backend), made(backend)
    for step in range(before + 1):
        for one in (whole, opt):
            give(one, step)
        whole.step()
        if step < before:
            opt.step()
    with failing(backend, at), pytest.raises(Broken, match="injected") as caught:
        opt.step()
    (said,) = caught.value.__notes__
    assert repr(caught.value.__cause__) == "OSError('the cause')"
    names = ["'a'", "'b'", "'c', 'd'"]
    assert f"({', '.join(names[:at])}) made the step" in said or at == 0
    assert f"({', '.join(names[at:])}) not; {names[at]} may hold a part of it" in said
    assert counts(opt) == [before + (i < at) for i in range(4)]
    for p, q in zip(params_of(whole)[:at], params_of(opt), strict=False):
        assert torch.equal(p, q)


def counts(opt: Optimizer) -> list[int]:
    return [int(opt.state[p]["step"]) for p in params_of(opt)]


def test_of_a_step_that_a_graph_was_to_take_up_nothing_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    opt = made("triton", capturable=True)
    for step in range(2):
        give(opt, step)
        opt.step()
    monkeypatch.setattr(counting, "capturing", lambda: True)
    with failing("triton", 1), pytest.raises(Broken) as caught:
        opt.step()
    assert not hasattr(caught.value, "__notes__")


def test_the_scale_of_a_step_that_failed_is_not_left_behind() -> None:
    """A scaler takes it back after steps that succeed only."""
    opt, scaler = made("cpp", fused=True), torch.amp.GradScaler("cpu", init_scale=4.0)
    give(opt, 0)
    for p in params_of(opt):
        assert p.grad is not None
        scaler.scale(p.grad)  # the scaler makes its scale when it is first asked
    with failing("cpp", 1), pytest.raises(Broken):
        scaler.step(opt)
    assert not hasattr(opt, "grad_scale") and not hasattr(opt, "found_inf")


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


@pytest.mark.parametrize("capturable", [False, True])
def test_kernels_are_compiled_before_the_first_is_launched(monkeypatch: pytest.MonkeyPatch, capturable: bool) -> None:
    """What the compiler refuses in the last bucket leaves the first as it was; and each is compiled once."""

    def answer(_: int | None) -> None:
        if len(compiler.tried) == 2:
            raise Broken("no registers left")

    compiler = Compiler(monkeypatch, answer)
    opt = made("triton", capturable=capturable)
    give(opt, 0)
    before = [p.detach().clone() for p in params_of(opt)]
    with pytest.raises(Broken) as caught:
        opt.step()
    assert not hasattr(caught.value, "__notes__") and not compiler.launched
    assert all(torch.equal(p, q) for p, q in zip(params_of(opt), before, strict=True))
    assert not any(int(entry["step"]) for entry in opt.state.values())
    for _ in range(3):
        opt.step()
    # The one that failed was tried again; c and d take the kernel of b.
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
        give(opt, step)
        opt.step()
    limits = [planned, *([] if planned is None else [72]), 80, 88, 96]
    assert compiler.tried == [(capturable, limit) for limit in limits] * 2  # two kernels
    assert set(compiler.launched) == {(capturable, 96)} and len(compiler.launched) >= 4


@pytest.mark.parametrize("case", ["numbers", "a tensor", "a scaler"])
def test_what_the_host_may_count_is_compiled_before_the_first_step(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """A capturable optimizer's steps, outside of graphs too, launch the kernels that the first one compiled."""
    spills = lambda limit: SimpleNamespace(run=None, n_regs=limit, n_spills=2 * (limit < 70))  # noqa: E731
    compiler = Compiler(monkeypatch, spills)
    monkeypatch.setattr(launch, "_limits", lambda *_: {"maxnreg": 64})
    lr = torch.tensor(0.1) if case == "a tensor" else 0.1
    p = nn.Parameter(torch.ones(3, 5))
    opt = optim.AdamW([p], lr=lr, plan="fp32", backend="triton", capturable=True, fused=case == "a scaler")
    for step in range(3):
        give(opt, step)
        if case == "a scaler":
            opt.grad_scale, opt.found_inf = torch.tensor(1.0), torch.tensor(0.0)  # type: ignore[attr-defined]
        opt.step()
        assert compiler.tried == [(True, 64), (True, 72)]
    assert compiler.launched == [(True, 72)] * 3


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


@pytest.mark.parametrize("at", [0, 1, 2])
def test_offloaded_parameters(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Chunks that were stepped are back on the device, one that broke off as far as it came."""
    monkeypatch.setattr(offload, "CHUNK", 400)  # a and b; c; d
    whole, opt = moved(made("cpp")), moved(made("cpp"))
    for one in (whole, opt):
        give(one, 0)
    whole.step()
    with failing("cpp", at), pytest.raises(Broken) as caught:
        opt.step()
    (said,) = caught.value.__notes__
    assert "AdamW.step() broke off: " in said
    stepped = re.findall(r"'(\w)'", said.partition("made the step")[0])
    assert len(stepped) >= at and f"'{'abcd'[at]}' may hold a part of it" in said
    for name, p, q in zip("abcd", params_of(whole), params_of(opt), strict=True):
        assert torch.equal(p, q) == (name in stepped), name
        assert bool(opt.state.get(q, {}).get("step")) == (name in stepped), name


@pytest.fixture
def listening() -> Iterator[None]:
    """Python's own handler, which is not there where the tests run in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("listening")
@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
@pytest.mark.parametrize("before", [0, 3], ids=["the long way", "the short way"])
def test_a_step_is_whole_when_it_is_interrupted(backend: str, before: int) -> None:
    """A handler runs as a kernel returns: the weights would have moved, and nothing been counted."""
    whole, opt = made(backend), made(backend)
    for step in range(before + 3):
        for one in (whole, opt):
            give(one, step)
        whole.step()
        if step == before:
            with interrupting(backend), pytest.raises(KeyboardInterrupt):
                opt.step()
        else:
            opt.step()
        assert everything(opt) == everything(whole)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def begun(monkeypatch: pytest.MonkeyPatch, press: int, saved: dict[str, Any] | None) -> tuple[optim.AdamW, int]:
    """Three steps of a model that was cast, the first ones' states `saved`; Ctrl-C is pressed at a place of `settle`.

    Returns how many places there are, too.
    """
    draw = torch.Generator().manual_seed(3)
    model = nn.ParameterList(torch.randn(40, 120, generator=draw) for _ in range(2))
    opt = optim.AdamW(cast_model(model, torch.bfloat16).named_parameters(), plan="int8_split24", backend="reference")
    places, real = [0], weights.settle

    def pressed(items: Iterable[Any]) -> Iterator[Any]:
        for item in (*items, None):
            places[0] += 1
            if places[0] == press:
                signal.raise_signal(signal.SIGINT)
            if item is not None:
                yield item

    with monkeypatch.context() as patch:
        patch.setattr(weights, "settle", lambda rounded, params: real(pressed(rounded), pressed(params)))
        give(opt, 0)
        with pytest.raises(KeyboardInterrupt) if press else nullcontext():
            opt.step() if saved is None else opt.load_state_dict(saved)
    for step in range(0 if press and saved is None else 1, 3):
        give(opt, step)
        opt.step()
    return opt, places[0]


@pytest.mark.usefixtures("listening")
@pytest.mark.parametrize("loads", [False, True], ids=["the first step", "loading"])
def test_states_and_their_weights_are_taken_together(monkeypatch: pytest.MonkeyPatch, loads: bool) -> None:
    """Ctrl-C between the two would leave states whose weights were not written: the run would go on with other bits."""
    saved = begun(monkeypatch, 0, None)[0].dense_state_dict() if loads else None
    whole, places = begun(monkeypatch, 0, saved)
    assert places == 6
    for press in range(1, places + 1):
        assert everything(begun(monkeypatch, press, saved)[0]) == everything(whole), press


@pytest.mark.usefixtures("listening")
def test_offloaded_steps_are_whole_when_they_are_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's part runs on a thread of its own, for which the main one waits."""
    whole, opt = made("cpp"), moved(made("cpp"))
    monkeypatch.setattr(offload, "CHUNK", 16)
    for step in range(3):
        for one in (whole, opt):
            give(one, step)
        whole.step()
        with interrupting("cpp"), pytest.raises(KeyboardInterrupt):
            opt.step()
        for p, q in zip(params_of(whole), params_of(opt), strict=True):
            assert torch.equal(p, q)
            assert opt.state[q]["step"] == step + 1


@pytest.mark.usefixtures("listening")
def test_a_second_interrupt_does_not_wait() -> None:
    opt = made("cpp")
    give(opt, 0)
    with interrupting("cpp", times=2), pytest.raises(KeyboardInterrupt) as caught:
        opt.step()
    assert "broke off" in caught.value.__notes__[0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handlers_of_others_are_called_behind_the_step() -> None:
    """Also where the step is made on another thread, which runs no handlers; and where Python has none."""
    opt = made("cpp")
    called: list[int] = []
    held: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda *_: called.append(counts(opt)[0]))
    try:
        give(opt, 0)
        with interrupting("cpp"):
            opt.step()
        assert called == [1]
        own = signal.getsignal(signal.SIGINT)
        with launching("cpp", before=lambda _: held.append(signal.getsignal(signal.SIGINT))):
            other = threading.Thread(target=opt.step)
            other.start()
            other.join()
            assert set(held) == {own}
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            opt.step()
            assert held[-1] is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
