"""Updates within backward: each parameter takes its step as soon as its gradient is complete, which is then freed.

A hook of torch's runs when a gradient has been accumulated.  It makes the step of that one parameter with the state,
the options, the name and the position that it has in the optimizer, and so with the bits of an ordinary step.  Each
parameter has a stepper of its own, and so plans that are kept (step/plan.py).

`step()` still updates parameters that have a gradient left, because fewer micro-batches than announced came, or because
they came into the optimizer after the hooks were placed.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from optgen.runtime.layout import sharding
from optgen.runtime.modes.accumulated import GradientAccumulator, steps_of
from optgen.runtime.modes.previous import OfOne, PreviousSums
from optgen.runtime.options import entries, options
from optgen.runtime.options.entries import Entry, Owner
from optgen.runtime.records import as_float, as_int
from optgen.runtime.records.warn import warn
from optgen.runtime.states import state
from optgen.runtime.step.model_sums import ModelSums
from optgen.runtime.step.stepper import Stepper

ClipBy = Literal["norm", "previous_norm"]

TINY = 1e-6
"""The number that torch.nn.utils.clip_grad_norm_ adds to a norm before it divides by it."""


class ReleasedParameter:
    """A parameter with a stepper of its own, in its place in the optimizer.

    entry    that place, with a group of its own: options are copied from the user's before each step
    summed   micro-batches since the last update
    sums     the sum of their gradients, if that is not p.grad itself
    updates  the number of its updates since the user's last step()
    roomy    True if a step, this or another one, needs a buffer as large as the parameter
    """

    roomy: bool

    def __init__(self, release: Release, owner: Owner, entry: Entry, old: ReleasedParameter | None) -> None:
        """Take a parameter's place in the optimizer; old: the one of its place before, which counts on."""
        p, name, make = entry.p, entry.name, release.accumulator
        self.p = p
        self.entry = entry._replace(group={"params": [p], "param_names": [name], "positions": [entry.position]})
        self.stepper, self.offload = Stepper(entry.number), release.optimizer._offload.part(entry)
        if (dtype := release.optimizer._stepper.dtypes.get(id(p))) is not None:
            self.stepper.dtypes[id(p)] = dtype
        self.stepper.sums, self.any_sums = OfOne(release.sums, entry.number), release.sums.wanted
        self.options: object = None
        self.refresh(owner)
        self.summed: int = 0 if old is None else old.summed
        self.updates: int = 0 if old is None else old.updates
        self.hook: Any = None if old is None else old.hook
        count = old.sums.count if old is not None and old.sums is not None else 0
        self.sums: GradientAccumulator | None = None if make is None else GradientAccumulator(make, p, name, count)

    def is_at(self, owner: Owner) -> bool:
        """Return True if the parameter has its place and name still."""
        number, place = self.entry.number, slice(self.entry.place, self.entry.place + 1)
        if number >= len(owner.groups):
            return False
        params, names = owner.groups[number]["params"][place], owner.groups[number].get("param_names")
        return (names is None or names[place] == [self.entry.name]) and any(p is self.p for p in params)

    def refresh(self, owner: Owner) -> None:
        """Take over the options as they are now.  Raises ValueError if the rule needs other parameters as well."""
        group = self.entry.group
        entries.take_options(group, owner.groups[self.entry.number])
        own = group.get("overrides"), group.get("blocks")
        now = (group["plan"], *own, options.flags_of(owner.cls, group), self.p.shape)
        if now != self.options:
            steps = steps_of(owner.cls, group, self.p, self.entry.name, self.any_sums)
            self.variant = steps[0]
            self.roomy = any(temp.space == "elem" for variant in steps for temp in variant.temps)
            self.options = now

    @_disable_dynamo
    def step(self, owner: Owner) -> None:
        """Update p from p.grad, as a parameter of `owner`."""
        self.refresh(owner)
        self.offload.step(owner._replace(groups=[self.entry.group]), self.stepper)
        if self.roomy:
            self.stepper.forget_tables()
            self.offload.forget_tables()

    def gather(self) -> None:
        """Move a sum that was kept elsewhere to p.grad."""
        if self.p.grad is not None and self.p.grad._is_zerotensor():  # torch takes back none that p has outgrown
            self.p.grad = state.materialized(self.p.grad)
        if self.sums is not None and self.summed:
            if self.p.grad is None:
                self.p.grad = torch.zeros_like(self.p)
            self.sums.add(self.p.grad)
            self.sums.clear()
        self.summed = 0


class Hook:
    """The hook that torch calls with a parameter whose gradient is complete.

    It keeps no optimizer alive: a parameter lives longer than the optimizers that it had.
    """

    __slots__ = ("release",)

    def __init__(self, release: Release) -> None:
        self.release = weakref.ref(release)

    def __call__(self, p: Tensor) -> None:
        release = self.release()
        if release is not None:
            release.complete(p)


class Clipping:
    """The clipping of gradients that come one after the other, in place and as torch.nn.utils does it.

    previous  the norm of all gradients at the step before, of clip_by="previous_norm"
    """

    def __init__(self, title: str, largest: float | None, by: ClipBy) -> None:
        if by not in get_args(ClipBy):
            raise ValueError(
                f"{title}: clip_by must be one of {', '.join(get_args(ClipBy))}, got {by!r}; the norm over the "
                f"model is known only after backward, and clip_by='previous_norm' takes that of the step before"
            )
        number = None if largest is None or isinstance(largest, bool) else as_float(largest)
        if largest is not None and not (number is not None and number > 0):
            raise ValueError(f"{title}: clip must be a number > 0, or None, got {largest!r}")
        self.largest, self.by = number, by
        self.norms: dict[int, Tensor] = {}
        self.previous: Tensor | None = None

    def clip(self, p: Tensor) -> None:
        """Clip the gradient of a parameter."""
        if self.largest is None or p.grad is None:
            return
        own = torch.linalg.vector_norm(p.grad, dtype=torch.promote_types(p.grad.dtype, torch.float32))
        if sharding.is_sharded(own):  # norms of plain tensors and of other meshes may stand beside it
            own = cast(Any, own).full_tensor()
        factor = self._factor(own)
        if self.by == "previous_norm":
            self.norms[id(p)] = own
            if self.previous is not None:
                before = self.previous.to(own.device)
                factor = torch.where(before.isfinite(), self._factor(before), factor)
        sharding.local(p.grad).mul_(factor)

    def _factor(self, norm: Tensor) -> Tensor:
        return torch.clamp(cast(float, self.largest) / (norm + TINY), max=1.0)

    def end(self, params: Iterable[Tensor]) -> None:
        """End a step of these parameters, whose norm is used at the next one."""
        if norms := [self.norms[id(p)] for p in params if id(p) in self.norms]:
            self.previous = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
        self.norms.clear()


class Release:
    """The hooks of an optimizer, until `remove()`, or until the optimizer is gone.

    accumulate   micro-batches whose gradients are summed before an update
    accumulator  makes what keeps that sum in place of p.grad, if anything does
    """

    def __init__(
        self,
        optimizer: Any,
        model: nn.Module | None,
        accumulate: int,
        accumulator: Callable[[list[Tensor]], torch.optim.Optimizer] | None,
        clip: float | None,
        clip_by: ClipBy,
        sums: Literal["previous"] | None,
    ) -> None:
        self._title = title = f"{type(optimizer).__name__}.release_gradients"
        if optimizer._release is not None:
            raise RuntimeError(f"{title}: the gradients are released already; remove() the handle of that call first")
        if optimizer._watch is not None:
            raise RuntimeError(f"{title}: watch() measures in step(), where released gradients are gone: remove() it")
        self.accumulate, self.accumulator = _micro_batches(title, accumulate, accumulator), accumulator
        self.clipping = Clipping(title, clip, clip_by)
        self.sums = PreviousSums(title, sums)
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"{title}: model must be a torch.nn.Module or None, got {type(model).__name__}")
        self._optimizer, self._model = weakref.ref(optimizer), model
        self._lock = threading.RLock()  # backward runs a thread per device
        self._released: dict[int, ReleasedParameter] = {}
        self._looked = self._warned = False
        owner = optimizer._owner()
        self._refuse_wrappers(owner)
        if not self._wanted(owner):
            raise ValueError(f"{title}: no trainable parameter of this optimizer is in the model that was given")
        self._attach(owner)
        optimizer._stepper.forget_step()  # it was one over parameters that get theirs within backward now
        optimizer._stepper.sums = self.sums

    @property
    def optimizer(self) -> Any:
        """The optimizer, which keeps this, and is there as long."""
        return self._optimizer()

    def refuse_released(self, params: Iterable[Tensor]) -> None:
        """Raise RuntimeError if another optimizer updates one of the parameters within backward: that one would free
        the gradient, and this one would never see any."""
        for p in params:
            hooks = (getattr(p, "_post_accumulate_grad_hooks", None) or {}).values()
            for other in (hook.release() for hook in hooks if isinstance(hook, Hook)):
                if other is not None and other is not self:
                    raise RuntimeError(
                        f"{self._title}: the gradient of a parameter of shape {list(p.shape)} is released to another "
                        f"optimizer already ({type(other.optimizer).__name__}), which would go on to update it: "
                        f"remove() the handle of that call first, or delete that optimizer (a name that still stands "
                        f"for it keeps it)"
                    )

    def _refuse_wrappers(self, owner: Owner) -> None:
        """Raise NotImplementedError for wrappers that reduce gradients over ranks after the hooks have run."""
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return
        fsdp = sys.modules.get("torch.distributed.fsdp")
        kinds = (nn.parallel.DistributedDataParallel, *((fsdp.FullyShardedDataParallel,) if fsdp else ()))
        ours = {id(entry.p) for entry in entries.of(owner.groups)}
        everything = gc.get_objects()
        wraps = {kind for kind in set(map(type, everything)) if issubclass(kind, kinds)}  # slow, so once per type
        for module in (m for m in everything if type(m) in wraps):
            if any(id(p) in ours for p in module.parameters()):
                raise NotImplementedError(
                    f"{self._title}: {type(module).__name__} sums gradients over ranks after the hooks of the "
                    f"parameters have run, in buffers of its own: ranks would part, and no memory would be saved.  Use "
                    f"torch.distributed.fsdp.fully_shard, by reshard_after_forward=False with no more to send, or "
                    f"step() as usual"
                )

    def _wanted(self, owner: Owner) -> list[Entry]:
        """Return the parameters that are to be released."""
        members = None if self._model is None else {id(p) for p in self._model.parameters()}
        return [e for e in entries.of(owner.groups) if e.p.requires_grad and (members is None or id(e.p) in members)]

    def _attach(self, owner: Owner) -> None:
        """Place hooks on parameters that came, were made trainable or replaced; those that left lose theirs."""
        wanted = {id(e.p): e for e in self._wanted(owner)}
        self.refuse_released(e.p for key, e in wanted.items() if key not in self._released)
        places = [(e, self._released.get(key)) for key, e in wanted.items()]
        moved = [(e, old) for e, old in places if old is None or old.entry[2:] != e[2:]]
        made = [(ReleasedParameter(self, owner, e, old), old) for e, old in moved]  # an error leaves all as it was
        for key in self._released.keys() - wanted.keys():
            self._detach(key)
        for one, old in made:
            if old is None:
                one.hook = cast(Any, one.p).register_post_accumulate_grad_hook(Hook(self))
            else:
                old.gather()
            self._released[id(one.p)] = one

    def _detach(self, key: int) -> None:
        one = self._released.pop(key)
        one.hook.remove()
        one.gather()

    def attach(self) -> None:
        """See to parameters that came and left."""
        with self._lock:
            self._attach(self.optimizer._owner())

    def remove(self) -> None:
        """Remove all hooks, and put sums that no update has used into p.grad."""
        with self._lock, torch.no_grad():
            for key in list(self._released):
                self._detach(key)
            self.optimizer._stepper.sums = ModelSums()

    # -- within backward ------------------------------------------------------------------------------

    def complete(self, p: Tensor) -> None:
        """Use p.grad, which is complete for this backward; if something is refused, it stays and nothing changes."""
        with self._lock, torch.no_grad():
            self.optimizer._refuse_unready("backward() with released gradients")
            owner = self.optimizer._owner()
            one = self._released.get(id(p))
            if one is None or p.grad is None:
                return
            if not self._looked:  # the model may have been wrapped since
                self._refuse_wrappers(owner)
                self._looked = True
            if not one.is_at(owner):  # a checkpoint has other names, for instance
                self._attach(owner)
                one = self._released.get(id(p))
                if one is None:
                    return
            self.sums.refuse_again(one.entry)
            p.grad = state.materialized(p.grad)  # sums and clipping write it
            if one.summed + 1 < self.accumulate:
                if one.sums is not None:
                    one.sums.add(p.grad)
                    p.grad = None
                one.summed += 1
                return
            one.gather()
            if (due := self.sums.due(one, owner)) is None:
                return
            self.clipping.clip(due.p)
            due.step(owner)
            due.p.grad = None
            due.updates += 1

    # -- between backwards ----------------------------------------------------------------------------

    def step(self) -> None:
        """Update from gradients that are still there, and end the norm of this step."""
        refuse_scaled(self.optimizer)
        with self._lock, torch.no_grad():
            owner = self.optimizer._owner()
            before = list(self._released.values())
            self._attach(owner)
            self._warn_repeated()
            for one in self._released.values():
                one.updates = 0
                one.gather()
                self.clipping.clip(one.p)
            if any(entry.p.grad is not None for entry in entries.of(owner.groups)):
                self.optimizer._update()
            for one in (*before, *self._released.values()):  # those that were frozen since their gradient came as well
                one.p.grad = None
            self.clipping.end(e.p for e in entries.of(owner.groups) if id(e.p) in self._released)
            self.sums.end(owner.groups)

    def _warn_repeated(self) -> None:
        """Warn, once, where a parameter was updated several times since the last step(): in each of several backwards.

        A loop without step() is not warned of: each of its backwards is meant to update.
        """
        most = max(self._released.values(), key=lambda one: one.updates, default=None)
        if most is None or most.updates < 2 or self._warned:
            return
        self._warned, name = True, state.label(most.p, most.entry.name)
        warn(
            f"{self._title}: {name} was updated {most.updates} times since the last step(), "
            f"once in each of several backwards.  For one update from the sum of their gradients give "
            f"accumulate={most.updates * self.accumulate}; for an update in each, call step() after each",
            type(self.optimizer),
        )

    def discard(self) -> None:
        """Forget sums that no update has used, as zero_grad does with p.grad."""
        with self._lock:
            for one in self._released.values():
                one.summed = 0
                if one.sums is not None:
                    one.sums.clear()
            self.sums.begin()


def refuse_scaled(optimizer: Any) -> None:
    """Raise RuntimeError if a GradScaler makes the step, which has left its scale with the optimizer."""
    left = [vars(optimizer).pop(name, None) for name in ("grad_scale", "found_inf")]
    if any(value is not None for value in left):
        raise RuntimeError(
            f"{type(optimizer).__name__}.step: its gradients were released within backward, where the factor of a "
            f"GradScaler was still in them, and a step that overflows could not be skipped any more.  Train in bf16, "
            f"which needs no GradScaler, or call remove() on the handle of release_gradients"
        )


def _micro_batches(title: str, accumulate: object, accumulator: object) -> int:
    """Return how many are summed before an update; ValueError if they cannot be."""
    count = None if isinstance(accumulate, bool) else as_int(accumulate)
    if count is None or count < 1:
        raise ValueError(f"{title}: accumulate must be a whole number >= 1, got {accumulate!r}")
    if accumulator is not None and (count == 1 or not callable(accumulator)):
        raise ValueError(
            f"{title}: accumulator must be what optgen.accumulate.accumulator('int8') makes, or a class "
            f"like it, with accumulate >= 2; got {accumulator!r} and accumulate={count}"
        )
    return count


class Handle(AbstractContextManager["Handle"]):
    """The handle of released gradients, which keeps its optimizer: also a context manager, which removes the hooks at
    its end."""

    def __init__(self, optimizer: Any, release: Release) -> None:
        self.optimizer, self._release = optimizer, release

    def remove(self) -> None:
        """Return to ordinary steps.  Sums of micro-batches that no update has used are in p.grad afterwards."""
        self._release.remove()
        if self.optimizer._release is self._release:
            self.optimizer._release = None

    def __exit__(self, *error: object) -> None:
        self.remove()


def release_gradients(
    self: Any,
    model: nn.Module | None = None,
    *,
    accumulate: int = 1,
    accumulator: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None,
    clip: float | None = None,
    clip_by: ClipBy = "norm",
    sums: Literal["previous"] | None = None,
) -> Handle:
    """Update each parameter within backward from now on, when its gradient is complete, which is then freed.

    model        only its parameters; None: all of this optimizer's
    accumulate   micro-batches whose gradients are summed before an update
    accumulator  keeps that sum in place of p.grad: `optgen.accumulate.accumulator(plan)`; None: p.grad, as torch sums
    clip         largest norm of a parameter's gradient; None: no clipping
    clip_by      "norm": of each parameter; "previous_norm": the factor is that of the norm over all parameters at the
                 step before (at the first step, of each parameter)
    sums         "previous": rules that need sums over the model take those of the step before; None: they are refused

    The training loop stays: `step()` then only updates what has a gradient left.  The bits are those of ordinary steps.
    NotImplementedError under DistributedDataParallel and FSDP1; RuntimeError where another optimizer does it for one of
    the parameters.  A GradScaler is refused by the first `step()` it makes.
    Returns the handle: `remove()`, or leaving it as a context, restores ordinary steps.  An optimizer that is deleted,
    and its handle with it, updates nothing any more.
    """
    self._refuse_unready("release_gradients()")
    self._release = Release(self, model, accumulate, accumulator, clip, clip_by, sums)
    return Handle(self, self._release)
