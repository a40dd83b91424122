"""place: stores stand in the last sweep, in the order of the buffers; a state is never read back after it was encoded.

rewrite:
    stores in the order in which formats made them  ->  stores in buffer order
"""

from __future__ import annotations

from dataclasses import replace

from optgen.ir.program import Schedule


def place(schedule: Schedule) -> Schedule:
    """See the module's docstring."""
    order = {b.name: i for i, b in enumerate(schedule.program.buffers)}
    last = schedule.sweeps[-1]
    stores = tuple(sorted(last.stores, key=lambda s: order[s.buffer]))
    if stores == last.stores:
        return schedule
    return replace(schedule, sweeps=(*schedule.sweeps[:-1], replace(last, stores=stores)))
