"""Time steps under `opt.watch` beside plain ones: AdamW, int8_split24."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import torch

from optgen.optim import AdamW
from tools.bench.race import Race, Shapes, gpt2, run_races


def small(layers: int = 6, width: int = 384, words: int = 8192) -> Shapes:
    """Return the shapes of a small GPT, 14 million parameters."""
    sides: Shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    layer: Shapes = [*sides, *((side[0],) for side in sides), *[(width,)] * 4]
    return [(words, width), (1024, width), *layer * layers, (width,), (width,)]


def races(asked: argparse.Namespace) -> Iterator[Race]:
    for name, shapes in (("GPT-2", gpt2()), ("small", small())):
        params = [torch.nn.Parameter((0.02 * torch.randn(shape)).bfloat16()) for shape in shapes]
        for p in params:
            p.grad = torch.randn_like(p)
        opt = AdamW(params, lr=1e-4, plan="int8_split24")
        opt.step()
        watches = {"plain": None, "watched": opt.watch(1, to=lambda step, tensors: None)}

        def before(which: str, opt: AdamW = opt, watches: dict[str, object] = watches) -> None:
            opt._watch = watches[which]

        count = sum(torch.Size(shape).numel() for shape in shapes)
        title = f"{name}: {count:,} parameters, {len(shapes)} tensors, every step watched"
        yield Race(title, dict.fromkeys(watches, opt.step), before=before)


def main(given: Sequence[str]) -> int:
    return run_races(races, argparse.ArgumentParser(description="The cost of a watched step"), given)
