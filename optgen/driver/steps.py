"""The steps of a rule alone, before it meets a plan, and the functions of whole matrices that they call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial

from optgen import passes
from optgen.backends import columns, matrices, wrapper
from optgen.driver import targets
from optgen.driver.pool import FunctionPool
from optgen.driver.project import Maths
from optgen.ir.program import Stage, Step
from optgen.lang.spec import Spec
from optgen.lower import lower_rule


@lru_cache(maxsize=4096)
def _rule(spec: Spec, flags: tuple[tuple[str, bool], ...], maths: Maths) -> Step:
    return targets.placed(spec, passes.step(lower_rule(spec, dict(flags)), maths))


def rule_step(spec: Spec, flags: Mapping[str, bool], maths: Maths = "strict") -> Step:
    """The step of a rule alone under a setting of its flags."""
    return _rule(spec, tuple(sorted(flags.items())), maths)


def kernel_steps(spec: Spec, maths: Maths) -> Iterator[tuple[Mapping[str, bool], Step, str]]:
    """Yield the steps of a rule, each with its flags and what its name ends in.

    Of a step that reads new states back there is a second one that does not, where a plan may not let it: one of them
    may be kept as a whole, which is known last, or relative to a state that is not read back.
    """
    nonneg = {s.name for s in spec.states if s.nonneg}
    for flags in spec.settings():
        step = rule_step(spec, flags, maths)
        yield flags, step, ""
        apart = any((x in step.early) != (base in step.early) for x, base in step.program.together)
        if apart or not nonneg.isdisjoint(step.early):
            late = replace(lower_rule(spec, flags), kept=())
            yield flags, targets.placed(spec, passes.step(late, maths)), "_late"


@lru_cache(maxsize=128)
def _pool(spec: Spec, maths: Maths) -> FunctionPool:
    """The functions of whole matrices of a rule, in strict maths and in that of its kernels; equal ones stand once."""
    pool = FunctionPool()
    steps = [(flags, rule_step(spec, flags)) for flags in spec.settings()]
    for flags, step in (*steps, *((flags, step) for flags, step, _ in kernel_steps(spec, maths))):
        for stage in step.stages:
            if stage.call == "whole":
                make = partial(matrices.matrix_function, stage.schedule)
                pool.add(targets.function_name(spec, flags, "matrices"), make, scalars_of(stage))
    return pool


def scalars_of(stage: Stage) -> list[str]:
    return [let.name for let in stage.schedule.program.host]


def matrix_function(spec: Spec, stage: Stage, maths: Maths = "fast") -> str:
    """Return the name of the function of a stage of whole matrices."""
    return _pool(spec, maths).name("", matrices.matrix_function(stage.schedule, "@"), scalars_of(stage))[0]


def matrix_lines(spec: Spec, maths: Maths) -> tuple[list[str], list[str]]:
    """Return the imports, but for torch, of a rule's functions of whole matrices, and their text."""
    functions = _pool(spec, maths).functions
    if not functions:
        return [], []
    names = matrices.needs(functions)
    imports = [wrapper.imported(names, "optgen.runtime.reference.matrices")] if names else []
    text = ["", "", "# Functions of whole matrices, which torch computes between sweeps.", *functions[0]]
    text += [x for function in functions[1:] for x in ("", "", *function)]
    return imports, columns.python("\n".join(text)).split("\n")
