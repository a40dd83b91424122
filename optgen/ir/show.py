"""The text form of the IR.

    add(mul($beta1, %exp_avg:f32), mul(1.0, @g))

`$name` is a host scalar, `%buffer:dtype` a load (with `/64` after it in block space), `@name` a let,
`#index` and `#key.name` the counter's leaves, `#extent.rows` a size of the tensor, numbers are f32, `3i` is
an i32; `cast<i32>(x)`, `block_max<64>(x)` carry an attribute.  A value without a name that is used several times
stands once, in a line `shared 1 = ...`, and is `@1` from there on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from optgen.ir.node import Node, leaf, postorder, written
from optgen.ir.program import Program, Schedule


def text(node: Node, names: Mapping[int, str] | None = None) -> str:
    """One node as text; nodes in `names` (by uid) are written as @name."""
    names = names or {}
    if node.uid in names:
        return f"@{names[node.uid]}"
    if not node.args:
        return leaf(node)
    return written(node, [text(a, names) for a in node.args])


def show(program: Program | Schedule) -> str:
    """Return a Program line by line, each shared value once."""
    p = program.program if isinstance(program, Schedule) else program
    lines = [f"program {p.name} maths={p.maths} block={p.block}"]
    for b in p.buffers:
        access = ("r" if b.reads else "") + ("w" if b.writes else "")
        lines.append(f"buffer {b.name} {b.dtype} {b.space} {b.role} {b.owner} {access}")
    lines += [f"host {let.name} = {text(let.node)}" for let in p.host]
    roots = [let.node for let in p.body] + [s.node for s in p.stores]
    users = Counter([a.uid for node in postorder(roots) for a in node.args] + [s.node.uid for s in p.stores])
    names: dict[int, str] = {}

    def share(root: Node) -> None:
        """Name the shared values below a node; a single operation on named values stays where it is used."""
        for node in postorder([root]):
            deep = any(a.args and a.uid not in names for a in node.args)
            if deep and node is not root and node.uid not in names and users[node.uid] > 1:
                number = sum(line.startswith("shared ") for line in lines) + 1
                lines.append(f"shared {number} = {text(node, names)}")
                names[node.uid] = str(number)

    for let in p.body:
        share(let.node)
        lines.append(f"{let.stage} {let.name} = {text(let.node, names)}")
        if let.node.args:
            names[let.node.uid] = let.name
    for s in p.stores:
        share(s.node)
        lines.append(f"store {s.buffer} = {text(s.node, names)}")
    if isinstance(program, Schedule):
        parts = ", ".join(f"{part.reduction} {part.name}" for part in program.partials)
        lines.append(f"sweep 1 reads {' '.join(program.sweep.reads)}" + (f" reduces {parts}" if parts else ""))
    return "\n".join(lines) + "\n"
