"""Equal programs go through the passes once: settings of the flags, dtypes and plans share many kernels."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from operator import attrgetter
from typing import TypeVar

from optgen.ir.program import Program, Schedule

Made = TypeVar("Made", Program, Schedule)
Log = Callable[[str, Program | Schedule, Program | Schedule], None]

KEPT = 512
"""Programs whose results are kept: what one rule's settings share is asked for again soon."""

_LET = attrgetter("name", "node", "stage", "line", "doc")
_REST = attrgetter("name", "buffers", "maths", "block", "rules", "hypers", "doc", "kept", "space", "draws")


def _key(program: Program) -> Hashable:
    """Everything that a program is made of, compared at little cost: places by identity, numbers by their text."""
    lets = [*program.host, *program.body, *program.host_locals, *program.host_stores]
    return (
        _REST(program),
        (len(program.host), len(program.body), len(program.host_locals)),
        tuple(map(_LET, lets)),
        tuple([id(let.loc) for let in lets]),
        tuple([(s.buffer, s.node) for s in program.stores]),
        repr((program.ranges, program.host_states)),  # == does not tell 0.0 from -0.0
    )


def once(do: Callable[[Program, Log | None], Made]) -> Callable[[Program, Log | None], Made]:
    """`do`, which makes the same of equal programs; where somebody looks on (`log`), it does so every time."""
    done: dict[Hashable, tuple[Program, Made]] = {}

    @wraps(do)
    def kept(program: Program, log: Log | None) -> Made:
        if log:
            return do(program, log)
        key = _key(program)
        found = done.get(key)
        if found is None:
            # The program is kept too: its places must live as long as their identities are compared.
            found = program, do(program, None)
            if len(done) >= KEPT:
                done.pop(next(iter(done)), None)
            done[key] = found
        return found[1]

    return kept
