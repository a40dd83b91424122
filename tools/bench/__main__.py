"""Measure time and memory: `python -m tools.bench WHAT --help`.

    cpu       steps of the C++ backend beside torch's optimizers and other packages' (docs/benchmarks/cpu-*.md)
    first_use  the time until a ready-made class is there, with and without a cache
    host      the host's part of a step (docs/contract.md)
    kernel    one C++ kernel by itself, or beside the text that another revision has kept
    matrices  steps of rules of matrices beside the products that they consist of (docs/formats.md)
    memory    the peak of whole training steps (docs/benchmarks/memory-*.md)
    views     steps that write views beside quantizers after a step (docs/benchmarks/views.md)
    watch     steps under `opt.watch` beside plain ones (docs/watch.md)

`tools/gpu_check.py` times a GPU.
"""

from __future__ import annotations

import importlib
import sys

WHAT = ("cpu", "first_use", "host", "kernel", "matrices", "memory", "views", "watch")


def main(given: list[str]) -> int:
    if given[:1] and given[0] in WHAT:
        code: int = importlib.import_module(f"tools.bench.{given[0]}").main(given[1:])
        return code
    print(__doc__)
    return 0 if given in (["-h"], ["--help"]) else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
