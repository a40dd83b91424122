"""Keys of the random numbers that stochastic rounding draws.

The kernels hash (element index, stream key, step key) into one 32-bit word.  Both keys are made here:

- the stream key names the parameter: a hash of its name where the optimizer was given named parameters, so
  that neither their order nor their grouping changes a bit; else of its position over all groups;
- the step key has two parts, since noise is evenly spread over a window of 256 steps and drawn anew then
  (gpu/codecs.py): its lowest bits are those of the step's place in its window, reversed, the others mix the group's
  seed with the window's number.

Keys are 32 bits as signed Python ints, the form in which Triton and torch take them.

Over time the bits are evenly spread rather than independent: within a window of 256 steps each field visits 256 equal
parts of its range once each, in van der Corput's order (a random start, and on it the bits of the step's number
reversed); a field of b < 8 bits its 2^b values, again and again.  An average over some steps sees far less noise so.
Each draw by itself is uniform, and rounding unbiased; fields of one element walk through a window side by side, so
their noise is not independent over it, and what was rounded under one draw is not independent of the next.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, the increment of SplitMix64

PLACE = 8
WINDOW = 1 << PLACE  # steps over which the noise of an element is one evenly spread sequence

M1, M2, M3 = 0x7FEB352D, 0x846CA68B, 0x9E3779B1
SALTS = (0, 0x3C6EF372, 0x1B873593, 0x5851F42D)

Word = tuple[int, tuple[tuple[int, int], ...], bool]
"""The recipe of a word of random bits: the factor of the step's place, the (shift, bits) of its fields of fewer than
PLACE bits, True if each step hashes anew."""


def salt(k: int) -> int:
    """Return what sets the k-th word of an element apart: the four above, then multiples of the golden ratio."""
    return SALTS[k] if k < len(SALTS) else (2 * k + 1) * M3 & 0xFFFFFFFF


def places(shares: Iterable[tuple[int, int]]) -> int:
    """Return the factor that puts a step's place in its window on top of each field (shift, bits) of a word."""
    return sum(1 << (shift + bits - PLACE) for shift, bits in shares if bits >= PLACE)


def deal(
    wants: Mapping[str, int], rare: Collection[str] = ()
) -> tuple[dict[str, tuple[int, int, int]], tuple[Word, ...]]:
    """Return (word, shift, bits) of each value that wants bits, first come first served, and the recipes of the words.

    A new word begins where 32 bits run out.  The first field of a word takes its top bits and the last one its bottom
    bits: the one needs only a shift, the other only a mask.

    rare  values that some steps do not store, or make anew; they have words of their own, drawn anew at each.  Of a
          window they would see some places only, at every second step those of the same half of the range: rounding
          would lean to one side for a whole window.
    """
    often = _shares({name: bits for name, bits in wants.items() if name not in rare})
    anew = _shares({name: bits for name, bits in wants.items() if name in rare})
    out: dict[str, tuple[int, int, int]] = {}
    words: list[Word] = []
    for k, share in enumerate(often + anew):
        fields: dict[str, tuple[int, int]] = {}
        top = 32
        for name, bits in share.items():
            top -= bits
            last = len(share) > 1 and name == list(share)[-1]
            fields[name] = 0 if last else top, bits
        narrow = tuple(f for f in fields.values() if f[1] < PLACE)
        words.append((places(fields.values()), narrow, False) if k < len(often) else (0, (), True))
        out |= {name: (k, shift, bits) for name, (shift, bits) in fields.items()}
    return out, tuple(words)


Recipe = tuple[int, int, tuple[tuple[int, int], ...], bool]
"""The salt of a word, the factor of the step's place, the bits of the place that each of its fields without room for
all takes and how far up they move, and True if each step hashes it anew."""


def recipes(words: Iterable[Word]) -> tuple[Recipe, ...]:
    """Return how kernels make each word."""
    return tuple(
        (
            signed(salt(k)),
            signed(spread),
            tuple((WINDOW - 1 & -(1 << PLACE - bits), shift + bits - PLACE) for shift, bits in narrow),
            anew,
        )
        for k, (spread, narrow, anew) in enumerate(words)
    )


def _shares(wants: Mapping[str, int]) -> list[dict[str, int]]:
    """Return, for each word, the values that share it and their bits."""
    shares: list[dict[str, int]] = []
    for name, bits in wants.items():
        if bits > 32:
            raise ValueError(f"{name} wants {bits} random bits; a word has 32")
        if bits and (not shares or sum(shares[-1].values()) + bits > 32):
            shares.append({})
        if bits:
            shares[-1][name] = bits
    return shares


def _mix(z: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea & Flood 2014): a bijection of 64 bits that avalanches."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def signed(word: int) -> int:
    """Return the int32 with the low 32 bits of `word`."""
    return (word + 2**31 & 2**32 - 1) - 2**31


@functools.lru_cache(maxsize=1024)
def step_key(seed: int, step: int) -> int:
    """32 bits for step number `step` (1, 2, ...) under `seed` (its low 64 bits count)."""
    return signed(_window_key(seed, step >> PLACE) | _PLACES[step & WINDOW - 1])


_PLACES = [int(f"{place:0{PLACE}b}"[::-1], 2) for place in range(WINDOW)]
"""The places of a window, their bits reversed."""


@functools.lru_cache(maxsize=1024)
def _window_key(seed: int, window: int) -> int:
    """Return the upper bits of the keys of a window's steps."""
    stream = _mix((seed + _GOLDEN) % 2**64)
    return _mix((stream + window * _GOLDEN) % 2**64) >> 32 & -WINDOW


def stream_of_steps(seed: int) -> int:
    """Return the 64-bit signed word from which a device makes keys of steps (`gpu.device_steps.step_key`)."""
    return (_mix((seed + _GOLDEN) % 2**64) + 2**63) % 2**64 - 2**63


@functools.lru_cache(maxsize=65536)
def stream_key(parameter: str | int) -> int:
    """32 bits for a parameter: its name, or its position over all groups."""
    if isinstance(parameter, str):
        return int.from_bytes(hashlib.blake2b(parameter.encode(), digest_size=4).digest(), "little", signed=True)
    return signed(_mix(((parameter + 1) * _GOLDEN) % 2**64) >> 32)


Label = str | int
"""A parameter's name, or its position over all groups where it has none."""


def are_labelled(value: Any) -> bool:
    """Return True for (name or position, anything) pairs."""
    return isinstance(value, (list, tuple)) and all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 and type(pair[0]) in (str, int) for pair in value
    )


_tables: dict[int, tuple[object, Mapping[Label, Any]]] = {}


def table(pairs: Any, checked: Callable[[Any], Iterable[tuple[Label, Any]]]) -> Mapping[Label, Any]:
    """Return the dict of (name or position, anything) pairs that a group records, if there are any.

    Asked for each parameter: a table is found by the identity of what is recorded, which is never changed in place.
    """
    if not pairs:
        return {}
    known = _tables.get(id(pairs))
    if known is None or known[0] is not pairs:
        if len(_tables) >= 256:
            _tables.clear()
        known = _tables[id(pairs)] = pairs, dict(checked(pairs))
    return known[1]
