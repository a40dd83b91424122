"""Random bits: a counter hash of (element, tensor, step), dealt out to the fields that round stochastically.

One 32-bit word serves an element's states and weight together where their wants add up to 32 bits; more
words come from the same counter under another salt.  The hash is made of IR operations, so every backend
draws the same bits, whatever the tiling, the order of the tensors or the number of shards.
"""

from __future__ import annotations

from optgen.formats.format import Noise
from optgen.lang.values import Value, lshr
from optgen.ir import node as ir
from optgen.ir.node import Node

# Odd multipliers of the first and second round and one salt per extra word.  The keys are 32-bit hashes
# themselves and both enter before the first round (a key that enters between the rounds leaves steps 2 %
# correlated): then two multiplications are enough.  tests/test_noise.py holds the words to uniformity and
# to independence over neighbours, steps, tensors and the bits of one word.
M1 = 0x7FEB352D
M2 = 0x846CA68B
SALTS = (0, 0x3C6EF372, 0x1B873593, 0x5851F42D)


def _i32(x: int) -> int:
    """The i32 with these 32 bits."""
    return x - (1 << 32) if x >= 1 << 31 else x


def word(k: int) -> Node:
    """The k-th 32-bit word of an element: hash(index, stream_key, step_key)."""
    index = Value(ir.index())
    stream, step = Value(ir.key("stream_key")), Value(ir.key("step_key"))
    x = index ^ stream ^ step
    x = (x ^ _i32(SALTS[k]) if k else x) * _i32(M1)
    x = (x ^ lshr(x, 16)) * _i32(M2)
    return (x ^ lshr(x, 15)).node


def deal(wants: dict[str, int]) -> tuple[dict[str, Noise], list[Node]]:
    """Noise for each field that wants bits, first come first served, a new word where 32 bits run out.

    Bits are dealt from the top of a word: the high bits of a multiplicative hash are its best.
    """
    out: dict[str, Noise] = {}
    words: list[Node] = []
    left = 0
    for name, bits in wants.items():
        if not bits:
            continue
        if bits > 32:
            raise ValueError(f"{name} wants {bits} random bits; a word has 32")
        if bits > left:
            words.append(word(len(words)))
            left = 32
        left -= bits
        out[name] = Noise(Value(words[-1]), left, bits)
    return out, words


__all__ = ["deal", "word"]
