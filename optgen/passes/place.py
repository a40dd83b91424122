"""place: stores stand in the last sweep, in the order of the buffers, and lets in the order in which stores need them.

The operands of the first store are computed first, within the three stages, so that a kernel that stores as soon as it
can holds few values at a time: the weight, which every rule reads and no encoder does, is done before moments are
encoded. A state is never read back after it was encoded.

rewrite:
    stores in the order in which formats made them  ->  stores in buffer order
    encode b = ... ; encode a = ... ; store a ; store b  ->  encode a = ... ; encode b = ... ; store a ; store b
"""

from __future__ import annotations

from dataclasses import replace

from optgen.ir.node import postorder
from optgen.ir.program import Let, Schedule, Section, Store

_STAGES: tuple[Section, ...] = ("decode", "update", "encode")


def _ordered(lets: tuple[Let, ...], stores: tuple[Store, ...]) -> tuple[Let, ...]:
    """The lets in the order in which the stores need them, stage by stage; then those that none needs."""
    named = {let.node.uid: let for let in reversed(lets)}
    needed = [named[n.uid] for n in postorder([s.node for s in stores]) if n.uid in named]
    done = {let.node.uid for let in needed}
    rest = [let for let in lets if let.node.uid not in done]
    return tuple(sorted([*needed, *rest], key=lambda let: _STAGES.index(let.stage)))


def place(schedule: Schedule) -> Schedule:
    """See the module's docstring."""
    order = {b.name: i for i, b in enumerate(schedule.program.buffers)}
    last = schedule.sweep
    stores = tuple(sorted(last.stores, key=lambda s: order[s.buffer]))
    lets = _ordered(last.lets, stores)
    if (stores, lets) == (last.stores, last.lets):
        return schedule
    return replace(schedule, sweep=replace(last, stores=stores, lets=lets))
