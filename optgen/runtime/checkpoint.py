"""Reading and writing of optimizer checkpoints.

torch's own load casts every floating state to the parameter's dtype, which destroys integer codes, scales
and the low halves of split weights; so loading is done here.  It reads everything, checks everything, and
only then hands back what the optimizer takes over: an error leaves the optimizer as it was.

Three kinds of per-parameter state are understood: the fields of the parameter's own variant, copied bit for
bit; the dense tensors of torch.optim under the states' names, encoded on the way in; and what a few other
packages keep (see `optgen.convert`), made dense first.

A group says in which version of this format its states are, under "format"; `MIGRATIONS` bring older ones up.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from optgen.runtime import blocks, keys, layout, low_bits, options, overrides, plans, sharding, state
from optgen.runtime.arena import Arena
from optgen.runtime.misfits import SHOWN, Misfits
from optgen.runtime.reader import reader
from optgen.runtime.records import Field, Variant, as_float, in_blocks
from optgen.runtime.warn import warn

Groups = list[dict[str, Any]]
Migration = Callable[[dict[str, Any], dict[Any, Any]], tuple[dict[str, Any], dict[Any, Any]]]


def _say_the_version(group: dict[str, Any], entries: dict[Any, Any]) -> tuple[dict[str, Any], dict[Any, Any]]:
    """0 -> 1: the same, but version 0 did not say so."""
    return group, entries


def _plans_of_single_parameters(
    group: dict[str, Any], entries: dict[Any, Any]
) -> tuple[dict[str, Any], dict[Any, Any]]:
    """1 -> 2: the same; since then a group may have "overrides", which version 1 would not see."""
    return group, entries


def _blocks_and_columns(group: dict[str, Any], entries: dict[Any, Any]) -> tuple[dict[str, Any], dict[Any, Any]]:
    """2 -> 3: the same, but for two things that version 2 would not see: a group may have "blocks" of rows; rank-1
    scales of tensors of more than two dimensions are one for each index of each dimension behind the first, where
    version 2 had one for each combination of indices.  `_misread` tells them apart.
    """
    return group, entries


def _names_of_codes(group: dict[str, Any], entries: dict[Any, Any]) -> tuple[dict[str, Any], dict[Any, Any]]:
    """3 -> 4: the same, but for two things that version 3 would not see: a group may have "streams" of random bits;
    codes have a name of their own, where version 3 had them under that of their state, as torch.optim has the state
    itself.  Only the plan knows which fields are codes, so `renamed` gives them their names.
    """
    return group, entries


MIGRATIONS: tuple[Migration, ...] = (
    _say_the_version,
    _plans_of_single_parameters,
    _blocks_and_columns,
    _names_of_codes,
)
"""From version i to i + 1: (saved group, state by parameter) -> the same in the next version, without changing either.

A key that is new in a group, a field that is renamed, split or encoded anew: each is a migration here, and a file in
tests/cases/checkpoints made by the last commit before it."""

FORMAT = len(MIGRATIONS)

AXES = 3
"""The first version with scales for the indices of each dimension."""


def _misread(variant: Variant, p: Tensor) -> str:
    """What a state from before AXES would be misread as; "" where its shape tells, or both are the same."""
    for f in variant.fields:
        if f.space == "axis":
            dims = layout.column_dims(f.matrix, p.shape)
            if len(dims) > 1 and math.prod(dims) == sum(dims):
                return (
                    f"{f.name}: expected scales of {len(dims)} dimensions, but before format {AXES} there was one for "
                    f"each of their {math.prod(dims)} combinations: load a dense_state_dict() of the version that "
                    f"saved it"
                )
    return ""


def migrated(group: Mapping[str, Any], entries: dict[Any, Any]) -> tuple[dict[str, Any], dict[Any, Any]]:
    """A saved group and its states in the present version; ValueError for one that is unknown here."""
    version = group.get("format", 0)
    if type(version) is not int or not 0 <= version <= FORMAT:
        raise ValueError(
            f"expected a checkpoint of format 0 to {FORMAT}, got format {version!r}"
            + ("; it was made by a newer optgen" if type(version) is int and version > FORMAT else "")
        )
    found = dict(group)
    for step in MIGRATIONS[version:]:
        found, entries = step(found, entries)
    return {**found, "format": FORMAT}, entries


def renamed(cls: Any, group: Mapping[str, Any], p: Tensor, label: plans.Label, entry: Any) -> Any:
    """A parameter's saved state with codes under the names of their fields, not under that of the state (format 3)."""
    if not isinstance(entry, Mapping) or p.dtype not in overrides.TRAINED:
        return entry
    codes = _codes(plans.chosen(cls, group, p.dtype, label).module)
    found = {
        key: f.name
        for key, value in entry.items()
        if (f := codes.get(key)) is not None
        and f.name not in entry
        and isinstance(value, Tensor)
        and value.dtype == f.torch_dtype  # else it is the state itself, of a tensor that is too small for codes
    }
    return {found.get(key, key): value for key, value in entry.items()} if found else entry


@lru_cache(maxsize=256)
def _codes(plan: ModuleType) -> dict[str, Field]:
    """The fields that hold codes, by the names of their states."""
    variants: Sequence[Variant] = plan.VARIANTS
    return {f.owner: f for v in variants for f in v.fields if f.name == f"{f.owner}_codes"}


def own_names(cls: Any, groups: Groups, states: Mapping[Any, Any]) -> list[dict[str, list[str]]]:
    """What the groups of a state dict say of a user's own entries; nothing where there are none."""
    found: list[dict[str, list[str]]] = []
    for group, labels in zip(groups, _labels(groups), strict=True):
        known: set[str] = set()
        names: dict[str, None] = {}
        for p, label in zip(group["params"], labels, strict=True):
            entry = states.get(p, {})
            if not known.issuperset(entry):
                known |= _names(cls, group, p, label)
                names |= dict.fromkeys(key for key in entry if isinstance(key, str) and key not in known)
        found.append({options.ENTRIES: list(names)} if names else {})
    beside = [key for key in states if isinstance(key, str)]
    if beside and found:
        found[0][options.BESIDE] = beside
    return found


def _names(cls: Any, group: Mapping[str, Any], p: Tensor, label: plans.Label) -> frozenset[str]:
    """What the state of a parameter consists of under its plan, whatever the flags."""
    trained = p.dtype in overrides.TRAINED
    return _fields(plans.chosen(cls, group, p.dtype, label).module) if trained else frozenset()


@lru_cache(maxsize=256)
def _fields(plan: ModuleType) -> frozenset[str]:
    variants: Sequence[Variant] = plan.VARIANTS
    return frozenset(["step", *(name for v in variants for name in (*v.host_names, *(f.name for f in v.fields)))])


def _listed(group: Mapping[str, Any], key: str) -> set[str]:
    """The names under one of the two keys; none where it is no list of them."""
    found = group.get(key, ())
    return {name for name in found if isinstance(name, str)} if isinstance(found, (list, tuple)) else set()


def _copied(value: Any, device: torch.device | None, name: str, misfits: Misfits) -> Any:
    """A user's own entry as torch.optim loads it: tensors are copied, to a device where one is given; what is no tensor
    and holds none, such as an object of a class of theirs, is the same one.

    A misfit for a tensor without values, which could not be read.
    """
    if isinstance(value, Tensor):
        if value.layout is torch.strided and not has_values(value):
            misfits.add(f"{name}: expected a tensor with values, got one without")
            return value
        return value.detach().to(device or value.device, copy=True)
    if isinstance(value, dict):
        return {key: _copied(x, device, name, misfits) for key, x in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(x, device, name, misfits) for x in value)
    return value


class Loaded(NamedTuple):
    """What an optimizer takes over.

    rounded   (p, what p has to hold): weights whose low bits went into the states
    """

    states: dict[Any, state.State]
    groups: Groups
    rounded: list[tuple[Tensor, Tensor]]


def read(
    cls: Any, groups: Groups, saved: Mapping[str, Any], present: Mapping[Any, Any] = MappingProxyType({})
) -> Loaded:
    """What `saved` makes of an optimizer of class `cls` with these groups, and with the states `present`.

    Nothing in the result is shared with `saved` but Python's immutable values and, of a user's own entries, what is no
    tensor, dict, list or tuple.  ValueError lists all misfits.
    """
    misfits = Misfits(f"{cls.__name__}.load_state_dict: the checkpoint does not fit, nothing was loaded")
    saved_groups, saved_state = parts(saved, misfits)
    old = _before_axes(saved_groups)
    saved_groups, saved_state = _present(saved_groups, saved_state, misfits)
    order = _match(groups, saved_groups, misfits)
    merged = [_merge(cls, i, g, s, order, misfits) for i, (g, s) in enumerate(zip(groups, saved_groups, strict=True))]
    misfits.stop()
    _take_streams(merged, saved_groups, order, saved.get(options.UNNAMED) is True)
    _take_overrides(cls, groups, merged, saved_groups, order)
    if cls.BLOCKS:
        _take_blocks(cls, groups, merged, saved_groups, order)
    beside = {key for group in saved_groups for key in _listed(group, options.BESIDE)} - set(order.values())
    _known_ids(order, saved_state, beside, misfits)
    started = any(not entry or "step" in entry for entry in state.of_parameters(present))
    loaded = Loaded({}, merged, [])
    missing: list[str] = []
    for group, saved_group, labels in zip(merged, saved_groups, _labels(merged), strict=True):
        own = "plan" in saved_group  # else of torch.optim or another package
        kept = _listed(saved_group, options.ENTRIES)
        found = zip(labels, group["params"], strict=True)
        arena = _arena(cls, group, {label: p for label, p in found if _is_there(saved_state.get(order[id(p)]))})
        for i, (label, p) in enumerate(zip(labels, group["params"], strict=True)):
            entry, extra = saved_state.get(order[id(p)]), {}
            if own:
                entry = renamed(cls, group, p, label, entry)
            if kept and isinstance(entry, Mapping):
                mine = kept - _names(cls, group, p, label)
                extra = {k: _copied(x, p.device, k, misfits) for k, x in entry.items() if k in mine}
                entry = {key: value for key, value in entry.items() if key not in mine}
            name = order[id(p)] if group.get("param_names") is None else group["param_names"][i]
            if _is_there(entry):
                if order[id(p)] in old and (said := _misread(select(cls, group, p, label)[2], p)):
                    misfits.add(f"{state.label(p, name if isinstance(name, (str, int)) else str(name))}: {said}")
                    continue
                made = _load_one(cls, group, p, entry, name, label, own, misfits, arena, loaded.rounded)
                if made is not None:
                    loaded.states[p] = made
            elif p.requires_grad and (not started or state.of(present, p)):
                missing.append(str(name))
            if extra:
                loaded.states.setdefault(p, {}).update(extra)
    loaded.states.update({k: _copied(x, None, k, misfits) for k, x in saved_state.items() if k in beside})
    if sharding.anywhere(bool(misfits.lines), [p for group in merged for p in group["params"]]) and not misfits.lines:
        misfits.add("another rank found what does not fit its parts, and says it")
    if misfits.lines and (whose := _whose(cls, merged, saved_state)):
        misfits.heading += f": {whose}"
    misfits.stop()
    if missing and any("step" in entry for entry in state.of_parameters(loaded.states)):
        warn(
            f"{cls.__name__}.load_state_dict: the checkpoint has no state for {len(missing)} parameters "
            f"({', '.join(missing[:SHOWN])}{', ...' if len(missing) > SHOWN else ''}): they start anew",
            cls,
        )
    return loaded


WHOSE: Mapping[frozenset[str], str] = {
    frozenset({"exp_avg", "exp_avg_sq"}): "Adam's or AdamW's",
    frozenset({"exp_avg", "exp_inf"}): "Adamax's",
    frozenset({"exp_avg"}): "Lion's",
    frozenset({"momentum_buffer"}): "SGD's",
    frozenset({"square_avg"}): "RMSprop's",
    frozenset({"square_avg", "acc_delta"}): "Adadelta's",
    frozenset({"sum"}): "Adagrad's",
}
"""The optimizers that are best known for states of these names."""


def _whose(cls: Any, groups: Groups, saved: Mapping[Any, Any]) -> str:
    """Return in words whose states a checkpoint seems to have; "" where they are of this class or of other names."""
    found: set[frozenset[str]] = set()
    for entry in saved.values():
        names = set(map(str, entry)) - {"step"} if isinstance(entry, Mapping) else set()
        names = {name for name in names if not name.startswith("weight_")}
        states = {name for known in WHOSE for name in known if not names.isdisjoint({name, f"{name}_codes"})}
        if not all(name in states or name.rpartition("_")[0] in states for name in names):
            return ""
        found |= {frozenset(states)} if names else set()
    own: set[frozenset[str]] = set()
    for group, labels in zip(groups, _labels(groups), strict=True):
        with suppress(TypeError, ValueError):
            for p, label in zip(group["params"], labels, strict=True):
                own.add(frozenset(select(cls, group, p, label)[2].states))
    known = [names for names in found if len(found) == 1 and names in WHOSE.keys() - own]
    return f"it looks like {WHOSE[known[0]]} ({', '.join(sorted(known[0]))})" if known else ""


def _present(
    groups: list[Mapping[str, Any]], entries: Mapping[Any, Any], misfits: Misfits
) -> tuple[list[Mapping[str, Any]], Mapping[Any, Any]]:
    """Groups and states in the present version; those of torch.optim and others, which name no plan, as they are."""
    made, states = [], dict(entries)
    for i, group in enumerate(groups):
        if "plan" not in group:
            if "format" in group:
                misfits.add(f"group {i}: expected 'plan', it is missing")
            made.append(group)
            continue
        own = {number: entries[number] for number in group["params"] if number in entries}
        try:
            found, own = migrated(group, own)
        except ValueError as error:
            misfits.add(f"group {i}: {error}")
            continue
        made.append(found)
        states |= own
    misfits.stop()
    return made, states


def _before_axes(groups: Iterable[Mapping[str, Any]]) -> set[Any]:
    """The parameters, by their numbers, of groups of an older version."""
    found: set[Any] = set()
    for group in groups:
        version = group.get("format", 0)
        if "plan" in group and type(version) is int and version < AXES:
            found.update(group["params"])
    return found


def opened(cls: Any, saved: Any) -> dict[str, Any]:
    """A copy of a state dict that hooks may change; TypeError where it is none."""
    if not isinstance(saved, Mapping):
        raise TypeError(f"{cls.__name__}.load_state_dict takes the dict that state_dict() made, got {saved!r:.80}")
    return dict(saved)


def parts(saved: Mapping[str, Any], misfits: Misfits) -> tuple[list[Mapping[str, Any]], Mapping[Any, Any]]:
    """(groups, states by the parameters' numbers) of a state dict; ValueError where it is built otherwise."""
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
        for number in group["params"]:
            if not _is_key(number):
                misfits.add(f"group {i}: expected numbers of parameters in 'params', got {_short(number)}")
            elif number in seen:
                misfits.add(f"group {i}: expected each parameter once in 'params', {_short(number)} is there again")
            else:
                seen.add(number)
        names = group.get("param_names")
        if names is None:
            continue
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, (str, int)) for name in names):
            misfits.add(f"group {i}: expected names in 'param_names', got {_short(names)}")
        elif len(names) != len(group["params"]):
            misfits.add(f"group {i}: expected {len(group['params'])} names in 'param_names', got {len(names)}")
    misfits.stop()
    return list(groups), entries


def _is_key(number: object) -> bool:
    """Whether a dict finds it by its value."""
    if isinstance(number, Tensor):
        return False
    try:
        hash(number)
    except TypeError:
        return False
    return True


def has_values(value: Tensor) -> bool:
    """Whether a tensor has memory with a place for each of its elements: reading others ends the process."""
    if value.layout is not torch.strided or value.is_meta:
        return False
    if type(value) not in (Tensor, nn.Parameter) or not value.numel():  # those of other types are made of others
        return True
    last = value.storage_offset() + sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
    return (last + 1) * value.element_size() <= value.untyped_storage().nbytes()


def without_values(value: Tensor) -> str:
    """What a tensor is that has none, as errors say it: "" where it has."""
    if has_values(value):
        return ""
    strange = f"of layout {value.layout}" if value.layout is not torch.strided else "whose memory was freed"
    return "on the meta device" if value.is_meta else strange


def _is_there(entry: object) -> bool:
    """Whether there is a state, or something that is none in its place."""
    return bool(entry) if isinstance(entry, Mapping) else entry is not None


def _short(value: object) -> str:
    """How errors show what may be anything."""
    if isinstance(value, Tensor):
        return state.describe(value.dtype, tuple(value.shape))
    return f"{value!r:.80}"


def _match(groups: Groups, saved: list[Mapping[str, Any]], misfits: Misfits) -> dict[int, Any]:
    """id(parameter) -> its number in the checkpoint.

    By name where a group's names are the same in another order, or are but for wrappers of modules (torch.compile,
    checkpoint_wrapper); else, as torch does, by position (renamed models).  Names that agree only in part mean another
    model and are refused.
    """
    if len(groups) != len(saved):
        misfits.add(f"expected {len(groups)} parameter groups, got {len(saved)}")
        misfits.stop()
    order: dict[int, Any] = {}
    for i, (group, other) in enumerate(zip(groups, saved, strict=True)):
        params, numbers = group["params"], list(other["params"])
        if len(params) != len(numbers):
            misfits.add(f"group {i}: expected {len(params)} parameters, got {len(numbers)}")
            continue
        names, other_names = group.get("param_names"), other.get("param_names")
        if names is not None and other_names is not None and list(names) != list(other_names):
            mine, theirs = _counted(names), _counted(other_names)
            if set(mine) != set(theirs):
                mine, theirs = _bare(names), _bare(other_names)
            missing, extra = set(mine) - set(theirs), set(theirs) - set(mine)
            if not missing:
                by_name = dict(zip(theirs, numbers, strict=True))
                numbers = [by_name[name] for name in mine]
            elif len(missing) < len(names):
                lacking = sorted(name for name, bare in zip(names, mine, strict=True) if bare in missing)
                found = sorted(name for name, bare in zip(other_names, theirs, strict=True) if bare in extra)
                misfits.add(f"group {i}: expected parameters {lacking}, got {found} in their place")
        order.update((id(p), number) for p, number in zip(params, numbers, strict=True))
    misfits.stop()
    return order


def _counted(names: Sequence[plans.Label]) -> list[tuple[plans.Label, int]]:
    """Each name, and how often it stands before: two parameters may share one."""
    seen: Counter[plans.Label] = Counter()
    found = []
    for name in names:
        found.append((name, seen[name]))
        seen[name] += 1
    return found


def _bare(names: Sequence[plans.Label]) -> list[tuple[plans.Label, int]]:
    """The same without wrappers; as they are, where two would share a name."""
    found = [overrides.bare(name) if isinstance(name, str) else name for name in names]
    return _counted(found if len(set(found)) == len(found) else names)


def positions(groups: Groups, saved: list[Mapping[str, Any]], misfits: Misfits) -> dict[int, int]:
    """id(parameter) -> its position in the checkpoint, counted over all of its groups."""
    numbers = [number for group in saved for number in group["params"]]
    place = {number: position for position, number in enumerate(numbers)}
    return {key: place[number] for key, number in _match(groups, saved, misfits).items()}


def _merge(
    cls: Any,
    index: int,
    group: Mapping[str, Any],
    saved: Mapping[str, Any],
    order: Mapping[int, Any],
    misfits: Misfits,
) -> dict[str, Any]:
    """The group as it is after loading: saved options and names over the present ones, present parameters."""
    taken = {key: copy.deepcopy(value) for key, value in saved.items() if key not in options.FOREIGN}
    if (given := taken.pop("param_names", None)) is not None:  # what random bits go by; in the present order
        names = dict(zip(saved["params"], given, strict=True))
        taken["param_names"] = [names[order[id(p)]] for p in group["params"]]
    merged = {**group, **taken}
    for key in ("overrides", "blocks"):
        if "plan" in saved and key not in saved:
            merged.pop(key, None)
    try:
        merged.update(options.check(cls, merged))
        merged["plan"] = options.record_plan(cls, merged["plan"], merged["params"])
    except (TypeError, ValueError) as error:
        misfits.add(f"group {index}: {error}")
    return merged


def _labels(groups: Sequence[Mapping[str, Any]]) -> list[list[plans.Label]]:
    """What each group calls its parameters: their names, or positions over all groups."""
    start, found = 0, []
    for group in groups:
        count = len(group["params"])
        names = group.get("param_names")
        found.append(list(range(start, start + count)) if names is None else list(names))
        start += count
    return found


def _take_streams(merged: Groups, saved: Sequence[Mapping[str, Any]], order: Mapping[int, Any], unnamed: bool) -> None:
    """Record in merged groups by what the random bits of parameters go on, where that is not what they are called now.

    unnamed   whether the optimizer that was saved had no names, so that bits went by positions
    """
    found: dict[Any, plans.Label] = {}
    for group, labels in zip(saved, _labels(saved), strict=True):
        own = keys.streams(group) | (dict(zip(labels, labels, strict=True)) if unnamed else {})
        found.update((n, own[label]) for n, label in zip(group["params"], labels, strict=True) if label in own)
    for group, other, labels in zip(merged, saved, _labels(merged), strict=True):
        if "plan" in other:
            pairs = [(label, found.get(order[id(p)], label)) for p, label in zip(group["params"], labels, strict=True)]
            group.pop("streams", None)
            if any(label != stream for label, stream in pairs):
                group["streams"] = tuple(pairs)


def _take_overrides(
    cls: Any, groups: Groups, merged: Groups, saved: Sequence[Mapping[str, Any]], order: Mapping[int, Any]
) -> None:
    """Gives merged groups the plans of single parameters that the checkpoint has, under the names that hold now.

    A group of another package has none, and takes nothing away.  Warns where they are not those of the optimizer.
    """
    changed = _take("overrides", plans.own, groups, merged, saved, order)
    if changed:
        label, was, now = changed[0]
        warn(
            f"{cls.__name__}.load_state_dict: the checkpoint keeps {len(changed)} parameters otherwise than the "
            f"`overrides` of this optimizer say, and is followed: {label!r} under {_named(str(now))}, not "
            f"{_named(str(was))}{' (and others)' if len(changed) > 1 else ''}; `optgen convert` gives a checkpoint "
            f"another plan",
            cls,
        )


def _take_blocks(
    cls: Any, groups: Groups, merged: Groups, saved: Sequence[Mapping[str, Any]], order: Mapping[int, Any]
) -> None:
    """The same for the blocks into which single parameters fall."""
    changed = _take("blocks", lambda group: blocks.of(cls, group), groups, merged, saved, order)
    if changed:
        label, was, now = changed[0]
        was, now = (f"{count} blocks" if count else "a block for each row" for count in (was, now))
        warn(
            f"{cls.__name__}.load_state_dict: the checkpoint has {len(changed)} parameters in other blocks than the "
            f"`blocks` of this optimizer say, and is followed: {label!r} in {now}, not {was}"
            f"{' (and others)' if len(changed) > 1 else ''}",
            cls,
        )


def _take(
    key: str,
    read: Callable[[Mapping[str, Any]], Mapping[plans.Label, Any]],
    groups: Groups,
    merged: Groups,
    saved: Sequence[Mapping[str, Any]],
    order: Mapping[int, Any],
) -> list[tuple[plans.Label, Any, Any]]:
    """Records in merged groups what the checkpoint's say under a key of single parameters, which `read` finds.

    Returns (label, what this optimizer has, what the checkpoint has) where they differ.
    """
    theirs: dict[Any, Any] = {}
    for group, labels in zip(saved, _labels(saved), strict=True):
        own = read(group)
        theirs.update((n, own.get(label)) for n, label in zip(group["params"], labels, strict=True))
    changed: list[tuple[plans.Label, Any, Any]] = []
    for i, (present, group, other) in enumerate(zip(groups, merged, saved, strict=True)):
        before, after = _labels(groups)[i], _labels(merged)[i]
        own = read(present)
        if "plan" in other:
            found = [theirs[order[id(p)]] for p in group["params"]]
            changed += [
                (label, own.get(old), value)
                for p, old, label, value in zip(group["params"], before, after, found, strict=True)
                if value != own.get(old) and p.requires_grad and "plan" in present
            ]
        else:
            found = [own.get(label) for label in before]
        group.pop(key, None)
        kept = tuple((label, value) for label, value in zip(after, found, strict=True) if value is not None)
        if kept:
            group[key] = kept
    return changed


def _named(value: str) -> str:
    return {"None": "the plan of its group", plans.FULL: "fp32 states"}.get(value, value)


def _known_ids(order: Mapping[int, Any], saved: Mapping[Any, Any], beside: Collection[str], misfits: Misfits) -> None:
    known = {*order.values(), *beside}
    for key in saved:
        if key not in known:
            misfits.add(f"state of {key!r}: expected parameters of the groups only, it is in none")


def select(
    cls: Any,
    group: Mapping[str, Any],
    p: Tensor,
    name: plans.Label | None = None,
    kept: Mapping[str, Any] | None = None,
) -> tuple[str, ModuleType, Variant]:
    """(plan name, plan, variant) of a parameter under the options of its group.

    name   by which the group knows the parameter: its name, or its position over all groups; None: it has no plan of
           its own
    kept   its state, where the variant is to be the one that this is of (`held`)
    """
    chosen = plans.chosen(cls, group, p.dtype, name)
    flags = options.flags_of(cls, group, tuple(p.shape))
    small, vector = p.numel() < chosen.limit, p.ndim < 2
    found = plans.variant(chosen.module, p.dtype, small, flags, vector)
    count = blocks.of(cls, group).get(name) if name is not None else None
    found = blocks.seen(found, p, count)
    return chosen.name, chosen.module, found if kept is None else held(cls, group, p, name, found, kept)


def held(
    cls: Any, group: Mapping[str, Any], p: Tensor, name: plans.Label | None, variant: Variant, kept: Mapping[str, Any]
) -> Variant:
    """The variant whose states an entry has: that of the parameter, or one beside it for other flags.

    While a hyper-parameter is 0, a state that is there only where it is not (SGD's momentum_buffer) stays as it is, as
    torch leaves it; where it is 0 from the beginning, there is none until it has been set and a step was made.
    """
    if variant.keys == kept.keys():
        return variant
    fixed = {flag.name for flag in cls.FLAGS if flag.shape is not None or flag.every is not None}
    switched = {flag.name for flag in cls.FLAGS if flag.nonzero is not None}
    chosen = plans.chosen(cls, group, p.dtype, name)
    small, vector = p.numel() < chosen.limit, p.ndim < 2
    settings = {tuple(v.flags.items()) for v in chosen.module.VARIANTS if v.param == variant.param}
    beside = [plans.variant(chosen.module, p.dtype, small, setting, vector) for setting in sorted(settings)]
    owners = {f.name: f.owner for v in beside for f in v.fields if f.owner != "p"}
    owners.update((name, name) for v in beside for name in v.states)
    there = {owners[key] for key in kept if key in owners}
    if there == set(variant.states):
        return variant
    for v in sorted(beside, key=lambda v: len(_apart(variant, v))):
        apart = _apart(variant, v)
        late = not there.issuperset(variant.states)
        if set(v.states) != there or apart & fixed or (late and not apart <= switched):
            continue
        if isinstance(variant.matrix, int):
            v = in_blocks(v, variant.matrix)
        common = there.intersection(variant.states) | {"p"}
        if {f for f in v.fields if f.owner in common} == {f for f in variant.fields if f.owner in common}:
            return v
    return variant


def _apart(a: Variant, b: Variant) -> set[str]:
    """The flags that differ."""
    return {name for name in a.flags.keys() | b.flags.keys() if a.flags.get(name, 0) != b.flags.get(name, 0)}


def _arena(cls: Any, group: Mapping[str, Any], params: Mapping[plans.Label, Tensor]) -> Arena:
    """Room for the states of those parameters that are on the CPU and have a plan: the rest will be refused."""
    sizes: list[int] = []
    for label, p in params.items():
        with suppress(TypeError, ValueError):
            here = state.home(p).type == "cpu" and not sharding.is_sharded(p)
            sizes += state.sizes(select(cls, group, p, label)[2], p, {}) if here else ()
    return Arena(sizes)


def _load_one(
    cls: Any,
    group: Mapping[str, Any],
    p: Tensor,
    entry: Any,
    name: object,
    label: plans.Label,
    own: bool,
    misfits: Misfits,
    arena: Arena,
    rounded: list[tuple[Tensor, Tensor]],
) -> state.State | None:
    """A state for p made of a checkpoint's entry (`own`: of this package); None where it is empty or does not fit.

    name    as errors call the parameter
    label   as its group does
    """
    where = state.label(p, name if isinstance(name, (str, int)) else str(name))
    if not isinstance(entry, Mapping):
        misfits.add(f"{where}: expected a dict of states, got {_short(entry)}")
        return None
    found = {key: value for key, value in entry.items() if value is not None}
    if not found:
        return None
    for key, value in found.items():
        if isinstance(value, Tensor) and (kind := without_values(value)):
            misfits.add(f"{where}: {key}: expected a tensor with values, got one {kind}")
            return None
    try:
        plan_name, plan, variant = select(cls, group, p, label)
        errors = None if own else found.get("error_bits")
        codes = {} if own else reader().codes(found, variant.states)
        found = found if own else reader().dense(found, variant.states, tuple(p.shape))
        variant = held(cls, group, p, label, variant, found)
    except (TypeError, ValueError) as error:
        misfits.add(f"{where}: {error}")
        return None
    before = len(misfits.lines)
    where = f"{where}, plan {plan_name}"
    parts, whole = None, p
    try:
        p = state.at_home(p)
        if sharding.is_sharded(p):
            parts = sharding.Parts.of(p, variant)
            p, found = parts.weight(p), parts.taken(found)
            errors = parts.beside("error_bits", errors) if isinstance(errors, Tensor) else errors
        exact = None if own else reader().weight({"error_bits": errors}, p, group.get("master_bytewidth"))
    except ValueError as error:
        misfits.add(f"{where}: {error}")
        return None
    dense = not own and is_dense(variant, p, found)
    expected = {*variant.states, *variant.host_names, "step"} if dense else variant.keys
    for key in sorted(map(str, found.keys() - expected)):
        misfits.add(f"{where}: {key}: not expected (it has {', '.join(sorted(expected))})")
    made = _scalars(variant, found, dense, where, misfits)
    if dense:
        apart = variant.of_whole and parts is not None and not parts.gathered and bool(parts.layout.dims())
        assembled: dict[str, Tensor] = {}
        if apart and parts is not None:  # whatever this rank finds wrong: others may not, and would wait
            assembled = parts.assembled({key: found[key].to(p.device) for key in variant.states})
        _numbers({**found, **assembled}, variant.states, variant.nonneg, where, misfits)
        if len(misfits.lines) == before:
            values = {key: found[key].to(p.device) for key in variant.states}
            room = {f.name: state.zeros(f, p, arena) for f in variant.fields}
            exact = low_bits.exact(p) if exact is None else exact
            wanted = variant.names if exact is None else (*variant.names, "p")
            if parts is not None and apart:
                made.update(_encode_apart(plan, variant, p, parts, assembled, room))
                wanted = tuple(name for name in wanted if name not in made)
            made.update(layout.encode(plan, variant, p, values, wanted, room, exact))
            if codes and parts is None:
                _keep_codes(plan, variant, p, values, codes, made)
            if exact is not None:
                shown = made.pop("p")
                if parts is not None and parts.gathered:  # p is a copy of all of it
                    p, shown = sharding.local(whole), sharding.part_of(shown, parts.layout)
                _write_later([(whole if parts is None else p, shown)], rounded, where, misfits)
        return made if parts is None else parts.wrapped(made)
    for f in variant.fields:
        tensor = _field(f, p, found.get(f.name), where, misfits, arena)
        if tensor is not None:
            made[f.name] = tensor
    if len(misfits.lines) == before:
        floats = [f for f in variant.fields if f.torch_dtype.is_floating_point]
        _numbers(made, [f.name for f in floats], {f.name for f in floats if f.nonneg}, where, misfits)
        coded = [n for n in variant.states if not variant.is_plain(n)]
        read = layout.decode(plan, variant, p, made, coded) if coded else {}
        _numbers(read, coded, variant.nonneg, where, misfits)
        _headers(made, read, variant.fields, where, misfits)
        found_here = [(whole if parts is None else q, shown) for q, shown in _true_rounding(plan, variant, p, made)]
        _write_later(found_here, rounded, where, misfits)
    return made if parts is None else parts.wrapped(made)


def _write_later(
    found: list[tuple[Tensor, Tensor]], rounded: list[tuple[Tensor, Tensor]], where: str, misfits: Misfits
) -> None:
    """Notes what weights are to hold; a misfit for one that could not be written."""
    for p, shown in found:
        if state.of_inference(p):
            misfits.add(f"{where}: the parameter {state.INFERENCE}")
        rounded.append((p, shown))


def _encode_apart(
    plan: ModuleType,
    variant: Variant,
    p: Tensor,
    parts: sharding.Parts,
    values: Mapping[str, Tensor],
    room: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """This rank's parts of what states are stored as with statistics of their whole tensor.

    p       this rank's part of the parameter: the states do not depend on it
    values  the states, whole
    room    tensors to write the parts into
    """
    like = torch.zeros(parts.layout.shape, dtype=p.dtype, device=p.device)
    fields = [f for f in variant.fields if f.owner in values]
    found = layout.encode(plan, variant, like, values, [f.name for f in fields])
    return {f.name: room[f.name].copy_(sharding.part_of(found[f.name], parts.field(f))) for f in fields}


def _keep_codes(
    plan: ModuleType,
    variant: Variant,
    p: Tensor,
    values: Mapping[str, Tensor],
    codes: Mapping[str, tuple[Tensor, Tensor]],
    made: dict[str, Any],
) -> None:
    """Puts another package's own codes and scales into `made` where the plan reads them as the very same numbers.

    Encoding the numbers anew would not give them back where a table has no -1: a block's largest magnitude is then
    less than the scale it was made with.
    """
    trial = dict(made)
    for name, (code, scale) in codes.items():
        own = {f.name: f for f in variant.fields if f.owner == name}
        to, beside = own.get(f"{name}_codes"), own.get(f"{name}_scale")
        if to is None or beside is None or len(own) > 2:
            continue
        if (to.torch_dtype, beside.torch_dtype) != (code.dtype, scale.dtype):
            continue
        shapes = layout.field_shape(to, p.shape), layout.field_shape(beside, p.shape)
        whole = layout.grid(layout.matrix_shape(to.matrix, p.shape))[1] % beside.per == 0
        if whole and (code.numel(), scale.numel()) == (math.prod(shapes[0]), math.prod(shapes[1])):
            trial[to.name] = code.reshape(shapes[0]).to(p.device, copy=True)
            trial[f"{name}_scale"] = scale.reshape(shapes[1]).to(p.device, copy=True)
    changed = [name for name in codes if trial.get(f"{name}_codes") is not made.get(f"{name}_codes")]
    read = layout.decode(plan, variant, p, trial, changed) if changed else {}
    for name in changed:
        if torch.equal(read[name], values[name].to(torch.float32)):
            for field in (f"{name}_codes", f"{name}_scale"):
                made[field].copy_(trial[field])


def _true_rounding(
    plan: ModuleType, variant: Variant, p: Tensor, made: Mapping[str, Any]
) -> list[tuple[Tensor, Tensor]]:
    """What p has to hold where it was cast from the very weight whose low bits `made` has.

    A cast rounds ties to even, a split weight rounds them up: without this such a weight would come back one place
    off.  Low bits of any other weight belong to a p that is still to be loaded, and are left alone.
    """
    own = [f.name for f in variant.fields if f.owner == "p"]
    exact = low_bits.exact(p) if own else None
    if exact is None:
        return []
    same = layout.encode(plan, variant, p, dict.fromkeys(variant.states, 0.0), [*own, "p"], None, exact)
    return [(p, same["p"])] if all(torch.equal(same[name], made[name]) for name in own) else []


def _numbers(
    values: Mapping[str, Tensor], names: Iterable[str], nonneg: Collection[str], where: str, misfits: Misfits
) -> None:
    """A misfit for every tensor with a NaN in it, and for those of `nonneg` with a negative number: from a run that
    diverged, or a damaged file."""
    for name in names:
        wrong = int(values[name].isnan().sum())
        if wrong:
            misfits.add(f"{where}: {name}: expected numbers, {wrong} of {values[name].numel()} are NaN")
        wrong = int((values[name] < 0).sum()) if name in nonneg else 0
        if wrong:
            misfits.add(f"{where}: {name}: expected numbers >= 0, {wrong} of {values[name].numel()} are negative")


def _headers(
    values: Mapping[str, Tensor], read: Mapping[str, Tensor], fields: Iterable[Field], where: str, misfits: Misfits
) -> None:
    """A misfit for every field of integers with one that its format never writes, or that makes an infinity: as a range
    most integers can be read.

    read   the states as they are decoded
    """
    for f in fields:
        if f.most is None:
            continue
        value = values[f.name].to(torch.int64) & ((1 << 8 * f.torch_dtype.itemsize) - 1)
        fits = (value >= f.least) & (value <= f.most)
        if f.low:
            fits &= torch.tensor([bool(f.low >> k & 1) for k in range(256)], device=value.device)[value & 255]
        wrong = int((~fits & (values[f.name] != f.zero)).sum())
        if wrong:
            misfits.add(f"{where}: {f.name}: expected headers of its blocks, {wrong} of {value.numel()} are none")
        wrong = int(read[f.owner].isinf().sum()) if f.owner in read else 0
        if wrong:
            misfits.add(f"{where}: {f.owner}: expected finite numbers, {wrong} of {read[f.owner].numel()} are infinite")


def is_dense(variant: Variant, p: Tensor, found: Mapping[str, Any]) -> bool:
    """Whether an entry holds torch's dense tensors of the states, not the variant's own fields."""
    if not variant.fields:
        return False
    few = {f.owner: layout.field_shape(f, p.shape) for f in variant.fields if not f.wide}
    dense = all(
        isinstance(value := found.get(name), Tensor)
        and value.is_floating_point()
        and tuple(value.shape) == few.get(name, tuple(p.shape))
        for name in variant.states
    )
    own = [f for f in variant.fields if f.name not in variant.states]
    if not dense or any(f.name in found for f in own):
        return False
    return bool(own) or any(not f.torch_dtype.is_floating_point for f in variant.fields)


def _scalars(variant: Variant, found: Mapping[str, Any], dense: bool, where: str, misfits: Misfits) -> dict[str, Any]:
    """`step` and the host states of an entry.

    torch's SGD counts no steps; where its buffer is there at all, a step was made, and that is all that a rule
    without a count asks.
    """
    own = set(variant.names) - set(variant.states)
    made: dict[str, Any] = {"step": 1}
    if "step" in found:
        step = state.step_count(found["step"])
        if step is None:
            misfits.add(f"{where}: step: expected a whole number >= 0, got {found['step']!r}")
        made["step"] = step
    elif own and not dense:
        misfits.add(f"{where}: step: expected a whole number >= 0, it is missing")
    for name in variant.host_names:
        number = as_float(found.get(name))
        if number is None:
            misfits.add(f"{where}: {name}: expected a number, got {found.get(name, 'nothing')!r}")
        made[name] = number
    return made


def _field(f: Field, p: Tensor, value: Any, where: str, misfits: Misfits, arena: Arena) -> Tensor | None:
    """A private, contiguous copy of a saved field on p's device; floats are cast to the declared dtype."""
    want = state.describe(f.torch_dtype, layout.field_shape(f, p.shape))
    if not isinstance(value, Tensor):
        got = "it is missing" if value is None else f"got {_short(value)}"
        misfits.add(f"{where}: {f.name}: expected {want}, {got}")
        return None
    floats = f.torch_dtype.is_floating_point and value.is_floating_point()
    if tuple(value.shape) != layout.field_shape(f, p.shape) or not (floats or value.dtype == f.torch_dtype):
        misfits.add(f"{where}: {f.name}: expected {want}, got {state.describe(value.dtype, tuple(value.shape))}")
        return None
    return state.zeros(f, p, arena).copy_(value.detach())


def dense_entry(plan: ModuleType, variant: Variant, p: Tensor, entry: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state as torch.optim keeps it: fp32 tensors under the states' names, `step` as a tensor."""
    dense: dict[str, Any] = {"step": torch.tensor(float(entry["step"]), dtype=torch.float32, device="cpu")}
    for name in variant.host_names:
        dense[name] = torch.tensor(float(entry[name]), dtype=torch.float32, device="cpu")
    dense.update(sharding.decode(plan, variant, state.at_home(p), entry, variant.states))
    return dense
