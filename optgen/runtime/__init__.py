"""The names that generated optimizers import: the torch.optim.Optimizer they derive from, and the records they fill in.

Stands alone: torch and the standard library, Triton once a kernel starts; nothing of the compiler.  The compiler reads
records and keys from here: torch is imported with the first name that needs it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from optgen.runtime.records import Eager, Field, Flag, Hyper, Rule, Stage, Temp, Variant, View, Whole
from optgen.runtime.records.join import FormatRecord, PlanRecord, RuleRecord, StateRecord, by_flags
from optgen.runtime.records.series import Series

if TYPE_CHECKING:
    from optgen.runtime.optimizer import Optimizer
    from optgen.runtime.states.memory import Memory, ParameterMemory

__all__ = [
    "Eager", "Field", "Flag", "FormatRecord", "Hyper", "Memory", "Optimizer", "ParameterMemory", "PlanRecord", "Rule",
    "RuleRecord", "Series", "Stage", "StateRecord", "Temp", "Variant", "View", "Whole", "by_flags",
]  # fmt: skip

_LATER = {"Memory": "states.memory", "ParameterMemory": "states.memory", "Optimizer": "optimizer"}


def __getattr__(name: str) -> object:
    if name in _LATER:
        return getattr(import_module(f"optgen.runtime.{_LATER[name]}"), name)
    raise AttributeError(f"module 'optgen.runtime' has no attribute {name!r}")
