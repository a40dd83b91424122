"""Host scalars as a Python function in fp64: what depends on the step and the hyper-parameters only."""

from __future__ import annotations

from dataclasses import dataclass, replace

from optgen.backends.printer import ATOM, Printer, Spelling, Text, comment_of, number, with_comments, wrapped
from optgen.ir.node import Node, postorder
from optgen.ir.program import Let, Program
from optgen.ir.ranges import never_zero


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


def _function(name: str) -> Spelling:
    return lambda p, n: p.call(name, *n.args)


def _div(p: Printer, n: Node) -> Text:
    if never_zero(n.args[1]):
        return f"{p.text(n.args[0], 20)} / {p.text(n.args[1], 21)}", 20
    return p.call("divide", *n.args)


HOST: dict[str, Spelling] = {
    "const": _const,
    "sym": lambda p, n: (str(n.attr), ATOM),
    "neg": lambda p, n: (f"-{p.text(n.args[0], 30)}", 30),
    "pow": lambda p, n: (f"{p.text(n.args[0], 41)}**{p.text(n.args[1], 40)}", 40),
    "div": _div,
    "sqrt": _function("root"),
    "exp": _function("math.exp"),
    "log": _function("math.log"),
    "floor": _function("math.floor"),
    "abs": _function("abs"),
    "max": _function("max"),
    "min": _function("min"),
    "cbrt": lambda p, n: (f"{p.text(n.args[0], 41)} ** (1 / 3)", 40),
    "not": lambda p, n: (f"not {p.text(n.args[0], 3)}", 3),
    "and": lambda p, n: (f"{p.text(n.args[0], 3)} and {p.text(n.args[1], 3)}", 2),
    "or": lambda p, n: (f"{p.text(n.args[0], 3)} or {p.text(n.args[1], 3)}", 1),
    "where": lambda p, n: (f"{p.text(n.args[1], 2)} if {p.text(n.args[0], 2)} else {p.text(n.args[2], 1)}", 1),
}


def scalars_function(program: Program, unpack: tuple[Unpack, ...], function: str) -> list[str]:
    """`def function(step, grad_scale, *, hypers..., host states...) -> scalars, then new host states`."""
    names = [u.name for u in unpack] + [name for name, _ in program.host_states]
    keywords = f", *, {', '.join(names)}" if names else ""
    out = [f"def {function}(step, grad_scale{keywords}):"]
    out.append('    """The kernel\'s scalars at this step, and the new host states; fp64."""')
    nodes = [let.node for let in (*program.host, *program.host_stores)]
    read = {n.attr for n in postorder(nodes) if n.op == "sym"}
    for u in unpack:
        if u.parts != (u.name,) and read & set(u.parts):
            out.append(f"    {', '.join(u.parts)} = {u.name}")
    printer = Printer(HOST, {})
    lines = [(f"{let.name} = {printer.bind(let)}", comment_of(let)) for let in _statements(program)]
    out += [f"    {line}" for line in with_comments(lines)]
    values = [let.name for let in program.host] + [printer.text(let.node) for let in program.host_stores]
    if len(values) == 1:
        return [*out, f"    return ({values[0]},)"]
    return out + [f"    {line}" for line in wrapped("return (", values, ")")]


def _statements(program: Program) -> list[Let]:
    """The author's host lets that a scalar or a host state is made of, then the scalars themselves."""
    scalars = {let.node.uid for let in program.host}
    live = {n.uid for n in postorder([let.node for let in (*program.host, *program.host_stores)])}
    taken = {let.name for let in program.host} | set(program.hypers)
    out = []
    for let in program.host_locals:
        if let.node.uid in live - scalars:
            name, k = let.name, 1
            while name in taken:
                k += 1
                name = f"{let.name}_{k}"
            taken.add(name)
            out.append(replace(let, name=name))
    return out + [let for let in program.host if let.node.op != "sym"]


def needs(programs: list[Program]) -> tuple[bool, list[str]]:
    """(whether `math` is used, names to import from optgen.runtime.scalars)."""
    ops = set()
    names = set()
    for p in programs:
        for n in postorder([let.node for let in (*p.host, *p.host_stores)]):
            ops.add(n.op)
            if n.op == "sqrt":
                names.add("root")
            if n.op == "div" and not never_zero(n.args[1]):
                names.add("divide")
    return bool(ops & {"exp", "log", "floor"}), sorted(names)
