"""The check of a checkpoint file: its bytes, its structure, and the states under their plans."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from optgen.base.errors import UserError
from optgen.convert.source import TRAINED, Find, existing, rule_of, split
from optgen.runtime import files
from optgen.runtime.checkpoint import checkpoint, container
from optgen.runtime.checkpoint.container import CheckpointError
from optgen.runtime.records import dtype_name, dtype_of


@dataclass
class Checked:
    """The result of checking a file."""

    parameters: int = 0
    elements: int = 0
    findings: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)


def verify(path: str, find: Find, spec: str | None = None) -> Checked:
    """Check every byte of a file of save_checkpoint, then its shapes, codes and numbers; UserError if there is no file.

    find   returns the optimizer class of a rule
    spec   the rule that made the file, if it names none or one that is not found
    """
    found = Checked()
    try:
        content = container.read(existing(path))
    except CheckpointError as error:
        found.findings.append(str(error))
        return found
    found.parameters = len(content["about"]["parameters"])
    _weights(content, found)
    try:
        cls = find(spec or rule_of(content["about"]))
    except UserError as error:
        found.unchecked.append(f"the codes of its states: {error.message}; name the rule with --spec")
        return found
    _states(cls, content, found)
    return found


def _weights(content: Mapping[str, Any], found: Checked) -> None:
    """Compare the model with the parameters that the checkpoint describes, and look for NaN in it."""
    model = content["model"] or {}
    for i, one in enumerate(content["about"]["parameters"]):
        found.elements += math.prod(one["shape"])
        value, want = model.get(one["key"]), f"{one['dtype']} {one['shape']}"
        got = f"{dtype_name(value.dtype)} {list(value.shape)}" if isinstance(value, Tensor) else "nothing"
        if model and one["key"] is not None and got != want:
            found.findings.append(f"model: {one['key']}: expected {want} of parameter {i}, got {got}")
    for key, value in model.items():
        floats = isinstance(value, Tensor) and value.is_floating_point() and checkpoint.has_values(value)
        if floats and (wrong := int(value.isnan().sum())):
            found.findings.append(f"model: {key}: {wrong} of {value.numel()} are NaN")


def _states(cls: Any, content: Mapping[str, Any], found: Checked) -> None:
    """Check every state against the formats of its plan, as loading does."""
    about, saved = content["about"], content["optimizer"]
    params = [torch.empty(one["shape"], dtype=dtype_of(one["dtype"])) for one in about["parameters"]]
    for p in params:
        p.requires_grad_(p.dtype in TRAINED)
    groups = [{"params": own} for own in split(saved["param_groups"], params)]
    try:
        with torch.no_grad():
            checkpoint.read(cls, groups, saved, {p: {} for p in params})  # as if none had a state: no warning
        found.findings += files.misread(cls, cls([torch.zeros(1, requires_grad=True)]).defaults, content)
    except ValueError as error:
        found.findings += [line.strip() for line in str(error).splitlines()[1:]]
