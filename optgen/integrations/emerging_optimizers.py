"""The registry of NVIDIA's Emerging-Optimizers."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from optgen.by_name import class_of
from optgen.integrations import framework


def register(rule: Any, name: str | None = None, *, plan: Any = None) -> str:
    """Register a rule for `emerging_optimizers.registry.get_optimizer_cls`, and return its name there.

    name   by default "optgen_" and the rule's name
    plan   the registry checks options by the signature, which has none for a plan
    """
    cls = class_of(rule, plan)
    name = name or f"optgen_{cls.SPEC}"
    if plan is not None:
        init = functools.partialmethod(cls.__init__, plan=plan)
        cls = type(cls.__name__, (cls,), {"__init__": init, "__signature__": inspect.signature(cls)})
    framework("emerging_optimizers.registry").register_optimizer(name)(cls)
    return name
