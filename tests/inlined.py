"""One kernel's schedule as one eager function, codecs and random words written out, by a printer of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from optgen.backends.printer import (
    ATOM,
    COMMON,
    Printer,
    Spelling,
    Text,
    assemble,
    bound_lines,
    function,
    listed,
    method,
    number,
    wrapped,
)  # fmt: skip
from optgen.ir.node import Node, postorder
from optgen.ir.program import Let, Schedule, Store
from optgen.ops import spaces
from optgen.ops.dtypes import f32, i32
from optgen.runtime.reference import eager


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


def _lshr(p: Printer, n: Node) -> Text:
    x, k = n.args
    return f"{p.text(x, 8)} >> {k.attr} & {hex((1 << (32 - k.attr)) - 1)}", 7


def _of_numbers(n: Node) -> bool:
    """Return True if a choice is one between two constants, for which torch.where takes the default dtype."""
    return n.op == "where" and n.args[1].op == n.args[2].op == "const"


def _where(p: Printer, n: Node) -> Text:
    return p.call("choose" if _of_numbers(n) else "torch.where", *n.args)


SPELL: dict[str, Spelling] = {
    **COMMON,
    "abs": method("abs()"),
    "sqrt": function("sqrt"),
    "floor": method("floor()"),
    "rint": method("round()"),
    "max": _limit("max"),
    "min": _limit("min"),
    "mul": _mul,
    "div": _div,
    "sign": _sign,
    "where": _where,
    "lshr": _lshr,
    "rotl": function("rotl"),
    "cast": lambda p, n: (f"{p.text(n.args[0], ATOM)}.to(torch.{n.dtype.torch})", ATOM),
    "bitcast": lambda p, n: (f"{p.text(n.args[0], ATOM)}.view(torch.{n.dtype.torch})", ATOM),
    "block_max": function("block_max", ", b.live"),
    "block_min": function("block_min", ", b.live"),
    "lookup": lambda p, n: (f"lookup({p.text(n.args[0])}, {n.attr})", ATOM),
    "search": lambda p, n: (f"search({p.text(n.args[0])}, {n.attr})", ATOM),
}

def endangered(stores: list[Store], lets: tuple[Let, ...]) -> list[Store]:
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


def tables(schedules: list[Schedule]) -> list[str]:
    """Return the tables of these schedules' functions: a tuple of numbers for each, lines of text."""
    nodes = [n for s in schedules for n in postorder(s.program.roots()) if n.op in ("lookup", "search")]
    lines: list[str] = []
    for name, table in sorted({str(n.attr): n.attr for n in nodes}.items()):
        lines += listed(name, table.values)
    return lines


def _load(p: object, n: Node) -> Text:
    name = f"{n.attr}_tensor"
    if n.dtype.packed:
        return f"b.codes({name}, {n.dtype.bits})", ATOM
    get = "per_block" if n.space.name == "block" else "elements"
    # The gradient comes in any float dtype, whatever the program calls it; a 0-dim scalar would not widen it.
    wide = ".to(torch.float32)" if n.attr == "g" and n.dtype.torch == "float32" else ""
    return f"b.{get}({name}){wide}", ATOM


INLINED = {**SPELL, "load": _load, "index": lambda p, n: ("b.index()", ATOM)}


def step_function(schedule: Schedule, function: str) -> list[str]:
    """`def function(p, g, fields..., scalars..., step_key, stream_key)`: one step, in place."""
    program, sweep = schedule.program, schedule.sweep
    host = [let.name for let in program.host]
    tensors = [f"{b.name}_tensor" for b in program.buffers]
    out = wrapped(f"def {function}(", [*tensors, *host, "step_key", "stream_key"], "):")
    out.append(f"    b = Blocks(p_tensor, {program.block})")
    if host:
        out.append(f"    ({', '.join(host)},) = scalars(p_tensor, {', '.join(host)})")
    printer = Printer(INLINED, {})
    lines = bound_lines(sweep.lets, printer)
    for s in endangered(list(sweep.stores), sweep.lets):
        kept = f"{printer.text(s.node, ATOM)}.clone()" if s.node.op in ("load", "bitcast") else printer.text(s.node)
        lines["encode"].append((f"{s.buffer}_new = {kept}", ""))
        printer.names[s.node.uid] = f"{s.buffer}_new"
    for s in sweep.stores:
        buffer, value = program.buffer(s.buffer), printer.text(s.node)
        kind, more = ("_codes", f", {buffer.dtype.bits}") if buffer.dtype.packed else ("", "")
        kind = "_per_block" if buffer.space.name == "block" else kind
        lines["encode"].append((f"{s.buffer}_tensor.copy_(b.flat{kind}({value}{more}))", ""))
    return out + [f"    {line}" for line in assemble(lines)]


# What these functions call, beside optgen.runtime.reference.eager.


def block_max(x: Tensor, live: Tensor | None) -> Tensor:
    """The largest int32 of each block, lanes past the end left out: (rows, blocks, 1)."""
    if live is not None:
        x = torch.where(live, x, torch.iinfo(x.dtype).min)
    return x.amax(-1, keepdim=True)


def block_min(x: Tensor, live: Tensor | None) -> Tensor:
    """The smallest int32 of each block, lanes past the end left out: (rows, blocks, 1)."""
    if live is not None:
        x = torch.where(live, x, torch.iinfo(x.dtype).max)
    return x.amin(-1, keepdim=True)


def lookup(x: Tensor, table: tuple[float, ...]) -> Tensor:
    """fp32: the entry number x (int32) of a table, 0 <= x < its length."""
    return eager.entries(table, x.device)[x.long()]


def search(x: Tensor, table: tuple[float, ...]) -> Tensor:
    """int32: how many entries of a rising table are <= x (fp32); 0 for a NaN."""
    found = torch.searchsorted(eager.entries(table, x.device), x.contiguous(), right=True, out_int32=True)
    return torch.where(x == x, found, 0)
