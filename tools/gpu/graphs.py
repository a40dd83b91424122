"""Steps in a CUDA graph: captured once, replayed, and compared bit by bit with the same steps outside a graph.

Both sides count their steps on the device (capturable=True), so that their scalars come from the same functions.  A
third counts on the host, and may differ from them by the rounding of its powers: how many values do is noted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from gpu.machine import in_words

SETTINGS = (
    ("AdamW", "int8_split24", torch.bfloat16),
    ("AdamW", "fp32", torch.float32),
    ("LAMB", "int8_split24", torch.bfloat16),
    ("CAME", "int8_split24", torch.bfloat16),
    ("Prodigy", "fp32", torch.float32),
    ("Muon", "fp32", torch.float32),
)
"""(class, plan, parameter dtype): one sweep, several, sums over the model, and matrix products between kernels."""

SHAPES = ((64, 200), (130, 150), (33, 7))
STEPS = 5

Record = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes what is to be done over and over; gives what does it."""


@dataclass
class Graph:
    """What became of one setting."""

    case: str
    problems: list[str] = field(default_factory=list)
    other_than_host: int = 0
    seconds: float = 0.0


class Side:
    """An optimizer over parameters of its own, its gradients made of `inputs` by a product that a graph may hold."""

    def __init__(self, cls: type, plan: str, dtype: torch.dtype, device: torch.device, capturable: bool) -> None:
        draw = torch.Generator().manual_seed(1)
        start = [torch.randn(shape, generator=draw).to(dtype) for shape in SHAPES]
        self.params = [torch.nn.Parameter(w.to(device, copy=True)) for w in start]
        self.inputs = [torch.zeros_like(p) for p in self.params]
        self.lr = torch.tensor(1e-2, device=device)
        rate: Any = self.lr if capturable else 1e-2
        self.opt = cls(self.params, lr=rate, plan=plan, backend="triton", capturable=capturable)
        for p in self.params:
            p.grad = torch.zeros_like(p)

    def feed(self, step: int) -> None:
        draw = torch.Generator().manual_seed(100 + step)
        for x in self.inputs:
            x.copy_(torch.randn(x.shape, generator=draw).to(x.dtype))
        rate = 1e-2 / (step + 1)
        self.lr.fill_(rate)
        if not isinstance(self.opt.param_groups[0]["lr"], torch.Tensor):
            self.opt.param_groups[0]["lr"] = float(self.lr.item())

    def step(self, fresh: bool) -> None:
        """fresh: gradients are new tensors, as after zero_grad(set_to_none=True)."""
        for p, x in zip(self.params, self.inputs, strict=True):
            if fresh:
                p.grad = x * 2
            else:
                assert p.grad is not None
                torch.mul(x, 2, out=p.grad)
        self.opt.step()

    def values(self) -> Iterator[torch.Tensor]:
        for p in self.params:
            yield p.detach()
            for x in self.opt.state[p].values():
                if torch.is_tensor(x) and x.ndim:
                    yield x


def record(device: torch.device) -> Record:
    """A CUDA graph; on the CPU, where there is none, the thing itself."""

    def capture(work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    return capture if device.type == "cuda" else lambda work: work


Setting = tuple[str, str, torch.dtype, bool]
"""(class, plan, parameter dtype, whether gradients are made in the graph)."""


def settings() -> list[Setting]:
    """With gradients that stay where they are, and with such as the graph makes."""
    return [(*setting, fresh) for setting in SETTINGS for fresh in (False, True)]


def name_of(name: str, plan: str, dtype: torch.dtype, fresh: bool) -> str:
    return f"{name}.{plan}{', gradients made in the graph' * fresh}"


def check_one(name: str, plan: str, dtype: torch.dtype, fresh: bool, device: torch.device) -> Graph:
    """One setting's outcome; never raises."""
    out, began = Graph(name_of(name, plan, dtype, fresh)), time.monotonic()
    try:
        _check_one(out, name, plan, dtype, fresh, device)
    except Exception as error:  # Triton's own are of no kind that is known here
        out.problems.append(in_words(error))
    out.seconds = round(time.monotonic() - began, 1)
    return out


def check(device: torch.device) -> Iterator[Graph]:
    """Each setting's outcome."""
    return (check_one(*setting, device) for setting in settings())


def _check_one(out: Graph, name: str, plan: str, dtype: torch.dtype, fresh: bool, device: torch.device) -> None:
    import generated

    cls = getattr(generated, name)
    graphed, eager, host = (Side(cls, plan, dtype, device, capturable) for capturable in (True, True, False))
    for side in (graphed, eager, host):
        side.feed(0)
        side.step(fresh)  # states, tables and compiled kernels are there before the capture
    if device.type == "cuda":
        torch.cuda.synchronize()
    replay = record(device)(lambda: graphed.step(fresh))
    for step in range(1, STEPS + 1):
        for side in (graphed, eager, host):
            side.feed(step)
        replay()
        eager.step(fresh)
        host.step(fresh)
        for k, (a, b) in enumerate(zip(graphed.values(), eager.values(), strict=True)):
            if not torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)):
                out.problems.append(f"step {step}: tensor {k} is not what a step outside the graph makes of it")
        if out.problems:
            return
    counts = {int(side.opt.state[p]["step"]) for side in (graphed, eager, host) for p in side.params}
    if counts != {STEPS + 1}:
        out.problems.append(f"steps counted: {sorted(counts)}, made: {STEPS + 1}")
    out.other_than_host = sum(int((a != b).sum()) for a, b in zip(graphed.values(), host.values(), strict=True))
