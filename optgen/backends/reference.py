"""Eager torch, strict maths: the reading of a Program that runs everywhere and that the others are held to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from optgen.backends import matrices
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
    number,
    shortest,
    with_comments,
    wrapped,
)  # fmt: skip
from optgen.ir.node import Node, postorder
from optgen.ir.program import Buffer, Let, Program, Schedule, Stage, Step, Store
from optgen.ops import spaces
from optgen.ops.dtypes import f32, i32
from optgen.ops.prims import GATHERS
from optgen.ops.spaces import Space

X, ROOT = "x", "root"
"""Buffers of codec programs that are no fields: the fp32 value, and the root that is read back of it."""


@dataclass(frozen=True)
class Codec:
    """The steps of a format alone.

    names  the buffers of its fields in the order in which they are stored
    reads  what the functions that read take; () where that is the fields
    given  what those that store take behind the value
    small  the small work for a state that is kept as a whole, in the order of its records
    """

    names: tuple[str, ...]
    decode: Step
    root: Step | None
    encode: Step | None
    nearest: Step
    reads: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    small: tuple[Schedule, ...] = ()


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


def _called(p: Printer, n: Node) -> Text:
    """A function of whole matrices: of what is kept in memory, in place."""
    x = n.args[0].args[0]
    scalars = ", ".join(f"float({p.text(a)})" for a in n.args[1:])
    return f"b.elements({n.attr}({x.attr}_tensor, {scalars}))", ATOM


def _load(p: ReferencePrinter, n: Node) -> Text:
    stored = n.attr in p.stored
    if stored and n.space == spaces.elem:
        return f'b.load("{n.attr}")', ATOM
    given = n.attr == X and not p.stored  # of a codec; a rule may have an x of its own
    name = n.attr if given else f'stored["{n.attr}"]' if stored else f"{n.attr}_tensor"
    if n.space.name in spaces.SMALL:
        return (f"b.spread({name})", ATOM) if p.space == spaces.elem else (name, ATOM)
    if n.dtype.packed:
        return f"b.codes({name}, {n.dtype.bits})", ATOM
    if given:
        return name, ATOM
    return f"b.{'per_block' if n.space.name == 'block' else 'elements'}({name})", ATOM


def _draw(p: Printer, n: Node) -> Text:
    kind, bits, width = n.attr
    return f"noise.{kind}({bits}{f', {width}' if kind != 'integer' else ''})", ATOM


@dataclass
class ReferencePrinter(Printer):
    """A printer that knows over which space the stage runs, and which buffers a plan's codecs load and store."""

    space: Space = spaces.elem
    stored: frozenset[str] = frozenset()


SPELL: dict[str, Spelling] = {
    **COMMON,
    "draw": _draw,
    "load": _load,
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
    "call": _called,
    "lookup": lambda p, n: (f"lookup({p.text(n.args[0])}, {n.attr})", ATOM),
    "search": lambda p, n: (f"search({p.text(n.args[0])}, {n.attr})", ATOM),
    **{op: function(op, ", b.dims") for op in GATHERS},
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


def _stored(program: Program, s: Store, printer: ReferencePrinter) -> str:
    """The line of a store."""
    buffer = program.buffer(s.buffer)
    value, name = printer.text(s.node), f"{s.buffer}_tensor"
    if buffer.reduction == "model_sum":
        return f"{name} = yield {value}"
    if buffer.role == "partial":
        if program.space == spaces.elem:
            return f"{name} = b.{buffer.reduction}({value})"
        return f'{name} = few_{buffer.reduction.split("_")[1]}({value}, "{buffer.space.name}")'
    if buffer.name not in printer.stored:
        # A state in fp32 is read where it lies: the copy outlives its store.
        copy = ".clone()" if s.node.op == "load" and s.node.attr in printer.stored else ""
        return f"{name} = b.flat({value}){copy}" if buffer.space == spaces.elem else f"{name} = {value}"
    if buffer.space.name in spaces.SMALL:
        return f'put(stored["{s.buffer}"], {value})'
    return f'b.store("{s.buffer}", {value})'


def _stage_lines(stage: Stage, printer: ReferencePrinter, order: Sequence[str]) -> dict[str, list[tuple[str, str]]]:
    """The lines of a stage: what it binds, the sums that it leaves, what it stores; `order`: of what is stored."""
    program, sweep = stage.schedule.program, stage.schedule.sweep
    lines = bound_lines(sweep.lets, printer)
    first = [s for s in sweep.stores if program.buffer(s.buffer).role == "partial"]
    rest = [s for s in sweep.stores if s not in first]
    stores = first + sorted(rest, key=lambda s: order.index(s.buffer) if s.buffer in order else -1)
    for s in _endangered(stores, sweep.lets):
        name = f"{s.buffer}_new"
        kept = f"{printer.text(s.node, ATOM)}.clone()" if s.node.op in ("load", "bitcast") else printer.text(s.node)
        lines["encode"].append((f"{name} = {kept}", ""))
        printer.names[s.node.uid] = name
    lines["encode"] += [(_stored(program, s, printer), "") for s in stores]
    return lines


def _whole_lines(stage: Stage, function: str, stored: Collection[str]) -> list[str]:
    """The call of a function of whole matrices, and the stores of matrix states."""
    schedule = stage.schedule
    given = [f'stored["{x}"]' if x in stored else f"{x}_tensor" for x in schedule.sweep.reads]
    given += [f"float({let.name})" for let in schedule.program.host]
    extents = ['stored.streams()' if x == "stream" else f'float(b.extent("{x}"))' for x in matrices.extents(schedule)]
    given += extents
    names = [s.buffer for s in schedule.sweep.stores]
    results = [f"{x}_new" if x in stored else f"{x}_tensor" for x in names]
    lines = wrapped(f"{', '.join(results)} = {function}(", given, ")")
    return [*lines, *(f'stored.put("{x}", {x}_new)' for x in names if x in stored)]


def rule_function(
    step: Step,
    function: str,
    source: str = "",
    called: Callable[[Stage], str] = lambda stage: stage.call,
    own: Callable[[Stage], str] = lambda stage: "",
) -> list[str]:
    """`def function(stored, scalars...)`: one step of a rule alone; `stored` a runtime.stored.Stored.

    called  the name of the function that a stage of whole matrices is
    own     the name of the function that a stage is (`stage_function`); "" if it stands here
    """
    out = wrapped(f"def {function}(", ["stored", *(let.name for let in step.host)], "):")
    stored = frozenset(b.name for b in step.program.buffers)
    begun = False
    for stage in step.stages:
        if len(step.stages) > 1:
            what = f"sweep {step.sweeps.index(stage) + 1}" if stage.is_sweep else stage.call or stage.space.name
            out += ["", f"    # == {what}: {stage.why}"]
        if name := own(stage):
            made = ", ".join(_left(step, stage))
            call = wrapped(f"{made} = {name}(" if made else f"{name}(", _given(step, stage), ")")
            out += [f"    {line}" for line in call]
            continue
        lines = _begun(stage, stored) if stage.space == spaces.elem or not begun else []
        begun |= bool(lines)
        lines += _whole_lines(stage, called(stage), stored) if stage.call == "whole" else _body(step, stage, source)
        out += [f"    {line}" for line in lines]
    return out


def stage_function(step: Step, stage: Stage, name: str, source: str = "") -> list[str]:
    """`def name(stored, scalars..., temps...)`: one stage of a step, which returns what it leaves for later ones.

    No lines for one that yields sums over the model, or calls a function of whole matrices.
    """
    if stage.call == "whole" or any(b.reduction == "model_sum" for b in stage.schedule.program.buffers):
        return []
    lines = _begun(stage, frozenset(b.name for b in step.program.buffers)) + _body(step, stage, source)
    made = _left(step, stage)
    ends = [f"return {', '.join(made)}"] if made else []
    return [*wrapped(f"def {name}(", _given(step, stage), "):"), *(f"    {line}" for line in (*lines, *ends))]


def _given(step: Step, stage: Stage) -> list[str]:
    """The arguments of the function of a stage."""
    program, stored = stage.schedule.program, {b.name for b in step.program.buffers}
    temps = [f"{x}_tensor" for x in stage.schedule.sweep.reads if x not in stored]
    return ["stored", *(let.name for let in program.host), *temps]


def _left(step: Step, stage: Stage) -> list[str]:
    """The values that a stage leaves for later ones."""
    stored = {b.name for b in step.program.buffers}
    return [f"{s.buffer}_tensor" for s in stage.schedule.sweep.stores if s.buffer not in stored]


def _begun(stage: Stage, stored: Collection[str]) -> list[str]:
    """The line that begins a sweep, or makes the sizes known that other stages compute with."""
    program = stage.schedule.program
    touched = [f'"{b.name}"' for b in program.touched if b.name in stored and b.space == spaces.elem]
    gathers = any(n.op in GATHERS for n in postorder(program.roots()))
    needed = stage.space == spaces.elem or program.is_sized or gathers
    return wrapped("b = stored.over(", touched, ")") if needed else []


def _body(step: Step, stage: Stage, source: str) -> list[str]:
    """The lines of a stage behind its beginning."""
    stored = frozenset(b.name for b in step.program.buffers)
    bases = {base for _, base in step.program.together}
    order = ["p", *sorted((b.owner for b in step.program.buffers), key=lambda owner: owner not in bases)]
    return assemble(_stage_lines(stage, ReferencePrinter(SPELL, {}, stage.space, stored), order), source)


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


def codec_functions(codec: Codec, name: str) -> list[list[str]]:
    """The functions name_decode(b, fields...), name_root, name_encode(b, x, noise) and name_nearest(b, x)."""
    given = ["b", *(f"{field}_tensor" for field in codec.names)]
    out = []
    for part, step, known in reading(codec, name, given):
        lines, found = _codec_lines(step, known)
        head = wrapped(f"def {name}_{part}(", given, "):")
        out.append([*head, *lines, f"    return {found[X if part == 'decode' else ROOT]}"])
    if codec.encode is not None:
        out.append(_writes(codec.encode, f"{name}_encode", "b, x, noise", codec.names))
    return [*out, _writes(codec.nearest, f"{name}_nearest", "b, x", codec.names)]


Known = Mapping[int, str]
"""Node -> the call of another function of the codec that returns it."""


def reading(codec: Codec, name: str, given: Sequence[str]) -> Iterator[tuple[str, Step, Known]]:
    """Yield the functions that read a value, "decode" and "root": one calls the other where its value is in it.

    given  the arguments of such a call
    """
    steps = {part: step for part, step in (("decode", codec.decode), ("root", codec.root)) if step is not None}
    values = {part: step.stages[-1].schedule.sweep.stores[0].node for part, step in steps.items()}
    for part, other in (("decode", "root"), ("root", "decode")):
        if part not in steps:
            continue
        within = other in steps and len(steps[part].stages) == 1 and values[other] in postorder([values[part]])
        yield part, steps[part], {values[other].uid: f"{name}_{other}({', '.join(given)})"} if within else {}


def lets_of(lets: Sequence[Let], roots: Sequence[Node], known: Known) -> list[Let]:
    """Return the lets that roots read where some nodes are known."""
    read, stack = set(), list(roots)
    while stack:
        node = stack.pop()
        if node.uid not in read:
            read.add(node.uid)
            stack += () if node.uid in known else node.args
    return [let for let in lets if let.node.uid in read]


def _writes(step: Step, function: str, arguments: str, fields: Sequence[str]) -> list[str]:
    lines, found = _codec_lines(step, {})
    results = [found[field] for field in (*fields, *([ROOT] if ROOT in found else []))]
    if len(results) == 1:
        return [f"def {function}({arguments}):", *lines, f"    return ({results[0]},)"]
    return [f"def {function}({arguments}):", *lines, *(f"    {line}" for line in wrapped("return (", results, ")"))]


def _codec_lines(step: Step, known: Known) -> tuple[list[str], dict[str, str]]:
    """The body of a codec's function, and each result's expression: fields as they are stored, X and ROOT as read."""
    out: list[str] = []
    found: dict[str, str] = {}
    for stage in step.stages:
        program, sweep = stage.schedule.program, stage.schedule.sweep
        printer = ReferencePrinter(SPELL, dict(known), stage.space)
        lets = lets_of(sweep.lets, [s.node for s in sweep.stores], known)
        lines = bound_lines(tuple(let for let in lets if let.node.attr != X), printer)
        out += [f"    {line}" for lets in lines.values() for line in with_comments(lets)]
        for s in sweep.stores:
            buffer = program.buffer(s.buffer)
            if buffer.role in ("partial", "temp"):
                out.append(f"    {_stored(program, s, printer)}")
                continue
            text = printer.text(s.node)
            if buffer.name not in (X, ROOT) and buffer.space.name not in spaces.SMALL:
                text = _flat(buffer, text)
            if stage is not step.stages[-1]:  # later stages read it as it is kept
                out.append(f"    {s.buffer}_tensor = {text}")
                text = f"{s.buffer}_tensor"
            found[s.buffer] = text
    return out, found


def _flat(buffer: Buffer, text: str) -> str:
    """A field's contents in the shape in which they are kept."""
    if buffer.dtype.packed:
        return f"b.flat_codes({text}, {buffer.dtype.bits})"
    return f"b.flat_per_block({text})" if buffer.space.name == "block" else f"b.flat({text})"


def tables(schedules: list[Schedule]) -> list[str]:
    """Return the tables of these schedules' functions: a tuple of numbers for each, lines of text."""
    nodes = [n for s in schedules for n in postorder(s.program.roots()) if n.op in ("lookup", "search")]
    lines: list[str] = []
    for name, table in sorted({str(n.attr): n.attr for n in nodes}.items()):
        lines += listed(name, table.values)
    return lines


def listed(name: str, numbers: tuple[float, ...]) -> list[str]:
    """A tuple of numbers under a name, lines of text."""
    return wrapped(f"{name} = (", [shortest(x) for x in numbers], ")", whole=120, limit=119)


HELPERS = (
    "axis_max", "axis_min", "block_max", "block_min", "choose", "few_max", "few_sum", "larger", "lookup",
    "newton_schulz", "put", "quotient", "rotl", "search", "smaller", "sqrt",
)  # fmt: skip


def needs(functions: Iterable[Iterable[str]]) -> list[str]:
    """Names that these functions' lines want from optgen.runtime.reference.eager."""
    return called(HELPERS, chain.from_iterable(functions))
