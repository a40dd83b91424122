"""The machine that a run is on, as far as a reader of the numbers has to know it; nothing that names it."""

from __future__ import annotations

import datetime
import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from gpu.machine import cores, version

from optgen.runtime import native

VECTORS = ("neon", "asimd", "sve", "f16c", "fma", "avx2", "avx512f", "avx512bw", "avx512vbmi", "avx512_bf16")
"""Flags of /proc/cpuinfo that decide which vector code a machine runs."""


def describe(packages: Iterable[str]) -> dict[str, Any]:
    """packages: distributions whose versions are noted where they are installed."""
    compiler = native.compiler()
    versions = {name: found for name in packages if (found := version(name))}
    return {
        "cpu": cpu_model(),
        "vectors": vectors(),
        "cores": cores(),
        "last_cache_mib": last_cache_mib(),
        "memory_gib": round(_meminfo("MemTotal") / 2**30, 1),
        "huge_pages": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "compiler": scrub(compiler.version) if compiler else None,
        "code_path": native.isa().name,
        "packages": versions,
        # What others do at the same time is in the numbers too, above all in those of several threads.
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def cpu_model(path: str = "/proc/cpuinfo") -> str:
    """As the processor names itself; virtual machines leave out which one of its line it is, so its numbers follow."""
    name = _cpuinfo("model name", path) or platform.processor() or platform.machine()
    family, model = _cpuinfo("cpu family", path), _cpuinfo("model", path)
    return name if re.search(r"\d", name) or not (family and model) else f"{name} (family {family}, model {model})"


def vectors(path: str = "/proc/cpuinfo") -> list[str]:
    flags = (_cpuinfo("flags", path) or _cpuinfo("Features", path) or "").split()
    return [name for name in VECTORS if name in flags]


def _cpuinfo(key: str, path: str) -> str | None:
    found = re.search(rf"^{key}\s*:\s*(.+)$", _text(path), re.MULTILINE)
    return found[1].strip() if found else None


def last_cache_mib() -> float | None:
    """Size of the cache next to memory, as one core sees it."""
    sizes = [_text(str(path)) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    kib = [int(size.strip()[:-1]) for size in sizes if size.strip().endswith("K")]
    return max(kib) / 1024 if kib else None


def available_memory() -> float:
    """Bytes that can be taken without anything being swapped out."""
    return float(_meminfo("MemAvailable") or 8 * 2**30)


def _meminfo(key: str) -> int:
    found = re.search(rf"^{key}:\s*(\d+) kB", _text("/proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _chosen(path: str) -> str | None:
    found = re.search(r"\[(\w+)\]", _text(path))
    return found[1] if found else None


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def scrub(text: str) -> str:
    """Without the folders of paths: a report says what happened, not where somebody keeps files.

    >>> scrub("cannot open /home/somebody/cache/kernel.so: no such file")
    'cannot open kernel.so: no such file'
    """
    start = r"(?:(?<=-[IL])|(?<![\w/.:]))(?:~|[A-Za-z]:)?"
    return re.sub(start + r"(?:[\\/][\w.+@~-]+)*[\\/](?=[\w.+@~-])", "", text)
