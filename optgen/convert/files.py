"""Conversion of checkpoint files: from any plan or other package to any plan, or to torch.optim's form.

An optimizer of the file's plan loads the file. Its dense states and full weights are what one of the new plan takes
over.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from optgen.base.errors import UserError
from optgen.runtime import files
from optgen.runtime.checkpoint import checkpoint, container
from optgen.runtime.checkpoint.atomic import instead_of
from optgen.runtime.checkpoint.container import CheckpointError
from optgen.runtime.options import overrides
from optgen.runtime.records import dtype_of
from optgen.runtime.records.problems import Problems
from optgen.runtime.states import low_bits

Groups = Sequence[Mapping[str, Any]]

TORCH = "torch"
"""The target that is not a plan: torch.optim's own form."""

FP32 = "fp32_master"
"""The plan that keeps all bits of states and weights, whatever their dtype."""

MODEL = ("model", "state_dict", "model_state_dict")
"""The keys under which training scripts save a model's state dict beside the optimizer's."""


class Refused(ValueError):
    """A reason not to convert a checkpoint, and a hint."""

    def __init__(self, why: str, hint: str = "") -> None:
        super().__init__(why)
        self.hint = hint


class Source(NamedTuple):
    """A checkpoint that was read.

    optimizer   one of its rule and plan, with its options, states and weights
    weights     the full weights of the parameters
    model       the model's state dict
    keys        the key in it of each parameter
    """

    optimizer: Any
    weights: list[Tensor]
    model: dict[str, Any]
    keys: list[str]
    extra: Any


class ModelState(nn.Module):
    """A model that has nothing but its state dict."""

    def __init__(self, content: dict[str, Any]) -> None:
        super().__init__()
        self.content = content

    def state_dict(self, *_: Any, **__: Any) -> Any:
        return self.content


def convert(
    source: str, target: str, *, to: str, find: Callable[[str], Any], spec: str | None = None,
    weights: str | None = None, param: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Write the checkpoint `source` to `target` under the plan `to`, or for torch.optim ("torch").

    find      returns the optimizer class of a rule
    spec      the rule, if the file does not name it
    weights   a file with the model's state dict, which a checkpoint without the model needs
    param     the dtype of the parameters in the result; None keeps it
    Raises UserError, and writes nothing, if something is missing or does not fit.
    """
    try:
        found = _read(source, find, spec, weights)
        made = None if to == TORCH else _rebuilt(found, to, None if param is None else dtype_of(param))
    except (TypeError, ValueError, RuntimeError) as error:
        why = str(error).removeprefix(f"{source} ").removeprefix(f"{source}: ")
        raise UserError("E418", path=source, why=why, hint=getattr(error, "hint", "")) from error
    try:
        if made is None:
            _write_torch(found, Path(target))
        else:
            files.save_checkpoint(target, made, ModelState(_with(found, _parameters(made))), found.extra)
    except OSError as error:
        raise UserError("E413", path=target, why=error.strerror or str(error)) from error
    return {
        "target": target, "to": to, "parameters": len(found.weights),
        "elements": sum(weight.numel() for weight in found.weights), "bytes": Path(target).stat().st_size,
    }  # fmt: skip


def existing(path: str) -> Path:
    """Return the path of a file that can be opened; UserError if it cannot."""
    file = Path(path)
    try:
        file.open("rb").close()
    except OSError as error:
        raise UserError("E417", path=path, why=error.strerror or str(error)) from error
    return file


# -- reading ---------------------------------------------------------------------------------------------------


def _load(path: str, weights: bool = False) -> dict[str, Any]:
    """Read a file of save_checkpoint, verifying its checksum, or one of torch.save.

    weights   any safetensors file will do
    """
    file = existing(path)
    if not container.is_of_torch(file):
        plain = weights and file.suffix == ".safetensors"
        return container.tensors_of(file) if plain else container.read(file)
    try:
        return container.load_torch(file)
    except CheckpointError as error:  # newer torch names an unknown class after the first line of its message
        if "torchao" not in str(error.__cause__):
            raise
    try:
        import torchao.optim  # noqa: F401  (it makes its own classes known)
    except ImportError as missing:
        raise ImportError("torchao, whose tensors are in the checkpoint: pip install torchao") from missing
    return container.load_torch(file)


def _read(source: str, find: Callable[[str], Any], spec: str | None, weights: str | None) -> Source:
    """Read a checkpoint by an optimizer of its plan; of another package's states the plan is one of fp32."""
    content = _load(source)
    saved = content if _is_state_dict(content) else _only_state_dict_in(content)
    about = content["about"] if "optgen_checkpoint" in content else None
    cls = find(_rule_of(about) if spec is None else spec)
    model = _model_in({} if saved is content else content, weights)
    groups, _ = checkpoint.parts(saved, Problems("its optimizer's state dict is none"))
    keys = _known(model, groups, about)
    params = [nn.Parameter(model[key].detach().clone(), model[key].dtype in overrides.TRAINED) for key in keys]
    if about is not None:
        for p, kept in zip(params, content["waiting"], strict=True):
            if kept is not None:  # a weight that was not stepped yet
                low_bits.attach(p, kept)
    own = all("plan" in group for group in groups)
    opt = cls(_grouped(groups, params), plan=groups[0]["plan"] if own else FP32)
    opt.load_state_dict(saved)
    return Source(opt, opt.full_weights(), model, keys, content.get("extra"))


def _only_state_dict_in(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the only part of a file that is an optimizer's state dict."""
    parts = [v for v in content.values() if _is_state_dict(v)]
    if len(parts) != 1:
        raise Refused(f"expected one optimizer's state dict in it, got {len(parts)}")
    return dict(parts[0])


def _is_state_dict(value: object) -> bool:
    """Return True for a mapping with the two keys of an optimizer's state dict."""
    return isinstance(value, Mapping) and {"state", "param_groups"} <= value.keys()


def _model_in(content: Mapping[str, Any], weights: str | None) -> dict[str, Any]:
    """Return the model's state dict from a file of weights, else from a checkpoint."""
    given = content if weights is None else _load(weights, weights=True)
    for key in MODEL:
        part = given.get(key)
        if isinstance(part, Mapping) and part and not _is_state_dict(part):
            return dict(part)
    if weights is None:
        raise Refused("it has no model's weights", "--weights FILE gives them: the model's state dict")
    return dict(given)


def _rule_of(about: Mapping[str, Any] | None) -> str:
    """Return the name of the rule: never a path, so that a checkpoint cannot choose which file is run."""
    if about is None:
        raise Refused("it does not say which rule made it", "--spec adamw, or the name of another rule")
    if " + " in about["class"]:
        why = f"it has optimizers of several rules: {about['class']}"
        raise Refused(why, "load it, and save the state dict of each of `opt.parts`")
    name = re.sub(r"\.py$", "", about["spec"]).rpartition("/")[2].rpartition(":")[2]
    if not name.isidentifier():
        raise UserError("E404", kind="spec", name=name)
    return name


def _known(model: Mapping[str, Any], groups: Groups, about: Mapping[str, Any] | None) -> list[str]:
    """Return the keys in the model of the parameters."""
    keys = [name for g in groups for name in g.get("param_names") or [None] * len(g["params"])]
    if about is not None:
        keys = [one["key"] or name for one, name in zip(about["parameters"], keys, strict=True)]
    if None in keys:
        keys = _in_order(model, len(groups), len(keys))
    for key in keys:
        if not isinstance(model.get(key), Tensor):
            raise Refused(f"the weights have no {key!r}", "give the weights of the model that was trained")
    return keys


def _in_order(model: Mapping[str, Any], groups: int, count: int) -> list[str]:
    """Return the keys of parameters without names: of the model's floating tensors, in order.

    They may still be in another order, if shapes allow it. So the result records the keys, and `load_checkpoint`
    compares them.
    """
    floats: dict[object, str] = {}
    for key, value in model.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            floats.setdefault(_memory(value), key)
    if groups > 1 or len(floats) != count:
        raise Refused(
            f"its {count} parameters have no names, and are not the weights' {len(floats)} tensors in order",
            "give weights that hold the parameters only, in their order, or save an optimizer of named parameters",
        )
    return list(floats.values())


def _grouped(groups: Groups, params: Iterable[Tensor]) -> list[dict[str, Any]]:
    """Return groups for a new optimizer, with the names, `overrides` and `blocks` of others."""
    rest, made = iter(params), list[dict[str, Any]]()
    for group in groups:
        own, names = list(islice(rest, len(group["params"]))), group.get("param_names")
        made.append({"params": list(zip(names, own, strict=True)) if names else own})
        made[-1] |= {key: group[key] for key in ("overrides", "blocks") if group.get(key)}
    return made


# -- writing ---------------------------------------------------------------------------------------------------


def _rebuilt(found: Source, plan: str, dtype: torch.dtype | None) -> Any:
    """Return an optimizer of the new plan that has taken over options, states and weights."""
    params, old = [], found.optimizer
    for p, full in zip(_parameters(old), found.weights, strict=True):
        trained = p.dtype in overrides.TRAINED
        params.append(nn.Parameter(full.to(dtype if dtype is not None and trained else p.dtype), trained))
        low_bits.keep(params[-1], full)
    made = type(old)(_grouped(old.param_groups, params), plan=plan)
    made.load_state_dict(old.dense_state_dict())
    for group, before in zip(made.param_groups, old.param_groups, strict=True):
        group["seed"] = before["seed"]
    return made


def _parameters(opt: Any) -> list[Tensor]:
    return [p for group in opt.param_groups for p in group["params"]]


def _with(found: Source, values: Iterable[Tensor]) -> dict[str, Any]:
    """Return the model's state dict with other values of the parameters; a tied weight has several keys."""
    new = {_memory(found.model[key]): value for key, value in zip(found.keys, values, strict=True)}
    return {key: new.get(_memory(x), x) if isinstance(x, Tensor) else x for key, x in found.model.items()}


def _memory(t: Tensor) -> object:
    """Return what tied weights have in common."""
    return t.data_ptr() or id(t), t.shape, t.dtype


def _write_torch(found: Source, target: Path) -> None:
    """Write torch.optim's form, with the fp32 model under a key that torch's load_state_dict ignores."""
    content = found.optimizer.dense_state_dict()
    full = _with(found, found.weights)
    narrow = [key for key, x in full.items() if isinstance(x, Tensor) and x.dtype in low_bits.NARROW]
    content["model"] = full | {key: full[key].float() for key in narrow}
    with instead_of(target) as file:
        torch.save(content, file)
