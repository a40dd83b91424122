"""torchtitan's optimizer container with generated optimizers: one method of a subclass names them.

    python examples/torchtitan_container.py --steps 20

In a training configuration: `optimizer=Container.Config(param_groups=[...])`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

import optgen.optim


class Container(OptimizersContainer):  # type: ignore[type-arg]
    """Knows every ready-made optimizer of optgen by its name; others are torchtitan's own."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        if name in dir(optgen.optim):
            made: Callable[..., torch.optim.Optimizer] = getattr(optgen.optim, name)
            return made
        return OptimizersContainer._resolve_optimizer_factory(name)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(32, 64), nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32))


def container(model: nn.Module) -> Container:
    """Muon for the matrix inside, AdamW for everything else; the checkpoint has both."""
    adamw: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "plan": "int8_split24"}
    muon = {"lr": 1e-2, "weight_decay": 0.1}
    groups = [
        ParamGroupConfig(pattern=r"1\.weight", optimizer_name="Muon", optimizer_kwargs=muon),
        ParamGroupConfig(pattern=r"bias$", optimizer_name="AdamW", optimizer_kwargs={**adamw, "weight_decay": 0.0}),
        ParamGroupConfig(pattern=r".*", optimizer_name="AdamW", optimizer_kwargs={**adamw, "weight_decay": 0.1}),
    ]
    return Container(Container.Config(param_groups=groups, implementation="for-loop"), model_parts=[model])


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
