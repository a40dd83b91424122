"""The sum of a parameter's gradients over micro-batches, kept in a plan's format until its update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from optgen.runtime.checkpoint import checkpoint
from optgen.runtime.layout import plans, sharding
from optgen.runtime.layout.plans import Label
from optgen.runtime.modes.offload import sums_over_model
from optgen.runtime.options.entries import Owner
from optgen.runtime.records import Variant
from optgen.runtime.records.uninterrupted import Uninterrupted
from optgen.runtime.states import state
from optgen.runtime.step.stepper import Stepper


def steps_of(cls: Any, group: dict[str, Any], p: Tensor, name: Label, sums: bool = False) -> list[Variant]:
    """Return the variants of the parameter's steps, the usual one first.

    Raises ValueError if its rule needs other parameters' gradients, unless `sums` of the step before serve.
    """
    _, plan, variant = checkpoint.select(cls, group, p, name)
    steps = list(plans.at_steps(plan, variant, cls.FLAGS))
    for v in steps:
        if sums_over_model(v) and not sums:
            names = ", ".join(v.model_temps) or "states of the model"
            raise ValueError(
                f"{cls.__name__}: the update of {state.label(p, name)} needs sums over the whole model ({names}), "
                f"known only when backward has ended.  Let it take those of the step before, by "
                f"release_gradients(..., sums='previous'), or call step() after backward"
            )
    return steps


class GradientAccumulator:
    """The sum of a parameter's gradients over micro-batches, kept by an optimizer whose rule is that sum.

    In the place of the weight stands the gradient itself, which so takes the sum.

    count   the sums before this one: each draws other random bits
    entry   the state of the sum, if there is one
    """

    def __init__(
        self, make: Callable[[list[Tensor]], torch.optim.Optimizer], p: Tensor, name: Label, count: int = 0
    ) -> None:
        keeper = make([p])
        if not isinstance(getattr(keeper, "SPEC", None), str) or len(keeper.param_groups) != 1:
            raise TypeError(
                f"release_gradients: accumulator must make a generated optimizer, as optgen.accumulate."
                f"accumulator('int8') does, got {keeper!r:.80}"
            )
        self._cls, self._group, self.name = type(keeper), keeper.param_groups[0], name
        self._group["param_names"] = [name]  # what it keeps otherwise goes by the position that it has alone
        if self._group.get("overrides"):
            self._group["overrides"] = tuple((name, plan) for _, plan in self._group["overrides"])
        steps_of(self._cls, self._group, p, name)
        self._group["params"] = []
        self._seed, self.count = self._group["seed"], count
        self.entry: dict[str, Any] | None = None

    @_disable_dynamo
    def add(self, g: Tensor) -> None:
        """Add g to the sum; g takes the new sum, rounded to its dtype."""
        group, g = self._group, sharding.waited(g)
        group["seed"] = self._seed + self.count
        weight = g.detach()
        weight.grad = g.detach()
        group["params"] = [weight]
        states: dict[Any, Any] = {} if self.entry is None else {weight: self.entry}
        owner = Owner(self._cls, [group], states, Uninterrupted())
        try:
            Stepper().step(owner)  # one that stayed would hold the gradient
            self.entry = states[weight]
        finally:
            weight.grad = None
            group["params"] = []

    def clear(self) -> None:
        """Set the sum to 0; the next one draws other random bits.

        The next one is of a window of its own (runtime/records/keys.py): places of one window an even number of steps
        apart, as the same micro-batch of every sum would be, are all in the same half of the cell.
        """
        self.entry = None
        self.count += 1
