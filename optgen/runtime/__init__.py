"""What generated optimizers import: the torch.optim.Optimizer they derive from, and the records they fill in.

Stands alone: torch and the standard library, Triton once a kernel starts; nothing of the compiler.
"""

from optgen.runtime.memory import Memory, ParameterMemory
from optgen.runtime.optimizer import Optimizer
from optgen.runtime.records import Eager, Field, Flag, Hyper, Stage, Temp, Variant

__all__ = ["Eager", "Field", "Flag", "Hyper", "Memory", "Optimizer", "ParameterMemory", "Stage", "Temp", "Variant"]
