"""A rule as lines of plain text, for docstrings and the terminal: straight from the trace, no SymPy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import count

from optgen.ir.node import Node, postorder
from optgen.lang.spec import Spec, Trace
from optgen.ops.prims import PRIMS

PREFIX, POWER, ATOM = 7, 8, 9

LONG = 30
"""Characters from which on a value that is used several times gets a line of its own."""


def _named(trace: Trace) -> dict[str, Node]:
    """Return the named values of a rule in order: the last value of p and of each state is x[t], others get primes."""
    new, lines = trace.new, dict[str, Node]()
    count = dict.fromkeys(("g", *new), 0)
    for let in trace.lets:
        name = f"{let.name}[t]"
        if name in lines or let.node is not new.get(let.name):
            count[let.name] = count.get(let.name, -1) + 1
            name = let.name + "'" * count[let.name]
        lines[name] = let.node
    for name in (x for x in new if x not in trace.inputs):
        lines.setdefault(f"{name}[t]", new[name])
    return lines


def number(x: float | bool) -> str:
    return str(x) if isinstance(x, bool) else f"{x:.15g}"


def _infix(node: Node, parts: list[tuple[str, int]]) -> tuple[str, int]:
    infix = PRIMS[node.op].infix
    assert infix is not None
    mark, binds, strict = infix
    if node.op in ("lt", "le") and node.args[0].op == "const":
        mark, parts = mark.replace("<", ">"), parts[::-1]  # t > 1 rather than 1 < t
    (left, a), (right, b) = parts
    left = left if a > binds or a == binds > 1 else f"({left})"  # a < b < c would mean something else
    right = right if b > binds or b == binds and not strict else f"({right})"
    return (f"{left} {mark} {right}", binds)


def _text(node: Node, parts: list[tuple[str, int]]) -> tuple[str, int]:
    """The text of a node whose operands are done, and how tightly it binds."""
    if PRIMS[node.op].infix is not None:
        return _infix(node, parts)
    if node.op in ("neg", "not"):
        text, binds = parts[0]
        return ("-" if node.op == "neg" else "~") + (text if binds >= PREFIX else f"({text})"), PREFIX
    if node.op in ("pow", "power"):
        (base, a), (exponent, b) = parts
        return (base if a >= ATOM else f"({base})") + "**" + (exponent if b >= ATOM else f"({exponent})"), POWER
    if node.op == "where":
        (c, _), (a_text, _), (b_text, _) = parts
        return f"({a_text} if {c} else {b_text})", ATOM
    function = node.attr if node.op == "call" else node.op.removeprefix("to_")
    return f"{function}({', '.join(t for t, _ in parts)})", ATOM


def _expression(root: Node, known: Mapping[int, str]) -> str:
    if root.uid in known:
        return known[root.uid]
    done: dict[int, tuple[str, int]] = {}
    for node in postorder([root]):
        if node.uid in known:
            done[node.uid] = (known[node.uid], ATOM)
        elif node.op == "const":
            done[node.uid] = (number(node.attr), ATOM if node.attr >= 0 else PREFIX)
        elif not node.args:
            done[node.uid] = (str(node.attr or node.op), ATOM)
        else:
            done[node.uid] = _text(node, [done[a.uid] for a in node.args])
    text = done[root.uid][0]
    return text[1:-1] if root.op == "where" else text


def _leaf_names(trace: Trace, nodes: Sequence[Node]) -> dict[int, str]:
    """Return the text of states and scalars, by uid."""
    before = {name: f"{name}[t-1]" for name in {*trace.new} - trace.inputs} | {"step": "t"}
    return {n.uid: before.get(str(n.attr), str(n.attr)) for n in nodes if n.op in ("load", "sym")}


def _lines(trace: Trace) -> Iterator[str]:
    """Yield each line of a rule.

    A value that an author's function returns unnamed is inlined, but one that recurs and is LONG is x1, x2, ...
    """
    named = _named(trace)
    nodes = postorder(named.values())
    known = _leaf_names(trace, nodes)
    users = Counter(a.uid for node in nodes for a in node.args)
    fresh = (name for name in map("x{}".format, count(1)) if name not in {*named, *known.values()})
    for name, root in named.items():
        for node in postorder([root]):
            shared = users[node.uid] > 1 and node.uid not in known and node is not root
            if shared and len(text := _expression(node, known)) > LONG:
                recurring = next(fresh)
                yield f"{recurring} = {text}"
                known[node.uid] = recurring
        yield f"{name} = {_expression(root, known)}"
        known.setdefault(root.uid, name)


def plain_formulas(spec: Spec, flags: Mapping[str, bool] | None = None) -> list[str]:
    """The rule, one line per line of the author's: `exp_avg[t] = beta1 * exp_avg[t-1] + (1 - beta1) * g`."""
    return [*_lines(spec.trace(flags))]
