"""Optimizers in the trainers of other packages, by the names of their rules.

    transformers          optimizer_cls_and_kwargs(args, "adamw"): an argument of Trainer, and of TRL's trainers
    torchtitan            config("adamw"): the configuration of an OptimizersContainer
    timm                  register("adamw"): a name for create_optimizer_v2
    emerging_optimizers   register("adamw"): a name in the registry of Emerging-Optimizers
    torchao               mx_tensor(opt.views(p)["mxfp8_rows"]): a view as torchao's layers take it
    axolotl               OptgenPlugin, for `plugins:` of a configuration

accelerate, Lightning and its CLI, and kohya's scripts take a class: optgen.optim.AdamW.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any


def framework(module: str) -> Any:
    """Import a module of a framework; ModuleNotFoundError names the package to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0].replace("_", "-")
        text = f"optgen.integrations: {package} is missing or incomplete ({error}): pip install {package}"
        raise ModuleNotFoundError(text, name=error.name) from error


def refuse_decay(cls: Any, decay: float, of: str = "") -> None:
    """Raise ValueError where a framework asks for weight decay and the rule has none."""
    if decay and "weight_decay" not in inspect.signature(cls).parameters:
        raise ValueError(f"{cls.__name__} has no weight decay, got weight_decay={decay!r}{of}: leave it at 0")
