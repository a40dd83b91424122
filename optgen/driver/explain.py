"""`optgen explain` and `optgen show`: memory, bounds, traffic, sweeps, lint and host scalars of a pair; its passes."""

from __future__ import annotations

import difflib
import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from optgen import passes
from optgen.base.loc import relative
from optgen.driver import judge, targets
from optgen.driver.project import Maths
from optgen.driver.targets import Case
from optgen.formats.bound import Bound
from optgen.formats.format import Format
from optgen.formats.plan import Plan, Storage
from optgen.ir.node import postorder
from optgen.ir.program import Program, Schedule, Step
from optgen.ir.show import show, text
from optgen.lang.declare import StateDecl
from optgen.lang.spec import Recurrence, Spec
from optgen.lower import lower
from optgen.ops import dtypes, spaces
from optgen.ops.prims import REDUCTIONS
from optgen.verify import bounds, lint
from optgen.verify.lint import Finding

UNKNOWN, NONE = "no bound is known", "no bound for an element"  # instead of an error
SIDE = 1024
"""Rows and columns of the matrices for which bytes of low rank are counted."""


# -- memory


@dataclass(frozen=True)
class Kept:
    """A value between steps: its bytes per parameter, and the error bound of storing it once."""

    name: str
    stored: str
    bytes: float
    error: str
    valid: str
    steady: str = ""


def memory(spec: Spec, storage: Storage, decays: Mapping[str, Recurrence] | None = None) -> list[Kept]:
    """Return a row for the weight and for each state; with `decays`, also the bound of averages after many steps."""
    master, param = storage.master, storage.param
    weight = _bound(master.bound(param))
    size = sum(f.bytes_per_param for f in master.fields(param).values())
    rows = [Kept("p", master.describe(param), size, *weight)]
    held = {s.name: s.space for s in spec.states}
    ranks = {s.name: _rank(spec, s) for s in spec.states if s.rank}
    for name, fmt in storage.states.items():
        error, valid = _bound(fmt.bound())
        steady = steady_state(fmt, (decays or {}).get(name))
        of, size = (f", one per {held[name].name}", 0.0)
        if spaces.dims(held[name]):
            of = "" if held[name] is spaces.elem else ", of square matrices"
            size = fmt.bytes_per_param
        if name in ranks:
            of, size = f", of {SIDE} x {SIDE} matrices of rank {ranks[name]}", size * ranks[name] / SIDE
        rows.append(Kept(name, f"{fmt}{of}", size, error, valid, steady))
    return rows


def _rank(spec: Spec, state: StateDecl) -> int:
    """Return the rank of a state by default, of matrices of SIDE rows and columns; SIDE where it has none."""
    own = state.rank if isinstance(state.rank, int) else SIDE
    return min(int(next((h.values[0] for h in spec.hypers if h.name == state.rank), own)), SIDE)


def _bound(bound: Bound | None) -> tuple[str, str]:
    """Return (error, range) in words; a user's format may have none, and so an element of which only means are kept."""
    if bound is None:
        return UNKNOWN, ""
    if bound.value == 0:
        return "exact", bound.valid
    if math.isinf(bound.value):
        return NONE, bound.valid
    return f"{bound.value:.3g} {'|x|' if bound.of == 'value' else bound.of}", bound.valid


def steady_state(fmt: Format, recurrence: Recurrence | None) -> str:
    none = fmt.exact or "" not in fmt.fields() or fmt.bound() is None
    if none or recurrence is None or recurrence.kind != "ema" or not recurrence.decay or recurrence.decay >= 1:
        return ""
    return f"under a decay of {recurrence.decay:g}: {bounds.steady_state(fmt, recurrence.decay)}"


def of_plan(plan: Plan) -> list[Kept]:
    """Return a row for the weight in each narrow dtype, and for each format that keeps states."""
    rows = []
    for param in (dtypes.bf16, dtypes.f16):
        size = sum(f.bytes_per_param for f in plan.master.fields(param).values())
        rows.append(Kept(f"{param.name} weight", plan.master.describe(param), size, *_bound(plan.master.bound(param))))
    roles = {role: getattr(plan, role) for role in ("signed", "nonneg", "initial", "small")}
    roles |= plan.of_matrices if plan.matrices == 8 else {}
    for role, fmt in {**roles, **plan.overrides}.items():
        for name, kept in {role: fmt, f"{role}, vectors": fmt.of_vectors()}.items():
            if name == role or kept != fmt:
                rows.append(Kept(name, str(kept), kept.bytes_per_param, *_bound(kept.bound())))
    return rows


def storage_lines(rows: Sequence[Kept]) -> list[str]:
    """Return the rows as plain lines, for the head of a generated file."""
    names = max(len(r.name) for r in rows)
    indent = " " * (names + 2)
    wrapper = textwrap.TextWrapper(112, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return [line for r in rows for line in wrapper.wrap(f"{r.name:<{names}}  {r.bytes:g} B  {r.stored}")]


# -- everything


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
    memory: tuple[Kept, ...]
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
    step = passes.step(lower(spec, case.flags, case.storage), "fast")
    decays = lint.recurrences(spec, case.flags)
    rows = tuple(memory(spec, case.storage, decays))
    verdict = judge.look(spec, plan)
    plain = 4.0 * (1 + sum(_rank(spec, s) / SIDE for s in spec.present(case.flags) if spaces.dims(s.space)))
    host = tuple((let.name, text(let.node)) for let in step.host)
    return Explanation(
        spec.name, plan.name, param, dict(case.flags), f"{relative(spec.loc.file)}:{spec.loc.line}",
        tuple(plain_formulas(spec, case.flags)), rows, sum(r.bytes for r in rows), plain, tuple(_sweeps(step)), host,
        step.program.rules, verdict.findings, verdict.discouraged,
    )  # fmt: skip


def _sweeps(step: Step) -> Iterator[Pass]:
    for stage in step.sweeps:
        sweep = stage.schedule.sweep
        buffers = stage.schedule.program.buffers
        size = {b.name: b.bytes_per_param for b in buffers if b.space.name in ("elem", "block") and b.role != "partial"}
        yield Pass(
            {name: size[name] for name in sweep.reads if size.get(name)},  # random numbers are drawn, not read
            {s.buffer: size[s.buffer] for s in sweep.stores if s.buffer in size},
            tuple(f"{b.reduction} {b.name}" for b in stage.schedule.partials),
            why_last(step) if stage is step.sweeps[-1] else stage.why,
        )


def why_last(step: Step) -> str:
    """Return the reason for the number of sweeps."""
    program = step.program
    count = len(step.sweeps)
    if len(step.stages) == 1:
        of = f" (and of its block of {program.block})" if program.block > 1 else ""
        return f"one sweep: every value depends on values of its own element{of} only"
    needs: dict[str, dict[str, None]] = {}  # user -> operations
    seen: set[int] = set()
    lets = [(f"{let.name} ({let.loc.short})", let.node) for let in program.body if let.loc is not None]
    for user, root in [*lets, *((f"keeping {program.buffer(s.buffer).owner}", s.node) for s in program.stores)]:
        new = [n for n in postorder([root]) if n.uid not in seen and (
            n.op in ("call", "matmul") or (n.op in REDUCTIONS and n.args[0].space == spaces.elem))]  # fmt: skip
        seen |= {n.uid for n in new}
        needs.setdefault(user, {}).update((str(n.attr) if n.op == "call" else n.op, None) for n in new)
    users = [f"{user} needs {', '.join(ops)}" for user, ops in needs.items() if ops]
    early = f"; {' and '.join(step.early)} stored early and read back: fewer bytes than computing it again"
    sweeps = "1 sweep and work on what it reduces" if count == 1 else f"{count} sweeps"
    return f"{sweeps}: " + "; ".join(users) + (early if step.early else "")


# -- show


@dataclass(frozen=True)
class Stage:
    """The IR after a pass; `changed` is False if its text is that of before."""

    name: str
    text: str
    changed: bool
    diff: str


def stages(spec: Spec, case: Case, maths: Maths) -> list[Stage]:
    """Return the program as it is lowered, and after every pass."""
    program = lower(spec, case.flags, case.storage)
    first = show(program)
    out = [Stage("lower", first, True, first)]

    def log(name: str, before: Program | Schedule, after: Program | Schedule) -> None:
        old, new = show(before), show(after)
        lines = difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0)
        diff = "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))
        out.append(Stage(name, new, old != new, diff))

    passes.step(program, maths, log)
    return out
