"""hoist: what depends only on the step and the hyper-parameters is computed once per step, on the host, in fp64.

rewrite:
    update exp_avg = add(mul($beta1, %exp_avg:f32), mul(sub(1.0, $beta1), @g))
  ->
    host   one_minus_beta1 = sub(1.0, $beta1)
    update exp_avg = add(mul($beta1, %exp_avg:f32), mul($one_minus_beta1, @g))
"""

from __future__ import annotations

from dataclasses import replace

from optgen.base.names import unique
from optgen.ir import node as ir
from optgen.ir.node import Node, Rewriter, postorder
from optgen.ir.program import Let, Program
from optgen.ir.spell import name_for
from optgen.ops import dtypes, spaces
from optgen.passes.name import RESERVED


def hoist(program: Program) -> Program:
    """See the module's docstring.  Names: the author's where a let of theirs is the scalar.

    Lets that no store reads go: rewriting has left them behind, and no kernel wants their scalars.
    """
    own = {let.node.uid: let for let in program.body if let.node.space == spaces.host and let.node.args}
    taken = RESERVED | set(program.hypers)
    found: dict[int, Let] = {}
    order: list[Let] = []

    def scalar(node: Node) -> Node:
        if node.dtype is dtypes.boolean:  # scalars are numbers: a condition among elements travels as 1 or 0
            return ir.op("lt", ir.const(0.0), scalar(ir.op("where", node, ir.const(1.0), ir.const(0.0))))
        let = found.get(node.uid)
        if let is None:
            base = own[node.uid].name if node.uid in own else name_for(node, f"scalar_{len(order)}")
            name = unique(base, taken)
            taken.add(name)
            let = own.get(node.uid, Let(name, node))
            let = found[node.uid] = replace(let, name=name, node=node)
            order.append(let)
        return ir.sym(let.name)

    def rule(node: Node) -> Node:
        if node.space == spaces.host or not node.args:
            return node
        # Scalars travel as f32: what is made of a key's bits stays in the kernel, which makes it once for all elements.
        left = [a.space == spaces.host and bool(a.args) and a.dtype is not dtypes.i32 for a in node.args]
        return ir.rebuild(node, [scalar(a) if leaves else a for a, leaves in zip(node.args, left, strict=True)])

    live = {n.uid for n in postorder([s.node for s in program.stores])}
    body = [let for let in program.body if let.node.space != spaces.host and let.node.uid in live]
    new = replace(program, body=tuple(body)).map(Rewriter(rule))
    used = {n.attr for n in postorder(new.roots()) if n.op == "sym"}
    plain = [Let(name, ir.sym(name)) for name in program.hypers if name in used]
    return replace(new, host=tuple(plain) + tuple(order), host_locals=tuple(own.values()))
