"""The records that the runtime joins: one module for each rule (`RULES`), one for each plan (`PLAN`)."""

from __future__ import annotations

import dataclasses
import itertools
import textwrap
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

from optgen.backends import host
from optgen.backends.printer import wrapped
from optgen.driver import eager_text, explain, kernel_text, targets
from optgen.driver.pool import Pool
from optgen.formats import floats, format
from optgen.formats.format import Format
from optgen.formats.plan import Plan, field_names, rounds_to_nearest
from optgen.ir.node import postorder
from optgen.ir.program import Program
from optgen.lang.spec import Spec
from optgen.lower import differing, lower_rule, needs_matrix
from optgen.ops import dtypes, spaces
from optgen.runtime.records import Field
from optgen.runtime.records.join import FP32, FormatRecord, PlanRecord, RuleRecord, StateRecord

RULE, PLAN = "records.py", "__init__.py"
WIDTH = 120


# -- text


class Name(str):
    """A name as it stands in the text."""


def _leaf(value: object) -> str:
    if isinstance(value, Name):
        return value
    if isinstance(value, str):
        return f'"{value}"'
    return hex(value) if type(value) is int and value > 0xFFFF else repr(value)


def _parts(value: Any) -> tuple[str, list[tuple[str, Any]], str] | None:
    """Return how a container's text begins, its parts behind what leads to each, and how it ends; None for others."""
    if isinstance(value, tuple):
        return "(", [("", x) for x in value], ")"
    if isinstance(value, Mapping):
        return "{", [(f"{_leaf(key)}: ", x) for key, x in value.items()], "}"
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
    if isinstance(value, tuple) and not any(map(_parts, value)):
        more = indent + "    "
        filled = textwrap.wrap(", ".join(map(_leaf, value)) + ",", WIDTH, initial_indent=more, subsequent_indent=more)
        yield from filled
    else:
        for inner, x in parts[1]:
            yield from written(inner, x, ",", indent + "    ")
    yield f"{indent}{parts[2]}{tail}"


# -- rules


@lru_cache(maxsize=64)
def rules(spec: Spec) -> tuple[Pool, tuple[RuleRecord, ...]]:
    """Return the host functions of a rule in strict maths, and its records under every setting of its flags."""
    pool = Pool()
    return pool, tuple(_rule(spec, flags, pool) for flags in spec.settings())


def _rule(spec: Spec, flags: Mapping[str, bool], pool: Pool) -> RuleRecord:
    step, program = eager_text.rule_step(spec, flags), lower_rule(spec, flags)
    recurrences = targets.recurrences_of(spec, tuple(sorted(flags.items())))
    states = [
        StateRecord(
            s.name, s.nonneg, s.space.name, s.init, s.normalized_by or "", rounds_to_nearest(recurrences[s.name])
        )
        for s in spec.present(flags)
    ]
    make = partial(host.scalars_function, kernel_text.host_program(step), kernel_text.unpack_of(spec))
    function: Any = Name(pool.add("host_scalars", make))
    return RuleRecord(
        name=spec.name,
        suffix=targets.function_name(spec, flags).removeprefix(spec.name),
        flags=flags,
        step=eager_text.function_of(spec, flags),
        scalars=tuple(let.name for let in step.host),
        host=function,
        states=tuple(states),
        host_states=program.host_states,
        unchanged=tuple(tuple(sorted(spec.unchanged(at))) for at in spec.at_steps(flags)),
        differs=tuple(sorted(differing(spec, flags))),
        early=step.early,
        spaces=tuple(sorted(_spaces(program))),
        by_rows=needs_matrix(spec, flags),
        matrix=spec.matrix,
    )


def _spaces(program: Program) -> Iterator[str]:
    """Yield the small spaces of what a step computes or leaves as it is, and "call" where it calls for matrices."""
    nodes = list(postorder(program.roots()))
    yield from ({n.space.name for n in nodes} | {b.space.name for b in program.buffers}) & spaces.SMALL
    if any(n.op == "call" for n in nodes):
        yield "call"


def rule_text(spec: Spec) -> str:
    """Return the text of generated/<spec>/records.py."""
    pool, found = rules(spec)
    file = targets.source_name(spec.loc.file)
    lines = [
        f"# @generated by optgen: edit {file}, not this file.  {spec.name} · records",
        "#",
        f"#   spec      {file}:{spec.loc.line}  sha256 {targets.digest(spec.loc.file)}",
        f"#   rebuild   optgen build {spec.name}",
        "# fmt: off",
        "# ruff: noqa",
        "from optgen.runtime.records.join import RuleRecord, StateRecord",
    ]
    if names := host.needs(pool.functions):
        lines += wrapped("from optgen.runtime.records.scalars import ", names, "")
    for function in pool.functions:
        lines += ["", "", *function]
    return "\n".join([*lines, "", "", *written("RULES = ", found)]) + "\n"


# -- plans


def plan_text(plan: Plan) -> str:
    """Return the text of a plan's package: what it keeps, within which bounds, and its record."""
    found = plan_record(plan)
    file = targets.source_name(plan.loc.file)
    kept = ["An element, in bytes between steps; a sweep that uses a value reads or writes so many.", ""]
    kept += explain.storage_lines(explain.of_plan(plan))
    lines = [
        f'"""{plan.doc}',
        "",
        *(f"    {line}".rstrip() for line in kept),
        '"""',
        f"# @generated by optgen: edit {file}, not this file.  plan {plan.name}",
        "#",
        f"#   plan      {file}:{plan.loc.line}  sha256 {targets.digest(plan.loc.file)}",
        "# fmt: off",
        "# ruff: noqa",
    ]
    text = list(written("PLAN = ", found))
    names = [name for name in ("FormatRecord", "PlanRecord") if any(f"{name}(" in line for line in text)]
    lines.append(f"from optgen.runtime.records.join import {', '.join(names)}")
    if any("Field(" in line for line in text):
        lines.append("from optgen.runtime.records import Field")
    return "\n".join([*lines, "", *text]) + "\n"


def plan_record(plan: Plan) -> PlanRecord:
    weights = {}
    for param in (dtypes.bf16, dtypes.f16):
        fields = [_field(k, f) for k, f in plan.master.fields(param).items() if k]
        weights[param.torch] = FormatRecord(f"weight_{param.name}", tuple(fields), plan.master.noise_bits(param))
    given = {role: _format(plan, getattr(plan, role)) for role in ("signed", "nonneg", "initial", "small")}
    own = {state: _format(plan, fmt) for state, fmt in sorted(plan.overrides.items())}
    return PlanRecord(plan.small_numel, weights, **given, overrides=own)


def _format(plan: Plan, fmt: Format) -> FormatRecord:
    found = fmt.rounded("stochastic") if fmt.rounding == "auto" else fmt
    if found == floats.f32:
        return FP32
    names = field_names("", found.fields())
    fields = tuple(_field(names[k].removeprefix("_"), f) for k, f in found.fields().items())
    vector = fmt.of_vectors()
    return FormatRecord(
        codec=eager_text.codec_of(plan, found),
        fields=fields,
        noise=found.noise_bits,
        relative=found.relative,
        positive=found.positive,
        matrix=found.matrix,
        nearest=eager_text.codec_of(plan, fmt.rounded("nearest")) if fmt.rounding == "auto" else None,
        vector=None if vector == fmt else _format(plan, vector),
    )


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
