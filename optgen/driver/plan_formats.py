"""The formats that a plan may keep a state in, each under the name of its codec in the plan's modules."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from optgen.formats import floats
from optgen.formats.format import Format
from optgen.formats.plan import Plan
from optgen.ir.program import Program
from optgen.lower import CodecPrograms, lower_codec

PLANS = "plans"
"""The folder of plans, in a generated folder."""


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
