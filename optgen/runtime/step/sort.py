"""Sort parameters with gradients into buckets: what shares a kernel; and in these into lines, which share scalars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optgen.runtime.checkpoint import checkpoint, inputs, weights
from optgen.runtime.layout import plans, sharded_states, sharding, workspace
from optgen.runtime.layout.fp8_weight import Fp8Weight, dtype_of
from optgen.runtime.layout.plans import Label
from optgen.runtime.options import blocks, options
from optgen.runtime.options.entries import Entry, Owner
from optgen.runtime.records import Variant, as_float, keys
from optgen.runtime.records.join import Pair
from optgen.runtime.states import state
from optgen.runtime.step import admit, backends, model_sums
from optgen.runtime.step.admit import Dtypes
from optgen.runtime.work import counting, gathered
from optgen.runtime.work.bucket import Backend, Bucket
from optgen.runtime.work.workers import Sending

_UNCUT: frozenset[str] = frozenset()
_WORK = frozenset({"work"})

_PLAIN = (torch.nn.Parameter, Tensor)
"""Classes of tensors that have memory of their own, if their storage has any."""

Fresh = list[tuple[Bucket, int]]
"""Parameters without states: their bucket, and their index in it."""


class Choice(NamedTuple):
    """The plan, the kernels and the backend of a parameter's step.

    plan     the rule under the plan
    variant  its kernels
    backend  the maker of the step: "triton"
    counted  True if steps are counted on the device, as capturable=True asks of Triton kernels
    sent     True if the host sends their scalars to the device, as capturable="host" asks
    rows     of each matrix of a parameter that is several of unequal numbers of rows: (64, 32); else ()
    """

    plan: Pair
    variant: Variant
    backend: Backend
    counted: bool
    sent: bool
    rows: tuple[int, ...]


class GroupChoices:
    """The choices of a group's parameters, one for all that are alike."""

    def __init__(self, cls: Any, group: dict[str, Any]) -> None:
        self._cls, self._group = cls, group
        self._own, self._blocks = plans.own(group), blocks.of(cls, group)
        self._made: dict[tuple[object, ...], Choice] = {}

    def find(self, entry: Entry) -> Choice:
        """Return the choice of a parameter.  Raises ValueError if its blocks do not divide its rows."""
        p, name = entry.p, entry.name
        count = self._blocks.get(name) if self._blocks else None
        kind = (dtype_of(p), p.device, p.shape, self._own.get(name) if self._own else None, count)
        choice = self._made.get(kind)
        if choice is None:
            choice = self._made[kind] = self._choose(p, name, count)
        return choice

    def _choose(self, p: Tensor, name: Label, count: blocks.Count | None) -> Choice:
        _, plan, variant = checkpoint.select(self._cls, self._group, p, name)
        backend = backends.able(backends.choose(self._group["backend"], p.device, plan), plan, variant)
        clocked = any(flag.clock is not None for flag in self._cls.FLAGS)
        asked = self._group.get("capturable") if backend == "triton" else None
        rows = count if isinstance(count, tuple) and variant.needs_matrix else ()
        sent = asked == options.HOST
        return Choice(plan, variant, backend, bool(asked) and not (sent or clocked), sent, rows)


class _Count(NamedTuple):
    """The steps that a parameter has made and its host states: numbers, or tensors if they are counted on the device.

    ready   its state is complete
    """

    step: Any
    host: tuple[Any, ...]
    on_device: bool
    ready: bool

    @property
    def key(self) -> tuple[object, ...]:
        return (id(self.step), *map(id, self.host)) if self.on_device else (self.step, self.host)


class _Sorter:
    """The buckets of a step, as parameters are added in order."""

    def __init__(self, owner: Owner, dtypes: Dtypes, sending: Sending) -> None:
        self.cls, self.states, self.dtypes, self.sending = owner.cls, owner.states, dtypes, sending
        self.buckets: dict[tuple[object, ...], Bucket] = {}
        self.chunks: dict[tuple[object, ...], tuple[int, int]] = {}
        self.lines: dict[tuple[object, ...], int] = {}
        self.inputs = bool(self.cls.INPUTS)
        self.clocked = any(flag.clock is not None for flag in self.cls.FLAGS)
        self.fresh: Fresh = []
        self.sharded, self.capturing = sharding.kind(), counting.capturing()
        limits = [name for flag in self.cls.FLAGS for name in flag.limits]
        self.deciding = [f.nonzero or f.name for f in self.cls.FLAGS if f.nonzero or not f.derived] + limits

    def begin(self, number: int, group: dict[str, Any]) -> None:
        """Parameters of this group follow."""
        options.check_again(self.cls, group)
        self.number, self.group = number, group
        self.workspace = group.get("workspace") or workspace.USUAL
        self.choices = GroupChoices(self.cls, group)

    def add(self, entry: Entry, g: Tensor) -> None:
        """Add a parameter to its bucket, a new one if there is none."""
        p, name = entry.p, entry.name
        grad_dtype = admit.check_pair(self.cls, self.dtypes, p, g, name)
        choice = self.choices.find(entry)
        kept: state.State | None = self.states.get(p)
        # The count of steps is asked last: the host would wait for one that is on a device.
        if self.deciding and kept and kept.keys() != choice.variant.keys and kept.get("step"):
            self._refuse_changed(choice, kept, state.label(p, name))
        shard, cut, size = self._shard(entry, choice, kept)
        if choice.variant.views or isinstance(p, Fp8Weight):
            admit.refuse_views(self.cls, entry, choice.variant, bool(choice.rows))
        count = self._count(choice, kept, p, name)
        if self.inputs:
            inputs.check_fed(self.cls, choice.variant, count.host, state.label(p, name))
        bucket = self._bucket(entry, choice, grad_dtype, cut, count, size)
        line = self.lines.setdefault((id(bucket), self.number, *count.key), len(bucket.lines))
        if line == len(bucket.lines):
            bucket.lines.add(self.number, entry.position, count.step, count.host)
        if not count.ready:
            self.fresh.append((bucket, len(bucket.params)))
        if shard is not None:
            (p, g), kept = admit.local_pair(self.cls, p, g, name), sharding.locals_of(shard.owner)
        if not _has_memory(p, g):
            g = admit.in_memory(self.cls, p, g, name, choice.backend == "reference")
        bucket.line_of.append(line)
        bucket.shards.append(shard)
        bucket.params.append(p)
        bucket.grads.append(g)
        bucket.states.append(kept if kept is not None else {})
        if choice.rows:
            bucket.pieces[len(bucket.names)] = name, choice.rows
        bucket.streams.append(keys.stream_key(name))
        bucket.names.append(name)
        bucket.positions.append(entry.position)

    def _shard(
        self, entry: Entry, choice: Choice, kept: state.State | None
    ) -> tuple[sharded_states.ShardedParameter | None, frozenset[str], int]:
        """Return how a parameter lies over ranks, if it does, what of its matrices is cut, and the elements of the
        largest part."""
        sending = self.sending.get(entry.p)
        uncut = _UNCUT if sending is None or sending[0].dims() else _WORK
        if self.sharded is None or not isinstance(entry.p, self.sharded):
            return None, uncut, entry.p.numel()
        shard = admit.shard(self.cls, choice.plan, choice.variant, entry, kept)
        if uncut:
            return shard, uncut, entry.p.numel()
        cut = _UNCUT if shard.gathered else shard.layout.roles(choice.variant.matrix)
        return shard, cut, sharding.largest_part(shard.layout) if cut else entry.p.numel()

    def _bucket(
        self, entry: Entry, choice: Choice, grad_dtype: torch.dtype, cut: frozenset[str], count: _Count, size: int
    ) -> Bucket:
        """Return the bucket of a parameter, a new one if there is none; size: elements of the largest part of it."""
        variant, device = choice.variant, entry.p.device
        at_step: options.Setting = ()
        if self.clocked:
            assert not isinstance(count.step, Tensor)  # such flags are not counted on a device
            host = dict(zip(variant.host_names, count.host, strict=True))
            at_step = options.at_step(self.cls, self.group, count.step + 1, entry.position, host)
        kind: tuple[object, ...] = (variant, choice.backend, choice.counted, choice.sent, self.workspace)
        kind, turn = (*kind, grad_dtype, device, cut, at_step), 0
        if choice.counted and any(stage.on_host for stage in variant.stages):
            kind = (*kind, self.number)  # what torch computes takes numbers that all lines have
        if variant.left_per_element and not (cut and variant.model_temps):
            chunk = self._chunk(kind, variant.left_per_element * size)
            kind, turn = (*kind, chunk), chunk if cut else 0
        bucket = self.buckets.get(kind)
        if bucket is None:
            bucket = self.buckets[kind] = Bucket(
                choice.plan, variant, choice.backend, device, grad_dtype, choice.counted, choice.sent, cut=cut,
                at_step=at_step, workspace=self.workspace, turn=turn, kind=kind,
            )  # fmt: skip
        return bucket

    def _refuse_changed(self, choice: Choice, kept: state.State, label: str) -> None:
        """Raise ValueError for a parameter that has other states under options that were changed since its steps."""
        if kept.keys() - frozenset().union(*(v.keys for v in choice.plan.variants)):
            return  # of another plan, or changed by hand: its check says what does not fit
        owners = {f.name: f.owner for v in choice.plan.variants for f in v.fields if f.owner != "p"}
        made, wanted = ({owners[key] for key in keys if key in owners} for keys in (kept, choice.variant.keys))
        if made != wanted:
            had, has = ("with", "does not have") if made - wanted else ("without", "has")
            names = ", ".join(sorted(made - wanted or wanted - made))
            options = ", ".join(f"{x}={self.group[x]!r}" for x in dict.fromkeys(self.deciding))
            raise ValueError(
                f"{self.cls.__name__}: {label} has made steps {had} {names}, which it {has} under {options}: set that "
                f"back, or make a new optimizer"
            )

    def _chunk(self, key: tuple[object, ...], size: int) -> int:
        """Return the number of the bucket for a parameter of so many bytes of workspace, among those that are alike."""
        chunk, used = self.chunks.get(key, (0, 0))
        if used and used + size > self.workspace:
            chunk, used = chunk + 1, 0
        self.chunks[key] = chunk, used + size
        return chunk

    def _count(self, choice: Choice, kept: state.State | None, p: Tensor, name: Label) -> _Count:
        """Return how many steps a parameter has made."""
        step = kept.get("step") if kept else None
        if choice.counted and kept is not None and counting.is_there(step, torch.int64, p.device):
            host = tuple([kept.get(key) for key in choice.variant.host_names])
            if all(counting.is_there(x, torch.float64, p.device) for x in host):
                return _Count(step, host, True, True)
        if self.capturing and not (choice.sent and step):
            raise counting.not_ready(state.label(p, name))
        if type(step) is not int or step <= 0:  # new, or put there by somebody else
            step = _steps(kept, p, name)
        host = tuple([_host_state(key, value, kept, p, name) for key, value in choice.variant.host_states])
        return _Count(step, host, False, step > 0)


def _has_memory(p: Tensor, g: Tensor) -> bool:
    """Return True if a parameter and its gradient have memory of their own, as nearly all have; False if it needs a
    closer look."""
    return not (
        type(g) is not Tensor
        or type(p) not in _PLAIN
        or not p.untyped_storage().nbytes()
        or not g.untyped_storage().nbytes()
        or g._is_zerotensor()
        or p._is_zerotensor()
    )


def _steps(kept: state.State | None, p: Tensor, name: Label) -> int:
    """Return the steps of a state that is new or was not made here; 0 if fields may still have to be filled in."""
    count = state.step_count(kept["step"]) if kept and "step" in kept else 0
    if count is None:
        got = kept["step"] if kept else None
        raise RuntimeError(f"{state.label(p, name)}: step must be a whole number >= 0, got {got!r}")
    if kept and count:
        kept["step"] = count
    return count


def _host_state(key: str, start: float, kept: state.State | None, p: Tensor, name: Label) -> float:
    """Return a host state as a number; `start` in a new state."""
    if not kept:
        return start
    value = kept.get(key, None if kept.get("step") else start)
    if type(value) is not float:
        value = as_float(value)
        if value is None:
            raise RuntimeError(f"{state.label(p, name)}: {key} must be a number, got {kept.get(key, 'nothing')!r}")
    return value


def buckets(
    owner: Owner,
    listed: Sequence[Entry],
    sending: Sending,
    elsewhere: Mapping[Tensor, Tensor],
    dtypes: Dtypes,
    fed: bool = True,
) -> tuple[list[Bucket], Fresh]:
    """Sort the parameters that have gradients; return the buckets, and the parameters whose states are to be made.

    sending     the parameters in whose steps ranks send
    elsewhere   gradients of parameters that have theirs on other ranks
    fed         whether inputs must have been fed
    """
    sorter = _Sorter(owner, dtypes, sending)
    sorter.inputs &= fed
    number = -1
    for entry in listed:
        if entry.number != number:
            number = entry.number
            sorter.begin(number, entry.group)
        g = entry.p.grad
        if g is None:
            g = elsewhere.get(entry.p) if elsewhere else None
        if g is not None:
            sorter.add(entry, g)
    found, fresh = list(sorter.buckets.values()), sorter.fresh
    for bucket in found if sorter.clocked else ():
        bucket.variant = plans.at_step(bucket.plan, bucket.variant, bucket.at_step)
    _compile(owner, found)
    _refuse_thawed(owner.cls, fresh)
    model_sums.check(found)
    return found, fresh


def _compile(owner: Owner, found: Sequence[Bucket]) -> None:
    """Give buckets C++ kernels, or strict maths where eager torch makes the step."""
    options = [{owner.groups[k]["backend"] for k in b.lines.groups} for b in found]
    backends.compile_all(found, [max(x, key=lambda option: option != "auto") for x in options])  # a request counts
    for bucket in found:
        if bucket.backend == "reference":
            bucket.variant = plans.strict(bucket.plan, bucket.variant)


def _refuse_thawed(cls: Any, fresh: Fresh) -> None:
    """Raise ValueError for a parameter that would have been refused, if it had not been frozen when it was given."""
    for b, i in fresh:
        if b.variant.needs_matrix and len(b.params[i].shape) < 2:
            raise admit.no_matrix(cls, b.params[i], b.names[i])
        admit.refuse_flattened(cls, b.params[i], b.names[i])


def complete(owner: Owner, found: Sequence[Bucket], fresh: Fresh) -> None:
    """Gather what buckets need of other ranks, make the missing states, and write the weights that belong to them.
    Parameters that are matrices of unequal numbers of rows are divided then."""
    gathered.collect(found)
    rounded: list[tuple[Tensor, Tensor]] = []
    new = []
    for b, i in fresh:
        line = b.line_of[i]
        group, step = owner.groups[b.lines.groups[line]], b.lines.steps[line]
        new.append(state.create(b.plan, b.variant, b.kept(i), b.states[i], group, rounded, step, b.parts(i)))
    model_sums.begin(owner.states, new, fresh, owner.groups)
    for (b, i), made in zip(fresh, new, strict=True):
        b.states[i] = made
        shard = b.shards[i]
        if shard is None:
            owner.states[b.params[i]] = made
        else:
            added = {key: value for key, value in made.items() if key == "step" or key not in shard.owner}
            shard.owner.update(shard.parts.wrapped(added))
            owner.states[shard.p] = shard.owner
    weights.settle(rounded, [b.kept(i) for b, i in fresh])
    gathered.collect_states(found)
    for bucket in found:
        bucket.divide()
