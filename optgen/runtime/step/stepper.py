"""The steps of some parameters: all of an optimizer, one whose gradient is released, or a chunk that is offloaded."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from optgen.runtime.cpu import cpu
from optgen.runtime.options import entries
from optgen.runtime.options.entries import Owner
from optgen.runtime.records import keys
from optgen.runtime.records.arena import Arena
from optgen.runtime.states import state
from optgen.runtime.step import agreement, fast_path, interrupts, launch, shared, sort
from optgen.runtime.step.admit import Dtypes
from optgen.runtime.step.partial_step import StepError
from optgen.runtime.work import counting, staged
from optgen.runtime.work.bucket import Bucket, run_reference

Numbers = tuple[list[float], tuple[float, ...]]
"""Scalars rounded to fp32, and host states after the step in fp64."""


class ReadyBucket(NamedTuple):
    """A bucket before its step.

    tables   None in eager torch
    scalars  numbers, or where they are on the device
    after    its host states after the step, or the step on the device
    """

    bucket: Bucket
    tables: launch.Tables | None
    scalars: Any
    key: int
    after: tuple[float, ...] | counting.Step

    def run(self) -> None:
        """Start the kernels, and count the step."""
        bucket, tables, scalars, key, _ = self
        if tables is None:
            run_reference(bucket, scalars, key)
        elif bucket.in_parts:
            staged.run(self.runner())
        elif tables.table is not None:
            cpu.run(bucket, tables.table, scalars, key)
        else:
            launch.run(bucket, tables, scalars, key)
        self.finish()

    def runner(self) -> staged.Runner:
        """Return the step in parts, between which the host has something to do."""
        bucket, tables, scalars, key, _ = self
        if tables is None:
            return shared.reference_runner(bucket, scalars, key)
        if tables.table is not None:
            return cpu.runner(bucket, tables.table, scalars, key)
        return launch.runner(bucket, tables, scalars, key)

    def finish(self) -> None:
        """Count the step in the states."""
        if isinstance(self.after, counting.Step):
            self.bucket.finish_counted(self.after)
        else:
            self.bucket.finish(self.after)


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
        """Make the next step the ordinary way."""
        self.fast_path = fast_path.FastPath()

    def step(self, owner: Owner, scaler: counting.Scaler | None = None) -> None:
        """Step every parameter that has a gradient.  Errors come before any change, except those of kernels."""
        try:
            self.attempt(owner, scaler)
        except StepError as stopped:
            raise stopped.noted(owner) from stopped.error.__cause__

    def attempt(self, owner: Owner, scaler: counting.Scaler | None = None) -> None:
        """Make the step; raise StepError if a kernel fails."""
        try:
            with interrupts.Later():
                if self.fast_path.run(owner.groups, owner.states, scaler):
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
        sending = agreement.senders(owner.cls, listed)
        elsewhere = agreement.gradients_elsewhere(owner.cls, sending)
        buckets, fresh = sort.buckets(owner, listed, elsewhere, self.dtypes, scaler)
        if not buckets:
            return
        shared.check(buckets)
        numbers = [None if b.counted else _on_host(owner.cls, owner.groups[b.group], b, scaler) for b in buckets]
        sort.complete(owner, buckets, fresh, self.arena)
        self.launcher.begin()
        ready = [self._prepare(owner, bucket, scaler, made) for bucket, made in zip(buckets, numbers, strict=True)]
        if not counting.capturing():
            for one in ready:
                if one.bucket.backend == "triton" and one.tables is not None:
                    launch.load(one.bucket, one.tables, one.scalars, one.key)
        with interrupts.Later():
            _run(ready)
            if any(f.space == "model" for bucket in buckets for f in bucket.variant.fields):
                shared.spread(owner.states, buckets)
        if not sending and _has_fast_path(owner.cls, ready):  # else other ranks may wait for this one at any step
            launches = [launch.prepared(one.bucket, one.tables) for one in ready if one.tables is not None]
            self.fast_path.keep(owner.cls, owner.groups, owner.states, launches, scaler is not None)

    def _prepare(
        self, owner: Owner, bucket: Bucket, scaler: counting.Scaler | None, numbers: Numbers | None
    ) -> ReadyBucket:
        """Do all that can fail, before anything changes; `numbers`: of a step that is counted on the host."""
        group = owner.groups[bucket.group]
        bucket.localize()
        tables = None
        if bucket.backend == "reference":
            bucket.check()
        else:
            tables = self.launcher.prepare(bucket)
        if numbers is not None:
            assert not isinstance(bucket.step, torch.Tensor)
            return ReadyBucket(bucket, tables, numbers[0], keys.step_key(group["seed"], bucket.step + 1), numbers[1])
        assert tables is not None
        alone = counting.sharing(owner.states, bucket.step) == len(bucket.params)
        if not alone and counting.capturing():
            raise counting.not_ready(f"not every parameter that steps with {state.label(*bucket.first)}")
        bucket.move_count(alone)
        control = tables.scalars_on(bucket)
        return ReadyBucket(bucket, tables, control, 0, _on_device(owner.cls, group, bucket, control, scaler))


def _has_fast_path(cls: Any, ready: Sequence[ReadyBucket]) -> bool:
    """Return True if steps that are like this one may take the fast path."""
    if any(one.tables is None or one.bucket.in_parts for one in ready):
        return False
    return all(flag.every is None for flag in cls.FLAGS)


def _run(ready: Sequence[ReadyBucket]) -> None:
    """Run the kernels of a step.  Raises StepError if any fails."""
    waiting = [one for one in ready if one.bucket.waits]
    done: list[state.State] = []
    at_work: list[state.State] = []
    try:
        for one in ready:
            if not one.bucket.waits:
                at_work = one.bucket.owned
                one.run()
                done += at_work
        if waiting:
            at_work = [s for one in waiting for s in one.bucket.owned]
            shared.run([one.runner() for one in waiting])
            for one in waiting:
                one.finish()
    except BaseException as error:
        raise StepError(error, done, at_work) from None


def _on_device(
    cls: Any, group: Mapping[str, Any], bucket: Bucket, control: counting.Control, scaler: counting.Scaler | None
) -> counting.Step:
    """Return a bucket's step on the device, its scalars computed into `control`."""
    variant = bucket.variant
    assert isinstance(bucket.step, torch.Tensor)
    host = [x for x in bucket.host if isinstance(x, torch.Tensor)]
    step = counting.Step(bucket.step, host, scaler.found if scaler else None)
    step.fill(
        control,
        *variant.host_for(bucket.backend),
        sign=-1.0 if group["maximize"] else 1.0,
        scale=scaler.scale if scaler else None,
        hypers={hyper.name: hyper.read_on(group[hyper.name], bucket.device) for hyper in cls.HYPERS},
        names=variant.host_names,
        seed=group["seed"] if variant.stochastic else None,
    )
    counting.check_calls(variant, control)
    return step


def _on_host(cls: Any, group: Mapping[str, Any], bucket: Bucket, scaler: counting.Scaler | None) -> Numbers:
    """Return the scalars and the new host states of a bucket, computed in fp64."""
    hypers = {hyper.name: hyper.read(group[hyper.name]) for hyper in cls.HYPERS}
    sign = -1.0 if group["maximize"] else 1.0
    if scaler is not None:
        sign = scaler.factor(sign)
    host, count = bucket.variant.host_for(bucket.backend)
    named = zip(bucket.variant.host_names, bucket.host, strict=True)
    values = host(bucket.step + 1, sign, **hypers, **dict(named))
    return [ctypes.c_float(value).value for value in values[:count]], tuple(values[count:])
