"""The commands on checkpoint files, with optimizers that are ready-made or compiled."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from optgen.base import ready
from optgen.convert import files
from optgen.convert.files import TORCH, existing
from optgen.driver import compile as compiling
from optgen.driver import load
from optgen.driver.terminal import Missing
from optgen.runtime.checkpoint import container
from optgen.runtime.checkpoint.container import CheckpointError
from optgen.runtime.layout import plans


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
    """Return the optimizer of a rule, ready-made or compiled."""
    spec = load.find_spec(rule)
    if Path(spec.loc.file).resolve().parent == ready.specs_dir().resolve():
        made = getattr(importlib.import_module("optgen._generated"), spec.class_name, None)
        if made is not None:
            plans.provider = plans.provider or compiling.provide
            return made
    return compiling.compile(spec, "fp32")
