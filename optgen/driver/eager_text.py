"""The text of the eager reference: one module for each rule, one of codecs for each plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path

from optgen import passes
from optgen.backends import columns, matrices, reference, wrapper
from optgen.backends.printer import wrapped
from optgen.base import ready
from optgen.driver import targets
from optgen.driver.pool import Pool
from optgen.driver.project import Maths
from optgen.driver.steps import matrix_function, matrix_functions, rule_step, scalars_of
from optgen.formats import floats
from optgen.formats.format import Format
from optgen.formats.plan import Plan
from optgen.ir.program import Program, Stage, Step
from optgen.lang.spec import Spec
from optgen.lower import CodecPrograms, lower_codec, lower_weight
from optgen.ops import dtypes

STEPS = "# Steps in place, in strict maths; the codecs of a plan load and store."
PLANS = "plans"
"""The folder of plans, in a generated folder and in this package."""


# -- rules


@lru_cache(maxsize=64)
def _functions(spec: Spec) -> tuple[Pool, Mapping[tuple[tuple[str, bool], ...], str]]:
    pool, names = Pool(), {}
    source = targets.source_name(spec.loc.file)
    shared = _shared_stages(spec, source)
    for flags in spec.settings():
        step = rule_step(spec, flags)
        make = partial(_function, spec, step, source, pool, shared)
        names[tuple(sorted(flags.items()))] = pool.add(
            targets.function_name(spec, flags), make, [let.name for let in step.host]
        )
    return pool, names


CHARACTERS = 300
"""Characters from which on a stage that several functions have is a function of its own."""


def _shared_stages(spec: Spec, source: str) -> tuple[Pool, Collection[str]]:
    """Return names of stages as functions, and those of them that several functions of the rule have."""
    functions, stages, counts = Pool(), Pool(), Counter[str]()
    for flags in spec.settings():
        step, wanted = rule_step(spec, flags), targets.function_name(spec, flags)
        text = reference.rule_function(step, "@", source, partial(matrix_function, spec))
        if not functions.name(wanted, text, [let.name for let in step.host])[1]:
            continue
        for k, stage in enumerate(step.stages, 1):
            lines = reference.stage_function(step, stage, "@", source) if len(step.stages) > 1 else []
            if sum(map(len, lines)) >= CHARACTERS:
                counts[stages.name(f"{wanted}_{k}", lines, scalars_of(stage))[0]] += 1
    return stages, {name for name, count in counts.items() if count > 1}


def _function(
    spec: Spec, step: Step, source: str, pool: Pool, shared: tuple[Pool, Collection[str]], name: str
) -> list[str]:
    def own(stage: Stage) -> str:
        def make(name: str) -> list[str]:
            return reference.stage_function(step, stage, name, source)

        found = shared[0].name("", make("@"), scalars_of(stage))[0]
        return pool.add(found, make, scalars_of(stage)) if found in shared[1] else ""

    return reference.rule_function(step, name, source, partial(matrix_function, spec), own)


def function_of(spec: Spec, flags: Mapping[str, bool]) -> str:
    """The name of the function of a setting: equal ones stand once."""
    return _functions(spec)[1][tuple(sorted(flags.items()))]


def rule_text(spec: Spec) -> str:
    """Return the eager functions of a rule as a module of their own."""
    imports, body = rule_lines(spec)
    return "\n".join(["import torch", "", *imports, *body]) + "\n"


def rule_lines(spec: Spec, maths: Maths = "fast") -> tuple[list[str], list[str]]:
    """Return the imports, but for torch, of a rule's eager functions, and their text.

    maths  of the kernels, which call the functions of whole matrices, too
    """
    pool, _ = _functions(spec)
    schedules = [s.schedule for flags in spec.settings() for s in rule_step(spec, flags).stages]
    first, *others = pool.functions
    functions = [*matrix_functions(spec, maths), [STEPS, *first], *others]
    tables = reference.tables(schedules)
    body = [*([""] if tables else []), *tables, *(x for function in functions for x in ("", "", *function))]
    used = {"eager": reference.needs(functions), "matrices": matrices.needs(functions)}
    imports = [wrapper.imported(names, f"optgen.runtime.reference.{room}") for room, names in used.items() if names]
    return imports, columns.python("\n".join(body)).split("\n")


# -- plans


@lru_cache(maxsize=256)
def formats(plan: Plan) -> Mapping[str, Format]:
    """Codec name -> format: every one that the plan may keep a state in, absolute."""
    found: dict[str, Format] = {}

    def add(name: str, fmt: Format) -> None:
        fmt = fmt.absolute() if fmt.relative else fmt
        if fmt.rounding == "auto":
            fmt = fmt.rounded("stochastic")
        if fmt == floats.f32 or fmt in found.values():
            return
        found[name] = fmt
        nearest = fmt.rounded("nearest")
        if nearest != fmt and not _alike(lower_codec(fmt), lower_codec(nearest)):
            found[f"{name}_nearest"] = nearest

    roles = {"signed": plan.signed, "nonneg": plan.nonneg, "initial": plan.initial, "small": plan.small}
    for role, fmt in {**roles, **{f"of_{state}": fmt for state, fmt in sorted(plan.overrides.items())}}.items():
        add(role, fmt)
        add(f"{role}_vector", fmt.of_vectors())
    return found


def _alike(one: CodecPrograms, other: CodecPrograms) -> bool:
    """Return True if two formats decode alike and round to nearest alike."""
    pairs = (one.decode, other.decode), (one.root, other.root), (one.nearest, other.nearest)
    return all(_same(a, b) for a, b in pairs)


def _same(a: Program | None, b: Program | None) -> bool:
    return (a and a.stores) == (b and b.stores)


def codec_of(plan: Plan, fmt: Format) -> str:
    """The name of a format's codec in the plan's module; "" for fp32."""
    fmt = fmt.absolute() if fmt.relative else fmt
    if fmt == floats.f32:
        return ""
    known = formats(plan)
    for name, own in known.items():
        if own == fmt:
            return name
    return next(name for name, own in known.items() if own.rounded(fmt.rounding) == fmt)


def shared(plan: Plan, others: Sequence[Plan]) -> dict[str, tuple[str, str]]:
    """Return codec name -> (plan, name there) of the codecs that one of the other plans has too."""
    found: dict[str, tuple[str, str]] = {}
    for other in others:
        theirs = {fmt: name for name, fmt in formats(other).items()}
        same = {name: theirs[fmt] for name, fmt in formats(plan).items() if fmt in theirs}
        if plan.master == other.master:
            same |= {name: name for name in ("weight_bf16", "weight_f16")}
        for name, there in same.items():
            found.setdefault(name, (other.name, there))
    return found


def imports(found: Mapping[str, tuple[str, str]], module: str = "") -> list[str]:
    """Return the lines that import codecs from the packages of other plans, or from a module (".triton") of each."""
    lines = []
    for plan in sorted({plan for plan, _ in found.values()}):
        names = [own if own == name else f"{name} as {own}" for own, (of, name) in found.items() if of == plan]
        lines += wrapped(f"from optgen.{PLANS}.{plan}{module} import ", sorted(names), "", whole=120)
    return lines


def codec_text(
    plan: Plan,
    others: Sequence[Plan] = (),
    top: Sequence[str] = (),
    more: Sequence[str] = (),
    record: Sequence[str] = (),
) -> str:
    """Return the text of a plan's eager codecs, which imports those that `others` have too.

    top, more, record  lines above all, further imports, and lines below all
    """
    known = shared(plan, others)
    functions: list[list[str]] = []
    schedules = []
    records = []
    codecs: dict[str, tuple[CodecPrograms, Format | None]] = {}
    for param in (dtypes.bf16, dtypes.f16):
        codecs[f"weight_{param.name}"] = lower_weight(plan.master, param), None
    codecs |= {name: (lower_codec(fmt), fmt) for name, fmt in formats(plan).items()}
    for name, (made, fmt) in codecs.items():
        if name in known:
            continue
        fields = made.fields
        programs = (made.decode, made.root, made.encode, made.nearest)
        decode, root, encode, nearest = (None if p is None else passes.step(p, "strict") for p in programs)
        assert decode is not None and nearest is not None
        codec = reference.Codec(tuple(suffix or "code" for suffix in fields), decode, root, encode, nearest)
        functions += reference.codec_functions(codec, name)
        schedules += [s.schedule for step in (decode, root, encode, nearest) if step for s in step.stages]
        given = [f"{name}_decode", f"{name}_nearest"]
        given += [f"encode={name}_encode"] if encode else []
        given += [f"root={name}_root"] if root else []
        block = max((f.per for f in fields.values()), default=1)
        given += [f"block={block}"] if block > 1 else []
        given += ["packed=True"] if any(f.dtype.packed for f in fields.values()) else []
        given += ["whole=True"] if any(f.space != "elem" for f in fields.values()) else []
        doc = plan.master.describe(dtypes.bf16 if name.endswith("bf16") else dtypes.f16) if fmt is None else str(fmt)
        records.append([f"# {doc}", f"{name} = Codec({', '.join(given)})"])
    what = f"plan {plan.name} · eager codecs, strict maths"
    header = [*top, targets.mark(plan.loc.file, what)]
    if records:
        functions.append([line for lines in records for line in (*lines, "")][:-1])
        more = ["from optgen.runtime.reference.stored import Codec", *more]
    return wrapper.render(
        "eager.py.j2",
        header="\n".join(header),
        torch=any("torch." in line for lines in functions for line in lines),
        names=reference.needs(functions),
        more="\n".join([*imports(known), *more]),
        tables=reference.tables(schedules),
        functions=[*functions, record] if record else functions,
    )


def is_ready(made: Plan | Spec) -> bool:
    """Return True for a plan or a rule that comes with the package."""
    return Path(made.loc.file).resolve().is_relative_to(ready.specs_dir().resolve())
