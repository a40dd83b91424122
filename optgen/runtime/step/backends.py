"""The choice of the backend that makes a step."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import torch

from optgen.runtime.cpu import cpu, native
from optgen.runtime.gpu import compiled
from optgen.runtime.options import options
from optgen.runtime.records import Variant
from optgen.runtime.records.join import Pair
from optgen.runtime.records.warn import warn
from optgen.runtime.work.bucket import Backend, Bucket


@functools.cache
def installed() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _warn_slow(reason: str) -> None:
    warn(f"the optimizer steps in eager torch, many times slower than fused: {reason}")


def meaning(option: str) -> str:
    """Return a group's `backend` option; OPTGEN_BACKEND takes the place of "auto"."""
    if option != "auto":
        if option not in options.BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(options.BACKENDS)}, got {option!r}")
        return option
    asked = os.environ.get("OPTGEN_BACKEND") or "auto"
    if asked not in options.BACKENDS:
        raise ValueError(f"OPTGEN_BACKEND must be one of {', '.join(options.BACKENDS)}, got {asked!r}")
    return asked


def choose(option: str, device: torch.device, plan: Pair) -> Backend:
    """Resolve a group's `backend` option for a device.  Raises RuntimeError naming the missing component."""
    option = meaning(option)
    usual: dict[str, Backend] = {"cpu": "cpp", "cuda": "triton"}
    named: dict[str, Backend] = {"cpp": "cpp", "triton": "triton"}
    backend = usual.get(device.type, "reference") if option == "auto" else named.get(option, "reference")
    missing = _missing(backend, device, plan)
    if missing and option != "auto":
        raise RuntimeError(f"backend={option!r}{missing}")
    if missing:
        _warn_slow(missing.removeprefix(", but "))
    return "reference" if missing else backend


def _missing(backend: Backend, device: torch.device, plan: Pair) -> str:
    """Return why a backend cannot make steps under a plan on a device, "" if it can."""
    if backend == "reference":
        return ""
    if backend == "cpp":
        if device.type != "cpu":
            return f" does not run on {device.type} tensors"
        if not cpu.has_kernels(plan):
            return f", but plan {plan.name!r} was built without C++ kernels"
        return "" if native.compiler() else f", but {native.no_compiler()}"
    if not installed():
        return ", but triton is not installed"
    if not compiled.has_kernels(plan):
        return f", but plan {plan.name!r} was built without Triton kernels"
    if device.type == "cuda" or (device.type == "cpu" and interpreted()):
        return ""
    return f" does not run on {device.type} tensors (on the CPU: TRITON_INTERPRET=1)"


def able(backend: Backend, plan: Pair, variant: Variant) -> Backend:
    """Return the backend, or eager torch if it has no kernels for a step of several stages."""
    if not variant.stages or backend in ("reference", "cpp"):
        return backend
    kernels = [s.kernel for s in variant.stages if not s.on_host]
    if backend == "triton" and hasattr(compiled.kernels(plan), kernels[0]):
        return backend
    return "reference"


def compile_all(buckets: Sequence[Bucket], asked: Sequence[str]) -> None:
    """Give buckets of the C++ backend their kernels, compiled together, before anything changes.

    asked   the `backend` option of each bucket's group
    Raises RuntimeError if a kernel that was requested cannot be had; else warns once, and takes eager torch.
    """
    wanted = [(bucket, option) for bucket, option in zip(buckets, asked, strict=True) if bucket.backend == "cpp"]
    if not wanted:
        return
    found = cpu.kernels([bucket for bucket, _ in wanted])
    for (bucket, option), made in zip(wanted, found, strict=True):
        if not isinstance(made, native.Unavailable):
            bucket.kernel = made
        elif meaning(option) == "cpp":
            raise RuntimeError(f"backend='cpp', but {bucket.variant.function}: {made}")
        else:
            _warn_slow(f"{bucket.variant.function}: {made}")
            bucket.backend = "reference"
