"""The base class of every generated optimizer: a torch.optim.Optimizer whose states may be quantized."""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import ParamsT, _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from optgen.runtime.checkpoint import checkpoint, inputs, reset, weights
from optgen.runtime.layout import plans, sharding
from optgen.runtime.layout.fp8_weight import Fp8Weight, dtype_of, kept_without
from optgen.runtime.layout.plans import Label, PlanOption
from optgen.runtime.modes import away, offload, release, watch
from optgen.runtime.modes import views as of_views
from optgen.runtime.options import blocks as of_rows
from optgen.runtime.options import entries, options
from optgen.runtime.options import overrides as rules
from optgen.runtime.options.entries import Entry, Owner
from optgen.runtime.records import Flag, Hyper
from optgen.runtime.records.uninterrupted import Uninterrupted
from optgen.runtime.records.warn import warn
from optgen.runtime.states import low_bits, memory, state
from optgen.runtime.states.views import ViewTensors
from optgen.runtime.step import admit, stepper

OTHERS = """
The other arguments are those of every generated optimizer: help(optgen.runtime.Optimizer).
Raises ValueError for a number out of its range and TypeError for what is no number, before anything is made."""
"""The end of the docstring of every generated class."""


Loaded = Sequence[tuple[Any, checkpoint.Loaded]]
"""Optimizers of one rule, each with the groups and states that it takes over."""


class Checkpointed(torch.optim.Optimizer):
    """The base of optimizers of one rule and of several: state dicts, full weights, inputs, plans and memory."""

    feed, scale_rows = inputs.feed, weights.scale_rows
    offload_states, reload_states = away.offload_states, away.reload_states
    reset_states = reset.reset_states

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Let hooks and profilers see the steps of a class as torch does, where there are any."""
        seen = torch.optim.Optimizer.profile_hook_step(func)

        @functools.wraps(func)
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            own = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
            hooks = own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks
            return (seen if hooks or torch.autograd.profiler._is_profiler_enabled else func)(self, *args, **kwargs)

        return step

    @property
    def _members(self) -> Sequence[Any]:
        """The optimizers of one rule: this one, or its parts."""
        return [self]

    def _read(self, state_dict: Mapping[str, Any]) -> Loaded:
        """Return each of these with what it takes over of a state dict; ValueError if that does not fit."""
        return [(one, read(one, state_dict)) for one in self._members]

    def _take(self, loaded: Loaded) -> None:
        """Go on with groups and states that were read."""
        for one, found in loaded:
            take(one, found)

    def _matched(self) -> Iterator[tuple[Any, Entry, Entry]]:
        """Yield, by parameter, the optimizer of one rule that steps it, its entry there, and its entry here."""
        own = {id(entry.p): (one, entry) for one in self._members for entry in one._entries()}
        return ((*own[id(entry.p)], entry) for entry in entries.of(self.param_groups))

    def _refuse_midway(self, action: str, stepping: bool = False) -> None:
        for one in self._members:
            what = f"{type(one).__name__}.{action}"
            one._offload.arrive()
            if not stepping and one._release is not None and one._release.sums.noted:
                raise RuntimeError(f"{what} before the end of a step of sums='previous': call step() first")
            if one._uphill:
                raise RuntimeError(f"{what} between the steps of SAM: call second_step() first")
            if torn := one._uninterrupted.torn:
                raise RuntimeError(
                    f"{what}: an error has broken off the last step, which had changed {checkpoint.some(torn)}, in "
                    f"whole or in part, and no other parameter: load a checkpoint into the model and into the "
                    f"optimizer (load_state_dict)"
                )

    def _refuse_unready(self, action: str) -> None:
        self._refuse_midway(action, stepping=True)
        for one in self._members:
            if one._evaluating:
                raise RuntimeError(f"{type(one).__name__}.{action} in evaluation: call train() first")
            if one._offload.away:
                where = "while its states are in host memory"
                raise RuntimeError(f"{type(one).__name__}.{action} {where}: call reload_states() first")

    def state_dict(self, weights_only: bool = False) -> dict[str, Any]:
        """Return the state dict as torch does, with options as Python numbers.

        weights_only  nothing of states but what belongs to the weights: low bits, masters.  Beside the model's state
                      dict these are the full weights; `load_state_dict` takes them (the model first), and moments,
                      counts of steps and options stay as they are

        It is for `load_state_dict` of the same rules.  Codes stand under names of their own (`exp_avg_codes`), so that
        torch.optim does not take them for states: `dense_state_dict` is the form that torch.optim loads.
        Between `eval()` and `train()` it has the weights of training too; the optimizer that loads it is in evaluation,
        and its `train()` puts them into the model.  RuntimeError between the steps of SAM.
        Entries of the user's own in `state` are left out, with a warning.
        """
        self._refuse_midway("state_dict()")
        found = self._without_own_entries(super().state_dict())
        owners = {id(group): type(one) for one in self._members for group in one.param_groups}
        for cls in dict.fromkeys(owners.values()):
            found = inputs.whole(cls, found)
        for group, saved in zip(self.param_groups, found.get("param_groups", ()), strict=False):  # or as hooks left it
            if isinstance(saved, dict):
                saved |= options.in_plain_numbers(owners[id(group)], saved)
        return weights.without_states(self, found) if weights_only else found

    def _without_own_entries(self, found: dict[str, Any]) -> dict[str, Any]:
        """Leave entries of the user's own out of a state dict, which no load would take, with one warning."""
        states, present = found.get("state", {}), dict[Any, Any](self.state)  # or as hooks left it
        beside = [key for key, value in present.items() if not isinstance(key, Tensor) and states.get(key) is value]
        for key in beside:
            del states[key]
        left = [f"{key!r}" for key in beside]
        for one, entry, whole in self._matched():
            kept = states.get(whole.position)
            if isinstance(kept, dict) and isinstance(entry.p, Fp8Weight):
                kept = states[whole.position] = kept_without(kept)
            if isinstance(kept, dict) and (own := kept.keys() - checkpoint.keys_of(type(one), entry)):
                states[whole.position] = {key: value for key, value in kept.items() if key not in own}
                left += [f"{key!r} of {state.label(entry.p, entry.name)}" for key in sorted(own, key=str)]
        if left:
            warn(
                f"{type(self).__name__}.state_dict: left out {len(left)} entries of your own in `state`, as {left[0]}: "
                f"keep them elsewhere",
                type(self._members[0]),
            )
        return found

    def dense_state_dict(self) -> dict[str, Any]:
        """Return a state dict with fp32 tensors under torch's names, which torch.optim and every plan can load.

        What torch has no place for (the weights' low halves, the seed, the plan) is left out: see full_weights.  In
        evaluation the weights of training are in it, fp32.
        """
        self._refuse_midway("dense_state_dict()")
        numbers, groups, dense = count(), [], {}
        for group in self.param_groups:
            packed = {key: value for key, value in group.items() if key not in options.OWN}
            groups.append({**packed, "params": [*islice(numbers, len(group["params"]))]})
        with torch.no_grad():
            for one, entry, whole in self._matched():
                if kept := state.of(one.state, entry.p):
                    _, plan, variant = checkpoint.select(type(one), entry.group, entry.p, entry.name)
                    state.check(variant, entry.p, kept, entry.name)
                    dense[whole.position] = checkpoint.dense_entry(plan, variant, entry.p, kept)
        return {"state": dense, "param_groups": groups}

    def full_weights(self) -> list[Tensor]:
        """Return the weights at full precision, fp32, in the order of the groups.

        In evaluation they are those to evaluate with, before they are rounded to the model's.
        Frozen ones that fp32 does not hold (integers, complex numbers, fp64) are copied as they are.
        """
        self._refuse_midway("full_weights()")
        with torch.no_grad():
            return [weights.of_entry(one, entry) for one, entry, _ in self._matched()]

    def master_state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return the model's state dict with its weights at full precision: fp32, for `fp32_model.load_state_dict`.

        Names are the model's own, tied weights under all of theirs.  Parameters that are not this optimizer's and
        floating buffers keep their values (fp32 where they are narrower); all else is as it is.  Tensors are copies,
        on their parameters' devices.  In evaluation the weights are those to evaluate with.
        RuntimeError where a weight was changed by something else and no longer fits what is kept of it; ValueError for
        a model none of whose parameters is this optimizer's.
        """
        self._refuse_midway("master_state_dict()")
        _warn_of_lost_bits(type(self._members[0]), model)
        return weights.of_model(self, model)

    def load_master_state_dict(
        self, model: torch.nn.Module, state_dict: Mapping[str, Any], strict: bool = True
    ) -> None:
        """Set the model's weights, and the bits of them that this optimizer keeps, from a state dict of any floating
        dtype; fp32 loses nothing that the plan can hold.  Other states (moments) stay as they are.

        strict   refuse names that are missing or that the model does not have
        Before the first step the bits wait beside the parameters (those of DTensors in their states) until that step
        takes them.  All is checked first: ValueError lists what does not fit, and nothing has changed.
        """
        self._refuse_unready("load_master_state_dict()")
        weights.load(self, model, state_dict, strict)

    def plans(self) -> dict[Label, str]:
        """Return the plan that each parameter is kept under, by name (by position over all groups where it has none).

        ValueError where two parameters of one name are kept under different plans.
        """
        found: dict[Label, str] = {}
        for one, entry, whole in self._matched():
            plan = one._plan_of(entry)
            if entry.p.requires_grad and found.setdefault(whole.name, plan) != plan:
                raise ValueError(
                    f"{type(self).__name__}: two parameters are called {whole.name!r}, and they are kept under "
                    f"{found[whole.name]} and {plan}: give them different names"
                )
        return found

    def next_graph(self) -> int | None:
        """Count the step that a CUDA graph is about to make, and send its numbers to the device (capturable="host").

        Return which one to replay, in the order of captures; or None, and nothing has changed, if none of them is the
        step that comes next: it is of another kind, or parameters, states or options are others than at the capture.
        """
        self._refuse_unready("next_graph()")
        found = [(one._owner(), one._stepper.graphs) for one in self._members]
        for number, graphs in enumerate(zip(*(graphs for _, graphs in found), strict=False)):
            pairs = [(graph, owner, graph.prepared(owner)) for graph, (owner, _) in zip(graphs, found, strict=True)]
            if all(ready is not None for *_, ready in pairs):
                for graph, owner, ready in pairs:
                    graph.send(owner, ready or ())
                return number
        return None

    def views(self, p: Tensor) -> dict[str, ViewTensors]:
        """Return the views of a parameter by name, such as "mxfp8_rows": tensors that each step writes.

        A view that is missing, or was made of another value of the weight, is made now.  ValueError where the plan
        makes none, or the parameter cannot have one.
        """
        for one, entry, _ in self._matched():
            if entry.p is p:
                return of_views.of(one, entry)
        raise ValueError(f"{type(self).__name__}.views: this tensor is none of its parameters")

    def use_views(self, model: torch.nn.Module, view: str = "mxfp8_rows") -> of_views.ViewHandle:
        """Let each nn.Linear of the model compute with the view of its weight; gradients are those of the weight.

        A forward whose weight was written to since the last step raises RuntimeError: call this again then.  Returns a
        handle; its `remove()` lets the layers compute with the weights.
        """
        return of_views.use(self, model, view)

    def memory(self) -> memory.Memory:
        """Return the bytes of the trainable weights and of their states, made already or not yet."""
        measured = []
        for one, entry, whole in self._matched():
            if (kept := state.of(one.state, entry.p)) or entry.p.requires_grad:
                variant = checkpoint.select(type(one), entry.group, entry.p, entry.name)[2]
                measured.append(memory.measure(entry.p, whole.name, one._plan_of(entry), variant, kept or {}))
        return memory.Memory(tuple(measured))


class Optimizer(Checkpointed):
    """The base of every generated optimizer: everything but its numbers.

    Options beyond the hyper-parameters, per group or for all:

    plan      how states and weights are stored: a plan's name, or None for the default
    overrides what single parameters are stored under instead: {pattern of names, "numel < N" or class of modules: a
              plan's name}, the first that holds wins; "fp32" keeps states in fp32, and the weight no less precise than
              `plan` does.  Groups that are added later follow it too; each may have one of its own
    blocks    of rules that have statistics of blocks of rows: into how many blocks of consecutive rows single matrices
              fall, {the same keys: a number}; 1 is the whole matrix.  Matrices without have a block for each row.  In
              Muon and rules like it each block is a matrix, and there is one, but of a stack [experts, rows, columns];
              there it may be the numbers of rows, {"*.qkv_proj.weight": (4096, 1024, 1024)}
    module    the model that the parameters are of, where `overrides` or `blocks` name classes of modules, or the
              parameters have no names; it is not kept
    backend   "auto" (Triton on GPUs; C++ on CPUs, compiled at the first step; eager torch where those are missing),
              "reference" (eager torch), "triton" or "cpp"; OPTGEN_BACKEND in the environment replaces "auto"
    seed      of the stochastic rounding; the same bits follow from the same seed, parameter names (positions
              where parameters have none) and steps, in any order or grouping
    maximize  step along the gradient, not against it
    capturable  count steps on the device and read nothing there, so that a CUDA graph may hold the step; numbers given
              as tensors on the device stay tensors, the others are part of the graph.  "host": the host counts, and
              `next_graph()` sends the numbers of each step before a replay
    offload   keep the states in host memory and let the host update the weights of an accelerator
    stagger   of rules that do more at every k-th step, such as new bases of matrices: let each parameter do so at steps
              of its own (by its position over all groups), so that no step does it for all but the first
    workspace of rules with functions of whole matrices: bytes, or as in "512MiB" (the default), that matrices take
              between two sweeps at a time; a batch of products has half of it
    replicas  the process group of ranks that hold the same parameters and gradients, such as `ddp.process_group`: each
              matrix of such rules is worked on by one of them, and the results go to all, with the bits that each would
              have found.  Parameters that are replicated DTensors say so themselves.  Neither saved nor copied
    """

    SPEC: ClassVar[str]
    HYPERS: ClassVar[tuple[Hyper, ...]]
    FLAGS: ClassVar[tuple[Flag, ...]] = ()
    PLANS: ClassVar[tuple[str, ...]]
    DEFAULT_PLAN: ClassVar[str]
    BLOCKS: ClassVar[str] = ""
    INPUTS: ClassVar[tuple[str, ...]] = ()
    evaluation: ClassVar[Callable[..., Tensor] | None] = None
    eval, train = weights.eval, weights.train

    _warned_of_stack, _all_given = False, True
    """The second: False while the constructor adds groups: it looks for shared memory once, not for every group."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if vars(cls).get("PLANS"):
            cls.DEFAULT_PLAN = plans.USUAL if plans.USUAL in cls.PLANS else cls.PLANS[0]
        if "PLANS" in vars(cls):
            _complete(cls)

    def __init__(
        self,
        params: ParamsT,
        hypers: Mapping[str, Any],
        /,
        *,
        maximize: bool = False,
        plan: PlanOption = None,
        overrides: rules.Given = None,
        blocks: rules.Given = None,
        module: torch.nn.Module | None = None,
        backend: str = "auto",
        seed: int = 0,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool | str = False,
        differentiable: bool = False,
        offload: bool = False,
        stagger: bool = False,
        workspace: int | str | None = None,
        replicas: Any = None,
        **unknown: Any,
    ) -> None:
        _refuse_unknown(type(self), unknown | ({} if self.BLOCKS or blocks is None else {"blocks": blocks}))
        given = {"maximize": maximize, **hypers, "plan": plan, "backend": backend, "seed": seed, "foreach": foreach}
        asked: dict[str, Any] = {"fused": fused, "capturable": capturable or None, "offload": offload or None}
        asked |= {"differentiable": differentiable, "stagger": stagger or None, "workspace": workspace}
        defaults = {**options.check(type(self), {**given, **asked}), "format": checkpoint.FORMAT}
        defaults |= {options.MODE: True} if self.evaluation is not None else {}
        self._reset_caches()
        tables = None if module is None else rules.Tables(type(self).__name__, module)
        self._rules = rules.Overrides(type(self), overrides, tables)
        self._blocks = of_rows.BlockOverrides(type(self), blocks, tables)
        self._all_given = False
        super().__init__(params, defaults)
        self.state = state.States(dict)
        self._all_given = True
        device = next((entry.p.device for entry in self._entries()), torch.device("cpu"))
        self._replicas = None if replicas is None else sharding.mesh_of(replicas, device)
        admit.refuse_shared_memory(type(self), self._entries())
        labels, found = [entry.name for entry in self._entries()], [entry.p for entry in self._entries()]
        for given_rules in (self._rules, self._blocks):
            given_rules.refuse_unused(found, labels)
            given_rules.keep()
        for model in [module] if module is not None else low_bits.sharded_models(found):
            _warn_of_lost_bits(type(self), model)
        admit.warn_of(type(self), list(self._entries()), module)

    def _reset_caches(self) -> None:
        """Reset what is derived from parameters and groups, and neither copied nor pickled."""
        self._stepper = stepper.Stepper()
        self._offload = offload.Offload()
        self._idle = 0  # steps without a gradient
        self._release: release.Release | None = None
        self._watch: watch.Watch | None = None
        self._uninterrupted = Uninterrupted()
        self._uphill = False  # between the two steps of SAM
        self._replicas = None
        self._rules, self._blocks = rules.Overrides(type(self)), of_rows.BlockOverrides(type(self))

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True if a GradScaler hands over its scale, as attributes `grad_scale` and `found_inf`: with released
        gradients, so that `step()` can refuse it.  The scaler itself would look for gradients that are gone."""
        return self._release is not None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._reset_caches()
        self._offload.away = state.pop("_away", False)
        super().__setstate__(state)
        for group in self.param_groups:
            if line := checkpoint.other_form(group):
                raise ValueError(line)
        own = {h.name: h.default for h in self.HYPERS} | {f.name: f.default for f in self.FLAGS if not f.derived}
        self.defaults |= own | self.defaults  # the rule may have got more since
        self.defaults.pop("differentiable", None)  # torch puts it there; it would wander into new groups
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        for entry in self._entries():
            self._stepper.dtypes[id(entry.p)] = (entry.p, dtype_of(entry.p))
        if self._offload.away or any(group.get("offload") for group in self.param_groups):
            self._offload.settle(self.param_groups)  # copies of parameters do not know their homes

    def __repr__(self) -> str:
        lines = [f"    group {i}: {_described(type(self), group)}" for i, group in enumerate(self.param_groups)]
        return "\n".join([f"{type(self).__name__} (", *lines, ")"])

    # -- groups and parameters ------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does; options are checked, and the plan is settled, before anything changes."""
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group)}")
        cls, params = type(self), param_group["params"]
        if not isinstance(params, (Tensor, set)):
            params = list(params)
        tensors = _admitted(cls, params)
        first = sum(len(g["params"]) for g in self.param_groups)
        names = entries.names(tensors, params, param_group.get("param_names"), first)
        settled = self._settled(param_group, tensors, names)
        group, number = {**self.defaults, **settled}, len(self.param_groups)
        self._admit([Entry(p, group, number, i, first + i, names[i]) for i, p in enumerate(tensors)])
        super().add_param_group({**settled, "params": params})
        self._stepper.dtypes.update((id(p), (p, dtype_of(p))) for p in tensors)
        if self._release is not None:
            self._release.attach()
        if self._all_given:
            admit.warn_of(cls, [e for e in self._entries() if e.group is self.param_groups[-1]])

    def _settled(self, param_group: dict[str, Any], tensors: list[Tensor], names: list[Label]) -> dict[str, Any]:
        """Return a group that is to come with its options checked, its plan, and those of single parameters."""
        cls, apart = type(self), ("overrides", "blocks") if self.BLOCKS else ("overrides",)
        own = {key: value for key, value in param_group.items() if key not in apart}
        found = options.check(cls, {**self.defaults, **own})
        found |= options.rounds(cls, found) | options.rates(cls, own, found, self.defaults)
        found["plan"] = options.record_plan(cls, found["plan"], tensors)
        options.warn_unknown(cls, own)
        found |= rules.decided(cls, self._rules, param_group.get("overrides"), found["plan"], tensors, names)
        if self.BLOCKS:
            found |= of_rows.decided(cls, self._blocks, param_group.get("blocks"), tensors, names)
        return own | found

    def _admit(self, new: list[Entry]) -> None:
        """Raise an error for parameters that cannot be stepped."""
        cls = type(self)
        if self._all_given:
            admit.refuse_shared_memory(cls, [*self._entries(), *new])
        stack = admit.refuse_vectors(cls, new)
        if stack is not None and not self._warned_of_stack:
            self._warned_of_stack = True
            admit.warn_stack(cls, stack)
        admit.refuse_layouts(cls, new)
        if self._release is not None:
            self._release.refuse_released(entry.p for entry in new if entry.p.requires_grad)

    def _entries(self) -> Iterator[Entry]:
        return entries.of(self.param_groups)

    def _plan_of(self, entry: Entry) -> str:
        return plans.chosen(type(self), entry.group, entry.name).shown

    def _owner(self) -> Owner:
        """Return the class, the groups and the states as they are now."""
        return Owner(type(self), self.param_groups, self.state, self._uninterrupted, self._replicas)

    # -- step -----------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient.

        closure   computes the loss and the gradients anew; it runs first, and its value is returned.
        Gradients are not changed.  Errors about parameters, gradients, states and options come before any change.
        """
        self._refuse_unready("step()")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._release is None:
            self._update()
        else:
            self._release.step()
        if self._watch is not None:
            self._watch.finish()
        self._count_idle()
        return loss

    @_disable_dynamo
    def _update(self) -> None:
        """Make the step; torch.compile leaves it as it is (one graph break)."""
        if self._watch is not None:
            self._watch.begin(self._owner())
        self._offload.step(self._owner(), self._stepper)

    @_disable_dynamo
    def _count_idle(self) -> None:
        """Warn, once, if two steps in a row have found no gradient, and none has ever come."""
        if self.state:
            return
        self._idle = 0 if any(entry.p.grad is not None for entry in self._entries()) else self._idle + 1
        if self._idle == 2:
            admit.warn_untrained(type(self), self.param_groups, self._idle)

    release_gradients = release.release_gradients
    watch = watch.watch

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients as torch does; sums of micro-batches that are kept elsewhere go with them."""
        super().zero_grad(set_to_none)
        if self._release is not None:
            self._release.discard()

    # -- evaluation -----------------------------------------------------------------------------------

    @property
    def _evaluating(self) -> bool:
        """True between `eval()` and `train()`, of rules that have weights for evaluation."""
        return self.evaluation is not None and any(group.get(options.MODE) is False for group in self.param_groups)

    def __getstate__(self) -> dict[str, Any]:
        self._refuse_midway("copying")
        own = {"_rules": self._rules, "_blocks": self._blocks, "_away": self._offload.away}
        return {**super().__getstate__(), **own}

    # -- checkpoints ----------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a checkpoint of this class, bit for bit, or one of torch.optim, encoding its states.

        The options saved with the groups win, the plan among them; only `backend` stays.  All is checked first:
        ValueError lists what does not fit, and nothing has changed.  Nothing stays shared with `state_dict`.
        One that was taken in evaluation leaves this optimizer in evaluation, and the model's weights as they are until
        `train()`; in evaluation any other is refused by a RuntimeError.
        """
        self._take(self._read(state_dict))


def read(one: Optimizer, state_dict: Mapping[str, Any]) -> checkpoint.Loaded:
    """Return groups and states as a state dict has them for an optimizer, or raise ValueError; nothing has changed."""
    if not one._uninterrupted.torn:
        one._refuse_midway("load_state_dict()")
    state_dict = checkpoint.opened(one, state_dict)
    alone = bool(state_dict.get(weights.WEIGHTS_ONLY))
    if alone and one._evaluating:
        one._refuse_unready("load_state_dict() of weights alone")
    with torch.no_grad():
        moved = one._offload.settle(one.param_groups)
        try:
            if alone:
                state_dict = weights.with_states(one, state_dict)
            loaded = checkpoint.read(type(one), one.param_groups, state_dict, one.state)
            loaded = loaded._replace(groups=one.param_groups) if alone else loaded
            if one._evaluating and all(group.get(options.MODE, True) for group in loaded.groups):
                one._refuse_unready("load_state_dict() of one that was taken in training")
            return loaded
        except BaseException:
            for entry, home in moved:
                state.settle(entry.p, home)
            raise


def take(one: Optimizer, loaded: checkpoint.Loaded) -> None:
    """Let an optimizer go on with groups and states that were read."""
    with torch.no_grad():
        started = [p for p in loaded.states if isinstance(p, Tensor) and state.of(loaded.states, p)]
        one._stepper.forget_step()
        one._uninterrupted.begun.clear()
        if one._watch is not None:
            one._watch.step = -1
        if one._release is not None:
            one._release.sums.begin()
        weights.settle(loaded.rounded, started)
        one.state = state.States(dict, inputs.freed(type(one), loaded.states))
        one.param_groups = loaded.groups
    for post_hook in one._optimizer_load_state_dict_post_hooks.values():
        post_hook(one)


def _refuse_unknown(cls: type[Optimizer], unknown: Mapping[str, Any]) -> None:
    """Raise TypeError for an argument that a class does not have."""
    for name in unknown:
        guess = options.near(name, inspect.signature(cls).parameters)
        owner = plans.generated_class(cls).__qualname__
        raise TypeError(f"{owner}.__init__() got an unexpected keyword argument {name!r}{guess}")


def _warn_of_lost_bits(cls: type[Optimizer], model: torch.nn.Module) -> None:
    """Warn, once for a model, if it was sharded after it had been cast, which leaves the low bits behind."""
    count = low_bits.lost(model)
    if count:
        warn(
            f"{cls.__name__}: the low bits that cast_model kept for {count} parameters did not come along when the "
            f"model was sharded: it goes on from its rounded weights.  To keep them, take full = model.state_dict() "
            f"before cast_model(..., low_bits=False), and call opt.load_master_state_dict(model, full) after sharding",
            cls,
        )


def _admitted(cls: type[Optimizer], params: Any) -> list[Tensor]:
    """Return the tensors of a group that is to come; TypeError or ValueError for what no group may have."""
    tensors = [params] if isinstance(params, Tensor) else [p[1] if isinstance(p, tuple) else p for p in params]
    tensors = [p for p in tensors if isinstance(p, Tensor)]  # torch refuses the rest by name
    if len({id(p) for p in tensors}) != len(tensors):
        raise ValueError(f"{cls.__name__}: a parameter group contains a parameter twice")
    for p in tensors:
        admit.refuse_unsupported(cls, p)
    return tensors


def _described(cls: type[Optimizer], group: Mapping[str, Any]) -> str:
    """Return the number of a group's parameters and its options; of single parameters, how many have each."""
    shown = {k: v for k, v in group.items() if k not in ("params", "param_names", "format")}
    for key in ("overrides", "blocks"):
        if isinstance(shown.get(key), tuple):  # as many pairs as parameters, maybe
            shown[key] = dict(Counter(value for _, value in shown[key]))
    for hyper in cls.HYPERS:
        if hyper.whole and isinstance(shown.get(hyper.name), float):
            shown[hyper.name] = int(shown[hyper.name])
    count = f"{len(group['params'])} parameters"
    if "role" in group and group.get("param_names"):
        count += f" of {', '.join(dict.fromkeys(re.sub(r'[0-9]+', '*', str(n)) for n in group['param_names']))}"
    return ", ".join([count, *(f"{k}={v!r}" for k, v in shown.items())])


def _complete(cls: type[Optimizer]) -> None:
    """Let help() and inspect.signature tell of a generated class what its text leaves to this module."""
    init: Any = vars(cls).get("__init__")
    own = [] if init is None else list(inspect.signature(init).parameters.values())
    if not own or own[-1].kind is not inspect.Parameter.VAR_KEYWORD:  # the text has it all
        return
    if cls.__doc__:
        cls.__doc__ = inspect.cleandoc(cls.__doc__) + OTHERS
    for p in inspect.signature(Optimizer.__init__).parameters.values():
        if p.kind is p.KEYWORD_ONLY and (cls.BLOCKS or p.name != "blocks"):
            own.insert(-1, p.replace(annotation=p.empty))
    init.__signature__ = inspect.Signature(own[:-1])
