"""share: a node used twice becomes one let, a let that nothing uses goes, and lets stand before their use.

rewrite:
    update a = mul(sqrt(%v:f32), $lr)
    update b = add(sqrt(%v:f32), $eps)
  ->
    update sqrt_v = sqrt(%v:f32)
    update a = mul(@sqrt_v, $lr)
    update b = add(@sqrt_v, $eps)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from optgen.ir.node import Node, postorder, unseen
from optgen.ir.program import Let, Program, Section
from optgen.ops import dtypes, spaces

# Too cheap to deserve a line of their own: a conversion or a shift of a loaded value.
_INLINE = {"neg", "not"}
STAGES: tuple[Section, ...] = ("decode", "update", "encode")


def share(program: Program) -> Program:
    """See the module's docstring."""
    roots = [s.node for s in program.stores]
    order = postorder(roots)
    live, shared = {n.uid for n in order}, _shared(order, roots)
    named: dict[int, Let] = {}
    for let in program.body:
        if let.node.uid in live and let.node.args and let.node.space != spaces.host:
            named.setdefault(let.node.uid, let)
    names = {uid: let.name for uid, let in named.items()}
    out: list[Let] = []
    seen: set[Node] = set()

    # Stage of a node that no line of the author made: decode if only decodes need it, else where it is first used.
    def emit(root: Node, stage: Section) -> None:
        for node in unseen(root, seen):
            if node.op == "load":
                out.append(Let(_load_name(node), node, "decode"))
            elif node.uid in named:
                let = named[node.uid]
                out.append(let if let.stage == stage else replace(let, stage=min(let.stage, stage, key=STAGES.index)))
            elif node.uid in shared:
                out.append(Let(f"{nearest(node, names) or 'word'}_{node.op}", node, stage))

    for let in named.values():
        emit(let.node, let.stage)
    for store in program.stores:
        emit(store.node, "encode")
    # A kernel reads in three blocks; what an earlier block needs was given that block's stage above.
    return replace(program, body=tuple(sorted(out, key=lambda let: STAGES.index(let.stage))))


def _shared(order: Sequence[Node], roots: Sequence[Node]) -> set[int]:
    """Return the uids of nodes that deserve a line: of operations that are read twice, and of blocks' values."""
    uses = Counter([a.uid for n in order for a in n.args])
    uses.update(r.uid for r in roots)
    # A block's value that elements read gets a name, so that the broadcast is the only thing beside it.
    beside = {a.uid for n in order if n.space is spaces.elem for a in n.args if a.space.name == "block"}
    operations = [n for n in order if n.args and n.space != spaces.host]
    return {n.uid for n in operations if n.uid in beside or (uses[n.uid] > 1 and n.op not in _INLINE)}


def _load_name(node: Node) -> str:
    """The buffer's name where the load is the value itself or a block's, else what it holds of it."""
    if node.dtype is dtypes.f32 or node.space.name == "block":
        return str(node.attr)
    return f"{str(node.attr).removesuffix('_codes')}_code" if node.dtype.is_int else f"{node.attr}_stored"


def nearest(node: Node, names: Mapping[int, str]) -> str:
    """Return the nearest name of an author, a format or a buffer below a node, the left one of several, or ""."""
    level, seen = [*node.args], set[Node]()
    while level:
        for n in level:
            if n.uid in names or n.op == "load":
                return names.get(n.uid, str(n.attr))
        seen.update(level)
        level = [a for n in level for a in n.args if a not in seen]
    return ""
