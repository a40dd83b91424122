"""timm's registry of optimizers."""

from __future__ import annotations

import inspect
from typing import Any

from optgen.by_name import class_of
from optgen.integrations import framework


def register(rule: Any, name: str | None = None, **defaults: Any) -> str:
    """Register a rule for `timm.optim.create_optimizer_v2`, and return its name there.

    name      by default "optgen-" and the rule's name; timm reads only what follows an underscore
    defaults  options of the class, such as plan; timm's own arguments come before them
    """
    optim = framework("timm.optim")
    cls = class_of(rule, defaults.get("plan"))
    takes = inspect.signature(cls).parameters
    name = (name or f"optgen-{cls.SPEC}").replace("_", "-")
    about = (cls.__doc__ or "").partition("\n")[0]
    known: dict[str, Any] = {f"has_{key}": key in takes for key in ("eps", "momentum", "betas")}
    known["num_betas"] = len(takes["betas"].default) if "betas" in takes else 2
    info = optim.OptimInfo(name=name, opt_class=cls, description=about, defaults=defaults or None, **known)
    framework("timm.optim._optim_factory").default_registry.register(info)
    return name
