"""The compiler, on one screen: every pass is a function IR -> IR, verified and logged after each stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from optgen.ir.program import Program, Schedule
from optgen.ir.verify import verify
from optgen.passes.convert import convert
from optgen.passes.decompose import decompose
from optgen.passes.fold import fold
from optgen.passes.fuse import fuse
from optgen.passes.hoist import hoist
from optgen.passes.name import name
from optgen.passes.place import place
from optgen.passes.share import share
from optgen.passes.sweeps import sweeps

PROGRAM_PASSES: tuple[Callable[[Program], Program], ...] = (
    decompose,  # primitives without a spelling become core ones
    fold,  #    constants and identities marked EXACT; in fast maths also the ROUNDS rules
    convert,  # fast maths: integers and floats meet in the mantissa; what intervals decide
    fuse,  #    fast maths: a product and the sum that reads it
    hoist,  #   what lives in host space moves there, fp64
    share,  #   equal nodes become one let
)
SCHEDULE_PASSES: tuple[Callable[[Schedule], Schedule], ...] = (
    place,  #   a state is stored in the last sweep that needs it
    name,  #    the author's names first
)

Log = Callable[[str, Program | Schedule, Program | Schedule], None]


def run(program: Program, maths: Literal["strict", "fast"] = "fast", log: Log | None = None) -> Schedule:
    """Program -> Schedule; `log(stage, before, after)` sees every stage."""
    from dataclasses import replace

    program = replace(program, maths=maths)
    verify(program, after="lower")
    for stage in PROGRAM_PASSES:
        new = stage(program)
        verify(new, after=stage.__name__)
        if log:
            log(stage.__name__, program, new)
        program = new
    schedule = sweeps(program)  # a cut after every element-wise reduction
    verify(schedule, after="sweeps")
    if log:
        log("sweeps", program, schedule)
    for later in SCHEDULE_PASSES:
        newer = later(schedule)
        verify(newer, after=later.__name__)
        if log:
            log(later.__name__, schedule, newer)
        schedule = newer
    return schedule


__all__ = [
    "PROGRAM_PASSES", "SCHEDULE_PASSES", "convert", "decompose", "fold", "fuse", "hoist", "name", "place", "run",
    "share", "sweeps",
]  # fmt: skip
