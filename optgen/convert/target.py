"""Conversion of a checkpoint to another plan, or to torch.optim's form."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from optgen.base.errors import UserError
from optgen.convert.source import (
    TORCH,
    TRAINED,
    Find,
    Source,
    existing,
    grouped,
    placeholder,
    read,
    refuse,
    same_memory,
    split,
)
from optgen.runtime import files
from optgen.runtime.checkpoint import checkpoint, container
from optgen.runtime.checkpoint.atomic import instead_of
from optgen.runtime.options import options
from optgen.runtime.records import dtype_name, dtype_of
from optgen.runtime.states import low_bits, state


def convert(
    source: str,
    target: str,
    *,
    to: str,
    find: Find,
    spec: str | None = None,
    weights: str | None = None,
    param: str | None = None,
) -> dict[str, Any]:
    """Write the checkpoint `source` to `target` under the plan `to`, or for torch.optim ("torch").

    find      returns the optimizer class of a rule
    spec      the rule, if the file does not name it
    weights   a file with the model's state dict, if the checkpoint has no model
    param     the dtype of the parameters in the result; None keeps it
    Raises UserError, and writes nothing, if something is missing or does not fit.
    """
    found, rule = read(existing(source), spec, weights, find)
    made = None if to == TORCH else _rebuilt(find(rule), found, to, None if param is None else dtype_of(param), source)
    try:
        if made is None:
            _write_torch(found, Path(target))
        else:
            _write_own(found, made, Path(target))
    except OSError as error:
        raise UserError("E413", path=target, why=error.strerror or str(error)) from error
    shapes = [p.shape for p in found.parameters]
    return {
        "target": target, "to": to, "from": found.kind, "parameters": len(shapes),
        "elements": sum(math.prod(shape) for shape in shapes if shape is not None),
        "bytes": Path(target).stat().st_size,
    }  # fmt: skip


def _rebuilt(cls: Any, found: Source, plan: str, dtype: torch.dtype | None, source: str) -> Any:
    """Return an optimizer of the new plan that has taken over states and weights."""
    params = []
    for i, p in enumerate(found.parameters):
        converted = dtype is not None and p.dtype.is_floating_point
        if not (p.dtype in TRAINED or i in found.states or converted):
            params.append(placeholder(p))
            continue
        weight = torch.zeros(p.shape or ()) if p.weight is None else p.weight.detach().to(torch.float32)
        q = nn.Parameter(weight.to(dtype or p.dtype))
        low_bits.keep(q, weight)
        params.append(q)
    try:
        opt = cls(grouped(found, params), plan=plan)
        opt.load_state_dict(_dense(found))
    except (TypeError, ValueError) as error:
        raise refuse(source, str(error)) from error
    for group, kept in zip(opt.param_groups, found.groups, strict=True):
        group.update({key: kept[key] for key in ("seed", "streams") if key in kept})
    for number, (p, q) in enumerate(zip(found.parameters, params, strict=True)):
        if p.weight is not None or q not in opt.state:
            continue
        group = next(g for g in opt.param_groups if any(q is x for x in g["params"]))
        name = number if group.get("param_names") is None else p.name
        if any(f.owner == "p" for f in checkpoint.select(cls, group, q, name)[2].fields):
            raise refuse(
                source,
                f"plan {plan} keeps more of a weight than a {dtype_name(q.dtype)} parameter shows, "
                f"and the weights are not in it",
                "--weights FILE gives them: the model's state dict",
            )
    return opt


def _dense(found: Source) -> dict[str, Any]:
    """Return the state dict of torch.optim."""
    numbers = split(found.groups, range(len(found.parameters)))
    others = [{k: v for k, v in group.items() if k not in options.OWN} for group in found.groups]
    groups = [group | {"params": own} for group, own in zip(others, numbers, strict=True)]
    return {"state": found.states, "param_groups": groups}


def _write_own(found: Source, opt: Any, target: Path) -> None:
    """Write a converted checkpoint as save_checkpoint would."""
    params = [p for g in opt.param_groups for p in g["params"]]
    model = None if found.model is None else dict(found.model)
    waiting = [None if state.of(opt.state, q) else q.__dict__.get(low_bits.ATTRIBUTE) for q in params]
    rows = []
    for p, q, bits in zip(found.parameters, params, waiting, strict=True):
        of_weight = bits is not None or any(key.startswith("weight_") for key in opt.state.get(q, ()))
        known = model is not None and p.key is not None and (of_weight or not p.in_order)
        if model is not None and p.key is not None:
            old = model[p.key]
            for key, value in model.items():  # a tied weight has several keys
                if value is old or (isinstance(value, Tensor) and same_memory(value, old)):
                    model[key] = q.detach()
        rows.append({"key": p.key if known else None, "shape": list(q.shape), "dtype": dtype_name(q.dtype)})
    about = {**files.about(opt, None), "parameters": rows}
    container.write(target, {
        "optgen_checkpoint": container.VERSION, "about": about, "optimizer": opt.state_dict(), "model": model,
        "waiting": waiting, "extra": found.extra,
    })  # fmt: skip


def _write_torch(found: Source, target: Path) -> None:
    """Write torch.optim's form, with the fp32 model under a key that torch's load_state_dict ignores."""
    content = _dense(found)
    if found.model is not None:
        full = {p.key: p.weight for p in found.parameters if p.key is not None}
        content["model"] = {
            k: full.get(k, v.float() if isinstance(v, Tensor) and v.dtype in low_bits.NARROW else v)
            for k, v in found.model.items()
        }
    with instead_of(target) as file:
        torch.save(content, file)
