"""sweeps: a program becomes the schedule of one kernel: what it reads, its lines, its stores.

rewrite:
    program  ->  sweep reads the buffers that it loads
"""

from __future__ import annotations

from optgen.ir.node import loads
from optgen.ir.program import Program, Schedule, Sweep


def sweeps(program: Program) -> Schedule:
    """See the module's docstring."""
    read = set(loads(program.roots()))
    reads = tuple(b.name for b in program.buffers if b.name in read)
    return Schedule(program, Sweep(reads, program.body, program.stores))
