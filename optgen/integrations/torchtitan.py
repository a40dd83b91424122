"""torchtitan's container of optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from optgen import optim
from optgen.by_name import REST, class_of, list_rules
from optgen.integrations import framework

titan: Any = framework("torchtitan.components.optimizer")


class Container(titan.OptimizersContainer):  # type: ignore[misc]
    """A container of optgen's optimizers, by the names of their rules or classes; other names are torchtitan's own."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.OptimizersContainer.Config):  # type: ignore[misc]
        """torchtitan's configuration, which builds this container."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        rule = name if name in list_rules() else getattr(optim, name).SPEC if name in dir(optim) else None
        if rule is not None:
            made: Callable[..., torch.optim.Optimizer] = class_of(rule)
            return made
        found: Callable[..., torch.optim.Optimizer] = titan.OptimizersContainer._resolve_optimizer_factory(name)
        return found


def config(rule: Any = "adamw", **options: Any) -> Any:
    """Return the configuration of a `Container`, the `optimizer` of a torchtitan Trainer.Config.

    rule     the name of a ready-made rule, or {regular expression: a name, or a dict of "rule" and options}; the first
             expression that is found in a parameter's name counts, "*" fits every name
    options  of all rules, such as lr and plan
    """
    rules = rule if isinstance(rule, Mapping) else {REST: rule}
    groups = []
    for pattern, value in rules.items():
        own = {**options, **(value if isinstance(value, Mapping) else {"rule": value})}
        name = own.pop("rule")
        expression = ".*" if pattern == REST else pattern
        groups.append(titan.ParamGroupConfig(pattern=expression, optimizer_name=name, optimizer_kwargs=own))
    return Container.Config(param_groups=groups, implementation="for-loop")
