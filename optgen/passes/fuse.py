"""fuse: a product that only one sum reads is computed with it, in one rounding.  Fast maths.

rewrite (ROUNDS):
    fma   x * y + z -> fma(x, y, z)        x * y - z -> fma(x, y, -z)        z - x * y -> fma(-x, y, z)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from optgen.ir import node as ir
from optgen.ir.node import Node, postorder, unseen
from optgen.ir.program import Program
from optgen.ops import dtypes, spaces
from optgen.passes.fold import exact


def fuse(program: Program) -> Program:
    """See the module's docstring."""
    if program.maths == "strict":
        return program
    uses = Counter(a.uid for n in postorder(program.roots()) for a in n.args)
    uses.update(s.node.uid for s in program.stores)
    fired = False
    memo: dict[int, Node] = {}
    seen: set[Node] = set()

    def fused(old: Node, x: Node, y: Node) -> Node | None:
        """The fma for `old`, whose operands have become x and y."""
        negate = old.op == "sub"
        if y.op == "mul" and uses[old.args[1].uid] <= 1 and y.space != spaces.host:
            a, b = y.args
            return ir.op("fma", exact(ir.op("neg", a)) if negate else a, b, x)
        if x.op == "mul" and uses[old.args[0].uid] <= 1 and x.space != spaces.host:
            return ir.op("fma", *x.args, exact(ir.op("neg", y)) if negate else y)
        return None

    def walk(root: Node) -> Node:
        nonlocal fired
        for node in unseen(root, seen):
            args = [memo[a.uid] for a in node.args]
            made = None
            if node.op in ("add", "sub") and node.dtype is dtypes.f32 and node.space != spaces.host:
                made = fused(node, *args)
                fired = fired or made is not None
            memo[node.uid] = made or (ir.rebuild(node, args) if args else node)
        return memo[root.uid]

    program = program.map(walk)
    return replace(program, rules=tuple(sorted({*program.rules, "fma"}))) if fired else program
