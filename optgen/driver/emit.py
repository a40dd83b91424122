"""(spec, plan) -> the files of one generated package, as text: deterministic, no dates, no paths."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from optgen.backends import columns, wrapper
from optgen.base.errors import UserError
from optgen.driver import cpp_text, judge, load, record_text, steps, targets, triton_text
from optgen.driver.plan_formats import PLANS, is_ready
from optgen.driver.project import Maths
from optgen.formats.plan import Plan
from optgen.lang.declare import INPUT
from optgen.lang.spec import Spec

Files = dict[str, str]
"""File name -> text."""


@dataclass(frozen=True)
class Backend:
    """A kind of generated text: the files of a rule and of a plan, of which those without text are left out.

    rule   (rule, maths) -> its files
    plan   (plan, maths, others) -> its files, which take from `others` the codecs that these have too
    names  those of files that only a build with this backend has
    """

    rule: Callable[[Spec, Maths], Files]
    plan: Callable[[Plan, Maths, Sequence[Plan]], Files] = lambda plan, maths, others: {}
    names: tuple[str, ...] = ()


BACKENDS = {
    "triton": Backend(
        lambda spec, maths: {triton_text.FILE: triton_text.rule_text(spec, maths)},
        lambda plan, maths, others: {triton_text.FILE: triton_text.codec_text(plan, maths, others)},
        (triton_text.FILE,),
    ),
    "cpp": Backend(
        lambda spec, maths: {cpp_text.FILE: cpp_text.rule_text(spec, maths)},
        lambda plan, maths, others: {cpp_text.CODECS: cpp_text.codec_text(plan, maths, others)},
        (cpp_text.FILE, cpp_text.CODECS),
    ),
    "reference": Backend(
        lambda spec, maths: {triton_text.STRICT: triton_text.tile_text(spec)},
        lambda plan, maths, others: {
            triton_text.STRICT: triton_text.codec_text(plan, "strict", others, triton_text.STRICT)
        },
    ),
}
"""Name -> backend."""


FINDINGS = "what the lint finds wrong with how a state is kept; constructing an optimizer warns of it."


def emit_plan(spec: Spec, plan: Plan, *, maths: Maths = "fast") -> Files:
    """Return file name -> text of generated/<spec>/<plan>/, which is what the lint finds; {} if it finds nothing."""
    known = is_ready(spec) and comes_with(plan, maths)
    wrong = {} if known else judge.discouraged(spec, targets.cases(spec, plan))
    if not wrong:
        return {}
    lines = [targets.mark(spec.loc.file, f"{spec.name} · plan {plan.name} · the lint"), "# fmt: off", "# ruff: noqa"]
    lines += ["", f"# State -> {FINDINGS}", "DISCOURAGED = {"]
    lines += [*(f'    "{state}": {reason!r},' for state, reason in wrong.items()), "}"]
    return {"__init__.py": columns.python("\n".join(lines) + "\n")}


def class_row(spec: Spec, plans: tuple[str, ...], own: Mapping[str, str]) -> wrapper.ClassRow:
    """Return the row that the wrapper's template needs, without the spec itself."""
    return wrapper.ClassRow(
        name=spec.class_name,
        module=spec.name,
        doc=spec.doc,
        cite=spec.cite,
        source=f"{targets.source_name(spec.loc.file)}",
        digest=targets.digest(spec.loc.file),
        hypers=spec.hypers,
        flags=spec.flags,
        shapes={flag.name: spec.shape_text(flag) for flag in spec.flags},
        plans=plans,
        own=own,
        rule=spec.source.body,
        evaluation=_evaluation(spec),
        inputs=tuple(s.name for s in spec.states if s.trait == INPUT),
        blocks="" if not spec.blocks else "heads" if spec.matrix == "heads" else "rows",
        ascent="" if spec.ascent is None else spec.ascent.class_name,
        ascends=spec.ascends,
    )


def _evaluation(spec: Spec) -> tuple[str, ...]:
    """The author's function as a static method; a state that is off counts as it starts."""
    if spec.evaluation is None:
        return ()
    head, *body = spec.evaluation.text.splitlines()
    name = spec.evaluation.function.__name__
    head = head.replace(f"def {name}(", "def evaluation(", 1)
    optional = {s.name: s.init for s in spec.states if s.when and s.name in spec.evaluation.states}
    for state, init in optional.items():
        head = re.sub(rf"\b{state}\b", f"{state}={None if isinstance(init, str) else init}", head, count=1)
    copies = (f"    {state} = p if {state} is None else {state}" for state, x in optional.items() if x == "param")
    quotes = [k for k, line in enumerate(body) for _ in range(line.count('"""'))]
    at = quotes[1] + 1 if quotes else 0  # below the docstring
    return ("@staticmethod", head, *body[:at], *copies, *body[at:])


def emit_package(spec: Spec, plan: Plan, *, maths: Maths = "fast") -> Files:
    """Path -> text of a package of its own: the class, its rule, one plan, and the plan's package if it is the
    user's."""
    own = {} if comes_with(plan, maths) else plan_files(plan, maths)
    files = rule_files(spec, (plan.name,), {plan.name: f".{PLANS}.{plan.name}"} if own else {}, maths)
    files |= {f"{plan.name}/{name}": text for name, text in emit_plan(spec, plan, maths=maths).items()}
    return files | {f"{PLANS}/{plan.name}/{name}": text for name, text in own.items()}


def comes_with(plan: Plan, maths: Maths) -> bool:
    """Return True if a plan's package comes with this one; that has the codecs of fast maths."""
    return maths == "fast" and is_ready(plan)


def rule_files(spec: Spec, plans: tuple[str, ...], own: Mapping[str, str], maths: Maths) -> Files:
    """Return file name -> text of a rule's files for all plans: the class with its eager reference and records, and
    its text for each other backend."""
    files = {"__init__.py": emit_class(spec, plans, own, maths)}
    for backend in BACKENDS.values():
        files |= backend.rule(spec, maths)
    if spec.ascent is not None:  # its plan moves 16-bit weights right in the mean
        first = emit_package(spec.ascent, load.find_plan("bf16_sr"), maths=maths)
        files |= {f"ascent/{path}": text for path, text in first.items()}
    return {name: text for name, text in files.items() if text}


def findings_text(specs: Iterable[Spec]) -> str:
    """Return the text of what the lint finds wrong with ready-made rules under the ready-made plans."""
    found: dict[str, dict[str, dict[str, list[str]]]] = {}
    for spec, plan in itertools.product(specs, filter(is_ready, load.plans().values())):
        for state, reason in judge.discouraged(spec, targets.cases(spec, plan)).items():
            found.setdefault(plan.name, {}).setdefault(reason, {}).setdefault(state, []).append(spec.name)
    lines = ["# @generated by optgen: `optgen build` writes this file from the specs.", "# fmt: off", "# ruff: noqa"]
    lines += [f"# State -> rules, under {FINDINGS}", "DISCOURAGED = {"]
    for name, reasons in found.items():
        lines += [f'    "{name}": {{']
        for reason, states in reasons.items():
            *first, last = (repr(part) for part in textwrap.wrap(reason, 108, drop_whitespace=False))
            lines += [*(f"        {part}" for part in first)]
            lines += record_text.written(f"{last}: ", {k: tuple(x) for k, x in states.items()}, ",", " " * 8)
        lines += ["    },"]
    return "\n".join([*lines, "}"]) + "\n"


def plan_files(plan: Plan, maths: Maths = "fast", others: Sequence[Plan] = ()) -> Files:
    """Return file name -> text of a plan's package: its record and its codecs, but for those that `others` have."""
    files = {record_text.PLAN: record_text.plan_text(plan, maths)}
    for backend in BACKENDS.values():
        files |= backend.plan(plan, maths, others)
    return files


def emit_class(spec: Spec, plans: tuple[str, ...], own: Mapping[str, str], maths: Maths) -> str:
    """The text of generated/<spec>/__init__.py; `own`: the user's plans and their packages.

    E115 for a class or a plan that is called as something else in this text: both are attributes of its module.
    """
    row = class_row(spec, plans, own)
    doc = "\n    ".join(line.rstrip() for line in row.doc.strip().splitlines()) or f"The rule {row.module}."
    called, functions = steps.matrix_lines(spec, maths)
    kinds, scalars, records = record_text.rule_lines(spec, maths)
    code = compile("\n".join(["import torch", *scalars, *called, *functions, *records]), row.source, "exec")
    modules = {Path(file).stem for file in (triton_text.FILE, triton_text.STRICT)}
    for name in ({row.name, *plans, *modules} & {*kinds, *code.co_names}) | ({row.name, *plans} & modules):
        raise UserError("E115", loc=spec.loc, name=name, why="something else in the generated module has it")
    uses_torch = any("torch." in line for line in functions)
    mark = targets.mark(spec.loc.file, f"{spec.name} · sha256 {row.digest} · rebuild: optgen build {spec.name}")
    kinds += ["Flag", "Hyper", *(["Series"] if any(h.series for h in row.hypers) else [])]
    first = ["from optgen.runtime.sharpness import TwoPhase", f"from .ascent import {row.ascent}"]
    kinds, first = (kinds, first) if row.ascent else ([*kinds, "Optimizer"], [])
    imports = [wrapper.imported(sorted(kinds), "optgen.runtime"), *first, *scalars, *called]
    head = wrapper.render("optim.py.j2", mark=mark, c=row, doc=doc, torch=uses_torch, imports=imports)
    return "\n".join([head[:-1], *functions, *records, *(["", "READY = True"] if is_ready(spec) else [])]) + "\n"


READY_STUB = '''"""The ready-made optimizers: `from optgen.optim import AdamW`."""
# @generated by optgen: `optgen build` writes this file from the specs.'''


def emit_stub(specs: Iterable[Spec], mark: str = READY_STUB) -> str:
    """Return the text of optgen/optim/__init__.pyi: the classes of these specs with their constructors' types."""
    rows = sorted((class_row(spec, ("fp32",), {}) for spec in specs), key=lambda row: row.name)
    return wrapper.render("optim.pyi.j2", classes=rows, mark=mark)


def class_stub(spec: Spec) -> Files:
    """Return the stub beside a class, whose constructor takes `**options`: file name -> text."""
    return {"__init__.pyi": emit_stub([spec], targets.mark(spec.loc.file, f"{spec.name} · types of the constructor"))}
