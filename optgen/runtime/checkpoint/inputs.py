"""Inputs: further values per element of a rule, such as the diagonal of a Hessian, that its user feeds.

An input is a state in fp32 that the rule reads and leaves as it is, beside a host state that says if it is fed
(`records.fed_name`): so checkpoints and offload have it as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from optgen.runtime.checkpoint import checkpoint
from optgen.runtime.layout import sharded_states, sharding
from optgen.runtime.options.entries import Entry, Owner
from optgen.runtime.records import Variant, fed_name
from optgen.runtime.states import state

Given = Mapping[Tensor, Tensor | None] | Sequence[Tensor | None] | Callable[[Tensor], Tensor | None]


@torch.no_grad()
def feed(self: Any, *, keep: bool = False, **values: Given) -> None:
    """Give the rule's inputs for the next step of each parameter: `opt.feed(hessian=tensors)`.

    values  for each input a tensor of each parameter's shape, on its device: by parameter, in the order of those that
            require a gradient (of several rules: of those whose rule has the input), or as a function of a parameter.
            Where there is none (None), nothing is fed.  Of a sharded parameter a DTensor over its mesh, or on every
            rank the whole tensor
    keep    for all further steps, until the next feed
    All is checked first: TypeError for names that are no inputs and values that are no tensors, ValueError for a tensor
    that does not fit its parameter; nothing has changed then.
    """
    for one in self._members:
        one._offload.arrive()
    cls, found = type(self).__name__, list[Any]()
    inputs = dict.fromkeys(x for one in self._members for x in one.INPUTS)
    for name, given in values.items():
        if name not in inputs:
            raise TypeError(f"{cls}.feed: {name!r} is no input of this rule; its inputs: {', '.join(inputs) or 'none'}")
        rows = [(one, entry) for one, entry, _ in self._matched() if name in one.INPUTS]
        own = _by_parameter(f"{cls}.feed: {name}", given, [entry.p for _, entry in rows])
        for one, entry in rows:
            if (x := own.get(id(entry.p))) is not None:
                _check(type(one).__name__, name, entry, x)
                found.append((one.state, entry, name, *_part(type(one), name, entry, x)))
    for row in found:
        _keep(*row, fed=2.0 if keep else 1.0)


def _keep(
    states: Any, entry: Entry, name: str, x: Tensor, parts: sharded_states.ShardedStates | None, *, fed: float
) -> None:
    kept = states[entry.p]
    if name in kept and sharding.local(kept[name]).is_contiguous():
        sharding.local(kept[name]).copy_(x)
    else:  # the first step makes the other states beside it
        made = {name: torch.empty(x.shape, dtype=torch.float32, device=state.home(entry.p)).copy_(x)}
        kept.update(made if parts is None else parts.wrapped(made))
    kept[fed_name(name)] = fed


def _by_parameter(what: str, given: Any, params: Sequence[Tensor]) -> dict[int, Tensor | None]:
    """Return the values of an input by id(parameter), in whichever form they are given."""
    trained = [p for p in params if p.requires_grad]
    if callable(given):
        return {id(p): given(p) for p in trained}
    if isinstance(given, Mapping):
        own = {id(p): x for p, x in given.items()}
        if unknown := own.keys() - set(map(id, params)):
            raise ValueError(f"{what} has tensors for {len(unknown)} parameters of no group of a rule that has it")
        return own
    if not hasattr(given, "__len__"):
        raise TypeError(f"{what} must be a list, a dict or a function of parameters, not {given!r:.60}")
    if len(given) != len(trained):
        raise ValueError(
            f"{what} has {len(given)} tensors, and {len(trained)} parameters require a gradient: give None where there "
            f"is none, or a dict by parameter"
        )
    return {id(p): x for p, x in zip(trained, given, strict=True)}


def freed(cls: Any, states: dict[Any, Any]) -> dict[Any, Any]:
    """Put one zero, expanded, in the place of inputs that were fed for the last step alone: none reads them again."""
    for name, kept in product(cls.INPUTS, states.values()):
        if isinstance(kept, dict) and type(fed := kept.get(fed_name(name))) is float and fed == 0.0 and name in kept:
            # contiguous() would leave one element its stride of 0, which view(dtype) refuses
            kept[name] = _changed(kept[name], lambda x: x.new_zeros(() if x.numel() > 1 else x.shape).expand(x.shape))
    return states


def whole(cls: Any, saved: dict[str, Any]) -> dict[str, Any]:
    """Put zeros of full size into a state dict, where inputs are freed: torch.distributed.checkpoint reads into it."""
    for name, (key, kept) in product(cls.INPUTS, saved.get("state", {}).items()):
        if isinstance(kept, dict) and name in kept:
            saved["state"][key] = saved["state"][key] | {name: _changed(kept[name], Tensor.contiguous)}
    return saved


def _changed(x: Any, change: Callable[[Tensor], Tensor]) -> Any:
    made = change(sharding.local(x))
    return sharding.wrapped(made, sharding.layout_of(x)) if sharding.is_sharded(x) else made


def _part(cls: Any, name: str, entry: Entry, x: Tensor) -> tuple[Tensor, sharded_states.ShardedStates | None]:
    """Return the part of a value that belongs to what this rank has of a parameter, and how that is sharded."""
    if not sharding.is_sharded(entry.p):
        return x, None
    try:
        parts = sharded_states.ShardedStates.of(entry.p, checkpoint.select(cls, entry.group, entry.p, entry.name)[2])
        return parts.beside(name, x), parts
    except ValueError as error:
        raise ValueError(f"{cls.__name__}.feed: {state.label(entry.p, entry.name)}: {error}") from None


def _check(cls: str, name: str, entry: Entry, x: Any) -> None:
    """Raise an error for a value of an input that does not fit its parameter."""
    label = state.label(entry.p, entry.name)
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"{cls}.feed: {name} of {label} must be a floating tensor, got {state.kind(x)}")
    if x.shape != entry.p.shape or x.device != entry.p.device:
        want = f"{list(entry.p.shape)} on {entry.p.device}"
        raise ValueError(f"{cls}.feed: {name} of {label} must be {want}, got {list(x.shape)} on {x.device}")


def begins(owner: Owner) -> bool:
    """Return True for a step of parameters without states at lr 0 with zero gradients, by which
    torch.distributed.checkpoint has states made (`_init_optim_state`)."""
    params = [p for group in owner.groups for p in group["params"] if p.grad is not None]
    if any(state.of(owner.states, p) for p in params) or any(group.get("lr", 1) != 0 for group in owner.groups):
        return False
    return not any(sharding.local(p.grad).any() for p in params)


def check_fed(cls: Any, variant: Variant, host: Sequence[Any], label: str) -> None:
    """Raise RuntimeError for an input that was not fed, if the rule has no flag for such steps.

    host   the parameter's host states, in the order of `variant.host_names`
    """
    values = dict(zip(variant.host_names, host, strict=True))
    optional = {name for flag in cls.FLAGS for name in flag.inputs}
    for name in cls.INPUTS:
        if name not in optional and not values.get(fed_name(name), 0.0) > 0:
            raise RuntimeError(
                f"{cls.__name__}: the input {name!r} of {label} was not fed for this step: call opt.feed({name}=...) "
                f"before step(), with keep=True if it stays the same"
            )
