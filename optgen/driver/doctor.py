"""`optgen doctor`: report what this machine has, and what follows from it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import optgen
from optgen.base import ready

Verdict = Literal["ok", "note", "warning", "missing"]
NEEDED = ("torch", "sympy", "jinja2", "typer", "rich")


@dataclass(frozen=True)
class Line:
    """A line of the report."""

    what: str
    found: str
    verdict: Verdict = "ok"
    advice: str = ""


def doctor() -> list[Line]:
    """Return every line, in a fixed order."""
    lines = [
        Line("optgen", f"{optgen.__version__}, {'a checkout' if ready.is_checkout() else 'installed'}"),
        Line("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
    ]
    lines += [_package(name, "missing") for name in NEEDED]
    lines.append(_package("hypothesis", "note", "`optgen fuzz` needs it: pip install 'optgen[fuzz]'"))
    lines.append(_package("triton", "note", "without Triton optimizers step in eager PyTorch on GPUs: right, but slow"))
    looks = {"gpu": _gpu, "cpu": _cpu, "compiler": _compiler, "cache": _cache}
    for what, look in looks.items():
        try:
            lines.append(look())
        except Exception as error:  # of a driver, for instance: the other lines are made all the same
            lines.append(Line(what, f"{type(error).__name__}: {error}", "note", "it could not be looked at"))
    if os.environ.get("TRITON_INTERPRET") == "1":
        lines.append(Line("TRITON_INTERPRET", "1", "note", "Triton kernels are interpreted: right, but very slow"))
    return lines


def verdict(lines: Sequence[Line]) -> str:
    """Return one line for all: ready or not, and where optimizers step."""
    missing = [x.what for x in lines if x.verdict == "missing"]
    if missing:
        return f"not ready: {', '.join(missing)} missing"
    of = {x.what: x.verdict for x in lines}
    gpu, cpu = of["gpu"] == "ok", of["cpu"] == "ok"
    places = [f"{'Triton kernels' if of['triton'] == 'ok' else 'eager PyTorch'} on GPUs"] if gpu else []
    places.append(f"{'C++ kernels' if cpu else 'eager PyTorch'} on the CPU")
    warned = [x.what for x in lines if x.verdict == "warning"]
    return f"ready: {', '.join(places)}" + (f"; see the warning at {' and '.join(warned)}" if warned else "")


def _package(name: str, absent: Verdict, advice: str = "") -> Line:
    try:
        return Line(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Line(name, "not installed", absent, advice or f"{sys.executable} -m pip install {name}")


def _gpu() -> Line:
    import torch

    if not torch.cuda.is_available():
        build = f"PyTorch's build: {torch.version.cuda or torch.version.hip or 'CPU'}"
        triton = ", Triton's kernels in its interpreter" if importlib.util.find_spec("triton") else ""
        return Line("gpu", "none", "note", f"{build}; optimizers step on the CPU{triton}")
    names = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    version = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    return Line("gpu", f"{', '.join(names)} ({version})")


def _cpu() -> Line:
    from optgen.runtime.cpu import native

    by = native.compiler()
    if by is None:
        why = f"{native.no_compiler()}; optimizers step on the CPU many times slower"
        return Line("cpu", "eager PyTorch", "note", why)
    return Line("cpu", f"{native.isa().name}, {by.version}")


def _compiler() -> Line:
    name = os.environ.get("CC") or next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), "")
    path = shutil.which(name) if name else None
    if path is None:
        return Line("compiler", "none", "note", "Triton compiles its launchers with one: install gcc")
    return Line("compiler", f"{path}, for Triton's launchers")


def _cache() -> Line:
    from optgen.runtime.cpu import native

    folder = native.cache_folder()
    text = f"{folder}, generated code and {len(list(folder.glob('*.so')))} compiled kernels"
    present = next(place for place in (folder, *folder.parents) if place.exists())
    if present == folder and not native.is_ours(folder.stat()):
        why = "other users can write to it, so it is not used"
    elif not present.is_dir() or not os.access(present, os.W_OK):
        why = "read-only"
    else:
        return Line("cache", text)
    advice = f"{why}: all is made again in every process; OPTGEN_CACHE names another folder"
    return Line("cache", text, "warning", advice)
