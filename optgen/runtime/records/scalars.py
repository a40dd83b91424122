"""Arithmetic of host scalars: IEEE answers where Python would raise; of tensors where a step is counted on a device.

Every function takes Python floats, and gives one; or, where any argument is an fp64 tensor, an fp64 tensor on its
device: 0-dim, or of several numbers, whose values are looked at on the host alone, for the bits that Python gives.  So
the generated host functions are the one formula of all.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import is_
from typing import Any

import torch
from torch import Tensor

Scalar = float | Tensor
"""A number of the host, or an fp64 tensor, 0-dim or of several numbers; between conditions, a condition."""

Truth = bool | Tensor
"""A condition: a bool, or a 0-dim bool tensor."""


_constants: dict[tuple[str, torch.device, int], Tensor] = {}
"""Numbers as tensors, by their text (zeros have signs): most of them never change.  Each stream has its own, since
others do not wait for it."""

KEPT = 4096


def _like(x: Scalar | Truth, other: Any) -> Tensor:
    """x as a tensor, fp64 or bool, beside another if it is none; not to be written."""
    if isinstance(x, Tensor):
        return x
    device, dtype = other.device, torch.bool if isinstance(x, bool) else torch.float64
    if _capturing():
        return torch.full((), x, dtype=dtype, device=device)
    key = (repr(x), device, _stream(device))
    found = _constants.get(key)
    if found is None:
        if len(_constants) >= KEPT:
            _constants.clear()
        found = _constants[key] = torch.full((), x, dtype=dtype, device=device)
    return found


def _stream(device: torch.device) -> int:
    """Return the stream that takes work on a device now."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def column(values: Sequence[Any], other: Tensor) -> Any:
    """Return the value of several lines, numbers or 0-dim tensors on one device: the one that all have, else one tensor
    of them; fp64.  Of tuples, such as `betas`, a tuple.  other: a tensor beside these."""
    first = values[0]
    if isinstance(first, tuple):
        return tuple(column(parts, other) for parts in zip(*values, strict=True))
    if all(map(is_, values, repeat(first))):
        return first.double() if isinstance(first, Tensor) else first
    if not any(issubclass(kind, Tensor) for kind in {*map(type, values)}):
        return _of_numbers(values, other)
    alike = len({x.dtype if isinstance(x, Tensor) else None for x in values}) == 1
    return torch.stack([x if alike and isinstance(x, Tensor) else _like(x, other).double() for x in values]).double()


def _of_numbers(values: Sequence[float], other: Tensor) -> Scalar:
    """Return `column` of numbers; zeros have signs."""
    if len({*values}) == 1 and (values[0] or len({*map(repr, values)}) == 1):
        return values[0]
    if _capturing():
        return torch.stack([_like(x, other).double() for x in values])
    made = torch.frombuffer(array("d", values), dtype=torch.float64)
    return made if other.device.type == "cpu" else made.to(other.device)


def _capturing() -> bool:
    """Return True while a CUDA graph is captured, which may run when none of the kept numbers is left."""
    return torch.cuda._initialized and torch.cuda.is_current_stream_capturing()


def where(condition: Truth, then: Scalar, other: Scalar) -> Scalar:
    """`then` where the condition holds, else `other`."""
    if isinstance(condition, Tensor):
        return torch.where(condition, _like(then, condition), _like(other, condition))
    return then if condition else other


def maximum(a: Scalar, b: Scalar) -> Scalar:
    """b where b > a, else a: Python's max, with its answer where one of them is NaN."""
    return where(b > a, b, a)


def minimum(a: Scalar, b: Scalar) -> Scalar:
    """b where b < a, else a: Python's min, likewise."""
    return where(b < a, b, a)


def both(a: Truth, b: Truth) -> Truth:
    return torch.logical_and(_like(a, b), _like(b, a)) if isinstance(a, Tensor) or isinstance(b, Tensor) else a and b


def either(a: Truth, b: Truth) -> Truth:
    return torch.logical_or(_like(a, b), _like(b, a)) if isinstance(a, Tensor) or isinstance(b, Tensor) else a or b


def negated(a: Truth) -> Truth:
    return torch.logical_not(a) if isinstance(a, Tensor) else not a


def divide(a: Scalar, b: Scalar) -> Scalar:
    """a / b; x / 0 is an infinity and 0 / 0 is NaN."""
    if isinstance(a, Tensor):
        return a / _like(b, a)
    if isinstance(b, Tensor):
        return _like(a, b) / b
    try:
        return a / b
    except ZeroDivisionError:
        return math.nan if a == 0 or a != a else math.copysign(math.inf, a) * math.copysign(1.0, b)


def _of_tensors(function: Callable[..., Scalar], torchs: Callable[..., Tensor], *given: Any) -> Tensor:
    """Return torch's function of tensors; of several numbers that the host has, Python's, which may have other last
    bits."""
    if any(isinstance(x, Tensor) and (x.ndim == 0 or x.device.type != "cpu") for x in given):
        return torchs(*given)
    lines = (x.tolist() if isinstance(x, Tensor) else repeat(x) for x in given)
    return torch.tensor(list(map(function, *lines)), dtype=torch.float64, device="cpu")


def root(x: Scalar) -> Scalar:
    """The square root; NaN below 0."""
    if isinstance(x, Tensor):
        return _of_tensors(root, torch.sqrt, x)
    return math.sqrt(x) if x >= 0 else math.nan


def cube_root(x: Scalar) -> Scalar:
    """The cube root, which has the sign of x."""
    if isinstance(x, Tensor):
        return _of_tensors(cube_root, lambda x: torch.copysign(x.abs() ** (1 / 3), x), x)
    return math.cbrt(x)


def power(base: Scalar, exponent: Scalar) -> Scalar:
    """base ** exponent; overflow is an infinity, 0 to a negative power too, and what would be complex is NaN."""
    if isinstance(base, Tensor) or isinstance(exponent, Tensor):
        # -0.0 as 0.0, so that a negative power of it is +Inf
        return _of_tensors(power, lambda base, exponent: (base + 0.0) ** exponent, base, exponent)
    out: Any
    try:
        out = float(base) ** exponent  # of two whole numbers Python would make one of any length
    except OverflowError:
        return -math.inf if base < 0 and exponent % 2 == 1 else math.inf
    except ZeroDivisionError:
        return math.inf
    return math.nan if isinstance(out, complex) else float(out)


def exp(x: Scalar) -> Scalar:
    """e ** x; overflow is an infinity."""
    if isinstance(x, Tensor):
        return _of_tensors(exp, torch.exp, x)
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def log(x: Scalar) -> Scalar:
    """The natural logarithm; -Inf at 0, NaN below."""
    if isinstance(x, Tensor):
        return _of_tensors(log, torch.log, x)
    return math.log(x) if x > 0 else -math.inf if x == 0 else math.nan


def tanh(x: Scalar) -> Scalar:
    """The hyperbolic tangent."""
    return _of_tensors(tanh, torch.tanh, x) if isinstance(x, Tensor) else math.tanh(x)


def sigmoid(x: Scalar) -> Scalar:
    """1 / (1 + e ** -x), without an overflow."""
    return divide(exp(minimum(x, 0.0)), 1.0 + exp(where(x < 0, x, -x)))


def atan2(y: Scalar, x: Scalar) -> Scalar:
    """The angle of the point (x, y)."""
    if isinstance(y, Tensor) or isinstance(x, Tensor):
        return _of_tensors(atan2, lambda y, x: torch.atan2(_like(y, x), _like(x, y)), y, x)
    return math.atan2(y, x)


def floor(x: Scalar) -> Scalar:
    """The integer at or below x, as a float; infinities and NaN stay."""
    if isinstance(x, Tensor):
        return x.floor() + 0.0  # no negative zero, as of an int
    return float(math.floor(x)) if math.isfinite(x) else x


def rint(x: Scalar) -> Scalar:
    """The integer nearest to x, half to even, as a float; infinities and NaN stay."""
    if isinstance(x, Tensor):
        return x.round() + 0.0  # no negative zero, as of an int
    return float(round(x)) if math.isfinite(x) else x


def sign(x: Scalar) -> Scalar:
    """-1, 0 or 1; NaN stays."""
    return where(x > 0, 1.0, where(x < 0, -1.0, x + 0.0))
