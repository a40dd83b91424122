"""Measure the host's part of a step, without its kernels.

Every contender steps over the tensors of a model, each of eight elements, and what its kernels would do is left out
where it can be: launches of Triton kernels are stubbed, of generated optimizers as of FlashOptim's, and C++ kernels are
left out of one of two rows.  FlashOptim asks for a GPU when it is constructed and when it makes its states, and is told
that there is one then.  torch's foreach and fused implementations do their work.  Shards are DTensors as fully_shard
makes them, each a half of a tensor on the first of two ranks, without the other.  No GPU takes part, and Triton's own
launcher is left out.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"  # Triton's side of a step on CPU tensors; its launches are stubbed

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from optgen.optim import AdamW
from tools.bench.race import Race, gpt2, in_words, llama_8b, run_races

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
Params = Callable[[int], list[torch.nn.Parameter]]


def tensors(count: int) -> list[torch.nn.Parameter]:
    """Return parameters of eight elements with gradients: the work per element costs next to nothing."""
    made = [torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16)) for _ in range(count)]
    for p in made:
        p.grad = torch.ones_like(p)
    return made


def shards(count: int) -> list[torch.nn.Parameter]:
    """The same of which a rank has a half each, with gradients that lie as fully_shard lays them."""
    mesh = init_device_mesh("cpu", (2,))
    made = []
    for _ in range(count):
        p = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4, dtype=torch.bfloat16), mesh, [Shard(0)]))
        p.grad = DTensor(torch.ones(2, 4, dtype=torch.bfloat16), p._spec, requires_grad=False)
        made.append(p)
    return made


@dataclass(frozen=True)
class Contender:
    """make    of parameters, an optimizer
    beginning  what holds while it is constructed and makes its first steps
    params     from their number
    moving     whether gradients lie elsewhere at each step
    stubbed    whether C++ kernels are left out when it is measured; Triton's always are
    """

    make: Make
    beginning: Callable[[], AbstractContextManager[None]] = nullcontext
    params: Params = tensors
    moving: bool = False
    stubbed: bool = False


def contenders() -> dict[str, Contender]:
    def ours(backend: str, params: Params = tensors, moving: bool = False, stubbed: bool = False, **more: Any) -> Any:
        def make(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
            return AdamW(params, lr=1e-3, plan="int8_split24", backend=backend, **more)

        return Contender(make, params=params, moving=moving, stubbed=stubbed)

    found = {
        "torch AdamW, foreach": Contender(lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=True)),
        "torch AdamW, fused": Contender(lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True)),
        "optgen AdamW, Triton, launch stubbed": ours("triton"),
        "optgen AdamW, Triton, launch stubbed, capturable": ours("triton", capturable=True),
        "optgen AdamW, Triton, launch stubbed, gradients elsewhere": ours("triton", moving=True),
        "optgen AdamW, Triton, launch stubbed, shards": ours("triton", shards),
        "optgen AdamW, C++, call stubbed": ours("cpp", stubbed=True),
        "optgen AdamW, C++, with its kernel": ours("cpp"),
    }
    with suppress(ImportError):
        import flashoptim

        stub_kernels(sys.modules[flashoptim.FlashAdamW.__module__])
        found["FlashOptim AdamW, launches stubbed"] = Contender(
            lambda params: flashoptim.FlashAdamW(params, lr=1e-3, master_weight_bits=24), as_on_a_gpu
        )
    return found


class Nothing:
    """A stub of a Triton kernel."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *_, **__: None


def stub_kernels(module: ModuleType) -> None:
    """Replace all Triton kernels of a module by ones that do nothing."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import KernelInterface

    for name, value in list(vars(module).items()):
        if isinstance(value, (KernelInterface, Autotuner)):
            setattr(module, name, Nothing())


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Let tensors on the CPU report that they are on a GPU, and torch that there is one."""
    true = property(lambda _: True)
    with patch.object(torch.cuda, "is_available", lambda: True), patch.object(torch.Tensor, "is_cuda", true):
        yield


class Stubs:
    """Stubs of Triton launches, and of C++ calls unless `calls` is set."""

    calls = True

    def __init__(self) -> None:
        from optgen.runtime.cpu import cpu
        from optgen.runtime.gpu import compiled

        compiled.start = lambda *_, **__: None
        call = cpu.call

        def counted(*given: Any) -> None:
            if self.calls:
                call(*given)

        cpu.call = counted


def race(title: str, count: int, stubs: Stubs) -> Race:
    """Return the race of all contenders that can be had here, over that many tensors."""
    listed, missing = contenders(), dict[str, str]()
    running: dict[str, torch.optim.Optimizer] = {}
    for name, contender in listed.items():
        try:
            with contender.beginning():
                optimizer = contender.make(contender.params(count))
                for _ in range(5):
                    optimizer.step()
            running[name] = optimizer
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            missing[name] = in_words(error)[:160]
    params = {name: opt.param_groups[0]["params"] if listed[name].moving else [] for name, opt in running.items()}
    spare = {name: [torch.ones_like(p) for p in moved] for name, moved in params.items()}

    def before(name: str) -> None:
        stubs.calls = not listed[name].stubbed
        for i, p in enumerate(params[name]):
            p.grad, spare[name][i] = spare[name][i], p.grad

    return Race(title, {name: opt.step for name, opt in running.items()}, before=before, row=20, missing=missing)


def races(asked: argparse.Namespace) -> Iterator[Race]:
    stubs = Stubs()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    for title, shapes in (("GPT-2 (148 tensors)", gpt2()), ("Llama-8B (291 tensors)", llama_8b())):
        yield race(title, len(shapes), stubs)


def main(given: Sequence[str]) -> int:
    return run_races(races, argparse.ArgumentParser(description="Host time of a step"), given)
