"""The optimizer class of a standalone file.  `driver/standalone.py` copies what such a file needs of this module."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from optgen.runtime.layout.layout import column_dims, field_shape, matrix_shape
from optgen.runtime.records import Stage, Variant
from optgen.runtime.records.keys import step_key, stream_key
from optgen.runtime.reference import matrices
from optgen.runtime.reference.eager import scalars
from optgen.runtime.reference.matrix_codecs import CODECS
from optgen.runtime.reference.run import EagerStep, Storage, Tensors, few_shape, write

HERE: Any = sys.modules[__name__]
"""The file: its functions are attributes."""


@cache
def eager_step(variant: Variant) -> EagerStep:
    """Return the step of a variant in eager torch."""
    return EagerStep(variant, HERE, HERE)


class SingleFile(torch.optim.Optimizer):
    """An optimizer of one device, whose steps are eager torch; its state dict holds states as they are stored."""

    HYPERS: Mapping[str, Any]  # name -> (numbers, 0 for one, or a function of the group; range; test)
    FLAGS: Mapping[str, Any] = {}  # name -> bool, a hyper-parameter that must not be 0, or a function of the shape
    VARIANTS: tuple[Any, ...]
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
        if wrong := [x for x in variant.names if x not in state]:
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

    def _create(self, variant: Any, p: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of a parameter before its first step."""
        state: dict[str, Any] = {"step": 0, **dict(variant.host_states)}
        for f in variant.fields:
            shape, dtype = field_shape(f, p.shape), getattr(torch, f.dtype)
            state[f.name] = torch.full(shape, f.zero, dtype=dtype, device=p.device)
            if f.owner == "p" and dtype is torch.float32:  # a copy of the weight
                state[f.name].copy_(p.detach())
        return state

    def _run(self, group: Mapping[str, Any], hypers: Mapping[str, Any], jobs: Sequence[tuple[Any, ...]]) -> None:
        for variant, name, p, state in jobs:
            numbers, key = self._advance(variant, variant.host[0], group, hypers, state)
            if p.numel():
                self._eager(variant, p, state, numbers, key, stream_key(name))

    def _on_host(self, variant: Variant, stage: Stage, x: Tensors, numbers: Sequence[float], key: int) -> None:
        """Make a stage of whole matrices, in a class of a rule that has such (OfMatrices)."""
        raise NotImplementedError

    def _eager(
        self, variant: Variant, p: Tensor, state: Mapping[str, Any], numbers: Any, key: int, stream: int
    ) -> None:
        """Make a step of a parameter."""
        assert variant.rule is not None and p.grad is not None
        w, g = p.contiguous(), p.grad.contiguous()
        shape = matrix_shape(variant.matrix, p.shape)
        alike = {f.name for f in variant.fields if f.per == 1 and f.space == "elem"}
        fields = {f: state[f].view(shape) if f in alike else state[f] for f in variant.names}
        dims = column_dims(variant.matrix, p.shape) if variant.has_axes else None
        x = Tensors(w.view(shape), g.view(shape), fields, dims=dims, stream=stream)
        for t in variant.temps:
            dtype = torch.bfloat16 if t.space == "elem" and not t.wide else torch.float32
            of = x.p.shape if t.space == "elem" else few_shape(t.space, x)
            x.temps[t.name] = torch.empty(of, dtype=dtype, device=p.device)
        given, step, k = scalars(p, *numbers) if numbers else (), eager_step(variant), 0
        for stage in variant.rule.stages:
            if stage.on_host:
                self._on_host(variant, stage, x, [float(s) for s in given], key)
            else:
                step.run(k, k + 1, x, given, key)
                k += 1
        if w is not p:
            p.copy_(w)


def as_matrices(x: Tensor, lead: Sequence[int] = ()) -> Tensor:
    """Return a tensor as a batch of matrices, or the one that it is; one number is that of each matrix."""
    x = x if x.ndim else x.expand(*lead, 1, 1)
    x = x.reshape(-1, *x.shape[-2:])
    return x if len(x) > 1 else x[0]


class OfMatrices(SingleFile):
    """An optimizer whose steps call functions of whole matrices."""

    def _on_host(self, variant: Variant, stage: Stage, x: Tensors, numbers: Sequence[float], key: int) -> None:
        """Call a function, and keep what it returns; states in 8 bits are decoded before and encoded after it."""
        if stage.space == "call":
            value = x.temps[stage.temps[0]]
            scalars_left = iter(stage.scalars)
            given = (numbers[next(scalars_left)] if x is None else x for x in stage.given)
            made = getattr(HERE, stage.kernel)(as_matrices(value), *given)
            value.copy_(made.view(value.shape))
            return
        kept, lead = variant.eager, x.p.shape[:-2]
        sizes = {"rows": x.p.shape[-2], "columns": x.p.shape[-1], "elements": x.p.numel()}
        stream = as_matrices(matrices.streams(x.stream, lead, x.p.device))
        fields = {name: as_matrices(y, lead) for name, y in {**x.fields, **x.temps}.items() if y.ndim != 1}

        def read(name: str) -> Tensor:
            coded = [fields[f] for f in variant.coded(name)]
            return CODECS[kept.matrices[name]].decode(*coded) if name in kept.matrices else fields[name]

        extents = [stream if name == "stream" else float(sizes[name]) for name in stage.extents]
        made = getattr(HERE, stage.kernel)(*map(read, stage.reads), *(numbers[k] for k in stage.scalars), *extents)
        results = dict(zip(stage.stores, [made] if isinstance(made, Tensor) else made, strict=True))
        for name in sorted(stage.stores, key=kept.over.__contains__):
            new: tuple[Tensor, ...] = (results[name],)
            if name in kept.matrices:
                noise = matrices.rounding(name, key, stream) if name in kept.random else None
                base = [fields[f] for f in variant.owned(kept.over.get(name, ""))]
                new = CODECS[kept.matrices[name]].encode(*new, *base, noise=noise)
            fields |= zip(variant.owned(name) or (name,), new, strict=True)
        names = [f for name in stage.stores for f in variant.owned(name) or (name,)]
        write([(x[f], fields[f].reshape(x[f].shape)) for f in names])


class Starting(SingleFile):
    """An optimizer with states that begin as the weight, or as a number other than 0."""

    def _create(self, variant: Any, p: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        state = super()._create(variant, p, group)
        starts: dict[str, Any] = {}
        for owner in dict.fromkeys(f.owner for f in variant.fields if f.owner != "p"):
            start = variant.init.get(owner, 0.0)
            starts[owner] = self._read(group, start) if start in self.HYPERS else start
        weight = p.detach().float().contiguous().view(matrix_shape(variant.matrix, p.shape))
        values = {k: weight if x == "param" else torch.full_like(weight, x) for k, x in starts.items()}
        made = Storage(variant, HERE).encode({"p": weight, **values}) if weight.numel() else {}
        for f in variant.fields:
            if not starts.get(f.owner):
                continue  # what its entries are already
            if not f.wide:
                state[f.name].fill_(starts[f.owner])
            elif f.name in made:
                state[f.name].copy_(made[f.name].view(state[f.name].shape))
        return state
