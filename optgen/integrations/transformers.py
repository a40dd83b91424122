"""Hugging Face Trainer, and the trainers of TRL."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from optgen.by_name import class_of, make
from optgen.integrations import refuse_decay

ADAM = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8}
"""The arguments of Adam that every TrainingArguments has, with their defaults."""


class Factory:
    """The maker of an optimizer of several rules: the Trainer calls it with its model."""

    def __call__(self, model: nn.Module, *_: Any, rules: Any, **options: Any) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = make(rules, model, **options)
        return made


def optimizer_cls_and_kwargs(
    args: Any, rule: Any = "adamw", *, plan: Any = None, model: nn.Module | None = None, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """Return the argument `optimizer_cls_and_kwargs` of a Trainer.

    args     TrainingArguments.  `learning_rate` becomes lr; adam_beta1, adam_beta2 and adam_epsilon become betas and
             eps, unless all have their defaults; the Trainer's groups have `weight_decay`
    rule     as of `optgen.make`.  Of several rules each has `weight_decay` for all its parameters, unless its dict
             says otherwise
    model    the Trainer's model, which gives the parameters their names
    options  of the class; they come before those of `args`

    ValueError for settings of Adam, or weight decay, and a rule that does not take them.
    """
    given: dict[str, Any] = {"lr": args.learning_rate}
    changed = [name for name, default in ADAM.items() if getattr(args, name) != default]
    if isinstance(rule, Mapping):
        if args.weight_decay:
            given["weight_decay"] = args.weight_decay
    elif changed and not {"betas", "eps"} <= options.keys():
        cls, betas, eps = class_of(rule, plan), (args.adam_beta1, args.adam_beta2), args.adam_epsilon
        takes = inspect.signature(cls).parameters
        if "eps" not in takes or "betas" not in takes or len(takes["betas"].default) != len(betas):
            name, words = cls.__name__, ", ".join(changed)
            raise ValueError(f"{name} does not take {words} of TrainingArguments: leave them, and give its own options")
        given |= {"betas": betas, "eps": eps}
    if isinstance(rule, Mapping):
        if changed:
            raise ValueError(f"several rules do not take {', '.join(changed)} of TrainingArguments: give each its own")
        return Factory, {"rules": rule, "plan": plan, **given, **options}
    refuse_decay(class_of(rule, plan), args.weight_decay, " of TrainingArguments")
    made = {} if plan is None else {"plan": plan}
    named = {} if model is None else {"module": model}
    return class_of(rule, plan), {**made, **named, **given, **options}
