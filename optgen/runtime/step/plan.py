"""The plans of steps: their buckets, their kernels, and what both follow from.

Sorting many small tensors into buckets takes longer than their kernels.  So a plan is kept, and makes further steps
while all that it follows from is as it was (`Plans.find`): parameters, the places of their memory and of their states,
which of them have gradients, and the options that decide which kernels run.  Numbers are read anew at each step.
Gradients may have moved, if they are aligned as before: their addresses are written into the kernels' tables.

Between steps a plan holds parameters alone; states and gradients are known by addresses and layouts (look.py), so that
users can free them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, compress, repeat
from operator import is_, is_not, itemgetter
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from optgen.runtime.layout import sharding
from optgen.runtime.options import options
from optgen.runtime.options.entries import Owner
from optgen.runtime.step.launch import Kernels, Tables
from optgen.runtime.step.look import look
from optgen.runtime.work import counting, staged
from optgen.runtime.work.bucket import Bucket
from optgen.runtime.work.counting import Control, HostScalars, StepScalars

State = dict[str, Any]


class Options:
    """The options of parameter groups: those that decide their buckets, and the numbers of a step.

    decided  what decides buckets, as it was when they were made
    values   all options, as they were at the last step; inside: lists and dicts among those that decide
    free     hyper-parameters that decide nothing
    read     the numbers of the lines of buckets, by their groups and the device that reads tensors
    last     True if all of these last
    """

    DECIDING = (*sorted(options.OWN - {"seed"}), *options.RUNNING, "param_names")

    def __init__(self, cls: Any, groups: Sequence[Mapping[str, Any]]) -> None:
        self.cls = cls
        limits = [name for flag in cls.FLAGS for name in flag.limits] + [h.name for h in cls.HYPERS if h.whole]
        self.keys = (*self.DECIDING, *limits)
        flags = {flag.nonzero or flag.name for flag in cls.FLAGS}
        self.free = {h.name for h in cls.HYPERS} - flags - {*self.keys}
        self.params = list(chain.from_iterable(map(_params, groups)))
        self.decided = [[x.copy() if isinstance(x, (list, dict)) else x for x in self._deciding(g)] for g in groups]
        self.names, self.values, self.inside = list[str](), list[Any](), list[tuple[Any, Any]]()
        self.read: dict[tuple[tuple[int, ...], torch.device | None], options.Numbers]
        self.last = True
        self._take(groups)

    def _deciding(self, group: Mapping[str, Any]) -> list[Any]:
        own = list(map(group.get, self.keys))
        return [len(group["params"]), list(group), options.flags_of(self.cls, group), *own]

    def match(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Return True if groups have the same parameters and ask for the same buckets; their numbers are taken."""
        names, values = list(chain.from_iterable(groups)), list(chain.from_iterable(map(_values, groups)))
        params = list(chain.from_iterable(map(_params, groups)))
        if len(params) != len(self.params) or not all(map(is_, params, self.params)):
            return False
        self.groups = groups
        if not self.last:
            self.read, self.last = {}, True
        others = set(compress(names, map(is_not, values, self.values))) if names == self.names else {""}
        if not others <= self.free or (self.inside and any(x != kept for x, kept in self.inside)):
            if list(map(self._deciding, groups)) != self.decided:
                return False
            self._take(groups)
        elif others:
            self.values, self.read = values, {}
        return True

    def _take(self, groups: Sequence[Mapping[str, Any]]) -> None:
        self.names, self.values = list(chain.from_iterable(groups)), list(chain.from_iterable(map(_values, groups)))
        inside = (group.get(key) for group in groups for key in self.keys)
        self.inside = [(x, x.copy()) for x in inside if isinstance(x, (list, dict))]
        self.groups, self.read, self.last = groups, {}, True

    def count(self, bucket: Bucket, control: Control | None) -> StepScalars:
        """Compute the scalars of a bucket's step; control: where they are on the device, None for the host's.

        Raises ValueError if a hyper-parameter is out of its range.
        """
        own = tuple(bucket.lines.groups), None if control is None else bucket.device
        if (numbers := self.read.get(own)) is None:
            groups = list(map(self.groups.__getitem__, bucket.lines.groups))
            self.read[own] = numbers = options.Numbers(self.cls, groups, own[1])
            self.last = self.last and numbers.last
        if control is None:
            return counting.on_host(bucket.variant, bucket.lines, numbers)
        return counting.on_device(bucket.variant, control, bucket.lines, numbers)


_params: Callable[[Any], Any] = itemgetter("params")
_values: Callable[[Any], Any] = dict.values


class PreparedBucket(NamedTuple):
    """A bucket before its step."""

    bucket: Bucket
    kernels: Kernels
    counted: StepScalars

    def run(self) -> None:
        """Make the step, and count it."""
        if self.bucket.in_parts:
            with torch.no_grad():
                staged.run(self.runner())
        else:
            self.kernels.run(self.bucket, self.counted.scalars)
            torch.autograd.graph.increment_version(self.bucket.params)  # nobody else sees what kernels write
        self.bucket.finish(self.counted.after)

    def runner(self) -> staged.Runner:
        """Return the step in parts, between which the host has something to do."""
        return self.kernels.runner(self.bucket, self.counted.scalars)


    @property
    def given(self) -> list[float]:
        """The numbers that functions of matrices take, and keys of what they draw, which a CUDA graph repeats."""
        scalars, variant = self.counted.scalars, self.bucket.variant
        places = [x for stage in variant.stages if stage.on_host for x in stage.scalars]
        found = [scalars.rounded(k, x) for k in range(len(self.bucket.lines)) for x in places]
        return [*found, *scalars.keys] if variant.eager.random and isinstance(scalars, HostScalars) else found


class PlannedBucket:
    """A bucket of a plan, what its tensors were, and its kernels."""

    def __init__(self, bucket: Bucket, kernels: Kernels, grads: list[Tensor]) -> None:
        self.bucket, self.kernels = bucket, kernels
        # torch moves the version of a DTensor, not that of its local part.
        self.params: list[Any] = [p if x is None else x.p for p, x in zip(bucket.params, bucket.shards, strict=True)]
        self.specs = [None if shard is None else shard.p._spec for shard in bucket.shards]
        self.sharded = any(spec is not None for spec in self.specs)
        self.single = [i for i, g in enumerate(grads) if g.numel() == 1]
        self.names = list(bucket.variant.names)
        self.firsts = [bucket.line_of.index(k) for k in range(len(bucket.lines))]
        self.shown: Callable[[], list[Tensor]] = bucket.shown if bucket.variant.views else list
        self.seen = look(self.names, bucket.states, bucket.params + self.shown() + grads)
        self.grads: list[int] = []

    def is_due(self, owner: Owner) -> bool:
        """Return True if the next step has the bucket's setting of the flags that change from step to step."""
        bucket = self.bucket
        for k, first in enumerate(self.firsts):
            group, step = owner.groups[bucket.lines.groups[k]], owner.states[self.params[first]]["step"] + 1
            own = (x for x, line in zip(bucket.positions, bucket.line_of, strict=True) if line == k)
            some = own if group.get("stagger") else (bucket.positions[first],)
            if any(options.at_step(owner.cls, group, step, x) != bucket.at_step for x in some):
                return False
        return True

    def fits(self, entries: list[Any], grads: list[Any]) -> bool:
        """Return True if the same kernels can run on what is there now; the bucket takes it.

        grads  none where a CUDA graph makes them
        Raises an error of Python or torch for what is missing or is no dense tensor.
        """
        if not self._takes_counts(entries):
            return False
        bucket, old = self.bucket, self.seen
        bucket.grads, bucket.states = grads, entries
        if self.sharded and not self._takes_parts():
            return False
        now = look(self.names, bucket.states, bucket.params + self.shown() + bucket.grads, old)
        own = len(now.addresses) - len(grads)
        if now.layouts != old.layouts or now.addresses[:own] != old.addresses[:own]:
            return False
        # One element is the only size at which a lazily negated tensor is contiguous.
        if any(bucket.grads[i].is_neg() for i in self.single):
            return False
        self.grads, known = now.addresses[own:].tolist(), self.kernels.signature.columns[1]
        return not grads or self.grads == known or self._may_move(bucket.grads, known)

    def _takes_parts(self) -> bool:
        """Let the bucket take the parts on this rank of what it has, if gradients lie as before."""
        bucket = self.bucket
        if not all(map(_placed, bucket.grads, self.specs)):
            return False
        bucket.params, bucket.grads = _local(self.params), _local(bucket.grads)
        for i, shard in enumerate(bucket.shards):
            if shard is not None:
                shard.owner = bucket.states[i]
                bucket.states[i] = dict(zip(self.names, _local(map(shard.owner.__getitem__, self.names)), strict=True))
        return True

    def _takes_counts(self, entries: Sequence[State]) -> bool:
        """Return True if all of each line have made as many steps, counted as before; the lines take the counts."""
        bucket = self.bucket
        kept = []
        for name in ("step", *bucket.variant.host_names):
            values = [entries[i][name] for i in self.firsts]
            if not all(map(is_, map(itemgetter(name), entries), bucket.each(values))):
                return False
            kept.append(values)
        steps, *hosts = kept
        if bucket.counted:
            columns = (bucket.lines.steps, *zip(*bucket.lines.hosts, strict=True))
            return all(map(is_, chain.from_iterable(kept), chain.from_iterable(columns)))
        if {*map(type, steps)} != {int} or min(steps) <= 0:
            return False
        bucket.lines.steps = steps
        if hosts:
            bucket.lines.hosts = list(zip(*hosts, strict=True))
            return {*map(type, chain.from_iterable(hosts))} == {float}
        return True

    def _may_move(self, grads: Sequence[Tensor], known: Sequence[int]) -> bool:
        """Return True if the launches can read the gradients at their new addresses."""
        for g, old, new in zip(grads, known, self.grads, strict=True):
            if old == new:
                continue
            # The address of freed memory is the offset alone.
            if g.numel() and new == g.storage_offset() * g.itemsize:
                return False
            if (old ^ new) % self.kernels.ALIGNMENT:
                return False
        return True

    def ready(self, groups: Options) -> PreparedBucket:
        """Return the bucket with the scalars of its next step."""
        control = self.kernels.control if self.bucket.counted else None
        return PreparedBucket(self.bucket, self.kernels, groups.count(self.bucket, control))

    def follow(self) -> None:
        """Write the addresses of gradients into the tables, where they have changed."""
        if self.grads != self.kernels.signature.columns[1]:
            self.kernels.follow(self.grads)

    def rest(self) -> None:
        """Let go of all but the parameters."""
        bucket = self.bucket
        bucket.grads, bucket.states = [], []
        if self.sharded:
            bucket.params = []
            for shard in bucket.shards:
                if shard is not None:
                    shard.owner = {}


def _local(tensors: Iterable[Any]) -> list[Any]:
    return [getattr(x, "_local_tensor", x) for x in tensors]


def _placed(g: Any, spec: Any) -> bool:
    """Return True if a gradient lies over the mesh as `spec` says (None: it is a plain tensor)."""
    own = getattr(g, "_spec", None)
    if own is None or spec is None:
        return own is spec
    return own is spec or (own.mesh == spec.mesh and own.placements == spec.placements)


class StepPlan:
    """A step that further ones may repeat.

    idle    of each parameter of the optimizer, whether it has no gradient
    places  of each part's parameters among these
    used    its kernels, as the launcher knows them
    keys    of the states, in which those of parts have the places `entries`
    """

    FED: ClassVar[bool] = True
    """False if the step's gradients are none of the parameters' own."""

    def __init__(self, owner: Owner, params: Sequence[Any], ready: Iterable[PreparedBucket], used: Tables) -> None:
        self.used = used
        self.parts = [PlannedBucket(one.bucket, one.kernels, one.bucket.grads if self.FED else []) for one in ready]
        self.clocked = any(flag.clock is not None for flag in owner.cls.FLAGS)
        self.idle = [p.grad is None for p in params]
        at = {id(p): i for i, p in enumerate(params)}
        self.places = [[at[id(p)] for p in part.params] for part in self.parts]
        self.keys = list(owner.states)
        at = {id(key): i for i, key in enumerate(self.keys)}
        self.entries = [[at[id(p)] for p in part.params] for part in self.parts]
        self.rest()

    def is_due(self, owner: Owner) -> bool:
        """Return True if flags that change from step to step have the plan's setting at the next one."""
        return not self.clocked or all(part.is_due(owner) for part in self.parts)

    def fits(self, owner: Owner, grads: Sequence[Any]) -> bool:
        """Return True if its kernels can run on what is there now; the buckets take it."""
        entries = list(owner.states.values())  # a parameter's own is found by a hash that Python computes
        if len(entries) != len(self.keys) or not all(map(is_, owner.states, self.keys)):
            return False
        for part, places, own in zip(self.parts, self.places, self.entries, strict=True):
            if not part.fits([entries[i] for i in own], [grads[i] for i in places] if self.FED else []):
                return False
        return True

    def rest(self) -> None:
        """Let go of states and gradients until the next step."""
        for part in self.parts:
            part.rest()


class Graph(StepPlan):
    """A step that a CUDA graph repeats, whose numbers the host sends before each replay."""

    FED = False

    def __init__(self, owner: Owner, groups: Options, ready: Sequence[PreparedBucket]) -> None:
        super().__init__(owner, [p for group in owner.groups for p in group["params"]], ready, {})
        self.groups, self.given = groups, [one.given for one in ready]

    def prepared(self, owner: Owner) -> list[PreparedBucket] | None:
        """Return its buckets, if it is the next step and the graph still holds."""
        try:
            if self.groups.match(owner.groups) and self.is_due(owner) and self.fits(owner, []):
                ready = [part.ready(self.groups) for part in self.parts]
                return ready if [one.given for one in ready] == self.given else None
        except (KeyError, AttributeError):  # no state
            pass
        return None

    def send(self, owner: Owner, ready: Iterable[PreparedBucket]) -> None:
        """Count the step, and send its numbers."""
        with owner.uninterrupted:
            for one in ready:
                one.kernels.send(one.counted.scalars)
                one.bucket.finish(one.counted.after)
        self.rest()


KEPT = 4
"""The most plans that are kept: of a rule that does more at every k-th step, of parameters that take turns."""


class Plans:
    """The plans that are kept; all hold for the same parameters and options, and one for those with gradients now.

    groups  the options; None where nothing is kept
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Plan the next step anew."""
        self.kept: list[StepPlan] = []
        self.groups: Options | None = None

    def find(self, owner: Owner) -> StepPlan | None:
        """Return the plan that makes the next step, too, whose tensors its buckets take; forget all if one does not
        hold any more."""
        if not self.kept:
            return None
        try:
            with self.plain_reads():
                if self._hold(owner):
                    grads = [p.grad for p in self.params]
                    idle = list(map(is_, grads, repeat(None)))
                    plan = next((x for x in self.kept if x.idle == idle and x.is_due(owner)), None)
                    if plan is None or plan.fits(owner, grads):
                        return plan
        except (KeyError, TypeError, AttributeError, RuntimeError):  # no state, not a dense tensor
            pass
        self.forget()
        return None

    def _hold(self, owner: Owner) -> bool:
        return (
            self.groups is not None
            and self.groups.match(owner.groups)
            and self._streams() == self.streams
            and not any(p.requires_grad for p in self.frozen)
        )

    def _streams(self) -> list[Any]:
        """Return the streams of launches."""
        return [torch.cuda.current_stream(device).cuda_stream for device in self.devices]

    def keep(self, owner: Owner, groups: Options, ready: Sequence[PreparedBucket], used: Tables) -> None:
        """Keep the plan of a step."""
        if not self.kept:
            self.groups = groups
            self.params = [p for group in owner.groups for p in group["params"]]
            sharded = [p for p in self.params if sharding.is_sharded(p)] if sharding.kind() else []
            self.frozen = [p for p in sharded if not p.requires_grad]  # ranks may wait for one another once trained
            self.devices = list({p.device: None for p in self.params if p.is_cuda})
            self.streams = self._streams()
            # torch asks subclasses for a handler at each attribute, which takes longer than the comparison itself.
            self.plain_reads: Callable[[], AbstractContextManager[Any]] = (
                torch._C.DisableTorchFunctionSubclass if sharded else nullcontext
            )
        self.kept = [StepPlan(owner, self.params, ready, used), *self.kept][:KEPT]
