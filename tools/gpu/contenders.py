"""What is timed: generated optimizers, and others that do the same where they are installed."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpu import catalog
from gpu.shapes import Shapes

Parameters = Sequence[torch.nn.Parameter]

BETAS, LION_BETAS, MOMENTUM = (0.9, 0.999), (0.9, 0.99), 0.9


@dataclass(frozen=True)
class Contender:
    """One way to step a list of parameters.

    family   the rule: contenders of one family do the same work and are compared with its first
    dtype    of the parameters and gradients
    traffic  bytes per element that a step has to move
    kept     bytes per element of weights and states, for fitting them into memory; gradients are shared
    make     builds the optimizer; raises where its library is missing or refuses
    """

    name: str
    family: str
    dtype: torch.dtype
    traffic: float
    kept: float
    make: Callable[[Parameters], Any]
    ours: bool = False

    def build(self, shapes: Shapes, gradients: Sequence[Tensor], device: torch.device) -> Runner:
        params = [torch.nn.Parameter(_random(shape, self.dtype, device)) for shape in shapes]
        for p, g in zip(params, gradients, strict=True):
            p.grad = g
        return Runner(self, params, self.make(params))


@dataclass
class Runner:
    """A contender with its parameters in memory; `optimizer` only needs a `step`."""

    contender: Contender
    params: list[torch.nn.Parameter]
    optimizer: Any

    def step(self) -> None:
        self.optimizer.step()


class Copying:
    """Copies one buffer to another: what memory can do at all, counted as read plus written.

    Of random bytes: memory and caches of some devices are quicker with what can be compressed.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.source = torch.empty(size, dtype=torch.uint8, device=device).random_(0, 256)
        self.target = torch.empty_like(self.source)
        self.moved = 2 * size

    def step(self) -> None:
        self.target.copy_(self.source)


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device).normal_(0.0, 0.02)


def gradients(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """One set for all contenders: no step writes to its gradients."""
    return [torch.empty(shape, dtype=dtype, device=device).normal_(0.0, 1e-3) for shape in shapes]


# Generated ------------------------------------------------------------------------------------------------------------


def ours(cls: str, plan: str, dtype: torch.dtype, backend: str, **hypers: Any) -> Contender:
    """A generated optimizer under one of its plans."""
    generated = catalog.generated_class(cls)
    module = catalog.plan_module(generated, plan)
    flags = {f.name: f.default if f.nonzero is None else bool(hypers.get(f.nonzero)) for f in generated.FLAGS}
    param = str(dtype).removeprefix("torch.")
    variant = catalog.large_variant(module, param, flags)
    return Contender(
        f"{cls} {plan}",
        generated.SPEC,
        dtype,
        catalog.traffic(module, variant.kernel_name, dtype).total,
        catalog.footprint(module, variant),
        lambda params: generated(params, plan=plan, backend=backend, **hypers),
        ours=True,
    )


def generated_contenders(backend: str) -> list[Contender]:
    """AdamW, Lion and SGD with momentum; of each family the 8-bit one with bf16 weights first."""
    found = []
    for cls, hypers in (
        ("AdamW", {"betas": BETAS, "weight_decay": 0.01}),
        ("Lion", {"betas": LION_BETAS, "weight_decay": 0.01}),
        ("SGD", {"momentum": MOMENTUM}),
    ):
        built = catalog.generated_class(cls).PLANS if cls in catalog.names() else ()
        for plan, dtype in (
            ("int8_split24", torch.bfloat16),
            ("fp32", torch.float32),
            ("int8_rn_split24", torch.bfloat16),
        ):
            if plan in built:
                found.append(ours(cls, plan, dtype, backend, lr=1e-3, **hypers))
    return found


# Others ---------------------------------------------------------------------------------------------------------------


def peers() -> tuple[list[Contender], dict[str, str]]:
    """(those that can be imported here, name -> why not for the rest)."""
    adamw: dict[str, Any] = {"lr": 1e-3, "betas": BETAS, "weight_decay": 0.01}
    lion: dict[str, Any] = {"lr": 1e-3, "betas": LION_BETAS, "weight_decay": 0.01}
    sgd: dict[str, Any] = {"lr": 1e-3, "momentum": MOMENTUM}
    bf16, fp32 = torch.bfloat16, torch.float32
    found = [
        Contender("torch fused AdamW fp32", "adamw", fp32, 28, 12, lambda p: torch.optim.AdamW(p, fused=True, **adamw)),
        Contender("torch fused AdamW bf16", "adamw", bf16, 14, 6, lambda p: torch.optim.AdamW(p, fused=True, **adamw)),
        Contender("torch fused SGD fp32", "sgd", fp32, 20, 8, lambda p: torch.optim.SGD(p, fused=True, **sgd)),
    ]
    missing = {}
    flash = _import("flashoptim", "FlashAdamW", "cast_model")
    if isinstance(flash, str):
        missing["FlashOptim"] = flash
    else:
        # 8-bit states with an fp16 scale per 32, 24-bit weights: its defaults.
        found += [
            Contender("FlashAdamW", "adamw", bf16, 12.25, 5.125, lambda p: flash.FlashAdamW(p, **adamw)),
            Contender("FlashLion", "lion", bf16, 10.125, 4.0625, lambda p: flash.FlashLion(p, **lion)),
            Contender("FlashSGD", "sgd", bf16, 10.125, 4.0625, lambda p: flash.FlashSGD(p, **sgd)),
        ]
    bits = _import("bitsandbytes", "optim")
    if isinstance(bits, str):
        missing["bitsandbytes"] = bits
    else:
        # bf16 weights without more bits, states with an fp32 scale per 256: it does less work.
        found += [
            Contender("bnb AdamW8bit", "adamw", bf16, 10.0625, 4.03125, lambda p: bits.optim.AdamW8bit(p, **adamw)),
            Contender("bnb Lion8bit", "lion", bf16, 8.03125, 3.015625, lambda p: bits.optim.Lion8bit(p, **lion)),
        ]
    return found, missing


def _import(name: str, *wanted: str) -> Any:
    """The module, or in words why it cannot be used."""
    try:
        module = importlib.import_module(name)
    except Exception as error:  # a broken installation says so in many ways
        return "not installed" if isinstance(error, ModuleNotFoundError) else f"{type(error).__name__}: {error}"[:200]
    lacking = [attribute for attribute in wanted if not hasattr(module, attribute)]
    return f"the module named {name} here is another one: no {', '.join(lacking)}" if lacking else module


# Fitting into memory --------------------------------------------------------------------------------------------------


def batches(family: Sequence[Contender], numel: int, memory: float) -> tuple[list[list[Contender]], list[Contender]]:
    """(runs of contenders that fit beside each other, those that fit in none).

    The family's first is in every batch: whatever is compared with it is timed beside it.

    memory   bytes, with what is shared (copy buffers) taken off
    """

    def size(chosen: Sequence[Contender]) -> float:
        shared = sum(dtype.itemsize for dtype in {c.dtype for c in chosen})
        return numel * (sum(c.kept for c in chosen) + shared)

    fitting = [c for c in family if size([c]) <= memory]
    left_out = [c for c in family if c not in fitting]
    if not fitting:
        return [], left_out
    first, rest = fitting[0], fitting[1:]
    out = [[first]]
    for contender in rest:
        if size([first, contender]) > memory:
            left_out.append(contender)
        elif size([*out[-1], contender]) <= memory:
            out[-1].append(contender)
        else:
            out.append([first, contender])
    return out, left_out


def scaled(numel: int, family: Sequence[Contender], memory: float) -> int:
    """`numel`, or the largest 2^k * 125 that lets the family's largest contender run beside its first."""
    first = family[0]
    need = max(first.kept + c.kept + first.dtype.itemsize + (c.dtype != first.dtype) * c.dtype.itemsize for c in family)
    if numel * need <= memory:
        return numel
    return 125 << int(math.log2(max(memory / need / 125, 1)))
