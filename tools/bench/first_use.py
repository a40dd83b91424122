"""Measure the first use of a ready-made optimizer, in new processes: `python -m tools.bench first_use [CLASS]`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

CODE = """
import os, sys, time
begun = time.process_time()
import torch
print(time.process_time() - begun, flush=True)
for cache in sys.argv[2:]:
    if os.fork() == 0:
        os.environ["OPTGEN_CACHE"], begun = cache, time.process_time()
        from optgen import optim
        from optgen.runtime.layout import plans
        plans.load(getattr(optim, sys.argv[1]), plans.USUAL)
        print(time.process_time() - begun, flush=True)
        os._exit(0)
    os.wait()
"""


def first_use(cls: str) -> dict[str, float]:
    """Return seconds of CPU time: to import torch, and beyond that to have a ready-made class and its default plan,
    without a cache ("cold", the better of two) and with one ("warm", the best of three)."""

    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": ""}
    with tempfile.TemporaryDirectory() as folder:
        caches = [f"{folder}/{k}" for k in (1, 2, 3, 3, 3, 3)]  # for the first one Python compiles the package itself
        command = [sys.executable, "-c", CODE, cls, *caches]
        said = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True).stdout
    torch, _, *cold, a, b, c = map(float, said.split())
    return {"torch": torch, "cold": min(cold), "warm": min(a, b, c)}


def main(given: list[str]) -> int:
    for name, seconds in first_use(*given[:1] or ["SOAP"]).items():
        print(f"{name:5} {seconds:.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
