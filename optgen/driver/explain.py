"""`optgen explain` and `optgen show`: memory, bounds, traffic, sweeps, lint and host scalars of a pair; its program."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from optgen.base.loc import relative
from optgen.driver import judge, record_text, steps, targets, triton_text
from optgen.driver.memory import SIDE, ValueBytes, memory, rank
from optgen.driver.targets import Case
from optgen.driver.terminal import table
from optgen.formats.plan import Plan
from optgen.ir.program import Step
from optgen.ir.show import show, text
from optgen.lang.spec import Spec
from optgen.lower import lower_rule
from optgen.ops import dtypes, spaces
from optgen.runtime import records
from optgen.runtime.records import Eager, Variant
from optgen.verify import lint
from optgen.verify.lint import Finding


@dataclass(frozen=True)
class Pass:
    """A sweep over memory: the bytes per parameter that it reads and writes, and the values that it reduces."""

    reads: dict[str, float]
    writes: dict[str, float]
    reduces: tuple[str, ...]
    why: str

    @property
    def bytes(self) -> float:
        return sum(self.reads.values()) + sum(self.writes.values())


@dataclass(frozen=True)
class Explanation:
    """The content of `optgen explain`, as data."""

    spec: str
    plan: str
    param: str
    flags: Mapping[str, bool]
    source: str
    formulas: tuple[str, ...]
    memory: tuple[ValueBytes, ...]
    total: float
    plain: float  # the same states and weight in fp32
    sweeps: tuple[Pass, ...]
    host: tuple[tuple[str, str], ...]
    rules: tuple[str, ...]
    findings: tuple[Finding, ...]
    discouraged: str

    @property
    def traffic(self) -> float:
        return sum(s.bytes for s in self.sweeps)

    @property
    def verdict(self) -> str:
        """The pair in one sentence: bytes kept and moved, and what the lint found."""
        count = Counter(f.severity for f in self.findings)
        found = ", ".join(f"{n} {kind}{'s' if n > 1 else ''}" for kind, n in count.items()) or "nothing"
        size = f"{self.total:.4g} bytes per parameter ({self.plain:.4g} in fp32)"
        word = "; discouraged" if self.discouraged else ""
        does = f"keeps {size} under {self.plan} and moves {self.traffic:.4g} a step"
        return f"{self.spec} {does}; the lint finds {found}{word}."


def case_of(spec: Spec, plan: Plan, param: str, flags: Mapping[str, bool]) -> Case:
    """Return the case of a parameter dtype and flags (others by default), for tensors large enough to quantize."""
    setting = {f.name: flags.get(f.name, f.default) for f in spec.flags}
    return next(
        c for c in targets.cases(spec, plan) if not c.small and c.param.torch == param and dict(c.flags) == setting
    )


def explain(spec: Spec, plan: Plan, param: str = "bfloat16", flags: Mapping[str, bool] | None = None) -> Explanation:
    """Explain a pair for one parameter dtype and flag setting."""
    from optgen.lang.plain import plain_formulas

    case = case_of(spec, plan, param, flags or {})
    variant, step = _joined(spec, plan, case)
    decays = lint.recurrences(spec, case.flags)
    for s in spec.present(case.flags):
        if s.normalized_by in lint.cancelling(spec, tuple(case.flags.items())):  # bounds are of the quotient, then
            first, second = decays[s.name], decays[s.normalized_by]
            if first.decay and second.decay and case.storage.states[s.normalized_by].unrounded:
                decays[s.name] = replace(first, decay=first.decay / math.sqrt(second.decay))
    rows = tuple(memory(spec, case.storage, decays))
    verdict = judge.look(spec, plan)
    plain = 4.0 * (1 + sum(rank(spec, s) / SIDE for s in spec.present(case.flags) if spaces.dims(s.space)))
    host = tuple((let.name, text(let.node)) for let in step.host)
    return Explanation(
        spec.name, plan.name, param, dict(case.flags), f"{relative(spec.loc.file)}:{spec.loc.line}",
        tuple(plain_formulas(spec, case.flags)), rows, sum(r.bytes for r in rows), plain,
        tuple(_sweeps(variant, step)), host, step.program.rules, verdict.findings, verdict.discouraged,
    )  # fmt: skip


def lines(x: Explanation) -> Iterator[str]:
    """Yield an explanation as lines of text."""
    flags = "".join(f", {k}={v}" for k, v in x.flags.items())
    yield from (x.verdict, f"{x.spec} under {x.plan}, {x.param} parameters{flags}  ({x.source})")
    yield from (f"    {line}" for line in x.formulas)
    rows = [(k.name, k.stored, f"{k.bytes:g}", k.error, k.valid) for k in x.memory]
    rows.append(("total", "", f"{x.total:g}", "", f"{x.plain:g} in fp32"))
    yield from ("", table(("value", "stored as", "B/param", "|error| <=", "where"), rows), "")
    yield from (f"stored again at every step  {k.name}: {k.steady}" for k in x.memory if k.steady)
    for n, s in enumerate(x.sweeps, 1):
        what = [f"writes {' '.join(s.writes)}"] if s.writes else []
        what += [f"reduces {', '.join(s.reduces)}"] if s.reduces else []
        did = "; ".join([f"reads {' '.join(s.reads)}", *what])
        yield f"sweep {n}/{len(x.sweeps)}  for {s.why}: {did}: {s.bytes:g} B per parameter"
    speed = f"{x.traffic / 4.8:.3g} ms per 1e9 parameters at 4.8 TB/s"  # the memory of an H200
    yield f"traffic    {x.traffic:g} B per parameter and step; {speed}"
    yield f"host       {len(x.host)} scalars in fp64 per step: " + ", ".join(name for name, _ in x.host)
    if x.rules:
        yield f"fast maths rounds differently by: {', '.join(x.rules)}"
    yield from (f"lint       {f}" for f in x.findings or ["nothing to say"])
    if x.discouraged:
        yield f"discouraged {x.discouraged}"


def _variant(spec: Spec, plan: Plan, case: Case) -> Variant:
    return next(v for v in record_text.variants(spec, plan) if v.function == targets.case_name(spec, case))


def _joined(spec: Spec, plan: Plan, case: Case) -> tuple[Variant, Step]:
    """Return the records of a case, and the step of the rule alone that they were made of."""
    variant = _variant(spec, plan, case)
    assert variant.rule is not None
    found = [s for flags, s, _ in steps.kernel_steps(spec, "fast") if flags == case.flags]
    return variant, next(s for s in found if s.early == variant.rule.early)


def _sizes(variant: Variant) -> dict[str, dict[str, float]]:
    """Return the bytes per parameter of each value's fields; of rows, columns and other few values none."""
    grain = float(dtypes.FROM_TORCH[variant.param].bytes)
    out = {"p": {"p": grain}, "g": {"g": grain}}
    for f in variant.fields:
        if f.space == "elem":
            out.setdefault(f.owner, {})[f.name] = dtypes.FROM_TORCH[f.dtype].bytes * f.width / f.per
    return out | {t.name: {t.name: 4.0 if t.wide else 2.0} for t in variant.temps if t.space == "elem"}


def _sweeps(variant: Variant, step: Step) -> Iterator[Pass]:
    rule, kept = variant.rule, variant.eager
    assert rule is not None
    sizes, temps = _sizes(variant), {t.name: t for t in variant.temps}

    def moved(names: Iterable[str]) -> dict[str, float]:
        return {field: size for name in names for field, size in sizes.get(name, {}).items()}

    why = iter(stage.why for stage in step.sweeps)
    for stage in (s for s in rule.stages if s.space == "elem"):
        yield Pass(
            moved(_read(stage, kept)),
            moved(variant.stored_by(stage) + [x for x in stage.temps if temps[x].space == "elem"]),
            tuple(f"{temps[x].reduction} {x}" for x in stage.temps if temps[x].reduction),
            f"{', '.join(stage.reduces)} as a whole" if stage.reduces else next(why),
        )


def _read(stage: records.Stage, kept: Eager) -> list[str]:
    """Return the values that a stage reads, and those that they are relative to; random numbers are not read."""
    read = [x for x in stage.reads if x not in stage.absent]
    return [*read, *(kept.relative[x] for x in read if x in kept.relative)]


# -- show


def parts(spec: Spec, plan: Plan, case: Case) -> dict[str, str]:
    """Return title -> text of the program of the rule, and of the codecs that keep its values."""
    out = {"program": show(lower_rule(spec, case.flags))}
    used = _variant(spec, plan, case).eager.codecs
    for name, codec, _, doc in triton_text.codecs(plan, "fast"):
        if owners := [owner for owner, own in used.items() if own == name]:
            made = {"decode": codec.decode, "encode": codec.encode or codec.nearest}
            lines = [f"{k}:\n{show(s.schedule)}" for k, step in made.items() for s in step.stages]
            out[f"codec of {', '.join(owners)}: {doc}"] = "\n".join(lines)
    return out
