"""`optgen replay`: make a recorded step again, and say where its bits differ."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch

from optgen.base.errors import UserError
from optgen.convert.source import existing, rule_of
from optgen.driver import compile as compiling
from optgen.driver import load, project
from optgen.driver.project import MATHS, Maths
from optgen.driver.terminal import Missing
from optgen.runtime.checkpoint.container import UNREADABLE, CheckpointError
from optgen.runtime.layout import plans
from optgen.runtime.modes import record


def replay(path: str, backend: str | None, spec: str | None, maths: Maths | None) -> dict[str, Any]:
    """Make the step in a file of `opt.record` again.

    backend, spec, maths  None: those of the record
    Returns what it is a step of, "parameters" (`record.replay`) and "notes" on what may explain
    differences.  UserError E420 for a file that cannot be replayed; Missing if the backend is not on this machine.
    """
    try:
        return _replayed(path, record.read(existing(path)), backend, spec, maths)
    except CheckpointError as error:
        said = str(error)
        why = f"it {said[len(path) + 1 :]}" if said.startswith(f"{path} ") else said.removeprefix(f"{path}: ")
        raise UserError("E420", path=path, why=why) from error
    except UNREADABLE as error:
        if str(error).startswith("backend="):
            raise Missing(str(error)) from error
        why = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise UserError("E420", path=path, why=why) from error


def _replayed(
    path: str, content: Mapping[str, Any], backend: str | None, spec: str | None, maths: Maths | None
) -> dict[str, Any]:
    about, here = content["about"], record.made_with()
    cls, by, asked = _class(about, spec, maths), str(about["backend"]), backend or str(about["backend"])
    notes = [
        f"recorded with {key} {was}, made again with {here[key]}"
        for key, was in about["made_with"].items() if was != here[key]
    ]  # fmt: skip
    if cls.__name__ != about["class"]:
        notes.append(f"recorded with {about['class']}, made again with {cls.__name__}")
    if asked != by:
        notes.append('backends round differently in fast maths; under maths="strict" all have the same bits')
    if about["batched"]:
        notes.append("matrices that were not recorded made this step as well, in batches with those that were")
    first = content["parameters"][0]["state"] or {"step": 0}
    torch.set_num_threads(about["threads"])
    return {
        "file": path, "class": about["class"], "step": int(first["step"]) + 1, "backend": asked, "recorded_by": by,
        "notes": notes, "parameters": record.replay(content, cls, asked),
    }  # fmt: skip


def _class(about: Mapping[str, Any], given: str | None, maths: Maths | None) -> Any:
    """Return the class of a record: ready-made, or compiled from its spec, in the maths that gives its very text."""
    plans.provider = plans.provider or compiling.provide
    module = str(about["module"])
    if given is None and maths is None and module.startswith(plans.READY):
        made = getattr(importlib.import_module(plans.READY.removesuffix(".")), str(about["class"]), None)
        if made is not None:
            return made
    spec = load.find_spec(given or rule_of(about))
    if given is None and maths is None and module.startswith(compiling.PACKAGE):
        for one in MATHS:
            if (made := compiling.compile(spec, about["built"][0], one)).__module__ == module:
                return made
    way = maths or project.read_config(load.home()).maths
    found = {plan: compiling.compile(spec, plan, way) for plan in about["plans"]}
    cls = next(iter(found.values()))
    plans.known.update({(cls, plan): plans.load(made, plan) for plan, made in found.items()})
    return cls
