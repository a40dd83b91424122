"""Checkpoints as files: one for the optimizer, the model and whatever else a run needs to go on.

The form of a file is in `container`; a file is written whole or not at all, and checked before anything changes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from optgen.runtime.checkpoint import checkpoint
from optgen.runtime.checkpoint.container import VERSION, Path_, read, refuse_sharded, write
from optgen.runtime.checkpoint.container import CheckpointError as CheckpointError
from optgen.runtime.checkpoint.weights import compare_names
from optgen.runtime.layout import layout, plans, sharding
from optgen.runtime.optimizer import Checkpointed, Optimizer
from optgen.runtime.options import entries, options
from optgen.runtime.records import dtype_name, dtype_of
from optgen.runtime.records.problems import Problems
from optgen.runtime.states import low_bits
from optgen.runtime.states.state import kind, problems
from optgen.runtime.states.state import of as state_of


def save_checkpoint(path: Path_, optimizer: Checkpointed, model: nn.Module | None = None, extra: Any = None) -> None:
    """Write a checkpoint from which a run goes on bit for bit; an older file of that name stays until it is complete.

    model   its state dict is written too, parameters and buffers in their own dtypes
    extra   anything made of tensors, numbers, strings, None, lists, tuples and dicts (also Counter and OrderedDict):
            schedulers, loaders, the step

    Raises TypeError for what could not be read back without running code, OSError if the file cannot be written.
    """
    _refuse_foreign(optimizer)
    params = _parameters(optimizer)
    for p in params:
        if sharding.is_sharded(p):  # before a value is looked at: ranks would wait for those that are not here
            refuse_sharded("optimizer", p)
    content = {
        "optgen_checkpoint": VERSION,
        "about": about(optimizer, model),
        "optimizer": optimizer.state_dict(),
        "model": None if model is None else dict(model.state_dict()),
        "waiting": [
            # not those of a weight that was cut or grown since
            bits if bits is not None and bits["low"].shape == p.shape else None
            for bits, p in zip(_waiting(params), params, strict=True)
        ],
        "extra": extra,
    }
    write(path, content)


def load_checkpoint(path: Path_, optimizer: Checkpointed, model: nn.Module | None = None) -> Any:
    """Take over a checkpoint; returns the `extra` that it was saved with, its tensors on the CPU.

    model   must be given what was saved of it to go on; without it only the optimizer is loaded

    Raises CheckpointError for a file that is damaged or no checkpoint, ValueError listing what does not fit. Then
    neither the optimizer nor the model has changed.
    """
    _refuse_foreign(optimizer)
    content = read(path)
    new = _checked(f"{os.fspath(path)} does not fit, nothing was loaded", optimizer, model, content)
    params, members = _parameters(optimizer), optimizer._members
    before, waiting = [(one, one.state, one.param_groups) for one in members], _waiting(params)
    optimizer.load_state_dict(content["optimizer"])
    if model is not None:
        try:
            model.load_state_dict(content["model"])
        except BaseException:
            for one, state, groups in before:
                one.state, one.param_groups = state, groups
            _attach(model, params, waiting)
            raise
        stepped = [state_of(optimizer.state, p) is not None for p in params]
        _attach(model, params, [None if done else _in_memory(bits) for done, bits in zip(stepped, new, strict=True)])
    return _in_memory(content["extra"])


def _checked(heading: str, optimizer: Checkpointed, model: nn.Module | None, content: Mapping[str, Any]) -> list[Any]:
    """Return what a checkpoint has of each parameter's low bits; ValueError listing what does not fit."""
    misfits = Problems(heading)
    expected, got = name_of(optimizer), content["about"]["class"]
    if sorted(got.split(" + ")) != sorted(expected.split(" + ")):  # of several rules in any order
        misfits.add(f"expected a checkpoint of {expected}, got one of {got}")
        misfits.stop()
    parts = list(_parts(optimizer, content))
    for part, _, own in parts:
        misfits.lines += misread(type(part), part.defaults, own)
    if model is not None:
        _compare(model, content["model"], misfits)
    misfits.stop()
    order: dict[int, int] = {}
    for part, places, own in parts:
        found = checkpoint.positions(part.param_groups, own["optimizer"]["param_groups"], misfits)
        order |= {key: places[at] for key, at in found.items()}
    if model is not None:
        _same_places(optimizer, model, content["about"]["parameters"], order, misfits)
    misfits.stop()
    return [] if model is None else [content["waiting"][order[id(p)]] for p in _parameters(optimizer)]


def _refuse_foreign(optimizer: Any) -> None:
    """Raise TypeError for an optimizer that optgen did not make."""
    if not isinstance(optimizer, Checkpointed):
        raise TypeError(
            f"expected a generated optimizer, got {type(optimizer).__name__}: keep its state_dict() with torch.save"
        )


def name_of(optimizer: Checkpointed) -> str:
    """Return the name of an optimizer's class, or of the classes of several rules: "Muon + AdamW"."""
    return " + ".join(plans.generated_class(type(one)).__name__ for one in optimizer._members)


def _parts(
    optimizer: Checkpointed, content: Mapping[str, Any]
) -> Iterator[tuple[Optimizer, Sequence[int], dict[str, Any]]]:
    """Yield each optimizer of one rule, the positions of its parameters in a checkpoint, and its share of that."""
    whole, numbers = content["about"], [n for group in content["optimizer"]["param_groups"] for n in group["params"]]
    place = {number: k for k, number in enumerate(numbers)}
    for part, saved in optimizer._split(content["optimizer"]):
        places = [place[number] for group in saved["param_groups"] for number in group["params"]]
        at = {k: i for i, k in enumerate(places)}
        readings = [[at[k], *rest] for k, *rest in whole["readings"] if k in at]
        own = {"parameters": [whole["parameters"][k] for k in places], "readings": readings}
        yield part, places, {"optimizer": saved, "about": own}


def _in_memory(value: Any) -> Any:
    """Return a value with copies of the tensors that are still in the file."""
    return checkpoint.copied(value, None, "extra", Problems("extra"))


def _parameters(optimizer: Checkpointed) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _waiting(params: Sequence[Tensor]) -> list[Any]:
    """Return the low bits of each parameter that no step has taken yet, or None."""
    return [p.__dict__.get(low_bits.ATTRIBUTE) for p in params]


def _attach(model: nn.Module, params: Sequence[Tensor], waiting: Sequence[Any]) -> None:
    """Put low bits beside parameters of a model, where there are some."""
    for p, bits in zip(params, waiting, strict=True):
        if bits is not None:
            low_bits.attach(p, bits)
    low_bits.carry(model)


def about(optimizer: Checkpointed, model: nn.Module | None) -> dict[str, Any]:
    """Return what tools need to read the optimizer's part without it: its class, and shapes and dtypes."""
    keys = {} if model is None else _keys(model)
    parameters = [
        {"key": keys.get(id(p)), "shape": list(p.shape), "dtype": dtype_name(p.dtype)} for p in _parameters(optimizer)
    ]
    spec = getattr(optimizer, "SPEC", "")  # several rules have none
    return {"class": name_of(optimizer), "spec": spec, "parameters": parameters, "readings": _readings(optimizer)}


def _keys(model: nn.Module) -> dict[int, str]:
    """Return id(tensor) -> its key in the model's state dict, the first one of a tied weight."""
    return {id(t): name for name, t in reversed(model.state_dict(keep_vars=True).items())}


# -- whether a plan still reads codes as it did ------------------------------------------------------------------

READ = 64
"""A file has the values of so many elements of a state beside their codes."""


def _readings(optimizer: Checkpointed) -> list[list[Any]]:
    """Return [position, state, its first values] of the smallest parameter of each kernel."""
    smallest: dict[object, tuple[int, int, Optimizer, entries.Entry]] = {}
    for one, entry, whole in optimizer._matched():
        if state_of(one.state, entry.p) and (size := entry.p.numel()):
            _, plan, variant = checkpoint.select(type(one), entry.group, entry.p, entry.name)
            if size < smallest.get(key := (one, plan, variant), (math.inf,))[0]:
                smallest[key] = size, whole.position, one, entry
    return [
        [position, name, values]
        for _, position, one, e in smallest.values()
        for name, values in _first_values(type(one), e.group, e.p, one.state[e.p], e.name).items()
    ]


def _first_values(
    cls: type, group: Mapping[str, Any], p: Tensor, kept: Mapping[str, Any], label: plans.Label
) -> dict[str, list[float]]:
    """Return the first values of every state that is kept in codes; {} if the state does not fit the plan."""
    _, plan, variant = checkpoint.select(cls, group, p, label)
    coded = [x for x in variant.states if not variant.is_plain(x) and x not in variant.eager.matrices]  # element-wise
    if not coded or any(problems(variant, p, kept)):
        return {}
    with torch.no_grad():
        values = layout.first(plan, variant, p, kept, coded, READ)
    return {name: values[name].reshape(-1)[:READ].tolist() for name in coded}


def misread(cls: type, defaults: Mapping[str, Any], content: Mapping[str, Any]) -> list[str]:
    """Return a line for every state that the plan of its name reads as other numbers than it was saved as.

    What does not fit the plan in shape is left to loading.
    """
    saved = content["optimizer"]
    rows, lines = list(entries.of(saved["param_groups"])), []
    for at, name, values in content["about"]["readings"]:
        number, group, *_, label = rows[at]
        kept, one = saved["state"].get(number), content["about"]["parameters"][at]
        if not isinstance(kept, Mapping) or any(
            isinstance(value, Tensor) and checkpoint.without_values(value) for value in kept.values()
        ):
            continue
        try:
            group = {**defaults, **group, **options.check(cls, {**defaults, **group})}
            p = torch.empty(one["shape"], dtype=dtype_of(one["dtype"]), device="cpu")
            now = _first_values(cls, group, p, kept, label).get(name, values)
        except (TypeError, ValueError, RuntimeError):  # no such plan, or not for this dtype; no room for such a shape
            continue
        # Far more than machines differ by, far less than the codes of one curve differ from those of another.
        for old, new in zip(values, now, strict=True):
            if not (math.isclose(old, new, rel_tol=2**-12) or (math.isnan(old) and math.isnan(new))):
                lines.append(
                    f"parameter {at}: {name} was saved as {old:.6g}, and plan {group['plan']!r} reads it as {new:.6g}: "
                    f"it is not the plan that the checkpoint was made with"
                )
                break
    return lines


# -- whether a model is the one that was saved -------------------------------------------------------------------


def _compare(model: nn.Module, saved: Any, misfits: Problems) -> None:
    """Add a misfit for every entry of a model's state dict that is not in the saved one with its dtype and shape."""
    if not isinstance(saved, Mapping):
        misfits.add("it has no model: it was saved without one; load the weights first, then the optimizer alone")
        return
    live = model.state_dict(keep_vars=True)
    compare_names(live, saved, misfits, "model: ")
    for name in (n for n in live if n in saved):
        if kind(live[name]) != kind(saved[name]):
            misfits.add(f"model: {name}: expected {kind(live[name])}, got {kind(saved[name])}")


def _same_places(
    optimizer: Checkpointed, model: nn.Module, saved: Sequence[Mapping[str, Any]], order: Mapping[int, int],
    misfits: Problems,
) -> None:  # fmt: skip
    """Add a misfit for every parameter that would go on with the state of another of the model's weights.

    Parameters without names are known by their places, which may hold other weights by now.
    """
    keys, live = _keys(model), model.state_dict(keep_vars=True)
    for p, *_, label in entries.of(optimizer.param_groups):
        now, then = keys.get(id(p)), saved[order[id(p)]].get("key") if id(p) in order else None
        if now is not None and then is not None and live.get(then) is not p:  # a tied weight has several keys
            misfits.add(f"{label}: expected the state of {now}, got that of {then}")
