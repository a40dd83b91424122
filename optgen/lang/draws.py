"""Random numbers of elements, which kernels draw: new ones at each step, for the parameter and the place in it.

A draw is a leaf: fp32, evenly spread over the multiples of 2^-24 from 0 to below 1, by a hash of place, parameter, seed
and step (runtime/reference/matrices.drawn).  All else is arithmetic on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from optgen.base.errors import UserError
from optgen.lang.values import author_loc, erfinv
from optgen.runtime.records import keys

DRAWN: ContextVar[Callable[[str], Any] | None] = ContextVar("DRAWN", default=None)
"""Name of a draw -> the function that makes its numbers in the reading of a rule that goes on."""

KEYS: ContextVar[tuple[int, int]] = ContextVar("KEYS", default=(0, keys.stream_key(0)))
"""The seed and the stream key of the parameter for which a rule is evaluated: by default the first of an optimizer,
without a name."""


def uniform_of_elements(number: object) -> Any:
    """A number of [0, 1) for each element, a multiple of 2^-24; those of another draw of the step are independent.

    Raises UserError E103 unless the number of the draw is a whole number from 0 to 63 that stands in the spec.
    """
    read = DRAWN.get()
    if type(number) is not int or not 0 <= number < 64 or read is None:
        want = "the number of a draw of elements, a whole number from 0 to 63 written in the spec"
        hint = "they are new at every step: normal(0), normal(1); normal(like, key) is of whole matrices"
        function = "normal() or uniform()"
        raise UserError("E103", loc=author_loc(), function=function, want=want, got=repr(number), hint=hint)
    return read(f"{keys.DRAW}{number}")


def normal_of_elements(number: object) -> Any:
    """A standard normal number for each element, at most 5.42 in size: the inverse of its distribution at a uniform
    one, which is midway between two multiples of 2^-24."""
    return math.sqrt(2.0) * erfinv(2.0 * uniform_of_elements(number) - (1.0 - 2.0**-24))
