"""The text form of the IR.

    add(mul($beta1, %exp_avg:f32), mul(1.0, @g))

`$name` is a host scalar, `%buffer:dtype` a load (with `/64` after it in block space), `@name` a let,
`#extent.rows` a size of the tensor, numbers are f32, `3i` is an i32; `cast<i32>(x)`, `block_max<64>(x)` carry an
attribute.  A value without a name that is used several times stands once, in a line `shared 1 = ...`, and is `@1` from
there on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

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


def _shared(root: Node, users: Mapping[int, int], names: dict[int, str]) -> Iterator[str]:
    """Yield a line for each shared value below a node and name it; a single operation on named values has none."""
    for node in postorder([root]):
        deep = any(a.args and a.uid not in names for a in node.args)
        if deep and node is not root and node.uid not in names and users[node.uid] > 1:
            number = 1 + sum(name.isdigit() for name in names.values())
            yield f"shared {number} = {text(node, names)}"
            names[node.uid] = str(number)


def show(program: Program | Schedule) -> str:
    """Return a Program line by line, each shared value once."""
    p = program.program if isinstance(program, Schedule) else program
    lines = [f"program {p.name} maths={p.maths} block={p.block}"]
    for b in p.buffers:
        lines.append(f"buffer {b.name} {b.dtype} {b.space} {b.role} {b.owner} {'r' * b.reads}{'w' * b.writes}")
    lines += [f"host {let.name} = {text(let.node)}" for let in p.host]
    roots = [let.node for let in p.body] + [s.node for s in p.stores]
    users = Counter([a.uid for node in postorder(roots) for a in node.args] + [s.node.uid for s in p.stores])
    names: dict[int, str] = {}
    for let in p.body:
        lines += _shared(let.node, users, names)
        lines.append(f"{let.stage} {let.name} = {text(let.node, names)}")
        if let.node.args:
            names[let.node.uid] = let.name
    for s in p.stores:
        lines += _shared(s.node, users, names)
        lines.append(f"store {s.buffer} = {text(s.node, names)}")
    if isinstance(program, Schedule):
        parts = ", ".join(f"{part.reduction} {part.name}" for part in program.partials)
        lines.append(f"sweep 1 reads {' '.join(program.sweep.reads)}" + (f" reduces {parts}" if parts else ""))
    return "\n".join(lines) + "\n"
