"""The ready-made optimizers: `from optgen.optim import AdamW`.

A class is generated when it is first asked for, once per machine, and so is a plan. A project's own classes are in its
own `generated`.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from typing import Any

from optgen.base import ready
from optgen.base.collecting import uncollected


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    if name.startswith("_"):
        raise AttributeError(name)
    rules = ready.classes()
    if name not in rules:
        near = difflib.get_close_matches(name.lower(), known := {n.lower(): n for n in rules}, n=1)
        meant = f"did you mean {known[near[0]]}? " if near else ""
        text = f"optgen.optim has no optimizer {name!r}: {meant}`optgen list` shows them"
        # `from optgen.optim import Name` replaces the text of an AttributeError, but not that of an ImportError.
        imported = sys._getframe(1).f_code.co_name == "_handle_fromlist"
        raise ImportError(text, name=__name__) if imported else AttributeError(text, name=name)
    with uncollected():
        plans: Any = importlib.import_module("optgen.runtime.layout.plans")
        if plans.provider is None:
            plans.provider = _compile_plan
        return getattr(importlib.import_module(f"optgen._ready.{rules[name]}"), name)


def _compile_plan(cls: type, plan: str) -> Any:
    """A plan of the user's: the compiler is loaded when the first one is asked for."""
    return importlib.import_module("optgen.driver.compile").provide(cls, plan)


def __dir__() -> list[str]:
    return list(ready.classes())
