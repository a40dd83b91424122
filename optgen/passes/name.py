"""name: the author's names first; a name is rebound, as the author did, once its old value is no longer needed.

rewrite:
    decode exp_avg = ...            ->  decode exp_avg = ...
    update exp_avg = ... exp_avg        update exp_avg = ... exp_avg       (old value dead: same name)
    update p = ... (old p used later)   update p_2 = ...
"""

from __future__ import annotations

import builtins
import keyword
from dataclasses import replace

from optgen.base.names import unique
from optgen.ir.node import Node
from optgen.ir.program import Let, Schedule
from optgen.lang.optimizer import CALLED, VARIABLES
from optgen.ops.prims import PRIMS

# Names that generated functions define, import or call: a let of that name gets an underscore.
RESERVED = {
    *keyword.kwlist,
    *dir(builtins),
    *VARIABLES,
    *CALLED,
    *"g_ptr at_row at_col at_mat at_eight live_row live_col live_mat live_eight".split(),
    *"extent_rows extent_columns extent_elements few_sum few_max newton_schulz draws fraction integer middle".split(),
    *"SHIFT stored Blocks".split(),
}


def last_use(lets: tuple[Let, ...], stores: tuple[Node, ...]) -> dict[int, int]:
    """Node uid -> index of the last let (or len(lets) for a store) that reads it, not looking below other lets."""
    bound = {let.node.uid for let in lets}
    out: dict[int, int] = {}

    def visit(root: Node, at: int) -> None:
        stack = list(root.args)
        while stack:
            node = stack.pop()
            if node.uid in bound:
                out[node.uid] = at
            else:
                stack.extend(node.args)

    for i, let in enumerate(lets):
        visit(let.node, i)
    for node in stores:
        if node.uid in bound:
            out[node.uid] = len(lets)
        else:
            visit(node, len(lets))
    return out


def name(schedule: Schedule) -> Schedule:
    """See the module's docstring."""
    program, sweep = schedule.program, schedule.sweep
    taken = RESERVED | PRIMS.keys() | program.scalars | {let.name for let in program.host}
    last = last_use(sweep.lets, tuple(s.node for s in sweep.stores))
    holder: dict[str, int] = {}  # name -> uid of the node it currently names
    out = []
    for i, let in enumerate(sweep.lets):
        base = f"{let.name}_" if let.name in taken else let.name
        name = unique(base, {x for x, uid in holder.items() if last.get(uid, -1) > i})
        holder[name] = let.node.uid
        out.append(let if name == let.name else replace(let, name=name))
    new = replace(sweep, lets=tuple(out))
    return Schedule(replace(program, body=new.lets), new)
