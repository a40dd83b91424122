"""Random bits: a counter hash of (element, tensor, window of steps), dealt out to the fields that round stochastically.

One 32-bit word serves an element's states and weight together where their wants add up to 32 bits; more
words come from the same counter under another salt.  The hash is made of IR operations, so every backend
draws the same bits, whatever the tiling, the order of the tensors or the number of shards.

Over time the bits are evenly spread rather than independent: within a window of 256 steps each field visits 256 equal
parts of its range once each, in van der Corput's order (a random start, and on it the bits of the step's number
reversed); a field of b < 8 bits its 2^b values, again and again.  An average over some steps sees far less noise so.
Each draw by itself is uniform, and rounding unbiased; fields of one element walk through a window side by side, so
their noise is not independent over it, and what was rounded under one draw is not independent of the next.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from optgen.formats.format import Noise
from optgen.ir import node as ir
from optgen.ir.node import Node
from optgen.lang.values import Value, lshr, rotl

# Eight neighbours share two hashes, and each reads one of them rotated by its own distance: a bit of a word is a sum
# of two shared bits, of which no two words, and no two bits of a word, have both in common.  So bits are pairwise
# independent, which is all that the variance of a sum of roundings asks for, at a quarter of the price of a hash
# each.  The keys are hashes themselves and both enter before the first round (a key that enters between
# the rounds leaves windows 2 % correlated).  tests/test_noise.py holds the words to uniformity and to independence
# over neighbours, steps, tensors and the bits of one word.
M1 = 0x7FEB352D
M2 = 0x846CA68B
M3 = 0x9E3779B1
SALTS = (0, 0x3C6EF372, 0x1B873593, 0x5851F42D)

# Windows end so that nothing can walk in step with the sequence for long: under scales that move finely, endless
# golden-ratio sequences had up to three times the noise of independent bits in roots of second moments.  256 steps are
# what our narrowest field has room for (8 bits); no speed of a grid is known at which their noise is more than that of
# independent bits (tests/test_noise.py), and windows of 32 have 3 to 15 % more error in Adam's updates.  The runtime's
# keys (runtime/keys.py) have the same number, and the reversed bits of the step at their end.
PLACE = 8
WINDOW = 1 << PLACE


def _i32(x: int) -> int:
    """The i32 with these 32 bits."""
    return x - (1 << 32) if x >= 1 << 31 else x


def salt(k: int) -> int:
    """What sets the k-th word of an element apart, 32 bits: the four above, then multiples of the golden ratio."""
    return SALTS[k] if k < len(SALTS) else (2 * k + 1) * M3 & 0xFFFFFFFF


def places(shares: Iterable[tuple[int, int]]) -> int:
    """What a step's place in its window is multiplied with to stand on top of each field (shift, bits) of a word."""
    return sum(1 << (shift + bits - PLACE) for shift, bits in shares if bits >= PLACE)


def _part(step: Value, shift: int, bits: int) -> Value:
    """The highest bits of a step's place, on a field that has no room for all of them."""
    highest = step & ((WINDOW - 1) & -(1 << (PLACE - bits)))
    up = shift + bits - PLACE
    part: Value = highest << up if up >= 0 else highest >> -up
    return part


def word(k: int, at: int, narrow: Iterable[tuple[int, int]] = (), *, anew: bool = False) -> Node:
    """The k-th 32-bit word of an element: hash(index, stream_key, window of step_key) ^ place of step_key * at.

    narrow  (shift, bits) of the fields of fewer than PLACE bits
    anew    another hash at every step instead, no place
    """
    index = Value(ir.index())
    stream, step = Value(ir.key("stream_key")), Value(ir.key("step_key"))
    x = lshr(index, 3) ^ stream ^ (step & -WINDOW)
    if anew:  # far from what sets the eights of a tensor apart
        x = x ^ (step & (WINDOW - 1)) * _i32(M2)
    x = (x ^ _i32(salt(k)) if k else x) * _i32(M1)
    x = (x ^ lshr(x, 16)) * _i32(M2)
    x = x ^ lshr(x, 15)
    moved = x if anew else x ^ (step & (WINDOW - 1)) * _i32(at)
    for shift, bits in narrow:
        moved = moved ^ _part(step, shift, bits)
    y = (x ^ lshr(x, 16)) * _i32(M3)
    y = (y ^ lshr(y, 15)) * _i32(M1)
    y = y ^ lshr(y, 16)
    lane = index & 7
    # Triangular numbers: no two pairs of neighbours are the same distance apart.
    out: Value = moved ^ rotl(y, ((lane * (lane + 1)) >> 1) + 1)
    return out.node


Word = tuple[int, tuple[tuple[int, int], ...], bool]
"""The recipe of a word: the factor of the step's place, its narrow fields, True if each step hashes anew."""


def dealt(wants: Mapping[str, int], rare: Collection[str] = ()) -> tuple[dict[str, tuple[int, int, int]], list[Word]]:
    """(word, shift, bits) of each field that wants bits, first come first served, and how each word is made.

    A new word begins where 32 bits run out.  The first field of a word takes its top bits and the last one its bottom
    bits: the one needs only a shift, the other only a mask.

    rare  fields that some steps do not store, or make anew; they have words of their own, drawn anew at each.  Of a
          window they would see some places only, at every second step those of the same half of the range: rounding
          would lean to one side for a whole window.
    """
    shares = _shares({name: bits for name, bits in wants.items() if name not in rare})
    often = len(shares)
    shares += _shares({name: bits for name, bits in wants.items() if name in rare})
    out: dict[str, tuple[int, int, int]] = {}
    words: list[Word] = []
    for k, share in enumerate(shares):
        fields: dict[str, tuple[int, int]] = {}
        top = 32
        for name, bits in share.items():
            top -= bits
            last = len(share) > 1 and name == list(share)[-1]
            fields[name] = 0 if last else top, bits
        narrow = tuple(f for f in fields.values() if f[1] < PLACE)
        words.append((places(fields.values()), narrow, False) if k < often else (0, (), True))
        out |= {name: (k, shift, bits) for name, (shift, bits) in fields.items()}
    return out, words


def deal(wants: Mapping[str, int], rare: Collection[str] = ()) -> tuple[dict[str, Noise], list[Node]]:
    """`dealt` as the noise of each field and the nodes of the words."""
    fields, made = dealt(wants, rare)
    words = [word(k, at, narrow, anew=anew) for k, (at, narrow, anew) in enumerate(made)]
    return {name: Noise(Value(words[k]), shift, bits) for name, (k, shift, bits) in fields.items()}, words


def _shares(wants: Mapping[str, int]) -> list[dict[str, int]]:
    """Of each word: its fields and their bits."""
    shares: list[dict[str, int]] = []
    for name, bits in wants.items():
        if bits > 32:
            raise ValueError(f"{name} wants {bits} random bits; a word has 32")
        if bits and (not shares or sum(shares[-1].values()) + bits > 32):
            shares.append({})
        if bits:
            shares[-1][name] = bits
    return shares


__all__ = ["WINDOW", "Word", "deal", "dealt", "places", "word"]
