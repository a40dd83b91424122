"""Expressions that one helper of Triton's prelude says in fewer instructions than their nodes, bit for bit.

They move bytes between words, which machines do in one permutation and compilers in two or three instructions.
Elements only: a value of a block is in every lane, and lanes hold too few of them to fill a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from optgen.ir.node import Node, is_const
from optgen.ops import dtypes, spaces


@dataclass(frozen=True)
class Idiom:
    """helper(*args, *numbers); names of a codec's arguments are given as numbers."""

    helper: str
    args: tuple[Node, ...]
    numbers: tuple[int | str, ...] = ()


@cache
def idiom(node: Node) -> Idiom | None:
    """Return the node in fast maths; None where it is spelled as it stands."""
    if node.space != spaces.elem:
        return None
    if node.op == "cast":
        return _cast(node)
    if node.op == "bitcast" and node.dtype is dtypes.f32:
        return _counter(node.args[0])
    return _joined(node) if node.op == "add" else None


@cache
def lanes(node: Node) -> Idiom | None:
    """The same for Triton's prelude, which has more of them: for bytes and bits of four words that a lane holds."""
    found = idiom(node)
    if found or node.space != spaces.elem or node.op != "cast":
        return found
    (x,) = node.args
    if node.dtype is dtypes.i32 and x.dtype is dtypes.u8 and x.op == "load":
        return Idiom("apart", (x,))
    if node.dtype is dtypes.u8 and x.op in ("shr", "lshr") and x.args[1].attr == 12:
        return _rounded(x.args[0]) or Idiom("bits", (x.args[0],), (12,))
    return None


def magnitude(n: Node) -> Node | None:
    """Return x of `words.block_top` and `block_bottom`, where it is a float: of block_max(bits(x) + NAN_LAST) or
    block_min(bits(x) & 0x7FFFFFFF).
    """
    op, number = ("add", dtypes.NAN_LAST) if n.op == "block_max" else ("and", 0x7FFFFFFF)
    (pattern,) = n.args
    if pattern.op != op or not is_const(pattern.args[1], number) or pattern.args[0].op != "bitcast":
        return None
    (x,) = pattern.args[0].args
    return x.args[0] if x.op == "abs" else x


def _cast(node: Node) -> Idiom | None:
    (x,) = node.args
    if node.dtype is dtypes.f32 and x.dtype is dtypes.bf16:
        return Idiom("widened", (x,))
    if node.dtype is not dtypes.u8 or x.dtype is not dtypes.i32:
        return None
    if x.op in ("shr", "lshr") and x.args[1].attr in (8, 16, 24):
        return Idiom("byte", (x.args[0],), (x.args[1].attr // 8,))
    return None


def _rounded(total: Node) -> Idiom | None:
    """Bits 12 to 19 of a pattern and 12 bits of noise."""
    if total.op != "add":
        return None
    pattern, drawn = total.args
    is_noise = drawn.op == "draw" and drawn.attr[:2] == ("integer", 12)
    return Idiom("rounded", (pattern,), ("draws", "SHIFT")) if is_noise else None


def _byte(node: Node) -> Node | None:
    """x of the i32 of a byte x."""
    return node.args[0] if node.op == "cast" and node.args[0].dtype is dtypes.u8 else None


def _counter(pattern: Node) -> Idiom | None:
    """2^23 + x: f32(x | 0x4B000000) of a byte x."""
    x = _byte(pattern.args[0]) if pattern.op == "or" and is_const(pattern.args[1], 0x4B000000) else None
    return None if x is None else Idiom("counter", (x,))


def _joined(node: Node) -> Idiom | None:
    """The pattern of a bf16 + (byte << 8)."""
    pattern, low = node.args
    if pattern.op != "bitcast" or pattern.args[0].op != "cast" or low.op != "shl" or not is_const(low.args[1], 8):
        return None
    (stored,), byte = pattern.args[0].args, _byte(low.args[0])
    return Idiom("joined", (stored, byte)) if byte is not None and stored.dtype is dtypes.bf16 else None


def printed(roots: list[Node]) -> Iterator[Node]:
    """Yield the nodes that Triton's kernels spell: `postorder` without the nodes inside an idiom."""
    seen: set[int] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node.uid not in seen:
            seen.add(node.uid)
            yield node
            found = lanes(node)
            stack += found.args if found else node.args
