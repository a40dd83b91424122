"""The steps of some parameters: all of an optimizer, one whose gradient is released, or a chunk that is offloaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optgen.runtime.checkpoint import inputs
from optgen.runtime.layout.plans import Label
from optgen.runtime.options import entries, options
from optgen.runtime.options.entries import Entry, Owner
from optgen.runtime.records import keys
from optgen.runtime.records.arena import Arena
from optgen.runtime.states import state
from optgen.runtime.step import agreement, fast_path, launch, shared, sort
from optgen.runtime.step.admit import Dtypes
from optgen.runtime.work import counting, eager, staged, workers
from optgen.runtime.work.bucket import Bucket


class ReadyBucket(NamedTuple):
    """A bucket before its step; its kernels are None in eager torch."""

    bucket: Bucket
    kernels: launch.Kernels | None
    counted: counting.Counted

    def run(self) -> None:
        """Make the step, and count it."""
        if self.kernels is None or self.bucket.in_parts:
            staged.run(self.runner())
        else:
            self.kernels.run(self.counted.scalars, self.counted.key)
            torch.autograd.graph.increment_version(self.bucket.params)  # nobody else sees what kernels write
        self.bucket.finish(self.counted.after)

    def runner(self) -> staged.Runner:
        """Return the step in parts, between which the host has something to do."""
        if self.kernels is not None:
            return self.kernels.runner(self.bucket, self.counted.scalars, self.counted.key)
        return eager.runner(self.bucket, self.counted.scalars, self.counted.key)


class Stepper:
    """The caches of some parameters' steps: tables, the last step, known dtypes.  None is copied or pickled.

    first_group  the number of its first group among those of the user's optimizer
    dtypes       id(parameter) -> the parameter, and its dtype when it was admitted
    arena        the buffer for new states on the CPU; None: one for each group and step
    """

    def __init__(self, first_group: int = 0) -> None:
        self.first_group = first_group
        self.dtypes: Dtypes = {}
        self.arena: Arena | None = None
        self.forget_tables()

    def forget_tables(self) -> None:
        """Free what kernels read beside the tensors, and the memory in which they leave values for one another."""
        self.launcher = launch.Launcher()
        self.forget_step()

    def forget_step(self) -> None:
        """Make the next step the ordinary way, and take names as they are then."""
        self.fast_path = fast_path.FastPath()
        self.named: dict[int, tuple[Tensor, Label]] = {}

    def step(self, owner: Owner, scaler: counting.Scaler | None = None) -> None:
        """Step every parameter that has a gradient.  Errors come before any change, except those of kernels."""
        try:
            if self.fast_path.run(owner, scaler):
                return
            with torch.no_grad():
                self._sort_and_run(owner, scaler)
        except (TypeError, ValueError):
            if not counting.capturing():
                self._refuse_numbers(owner)
            raise

    def _refuse_numbers(self, owner: Owner) -> None:
        """Raise TypeError or ValueError for a hyper-parameter that was set to what the constructor refuses."""
        for number, group in enumerate(owner.groups, self.first_group):
            for hyper in owner.cls.HYPERS:
                try:
                    hyper.read(group.get(hyper.name, hyper.default))
                except (TypeError, ValueError) as error:
                    raise type(error)(f"{owner.cls.__name__}: group {number}: {error}") from None

    def _sort_and_run(self, owner: Owner, scaler: counting.Scaler | None) -> None:
        """Make a step that is not like the one before."""
        listed = list(entries.of(owner.groups))
        self._refuse_moved_names(owner.cls, listed)
        sending = agreement.senders(owner.cls, listed)
        elsewhere = agreement.gradients_elsewhere(owner.cls, sending)
        begins = bool(owner.cls.INPUTS) and inputs.begins(owner)  # makes states alone: nothing was fed
        buckets, fresh = sort.buckets(owner, listed, elsewhere, self.dtypes, scaler, not begins)
        if not buckets:
            return
        if sending:
            workers.share(buckets, sending, keys.stream_key(listed[0].name))
        shared.check(buckets)
        counted = [None if b.counted else _counted(owner.cls, owner.groups[b.group], b, None, scaler) for b in buckets]
        with owner.uninterrupted:
            self._change(owner, buckets, fresh, counted, scaler, begins, bool(sending))

    def _change(
        self, owner: Owner, buckets: Sequence[Bucket], fresh: sort.Fresh, counted: Sequence[counting.Counted | None],
        scaler: counting.Scaler | None, begins: bool, sending: bool,
    ) -> None:  # fmt: skip
        """Make the missing states, run the kernels and cache the step."""
        sort.complete(owner, buckets, fresh, self.arena)
        self.launcher.begin()
        pairs = [] if begins else list(zip(buckets, counted, strict=True))
        ready = [self._prepare(owner, bucket, scaler, known) for bucket, known in pairs]
        if not counting.capturing():
            for _, kernels, (scalars, key, _) in ready:
                if kernels is not None:
                    kernels.load(scalars, key)
        _run(ready, owner.uninterrupted.begun)
        if owner.cls.INPUTS:
            inputs.freed(owner.cls, {id(kept): kept for bucket in buckets for kept in bucket.owned})
        if any(f.space == "model" for bucket in buckets for f in bucket.variant.fields):
            shared.spread(owner.states, buckets)
        elif not sending and _has_fast_path(owner.cls, ready):  # else other ranks may wait for this one at any step
            prepared = [(one.bucket, one.kernels) for one in ready if one.kernels is not None]
            self.fast_path.keep(owner, prepared, scaler is not None)

    def _refuse_moved_names(self, cls: Any, listed: Sequence[Entry]) -> None:
        """Raise ValueError if a parameter is called as another one was at the step before, which has happened to a list
        of parameters, not to its names; positions matter where options of single parameters go by them."""
        before, self.named = self.named, {id(e.p): (e.p, e.name) for e in listed}
        if before == self.named or not before:
            return
        known = {name for _, name in before.values()}
        for e in listed:
            old = before.get(id(e.p), (e.p, e.name))[1]
            counts = isinstance(e.name, str) or e.group.get("overrides") or e.group.get("blocks")
            if old != e.name and e.name in known and counts:
                self.named = before
                what = "name" if isinstance(e.name, str) else "position, by which it has overrides or blocks,"
                raise ValueError(
                    f"{cls.__name__}: a parameter of shape {list(e.p.shape)} has got the {what} of another one, "
                    f"{e.name!r} for {old!r}: edit 'param_names' as 'params', or make the optimizer anew"
                )

    def _prepare(
        self, owner: Owner, bucket: Bucket, scaler: counting.Scaler | None, counted: counting.Counted | None
    ) -> ReadyBucket:
        """Do all that can fail, before anything changes; `counted`: None for a step that is counted on the device."""
        bucket.localize()
        if bucket.backend == "reference":
            bucket.check()
        kernels = None if bucket.backend == "reference" else self.launcher.prepare(bucket)
        if counted is not None:
            return ReadyBucket(bucket, kernels, counted)
        assert kernels is not None
        alone = counting.sharing(owner.states, bucket.step) == len({id(s) for s in bucket.owned})
        if not alone and counting.capturing():
            raise counting.not_ready(f"not every parameter that steps with {state.label(*bucket.first)}")
        bucket.move_count(alone)
        made = _counted(owner.cls, owner.groups[bucket.group], bucket, kernels.control, scaler)
        return ReadyBucket(bucket, kernels, made)


def _has_fast_path(cls: Any, ready: Sequence[ReadyBucket]) -> bool:
    """Return True if steps that are like this one may take the fast path."""
    if any(one.kernels is None or one.bucket.in_parts or one.bucket.wholes for one in ready):
        return False
    return not cls.INPUTS and all(flag.clock is None for flag in cls.FLAGS)


def _run(ready: Sequence[ReadyBucket], begun: list[Label]) -> None:
    """Run the kernels of a step."""
    for one in ready:
        if not one.bucket.waits:
            begun += one.bucket.names
            one.run()
    waiting = [one for one in ready if one.bucket.waits]
    if waiting:
        begun += [name for one in waiting for name in one.bucket.names]
        turns = sorted({one.bucket.turn for one in waiting})
        shared.run([one.runner() for one in waiting if one.bucket.turn == turn] for turn in turns)
        for one in waiting:
            one.bucket.finish(one.counted.after)


def _counted(
    cls: Any, group: Mapping[str, Any], bucket: Bucket, control: counting.Control | None, scaler: counting.Scaler | None
) -> counting.Counted:
    """Return a bucket's step; `control`: where its scalars are on the device, None if it is counted on the host."""
    variant, sign = bucket.variant, -1.0 if group["maximize"] else 1.0
    hypers = options.hypers_of(cls, group, None if control is None else bucket.device)
    made_by = variant.host
    return counting.counted(made_by, variant, control, bucket.step, sign, hypers, bucket.host, group["seed"], scaler)
