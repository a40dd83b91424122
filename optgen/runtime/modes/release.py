"""Updates within backward: each parameter takes its step as soon as its gradient is complete, which is then freed.

A hook of torch's runs when a gradient has been accumulated.  It steps an optimizer of that one parameter, which shares
the state, the options, the name and the position of the parameter with the optimizer that the user holds, and so makes
the same bits as an ordinary step.  It keeps tables of its own, so that each takes the fast path (fast_path.py).

What `step()` still does then: parameters that have a gradient left (because fewer micro-batches than said came, or
because they came into the optimizer after the hooks were placed).
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import torch
from torch import Tensor, nn

from optgen.runtime.checkpoint import checkpoint
from optgen.runtime.layout import plans, sharding
from optgen.runtime.modes import alone
from optgen.runtime.options import options
from optgen.runtime.records import Variant, as_float, as_int
from optgen.runtime.records.arena import Arena
from optgen.runtime.records.warn import warn
from optgen.runtime.states import state
from optgen.runtime.step import fast_path, strays

if TYPE_CHECKING:
    from optgen.runtime.optimizer import Optimizer

ClipBy = Literal["norm", "value", "previous_norm"]

CLIPS = ("norm", "value", "previous_norm")

TINY = 1e-6
"""What torch.nn.utils.clip_grad_norm_ adds to a norm before it divides by it."""


class One:
    """The optimizer of one parameter: an instance of the user's class that never saw its constructor.

    option   of its group, copied from the user's group before each step
    summed   micro-batches since the last update
    sums     keeps the sum of their gradients, where that is not p.grad itself
    trained  whether a gradient has come since the user's last step()
    updates  how many updates it has made since then
    roomy    whether a step, this or another one, needs room as large as the parameter
    """

    __slots__ = (
        "flags", "group", "name", "number", "p", "place", "roomy", "stepper", "summed", "sums", "trained", "updates",
        "variant",
    )  # fmt: skip

    def __init__(self, optimizer: Optimizer, p: Tensor, number: int, place: int, name: str | int) -> None:
        self.p, self.number, self.place, self.name = p, number, place, name
        self.group: dict[str, Any] = {}
        self.stepper = alone.part(optimizer, [self.group])
        self.stepper._first_group = number
        self.stepper._offload.expect(p)
        known = optimizer._dtypes.get(id(p))
        if known is not None:
            self.stepper._dtypes[id(p)] = known
        self.summed = self.updates = 0
        self.trained = False
        self.sums: Sums | None = None
        self.flags: object = None
        self.variant: Variant | None = None
        self.roomy = False

    def step(self, optimizer: Optimizer) -> None:
        """The update of p from p.grad, in the name of `optimizer`."""
        p, stepper = self.p, self.stepper
        self.refresh(optimizer)
        kept = optimizer.state.get(p)
        if kept is not stepper.state.get(p):
            stepper.state = defaultdict(dict) if kept is None else defaultdict(dict, {p: kept})
        stepper._update()
        stepper._room = None
        if kept is not stepper.state[p]:
            optimizer.state[p] = stepper.state[p]
        if self.roomy:
            stepper._forget_tables()
            stepper._offload.forget_tables()

    def is_alone(self, optimizer: Optimizer) -> bool:
        """Whether nothing but the optimizer, and what was made to release its gradient, refers to the parameter."""
        stepper, key = self.stepper, id(self.p)
        notes = [optimizer._dtypes, stepper._dtypes] + ([] if self.sums is None else [self.sums.notes()])
        tuples = {id(found) for known in notes if (found := known.get(key)) is not None}  # they may share one
        states = (self.p in optimizer.state) + (self.p in stepper.state)
        # its own list and the user's, the record, the argument
        cached = optimizer._fast_path.holds(self.p) + stepper._fast_path.holds(self.p)
        return sys.getrefcount(self.p) <= 4 + len(tuples) + states + cached

    def refresh(self, optimizer: Optimizer) -> None:
        """Take over the options as they are now; ValueError where the rule cannot be applied to one parameter alone."""
        theirs, group = optimizer.param_groups[self.number], self.group
        if not group:
            group["params"] = [self.p]
            group["param_names"] = [self.name]
        alone.take_over(theirs, group)
        own = group.get("overrides"), group.get("blocks")
        flags = (group["plan"], *own, options.flags_of(type(optimizer), group, tuple(self.p.shape)))
        if flags != self.flags:
            steps = refuse_sums(optimizer, group, self.p, self.name)
            self.variant = steps[0]
            self.roomy = any(temp.space == "elem" for variant in steps for temp in variant.temps)
            self.flags = flags


def _give_room(optimizer: Optimizer, ones: Iterable[One]) -> None:
    """Room on the CPU for the states of all, in one mapping by group: huge pages of many small ones go to waste."""
    sizes: dict[int, list[int]] = {}
    lacking = [one for one in ones if state.home(one.p).type == "cpu" and not optimizer.state.get(one.p)]
    for one in lacking:
        assert one.variant is not None
        sizes.setdefault(one.number, []).extend(state.sizes(one.variant, one.p, {}))
    rooms = {number: Arena(found) for number, found in sizes.items()}
    for one in lacking:
        one.stepper._room = rooms[one.number]


def refuse_sums(optimizer: Optimizer, group: dict[str, Any], p: Tensor, name: str | int) -> list[Variant]:
    """The variants of the parameter's steps, the usual one first; ValueError where its rule needs other parameters'
    gradients."""
    cls = type(optimizer)
    _, plan, variant = checkpoint.select(cls, group, p, name)
    steps = list(plans.at_steps(plan, variant, cls.FLAGS))
    for v in steps:
        if v.model_temps or any(f.space == "model" for f in v.fields):
            what = ", ".join(v.model_temps) or "states of the model"
            raise ValueError(
                f"{cls.__name__}: the update of {state.label(p, name)} needs sums over the whole model ({what}), known "
                f"only when backward has ended: gradients cannot be released.  Call step() after backward; to clip by "
                f"a norm over the model, take the rule that does not, and release_gradients(clip=..., "
                f"clip_by='previous_norm')"
            )
    return steps


class Hook:
    """What torch calls with a parameter whose gradient is complete.  It keeps no optimizer alive: a parameter lives
    longer than the optimizers that it had."""

    __slots__ = ("_release",)

    def __init__(self, release: Release) -> None:
        self._release = weakref.ref(release)

    def __call__(self, p: Tensor) -> None:
        found = self._release()
        if found is not None and found._optimizer() is not None:
            found._complete(p)

    def release(self) -> Release | None:
        """Whose it is, as long as that is there."""
        return self._release()


def _releases(p: Tensor) -> Iterator[Release]:
    """Yield the releases that have a hook on the parameter."""
    for hook in (getattr(p, "_post_accumulate_grad_hooks", None) or {}).values():
        if isinstance(hook, Hook) and (found := hook.release()) is not None:
            yield found


def _watch_clipping() -> None:
    """Have torch's clip_grad_norm_ warn where it looks for gradients that were released.

    Every trainer's clipping by norm passes through it, and nothing else can see that it finds no gradients.
    """
    module: Any = torch.nn.utils.clip_grad
    plain = getattr(module, "_clip_grads_with_norm_", None)
    if plain is None or hasattr(plain, "optgen"):
        return

    @functools.wraps(plain)
    def watched(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and not isinstance(parameters, Tensor):
            for p in parameters:
                for release in _releases(p):
                    release.warn_unclipped(p)
        return plain(parameters, *args, **kwargs)

    cast(Any, watched).optgen = True
    module._clip_grads_with_norm_ = watched


def _connect(p: Tensor) -> None:
    """Has torch call the hooks that p knows: it forgets to once conversions have swapped what is in a Parameter
    (torch.__future__.set_swap_module_params_on_conversion), and looks for them again when they are set."""
    known: Any = p
    known._post_accumulate_grad_hooks = known._post_accumulate_grad_hooks


def _materialize(p: Tensor) -> None:
    """Zeros that lie nowhere are no gradient to sum or to clip, which write it."""
    if p.grad is not None and p.grad._is_zerotensor():
        p.grad = state.materialized(p.grad)


def _unhook(hooks: dict[int, Any]) -> None:
    for hook in hooks.values():
        hook.remove()


class Handle:
    """What `Optimizer.release_gradients` returns, and what keeps its optimizer: also a context manager, which removes
    the hooks at its end."""

    def __init__(self, optimizer: Optimizer, release: Release) -> None:
        self.optimizer, self._release = optimizer, release

    def __getattr__(self, name: str) -> Any:
        if name == "_release":  # of a copy that is not built yet
            raise AttributeError(name)
        return getattr(self._release, name)

    @property
    def accumulate(self) -> int:
        """Micro-batches whose gradients are summed before an update; it may be changed."""
        return self._release.accumulate

    @accumulate.setter
    def accumulate(self, count: int) -> None:
        self._release.accumulate = count

    def remove(self) -> None:
        """Back to ordinary steps.  Sums of micro-batches that no update has used are in p.grad afterwards."""
        self._release.remove()

    def state_dict(self) -> dict[str, Any]:
        """What an exact continuation needs beside the optimizer's state dict: the norm of the last step, and how many
        sums of micro-batches each parameter has had.

        RuntimeError where sums of micro-batches are waiting: save between updates.
        """
        return self._release.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave; TypeError for anything else."""
        self._release.load_state_dict(state_dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


class Release:
    """The hooks of an optimizer, until `remove()`, or until the optimizer is gone.

    accumulate  micro-batches whose gradients are summed before an update
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module | None = None,
        *,
        accumulate: int = 1,
        accumulator: Callable[[list[Tensor]], Optimizer] | None = None,
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
        self._check_clip(owner, clip, clip_by)
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"{owner}: model must be a torch.nn.Module or None, got {type(model).__name__}")
        self._optimizer, self.accumulate = weakref.ref(optimizer), count
        self._model, self._accumulator = model, accumulator
        self._clip, self._clip_by = None if clip is None else float(clip), clip_by
        self._lock = threading.RLock()  # backward runs a thread per device
        self._ones: dict[int, One] = {}
        self._hooks: dict[int, Any] = {}
        weakref.finalize(self, _unhook, self._hooks).atexit = False
        self._norms: dict[int, Tensor] = {}
        self._previous: Tensor | None = None
        self._counts: dict[str | int, int] = {}
        self._looked = False
        self._warned: set[str] = set()
        self._refuse_wrappers()
        wanted = self._wanted()
        if not wanted:
            raise ValueError(f"{owner}: no trainable parameter of this optimizer is in the model that was given")
        self.refuse_released([p for p, *_ in wanted])
        ones = [One(optimizer, *found) for found in wanted]
        for one in ones:
            one.refresh(optimizer)
            self._give_sums(one)
        _give_room(optimizer, ones)
        optimizer._fast_path = fast_path.FastPath()  # of steps over parameters that get theirs within backward now
        for one in ones:
            self._place(one)
        if clip is None:
            _watch_clipping()

    @property
    def optimizer(self) -> Optimizer:
        """Whose steps these are; it is there whenever this is asked for one."""
        found = self._optimizer()
        assert found is not None
        return found

    def refuse_released(self, params: Iterable[Tensor]) -> None:
        """RuntimeError where another optimizer updates one of the parameters within backward: that one would free the
        gradient, and this one would never see any."""
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

    @staticmethod
    def _check_clip(owner: str, clip: float | None, clip_by: str) -> None:
        if clip_by in ("global_norm", "model_norm", "total_norm"):
            raise ValueError(
                f"{owner}: clip_by={clip_by!r}: the norm over the model is known only when backward has ended, and by "
                f"then the parameters are updated; clip_by='previous_norm' takes the norm of the step before, "
                f"clip_by='norm' each parameter's own"
            )
        if clip_by not in CLIPS:
            raise ValueError(f"{owner}: clip_by must be one of {', '.join(CLIPS)}, got {clip_by!r}")
        if clip is not None:
            number = None if isinstance(clip, bool) else as_float(clip)
            if number is None or not number > 0:
                raise ValueError(f"{owner}: clip must be a number > 0, or None, got {clip!r}")

    def _refuse_wrappers(self) -> None:
        """NotImplementedError for wrappers that reduce gradients over ranks after the hooks have run."""
        places = (
            ("torch.nn.parallel.distributed", "DistributedDataParallel"),
            ("torch.distributed.fsdp", "FullyShardedDataParallel"),
        )
        found = (getattr(sys.modules.get(module), name, None) for module, name in places)
        kinds = tuple(kind for kind in found if isinstance(kind, type))
        wrappers: list[Any] = [] if self._model is None else [m for m in self._model.modules() if isinstance(m, kinds)]
        if not wrappers and torch.distributed.is_available() and torch.distributed.is_initialized():
            ours = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
            everything = [o for o in gc.get_objects() if issubclass(type(o), kinds)]
            wrappers = [m for m in everything if any(id(p) in ours for p in m.parameters())]
        if wrappers:
            raise NotImplementedError(
                f"{type(self.optimizer).__name__}.release_gradients: {type(wrappers[0]).__name__} sums gradients over "
                f"ranks after the hooks of the parameters have run, in buffers of its own: ranks would part, and no "
                f"memory would be saved.  Use torch.distributed.fsdp.fully_shard, or step() as usual"
            )

    def _wanted(self) -> list[tuple[Tensor, int, int, str | int]]:
        """(parameter, number of its group, place in it, name) of all that are to be released."""
        members = None if self._model is None else {id(p) for p in self._model.parameters()}
        found = []
        position = 0
        for number, group in enumerate(self.optimizer.param_groups):
            names = group.get("param_names")
            for place, p in enumerate(group["params"]):
                if p.requires_grad and (members is None or id(p) in members):
                    found.append((p, number, place, position if names is None else names[place]))
                position += 1
        return found

    def _give_sums(self, one: One) -> None:
        if self._accumulator is not None and one.sums is None:
            one.sums = Sums(self._accumulator, one.p, one.name, self._counts.get(one.name, 0))

    def _place(self, one: One) -> None:
        p = one.p
        self._ones[id(p)] = one
        if id(p) not in self._hooks:
            register: Callable[..., Any] = p.register_post_accumulate_grad_hook
            self._hooks[id(p)] = register(Hook(self))

    # -- within backward ------------------------------------------------------------------------------

    def _complete(self, p: Tensor) -> None:
        """p.grad is complete for this backward; where something is refused, it stays and nothing has changed."""
        with self._lock, torch.no_grad():
            self.optimizer._refuse_in_evaluation("backward() with released gradients")
            self.optimizer._see_marks()
            one = self._ones.get(id(p))
            if one is None or p.grad is None:
                return
            if not self._looked:  # the model may have been wrapped since
                self._refuse_wrappers()
                self._looked = True
            one = self._current(one)
            one.trained = True
            _materialize(p)
            if one.summed + 1 < self.accumulate:
                if one.sums is not None:
                    one.sums.add(p.grad)
                    p.grad = None
                one.summed += 1
                return
            self._update(one)

    def _current(self, one: One) -> One:
        """The parameter's record, made anew where it stands elsewhere now, or has another name: a checkpoint's."""
        groups = self.optimizer.param_groups
        if one.number < len(groups):
            params, names = groups[one.number]["params"], groups[one.number].get("param_names")
            named = names is None or (one.place < len(names) and names[one.place] == one.name)
            if one.place < len(params) and params[one.place] is one.p and named:
                return one
        self.attach()
        return self._ones.get(id(one.p), one)

    def _update(self, one: One) -> None:
        """Clip, step, free."""
        p = one.p
        assert p.grad is not None
        if one.sums is not None and one.summed:
            one.sums.add(p.grad)
            one.sums.clear()
            one.summed = 0
        self._clip_one(one)
        one.step(self.optimizer)
        p.grad = None
        one.summed = 0
        one.updates += 1

    def _clip_one(self, one: One) -> None:
        """In place, and as torch.nn.utils does it."""
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
            if self._previous is not None:
                before = self._previous.to(own.device)
                factor = torch.where(before.isfinite(), torch.clamp(clip / (before + TINY), max=1.0), factor)
        sharding.local(p.grad).mul_(factor)

    # -- between backwards ----------------------------------------------------------------------------

    def attach(self) -> None:
        """Hooks for parameters that came, were made trainable or replaced; those that left lose theirs."""
        with self._lock:
            wanted = self._wanted()
            left = self._ones.keys() - {id(p) for p, *_ in wanted}
            self.refuse_released([p for p, *_ in wanted if id(p) not in self._ones])
            for p, number, place, name in wanted:
                old = self._ones.get(id(p))
                if old is not None and (old.number, old.place, old.name) == (number, place, name):
                    continue
                one = One(self.optimizer, p, number, place, name)
                one.refresh(self.optimizer)
                if old is not None:
                    one.summed, one.trained, one.updates = old.summed, old.trained, old.updates
                    if old.summed or old.name == name:
                        one.sums = old.sums
                        if one.sums is not None:
                            one.sums.rename(name)
                self._give_sums(one)
                self._place(one)
            for key in left:
                self._hooks.pop(key).remove()
                self._hand_over(self._ones.pop(key))

    def step(self) -> None:
        """What `Optimizer.step` does now: the gradients that are still there, and the end of this step's norm."""
        left = [vars(self.optimizer).pop(name, None) for name in ("grad_scale", "found_inf")]
        if any(value is not None for value in left):
            raise RuntimeError(SCALED.format(type(self.optimizer).__name__))
        with self._lock, torch.no_grad():
            before = list(self._ones.values())
            for one in before:
                if one.p.grad is not None:  # maybe because no hook was called
                    _connect(one.p)
            self.attach()
            self.optimizer._say_strays(self._look())
            for one in self._ones.values():
                if one.summed or one.p.grad is not None:
                    self._hand_over(one)
                    self._clip_one(one)
            if any(p.grad is not None for group in self.optimizer.param_groups for p in group["params"]):
                self.optimizer._update()
            for one in (*before, *self._ones.values()):  # those that were frozen since their gradient came as well
                one.p.grad = None
                one.summed = 0
            if self._norms:
                order = [self._norms[id(p)] for p, *_ in self._wanted() if id(p) in self._norms]
                self._previous = torch.linalg.vector_norm(torch.stack([n.to(order[0].device) for n in order]))
                self._norms.clear()

    def _look(self) -> strays.Found:
        """What came since the last step, and which parameters no gradient can come for; asks anew from now on."""
        ones = list(self._ones.values())
        lacking = [one for one in ones if not one.trained and one.p.grad is None]
        found = strays.Found(len(ones) - len(lacking))
        if lacking and self.optimizer._strays is not None and not self._offload_holds():
            alone = {id(one.p) for one in lacking if one.is_alone(self.optimizer)}
            if alone:
                found.places = {e.position for e in self.optimizer._entries() if id(e.p) in alone}
                found.others_live = any(not one.is_alone(self.optimizer) for one in ones if one.trained)
        self._warn_repeated(ones)
        for one in ones:
            one.trained, one.updates = False, 0
        return found

    def _warn_repeated(self, ones: Iterable[One]) -> None:
        """Warn, once, where a parameter was updated several times since the last step(): in each of several backwards.

        A loop without step() is not warned of: each of its backwards is meant to update.
        """
        most = max(ones, key=lambda one: one.updates, default=None)
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

    def warn_unclipped(self, p: Tensor) -> None:
        """Warn, once, where gradients are to be clipped of which that of `p` has been released, without clip=."""
        one, optimizer = self._ones.get(id(p)), self._optimizer()
        updated = one is not None and one.updates > 0 and p.grad is None
        if not updated or optimizer is None or self._clip is not None or "clip" in self._warned:
            return
        self._warned.add("clip")
        warn(
            f"{type(optimizer).__name__}.release_gradients: clip_grad_norm_ found no gradients and clipped nothing: "
            f"they were released within backward.  Give release_gradients(..., clip=...), and turn the other clipping "
            f"off (max_grad_norm=0 in transformers)",
            type(optimizer),
        )

    def _offload_holds(self) -> bool:
        """Whether what moves parameters to the host and back refers to them, too."""
        return any(group.get("offload") for group in self.optimizer.param_groups)

    def discard(self) -> None:
        """Forget sums that no update has used: what zero_grad means for p.grad."""
        with self._lock:
            for one in self._ones.values():
                one.summed = 0
                if one.sums is not None:
                    one.sums.clear()

    def _hand_over(self, one: One) -> None:
        """A sum that was kept elsewhere goes to p.grad."""
        if one.sums is not None and one.summed:
            if one.p.grad is None:
                one.p.grad = torch.zeros_like(one.p)
            one.sums.add(one.p.grad)
            one.sums.clear()
        _materialize(one.p)
        one.summed = 0

    def remove(self) -> None:
        """Back to ordinary steps.  Sums of micro-batches that no update has used are in p.grad afterwards."""
        with self._lock, torch.no_grad():
            for hook in self._hooks.values():
                hook.remove()
            self._hooks.clear()
            for one in self._ones.values():
                self._hand_over(one)
            self._ones.clear()
            if self.optimizer._release is self:
                self.optimizer._release = None

    # -- checkpoints ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What an exact continuation needs beside the optimizer's state dict: the norm of the last step, and how many
        sums of micro-batches each parameter has had, by name (by position where it has none).

        RuntimeError where sums of micro-batches are waiting: save between updates.
        """
        if any(one.summed for one in self._ones.values()):
            raise RuntimeError("release_gradients: micro-batches are waiting for their update; save after step()")
        found: dict[str, Any] = {"previous_norm": None if self._previous is None else self._previous.clone()}
        with self._lock:
            self.attach()
            sums = {one.name: one.sums.count for one in self._ones.values() if one.sums is not None}
        return {**found, "sums": sums} if sums else found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave; TypeError for anything else."""
        norm, sums = state_dict.get("previous_norm", self), state_dict.get("sums", {})
        counts = [type(count) is int and count >= 0 for count in sums.values()] if isinstance(sums, dict) else [False]
        if norm is self or not (norm is None or (isinstance(norm, Tensor) and norm.numel() == 1)) or not all(counts):
            raise TypeError(
                f"release_gradients: expected what the handle's state_dict() gave, {{'previous_norm': a tensor of one "
                f"element or None, 'sums': numbers by name}}, got {state_dict!r:.80}"
            )
        self._previous = None if norm is None else norm.detach().to(torch.float32).reshape(()).clone()
        self._counts = dict(sums)
        with self._lock:
            self.attach()
            for one in self._ones.values():
                if one.sums is not None:
                    one.sums.count = sums.get(one.name, one.sums.count)


SCALED = (
    "{}.step: its gradients were released within backward, where the factor of a GradScaler was still in them, and a "
    "step that overflows could not be skipped any more.  Train in bf16, which needs no GradScaler, or call remove() on "
    "the handle of release_gradients"
)


class Sums:
    """The sum of a parameter's gradients over micro-batches, kept by an optimizer whose rule is that sum.

    In the place of the weight stands the gradient itself, which so takes the sum.

    count   the sums before this one: each draws other random bits
    """

    __slots__ = ("_entry", "_first", "_keeper", "_seed", "_zeros", "count")

    def __init__(self, make: Callable[[list[Tensor]], Optimizer], p: Tensor, name: str | int, count: int = 0) -> None:
        self._keeper = keeper = make([p])
        if not isinstance(getattr(keeper, "SPEC", None), str) or len(keeper.param_groups) != 1:
            raise TypeError(
                f"release_gradients: accumulator must make a generated optimizer, as optgen.accumulate."
                f"accumulator('int8') does, got {keeper!r:.80}"
            )
        group = keeper.param_groups[0]
        self.rename(name)  # what it keeps otherwise goes by the position that it has alone
        variant = refuse_sums(keeper, group, p, name)[0]
        self._zeros = {f.name: f.zero for f in variant.fields}
        self._first = {"step": 0, **dict(variant.host_states)}
        group["params"] = []
        self._seed, self.count = group["seed"], count
        self._entry: dict[str, Any] | None = None

    def rename(self, name: str | int) -> None:
        """The parameter is called otherwise from now on, by which its random bits go."""
        group = self._keeper.param_groups[0]
        group["param_names"] = [name]
        if group.get("overrides"):
            group["overrides"] = tuple((name, plan) for _, plan in group["overrides"])

    def add(self, g: Tensor) -> None:
        """sum += g; g takes the new sum, rounded to its dtype."""
        keeper, g = self._keeper, sharding.waited(g)
        keeper.param_groups[0]["seed"] = self._seed + self.count
        weight = g.detach()
        weight.grad = g.detach()
        keeper.param_groups[0]["params"] = [weight]
        keeper.state = defaultdict(dict, {} if self._entry is None else {weight: self._entry})
        try:
            keeper._update()
            self._entry = keeper.state[weight]
        finally:
            weight.grad = None
            keeper.param_groups[0]["params"] = []
            keeper._reset_caches()  # they know the gradient, which is to be freed
            keeper.state = defaultdict(dict)

    def notes(self) -> dict[int, tuple[Tensor, torch.dtype]]:
        """What refers to the parameter here."""
        return self._keeper._dtypes

    def clear(self) -> None:
        """The sum is 0 again, and the next one draws other random bits.

        The next one is of a window of its own (runtime/records/keys.py): places of one window an even number of steps
        apart, as the same micro-batch of every sum would be, are all in the same half of the cell.
        """
        for name, zero in self._zeros.items():
            if self._entry is not None:
                self._entry[name].fill_(zero)
        if self._entry is not None:
            self._entry.update(self._first)
        self.count += 1
