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
    if to == TORCH:
        return _write_torch(found, Path(target))
    cls = find(rule)
    made = _rebuilt(cls, found, to, None if param is None else dtype_of(param), source)
    return _write_own(cls, found, made, Path(target), to)


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
        seeds = [{k: g[k] for k in ("seed", "streams") if k in g} for g in found.groups]
        dropped = options.OWN
        numbers = iter(range(len(params)))
        groups = [
            {**{k: v for k, v in g.items() if k not in dropped}, "params": [next(numbers) for _ in g["params"]]}
            for g in found.groups
        ]
        opt.load_state_dict({"state": found.states, "param_groups": groups})
    except (TypeError, ValueError) as error:
        raise refuse(source, str(error)) from error
    for group, seed in zip(opt.param_groups, seeds, strict=True):
        group.update(seed)
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


def _write_own(cls: Any, found: Source, opt: Any, target: Path, plan: str) -> dict[str, Any]:
    """Write a converted checkpoint as save_checkpoint would; returns a summary of it."""
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
    saved = opt.state_dict()
    _write(target, {
        "optgen_checkpoint": container.VERSION, "about": about, "optimizer": saved, "model": model,
        "waiting": waiting, "extra": found.extra,
    })  # fmt: skip
    return {
        "target": str(target), "to": plan, "from": found.kind, "parameters": len(params),
        "elements": sum(q.numel() for q in params), "bytes": target.stat().st_size,
    }  # fmt: skip


def _write(target: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint file; UserError if it cannot be written."""
    try:
        container.write(target, content)
    except OSError as error:
        raise UserError("E413", path=target, why=error.strerror or str(error)) from error


def _write_torch(found: Source, target: Path) -> dict[str, Any]:
    """Write torch.optim's form, with the fp32 model under a key that torch's load_state_dict ignores."""
    numbers = iter(range(len(found.parameters)))
    groups = []
    for group in found.groups:
        kept = {k: v for k, v in group.items() if k not in ("params", *options.OWN)}
        groups.append({**kept, "params": [next(numbers) for _ in group["params"]]})
    content: dict[str, Any] = {"state": found.states, "param_groups": groups}
    if found.model is not None:
        full = {p.key: p.weight for p in found.parameters if p.key is not None}
        content["model"] = {
            k: full.get(k, v.float() if isinstance(v, Tensor) and v.dtype in low_bits.NARROW else v)
            for k, v in found.model.items()
        }
    try:
        with instead_of(target) as file:
            torch.save(content, file)
    except OSError as error:
        raise UserError("E413", path=target, why=error.strerror or str(error)) from error
    return {
        "target": str(target), "to": TORCH, "from": found.kind, "parameters": len(found.parameters),
        "elements": sum(math.prod(p.shape or ()) for p in found.parameters if p.shape is not None),
        "bytes": target.stat().st_size,
    }  # fmt: skip
