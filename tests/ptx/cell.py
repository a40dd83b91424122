"""Train a cell by compiled Triton kernels whose PTX is executed on the CPU, beside the eager reference.

    python -m tests.ptx.cell    [cell, capability of the device] as JSON on standard input

It prints what is wrong.
Strict maths, a whole optimizer, through the runtime.  Results of matrix functions come from torch, as on a device.
Every launch is searched for races; the text of every kernel is scanned, and the machine code of every fourth.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests import product
from tests.product import Cell
from tests.ptx import driver, scan

SHAPES = (*product.SHAPES, *product.REDUCED, (8, 512))  # the last one: of full tiles
STEPS = 2


def emulated(cell: Cell) -> dict[str, Any]:
    """Train a cell; return what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            wrong = product.differing(cell, Path(folder), STEPS, ("triton",), SHAPES)
        except Exception as error:  # any failure belongs to the result
            wrong = [f"{type(error).__name__}: {error}".splitlines()[0][:300]]
    for x in driver.LOADED.values():
        found = scan.of_ptx(x.ptx)
        if x.cubin:
            found += scan.of_machine_code(x.ptx, x.tool("nvdisasm", "-c"))
        wrong += [f"{x.kernel.name}: {word}" for word in found]
    return {"wrong": wrong}


def main() -> None:
    words, capability = json.load(sys.stdin)
    words["flags"] = tuple((name, on) for name, on in words["flags"])
    torch.set_num_threads(1)
    driver.install(capability)
    driver.races, driver.assembled = True, 4
    print(json.dumps(emulated(Cell(**words))))


if __name__ == "__main__":
    main()
