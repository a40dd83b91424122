"""Functions of whole matrices as text: torch, one module for each rule, called by every backend between two sweeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from itertools import chain

from optgen.backends.printer import (
    ATOM,
    COMMON,
    Printer,
    Spelling,
    Text,
    called,
    comment_of,
    function,
    method,
    with_comments,
    wrapped,
)  # fmt: skip
from optgen.ir.node import Node, postorder
from optgen.ir.program import Schedule, Store
from optgen.ops import spaces
from optgen.ops.prims import CALLS


def _limit(side: str, p: Printer, n: Node) -> Text:
    x, y = sorted(n.args, key=lambda a: a.space.rank, reverse=True)
    return f"{p.text(x, ATOM)}.clamp({side}={p.text(y)})", ATOM


def _called(p: Printer, n: Node) -> Text:
    text, binds = p.call(n.attr, *n.args)
    return f"{text}.float()" if n.attr == "newton_schulz" else text, binds  # which is bf16


def _late(stores: Iterable[Store], roots: Sequence[Node]) -> Collection[int]:
    """Return the numbers of products of elements that are results, as they are or by `unwide`, and nothing else: their
    caller has memory for them."""
    nodes, found = postorder(roots), set[int]()
    uses = Counter(a.uid for n in nodes for a in n.args) + Counter(s.node.uid for s in stores)
    for s in stores:
        n = s.node.args[1] if s.node.op == "call" and s.node.attr == "unwide" else s.node
        if n.op == "matmul" and s.node.space == spaces.elem and uses[n.uid] == uses[s.node.uid] == 1:
            found.add(n.uid)
    return found


def _overwritten(stores: Iterable[Store], roots: Sequence[Node]) -> Collection[int]:
    """Return the numbers of states that a function reads once and stores, if nothing in it may raise an error."""
    nodes, stored = postorder(roots), {s.buffer for s in stores}
    uses = Counter(x.uid for x in (*(s.node for s in stores), *(a for n in nodes for a in n.args)))
    if any(n.op == "call" and n.attr not in ("unwide", "column_norms") for n in nodes):
        return ()
    return {n.uid for n in nodes if n.op == "load" and n.attr in stored and uses[n.uid] == 1}


def _matmul(late: Collection[int], p: Printer, n: Node) -> Text:
    x, y = n.args
    if n.uid in late:
        return p.call("Product", x, y)
    if any(b.op == "transpose" and b.args[0].uid == a.uid for a, b in ((x, y), (y, x))):
        return p.call("gram", x)
    return f"{p.text(x, 20)} @ {p.text(y, 21)}", 20


def _in_place(method: str, overwritten: Collection[int], p: Printer, n: Node) -> Text:
    """Spell a sum or a product in the place of an operand that nobody else reads."""
    for x, y in (n.args, n.args[::-1]) if n.space != spaces.host else ():
        made = x.op in ("matmul", "add", "mul", "sqrt") and x.uid not in p.names
        if x.space == n.space and (made or x.uid in overwritten):
            return f"{p.text(x, ATOM)}.{method}_({p.text(y)})", ATOM
    return p.infix(n)


def _where(p: Printer, n: Node) -> Text:
    condition, x, y = n.args
    if condition.space == spaces.host:
        return f"({p.text(x, 1)} if {p.text(condition)} else {p.text(y)})", ATOM
    numbers = x.space == y.space == spaces.host  # of which torch makes the default dtype
    return f"{p.call('torch.where', *n.args)[0]}{'.float()' if numbers else ''}", ATOM


SPELL: dict[str, Spelling] = {
    **COMMON,
    "extent": lambda p, n: (str(n.attr), ATOM),
    "transpose": method("mT"),
    "call": _called,
    "to_wide": function("wide"),
    "zero_product": function("zero_product"),
    "abs": method("abs()"),
    "sqrt": method("sqrt()"),
    "sign": method("sign()"),
    "mat_sum": method("sum((-2, -1), keepdim=True)"),
    "mat_max": method("amax((-2, -1), keepdim=True)"),
    "max": lambda p, n: _limit("min", p, n),
    "min": lambda p, n: _limit("max", p, n),
    "where": _where,
}


def extents(schedule: Schedule) -> list[str]:
    """Return the sizes of the tensor that a stage computes with."""
    return sorted({str(n.attr) for n in postorder(schedule.program.roots()) if n.op == "extent"})


def matrix_function(schedule: Schedule, name: str) -> list[str]:
    """Return `def name(what is read..., scalars..., sizes...)`, which returns what the stage stores, in its order.

    Tensors, some of which are returned as a Product, are (..., rows, columns), scalars and sizes numbers.
    """
    lets = schedule.sweep.lets
    loads = {let.node.attr: let for let in lets if let.node.op == "load"}
    values = schedule.sweep.stores, schedule.program.roots()
    overwritten, late = _overwritten(*values), _late(*values)
    spell = {x: partial(_in_place, x, overwritten) for x in ("add", "mul")} | {"matmul": partial(_matmul, late)}
    printer = Printer({**SPELL, **spell}, {let.node.uid: let.name for let in loads.values()})
    names = [loads[x].name for x in schedule.sweep.reads]
    lines = [(f"{x.name} = {printer.bind(x)}", comment_of(x)) for x in lets if x.node.op != "load"]
    scalars = [let.name for let in schedule.program.host]
    head = wrapped(f"def {name}(", [*names, *scalars, *extents(schedule)], "):")
    found = [printer.text(s.node) for s in schedule.sweep.stores]
    ends = wrapped("return (", found, ")") if len(found) > 6 else [f"return {', '.join(found)}"]
    return [*head, *(f"    {line}" for line in (*with_comments(lines), *ends))]


def needs(functions: Iterable[Sequence[str]]) -> list[str]:
    """Return the names that functions' lines want from optgen.runtime.reference.matrices."""
    return called(sorted({"Product", "gram", "wide", "zero_product", *CALLS}), chain(*functions))
