"""The text of a rule's kernels, free of any plan: its records for each setting of its flags."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from optgen import passes
from optgen.backends import host, triton, triton_text, wrapper
from optgen.backends.cpp import RESERVED
from optgen.backends.host import Unpack
from optgen.backends.printer import wrapped
from optgen.driver import eager_text, targets
from optgen.driver.pool import Pool
from optgen.driver.project import Maths
from optgen.formats.plan import Plan, Storage
from optgen.ir import node as ir
from optgen.ir.node import Node, Rewriter, postorder
from optgen.ir.program import Buffer, Program, Stage, Step
from optgen.ir.ranges import is_plus
from optgen.lang.spec import Spec
from optgen.lower import is_whole, lower_divided
from optgen.ops import dtypes
from optgen.passes.convert import ARITHMETIC

FILE = "kernels.py"

Flags = tuple[tuple[str, bool], ...]


@dataclass(frozen=True)
class Setting:
    """The step of a rule under one setting of its flags: the names of its kernels, and of its host function.

    whole  states that a plan keeps as a whole, whose fields the tile functions read and store
    """

    flags: Mapping[str, bool]
    step: Step
    kernels: tuple[str, ...]
    host: str
    whole: frozenset[str] = frozenset()


@dataclass(frozen=True)
class RuleKernels:
    """The kernels of a rule; those of settings that differ in scalars alone are one.

    host      the host functions, lines of text
    stages    kernel -> the stage that it is of, first come first served
    """

    settings: tuple[Setting, ...]
    host: tuple[list[str], ...]
    stages: Mapping[str, Stage]


@lru_cache(maxsize=128)
def rule_kernels(spec: Spec, maths: Maths, plan: Plan | None = None) -> RuleKernels:
    """Number and name the kernels of a rule: <rule>, or <rule>_<k> where a step takes several; words of flags after.

    plan  the steps that it divides otherwise, and no others
    """
    scalars = Pool()
    settings: list[Setting] = []
    known: dict[tuple[object, ...], str] = {}
    stages: dict[str, Stage] = {}
    for flags, step, whole in _steps(spec, maths, plan):
        name = targets.function_name(spec, flags)
        # A plan that keeps states of large tensors as a whole may divide the step of small ones too.
        name += "_small" if any(s.flags == flags for s in settings) else ""
        names = []
        for k, stage in enumerate(step.stages):
            wanted = f"{name}_{k + 1}" if step.in_stages else name
            wanted += "_" if wanted in RESERVED else ""  # a rule may be called `signed`
            found = stage.call or known.setdefault(_meaning(step, stage), wanted)
            stages.setdefault(found, stage)
            names.append(found)
        make = partial(host.scalars_function, host_program(step), unpack_of(spec))
        settings.append(Setting(flags, step, tuple(names), scalars.add("scalars", make), whole))
    return RuleKernels(tuple(settings), tuple(scalars.functions), stages)


def _steps(spec: Spec, maths: Maths, plan: Plan | None) -> Iterator[tuple[Mapping[str, bool], Step, frozenset[str]]]:
    """Yield the steps of a rule, each with its flags and the states that are kept as a whole; see `rule_kernels`."""
    for flags in spec.settings():
        step = eager_text.rule_step(spec, flags, maths)
        if plan is None:
            yield flags, step, frozenset()
            continue
        recurrences = targets.recurrences_of(spec, tuple(sorted(flags.items())))
        known = set()
        for small in (False, True):
            storage = plan.storage(spec.present(flags), dtypes.f32, small, recurrences)
            whole = frozenset(name for name, fmt in storage.states.items() if is_whole(fmt))
            if is_divided(storage, step) and whole not in known:
                known.add(whole)
                yield flags, targets.placed(spec, passes.step(lower_divided(spec, flags, storage), maths)), whole


def is_divided(storage: Storage, rule: Step) -> bool:
    """Return True if a plan divides the step of a rule into stages of its own; see `Variant.divided`."""
    return any(map(is_whole, storage.states.values()))


def _meaning(step: Step, stage: Stage) -> tuple[object, ...]:
    """Return a key that two stages share if they do the same, under whatever names of scalars.

    Small work between sweeps is one kernel for all of its level, so its key is that of the level.
    """
    if not stage.is_sweep:
        level = [s for s in step.stages if s.level == stage.level and not s.call]
        return (level.index(stage), *(_stores(s.schedule.program, s) for s in level))
    return _stores(stage.schedule.program, stage)


def _stores(program: Program, stage: Stage) -> tuple[object, ...]:
    number = {let.name: ir.sym(f"${i}") for i, let in enumerate(program.host)}

    def rule(node: Node) -> Node:
        return number.get(node.attr, node) if node.op == "sym" else node

    rewrite = Rewriter(rule)
    return (stage.space, *((s.buffer, rewrite(s.node).uid) for s in stage.schedule.sweep.stores))


def is_single(step: Step) -> bool:
    """Return True if a step is one sweep over elements, whose kernel is free of any plan."""
    (first, *rest) = step.stages
    matrices = any(b.space.name in ("row", "col", "mat") for b in first.schedule.program.buffers)
    return not rest and first.is_sweep and not matrices


def host_program(step: Step) -> Program:
    """The program that a step's host function is generated from."""
    return replace(step.program, host=step.host, host_locals=step.host_locals)


def unpack_of(spec: Spec) -> tuple[Unpack, ...]:
    """The arguments of host functions and the scalars that they are made of."""
    return tuple(Unpack(h.name, h.parts) for h in spec.hypers)


def temp_row(step: Step, b: Buffer) -> str:
    """The record of a value that one stage leaves for later ones."""
    if b.role != "partial":
        return f'Temp("{b.name}", "{b.space.name}")'
    (source,) = {s.space.name for s in step.stages if b.name in {x.name for x in s.schedule.partials}}
    return f'Temp("{b.name}", "{b.space.name}", "{b.reduction}", "{source}")'


def _stage_row(stage: Stage, kernel: str, nonneg: Collection[str]) -> list[str]:
    """The record of a stage, lines of text; `nonneg`: states of which no value is negative."""
    program, sweep = stage.schedule.program, stage.schedule.sweep
    given: dict[str, object] = {}
    space = stage.space.name
    if stage.call:
        (buffer,) = program.buffers
        (call,) = (n for n in postorder(program.roots()) if n.op == "call")
        space, given = "call", {"temps": (buffer.name,), "given": tuple(a.attr for a in call.args[1:])}
    else:
        terms = triton.terms(stage.schedule)
        stored = triton_text.stored(stage.schedule)
        given["temps"] = tuple(b.name for b in program.buffers if b.role in ("temp", "partial") and b.writes)
        given["matrices"] = any(b.space.name in ("row", "col", "mat") for b in program.buffers)
        given["reads"] = sweep.reads
        given["stores"] = tuple(s.buffer for s in stored)
        given["sums"] = tuple((_kind(stage, t), tuple(b.name for b in t.partials)) for t in terms)
        given["extents"] = tuple(triton.sizes(program))
        given["plus"] = tuple(s.buffer for s in stored if is_plus(s.node, nonneg))
        given["picked"] = tuple(s.buffer for s in stored if s.node.op not in ARITHMETIC)
    shown = [f'"{kernel}"', f'"{space}"', str(stage.level), repr(stage.scalars)]
    shown += [f"{key}={value!r}" for key, value in given.items() if value]
    return wrapped("Stage(", ", ".join(shown).split(", "), "),", whole=104, limit=104)


def _kind(stage: Stage, term: triton.Term) -> str:
    """Return how a term is reduced; factors are taken apart for sweeps alone."""
    return term.kind if stage.is_sweep else "max" if term.is_max else "sum"


def header_of(spec: Spec, plan: Plan | None, what: str) -> list[str]:
    """Return the comment at the top of a rule's file, or of what a plan divides otherwise."""
    file = targets.source_name(spec.loc.file)
    under, option = ("", "") if plan is None else (f" · plan {plan.name}", f" --plan {plan.name}")
    return [
        f"# @generated by optgen: edit {file}, not this file.  {spec.name}{under} · {what}",
        "#",
        f"#   spec      {file}:{spec.loc.line}  sha256 {targets.digest(spec.loc.file)}",
        f"#   rebuild   optgen build {spec.name}{option}",
    ]


def record_text(spec: Spec, maths: Maths, plan: Plan | None = None) -> str:
    """The text of generated/<rule>/kernels.py, and of that file of a plan that divides steps; "" if it divides none."""
    made = rule_kernels(spec, maths, plan)
    if not made.settings:
        return ""
    header = header_of(spec, plan, f"kernels, {maths} maths")
    rules = sorted({r for s in made.settings for r in s.step.program.rules})
    header += [f"#   rounding changed by: {', '.join(rules)}"] if rules else []
    nonneg = {s.name for s in spec.states if s.nonneg}
    rows: dict[str, dict[str, Any]] = {}  # of settings with equal steps one
    for s in made.settings:
        names = [f'"{let.name}"' for let in s.step.host]
        row = {
            "scalars": wrapped("scalars=(", names, "),", whole=0, limit=108),
            "host": s.host,
            "temps": [temp_row(s.step, b) for b in s.step.temps],
            "stages": [_stage_row(x, name, nonneg) for x, name in zip(s.step.stages, s.kernels, strict=True)],
            "early": s.step.early,
            "whole": tuple(sorted(s.whole)),
        }
        rows.setdefault(repr(row), {**row, "settings": []})["settings"].append(dict(s.flags))
    return wrapper.render(
        "kernels.py.j2",
        header="\n".join(header),
        scalar_names=host.needs(made.host),
        functions=made.host,
        rules=list(rows.values()),
        has_temps=any(row["temps"] for row in rows.values()),
        strict=maths == "strict",
    )
