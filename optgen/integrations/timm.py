"""timm's registry of optimizers."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from optgen.by_name import class_of
from optgen.integrations import framework, refuse_decay


def register(rule: Any, name: str | None = None, **defaults: Any) -> str:
    """Register a rule for `timm.optim.create_optimizer_v2`, and return its name there.

    name      by default "optgen-" and the rule's name; timm reads only what follows an underscore
    defaults  options of the class, such as plan; timm's own arguments come before them: a weight_decay of 0 if it
              is told no other, and a momentum of 0.9 for a rule that has one and no default of it here
    """
    optim = framework("timm.optim")
    cls = class_of(rule, defaults.get("plan"))
    takes = inspect.signature(cls).parameters
    name = (name or f"optgen-{cls.SPEC}").replace("_", "-")
    about = (cls.__doc__ or "").partition("\n")[0]
    if "weight_decay" not in takes:
        cls = _without_decay(cls)
    known: dict[str, Any] = {f"has_{key}": key in takes for key in ("eps", "momentum", "betas")}
    known["num_betas"] = len(takes["betas"].default) if "betas" in takes else 2
    info = optim.OptimInfo(name=name, opt_class=cls, description=about, defaults=defaults or None, **known)
    framework("timm.optim._optim_factory").default_registry.register(info)
    return name


def _without_decay(cls: type[Any]) -> type[Any]:
    """Return the class of a rule without weight decay that takes timm's `weight_decay`, which it always gives, of 0."""

    def init(self: Any, params: Iterable[Any], weight_decay: float = 0.0, **options: Any) -> None:
        groups = list(params)
        decay = max([weight_decay, *(x.get("weight_decay", 0.0) for x in groups if isinstance(x, dict))])
        refuse_decay(cls, decay)
        cls.__init__(self, groups, **options)

    return type(cls.__name__, (cls,), {"__init__": init})
