"""Whether a plan may store a rule's states: the formats that fit, and the lint's verdict."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from optgen.driver import targets
from optgen.formats.plan import Plan
from optgen.lang.spec import Spec
from optgen.lower import untouched
from optgen.verify import lint
from optgen.verify.lint import Finding


@dataclass(frozen=True)
class Verdict:
    """What the lint says about a pair over all its cases, each finding once."""

    findings: tuple[Finding, ...]
    discouraged: str  # why it is built all the same; "" if it need not be

    @property
    def refused(self) -> bool:
        return any(f.severity == "error" for f in self.findings) and not self.discouraged


def judge(spec: Spec, plan: Plan, *, force: bool = False) -> Verdict:
    """The verdict; raises UserError where a format cannot hold a state or a compander is wrong, and, without `force`,
    where the lint refuses."""
    cases = list(targets.cases(spec, plan))
    if force:
        found = [f for case in cases for f in _linted(spec, case)]
    else:
        found = [f for case in cases for f in lint.check(spec, plan, case.storage, case.flags, _where(case))]
    found += [*(f for case in cases for f in lint.overflow(spec, case.flags)), *lint.vectors(spec)]
    return Verdict(_once(found), plan.discouraged or ("--force" if force else ""))


def look(spec: Spec, plan: Plan) -> Verdict:
    """The verdict without refusing on the lint's account; raises UserError where a format does not fit, or is wrong."""
    cases = list(targets.cases(spec, plan))
    found = [f for case in cases for f in (*_linted(spec, case), *lint.overflow(spec, case.flags))]
    return Verdict(_once([*found, *lint.vectors(spec)]), plan.discouraged)


def discouraged(spec: Spec, cases: Iterable[targets.Case]) -> dict[str, str]:
    """Return the lint's first error about each state; {} where it finds none."""
    found: dict[str, str] = {}
    for f in _once(f for case in cases for f in _linted(spec, case)):
        if f.severity == "error":
            found.setdefault(f.state, f.reason)
    return found


def _linted(spec: Spec, case: targets.Case) -> list[Finding]:
    lint.prove_companders(case.storage)
    still = untouched(spec, case.storage, case.flags)
    found = lint.lint(lint.recurrences(spec, case.flags), case.storage, still)
    return [replace(f, where=_where(case)) for f in found]


def _where(case: targets.Case) -> str:
    return " of vectors" if case.vector else ""


def _once(found: Iterable[Finding]) -> tuple[Finding, ...]:
    """Each (rule, state) once, in order; what is about vectors alone is said of none but them."""
    seen: dict[tuple[str, str], Finding] = {}
    for f in sorted(found, key=lambda f: f.where != ""):
        seen.setdefault((f.code, f.state), f)
    order = {"error": 0, "warning": 1, "note": 2}
    return tuple(sorted(seen.values(), key=lambda f: order[f.severity]))
