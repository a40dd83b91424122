"""A learning rate that was found on a small model, used for a wider one: muP by `optgen.make(..., scale="mup")`.

    python examples/wider_model.py --width 256

Rates and weight decay of each group follow the width; the model has to begin with muP's weights as well, which
`scale_weights` makes of fresh ones, whatever initialized them.  Heads of attention should keep their size.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

import optgen


@torch.no_grad()
def scale_weights(optimizer: Any, base: nn.Module) -> None:
    """Give fresh matrices the standard deviations of the base model's over the root of how many times the inputs they
    have, and the head those over the inputs themselves."""
    small = dict(base.named_parameters())
    for group in optimizer.param_groups:
        for name, p in zip(group["param_names"], group["params"], strict=True):
            if group["role"] != "vector" and p.ndim > 1:
                inputs = 1.0 if group["role"] == "embedding" else p[0].numel() / small[name][0].numel()
                wanted = small[name].std() * inputs ** (-1.0 if group["role"] == "head" else -0.5)
                p.mul_(wanted / p.std().clamp(min=1e-30))


def network(width: int) -> nn.Module:
    return nn.Sequential(nn.Embedding(32, width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width),
                         nn.LayerNorm(width), nn.Linear(width, 32))  # fmt: skip


def train(width: int, steps: int, lr: float = 1e-2) -> float:
    """Train at the rate that is good at width 32 and return the last loss."""
    torch.manual_seed(0)
    model, base = network(width), network(32)
    opt = optgen.make("adamw", model, scale="mup", base_width=32, lr=lr, sort={r"^5\.weight": "head"})
    scale_weights(opt, base)
    loss = torch.tensor(0.0)
    for step in range(steps):
        x = torch.randint(32, (256,), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(x), (5 * x + 3) % 32)
        loss.backward()
        opt.step()
        opt.zero_grad()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    print(f"loss at width {given.width}: {train(given.width, given.steps):.4f}")


if __name__ == "__main__":
    main()
