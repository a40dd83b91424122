"""C++ text of rules, free of any plan; `runtime/cpu/cpp/sweep.h` and `steps.h` join it with a plan's codecs.

A rule of one sweep is a struct of its scalars; its functions compute with the states of W elements.  A stage of any
other is a function of its scalars and its values, for W of them: elements in a sweep, else rows, columns, matrices or
tensors.  A value comes as it is stored, so that a coefficient meets the scale of a block before it meets an element:
`exp_avg.times(c)` is c * exp_avg, `exp_avg.plus(c, y)` is c * exp_avg + y, `exp_avg.read()` its value and
`exp_avg.read_root()` the root of that.  What is new or reduced is set: `exp_avg.set(x)`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from itertools import starmap

from optgen.backends import triton, triton_text
from optgen.backends.cpp import RESERVED, WORTH, CppPrinter, Phases, assigned, cost, type_of, wanted
from optgen.backends.printer import ATOM, Text, with_comments
from optgen.ir.node import Node
from optgen.ir.program import Schedule, Store
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
    """A printer of values that a plan keeps, value -> its parameter; `pieces`: those that are multiplied, or their
    roots taken, and no more."""

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
        if node.op == "sqrt" and node.args[0].op == "load" and node.args[0].attr in self.pieces:
            return f"{self.values[node.args[0].attr]}.read_root()", ATOM
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


class _Lines:
    """The lines of the functions of a rule.

    values    value that a plan keeps -> its parameter
    params    these parameters, of types S0, S1, ... that `template` names
    sizes     the parameters of the tensor's sizes
    scalars   the parameters of host scalars
    pieces    the states of elements that are only multiplied, or their roots taken
    new       value -> what the rule makes of it
    """

    def __init__(
        self, schedule: Schedule, nonneg: Collection[str], names: Iterable[str], loads: Iterable[str],
        reserved: frozenset[str],
    ) -> None:  # fmt: skip
        """Collect what functions of these values need; `loads`: those that are read in lines of their own."""
        sweep, program = schedule.sweep, schedule.program
        self.pieces = triton_text.multiplied(schedule, nonneg, roots=True)
        self.values = {x: f"{x}_" if x in reserved else x for x in _but_weight(names)}
        kinds = [f"S{k}" for k in range(len(self.values))]
        self.params = [f"{kind} &{x}" for kind, x in zip(kinds, self.values.values(), strict=True)]
        self.template = [f"template <{', '.join(f'class {kind}' for kind in kinds)}>"] if kinds else []
        self.sizes = [f"extent_{x}" for x in triton.sizes(program)]
        self.new = {s.buffer: s.node for s in sweep.stores if s.buffer in self.values or s.buffer == "p"}
        read = {*loads} - {"p", "g", *self.pieces}
        lets = tuple(let for let in sweep.lets if let.node.op != "load" or let.node.attr in read)
        stores = tuple(starmap(Store, self.new.items()))
        taken = reserved.union(self.values.values(), kinds, self.sizes)
        self.plan = Phases(replace(schedule, sweep=replace(sweep, lets=lets, stores=stores)), taken)
        self.scalars = [self.plan.scalar[let.name] for let in program.host]

    def of(self, stored: Collection[str], names: Mapping[int, str] | None = None) -> list[str]:
        """Return the lines that set these values and return the weight; `names`: node -> its text."""
        plan, names = self.plan, names or {}
        printer = ValuePrinter(plan, self.pieces, self.values)
        printer.names |= {n.uid: str(n.attr) for n in plan.nodes if n.op == "load" and n.attr in ("p", "g")}
        printer.names |= names
        need = reached([self.new[x] for x in stored], names)
        lines = [assigned(plan, let, printer) for let in plan.phases[0].elements if let.node.uid in need]
        lines += [(f"{self.values[x]}.set({printer.of_float(self.new[x])});", "") for x in stored if x != "p"]
        if "p" in stored:
            lines.append((f"return {printer.of_float(self.new['p'])};", ""))
        return with_comments(lines, comment_mark="//")


def _but_weight(names: Iterable[str]) -> list[str]:
    return [x for x in dict.fromkeys(names) if x not in ("p", "g")]


def rule_struct(schedule: Schedule, kernel: str, nonneg: Collection[str]) -> list[str]:
    """The struct of a sweep; `nonneg`: states of which no value is negative."""
    names = (*schedule.sweep.reads, *(s.buffer for s in schedule.sweep.stores))
    rule = _Lines(schedule, nonneg, names, names, NAMES)
    host = rule.scalars
    apart, rows, functions = _functions(rule)
    out = [f"static constexpr int SCALARS = {len(host)}, APART = {apart};"]
    out += [f"static constexpr bool {row};" for row in rows]
    out += [f"const F {', '.join(host)};"] if host else []
    initializers = " : " + ", ".join(f"{name}(scalars[{k}])" for k, name in enumerate(host)) if host else ""
    out += ["", f"explicit {kernel}(const float *{'scalars' if host else ''}){initializers} {{}}"]
    for head, lines in functions:
        out += [*rule.template, f"{head} const {{", *(f"    {x}" for x in lines), "}"]
    return [f"struct {kernel} {{  // {schedule.program.name}", *(f"    {x}" if x else "" for x in out), "};"]


def _functions(rule: _Lines) -> tuple[int, list[str], list[tuple[str, list[str]]]]:
    """Return `APART` of a sweep's struct, its rows of flags, and its functions: (head, lines)."""
    taken = ", ".join(["F p", "F g", *rule.params])
    states = _but_weight(rule.new)
    cut = _cut(rule.new["p"], {x: rule.new[x] for x in states})
    if cut is None:
        flags = ", ".join(["false"] * len(rule.params))
        rows = [f"NEXT[] = {{{flags}}}, ROOT[] = {{{flags}}}"] if flags else []
        return 0, rows, [(f"F step({taken})", rule.of([*states, "p"]))]
    read, apart = cut
    rows = []
    for name, how in (("ROOT", "root"), ("NEXT", "next")):
        flags = ", ".join(str((x, how) in read.values()).lower() for x in rule.values)
        rows.append(f"{name}[] = {{{flags}}}")
    read_back = {uid: f"{rule.values[x]}.{how}()" for uid, (x, how) in read.items()}
    taken_back = ", ".join(["F p", "F g", *(f"const {x}" for x in rule.params)])
    of_weight = f"F weight({taken_back})", rule.of(["p"], read_back)
    return apart, rows, [(f"void states({taken})", rule.of(states)), of_weight]


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


def _reads_of(weight: Node, states: Mapping[int, str]) -> tuple[dict[int, tuple[str, str]], dict[int, Node]]:
    """Return the new states, or their roots, that a weight reads, and the nodes that follow from them."""
    read: dict[int, tuple[str, str]] = {}
    computed: dict[int, Node] = {}
    stack = [weight]
    while stack:
        n = stack.pop()
        if n.uid in computed or n.uid in read:
            continue
        if n.uid in states:
            read[n.uid] = states[n.uid], "next"
        elif n.op == "sqrt" and n.args[0].uid in states:
            read[n.uid] = states[n.args[0].uid], "root"
        else:
            computed[n.uid] = n
            stack.extend(n.args)
    return read, computed


def _cut(weight: Node, states: Mapping[str, Node]) -> tuple[dict[int, tuple[str, str]], int] | None:
    """Return the new states that the weight reads, and for which weights a loop of its own pays (`APART` in sweep.h).

    None where it needs more than them, the gradient and itself.
    """
    by_node = {n.uid: x for x, n in states.items() if n.op not in ("load", "const", "sym")}
    read, computed = _reads_of(weight, by_node)
    if not read or any(n.op == "load" and n.attr not in ("p", "g") for n in computed.values()):
        return None
    work = [n for n in computed.values() if n.space == spaces.elem and n.op != "const"]
    shared = reached(states.values(), ())
    return None if cost(n for n in work if n.uid in shared) > 1 else (read, 2 if cost(work) >= WORTH else 1)


# -- stages


def stage_function(
    schedule: Schedule, kernel: str, nonneg: Collection[str], title: str = "", *, static: bool = False
) -> list[str]:
    """The function of a stage.

    nonneg  states of which no value is negative
    title   a comment above it
    static  True for one of a struct
    """
    reads = schedule.sweep.reads
    stored = [s.buffer for s in triton_text.stored(schedule)] + [t.partials[0].name for t in triton.terms(schedule)]
    stage = _Lines(schedule, nonneg, (*reads, *stored), triton_text.states_of(schedule.program), _OF_STAGES)
    given = [f"F {x}" for x in ("p", "g") if x in reads] + [f"F {x}" for x in (*stage.scalars, *stage.sizes)]
    kind = "F" if "p" in stage.new else "void"
    head = f"{'static ' * static}OPTGEN_INLINE {kind} {kernel}({', '.join([*given, *stage.params])}) {{"
    lines = stage.of([x for x in (*stage.values, "p") if x in stage.new])
    return [*([title] if title else []), *stage.template, head, *(f"    {line}" for line in lines), "}"]


__all__ = ["NAMES", "ValuePrinter", "reached", "rule_struct", "stage_function"]
