"""The bytes per parameter of each value that a pair keeps between steps, and the error bound of storing it."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from optgen.formats.bound import Bound
from optgen.formats.format import Format
from optgen.formats.plan import Plan, Storage
from optgen.formats.views import VIEWS
from optgen.lang.declare import StateDecl
from optgen.lang.spec import Recurrence, Spec
from optgen.ops import spaces
from optgen.verify import bounds

UNKNOWN, NONE = "no bound is known", "no bound for an element"  # instead of an error
SIDE = 1024
"""Rows and columns of the matrices for which bytes of low rank are counted."""


@dataclass(frozen=True)
class ValueBytes:
    """A value between steps: its bytes per parameter, and the error bound of storing it once."""

    name: str
    stored: str
    bytes: float
    error: str
    valid: str
    steady: str = ""


def memory(spec: Spec, storage: Storage, decays: Mapping[str, Recurrence] | None = None) -> list[ValueBytes]:
    """Return a row for the weight and for each state; with `decays`, also the bound of averages after many steps."""
    master, param = storage.master, storage.param
    weight = _bound(master.bound(param))
    size = sum(f.bytes_per_param for f in master.fields(param).values())
    rows = [ValueBytes("p", master.describe(param), size, *weight)]
    held = {s.name: s.space for s in spec.states}
    ranks = {s.name: rank(spec, s) for s in spec.states if s.rank}
    for name, fmt in storage.states.items():
        error, valid = _bound(fmt.bound())
        steady = steady_state(fmt, (decays or {}).get(name))
        of, size = (f", one per {held[name].name}", 0.0)
        if spaces.dims(held[name]):
            of = "" if held[name] is spaces.elem else ", of square matrices"
            size = fmt.bytes_per_param
        if name in ranks:
            of, size = f", of {SIDE} x {SIDE} matrices of rank {ranks[name]}", size * ranks[name] / SIDE
        rows.append(ValueBytes(name, f"{fmt}{of}", size, error, valid, steady))
    return [*rows, *_views(storage.plan)]


def _views(plan: Plan) -> list[ValueBytes]:
    """Return a row for each further encoding of the weight."""
    found = {name: VIEWS[name] for name in plan.views}
    return [ValueBytes(name, str(fmt), fmt.bytes_per_param, *_bound(fmt.bound())) for name, fmt in found.items()]


def rank(spec: Spec, state: StateDecl) -> int:
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


def of_plan(plan: Plan) -> list[ValueBytes]:
    """Return a row for the weight in each narrow dtype, and for each format that keeps states."""
    rows = []
    for param in plan.master.params:
        size = sum(f.bytes_per_param for f in plan.master.fields(param).values())
        rows.append(
            ValueBytes(f"{param.name} weight", plan.master.describe(param), size, *_bound(plan.master.bound(param)))
        )
    roles = {role: getattr(plan, role) for role in ("signed", "nonneg", "initial", "small")}
    roles |= plan.of_matrices if plan.matrices == 8 else {}
    for role, fmt in {**roles, **plan.overrides}.items():
        for name, kept in {role: fmt, f"{role}, vectors": fmt.of_vectors()}.items():
            if name == role or kept != fmt:
                rows.append(ValueBytes(name, str(kept), kept.bytes_per_param, *_bound(kept.bound())))
    return [*rows, *_views(plan)]


def storage_lines(rows: Sequence[ValueBytes]) -> list[str]:
    """Return the rows as plain lines, for the head of a generated file."""
    names = max(len(r.name) for r in rows)
    indent = " " * (names + 2)
    wrapper = textwrap.TextWrapper(112, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return [line for r in rows for line in wrapper.wrap(f"{r.name:<{names}}  {r.bytes:g} B  {r.stored}")]
