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
from dataclasses import dataclass

from optgen.formats.format import Noise
from optgen.ir import node as ir
from optgen.ir.node import Node
from optgen.lang.values import Num, Value, lshr, rotl
from optgen.runtime.records import keys
from optgen.runtime.records.keys import M1, M2, M3, PLACE, WINDOW, signed

# Eight neighbours share two hashes, and each reads one of them rotated by its own distance: a bit of a word is a sum
# of two shared bits, of which no two words, and no two bits of a word, have both in common.  So bits are pairwise
# independent, which is all that the variance of a sum of roundings asks for, at a quarter of the price of a hash
# each.  The keys are hashes themselves and both enter before the first round (a key that enters between
# the rounds leaves windows 2 % correlated).  tests/test_noise.py holds the words to uniformity and to independence
# over neighbours, steps, tensors and the bits of one word.
#
# Windows end so that nothing can walk in step with the sequence for long: under scales that move finely, endless
# golden-ratio sequences had up to three times the noise of independent bits in roots of second moments.  256 steps are
# what our narrowest field has room for (8 bits); no speed of a grid is known at which their noise is more than that of
# independent bits (tests/test_noise.py), and windows of 32 have 3 to 15 % more error in Adam's updates.  Keys of
# steps (runtime/records/keys.py) end in the reversed bits of the step.


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
        x = x ^ (step & (WINDOW - 1)) * signed(M2)
    x = (x ^ signed(keys.salt(k)) if k else x) * signed(M1)
    x = (x ^ lshr(x, 16)) * signed(M2)
    x = x ^ lshr(x, 15)
    moved = x if anew else x ^ (step & (WINDOW - 1)) * signed(at)
    for shift, bits in narrow:
        moved = moved ^ _part(step, shift, bits)
    y = (x ^ lshr(x, 16)) * signed(M3)
    y = (y ^ lshr(y, 15)) * signed(M1)
    y = y ^ lshr(y, 16)
    lane = index & 7
    # Triangular numbers: no two pairs of neighbours are the same distance apart.
    out: Value = moved ^ rotl(y, ((lane * (lane + 1)) >> 1) + 1)
    return out.node


def deal(wants: Mapping[str, int], rare: Collection[str] = ()) -> tuple[dict[str, Noise], list[Node]]:
    """Return the noise of each field (keys.deal) and the nodes of the words."""
    fields, made = keys.deal(wants, rare)
    words = [word(k, at, narrow, anew=anew) for k, (at, narrow, anew) in enumerate(made)]
    return {name: Noise(Value(words[k]), shift, bits) for name, (k, shift, bits) in fields.items()}, words


@dataclass(frozen=True)
class Drawn(Noise):
    """Noise as a codec asks for it: leaves instead of bits of a word."""

    word: Num = None
    shift: int = 0
    bits: int = 0

    def integer(self) -> Num:
        return Value(ir.draw("integer", self.bits, self.bits))

    def fraction(self, width: int) -> Num:
        return Value(ir.draw("fraction", self.bits, width))

    def middle(self, width: int) -> Num:
        return Value(ir.draw("middle", self.bits, width))


__all__ = ["Drawn", "deal", "word"]
