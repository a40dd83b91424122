"""The kernels of a rule: a step for each setting of its flags, of which equal stages are one kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from optgen.backends.cpp import RESERVED
from optgen.backends.host import Unpack
from optgen.driver import steps, targets
from optgen.driver.project import Maths
from optgen.ir import node as ir
from optgen.ir.node import Node, Rewriter
from optgen.ir.program import Program, Stage, Step
from optgen.lang.spec import Spec
from optgen.runtime.records import join


@dataclass(frozen=True)
class Setting:
    """The step of a rule under one setting of its flags.

    kernels  the name of each stage's kernel
    levels   the level of each stage (optgen.runtime.records.join.levels): small work of one level is one launch
    """

    flags: Mapping[str, bool]
    step: Step
    kernels: tuple[str, ...]
    levels: tuple[int, ...]


@dataclass(frozen=True)
class RuleKernels:
    """The kernels of a rule; those of settings that differ in scalars alone are one.

    stages  kernel -> the stage that it is of, first come first served
    """

    settings: tuple[Setting, ...]
    stages: Mapping[str, Stage]


@lru_cache(maxsize=128)
def rule_kernels(spec: Spec, maths: Maths) -> RuleKernels:
    """Number and name the kernels of a rule: <rule>, or <rule>_<k> where a step takes several; words of flags after."""
    settings: list[Setting] = []
    known: dict[tuple[object, ...], str] = {}
    stages: dict[str, Stage] = {}
    for flags, step, tail in steps.kernel_steps(spec, maths):
        name = targets.function_name(spec, flags) + tail
        names = []
        levels = _levels(step)
        for k, stage in enumerate(step.stages):
            wanted = f"{name}_{k + 1}" if step.in_stages else name
            wanted += "_" if wanted in RESERVED else ""  # a rule may be called `signed`
            if stage.call == "whole":
                names.append(steps.matrix_function(spec, stage, maths))
                stages.setdefault(names[-1], stage)
                continue
            found = stage.call or known.setdefault(_meaning(step, levels, k), wanted)
            stages.setdefault(found, stage)
            names.append(found)
        settings.append(Setting(flags, step, tuple(names), levels))
    return RuleKernels(tuple(settings), stages)


def _levels(step: Step) -> tuple[int, ...]:
    """Return the level of each stage, as the runtime derives it from the stages' records."""

    def stored(stage: Stage) -> list[str]:
        return [b.name for b in stage.schedule.program.buffers if b.writes and b.space.name == "model"]

    return tuple(
        join.levels(("call" if s.call else s.space.name, s.schedule.sweep.reads, stored(s)) for s in step.stages)
    )


def _meaning(step: Step, levels: Sequence[int], k: int) -> tuple[object, ...]:
    """Return a key that two stages share if they do the same, under whatever names of scalars; `k`: the stage's number.

    Small work between sweeps is one kernel for all of its level, so its key is that of the level.
    """
    stage = step.stages[k]
    if not stage.is_sweep:
        level = [s for s, at in zip(step.stages, levels, strict=True) if at == levels[k] and not s.call]
        return (level.index(stage), *(_stores(s.schedule.program, s) for s in level))
    return _stores(stage.schedule.program, stage)


def _stores(program: Program, stage: Stage) -> tuple[object, ...]:
    number = {let.name: ir.sym(f"${i}") for i, let in enumerate(program.host)}

    def rule(node: Node) -> Node:
        return number.get(node.attr, node) if node.op == "sym" else node

    rewrite = Rewriter(rule)
    return (stage.space, *((s.buffer, rewrite(s.node).uid) for s in stage.schedule.sweep.stores))


def host_program(step: Step) -> Program:
    """The program that a step's host function is generated from."""
    return replace(step.program, host=step.host, host_locals=step.host_locals)


def unpack_of(spec: Spec) -> tuple[Unpack, ...]:
    """The arguments of host functions and the scalars that they are made of."""
    return tuple(Unpack(h.name, h.parts) for h in spec.hypers)
