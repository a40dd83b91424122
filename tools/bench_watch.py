"""The cost of a watched step on this machine: `opt.watch`, AdamW under int8_split24, side by side.

    .venv/bin/python tools/bench_watch.py [--threads 1] [--pairs 20]

Each pair has a watched and a plain step, in turns first; the figures are medians of their ratios.  With one thread it
is the time of the processor, which other work on the machine does not lengthen.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [p for p in (str(ROOT),) if p not in sys.path]

from optgen.optim import AdamW  # noqa: E402
from tools.benchmark import gpt2  # noqa: E402


def shapes(layers: int, width: int, words: int) -> list[tuple[int, ...]]:
    """The tensors of a small GPT."""
    found: list[tuple[int, ...]] = [(words, width), (1024, width)]
    for _ in range(layers):
        sides = ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))
        found += [*sides, *((rows,) for rows, _ in sides), *[(width,)] * 4]
    return [*found, (width,), (width,)]


def cost(sizes: list[tuple[int, ...]], pairs: int) -> tuple[float, float]:
    """Return (seconds of a plain step, what a watched one takes more, as a share)."""
    params = [torch.nn.Parameter((0.02 * torch.randn(size)).bfloat16()) for size in sizes]
    for p in params:
        p.grad = torch.randn_like(p)
    opt = AdamW(params, lr=1e-4, plan="int8_split24")
    opt.step()
    watch = opt.watch(1, to=lambda step, tensors: None)
    opt.step()
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    plain, more = [], []
    for k in range(pairs):
        took = {}
        for watched in (k % 2 == 0, k % 2 == 1):
            opt._watch = watch if watched else None
            start = clock()
            opt.step()
            took[watched] = clock() - start
        plain.append(took[False])
        more.append(took[True] / took[False] - 1)
    return statistics.median(plain), statistics.median(more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--pairs", type=int, default=20)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    for name, sizes in (("GPT-2", [tuple(s) for s in gpt2()]), ("small", shapes(6, 384, 8192))):
        plain, more = cost(sizes, given.pairs)
        count = sum(torch.Size(size).numel() for size in sizes)
        print(
            f"{name}, {count:,} parameters, {len(sizes)} tensors, {given.threads} threads: {1e3 * plain:.2f} ms, "
            f"watched {more:+.1%}, every=100 {more / 100:+.3%}"
        )


if __name__ == "__main__":
    main()
