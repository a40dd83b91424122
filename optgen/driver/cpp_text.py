"""The C++ text of rules and of plans."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from optgen.backends import columns, cpp_codecs, cpp_text
from optgen.driver import kernel_text, targets, triton_text
from optgen.driver.project import Maths
from optgen.formats.plan import Plan
from optgen.lang.spec import Spec

FILE, CODECS = "kernels.h", "codecs.h"
"""The files of a rule, and of a plan."""


def _header(mark: str, structs: Iterable[list[str]]) -> str:
    head = [f"//{mark[1:]}", "// clang-format off"]
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
    return _header(targets.mark(spec.loc.file, f"{spec.name} · cpp, {maths} maths"), structs.values())


@lru_cache(maxsize=256)
def codec_text(plan: Plan, maths: Maths) -> str:
    """Return the text of a plan's C++ codecs."""
    found = list(triton_text.codecs(plan, maths))
    structs = [table] if (table := cpp_codecs.table_lines(codec for _, codec, _, _ in found)) else []
    names = {name for name, _, _, _ in found}
    for name, codec, fmt, doc in found:
        both = fmt is not None and f"{name}_nearest" not in names
        small = [cpp_text.stage_function(s, f"small_{k}", (), static=True) for k, s in enumerate(codec.small, 1)]
        structs += cpp_codecs.codec_structs(codec, name, doc, both, small)
    return _header(targets.mark(plan.loc.file, f"plan {plan.name} · C++ codecs, {maths} maths"), structs)
