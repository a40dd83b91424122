"""(spec, plan) -> the files of one generated package, as text: deterministic, no dates, no paths."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from optgen.backends import columns, wrapper
from optgen.base.errors import UserError
from optgen.driver import cpp_text, judge, load, record_text, steps, targets, triton_text
from optgen.driver.plan_formats import PLANS
from optgen.driver.project import Maths
from optgen.formats.plan import Plan
from optgen.lang.declare import INPUT
from optgen.lang.spec import Spec

Files = dict[str, str]
"""File name -> text."""


@dataclass(frozen=True)
class Backend:
    """A kind of generated text: the files of a rule and of a plan, of which those without text are left out.

    rule  (rule, maths) -> its files
    plan  (plan, maths) -> its files
    """

    rule: Callable[[Spec, Maths], Files]
    plan: Callable[[Plan, Maths], Files] = lambda plan, maths: {}


BACKENDS = {
    "triton": Backend(
        lambda spec, maths: {triton_text.FILE: triton_text.rule_text(spec, maths)},
        lambda plan, maths: {triton_text.FILE: triton_text.codec_text(plan, maths)},
    ),
    "cpp": Backend(
        lambda spec, maths: {cpp_text.FILE: cpp_text.rule_text(spec, maths)},
        lambda plan, maths: {cpp_text.CODECS: cpp_text.codec_text(plan, maths)},
    ),
    "reference": Backend(
        lambda spec, maths: {triton_text.STRICT: triton_text.tile_text(spec)},
        lambda plan, maths: {triton_text.STRICT: triton_text.codec_text(plan, "strict")},
    ),
}
"""Name -> backend."""


def findings_files(spec: Spec, plan: Plan) -> Files:
    """Return file name -> text of generated/<spec>/<plan>/, what the lint finds; {} where it refuses errors."""
    if not plan.discouraged:
        return {}
    wrong = judge.discouraged(spec, targets.cases(spec, plan))
    lines = [targets.mark(spec.loc.file, f"{spec.name} · plan {plan.name} · the lint"), "# fmt: off", "# ruff: noqa"]
    lines += ["", "# State -> what the lint finds wrong with how it is kept; constructing an optimizer warns of it."]
    lines += ["DISCOURAGED = {", *(f'    "{state}": {reason!r},' for state, reason in wrong.items()), "}"]
    return {"__init__.py": columns.python("\n".join(lines) + "\n")}


def class_row(spec: Spec, plans: tuple[str, ...]) -> wrapper.ClassRow:
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
    """Return path -> text of a generated folder that holds one rule under one plan, without its own `__init__.py`."""
    files = {f"{spec.name}/{name}": text for name, text in rule_files(spec, (plan.name,), maths).items()}
    files |= {f"{spec.name}/{plan.name}/{name}": text for name, text in findings_files(spec, plan).items()}
    return files | {f"{PLANS}/{plan.name}/{name}": text for name, text in plan_files(plan, maths).items()}


def rule_files(spec: Spec, plans: tuple[str, ...], maths: Maths) -> Files:
    """Return file name -> text of a rule's files for all plans: the class with its records, and its text for each
    backend."""
    files = {"__init__.py": emit_class(spec, plans, maths)}
    for backend in BACKENDS.values():
        files |= backend.rule(spec, maths)
    if spec.ascent is not None:  # its plan moves 16-bit weights right in the mean
        plan = load.find_plan("bf16_sr")
        files |= {f"ascent/{name}": text for name, text in rule_files(spec.ascent, (plan.name,), maths).items()}
        files |= {f"{PLANS}/{plan.name}/{name}": text for name, text in plan_files(plan, maths).items()}
    return {name: text for name, text in files.items() if text}


def plan_files(plan: Plan, maths: Maths = "fast") -> Files:
    """Return file name -> text of a plan's package: its record and its codecs."""
    files = {record_text.PLAN: record_text.plan_text(plan, maths)}
    for backend in BACKENDS.values():
        files |= backend.plan(plan, maths)
    return files


def emit_class(spec: Spec, plans: tuple[str, ...], maths: Maths) -> str:
    """The text of generated/<spec>/__init__.py.

    E115 for a class or a plan that is called as something else in this text: both are attributes of its module.
    """
    row = class_row(spec, plans)
    doc = "\n    ".join(line.rstrip() for line in row.doc.strip().splitlines()) or f"The rule {row.module}."
    called, functions = steps.matrix_lines(spec, maths)
    kinds, scalars, records = record_text.rule_lines(spec, maths)
    code = compile("\n".join(["import torch", *scalars, *called, *functions, *records]), row.source, "exec")
    modules = {Path(file).stem for file in (triton_text.FILE, triton_text.STRICT)}
    for name in ({row.name, *plans, *modules} & {*kinds, *code.co_names}) | ({row.name, *plans} & modules):
        raise UserError("E115", loc=spec.loc, name=name, why="something else in the generated module has it")
    uses_torch = any("torch." in line for line in functions)
    mark = targets.mark(spec.loc.file, f"{spec.name} · sha256 {row.digest} · rebuild: optgen build")
    kinds += ["Flag", "Hyper", *(["Series"] if any(h.series for h in row.hypers) else [])]
    first = ["from optgen.runtime.sharpness import TwoPhase", f"from .ascent import {row.ascent}"]
    kinds, first = (kinds, first) if row.ascent else ([*kinds, "Optimizer"], [])
    imports = [wrapper.imported(sorted(kinds), "optgen.runtime"), *first, *scalars, *called]
    head = wrapper.render("optim.py.j2", mark=mark, c=row, doc=doc, torch=uses_torch, imports=imports)
    return "\n".join([head[:-1], *functions, *records]) + "\n"


READY_STUB = '''"""The ready-made optimizers: `from optgen.optim import AdamW`."""
# @generated by optgen: `optgen build` writes this file from the specs.'''


def emit_stub(specs: Iterable[Spec], mark: str = READY_STUB) -> str:
    """Return the text of optgen/optim/__init__.pyi: the classes of these specs with their constructors' types."""
    rows = sorted((class_row(spec, ("fp32",)) for spec in specs), key=lambda row: row.name)
    return wrapper.render("optim.pyi.j2", classes=rows, mark=mark)


def class_stub(spec: Spec) -> Files:
    """Return the stub beside a class, whose constructor takes `**options`: file name -> text."""
    return {"__init__.pyi": emit_stub([spec], targets.mark(spec.loc.file, f"{spec.name} · types of the constructor"))}
