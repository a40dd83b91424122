"""The C++ text of rules and of plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

from optgen import passes
from optgen.backends import columns, cpp_codecs, cpp_text
from optgen.driver import kernel_text, plan_formats, targets, triton_text
from optgen.driver.project import Maths
from optgen.formats.plan import Plan
from optgen.ir.node import Node, Rewriter, is_const, op
from optgen.ir.program import Step
from optgen.ir.ranges import Intervals
from optgen.lang.spec import Spec
from optgen.ops.dtypes import i32

FILE, CODECS = "kernels.h", "codecs.h"
"""The files of a rule, and of a plan."""


def _header(mark: str, lines: Iterable[str], structs: Iterable[list[str]]) -> str:
    head = [f"//{mark[1:]}", *lines, "// clang-format off"]
    return columns.cpp("\n".join([*head, *(x for s in structs for x in ("", *s))]) + "\n")


@lru_cache(maxsize=256)
def rule_text(spec: Spec, maths: Maths) -> str:
    """Return the text of generated/<rule>/kernels.h."""
    made = kernel_text.rule_kernels(spec, maths)
    nonneg = {s.name for s in spec.states if s.nonneg}
    structs: dict[str, list[str]] = {}
    # Also of a kernel that is the only one of a step under other flags, which takes a struct.
    single = {
        kernel
        for setting in made.settings
        for kernel in setting.kernels
        if setting.step.stages[0].is_sweep and not setting.step.in_stages
    }
    for setting in made.settings:
        for kernel in setting.kernels:
            stage = made.stages[kernel]
            if kernel in structs or stage.call:
                continue
            if kernel in single:
                structs[kernel] = cpp_text.rule_struct(stage.schedule, kernel, nonneg)
            else:
                title = f"// {'a sweep' if stage.is_sweep else stage.space.name}: {stage.why}"
                structs[kernel] = cpp_text.stage_function(stage.schedule, kernel, nonneg, title)
    return _header(targets.mark(spec.loc.file, f"{spec.name} · cpp, {maths} maths"), (), structs.values())


@lru_cache(maxsize=256)
def codec_text(plan: Plan, maths: Maths, others: Sequence[Plan] = ()) -> str:
    """Return the text of a plan's C++ codecs, with the names of those that stand in the files of `others`."""
    every = list(triton_text.codecs(plan, maths))
    alone = {name for name, codec, _, _ in every if not cpp_codecs.table_lines([codec])}
    known = {name: there for name, there in plan_formats.shared(plan, others).items() if name in alone}
    found = [codec for codec in every if codec[0] not in known]
    structs = [table] if (table := cpp_codecs.table_lines(codec for _, codec, _, _ in found)) else []
    names = {name for name, _, _, _ in every}
    for name, codec, fmt, doc in found:
        both = fmt is not None and f"{name}_nearest" not in names
        codec = codec if maths == "strict" or codec.encode is None else replace(codec, encode=_clamped(codec.encode))
        small = [cpp_text.stage_function(s, f"small_{k}", (), static=True) for k, s in enumerate(codec.small, 1)]
        structs += cpp_codecs.codec_structs(codec, name, doc, both, small)
    head = [f"// from {of}: {there}" + f" as {name}" * (name != there) for name, (of, there) in known.items()]
    return _header(targets.mark(plan.loc.file, f"plan {plan.name} · C++ codecs, {maths} maths"), head, structs)


def _clamped(step: Step) -> Step:
    """Clamp before a difference: max(min(x - b, c - b), 0) * s + (n + o) is max(min(x, c), b) * s + (n + (o - b * s)).

    Of x, b and c that are not negative, modulo 2^32, n of each element and o of each block: 1 to 2 % of AdamW
    int8_split24.  GPUs have one instruction for the difference and both limits.
    """

    def rule(n: Node) -> Node:
        if n.op != "add" or n.dtype is not i32 or [x.op for x in n.args] != ["mul", "add"]:
            return n
        (limits, s), (drawn, o) = (x.args for x in n.args)
        if limits.op != "max" or not is_const(limits.args[1], 0) or limits.args[0].op != "min":
            return n
        low = limits.args[0]
        if [y.op for y in low.args] != ["sub", "sub"]:
            return n
        (x, b), (c, other) = (y.args for y in low.args)
        if b.uid != other.uid or o.space.name != "block" or any(intervals(y)[0] < 0 for y in (x, b, c)):
            return n
        inside = op("mul", op("max", op("min", x, c), b), s)
        return op("add", inside, op("add", drawn, op("sub", o, op("mul", b, s))))

    if len(step.stages) > 1:
        return step
    (stage,) = step.stages
    program = stage.schedule.program
    intervals = Intervals(dict(program.ranges))
    schedule = passes.name(passes.place(passes.share(program.map(Rewriter(rule)))))
    return replace(step, stages=(replace(stage, schedule=schedule),))
