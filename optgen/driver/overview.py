"""`optgen list` and `optgen check`: the specs and plans, their errors, and which plan may store which rule."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from optgen.base import ready
from optgen.base.errors import UserError
from optgen.driver import judge, load
from optgen.driver.load import SpecEntry
from optgen.driver.project import DEFAULT_PLANS, is_pattern, read_config, wishes
from optgen.formats.plan import Plan
from optgen.lang.spec import Spec
from optgen.ops import dtypes
from optgen.verify import lint


def of_entry(entry: SpecEntry) -> dict[str, Any]:
    """Return a row of the list; a spec that cannot be loaded is listed with the error's code."""
    row: dict[str, Any] = {"name": entry.name, "file": str(entry.file), "own": entry.own}
    try:
        spec = load.find_spec(f"{entry.file}:{entry.name}")
    except UserError as error:
        return row | {"class": "", "like": "", "does": f"error {error.code}", "states": "", "cite": ""}
    states = ", ".join([s.name for s in spec.states] + [s.name for s in spec.host_states])
    does = spec.doc.partition("\n")[0]
    return row | {"class": spec.class_name, "like": spec.like or "", "does": does, "states": states, "cite": spec.cite}


def of_plan(plan: Plan) -> dict[str, Any]:
    """Return a row of the list; bytes are those of AdamW, after whose two moments plans are named."""
    adamw = load.find_spec(ready.specs_dir() / "adamw.py")
    states = adamw.present({f.name: f.default for f in adamw.flags})
    size, of_fp32 = (f"{plan.storage(states, d, False).bytes_per_param:g}" for d in (dtypes.bf16, dtypes.f32))
    row = {"name": plan.name, "doc": plan.doc.splitlines()[0] if plan.doc else "", "bytes": size}
    word = "discouraged" if plan.discouraged else ""
    return row | {"bytes_float32": of_fp32, "discouraged": word, "file": plan.loc.file}


def check(names: Sequence[str], plans: Sequence[str]) -> tuple[list[dict[str, Any]], list[UserError]]:
    """Return (a row per sound spec: its verdict under every plan, and the plans asked for, by default those of the
    build; the errors of the others)."""
    chosen = _chosen(plans) if plans else list(load.plans().values())
    rows, errors, built = [], list[UserError](), _built()
    own = [f"{e.file}:{e.name}" for e in load.entries().values() if e.own]  # E412 comes before all others
    for name in names or own:
        try:
            spec = load.find_spec(name)
            spec.check()
        except UserError as error:
            if names and error.code == "E404":
                raise
            errors.append(error)
            continue
        asked = [p.name for p in chosen] if plans else built.get(spec.name, list(DEFAULT_PLANS))
        verdicts, notes = {p.name: _verdict(spec, p) for p in chosen}, [str(f) for f in lint.vectors(spec)]
        row = {"name": spec.name, "file": spec.loc.file, "plans": verdicts, "asked": asked, "notes": notes}
        rows.append(row)
    return rows, errors


def _built() -> dict[str, list[str]]:
    """Return the plans under which the project builds each of its specs."""
    out: dict[str, list[str]] = {}
    for wish in wishes(load.home(), read_config(load.home())):
        out.setdefault(wish.spec, []).append(wish.plan)
    return out


def _chosen(names: Sequence[str]) -> list[Plan]:
    """Return the plans of these names, each once; a pattern stands for all that it matches."""
    out: dict[str, Plan] = {}
    for name in names:
        matches = [p for n, p in load.plans().items() if fnmatchcase(n, name)] if is_pattern(name) else []
        out |= {plan.name: plan for plan in matches or [load.find_plan(name)]}
    return list(out.values())


def _verdict(spec: Spec, plan: Plan) -> dict[str, Any]:
    try:
        verdict = judge.look(spec, plan)
    except UserError as error:
        return {"verdict": "does not fit", "findings": [error.message]}
    errors = [f for f in verdict.findings if f.severity == "error"]
    word = "ok" if not errors else "discouraged" if verdict.discouraged else "refused"
    return {"verdict": word, "findings": [str(f) for f in verdict.findings if f.severity != "note"]}
