"""The record of one step: what its kernels read and what they left, in a file from which `replay` makes it again.

For each recorded parameter the file has weight, gradient and state as the step found them, low bits that wait for a
first step, and weight and state after the step; for all of them the options of their groups, the names or positions
that their random bits are of, and the scale of a GradScaler.  Its form is that of a checkpoint.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import math
import os
import platform
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optgen.runtime.checkpoint import checkpoint, container
from optgen.runtime.checkpoint.container import CheckpointError
from optgen.runtime.layout import plans, sharding
from optgen.runtime.modes import offload
from optgen.runtime.options import entries, options
from optgen.runtime.options.entries import Entry, Owner
from optgen.runtime.records.uninterrupted import Uninterrupted
from optgen.runtime.records.warn import warn
from optgen.runtime.states import low_bits, state
from optgen.runtime.step import backends
from optgen.runtime.step.stepper import Stepper
from optgen.runtime.work import counting

KEY, VERSION = "optgen_record", 1
"""The key of a record's version in its file, where a checkpoint has another."""

Names = str | int | Iterable[str | int] | None


class Record:
    """The record of a step that is to come.

    path      the file, in a folder that is there
    patterns  of names (of positions where parameters have none); those of all parameters match "*"
    last      the record that was asked for before and not made: a warning
    """

    def __init__(self, owner: Owner, path: str | os.PathLike[str], params: Names, last: Record | None = None) -> None:
        self.name, self.path = f"{owner.cls.__name__}.record", Path(path)
        given = ["*"] if params is None else [params] if isinstance(params, (str, int)) else params
        self.patterns = [str(x) for x in given]
        if not self.patterns:
            raise ValueError(f"{self.name}: params is empty: leave it out to record all parameters")
        if self.path.is_dir():
            raise IsADirectoryError(f"{self.name}: {self.path} is a folder: name a file in it")
        if not self.path.parent.is_dir():
            raise FileNotFoundError(f"{self.name}: there is no folder {self.path.parent}: make it first")
        self._choose(owner)
        if last is not None:
            warn(f"{self.name}: no step was recorded in {last.path}: {self.path} takes its place", owner.cls)

    def _choose(self, owner: Owner) -> list[Entry]:
        """Return the chosen parameters.  Raises an error for a name of none, or a step that is not to be recorded."""
        listed = [e for e in entries.of(owner.groups) if e.p.requires_grad or e.p.grad is not None]
        for pattern in self.patterns:
            if not any(fnmatch.fnmatchcase(str(e.name), pattern) for e in listed):
                names = ", ".join(str(e.name) for e in listed[:3])
                raise ValueError(
                    f"{self.name}: no trainable parameter is called {pattern!r}.  The first are {names}; where "
                    f"parameters have no names, their positions are meant"
                )
        chosen = [e for e in listed if any(fnmatch.fnmatchcase(str(e.name), x) for x in self.patterns)]
        for e in chosen:
            self._refuse(owner, e, len(chosen) == len(listed))
        return chosen

    def _refuse(self, owner: Owner, e: Entry, whole: bool) -> None:
        """Raise an error if the step of a parameter cannot be recorded; `whole`: all others are chosen too."""
        label = state.label(e.p, e.name)
        if sharding.is_sharded(e.p):
            raise NotImplementedError(
                f"{self.name}: {label} is a DTensor, of which each rank has a part: choose parameters that are none, "
                f"or record a run on one rank, which goes on from the same checkpoint"
            )
        if e.group.get("capturable"):
            raise ValueError(
                f"{self.name}: {label} has capturable=True, under which the host reads nothing of a step: set it to "
                f"False in the parameter group until the step is recorded"
            )
        if not whole and offload.needs_model(owner, e):
            raise ValueError(
                f"{self.name}: {owner.cls.__name__} sums over the whole model, so the step of {label} needs all "
                f"parameters: leave params= out"
            )

    @torch.no_grad()
    def begin(self, owner: Owner, scaler: counting.Scaler | None) -> bool:
        """Copy what the step will read of the chosen parameters; return False if it has none of them, or is skipped."""
        found = [e for e in self._choose(owner) if e.p.grad is not None or offload.needs_model(owner, e)]
        first = next((e for e in found if e.p.grad is not None), None)
        if first is None or (scaler is not None and scaler.found_infinity()):
            return False
        cls, numbers = plans.generated_class(owner.cls), list(dict.fromkeys(e.number for e in found))
        seen: dict[int, Tensor] = {}
        pairs = {e.name: plans.chosen(owner.cls, e.group, e.p.dtype, e.name).pair for e in found}
        others = len(found) < sum(e.p.grad is not None for e in entries.of(owner.groups))
        matrices = any(stage.on_host for pair in pairs.values() for v in pair.variants for stage in v.stages)
        self._content = {
            KEY: VERSION, "format": checkpoint.FORMAT,
            "about": {
                "class": cls.__name__, "spec": cls.SPEC, "module": cls.__module__, "built": list(cls.PLANS),
                "plans": list(dict.fromkeys(pair.name for pair in pairs.values())), "batched": others and matrices,
                "backend": backends.choose(first.group["backend"], first.p.device, pairs[first.name]),
                "threads": torch.get_num_threads(), "made_with": made_with(),
            },
            "scale": None if scaler is None or scaler.scale is None else float(scaler.scale.item()),
            "groups": [_options(owner.cls, owner.groups[number]) for number in numbers],
            "parameters": [
                {
                    "name": e.name, "position": e.position, "group": numbers.index(e.number), "weight": _copied(e.p),
                    "gradient": None if e.p.grad is None else _copied(sharding.waited(state.materialized(e.p.grad))),
                    "waiting": _copied(e.p.__dict__.get(low_bits.ATTRIBUTE)), "state": _state(owner, e, seen),
                }
                for e in found
            ],
        }  # fmt: skip
        self._recorded = found
        return True

    @torch.no_grad()
    def end(self, owner: Owner) -> None:
        """Write what was copied, and what the step has left; a warning if the file cannot be written."""
        seen: dict[int, Tensor] = {}
        after = [{"weight": _copied(e.p), "state": _state(owner, e, seen)} for e in self._recorded]
        try:
            container.write(self.path, {**self._content, "after": after})
        except OSError as error:  # the step is made: an error would say that nothing has changed
            warn(f"{self.name}: the step was made, and its record was not written: {error}", owner.cls)


def made_with() -> dict[str, str]:
    """Return the versions and the processor on which the last bits of torch's functions and of fast maths depend."""
    triton = metadata.version("triton") if importlib.util.find_spec("triton") else "none"
    processor = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return {"torch": str(torch.__version__), "triton": triton, "processor": processor}


def _options(cls: Any, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group, without a user's own keys."""
    known = {"maximize", options.BASE, *options.OWN, *options.RUNNING, *(x.name for x in (*cls.HYPERS, *cls.FLAGS))}
    return {k: v for k, v in {**group, **options.in_plain_numbers(cls, group)}.items() if k in known}


def _copied(value: Any, device: str = "cpu") -> Any:
    """Return a copy on a device of a tensor, or of a dict with some."""
    if isinstance(value, dict):
        return {key: _copied(x, device) for key, x in value.items()}
    return value.detach().to(device, copy=True) if isinstance(value, Tensor) else value


def _state(owner: Owner, entry: Entry, seen: dict[int, Tensor]) -> dict[str, Any] | None:
    """Return a copy of a parameter's state, None if it has none; `seen` has the copies of shared tensors."""
    kept = owner.states.get(entry.p)  # without a step where inputs wait for the first one
    return _shared(kept, seen) if kept else None


def _shared(kept: Mapping[str, Any], seen: dict[int, Tensor], device: str = "cpu") -> dict[str, Any]:
    """Return copies of the numbers and tensors of a state, of a tensor in several states one copy."""
    found = {key: x for key, x in kept.items() if isinstance(x, (Tensor, int, float))}
    for x in found.values():
        if isinstance(x, Tensor) and id(x) not in seen:
            seen[id(x)] = _copied(x, device)
    return {key: seen.get(id(x), x) if isinstance(x, Tensor) else x for key, x in found.items()}


# -- the step again --------------------------------------------------------------------------------------------


def read(path: Path) -> dict[str, Any]:
    """Return the content of a record.  Raises CheckpointError if the file is damaged, or none of this version."""
    content = container.read_tree(path)
    if KEY not in content:
        what = "is a checkpoint, for `optgen verify-checkpoint`, and " * ("optgen_checkpoint" in content)
        raise CheckpointError(f"{path} {what}holds no recorded step: opt.record(path) writes one")
    found = content[KEY], content.get("format")
    if found != (VERSION, checkpoint.FORMAT):
        raise CheckpointError(
            f"{path} is a record of version {found[0]} with groups of format {found[1]}, expected {VERSION} and "
            f"{checkpoint.FORMAT}: replay it with the optgen that wrote it"
        )
    before, after = content.get("parameters"), content.get("after")
    if not before or not after or len(before) != len(after):
        raise CheckpointError(f"{path} does not hold the same parameters before and after the step")
    return content


def replay(content: Mapping[str, Any], cls: Any, backend: str) -> list[dict[str, Any]]:
    """Make a recorded step again with a class of its rule, and compare every bit that it leaves.

    Triton's kernels run on a GPU if there is one, all else on the CPU.  Raises the errors of a step.
    Returns the "name" and "kind" of each parameter, how many "values" were compared, and their "differences": of a
    "value" how many of its "elements" are "differing", and of the first the "place", as "recorded" and "made" now.
    """
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    own: dict[str, Any] = {"backend": backend, "offload": False}
    groups = [{**given, **own, **{key: [] for key in entries.OWN}} for given in content["groups"]]
    states: dict[Any, Any] = {}
    seen: dict[int, Tensor] = {}
    for one in content["parameters"]:
        p: Any = torch.nn.Parameter(_copied(one["weight"], device))
        p.grad_dtype = None  # gradients of any dtype
        p.grad = _copied(one["gradient"], device)
        if one["waiting"] is not None:
            setattr(p, low_bits.ATTRIBUTE, one["waiting"])
        if one["state"] is not None:
            states[p] = _shared(one["state"], seen, device)
        for key, x in zip(entries.OWN, (p, one["name"], one["position"]), strict=True):
            groups[one["group"]][key].append(x)
    params = [p for group in groups for p in group["params"]]
    scale = None if content["scale"] is None else torch.tensor([content["scale"]], device=device)
    scaler = None if scale is None else counting.Scaler(scale, torch.zeros_like(scale))
    Stepper().step(Owner(cls, groups, states, Uninterrupted()), scaler)
    rows = []
    for p, one, after in zip(params, content["parameters"], content["after"], strict=True):
        was = {"weight": after["weight"], **(after["state"] or {})}
        now = {"weight": p.detach(), **states.get(p, {})}
        found = [_difference(name, was.get(name), now.get(name)) for name in {**was, **now}]
        apart = [x for x in found if x]
        rows.append({"name": str(one["name"]), "kind": state.kind(p), "values": len(found), "differences": apart})
    return rows


def _difference(name: str, recorded: Any, made: Any) -> dict[str, Any]:
    """Compare two values bit by bit; {} if they are equal.  Numbers may have been counted on a device."""
    values = (math.nan if x is None else x for x in (recorded, made))
    a, b = (x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64) for x in values)
    if {a.dtype, b.dtype} == {torch.int64, torch.float64}:
        a, b = a.double(), b.double()
    found = {"value": name, "differing": a.numel(), "elements": a.numel(), "place": []}
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        kinds = ("nothing" if x is None else state.kind(x) for x in (recorded, made))
        return {**found, **dict(zip(("recorded", "made"), kinds, strict=True))}
    apart = (_words(a) != _words(b)).any(1).nonzero().flatten()
    if not len(apart):
        return {}
    place = [int(i) for i in torch.unravel_index(apart[0], a.shape)]
    one, other = (x.reshape(-1)[apart[0]].item() for x in (a, b))
    return {**found, "differing": len(apart), "place": place, "recorded": one, "made": other}


def _words(t: Tensor) -> Tensor:
    """Return the bytes of each element: uint8 (elements, bytes)."""
    flat = t.cpu().contiguous().view(-1)
    return flat.view(torch.uint8).view(len(flat), t.element_size())
