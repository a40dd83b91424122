"""The cost of a format and its error: derived from the format itself, never typed in.

- `one_step_bound` and `master_bound`: the worst error of storing a number once, which the format states;
- `steady_state`: the error when an average is stored again at every step.

Every bound has its exact counterpart in `tools/certificate.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from optgen.formats.bound import Bound
from optgen.formats.format import Format, Master
from optgen.ops.dtypes import DType


class UnknownBound(TypeError):
    """No bound is known: the format, or master weight, states none."""


@lru_cache(maxsize=256)
def one_step_bound(fmt: Format) -> Bound:
    """Return the worst error of storing a value once.  Raises UnknownBound where the format states none."""
    return _known(fmt, fmt.bound())


def master_bound(master: Master, param: DType) -> Bound:
    """Return the worst error of keeping a weight once.  Raises UnknownBound where the master weight states none."""
    return _known(master, master.bound(param))


def _known(of: Format | Master, found: Bound | None) -> Bound:
    if found is None:
        raise UnknownBound(f"no bound is known: {type(of).__name__} states none by a method bound()")
    return found


# -- stored again at every step


@dataclass(frozen=True)
class Steady:
    """The settling of an average s' = decay * s + (1 - decay) * x that is stored at every step.

    A nonnegative state: kept / true lies in [low, high] (`of` is "factor").  A signed one: |kept - true| <= high
    times `of`.  `law` says where from.  Stochastic: `rms` is the expected size instead, low and high bound what a
    single worst sequence of draws could do.
    """

    low: float
    high: float
    of: str
    law: str
    rms: float | None = None

    def __str__(self) -> str:
        if self.rms is not None:
            return f"about {self.rms:.2g} of the {self.of} rms, unbiased ({self.law})"
        if self.of == "factor":
            top = "inf" if math.isinf(self.high) else f"{self.high:.3g}"
            return f"kept / true in [{self.low:.3g}, {top}] ({self.law})"
        return f"within {self.high:.3g} of the {self.of} ({self.law})"


def steady_state(fmt: Format, decay: float) -> Steady:
    """The effect of storing an exponential average with this decay in this format, over any number of steps."""
    bound, random = one_step_bound(fmt), fmt.noise_bits > 0 or fmt.rounding == "stochastic"
    step = bound.total
    if math.isinf(step):
        return Steady(0.0, math.inf, "factor", "nothing is promised for an element")
    if bound.of in ("value", "root"):
        relative = (1 + step) ** 2 - 1 if bound.of == "root" else step
        low, high = _factor(decay, relative)
        if not random:
            return Steady(low, high, "factor", "geometric sum of relative errors")
        # A value on the grid of wide cells moves by (1 - decay) of itself and is rounded over one cell: the noise of a
        # step is cell * movement, and 1 / (1 - decay) of them are remembered.  It crosses narrow cells.
        narrow, wide = _spread(decay, relative), math.sqrt(relative / 2)
        law = "independent errors" if narrow < wide else "sqrt(cell / 2)"
        return Steady(low, high, "value", law, min(narrow, wide))
    # Errors of roots add up under the root of the decay, which is reached where an average fades to 0.
    most = step / (1 - (math.sqrt(abs(decay)) if fmt.of == "sqrt" else abs(decay)))
    if random:
        return Steady(-most, most, bound.of, "independent errors", _spread(decay, step))
    return Steady(-most, most, bound.of, "geometric sum of errors")


def _spread(decay: float, cell: float) -> float:
    """The expected size of what independent errors add up to; the mean square of one is a sixth of a cell's."""
    return cell / math.sqrt(6 * (1 - decay * decay))


def _factor(decay: float, relative: float) -> tuple[float, float]:
    """The fixed points of f -> (decay * f + 1 - decay) * (1 -+ relative).

    Under a negative decay errors alternate: 1 -+ e with e = |decay| * e + relative * (1 + |decay| * e).
    """
    if decay < 0:
        growth = -decay * (1 + relative)
        error = math.inf if growth >= 1 else relative / (1 - growth)
        return 1 - error, 1 + error
    low = (1 - decay) * (1 - relative) / (1 - decay * (1 - relative))
    growth = decay * (1 + relative)
    high = math.inf if growth >= 1 else (1 - decay) * (1 + relative) / (1 - growth)
    return max(low, 0.0), high
