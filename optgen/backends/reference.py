"""Eager torch, strict maths: the reading of a Program that runs everywhere and that the others are held to."""

from __future__ import annotations

from optgen.backends.printer import ATOM, Printer, Spelling, Text, comment_of, number, with_comments, wrapped
from optgen.ir.node import Node, postorder
from optgen.ir.program import Let, Program, Schedule


def _const(p: Printer, n: Node) -> Text:
    return number(n), ATOM if n.attr >= 0 or isinstance(n.attr, bool) else 30


def _limit(low: str) -> Spelling:
    """min and max: clamp where a side is a constant (it keeps NaN), else minimum / maximum."""

    def spell(p: Printer, n: Node) -> Text:
        x, y = n.args
        if x.op == "const":
            x, y = y, x
        if y.op == "const":
            side = "min" if low == "max" else "max"
            return f"{p.text(x, ATOM)}.clamp({side}={number(y)})", ATOM
        return p.call("torch.maximum" if low == "max" else "torch.minimum", x, y)

    return spell


def _div(p: Printer, n: Node) -> Text:
    x, y = n.args
    if x.op == "const":
        return p.call("quotient", x, y)
    return f"{p.text(x, 20)} / {p.text(y, 21)}", 20


def _sign(p: Printer, n: Node) -> Text:
    x = p.text(n.args[0])
    return f"torch.where({p.text(n.args[0], 5)} > 0, 1.0, torch.where({p.text(n.args[0], 5)} < 0, -1.0, {x}))", ATOM


def _cast(p: Printer, n: Node) -> Text:
    return f"{p.text(n.args[0], ATOM)}.to(torch.{n.dtype.torch})", ATOM


def _bitcast(p: Printer, n: Node) -> Text:
    return f"{p.text(n.args[0], ATOM)}.view(torch.{n.dtype.torch})", ATOM


def _lshr(p: Printer, n: Node) -> Text:
    x, k = n.args
    return f"{p.text(x, 8)} >> {k.attr} & {hex((1 << (32 - k.attr)) - 1)}", 7


def _where(p: Printer, n: Node) -> Text:
    return p.call("torch.where", *n.args)


def _method(name: str) -> Spelling:
    return lambda p, n: (f"{p.text(n.args[0], ATOM)}.{name}()", ATOM)


def _block(name: str) -> Spelling:
    return lambda p, n: (f"{name}({p.text(n.args[0])}, b.live)", ATOM)


def _load(p: Printer, n: Node) -> Text:
    get = "per_block" if n.space.name == "block" else "elements"
    name = f'values["{n.attr[3:]}"]' if n.attr.startswith("in_") else f"{n.attr}_tensor"
    # The gradient comes in any float dtype, whatever the program calls it; a 0-dim scalar would not widen it.
    wide = ".to(torch.float32)" if n.attr == "g" and n.dtype.torch == "float32" else ""
    return f"b.{get}({name}){wide}", ATOM


SPELL: dict[str, Spelling] = {
    "const": _const,
    "sym": lambda p, n: (str(n.attr), ATOM),
    "key": lambda p, n: (str(n.attr), ATOM),
    "index": lambda p, n: ("b.index()", ATOM),
    "load": _load,
    "neg": lambda p, n: (f"-{p.text(n.args[0], 30)}", 30),
    "not": lambda p, n: (f"~{p.text(n.args[0], 30)}", 30),
    "abs": _method("abs"),
    "sqrt": lambda p, n: p.call("sqrt", *n.args),
    "floor": _method("floor"),
    "rint": _method("round"),
    "max": _limit("max"),
    "min": _limit("min"),
    "div": _div,
    "sign": _sign,
    "where": _where,
    "lshr": _lshr,
    "rotl": lambda p, n: p.call("rotl", *n.args),
    "cast": _cast,
    "bitcast": _bitcast,
    "block_max": _block("block_max"),
    "block_min": _block("block_min"),
}

TITLES = {"decode": "load and decode", "update": "update", "encode": "encode and store"}


def bound_lines(sweep_lets: tuple[Let, ...], printer: Printer) -> dict[str, list[tuple[str, str]]]:
    """Stage -> (code, comment) of every let, binding their names as they come."""
    lines: dict[str, list[tuple[str, str]]] = {"decode": [], "update": [], "encode": []}
    for let in sweep_lets:
        lines[let.stage].append((f"{let.name} = {printer.bind(let)}", comment_of(let)))
    return lines


def assemble(lines: dict[str, list[tuple[str, str]]], source: str = "") -> list[str]:
    """The kernel's three blocks, each under its title."""
    out: list[str] = []
    for stage, title in TITLES.items():
        if lines[stage]:
            out.append(f"# -- {title}" + (f"  ({source})" if stage == "update" and source else ""))
            out += with_comments(lines[stage])
    return out


def _kind(program: Program, buffer: str) -> str:
    return "_per_block" if program.buffer(buffer).space.name == "block" else ""


def step_function(schedule: Schedule, function: str, source: str = "") -> list[str]:
    """`def function(p, g, fields..., scalars..., step_key, stream_key)`: one step, in place."""
    program, (sweep,) = schedule.program, schedule.sweeps
    printer = Printer(SPELL, {})
    host = [let.name for let in program.host]
    tensors = [f"{b.name}_tensor" for b in program.buffers]
    out = wrapped(f"def {function}(", [*tensors, *host, "step_key", "stream_key"], "):")
    out.append('    """One step in place, in strict maths."""')
    out.append(f"    b = Blocks(p_tensor, {program.block})")
    if host:
        # One name needs the comma that makes it a tuple; more are wrapped in parentheses where they are many.
        names = wrapped("(", host, f"{',' if len(host) == 1 else ''}) = scalars(")
        out += [f"    {line}" for line in names[:-1]] + [
            f"    {line}" for line in wrapped(f"{names[-1]}", ["p_tensor", *host], ")")
        ]
    lines = bound_lines(sweep.lets, printer)
    lines["encode"] += [
        (f"b.store{_kind(program, s.buffer)}({s.buffer}_tensor, {printer.text(s.node)})", "") for s in sweep.stores
    ]
    return out + [f"    {line}" for line in assemble(lines, source)]


def decode_function(schedule: Schedule, function: str) -> list[str]:
    """`def function(p, fields...) -> dict`: the f32 weight under "p" and the f32 states, in the parameter's shape."""
    program, (sweep,) = schedule.program, schedule.sweeps
    printer = Printer(SPELL, {})
    tensors = [f"{b.name}_tensor" for b in program.buffers if b.reads]
    out = wrapped(f"def {function}(", tensors, "):")
    out.append('    """What is stored -> {"p": fp32 weight, state name: fp32 state}, of the parameter\'s shape."""')
    out.append(f"    b = Blocks(p_tensor, {program.block})")
    lines = bound_lines(sweep.lets, printer)
    out += [f"    {line}" for stage in lines.values() for line in with_comments(stage)]
    results = [f'"{program.buffer(s.buffer).owner}": b.flat({printer.text(s.node)})' for s in sweep.stores]
    return [*out, "    return {", *(f"        {r}," for r in results), "    }"]


def encode_function(schedule: Schedule, function: str) -> list[str]:
    """`def function(values) -> dict`: fields from fp32 values, rounded to nearest."""
    program, (sweep,) = schedule.program, schedule.sweeps
    printer = Printer(SPELL, {})
    out = [f"def {function}(values):"]
    out.append('    """{"p": fp32 weight, state name: fp32 state} -> what is stored, rounded to nearest."""')
    out.append(f'    b = Blocks(values["p"], {program.block})')
    lines = bound_lines(sweep.lets, printer)
    out += [f"    {line}" for stage in lines.values() for line in with_comments(stage)]
    results = [f'"{s.buffer}": b.flat{_kind(program, s.buffer)}({printer.text(s.node)})' for s in sweep.stores]
    return [*out, "    return {", *(f"        {r}," for r in results), "    }"]


def needs(schedules: list[Schedule]) -> list[str]:
    """Names to import from optgen.runtime.eager."""
    names = {"Blocks"}
    for s in schedules:
        if s.program.host:
            names.add("scalars")
        for n in postorder(s.program.roots()):
            if n.op in ("block_max", "block_min"):
                names.add(n.op)
            if n.op in ("sqrt", "rotl"):
                names.add(n.op)
            if n.op == "div" and n.args[0].op == "const":
                names.add("quotient")
    return sorted(names)
