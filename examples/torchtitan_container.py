"""torchtitan's optimizer container with generated optimizers, by the names of their rules.

    python examples/torchtitan_container.py --steps 20

In a training configuration: `optimizer=config("adamw", lr=3e-4, plan="int8_split24")`.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

from optgen.integrations.torchtitan import Container, config


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(32, 64), nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32))


def container(model: nn.Module) -> Container:
    """Muon for the matrix inside, AdamW for everything else; the checkpoint has both."""
    muon, no_decay = {"rule": "muon", "plan": "fp32"}, {"rule": "adamw", "weight_decay": 0.0}
    rules = {r"1\.weight": muon, r"bias$": no_decay, "*": "adamw"}
    return config(rules, lr=1e-2, weight_decay=0.1, plan="int8_split24").build(model_parts=[model])


def train(model: nn.Module, optimizers: Container, first: int, last: int) -> None:
    for k in range(first, last):
        tokens, wanted = torch.randint(32, (2, 16), generator=torch.Generator().manual_seed(k))
        nn.functional.cross_entropy(model(tokens), wanted).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers.step()
        optimizers.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    model = network()
    optimizers = container(model)
    train(model, optimizers, 0, given.steps)
    print(*(f"{type(o).__name__}: {o.memory()}" for o in optimizers), sep="\n")


if __name__ == "__main__":
    main()
