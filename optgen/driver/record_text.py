"""The records that the runtime joins: `RULES` and `STEPS` in the module of a rule, `PLAN` in that of a plan."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, TypeVar

from optgen import passes
from optgen.backends import columns, host, matrices, triton, triton_text, wrapper
from optgen.base.names import unique
from optgen.driver import kernel_text, memory, plan_formats, targets
from optgen.driver.pool import FunctionPool
from optgen.driver.project import Maths
from optgen.driver.steps import rule_step
from optgen.formats import floats, format
from optgen.formats.format import Format
from optgen.formats.plan import Plan, coded_trait, field_names, rounds_to_nearest
from optgen.formats.views import COLUMNS, VIEWS
from optgen.ir.node import brief, loads, postorder
from optgen.ir.program import Buffer, Program, Schedule, Stage, Step
from optgen.ir.ranges import is_plus
from optgen.lang.spec import Spec
from optgen.lower import CODE, X, differing, lower_codec, lower_rule, needs_matrix
from optgen.ops import dtypes, spaces
from optgen.ops.prims import MATRIX_OPS
from optgen.passes.convert import ARITHMETIC
from optgen.runtime import records
from optgen.runtime.records import WIDE, Field, Rule, Temp, Variant, View, Whole
from optgen.runtime.records.join import FP32, FormatRecord, PlanRecord, RuleRecord, StateRecord, by_flags, with_steps
from optgen.verify.lint import cancelling

PLAN = "__init__.py"
WIDTH = 120
UNBROKEN: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
BLANK = "\0"  # where no line ends
LINEAR = re.compile(r"mul\(\$(\w+), (?:%g:f32|fma\(\$(\w+), %\w+:f32, %p:f32\))\)")


# -- text


class Name(str):
    """A name as it stands in the text."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a function with these arguments."""

    function: str
    arguments: tuple[Any, ...]


def _leaf(value: object) -> str:
    if isinstance(value, Name):
        return value
    if isinstance(value, str):
        return f'"{value}"'
    return hex(value) if type(value) is int and value > 0xFFFF else repr(value)


def _parts(value: Any) -> tuple[str, list[tuple[str, Any]], str] | None:
    """Return how a container's text begins, its parts behind what leads to each, and how it ends; None for others."""
    if isinstance(value, tuple):
        if len(value) > 3 and value == tuple(range(len(value))):
            return "tuple(", [("", Name(f"range({len(value)})"))], ")"
        return "(", [("", x) for x in value], ")"
    if isinstance(value, Mapping):
        return "{", [(f"{_leaf(key)}: ", x) for key, x in value.items()], "}"
    if isinstance(value, Call):
        return f"{value.function}(", [("", x) for x in value.arguments], ")"
    return _of_record(value) if dataclasses.is_dataclass(value) else None


def _of_record(value: Any) -> tuple[str, list[tuple[str, Any]], str]:
    """Return the same of a record, without what is the default; the first two fields that have none stand unnamed."""
    fields = dataclasses.fields(value)
    required = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING]
    blank = type(value)(*(getattr(value, name) for name in required))
    given = [f.name for f in fields if f.name in required or getattr(value, f.name) != getattr(blank, f.name)]
    parts = [("" if name in required[:2] else f"{name}=", getattr(value, name)) for name in given]
    return f"{type(value).__name__}(", parts, ")"


def line(value: Any) -> str:
    """Return the text that makes a record, without what is the default, in one line."""
    parts = _parts(value)
    if parts is None:
        return _leaf(value)
    inside = ", ".join(f"{lead}{line(x)}" for lead, x in parts[1])
    return f"{parts[0]}{inside}{',' if isinstance(value, tuple) and len(value) == 1 else ''}{parts[2]}"


def written(lead: str, value: Any, tail: str = "", indent: str = "") -> Iterator[str]:
    """Yield `lead` and the text that makes a record, without what is the default, in lines of at most WIDTH columns.

    The parts of a container of records stand in lines of their own, if it does not fit in one line.
    """
    one, parts = f"{lead}{line(value)}{tail}", _parts(value)
    if parts is None or not _has_record(value) or len(indent + one) <= WIDTH:
        more = f"{indent}    "
        if parts is not None and len(parts[1]) > 1:
            inside = [f"{name}{line(x)}" for name, x in parts[1]]
            kept = [x.replace(" ", BLANK) if len(x) < WIDTH / 2 else x for x in inside]
            head = f"{lead.replace(' ', BLANK)}{parts[0]}"
            if len(indent + head + inside[0]) >= WIDTH:  # a long name, which is there twice
                yield indent + head.replace(BLANK, " ")
                head, indent = "", more
            one = f"{head}{', '.join(kept)}{parts[2]}{tail}"
        lines = textwrap.wrap(one, WIDTH, initial_indent=indent, subsequent_indent=more, **UNBROKEN)
        yield from (x.replace(BLANK, " ") for x in lines)
        return
    yield f"{indent}{lead}{parts[0]}"
    for name, x in parts[1]:
        yield from written(name, x, ",", f"{indent}    ")
    yield f"{indent}{parts[2]}{tail}"


def _has_record(value: Any) -> bool:
    parts = _parts(value)
    return parts is not None and any(dataclasses.is_dataclass(x) or _has_record(x) for _, x in parts[1])


# -- rules


def rules(spec: Spec) -> tuple[RuleRecord, ...]:
    """Return the records of a rule, one for every setting of its flags."""
    return by_flags(_usual(spec), *_rules(spec))


def variants(spec: Spec, plan: Plan, maths: Maths = "fast") -> Iterator[Variant]:
    """Yield what the runtime makes of a rule and a plan; host functions are names."""
    return with_steps(rules(spec), steps(spec, maths, FunctionPool()), plan_record(plan, maths))


def _usual(spec: Spec) -> Mapping[str, bool]:
    return {f.name: f.default for f in spec.flags}


@lru_cache(maxsize=64)
def _rules(spec: Spec) -> tuple[RuleRecord, ...]:
    """Return the records of a rule, those of settings that differ in nothing else as one."""
    return tuple(_merged(_rule(spec, flags) for flags in spec.settings()))


R = TypeVar("R", Rule, RuleRecord)


def _merged(records: Iterable[R]) -> Iterator[R]:
    """Yield records of one setting each, those that differ in nothing else as one."""
    alike: dict[str, list[R]] = {}
    for record in records:
        alike.setdefault(line(dataclasses.replace(record, settings=())), []).append(record)
    for some in alike.values():
        yield dataclasses.replace(some[0], settings=_shortened([x for record in some for x in record.settings]))


def _shortened(settings: Sequence[Mapping[str, bool]]) -> tuple[Mapping[str, bool], ...]:
    """Return partial settings that together allow these and no others: what is the same both ways is left out."""
    left = [dict(s) for s in settings]
    for name in settings[0]:
        for s in [s for s in left if s.get(name) is False]:
            if (twin := s | {name: True}) in left:
                left.remove(twin)
                left[left.index(s)] = {k: on for k, on in s.items() if k != name}
    return tuple(left)


def _rule(spec: Spec, flags: Mapping[str, bool]) -> RuleRecord:
    step, program = rule_step(spec, flags), lower_rule(spec, flags)
    recurrences = targets.recurrences_of(spec, tuple(sorted(flags.items())))
    cancels = cancelling(spec, tuple(flags.items()))
    states = [
        StateRecord(
            s.name,
            s.nonneg,
            s.space.name,
            s.init,
            s.normalized_by or "",
            s.name in cancels,
            rounds_to_nearest(recurrences[s.name]),
            s.rank,
            coded_trait(s, recurrences[s.name]),
        )
        for s in spec.present(flags)
    ]
    return RuleRecord(
        name=spec.name,
        states=tuple(states),
        host_states=program.host_states,
        unchanged=tuple(tuple(sorted(spec.unchanged(at))) for at in spec.at_steps(flags)),
        differs=tuple(sorted(differing(spec, flags))),
        early=step.early,
        spaces=tuple(sorted(_spaces(program))),
        by_rows=needs_matrix(spec, flags),
        matrix=spec.matrix,
        settings=(flags,),
    )


def _spaces(program: Program) -> Iterator[str]:
    """Yield the small spaces of what a step computes or leaves as it is, and "call" where it calls for matrices."""
    nodes = list(postorder(program.roots()))
    yield from ({n.space.name for n in nodes} | {b.space.name for b in program.buffers}) & spaces.SMALL
    if any(n.op in MATRIX_OPS for n in nodes):
        yield "call"


def steps(spec: Spec, maths: Maths, pool: FunctionPool, named: str = "kernel_scalars") -> tuple[Rule, ...]:
    """Return the steps of a rule's kernels, one for settings whose steps are equal; host functions go to `pool` under
    that name."""
    nonneg = {s.name for s in spec.states if s.nonneg}
    found: list[Rule] = []
    for s in kernel_text.rule_kernels(spec, maths).settings:
        make = partial(host.scalars_function, kernel_text.host_program(s.step), kernel_text.unpack_of(spec))
        function: Any = Name(pool.add(named, make))
        scalars = [let.name for let in s.step.host]
        stages = [_stage(x, name, nonneg, scalars) for x, name in zip(s.step.stages, s.kernels, strict=True)]
        if len(stages) == 1 and stages[0].scalars == tuple(range(len(scalars))):
            stages = [dataclasses.replace(stages[0], scalars=())]
        step = Rule(
            settings=(s.flags,),
            scalars=len(scalars),
            host=function,
            temps=_temps(s.step.temps, stages),
            stages=tuple(stages),
            early=s.step.early,
            strict=maths == "strict",
        )
        found.append(step)
    return tuple(_merged(found))


def _temps(buffers: Iterable[Buffer], stages: Sequence[records.Stage]) -> dict[str, tuple[str, ...]]:
    """Return space -> names of the values that stages leave for one another, but for those of `Rule.temps`' rule."""
    usual = {x: s.space for s in reversed(stages) for x in s.stores}
    usual |= {x: x.partition("_")[0] for s in stages for x in s.summed}
    out: dict[str, tuple[str, ...]] = {}
    for b in buffers:
        space = WIDE if b.space == spaces.elem and b.dtype is dtypes.f32 else b.space.name
        if usual[b.name] != space:
            out[space] = (*out.get(space, ()), b.name)
    return out


class _Constants:
    """Constants of a module, one for each text, as lines; `taken`: names that they may not have."""

    def __init__(self, taken: Collection[str]) -> None:
        self.taken, self.names, self.lines = {*taken}, dict[str, str](), list[str]()

    def name(self, wanted: str, x: Any) -> Any:
        """Return the name of the constant of a value."""
        text = line(x)
        if text not in self.names:
            self.names[text] = unique(wanted, {*self.taken, *self.names.values()})
            self.lines += written(f"{self.names[text]} = ", x)
        return Name(self.names[text])

    def rule(self, record: RuleRecord) -> RuleRecord:
        """Return a record with the name of its states."""
        return dataclasses.replace(record, states=self.name("STATES", record.states) if record.states else ())

    def step(self, record: Rule) -> Rule:
        """Return a record with the names of its stages."""
        return dataclasses.replace(record, stages=tuple(self.name(s.kernel.upper(), s) for s in record.stages))


def _stage(stage: Stage, kernel: str, nonneg: Collection[str], scalars: Sequence[str]) -> records.Stage:
    """Return the record of a stage; `nonneg`: states of which no value is negative; `scalars`: names of the step's."""
    schedule, sweep = stage.schedule, stage.schedule.sweep
    if stage.call == "whole":
        return _whole(schedule, kernel, stage.scalars)
    if stage.call:
        return _call(schedule.program, kernel, scalars)
    stored = triton_text.stored(schedule)
    states = [s for s in stored if schedule.program.buffer(s.buffer).role != "temp"]
    positive = [s for s in states if s.buffer in nonneg]
    needs = loads([s.node for s in positive]) if stage.is_sweep else []
    linear = LINEAR.fullmatch(brief(stored[0].node)) if len(stored) == 1 and not schedule.partials else None
    return records.Stage(
        kernel,
        stage.space.name,
        stage.scalars,
        reads=tuple(sweep.reads),
        stores=tuple(s.buffer for s in stored),
        sums=tuple((_kind(stage, t), tuple(b.name for b in t.partials)) for t in triton.terms(schedule)),
        extents=tuple(triton.sizes(schedule.program)),
        zeros=tuple(s.buffer for s in positive if not is_plus(s.node, nonneg)),
        picked=tuple(s.buffer for s in states if s.node.op not in ARITHMETIC),
        needs=tuple(x for x in sweep.reads if x in needs),
        linear=tuple(scalars.index(x) for x in linear.groups() if x) if linear else (),
    )


def _whole(schedule: Schedule, kernel: str, scalars: tuple[int, ...]) -> records.Stage:
    """Return the record of a function of whole matrices in the rule's module."""
    reads, stores = tuple(schedule.sweep.reads), tuple(s.buffer for s in schedule.sweep.stores)
    return records.Stage(
        kernel, "whole", scalars, reads=reads, stores=stores, extents=tuple(matrices.extents(schedule))
    )  # fmt: skip


def _call(program: Program, kernel: str, scalars: Sequence[str]) -> records.Stage:
    """Return the record of a call of a function of matrices."""
    (buffer,) = program.buffers
    (call,) = (n for n in postorder(program.roots()) if n.op == "call")
    given = [a.attr for a in call.args[1:]]
    return records.Stage(
        kernel, "call", tuple(scalars.index(x) for x in given if isinstance(x, str)),
        given=tuple(None if isinstance(x, str) else x for x in given), stores=(buffer.name,),
    )  # fmt: skip


def _kind(stage: Stage, term: triton.Term) -> str:
    """Return how a term is reduced; factors are taken apart for sweeps alone."""
    return term.kind if stage.is_sweep else "max" if term.is_max else "sum"


def rule_text(spec: Spec, maths: Maths) -> str:
    """Return the records of a rule as a module of their own."""
    names, imports, body = rule_lines(spec, maths)
    return "\n".join([f"from optgen.runtime import {', '.join(names)}", *imports, *body]) + "\n"


def rule_lines(spec: Spec, maths: Maths) -> tuple[list[str], list[str], list[str]]:
    """Return the names that a rule's records import from optgen.runtime, their other imports, and their text."""
    pool, constants = FunctionPool(), _Constants(("RULES", "STEPS", "STRICT", spec.class_name))
    rules, made = tuple(map(constants.rule, _rules(spec))), tuple(map(constants.step, steps(spec, maths, pool)))
    body = _functions("# Scalars at a step, in fp64, with the new host states behind them.", pool.functions)
    body += ["", "", "# The states, and the kernels.", *constants.lines]
    body += ["", "# The states under each setting of the flags."]
    body += written("RULES = ", Call("by_flags", (_usual(spec), *rules)))
    body += ["", f"# The steps of kernels, in {maths} maths{_rounding(spec, maths)}."]
    body += written("STEPS = ", made)
    if maths == "strict":
        body += ["STRICT = STEPS"]
    else:
        known, constants.lines = len(pool.functions), []
        strict = tuple(map(constants.step, steps(spec, "strict", pool, "host_scalars")))
        title = "# The same steps in strict maths, as the eager reference makes them."
        body += _functions(title, pool.functions[known:]) + ["", ""] * (len(pool.functions) > known)
        body += [*constants.lines, *written("STRICT = ", strict)]
    called = host.needs(pool.functions)
    imports = [wrapper.imported(called, "optgen.runtime.records.scalars")] if called else []
    return ["Rule", "RuleRecord", "Stage", "StateRecord", "by_flags"], imports, body


def _functions(title: str, functions: Iterable[Sequence[str]]) -> list[str]:
    """Return functions under a title, as lines of text."""
    texts = [columns.python("\n".join(function)).split("\n") for function in functions]
    return ["", "", title, *[line for text in texts for line in ("", "", *text)][2:]]


def _rounding(spec: Spec, maths: Maths) -> str:
    """Return the passes by which the kernels' rounding differs from the reference, as the end of a comment."""
    settings = kernel_text.rule_kernels(spec, maths).settings
    names = sorted({r for s in settings for r in s.step.program.rules})
    return f"; rounding changed by: {', '.join(names)}" if names else ""


# -- plans


def plan_text(plan: Plan, maths: Maths = "fast") -> str:
    """Return the text of a plan's package: how it keeps an element, and its record."""
    doc = [f'"""{plan.doc}', "", *(f"    {x}" for x in memory.storage_lines(memory.of_plan(plan))), '"""']
    text = list(written("PLAN = ", plan_record(plan, maths)))
    known = ("Field", "FormatRecord", "PlanRecord", "Stage", "Temp", "View", "Whole")
    names = [name for name in known if any(f"{name}(" in line for line in text)]
    head = [*doc, targets.mark(plan.loc.file, f"plan {plan.name}"), "# fmt: off", "# ruff: noqa"]
    return "\n".join([*head, f"from optgen.runtime import {', '.join(names)}", "", *text]) + "\n"


def plan_record(plan: Plan, maths: Maths = "fast") -> PlanRecord:
    """Return the record of a plan; the small work for states that are kept as a whole is that of kernels."""
    weights = {}
    for param in plan.master.params:
        fields = [_field(k, f) for k, f in plan.master.fields(param).items() if k]
        weights[param.torch] = FormatRecord(f"weight_{param.name}", tuple(fields), plan.master.noise_bits(param))
    given = {role: _format(plan, getattr(plan, role), maths) for role in ("signed", "nonneg", "initial", "small")}
    own = {state: _format(plan, fmt, maths) for state, fmt in sorted(plan.overrides.items())}
    wrong = bool(plan.discouraged)
    views = tuple(_view(name, VIEWS[name]) for name in plan.views)
    return PlanRecord(
        plan.small_numel, weights, **given, matrices=plan.matrices, overrides=own, discouraged=wrong, views=views
    )  # fmt: skip


def _view(name: str, fmt: Format) -> View:
    fields = [_field(k, f) for k, f in zip(_names(fmt), fmt.fields().values(), strict=True)]
    fields += [Field("tensor", "float32", space="tensor")] if "top" in fmt.fields() else []
    if fmt is COLUMNS:
        fields = [dataclasses.replace(f, space="transposed") for f in fields]
    return View(name, fmt.block, tuple(dataclasses.replace(f, name=f"{name}_{f.name}", state=name) for f in fields))


def _format(plan: Plan, fmt: Format, maths: Maths) -> FormatRecord:
    found = fmt.rounded("stochastic") if fmt.rounding == "auto" else fmt
    if found == floats.f32:
        return FP32
    fields = tuple(_field(name, f) for name, f in zip(_names(found), found.fields().values(), strict=True))
    vector, work = fmt.of_vectors(), whole_work(found, maths)
    return FormatRecord(
        codec=plan_formats.codec_of(plan, found),
        fields=fields,
        noise=found.noise_bits,
        relative=found.relative,
        unrounded=found.unrounded,
        positive=found.positive,
        matrix=found.matrix,
        nearest=plan_formats.codec_of(plan, fmt.rounded("nearest")) if fmt.rounding == "auto" else None,
        vector=None if vector == fmt else _format(plan, vector, maths),
        whole=None if work is None else work.record,
    )


def _names(fmt: Format) -> list[str]:
    """Return the names of a format's fields in records."""
    return [name.removeprefix("_") for name in field_names("", fmt.fields()).values()]


# -- states that are kept as a whole


@dataclasses.dataclass(frozen=True)
class WholeWork:
    """The small work for states in one format, as a record and as schedules.

    reads, given  buffers of the codec's programs that its functions take; see `optgen.backends.codec.Codec`
    """

    record: Whole
    reads: tuple[str, ...]
    given: tuple[str, ...]
    small: tuple[Schedule, ...]


@lru_cache(maxsize=256)
def whole_work(fmt: Format, maths: Maths) -> WholeWork | None:
    """Return the small work of a format that keeps numbers of rows, columns or the tensor; None of any other."""
    if all(f.space == "elem" for f in fmt.fields().values()):
        return None
    made = lower_codec(fmt)
    reading, writing = _steps(maths, made.decode, made.root), _steps(maths, made.nearest, made.encode)
    names = {k or CODE: name for k, name in zip(made.fields, _names(fmt), strict=True)}
    taken = _last_reads(reading)
    reads = tuple(dict.fromkeys([*(k for k in names if k in taken), *taken]))
    given = tuple(x for x in _last_reads(writing) if x != X)
    vectors = _vectors(made.fields, reads)
    # A vector that reading needs is replaced when the new value is stored; all others as soon as they are made.
    kept = {k: f"new_{names[k]}" for k in vectors}
    new = {b.name: f"new_{b.name}" for b in writing[0].temps} | names | kept
    before = _before(reading)
    first, *between, _ = writing[0].stages
    record = Whole(
        decode=tuple(names.get(x, x) for x in reads),
        encode=tuple(map(new.__getitem__, given)),
        sums=_small(first, 0, new).sums,
        before=_numbered(before, 1, names),
        between=_numbered(between, len(before) + 1, new),
        temps=(*_temps_of(reading[0]), *_temps_of(writing[0], "new_"), *map(Temp, kept.values(), vectors.values())),
        kept=tuple((names[k], kept[k], space) for k, space in vectors.items()),
    )
    return WholeWork(record, reads, given, tuple(s.schedule for s in (*before, *between)))


def _steps(maths: Maths, *programs: Program | None) -> list[Step]:
    return [passes.step(p, maths) for p in programs if p is not None]


def _last_reads(steps: Iterable[Step]) -> list[str]:
    """Return the buffers that the last sweeps of steps read."""
    return list(dict.fromkeys(x for step in steps for x in step.sweeps[-1].schedule.sweep.reads))


def _before(steps: Iterable[Step]) -> list[Stage]:
    """Return the small work before the last sweeps of steps, of which equal stores are one."""
    found = {tuple(s.buffer for s in x.schedule.sweep.stores): x for step in steps for x in step.stages[:-1]}
    return list(found.values())


def _vectors(fields: Mapping[str, format.Field], reads: Collection[str]) -> dict[str, str]:
    """Return field -> space of those with few values that reading needs."""
    return {k: f.space for k, f in fields.items() if k and f.space != "elem" and k in reads}


def _temps_of(step: Step, prefix: str = "") -> Iterator[Temp]:
    """Yield the records of the values that stages leave for later ones."""
    sources = {b.name: s.space.name for s in step.stages for b in s.schedule.partials}
    return (Temp(prefix + b.name, b.space.name, b.reduction, sources.get(b.name, "")) for b in step.temps)


def _numbered(stages: Iterable[Stage], first: int, names: Mapping[str, str]) -> tuple[records.Stage, ...]:
    return tuple(_small(stage, k, names) for k, stage in enumerate(stages, first))


def _small(stage: Stage, number: int, names: Mapping[str, str]) -> records.Stage:
    """Return the record of small work, with other names of what it reads and stores."""
    buffers = stage.schedule.program.buffers
    temps = tuple(b.name for b in buffers if b.role in ("temp", "partial") and b.writes)
    by_rows = any(b.space.name in ("row", "col", "mat") for b in buffers)
    made = dataclasses.replace(_stage(stage, f"small_{number}", (), ()), temps=temps, matrices=by_rows, picked=())
    return made.renamed(lambda x: names.get(x, x))


def _field(name: str, f: format.Field) -> Field:
    bits = f.dtype.bits
    return Field(
        name,
        f.dtype.torch,
        per=8 if f.dtype.packed else f.per,
        zero=int(f.zero) * (255 // ((1 << bits) - 1)) if f.dtype.packed else f.zero,  # every code of the byte
        width=bits if f.dtype.packed else 1,
        space=f.space,
        nonneg=f.nonneg and f.dtype.is_float,
    )
