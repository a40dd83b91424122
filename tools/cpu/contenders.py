"""What is timed: generated optimizers on their code paths, torch's own, and others where they are installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from gpu import catalog
from gpu.contenders import BETAS, LION_BETAS, MOMENTUM, Contender, Parameters, Runner
from gpu.contenders import _import as imported
from torch import Tensor

from cpu.ceiling import Streams

BASE = "torch AdamW fused fp32"
FLAGSHIP = "AdamW int8_split24"
PACKAGES = ("optgen", "deepspeed", "torchao", "bitsandbytes", "ninja", "numpy", "matplotlib")

BF16, FP32 = torch.bfloat16, torch.float32
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": BETAS, "eps": 1e-8, "weight_decay": 0.01}
LION: dict[str, Any] = {"lr": 1e-3, "betas": LION_BETAS, "weight_decay": 0.01}
SGD: dict[str, Any] = {"lr": 1e-3, "momentum": MOMENTUM}


@dataclass(frozen=True)
class Entrant(Contender):
    """A contender on a CPU.

    isa   the code path, "" for the one that the machine would take
    """

    isa: str = ""

    def path(self) -> Any:
        """Inside, kernels are compiled and loaded for this entrant's code path."""
        return code_path(self.isa) if self.isa else nullcontext()


@contextmanager
def code_path(isa: str) -> Iterator[None]:
    before = os.environ.get("OPTGEN_ISA")
    os.environ["OPTGEN_ISA"] = isa
    try:
        yield
    finally:
        if before is None:
            del os.environ["OPTGEN_ISA"]
        else:
            os.environ["OPTGEN_ISA"] = before


def entrant(name: str, dtype: torch.dtype, kept: float, make: Callable[[Parameters], Any], **more: Any) -> Entrant:
    """kept: bytes per element of weight and states, to see what fits into memory; reports measure it."""
    return Entrant(name, "all", dtype, 2 * kept + dtype.itemsize, kept, make, **more)


# Generated ------------------------------------------------------------------------------------------------------------


def generated(backend: str) -> list[Entrant]:
    """AdamW and Lion; AdamW with 8-bit states on the other code paths as well, where the backend has several."""
    paths = ("avx2", "portable") if backend == "cpp" else ()
    return [
        ours("AdamW", "int8_split24", BF16, backend, ADAMW),
        *(ours("AdamW", "int8_split24", BF16, backend, ADAMW, isa=isa) for isa in paths),
        ours("AdamW", "int8_rn_split24", BF16, backend, ADAMW),
        ours("AdamW", "fp32", FP32, backend, ADAMW),
        ours("Lion", "int8_split24", BF16, backend, LION),
        ours("Lion", "fp32", FP32, backend, LION),
    ]


def ours(cls: str, plan: str, dtype: torch.dtype, backend: str, hypers: dict[str, Any], isa: str = "") -> Entrant:
    found = catalog.generated_class(cls)
    module = catalog.plan_module(found, plan)
    flags = {f.name: f.default if f.nonzero is None else bool(hypers.get(f.nonzero)) for f in found.FLAGS}
    kept = catalog.footprint(module, catalog.large_variant(module, str(dtype).removeprefix("torch."), flags))
    name = f"{cls} {plan}" + f", {isa}" * bool(isa)
    return entrant(name, dtype, kept, lambda p: found(p, plan=plan, backend=backend, **hypers), ours=True, isa=isa)


# Others ---------------------------------------------------------------------------------------------------------------


def torch_s_own() -> list[Entrant]:
    adamw, sgd = torch.optim.AdamW, torch.optim.SGD
    return [
        entrant(BASE, FP32, 12, lambda p: adamw(p, fused=True, **ADAMW)),
        entrant("torch AdamW fused bf16", BF16, 6, lambda p: adamw(p, fused=True, **ADAMW)),
        entrant("torch AdamW foreach fp32", FP32, 12, lambda p: adamw(p, foreach=True, **ADAMW)),
        entrant("torch SGD momentum fused fp32", FP32, 8, lambda p: sgd(p, fused=True, **SGD)),
    ]


def peers() -> tuple[list[Entrant], dict[str, str]]:
    """(those that can be imported here, name -> why not for the rest)."""
    # Extensions that are compiled when first used look for `ninja` on the path; it is installed beside Python.
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    found, missing = [], {}
    deepspeed = imported("deepspeed.ops.adam", "DeepSpeedCPUAdam")
    if isinstance(deepspeed, str):
        missing["DeepSpeedCPUAdam"] = deepspeed
    else:
        make = deepspeed.DeepSpeedCPUAdam
        found.append(entrant("DeepSpeedCPUAdam fp32", FP32, 12, lambda p: make(p, adamw_mode=True, **ADAMW)))
    for name, kept in (("AdamW8bit", 6.03), ("AdamW4bit", 5.06), ("AdamWFp8", 6.03)):
        ao = imported("torchao.optim", name)
        if isinstance(ao, str):
            missing[f"torchao {name}"] = ao
        else:
            found.append(entrant(f"torchao {name} fp32", FP32, kept, _with_adamw(getattr(ao, name))))
    bnb = imported("bitsandbytes", "optim")
    if isinstance(bnb, str):
        missing["bitsandbytes AdamW8bit"] = bnb
    else:
        found.append(entrant("bitsandbytes AdamW8bit fp32", FP32, 6.03, _with_adamw(bnb.optim.AdamW8bit)))
    return found, missing


def _with_adamw(cls: Any) -> Callable[[Parameters], Any]:
    return lambda params: cls(params, **ADAMW)


# What a step moves ----------------------------------------------------------------------------------------------------


def streams(runner: Runner) -> Streams:
    """Bytes per element of what the optimizer holds after a step: weights and states changed, gradients read.

    Counted on the tensors that are there, not on what a library says of itself: several keep small or unaligned
    tensors in fp32.
    """
    numel = sum(p.numel() for p in runner.params)
    sizes: dict[str, int] = {}
    seen: set[int] = set()
    for p in runner.params:
        _add(sizes, seen, "p", p.detach())
        for name, value in runner.optimizer.state.get(p, {}).items():
            if isinstance(value, Tensor) and name != "step":
                for part, tensor in _plain(name, value):
                    _add(sizes, seen, part, tensor)
    gradients = sum(p.grad.nbytes for p in runner.params if p.grad is not None)
    return Streams(tuple(sorted((size / numel for size in sizes.values()), reverse=True)), (gradients / numel,))


def _add(sizes: dict[str, int], seen: set[int], name: str, tensor: Tensor) -> None:
    if tensor.numel() and tensor.data_ptr() not in seen:
        seen.add(tensor.data_ptr())
        sizes[name] = sizes.get(name, 0) + tensor.nbytes


def _plain(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a tensor is made of, where a library wraps its codes and scales into a class."""
    if not hasattr(value, "__tensor_flatten__"):
        yield name, value
        return
    for part in value.__tensor_flatten__()[0]:
        yield from _plain(f"{name}.{part}", getattr(value, part))


# Fitting into memory --------------------------------------------------------------------------------------------------


def batches(
    entrants: Sequence[Entrant], numel: int, memory: float, beside: Sequence[str] = (BASE, FLAGSHIP)
) -> tuple[list[list[Entrant]], list[Entrant]]:
    """(runs of entrants that fit into memory at the same time, those that fit in none).

    beside   what everything is compared with: in every run
    """

    def size(chosen: Sequence[Entrant]) -> float:
        shared = sum(dtype.itemsize for dtype in {c.dtype for c in chosen})  # one set of gradients per dtype
        patterns = max((c.kept + c.dtype.itemsize for c in chosen), default=0.0)  # what the ceilings share
        return numel * (sum(c.kept for c in chosen) + shared + patterns)

    first = [c for c in entrants if c.name in beside]
    out, left_out = [list(first)], []
    for one in entrants:
        if one in first:
            continue
        if size([*first, one]) > memory:
            left_out.append(one)
        elif size([*out[-1], one]) <= memory:
            out[-1].append(one)
        else:
            out.append([*first, one])
    return ([], list(entrants)) if size(first) > memory else (out, left_out)
