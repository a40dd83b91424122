"""The optimizer class of a standalone file.  `driver/standalone.py` copies what such a file needs of this module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from optgen.runtime.layout.layout import column_dims, field_shape, matrix_shape
from optgen.runtime.records import Eager
from optgen.runtime.records.keys import step_key, stream_key
from optgen.runtime.reference.eager import scalars
from optgen.runtime.reference.stored import Stored, encode


@dataclass(frozen=True)
class Field:
    """One stored tensor; entries of `width` bits per `per` elements, `zero` is the entry that decodes to 0."""

    name: str
    dtype: str
    per: int = 1
    zero: float = 0
    state: str = ""
    width: int = 1
    space: str = "elem"
    matrix: Any = "last"
    shared: bool = False
    rank: int = 0  # files have no states of low rank, and no parts of matrix states
    part: str = ""

    @property
    def wide(self) -> bool:
        return self.space == "elem" or self.shared

    @property
    def owner(self) -> str:
        return self.state or self.name


@dataclass(frozen=True)
class Variant:
    """The step for parameters of one dtype: its functions, and the tensors that it keeps.

    host  (step, grad_scale, **hypers, **host states) -> the scalars of the step, then new host states; fp64
    """

    param: str
    step: Callable[..., Any]
    host: Callable[..., tuple[Any, ...]]
    small: bool = False
    vector: bool = False
    flags: Mapping[str, bool] = field(default_factory=dict)
    fields: tuple[Field, ...] = ()
    host_states: tuple[tuple[str, float], ...] = ()
    init: Mapping[str, float | str] = field(default_factory=dict)
    matrix: Any = "last"
    axes: bool = False
    eager: Eager = field(default_factory=Eager)

    @property
    def states(self) -> tuple[str, ...]:
        return tuple(f.name for f in self.fields)

    def owned(self, owner: str) -> tuple[str, ...]:
        return tuple(f.name for f in self.fields if f.owner == owner)


class SingleFile(torch.optim.Optimizer):
    """An optimizer of one device; its state dict holds states as they are stored."""

    HYPERS: Mapping[str, Any]  # name -> (numbers, 0 for one, or a function of the group; range; test)
    FLAGS: Mapping[str, Any] = {}  # name -> bool, a hyper-parameter that must not be 0, or a function of the shape
    VARIANTS: tuple[Any, ...]
    _run: Any  # (group, hypers, jobs): make the steps of a group
    _create: Any  # (variant, p, group) -> the first states
    SMALL: int  # smaller tensors keep their states in fp32

    def __init__(self, params: Any, defaults: dict[str, Any], seed: int) -> None:
        super().__init__(params, {**defaults, "seed": seed})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; ValueError for a hyper-parameter out of its range."""
        for name in self.HYPERS:
            self._read({**self.defaults, **param_group}, name)
        super().add_param_group(param_group)

    def _read(self, group: Mapping[str, Any], name: str) -> Any:
        count, words, holds = self.HYPERS[name]
        count, value = (0, count(group)) if callable(count) else (count, group[name])
        numbers = tuple(float(x) for x in (value if count else [value]))
        if len(numbers) != max(count, 1) or not all(map(holds, numbers)):
            raise ValueError(f"{type(self).__name__}: {name} must be {words}, got {group[name]!r}")
        return numbers if count else numbers[0]

    def _variant(self, p: Tensor, group: Mapping[str, Any]) -> Any:
        """Return the step of a parameter."""
        flags = {}
        for name, rule in self.FLAGS.items():
            value = rule(tuple(p.shape)) if callable(rule) else rule
            flags[name] = value if isinstance(value, bool) else bool(group[value])
        small, vector, dtype = p.numel() < self.SMALL, p.ndim < 2, str(p.dtype)[6:]
        fitting = [v for v in self.VARIANTS if v.param == dtype and all(flags[k] == on for k, on in v.flags.items())]
        for v in sorted(fitting, key=lambda v: (not v.small, not v.vector)):
            if v.small <= small and v.vector <= vector:
                return v
        raise TypeError(f"{type(self).__name__}: parameters of dtype {dtype} and shape {list(p.shape)} are not served")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step, after evaluating `closure` if there is one; return what it gives."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        position = 0
        for group in self.param_groups:
            hypers = {name: self._read(group, name) for name in self.HYPERS}
            names = group.get("param_names") or range(position, position + len(group["params"]))
            jobs = [(x, p) for x, p in zip(names, group["params"], strict=True) if p.grad is not None]
            self._run(group, hypers, [(self._prepare(name, p, group), name, p, self.state[p]) for name, p in jobs])
            position += len(group["params"])
        return loss

    def _prepare(self, name: str | int, p: Tensor, group: Mapping[str, Any]) -> Any:
        """Return the step of a parameter that has its states; they begin here."""
        if p.grad is None or p.grad.layout != torch.strided:
            raise RuntimeError(f"{type(self).__name__}: the gradient of parameter {name!r} is not dense")
        variant, state = self._variant(p, group), self.state[p]
        if not state:
            state.update(self._create(variant, p, group))
        if wrong := [x for x in variant.states if x not in state]:
            raise RuntimeError(f"{type(self).__name__}: parameter {name!r} has no state {', '.join(wrong)}")
        return variant

    def _advance(self, variant: Any, host: Any, group: Any, hypers: Any, state: Any) -> tuple[Any, int]:
        """Count a step; return its scalars and its key of random bits."""
        state["step"] += 1
        keep = {name: state[name] for name, _ in variant.host_states}
        given = host(state["step"], -1.0 if group["maximize"] else 1.0, **hypers, **keep)
        count = len(given) - len(keep)
        state.update(zip(keep, map(float, given[count:]), strict=True))
        return given[:count], step_key(group["seed"], state["step"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states as they are stored; torch would cast them to the dtype of the parameter."""
        mine, theirs = ([g.get("param_names") for g in gs] for gs in (self.param_groups, state_dict["param_groups"]))
        if None not in [*mine, *theirs] and mine != theirs:
            raise ValueError(f"{type(self).__name__}: parameters are loaded by position, and names differ: {theirs}")
        super().load_state_dict(state_dict)
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for key, p in zip(saved, params, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                self.state[p][name] = value.to(p.device, copy=True) if isinstance(value, Tensor) else value


class EagerFile(SingleFile):
    """An optimizer whose steps are made by eager torch."""

    CODECS: Any

    def _create(self, variant: Any, p: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of a parameter before its first step."""
        state: dict[str, Any] = {"step": 0, **dict(variant.host_states)}
        for f in variant.fields:
            dtype = getattr(torch, f.dtype)
            state[f.name] = torch.full(field_shape(f, p.shape), f.zero, dtype=dtype, device=p.device)
        return state

    def _run(self, group: Mapping[str, Any], hypers: Mapping[str, Any], jobs: Sequence[tuple[Any, ...]]) -> None:
        for variant, name, p, state in jobs:
            numbers, step = self._advance(variant, variant.host, group, hypers, state)
            if not p.numel():
                continue
            w, g = p.contiguous(), p.grad.contiguous()
            shape = matrix_shape(variant.matrix, p.shape)
            alike = {f.name for f in variant.fields if f.per == 1 and f.space == "elem"}
            fields = {f: state[f].view(shape) if f in alike else state[f] for f in variant.states}
            dims = column_dims(variant.matrix, p.shape) if variant.axes else None
            random_keys = step, stream_key(name)
            stored = Stored(variant, self.CODECS, w.view(shape), g.view(shape), fields, random_keys, dims=dims)
            variant.step(stored, *(scalars(p, *numbers) if numbers else ()))
            if w is not p:
                p.copy_(w)


class Starting(EagerFile):
    """An optimizer with states that begin as the weight, or as a number other than 0."""

    def _create(self, variant: Any, p: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        state = super()._create(variant, p, group)
        starts: dict[str, Any] = {}
        for owner in dict.fromkeys(f.owner for f in variant.fields if f.owner != "p"):
            start = variant.init.get(owner, 0.0)
            starts[owner] = self._read(group, start) if start in self.HYPERS else start
        seen = matrix_shape(variant.matrix, p.shape)
        weight = p.detach().float().contiguous().view(seen)
        values = {k: weight if x == "param" else torch.full_like(weight, x) for k, x in starts.items()}
        made = encode(variant, self.CODECS)({"p": weight, **values}) if weight.numel() else {}
        for f in variant.fields:
            if starts.get(f.owner) == 0:
                continue  # what its entries are already
            if not f.wide:
                state[f.name].fill_(starts[f.owner])
            elif f.name in made:
                state[f.name].copy_(made[f.name].view(state[f.name].shape))
        return state
