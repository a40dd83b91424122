"""The kernel around a kernel that takes its scalars from device memory, for steps that are counted there."""

from __future__ import annotations

import triton
import triton.language as tl

from optgen.runtime.records import keys

PLACE, WINDOW = tl.constexpr(keys.PLACE), tl.constexpr(keys.WINDOW)


@triton.jit
def _chosen(values, WHICH: tl.constexpr):
    """The numbers at those places, as a tuple."""
    out = ()
    for k in tl.static_range(len(WHICH)):
        out = out + (tl.load(values + WHICH[k]),)
    return out


@triton.jit
def _shifted(z, BY: tl.constexpr):
    """A logical shift of int64 to the right: its own brings in copies of the sign."""
    return (z >> BY) & ((1 << (64 - BY)) - 1)


@triton.jit
def step_key(number, stream):
    """`keys.step_key` of a step, int64, under a seed of that stream (`keys.stream_of_steps`): int32."""
    z = (number >> PLACE) * -7046029254386353131 + stream
    z = (z ^ _shifted(z, 30)) * -4658895280553007687
    z = (z ^ _shifted(z, 27)) * -7723592293110705685
    z = z ^ _shifted(z, 31)
    place = number * 0
    for i in tl.static_range(PLACE):
        place += ((number >> i) & 1) * (WINDOW >> (i + 1))
    return (((z >> 32) & -WINDOW) | place).to(tl.int32)


@triton.jit
def controlled(
    table, work, values, words, kernel: tl.constexpr, WHICH: tl.constexpr, KEYED: tl.constexpr, LINE: tl.constexpr,
    CONSTANTS,
):  # fmt: skip
    """`kernel`, a program of it for each program.

    values     fp32: the scalars of a step, line by line; WHICH of them the kernel takes, by position
    words      int64, two of each line: the number of the step, and the stream of its key
    KEYED      whether the kernel takes the key
    LINE       where a tensor's line stands, above its stream key: entries of a work item, entries of a row of the
               table, and that entry; then the scalars of a line.  () where all tensors have one line
    CONSTANTS  what else it takes, in its order: a tuple of constexpr, not a constexpr of a tuple, which Triton 3.6 does
               not take apart at a star
    """
    if len(LINE) > 0:
        row = table + LINE[1] * tl.load(work + LINE[0] * tl.program_id(0)).to(tl.int64)
        line = tl.load(row + LINE[2]) >> 32
        values += LINE[3] * line
        words += 2 * line
    if KEYED:
        kernel(table, work, *_chosen(values, WHICH), step_key(tl.load(words), tl.load(words + 1)), *CONSTANTS)
    else:
        kernel(table, work, *_chosen(values, WHICH), *CONSTANTS)
