"""The records that the runtime joins: `RULES` and `STEPS` in the module of a rule, `PLAN` in that of a plan."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, TypeVar

from optgen import passes
from optgen.backends import columns, host, matrices, triton, triton_text, wrapper
from optgen.base.names import unique
from optgen.driver import kernel_text, memory, plan_formats, targets
from optgen.driver.pool import Pool
from optgen.driver.project import Maths
from optgen.driver.steps import rule_step
from optgen.formats import floats, format
from optgen.formats.format import Format
from optgen.formats.plan import Plan, coded_trait, field_names, rounds_to_nearest
from optgen.ir.node import loads, postorder
from optgen.ir.program import Buffer, Program, Schedule, Stage, Step
from optgen.ir.ranges import is_plus
from optgen.lang.spec import Spec
from optgen.lower import CODE, X, differing, lower_codec, lower_rule, needs_matrix
from optgen.ops import dtypes, spaces
from optgen.ops.prims import MATRIX_OPS
from optgen.passes.convert import ARITHMETIC
from optgen.runtime import records
from optgen.runtime.records import Field, Rule, Temp, Variant, Whole
from optgen.runtime.records.join import FP32, FormatRecord, PlanRecord, RuleRecord, StateRecord, by_flags, with_steps

PLAN = "__init__.py"
WIDTH = 120


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
    if isinstance(value, tuple) and len(value) > 3 and value == tuple(range(len(value))):
        return "tuple(", [("", Name(f"range({len(value)})"))], ")"
    if isinstance(value, tuple):
        return "(", [("", x) for x in value], ")"
    if isinstance(value, Mapping):
        return "{", [(f"{_leaf(key)}: ", x) for key, x in value.items()], "}"
    if isinstance(value, Call):
        return f"{value.function}(", [("", x) for x in value.arguments], ")"
    if not dataclasses.is_dataclass(value):
        return None
    fields = dataclasses.fields(value)
    required = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING]
    parts = [("" if f.name in required[:2] else f"{f.name}=", getattr(value, f.name)) for f in fields]
    kind: Any = type(value)
    blank = kind(*(getattr(value, name) for name in required))
    given = [f.name in required or getattr(value, f.name) != getattr(blank, f.name) for f in fields]
    return f"{kind.__name__}(", list(itertools.compress(parts, given)), ")"


def line(value: Any) -> str:
    """Return the text that makes a record, without what is the default, in one line."""
    parts = _parts(value)
    if parts is None:
        return _leaf(value)
    inside = ", ".join(f"{lead}{line(x)}" for lead, x in parts[1])
    return f"{parts[0]}{inside}{',' if isinstance(value, tuple) and len(value) == 1 else ''}{parts[2]}"


def written(lead: str, value: Any, tail: str = "", indent: str = "") -> Iterator[str]:
    """Yield `lead` and the text that makes a record, without what is the default, in lines of at most WIDTH columns."""
    one = f"{indent}{lead}{line(value)}{tail}"
    parts = _parts(value)
    if len(one) <= WIDTH or parts is None:
        yield one
        return
    yield f"{indent}{lead}{parts[0]}"
    records = isinstance(value, (tuple, Call)) and any(dataclasses.is_dataclass(x) for _, x in parts[1])
    yield from _filled(parts[1], indent + "    ", records)
    yield f"{indent}{parts[2]}{tail}"


def _filled(parts: Sequence[tuple[str, Any]], indent: str, apart: bool) -> Iterator[str]:
    """Yield the parts of a container in lines as full as they get, or each in lines of its own."""
    filled = ""
    for lead, x in parts:
        text = f"{lead}{line(x)},"
        if filled and not apart and len(f"{indent}{filled} {text}") <= WIDTH:
            filled += f" {text}"
            continue
        if filled:
            yield indent + filled
        fits = len(indent + text) <= WIDTH
        filled = text if fits else ""
        if not fits:
            yield from written(lead, x, ",", indent)
    if filled:
        yield indent + filled


# -- rules


def rules(spec: Spec) -> tuple[RuleRecord, ...]:
    """Return the records of a rule, one for every setting of its flags."""
    return by_flags(_usual(spec), *_rules(spec))


def variants(spec: Spec, plan: Plan, maths: Maths = "fast") -> Iterator[Variant]:
    """Yield what the runtime makes of a rule and a plan; host functions are names."""
    return with_steps(rules(spec), steps(spec, maths, Pool()), plan_record(plan, maths))


def _usual(spec: Spec) -> Mapping[str, bool]:
    return {f.name: f.default for f in spec.flags}


@lru_cache(maxsize=64)
def _rules(spec: Spec) -> tuple[RuleRecord, ...]:
    """Return the records of a rule, those of settings that differ in nothing else as one."""
    return tuple(_merged(_rule(spec, flags) for flags in spec.settings()))


R = TypeVar("R", Rule, RuleRecord)


def _merged(found: Iterable[R]) -> Iterator[R]:
    """Yield records of one setting each, those that differ in nothing else as one."""
    settings: dict[R, list[Mapping[str, bool]]] = {}
    for record in found:
        settings.setdefault(dataclasses.replace(record, settings=()), []).extend(record.settings)
    for record, each in settings.items():
        yield dataclasses.replace(record, settings=_shortened(each))


def _shortened(settings: Sequence[Mapping[str, bool]]) -> tuple[Mapping[str, bool], ...]:
    """Return partial settings that together allow these and no others: what is the same both ways is left out."""
    names, whole = list(settings[0]), [frozenset(s.items()) for s in settings]
    found, level = [], set(whole)
    while level:
        wider = {s: {s - {x} for x in s if s ^ {x, (x[0], not x[1])} in level} for s in level}
        found += [s for s, several in wider.items() if not several]
        level = set().union(*wider.values())
    found.sort(key=lambda s: (len(s), [names.index(name) * 2 + (not on) for name, on in sorted(s, key=_place(names))]))
    kept: list[Mapping[str, bool]] = []
    left = set(whole)
    while left:
        best = max(found, key=lambda s: sum(s <= x for x in left))
        left = {x for x in left if not best <= x}
        kept.append(dict(sorted(best, key=_place(names))))
    return tuple(kept)


def _place(names: Sequence[str]) -> Callable[[tuple[str, bool]], int]:
    return lambda pair: names.index(pair[0])


def _rule(spec: Spec, flags: Mapping[str, bool]) -> RuleRecord:
    step, program = rule_step(spec, flags), lower_rule(spec, flags)
    recurrences = targets.recurrences_of(spec, tuple(sorted(flags.items())))
    states = [
        StateRecord(
            s.name, s.nonneg, s.space.name, s.init, s.normalized_by or "", rounds_to_nearest(recurrences[s.name]),
            s.rank, coded_trait(s, recurrences[s.name]),
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
        draws=spec.trace(flags).draws,
        settings=(flags,),
    )


def _spaces(program: Program) -> Iterator[str]:
    """Yield the small spaces of what a step computes or leaves as it is, and "call" where it calls for matrices."""
    nodes = list(postorder(program.roots()))
    yield from ({n.space.name for n in nodes} | {b.space.name for b in program.buffers}) & spaces.SMALL
    if any(n.op in MATRIX_OPS for n in nodes):
        yield "call"


def steps(spec: Spec, maths: Maths, pool: Pool, named: str = "kernel_scalars") -> tuple[Rule, ...]:
    """Return the steps of a rule's kernels, one for settings whose steps are equal; host functions go to `pool` under
    that name."""
    nonneg = {s.name for s in spec.states if s.nonneg}
    found: list[Rule] = []
    for s in kernel_text.rule_kernels(spec, maths).settings:
        make = partial(host.scalars_function, kernel_text.host_program(s.step), kernel_text.unpack_of(spec))
        function: Any = Name(pool.add(named, make))
        step = Rule(
            settings=(s.flags,),
            scalars=tuple(let.name for let in s.step.host),
            host=function,
            temps=tuple(_temp(s.step, b) for b in s.step.temps),
            stages=tuple(_stage(x, name, nonneg) for x, name in zip(s.step.stages, s.kernels, strict=True)),
            early=s.step.early,
            strict=maths == "strict",
        )
        found.append(step)
    return tuple(_merged(found))


def _shared(found: Sequence[Rule | RuleRecord], taken: str) -> tuple[list[str], list[Any]]:
    """Return constants for what several records have alike, as lines of text, and the records with their names.

    taken  the name of the class
    """
    every = [(k, x) for record in found for k, x in _shareable(record)]
    counts = Counter(line(x) for _, x in every)
    names: dict[str, str] = {" " * k: x for k, x in enumerate(("RULES", "STRICT", "STEPS", taken))}
    lines: list[str] = []
    for wanted, x in every:
        text = line(x)
        if counts[text] > 1 and len(text) > 40 and text not in names:
            names[text] = unique(wanted, {*names.values()})
            lines += written(f"{names[text]} = ", x)

    def name(x: Any) -> Any:
        return Name(names[line(x)]) if line(x) in names else x

    short = []
    for record in found:
        changes = {k: name(getattr(record, k)) for k in _SHARED if hasattr(record, k)}
        if isinstance(record, Rule):
            changes["stages"] = tuple(map(name, record.stages))
        short.append(dataclasses.replace(record, **changes))
    return lines, short


_SHARED = "scalars", "states", "temps"


def _shareable(record: Rule | RuleRecord) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a record that others may have too, each with a name for it."""
    yield from ((k.upper(), getattr(record, k)) for k in _SHARED if hasattr(record, k))
    if isinstance(record, Rule):
        yield from ((stage.kernel.upper(), stage) for stage in record.stages)


def _temp(step: Step, b: Buffer) -> Temp:
    """Return the record of a value that one stage leaves for later ones."""
    if b.role != "partial":
        return Temp(b.name, b.space.name, wide=b.space == spaces.elem and b.dtype is dtypes.f32)
    (source,) = {s.space.name for s in step.stages if b.name in {x.name for x in s.schedule.partials}}
    return Temp(b.name, b.space.name, b.reduction, source)


def _stage(stage: Stage, kernel: str, nonneg: Collection[str]) -> records.Stage:
    """Return the record of a stage; `nonneg`: states of which no value is negative."""
    program, sweep = stage.schedule.program, stage.schedule.sweep
    if stage.call not in ("", "whole"):
        (buffer,) = program.buffers
        (call,) = (n for n in postorder(program.roots()) if n.op == "call")
        given = tuple(a.attr for a in call.args[1:])
        return records.Stage(kernel, "call", stage.level, stage.scalars, temps=(buffer.name,), given=given)
    if stage.call:
        results = tuple(s.buffer for s in sweep.stores)
        temps, extents = tuple(x for x in results if program.buffer(x).role == "temp"), matrices.extents(stage.schedule)
        return records.Stage(
            kernel, "whole", stage.level, stage.scalars, temps, reads=tuple(sweep.reads), stores=results,
            extents=tuple(extents),
        )  # fmt: skip
    stored = triton_text.stored(stage.schedule)
    needs = [(s.buffer, {*loads([s.node])}) for s in stored if s.buffer in nonneg and stage.is_sweep]
    return records.Stage(
        kernel,
        stage.space.name,
        stage.level,
        stage.scalars,
        temps=tuple(b.name for b in program.buffers if b.role in ("temp", "partial") and b.writes),
        matrices=any(b.space.name in ("row", "col", "mat") for b in program.buffers),
        reads=tuple(sweep.reads),
        stores=tuple(s.buffer for s in stored),
        sums=tuple((_kind(stage, t), tuple(b.name for b in t.partials)) for t in triton.terms(stage.schedule)),
        extents=tuple(triton.sizes(program)),
        plus=tuple(s.buffer for s in stored if is_plus(s.node, nonneg)),
        picked=tuple(s.buffer for s in stored if s.node.op not in ARITHMETIC),
        needs=tuple((state, tuple(x for x in sweep.reads if x in read)) for state, read in needs),
    )


def _kind(stage: Stage, term: triton.Term) -> str:
    """Return how a term is reduced; factors are taken apart for sweeps alone."""
    return term.kind if stage.is_sweep else "max" if term.is_max else "sum"


def rule_text(spec: Spec, maths: Maths) -> str:
    """Return the records of a rule as a module of their own."""
    names, imports, body = rule_lines(spec, maths)
    return "\n".join([f"from optgen.runtime import {', '.join(names)}", *imports, *body]) + "\n"


def rule_lines(spec: Spec, maths: Maths) -> tuple[list[str], list[str], list[str]]:
    """Return the names that a rule's records import from optgen.runtime, their other imports, and their text."""
    found, pool = _rules(spec), Pool()
    exact = steps(spec, "strict", pool, "host_scalars")
    made = () if maths == "strict" else steps(spec, maths, pool)
    temps = any(step.temps for step in (*exact, *made))
    names = ["Rule", "RuleRecord", "Stage", "StateRecord", *(["Temp"] if temps else []), "by_flags"]
    called = host.needs(pool.functions)
    imports = [wrapper.imported(called, "optgen.runtime.records.scalars")] if called else []
    body = ["", "", "# Scalars at a step, in fp64, with the new host states behind them."]
    texts = [columns.python("\n".join(function)).split("\n") for function in pool.functions]
    body += [line for text in texts for line in ("", "", *text)][2:]
    constants, short = _shared([*found, *exact, *made], spec.class_name)
    body += ["", "", *(["# What several of the records below have.", *constants, ""] if constants else [])]
    body += ["# The states, and what of them a step makes."]
    body += written("RULES = ", Call("by_flags", (_usual(spec), *short[: len(found)])))
    body += ["", "# The step in strict maths, as the eager reference makes it."]
    body += written("STRICT = ", tuple(short[len(found) : len(found) + len(exact)]))
    body += ["", f"# The step of kernels, in {maths} maths{_rounding(spec, maths)}."]
    body += written("STEPS = ", tuple(short[len(found) + len(exact) :])) if made else ["STEPS = STRICT"]
    return names, imports, body


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
    known = ("Field", "FormatRecord", "PlanRecord", "Stage", "Temp", "Whole")
    names = [name for name in known if any(f"{name}(" in line for line in text)]
    head = [*doc, targets.mark(plan.loc.file, f"plan {plan.name}"), "# fmt: off", "# ruff: noqa"]
    return "\n".join([*head, f"from optgen.runtime import {', '.join(names)}", "", *text]) + "\n"


def plan_record(plan: Plan, maths: Maths = "fast") -> PlanRecord:
    """Return the record of a plan; the small work for states that are kept as a whole is that of kernels."""
    weights = {}
    for param in (dtypes.bf16, dtypes.f16):
        fields = [_field(k, f) for k, f in plan.master.fields(param).items() if k]
        weights[param.torch] = FormatRecord(f"weight_{param.name}", tuple(fields), plan.master.noise_bits(param))
    given = {role: _format(plan, getattr(plan, role), maths) for role in ("signed", "nonneg", "initial", "small")}
    own = {state: _format(plan, fmt, maths) for state, fmt in sorted(plan.overrides.items())}
    wrong = bool(plan.discouraged)
    return PlanRecord(plan.small_numel, weights, **given, matrices=plan.matrices, overrides=own, discouraged=wrong)


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
    reading = [passes.step(p, maths) for p in (made.decode, made.root) if p is not None]
    writing = [passes.step(p, maths) for p in (made.nearest, made.encode) if p is not None]
    before = {tuple(s.buffer for s in x.schedule.sweep.stores): x for step in reading for x in step.stages[:-1]}
    first, *between, _ = writing[0].stages
    names = {k or CODE: name for k, name in zip(made.fields, _names(fmt), strict=True)}
    reads = dict.fromkeys([k for k in names if any(k in s.sweeps[-1].schedule.sweep.reads for s in reading)])
    reads |= dict.fromkeys(x for s in reading for x in s.sweeps[-1].schedule.sweep.reads)
    given = dict.fromkeys(x for s in writing for x in s.sweeps[-1].schedule.sweep.reads if x != X)
    # A vector that reading needs is replaced when the new value is stored; all others as soon as they are made.
    kept = {k: f"new_{name}" for k, name in names.items() if made.fields.get(k) and k in reads and k != CODE}
    kept = {k: name for k, name in kept.items() if made.fields[k].space != "elem"}
    new = {b.name: f"new_{b.name}" for b in writing[0].temps} | {k: names[k] for k in names} | kept
    temps = [_temp(step, b) for step in reading[:1] for b in step.temps]
    temps += [dataclasses.replace(t, name=new[t.name]) for t in (_temp(writing[0], b) for b in writing[0].temps)]
    temps += [Temp(name, made.fields[k].space) for k, name in kept.items()]
    old = {b.name: b.name for step in reading for b in step.temps} | names
    stages = [_stage(s, f"small_{k}", ()).renamed(lambda x: old.get(x, x)) for k, s in enumerate(before.values(), 1)]
    following = enumerate(between, len(stages) + 1)
    made_by = [_stage(s, f"small_{k}", ()).renamed(lambda x: new.get(x, x)) for k, s in following]
    record = Whole(
        decode=tuple(old[x] for x in reads),
        encode=tuple(new[x] for x in given),
        sums=_stage(first, "", ()).renamed(lambda x: new.get(x, x)).sums,
        before=tuple(stages),
        between=tuple(made_by),
        temps=tuple(temps),
        kept=tuple((names[k], name, made.fields[k].space) for k, name in kept.items()),
    )
    return WholeWork(record, tuple(reads), tuple(given), tuple(s.schedule for s in (*before.values(), *between)))


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
        least=f.least if f.most is not None else 0,
        most=f.most,
        low=f.low if f.most is not None else 0,
    )
