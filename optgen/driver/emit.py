"""(spec, plan) -> the files of one generated package, as text: deterministic, no dates, no paths."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import optgen
from optgen import passes
from optgen.backends import host, reference, triton, triton_stages, wrapper
from optgen.driver import cpp_text, eager_text, explain, judge, kernel_text, record_text, targets, triton_text
from optgen.driver.eager_text import PLANS, is_ready
from optgen.driver.pool import Pool, replaced
from optgen.driver.project import Maths
from optgen.driver.record_text import Name, written
from optgen.driver.targets import Case
from optgen.formats.plan import Plan
from optgen.ir.node import postorder
from optgen.ir.program import Buffer, Program, Stage, Step
from optgen.lang.spec import Spec
from optgen.lower import lower
from optgen.runtime import records
from optgen.runtime.records import Temp

FILES = {"triton": ("triton_kernels.py", "triton.py"), "cpp": ("kernels.cpp",)}
"""The files that each backend beside the reference adds to the packages of rules, of plans and of the two."""


@dataclass(frozen=True)
class Compiled:
    """One case through the passes; `fast` in the maths that was asked for."""

    spec: Spec
    case: Case
    program: Program
    fast: Step

    @cached_property
    def strict(self) -> Step:
        """The step in strict maths."""
        return targets.placed(self.spec, passes.step(self.program, "strict"))


@dataclass
class Functions:
    """Triton functions of steps that take several stages: of equal ones the first is kept, and called by all.

    tiles, limits, warps, dense    of the kernels that are kept; see triton_stages.Kernels
    """

    pool: Pool
    tiles: dict[str, int] = field(default_factory=dict)
    limits: dict[str, int | None] = field(default_factory=dict)
    warps: dict[str, int] = field(default_factory=dict)
    dense: dict[str, dict[str, int]] = field(default_factory=dict)

    def add(self, step: Step, name: str, source: str, under_at: Sequence[str] | None = None) -> dict[str, str]:
        """Print a step; its stages' kernels -> the names under which they stand.

        under_at  the lines under the name @, where they are known already
        """
        found = triton_stages.kernels(step, name, source)
        # Lines are wrapped by the lengths of names: functions are compared as they would be under one short name.
        compared = triton_stages.kernels(step, "@", source).lines if under_at is None else under_at
        renamed: dict[str, str] = {}
        for lines, same in zip(_units(found.lines), _units(compared), strict=True):
            own, short = _defined(lines), _defined(same)
            kept = {x.replace(name, "@", 1): y for x, y in renamed.items()} | {short: "@"}
            marker = replaced("\n".join(same), kept)
            renamed[own] = self.pool.keep(marker, own, replaced("\n".join(lines), renamed).split("\n"))
            renamed[f"{own}_flat"] = f"{renamed[own]}_flat"
        self.tiles |= {renamed[key]: value for key, value in found.tiles.items()}
        self.limits |= {renamed[key]: value for key, value in found.limits.items()}
        self.warps |= {renamed[key]: value for key, value in found.warps.items()}
        self.dense |= {renamed[key]: value for key, value in found.dense.items()}
        stages = [f"{name}_{k + 1}" for k in range(len(step.stages))]
        return {stage: renamed.get(stage, stage) for stage in stages}


def _units(lines: Sequence[str]) -> list[list[str]]:
    """The functions of a text one by one; a kernel and its twin for tensors of any shape are one."""
    out: list[list[str]] = []
    for part in re.split(r"^(?=@triton\.jit)", "\n".join(lines), flags=re.MULTILINE)[1:]:
        unit = part.rstrip("\n").split("\n")
        if out and _defined(unit) == f"{_defined(out[-1])}_flat":
            out[-1] += ["", "", *unit]
        else:
            out.append(unit)
    return out


def _defined(unit: Sequence[str]) -> str:
    """The first function's name."""
    return unit[1].removeprefix("def ").split("(")[0]


def compile_case(spec: Spec, case: Case, maths: Maths = "fast") -> Compiled:
    """Lower one case and run the passes of the kernels' maths."""
    program = lower(spec, case.flags, case.storage)
    pieces = passes.cut(program)
    fast = targets.placed(spec, passes.step(program, maths, pieces=pieces))
    return Compiled(spec, case, program, fast)




def is_divided(plan: Plan, case: Case, rule: Step) -> bool:
    """Return True if a plan divides the step of a rule into stages of its own; see `Variant.divided`."""
    factored = any(f.space != "elem" for fmt in case.storage.states.values() for f in fmt.fields().values())
    return factored or (not plan.read_back and bool(rule.early))


def header(spec: Spec, plan: Plan, backend: str, compiled: list[Compiled], maths: Maths) -> str:
    """The comment at the top of a generated file: what it is, what to edit, what it stores within what bound."""
    command = f"optgen build {spec.name} --plan {plan.name}"
    spec_file, plan_file = targets.source_name(spec.loc.file), targets.source_name(plan.loc.file) if plan.loc else ""
    lines = [
        f"# @generated by optgen: edit {spec_file}, not this file.  {spec.name} · plan {plan.name} · {backend}",
        "#",
        f"#   spec      {spec_file}:{spec.loc.line}  sha256 {targets.digest(spec.loc.file)}",
    ]
    if plan.loc:
        lines.append(f"#   plan      {plan_file}:{plan.loc.line}  sha256 {targets.digest(plan.loc.file)}")
    lines += [f"#   rebuild   {command}", f"#   explain   optgen explain {spec.name} --plan {plan.name}", "#"]
    first = next((c for c in compiled if c.case.param.torch == "bfloat16" and not c.case.small), compiled[0])
    lines += [f"#   {line}".rstrip() for line in explain.storage_lines(explain.memory(spec, first.case.storage))]
    most = max(compiled, key=lambda c: (not c.case.small, c.case.param == first.case.param, len(c.fast.sweeps)))
    read, written = most.fast.traffic
    count = len(most.fast.sweeps)
    lines.append(
        f"#   traffic   {read + written:g} B per {most.case.param.torch} parameter and step: "
        + ("1 sweep, no temporaries" if count == 1 else f"{count} sweeps")
    )
    if backend in ("triton", "cpp"):
        rules = sorted({r for c in compiled for r in c.fast.program.rules})
        lines.append(f"#   maths     {maths}" + (f"; rounding changed by: {', '.join(rules)}" if rules else ""))
    return "\n".join(lines)


def emit_plan(
    spec: Spec, plan: Plan, *, maths: Maths = "fast", cases: Iterable[Case] | None = None
) -> dict[str, str]:
    """File name -> text of generated/<spec>/<plan>/.  `cases`: those to generate, all of them by default."""
    compiled = [compile_case(spec, c, maths) for c in (targets.cases(spec, plan) if cases is None else cases)]
    scalars, kernels = Pool(), Pool()
    cpp_kernels = cpp_text.Kernels()
    source = f"{targets.source_name(spec.loc.file)}"
    rows: dict[str, dict[str, Any]] = {}
    whole, functions = Pool(), Functions(kernels)  # Triton's, of steps that take several stages
    names: dict[str, str] = {}  # of stages' kernels: of equal ones the first one's
    printed: dict[int, str] = {}  # the kernels of steps that are one, by their schedules: settings of flags share them
    helpers: set[str] = set()
    memory: dict[str, tuple[float, ...]] = {}  # tables that kernels read from there
    numbers: dict[str, list[str]] = {}  # which of them, by variant
    unpack = kernel_text.unpack_of(spec)
    for c in compiled:
        wanted = targets.case_name(spec, c.case)
        rule = kernel_text.setting(spec, maths, c.case.flags).step
        own = c.fast.in_stages and is_divided(plan, c.case, rule)
        programs = [s.schedule.program for s in c.fast.stages if not s.call and own]
        if read := triton.in_memory(programs):
            numbers[wanted] = list(read)
            memory |= read
        # Strict and fast maths hoist different scalars: the runtime passes each backend its own.
        function = partial(host.scalars_function, kernel_text.host_program(c.fast), unpack)
        if c.fast.in_stages and not own:
            # The stages are those of the rule.
            rows[wanted] = {"kernel": cpp_kernels.add(spec, c.case, maths, c.fast, wanted, rule)}
            continue
        fast_host = scalars.add("kernel_scalars", function)
        if c.fast.in_stages:
            lines = triton_stages.kernels(c.fast, "@", source).lines
            kernel_name, new = whole.name(wanted, lines, [let.name for let in c.fast.host])
            if new:
                names |= functions.add(c.fast, kernel_name, source, lines)
                helpers |= set(triton_stages.needs(c.fast))
                cpp_kernels.add(spec, c.case, maths, c.fast, kernel_name)
            rows[wanted] = _kernels(c.fast, kernel_name, fast_host, names)
            continue
        (only,) = c.fast.stages
        kernel_name = printed.get(id(only.schedule), "")
        if not kernel_name:
            kernel_name = printed[id(only.schedule)] = cpp_kernels.add(spec, c.case, maths, c.fast, wanted)
        rows[wanted] = _kernels(c.fast, kernel_name, fast_host, names)
    scalar_names = host.needs(scalars.functions)
    head = {b: header(spec, plan, b, compiled, maths) for b in ("tables", "triton", "cpp")}
    files = {
        "__init__.py": wrapper.render(
            "plan.py.j2",
            header=head["tables"],
            scalar_names=scalar_names,
            discouraged=judge.discouraged(spec, [c.case for c in compiled]),
            functions=scalars.functions,
            kernels=list(written("KERNELS = ", rows)),
            records=[name for name in ("Stage", "Temp") if any(name.lower() + "s" in row for row in rows.values())],
        ),
        "kernels.cpp": wrapper.render(
            "cpp.cpp.j2",
            header=re.sub("^#", "//", head["cpp"], flags=re.M),
            include="stages.h" if cpp_kernels.steps.functions else "optgen.h",
            kernels=cpp_text.texts(plan, maths, cpp_kernels),
        ),
    }
    if kernels.functions:
        files["triton_kernels.py"] = wrapper.render(
            "triton.py.j2",
            header=head["triton"],
            helpers=sorted(helpers),
            kernels=kernels.functions,
            tiles=functions.tiles,
            registers=functions.limits,
            warps=functions.warps,
            dense=functions.dense,
            numbers=numbers,
            memory=[line for name, x in sorted(memory.items()) for line in reference.listed(name, x)],
        )
    return files


def _kernels(step: Step, kernel: str, function: str, names: Mapping[str, str]) -> dict[str, Any]:
    """The kernels of a variant: see `Variant`.  `names`: stages' kernels, of equal ones the first one's."""
    scalars = tuple(let.name for let in step.host)
    found: dict[str, Any] = dict(kernel=kernel, kernel_scalars=scalars, kernel_host=Name(function))
    if step.in_stages:
        found |= dict(temps=tuple(_temp(step, b) for b in step.temps))
        found |= dict(stages=tuple(_stage(s, names[f"{kernel}_{k + 1}"]) for k, s in enumerate(step.stages)))
    return found


def _temp(step: Step, b: Buffer) -> Temp:
    if b.role != "partial":
        return Temp(b.name, b.space.name)
    (source,) = {s.space.name for s in step.stages if b.name in {x.name for x in s.schedule.partials}}
    return Temp(b.name, b.space.name, b.reduction, source)


def _stage(stage: Stage, kernel: str) -> records.Stage:
    program = stage.schedule.program
    if stage.call:
        (buffer,) = program.buffers
        (call,) = (n for n in postorder(program.roots()) if n.op == "call")
        given = tuple(a.attr for a in call.args[1:])
        return records.Stage(stage.call, "call", stage.level, stage.scalars, (buffer.name,), given=given)
    temps = tuple(b.name for b in program.buffers if b.role in ("temp", "partial") and b.writes)
    matrices = any(b.space.name in ("row", "col", "mat") for b in program.buffers)
    return records.Stage(kernel, stage.space.name, stage.level, stage.scalars, temps, matrices, program.block)


def class_row(spec: Spec, plans: tuple[str, ...], own: Mapping[str, str]) -> wrapper.ClassRow:
    """Return the row that the wrapper's template needs, without the spec itself."""
    hypers = tuple(
        wrapper.HyperRow(
            h.name,
            h.default,
            tuple((k, float(v)) for k in ("ge", "gt", "le", "lt") if (v := getattr(h, k)) is not None),
            h.parts,
        )
        for h in spec.hypers
    )
    flags = tuple(
        wrapper.FlagRow(f.name, f.default, f.nonzero, f.needs, f.excludes, spec.shape_text(f), f.every)
        for f in spec.flags
    )
    defaults = {d: p if p in plans else plans[0] for d, p in targets.DEFAULT_PLAN.items()}
    return wrapper.ClassRow(
        name=spec.class_name,
        module=spec.name,
        doc=spec.doc,
        cite=spec.cite,
        source=f"{targets.source_name(spec.loc.file)}",
        digest=targets.digest(spec.loc.file),
        hypers=hypers,
        flags=flags,
        plans=plans,
        own=own,
        default_plan=defaults,
        rule=spec.source.body,
        rebuild=f"optgen build {spec.name}",
        evaluation=_evaluation(spec),
        blocks=spec.blocks,
    )


def _evaluation(spec: Spec) -> tuple[str, ...]:
    """The author's function as a static method."""
    if spec.evaluation is None:
        return ()
    head, *body = spec.evaluation.text.splitlines()
    name = spec.evaluation.function.__name__
    return ("@staticmethod", head.replace(f"def {name}(", "def evaluation(", 1), *body)


def emit_package(
    spec: Spec, plan: Plan, *, maths: Maths = "fast", cases: Iterable[Case] | None = None
) -> dict[str, str]:
    """Path -> text of a package of its own: the class, its rule, one plan, and the plan's package if it is the
    user's."""
    own = {} if comes_with(plan, maths) else plan_files(plan, maths)
    files = rule_files(spec, (plan.name,), {plan.name: f".{PLANS}.{plan.name}"} if own else {}, maths)
    files |= {f"{plan.name}/{name}": text for name, text in emit_plan(spec, plan, maths=maths, cases=cases).items()}
    return files | {f"{PLANS}/{plan.name}/{name}": text for name, text in own.items()}


def comes_with(plan: Plan, maths: Maths) -> bool:
    """Return True if a plan's package comes with this one; that has the codecs of fast maths."""
    return maths == "fast" and is_ready(plan)


def rule_files(spec: Spec, plans: tuple[str, ...], own: Mapping[str, str], maths: Maths) -> dict[str, str]:
    """Return file name -> text of what a rule has for all plans: the class, its records, its eager text."""
    device = triton_text.rule_text(spec, maths)
    return {
        "__init__.py": emit_class(spec, plans, own),
        record_text.RULE: record_text.rule_text(spec),
        eager_text.FILE: eager_text.rule_text(spec),
        kernel_text.FILE: kernel_text.record_text(spec, maths),
        **({triton_text.FILE: device} if device else {}),
    }


def plan_files(plan: Plan, maths: Maths = "fast") -> dict[str, str]:
    """Return file name -> text of a plan's package: its record and its codecs."""
    return {
        record_text.PLAN: record_text.plan_text(plan),
        eager_text.FILE: eager_text.codec_text(plan),
        triton_text.FILE: triton_text.codec_text(plan, maths),
    }


def emit_class(spec: Spec, plans: tuple[str, ...], own: Mapping[str, str]) -> str:
    """The text of generated/<spec>/__init__.py; `own`: the user's plans and their packages."""
    row = class_row(spec, plans, own)
    doc = "\n    ".join(line.rstrip() for line in row.doc.strip().splitlines()) or f"The rule {row.module}."
    return wrapper.render("optim.py.j2", c=row, doc=doc)


def emit_stub(specs: Iterable[Spec]) -> str:
    """Return the text of optgen/optim/__init__.pyi: the classes of these specs with their constructors' types."""
    rows = sorted((class_row(spec, ("fp32",), {}) for spec in specs), key=lambda row: row.name)
    return wrapper.render("optim.pyi.j2", classes=rows)


VERSION = optgen.__version__
