"""A storage format alone, as the steps that backends print its functions from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from optgen.ir.node import Node, postorder
from optgen.ir.program import Let, Schedule, Step

X, ROOT = "x", "root"
"""Buffers of codec programs that are no fields: the fp32 value, and the root that is read back of it."""


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


Known = Mapping[int, str]
"""Node -> the call of another function of the codec that returns it."""


def reading(codec: CodecText, name: str, given: Sequence[str]) -> Iterator[tuple[str, Step, Known]]:
    """Yield the functions that read a value, "decode" and "root": one calls the other where its value is in it.

    given  the arguments of such a call
    """
    steps = {part: step for part, step in (("decode", codec.decode), ("root", codec.root)) if step is not None}
    values = {part: step.stages[-1].schedule.sweep.stores[0].node for part, step in steps.items()}
    for part, other in (("decode", "root"), ("root", "decode")):
        if part not in steps:
            continue
        within = other in steps and len(steps[part].stages) == 1 and values[other] in postorder([values[part]])
        yield part, steps[part], {values[other].uid: f"{name}_{other}({', '.join(given)})"} if within else {}


def lets_of(lets: Sequence[Let], roots: Sequence[Node], known: Known) -> list[Let]:
    """Return the lets that roots read where some nodes are known."""
    read, stack = set(), list(roots)
    while stack:
        node = stack.pop()
        if node.uid not in read:
            read.add(node.uid)
            stack += () if node.uid in known else node.args
    return [let for let in lets if let.node.uid in read]
