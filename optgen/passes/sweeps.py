"""sweeps: one pass over memory, cut after every reduction that feeds back into elements.

A node's level is the number of row, column or tensor reductions of elements on the longest path below it.  Sweep k
computes the operands of the reductions of level k, leaves their partials, and the last sweep stores.
What crosses a cut is recomputed from the loads: reading a compressed state again costs 1 byte per element
where spilling an f32 would cost 8.
"""

from __future__ import annotations

from optgen.ir.node import Node, loads, postorder
from optgen.ir.program import Partial, Program, Schedule, Sweep
from optgen.ops import spaces
from optgen.ops.prims import REDUCTIONS


def cuts(node: Node) -> bool:
    """Whether the node needs a pass over all elements before it; a mean of row sums, say, is small work between."""
    return node.op in REDUCTIONS and node.args[0].space == spaces.elem


def levels(roots: list[Node]) -> dict[int, int]:
    """Node uid -> number of reductions below it."""
    out: dict[int, int] = {}
    for node in postorder(roots):
        below = max((out[a.uid] for a in node.args), default=0)
        out[node.uid] = below + cuts(node)
    return out


def sweeps(program: Program) -> Schedule:
    """See the module's docstring."""
    level = levels(program.roots())
    reductions = [n for n in postorder(program.roots()) if cuts(n)]
    last = max(level.values(), default=0)
    out = []
    for k in range(last):
        here = [n for n in reductions if level[n.uid] == k + 1]
        partials = tuple(Partial(f"partial_{i}", n.op, n.args[0]) for i, n in enumerate(here))
        reads = sorted(set(loads([p.node for p in partials])), key=[b.name for b in program.buffers].index)
        needed = {n.uid for n in postorder([p.node for p in partials])}
        lets = tuple(let for let in program.body if let.node.uid in needed)
        out.append(Sweep(tuple(reads), lets, partials, (), why=", ".join(p.reduction for p in partials)))
    read = set(loads(program.roots()))
    everything = tuple(b.name for b in program.buffers if b.name in read)
    out.append(Sweep(everything, program.body, (), program.stores, why="the update"))
    return Schedule(program, tuple(out))
