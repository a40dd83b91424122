"""The kernels of a rule: a step for each setting of its flags, of which equal stages are one kernel."""

from __future__ import annotations

from collections.abc import Mapping
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


@dataclass(frozen=True)
class Setting:
    """The step of a rule under one setting of its flags, and the names of its kernels."""

    flags: Mapping[str, bool]
    step: Step
    kernels: tuple[str, ...]


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
        for k, stage in enumerate(step.stages):
            wanted = f"{name}_{k + 1}" if step.in_stages else name
            wanted += "_" if wanted in RESERVED else ""  # a rule may be called `signed`
            if stage.call == "whole":
                names.append(steps.matrix_function(spec, stage, maths))
                stages.setdefault(names[-1], stage)
                continue
            found = stage.call or known.setdefault(_meaning(step, stage), wanted)
            stages.setdefault(found, stage)
            names.append(found)
        settings.append(Setting(flags, step, tuple(names)))
    return RuleKernels(tuple(settings), stages)


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


def host_program(step: Step) -> Program:
    """The program that a step's host function is generated from."""
    return replace(step.program, host=step.host, host_locals=step.host_locals)


def unpack_of(spec: Spec) -> tuple[Unpack, ...]:
    """The arguments of host functions and the scalars that they are made of."""
    return tuple(Unpack(h.name, h.parts) for h in spec.hypers)
