"""The verdict on a plan for a rule: whether its formats fit the states, and the findings of the lint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from optgen.driver import targets
from optgen.formats.plan import Plan
from optgen.lang.spec import Spec
from optgen.verify import lint
from optgen.verify.lint import Finding


@dataclass(frozen=True)
class Verdict:
    """The findings of the lint about a pair over all its cases, each once."""

    findings: tuple[Finding, ...]
    discouraged: str  # why it is built all the same; "" if it need not be

    @property
    def refused(self) -> bool:
        return any(f.severity == "error" for f in self.findings) and not self.discouraged


def judge(spec: Spec, plan: Plan) -> Verdict:
    """Return the verdict. Raises UserError where a format cannot hold a state, and where the lint refuses."""
    verdict = look(spec, plan)
    if verdict.refused:
        for case in targets.cases(spec, plan):  # raises the first error
            lint.check(spec, plan, case.storage, case.flags, _where(case))
    return verdict


def look(spec: Spec, plan: Plan) -> Verdict:
    """Return the verdict, also where the lint refuses; raises UserError where a format does not fit, or is wrong."""
    found: list[Finding] = []
    for case in targets.cases(spec, plan):
        found += _linted(spec, case)
        found += [*lint.amplified(spec, case.storage, case.flags), *lint.overflow(spec, case.flags)]
    return Verdict(_once([*found, *lint.vectors(spec)]), plan.discouraged)


def discouraged(spec: Spec, cases: Iterable[targets.Case]) -> dict[str, str]:
    """Return the lint's first error about each state; {} where it finds none."""
    found: dict[str, str] = {}
    for f in _once(f for case in cases for f in _linted(spec, case)):
        if f.severity == "error":
            found.setdefault(f.state, f.reason)
    return found


def _linted(spec: Spec, case: targets.Case) -> list[Finding]:
    return lint.linted(spec, case.storage, case.flags, _where(case))


def _where(case: targets.Case) -> str:
    return " of vectors" if case.vector else ""


def _once(found: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return each (rule, state) once, errors first; a finding about vectors only where there is no general one."""
    seen: dict[tuple[str, str], Finding] = {}
    for f in sorted(found, key=lambda f: f.where != ""):
        seen.setdefault((f.code, f.state), f)
    return tuple(sorted(seen.values(), key=lambda f: lint.ORDER[f.severity]))
