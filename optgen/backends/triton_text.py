"""Triton text of a rule alone, and of storage formats alone.

A rule's tile function computes with values; the records that its kernel is launched with say how a plan keeps them.  A
state comes as it is stored, so that a coefficient meets the scale of a block before it meets an element:
`times(c, x, PLAN.m)` is c * x, `plus(c, x, y, PLAN.m)` is c * x + y, and `read(x, PLAN.m)` is x.

A codec is a few functions of the fields of a value, see `optgen.runtime.gpu.codecs`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence

from optgen.backends import triton
from optgen.backends.codec import ROOT, UNROUNDED, CodecText, X
from optgen.backends.printer import ATOM, Printer, Text, bound_lines, called, computed, with_comments, wrapped
from optgen.backends.triton import TritonPrinter
from optgen.ir.node import Node, postorder
from optgen.ir.program import Let, Program, Schedule, Step, Store
from optgen.ir.ranges import Intervals
from optgen.ops import spaces

C = "c"
"""The coefficient that a codec's `decode` multiplies its value with."""

LARGEST = 2.0**60
"""The largest coefficient of a value that is never negative."""

PRELUDE = (
    "apart", "bits", "block_least", "block_magnitude", "block_max", "block_min", "byte", "counter", "floor",
    "inverse", "joined", "minus", "narrow", "reciprocal", "rint", "rounded", "sign", "widened",
)  # fmt: skip
CODECS = ("Codec", "beside", "fraction", "integer", "middle", "plus", "read", "times")
MODULES = {
    "codecs": CODECS, "matrices": ("walk",), "prelude": PRELUDE, "small_work": ("rounds",),
}  # fmt: skip
"""The functions that generated text may call, by modules of optgen.runtime.gpu."""


def imports(lines: Iterable[str]) -> list[str]:
    """Return the import lines of helpers that this text calls."""
    text, out = list(lines), []
    for module, names in MODULES.items():
        if found := called(sorted(names), text):
            head = f"from optgen.runtime.gpu.{module} import "
            out += wrapped(head, found, "", whole=120) if len(found) < 8 else wrapped(f"{head}(", found, ")")
    return out


# -- rules


class RulePrinter(TritonPrinter):
    """A printer of values that a plan keeps.

    states  those that codecs read
    pieces  of these the ones that are only multiplied, by the names of their loads
    """

    def __init__(self, schedule: Schedule, nonneg: Collection[str]) -> None:
        super().__init__(schedule.program)
        self.states = states_of(schedule.program)
        self.pieces = multiplied(schedule, nonneg)

    def express(self, node: Node) -> Text:
        if node.uid not in self.names:
            for c, x in (node.args[:2], node.args[1::-1]) if node.op in ("mul", "fma") else ():
                if x.op == "load" and x.attr in self.pieces:
                    given = [self.text(c), self.text(x), *map(self.text, node.args[2:])]
                    return f"{'plus' if node.op == 'fma' else 'times'}({', '.join(given)}, PLAN.{x.attr})", ATOM
        return super().express(node)


def states_of(program: Program) -> frozenset[str]:
    """Return the states of elements."""
    return frozenset(b.name for b in program.buffers if b.role == "state" and b.space == spaces.elem)


def multiplied(schedule: Schedule, nonneg: Collection[str], *, roots: bool = False) -> frozenset[str]:
    """Return the states of elements of which nothing is read but products with host scalars.

    nonneg  states whose codec may take the root of such a scalar: it is known to be in [0, LARGEST]
    roots   True if their own roots may be read, too
    """
    program = schedule.program
    if program.maths == "strict":
        return frozenset()
    intervals = Intervals(triton.scalar_ranges(program))
    nodes = postorder([s.node for s in schedule.sweep.stores])
    bare = {s.node.attr for s in schedule.sweep.stores if s.node.op == "load"}
    for n in nodes:
        if not (roots and n.op == "sqrt" and n.args[0].attr in nonneg):
            bare |= _bare(n, nonneg, intervals)
    return states_of(program).intersection(n.attr for n in nodes if n.op == "load") - bare


def _bare(node: Node, nonneg: Collection[str], intervals: Intervals) -> set[str]:
    """Return the buffers of which a node reads more than a product with a host scalar."""
    loads = [a for a in node.args if a.op == "load"]
    scalar = next((a for a in node.args[:2] if node.op in ("mul", "fma") and a.op in ("sym", "const")), None)
    if scalar is None:
        return {a.attr for a in loads}
    low, high = intervals(scalar)
    is_root = low >= 0 and high <= LARGEST
    return {a.attr for a in loads if a in node.args[2:] or (a.attr in nonneg and not is_root)}


def stored(schedule: Schedule) -> list[Store]:
    """Return what a stage stores as it is; the host adds up what is summed over the model."""
    summed = {b.name for b in schedule.program.buffers if b.role == "partial" and b.space != spaces.model}
    return [s for s in schedule.sweep.stores if s.buffer not in summed]


def sweep_functions(schedule: Schedule, kernel: str, nonneg: Collection[str]) -> list[str]:
    """The tile function of a sweep, and the kernel that walks the tiles of a work item.

    nonneg  states of which no value is negative
    """
    program = schedule.program
    scalars = triton.scalars(program)
    args = ["table", "work", *(f"{h}: tl.float32" for h in scalars), "step_key: tl.int32", "SWEEP: tl.constexpr"]
    call = ["table", "work", f"{kernel}_tile", "SWEEP", *triton.in_tuple(scalars), "step_key"]
    out = [*tile_function(schedule, kernel, nonneg), "", "", triton.ENTRY]
    return [*out, *wrapped(f"def {kernel}_sweep(", args), *(f"    {x}" for x in wrapped("walk(", call, close=")"))]


def tile_function(schedule: Schedule, kernel: str, nonneg: Collection[str]) -> list[str]:
    """The tile function of a sweep, with the functions that look numbers up for it."""
    program = schedule.program
    printer = RulePrinter(schedule, nonneg)

    def reading(let: Let) -> str:
        kept = let.node.attr in printer.states - printer.pieces
        return f"{let.name} = read({let.name}, PLAN.{let.node.attr})" if kept else ""

    lines, names = _read(schedule, printer, reading)
    results = [_result(program, s, printer) for s in stored(schedule)]
    results += [printer.text(node) for t in triton.terms(schedule) for node in t.parts]
    lines["encode"].append((f"return {_tuple(results)}", ""))
    host = [let.name for let in program.host]
    sizes = [f"extent_{x}" for x in triton.sizes(program)]
    given = ["PLAN: tl.constexpr", *names, *sizes, *host, "live", "MASKED: tl.constexpr"]
    out = [*triton.tables(program), "@triton.jit", *wrapped(f"def {kernel}_tile(", given)]
    out.append(f'    """{_made(schedule)}"""')
    return out + [f"    {line}" for part in lines.values() for line in with_comments(part)]


def _made(schedule: Schedule) -> str:
    """The words for what the function of a stage returns."""
    new = [s.buffer for s in stored(schedule)]
    summed = [b.name for t in triton.terms(schedule) for b in t.partials]
    words = [f"The new {', '.join(new)}"] if new else []
    words += [f"{'the' if new else 'The'} terms of {', '.join(dict.fromkeys(summed))}"] if summed else []
    return textwrap.fill("; ".join(words) + ".", 105).replace("\n", "\n    ")


def _read(
    schedule: Schedule, printer: Printer, reading: Callable[[Let], str]
) -> tuple[dict[str, list[tuple[str, str]]], list[str]]:
    """The lines of a stage's function, and the names of the values that it takes.

    reading  the line that makes a number of a value, or ""
    """
    sweep = schedule.sweep
    found = {let.node.attr: let for let in sweep.lets if let.node.op == "load"}
    lines = bound_lines((), printer)
    for name in sweep.reads:
        let = found[name]
        printer.names[let.node.uid] = let.name
        lines["decode"] += [(line, "")] if (line := reading(let)) else []
    for let in triton.printed_lets(schedule):
        if let.node.op != "load":
            for section, new in bound_lines((let,), printer).items():
                lines[section] += new
    return lines, [found[name].name for name in sweep.reads]


def level_functions(stages: Sequence[tuple[str, Schedule]], known: dict[str, str]) -> list[str]:
    """The functions of small work between two sweeps, and the kernel that takes matrices through its rounds.

    known  text of a function -> its name; equal ones stand once in a module
    """
    out: list[str] = []
    host: dict[str, None] = {}
    calls = []
    for k, (kernel, schedule) in enumerate(stages):
        function, text = values_function(schedule, kernel, known)
        out += [*text, "", ""] if text else []
        scalars = triton.scalars(schedule.program)
        host |= dict.fromkeys(scalars)
        taken = ["table", "work", function, "LEVEL", str(k), *triton.in_tuple(scalars)]
        calls += [f"    {x}" for x in wrapped("rounds(", taken, close=")")]
    args = ["table", "work", *(f"{h}: tl.float32" for h in host), "LEVEL: tl.constexpr"]
    out += ["@triton.jit", *wrapped(f"def {stages[0][0]}_between(", args)]
    return [*out, *calls]


def values_function(schedule: Schedule, kernel: str, known: dict[str, str]) -> tuple[str, list[str]]:
    """The name and the lines of the function of a stage of small work; no lines where an equal one stands already.

    known  as in level_functions
    """
    given, text = _values(schedule)
    function = known.setdefault("\n".join([*given, *text]), f"{kernel}_values")
    new = function == f"{kernel}_values"
    return function, ["@triton.jit", *wrapped(f"def {function}(", given), *text] if new else []


def _values(schedule: Schedule) -> tuple[list[str], list[str]]:
    """The arguments and the lines of the function of a stage of small work."""
    program = schedule.program
    printer = TritonPrinter(program)
    lines, names = _read(schedule, printer, lambda _: "")
    results = [printer.text(s.node) for s in stored(schedule)]
    results += [printer.text(t.node) for t in triton.terms(schedule)]
    lines["encode"].append((f"return {_tuple(results)}", ""))
    given = [*names, *(f"extent_{x}" for x in triton.sizes(program)), *(let.name for let in program.host)]
    text = [f"    {line}" for part in lines.values() for line in with_comments(part)]
    return given, [f'    """{_made(schedule)}"""', *text]


def small_functions(stages: Iterable[Schedule], name: str) -> list[list[str]]:
    """The functions name_small_1(values..., sizes...), name_small_2 ... of a codec's small work."""
    out = []
    for k, schedule in enumerate(stages):
        given, text = _values(schedule)
        out.append([*_head(f"{name}_small_{k + 1}", given), *text])
    return out


def _tuple(items: Sequence[str]) -> str:
    return f"({items[0]},)" if len(items) == 1 else ", ".join(items)


def _result(program: Program, s: Store, printer: Printer) -> str:
    text = printer.text(s.node)
    whole = s.node.space == spaces.elem or program.buffer(s.buffer).space.name == "block"
    return text if whole else f"tl.broadcast_to({text}, live.shape)"


# -- codecs


def codec_functions(codec: CodecText, name: str) -> list[list[str]]:
    """The functions name_decode(c, fields...), name_root(fields...), name_encode and name_nearest."""
    tables = [f"{table}_ptr" for table in triton.in_memory(_programs(codec))]
    given = [*_fields(codec.decode, codec.reads or codec.names), *tables]
    out = []
    # Two factors of c * x: c meets what there are few of.
    lines, results = _body(codec.decode)
    text, node, printer = results[X]
    factors = [printer.operand(node, a) for a in node.args] if node.op == "mul" else [text, "1.0"]
    head = [*_head(f"{name}_decode", [C, *given]), *_scalars(codec.decode)]
    out.append([*head, *lines, f"    return {', '.join(factors)}"])
    if codec.root is not None:
        lines, results = _body(codec.root)
        out.append([*_head(f"{name}_root", given), *_scalars(codec.root), *lines, f"    return {results[ROOT][0]}"])
    for step, tail, given in (
        (codec.encode, "encode", ["draws", "SHIFT: tl.constexpr"]),
        (codec.nearest, "nearest", []),
    ):
        if step is not None:
            lines, results = _body(step)
            made = [results[field][0] for field in (*codec.names, *(x for x in (ROOT, UNROUNDED) if x in results))]
            given += [*_fields(step, codec.given), *tables]
            head = _head(f"{name}_{tail}", ["x", "live", "MASKED: tl.constexpr", *given])
            short = len(text := f"    return {_tuple(made)}") <= 116
            last = [text] if short else ["    return (", *(f"        {x}," for x in made), "    )"]
            out.append([*head, *_scalars(step), *lines, *last])
    return [*out, *small_functions(codec.small, name)]


def _head(function: str, names: Sequence[str]) -> list[str]:
    return ["@triton.jit", *wrapped(f"def {function}(", names)]


def _programs(codec: CodecText) -> list[Program]:
    steps = [step for step in (codec.decode, codec.root, codec.encode, codec.nearest) if step]
    return [s.schedule.program for step in steps for s in step.stages]


def _fields(step: Step, fields: Sequence[str]) -> list[str]:
    """Return the names of a codec's fields."""
    loads = {let.node.attr: let.name for let in step.sweeps[-1].schedule.sweep.lets if let.node.op == "load"}
    return [loads.get(field, f"{field}_") for field in fields]


def _scalars(step: Step) -> list[str]:
    """The lines that compute what is made of constants and c alone."""
    printer = TritonPrinter(step.sweeps[-1].schedule.program)
    found = [(let.name, computed(let.node)) for let in step.host if let.node.op != "sym"]
    return [f"    {name} = {printer.text(node)}" for name, node in found]


def _body(step: Step) -> tuple[list[str], dict[str, tuple[str, Node, TritonPrinter]]]:
    """The lines of a codec's function, and its results."""
    stage = step.sweeps[-1]
    program, sweep = stage.schedule.program, stage.schedule.sweep
    printer = TritonPrinter(program)
    printer.names |= {let.node.uid: let.name for let in sweep.lets if let.node.op == "load"}
    rest = tuple(let for let in triton.printed_lets(stage.schedule) if let.node.op != "load")
    lines = [f"    {line}" for some in bound_lines(rest, printer).values() for line, _ in some]
    results = {s.buffer: (printer.text(s.node), s.node, printer) for s in sweep.stores}
    return lines, results


def codec_record(codec: CodecText, name: str, *, plus: bool) -> list[str]:
    """The arguments of a codec's record."""
    given = [f"{name}_decode", f"{name}_nearest"]
    given += [f"encode={name}_encode"] if codec.encode else []
    given += [f"root={name}_root"] if codec.root else []
    programs = _programs(codec)
    rules = {rule for p in programs for rule in p.rules}
    nodes = [n for p in programs for n in postorder(p.roots())]
    has = {
        "strict": programs[0].maths == "strict",
        "guards": "nan" in rules,
        "looks_up": "table" in rules or any(n.op in ("lookup", "search") for n in nodes),
        "lines": "table" in rules,
        "plus": plus,
    }
    given += [f"{key}=True" for key, value in has.items() if value]
    numbers = triton.in_memory(programs)
    given += [f"tables=({', '.join(numbers)},)"] if numbers else []
    small = [f"{name}_small_{k + 1}" for k in range(len(codec.small))]
    given += [f"small={triton.as_tuple(small)}"] if small else []
    return given


def table_functions(codecs: Sequence[CodecText]) -> list[list[str]]:
    """The functions that look numbers up, each once."""
    found: dict[str, list[str]] = {}
    for codec in codecs:
        for program in _programs(codec):
            for part in "\n".join(triton.tables(program)).split("\n\n\n"):
                if part.strip():
                    found.setdefault(part, part.strip("\n").split("\n"))
    return list(found.values())


def numbers(codec: CodecText) -> dict[str, tuple[float, ...]]:
    """Return the tables that a codec reads from memory."""
    return triton.in_memory(_programs(codec))
