"""Checkpoints as files: one for the optimizer, the model and whatever else a run needs to go on.

The form of a file is in `container`; a file is written whole or not at all, and checked before anything changes.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from optgen.runtime.checkpoint import checkpoint
from optgen.runtime.checkpoint.container import VERSION, Path_, read, refuse_sharded, write
from optgen.runtime.checkpoint.container import CheckpointError as CheckpointError
from optgen.runtime.checkpoint.weights import compare_names
from optgen.runtime.layout import fp8_weight, layout, plans, sharding
from optgen.runtime.layout.fp8_weight import Fp8Weight
from optgen.runtime.optimizer import Checkpointed, Loaded, Optimizer
from optgen.runtime.options import entries
from optgen.runtime.records import dtype_name
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
    optimizer._refuse_midway("save_checkpoint()")
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
    write(path, tree_map_only(Fp8Weight, Fp8Weight.parts, content))


def load_checkpoint(path: Path_, optimizer: Checkpointed, model: nn.Module | None = None) -> Any:
    """Take over a checkpoint; returns the `extra` that it was saved with, its tensors on the CPU.

    model   must be given what was saved of it to go on; without it only the optimizer is loaded

    Raises CheckpointError for a file that is damaged or no checkpoint, ValueError listing what does not fit. Then
    neither the optimizer nor the model has changed.
    """
    _refuse_foreign(optimizer)
    content = fp8_weight.joined(read(path))
    misfits = Problems(f"{os.fspath(path)} does not fit, nothing was loaded")
    expected, got = name_of(optimizer), content["about"]["class"]
    if sorted(got.split(" + ")) != sorted(expected.split(" + ")):  # of several rules in any order
        misfits.add(f"expected a checkpoint of {expected}, got one of {got}")
        misfits.stop()
    if model is not None:
        _compare(model, content["model"], misfits)
    misfits.stop()
    loaded = optimizer._read(content["optimizer"])
    numbers = [number for group in content["optimizer"]["param_groups"] for number in group["params"]]
    position = {number: i for i, number in enumerate(numbers)}
    places = {key: position[number] for _, found in loaded for key, number in found.numbers.items()}
    misfits.lines += _misread(loaded, places, content["about"]["readings"])
    if model is not None:
        _same_places(optimizer, model, content["about"]["parameters"], places, misfits)
    misfits.stop()
    if model is not None:
        model.load_state_dict(content["model"])
        for _, found in loaded:
            found.rounded.clear()  # the model's weights are those that belong to the states
    optimizer._take(loaded)
    if model is not None:
        for p in _parameters(optimizer):
            bits = content["waiting"][places[id(p)]]
            if bits is not None and state_of(optimizer.state, p) is None:
                low_bits.attach(p, copy.deepcopy(bits))
        low_bits.register(model)
    return copy.deepcopy(content["extra"])  # its tensors are still in the file


def _refuse_foreign(optimizer: Any) -> None:
    """Raise TypeError for an optimizer that optgen did not make."""
    if not isinstance(optimizer, Checkpointed):
        raise TypeError(
            f"expected a generated optimizer, got {type(optimizer).__name__}: keep its state_dict() with torch.save"
        )


def name_of(optimizer: Checkpointed) -> str:
    """Return the name of an optimizer's class, or of the classes of several rules: "Muon + AdamW"."""
    return " + ".join(plans.generated_class(type(one)).__name__ for one in optimizer._members)


def _parameters(optimizer: Checkpointed) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _waiting(params: Sequence[Tensor]) -> list[Any]:
    """Return the low bits of each parameter that no step has taken yet, or None."""
    return [p.__dict__.get(low_bits.ATTRIBUTE) for p in params]


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
        [position, name, values.tolist()]
        for _, position, one, entry in smallest.values()
        for name, values in _first_values(type(one), entry, one.state[entry.p]).items()
    ]


def _first_values(cls: type, entry: entries.Entry, kept: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the first values of every state that is kept in codes; {} if the state does not fit the plan."""
    _, plan, variant = checkpoint.select(cls, entry.group, entry.p, entry.name)
    coded = [x for x in variant.states if not variant.is_plain(x) and x not in variant.eager.matrices]  # element-wise
    if not coded or any(problems(variant, entry.p, kept)):
        return {}
    with torch.no_grad():
        values = layout.first(plan, variant, entry.p, kept, coded, READ)
    return {name: value.reshape(-1)[:READ].cpu() for name, value in values.items()}


def _misread(loaded: Loaded, places: Mapping[int, int], readings: Sequence[Any]) -> Iterator[str]:
    """Yield a line for every state that the plan of its name reads as other numbers than it was saved as.

    places   id(parameter) -> its position in the checkpoint
    """
    rows = {places[id(e.p)]: (part, found, e) for part, found in loaded for e in entries.of(found.groups)}
    for position, name, values in readings:
        part, found, entry = rows[position]
        now = _first_values(type(part), entry, found.states.get(entry.p, {})).get(name)
        # Far more than machines differ by, far less than the codes of one curve differ from those of another.
        saved = torch.tensor(values, device="cpu")
        if now is not None and not torch.allclose(now, saved, rtol=2**-12, atol=0, equal_nan=True):
            yield (
                f"parameter {position}: plan {entry.group['plan']!r} reads {name} as other numbers than were saved: it "
                f"is not the plan that the checkpoint was made with"
            )


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
    optimizer: Checkpointed, model: nn.Module, saved: Sequence[Mapping[str, Any]], places: Mapping[int, int],
    misfits: Problems,
) -> None:  # fmt: skip
    """Add a misfit for every parameter that would go on with the state of another of the model's weights.

    Parameters without names are known by their places, which may hold other weights by now.
    """
    keys, live = _keys(model), model.state_dict(keep_vars=True)
    for p, *_, label in entries.of(optimizer.param_groups):
        now, then = keys.get(id(p)), saved[places[id(p)]]["key"]
        if now is not None and then is not None and live.get(then) is not p:  # a tied weight has several keys
            misfits.add(f"{label}: expected the state of {now}, got that of {then}")
