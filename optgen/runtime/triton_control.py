"""The kernel around a kernel that takes its scalars from device memory, for steps that are counted there."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _chosen(values, WHICH: tl.constexpr):
    """The numbers at those places, as a tuple."""
    out = ()
    for k in tl.static_range(len(WHICH)):
        out = out + (tl.load(values + WHICH[k]),)
    return out


@triton.jit
def controlled(
    table, work, values, words, kernel: tl.constexpr, WHICH: tl.constexpr, KEYED: tl.constexpr, CONSTANTS: tl.constexpr
):
    """`kernel`, a program of it for each program; nothing where the step is to be skipped.

    values     fp32: the scalars of a step; WHICH of them the kernel takes, by position
    words      int32 (2,): the step key, and whether to skip
    KEYED      whether the kernel takes the key
    CONSTANTS  what else it takes, in its order
    """
    if tl.load(words + 1) == 0:
        if KEYED:
            kernel(table, work, *_chosen(values, WHICH), tl.load(words), *CONSTANTS)
        else:
            kernel(table, work, *_chosen(values, WHICH), *CONSTANTS)
