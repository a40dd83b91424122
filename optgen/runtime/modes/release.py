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
from typing import Any, Literal, Self, cast, get_args

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from optgen.runtime.layout import sharding
from optgen.runtime.modes.accumulated import GradientAccumulator, refuse_sums
from optgen.runtime.options import entries, options
from optgen.runtime.options.entries import Entry, Owner
from optgen.runtime.records import Variant, as_float, as_int
from optgen.runtime.records.arena import Arena
from optgen.runtime.records.warn import warn
from optgen.runtime.states import state
from optgen.runtime.step.stepper import Stepper

ClipBy = Literal["norm", "value", "previous_norm"]

TINY = 1e-6
"""The number that torch.nn.utils.clip_grad_norm_ adds to a norm before it divides by it."""


class ReleasedParameter:
    """A parameter with a stepper of its own.

    entry    its place in the optimizer, with a group of its own: options are copied from the user's before each step
    old      what it was before it took another place or name
    summed   micro-batches since the last update
    sums     the sum of their gradients, if that is not p.grad itself
    updates  the number of its updates since the user's last step()
    roomy    True if a step, this or another one, needs a buffer as large as the parameter
    """

    def __init__(self, release: Release, owner: Owner, entry: Entry, old: ReleasedParameter | None) -> None:
        optimizer, make = release.optimizer, release.accumulator
        self.p, self.name = entry.p, entry.name
        self.group: dict[str, Any] = {"params": [self.p], "param_names": [self.name], "positions": [entry.position]}
        self.entry = entry._replace(group=self.group)
        self.stepper, self.offload = Stepper(entry.number), optimizer._offload.part(entry)
        known = optimizer._stepper.dtypes.get(id(self.p))
        if known is not None:
            self.stepper.dtypes[id(self.p)] = known
        self.flags: object = None
        self.variant: Variant | None = None
        self.roomy = False
        self.refresh(owner)
        self.summed: int = old.summed if old is not None else 0
        self.updates: int = old.updates if old is not None else 0
        count = release.counts.get(self.name, 0)
        if old is not None and old.sums is not None and old.name == self.name:
            count = old.sums.count
        self.sums: GradientAccumulator | None = (
            None if make is None else GradientAccumulator(make, self.p, self.name, count)
        )

    def is_at(self, owner: Owner) -> bool:
        """Return True if the parameter has its place and name still."""
        number, place = self.entry.number, self.entry.place
        if number >= len(owner.groups):
            return False
        params, names = owner.groups[number]["params"], owner.groups[number].get("param_names")
        named = names is None or (place < len(names) and names[place] == self.name)
        return bool(named and place < len(params) and params[place] is self.p)

    def refresh(self, owner: Owner) -> None:
        """Take over the options as they are now.  Raises ValueError if the rule needs other parameters as well."""
        group = self.group
        entries.take_options(group, owner.groups[self.entry.number])
        own = group.get("overrides"), group.get("blocks")
        flags = (group["plan"], *own, options.flags_of(owner.cls, group), self.p.shape)
        if flags != self.flags:
            steps = refuse_sums(owner.cls, group, self.p, self.name)
            self.variant = steps[0]
            self.roomy = any(temp.space == "elem" for variant in steps for temp in variant.temps)
            self.flags = flags

    @_disable_dynamo
    def step(self, owner: Owner) -> None:
        """Update p from p.grad, as a parameter of `owner`."""
        self.refresh(owner)
        self.offload.step(owner._replace(groups=[self.group]), self.stepper)
        self.stepper.arena = None
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


def _give_room(owner: Owner, released: Iterable[ReleasedParameter]) -> None:
    """Give all on the CPU one buffer for their first states: huge pages of many small ones go to waste."""
    lacking = [one for one in released if state.home(one.p).type == "cpu" and not owner.states.get(one.p)]
    room = Arena([size for one in lacking if one.variant for size in state.sizes(one.variant, one.p, {})])
    for one in lacking:
        one.stepper.arena = room


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


class Release:
    """The hooks of an optimizer, until `remove()`, or until the optimizer is gone.

    accumulate   micro-batches whose gradients are summed before an update
    accumulator  makes what keeps that sum in place of p.grad, if anything does
    previous     the norm of all gradients at the step before, of clip_by="previous_norm"
    counts       sums that each parameter has had by a checkpoint, by name
    """

    def __init__(
        self,
        optimizer: Any,
        model: nn.Module | None = None,
        *,
        accumulate: int = 1,
        accumulator: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None,
        clip: float | None = None,
        clip_by: ClipBy = "norm",
    ) -> None:
        self._title = title = f"{type(optimizer).__name__}.release_gradients"
        if optimizer._release is not None:
            raise RuntimeError(f"{title}: the gradients are released already; remove() the handle of that call first")
        count = None if isinstance(accumulate, bool) else as_int(accumulate)
        if count is None or count < 1:
            raise ValueError(f"{title}: accumulate must be a whole number >= 1, got {accumulate!r}")
        if accumulator is not None and (count == 1 or not callable(accumulator)):
            raise ValueError(
                f"{title}: accumulator must be what optgen.accumulate.accumulator('int8') makes, or a class "
                f"like it, with accumulate >= 2; got {accumulator!r} and accumulate={count}"
            )
        if clip_by not in get_args(ClipBy):
            raise ValueError(
                f"{title}: clip_by must be one of {', '.join(get_args(ClipBy))}, got {clip_by!r}; the norm over the "
                f"model is known only after backward, and clip_by='previous_norm' takes that of the step before"
            )
        number = None if clip is None or isinstance(clip, bool) else as_float(clip)
        if clip is not None and not (number is not None and number > 0):
            raise ValueError(f"{title}: clip must be a number > 0, or None, got {clip!r}")
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"{title}: model must be a torch.nn.Module or None, got {type(model).__name__}")
        self._optimizer, self.accumulate = weakref.ref(optimizer), count
        self._model, self.accumulator = model, accumulator
        self._clip, self._clip_by = number, clip_by
        self._lock = threading.RLock()  # backward runs a thread per device
        self._released: dict[int, ReleasedParameter] = {}
        self._hooks: dict[int, Any] = {}
        self._norms: dict[int, Tensor] = {}
        self.previous: Tensor | None = None
        self.counts: dict[str | int, int] = {}
        self._looked = self._warned = False
        owner = optimizer._owner()
        self._refuse_wrappers(owner)
        if not self._wanted(owner):
            raise ValueError(f"{title}: no trainable parameter of this optimizer is in the model that was given")
        self._attach(owner)
        optimizer._stepper.forget_step()  # it was one over parameters that get theirs within backward now

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
                    f"torch.distributed.fsdp.fully_shard, or step() as usual"
                )

    def _wanted(self, owner: Owner) -> list[Entry]:
        """Return the parameters that are to be released."""
        members = None if self._model is None else {id(p) for p in self._model.parameters()}
        return [e for e in entries.of(owner.groups) if e.p.requires_grad and (members is None or id(e.p) in members)]

    def _attach(self, owner: Owner) -> None:
        """Place hooks on parameters that came, were made trainable or replaced; those that left lose theirs."""
        wanted = self._wanted(owner)
        self.refuse_released(e.p for e in wanted if id(e.p) not in self._released)
        held = {id(e.p): self._released.get(id(e.p)) for e in wanted}
        moved = [e for e in wanted if (old := held[id(e.p)]) is None or old.entry[2:] != e[2:]]
        made = [ReleasedParameter(self, owner, e, held[id(e.p)]) for e in moved]
        _give_room(owner, made)
        for one in made:
            if (old := self._released.get(id(one.p))) is None:
                self._hooks[id(one.p)] = cast(Any, one.p).register_post_accumulate_grad_hook(Hook(self))
            else:
                old.gather()
            self._released[id(one.p)] = one
        for key in self._released.keys() - held.keys():
            self._hooks.pop(key).remove()
            self._released.pop(key).gather()

    def attached(self) -> list[ReleasedParameter]:
        """Return all parameters with a hook, after those that came and left have been seen to."""
        with self._lock:
            self._attach(self.optimizer._owner())
            return list(self._released.values())

    def remove(self) -> None:
        """Remove all hooks, and put sums that no update has used into p.grad."""
        with self._lock, torch.no_grad():
            for key, one in self._released.items():
                self._hooks.pop(key).remove()
                one.gather()
            self._released.clear()

    # -- within backward ------------------------------------------------------------------------------

    def complete(self, p: Tensor) -> None:
        """Use p.grad, which is complete for this backward; if something is refused, it stays and nothing changes."""
        with self._lock, torch.no_grad():
            self.optimizer._refuse_in_evaluation("backward() with released gradients")
            owner = self.optimizer._owner()
            one = self._released.get(id(p))
            if one is None or p.grad is None:
                return
            if not self._looked:  # the model may have been wrapped since
                self._refuse_wrappers(owner)
                self._looked = True
            if not one.is_at(owner):  # a checkpoint has other names, for instance
                self._attach(owner)
                one = self._released.get(id(p), one)
            p.grad = state.materialized(p.grad)  # sums and clipping write it
            if one.summed + 1 < self.accumulate:
                if one.sums is not None:
                    one.sums.add(p.grad)
                    p.grad = None
                one.summed += 1
                return
            one.gather()
            self._clip_one(one)
            watch = self.optimizer._watch
            sampled = [] if watch is None else watch.begin(owner, [one.entry])
            one.step(owner)
            if watch is not None:
                watch.end(sampled)
            p.grad = None
            one.updates += 1

    def _clip_one(self, one: ReleasedParameter) -> None:
        """Clip the gradient in place, as torch.nn.utils does it."""
        p, clip = one.p, self._clip
        if clip is None or p.grad is None:
            return
        if self._clip_by == "value":
            p.grad.clamp_(-clip, clip)
            return
        own = torch.linalg.vector_norm(p.grad, dtype=torch.promote_types(p.grad.dtype, torch.float32))
        if sharding.is_sharded(own):  # norms of plain tensors and of other meshes may stand beside it
            own = cast(Any, own).full_tensor()
        factor = torch.clamp(clip / (own + TINY), max=1.0)
        if self._clip_by == "previous_norm":
            self._norms[id(p)] = own
            if self.previous is not None:
                before = self.previous.to(own.device)
                factor = torch.where(before.isfinite(), torch.clamp(clip / (before + TINY), max=1.0), factor)
        sharding.local(p.grad).mul_(factor)

    # -- between backwards ----------------------------------------------------------------------------

    def step(self) -> None:
        """Update from gradients that are still there, and end the norm of this step."""
        left = [vars(self.optimizer).pop(name, None) for name in ("grad_scale", "found_inf")]
        if any(value is not None for value in left):
            raise RuntimeError(
                f"{type(self.optimizer).__name__}.step: its gradients were released within backward, where the factor "
                f"of a GradScaler was still in them, and a step that overflows could not be skipped any more.  Train "
                f"in bf16, which needs no GradScaler, or call remove() on the handle of release_gradients"
            )
        with self._lock, torch.no_grad():
            owner = self.optimizer._owner()
            before = list(self._released.values())
            for one in before:
                if one.p.grad is not None:  # maybe because torch forgot its hooks when a conversion swapped the content
                    known: Any = one.p  # of Parameters; it looks for them when they are set
                    known._post_accumulate_grad_hooks = known._post_accumulate_grad_hooks
            self._attach(owner)
            self._warn_repeated()
            for one in self._released.values():
                one.updates = 0
                one.gather()
                self._clip_one(one)
            if any(entry.p.grad is not None for entry in entries.of(owner.groups)):
                self.optimizer._update()
            for one in (*before, *self._released.values()):  # those that were frozen since their gradient came as well
                one.p.grad = None
            kept = self._norms.keys() & self._released.keys()
            if norms := [self._norms[id(e.p)] for e in entries.of(owner.groups) if id(e.p) in kept]:
                self.previous = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
            self._norms.clear()

    def _warn_repeated(self) -> None:
        """Warn, once, where a parameter was updated several times since the last step(): in each of several backwards.

        A loop without step() is not warned of: each of its backwards is meant to update.
        """
        most = max(self._released.values(), key=lambda one: one.updates, default=None)
        if most is None or most.updates < 2 or self._warned:
            return
        self._warned = True
        warn(
            f"{self._title}: {state.label(most.p, most.name)} was updated {most.updates} times since the last step(), "
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


class Handle:
    """The handle of released gradients, which keeps its optimizer: also a context manager, which removes the hooks at
    its end."""

    def __init__(self, optimizer: Any, release: Release) -> None:
        self.optimizer, self._release = optimizer, release

    def remove(self) -> None:
        """Return to ordinary steps.  Sums of micro-batches that no update has used are in p.grad afterwards."""
        self._release.remove()
        if self.optimizer._release is self._release:
            self.optimizer._release = None

    def state_dict(self) -> dict[str, Any]:
        """Return what an exact continuation needs beside the optimizer's state dict: the norm of the last step, and how
        many sums of micro-batches each parameter has had, by name (by position where it has none).

        Raises RuntimeError if sums of micro-batches are waiting: save between updates.
        """
        released = self._release.attached()
        if any(one.summed for one in released):
            raise RuntimeError("release_gradients: micro-batches are waiting for their update; save after step()")
        norm = self._release.previous
        sums = {one.name: one.sums.count for one in released if one.sums is not None}
        return {"previous_norm": None if norm is None else norm.clone(), **({"sums": sums} if sums else {})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a dict that `state_dict` returned.  Raises TypeError for anything else."""
        norm, sums = state_dict.get("previous_norm", self), state_dict.get("sums", {})
        if not (norm is None or (isinstance(norm, Tensor) and norm.numel() == 1)) or not isinstance(sums, dict):
            raise TypeError(
                f"release_gradients: expected what the handle's state_dict() gave, {{'previous_norm': a tensor of one "
                f"element or None, 'sums': numbers by name}}, got {state_dict!r:.80}"
            )
        self._release.previous = None if norm is None else norm.detach().to(torch.float32).reshape(()).clone()
        self._release.counts = dict(sums)
        for one in self._release.attached():
            if one.sums is not None:
                one.sums.count = sums.get(one.name, one.sums.count)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()
