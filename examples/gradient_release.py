"""Training in 5.1 bytes per parameter: weights in bf16, 8-bit AdamW, and gradients that live for one layer only.

    python examples/gradient_release.py --steps 20 --accumulate 4
    python examples/gradient_release.py --steps 200 --rule prodigy     # which finds its learning rate, in 10.1 bytes
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

from optgen.accumulate import accumulator
from optgen.optim import AdamW, Prodigy

RULES = {"adamw": (AdamW, {"lr": 1e-3, "weight_decay": 0.1}), "prodigy": (Prodigy, {"lr": 1.0})}


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4)]
    return nn.Sequential(nn.Embedding(64, 256), *layers, nn.Linear(256, 64)).to(torch.bfloat16)


def train(steps: int, accumulate: int = 1, released: bool = True, rule: str = "adamw") -> tuple[nn.Module, AdamW]:
    model, (cls, options) = network(), RULES[rule]
    optimizer = cls(model.named_parameters(), **options, plan="int8_split24")
    if released:
        # Between micro-batches the sum of the gradients takes one byte per parameter.
        kept = accumulator("int8") if accumulate > 1 else None
        # Prodigy sums over the model, and takes for the sums of a step those of the one before.
        optimizer.release_gradients(model, accumulate=accumulate, accumulator=kept, sums="previous")
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for k in range(steps):
        for i in range(accumulate):
            random = torch.Generator().manual_seed(accumulate * k + i)
            tokens = torch.randint(64, (32,), generator=random)
            loss = nn.functional.cross_entropy(model(tokens).float(), (3 * tokens + 1) % 64)
            (loss / accumulate).backward()  # parameters are updated in here
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model, optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--rule", choices=RULES, default="adamw")
    given = parser.parse_args()
    _, optimizer = train(given.steps, given.accumulate, rule=given.rule)
    print(optimizer.memory())


if __name__ == "__main__":
    main()
