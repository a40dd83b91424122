"""States that change places between the device and the host: checkpoints that are loaded elsewhere, and offloading."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gpu.machine import in_words

SHAPES = ((96, 80), (4353,), (5, 70))
STEPS = 3
CPU = torch.device("cpu")


@dataclass
class Move:
    """What became of one check."""

    case: str
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


def check_one(name: str, device: torch.device) -> Move:
    """One of `CHECKS`; never raises."""
    out, began = Move(name), time.monotonic()
    try:
        out.problems += CHECKS[name](device)
    except Exception as error:  # a finding, not the end of the others
        out.problems.append(in_words(error))
    out.seconds = round(time.monotonic() - began, 1)
    return out


def _parameters(device: torch.device) -> list[torch.nn.Parameter]:
    draw = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(s, generator=draw).bfloat16().to(device)) for s in SHAPES]


def _step(optimizer: Any, params: Sequence[torch.nn.Parameter], step: int) -> None:
    draw = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=draw).to(p)
    optimizer.step()


def _differences(
    first: Any, second: Any, one: Sequence[torch.nn.Parameter], two: Sequence[torch.nn.Parameter]
) -> list[str]:
    """Names of the values that have other bits."""
    found = []
    for k, (p, q) in enumerate(zip(one, two, strict=True)):
        pairs = {"p": (p.detach(), q.detach())}
        pairs |= {name: (x, second.state[q][name]) for name, x in first.state[p].items() if torch.is_tensor(x)}
        for name, (a, b) in pairs.items():
            a, b = (x.cpu().contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
            if not torch.equal(a, b):
                found.append(f"tensor {k} {tuple(p.shape)}: {name} has other bits")
    return found


def _checkpoint(begun: torch.device, other: torch.device) -> list[str]:
    """Steps on one device, a checkpoint, and one more step there and on the other, both in the eager reference."""
    import generated

    cls = generated.AdamW
    params = _parameters(begun)
    optimizer = cls(params, plan="int8_split24", backend="triton" if begun.type == "cuda" else "reference")
    for step in range(STEPS):
        _step(optimizer, params, step)
    buffer = io.BytesIO()
    torch.save({"weights": [p.detach() for p in params], "optimizer": optimizer.state_dict()}, buffer)
    sides = []
    for device in (begun, other):
        buffer.seek(0)
        saved = torch.load(buffer, map_location=CPU if device == other else None, weights_only=True)
        copies = [torch.nn.Parameter(w.to(device)) for w in saved["weights"]]
        fresh = cls(copies, plan="int8_split24", backend="reference")
        fresh.load_state_dict(saved["optimizer"])
        if device == begun and (different := _differences(optimizer, fresh, params, copies)):
            return [f"loaded: {x}" for x in different]
        _step(fresh, copies, STEPS)
        sides.append((fresh, copies))
    (here, ours), (there, theirs) = sides
    where = {x.device.type for p in theirs for x in there.state[p].values() if torch.is_tensor(x) and x.ndim}
    wrong = [f"states loaded for {other.type} lie on {', '.join(sorted(where))}"] if where != {other.type} else []
    return wrong + [f"a step after loading: {x}" for x in _differences(here, there, ours, theirs)]


def _offload(device: torch.device) -> list[str]:
    """States in host memory, where C++ makes the steps, beside states on the device: strict maths, so the same bits."""
    import optgen

    cls = optgen.compile("adamw", plan="int8_split24", maths="strict")
    sides = []
    for options in ({"offload": True}, {"backend": "triton"}):
        params = _parameters(device)
        optimizer: Any = cls(params, plan="int8_split24", **options)
        for step in range(STEPS):
            _step(optimizer, params, step)
        sides.append((optimizer, params))
    if device.type == "cuda":
        torch.cuda.synchronize()
    (there, theirs), (here, ours) = sides
    on = {x.device.type for p in theirs for x in there.state[p].values() if torch.is_tensor(x) and x.ndim}
    wrong = [f"offloaded states lie on {', '.join(sorted(on))}"] if on != {"cpu"} else []
    return wrong + _differences(here, there, ours, theirs)


CHECKS: dict[str, Callable[[torch.device], list[str]]] = {
    "a checkpoint of the device, loaded on the CPU": lambda device: _checkpoint(device, CPU),
    "a checkpoint of the CPU, loaded on the device": lambda device: _checkpoint(CPU, device),
    "AdamW int8_split24 with its states in host memory": _offload,
}
