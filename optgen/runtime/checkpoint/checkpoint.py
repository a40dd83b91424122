"""Reading and writing of optimizer checkpoints.

torch's own load casts every floating state to the parameter's dtype, which destroys integer codes, scales and the low
halves of split weights. `read` checks everything before it returns what the optimizer takes over, so an error leaves
the optimizer as it was.

Three kinds of per-parameter state are read: the fields of the parameter's variant, copied bit for bit; the dense
tensors of torch.optim under the states' names, encoded; and the states of a few other packages (`optgen.convert`),
decoded first.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from optgen.runtime.layout import layout, messages, plans, sharded_states, sharding
from optgen.runtime.layout.fp8_weight import dtype_of, kept_with
from optgen.runtime.options import blocks, options, overrides
from optgen.runtime.options.entries import Entry
from optgen.runtime.options.entries import labels as labels_of
from optgen.runtime.records import Variant, as_float, fed_name
from optgen.runtime.records.join import Pair
from optgen.runtime.records.problems import SHOWN, Problems
from optgen.runtime.records.warn import warn
from optgen.runtime.states import low_bits, state

Groups = list[dict[str, Any]]
Keys = list[list[Any]]
"""The keys that tell the parameters of each group apart: their names, or (group, place)."""

FORMAT = 5
"""The form of a group and its states, saved under "format"; no other is read. It rises where keys of groups or states
change after a release.
"""


def other_form(group: Mapping[str, Any]) -> str:
    """Describe a group of another form, or with a form and no plan; "" for one that is read."""
    found = group.get("format")
    if "plan" in group and (type(found) is not int or found != FORMAT):
        return f"expected a checkpoint of format {FORMAT}, got format {found!r}, which is not read"
    return "expected 'plan', it is missing" if "format" in group and "plan" not in group else ""


def is_stack(cls: Any, group: Mapping[str, Any], p: Tensor, label: plans.Label) -> bool:
    """Return True if a rule of matrix="heads" takes a parameter as a stack of matrices."""
    if cls.BLOCKS != "heads" or p.ndim != 3:
        return False
    variant = select(cls, group, p, label)[2]
    return variant.needs_matrix and variant.matrix == "last"


Absent = list[tuple[Tensor, str]]
"""Parameters without a state in a checkpoint, and their names."""


class Loaded(NamedTuple):
    """The states and groups that an optimizer takes over.

    rounded   (p, its new values): weights whose low bits went into the states
    numbers   id(parameter) -> its number in the checkpoint
    """

    states: dict[Any, state.State]
    groups: Groups
    rounded: list[tuple[Tensor, Tensor]]
    numbers: dict[int, Any]


def read(cls: Any, groups: Groups, saved: Mapping[str, Any], present: Mapping[Any, Any]) -> Loaded:
    """Read a state dict for an optimizer of class `cls` with these groups and the states `present`.

    The result shares nothing with `saved`. Raises ValueError listing all misfits.
    """
    misfits = Problems(f"{cls.__name__}.load_state_dict: the checkpoint does not fit, nothing was loaded")
    saved_groups, saved_state = parts(saved, misfits)
    saved_groups = _aligned(groups, saved_groups)
    order, sources = matched = match(groups, saved_groups, misfits)
    bare = all(isinstance(entry, Mapping) and not entry for entry in saved_state.values())
    pairs = enumerate(zip(groups, sources, strict=True))
    merged = [_merge(cls, i, *pair, order, bare, misfits) for i, pair in pairs]
    misfits.stop()
    _take_settings(cls, groups, merged, saved_groups, matched)
    known = set(order.values())
    misfits.lines += [
        f"state of {key!r}: expected parameters of the groups only, it is in none"
        for key in saved_state
        if key not in known
    ]
    loaded, absent = Loaded({}, merged, [], order), Absent()
    for group, saved_group, labels in zip(merged, sources, labels_of(merged), strict=True):
        reading = _Reading(cls, group, saved_group, misfits, loaded)
        absent += reading.read(labels, [order[id(p)] for p in group["params"]], saved_state)
    if messages.anywhere(bool(misfits.lines), [p for group in merged for p in group["params"]]) and not misfits.lines:
        misfits.add("another rank found what does not fit its parts, and says it")
    misfits.stop()
    _warn_of_absent(cls, absent, present, loaded.states)
    _warn_of_names(cls, groups, sources)
    return loaded


def _warn_of_names(cls: Any, groups: Groups, sources: Sequence[Mapping[str, Any]]) -> None:
    """Warn if an optimizer with names goes on from a checkpoint without them."""
    unnamed = [source for source in sources if "plan" in source and source["params"] and not source.get("param_names")]
    if unnamed and any(group.get("param_names") for group in groups):
        warn(
            f"{cls.__name__}.load_state_dict: the checkpoint is of an optimizer without names: random bits follow the "
            f"names of this one from now on, and are others than its run would have had",
            cls,
        )


def _warn_of_absent(cls: Any, absent: Absent, present: Mapping[Any, Any], states: Mapping[Any, Any]) -> None:
    """Warn of parameters without a state in a checkpoint of steps, unless no step was made of them here either."""
    started = any(not entry or "step" in entry for entry in state.of_parameters(present))
    names = [name for p, name in absent if not started or state.of(present, p)]
    if names and any("step" in entry for entry in state.of_parameters(states)):
        warn(
            f"{cls.__name__}.load_state_dict: the checkpoint has no state for {len(names)} parameters "
            f"{some(names)}: they start anew",
            cls,
        )


reader = partial(importlib.import_module, "optgen.convert.packages")
"""Load the reader of other packages' states; optgen's own checkpoints do without it."""


def opened(optimizer: torch.optim.Optimizer, saved: Any) -> dict[str, Any]:
    """Return a state dict as an optimizer's hooks leave it, which get a copy; TypeError if it is no mapping."""
    if not isinstance(saved, Mapping):
        name = type(optimizer).__name__
        raise TypeError(f"{name}.load_state_dict takes the dict that state_dict() made, got {saved!r:.80}")
    found = dict(saved)
    for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = pre_hook(optimizer, found)
        if changed is not None:
            found = changed
    return found


def parts(saved: Mapping[str, Any], misfits: Problems) -> tuple[list[Mapping[str, Any]], Mapping[Any, Any]]:
    """Return (groups, states by the parameters' numbers) of a state dict; ValueError if it is built otherwise."""
    groups, entries = saved.get("param_groups"), saved.get("state")
    if not isinstance(groups, Sequence) or not all(
        isinstance(g, Mapping) and isinstance(g.get("params"), Sequence) for g in groups
    ):
        misfits.add("expected 'param_groups': a list of groups, each with 'params'")
    if not isinstance(entries, Mapping):
        misfits.add("expected 'state': a dict by parameter number")
    misfits.stop()
    assert isinstance(groups, Sequence) and isinstance(entries, Mapping)
    seen: set[Any] = set()
    for i, group in enumerate(groups):
        misfits.lines += [f"group {i}: {line}" for line in _wrong_in_group(group, seen)]
    filled = ["plan" in group for group in groups if group["params"]]
    if any(filled) and not all(filled):  # torch.distributed.checkpoint gives a saved group's options to one group
        misfits.add("expected 'plan' in every group: some have no options, as those that were one when it was saved")
    misfits.stop()
    return list(groups), entries


def _wrong_in_group(group: Mapping[str, Any], seen: set[Any]) -> Iterator[str]:
    """Yield what is wrong with a saved group, whatever the optimizer; `seen` has the parameters of earlier groups."""
    if line := other_form(group):
        yield line
    for number in group["params"]:
        if not isinstance(number, (int, str)):
            yield f"expected numbers of parameters in 'params', got {_short(number)}"
        elif number in seen:
            yield f"expected each parameter once in 'params', {_short(number)} is there again"
        else:
            seen.add(number)
    names = group.get("param_names", ())
    if names is not None and not (isinstance(names, (list, tuple)) and all(isinstance(x, (str, int)) for x in names)):
        yield f"expected names in 'param_names', got {_short(names)}"
    elif names is not None and "param_names" in group and len(names) != len(group["params"]):
        yield f"expected {len(group['params'])} names in 'param_names', got {len(names)}"


def without_values(value: Tensor) -> str:
    """Describe a tensor without memory for each of its elements, reading which would crash the process; "" if it has
    it."""
    if value.is_meta:
        return "on the meta device"
    if value.layout is not torch.strided:
        return f"of layout {value.layout}"
    if type(value) not in (Tensor, nn.Parameter) or not value.numel():  # those of other types are made of others
        return ""
    last = value.storage_offset() + sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
    return "" if (last + 1) * value.element_size() <= value.untyped_storage().nbytes() else "whose memory was freed"


def _short(value: object) -> str:
    """Return a short text of any value for an error message."""
    if isinstance(value, Tensor) and value.ndim:
        return state.describe(value.dtype, tuple(value.shape))
    return f"{value!r:.80}"


def _finite(value: object) -> float | None:
    number = as_float(value)
    return number if number is not None and math.isfinite(number) else None


class Matched(NamedTuple):
    """The places of parameters and groups in a checkpoint.

    order    id(parameter) -> its number in the checkpoint
    sources  the saved group that each group takes its options from: the one that has its parameters
    """

    order: dict[int, Any]
    sources: list[Mapping[str, Any]]


def match(groups: Groups, saved: list[Mapping[str, Any]], misfits: Problems) -> Matched:
    """Match parameters by name over all groups if both sides have names that tell them apart, else by position.

    Names of wrappers (torch.compile, checkpoint_wrapper) are ignored unless both sides have the same names.  Raises
    ValueError listing what one side lacks, and the groups whose parameters are in several saved ones.
    """
    mine, theirs = _keys(groups, saved, misfits)
    own, others = (set[Any]().union(*keys) for keys in (mine, theirs))
    if own != others:
        lacking, extra = some([*own - others]), some([*others - own])
        line = f"expected parameters {lacking}, " if own - others else f"parameters {extra}: not expected"
        line += "" if own <= others else f"got {extra} in their place" if others - own else "they are missing"
        if not own & others:
            line += "; no name is known: without 'param_names' in its groups, a state dict is read by position"
        misfits.add(line)
    misfits.stop()
    places = {
        key: (number, i)
        for i, (keys, other) in enumerate(zip(theirs, saved, strict=True))
        for key, number in zip(keys, other["params"], strict=True)
    }
    alike = [*map(set, mine)] == [*map(set, theirs)]
    order, sources = dict[int, Any](), list[Mapping[str, Any]]()
    for i, (keys, group) in enumerate(zip(mine, groups, strict=True)):
        order |= {id(p): places[key][0] for key, p in zip(keys, group["params"], strict=True)}
        several = sorted({places[key][1] for key in keys})
        if len(several) > 1:
            misfits.add(f"group {i}: expected its parameters in one group, they are in groups {several}")
        sources.append(saved[several[0]] if several else saved[i] if alike else {"params": []})
    misfits.stop()
    return Matched(order, sources)


def _keys(groups: Groups, saved: list[Mapping[str, Any]], misfits: Problems) -> tuple[Keys, Keys]:
    """Return by what parameters are matched: names, or (group, place) where one side has none or one of them twice."""
    mine, theirs = _names(groups), _names(saved)
    if mine and theirs:
        same = set().union(*mine) == set().union(*theirs)
        found = (mine, theirs) if same else (_bare(mine), _bare(theirs))
        if all(len(set().union(*keys)) == sum(map(len, keys)) for keys in found):
            return found
    if len(groups) != len(saved):
        misfits.add(f"expected {len(groups)} parameter groups, got {len(saved)}")
    for i, (group, other) in enumerate(zip(groups, saved, strict=False)):
        if (want := len(group["params"])) != (got := len(other["params"])):
            misfits.add(f"group {i}: expected {want} parameters, got {got}")
    if mine and theirs and mine != theirs:
        misfits.add("several parameters have one name, and names or groups are others than those saved")
    misfits.stop()
    places = [[(i, k) for k, _ in enumerate(group["params"])] for i, group in enumerate(groups)]
    return places, places


def _names(groups: Sequence[Mapping[str, Any]]) -> Keys | None:
    """Return the names of each group's parameters; None if a group with parameters has no names, or none has any."""
    found = [list(group.get("param_names") or ()) for group in groups]
    if not any(found) or any(len(x) != len(group["params"]) for x, group in zip(found, groups, strict=True)):
        return None
    return found


def _bare(keys: Keys) -> Keys:
    """Return names without those of wrappers."""
    return [[overrides.bare(name) if isinstance(name, str) else name for name in names] for names in keys]


def some(names: Sequence[plans.Label]) -> str:
    """Return a list of names for an error message, which shows the first ones."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{sorted(names, key=str)[:SHOWN]}{more}"


def _aligned(groups: Groups, saved: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return saved groups with `param_names` in the order of `params`.

    torch.distributed.checkpoint names parameters as the model does, and puts them, but not `param_names`, in the order
    of the optimizer.
    """
    found = []
    for i, other in enumerate(saved):
        names, params = other.get("param_names"), other["params"]
        if names and all(isinstance(number, str) for number in params):
            by_bare = {overrides.bare(str(name)): name for name in names}
            present = groups[i].get("param_names") or () if i < len(groups) else ()
            if by_bare.keys() == {overrides.bare(number) for number in params}:
                other = {**other, "param_names": [by_bare[overrides.bare(number)] for number in params]}
            elif Counter(present) == Counter(names):  # of other names than the model's
                other = {**other, "param_names": list(present)}
        found.append(other)
    return found


def _merge(
    cls: Any, index: int, group: Mapping[str, Any], saved: Mapping[str, Any], order: Mapping[int, Any], bare: bool,
    misfits: Problems,
) -> dict[str, Any]:  # fmt: skip
    """Return the group after loading: present parameters, with saved options and names over the present ones.

    bare   True if there is no state, which would tell if the options are another rule's
    """
    absent = [hyper.name for hyper in cls.HYPERS if bare and hyper.name not in saved and saved["params"]]
    if absent:
        misfits.add(f"group {index}: expected {', '.join(absent)}, they are missing, and so are all states")
    taken = {key: copy.deepcopy(value) for key, value in saved.items() if key not in options.FOREIGN}
    if (given := taken.pop("param_names", None)) is not None:  # what random bits go by; in the present order
        names = dict(zip(saved["params"], given, strict=True))
        taken["param_names"] = [names[order[id(p)]] for p in group["params"]]
    merged = {**group, **({options.MODE: True} if options.MODE in group else {}), **taken}
    try:
        merged.update(options.check(cls, merged))
        merged["plan"] = options.record_plan(cls, merged["plan"], merged["params"])
    except (TypeError, ValueError) as error:
        misfits.add(f"group {index}: {error}")
    return merged


def _take_settings(
    cls: Any, groups: Groups, merged: Groups, saved: Sequence[Mapping[str, Any]], matched: Matched
) -> None:
    """Give merged groups the checkpoint's plans and blocks of single parameters, under the present names.

    Groups of other packages have none and change nothing. Warns if they differ from the optimizer's.
    """
    for key, read in (("overrides", plans.own), ("blocks", partial(blocks.of, cls)))[: 1 + bool(cls.BLOCKS)]:
        theirs = {
            number: own.get(label)
            for group, labels in zip(saved, labels_of(saved), strict=True)
            for own in (read(group),)
            for number, label in zip(group["params"], labels, strict=True)
        }
        settings: list[tuple[Any, ...]] = []
        rows = zip(groups, labels_of(groups), merged, labels_of(merged), matched.sources, strict=True)
        for present, before, group, after, other in rows:
            found = mine = [read(present).get(label) for label in before]
            if "plan" in other:
                found = [theirs[matched.order[id(p)]] for p in group["params"]]
            settings += zip(group["params"], after, mine, found, strict=True)
            group.pop(key, None)
            if kept := tuple((label, value) for label, value in zip(after, found, strict=True) if value is not None):
                group[key] = kept
        _warn_of_changed(cls, key, settings)


def _warn_of_changed(cls: Any, key: str, settings: Sequence[tuple[Any, ...]]) -> None:
    """Warn if a checkpoint changes the plans or blocks of parameters; settings: (parameter, label, before, after)."""
    changed = [(label, was, now) for p, label, was, now in settings if was != now and p.requires_grad]
    for label, was, now in changed[:1]:
        warn(
            f"{cls.__name__}.load_state_dict: the checkpoint keeps {len(changed)} parameters otherwise than the "
            f"`{key}` of this optimizer say, and is followed: {label!r} has {now}, not {was}",
            cls,
        )


def select(
    cls: Any, group: Mapping[str, Any], p: Tensor, name: plans.Label | None = None
) -> tuple[str, Pair, Variant]:
    """Return (plan name, plan, variant) of a parameter under the options of its group.

    name  the parameter's label in its group: its name, or its position over all groups; None if it has no plan of its
          own
    """
    chosen = plans.chosen(cls, group, name)
    count = blocks.of(cls, group).get(name) if name is not None else None
    try:
        shape = blocks.shape(cls, p, count)
    except ValueError as error:
        raise ValueError(f"{cls.__name__}: blocks: parameter {name!r} {error}") from None
    flags = options.flags_of(cls, group, shape, name)
    small, vector = p.numel() < chosen.limit, p.ndim < 2
    found = plans.variant(chosen.pair, dtype_of(p), small, flags, vector)
    return chosen.name, chosen.pair, blocks.seen(cls, found, p, count, group, name)


def keys_of(cls: Any, entry: Entry) -> frozenset[str]:
    """Return the keys that a parameter's state may have under its plan, whatever the flags."""
    return _keys_of(plans.chosen(cls, entry.group, entry.name).pair)


@lru_cache(maxsize=256)
def _keys_of(plan: Pair) -> frozenset[str]:
    return frozenset({"step", state.TRAINED}).union(*(variant.keys for variant in plan.variants))


@dataclass(frozen=True)
class _Reading:
    """The states of a group's parameters, read into `loaded`."""

    cls: Any
    group: Mapping[str, Any]
    saved: Mapping[str, Any]
    misfits: Problems
    loaded: Loaded

    @property
    def own(self) -> bool:
        """True for a group of optgen, False for one of torch.optim or another package."""
        return "plan" in self.saved

    @property
    def evaluating(self) -> bool:
        """True for a group that was saved in evaluation, of a rule that has weights for it."""
        return self.cls.evaluation is not None and self.group[options.MODE] is False

    def read(self, labels: Sequence[plans.Label], numbers: Sequence[Any], saved: Mapping[Any, Any]) -> Absent:
        """Read the states; returns the parameters that have none in the checkpoint, and their names.

        numbers   the parameters' numbers in the checkpoint
        """
        group = self.group
        names = numbers if group.get("param_names") is None else group["param_names"]
        absent = Absent()
        for p, label, number, name in zip(group["params"], labels, numbers, names, strict=True):
            entry: Any = saved.get(number)
            where = state.label(p, name)
            if self.own and self._is_fed(entry):
                self.loaded.states[p] = self._fed(p, entry, where)
                entry = None
            source = None if entry is None else self.opened(p, label, entry, where)
            if source is not None:
                self.loaded.states[p] = source.read()
            elif p.requires_grad:
                absent.append((p, str(name)))
        return absent

    def _is_fed(self, entry: Any) -> bool:
        """Return True for inputs of a first step still to come."""
        names = {x for name in self.cls.INPUTS for x in (name, fed_name(name))}
        return isinstance(entry, Mapping) and bool(entry) and entry.keys() <= names

    def _fed(self, p: Tensor, entry: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return copies of inputs; misfits for those that `feed` does not leave there."""
        want, found = state.describe(torch.float32, tuple(p.shape)), dict[str, Any]()
        for name in (x for x in self.cls.INPUTS if x in entry or fed_name(x) in entry):
            value, fed = entry.get(name), as_float(entry.get(fed_name(name)))
            if not isinstance(value, Tensor) or without_values(value) or state.kind(value) != want or fed not in (1, 2):
                self.misfits.add(f"{where}: {name}: expected {want} that is fed, got {_short(value)} and {fed}")
            else:
                found |= {name: value.detach().to(p.device, copy=True), fed_name(name): fed}
        return found

    def opened(self, target: Tensor, label: plans.Label, entry: Any, where: str) -> _Source | None:
        """Return the source of a parameter's state; None if there is nothing to read, or misfits were found."""
        if not isinstance(entry, Mapping):
            self.misfits.add(f"{where}: expected a dict of states, got {_short(entry)}")
            return None
        found = {key: value for key, value in entry.items() if value is not None}
        for key, value in itertools.chain(
            found.items(), *(x.items() for x in found.values() if isinstance(x, Mapping))
        ):
            if isinstance(value, Tensor) and (kind := without_values(value)):
                self.misfits.add(f"{where}: {key}: expected a tensor with values, got one {kind}")
                return None
        if not found:
            return None
        trained = found.pop(state.TRAINED, None) if self.evaluating else None
        if self.evaluating and not isinstance(trained, Tensor):
            self.misfits.add(f"{where}: {state.TRAINED}: it is missing, and the checkpoint was taken in evaluation")
            self.misfits.heading = self.misfits.heading.removesuffix(EVALUATED) + EVALUATED
            return None
        try:
            plan_name, plan, variant = select(self.cls, self.group, target, label)
            where = f"{where}, plan {plan_name}"
            return self._source(plan, variant, target, label, found, trained, where)
        except (TypeError, ValueError) as error:
            self.misfits.add(f"{where}: {error}")
            return None

    def _source(
        self, plan: Pair, variant: Variant, target: Tensor, label: plans.Label, found: dict[str, Any],
        trained: Tensor | None, where: str,
    ) -> _Source:  # fmt: skip
        """Return the source of a parameter's state; TypeError or ValueError if it does not fit."""
        errors, p, parts, exact = None, state.at_home(target), None, None
        if not self.own:
            errors = found.get("error_bits")
            found = reader().dense(found, variant.states, tuple(target.shape))
        if sharding.is_sharded(p):
            parts = sharded_states.ShardedStates.of(p, variant)
            p, found = parts.weight(p), parts.taken(found)
            errors = parts.beside("error_bits", errors) if isinstance(errors, Tensor) else errors
        if trained is not None:
            trained = _trained(trained, target, p, parts, self.own)
        if not self.own:
            exact = reader().weight({"error_bits": errors}, p, self.group.get("master_bytewidth"))
        return _Source(self, plan, variant, target, p, parts, found, exact, trained, where)


EVALUATED = (
    " (torch.distributed.checkpoint reads what the optimizer's own state dict has: make the states by "
    "get_optimizer_state_dict, call eval(), and load once more)"
)


def _trained(value: Tensor, target: Tensor, p: Tensor, parts: sharded_states.ShardedStates | None, own: bool) -> Tensor:
    """Return a copy of a weight of training that stands beside p, fp32 if it is from a dense state dict.

    Raises ValueError if it does not fit.
    """
    want = state.describe(target.dtype if own else torch.float32, tuple(target.shape))
    if state.kind(value) != want:
        raise ValueError(f"{state.TRAINED}: expected {want}, got {_short(value)}")
    part = value if parts is None else parts.beside(state.TRAINED, value)
    return part.detach().to(p.device, copy=True).contiguous()


@dataclass(frozen=True)
class _Source:
    """The saved state of one parameter, and what it is read for.

    target   the parameter; p is the same, or if it is sharded this rank's part of it or a copy of all of it
    parts    the layout of a sharded parameter
    exact    the full weight, if another package saved it
    trained  the weight of training, if it was saved in evaluation: as it was, or full from a dense state dict
    where    the parameter and its plan, as misfits call it
    """

    reading: _Reading
    plan: Pair
    variant: Variant
    target: Tensor
    p: Tensor
    parts: sharded_states.ShardedStates | None
    entry: Mapping[str, Any]
    exact: Tensor | None
    trained: Tensor | None
    where: str

    def misfit(self, line: str) -> None:
        self.reading.misfits.add(f"{self.where}: {line}")

    def read(self) -> state.State:
        """Return the state, which is of no use if misfits were found."""
        variant, misfits = self.variant, self.reading.misfits.lines
        before, dense = len(misfits), not self.reading.own and self._is_dense()
        expected = {*variant.states, *variant.host_names, "step"} if dense else variant.keys
        expected -= kept_with(self.p, {}).keys()
        for key in sorted(map(str, self.entry.keys() - expected)):
            self.misfit(f"{key}: not expected (it has {', '.join(sorted(expected))})")
        made, whole = dict[str, Any](step=1), self._whole() if dense else {}
        for key, want, read in self._expected(dense):
            value = self.entry.get(key)
            made[key] = read(value)
            if made[key] is None:
                self.misfit(f"{key}: expected {want}, {'it is missing' if value is None else f'got {_short(value)}'}")
        if dense:
            self._numbers({**self.entry, **whole}, variant.states, variant.nonneg)
        if len(misfits) == before:
            shown = self._encode(made, whole) if dense else self._checked(made)
            if self.trained is not None and not dense:
                shown = self.trained
            if shown is not None:
                self._show(shown, made)
        return kept_with(self.p, made) if self.parts is None else self.parts.wrapped(made)

    def _is_dense(self) -> bool:
        """Return True if the entry holds torch's dense tensors of the states, not the variant's own fields."""
        fields, found = self.variant.fields, self.entry
        shapes = {f.owner: state.shape(f.of_values, self.p, self.parts) for f in fields if not f.wide}
        if any(f.name in found for f in fields if f.name not in self.variant.states):
            return False
        for name in self.variant.states:
            value, shape = found.get(name), shapes.get(name, tuple(self.p.shape))
            if not isinstance(value, Tensor) or not value.is_floating_point() or tuple(value.shape) != shape:
                return False
        return any(f.name not in self.variant.states or not f.torch_dtype.is_floating_point for f in fields)

    def _whole(self) -> Mapping[str, Tensor]:
        """Return the states of the whole tensor, if formats need statistics of all ranks.

        All ranks ask for them, also those that found misfits.
        """
        of_whole = self.variant.of_whole or self.variant.eager.matrices
        if self.parts is None or self.parts.gathered or not of_whole or not self.parts.layout.dims():
            return {}
        return self.parts.assembled({key: self.entry[key].to(self.p.device) for key in self.variant.states})

    def _show(self, weight: Tensor, made: dict[str, Any]) -> None:
        """Let the parameter have that weight; in evaluation it stands beside it."""
        parts, p = self.parts, self.target if self.parts is None else self.p
        if parts is not None and parts.gathered:  # p is a copy of all of it
            p, weight = sharding.local(self.target), sharding.part_of(weight, parts.layout)
        if self.trained is None:
            self.reading.loaded.rounded.append((p, weight))
        else:
            weight = weight.to(p.device, p.dtype)
            made[state.TRAINED] = weight if parts is None else sharding.wrapped(weight, parts.layout)

    def _expected(self, dense: bool) -> Iterator[tuple[str, str, Callable[[Any], Any]]]:
        """Yield (key, what its value has to be, function that returns the value to be taken over, None if it is not).

        torch's SGD counts no steps. If its buffer is there, a step was made, which is all that a rule without a count
        needs to know.
        """
        if "step" in self.entry or (not dense and set(self.variant.names) - set(self.variant.states)):
            yield "step", "a whole number >= 0", state.step_count
        for name in self.variant.host_names:
            yield name, "a finite number", _finite
        for f in () if dense else (f for f in self.variant.fields if f.name not in kept_with(self.p, {})):
            want = state.describe(f.torch_dtype, state.shape(f, self.p, self.parts))
            yield f.name, want, partial(self._field, f)

    def _field(self, f: Any, value: Any) -> Tensor | None:
        """Return a copy of a field, contiguous and on p's device; floats are cast to the field's dtype."""
        if not isinstance(value, Tensor) or tuple(value.shape) != state.shape(f, self.p, self.parts):
            return None
        floats = f.torch_dtype.is_floating_point and value.is_floating_point()
        fits = floats or value.dtype == f.torch_dtype
        return state.zeros(f, self.p, self.parts).copy_(value.detach()) if fits else None

    def _checked(self, made: Mapping[str, Any]) -> Tensor | None:
        """Check the numbers of copied fields; returns new values of p if it is rounded anew."""
        plan, variant, p = self.plan, self.variant, self.p
        floats = [f for f in variant.fields if f.torch_dtype.is_floating_point]
        self._numbers(made, [f.name for f in floats], {f.name for f in floats if f.nonneg})
        parted = variant.eager.matrices if self.parts is not None else ()  # read as a whole only
        coded = [n for n in variant.states if not variant.is_plain(n) and n not in parted]
        read = layout.decode(plan, variant, p, made, coded) if coded else {}
        self._numbers(read, coded, variant.nonneg)
        return self._rounded(made)

    def _rounded(self, made: Mapping[str, Any]) -> Tensor | None:
        """Return new values of p if it is rounded anew.

        It is if p was cast from the weight whose low bits are in `made`: a cast rounds ties to even and a split weight
        rounds them up, so that the weight would differ in its last place. Low bits of any other weight belong to a p
        that is loaded later.
        """
        plan, variant, p = self.plan, self.variant, self.p
        own = [f.name for f in variant.fields if f.owner == "p"]
        exact = low_bits.exact(p) if own else None
        if exact is None:
            return None
        same = layout.encode(plan, variant, p, dict.fromkeys(variant.states, 0.0), [*own, "p"], None, exact)
        return same["p"] if all(torch.equal(same[name], made[name]) for name in own) else None

    def _count(self, name: str, wrong: Tensor, want: str, got: str) -> None:
        """Add a misfit if some elements are wrong."""
        if number := int(wrong.sum()):
            self.misfit(f"{name}: expected {want}, {number} of {wrong.numel()} are {got}")

    def _numbers(self, values: Mapping[str, Any], names: Iterable[str], nonneg: Collection[str]) -> None:
        """Check tensors for NaN, and those of `nonneg` for negative numbers, as a damaged file or a run that diverged
        has."""
        for name in names:
            self._count(name, values[name].isnan(), "numbers", "NaN")
            if name in nonneg:
                self._count(name, values[name] < 0, "numbers >= 0", "negative")

    def _encode(self, made: dict[str, Any], whole: Mapping[str, Tensor]) -> Tensor | None:
        """Encode dense states into `made`; returns the new values of p if its full weight is known.

        whole   the states of the whole tensor, where this rank encodes its part of them
        """
        plan, variant, p, parts = self.plan, self.variant, self.p, self.parts
        values = {key: self.entry[key].to(p.device) for key in variant.states}
        made |= kept_with(p, {})
        room = {f.name: state.zeros(f, p, parts) for f in variant.fields}
        exact = next((x for x in (self.trained, self.exact) if x is not None), low_bits.exact(p))
        if whole and parts is not None:
            like = torch.zeros(parts.layout.shape, dtype=p.dtype, device=p.device)  # states do not depend on it
            fields = [f for f in variant.fields if f.owner in whole]
            found = layout.encode(plan, variant, like, whole, [f.name for f in fields])
            for f in fields:
                made[f.name] = room[f.name].copy_(sharding.part_of(found[f.name], parts.field(f)))
        wanted = [name for name in (*variant.names, *(() if exact is None else ("p",))) if name not in made]
        made.update(layout.encode(plan, variant, p, values, wanted, room, exact))
        return None if exact is None else made.pop("p")


def dense_entry(plan: Pair, variant: Variant, p: Tensor, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's state in torch.optim's form: fp32 tensors under the states' names, `step` as a tensor."""
    dense: dict[str, Any] = {"step": torch.tensor(float(entry["step"]), dtype=torch.float32, device="cpu")}
    for name in variant.host_names:
        dense[name] = torch.tensor(float(entry[name]), dtype=torch.float32, device="cpu")
    dense.update(sharded_states.decode(plan, variant, state.at_home(p), entry, variant.states))
    if state.TRAINED in entry:
        p = state.at_home(state.trained(p, entry))
        dense[state.TRAINED] = sharded_states.decode(plan, variant, p, entry, ("p",))["p"]
    return dense
