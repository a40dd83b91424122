"""place: a program becomes the schedule of one kernel: stores in buffer order, lets in the order stores need them.

The operands of the first store are computed first, within the three stages, so that a kernel that stores as soon as it
can holds few values at a time: the weight, which every rule reads and no encoder does, is done before moments are
encoded. A state is never read back after it was encoded.

rewrite:
    program  ->  sweep reads the buffers that it loads; stores in buffer order
    encode b = ... ; encode a = ... ; store a ; store b  ->  encode a = ... ; encode b = ... ; store a ; store b
"""

from __future__ import annotations

from optgen.ir.node import loads, postorder
from optgen.ir.program import Let, Program, Schedule, Store, Sweep
from optgen.passes.share import STAGES


def _ordered(lets: tuple[Let, ...], stores: tuple[Store, ...]) -> tuple[Let, ...]:
    """The lets in the order in which the stores need them, stage by stage; then those that none needs."""
    named = {let.node.uid: let for let in reversed(lets)}
    needed = [named[n.uid] for n in postorder([s.node for s in stores]) if n.uid in named]
    done = {let.node.uid for let in needed}
    rest = [let for let in lets if let.node.uid not in done]
    return tuple(sorted([*needed, *rest], key=lambda let: STAGES.index(let.stage)))


def place(program: Program) -> Schedule:
    """See the module's docstring."""
    read = set(loads(program.roots()))
    order = [b.name for b in program.buffers]
    stores = tuple(sorted(program.stores, key=lambda s: order.index(s.buffer)))
    return Schedule(program, Sweep(tuple(n for n in order if n in read), _ordered(program.body, stores), stores))
