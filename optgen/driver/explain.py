"""What a user asks of a pair (spec, plan): memory, bounds, traffic, sweeps and why, lint, host scalars."""

from __future__ import annotations

from optgen.formats.plan import Storage
from optgen.lang.spec import Spec


def storage_lines(spec: Spec, storage: Storage) -> list[str]:
    """The storage table as plain lines, for the header of a generated file."""
    rows = [("p", storage.master.describe(storage.param), sum(f.bytes_per_param for f in storage.master.fields(storage.param).values()))]
    rows += [(name, str(fmt), fmt.bytes_per_param) for name, fmt in storage.states.items()]
    wide = [max(len(r[k]) for r in rows) for k in (0, 1)]
    return [f"{a:<{wide[0]}}  {b:<{wide[1]}}  {c:g} B" for a, b, c in rows]
