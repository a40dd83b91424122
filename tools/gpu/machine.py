"""The machine a run is on, the clock it keeps to, and what it prints: plain lines, wherever they go."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch


def in_words(error: Exception) -> str:
    """What an error says, as reports have it."""
    return f"{type(error).__name__}: {str(error).strip()[:500]}"


def describe(device: str) -> dict[str, Any]:
    """What a reader of the numbers has to know about where they come from."""
    found: dict[str, Any] = {
        "device": "CPU (Triton's interpreter)",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "cuda": torch.version.cuda,
        "driver": None,
        "cores": cores(),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "l2_mib": round(getattr(properties, "L2_cache_size", 0) / 2**20),
            "driver": _ask_driver(),
        }
    return found


def version(package: str) -> str | None:
    """The installed version, None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        module = sys.modules.get(package)
        return getattr(module, "__version__", None)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _ask_driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def slug(text: str) -> str:
    """A name for files.

    >>> slug("NVIDIA H200")
    'nvidia-h200'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


@dataclass
class Clock:
    """The time a run may take.  Sections that no longer fit are left out, and said to be."""

    budget: float
    start: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.start

    @property
    def left(self) -> float:
        return self.budget - self.elapsed

    def until(self, share: float) -> Clock:
        """The same clock, for what may take that share of what is left."""
        return Clock(self.elapsed + share * max(self.left, 0.0), self.start)

    @property
    def end(self) -> float:
        """When the time is over, as time.monotonic() says it."""
        return self.start + self.budget

    def say(self, text: str) -> None:
        """A line with the time since the start, at once."""
        print(f"[{self.elapsed:6.1f} s] {text}", flush=True)
