"""C++ text of rules, free of any plan; `runtime/cpu/cpp/sweep.h` and `steps.h` join it with a plan's codecs.

A rule of one sweep is a struct of its scalars; its functions compute with the states of W elements.  A stage of any
other is a function of its scalars and its values, for W of them: elements in a sweep, else rows, columns, matrices or
tensors.  A value comes as it is stored, so that a coefficient meets the scale of a block before it meets an element:
`exp_avg.times(c)` is c * exp_avg, `exp_avg.plus(c, y)` is c * exp_avg + y, and `exp_avg.read()` its value.  What is
new or reduced is set: `exp_avg.set(x)`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from optgen.backends import triton, triton_text
from optgen.backends.cpp import RESERVED, WORTH, CppPrinter, Phases, assigned, cost, type_of, wanted
from optgen.backends.printer import ATOM, Text, with_comments
from optgen.ir.node import Node
from optgen.ir.program import Let, Schedule, Store
from optgen.ops import dtypes, spaces

NAMES = RESERVED | frozenset(
    "All APART Arrays at b blocks_ Codec code_at DRAWS encode end FIELDS first full_nearest g h HAS_ROOT Head head i "
    "in In Later Loop LOOPS more most_of next NEXT Of p pack_codes plus Product READS root ROOT ROOTED ROOT_LOOP set "
    "of_head_1 of_head_2 of_head_3 of_in OfBlocks start states step Sweep tail tile times unpack_codes Value VALUE "
    "weight WIDE x c N".split()
)
"""Names that joined text gives itself, beside the words of all C++ text."""
_OF_STAGES = RESERVED | frozenset("All Codec g Loop OPTGEN_INLINE p Product Sweep Value".split())


class ValuePrinter(CppPrinter):
    """A printer of values that a plan keeps, value -> its parameter; `pieces`: those that are only multiplied."""

    def __init__(self, plan: Phases, pieces: Collection[str], values: Mapping[str, str]) -> None:
        super().__init__(plan)
        self.pieces, self.values = pieces, values

    def express(self, node: Node) -> Text:
        if node.uid in self.names:
            return super().express(node)
        for c, x in (node.args[:2], node.args[1::-1]) if node.op in ("mul", "fma") else ():
            if x.op == "load" and x.attr in self.pieces:
                given = ", ".join(self._number(a) for a in (c, *node.args[2:]))
                return f"{self.values[x.attr]}.{'plus' if node.op == 'fma' else 'times'}({given})", ATOM
        # What one stage leaves for the next ones of each element is bf16.
        load = node.args[0] if node.op == "cast" and node.args[0].dtype is dtypes.bf16 else node
        if load.op == "load" and load.attr in self.values:
            return f"{self.values[load.attr]}.read()", ATOM
        return super().express(node)

    def _number(self, node: Node) -> str:
        return f"F({self.text(node)})" if node.op == "const" else self.text(node)

    def of_float(self, node: Node) -> str:
        """The text of a number of each element; a word whose upper half is bf16 as a float of its bits."""
        if node.op == "const" or node.space == spaces.host:
            return f"F({self.text(node)})"
        word = wanted(node) if node.dtype is dtypes.bf16 else node
        return self.text(word) if type_of(word.dtype) == "F" else f"as_float({self.text(word)})"


def rule_struct(schedule: Schedule, kernel: str, nonneg: Collection[str]) -> list[str]:
    """The struct of a sweep; `nonneg`: states of which no value is negative."""
    sweep, program = schedule.sweep, schedule.program
    elements = frozenset(b.name for b in program.buffers if b.role == "state" and b.space == spaces.elem)
    pieces = triton_text.multiplied(schedule, nonneg, elements)
    values = [x for x in dict.fromkeys((*sweep.reads, *(s.buffer for s in sweep.stores))) if x not in ("p", "g")]
    states = {x: f"{x}_" if x in NAMES else x for x in values}
    loads = {"p", "g", *pieces}
    lets = tuple(let for let in sweep.lets if not (let.node.op == "load" and let.node.attr in loads))
    plan = Phases(replace(schedule, sweep=replace(sweep, lets=lets)), NAMES | frozenset(states.values()))
    host = [plan.scalar[let.name] for let in program.host]
    given = {n.uid: str(n.attr) for n in plan.nodes if n.op == "load" and n.attr in ("p", "g")}
    new = {s.buffer: s.node for s in sweep.stores}
    out = [f"struct {kernel} {{  // {program.name}"]
    out.append(f"    static constexpr int SCALARS = {len(host)}, APART = {{apart}};")
    out += [f"    const F {', '.join(host)};"] if host else []
    made = ", ".join(f"{name}(scalars[{k}])" for k, name in enumerate(host))
    out += ["", f"    explicit {kernel}(const float *{'scalars' if host else ''}){' : ' + made if host else ''} {{}}"]
    types = [f"S{k}" for k in range(len(values))]
    template = [f"    template <{', '.join(f'class {t}' for t in types)}>"] if types else []
    params = [f"{t} &{states[x]}" for t, x in zip(types, values, strict=True)]

    def body(printer: ValuePrinter, roots: Iterable[Node], stop: Collection[int]) -> list[tuple[str, str]]:
        need = reached(roots, stop)
        return [assigned(plan, let, printer) for let in plan.phases[0].elements if let.node.uid in need]

    def function(head: str, lines: list[tuple[str, str]]) -> None:
        out.extend([*template, f"    {head} const {{"])
        out.extend(f"        {line}" for line in with_comments(lines, comment_mark="//"))
        out.append("    }")

    def setting(printer: ValuePrinter) -> list[tuple[str, str]]:
        return [(f"{states[x]}.set({printer.of_float(n)});", "") for x, n in new.items() if x != "p"]

    def printer_of(names: dict[int, str]) -> ValuePrinter:
        printer = ValuePrinter(plan, pieces, states)
        printer.names |= given | names
        return printer

    cut = _cut(new, plan)
    if cut is None:
        printer = printer_of({})
        lines = body(printer, new.values(), ())
        function(
            f"F step({', '.join(['F p', 'F g', *params])})",
            [*lines, *setting(printer), (f"return {printer.of_float(new['p'])};", "")],
        )
        apart = 0
    else:
        read, apart = cut
        printer = printer_of({})
        own = [n for x, n in new.items() if x != "p"]
        lines = body(printer, own, ())
        function(f"void states({', '.join(['F p', 'F g', *params])})", [*lines, *setting(printer)])
        printer = printer_of({uid: f"{states[x]}.{how}()" for uid, (x, how) in read.items()})
        lines = body(printer, [new["p"]], read)
        taken = ", ".join(["F p", "F g", *(f"const {x}" for x in params)])
        function(f"F weight({taken})", [*lines, (f"return {printer.of_float(new['p'])};", "")])
        for name, how in (("NEXT", "next"), ("ROOT", "root")):
            row = ", ".join(str((x, how) in read.values()).lower() for x in values)
            out.insert(2, f"    static constexpr bool {name}[] = {{{row}}};")
    if cut is None and values:
        flags = ", ".join(["false"] * len(values))
        out.insert(2, f"    static constexpr bool NEXT[] = {{{flags}}}, ROOT[] = {{{flags}}};")
    out[1] = out[1].format(apart=apart)
    return [*out, "};"]


def reached(roots: Iterable[Node], stop: Collection[int]) -> dict[int, Node]:
    """Return the nodes that are computed for these roots."""
    out: dict[int, Node] = {}
    stack = list(roots)
    while stack:
        n = stack.pop()
        if n.uid not in out and n.uid not in stop:
            out[n.uid] = n
            stack.extend(n.args)
    return out


def _cut(new: dict[str, Node], plan: Phases) -> tuple[dict[int, tuple[str, str]], int] | None:
    """Return the new states that the weight reads, and for which weights a loop of its own pays (`APART` in sweep.h).

    None where it needs more than them, the gradient and itself.
    """
    states = {n.uid: x for x, n in new.items() if x != "p" and n.op not in ("load", "const", "sym")}
    read: dict[int, tuple[str, str]] = {}
    own: dict[int, Node] = {}
    stack = [new["p"]]
    while stack:
        n = stack.pop()
        if n.uid in own or n.uid in read:
            continue
        if n.uid in states:
            read[n.uid] = states[n.uid], "next"
        elif n.op == "sqrt" and n.args[0].uid in states:
            read[n.uid] = states[n.args[0].uid], "root"
        elif n.op == "load" and n.attr not in ("p", "g"):
            return None
        else:
            own[n.uid] = n
            stack.extend(n.args)
    shared = reached([n for x, n in new.items() if x != "p"], ())
    work = [n for n in own.values() if n.space == spaces.elem and n.op != "const"]
    if not read or cost(n for n in work if n.uid in shared) > 1:
        return None
    return read, 2 if cost(work) >= WORTH else 1


# -- stages


def stage_function(
    schedule: Schedule, kernel: str, nonneg: Collection[str], title: str = "", *, static: bool = False
) -> list[str]:
    """The function of a stage.

    nonneg  states of which no value is negative
    title   a comment above it
    static  True for one of a struct
    """
    sweep, program = schedule.sweep, schedule.program
    elements = frozenset(b.name for b in program.buffers if b.role == "state" and b.space == spaces.elem)
    pieces = triton_text.multiplied(schedule, nonneg, elements)
    stored = triton_text.stored(schedule)
    new = {s.buffer: s.node for s in schedule.sweep.stores}
    sums = [term.partials[0].name for term in triton.terms(schedule)]
    names = [x for x in dict.fromkeys((*sweep.reads, *(s.buffer for s in stored), *sums)) if x not in ("p", "g")]
    values = {x: f"{x}_" if x in _OF_STAGES else x for x in names}
    kinds = {x: f"S{k}" for k, x in enumerate(names)}
    lets = tuple(let for let in sweep.lets if _is_named(let, elements - pieces))
    sizes = [f"extent_{x}" for x in triton.sizes(program)]
    taken = frozenset((*values.values(), *kinds.values(), *sizes))
    kept = tuple(Store(x, n) for x, n in new.items() if x in values or x == "p")
    plan = Phases(replace(schedule, sweep=replace(sweep, lets=lets, stores=kept)), _OF_STAGES | taken)
    printer = ValuePrinter(plan, pieces, values)
    printer.names |= {n.uid: str(n.attr) for n in plan.nodes if n.op == "load" and n.attr in ("p", "g")}
    lines = [assigned(plan, let, printer) for let in plan.phases[0].elements]
    lines += [(f"{values[x]}.set({printer.of_float(new[x])});", "") for x in names if x in new]
    if "p" in new:
        lines.append((f"return {printer.of_float(new['p'])};", ""))
    given = [f"F {x}" for x in ("p", "g") if x in sweep.reads]
    given += [f"F {plan.scalar[let.name]}" for let in program.host] + [f"F {x}" for x in sizes]
    given += [f"{kinds[x]} &{values[x]}" for x in names]
    kind = "F" if "p" in new else "void"
    head = [f"template <{', '.join(f'class {kinds[x]}' for x in names)}>"] if names else []
    head.append(f"{'static ' * static}OPTGEN_INLINE {kind} {kernel}({', '.join(given)}) {{")
    head[:0] = [title] if title else []
    return [*head, *(f"    {line}" for line in with_comments(lines, comment_mark="//")), "}"]


def _is_named(let: Let, states: Collection[str]) -> bool:
    """Return True if a line names the value of a let: of loads, what is decoded."""
    return let.node.op != "load" or let.node.attr in states


__all__ = ["NAMES", "ValuePrinter", "reached", "rule_struct", "stage_function"]
