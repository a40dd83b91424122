"""`optgen doctor`: what this machine has, and what follows from it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import optgen
from optgen.base import ready
from optgen.driver import compile as compiling

Verdict = Literal["ok", "note", "missing"]
NEEDED = ("torch", "numpy", "sympy", "jinja2", "typer", "rich", "hypothesis")


@dataclass(frozen=True)
class Line:
    """One thing that was looked at."""

    what: str
    found: str
    verdict: Verdict = "ok"
    advice: str = ""


def doctor() -> list[Line]:
    """Every line, in a fixed order."""
    lines = [
        Line("optgen", f"{optgen.__version__}, {'a checkout' if ready.is_checkout() else 'installed'}"),
        Line("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
    ]
    lines += [_package(name, "missing") for name in NEEDED]
    lines.append(_package("triton", "note", "without Triton optimizers step in eager PyTorch on GPUs: right, but slow"))
    lines += [_guarded("gpu", _gpu), _guarded("cpu", _cpu), _guarded("compiler", _compiler), _guarded("cache", _cache)]
    if os.environ.get("TRITON_INTERPRET") == "1":
        lines.append(Line("TRITON_INTERPRET", "1", "note", "Triton kernels are interpreted: right, but very slow"))
    return lines


def _package(name: str, absent: Verdict, advice: str = "") -> Line:
    try:
        return Line(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Line(name, "not installed", absent, advice or f"{sys.executable} -m pip install {name}")


def _guarded(what: str, look: Callable[[], Line]) -> Line:
    """A look that must not take the others down with it: drivers fail in many ways."""
    try:
        return look()
    except Exception as error:
        return Line(what, f"{type(error).__name__}: {error}", "note", "it could not be looked at")


def _gpu() -> Line:
    import torch

    if not torch.cuda.is_available():
        build = f"PyTorch's build: {torch.version.cuda or torch.version.hip or 'CPU'}"
        return Line("gpu", "none", "note", f"{build}; optimizers step on the CPU, Triton's kernels in its interpreter")
    names = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    version = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    return Line("gpu", f"{', '.join(names)} ({version})")


def _cpu() -> Line:
    from optgen.runtime import native

    found = native.describe()
    if found["problem"]:
        return Line("cpu", "eager PyTorch", "note", f"{found['problem']}; optimizers step on the CPU many times slower")
    kept = f"{found['kernels']} kernels in {found['cache']}" + ("" if found["writable"] else ", which takes no more")
    return Line("cpu", f"{found['isa']}, {found['version']}; {kept}")


def _compiler() -> Line:
    name = os.environ.get("CC") or next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), "")
    path = shutil.which(name) if name else None
    if path is None:
        return Line("compiler", "none", "note", "Triton compiles its launchers with one: install gcc")
    return Line("compiler", path)


def _cache() -> Line:
    wanted = compiling.wanted_cache_folder()
    if not wanted.exists():
        return Line("cache", f"{wanted}, not there yet")
    if not compiling.is_private(wanted):
        return Line("cache", f"{wanted}, not private", "note", "others could write code there, so it is not used")
    return Line("cache", str(wanted))
