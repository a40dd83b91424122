"""Parameter groups as timm makes them (layer decay, no decay for vectors) under a generated optimizer.

    python examples/timm_groups.py --steps 20

With timm at hand: `param_groups_layer_decay(model, weight_decay, layer_decay=0.8)` gives such groups.  Its schedulers
multiply each group's learning rate by its `lr_scale`, which is a key of timm's own: optimizers leave it alone.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

from optgen.optim import AdamW


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 20)
    )


def groups(model: nn.Sequential, weight_decay: float, layer_decay: float) -> list[dict[str, Any]]:
    """A group per layer and kind; the further a layer is from the output, the smaller its learning rate."""
    made = []
    depth = len(model)
    for i, layer in enumerate(model):
        for decay in (weight_decay, 0.0):
            params = [p for p in layer.parameters() if (p.ndim >= 2) == (decay > 0)]
            if params:
                scale = layer_decay ** (depth - 1 - i)
                made.append({"params": params, "weight_decay": decay, "lr_scale": scale})
    return made


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """What timm's schedulers do at each update."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for k in range(first, last):
        random = torch.Generator().manual_seed(k)
        images, wanted = torch.randn(4, 3, 10, 10, generator=random), torch.randint(20, (4,), generator=random)
        set_lr(optimizer, 1e-2 / (1 + k))
        nn.functional.cross_entropy(model(images), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    model = network()
    optimizer = AdamW(groups(model, 0.05, 0.8), lr=1e-2, plan="int8_split24")
    train(model, optimizer, 0, given.steps)
    print(optimizer.memory())


if __name__ == "__main__":
    main()
