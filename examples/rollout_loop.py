"""Reinforcement learning on one device, in turns: the states leave while the model generates, and come back to step.

    python examples/rollout_loop.py --rounds 60
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from optgen.optim import AdamW

TOKENS, LENGTH = 16, 8


@torch.no_grad()
def rollout(model: nn.Module, draw: torch.Generator) -> Tensor:
    """Let the model write 64 lines, token by token."""
    tokens = torch.randint(TOKENS, (64, 1), generator=draw)
    for _ in range(LENGTH):
        following = model(tokens[:, -1]).float().softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(following, 1, generator=draw)], 1)
    return tokens


def train(rounds: int, away: bool = True) -> tuple[nn.Module, list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(TOKENS, 256), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, TOKENS)).bfloat16()
    optimizer, draw, means = AdamW(model.named_parameters(), lr=2e-3), torch.Generator().manual_seed(1), list[float]()
    for _ in range(rounds):
        if away:  # beside an engine in another process: torch.cuda.empty_cache() as well
            optimizer.offload_states()
        tokens = rollout(model, draw)
        reward = (tokens[:, 1:] == (tokens[:, :-1] + 1) % TOKENS).float()  # for counting upwards
        means.append(reward.mean().item())
        optimizer.reload_states()
        surprise = nn.functional.cross_entropy(model(tokens[:, :-1]).float().mT, tokens[:, 1:], reduction="none")
        ((reward - reward.mean()) * surprise).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, means


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    _, found = train(parser.parse_args().rounds)
    print(f"reward {found[0]:.2f} at first, {found[-1]:.2f} at the end")
