"""The fast path through a step that is like the one before.

Sorting many small tensors into buckets takes longer than their kernels.  So an optimizer keeps its last step: the
objects that it saw and where their memory was.  While the next step finds the same, the prepared launches run again
with new scalars.  Gradients may have moved, if they are aligned as before: their addresses are written into the
kernels' tables.  After any other difference the step is made the ordinary way, and that step is kept instead.

States and gradients are held by weak references and addresses only, so that users can free them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import repeat
from operator import call, is_
from typing import Any

import torch
from torch import Tensor

from optgen.runtime.layout import sharding
from optgen.runtime.options import options
from optgen.runtime.options.entries import Owner
from optgen.runtime.step import launch
from optgen.runtime.step.launch import Kernels
from optgen.runtime.work import counting
from optgen.runtime.work.bucket import Bucket

PATIENCE = 64
"""The most steps before the next attempt, where consecutive steps keep differing."""

State = dict[str, Any]

Prepared = Sequence[tuple[Bucket, Kernels]]
"""The buckets of a step and their kernels."""

_address: Callable[[Tensor], int] = Tensor.data_ptr
_contiguous: Callable[[Tensor], bool] = Tensor.is_contiguous


class CachedGroup:
    """The options of a parameter group at the last step."""

    LAUNCH = (*sorted(options.OWN - {"seed"}), *options.RUNNING, "param_names")
    """Keys of options that decide which kernels run."""

    def __init__(self, cls: Any, group: Mapping[str, Any], counted: bool) -> None:
        self.cls, self.counted = cls, counted
        self.ids = list(map(id, group["params"]))
        self.keys = list(group)
        self.launch = [value.copy() if isinstance(value, (list, dict)) else value for value in self._launch(group)]
        self.flags = options.flags_of(cls, group)

    def _launch(self, group: Mapping[str, Any]) -> list[Any]:
        return [group.get(key) for key in self.LAUNCH]

    def matches(self, group: Mapping[str, Any]) -> bool:
        """Return True if the group has the same parameters and asks for the same kernels.

        Hyper-parameters may differ; they are read.  Raises ValueError if one is out of its range.
        """
        if (
            list(map(id, group["params"])) != self.ids
            or list(group) != self.keys
            or self._launch(group) != self.launch
            or options.flags_of(self.cls, group) != self.flags
        ):
            return False
        self.sign = -1.0 if group["maximize"] else 1.0
        self.seed = group["seed"]
        if not self.counted:  # a step that is counted on a device reads them there
            self.hypers = options.hypers_of(self.cls, group)
        self.group = group
        return True


class CachedBucket:
    """A bucket's launches, and what its tensors were.  Parameters are held, other tensors are not."""

    def __init__(self, bucket: Bucket, kernels: Kernels, state: Mapping[Any, State]) -> None:
        self.group, self.variant, self.kernels = bucket.group, bucket.variant, kernels
        self.control = kernels.control if bucket.counted else None
        self.device, self.labels = bucket.device, bucket.names
        # torch moves the version of a DTensor, not that of its local part.
        pairs = list(zip(bucket.params, bucket.shards, strict=True))
        self.params = [p if shard is None else shard.p for p, shard in pairs]
        self.specs = [None if shard is None else shard.p._spec for _, shard in pairs]
        self.sharded = any(spec is not None for spec in self.specs)
        self.dtypes = [p.dtype for p in bucket.params]
        self.grad_dtypes = [bucket.grad_dtype] * len(bucket.params)
        self.shapes = [p.shape for p in bucket.params]
        self.addresses = list(map(_address, bucket.params))
        self.grads = list(map(_address, bucket.grads))
        self.single = [i for i, shape in enumerate(self.shapes) if shape.numel() == 1]
        self.names = ("step", *bucket.variant.host_names)
        self.numbers = [bucket.states[0][name] for name in self.names]
        users = [state[p][name] for p in self.params for name in bucket.variant.names]
        self.fields = [weakref.ref(x) for x in users]
        self.field_addresses = [_address(s[name]) for s in bucket.states for name in bucket.variant.names]
        self.made_by = bucket.variant.host

    def matches(self, state: Mapping[Any, State]) -> bool:
        """Return True if the same kernels can run on what is there now; notes the states and the gradients' addresses.

        Raises an error of Python or torch for what is missing or is no dense tensor.
        """
        params: Sequence[Any] = self.params
        grads: Sequence[Any] = [p.grad for p in params]
        entries: list[Any] = list(map(state.get, params))  # a defaultdict would make what is missing
        self.entries = entries
        fields = [entry[name] for entry in entries for name in self.variant.names]
        if not all(map(is_, map(call, self.fields), fields)):
            return False
        for name, value in zip(self.names, self.numbers, strict=True):
            if not all(map(is_, [entry[name] for entry in entries], repeat(value))):
                return False
        if self.sharded:
            if not all(map(_placed, grads, self.specs)):
                return False
            params, grads, fields = _local(params), _local(grads), _local(fields)
        self.grads_now = list(map(_address, grads))
        return (
            list(map(_address, fields)) == self.field_addresses
            and list(map(_address, params)) == self.addresses
            and [p.shape for p in params] == self.shapes
            and [g.shape for g in grads] == self.shapes
            and [p.dtype for p in params] == self.dtypes
            and [g.dtype for g in grads] == self.grad_dtypes
            and all(map(_contiguous, params))
            and all(map(_contiguous, grads))
            # One element is the only size at which a lazily negated tensor is contiguous.
            and not any(grads[i].is_neg() for i in self.single)
            and (self.grads_now == self.grads or self._may_move(grads))
        )

    def _may_move(self, grads: Sequence[Tensor]) -> bool:
        """Return True if the launches can read the gradients at their new addresses."""
        for g, old, new in zip(grads, self.grads, self.grads_now, strict=True):
            if old == new:
                continue
            # The address of freed memory is the offset alone.
            if g.device != self.device or (g.numel() and new == g.storage_offset() * g.itemsize):
                return False
            if (old ^ new) % self.kernels.ALIGNMENT:
                return False
        return True

    def follow(self) -> None:
        """Write the addresses of gradients into the tables, where they have changed."""
        if self.grads_now != self.grads:
            self.grads = self.grads_now
            self.kernels.follow(self.grads)

    def count(self, group: CachedGroup, scaler: counting.Scaler | None) -> counting.Counted:
        """Compute the scalars."""
        number, *host = self.numbers
        hypers = group.hypers if self.control is None else options.hypers_of(group.cls, group.group, self.device)
        return counting.counted(
            self.made_by, self.variant, self.control, number, group.sign, hypers, host, group.seed, scaler
        )

    def run(self, counted: counting.Counted) -> None:
        """Launch the step, then count it in the states."""
        self.kernels.run(counted.scalars, counted.key)
        torch.autograd.graph.increment_version(self.params)
        if isinstance(counted.after, counting.Step):
            counted.after.finish()
            return
        self.numbers = counted.after
        for name, value in zip(self.names, self.numbers, strict=True):
            for entry in self.entries:
                entry[name] = value


def _local(tensors: Iterable[Any]) -> list[Tensor]:
    return [getattr(x, "_local_tensor", x) for x in tensors]


def _placed(g: Any, spec: Any) -> bool:
    """Return True if a gradient lies over the mesh as `spec` says (None: it is a plain tensor)."""
    own = getattr(g, "_spec", None)
    if own is None or spec is None:
        return own is spec
    return own is spec or (own.mesh == spec.mesh and own.placements == spec.placements)


class CachedStep:
    """The plan of a step, valid while parameters, states and options are unchanged."""

    def __init__(self, owner: Owner, prepared: Prepared, scaled: bool) -> None:
        self.buckets = [CachedBucket(*one, owner.states) for one in prepared]
        counted = {b.group for b in self.buckets} - {b.group for b in self.buckets if b.control is None}
        self.groups = [CachedGroup(owner.cls, group, number in counted) for number, group in enumerate(owner.groups)]
        self.scaled, self.on_host = scaled, any(bucket.control is None for bucket in self.buckets)
        stepped = {id(p) for bucket in self.buckets for p in bucket.params}
        params = [p for group in owner.groups for p in group["params"]]
        self.idle = [p for p in params if id(p) not in stepped]
        # Ranks may wait for one another once these are trained.
        self.frozen = [p for p in params if sharding.is_sharded(p) and not p.requires_grad]
        self.launch_settings = self._launch_settings()
        # torch asks subclasses for a handler at each attribute, which takes longer than the comparison itself.
        sharded = any(bucket.sharded for bucket in self.buckets)
        self.plain_reads: Callable[[], AbstractContextManager[Any]] = (
            torch._C.DisableTorchFunctionSubclass if sharded else nullcontext
        )

    def _launch_settings(self) -> list[Any]:
        """Return the tuning and the streams of launches."""
        devices = [bucket.device for bucket in self.buckets if bucket.device.type == "cuda"]
        return [launch.tuning, *(torch.cuda.current_stream(device).cuda_stream for device in devices)]

    def matches(self, owner: Owner, scaled: bool) -> bool:
        """Return True if the kept launches make this step.  Raises ValueError for a hyper-parameter out of range."""
        groups = owner.groups
        if len(groups) != len(self.groups) or scaled != self.scaled or self._launch_settings() != self.launch_settings:
            return False
        if not all(kept.matches(group) for kept, group in zip(self.groups, groups, strict=True)):
            return False
        if any(p.requires_grad for p in self.frozen) or any(p.grad is not None for p in self.idle):
            return False
        try:
            with self.plain_reads():
                return all(bucket.matches(owner.states) for bucket in self.buckets)
        except (KeyError, TypeError, AttributeError, RuntimeError):  # no state, no gradient, not a dense tensor
            return False

    def run(self, owner: Owner, scaler: counting.Scaler | None) -> bool:
        """Make the step if it is like the last one; return False, and nothing has changed, if not.

        Raises ValueError, before anything changes, if a hyper-parameter is out of its range.
        """
        if not self.matches(owner, scaler is not None):
            return False
        if scaler is not None and self.on_host and scaler.found_infinity():
            return True
        counted = [bucket.count(self.groups[bucket.group], scaler) for bucket in self.buckets]
        with owner.uninterrupted as begun:
            for bucket in self.buckets:
                bucket.follow()
            for bucket, one in zip(self.buckets, counted, strict=True):
                begun += bucket.labels
                bucket.run(one)
        return True

    def release(self) -> None:
        """Let go of the states that `matches` noted."""
        for bucket in self.buckets:
            bucket.entries = []


class FastPath:
    """An optimizer's cached step, and how long to wait before caching another."""

    def __init__(self) -> None:
        self.last: CachedStep | None = None
        self._wait = 0
        self._left = 0

    def run(self, owner: Owner, scaler: counting.Scaler | None) -> bool:
        """Make the step as `CachedStep.run`; forget a cached step that does not match or raises an error.

        A CUDA graph captures the ordinary step, which has tables of its own.
        """
        last = self.last
        if last is None or counting.capturing():
            return False
        self.last = None  # an error may leave it with addresses that no table on the device has
        try:
            if not last.run(owner, scaler):
                return False
        finally:
            last.release()
        self.last, self._wait, self._left = last, 0, 0
        return True

    def keep(self, owner: Owner, prepared: Prepared, scaled: bool) -> None:
        """Cache an ordinary step of these buckets; `scaled`: it had a GradScaler."""
        if self._left > 0:
            self._left -= 1
            return
        if not prepared or counting.capturing():
            return
        # The kernels of a parameter that is not contiguous ran on a copy.
        copied = any(bucket.written for bucket, _ in prepared)
        self.last = None if copied else CachedStep(owner, prepared, scaled)
        self._left, self._wait = self._wait, min(2 * self._wait + 1, PATIENCE)
