"""Modules whose optimizer states are to stay in fp32, under every optimizer.

The mark is on the module, not on its parameters: casting, moving, sharding and loading put other Parameter objects into
a module, and copies of parameters lose what was set on them.  A mark finds the module again without keeping it alive,
and goes with it when it is copied or pickled.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn

ATTRIBUTE = "_optgen_fp32_states"

_marks: weakref.WeakSet[Mark] = weakref.WeakSet()


class Mark:
    """Hangs on a module, and is known here as long as that lives."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        _marks.add(self)

    @property
    def module(self) -> nn.Module | None:
        return self._module()

    def __deepcopy__(self, memo: dict[int, Any]) -> Mark | None:
        """The mark of the module's copy, which is made before its attributes are."""
        module = self._module()
        made = None if module is None else memo.get(id(module))
        return Mark(made) if isinstance(made, nn.Module) else None

    def __reduce__(self) -> tuple[object, ...]:
        module = self._module()  # None: of a shallow copy that outlived its original
        return (type(None), ()) if module is None else (Mark, (module,))


def keep_states_fp32(module: nn.Module) -> nn.Module:
    """Let every optimizer keep the states of this module's parameters, and of those below it, in fp32; returns it.

    As `overrides={"name": "fp32"}` would, but said once, where the model is made.  It holds for optimizers that are
    made afterwards; `overrides` that name the parameter come first.
    The mark follows the module through `.to()`, casts, `fully_shard`, deep copies and pickling.
    TypeError for what is no module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"keep_states_fp32: expected a torch.nn.Module, got {module!r:.80}")
    if not isinstance(module.__dict__.get(ATTRIBUTE), Mark) or module.__dict__[ATTRIBUTE].module is not module:
        object.__setattr__(module, ATTRIBUTE, Mark(module))
    return module


def parameters() -> dict[int, Tensor]:
    """The parameters of all marked modules, as they are now, by id."""
    modules = [mark.module for mark in list(_marks)]
    return {id(p): p for module in modules if module is not None for p in module.parameters()}
