"""A CUDA graph of whole training steps, with a group for each layer and float rates that a schedule changes.

    python examples/cuda_graph.py --steps 40

Each kind of step is made once outside, then captured, then replayed: AdamW's has one kind, a rule that does more at
every k-th step has two.  Without a GPU all steps are made outside.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

from optgen.optim import AdamW

DECAY = 0.8
"""The rate of a layer over that of the next one."""


def network(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(64, 8)).to(device)


def optimizer(model: nn.Sequential, lr: float = 1e-2) -> AdamW:
    layers = [list(layer.parameters()) for layer in model if isinstance(layer, nn.Linear)]
    groups = [{"params": own, "lr": lr * DECAY**k} for k, own in enumerate(reversed(layers))]
    return AdamW(groups, capturable="host")


def train(model: nn.Sequential, opt: AdamW, steps: int, warm: int = 3) -> list[float]:
    """Return the losses."""
    device = next(model.parameters()).device
    images, wanted = torch.zeros(32, 64, device=device), torch.zeros(32, 8, device=device)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    losses, loss = list[float](), torch.zeros((), device=device)
    graphs: list[torch.cuda.CUDAGraph] = []

    def forward_and_backward() -> None:
        opt.zero_grad(set_to_none=False)
        error = nn.functional.mse_loss(model(images), wanted)
        error.backward()
        loss.copy_(error.detach())

    for step in range(steps):
        random = torch.Generator().manual_seed(step)
        images.copy_(batch := torch.randn(32, 64, generator=random))
        wanted.copy_(batch[:, :8].tanh())
        number = opt.next_graph()
        if number is None and (step < warm or device.type != "cuda"):
            forward_and_backward()
            opt.step()
        else:
            if number is None:
                graphs.append(torch.cuda.CUDAGraph())
                with torch.cuda.graph(graphs[-1]):
                    forward_and_backward()
                    opt.step()
                number = opt.next_graph()
            graphs[number or 0].replay()
        schedule.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    model = network(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    losses = train(model, optimizer(model), given.steps)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
