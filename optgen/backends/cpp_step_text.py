"""C++ text of the stages of a rule whose step takes several; `runtime/cpu/cpp/steps.h` joins it with a plan's codecs.

A stage is a function of its scalars and its values, for W of them: elements in a sweep, else rows, columns, matrices
or tensors.  Values come as in `cpp_text`: `exp_avg.read()`, `exp_avg.times(c)`, `exp_avg.set(x)`.  What is reduced is
set as well.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from optgen.backends import triton, triton_text
from optgen.backends.cpp import RESERVED, Phases, assigned
from optgen.backends.cpp_text import ValuePrinter
from optgen.backends.printer import with_comments
from optgen.ir.program import Let, Schedule, Store
from optgen.ops import spaces

_RESERVED = RESERVED | frozenset("All Codec g Loop OPTGEN_INLINE p Product Sweep Value".split())


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
    values = {x: f"{x}_" if x in _RESERVED else x for x in names}
    kinds = {x: f"S{k}" for k, x in enumerate(names)}
    lets = tuple(let for let in sweep.lets if _is_named(let, elements - pieces))
    sizes = [f"extent_{x}" for x in triton.sizes(program)]
    taken = frozenset((*values.values(), *kinds.values(), *sizes))
    kept = tuple(Store(x, n) for x, n in new.items() if x in values or x == "p")
    plan = Phases(replace(schedule, sweep=replace(sweep, lets=lets, stores=kept)), _RESERVED | taken)
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
