"""A storage format alone, as the steps that backends print its functions from."""

from __future__ import annotations

from dataclasses import dataclass

from optgen.ir.program import Schedule, Step

X, ROOT, UNROUNDED = "x", "root", "unrounded"
"""Buffers of codec programs that are no fields: the fp32 value, the root that is read back of it, and its own root."""


@dataclass(frozen=True)
class CodecText:
    """The steps of a format alone.

    names  the buffers of its fields in the order in which they are stored
    reads  what the functions that read take; () where that is the fields
    given  what those that store take behind the value
    small  the small work for a state that is kept as a whole, in the order of its records
    """

    names: tuple[str, ...]
    decode: Step
    root: Step | None
    encode: Step | None
    nearest: Step
    reads: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    small: tuple[Schedule, ...] = ()
