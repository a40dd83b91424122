"""Updates within backward: each parameter takes its step as soon as its gradient is complete, which is then freed.

A hook of torch's runs when a gradient has been accumulated.  It makes the step of that one parameter with the state,
the options, the name and the position that it has in the optimizer, and so with the bits of an ordinary step.  Each
parameter has a stepper of its own, so that each takes the fast path (step/fast_path.py).

`step()` still updates parameters that have a gradient left, because fewer micro-batches than announced came, or because
they came into the optimizer after the hooks were placed.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, Self, cast, get_args

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from optgen.runtime.checkpoint import checkpoint
from optgen.runtime.layout import plans, sharding
from optgen.runtime.layout.plans import Label
from optgen.runtime.modes.offload import sums_over_model
from optgen.runtime.options import entries, options
from optgen.runtime.options.entries import Entry, Owner
from optgen.runtime.records import Variant, as_float, as_int
from optgen.runtime.records.arena import Arena
from optgen.runtime.records.uninterrupted import Uninterrupted
from optgen.runtime.records.warn import warn
from optgen.runtime.states import state
from optgen.runtime.step.stepper import Stepper

ClipBy = Literal["norm", "value", "previous_norm"]

TINY = 1e-6
"""The number that torch.nn.utils.clip_grad_norm_ adds to a norm before it divides by it."""


class ReleasedParameter:
    """A parameter with a stepper of its own.

    group    its options, copied from the user's group before each step
    summed   micro-batches since the last update
    sums     the sum of their gradients, if that is not p.grad itself
    updates  the number of its updates since the user's last step()
    roomy    True if a step, this or another one, needs a buffer as large as the parameter
    """

    def __init__(self, optimizer: Any, entry: Entry) -> None:
        self.p, _, self.number, self.place, position, self.name = entry
        self.group: dict[str, Any] = {"params": [self.p], "param_names": [self.name], "positions": [position]}
        self.stepper, self.offload = Stepper(self.number), optimizer._offload.part(entry)
        known = optimizer._stepper.dtypes.get(id(self.p))
        if known is not None:
            self.stepper.dtypes[id(self.p)] = known
        self.summed = self.updates = 0
        self.sums: GradientAccumulator | None = None
        self.flags: object = None
        self.variant: Variant | None = None
        self.roomy = False

    @_disable_dynamo
    def step(self, owner: Owner) -> None:
        """Update p from p.grad, as a parameter of `owner`."""
        self.refresh(owner)
        self.offload.step(owner._replace(groups=[self.group]), self.stepper)
        self.stepper.arena = None
        if self.roomy:
            self.stepper.forget_tables()
            self.offload.forget_tables()

    def refresh(self, owner: Owner) -> None:
        """Take over the options as they are now.  Raises ValueError if the rule needs other parameters as well."""
        group = self.group
        entries.take_options(group, owner.groups[self.number])
        own = group.get("overrides"), group.get("blocks")
        flags = (group["plan"], *own, options.flags_of(owner.cls, group), self.p.shape)
        if flags != self.flags:
            steps = refuse_sums(owner.cls, group, self.p, self.name)
            self.variant = steps[0]
            self.roomy = any(temp.space == "elem" for variant in steps for temp in variant.temps)
            self.flags = flags


def _give_room(owner: Owner, released: Iterable[ReleasedParameter]) -> None:
    """Give all on the CPU one buffer for their first states: huge pages of many small ones go to waste."""
    lacking = [one for one in released if state.home(one.p).type == "cpu" and not owner.states.get(one.p)]
    room = Arena([size for one in lacking if one.variant for size in state.sizes(one.variant, one.p, {})])
    for one in lacking:
        one.stepper.arena = room


def refuse_sums(cls: Any, group: dict[str, Any], p: Tensor, name: Label) -> list[Variant]:
    """Return the variants of the parameter's steps, the usual one first.

    Raises ValueError if its rule needs other parameters' gradients.
    """
    _, plan, variant = checkpoint.select(cls, group, p, name)
    steps = list(plans.at_steps(plan, variant, cls.FLAGS))
    for v in steps:
        if sums_over_model(v):
            sums = ", ".join(v.model_temps) or "states of the model"
            raise ValueError(
                f"{cls.__name__}: the update of {state.label(p, name)} needs sums over the whole model ({sums}), known "
                f"only when backward has ended: gradients cannot be released.  Call step() after backward; to clip by "
                f"a norm over the model, take the rule that does not, and release_gradients(clip=..., "
                f"clip_by='previous_norm')"
            )
    return steps


class Hook:
    """The hook that torch calls with a parameter whose gradient is complete.

    It keeps no optimizer alive: a parameter lives longer than the optimizers that it had.
    """

    __slots__ = ("release",)

    def __init__(self, release: Release) -> None:
        self.release = weakref.ref(release)

    def __call__(self, p: Tensor) -> None:
        found = self.release()
        if found is not None and found._optimizer() is not None:
            found._complete(p)


def _releases(p: Tensor) -> Iterator[Release]:
    """Yield the releases that have a hook on the parameter."""
    for hook in (getattr(p, "_post_accumulate_grad_hooks", None) or {}).values():
        if isinstance(hook, Hook) and (found := hook.release()) is not None:
            yield found


def _unhook(hooks: dict[int, Any]) -> None:
    for hook in hooks.values():
        hook.remove()


class Release:
    """The hooks of an optimizer, until `remove()`, or until the optimizer is gone.

    accumulate  micro-batches whose gradients are summed before an update
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
        owner = f"{type(optimizer).__name__}.release_gradients"
        if optimizer._release is not None:
            raise RuntimeError(f"{owner}: the gradients are released already; remove() the handle of that call first")
        count = as_int(accumulate)
        if count is None or isinstance(accumulate, bool) or count < 1:
            raise ValueError(f"{owner}: accumulate must be a whole number >= 1, got {accumulate!r}")
        if accumulator is not None and (count == 1 or not callable(accumulator)):
            raise ValueError(
                f"{owner}: accumulator must be what optgen.accumulate.accumulator('int8') makes, or a class "
                f"like it, with accumulate >= 2; got {accumulator!r} and accumulate={count}"
            )
        if clip_by not in get_args(ClipBy):
            raise ValueError(
                f"{owner}: clip_by must be one of {', '.join(get_args(ClipBy))}, got {clip_by!r}; the norm over the "
                f"model is known only after backward, and clip_by='previous_norm' takes that of the step before"
            )
        number = None if clip is None or isinstance(clip, bool) else as_float(clip)
        if clip is not None and not (number is not None and number > 0):
            raise ValueError(f"{owner}: clip must be a number > 0, or None, got {clip!r}")
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"{owner}: model must be a torch.nn.Module or None, got {type(model).__name__}")
        self._optimizer, self.accumulate = weakref.ref(optimizer), count
        self._model, self._accumulator = model, accumulator
        self._clip, self._clip_by = number, clip_by
        self._lock = threading.RLock()  # backward runs a thread per device
        self._released: dict[int, ReleasedParameter] = {}
        self._hooks: dict[int, Any] = {}
        weakref.finalize(self, _unhook, self._hooks).atexit = False
        self._norms: dict[int, Tensor] = {}
        self.previous: Tensor | None = None
        self.counts: dict[str | int, int] = {}
        self._looked = False
        self._warned: set[str] = set()
        groups = optimizer._owner()
        self._refuse_wrappers(groups)
        wanted = self._wanted(groups)
        if not wanted:
            raise ValueError(f"{owner}: no trainable parameter of this optimizer is in the model that was given")
        self.refuse_released([p for p, *_ in wanted])
        released = [ReleasedParameter(optimizer, found) for found in wanted]
        for one in released:
            one.refresh(groups)
            self._give_sums(one)
        _give_room(groups, released)
        optimizer._stepper.forget_step()  # it was one over parameters that get theirs within backward now
        for one in released:
            self._place(one)

    @property
    def optimizer(self) -> Any:
        """The optimizer, which is there whenever this is asked for a step."""
        found = self._optimizer()
        assert found is not None
        return found

    def refuse_released(self, params: Iterable[Tensor]) -> None:
        """Raise RuntimeError if another optimizer updates one of the parameters within backward: that one would free
        the gradient, and this one would never see any."""
        for p in params:
            for other in _releases(p):
                owner = None if other is self else other._optimizer()
                if owner is not None:
                    raise RuntimeError(
                        f"{type(self.optimizer).__name__}.release_gradients: the gradient of a parameter of shape "
                        f"{list(p.shape)} is released to another optimizer already ({type(owner).__name__}), which "
                        f"would go on to update it: remove() the handle of that call first, or delete that optimizer "
                        f"(a name that still stands for it keeps it)"
                    )

    def _refuse_wrappers(self, owner: Owner) -> None:
        """Raise NotImplementedError for wrappers that reduce gradients over ranks after the hooks have run."""
        ddp, fsdp = map(sys.modules.get, ("torch.nn.parallel.distributed", "torch.distributed.fsdp"))
        found = getattr(ddp, "DistributedDataParallel", None), getattr(fsdp, "FullyShardedDataParallel", None)
        kinds = tuple(kind for kind in found if isinstance(kind, type))
        if not kinds or not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return
        ours = {id(entry.p) for entry in entries.of(owner.groups)}
        everything = gc.get_objects()
        wraps = {kind for kind in set(map(type, everything)) if issubclass(kind, kinds)}  # slow, so once per type
        wrappers = [m for m in everything if type(m) in wraps and any(id(p) in ours for p in m.parameters())]
        if wrappers:
            raise NotImplementedError(
                f"{owner.cls.__name__}.release_gradients: {type(wrappers[0]).__name__} sums gradients over "
                f"ranks after the hooks of the parameters have run, in buffers of its own: ranks would part, and no "
                f"memory would be saved.  Use torch.distributed.fsdp.fully_shard, or step() as usual"
            )

    def _wanted(self, owner: Owner) -> list[Entry]:
        """Return the parameters that are to be released."""
        members = None if self._model is None else {id(p) for p in self._model.parameters()}
        return [e for e in entries.of(owner.groups) if e.p.requires_grad and (members is None or id(e.p) in members)]

    def _give_sums(self, one: ReleasedParameter) -> None:
        if self._accumulator is not None and one.sums is None:
            one.sums = GradientAccumulator(self._accumulator, one.p, one.name, self.counts.get(one.name, 0))

    def _place(self, one: ReleasedParameter) -> None:
        self._released[id(one.p)] = one
        if id(one.p) not in self._hooks:
            register: Callable[..., Any] = one.p.register_post_accumulate_grad_hook
            self._hooks[id(one.p)] = register(Hook(self))

    # -- within backward ------------------------------------------------------------------------------

    def _complete(self, p: Tensor) -> None:
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
            one = self._current(owner, one)
            p.grad = state.materialized(p.grad)  # sums and clipping write it
            if one.summed + 1 < self.accumulate:
                if one.sums is not None:
                    one.sums.add(p.grad)
                    p.grad = None
                one.summed += 1
                return
            self._update(owner, one)

    def _current(self, owner: Owner, one: ReleasedParameter) -> ReleasedParameter:
        """Return the parameter's record, made anew if it has another place or name now: a checkpoint's."""
        if one.number < len(owner.groups):
            params, names = owner.groups[one.number]["params"], owner.groups[one.number].get("param_names")
            named = names is None or (one.place < len(names) and names[one.place] == one.name)
            if one.place < len(params) and params[one.place] is one.p and named:
                return one
        self._attach(owner)
        return self._released.get(id(one.p), one)

    def _update(self, owner: Owner, one: ReleasedParameter) -> None:
        """Clip the gradient, step, and free it."""
        assert one.p.grad is not None
        if one.sums is not None and one.summed:
            one.sums.add(one.p.grad)
            one.sums.clear()
            one.summed = 0
        self._clip_one(one)
        watch = self.optimizer._watch
        own = Entry(one.p, one.group, one.number, one.place, one.group["positions"][0], one.name)
        sampled = [] if watch is None else watch.begin(owner, [own])
        one.step(owner)
        if watch is not None:
            watch.end(sampled)
        one.p.grad = None
        one.summed = 0
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

    def attached(self) -> list[ReleasedParameter]:
        """Place hooks on parameters that came, were made trainable or replaced; those that left lose theirs.

        Returns all that have one.
        """
        with self._lock:
            self._attach(self.optimizer._owner())
            return list(self._released.values())

    def remove(self) -> None:
        """Remove all hooks, and put sums that no update has used into p.grad."""
        with self._lock, torch.no_grad():
            _unhook(self._hooks)
            self._hooks.clear()
            for one in self._released.values():
                self._hand_over(one)
            self._released.clear()

    def _attach(self, owner: Owner) -> None:
        wanted = self._wanted(owner)
        left = self._released.keys() - {id(p) for p, *_ in wanted}
        self.refuse_released([p for p, *_ in wanted if id(p) not in self._released])
        for entry in wanted:
            old = self._released.get(id(entry.p))
            if old is not None and (old.number, old.place, old.name) == (entry.number, entry.place, entry.name):
                continue
            one = ReleasedParameter(self.optimizer, entry)
            one.refresh(owner)
            if old is not None:
                one.summed, one.updates = old.summed, old.updates
                if old.summed or old.name == entry.name:
                    one.sums = old.sums
                    if one.sums is not None:
                        one.sums.rename(entry.name)
            self._give_sums(one)
            self._place(one)
        for key in left:
            self._hooks.pop(key).remove()
            self._hand_over(self._released.pop(key))

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
            self._warn_repeated(self._released.values())
            for one in self._released.values():
                one.updates = 0
                if one.summed or one.p.grad is not None:
                    self._hand_over(one)
                    self._clip_one(one)
            if any(entry.p.grad is not None for entry in entries.of(owner.groups)):
                self.optimizer._update()
            for one in (*before, *self._released.values()):  # those that were frozen since their gradient came as well
                one.p.grad = None
                one.summed = 0
            if self._norms:
                order = [self._norms[id(p)] for p, *_ in self._wanted(owner) if id(p) in self._norms]
                self.previous = torch.linalg.vector_norm(torch.stack([n.to(order[0].device) for n in order]))
                self._norms.clear()

    def _warn_repeated(self, released: Iterable[ReleasedParameter]) -> None:
        """Warn, once, where a parameter was updated several times since the last step(): in each of several backwards.

        A loop without step() is not warned of: each of its backwards is meant to update.
        """
        most = max(released, key=lambda one: one.updates, default=None)
        if most is None or most.updates < 2 or "updates" in self._warned:
            return
        self._warned.add("updates")
        warn(
            f"{type(self.optimizer).__name__}.release_gradients: {state.label(most.p, most.name)} was updated "
            f"{most.updates} times since the last step(), once in each of several backwards.  For one update from the "
            f"sum of their gradients give accumulate={most.updates * self.accumulate}; for an update in each, call "
            f"step() after each",
            type(self.optimizer),
        )

    def discard(self) -> None:
        """Forget sums that no update has used, as zero_grad does with p.grad."""
        with self._lock:
            for one in self._released.values():
                one.summed = 0
                if one.sums is not None:
                    one.sums.clear()

    def _hand_over(self, one: ReleasedParameter) -> None:
        """Move a sum that was kept elsewhere to p.grad."""
        if one.p.grad is not None and one.p.grad._is_zerotensor():  # torch takes back none that p has outgrown
            one.p.grad = state.materialized(one.p.grad)
        if one.sums is not None and one.summed:
            if one.p.grad is None:
                one.p.grad = torch.zeros_like(one.p)
            one.sums.add(one.p.grad)
            one.sums.clear()
        one.summed = 0


class Handle:
    """The handle of released gradients, which keeps its optimizer: also a context manager, which removes the hooks at
    its end."""

    def __init__(self, optimizer: Any, release: Release) -> None:
        self.optimizer, self._release = optimizer, release

    @property
    def accumulate(self) -> int:
        """Micro-batches whose gradients are summed before an update; it may be changed."""
        return self._release.accumulate

    @accumulate.setter
    def accumulate(self, count: int) -> None:
        self._release.accumulate = count

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
        counts = [type(count) is int and count >= 0 for count in sums.values()] if isinstance(sums, dict) else [False]
        if not (norm is None or (isinstance(norm, Tensor) and norm.numel() == 1)) or not all(counts):
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


class GradientAccumulator:
    """The sum of a parameter's gradients over micro-batches, kept by an optimizer whose rule is that sum.

    In the place of the weight stands the gradient itself, which so takes the sum.

    count   the sums before this one: each draws other random bits
    """

    def __init__(
        self, make: Callable[[list[Tensor]], torch.optim.Optimizer], p: Tensor, name: Label, count: int = 0
    ) -> None:
        keeper = make([p])
        if not isinstance(getattr(keeper, "SPEC", None), str) or len(keeper.param_groups) != 1:
            raise TypeError(
                f"release_gradients: accumulator must make a generated optimizer, as optgen.accumulate."
                f"accumulator('int8') does, got {keeper!r:.80}"
            )
        self._cls, self._group = type(keeper), keeper.param_groups[0]
        self.rename(name)  # what it keeps otherwise goes by the position that it has alone
        variant = refuse_sums(self._cls, self._group, p, name)[0]
        self._zeros = {f.name: f.zero for f in variant.fields}
        self._first = {"step": 0, **dict(variant.host_states)}
        self._group["params"] = []
        self._seed, self.count = self._group["seed"], count
        self._entry: dict[str, Any] | None = None

    def rename(self, name: Label) -> None:
        """Give the parameter another name, from which its random bits follow."""
        self._group["param_names"] = [name]
        if self._group.get("overrides"):
            self._group["overrides"] = tuple((name, plan) for _, plan in self._group["overrides"])

    @_disable_dynamo
    def add(self, g: Tensor) -> None:
        """Add g to the sum; g takes the new sum, rounded to its dtype."""
        group, g = self._group, sharding.waited(g)
        group["seed"] = self._seed + self.count
        weight = g.detach()
        weight.grad = g.detach()
        group["params"] = [weight]
        states: dict[Any, Any] = {} if self._entry is None else {weight: self._entry}
        owner = Owner(self._cls, [group], states, Uninterrupted())
        try:
            Stepper().step(owner)  # one that stayed would hold the gradient
            self._entry = states[weight]
        finally:
            weight.grad = None
            group["params"] = []

    def clear(self) -> None:
        """Set the sum to 0; the next one draws other random bits.

        The next one is of a window of its own (runtime/records/keys.py): places of one window an even number of steps
        apart, as the same micro-batch of every sum would be, are all in the same half of the cell.
        """
        if self._entry is not None:
            for name, zero in self._zeros.items():
                self._entry[name].fill_(zero)
            self._entry.update(self._first)
        self.count += 1
