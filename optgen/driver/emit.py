"""(spec, plan) -> the files of one generated package, as text: deterministic, no dates, no paths."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import optgen
from optgen import passes
from optgen.backends import cpp, cpp_stages, host, reference, triton, triton_stages, wrapper
from optgen.driver import eager_text, explain, judge, kernel_text, targets
from optgen.driver.pool import Pool, replaced
from optgen.driver.project import Maths
from optgen.driver.targets import Case
from optgen.formats.plan import Plan, field_names
from optgen.ir.program import Program, Stage, Step
from optgen.lang.spec import Spec
from optgen.lower import lower, matrix_of, needs_matrix
from optgen.ops import spaces

FILES = {"triton": "triton_kernels.py", "cpp": "kernels.cpp"}
"""The file that each backend beside the reference adds to a plan's package."""


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


def _nodes(program: Program) -> Any:
    from optgen.ir.node import postorder

    return postorder(program.roots())


def _has_matrices(program: Program, within: Collection[str] = spaces.SMALL) -> bool:
    """Whether a step sees matrices: in values, in what it leaves as it is, or in a function of them.

    within  the spaces that say so
    """
    small = (x.space.name in within for x in (*_nodes(program), *program.buffers))
    return any(small) or any(n.op == "call" for n in _nodes(program))


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
    lines += [f"#   {line}".rstrip() for line in explain.storage_lines(spec, first.case.storage)]
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
    spec: Spec, plan: Plan, *, maths: Maths = "fast", cases: Iterable[Case] | None = None, above: str = "..."
) -> dict[str, str]:
    """File name -> text of generated/<spec>/<plan>/.

    cases  those to generate, all of them by default
    above  leads from the package to the folder with the codecs of a user's plans
    """
    compiled = [compile_case(spec, c, maths) for c in (targets.cases(spec, plan) if cases is None else cases)]
    scalars, kernels = Pool(), Pool()
    cpp_kernels: dict[str, list[str]] = {}  # under the names of the Triton kernels that do the same
    cpp_parts = Pool()  # of steps that take several stages
    cpp_steps: dict[str, list[str]] = {}
    source = f"{targets.source_name(spec.loc.file)}"
    rows: list[dict[str, Any]] = []
    whole, functions = Pool(), Functions(kernels)  # Triton's, of steps that take several stages
    tiles, limits = functions.tiles, functions.limits
    names: dict[str, str] = {}  # of stages' kernels: of equal ones the first one's
    printed: dict[int, str] = {}  # the kernels of steps that are one, by their schedules: settings of flags share them
    helpers: set[str] = set()
    memory: dict[str, tuple[float, ...]] = {}  # tables that kernels read from there
    numbers: dict[str, list[str]] = {}  # which of them, by variant
    unpack = kernel_text.unpack_of(spec)
    for c in compiled:
        wanted = targets.case_name(spec, c.case)

        def kernel(name: str, c: Compiled = c) -> list[str]:
            return triton.kernel(c.fast.stages[0].schedule, name, source)

        if read := triton.in_memory([s.schedule.program for s in c.fast.stages if not s.call]):
            numbers[wanted] = list(read)
            memory |= read
        # Strict and fast maths hoist different scalars: the runtime passes each backend its own.
        rule = eager_text.rule_step(spec, c.case.flags)
        strict, fast = (partial(host.scalars_function, kernel_text.host_program(x), unpack) for x in (rule, c.fast))
        strict_host, fast_host = scalars.add("host_scalars", strict), scalars.add("kernel_scalars", fast)
        if c.fast.in_stages:
            lines = triton_stages.kernels(c.fast, "@", source).lines
            kernel_name, new = whole.name(wanted, lines, [let.name for let in c.fast.host])
            if new:
                names |= functions.add(c.fast, kernel_name, source, lines)
                helpers |= set(triton_stages.needs(c.fast))
                cpp_steps[kernel_name] = _cpp_step(c.fast, kernel_name, source, cpp_parts)
            row = _variant_row(spec, c, wanted, strict_host, fast_host, kernel_name)
            rows.append(row | {"stages": _stage_rows(c.fast, kernel_name, names)})
            continue
        (only,) = c.fast.stages
        kernel_name = printed.get(id(only.schedule), "")
        if not kernel_name:
            kernel_name = kernels.add(wanted, kernel, [let.name for let in c.fast.host])
            printed[id(only.schedule)] = kernel_name
            tiles[kernel_name] = triton.tile_elements(only.schedule)
            limits[kernel_name] = triton.registers(only.schedule)
            if kernel_name not in cpp_kernels:
                cpp_kernels[kernel_name] = cpp.kernel(only.schedule, kernel_name, source)
        rows.append(_variant_row(spec, c, wanted, strict_host, fast_host, kernel_name))
    scalar_names = host.needs(scalars.functions)
    head = {b: header(spec, plan, b, compiled, maths) for b in ("tables", "triton", "cpp")}
    single = [c.fast.stages[0].schedule for c in compiled if not c.fast.in_stages]
    return {
        "__init__.py": wrapper.render(
            "plan.py.j2",
            header=head["tables"],
            scalar_names=scalar_names,
            small_numel=plan.small_numel,
            codecs=eager_text.codec_module(plan, above),
            discouraged=judge.discouraged(spec, [c.case for c in compiled]),
            functions=scalars.functions,
            variants=rows,
        ),
        "triton_kernels.py": wrapper.render(
            "triton.py.j2",
            header=head["triton"],
            helpers=sorted({*(triton.helpers(single) if single or not helpers else ()), *helpers}),
            kernels=kernels.functions,
            tiles=tiles,
            registers=limits,
            warps=functions.warps,
            dense=functions.dense,
            numbers=numbers,
            memory=[line for name, x in sorted(memory.items()) for line in reference.listed(name, x)],
        ),
        "kernels.cpp": wrapper.render(
            "cpp.cpp.j2",
            header=re.sub("^#", "//", head["cpp"], flags=re.M),
            include="stages.h" if cpp_steps else "optgen.h",
            kernels=[*cpp_kernels.values(), *cpp_parts.functions, *cpp_steps.values()],
        ),
    }


def _cpp_step(step: Step, name: str, source: str, parts: Pool) -> list[str]:
    """The C++ struct of a step that takes several stages; equal stages are printed once, into `parts`."""
    names = []
    for k, stage in enumerate(step.stages):
        if stage.call:
            continue
        wanted = f"{name}_{k + 1}"
        scalars = [let.name for let in stage.schedule.program.host]
        names.append(parts.add(wanted, partial(cpp_stages.stage, step, k, source=source), scalars))
    return cpp_stages.whole(step, name, names)


def _nonneg(spec: Spec, case: Case) -> set[str]:
    """Names of the fields of which no number may be negative, as floats; a nonnegative state's first one stands for
    the state."""
    found = set()
    for state in spec.present(case.flags):
        fields = case.storage.states[state.name].fields()
        names = field_names(state.name, fields)
        found |= {names[suffix] for suffix, f in fields.items() if f.nonneg and f.dtype.is_float}
        found |= {next(iter(names.values()))} if state.nonneg else set()
    return found


def _held(case: Case, name: str) -> str:
    """What a field's integers may be, as arguments of its row."""
    f = case.storage.fields()[name]
    if f.most is None:
        return ""
    return f", least={f.least}, most={f.most}" + (f", low={f.low:#x}" if f.low else "")


def _variant_row(
    spec: Spec, c: Compiled, name: str, strict_host: str, fast_host: str, kernel: str
) -> dict[str, Any]:
    program = c.program
    rule = eager_text.rule_step(spec, c.case.flags)
    elements = {s.name for s in spec.states if s.space == spaces.elem}
    matrix = matrix_of(spec, c.case.flags, c.case.storage)
    nonneg = _nonneg(spec, c.case)
    fields = []
    for b in program.buffers:
        if b.role in ("param", "grad"):
            continue
        zero, per = c.case.storage.fields()[b.name].zero, f"per={b.space.size or 1}"
        if b.dtype.packed:
            zero = int(zero) * (255 // ((1 << b.dtype.bits) - 1))  # the same code everywhere in the byte
            per = f"per=8, width={b.dtype.bits}"
        where = f', space="{b.space.name}"' if b.space.name in spaces.SMALL else ""
        where += f', matrix="{matrix}"' if where and matrix != "last" else ""
        where += ", shared=True" if where and b.owner in elements else ""
        where += ", nonneg=True" if b.name in nonneg else ""
        where += _held(c.case, b.name)
        fields.append(
            f'Field("{b.name}", "{b.dtype.torch}", {per}, zero={zero!r}, state="{b.owner}"{where})'
        )
    starts: Mapping[str, Any] = {s.name: s.init for s in spec.present(c.case.flags) if s.init != 0.0}
    elsewhere = needs_matrix(spec, c.case.flags) and not _has_matrices(program, ("row", "col", "mat"))
    return dict(
        function=name,
        step=eager_text.function_of(spec, c.case.flags),
        kernel=kernel,
        eager=eager_text.record(spec, c.case, c.fast.early),
        param=c.case.param.torch,
        small=c.case.small,
        vector=c.case.vector,
        flags=dict(c.case.flags),
        fields=fields,
        scalars=tuple(let.name for let in rule.host),
        host=strict_host,
        kernel_scalars=tuple(let.name for let in c.fast.host),
        kernel_host=fast_host,
        block=program.block,
        stochastic=any(n.op == "key" for n in _nodes(program)),
        host_states=program.host_states,
        init=dict(starts),
        rows=elsewhere,
        matrix=matrix if elsewhere or _has_matrices(program) else "last",
        temps=[kernel_text.temp_row(c.fast, b) for b in c.fast.temps],
        stages=[],
    )


def _stage_rows(step: Step, kernel: str, names: Mapping[str, str]) -> list[str]:
    return [_stage_row(s, names[f"{kernel}_{k + 1}"]) for k, s in enumerate(step.stages)]


def _stage_row(stage: Stage, kernel: str) -> str:
    program = stage.schedule.program
    if stage.call:
        (buffer,) = program.buffers
        (call,) = (n for n in _nodes(program) if n.op == "call")
        given = tuple(a.attr for a in call.args[1:])
        return (
            f'Stage("{stage.call}", "call", {stage.level}, {stage.scalars!r}, '
            f"temps={(buffer.name,)!r}, given={given!r})"
        )
    temps = tuple(b.name for b in program.buffers if b.role in ("temp", "partial") and b.writes)
    matrices = any(b.space.name in ("row", "col", "mat") for b in program.buffers)
    return (
        f'Stage("{kernel}", "{stage.space.name}", {stage.level}, {stage.scalars!r}, temps={temps!r}, '
        f"matrices={matrices}, block={program.block})"
    )


def class_row(spec: Spec, plans: tuple[str, ...]) -> wrapper.ClassRow:
    """What the wrapper's template needs, without the spec itself."""
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
    """Path -> text of a package of its own: the class, its eager rule, one plan, and the plan's codecs if they are the
    user's."""
    files = emit_rule(spec, (plan.name,), maths)
    made = emit_plan(spec, plan, maths=maths, cases=cases, above="..")
    files |= {f"{plan.name}/{name}": text for name, text in made.items()}
    if not eager_text.is_ready(plan):
        files[f"{eager_text.PLANS}/{plan.name}/{eager_text.FILE}"] = eager_text.codec_text(plan)
    return files


def emit_rule(spec: Spec, plans: tuple[str, ...], maths: Maths = "fast") -> dict[str, str]:
    """File name -> text of generated/<spec>/, beside the folders of its plans."""
    return {
        "__init__.py": emit_class(spec, plans),
        eager_text.FILE: eager_text.rule_text(spec),
        kernel_text.FILE: kernel_text.record_text(spec, maths),
    }


def emit_class(spec: Spec, plans: tuple[str, ...]) -> str:
    """The text of generated/<spec>/__init__.py."""
    row = class_row(spec, plans)
    doc = "\n    ".join(line.rstrip() for line in row.doc.strip().splitlines()) or f"The rule {row.module}."
    return wrapper.render("optim.py.j2", c=row, doc=doc)


def emit_stub(specs: Iterable[Spec]) -> str:
    """Return the text of optgen/optim/__init__.pyi: the classes of these specs with their constructors' types."""
    rows = sorted((class_row(spec, ("fp32",)) for spec in specs), key=lambda row: row.name)
    return wrapper.render("optim.pyi.j2", classes=rows)


VERSION = optgen.__version__
