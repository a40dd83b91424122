"""Find the best learning rate of AdamW for the demo's language model at four widths, with and without scale="mup".

    python -m docs.tools.transfer       runs that docs/benchmarks/transfer.json lacks, then the picture and the table of
                                        docs/widths.md

One layer, heads of 16, torch's initialization, 200 steps of 16 x 32 bytes.  From the best rate of the width before,
rates are doubled and halved until the best has a worse one on either side.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import nn

from examples.wider_model import scale_weights
from tools.demo_model import Corpus, LanguageModel, Size, corpus, train
from tools.prose import packed, table

RECORD = Path(__file__).resolve().parents[1] / "benchmarks/transfer.json"
WIDTHS, WAYS, SEEDS, STEPS, START = (64, 128, 256, 512), ("plain", "mup"), (0,), 200, 4e-3
BASE = Size(layers=1, width=64, heads=4, context=32, batch=16)
Found = dict[str, float]


def key_of(way: str, width: int, k: int, seed: int) -> str:
    return f"{way}, width {width}, lr {START * 2.0**k:g}, seed {seed}"


def fresh(model: nn.Module) -> nn.Module:
    """Give a model's layers torch's own initialization: embeddings of N(0, 1), matrices by the root of their inputs."""
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.Linear)):
            module.reset_parameters()
    return model


def make(model: nn.Module, way: str, lr: float) -> torch.optim.Optimizer:
    """Return AdamW for a fresh model, whose weights are scaled first under scale="mup"."""
    import optgen

    options: dict[str, Any] = {"plan": "fp32", "lr": lr, "betas": (0.9, 0.95), "weight_decay": 0.1}
    fresh(model)
    if way == "plain":
        return optgen.make("adamw", model, **options)
    base = fresh(LanguageModel(BASE))
    optimizer = optgen.make("adamw", model, scale="mup", base_width=BASE.width, **options)
    scale_weights(optimizer, base)
    return optimizer


def loss(way: str, width: int, k: int, text: Corpus, found: Found) -> float:
    """Return the mean loss over seeds at a rate; runs that are missing are made and recorded."""
    for seed in SEEDS:
        if (key := key_of(way, width, k, seed)) not in found:
            size = replace(BASE, width=width, heads=width // 16)
            optimizer = partial(make, way=way, lr=START * 2.0**k)
            run = train(text, size, optimizer, dtype=torch.float32, steps=STEPS, seed=seed, checks=1)
            found[key] = round(run.final, 4)
            RECORD.write_text(packed(found), encoding="utf-8")
            print(f"{key}: {found[key]}", flush=True)
    return mean(found[key_of(way, width, k, seed)] for seed in SEEDS)


def losses(way: str, width: int) -> dict[float, float]:
    """Return the recorded mean losses over seeds, by rate."""
    found, rates = json.loads(RECORD.read_text(encoding="utf-8")), range(-9, 10)
    keys = {START * 2.0**k: [key_of(way, width, k, seed) for seed in SEEDS] for k in rates}
    return {lr: mean(found[key] for key in own) for lr, own in keys.items() if found.keys() >= {*own}}


def rows() -> list[str]:
    """Return the table of best rates."""
    best = {way: [min((at := losses(way, width)), key=at.__getitem__) for width in WIDTHS] for way in WAYS}
    shown = [(way, *(f"{x:g}" for x in r), f"{max(r) / min(r):g}") for way, r in best.items()]
    return table(("best lr", *map(str, WIDTHS), "largest over smallest"), shown)


def main() -> None:
    torch.set_num_threads(1)
    found: Found = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    text = corpus()
    for way in WAYS:
        k = 0
        for width in WIDTHS:
            while (near := min((k - 1, k, k + 1), key=lambda i: loss(way, width, i, text, found))) != k:
                k = near
    print(*rows(), sep="\n")
    from docs.tools.draw import write  # which reads this record

    write("transfer")


if __name__ == "__main__":
    main()
