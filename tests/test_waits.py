"""The host waits for a device in no step after the first: what a step sends there goes without it.

Triton's kernels run in the interpreter, on the CPU.  What the runtime makes with device="cpu" is the host's, every
other tensor stands for one of a device: copies between the two, and reads of the latter, are counted.
"""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

pytest.importorskip("triton")

import optgen.optim as optim
from optgen.runtime.gpu import compiled
from optgen.runtime.modes.release import Release
from optgen.runtime.records import scalars
from tests.training import give

SHAPES = {"a": (6, 4), "b": (3, 7), "c": (4, 6)}
READS = {"item", "tolist", "numpy", "nonzero", "equal", "__bool__", "__int__", "__float__", "__index__", "cpu"}


class Waits(TorchFunctionMode):
    """Lists the functions in which the host would wait for a device.  Its own tensors have an attribute `on_host`, and
    constants, of which each has its own, `constant`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        device = kwargs.get("device", next((x for x in args if isinstance(x, torch.device)), None))
        flat = [x for arg in args for x in (arg if isinstance(arg, (list, tuple)) else [arg])]
        tensors = [x for x in flat if isinstance(x, Tensor) and not hasattr(x, "constant")]
        of_host = [hasattr(x, "on_host") for x in tensors]
        here = device == "cpu" if device is not None else bool(of_host) and all(of_host)
        made = func(*args, **kwargs)
        copied = name == "copy_" and len(set(of_host)) > 1 or name == "to" and here not in of_host
        values = name == "tensor" and isinstance(device, torch.device)  # torch makes them here, then copies
        if (copied or values) and not kwargs.get("non_blocking") or name in READS and not all(of_host):
            self.found.append(name)
        if name == "full" and made.ndim == 0:
            made.constant = True
        elif here and name != "copy_":
            for x in made if isinstance(made, (list, tuple)) else [made]:
                if isinstance(x, Tensor):
                    x.on_host = True  # type: ignore[attr-defined]
        return made


def waits(monkeypatch: pytest.MonkeyPatch, does: Callable[[], object]) -> list[str]:
    """Return in what the host would wait; what the interpreter does in place of a device is left out."""

    def on_device(start: Any) -> Any:
        def started(*args: Any) -> None:
            with torch._C.DisableTorchFunction():
                start(*args)

        return started

    mode, plain, read = Waits(), Release.complete, torch.frombuffer

    def from_buffer(*args: Any, **kwargs: Any) -> Tensor:  # the host's memory; no mode sees it
        made = read(*args, **kwargs)
        setattr(made, "on_host", True)  # noqa: B010
        return made

    def complete(*args: Any) -> Any:  # backward calls it outside of modes
        with mode:
            return plain(*args)

    with monkeypatch.context() as patch, mode:
        patch.setattr(compiled, "start", on_device(compiled.start))
        patch.setattr(scalars, "_constants", {})
        patch.setattr(torch, "frombuffer", from_buffer)
        patch.setattr(compiled, "load", on_device(compiled.load))
        patch.setattr(Release, "complete", complete)
        does()
    return mode.found


def made(rule: str, **options: Any) -> tuple[Any, dict[str, nn.Parameter]]:
    draw = torch.Generator().manual_seed(0)
    params = {name: nn.Parameter(torch.randn(shape, generator=draw)) for name, shape in SHAPES.items()}
    return getattr(optim, rule)(params.items(), plan="fp32", backend="triton", **options), params


def test_waits_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    on_device = torch.zeros(3)
    host: Any = lambda: torch.tensor([1.0, 2.0, 3.0], device="cpu")  # noqa: E731
    blocking = {
        "to": lambda: (host() * 2).to(torch.device("cpu")),
        "copy_": lambda: torch.empty_like(host(), device=torch.device("cpu")).copy_(host()),
        "tensor": lambda: torch.tensor([1.0], device=torch.device("cpu")),
        "tolist": lambda: (on_device * 2).tolist(),
    }
    for name, does in blocking.items():
        assert waits(monkeypatch, does) == [name]
    assert waits(monkeypatch, lambda: host().tolist()) == []
    assert waits(monkeypatch, lambda: host().to(torch.device("cpu"), non_blocking=True)) == []


@pytest.mark.parametrize("rule", ["AdamW", "Muon", "SM3"])
def test_no_step_waits(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one whose gradients lie elsewhere, or that takes other tensors than the one before."""
    opt, params = made(rule)
    kept: list[Any] = []
    for step, absent in enumerate([(), (), ("b",), (), ("a", "c")]):
        kept.append([p.grad for p in params.values()])  # alive, so that the new ones lie elsewhere
        give(params.values(), step)
        for name in absent:
            params[name].grad = None
        found = waits(monkeypatch, opt.step)
        assert step == 0 or found == []


@pytest.mark.parametrize("rule", ["AdamW", "Muon"])
def test_no_backward_that_steps_waits(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Muon's values of elements are let go of after each parameter, and its tables with them."""
    opt, params = made(rule)
    opt.release_gradients()
    for step in range(3):
        draw = torch.Generator().manual_seed(step)
        loss = sum((p * torch.randn(p.shape, generator=draw)).sum() for p in params.values())
        assert isinstance(loss, Tensor)
        found = waits(monkeypatch, loss.backward)
        assert all(p.grad is None for p in params.values())
        assert step == 0 or found == []
        opt.step()


@pytest.mark.parametrize("seed", range(8))
def test_watched_numbers_are_read_once_every_device_has_sent_its_own(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, done = random.Random(seed), set[str]()

    class Event(SimpleNamespace):
        def query(self) -> bool:
            return self.device in done

        def synchronize(self) -> None:
            done.add(self.device)

    class Sums:
        """Stands for sums on a device, and for their copy on the host."""

        is_cuda = True

        def __init__(self, device: str) -> None:
            self.device = device

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any, kwargs: Any) -> "Sums":
            assert func is torch.empty_like and kwargs == {"device": "cpu", "pin_memory": True}
            return cls(args[0].device)

        def copy_(self, _: Any, non_blocking: bool) -> "Sums":
            assert non_blocking
            return self

        def tolist(self) -> str:
            assert self.device in done
            return self.device

    def current(device: str) -> Any:
        return SimpleNamespace(record_event=lambda: Event(device=device))

    monkeypatch.setattr(torch.cuda, "current_stream", current)
    opt, _ = made("AdamW")
    got: list[int] = []
    watching = opt.watch(1, to=lambda step, rows: got.append(len(rows)))
    for _ in range(5):
        devices = [draw.choice(["cuda:0", "cuda:1", "cuda:2"]) for _ in range(draw.randint(1, 3))]
        watching._tables = [
            SimpleNamespace(reduce=lambda d=d: Sums(d), numbers=lambda d, k=k: {k: d}) for k, d in enumerate(devices)
        ]
        watching.step += watching.step < 0
        done &= {draw.choice(devices)}
        watching.finish()
    watching.remove()
    assert len(got) == 5
