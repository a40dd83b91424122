"""Checkpoints of any kind, read as torch.optim would have them: dense states and full weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from optgen.base.errors import UserError
from optgen.convert import packages
from optgen.runtime.checkpoint import checkpoint, container
from optgen.runtime.checkpoint.container import CheckpointError
from optgen.runtime.records import dtype_name, dtype_of
from optgen.runtime.records.misfits import Misfits
from optgen.runtime.states import low_bits

T = TypeVar("T")

Find = Callable[[str], Any]
"""A function from the name of a rule to its optimizer class."""

TORCH = "torch"
"""The target that is not a plan: torch.optim's own form."""

TRAINED = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""The dtypes of parameters that have states. Parameters of other dtypes are not trained and stay as they are."""

FP32 = {"float32": "fp32", "bfloat16": "fp32_master", "float16": "fp32_master"}
"""The plan that keeps all bits, by dtype of the parameters."""

MODEL = ("model", "state_dict", "model_state_dict")
"""The keys under which training scripts save a model's state dict beside the optimizer's."""


@dataclass
class Parameter:
    """A parameter of a checkpoint: its name there, its key in the model, and its weight if that is known.

    in_order   the key was taken from the parameter's position in the model, since the checkpoint has none
    """

    name: str | None
    key: str | None
    shape: tuple[int, ...] | None
    dtype: torch.dtype
    weight: Tensor | None = None
    in_order: bool = False


@dataclass
class Source:
    """A checkpoint as torch.optim would have it: dense states by position, and full weights."""

    kind: str
    groups: list[dict[str, Any]]
    parameters: list[Parameter]
    states: dict[int, dict[str, Any]]
    model: dict[str, Any] | None = None
    extra: Any = None


def refuse(path: object, why: str, hint: str = "") -> UserError:
    """Return the error of a checkpoint that cannot be converted."""
    return UserError("E418", path=path, why=why, hint=hint)


def existing(path: str) -> Path:
    """Return the path of a file that can be opened; UserError if it cannot."""
    file = Path(path)
    try:
        file.open("rb").close()
    except OSError as error:
        raise UserError("E417", path=path, why=error.strerror or str(error)) from error
    return file


def rule_of(about: Mapping[str, Any]) -> str:
    """Return the name of the rule: never a path, so that a checkpoint cannot choose which file is run."""
    name = re.sub(r"\.py$", "", str(about.get("spec", ""))).rpartition("/")[2].rpartition(":")[2]
    if not name.isidentifier():
        raise UserError("E404", kind="spec", name=name)
    return name


def is_state_dict(value: object) -> bool:
    """Return True for a mapping with the two keys of an optimizer's state dict."""
    return isinstance(value, Mapping) and {"state", "param_groups"} <= value.keys()


def is_own(saved: Mapping[str, Any]) -> bool:
    """Return True for a state dict that an optgen optimizer made."""
    return all("plan" in group for group in saved["param_groups"])


def _load(file: Path, weights: bool = False) -> dict[str, Any]:
    """Read a file of save_checkpoint, verifying its checksum, or one of torch.save.

    weights   any safetensors file will do
    """
    try:
        if not container.is_of_torch(file):
            plain = weights and file.suffix == ".safetensors"
            return container.tensors_of(file) if plain else container.read(file)
        try:
            return container.load_torch(file)
        except CheckpointError as error:
            # Newer torch names an unknown class after the first line of its message; torchao registers its own.
            if "torchao" not in str(error.__cause__):
                raise
            try:
                import torchao.optim  # noqa: F401
            except ImportError as missing:
                raise ImportError("torchao, whose tensors are in the checkpoint: pip install torchao") from missing
            return container.load_torch(file)
    except CheckpointError as error:
        raise refuse(file, str(error).removeprefix(f"{file} ").removeprefix(f"{file}: ")) from error


def read(file: Path, spec: str | None, weights: str | None, find: Find) -> tuple[Source, str]:
    """Return the content of a checkpoint and the name of its rule."""
    content = _load(file)
    saved = _state_dict_in(content, file)
    about = content.get("about") if saved is not content else None
    if isinstance(about, Mapping) and " + " in str(about.get("class")):
        why = f"it has optimizers of several rules: {about['class']}"
        raise refuse(file, why, "load it, and save the state dict of each of `opt.parts`")
    if not isinstance(about, Mapping) and spec is None:
        raise refuse(file, "it does not say which rule made it", "--spec adamw, or the name of another rule")
    rule = spec if spec is not None else rule_of(about or {})
    try:
        groups, states = checkpoint.parts(saved, Misfits("its optimizer's state dict is none"))
    except ValueError as error:
        raise refuse(file, str(error)) from error
    entries = [states.get(number) for group in groups for number in group["params"]]
    model = _model_in(content) if saved is not content else None
    if weights is not None:
        given = _load(existing(weights), weights=True)
        model = _model_in(given) or given
    parameters = _parameters(groups, entries, about, model, file)
    kind = "optgen" if is_own(saved) else TORCH
    found = Source(kind, list(map(dict, groups)), parameters, {}, model, content.get("extra"))
    _decode(found, find(rule), saved, content.get("waiting") or [], file)
    return found, rule


def _state_dict_in(content: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
    """Return the optimizer's state dict: the content itself, or the only part of it that is one."""
    if is_state_dict(content):
        return content
    parts = [v for v in content.values() if is_state_dict(v)]
    if len(parts) != 1:
        raise refuse(file, f"expected one optimizer's state dict in it, got {len(parts)}")
    return dict(parts[0])


def _model_in(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the model's state dict in a checkpoint, or None if there is none."""
    for key in MODEL:
        part = content.get(key)
        if isinstance(part, Mapping) and part and not is_state_dict(part):
            return dict(part)
    return None


def _parameters(
    groups: Sequence[Mapping[str, Any]], entries: Sequence[Any], about: Any, model: Mapping[str, Any] | None, file: Path
) -> list[Parameter]:
    """Return the parameters of a checkpoint with what it and the weights tell about them."""
    names: list[str | None] = []
    for group in groups:
        given = group.get("param_names")
        names += list(given) if given is not None else [None] * len(group["params"])
    if isinstance(about, Mapping):
        rows = zip(names, about["parameters"], strict=True)
        made = [Parameter(n, one["key"] or n, tuple(one["shape"]), dtype_of(one["dtype"])) for n, one in rows]
    else:
        made = [Parameter(n, n, *_shown(entries[i])) for i, n in enumerate(names)]
        low = any(str(key).startswith("weight_") for entry in entries for key in entry or ())
        if low and model is None:
            why = "it keeps low bits of weights, but neither these nor their dtype"
            raise refuse(file, why, "--weights FILE gives them: the model's state dict")
    if model is None:
        return made
    if all(p.key is None for p in made):
        _in_order(made, groups, model, file)
    for p in made:
        if p.key is None:
            continue
        value = model.get(p.key)
        if not isinstance(value, Tensor):
            raise refuse(file, f"the weights have no {p.key!r}", "give the weights of the model that was trained")
        if p.shape is not None and tuple(value.shape) != p.shape:
            raise refuse(file, f"the weight {p.key!r} is {list(value.shape)}, its state {list(p.shape)}")
        if isinstance(about, Mapping) and value.dtype != p.dtype:
            why = f"the weight {p.key!r} is {dtype_name(value.dtype)}, its state was made for {dtype_name(p.dtype)}"
            raise refuse(file, why, "give the weights in the dtype that they were trained in")
        p.shape, p.dtype, p.weight = tuple(value.shape), value.dtype, value
    return made


def _shown(entry: Any) -> tuple[tuple[int, ...] | None, torch.dtype]:
    """Return (shape, dtype) of a parameter as its state shows them: torch's states have the parameter's dtype."""
    parts = dict(entry) if isinstance(entry, Mapping) else {}
    parts |= nested if isinstance(nested := parts.get(packages.BNB), Mapping) else {}
    tensors = [v for k, v in parts.items() if isinstance(v, Tensor) and k != "step" and v.ndim]
    if not tensors:
        return None, torch.float32
    first = tensors[0]
    return tuple(first.shape), first.dtype if first.dtype in low_bits.NARROW else torch.float32


def _in_order(made: list[Parameter], groups: Sequence[Mapping[str, Any]], model: Mapping[str, Any], file: Path) -> None:
    """Give parameters without names the keys of the model's floating tensors, in order; UserError if shapes differ.

    Tensors of equal shape may still be in another order. So the result records the keys of weights that it keeps parts
    of, and loading compares them (`files.load_checkpoint`).
    """
    floats: dict[str, Tensor] = {}
    for key, value in model.items():
        tied = isinstance(value, Tensor) and any(same_memory(value, v) for v in floats.values())
        if isinstance(value, Tensor) and value.is_floating_point() and not tied:
            floats[key] = value
    fits = len(groups) == 1 and len(floats) == len(made)
    if not fits or any(p.shape not in (None, tuple(v.shape)) for p, v in zip(made, floats.values(), strict=True)):
        raise refuse(
            file,
            f"its {len(made)} parameters have no names, and are not the weights' {len(floats)} tensors in order",
            "give weights that hold the parameters only, in their order, or save an optimizer of named parameters",
        )
    for p, key in zip(made, floats, strict=True):
        p.key, p.in_order = key, True


def placeholder(p: Parameter) -> nn.Parameter:
    """Return the parameter, or zeros if its weight is not known."""
    value = torch.zeros(p.shape or (), dtype=p.dtype) if p.weight is None else p.weight.detach().clone()
    return nn.Parameter(value, requires_grad=p.dtype in TRAINED)


def _decode(
    found: Source, cls: Any, saved: Mapping[str, Any], waiting: Sequence[dict[str, Any] | None], file: Path
) -> None:
    """Decode the states and weights of a checkpoint into `found`: an optimizer of its plan loads it.

    States of other packages become fp32, beside full copies of the weights.
    """
    params = [placeholder(p) for p in found.parameters]
    for weight, kept in zip(params, waiting, strict=bool(waiting)):
        if kept is not None:  # a weight that was not stepped yet
            setattr(weight, low_bits.ATTRIBUTE, kept)
    own = is_own(saved)
    try:
        opt = cls(grouped(found, params), plan=saved["param_groups"][0]["plan"] if own else FP32)
        opt.load_state_dict(saved)
    except (TypeError, ValueError) as error:
        raise refuse(file, str(error)) from error
    found.states = opt.dense_state_dict()["state"]
    full = opt.full_weights() if all(p.weight is not None for p in found.parameters) else []
    for p, exact in zip(found.parameters, full, strict=False):
        p.weight = exact if p.dtype in TRAINED else p.weight
    if not own:
        known = {"params", "param_names", "maximize", "initial_lr"}
        known |= {h.name for h in cls.HYPERS} | {f.name for f in cls.FLAGS}
        for group, kept in zip(found.groups, opt.param_groups, strict=True):
            for key in [key for key in group if key not in known]:
                del group[key]
            group.update((key, kept[key]) for key in group if key not in ("params", "param_names"))


def split(groups: Sequence[Mapping[str, Any]], values: Iterable[T]) -> list[list[T]]:
    """Return the values of each group's parameters, of values of all of them in order."""
    rest = iter(values)
    return [list(islice(rest, len(group["params"]))) for group in groups]


def grouped(found: Source, params: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Return parameter groups for an optimizer, with the checkpoint's names, `overrides` and `blocks`."""
    made: list[dict[str, Any]] = []
    for group, part in zip(found.groups, split(found.groups, params), strict=True):
        names = group.get("param_names")
        made.append({"params": list(zip(names, part, strict=True)) if names else part})
        made[-1] |= {key: group[key] for key in ("overrides", "blocks") if group.get(key)}
    return made


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors are views of the same elements."""
    return a.numel() > 0 and (a.data_ptr(), a.shape, a.dtype) == (b.data_ptr(), b.shape, b.dtype)
