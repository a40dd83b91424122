"""The unit of work of a step: parameters that share a kernel, each with a line of its scalars."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import setitem
from typing import Any, Literal

import torch
from torch import Tensor

from optgen.runtime.layout import layout, sharded_states, sharding, workspace
from optgen.runtime.layout.fp8_weight import Fp8Weight, kept_with, memory
from optgen.runtime.records import Variant, keys
from optgen.runtime.records.join import Pair
from optgen.runtime.reference.matrix_codecs import CODECS, MatrixCodec
from optgen.runtime.states import state, views
from optgen.runtime.work.counting import DeviceStep, Lines, capturing

Backend = Literal["reference", "triton", "cpp"]
"""The maker of a step: eager torch, Triton kernels or C++ kernels."""


@dataclass(slots=True)
class Bucket:
    """Parameters that one kernel steps, of any groups: parallel lists, and what is one for all.

    plan, variant  the rule under a plan of storage, and its kernel: of AdamW under int8_split24, that of bf16 weights
    backend        the maker of the step: "cpp"
    device         of all tensors: cuda:0
    grad_dtype     the dtype in which kernels read gradients: torch.bfloat16
    lines          the lines of scalars: of each group, and count of steps in it
    counted        True if a device counts steps, under capturable=True
    sent           True if the host sends the scalars of each step to the device, under capturable="host"
    params, grads  the user's tensors until `localize`, then contiguous ones
    states         of each parameter: {"exp_avg_codes": tensor, ..., "step": 7}
    streams        the streams of random bits, hashes of names
    line_of        the number of each parameter's line
    names          of the parameters, or their positions where they have none: "0.weight"
    coded          Fp8Weights, whose codes are among the params
    written        (tensor of the user, contiguous copy that the step writes): copied back in `finish`
    kernel         the compiled function of the C++ backend
    codecs         of matrix states, by trait
    cut            the dimensions of matrices that lie over several ranks, or "work" on matrices that all of them hold:
                   {"row"}; the same for all parameters
    shards         the layout over ranks of each parameter that is a DTensor; params, grads and states are its parts
    workers        the layout over ranks and the workers (workers.py) of parameters with functions of matrices, by index
    places         the place of each part in its logical tensor; None if each is all of it
    pool           the workspace shared with buckets that step before or after; None for one of its own
    at_step        the setting of flags that change from step to step: (("refresh", True),)
    pieces         of parameters that are matrices of unequal numbers of rows, by index: the label that random bits
                   follow, and the rows: ("w", (64, 32)); `divide` puts the matrices in their place
    wholes         the states of such parameters as the optimizer holds them, by index of the matrix
    workspace      bytes of values of elements between sweeps: 2**29; half of it, of the matrices in one batch
    turn           the turn in which buckets that wait for other ranks run together: 0
    kind           the key of the bucket
    positions      of the parameters, over all groups: [0, 3]
    """

    plan: Pair
    variant: Variant
    backend: Backend
    device: torch.device
    grad_dtype: torch.dtype
    counted: bool = False
    sent: bool = False
    lines: Lines = field(default_factory=Lines)
    line_of: list[int] = field(default_factory=list)
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    states: list[state.State] = field(default_factory=list)
    streams: list[int] = field(default_factory=list)
    names: list[str | int] = field(default_factory=list)
    written: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    coded: list[Tensor] = field(default_factory=list)
    kernel: Callable[..., int] | None = None
    codecs: Mapping[str, MatrixCodec] = field(default_factory=lambda: CODECS)
    cut: frozenset[str] = frozenset()
    shards: list[sharded_states.ShardedParameter | None] = field(default_factory=list)
    workers: dict[int, tuple[sharding.Layout, tuple[int, ...]]] = field(default_factory=dict)
    places: list[layout.Place] | None = None
    pool: workspace.Pool | None = None
    at_step: tuple[tuple[str, bool], ...] = ()
    pieces: dict[int, tuple[keys.Label, tuple[int, ...]]] = field(default_factory=dict)
    wholes: dict[int, state.State] = field(default_factory=dict)
    workspace: int = workspace.USUAL
    turn: int = 0
    kind: tuple[object, ...] = ()
    positions: list[int] = field(default_factory=list)

    @property
    def in_parts(self) -> bool:
        """True if the host has work between its kernels: a sum over the model or over ranks, a function of matrices; or
        does it all."""
        return self.backend == "reference" or self.variant.in_parts or (bool(self.variant.stages) and bool(self.cut))

    @property
    def waits(self) -> bool:
        """True if its step is made together with those of other buckets."""
        return bool(self.variant.model_temps) or (bool(self.variant.stages) and bool(self.cut))

    @property
    def lasts(self) -> bool:
        """True if its kernels can make further steps.

        An Fp8Weight may have other memory then.  Those of a parameter that is not contiguous run on a copy, and those
        of several matrices on views, made anew at each step.  Nothing is kept of eager torch, with which the others are
        compared.
        """
        return not (self.backend == "reference" or self.written or self.coded or self.wholes)

    @property
    def owned(self) -> list[state.State]:
        """The states as the optimizer holds them."""
        pairs = enumerate(zip(self.states, self.shards, strict=True))
        return [self.wholes.get(i, s) if shard is None else shard.owner for i, (s, shard) in pairs]

    def numel(self, i: int) -> int:
        """Elements of the logical tensor."""
        return self.params[i].numel() if self.places is None else self.places[i].numel

    @property
    def live(self) -> list[int]:
        """The parameters that have elements, on any rank."""
        sizes = [p.numel() for p in self.params] if self.places is None else [place.numel for place in self.places]
        return [i for i, size in enumerate(sizes) if size]

    @property
    def first(self) -> tuple[Tensor, str | int]:
        """A parameter and its name, for errors."""
        return self.params[0], self.names[0]

    def divide(self) -> None:
        """Replace each parameter that is several matrices by views of its rows, as if these were parameters called
        "name[start:stop]"."""
        if not self.pieces:
            return
        rows: list[tuple[Any, ...]] = []
        given, self.workers = self.workers, {}
        columns = self.params, self.grads, self.states, self.streams, self.names, self.shards, self.line_of
        for i, (p, g, s, stream, name, shard, line) in enumerate(zip(*columns, strict=True)):
            over, workers = given.get(i, (None, ()))
            if i not in self.pieces:
                self.workers |= {len(rows): given[i]} if over else {}
                rows.append((p, g, s, stream, name, shard, line))
                continue
            state.check(self.variant, p, s, name)
            label, sizes = self.pieces[i]
            for k, (start, size) in enumerate(zip(itertools.accumulate(sizes, initial=0), sizes, strict=False)):
                part = s | {key: s[key].narrow(0, start, size) for key in self.variant.names}
                span = f"[{start}:{start + size}]"
                self.wholes[len(rows)] = s if shard is None else shard.owner
                self.workers |= {len(rows): (over.of_all((size, *p.shape[1:])), (workers[k],))} if over else {}
                views = p.narrow(0, start, size), g.narrow(0, start, size), part
                rows.append((*views, keys.stream_key(f"{label}{span}"), f"{name}{span}", shard, line))
        (
            self.params, self.grads, self.states, self.streams, self.names, self.shards, self.line_of,
        ) = map(list, zip(*rows, strict=True))  # fmt: skip
        self.settle()

    def localize(self) -> None:
        """Contiguous params and grads in logical order: the kernels see memory, not strides."""
        for i, p in enumerate(self.params):
            if isinstance(p, Fp8Weight):
                self.params[i] = memory(p)
                self.states[i].update(kept_with(p, {}))  # p.data = ... gives it others
                self.coded.append(p)
            elif not p.is_contiguous():
                if state.overlaps(p):  # it was frozen, or something else, when the optimizer was made
                    raise RuntimeError(f"{state.label(p, self.names[i])} is an expanded view: its elements overlap")
                self.params[i] = p.contiguous()
                self.written.append((p, self.params[i]))
            g = self.grads[i]
            if g.dtype != self.grad_dtype:  # fp64
                g = g.to(self.grad_dtype)
            self.grads[i] = g if g.is_contiguous() and not g.is_neg() else g.resolve_neg().contiguous()

    def views(self, i: int) -> dict[str, Tensor]:
        """Return the tensors of a parameter's views, by name."""
        return views.room(self.owner(i), self.variant, self.params[i]) if self.variant.views else {}

    def shown(self) -> list[Tensor]:
        """Return the tensors of views: those of all parameters for each of the variant's."""
        found = [self.views(i) for i in range(len(self.params))] if self.variant.views else []
        return [x[f.name] for f in self.variant.shown for x in found]

    def owner(self, i: int) -> Tensor:
        """Return the user's tensor of a parameter, of which the step may write a contiguous copy or a part."""
        shard = self.shards[i]
        if shard is not None:
            return shard.p
        return next((user for user, copy in self.written if copy is self.params[i]), self.params[i])

    def prepare_views(self) -> None:
        """Set the scales of views for a step."""
        if self.variant.views:  # the owners of many small tensors take a quarter of a step's time on the host
            views.prepare(self.plan, self.variant, [self.owner(i) for i in range(len(self.params))])

    def stamp(self) -> None:
        """Note that the views, which kernels have written, are those of the weights that the step has left."""
        torch.autograd.graph.increment_version(self.shown())
        parts = (shard is None or not shard.whole for shard in self.shards)
        views.stamp([self.owner(i) for i, part in enumerate(parts) if part])

    def check(self) -> None:
        for p, s, name, shard in zip(self.params, self.states, self.names, self.shards, strict=True):
            state.check(self.variant, p, s, name, None if shard is None or shard.whole else shard.parts)

    def move_count(self, counts: Mapping[int, int]) -> bool:
        """The counts of steps and the host states go to the device; the states take them over in `finish`.

        counts  the number of parameters that a tensor counts, by its id (`counting.sharing`)
        A line that another bucket is counted with takes copies; returns True if one does.
        """
        own = Counter(k for k, _ in {(k, id(s)) for k, s in zip(self.line_of, self.owned, strict=True)})
        copied = False
        steps, hosts = self.lines.steps, self.lines.hosts
        for k, (step, host) in enumerate(zip(steps, hosts, strict=True)):
            if not isinstance(step, Tensor):
                steps[k] = torch.full((), step, dtype=torch.int64, device=self.device)
                hosts[k] = tuple(torch.full((), float(x), dtype=torch.float64, device=self.device) for x in host)
            elif counts[id(step)] != own[k]:
                steps[k], hosts[k], copied = step.clone(), tuple(x.clone() for x in host), True
        return copied

    def each(self, values: Sequence[Any]) -> Iterable[Any]:
        """Return for each parameter the value of its line; without end where there is one line."""
        return repeat(values[0]) if len(values) == 1 else map(values.__getitem__, self.line_of)

    def finish(self, after: Sequence[Sequence[Any]] | DeviceStep) -> None:
        """Copy back what was copied, count the step, and keep the host states: `StepScalars.after`."""
        for user, copy in self.written:
            user.copy_(copy)
        sharded = [shard.p for shard in self.shards if shard is not None]
        torch.autograd.graph.increment_version([*sharded, *self.coded])
        if self.variant.views:
            self.stamp()
        if self.sent and capturing():
            return  # the host counts the step when it is replayed
        kept = self._device_counts() if isinstance(after, DeviceStep) else after
        for name, values in zip(("step", *self.variant.host_names), zip(*kept, strict=True), strict=True):
            for states in (self.states, self.owned) if self.wholes or sharded else (self.states,):
                any(map(setitem, states, repeat(name), self.each(values)))
        if isinstance(after, DeviceStep):
            after.finish()

    def _device_counts(self) -> Sequence[Sequence[Any]]:
        """Return the count of steps and the host states of each line that a device counts."""
        return [(x, *y) for x, y in zip(self.lines.steps, self.lines.hosts, strict=True)]

    def kept(self, i: int) -> Tensor:
        """Return the tensor that a parameter's states belong to: it, or its part on this rank."""
        shard = self.shards[i]
        return self.params[i] if shard is None or shard.gathered or not shard.whole else sharding.local(shard.p)

    def parts(self, i: int) -> sharded_states.ShardedStates | None:
        """Return the layout of a parameter and its states, if it is a DTensor."""
        shard = self.shards[i]
        return None if shard is None else shard.parts

    def settle(self) -> None:
        """Set the places of parameters, once it is known which of them the kernels see whole."""
        if not any(self.shards):
            return
        matrix, places = self.variant.matrix, []
        for p, shard in zip(self.params, self.shards, strict=True):
            if shard is None or shard.whole:
                places.append(layout.place(layout.matrix_shape(matrix, p.shape)))
            else:
                places.append(shard.layout.place(matrix))
        self.places = places
