"""The compiler, on one screen: every pass is a function IR -> IR, verified after each stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

from optgen.ir.program import Program, Schedule, Stage, Step
from optgen.ir.verify import verify
from optgen.ops import spaces
from optgen.passes import scalars
from optgen.passes.convert import convert
from optgen.passes.cut import cut
from optgen.passes.decompose import decompose
from optgen.passes.fold import fold
from optgen.passes.fuse import fuse
from optgen.passes.hoist import hoist
from optgen.passes.linear import linear
from optgen.passes.name import name
from optgen.passes.place import place
from optgen.passes.share import share

PROGRAM_PASSES: tuple[Callable[[Program], Program], ...] = (
    decompose,  # primitives without a spelling become core ones
    fold,  #    constants and identities marked EXACT; in fast maths also the ROUNDS rules
    convert,  # fast maths: integers and floats meet in the mantissa; what intervals decide
    fuse,  #    fast maths: a product and the sum that reads it
    hoist,  #   what lives in host space moves there, fp64
    share,  #   equal nodes become one let
)
SCHEDULE_PASSES: tuple[Callable[[Any], Schedule], ...] = (
    place,  #   a program becomes the schedule of one kernel
    name,  #    the author's names first
)


@lru_cache(maxsize=512)
def _once(stages: tuple[Callable[[Any], Any], ...], ir: Any, numbers: str) -> Any:
    for stage in stages:
        ir = stage(ir)
        verify(ir, after=stage.__name__)
    return ir


def _passed(stages: tuple[Callable[[Any], Any], ...], program: Program) -> Any:
    """Return what the stages make of a program; equal ones, which settings of flags and plans share, pass once."""
    return _once(stages, program, repr((program.ranges, program.host_states)))  # == does not tell 0.0 from -0.0


def step(program: Program, maths: Literal["strict", "fast"] = "fast") -> Step:
    """Return the kernels of a whole optimizer step."""
    whole = replace(program, maths=maths)
    verify(whole, after="lower")
    if maths == "fast" and (new := linear(whole)) is not whole:
        verify(new, after="linear")
        whole = new
    pieces, early = cut(whole)
    programs = []
    for piece in pieces:
        verify(piece.program, after="cut")
        of_piece = "strict" if piece.program.space == spaces.whole else maths
        programs.append(_passed(PROGRAM_PASSES, replace(piece.program, maths=of_piece)))
    programs, host = scalars.merged(programs)
    names = [let.name for let in host]
    stages = []
    for piece, own in zip(pieces, programs, strict=True):
        taken = tuple(names.index(x.name) for x in own.host)
        stages.append(Stage(_passed(SCHEDULE_PASSES, own), piece.why, taken))
    rules = {*whole.rules, *(rule for x in programs for rule in x.rules)}
    whole = replace(whole, rules=tuple(sorted(rules)))
    return Step(whole, tuple(stages), host, scalars.locals_of(programs), early)


__all__ = [
    "PROGRAM_PASSES", "SCHEDULE_PASSES", "convert", "cut", "decompose", "fold", "fuse", "hoist", "linear", "name",
    "place", "share", "step",
]  # fmt: skip
