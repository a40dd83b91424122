"""Measure the first use of a ready-made optimizer, in new processes: `python -m tools.bench first_use [CLASS]`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

CODE = """
import sys, time
times = [time.process_time()]
import torch
times.append(time.process_time())
from optgen import optim
from optgen.runtime.layout import plans
plans.load(getattr(optim, sys.argv[1]), plans.USUAL)
times.append(time.process_time())
print(times[1] - times[0], times[2] - times[1])
"""


def first_use(cls: str) -> dict[str, float]:
    """Return seconds of CPU time: to import torch, and beyond that to have a ready-made class and its default plan,
    without a cache ("cold", the better of two) and with one ("warm", the best of three)."""

    def run(cache: str) -> tuple[float, float]:
        env = {**os.environ, "OPTGEN_CACHE": cache, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": ""}
        command = [sys.executable, "-c", CODE, cls]
        said = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
        torch, ours = map(float, said.split())
        return torch, ours

    with tempfile.TemporaryDirectory() as folder:
        run(f"{folder}/first")  # and have Python compile the package itself
        cold = min(run(f"{folder}/{cache}")[1] for cache in ("second", "third"))
        warm = [run(f"{folder}/third") for _ in range(3)]
    return {"torch": min(x for x, _ in warm), "cold": cold, "warm": min(x for _, x in warm)}


def main(given: list[str]) -> int:
    for name, seconds in first_use(*given[:1] or ["SOAP"]).items():
        print(f"{name:5} {seconds:.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
