"""The base class of every generated optimizer: a torch.optim.Optimizer whose states may be quantized."""

from __future__ import annotations

import ctypes
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any, ClassVar, NamedTuple, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import ParamsT

from optgen.runtime.checkpoint import checkpoint, evaluation, weights
from optgen.runtime.cpu import cpu
from optgen.runtime.layout import plans, sharding
from optgen.runtime.layout.plans import Label, PlanOption, Recorded
from optgen.runtime.modes import offload, release
from optgen.runtime.options import blocks as of_rows
from optgen.runtime.options import options
from optgen.runtime.options import overrides as rules
from optgen.runtime.records import Flag, Hyper, Variant, as_float, dtype_name, keys, marks
from optgen.runtime.records.arena import Arena
from optgen.runtime.records.join import Pair
from optgen.runtime.records.warn import warn
from optgen.runtime.states import low_bits, memory, state
from optgen.runtime.step import brokenoff, fast_path, interrupts, launch, shared, strays
from optgen.runtime.work import counting, whole
from optgen.runtime.work.bucket import Bucket, run_reference

GRADS = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Gradient dtypes that kernels read; fp64 is converted to fp32."""


class Entry(NamedTuple):
    """A parameter, the group it is in, its position over all groups, and its name (or that position)."""

    p: Tensor
    group: dict[str, Any]
    position: int
    name: str | int


_UNCUT: frozenset[str] = frozenset()

_PLAIN = (torch.nn.Parameter, Tensor)
"""Classes of tensors that have memory of their own, if their storage has any."""


class Ready(NamedTuple):
    """A bucket before its step: its tables (None: eager torch), scalars and step key, and what counts it then: its host
    states after it, or the step on the device."""

    bucket: Bucket
    tables: launch.Tables | None
    scalars: Any
    key: int
    after: tuple[float, ...] | counting.Step

    def finish(self) -> None:
        if isinstance(self.after, counting.Step):
            self.bucket.finish_counted(self.after)
        else:
            self.bucket.finish(self.after)


class Choice:
    """What parameters of one dtype and device take in a group: plan, backend, and the variant by their size.

    own      the plan that they have for themselves; None: that of the group
    counted  whether their steps are counted on the device: as capturable=True asks, and fused=True where there is a
             GradScaler; without one (None) as their states are.  Only Triton's kernels can be told
    """

    __slots__ = (
        "_by_shape", "_cls", "_group", "backend", "counted", "device", "dtype", "large", "limit", "own", "plan",
        "small", "vector",
    )  # fmt: skip

    def __init__(self, cls: type, group: dict[str, Any], p: Tensor, scaled: bool, own: str | None) -> None:
        self.dtype, self.device, self.own = p.dtype, p.device, own
        chosen = plans.resolved(cls, group.get("plan"), p.dtype, own)
        self.plan = chosen.pair
        self.backend = launch.choose(group["backend"], p.device, self.plan)
        self.counted: bool | None = False
        if self.backend == "triton" and all(flag.every is None for flag in options.flags_declared(cls)):
            self.counted = True if group.get("capturable") else None if group.get("fused") else False
            if self.counted is None and scaled:
                self.counted = True
        self.limit = chosen.limit
        self._by_shape: dict[torch.Size, Variant] | None = None
        if any(flag.shape is not None for flag in options.flags_declared(cls)):
            self._by_shape, self._cls, self._group = {}, cls, group
            return
        flags = options.flags_of(cls, group)
        self.large = plans.variant(self.plan, p.dtype, False, flags)
        self.small = plans.variant(self.plan, p.dtype, True, flags)
        self.vector = plans.variant(self.plan, p.dtype, False, flags, True)

    def variant(self, p: Tensor) -> Variant:
        if self._by_shape is not None:
            return self._by_shape.get(p.shape) or self._find(p)
        if self.limit and p.numel() < self.limit:
            return self.small
        return self.large if p.ndim >= 2 else self.vector

    def _find(self, p: Tensor) -> Variant:
        """Where flags follow the shape, every shape has its variant."""
        assert self._by_shape is not None
        flags = options.flags_of(self._cls, self._group, tuple(p.shape))
        found = plans.variant(self.plan, p.dtype, p.numel() < self.limit, flags, p.ndim < 2)
        self._by_shape[p.shape] = found
        return found


def _same(step: object, host: Sequence[object], bucket: Bucket) -> bool:
    """Whether a bucket is counted by these very tensors."""
    return step is bucket.step and all(map(is_, host, bucket.host))


class Optimizer(torch.optim.Optimizer):
    """What a generated optimizer inherits: everything but its numbers.

    Options beyond the hyper-parameters, per group or for all:

    plan      how states and weights are stored: a plan's name, names by parameter dtype, or None for the default
    overrides what single parameters are stored under instead: {pattern of names, "numel < N", module, class of modules
              or parameter: a plan's name}, the first that holds wins; "fp32" keeps states in fp32, and the weight no
              less precise than `plan` does.  Groups that are added later follow it too; each may have one of its own
    blocks    of rules that have statistics of blocks of rows: into how many blocks of consecutive rows single matrices
              fall, {the same keys: a number}; 1 is the whole matrix.  Matrices without have a block for each row
    module    the model that the parameters are of, where `overrides` or `blocks` name classes of modules, or the
              parameters have no names; it is not kept
    backend   "auto" (Triton on GPUs; C++ on CPUs, compiled at the first step; eager torch where those are missing),
              "reference" (eager torch), "triton" or "cpp"; OPTGEN_BACKEND in the environment replaces "auto"
    seed      of the stochastic rounding; the same bits follow from the same seed, parameter names (positions
              where parameters have none) and steps, in any order or grouping
    maximize  step along the gradient, not against it
    capturable  count steps on the device and read nothing there, so that a CUDA graph may hold the step; numbers given
              as tensors on the device stay tensors, the others are part of the graph
    fused     let torch.amp.GradScaler leave gradients scaled: the kernels divide, and skip a step that has an infinity
    offload   keep the states in host memory and let the host update the weights of an accelerator
    """

    SPEC: ClassVar[str]
    HYPERS: ClassVar[tuple[Hyper, ...]]
    FLAGS: ClassVar[tuple[Flag, ...]] = ()
    PLANS: ClassVar[tuple[str, ...]]
    OWN_PLANS: ClassVar[Mapping[str, str]] = {}
    DEFAULT_PLAN: ClassVar[Mapping[str, str]]
    BLOCKS: ClassVar[bool] = False
    evaluation: ClassVar[Callable[..., Tensor] | None] = None

    _rules: rules.Rules | None = None
    _blocks: of_rows.Rules | None = None
    _marks = 0
    """What marks.newest() said when parameters of marked modules were last looked for."""
    _warned_of_stack = False
    _all_given = True
    """Whether the constructor has all groups: it looks for shared memory once, not for every group of many."""
    _first_group = 0
    """The number of its first group among those of the user's optimizer, of which it may be a part."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if vars(cls).get("PLANS") and not plans.has_records(cls):
            raise ImportError(
                f"{cls.__module__} was generated by an earlier version of optgen: run `optgen build {cls.SPEC}`, or "
                f"`optgen build` for all that the project has"
            )

    def __init__(
        self,
        params: ParamsT,
        hypers: Mapping[str, Any],
        *,
        plan: PlanOption = None,
        overrides: rules.Given = None,
        blocks: rules.Given = None,
        module: torch.nn.Module | None = None,
        backend: str = "auto",
        seed: int = 0,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        offload: bool = False,
    ) -> None:
        given = {"maximize": False, **hypers, "plan": plan, "backend": backend, "seed": seed, "foreach": foreach}
        asked: dict[str, Any] = {"capturable": capturable or None, "fused": fused or None, "offload": offload or None}
        asked["differentiable"] = differentiable
        defaults = {**options.check(type(self), {**given, **asked}), "format": checkpoint.FORMAT}
        self._reset_caches()
        self._rules = rules.Rules(type(self), overrides, module)
        self._blocks = of_rows.Rules(type(self), blocks, module) if self.BLOCKS else None
        every = self._every_rules()
        if module is not None:
            self._rules.tables = rules.Tables(module)
            every[-1].tables = self._rules.tables
        self._all_given = False
        super().__init__(params, defaults)
        self._all_given = True
        self._refuse_shared_memory([], [])
        labels, found = [entry.name for entry in self._entries()], [entry.p for entry in self._entries()]
        for given_rules in every:
            if given_rules.rules:
                given_rules.refuse_unused(given_rules.members(found, labels))
            given_rules.tables = None
        self._marks = marks.newest()
        for model in [module] if module is not None else low_bits.sharded_models(found):
            self._say_lost_bits(model)
        self._warn_discouraged(self._entries())

    def _warn_discouraged(self, entries: Iterable[Entry]) -> None:
        """Warn of plans that the lint finds an error in, once each, where they keep a state that it is about."""
        cls, warned = type(self), set[str]()
        for p, group, _, label in entries:
            if not p.requires_grad:
                continue
            name, pair, _ = plans.chosen(cls, group, p.dtype, label)
            if not pair.discouraged or name in warned:
                continue
            variant = checkpoint.select(cls, group, p, label)[2]
            found = [] if variant.small else [s for s in pair.discouraged if s in variant.states]
            if found:
                warned.add(name)
                usual = cls.DEFAULT_PLAN.get(dtype_name(p.dtype), name)
                other = f", such as {usual!r}" if usual != name else ""
                warn(
                    f"{cls.__name__}: plan {name!r} is discouraged: `{found[0]}`: {pair.discouraged[found[0]]}.  Use "
                    f"another plan{other}; `optgen check {cls.SPEC}` lists those without an error",
                    cls,
                )

    def _say_lost_bits(self, model: torch.nn.Module) -> None:
        """Warns, once for a model, where it was sharded after it had been cast, which leaves what was kept behind."""
        count = low_bits.lost(model)
        if count:
            warn(
                f"{type(self).__name__}: the low bits that cast_model kept for {count} parameters did not come along "
                f"when the model was sharded: it goes on from its rounded weights.  To keep them, take full = "
                f"model.state_dict() before cast_model(..., low_bits=False), and call "
                f"opt.load_master_state_dict(model, full) after sharding",
                type(self),
            )

    def _reset_caches(self) -> None:
        """What is derived from parameters and groups, and neither copied nor pickled."""
        self._dtypes: dict[int, tuple[Tensor, torch.dtype]] = {}
        self._forget_tables()
        self._counters = counting.Counters()
        self._trained: dict[Tensor, Tensor] | None = None
        self._release: release.Release | None = None
        self._offload = offload.Offload()
        self._room: Arena | None = None
        self._broke_off: brokenoff.BrokenOff | None = None
        self._strays: int | None = 0
        """Steps in a row that found no gradient; None: something was said, or there is nothing to say (of a part)."""

    def _forget_tables(self) -> None:
        """What kernels read beside the tensors, and the room in which they leave values for one another."""
        self._launcher = launch.Launcher()
        self._fast_path = fast_path.FastPath()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What GradScaler asks: whether it may hand over its scale, and whether it found an infinity, as attributes
        `grad_scale` and `found_inf`.

        With released gradients it may, so that `step()` can refuse it: the scaler itself would look for gradients that
        are gone.
        """
        return bool(self.defaults.get("fused")) or self._release is not None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._reset_caches()
        super().__setstate__({k: v for k, v in state.items() if k != low_bits.CARRIER})
        self._bring_up()
        self.defaults.pop("differentiable", None)  # torch puts it there; it would wander into new groups
        for group in self.param_groups:
            options.set_missing(group, self.defaults)
        for entry in self._entries():
            self._dtypes[id(entry.p)] = (entry.p, entry.p.dtype)
        if any(group.get("offload") for group in self.param_groups):  # copies of parameters do not know their homes
            self._offload.settle(self)

    def _bring_up(self) -> None:
        """Groups and states of an older version, as a pickle may hold them."""
        current = [group.get("format") == checkpoint.FORMAT for group in self.param_groups]
        for group in self.param_groups:
            own = {p: self.state[p] for p in group["params"] if p in self.state}
            found, own = checkpoint.migrated(group, own)
            group.update(found)
            self.state.update(own)
        if not all(current):
            for p, group, _, name in self._entries():
                if p in self.state:
                    self.state[p] = checkpoint.renamed(type(self), group, p, name, self.state[p])
        self.defaults["format"] = checkpoint.FORMAT

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__} ("]
        for i, group in enumerate(self.param_groups):
            shown_options = {k: v for k, v in group.items() if k not in ("params", "param_names", "streams", "format")}
            for key in ("overrides", "blocks"):
                if isinstance(given := shown_options.get(key), tuple):  # as many pairs as parameters, maybe
                    shown_options[key] = dict(Counter(value for _, value in given))
            shown = ", ".join(f"{k}={v!r}" for k, v in shown_options.items())
            lines.append(f"    group {i}: {len(group['params'])} parameters, {shown}")
        return "\n".join([*lines, ")"])

    # -- groups and parameters ------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; options are checked, and the plan is settled, before anything changes."""
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group)}")
        params = param_group["params"]
        if not isinstance(params, (Tensor, set)):
            params = list(params)
        tensors = [params] if isinstance(params, Tensor) else [p[1] if isinstance(p, tuple) else p for p in params]
        tensors = [p for p in tensors if isinstance(p, Tensor)]  # torch refuses the rest by name below
        if len({id(p) for p in tensors}) != len(tensors):
            raise ValueError(f"{type(self).__name__}: a parameter group contains a parameter twice")
        for p in tensors:
            self._admit(p)
        given, rows = param_group.get("overrides"), param_group.get("blocks")
        apart = ("overrides", "blocks") if self.BLOCKS else ("overrides",)
        param_group = {key: value for key, value in param_group.items() if key not in apart}
        group = {**self.defaults, **param_group}
        found = options.check(type(self), group)
        found["plan"] = options.record_plan(type(self), found["plan"], tensors)
        options.warn_unknown(type(self), param_group)
        names = self._labels(tensors, params, param_group.get("param_names"))
        if self._all_given:
            self._refuse_shared_memory(tensors, names)
        found |= self._overrides(given, found["plan"], tensors, names)
        found |= self._rows(rows, tensors, names)
        self._refuse_vectors(tensors, {**group, **found}, names)
        self._refuse_layouts(tensors, {**group, **found}, names)
        if self._release is not None:
            self._release.refuse_released(p for p in tensors if p.requires_grad)
        super().add_param_group({**param_group, **found, "params": params})
        for p in tensors:
            self._dtypes[id(p)] = (p, p.dtype)
        for own in self._every_rules():
            own.follow(tensors, held=True)
        if self._release is not None:
            self._release.attach()
        if self._all_given:
            self._warn_discouraged([e for e in self._entries() if e.group is self.param_groups[-1]])

    def _admit(self, p: Tensor) -> None:
        """Refuses what no kernel can update rightly.  Frozen tensors may be anything."""
        owner = type(self).__name__
        if not p.requires_grad:
            return
        if torch.nn.parameter.is_lazy(p):
            raise ValueError(
                f"{owner}: a parameter of a lazy module has no shape yet, which its states follow: make a forward pass "
                f"with the model first, then create the optimizer"
            )
        if p.is_complex():
            raise TypeError(f"{owner} does not support complex parameters; optimize torch.view_as_real(p) instead")
        if p.layout is not torch.strided:
            raise TypeError(f"{owner} does not support parameters of layout {p.layout}")
        if state.wraps(p):
            raise TypeError(
                f"{owner} does not support parameters of class {type(p).__name__}: they stand for other tensors and "
                f"have no memory that kernels could update; optimize those, or a plain copy"
            )
        if state.overlaps(p):
            raise ValueError(
                f"{owner}: a parameter of shape {list(p.shape)} and strides {list(p.stride())} is an expanded view or "
                f"a sliding window: its elements overlap; optimize the tensor that it is a view of"
            )

    def _refuse_shared_memory(self, tensors: Sequence[Tensor], names: Sequence[Label]) -> None:
        """ValueError where two parameters have memory in common, of the groups that are there and of one to come."""
        every = [(entry.p, entry.name) for entry in self._entries()] + list(zip(tensors, names, strict=True))
        trained = [(p, name) for p, name in every if p.requires_grad]
        found = state.alike([p for p, _ in trained])
        if found is not None and trained[found[0]][0] is not trained[found[1]][0]:  # torch says that one is in twice
            a, b = (state.label(*trained[i]) for i in found)
            raise ValueError(
                f"{type(self).__name__}: {a} and {b} share memory, which both updates would write: tie weights by "
                f"giving both modules the same Parameter, or optimize the tensor that both are views of"
            )

    def _labels(self, tensors: list[Tensor], params: Any, kept: Any) -> list[Label]:
        """What the parameters of a group that is to come will be called: their names, or positions over all groups.

        kept   the names that the group says, as that of another optimizer does
        """
        first = sum(len(g["params"]) for g in self.param_groups)
        given = params if isinstance(params, list) else []
        names = {id(p[1]): str(p[0]) for p in given if isinstance(p, tuple)}
        if not names and isinstance(kept, (list, tuple)) and len(kept) == len(tensors):
            return list(kept)
        return [names.get(id(p), first + i) for i, p in enumerate(tensors)]

    def _every_rules(self) -> list[rules.Rules]:
        """Those of the optimizer: of plans, and of blocks where its rule has such."""
        return [own for own in (self._rules, self._blocks) if own is not None]

    def _overrides(
        self, given: Any, plan: PlanOption, tensors: list[Tensor], labels: list[Label]
    ) -> dict[str, Recorded]:
        """{"overrides": the plans of single parameters in a group that is to come}; {} where it has none.

        given   what the group itself says: rules, or what another optimizer recorded in it; rules of the optimizer and
                marks of modules follow
        """
        cls = type(self)
        asked = self._asked(rules.Rules, rules.recorded, self._rules, given, tensors, labels)
        marked = marks.parameters()
        asked = [a or (rules.FP32 if id(p) in marked else None) for a, p in zip(asked, tensors, strict=True)]
        decided = rules.decided(cls, plan, tensors, labels, asked)
        return {"overrides": decided} if decided else {}

    def _rows(self, given: Any, tensors: list[Tensor], labels: list[Label]) -> dict[str, of_rows.Recorded]:
        """{"blocks": those of single parameters in a group that is to come}; {} where it has none.

        given   as of `_overrides`
        """
        if not self.BLOCKS:
            return {}
        cls = type(self)
        asked = self._asked(of_rows.Rules, of_rows.recorded, self._blocks, given, tensors, labels)
        decided = of_rows.decided(cls, tensors, labels, asked)
        return {"blocks": decided} if decided else {}

    def _asked(
        self,
        kind: type[rules.Rules],
        read: Callable[[type, Any], Sequence[tuple[Label, Any]]],
        own: rules.Rules | None,
        given: Any,
        tensors: list[Tensor],
        labels: list[Label],
    ) -> list[Any]:
        """What a group says of each of its parameters, then what rules of the optimizer say; None: nothing.

        given   rules of the group, or what another optimizer recorded in it, which `read` checks
        """
        cls, option = type(self), kind.OPTION
        recorded: Mapping[Label, Any] = {}
        of_group = kind(cls)
        if isinstance(given, Mapping):
            of_group = kind(cls, given, None if own is None else own.model)
            of_group.tables = None if own is None else own.tables
        elif given is not None:
            recorded = dict(read(cls, given))
            extra = [label for label in recorded if label not in labels]
            if extra:
                raise ValueError(
                    f"{cls.__name__}: {option} of a group: it has no parameter {extra[0]!r} (positions are counted "
                    f"over all groups)"
                )
        asked = [recorded.get(label) for label in labels]
        for found in (of_group, own):
            if found is not None and found.rules:
                members = found.members(tensors, labels)
                asked = [a or b for a, b in zip(asked, found.apply(members), strict=True)]
                if found is of_group:
                    found.refuse_unused(members)
        return asked

    def _see_marks(self) -> None:
        """Modules that were marked since the optimizer was made: their parameters follow, up to their first step."""
        if self._marks == marks.newest():
            return
        newest = marks.newest()
        marked, late = marks.parameters(since=self._marks), list[Entry]()  # copies of marked modules count as such
        found: list[tuple[dict[str, Any], Recorded]] = []
        for group in self.param_groups:
            added: list[Entry] = []
            for entry in self._entries():
                if entry.group is group and id(entry.p) in marked and entry.name not in plans.own(group):
                    (late if state.of(self.state, entry.p) else added).append(entry)
            decided = rules.decided(
                type(self), group["plan"], [e.p for e in added], [e.name for e in added], [rules.FP32] * len(added)
            )
            if decided:
                found.append((group, decided))
        for group, decided in found:
            group["overrides"] = (*group.get("overrides", ()), *decided)
        self._marks = newest
        if late:
            warn(
                f"{type(self).__name__}: {state.label(late[0].p, late[0].name)}"
                + (f" and {len(late) - 1} more" if len(late) > 1 else "")
                + " had made steps when keep_states_fp32 was called for its module: its states stay as they are.  Call "
                "it before the first step",
                type(self),
            )

    def _refuse_vectors(self, tensors: list[Tensor], group: dict[str, Any], names: list[Label]) -> None:
        """ValueError for a parameter without rows and columns where the rule needs them; warns of stacks of matrices
        that a function of matrices takes as one.
        """
        for i, p in enumerate(tensors):
            stack = p.ndim == 3 and min(p.shape[1:]) >= 8  # the last dimension of a 1-d convolution is shorter
            if not p.requires_grad or not (p.ndim < 2 or stack):
                continue
            cls, name = type(self), names[i]
            variant = checkpoint.select(cls, group, p, name)[2]
            if p.ndim < 2 and variant.needs_matrix:
                raise self._no_matrix(p, name)
            whole = variant.matrix == "first" and any(s.space == "call" for s in variant.stages)
            if stack and whole and not self._warned_of_stack:
                self._warned_of_stack = True
                warn(
                    f"{cls.__name__} orthogonalizes {state.label(p, name)} as one matrix of {p.shape[0]} rows: "
                    f"dimension 0 against all others. That is right for convolutions. If it is a stack of matrices, "
                    "such as a layer's experts, make each a parameter of its own, or build a copy of the spec with "
                    '@optimizer(..., matrix="last"), which takes each matrix by itself',
                    cls,
                )

    def _no_matrix(self, p: Tensor, name: Label) -> ValueError:
        return ValueError(
            f"{type(self).__name__}: {state.label(p, name)} has no rows and columns, whose statistics this rule needs; "
            f"give such parameters to another optimizer"
        )

    def _refuse_layouts(self, tensors: list[Tensor], group: dict[str, Any], names: list[Label]) -> None:
        """ValueError for a parameter of several ranks whose parts no kernel can update."""
        first = sum(len(g["params"]) for g in self.param_groups)
        for i, p in enumerate(tensors):
            flattened = rules.is_flattened(p)
            if not p.requires_grad or not (flattened or sharding.is_sharded(p)):
                continue
            cls, name = type(self), names[i]
            _, plan, variant = checkpoint.select(cls, group, p, name)
            if not flattened:
                self._shard(plan, variant, p, None, first + i, name)
            else:
                self._refuse_flattened(p, name, plan, variant)

    def _refuse_flattened(self, p: Tensor, name: Label, plan: Pair, variant: Variant) -> None:
        """ValueError for a piece of a flattened parameter that any step is to take by more than its elements."""
        beyond = [v for v in plans.at_steps(plan, variant, self.FLAGS) if v.stages or v.stochastic or v.block > 1]
        if beyond or plan.small_numel:
            raise ValueError(
                f"{type(self).__name__}: {state.label(p, name)} was flattened and cut by FullyShardedDataParallel: its "
                f"rows are lost, which this rule or plan needs; use torch.distributed.fsdp.fully_shard, or an "
                f"element-wise rule under a plan without blocks and random bits (fp32, fp32_master)"
            )

    def _entries(self) -> Iterator[Entry]:
        position = 0
        for group in self.param_groups:
            names = group.get("param_names")
            for i, p in enumerate(group["params"]):
                yield Entry(p, group, position, position if names is None else names[i])
                position += 1

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
        self._refuse_in_evaluation("step()")
        self._see_marks()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._release is None:
            self._update()
        else:
            self._release.step()
        return loss

    @_disable_dynamo
    def _update(self) -> None:
        """The step proper; torch.compile leaves it as it is (one graph break)."""
        try:
            self._step_once()
        except BaseException as error:
            # A GradScaler takes its scale back after steps that succeed only, and would multiply it into the next one.
            for name in ("grad_scale", "found_inf"):
                self.__dict__.pop(name, None)
            if isinstance(error, (TypeError, ValueError)) and not counting.capturing():
                self._refuse_numbers()
            raise

    def _refuse_numbers(self) -> None:
        """TypeError or ValueError for a hyper-parameter that was set to what its constructor refuses."""
        for number, group in enumerate(self.param_groups, self._first_group):
            for hyper in self.HYPERS:
                try:
                    hyper.read(group.get(hyper.name, hyper.default))
                except (TypeError, ValueError) as error:
                    raise type(error)(f"{type(self).__name__}: group {number}: {error}") from None

    def _step_once(self) -> None:
        scaler = counting.Scaler.of(self) if self._step_supports_amp_scaling else None
        if self._offload.active or any(group.get("offload") for group in self.param_groups):
            self._look_for_strays()
            with interrupts.Later():
                self._offload.step(self, scaler)
            return
        with interrupts.Later():
            try:
                if self._fast_path.run(self.param_groups, self.state, scaler):
                    return
            except fast_path.StepError as stopped:
                self._break_off(stopped.error, stopped.done, stopped.at_work)
                raise stopped.error from stopped.error.__cause__
        with torch.no_grad():
            self._sort_and_run(scaler)

    def _sort_and_run(self, scaler: counting.Scaler | None) -> None:
        """A step that is not like the one before."""
        self._look_for_strays()
        buckets = self._buckets(scaler)
        if not buckets:
            self._broke_off = None  # what was left has no gradients any more
            return
        shared.check(buckets)
        self._launcher.begin()
        prepared = [self._prepare(bucket, scaler) for bucket in buckets]
        if not counting.capturing():
            for bucket, tables, scalars, key, _ in prepared:
                if bucket.backend == "triton" and tables is not None:
                    launch.load(bucket, tables, scalars, key)
        with interrupts.Later():
            self._run(prepared)
            if any(f.space == "model" for b, *_ in prepared for f in b.variant.fields):
                shared.spread(self.state, [bucket for bucket, *_ in prepared])
            self._counters.take(buckets)
            self._counters.forget(self.state)
        if self._has_fast_path(prepared):
            launches = [launch.prepared(x.bucket, x.tables) for x in prepared if x.tables is not None]
            self._fast_path.keep(type(self), self.param_groups, self.state, launches, scaler is not None)

    def _has_fast_path(self, prepared: Sequence[Ready]) -> bool:
        """Return True if steps that are like this one may take the fast path."""
        if any(b.in_parts for b, *_ in prepared) or any(flag.every is not None for flag in self.FLAGS):
            return False
        sharded = sharding.kind()
        if sharded is not None and self._senders(sharded):  # others may wait for this rank at any step
            return False
        return all(ready.tables is not None for ready in prepared)

    def _run(self, prepared: Sequence[Ready]) -> None:
        """The kernels; an error says what has been stepped before it."""
        alone = [ready for ready in prepared if not ready.bucket.waits]
        waiting = [ready for ready in prepared if ready.bucket.waits]
        done: list[state.State] = []
        at_work: list[state.State] = []
        try:
            for ready in alone:
                at_work = ready.bucket.owned
                bucket, tables, scalars, key, _ = ready
                if isinstance(scalars, counting.Control):
                    assert tables is not None
                    launch.run(bucket, tables, scalars, key)
                elif tables is None:
                    run_reference(bucket, scalars, key)
                elif tables.table is not None:
                    cpu.run(bucket, tables.table, scalars, key)
                else:
                    launch.run(bucket, tables, scalars, key)
                ready.finish()
                done += at_work
            if waiting:
                at_work = [s for ready in waiting for s in ready.bucket.owned]
                shared.run([shared.runner(b, tables, scalars, key) for b, tables, scalars, key, _ in waiting])
                for ready in waiting:
                    ready.finish()
        except BaseException as error:
            self._break_off(error, done, at_work)
            raise
        self._broke_off = None

    def _break_off(self, error: BaseException, done: Sequence[state.State], at_work: Sequence[state.State]) -> None:
        """Keeps what had been stepped when kernels were broken off, and says it in the error.

        Nothing has run of a step that a graph was to take up.
        """
        if counting.capturing():
            return
        self._broke_off = brokenoff.BrokenOff(self._entries(), self.state, done, at_work, self._broke_off)
        if not self._offload.part:  # else the whole optimizer says it
            error.add_note(f"{type(self).__name__}.step() broke off: {self._broke_off}")

    def _look_for_strays(self) -> None:
        """`_say_strays` of a step that is to be made from the gradients that are here."""
        if self._strays is not None:
            self._say_strays(strays.look(self.param_groups, self._dtypes, self.state))

    def _say_strays(self, found: strays.Found) -> None:
        """Warns, once, of parameters that cannot get gradients any more, and where no step had any to begin with."""
        if self._strays is None:
            return
        owner, text = type(self).__name__, ""
        self._strays = 0 if found.trained else self._strays + 1
        if found.places and (found.others_live if found.trained else self._strays >= strays.IDLE):
            labels = [state.label(e.p, e.name) for e in self._entries() if e.position in found.places]
            text = strays.nothing_refers(owner, labels, found.trained)
        elif self._strays == strays.IDLE and not self.state and not self._has_pieces():
            text = strays.never_a_gradient(owner, sum(len(g["params"]) for g in self.param_groups))
        if text:
            self._strays = None
            warn(text, type(self))

    def _has_pieces(self) -> bool:
        """Whether FullyShardedDataParallel has cut its parameters: those that are trained may all be on other ranks."""
        return any(rules.is_flattened(entry.p) for entry in self._entries())

    def _prepare(self, bucket: Bucket, scaler: counting.Scaler | None) -> Ready:
        """All that can fail, before anything changes."""
        bucket.localize()
        tables = None
        if bucket.backend == "reference":
            bucket.check()
        else:
            tables = self._launcher.prepare(bucket)
        if bucket.counted:
            assert tables is not None
            alone = self._counters.shared_by(bucket.step) == len(bucket.params)
            if not alone and counting.capturing():
                raise counting.not_ready(f"not every parameter that steps with {state.label(*bucket.first)}")
            bucket.move_count(alone)
            room = tables.scalars_on(bucket)
            return Ready(bucket, tables, room, 0, self._count(bucket, room, scaler))
        assert not isinstance(bucket.step, Tensor)
        scalars, host = self._host_scalars(bucket, scaler)
        key = keys.step_key(self.param_groups[bucket.group]["seed"], bucket.step + 1)
        return Ready(bucket, tables, scalars, key, host)

    def _buckets(self, scaler: counting.Scaler | None) -> list[Bucket]:
        """Parameters with gradients by what they share; states that are not there yet are made.

        No buckets where a scaler has found an infinity, if any step is counted on the host.

        Runs once per parameter and step, between kernels that may take less time than it: hence the locals, and the
        look at the bucket of the parameter before, which is nearly always the right one.
        """
        buckets: dict[tuple[object, ...], Bucket] = {}
        fresh: list[tuple[Bucket, int]] = []
        position = 0
        states, dtypes, knows, capturing = self.state, self._dtypes, self._counters.knows, counting.capturing()
        broke_off = self._broke_off
        sharded = sharding.kind()
        missing = {} if sharded is None else self._gradients_elsewhere(sharded)
        switched = any(flag.nonzero is not None for flag in self.FLAGS)
        for number, group in enumerate(self.param_groups):
            options.check_again(type(self), group)
            chosen: dict[tuple[torch.dtype, torch.device, str | None], Choice] = {}
            names, start = group.get("param_names"), position
            position += len(group["params"])
            special, in_blocks, streams = plans.own(group), of_rows.of(type(self), group), keys.streams(group)
            own: str | None = None
            choice: Choice | None = None
            bucket: Bucket | None = None
            number_of: Any = None  # its step, where that is a number
            for i, p in enumerate(group["params"]):
                g = p.grad
                if g is None:
                    if p not in missing:
                        continue
                    g = missing[p]
                elif broke_off is not None and broke_off.made(p, g):
                    continue
                name = start + i if names is None else names[i]
                dtype, device, grad_dtype = p.dtype, p.device, g.dtype
                known = dtypes.get(id(p))
                if (
                    known is None
                    or known[1] is not dtype
                    or g.layout is not torch.strided
                    or grad_dtype not in GRADS
                    or g.shape != p.shape
                    or g.device != device
                ):
                    grad_dtype = self._check_pair(p, g, name)
                if special:
                    own = special.get(name)
                if choice is None or dtype is not choice.dtype or device != choice.device or own != choice.own:
                    kind = (dtype, device, own)
                    choice = chosen[kind] = chosen.get(kind) or Choice(type(self), group, p, scaler is not None, own)
                variant = choice.variant(p)
                if in_blocks:
                    variant = self._in_blocks(variant, p, in_blocks.get(name), name)
                entry = states.get(p)
                shard = None
                if sharded is not None and isinstance(p, sharded):
                    shard = self._shard(choice.plan, variant, p, entry, start + i, name)
                cut = shard.layout.roles(variant.matrix) if shard is not None and not shard.gathered else _UNCUT
                step: Any = entry.get("step") if entry else None
                host: Any = variant.host_start
                counted = choice.counted is not False and isinstance(step, Tensor) and knows(step)
                if counted and host:
                    assert entry is not None
                    host = tuple([entry.get(n) for n in variant.host_names])
                    counted = all(map(knows, host))
                ready = counted  # by tensors, which are not looked at
                if not counted:
                    if capturing:
                        raise counting.not_ready(state.label(p, name))
                    if type(step) is not int or step <= 0:  # new, or put there by somebody else
                        step = self._steps(variant, entry, p, name)
                    ready = step > 0
                    if variant.host_start:
                        host = tuple([self._host_state(n, v, entry, p, name) for n, v in variant.host_states])
                if switched and ready and self._begins(group, variant, p, entry, name):
                    ready = False
                if (
                    bucket is None
                    or variant is not bucket.variant
                    or grad_dtype is not bucket.grad_dtype
                    or device != bucket.device
                    or cut != bucket.cut
                    or not (_same(step, host, bucket) if counted else step == number_of and host == bucket.host)
                ):
                    of_step = (id(step), *map(id, host)) if counted else (step, host)
                    key = (number, variant, grad_dtype, device, cut, *of_step)
                    backend = launch.able(choice.backend, choice.plan, variant)
                    made = Bucket(number, choice.plan, variant, backend, device, grad_dtype, step, host, cut=cut)
                    made.counted = backend == "triton" and (counted or bool(choice.counted))
                    bucket = buckets.setdefault(key, made)
                    number_of = None if counted else step
                if not ready:
                    fresh.append((bucket, len(bucket.params)))
                if shard is not None:
                    (p, g), entry = self._local_pair(p, g, name), sharding.locals_of(shard.owner)
                if (
                    type(g) is not Tensor
                    or type(p) not in _PLAIN
                    or not p.untyped_storage().nbytes()
                    or not g.untyped_storage().nbytes()
                    or g._is_zerotensor()
                    or p._is_zerotensor()
                ):
                    g = self._in_memory(p, g, name, choice.backend == "reference")
                bucket.shards.append(shard)
                bucket.params.append(p)
                bucket.grads.append(g)
                bucket.states.append(entry if entry is not None else {})
                bucket.streams.append(keys.stream_key(streams.get(name, name) if streams else name))
                bucket.names.append(name)
        if len(dtypes) > 2 * position:  # parameters were swapped for others: forget those that left
            live = {id(p) for group in self.param_groups for p in group["params"]}
            for own_rules in self._every_rules():
                own_rules.follow((p for key, (p, _) in dtypes.items() if key not in live), held=False)
            self._dtypes = {key: value for key, value in dtypes.items() if key in live}
        if any(flag.every is not None for flag in self.FLAGS):
            for made in buckets.values():
                assert not isinstance(made.step, Tensor)  # such flags are not counted on a device
                flags = options.at_step(type(self), self.param_groups[made.group], made.step + 1)
                made.variant = plans.at_step(made.plan, made.variant, flags)
        if scaler is not None and not all(b.counted for b in buckets.values()) and scaler.found_infinity():
            return []
        for made in buckets.values():
            made.refuse_inference()
        launch.compile_all(list(buckets.values()), [self.param_groups[b.group]["backend"] for b in buckets.values()])
        for b, i in fresh:  # thawed since it was given
            if b.variant.needs_matrix and len(b.params[i].shape) < 2:
                raise self._no_matrix(b.params[i], b.names[i])
            if rules.is_flattened(b.params[i]):
                self._refuse_flattened(b.params[i], b.names[i], b.plan, b.variant)
        whole.collect(buckets.values())
        arenas = self._arenas(fresh)
        groups = self.param_groups
        rounded: list[tuple[Tensor, Tensor]] = []
        new = [
            state.create(
                b.plan, b.variant, b.kept(i), b.states[i], arenas.get(b.group), groups[b.group], rounded, b.step
            )
            for b, i in fresh
        ]
        with interrupts.Later():  # states without the weights that belong to them would go on with other bits
            self._take_states(fresh, new, rounded)
        whole.collect_states(buckets.values())
        return list(buckets.values())

    def _take_states(
        self, fresh: list[tuple[Bucket, int]], new: list[state.State], rounded: list[tuple[Tensor, Tensor]]
    ) -> None:
        """Take over states that were made for a step, and write the weights that belong to them."""
        shared.begin(self.state, new, fresh, self.param_groups)
        for (b, i), entry in zip(fresh, new, strict=True):
            b.states[i] = entry
            shard = b.shards[i]
            if shard is None:
                self.state[b.params[i]] = entry
            else:
                added = {key: value for key, value in entry.items() if key == "step" or key not in shard.owner}
                shard.owner.update(shard.parts.wrapped(added))
                self.state[shard.p] = shard.owner
        weights.settle(rounded, [b.kept(i) for b, i in fresh])

    def _begins(
        self, group: dict[str, Any], variant: Variant, p: Tensor, entry: state.State | None, name: str | int
    ) -> bool:
        """Whether the state of a parameter that has made steps lacks what a hyper-parameter asks for since it is not 0
        any more.  RuntimeError where that would have had to begin with the first weight."""
        if entry is None or variant.keys <= entry.keys():
            return False
        before = checkpoint.held(type(self), group, p, name, variant, entry)
        if before is variant:  # something else is missing: the state does not fit
            return False
        late = [found for found in variant.states if found not in before.states]
        if any(variant.init.get(found) == "param" for found in late):
            raise RuntimeError(
                f"{type(self).__name__}: {state.label(p, name)} has made steps without {late[0]}, which "
                f"begins with the weight before the first one: that is gone, make a new optimizer"
            )
        if counting.capturing():
            raise counting.not_ready(state.label(p, name))
        return bool(late)

    def _in_blocks(self, variant: Variant, p: Tensor, count: int | None, name: Label) -> Variant:
        """The variant for a parameter in so many blocks; ValueError where it does not fall into them."""
        try:
            return of_rows.seen(variant, p, count)
        except ValueError as error:
            raise ValueError(f"{type(self).__name__}: blocks: parameter {name!r} {error}") from None

    def _gradients_elsewhere(self, sharded: type) -> dict[Tensor, Tensor]:
        """Parameters that have no gradient here but on other ranks, which wait for this one: each with one of zeros.

        RuntimeError, on all of them, where some ranks have made a parameter's step and others have not.
        """
        wanted = self._senders(sharded)
        if wanted and counting.capturing():
            raise RuntimeError(
                f"{type(self).__name__}: a CUDA graph is being captured, but ranks agree on who has gradients at each "
                f"step of this rule over parts of tensors, for which the host waits: leave step() out of the graph"
            )
        if not wanted:
            return {}
        broke_off = self._broke_off
        made = [broke_off is not None and broke_off.made(p, p.grad) for p in wanted]
        found = sharding.agreed(wanted, made)
        seen = [(p, done) for p, has, done in zip(wanted, found, made, strict=True) if has == sharding.MADE]
        behind = [p for p, done in seen if not done]
        # Those that have made it refuse too: they would wait for the others.
        if seen and sharding.anywhere(bool(behind), [p for p, _ in seen]):
            which = {id(entry.p): entry.name for entry in self._entries()}
            some = behind or [p for p, _ in seen]
            raise RuntimeError(
                f"{type(self).__name__}: {state.label(some[0], which[id(some[0])])}"
                + (f" and {len(some) - 1} more" if len(some) > 1 else "")
                + f" made its step on {'other ranks' if behind else 'this rank'} before an error broke that off there, "
                f"and not on {'this one' if behind else 'all others'}: the ranks have parted, go on from a checkpoint"
            )
        lacking = [p for p, has in zip(wanted, found, strict=True) if has == sharding.TO_MAKE and p.grad is None]
        return {p: torch.zeros_like(p) for p in lacking}

    def _senders(self, sharded: type) -> list[Any]:
        """The trainable parameters in whose step ranks send one another something, in this or in another one: which
        one this is follows from how many were made, so that ranks have to count alike."""
        found: list[Any] = []
        chosen: dict[tuple[int, torch.dtype, torch.device, str | None], Choice] = {}
        for entry in self._entries():
            if entry.p.requires_grad and isinstance(entry.p, sharded):
                own = plans.own(entry.group).get(entry.name)
                kind = id(entry.group), entry.p.dtype, entry.p.device, own
                choice = chosen[kind] = chosen.get(kind) or Choice(type(self), entry.group, entry.p, False, own)
                count = of_rows.of(type(self), entry.group).get(entry.name)
                variant = self._in_blocks(choice.variant(entry.p), entry.p, count, entry.name)
                if self._sends(choice.plan, variant, entry.p):
                    found.append(entry.p)
        return found

    def _sends(self, plan: Pair, variant: Variant, p: Any) -> bool:
        """Whether ranks send one another something in a step of a parameter."""
        of = sharding.layout_of(p)
        if not of.dims():
            return False
        sends = any(v.stages for v in plans.at_steps(plan, variant, self.FLAGS))
        return sends or sharding.mode(variant, of) == "gathered"

    def _shard(
        self, plan: Pair, variant: Variant, p: Any, entry: state.State | None, position: int, name: str | int
    ) -> sharding.Shard:
        """How a DTensor lies; ValueError, before its first step, where no kernel can update its parts in every one."""
        try:
            parts = sharding.Parts.of(p, variant)
            if not entry:
                for other in plans.at_steps(plan, variant, self.FLAGS):
                    sharding.mode(other, parts.layout)
        except ValueError as error:
            where = f"{tuple(p.placements)} over a mesh of {list(p.device_mesh.shape)}"
            raise ValueError(f"{type(self).__name__}: {state.label(p, name)}, {where}: {error}") from None
        return sharding.Shard(p, parts.layout, position, entry if entry is not None else {}, parts, parts.gathered)

    def _local_pair(self, p: Any, g: Tensor, name: str | int) -> tuple[Tensor, Tensor]:
        try:
            return sharding.pair(p, g)
        except (TypeError, ValueError, RuntimeError) as error:
            raise type(error)(f"{type(self).__name__}: {state.label(p, name)}: {error}") from None

    def _arenas(self, fresh: list[tuple[Bucket, int]]) -> dict[int, Arena]:
        """Room for the states that are made now, by group."""
        if self._room is not None:
            return {b.group: self._room for b, _ in fresh}
        sizes: dict[int, list[int]] = {}
        for b, i in fresh:
            if b.device.type == "cpu":
                sizes.setdefault(b.group, []).extend(state.sizes(b.variant, b.kept(i), b.states[i]))
        return {group: Arena(found) for group, found in sizes.items()}

    def _check_pair(self, p: Tensor, g: Tensor, name: str | int) -> torch.dtype:
        """Refuses gradients and parameters that no kernel takes; the dtype in which kernels read the gradient."""
        known = self._dtypes.get(id(p))
        if known is None:  # put into the group by somebody else, as sharding wrappers do
            self._admit(p)
            known = self._dtypes[id(p)] = (p, p.dtype)
        if known[1] is not p.dtype:
            raise RuntimeError(
                f"{type(self).__name__}: {state.label(p, name)} was {dtype_name(known[1])} when the optimizer was "
                f"created: convert the model first, then create the optimizer (and load the old one's "
                f"dense_state_dict() into it)"
            )
        if g.layout is not torch.strided:
            raise RuntimeError(
                f"{type(self).__name__} does not support sparse gradients: {state.label(p, name)} has one"
            )
        if not g.is_floating_point():
            raise TypeError(f"{type(self).__name__}: {state.label(p, name)} has a gradient of {dtype_name(g.dtype)}")
        if g.shape != p.shape or g.device != p.device:  # torch looks when p.grad is set, not when p.data is
            raise RuntimeError(
                f"{type(self).__name__}: {state.label(p, name)} is on {p.device}, and its gradient is of shape "
                f"{list(g.shape)} on {g.device}: the parameter was given other memory (p.data = ...) after backward; "
                f"compute the gradient anew"
            )
        return g.dtype if g.dtype in GRADS else torch.float32

    def _in_memory(self, p: Tensor, g: Tensor, name: str | int, eager: bool) -> Tensor:
        """The gradient, waited for, and put into memory where it is zeros that have none; TypeError or RuntimeError
        where it or the parameter is at no address."""
        g = state.materialized(sharding.waited(g))
        for which, t in (("", p), ("the gradient of ", g)):
            if state.wraps(t):
                raise TypeError(
                    f"{type(self).__name__}: {which}{state.label(p, name)} is of class {type(t).__name__}, which "
                    f"stands for other tensors and has no memory of its own"
                )
            if not state.has_memory(t, eager):
                raise RuntimeError(
                    f"{type(self).__name__}: {which}{state.label(p, name)} has no memory: it was freed (its storage "
                    f"was resized to 0, as what shards a model does between uses), or it never had any"
                )
        return g

    def _steps(self, variant: Variant, entry: state.State | None, p: Tensor, name: str | int) -> int:
        """The steps of a state that is new or was not made here; 0 where fields may still have to be filled in."""
        count = state.step_count(entry["step"]) if entry and "step" in entry else 0
        if count is None:
            got = entry["step"] if entry else None
            raise RuntimeError(f"{state.label(p, name)}: step must be a whole number >= 0, got {got!r}")
        if entry and count:
            entry["step"] = count
        return count

    def _host_state(self, key: str, start: float, entry: state.State | None, p: Tensor, name: str | int) -> float:
        if not entry:
            return start
        value = entry.get(key, None if entry.get("step") else start)
        if type(value) is not float:
            value = as_float(value)
            if value is None:
                raise RuntimeError(f"{state.label(p, name)}: {key} must be a number, got {entry.get(key, 'nothing')!r}")
        return value

    def _count(self, bucket: Bucket, room: counting.Control, scaler: counting.Scaler | None) -> counting.Step:
        """The bucket's step on the device, its scalars computed."""
        group, variant = self.param_groups[bucket.group], bucket.variant
        assert isinstance(bucket.step, Tensor)
        host = [x for x in bucket.host if isinstance(x, Tensor)]
        step = counting.Step(bucket.step, host, scaler.found if scaler else None)
        step.fill(
            room,
            *variant.host_for(True),
            sign=-1.0 if group["maximize"] else 1.0,
            scale=scaler.scale if scaler else None,
            hypers={hyper.name: hyper.read_on(group[hyper.name], bucket.device) for hyper in self.HYPERS},
            names=variant.host_names,
            seed=group["seed"] if variant.stochastic else None,
        )
        counting.check_calls(variant, room)
        return step

    def _host_scalars(self, bucket: Bucket, scaler: counting.Scaler | None) -> tuple[list[float], tuple[float, ...]]:
        """(scalars rounded to fp32, new host states in fp64) of a bucket, computed in fp64."""
        group, variant = self.param_groups[bucket.group], bucket.variant
        hypers = {hyper.name: hyper.read(group[hyper.name]) for hyper in self.HYPERS}
        sign = -1.0 if group["maximize"] else 1.0
        if scaler is not None:
            sign = scaler.factor(sign)
        host, count = variant.host_for(bucket.backend != "reference")
        values = host(bucket.step + 1, sign, **hypers, **dict(zip(variant.host_names, bucket.host, strict=True)))
        return [ctypes.c_float(value).value for value in values[:count]], tuple(values[count:])

    # -- gradient release -----------------------------------------------------------------------------

    def release_gradients(
        self,
        model: torch.nn.Module | None = None,
        *,
        accumulate: int = 1,
        accumulator: Callable[[list[Tensor]], Optimizer] | None = None,
        clip: float | None = None,
        clip_by: release.ClipBy = "norm",
    ) -> release.Handle:
        """From now on each parameter is updated within backward, when its gradient is complete, which is then freed.

        model        only its parameters; None: all of this optimizer's
        accumulate   micro-batches whose gradients are summed before an update
        accumulator  keeps that sum in place of p.grad: `optgen.accumulate.accumulator(plan)`; None: p.grad, as torch
                     sums
        clip         largest norm or value of a parameter's gradient; None: no clipping
        clip_by      "norm": of each parameter; "value": of each element; "previous_norm": the factor is that of the
                     norm over all parameters at the step before (at the first step, of each parameter)

        The training loop stays: `step()` then only updates what has a gradient left.  The bits are those of ordinary
        steps.  ValueError for rules that need sums over the model; NotImplementedError under DistributedDataParallel
        and FSDP1; RuntimeError where another optimizer does it for one of the parameters.  A GradScaler is refused by
        the first `step()` it makes.
        Returns the handle: `remove()`, or leaving it as a context, restores ordinary steps.  An optimizer that is
        deleted, and its handle with it, updates nothing any more.
        """
        self._refuse_in_evaluation("release_gradients()")
        self._see_marks()
        self._release = release.Release(
            self, model, accumulate=accumulate, accumulator=accumulator, clip=clip, clip_by=clip_by
        )
        return release.Handle(self, self._release)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; sums of micro-batches that are kept elsewhere go with the gradients."""
        super().zero_grad(set_to_none)
        if self._release is not None:
            self._release.discard()

    # -- evaluation -----------------------------------------------------------------------------------

    def eval(self) -> None:
        """Puts the weights that the model is to be evaluated with into it, where the rule has such (an average of those
        that it trains); else nothing.  Until `train()` is called there is no step and no state_dict."""
        if self.evaluation is None or self._trained is not None:
            return
        with torch.no_grad():
            started = [entry for entry in self._entries() if state.of(self.state, entry.p)]
            for p, *_, name in started:
                state.refuse_inference(p, name, sharding.local(p))
            found = [
                (p, p.detach().clone(), evaluation.weights(type(self), group, p, self.state[p], name))
                for p, group, _, name in started
            ]
            self._trained = {p: trained for p, trained, _ in found}
            for p, _, weights in found:
                sharding.local(p).copy_(weights)

    def train(self) -> None:
        """Puts back the weights that `eval()` took out, bit for bit."""
        if self._trained is None:
            return
        with torch.no_grad():
            for p, value in self._trained.items():
                sharding.local(p).copy_(sharding.local(value))
        self._trained = None

    def state_dict(self) -> dict[str, Any]:
        """As torch's, its options in Python's own numbers; groups say which entries of the states are a user's own.

        It is for `load_state_dict` of this class.  Codes stand under names of their own (`exp_avg_codes`), so that
        torch.optim does not take them for states: `dense_state_dict` is the form that torch.optim loads.
        RuntimeError between `eval()` and `train()`: the model then holds other weights.
        """
        self._refuse_in_evaluation("state_dict()")
        found = super().state_dict()
        for group in found.get("param_groups", ()):  # hooks may have made it another
            if isinstance(group, dict):
                group.update(options.in_plain_numbers(type(self), group))
        if all(group.get("param_names") is None for group in self.param_groups):
            found[options.UNNAMED] = True
        own = checkpoint.own_names(type(self), self.param_groups, self.state)
        for group, names in zip(found.get("param_groups", ()), own, strict=False):
            if isinstance(group, dict):
                group.update(names)
        return found

    def _refuse_in_evaluation(self, what: str) -> None:
        if self._trained is not None:
            raise RuntimeError(f"{type(self).__name__}.{what} in evaluation: call train() first")

    def __getstate__(self) -> dict[str, Any]:
        self._refuse_in_evaluation("copying")
        found: dict[str, Any] = super().__getstate__()
        if self._rules is not None and (kept := self._rules.portable()) is not None:
            found["_rules"] = kept
        if self._blocks is not None:
            found["_blocks"] = self._blocks.portable()
        params = [entry.p for entry in self._entries()]
        if any(low_bits.ATTRIBUTE in p.__dict__ for p in params):
            found[low_bits.CARRIER] = low_bits.Carrier(params)
        return found

    # -- checkpoints ----------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a checkpoint of this class, bit for bit, or one of torch.optim, encoding its states.

        The options saved with the groups win, the plan among them; only `backend` stays.  All is checked first:
        ValueError lists what does not fit, and nothing has changed.  Nothing stays shared with `state_dict`.
        """
        self._refuse_in_evaluation("load_state_dict()")
        state_dict = checkpoint.opened(type(self), state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            if changed is not None:
                state_dict = changed
        with torch.no_grad():
            moved = self._offload.settle(self)
            try:
                loaded = checkpoint.read(type(self), self.param_groups, state_dict, self.state)
            except BaseException:
                for p, home in moved:
                    state.settle(p, home)
                raise
            started = [p for p in loaded.states if isinstance(p, Tensor) and state.of(loaded.states, p)]
            with interrupts.Later():
                self._fast_path, self._broke_off = fast_path.FastPath(), None
                weights.settle(loaded.rounded, started)
                self.state = defaultdict(dict, loaded.states)
                self.param_groups = loaded.groups
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def dense_state_dict(self) -> dict[str, Any]:
        """A state dict with fp32 tensors under torch's names, which torch.optim and every plan can load.

        What torch has no place for (the weights' low halves, the seed, the plan) is left out: see master_weights.
        """
        self._refuse_in_evaluation("dense_state_dict()")
        numbers = {id(entry.p): entry.position for entry in self._entries()}
        groups = []
        for group in self.param_groups:
            packed = {k: v for k, v in group.items() if k not in ("params", *options.OWN)}
            groups.append({**packed, "params": [numbers[id(p)] for p in group["params"]]})
        dense = {}
        with torch.no_grad():
            for entry in self._entries():
                kept = state.of(self.state, entry.p)
                if kept:
                    _, plan, variant = checkpoint.select(type(self), entry.group, entry.p, entry.name, kept)
                    state.check(variant, entry.p, kept, entry.name)
                    dense[entry.position] = checkpoint.dense_entry(plan, variant, entry.p, kept)
        return {"state": dense, "param_groups": groups}

    def master_weights(self) -> dict[str | int, Tensor]:
        """The weights at full precision, fp32, by name (by position where parameters have no names).

        Frozen ones that fp32 does not hold (integers, complex numbers, fp64) are copied as they are.
        ValueError where two parameters have one name, as those of two models may: see `master_state_dict`.
        """
        self._refuse_in_evaluation("master_weights()")
        names = [entry.name for entry in self._entries()]
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise ValueError(
                f"{type(self).__name__}.master_weights() is by name, and two parameters are called {twice[0]!r}: give "
                f"them different names, or take master_state_dict(model) of each model"
            )
        return dict(zip(names, self.full_weights(), strict=True))

    def full_weights(self) -> list[Tensor]:
        """The weights at full precision, fp32, in the order of the groups; frozen ones as in `master_weights`."""
        self._refuse_in_evaluation("full_weights()")
        with torch.no_grad():
            return [self._full_weight(entry) for entry in self._entries()]

    def _full_weight(self, entry: Entry) -> Tensor:
        kept = state.of(self.state, entry.p)
        if not kept:
            return weights.fresh(entry.p)
        _, plan, variant = checkpoint.select(type(self), entry.group, entry.p, entry.name, kept)
        return weights.full(plan, variant, entry.p, kept, entry.name)

    def _trained_entries(self) -> dict[int, Entry]:
        """id(parameter) -> its entry, of those that are trained."""
        return {
            id(entry.p): entry for entry in self._entries() if entry.p.requires_grad or state.of(self.state, entry.p)
        }

    def master_state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """The model's state dict with its weights at full precision: fp32, for `fp32_model.load_state_dict`.

        Names are the model's own, tied weights under all of theirs.  Parameters that are not this optimizer's and
        floating buffers keep their values (fp32 where they are narrower); all else is as it is.  Tensors are copies,
        on their parameters' devices.
        RuntimeError where a weight was changed by something else and no longer fits what is kept of it; ValueError for
        a model none of whose parameters is this optimizer's.
        """
        self._refuse_in_evaluation("master_state_dict()")
        self._say_lost_bits(model)
        owned = {key: functools.partial(self._full_weight, entry) for key, entry in self._trained_entries().items()}
        with torch.no_grad():
            return weights.of_model(model, type(self).__name__, owned)

    def load_master_state_dict(
        self, model: torch.nn.Module, state_dict: Mapping[str, Any], strict: bool = True
    ) -> None:
        """Set the model's weights, and the bits of them that this optimizer keeps, from a state dict of any floating
        dtype; fp32 loses nothing that the plan can hold.  Other states (moments) stay as they are.

        strict   refuse names that are missing or that the model does not have
        Before the first step the bits wait beside the parameters (those of DTensors in their states) until that step
        takes them.  All is checked first: ValueError lists what does not fit, RuntimeError names what was made under
        torch.inference_mode and cannot be written outside of it, and nothing has changed.
        """
        self._refuse_in_evaluation("load_master_state_dict()")
        entries = self._trained_entries()
        with torch.no_grad():
            found = weights.check(model, type(self).__name__, state_dict, entries, strict)
            ready = []
            for p, value in found.owned:
                entry = entries[id(p)]
                kept = state.of(self.state, p)
                _, plan, variant = checkpoint.select(type(self), entry.group, p, entry.name, kept or None)
                if kept:
                    state.check(variant, p, kept, entry.name)
                own = {f.name: (kept or {}).get(f.name) for f in variant.fields if f.owner == "p"}
                state.refuse_inference(p, entry.name, sharding.local(p), sharding.locals_of(own))
                ready.append((plan, variant, p, kept, value, entry.group))
            if found.rest:
                model.load_state_dict(found.rest, strict=False)
            for plan, variant, p, kept, value, group in ready:
                made = weights.put(plan, variant, p, kept, value, group)
                if made is not None:
                    self.state[p] = {**self.state.get(p, {}), **made}
            low_bits.carry(model)

    def plans(self) -> dict[Label, str]:
        """The plan that each parameter is kept under, by name (by position over all groups where it has none).

        ValueError where two parameters of one name are kept under different plans.
        """
        self._see_marks()
        found: dict[Label, str] = {}
        for entry in self._entries():
            if entry.p.requires_grad and found.setdefault(entry.name, self._plan_of(entry)) != self._plan_of(entry):
                raise ValueError(
                    f"{type(self).__name__}: two parameters are called {entry.name!r}, and they are kept under "
                    f"{found[entry.name]} and {self._plan_of(entry)}: give them different names"
                )
        return found

    def _plan_of(self, entry: Entry) -> str:
        return plans.chosen(type(self), entry.group, entry.p.dtype, entry.name).shown

    def memory(self) -> memory.Memory:
        """Bytes of the trainable weights and of their states, made already or not yet."""
        self._see_marks()
        measured = []
        for entry in self._entries():
            if entry.p.requires_grad or state.of(self.state, entry.p):
                variant = checkpoint.select(type(self), entry.group, entry.p, entry.name)[2]
                measured.append(memory.measure(entry.p, entry.name, self._plan_of(entry), variant))
        return memory.Memory(tuple(measured))
