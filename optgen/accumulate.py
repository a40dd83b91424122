"""The sum of gradients over micro-batches, stored in any plan's format, for `release_gradients(accumulator=...)`.

opt.release_gradients(model, accumulate=8, accumulator=accumulator("int8"))
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from optgen.driver.compile import compile
from optgen.formats.plan import Plan
from optgen.lang import optimizer, state


@optimizer(cite="a plain sum")
def gradient_sum(p: Any, g: Any, total: Any = state()) -> Any:
    """Add the gradient to the sum; the parameter of the step receives the sum."""
    total = total + g
    p = total
    return p, total


def accumulator(plan: Plan | str = "int8", *, seed: int = 0, backend: str = "auto") -> functools.partial[Any]:
    """Return the constructor of an accumulator for a parameter, under a plan.

    plan           "int8" (1.03 bytes per element), "bf16_sr" (2), "fp32" (4), or one of your own, of which
                   the format for signed states counts
    seed, backend  as for an optimizer

    The sum that an update reads is off by at most one storing error for each micro-batch but the last; the errors of
    stochastic plans have both signs. Tensors too small for the plan are kept in fp32.
    """
    made: Callable[..., Any] = compile(gradient_sum, plan)
    return functools.partial(made, seed=seed, backend=backend)
