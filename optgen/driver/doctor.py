"""`optgen doctor`: report what this machine has, and what follows from it."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass

import optgen
from optgen.base import ready

NEEDED = ("torch", "sympy", "jinja2")
OPTIONAL = {
    "triton": "without Triton optimizers step in eager PyTorch on GPUs: right, but slow",
}


@dataclass(frozen=True)
class Line:
    """A line of the report; `missing`: without it optimizers cannot step."""

    what: str
    found: str
    advice: str = ""
    missing: bool = False


def doctor() -> list[Line]:
    """Return every line, in a fixed order."""
    lines = [
        Line("optgen", f"{optgen.__version__}, {'a checkout' if ready.is_checkout() else 'installed'}"),
        Line("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
    ]
    for name in (*NEEDED, *OPTIONAL):
        try:
            lines.append(Line(name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            lines.append(Line(name, "not installed", OPTIONAL.get(name, ""), name in NEEDED))
    return lines if any(line.missing for line in lines) else [*lines, _gpu(), _cpu(), _cache()]


def _gpu() -> Line:
    import torch

    if not torch.cuda.is_available():
        return Line("gpu", "none", "optimizers step on the CPU")
    names = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    version = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    return Line("gpu", f"{', '.join(names)} ({version})")


def _cpu() -> Line:
    from optgen.runtime.cpu import native

    by = native.compiler()
    if by is None:
        return Line("cpu", "eager PyTorch", f"{native.no_compiler()}; optimizers step on the CPU many times slower")
    return Line("cpu", f"C++ kernels, {native.isa().name}, {by.version}")


def _cache() -> Line:
    from optgen.runtime.cpu import cache

    folder = cache.place()
    if cache.folder() == folder:
        return Line("cache", str(folder))
    why = "it is read-only, or others can write to it: all is made again in every process"
    return Line("cache", str(folder), f"{why}; OPTGEN_CACHE names another folder")
