"""Checkpoint files from the outside: whether one is sound, and one made into another."""

from __future__ import annotations

import importlib
import math
import re
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from optgen.base import ready
from optgen.base.errors import UserError
from optgen.driver import compile as compiling
from optgen.driver import load
from optgen.driver.terminal import Missing
from optgen.runtime import checkpoint, files, foreign, low_bits, options, plans, state
from optgen.runtime.content import problem
from optgen.runtime.files import CheckpointError
from optgen.runtime.misfits import Misfits
from optgen.runtime.records import dtype_name, dtype_of

TORCH = "torch"
"""The target that is no plan: torch.optim's own form."""

TRAINED = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Dtypes of parameters that have states; those of other ones are never trained, and stay as they are."""

MODEL = ("model", "state_dict", "model_state_dict")
"""Under which of these training scripts save a model's state dict beside the optimizer's."""


@dataclass
class Checked:
    """What was found in a file."""

    kind: str = ""
    parameters: int = 0
    elements: int = 0
    findings: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)


def verify(path: str, spec: str | None = None) -> Checked:
    """Check every byte, then what the bytes say; UserError where there is no such file.

    spec   the rule that made it, where it does not say so or is not found by its name
    """
    file = _there(path)
    found = Checked()
    try:
        content = _open(file, found)
    except CheckpointError as error:
        found.findings.append(str(error))
        return found
    saved = content if _is_state_dict(content) else content.get("optimizer")
    if not isinstance(saved, Mapping) or not _is_state_dict(saved):
        found.findings.append(f"{path} holds no optimizer: expected 'state' and 'param_groups'")
        return found
    try:
        _built(saved, file)
    except UserError as error:
        found.findings.append(error.message)
        return found
    found.parameters = sum(len(g["params"]) for g in saved["param_groups"])
    if not _is_ours(saved):
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
        cls = _class(spec or _rule(about))
    except UserError as error:
        found.unchecked.append(f"the codes of its states: {error.message}; name the rule with --spec")
        return found
    _states(cls, content, found)
    return found


def _open(file: Path, found: Checked) -> dict[str, Any]:
    if file.suffix == ".safetensors":
        found.kind = "optgen checkpoint, safetensors"
        return files.read(file)
    if zipfile.is_zipfile(file) and not files.has_checksum(file):
        found.kind = "torch.save"
        try:
            with zipfile.ZipFile(file) as archive:
                bad = archive.testzip()
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{file} is damaged: {error}") from error
        if bad is not None:
            raise CheckpointError(f"{file} is damaged in {bad}")
        found.unchecked.append("bytes outside the archive's entries: it has no checksum of the whole file")
        return _of_torch(file)
    found.kind = "optgen checkpoint"
    return files.read(file)


def _weights(content: Mapping[str, Any], found: Checked) -> None:
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
    for key, value in values.items() if isinstance(values, Mapping) else ():
        if isinstance(value, Tensor) and type(value) is Tensor and value.is_floating_point():
            wrong = int(value.isnan().sum())
            if wrong:
                found.findings.append(f"{where}: {key}: {wrong} of {value.numel()} are NaN")


def _states(cls: Any, content: Mapping[str, Any], found: Checked) -> None:
    """Every state against the formats of its plan, as loading would."""
    about, saved = content["about"], content["optimizer"]
    params = [torch.empty(one["shape"], dtype=dtype_of(one["dtype"])) for one in about["parameters"]]
    for p in params:
        p.requires_grad_(p.dtype in TRAINED)
    groups, start = [], 0
    for group in saved["param_groups"]:
        end = start + len(group["params"])
        groups.append({"params": params[start:end]})
        start = end
    try:
        with torch.no_grad():
            checkpoint.read(cls, groups, saved, {p: {} for p in params})  # as if none had a state: no warning of such
        found.findings += files.misread(cls, cls([torch.zeros(1, requires_grad=True)]).defaults, content)
    except ValueError as error:
        found.findings += [line.strip() for line in str(error).splitlines()[1:]]


# -- one into another --------------------------------------------------------------------------------------------


@dataclass
class Parameter:
    """One parameter of a checkpoint: its name there, its key in the model, and its weight where that is known.

    in_order   whether the key is the one of its place in the model, where nothing said it
    """

    name: str | None
    key: str | None
    shape: tuple[int, ...] | None
    dtype: torch.dtype
    weight: Tensor | None = None
    in_order: bool = False


@dataclass
class Source:
    """A checkpoint as torch.optim would have it: dense states, by position, and full weights."""

    kind: str
    groups: list[dict[str, Any]]
    parameters: list[Parameter]
    states: dict[int, dict[str, Any]]
    model: dict[str, Any] | None = None
    extra: Any = None
    coded: dict[int, Mapping[str, Any]] = field(default_factory=dict)  # as they were, of packages whose codes may stay


def convert(
    source: str, target: str, *, to: str, spec: str | None = None, weights: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """Write `target`: the checkpoint `source` under the plan `to`, or for torch.optim ("torch").

    spec      the rule, where the file does not say it
    weights   a file with the model's state dict, where the checkpoint has no model
    param     the parameters' dtype in the result; without it as it was
    UserError where something is missing or does not fit; nothing is written then.
    """
    found, rule = _read(_there(source), spec, weights)
    if to == TORCH:
        return _write_torch(found, Path(target))
    cls = _class(rule)
    load.find_plan(to)
    made = _rebuilt(cls, found, to, None if param is None else dtype_of(param), source)
    return _write_own(cls, found, made, Path(target), to)


def _refuse(path: object, why: str, hint: str = "") -> UserError:
    return UserError("E418", path=path, why=why, hint=hint)


def _there(path: str) -> Path:
    file = Path(path)
    try:
        file.open("rb").close()
    except OSError as error:
        raise UserError("E417", path=path, why=error.strerror or str(error)) from error
    return file


def _rule(about: Mapping[str, Any]) -> str:
    """The name of the rule: only ever a name, so that a checkpoint cannot say which file is run."""
    name = re.sub(r"\.py$", "", str(about.get("spec", ""))).rpartition("/")[2].rpartition(":")[2]
    if not name.isidentifier():
        raise UserError("E404", kind="spec", name=name)
    return name


def _class(rule: str) -> Any:
    """The optimizer of a rule: the ready-made one, or compiled."""
    spec = load.find_spec(rule)
    if Path(spec.loc.file).resolve().parent == ready.specs_dir().resolve():
        made = getattr(importlib.import_module("optgen._generated"), spec.class_name, None)
        if made is not None:
            plans.provider = plans.provider or compiling.provide
            return made
    return compiling.compile(spec, "fp32")


def _is_state_dict(value: object) -> bool:
    return isinstance(value, Mapping) and {"state", "param_groups"} <= value.keys()


def _is_ours(saved: Mapping[str, Any]) -> bool:
    return all("plan" in group for group in saved["param_groups"])


def _load(file: Path) -> dict[str, Any]:
    """A file of ours, checked, or one of torch.save."""
    try:
        if file.suffix == ".safetensors" or files.has_checksum(file):
            return files.read(file)
        return _of_torch(file)
    except CheckpointError as error:
        raise _refuse(file, str(error).removeprefix(f"{file} ").removeprefix(f"{file}: ")) from error


def _of_torch(file: Path) -> dict[str, Any]:
    """A file of torch.save: one of ours, without its end, is not taken for such."""
    try:
        found = files.load_torch(file)
    except CheckpointError as error:
        # What stands in the file and is not known: later torch says it behind the first line of its message.
        if "torchao" not in str(error.__cause__):
            raise
        _import_torchao()
        found = files.load_torch(file)
    if "optgen_checkpoint" in found:
        raise CheckpointError(f"{file} was cut short: its checksum is missing")
    return found


def _import_torchao() -> None:
    """Its tensors can be loaded only where it has said so."""
    try:
        import torchao.optim  # noqa: F401
    except ImportError as error:
        raise Missing("torchao, whose tensors are in the checkpoint: pip install torchao") from error


def _read(file: Path, spec: str | None, weights: str | None) -> tuple[Source, str]:
    content = _load(file)
    saved = _state_dict_in(content, file)
    about = content.get("about") if saved is not content else None
    if not isinstance(about, Mapping) and spec is None:
        raise _refuse(file, "it does not say which rule made it", "--spec adamw, or the name of another rule")
    rule = spec if spec is not None else _rule(about or {})
    groups, entries = _built(saved, file)
    model = _model_in(content) if saved is not content else None
    if weights is not None:
        model = _load_weights(_there(weights))
    parameters = _parameters(groups, entries, about, model, file)
    found = Source("optgen" if _is_ours(saved) else TORCH, groups, parameters, {}, model, content.get("extra"))
    if _is_ours(saved):
        _decode_own(found, rule, saved, content.get("waiting") or [], file)
    else:
        _decode_foreign(found, rule, saved, entries, file)
    return found, rule


def _built(saved: Mapping[str, Any], file: Path) -> tuple[list[dict[str, Any]], dict[int, Mapping[str, Any]]]:
    """(groups, states by position) of a state dict, whoever made it."""
    try:
        groups, states = checkpoint.parts(saved, Misfits("its optimizer's state dict is none"))
    except ValueError as error:
        raise _refuse(file, str(error)) from error
    entries: dict[int, Mapping[str, Any]] = {}
    for i, number in enumerate(n for g in groups for n in g["params"]):
        entry = states.get(number)
        nested = entry.get(foreign.BNB, {}) if isinstance(entry, Mapping) else {}
        if not (entry is None or isinstance(entry, Mapping)) or not isinstance(nested, Mapping):
            raise _refuse(file, f"parameter {i}: expected a dict of states, got {entry!r:.80}")
        entries[i] = entry or {}
        for key, value in {**entries[i], **nested}.items():
            if isinstance(value, Tensor) and not checkpoint.has_values(value):
                raise _refuse(file, f"parameter {i}: {key}: expected a tensor with values, got {value!r:.80}")
    return [dict(group) for group in groups], entries


def _state_dict_in(content: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
    """The optimizer's state dict: the file's content, or the one part of it that is one."""
    if _is_state_dict(content):
        return content
    parts = [v for v in content.values() if _is_state_dict(v)]
    if len(parts) != 1:
        raise _refuse(file, f"expected one optimizer's state dict in it, got {len(parts)}")
    part: Mapping[str, Any] = parts[0]
    return part


def _load_weights(file: Path) -> dict[str, Any]:
    """A model's state dict: alone in a file, or under one of `MODEL` in one."""
    if file.suffix == ".safetensors":
        found: dict[str, Any] = files.tensors_of(file)
        return found
    content = _load(file)
    part = _model_in(content)
    return content if part is None else part


def _model_in(content: Mapping[str, Any]) -> dict[str, Any] | None:
    for key in MODEL:
        part = content.get(key)
        if isinstance(part, Mapping) and part and not _is_state_dict(part):
            return dict(part)
    return None


def _parameters(
    groups: Sequence[Mapping[str, Any]],
    entries: Mapping[int, Mapping[str, Any]],
    about: Any,
    model: Mapping[str, Any] | None,
    file: Path,
) -> list[Parameter]:
    names: list[str | None] = []
    for group in groups:
        given = group.get("param_names")
        names += list(given) if given is not None else [None] * len(group["params"])
    if isinstance(about, Mapping):
        rows = zip(names, about["parameters"], strict=True)
        made = [Parameter(n, one["key"] or n, tuple(one["shape"]), dtype_of(one["dtype"])) for n, one in rows]
    else:
        made = [Parameter(n, n, *_shown(entries[i])) for i, n in enumerate(names)]
        low = any(str(key).startswith("weight_") for entry in entries.values() for key in entry)
        if low and model is None:
            why = "it keeps low bits of weights, but neither these nor their dtype"
            raise _refuse(file, why, "--weights FILE gives them: the model's state dict")
    if model is None:
        return made
    if all(p.key is None for p in made):
        _in_order(made, groups, model, file)
    for p in made:
        if p.key is None:
            continue
        value = model.get(p.key)
        if not isinstance(value, Tensor):
            raise _refuse(file, f"the weights have no {p.key!r}", "give the weights of the model that was trained")
        if p.shape is not None and tuple(value.shape) != p.shape:
            raise _refuse(file, f"the weight {p.key!r} is {list(value.shape)}, its state {list(p.shape)}")
        if isinstance(about, Mapping) and value.dtype != p.dtype:
            why = f"the weight {p.key!r} is {dtype_name(value.dtype)}, its state was made for {dtype_name(p.dtype)}"
            raise _refuse(file, why, "give the weights in the dtype that they were trained in")
        p.shape, p.dtype, p.weight = tuple(value.shape), value.dtype, value
    return made


def _shown(entry: Mapping[str, Any]) -> tuple[tuple[int, ...] | None, torch.dtype]:
    """(shape, dtype) of a parameter by its state: torch's states have its dtype."""
    parts = {**entry, **entry.get(foreign.BNB, {})}
    tensors = [v for k, v in parts.items() if isinstance(v, Tensor) and k != "step" and v.ndim]
    if not tensors:
        return None, torch.float32
    first = tensors[0]
    return tuple(first.shape), first.dtype if first.dtype in low_bits.NARROW else torch.float32


def _in_order(made: list[Parameter], groups: Sequence[Mapping[str, Any]], model: Mapping[str, Any], file: Path) -> None:
    """Keys for parameters without names: the model's floating tensors in order, where their shapes agree.

    Of equal shapes, the order may still be another: the result has the keys of weights that it keeps parts of, and
    loading compares them (`files.load_checkpoint`).
    """
    floats: dict[str, Tensor] = {}
    for key, value in model.items():
        if isinstance(value, Tensor) and value.is_floating_point() and not any(_one(value, v) for v in floats.values()):
            floats[key] = value
    fits = len(groups) == 1 and len(floats) == len(made)
    if not fits or any(p.shape not in (None, tuple(v.shape)) for p, v in zip(made, floats.values(), strict=True)):
        raise _refuse(
            file,
            f"its {len(made)} parameters have no names, and are not the weights' {len(floats)} tensors in order",
            "give weights that hold the parameters only, in their order, or save an optimizer of named parameters",
        )
    for p, key in zip(made, floats, strict=True):
        p.key, p.in_order = key, True


def _tensor(p: Parameter) -> nn.Parameter:
    """The parameter, or zeros in its place where it is not known."""
    value = torch.zeros(p.shape or (), dtype=p.dtype) if p.weight is None else p.weight.detach().clone()
    return nn.Parameter(value, requires_grad=p.dtype in TRAINED)


def _decode_own(
    found: Source, rule: str, saved: Mapping[str, Any], waiting: Sequence[dict[str, Any] | None], file: Path
) -> None:
    cls = _class(rule)
    params = [_tensor(p) for p in found.parameters]
    for weight, kept in zip(params, waiting, strict=bool(waiting)):
        if kept is not None:  # of a weight that has made no step yet
            setattr(weight, low_bits.ATTRIBUTE, kept)
    try:
        opt = cls(_grouped(found, params), plan=saved["param_groups"][0]["plan"])
        opt.load_state_dict(saved)
    except (TypeError, ValueError) as error:
        raise _refuse(file, str(error)) from error
    known = opt.dense_state_dict()["state"]
    full = opt.full_weights() if all(p.weight is not None for p in found.parameters) else []
    found.states = known
    for p, exact in zip(found.parameters, full, strict=False):
        p.weight = exact if p.dtype in TRAINED else p.weight


def _decode_foreign(found: Source, rule: str, saved: Mapping[str, Any], entries: Any, file: Path) -> None:
    cls = _class(rule)
    try:
        states = _state_names(cls, found)
    except (TypeError, ValueError) as error:
        raise _refuse(file, str(error)) from error
    widths = [group.get("master_bytewidth") for group in found.groups for _ in group["params"]]
    for i, (p, entry) in enumerate(zip(found.parameters, entries.values(), strict=True)):
        if not entry:
            continue
        try:
            if p.weight is not None:
                exact = foreign.weight(entry, p.weight, widths[i])
                p.weight = p.weight if exact is None else exact
            found.states[i] = foreign.dense(entry, states, p.shape or ())
            if foreign.codes(entry, states):
                found.coded[i] = entry
        except ValueError as error:
            raise _refuse(file, f"parameter {p.name or i}: {error}") from error
    known = {"params", "param_names", "maximize", "initial_lr"}
    known |= {h.name for h in cls.HYPERS} | {f.name for f in cls.FLAGS}
    for group in found.groups:
        for key in group.keys() - known:
            del group[key]
        for key, value in group.items():
            if isinstance(value, Tensor):
                if value.numel() != 1 or not checkpoint.has_values(value):
                    raise _refuse(file, f"{key}: expected a number, got a tensor of shape {list(value.shape)}")
                group[key] = value.item()


def _state_names(cls: Any, found: Source) -> tuple[str, ...]:
    """The states of the rule, in order, as its first parameter with elements has them."""
    first = next((p for p in found.parameters if p.shape), None)
    p = torch.zeros(first.shape if first and first.shape else (1,))
    first_group = found.groups[0] if found.groups else {}
    group = {**cls([p.requires_grad_()]).param_groups[0], **{k: v for k, v in first_group.items() if k != "params"}}
    group |= options.check(cls, group)
    names: tuple[str, ...] = checkpoint.select(cls, {**group, "plan": "fp32"}, p)[2].states
    return names


def _grouped(found: Source, params: Sequence[Tensor]) -> list[dict[str, Any]]:
    made, start = [], 0
    for group in found.groups:
        end = start + len(group["params"])
        part = params[start:end]
        names = group.get("param_names")
        made.append({"params": list(zip(names, part, strict=True)) if names else list(part)})
        made[-1] |= {key: group[key] for key in ("overrides", "blocks") if group.get(key)}
        start = end
    return made


def _rebuilt(cls: Any, found: Source, plan: str, dtype: torch.dtype | None, source: str) -> Any:
    """An optimizer of the new plan that has taken over states and weights."""
    params = []
    for i, p in enumerate(found.parameters):
        converted = dtype is not None and p.dtype.is_floating_point
        if not (p.dtype in TRAINED or i in found.states or converted):
            params.append(_tensor(p))
            continue
        weight = torch.zeros(p.shape or ()) if p.weight is None else p.weight.detach().to(torch.float32)
        q = nn.Parameter(weight.to(dtype or p.dtype))
        low_bits.keep(q, weight)
        params.append(q)
    try:
        opt = cls(_grouped(found, params), plan=plan)
        seeds = [{k: g[k] for k in ("seed", "streams") if k in g} for g in found.groups]
        dropped = options.OWN
        numbers = iter(range(len(params)))
        groups = [
            {**{k: v for k, v in g.items() if k not in dropped}, "params": [next(numbers) for _ in g["params"]]}
            for g in found.groups
        ]
        opt.load_state_dict({"state": {**found.states, **found.coded}, "param_groups": groups})
    except (TypeError, ValueError) as error:
        raise _refuse(source, str(error)) from error
    for group, seed in zip(opt.param_groups, seeds, strict=True):
        group.update(seed)
    for number, (p, q) in enumerate(zip(found.parameters, params, strict=True)):
        if p.weight is not None or q not in opt.state:
            continue
        group = next(g for g in opt.param_groups if any(q is x for x in g["params"]))
        name = number if group.get("param_names") is None else p.name
        if any(f.owner == "p" for f in checkpoint.select(cls, group, q, name)[2].fields):
            raise _refuse(
                source,
                f"plan {plan} keeps more of a weight than a {dtype_name(q.dtype)} parameter shows, "
                f"and the weights are not in it",
                "--weights FILE gives them: the model's state dict",
            )
    return opt


def _write_own(cls: Any, found: Source, opt: Any, target: Path, plan: str) -> dict[str, Any]:
    params = [p for g in opt.param_groups for p in g["params"]]
    model = None if found.model is None else dict(found.model)
    waiting = [None if state.of(opt.state, q) else q.__dict__.get(low_bits.ATTRIBUTE) for q in params]
    rows = []
    for p, q, bits in zip(found.parameters, params, waiting, strict=True):
        of_weight = bits is not None or any(key.startswith("weight_") for key in opt.state.get(q, ()))
        known = model is not None and p.key is not None and (of_weight or not p.in_order)
        if model is not None and p.key is not None:
            old = model[p.key]
            for key, value in model.items():  # under all its names
                if value is old or (isinstance(value, Tensor) and _one(value, old)):
                    model[key] = q.detach()
        rows.append({"key": p.key if known else None, "shape": list(q.shape), "dtype": dtype_name(q.dtype)})
    about = {**files.about(opt, None), "parameters": rows}
    saved = opt.state_dict()
    _write(target, {
        "optgen_checkpoint": files.VERSION, "about": about, "optimizer": saved, "model": model,
        "waiting": waiting, "extra": found.extra,
    })  # fmt: skip
    return {
        "target": str(target), "to": plan, "from": found.kind, "parameters": len(params),
        "elements": sum(q.numel() for q in params), "bytes": target.stat().st_size,
    }  # fmt: skip


def _one(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same memory."""
    return a.numel() > 0 and (a.data_ptr(), a.shape, a.dtype) == (b.data_ptr(), b.shape, b.dtype)


def _write(target: Path, content: dict[str, Any]) -> None:
    try:
        files.write(target, content)
    except OSError as error:
        raise UserError("E413", path=target, why=error.strerror or str(error)) from error


def _write_torch(found: Source, target: Path) -> dict[str, Any]:
    """torch.optim's own form; the fp32 model beside it, which torch's load_state_dict reads over."""
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
        with files.instead_of(target) as file:
            torch.save(content, file)
    except OSError as error:
        raise UserError("E413", path=target, why=error.strerror or str(error)) from error
    return {
        "target": str(target), "to": TORCH, "from": found.kind, "parameters": len(found.parameters),
        "elements": sum(math.prod(p.shape or ()) for p in found.parameters if p.shape is not None),
        "bytes": target.stat().st_size,
    }  # fmt: skip
