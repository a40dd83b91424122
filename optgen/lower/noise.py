"""Random bits: a counter hash of (element, tensor, step), dealt out to the fields that round stochastically.

One 32-bit word serves an element's states and weight together where their wants add up to 32 bits; more
words come from the same counter under another salt.  The hash is made of IR operations, so every backend
draws the same bits, whatever the tiling, the order of the tensors or the number of shards.
"""

from __future__ import annotations

from optgen.formats.format import Noise
from optgen.ir import node as ir
from optgen.ir.node import Node
from optgen.lang.values import Value, lshr, rotl

# Eight neighbours share two hashes, and each reads one of them rotated by its own distance: a bit of a word is a sum
# of two shared bits, of which no two words, and no two bits of a word, have both in common.  So bits are pairwise
# independent, which is all that the variance of a sum of roundings asks for, at a quarter of the price of a hash
# each.  The keys are 32-bit hashes themselves and both enter before the first round (a key that enters between
# the rounds leaves steps 2 % correlated).  tests/test_noise.py holds the words to uniformity and to independence
# over neighbours, steps, tensors and the bits of one word.
M1 = 0x7FEB352D
M2 = 0x846CA68B
M3 = 0x9E3779B1
SALTS = (0, 0x3C6EF372, 0x1B873593, 0x5851F42D)


def _i32(x: int) -> int:
    """The i32 with these 32 bits."""
    return x - (1 << 32) if x >= 1 << 31 else x


def word(k: int) -> Node:
    """The k-th 32-bit word of an element: hash(index, stream_key, step_key)."""
    index = Value(ir.index())
    stream, step = Value(ir.key("stream_key")), Value(ir.key("step_key"))
    x = lshr(index, 3) ^ stream ^ step
    x = (x ^ _i32(SALTS[k]) if k else x) * _i32(M1)
    x = (x ^ lshr(x, 16)) * _i32(M2)
    x = x ^ lshr(x, 15)
    y = (x ^ lshr(x, 16)) * _i32(M3)
    y = (y ^ lshr(y, 15)) * _i32(M1)
    y = y ^ lshr(y, 16)
    lane = index & 7
    # Triangular numbers: no two pairs of neighbours are the same distance apart.
    out: Value = x ^ rotl(y, ((lane * (lane + 1)) >> 1) + 1)
    return out.node


def deal(wants: dict[str, int]) -> tuple[dict[str, Noise], list[Node]]:
    """Noise for each field that wants bits, first come first served, a new word where 32 bits run out.

    The first field of a word takes its top bits and the last one its bottom bits: the one needs only a shift, the
    other only a mask.
    """
    shares: list[dict[str, int]] = []
    for name, bits in wants.items():
        if bits > 32:
            raise ValueError(f"{name} wants {bits} random bits; a word has 32")
        if bits and (not shares or sum(shares[-1].values()) + bits > 32):
            shares.append({})
        if bits:
            shares[-1][name] = bits
    words = [word(k) for k in range(len(shares))]
    out: dict[str, Noise] = {}
    for node, share in zip(words, shares, strict=True):
        top = 32
        for name, bits in share.items():
            top -= bits
            last = len(share) > 1 and name == list(share)[-1]
            out[name] = Noise(Value(node), 0 if last else top, bits)
    return out, words


__all__ = ["deal", "word"]
