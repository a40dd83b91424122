"""Steps of several stages on CPU tensors: their workspace.

A row of the table (optgen/runtime/cpu/cpp/stages.h): addresses of p, g, the fields, the temps, the partial results of
sweeps; address of the dense copy or 0; matrices, rows, columns of the last two dimensions; numel,
columns, stream key; where it lies in the logical tensor (layout.Place).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from optgen.runtime.layout import workspace
from optgen.runtime.layout.workspace import Workspace, matrices
from optgen.runtime.records import Variant

NARROW = 64
"""Columns below which the matrices of a stack are walked as one long row: each of them is small, too."""


def dense_copies(variant: Variant, shape: torch.Size) -> int:
    """Return the number of fp32 tensors of the parameter's shape that the widest sweep fills, where it cannot sum as it
    goes; else 0.

    That is where blocks straddle the rows of matrices, and in stacks of matrices with very short rows.
    """
    columns = matrices(shape)[2]
    sweeps = [s for s in variant.stages if s.space == "elem" and s.matrices]
    straddling = any(columns % s.block for s in sweeps)
    if not sweeps or len(shape) < 3 or not (straddling or columns < NARROW):
        return 0
    from_elements = {t.name for t in variant.reduced}
    return max(1, *(len(from_elements.intersection(s.temps)) for s in sweeps))


def make(
    variant: Variant, shapes: Sequence[torch.Size], device: torch.device, pool: workspace.Pool | None
) -> Workspace:
    """Make the workspace of a bucket: temps, partial results, and dense copies where they are needed.

    Its last column holds the addresses of the dense copies, 0 where there is none.
    """
    few = workspace.make(variant, shapes, device, pool)
    copies = [dense_copies(variant, shape) * math.prod(shape) for shape in shapes]
    dense = torch.empty(sum(copies) + len(copies) * 16, dtype=torch.float32, device="cpu")
    at, addresses = -(-dense.data_ptr() // 64) * 64, []
    for count in copies:
        addresses.append(at if count else 0)
        at += -(-count * 4 // 64) * 64
    return replace(few, columns=[*few.columns, addresses], dense=dense)
