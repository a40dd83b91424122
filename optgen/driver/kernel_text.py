"""The kernels of a rule: a step for each setting of its flags, of which equal stages are one kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from optgen import passes
from optgen.backends.cpp import RESERVED
from optgen.backends.host import Unpack
from optgen.driver import eager_text, targets
from optgen.driver.project import Maths
from optgen.formats.plan import Plan, Storage
from optgen.ir import node as ir
from optgen.ir.node import Node, Rewriter
from optgen.ir.program import Program, Stage, Step
from optgen.lang.spec import Spec
from optgen.lower import is_whole, lower_divided
from optgen.ops import dtypes

Flags = tuple[tuple[str, bool], ...]


@dataclass(frozen=True)
class Setting:
    """The step of a rule under one setting of its flags, and the names of its kernels.

    whole  states that a plan keeps as a whole, whose fields the tile functions read and store
    """

    flags: Mapping[str, bool]
    step: Step
    kernels: tuple[str, ...]
    whole: frozenset[str] = frozenset()


@dataclass(frozen=True)
class RuleKernels:
    """The kernels of a rule; those of settings that differ in scalars alone are one.

    stages  kernel -> the stage that it is of, first come first served
    """

    settings: tuple[Setting, ...]
    stages: Mapping[str, Stage]


@lru_cache(maxsize=128)
def rule_kernels(spec: Spec, maths: Maths, plan: Plan | None = None) -> RuleKernels:
    """Number and name the kernels of a rule: <rule>, or <rule>_<k> where a step takes several; words of flags after.

    plan  the steps that it divides otherwise, and no others
    """
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
        settings.append(Setting(flags, step, tuple(names), whole))
    return RuleKernels(tuple(settings), stages)


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
