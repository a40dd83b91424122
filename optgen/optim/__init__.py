"""The ready-made optimizers: `from optgen.optim import AdamW`.

Names are looked up when asked for, so that one optimizer does not import the others.  The classes are those of
the generated package that comes with optgen; a project's own are in its own `generated`.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("_") and name != "__all__":
        raise AttributeError(name)
    package = importlib.import_module("optgen._generated")
    if name != "__all__" and name not in package.__all__:  # what was imported of it has modules in it, too: `adamw`
        near = difflib.get_close_matches(name.lower(), known := {n.lower(): n for n in package.__all__}, n=1)
        meant = f"did you mean {known[near[0]]}? " if near else ""
        text = f"optgen.optim has no optimizer {name!r}: {meant}`optgen list` shows them"
        # `from optgen.optim import Name` replaces the text of an AttributeError, but not that of an ImportError.
        imported = sys._getframe(1).f_code.co_name == "_handle_fromlist"
        raise ImportError(text, name=__name__) if imported else AttributeError(text, name=name)
    found = getattr(package, name)
    plans: Any = importlib.import_module("optgen.runtime.layout.plans")
    if plans.provider is None:
        plans.provider = _compile_plan
    return found


def _compile_plan(cls: type, plan: str) -> Any:
    """A plan that was not built ahead: the compiler is loaded when the first one is asked for."""
    return importlib.import_module("optgen.driver.compile").provide(cls, plan)


def __dir__() -> list[str]:
    return sorted(importlib.import_module("optgen._generated").__all__)
