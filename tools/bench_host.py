"""Measure the host time of a step without its kernels: `python tools/bench_host.py [--out FILE]`.

Every contender steps over the tensors of a model, each of eight elements, and what its kernels would do is left out
where it can be: launches of Triton kernels are stubbed, of generated optimizers as of FlashOptim's, and C++ kernels are
left out of one of two rows.  FlashOptim asks for a GPU when it is constructed and when it makes its states, and is told
that there is one then.  torch's foreach and fused implementations do their work.  Shards are DTensors as fully_shard
makes them, each a half of a tensor on the first of two ranks, without the other.

Contenders take turns; the figures are medians of the CPU time of the thread; other work on the machine, which shares
its caches, makes them longer than the least that was seen.  No GPU takes part, and Triton's own launcher is left out.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"  # Triton's side of a step on CPU tensors; its launches are stubbed
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Shard, distribute_tensor  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from tools import benchmark  # noqa: E402
from tools.prose import table  # noqa: E402

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
Params = Callable[[int], list[torch.nn.Parameter]]

MODELS = {"GPT-2 (148 tensors)": benchmark.gpt2, "Llama-8B (291 tensors)": benchmark.llama_8b}
TARGET = 0.5
"""The share of the time of torch's fused AdamW that a generated optimizer may take."""


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
    import generated

    def ours(backend: str, params: Params = tensors, **more: Any) -> Contender:
        measured = {name: more.pop(name) for name in ("moving", "stubbed") if name in more}

        def make(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
            return generated.AdamW(params, lr=1e-3, plan="int8_split24", backend=backend, **more)

        return Contender(make, params=params, **measured)

    def theirs(**more: Any) -> Contender:
        return Contender(lambda params: torch.optim.AdamW(params, lr=1e-3, **more))

    found = {
        "optgen AdamW, Triton, launch stubbed": ours("triton"),
        "optgen AdamW, Triton, launch stubbed, capturable": ours("triton", capturable=True),
        "optgen AdamW, Triton, launch stubbed, gradients elsewhere": ours("triton", moving=True),
        "optgen AdamW, Triton, launch stubbed, shards": ours("triton", shards),
        "optgen AdamW, C++, call stubbed": ours("cpp", stubbed=True),
        "optgen AdamW, C++, with its kernel": ours("cpp"),
        "torch AdamW, foreach": theirs(foreach=True),
        "torch AdamW, fused": theirs(fused=True),
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

        compiled.start = lambda *_, **__: None  # type: ignore[assignment]
        call = cpu.call

        def counted(*given: Any) -> None:
            if self.calls:
                call(*given)

        cpu.call = counted


def measure(count: int, rounds: int, steps: int, stubs: Stubs) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Return (name -> milliseconds of every step, name -> why it is missing)."""
    running: dict[str, torch.optim.Optimizer] = {}
    missing: dict[str, str] = {}
    listed = contenders()
    for name, contender in listed.items():
        try:
            with contender.beginning():
                running[name] = contender.make(contender.params(count))
                for _ in range(5):
                    running[name].step()
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            running.pop(name, None)
    times: dict[str, list[float]] = {name: [] for name in running}
    spare = {name: [torch.ones_like(p) for p in opt.param_groups[0]["params"]] for name, opt in running.items()}
    gc.disable()
    for _ in range(rounds):
        for name, opt in running.items():
            stubs.calls = not listed[name].stubbed
            for _ in range(steps):
                for i, p in enumerate(opt.param_groups[0]["params"] if listed[name].moving else ()):
                    p.grad, spare[name][i] = spare[name][i], p.grad
                began = time.thread_time_ns()
                opt.step()
                times[name].append((time.thread_time_ns() - began) / 1e6)
        gc.collect()
    gc.enable()
    return times, missing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20, help="per contender and round")
    parser.add_argument("--out", type=Path, help="write FILE.json and FILE.md")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    stubs = Stubs()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    data: dict[str, Any] = {
        "versions": {name: v for name in ("torch", "triton", "flashoptim") if (v := benchmark.installed(name))},
        "python": platform.python_version(),
        "processor": benchmark.cpu_model(),
        "cores": os.cpu_count(),
        "target_of_fused": TARGET,
        "models": {},
    }
    for name, listed in MODELS.items():
        times, missing = measure(len(listed()), chosen.rounds, chosen.steps, stubs)
        data["models"][name] = {
            "missing": missing,
            "contenders": {
                key: {"median_ms": round(statistics.median(found), 4), "least_ms": round(min(found), 4)}
                for key, found in times.items()
            },
        }
    data["load"] = round(os.getloadavg()[0], 1)
    text = markdown(data)
    print(text)
    if chosen.out:
        benchmark.save(chosen.out.with_suffix(".json"), data)
        benchmark.write(chosen.out.with_suffix(".md"), text)
    return 0


def markdown(data: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    lines = [
        "# Host time of a step",
        "",
        "What `opt.step()` costs the host beside its kernels, on a CPU: CPU time of the thread over tensors of eight",
        "elements, the launches of Triton kernels stubbed (FlashOptim's as well: while it makes its states it is told",
        "that there is a GPU); the median and the least of steps taken in turns with the other contenders",
        f"(`python tools/bench_host.py`). {data['processor']} of {data['cores']} cores",
        f"with a load of {data['load']} (processes that want one), Python {data['python']}, {versions}.",
    ]
    for name, found in data["models"].items():
        base = found["contenders"].get("torch AdamW, foreach", {}).get("median_ms")
        rows = [
            [key, f"{x['median_ms']:.3f}", f"{x['least_ms']:.3f}", f"{x['median_ms'] / base:.3f}" if base else ""]
            for key, x in found["contenders"].items()
        ] + [[key, f"not here: {why}", "", ""] for key, why in found["missing"].items()]
        head = ("", "ms, median", "ms, least", "of torch's foreach")
        lines += ["", f"## {name}", "", *table(head, rows)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
