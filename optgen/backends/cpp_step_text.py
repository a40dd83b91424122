"""C++ text of the stages of a rule whose step takes several; `runtime/cpu/cpp/steps.h` joins it with a plan's codecs.

A stage is a function of its scalars and its values, for W of them: elements in a sweep, else rows, columns, matrices
or tensors.  Values come as in `cpp_text`: `exp_avg.read()`, `exp_avg.times(c)`, `exp_avg.set(x)`.  What is reduced is
set as well.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from optgen.backends import triton, triton_text
from optgen.backends.cpp import RESERVED, CppPrinter, Phases, assigned, type_of, wanted
from optgen.backends.printer import ATOM, Printer, Text, with_comments
from optgen.ir.node import Node
from optgen.ir.program import Let, Stage, Store
from optgen.ops import dtypes, spaces

_RESERVED = RESERVED | frozenset("All Codec g Loop OPTGEN_INLINE p Product Sweep Value".split())


class _StagePrinter(CppPrinter):
    """A printer of values that a plan keeps.

    values  value -> its parameter; the names of types are those of `kinds`
    pieces  states that are only multiplied
    """

    def __init__(
        self, plan: Phases, values: Mapping[str, str], kinds: Mapping[str, str], pieces: Collection[str]
    ) -> None:
        super().__init__(plan)
        self.values, self.kinds, self.pieces = values, kinds, pieces
        self.spell = {**self.spell, "draw": self._draw}

    def _draw(self, _: Printer, node: Node) -> Text:
        """Random bits of a state that is kept as a whole, whose codes the stage stores."""
        kind, _, width, of = node.attr
        (codes,) = (b.name for b in self.phases.program.buffers if b.owner == of and b.space == spaces.elem)
        more = f", {width}" if kind != "integer" else ""
        return f"{kind}<{self.kinds[codes]}::VALUE{more}>({self.values[codes]}.noise)", ATOM

    def express(self, node: Node) -> Text:
        if node.uid in self.names:
            return super().express(node)
        for c, x in (node.args[:2], node.args[1::-1]) if node.op in ("mul", "fma") else ():
            if x.op == "load" and x.attr in self.pieces:
                given = ", ".join(self._number(a) for a in (c, *node.args[2:]))
                return f"{self.values[x.attr]}.{'plus' if node.op == 'fma' else 'times'}({given})", ATOM
        load = node.args[0] if node.op == "cast" and is_temp(node.args[0]) else node
        if load.op == "load" and load.attr in self.values:
            floats = load is not node or load.dtype is dtypes.f32
            return f"{self.values[load.attr]}.{'read' if floats else 'raw'}()", ATOM
        return super().express(node)

    def _number(self, node: Node) -> str:
        return f"F({self.text(node)})" if node.op == "const" else self.text(node)

    def of_float(self, node: Node) -> str:
        """The text of a number of each element; a code, and a word whose upper half is bf16, as a float of its bits."""
        if node.op == "const" or node.space == spaces.host:
            return f"F({self.text(node)})"
        word = wanted(node) if node.dtype is dtypes.bf16 else node
        text = f"to_int({self.text(word)})" if word.uid in self.raw else self.text(word)
        return text if type_of(word.dtype) == "F" else f"as_float({text})"


def is_temp(node: Node) -> bool:
    """Return True for the load of a value for each element that one stage leaves for the next ones, bf16."""
    return node.op == "load" and node.dtype is dtypes.bf16


def stage_function(stage: Stage, kernel: str, nonneg: Collection[str], whole: Collection[str]) -> list[str]:
    """The function of a stage.

    nonneg  states of which no value is negative
    whole   states that are kept as a whole: their fields come as they are
    """
    schedule = stage.schedule
    sweep, program = schedule.sweep, schedule.program
    states = [b for b in program.buffers if b.role == "state" and b.space == spaces.elem and b.owner not in whole]
    elements = frozenset(b.name for b in states)
    pieces = triton_text.multiplied(schedule, nonneg, elements)
    stored = triton_text.stored(schedule)
    new = {s.buffer: s.node for s in schedule.sweep.stores}
    sums = [term.partials[0].name for term in triton.terms(stage.schedule)]
    names = [x for x in dict.fromkeys((*sweep.reads, *(s.buffer for s in stored), *sums)) if x not in ("p", "g")]
    values = {x: f"{x}_" if x in _RESERVED else x for x in names}
    kinds = {x: f"S{k}" for k, x in enumerate(names)}
    lets = tuple(let for let in sweep.lets if _is_named(let, elements - pieces))
    sizes = [f"extent_{x}" for x in triton.sizes(program)]
    taken = frozenset((*values.values(), *kinds.values(), *sizes))
    kept = tuple(Store(x, n) for x, n in new.items() if x in values or x == "p")
    plan = Phases(replace(schedule, sweep=replace(sweep, lets=lets, stores=kept)), _RESERVED | taken)
    printer = _StagePrinter(plan, values, kinds, pieces)
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
    head.append(f"OPTGEN_INLINE {kind} {kernel}({', '.join(given)}) {{")
    title = f"// {'a sweep' if stage.is_sweep else stage.space.name}: {stage.why}"
    return [title, *head, *(f"    {line}" for line in with_comments(lines, comment_mark="//")), "}"]


def _is_named(let: Let, states: Collection[str]) -> bool:
    """Return True if a line names the value of a let: of loads, what is decoded, and codes."""
    node = let.node
    if node.op != "load":
        return True
    return node.attr in states or (node.dtype is not dtypes.f32 and not is_temp(node))


def whole_struct(name: str, bits: int) -> list[str]:
    """The random bits that a state draws which is kept as a whole; the rule's functions are its codec."""
    return [f"struct {name}_stochastic {{", f"    static constexpr int NOISE = {bits};", "};"]
