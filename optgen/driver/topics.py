"""`optgen explain` of what is no rule: an error's code, a finding of the lint, a plan."""

from __future__ import annotations

import re
from collections.abc import Iterator

from optgen.base.errors import TABLE
from optgen.driver import load, memory
from optgen.verify import lint


def lines(name: str) -> Iterator[str]:
    """Yield what is known of an error's code (E101), a finding's (L2) or a plan; nothing for another name."""
    if (code := name.upper()) in TABLE:
        yield from _of_error(code)
    elif found := re.search(rf"^{re.escape(code)}\s+(.*\n(?:    .*\n)*)", lint.__doc__ or "", re.M):
        yield f"finding {code} of the lint"
        yield f"    {' '.join(found[1].split())}"
        yield "    hint: `optgen check RULE --plan PLAN` shows the states that have it (docs/formats.md, The lint)"
    elif name in load.plans() and name not in load.entries():
        plan = load.plans()[name]
        yield from (f"{name}, a plan  ({plan.loc})" if plan.loc else f"{name}, a plan", plan.doc, "")
        yield from memory.storage_lines(memory.of_plan(plan))
        yield from ("", f"discouraged: {plan.discouraged}") if plan.discouraged else ()


def _of_error(code: str) -> Iterator[str]:
    """Yield the row of an error, with <name> where a message has the name at fault."""
    row = TABLE[code]
    yield f"error {code}"
    for label, text in ("", row.message), ("note: ", row.note), ("hint: ", row.hint):
        if text:
            yield f"    {label}" + re.sub(r"{(\w+)[^}]*}", r"<\1>", text)
