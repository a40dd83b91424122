"""Keys of the random numbers that stochastic rounding draws.

The kernels hash (element index, stream key, step key) into one 32-bit word.  Both keys are made here:

- the stream key names the parameter: a hash of its name where the optimizer was given named parameters, so
  that neither their order nor their grouping changes a bit; else of its position over all groups.  Parameters with
  names that go on from a checkpoint without keep the positions, which their group records under "streams";
- the step key has two parts, since noise is evenly spread over a window of 256 steps and drawn anew then
  (lower/noise.py): its lowest bits are those of the step's place in its window, reversed, the others mix the group's
  seed with the window's number.

Keys are 32 bits as signed Python ints, the form in which Triton and torch take them.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from typing import Any

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, the increment of SplitMix64

PLACE = 8
WINDOW = 1 << PLACE
"""Steps over which the noise of an element is one evenly spread sequence."""


def _mix(z: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea & Flood 2014): a bijection of 64 bits that avalanches."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


@functools.lru_cache(maxsize=1024)
def step_key(seed: int, step: int) -> int:
    """32 bits for step number `step` (1, 2, ...) under `seed` (its low 64 bits count)."""
    stream = _mix((seed + _GOLDEN) & _MASK)
    word = _mix((stream + (step >> PLACE) * _GOLDEN) & _MASK) >> 32
    return _signed(word & -WINDOW | sum((step >> i & 1) << (PLACE - 1 - i) for i in range(PLACE)))


def _wrapped(word: int) -> int:
    """64 bits as torch's int64 holds them."""
    return word - 2**64 if word >= 2**63 else word


def stream_of_steps(seed: int) -> int:
    """What a device needs of a seed to make the keys of its steps (`triton_control.step_key`): 64 bits, signed."""
    return _wrapped(_mix((seed + _GOLDEN) & _MASK))


@functools.lru_cache(maxsize=65536)
def stream_key(parameter: str | int) -> int:
    """32 bits for a parameter: its name, or its position over all groups."""
    if isinstance(parameter, str):
        return int.from_bytes(hashlib.blake2b(parameter.encode(), digest_size=4).digest(), "little", signed=True)
    return _signed(_mix(((parameter + 1) * _GOLDEN) & _MASK) >> 32)


Label = str | int


def streams(group: Mapping[str, Any]) -> dict[Label, Label]:
    """Return the labels that a group's stream keys are made of, where they differ from the parameters' labels."""
    return dict(group.get("streams") or ())


def recorded(value: Any, owner: str) -> tuple[tuple[Label, Label], ...]:
    """Return the checked "streams" of a group: (name or position, name or position) pairs."""
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 and all(type(x) in (str, int) for x in pair)
        for pair in value
    ):
        raise TypeError(f"{owner}: streams of a group must be pairs of names or positions, got {value!r:.80}")
    return tuple((label, stream) for label, stream in value)
