"""The commands on checkpoint files, with compiled optimizers."""

from __future__ import annotations

from typing import Any

from optgen.convert import files
from optgen.convert.files import TORCH, existing
from optgen.driver import compile as compiling
from optgen.driver import load
from optgen.driver.terminal import Missing
from optgen.runtime.checkpoint import container
from optgen.runtime.checkpoint.container import CheckpointError


def verify(path: str) -> dict[str, Any]:
    """Check every byte of a file of save_checkpoint; UserError if there is no file.

    Returns {"parameters": their number, "findings": what is wrong}.
    """
    try:
        return {"parameters": len(container.read(existing(path))["about"]["parameters"]), "findings": []}
    except CheckpointError as error:
        return {"parameters": 0, "findings": [str(error)]}


def convert(
    source: str, target: str, *, to: str, spec: str | None = None, weights: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """Write the checkpoint `source` to `target` under the plan `to`, or for torch.optim ("torch")."""
    if to != TORCH:
        load.find_plan(to)
    try:
        return files.convert(source, target, to=to, find=_class, spec=spec, weights=weights, param=param)
    except ImportError as error:
        raise Missing(str(error)) from error


def _class(rule: str) -> Any:
    return compiling.compile(rule, "fp32")
