"""The memory of an optimizer, per parameter tensor and in total."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from optgen.runtime.layout import layout
from optgen.runtime.layout.fp8_weight import memory
from optgen.runtime.records import Variant, fed_name
from optgen.runtime.states import state


@dataclass(frozen=True)
class ParameterMemory:
    """One parameter tensor; `states` maps each stored field to its bytes (the weight itself not counted), `places` each
    device to the bytes on it."""

    name: str | int
    shape: tuple[int, ...]
    dtype: str
    plan: str
    kernel: str
    numel: int
    weight: int
    states: dict[str, int]
    places: dict[str, int]

    @property
    def total(self) -> int:
        return self.weight + sum(self.states.values())

    @property
    def per_element(self) -> float:
        """Bytes per element, the weight counted."""
        return self.total / self.numel if self.numel else 0.0


@dataclass(frozen=True, repr=False)
class Memory:
    """Bytes of the weights and of what is kept beside them; printed as a table.  Gradients are not counted."""

    parameters: tuple[ParameterMemory, ...]

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.parameters)

    @property
    def weights(self) -> int:
        return sum(p.weight for p in self.parameters)

    @property
    def states(self) -> dict[str, int]:
        """Stored field -> bytes over all parameters."""
        total: Counter[str] = Counter()
        for p in self.parameters:
            total.update(p.states)
        return dict(total)

    @property
    def places(self) -> dict[str, int]:
        """Device -> bytes of weights and states that lie on it."""
        return dict(sum((Counter(p.places) for p in self.parameters), Counter[str]()))

    @property
    def total(self) -> int:
        return self.weights + sum(self.states.values())

    @property
    def per_element(self) -> float:
        """Bytes per element over all parameters, the weights counted."""
        return self.total / self.numel if self.numel else 0.0

    def __repr__(self) -> str:
        places = [(f"on {device}", size) for device, size in self.places.items()]
        lines = [("weights", self.weights), *self.states.items(), ("total", self.total), *places]
        width = max(len(name) for name, _ in lines)
        plans = list(dict.fromkeys(p.plan for p in self.parameters))
        table = [f"{_tensors(self)}, {self.numel:,} elements, plan {', '.join(plans) or 'none'}"]
        for name, size in lines:
            per = size / self.numel if self.numel else 0.0
            table.append(f"  {name:<{width}}  {human(size):>10}  {per:8.4f} bytes per element")
        for plan in plans if len(plans) > 1 else ():
            part = Memory(tuple(p for p in self.parameters if p.plan == plan))
            table.append(f"  {plan}: {_tensors(part)}, {part.numel:,} elements, {part.per_element:.4f} bytes each")
        return "\n".join(table)


def _tensors(memory: Memory) -> str:
    count = len(memory.parameters)
    return f"{count} tensor{'s' * (count != 1)}"


def human(size: int) -> str:
    """A size in binary units, three digits."""
    power = min(int(math.log2(size) // 10), 4) if size else 0
    return f"{size} B" if power == 0 else f"{size / 1024**power:.3g} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"


def measure(p: torch.Tensor, name: str | int, plan: str, variant: Variant, kept: Mapping[str, Any]) -> ParameterMemory:
    """Return the bytes of p and its state, which need not exist yet, from shapes; an input that is freed has none."""
    states = {f.name: math.prod(layout.field_shape(f, p.shape)) * f.torch_dtype.itemsize for f in variant.fields}
    states |= {f.name: math.prod(layout.field_shape(f, p.shape)) * f.torch_dtype.itemsize for f in variant.shown}
    states |= {x: 0 for x in states if type(fed := kept.get(fed_name(x))) is float and not fed}
    weight = p.numel() * memory(p).element_size()
    here = weight + sum(states[f.name] for f in variant.shown)
    places = Counter({str(p.device): here}) + Counter({str(state.home(p)): sum(states.values()) + weight - here})
    return ParameterMemory(
        name, tuple(p.shape), str(p.dtype).removeprefix("torch."), plan, variant.function, p.numel(), weight, states,
        dict(places),
    )  # fmt: skip
