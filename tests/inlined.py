"""One kernel's schedule as one eager function, codecs and random words written out: beside what optgen generates."""

from __future__ import annotations

from optgen.backends.printer import ATOM, Text, wrapped
from optgen.backends.reference import SPELL, ReferencePrinter, _endangered, assemble, bound_lines
from optgen.ir.node import Node
from optgen.ir.program import Schedule


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
    printer = ReferencePrinter(INLINED, {})
    lines = bound_lines(sweep.lets, printer)
    for s in _endangered(list(sweep.stores), sweep.lets):
        kept = f"{printer.text(s.node, ATOM)}.clone()" if s.node.op in ("load", "bitcast") else printer.text(s.node)
        lines["encode"].append((f"{s.buffer}_new = {kept}", ""))
        printer.names[s.node.uid] = f"{s.buffer}_new"
    for s in sweep.stores:
        buffer, value = program.buffer(s.buffer), printer.text(s.node)
        kind, more = ("_codes", f", {buffer.dtype.bits}") if buffer.dtype.packed else ("", "")
        kind = "_per_block" if buffer.space.name == "block" else kind
        lines["encode"].append((f"{s.buffer}_tensor.copy_(b.flat{kind}({value}{more}))", ""))
    return out + [f"    {line}" for line in assemble(lines)]
