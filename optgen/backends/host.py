"""Host scalars as a Python function in fp64: what depends on the step and the hyper-parameters only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain, count

from optgen.backends.printer import (
    ATOM,
    COMMON,
    Printer,
    Spelling,
    Text,
    called,
    comment_of,
    function,
    number,
    with_comments,
    wrapped,
)  # fmt: skip
from optgen.base.names import unique
from optgen.ir.node import Node, postorder
from optgen.ir.program import Let, Program
from optgen.ir.ranges import Intervals, never_zero


@dataclass(frozen=True)
class Unpack:
    """A constructor argument and the names of its scalars: ("betas", ("beta1", "beta2"))."""

    name: str
    parts: tuple[str, ...]


def _const(p: Printer, n: Node) -> Text:
    value = n.attr
    text = number(n)
    if isinstance(value, float) and value == int(value) and abs(value) < 1e6:
        text = str(int(value))
    return text, ATOM if value >= 0 else 30


def _div(p: HostPrinter, n: Node) -> Text:
    """Spell a quotient: 1 / x as it is, else a call: torch multiplies by a reciprocal where one side is a number."""
    if n.args[0].op == "const" and n.args[0].attr == 1 and never_zero(n.args[1], p.intervals):
        return f"{p.text(n.args[0], 20)} / {p.text(n.args[1], 21)}", 20
    return p.call("divide", *n.args)


class HostPrinter(Printer):
    """A printer that knows the intervals of the hyper-parameters and the step."""

    def __init__(self, program: Program) -> None:
        super().__init__(HOST, {})
        self.intervals = Intervals(dict(program.ranges))


HOST: dict[str, Spelling] = {
    **COMMON,
    "const": _const,
    "pow": function("power"),
    "div": _div,
    **{x: function(x) for x in "abs atan2 exp floor log rint sigmoid sign tanh where".split()},
    "sqrt": function("root"),
    "max": function("maximum"),
    "min": function("minimum"),
    "cbrt": function("cube_root"),
    "not": function("negated"),
    "and": function("both"),
    "or": function("either"),
}
"""Operators of numbers and of 0-dim tensors; what only numbers have is a function of runtime/records/scalars.py."""


def scalars_function(program: Program, unpack: tuple[Unpack, ...], function: str) -> list[str]:
    """`def function(step, grad_scale, *, hypers..., host states...) -> scalars, then new host states`."""
    names = [u.name for u in unpack] + [name for name, _ in program.host_states]
    out = wrapped(f"def {function}(", ["step", "grad_scale", *(["*", *names] if names else [])])
    read = {n.attr for n in postorder(_roots(program)) if n.op == "sym"}
    out += [f"    {', '.join(u.parts)} = {u.name}" for u in unpack if u.parts != (u.name,) and read & set(u.parts)]
    printer = HostPrinter(program)
    lines = [(f"{let.name} = {printer.bind(let)}", comment_of(let)) for let in _shared(program, _statements(program))]
    out += [f"    {line}" for line in with_comments(lines)]
    values = [let.name for let in program.host] + [printer.text(let.node) for let in program.host_stores]
    if len(values) == 1:
        return [*out, f"    return ({values[0]},)"]
    return out + [f"    {line}" for line in wrapped("return (", values, ")")]


def _roots(program: Program) -> list[Node]:
    return [let.node for let in (*program.host, *program.host_stores)]


def _statements(program: Program) -> list[Let]:
    """The author's host lets that a scalar or a host state is made of, then the scalars themselves."""
    scalars = {let.node.uid for let in program.host}
    live = {n.uid for n in postorder(_roots(program))}
    taken = {let.name for let in program.host} | set(program.hypers) | {"abs", *HELPERS}
    out = []
    for let in program.host_locals:
        if let.node.uid in live - scalars:
            name = unique(let.name, taken)
            taken.add(name)
            out.append(replace(let, name=name))
    return out + [let for let in program.host if let.node.op != "sym"]


def _shared(program: Program, statements: list[Let]) -> list[Let]:
    """The statements, before each the expressions in it that are read twice or more and have no name."""
    named = {let.node.uid for let in statements}
    nodes = [*(let.node for let in statements), *(let.node for let in program.host_stores)]
    reads = Counter(a.uid for n in postorder(nodes) for a in n.args)
    taken = {let.name for let in (*statements, *program.host)} | set(program.hypers)
    taken |= {name for name, _ in program.host_states}
    out: list[Let] = []
    free = (name for k in count(1) if (name := f"common_{k}") not in taken)
    for i, root in enumerate(nodes):
        for n in postorder([root]):
            if reads[n.uid] > 1 and n.args and n.uid not in named:
                named.add(n.uid)
                out.append(Let(next(free), n))
        out += statements[i : i + 1]
    return out


HELPERS = (
    "atan2", "both", "cube_root", "divide", "either", "exp", "floor", "log", "maximum", "minimum", "negated",
    "power", "rint", "root", "sigmoid", "sign", "tanh", "where",
)  # fmt: skip


def needs(functions: Iterable[Iterable[str]]) -> list[str]:
    """Names that these functions' lines want from optgen.runtime.records.scalars."""
    return called(HELPERS, chain.from_iterable(functions))
