"""A generated optimizer under timm: its groups (layer decay, none for vectors), its registry and its schedule.

    pip install timm        (and a torchvision of the same build as torch, without which timm cannot be imported)
    python examples/timm_groups.py --steps 20

Registered under a name it is made by `create_optimizer_v2`, as timm's own training script does.  Schedulers of timm
multiply each group's learning rate by its `lr_scale`, which is a key of timm's own: optimizers leave it alone.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import nn

from optgen.integrations.timm import register
from optgen.optim import AdamW

register("adamw", "adamw8", plan="int8_split24", betas=(0.9, 0.95))


def network() -> nn.Module:
    torch.manual_seed(0)
    return VisionTransformer(img_size=16, patch_size=4, embed_dim=96, depth=2, num_heads=3, num_classes=20)


def optimizer(model: nn.Module, name: str = "adamw8", **options: Any) -> torch.optim.Optimizer:
    return create_optimizer_v2(model, name, lr=1e-3, weight_decay=0.05, layer_decay=0.8, **options)


def schedule(optimizer: torch.optim.Optimizer) -> CosineLRScheduler:
    return CosineLRScheduler(optimizer, t_initial=40, lr_min=1e-5, warmup_t=3, warmup_lr_init=1e-6)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    rates = schedule(optimizer)
    for k in range(first, last):
        random = torch.Generator().manual_seed(k)
        images, wanted = torch.randn(4, 3, 16, 16, generator=random), torch.randint(20, (4,), generator=random)
        rates.step(k)
        nn.functional.cross_entropy(model(images), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    model = network()
    made = optimizer(model)
    train(model, made, 0, given.steps)
    if isinstance(made, AdamW):  # and not one of timm's own
        print(made.memory())


if __name__ == "__main__":
    main()
