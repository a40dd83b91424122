"""linear: fast maths takes what a sum has in common out of it: host factors of the summands, host addends of a mean.

The sweep then adds up as little as it can; the factor meets one value per row, column, matrix or tensor instead of
one per element.  An addend leaves only where neither side can be negative, so that nothing cancels.  A product whose
other factors all stand twice becomes a square, whose root is computed once.

Likewise what few values there are of is divided and multiplied where they are few, between the sweeps: an element's
value meets one factor per row, and one per column.

rewrite (ROUNDS):
    row_sum(mul(mul(h, x), mul(h, x)))               ->  mul(mul(h, h), row_sum(mul(x, x)))
    row_sum(div(mul(h, x), y))                       ->  mul(h, row_sum(div(x, y)))
    div(row_sum(add(mul(x, x), h)), #extent.columns) ->  add(div(row_sum(mul(x, x)), #extent.columns), h), h >= 0
    div(mul(x, row), tensor)                         ->  mul(x, mul(row, div(1.0, tensor)))      x per element
"""

from __future__ import annotations

from dataclasses import replace

from optgen.ir import node as ir
from optgen.ir.node import Node, Rewriter
from optgen.ir.program import Program
from optgen.ir.ranges import Intervals
from optgen.ops import dtypes, spaces
from optgen.passes.fold import FEW


def _factors(node: Node) -> list[Node]:
    """The factors of a product, from left to right."""
    out, stack = [], [node]
    while stack:
        top = stack.pop()
        if top.op == "mul" and top.space != spaces.host:
            stack += reversed(top.args)
        else:
            out.append(top)
    return out


def _product(factors: list[Node]) -> Node:
    out = factors[0]
    for x in factors[1:]:
        out = ir.op("mul", out, x)
    return out


def _is_few(node: Node) -> bool:
    return node.space.name in FEW


def _apart(node: Node) -> Node:
    """A product of an element's value and of several of rows, matrices or tensors: these as one factor.

    A square stays as it is: that of a small factor may vanish where the product with a large value does not.
    """
    few: list[Node] = []
    rest: list[Node] = []
    divides = False

    def collect(x: Node) -> None:
        nonlocal divides
        if x.op == "mul" and x.space == spaces.elem:
            for a in x.args:
                collect(a)
        elif x.op == "div" and x.space == spaces.elem and _is_few(x.args[1]):
            collect(x.args[0])
            divides = True
            few.append(ir.op("div", ir.const(1.0), x.args[1]))
        elif _is_few(x):
            few.append(x)
        else:
            rest.append(x)

    collect(node)
    twice = len({x.uid for x in few}) < len(few)
    if not rest or twice or not (divides or len(few) > 1):
        return node
    return ir.op("mul", _product(rest), _product(few))


def _square(factors: list[Node]) -> Node:
    """The product; of factors that all stand an even number of times, as a square."""
    each: dict[int, list[Node]] = {}
    for x in factors:
        each.setdefault(x.uid, []).append(x)
    if any(len(same) % 2 for same in each.values()):
        return _product(factors)
    root = _product([x for same in each.values() for x in same[: len(same) // 2]])
    return ir.op("mul", root, root)


def _is_sum(node: Node) -> bool:
    """Return True if the node adds up elements."""
    return node.op.endswith("_sum") and node.op != "model_sum" and node.args[0].space == spaces.elem


def _count(op: str) -> Node | None:
    """Return the number of elements that one result stands for; None for the model, where nobody knows it."""
    if op == "mat_sum":
        return ir.op("mul", ir.extent("rows"), ir.extent("columns"))
    name = {"row_sum": "columns", "col_sum": "rows", "tensor_sum": "elements"}.get(op)
    return ir.extent(name) if name else None


def linear(program: Program) -> Program:
    """See the module's docstring."""
    intervals = Intervals(dict(program.ranges))
    fired = False

    def nonneg(node: Node) -> bool:
        return intervals(node)[0] >= 0

    def rule(node: Node) -> Node:
        nonlocal fired
        if node.op == "div" and _is_sum(node.args[0]) and node.args[1] is _count(node.args[0].op):
            total, count = node.args
            (x,) = total.args
            for rest, addend in (x.args, x.args[::-1]) if x.op == "add" else ():
                if addend.space == spaces.host and rest.space == spaces.elem and nonneg(rest) and nonneg(addend):
                    fired = True
                    return ir.op("add", ir.op("div", rule(ir.op(total.op, rest)), count), addend)
        if node.op in ("mul", "div") and node.space == spaces.elem and node.dtype is dtypes.f32:
            new = _apart(node)
            fired = fired or new is not node
            return new
        if not _is_sum(node):
            return node
        (x,) = node.args
        factors = _factors(x.args[0] if x.op == "div" else x)
        host = [f for f in factors if f.space == spaces.host]
        others = sorted((f for f in factors if f.space != spaces.host), key=_is_few)
        if not host or not others or _square(others).space != spaces.elem:
            return node
        fired = True
        rest = _square(others)
        return ir.op("mul", _product(host), ir.op(node.op, ir.op("div", rest, x.args[1]) if x.op == "div" else rest))

    new = program.map(Rewriter(rule))
    return replace(new, rules=tuple(sorted({*new.rules, "linear"}))) if fired else program
