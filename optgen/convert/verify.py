"""The check of a checkpoint file: its bytes, its structure, and the states under their plans."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optgen.base.errors import UserError
from optgen.convert.source import (
    TRAINED,
    Find,
    existing,
    groups_and_states,
    is_own,
    is_state_dict,
    load_torch,
    rule_of,
    split,
)
from optgen.runtime import files
from optgen.runtime.checkpoint import checkpoint, container
from optgen.runtime.checkpoint.container import CheckpointError
from optgen.runtime.checkpoint.content import problem
from optgen.runtime.records import dtype_name, dtype_of


@dataclass
class Checked:
    """The result of checking a file."""

    kind: str = ""
    parameters: int = 0
    elements: int = 0
    findings: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)


def verify(path: str, find: Find, spec: str | None = None) -> Checked:
    """Check every byte of a file, then its shapes, codes and numbers; UserError if there is no such file.

    find   returns the optimizer class of a rule
    spec   the rule that made the file, if it names none or one that is not found
    """
    file = existing(path)
    found = Checked()
    try:
        content = _open(file, found)
    except CheckpointError as error:
        found.findings.append(str(error))
        return found
    saved = content if is_state_dict(content) else content.get("optimizer")
    if not isinstance(saved, Mapping) or not is_state_dict(saved):
        found.findings.append(f"{path} holds no optimizer: expected 'state' and 'param_groups'")
        return found
    try:
        groups_and_states(saved, file)
    except UserError as error:
        found.findings.append(error.message)
        return found
    found.parameters = sum(len(g["params"]) for g in saved["param_groups"])
    if not is_own(saved):
        found.kind = f"{found.kind} of another package"
        for number, entry in saved["state"].items():
            _nan(f"state of {number}", entry, found)
        found.unchecked.append("the shapes and codes of its states: it is not one of optgen's")
        return found
    if problem(content):
        found.unchecked.append("shapes and codes of its states: it does not say its rule and parameters")
        return found
    about = content["about"]
    _weights(content, found)
    try:
        cls = find(spec or rule_of(about))
    except UserError as error:
        found.unchecked.append(f"the codes of its states: {error.message}; name the rule with --spec")
        return found
    _states(cls, content, found)
    return found


def _open(file: Path, found: Checked) -> dict[str, Any]:
    """Read a file of any kind and record its kind; CheckpointError if it is damaged."""
    if container.is_of_torch(file) and zipfile.is_zipfile(file):
        found.kind = "torch.save"
        try:
            with zipfile.ZipFile(file) as archive:
                bad = archive.testzip()
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{file} is damaged: {error}") from error
        if bad is not None:
            raise CheckpointError(f"{file} is damaged in {bad}")
        found.unchecked.append("bytes outside the archive's entries: it has no checksum of the whole file")
        return load_torch(file)
    found.kind = "optgen checkpoint"
    return container.read(file)


def _weights(content: Mapping[str, Any], found: Checked) -> None:
    """Compare the model with the parameters that the checkpoint describes."""
    model = content["model"]
    _nan("model", model, found)
    for i, one in enumerate(content["about"]["parameters"]):
        found.elements += math.prod(one["shape"])
        key = one.get("key")
        if key is None or not isinstance(model, Mapping):
            continue
        value = model.get(key)
        want = f"{one['dtype']} {one['shape']}"
        got = f"{dtype_name(value.dtype)} {list(value.shape)}" if isinstance(value, Tensor) else "nothing"
        if got != want:
            found.findings.append(f"model: {key}: expected {want} of parameter {i}, got {got}")


def _nan(where: str, values: object, found: Checked) -> None:
    """Record the tensors of a mapping that have NaN elements."""
    for key, value in values.items() if isinstance(values, Mapping) else ():
        if isinstance(value, Tensor) and type(value) is Tensor and value.is_floating_point():
            wrong = int(value.isnan().sum())
            if wrong:
                found.findings.append(f"{where}: {key}: {wrong} of {value.numel()} are NaN")


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
