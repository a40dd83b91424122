"""The steps of some parameters: all of an optimizer, one whose gradient is released, or a chunk that is offloaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from optgen.runtime.checkpoint import inputs
from optgen.runtime.layout.plans import Label
from optgen.runtime.options import entries
from optgen.runtime.options.entries import Entry, Owner
from optgen.runtime.records import keys
from optgen.runtime.states import state
from optgen.runtime.step import agreement, launch, model_sums, sort
from optgen.runtime.step.admit import Dtypes
from optgen.runtime.step.plan import Graph, Options, Plans, PreparedBucket, StepPlan
from optgen.runtime.work import counting, workers
from optgen.runtime.work.bucket import Bucket


class Stepper:
    """The caches of some parameters' steps: plans, tables, known dtypes.  None is copied or pickled.

    first_group  the number of its first group among those of the user's optimizer
    dtypes       id(parameter) -> the parameter, and its dtype when it was admitted
    compared     id(parameter) of those that other ranks hold, too, and were found to have with equal states
    sums         takes the sums over the model
    """

    def __init__(self, first_group: int = 0) -> None:
        self.first_group = first_group
        self.dtypes: Dtypes = {}
        self.sums = model_sums.ModelSums()
        self.plans, self.graphs = Plans(), list[Graph]()
        self.forget_tables()

    def forget_tables(self) -> None:
        """Free what kernels read beside the tensors, and the memory in which they leave values for one another."""
        self.launcher = launch.Launcher()
        self.forget_step()

    def forget_step(self) -> None:
        """Plan the next step anew, and take names as they are then."""
        self.plans.forget()
        self.named: dict[int, tuple[Tensor, Label]] = {}
        self.compared: set[int] = set()

    def step(self, owner: Owner) -> None:
        """Step every parameter that has a gradient.  Errors come before any change, except those of kernels."""
        # A CUDA graph captures a step that has tables of its own.
        plan = None if counting.capturing() else self.plans.find(owner)
        try:
            if plan is not None:
                self._repeat(plan, owner)
            else:
                with torch.no_grad():
                    self._plan_and_run(owner)
        except (TypeError, ValueError):
            if not counting.capturing():
                self.refuse_numbers(owner)
            raise

    def _repeat(self, plan: StepPlan, owner: Owner) -> None:
        """Make a step by a plan that was kept."""
        try:
            self.launcher.used = plan.used
            assert self.plans.groups is not None
            ready = [part.ready(self.plans.groups) for part in plan.parts]
            with owner.uninterrupted as begun:
                for part in plan.parts:
                    part.follow()
                self._run(owner, ready, begun)
        except BaseException:
            self.plans.forget()  # it may have addresses that no table on the device has
            raise
        finally:
            plan.rest()

    def refuse_numbers(self, owner: Owner) -> None:
        """Raise TypeError or ValueError for a hyper-parameter that was set to what the constructor refuses."""
        for number, group in enumerate(owner.groups, self.first_group):
            for hyper in owner.cls.HYPERS:
                try:
                    hyper.read(group.get(hyper.name, hyper.default))
                except (TypeError, ValueError) as error:
                    raise type(error)(f"{owner.cls.__name__}: group {number}: {error}") from None

    def _plan_and_run(self, owner: Owner) -> None:
        """Make a step that is not like the one before."""
        listed = self._listed(owner)
        self._refuse_moved_names(owner.cls, listed)
        sending = agreement.senders(owner, listed)
        elsewhere = agreement.gradients_elsewhere(owner, sending, self.compared)
        begins = bool(owner.cls.INPUTS) and inputs.begins(owner)  # makes states alone: nothing was fed
        buckets, fresh = sort.buckets(owner, listed, sending, elsewhere, self.dtypes, not begins)
        if not buckets:
            return
        if sending:
            workers.share(buckets, sending, keys.stream_key(listed[0].name))
        groups = Options(owner.cls, owner.groups)
        counted = [None if b.counted else groups.count(b, None) for b in buckets]
        with owner.uninterrupted as begun:
            sort.complete(owner, buckets, fresh)
            self.launcher.begin(plan.used for plan in self.plans.kept)
            pairs = [] if begins else list(zip(buckets, counted, strict=True))
            ready = [self._prepare(owner, bucket, groups, known) for bucket, known in pairs]
            if not counting.capturing():
                for one in ready:
                    one.kernels.load(one.counted.scalars)
            self._run(owner, ready, begun)
            if owner.cls.INPUTS:
                inputs.freed(owner.cls, {id(kept): kept for bucket in buckets for kept in bucket.owned})
            elif not sending:  # else other ranks may wait for this one at any step
                self._keep(owner, groups, ready)

    def _keep(self, owner: Owner, groups: Options, ready: Sequence[PreparedBucket]) -> None:
        """Keep the plan of a step, if it can make further ones."""
        if not all(one.bucket.lasts for one in ready):
            return
        if counting.capturing():
            if all(one.bucket.sent for one in ready):
                self.graphs.append(Graph(owner, groups, ready))
            return
        if self.launcher.grown:  # else other plans would keep as much
            self.plans.forget()
        self.plans.keep(owner, groups, ready, self.launcher.used)

    def _listed(self, owner: Owner) -> list[Entry]:
        """Return the parameters; the dtypes of those that were replaced are forgotten."""
        listed = list(entries.of(owner.groups))
        there = {id(e.p) for e in listed}
        self.dtypes = {key: known for key, known in self.dtypes.items() if key in there}
        return listed

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
        self, owner: Owner, bucket: Bucket, groups: Options, counted: counting.StepScalars | None
    ) -> PreparedBucket:
        """Do all that can fail, before anything changes; `counted`: None for a step that is counted on the device."""
        bucket.localize()
        if bucket.sent and counting.capturing():
            _refuse_waits(bucket)
        kernels = self.launcher.prepare(bucket)
        if counted is not None:
            return PreparedBucket(bucket, kernels, counted)
        if bucket.move_count(counting.sharing(owner.states)) and counting.capturing():
            raise counting.not_ready(f"not every parameter that steps with {state.label(*bucket.first)}")
        return PreparedBucket(bucket, kernels, groups.count(bucket, kernels.control))

    def _run(self, owner: Owner, ready: Sequence[PreparedBucket], begun: list[Label]) -> None:
        """Run the kernels of a step, and spread what the whole model has one value of."""
        waiting = []
        for one in ready:
            one.bucket.prepare_views()
            if one.bucket.waits:
                waiting.append(one)
            else:
                begun += one.bucket.names
                one.run()
        if waiting:
            begun += [name for one in waiting for name in one.bucket.names]
            model_sums.run(waiting, self.sums)
        if any(one.bucket.variant.of_model for one in ready):
            self.sums.spread(owner.states, [one.bucket for one in ready])


def _refuse_waits(bucket: Bucket) -> None:
    """Raise RuntimeError for a step whose functions of matrices read back from the device."""
    whole = any(stage.space == "whole" for stage in bucket.variant.stages)
    if whole and (not bucket.at_step or any(on for _, on in bucket.at_step)):
        raise RuntimeError(
            f"a CUDA graph is being captured, but functions of matrices wait for the device in this step of "
            f"{state.label(*bucket.first)}: make it outside of a graph"
        )
