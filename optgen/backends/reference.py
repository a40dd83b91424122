"""Eager torch, strict maths: the reading of a Program that runs everywhere and that the others are held to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from optgen.backends.printer import ATOM, Printer, Spelling, Text, comment_of, number, with_comments, wrapped
from optgen.ir.node import Node, postorder
from optgen.ir.program import Let, Program, Schedule, Step, Store
from optgen.ops import spaces
from optgen.ops.dtypes import f32, i32
from optgen.ops.prims import GATHERS
from optgen.ops.spaces import Space


def _const(p: Printer, n: Node) -> Text:
    return number(n), ATOM if n.attr >= 0 or isinstance(n.attr, bool) else 30


def _of_zeros(n: Node) -> bool:
    """Return True for a minimum or maximum that two zeros of either sign may meet in."""
    return n.op in ("max", "min") and n.dtype is f32 and not any(a.op == "const" and a.attr != 0 for a in n.args)


def _limit(low: str) -> Spelling:
    """min and max: clamp where a side is a constant (it keeps NaN), else minimum / maximum; of zeros, `larger`."""

    def spell(p: Printer, n: Node) -> Text:
        x, y = n.args
        if x.op == "const":
            x, y = y, x
        if _of_zeros(n):
            return p.call("larger" if low == "max" else "smaller", x, y)
        if y.op == "const":
            side = "min" if low == "max" else "max"
            return f"{p.text(x, ATOM)}.clamp({side}={number(y)})", ATOM
        return p.call("torch.maximum" if low == "max" else "torch.minimum", x, y)

    return spell


def _div(p: Printer, n: Node) -> Text:
    x, y = n.args
    if "const" in (x.op, y.op):
        return p.call("quotient", x, y)
    return f"{p.text(x, 20)} / {p.text(y, 21)}", 20


def _mul(p: Printer, n: Node) -> Text:
    text = f"{p.text(n.args[0], 20)} * {p.text(n.args[1], 21)}"
    if n.dtype is i32 and n.space == spaces.host:  # of plain ints, which do not wrap around by themselves
        return f"(({text} + 2**31 & 2**32 - 1) - 2**31)", ATOM
    return text, 20


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


def _of_numbers(n: Node) -> bool:
    """Whether a choice is one between two constants, for which torch.where takes the default dtype."""
    return n.op == "where" and n.args[1].op == n.args[2].op == "const"


def _where(p: Printer, n: Node) -> Text:
    return p.call("choose" if _of_numbers(n) else "torch.where", *n.args)


def _method(name: str) -> Spelling:
    return lambda p, n: (f"{p.text(n.args[0], ATOM)}.{name}()", ATOM)


def _block(name: str) -> Spelling:
    return lambda p, n: (f"{name}({p.text(n.args[0])}, b.live)", ATOM)


def _table(p: Printer, n: Node) -> Text:
    return f"{n.op}({p.text(n.args[0])}, {n.attr})", ATOM


def _gather(p: Printer, n: Node) -> Text:
    return f"{n.op}({p.text(n.args[0])}, dims)", ATOM


def _gathers(programs: Iterable[Program]) -> set[str]:
    """The names of what is gathered along the dimensions of columns."""
    return {n.op for program in programs for n in postorder(program.roots()) if n.op in GATHERS}


def _called(p: Printer, n: Node) -> Text:
    """A function of whole matrices: of what is kept in memory, in place."""
    x = n.args[0].args[0]
    scalars = ", ".join(f"float({p.text(a)})" for a in n.args[1:])
    return f"b.elements({n.attr}({x.attr}_tensor, {scalars}))", ATOM


def _load(p: Printer, n: Node) -> Text:
    name = f'values["{n.attr[3:]}"]' if n.attr.startswith("in_") else f"{n.attr}_tensor"
    if n.space.name in spaces.SMALL:
        beside = isinstance(p, ReferencePrinter) and p.space == spaces.elem
        return (f"b.spread({name})", ATOM) if beside else (name, ATOM)
    if n.dtype.packed:
        return f"b.codes({name}, {n.dtype.bits})", ATOM
    get = "per_block" if n.space.name == "block" else "elements"
    # The gradient comes in any float dtype, whatever the program calls it; a 0-dim scalar would not widen it.
    wide = ".to(torch.float32)" if n.attr == "g" and n.dtype.torch == "float32" else ""
    return f"b.{get}({name}){wide}", ATOM


@dataclass
class ReferencePrinter(Printer):
    """A printer that knows over which space the stage runs."""

    space: Space = spaces.elem


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
    "mul": _mul,
    "div": _div,
    "sign": _sign,
    "where": _where,
    "lshr": _lshr,
    "rotl": lambda p, n: p.call("rotl", *n.args),
    "cast": _cast,
    "bitcast": _bitcast,
    "block_max": _block("block_max"),
    "block_min": _block("block_min"),
    "call": _called,
    "lookup": _table,
    "search": _table,
    **dict.fromkeys(GATHERS, _gather),
    "extent": lambda p, n: (f'b.extent("{n.attr}")', ATOM),
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


def _kind(program: Program, buffer: str) -> tuple[str, str]:
    """How the method that stores it ends, and its last argument."""
    b = program.buffer(buffer)
    if b.dtype.packed:
        return "_codes", f", {b.dtype.bits}"
    return ("_per_block" if b.space.name == "block" else ""), ""


def _stored(program: Program, s: Store, printer: Printer) -> str:
    """The line of a store."""
    buffer = program.buffer(s.buffer)
    value, name = printer.text(s.node), f"{s.buffer}_tensor"
    if buffer.reduction == "model_sum":
        return f"{name} = yield {value}"
    if buffer.role == "partial":
        if program.space == spaces.elem:
            return f"{name} = b.{buffer.reduction}({value})"
        return f'{name} = few_{buffer.reduction.split("_")[1]}({value}, "{buffer.space.name}")'
    if buffer.role == "temp":
        return f"{name} = b.flat({value})" if buffer.space == spaces.elem else f"{name} = {value}"
    if buffer.space.name in spaces.SMALL:
        return f"put({name}, {value})"
    kind, more = _kind(program, s.buffer)
    return f"b.store{kind}({name}, {value}{more})"


def _block_size(program: Program) -> int:
    return program.block if program.space == spaces.elem else 1


def _dims(step: Step) -> list[str]:
    """The argument that says of which dimensions columns are made, where something is kept by them; default: of one."""
    return ["dims=None"] if any(b.space == spaces.axis for b in step.program.buffers) else []


def step_function(step: Step, function: str, source: str = "") -> list[str]:
    """`def function(p, g, fields..., scalars..., step_key, stream_key, place, dims)`: one step, in place."""
    host = [let.name for let in step.host]
    tensors = [f"{b.name}_tensor" for b in step.program.buffers]
    more = ["place=None", *_dims(step)]
    out = wrapped(f"def {function}(", [*tensors, *host, "step_key", "stream_key", *more], "):")
    out.append('    """One step in place, in strict maths."""')
    blocks = [_block_size(s.schedule.program) for s in step.stages]
    out.append(f"    b = Blocks(p_tensor, {blocks[0]}, place)")
    if host:
        # One name needs the comma that makes it a tuple; more are wrapped in parentheses where they are many.
        names = wrapped("(", host, f"{',' if len(host) == 1 else ''}) = scalars(")
        out += [f"    {line}" for line in names[:-1]] + [
            f"    {line}" for line in wrapped(f"{names[-1]}", ["p_tensor", *host], ")")
        ]
    for k, stage in enumerate(step.stages):
        program, sweep = stage.schedule.program, stage.schedule.sweep
        if len(step.stages) > 1:
            what = f"sweep {step.sweeps.index(stage) + 1}" if stage.is_sweep else stage.call or stage.space.name
            out += ["", f"    # == {what}: {stage.why}"]
        if k and stage.space == spaces.elem:
            before = next((blocks[i] for i in range(k - 1, -1, -1) if step.stages[i].space == spaces.elem), blocks[0])
            if before != blocks[k]:
                out.append(f"    b = Blocks(p_tensor, {blocks[k]}, place)")
        printer = ReferencePrinter(SPELL, {}, stage.space)
        lines = bound_lines(sweep.lets, printer)
        first = [s for s in sweep.stores if program.buffer(s.buffer).role == "partial"]
        stores = first + [s for s in sweep.stores if s not in first]
        for s in _endangered(stores, sweep.lets):
            name = f"{s.buffer}_new"
            kept = f"{printer.text(s.node, ATOM)}.clone()" if s.node.op in ("load", "bitcast") else printer.text(s.node)
            lines["encode"].append((f"{name} = {kept}", ""))
            printer.names[s.node.uid] = name
        lines["encode"] += [(_stored(program, s, printer), "") for s in stores]
        out += [f"    {line}" for line in assemble(lines, source)]
    return out


def _endangered(stores: list[Store], lets: tuple[Let, ...]) -> list[Store]:
    """Stores whose expression reads what a store before them overwrites: an fp32 load is the tensor itself, no copy."""
    bound = {let.node.uid for let in lets if let.node.op not in ("load", "bitcast")}
    written: set[str] = set()
    found = []
    for s in stores:
        stack, read = [s.node], set()
        while stack:
            node = stack.pop()
            if node.op == "load":
                read.add(str(node.attr))
            elif node.uid not in bound:
                stack.extend(node.args)
        if read & written:
            found.append(s)
        written.add(s.buffer)
    return found


def decode_function(step: Step, function: str) -> list[str]:
    """`def function(p, fields..., dims) -> dict`: the f32 weight under "p" and the f32 states, shaped as p."""
    tensors = [f"{b.name}_tensor" for b in step.program.buffers if b.reads]
    out = wrapped(f"def {function}(", [*tensors, *_dims(step)], "):")
    out.append('    """What is stored -> {"p": fp32 weight, state name: fp32 state}, of the parameter\'s shape."""')
    return out + _codec(step, "p_tensor", lambda program, name: (f'"{program.buffer(name).owner}"', "", ""))


def encode_function(step: Step, function: str) -> list[str]:
    """`def function(values, dims) -> dict`: fields from fp32 values, rounded to nearest."""
    out = [f"def {function}({', '.join(['values', *_dims(step)])}):"]
    out.append('    """{"p": fp32 weight, state name: fp32 state} -> what is stored, rounded to nearest."""')
    return out + _codec(step, 'values["p"]', lambda program, name: (f'"{name}"', *_kind(program, name)))


def _codec(step: Step, weight: str, entry: Callable[[Program, str], tuple[str, str, str]]) -> list[str]:
    """The body of a codec; `entry` says of a store under which key it is returned, and how `Blocks.flat` ends."""
    block = step.program.block
    out = [f"    b = Blocks({weight}, {block})"]
    results = {}
    for stage in step.stages:
        program, sweep = stage.schedule.program, stage.schedule.sweep
        if _block_size(program) != block and stage.space == spaces.elem:
            block = _block_size(program)
            out.append(f"    b = Blocks({weight}, {block})")
        printer = ReferencePrinter(SPELL, {}, stage.space)
        lines = bound_lines(sweep.lets, printer)
        out += [f"    {line}" for lets in lines.values() for line in with_comments(lets)]
        for s in sweep.stores:
            buffer = program.buffer(s.buffer)
            if buffer.role in ("partial", "temp"):
                out.append(f"    {_stored(program, s, printer)}")
                continue
            key, kind, more = entry(program, s.buffer)
            text = printer.text(s.node)
            if buffer.space.name in spaces.SMALL:
                # Later stages read it as what is kept.
                out.append(f"    {s.buffer}_tensor = {text}")
                results[s.buffer] = f"{key}: {s.buffer}_tensor"
            else:
                results[s.buffer] = f"{key}: b.flat{kind}({text}{more})"
                if stage is not step.stages[-1]:
                    out.append(f"    {s.buffer}_tensor = b.flat{kind}({text}{more})")
                    results[s.buffer] = f"{key}: {s.buffer}_tensor"
    return [*out, "    return {", *(f"        {result}," for result in results.values()), "    }"]


def tables(schedules: list[Schedule]) -> list[str]:
    """What the functions of these schedules look things up in: a tuple of numbers for each table, lines of text."""
    nodes = [n for s in schedules for n in postorder(s.program.roots()) if n.op in ("lookup", "search")]
    lines: list[str] = []
    for name, table in sorted({str(n.attr): n.attr for n in nodes}.items()):
        lines += listed(name, table.values)
    return lines


def listed(name: str, numbers: tuple[float, ...]) -> list[str]:
    """A tuple of numbers under a name, lines of text."""
    return wrapped(f"{name} = (", [repr(x) for x in numbers], ")")


def needs(schedules: list[Schedule]) -> list[str]:
    """Names to import from optgen.runtime.eager."""
    names = {"Blocks"}
    for s in schedules:
        for buffer in (s.program.buffer(x.buffer) for x in s.sweep.stores):
            if buffer.role == "partial" and s.program.space != spaces.elem:
                names.add(f"few_{buffer.reduction.split('_')[1]}")
            elif buffer.role == "state" and buffer.space.name in spaces.SMALL:
                names.add("put")
        names |= {str(n.attr) for n in postorder(s.program.roots()) if n.op == "call"}
        names |= _gathers([s.program])
        if s.program.host:
            names.add("scalars")
        for n in postorder(s.program.roots()):
            if n.op in ("block_max", "block_min"):
                names.add(n.op)
            if n.op in ("sqrt", "rotl", "lookup", "search"):
                names.add(n.op)
            if _of_numbers(n):
                names.add("choose")
            if _of_zeros(n):
                names.add("larger" if n.op == "max" else "smaller")
            if n.op == "div" and "const" in (a.op for a in n.args):
                names.add("quotient")
    return sorted(names)
