"""The formats that a plan may keep a state in, each under the name of its codec in the plan's modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from optgen.backends.printer import wrapped
from optgen.base import ready
from optgen.formats import floats
from optgen.formats.format import Format
from optgen.formats.plan import Plan
from optgen.ir.program import Program
from optgen.lang.spec import Spec
from optgen.lower import CodecPrograms, lower_codec

PLANS = "plans"
"""The folder of plans, in a generated folder and in this package."""


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


def shared(plan: Plan, others: Sequence[Plan]) -> dict[str, tuple[str, str]]:
    """Return codec name -> (plan, name there) of the codecs that one of the other plans has too."""
    found: dict[str, tuple[str, str]] = {}
    for other in others:
        theirs = {fmt: name for name, fmt in formats(other).items()}
        same = {name: theirs[fmt] for name, fmt in formats(plan).items() if fmt in theirs}
        if plan.master == other.master:
            same |= {name: name for name in ("weight_bf16", "weight_f16")}
        for name, there in same.items():
            found.setdefault(name, (other.name, there))
    return found


def imports(found: Mapping[str, tuple[str, str]], module: str) -> list[str]:
    """Return the lines that import codecs from a module (".triton") of the packages of other plans."""
    lines = []
    for plan in sorted({plan for plan, _ in found.values()}):
        names = [own if own == name else f"{name} as {own}" for own, (of, name) in found.items() if of == plan]
        lines += wrapped(f"from optgen.{PLANS}.{plan}{module} import ", sorted(names), "", whole=120)
    return lines


def is_ready(made: Plan | Spec) -> bool:
    """Return True for a plan or a rule that comes with the package."""
    return Path(made.loc.file).resolve().is_relative_to(ready.specs_dir().resolve())
