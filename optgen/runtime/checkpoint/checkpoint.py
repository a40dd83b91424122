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
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from optgen.runtime.checkpoint.reader import reader
from optgen.runtime.layout import layout, plans, sharding
from optgen.runtime.options import blocks, options, overrides
from optgen.runtime.records import Field, Variant, as_float, in_blocks, keys
from optgen.runtime.records.arena import Arena
from optgen.runtime.records.join import Pair
from optgen.runtime.records.misfits import SHOWN, Misfits
from optgen.runtime.records.warn import warn
from optgen.runtime.states import low_bits, state

Groups = list[dict[str, Any]]
Migration = Callable[[dict[str, Any], dict[Any, Any]], tuple[dict[str, Any], dict[Any, Any]]]


FORMAT = 4
"""The version of a group and its states, saved under "format". A file of every version is in tests/cases/checkpoints.

1   The version is saved; version 0 had none.
2   A group may have "overrides".
3   A group may have "blocks". Rank-1 scales of tensors of three dimensions and more have one entry per index of each
    dimension behind the first; before there was one per combination of indices (`_misread` tells them apart).
4   A group may have "streams" of random bits. Codes have names of their own; before they had the name of their state,
    which torch.optim gives to the state itself (`renamed` renames them by the plan).
"""

MIGRATIONS: Mapping[int, Migration] = MappingProxyType({})
"""From a version to the next one, for versions with other keys or forms: (saved group, state by parameter) -> the same
in the next version, without changing either. No version has needed one so far."""

AXES = 3
"""The first version with scales per index of each dimension."""


def _misread(variant: Variant, p: Tensor) -> str:
    """Return the problem of a state from before AXES whose shape does not tell how it is read; "" if there is none."""
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
    """Return a saved group and its states in the present version; ValueError for an unknown version."""
    version = group.get("format", 0)
    if type(version) is not int or not 0 <= version <= FORMAT:
        raise ValueError(
            f"expected a checkpoint of format 0 to {FORMAT}, got format {version!r}"
            + ("; it was made by a newer optgen" if type(version) is int and version > FORMAT else "")
        )
    found = dict(group)
    for step in range(version, FORMAT):
        if step in MIGRATIONS:
            found, entries = MIGRATIONS[step](found, entries)
    return {**found, "format": FORMAT}, entries


def renamed(cls: Any, group: Mapping[str, Any], p: Tensor, label: plans.Label, entry: Any) -> Any:
    """Return a parameter's saved state with codes under the names of their fields, not of the state (format 3)."""
    if not isinstance(entry, Mapping) or p.dtype not in overrides.TRAINED:
        return entry
    codes = _codes(plans.chosen(cls, group, p.dtype, label).pair)
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
def _codes(plan: Pair) -> dict[str, Field]:
    """Return the fields that hold codes, by the names of their states."""
    return {f.owner: f for v in plan.variants for f in v.fields if f.name == f"{f.owner}_codes"}


def own_names(cls: Any, groups: Groups, states: Mapping[Any, Any]) -> list[dict[str, list[str]]]:
    """Return the names of a user's own entries, for each group of a state dict."""
    found: list[dict[str, list[str]]] = []
    for group, labels in zip(groups, labels_of(groups), strict=True):
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
    """Return the keys of a parameter's state under its plan, for any setting of the flags."""
    trained = p.dtype in overrides.TRAINED
    return _fields(plans.chosen(cls, group, p.dtype, label).pair) if trained else frozenset()


@lru_cache(maxsize=256)
def _fields(plan: Pair) -> frozenset[str]:
    """Return the keys of the states of all variants of a plan."""
    return frozenset(["step", *(name for v in plan.variants for name in (*v.host_names, *(f.name for f in v.fields)))])


def _listed(group: Mapping[str, Any], key: str) -> set[str]:
    """Return the names listed in a group under `key`, empty unless it is a list."""
    found = group.get(key, ())
    return {name for name in found if isinstance(name, str)} if isinstance(found, (list, tuple)) else set()


def _copied(value: Any, device: torch.device | None, name: str, misfits: Misfits) -> Any:
    """Copy a user's own entry as torch.optim does: tensors are copied, to `device` if given; other objects are shared.

    A tensor without values is a misfit.
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
    """The states and groups that an optimizer takes over.

    rounded   (p, its new values): weights whose low bits went into the states
    """

    states: dict[Any, state.State]
    groups: Groups
    rounded: list[tuple[Tensor, Tensor]]


def read(
    cls: Any, groups: Groups, saved: Mapping[str, Any], present: Mapping[Any, Any] = MappingProxyType({})
) -> Loaded:
    """Read a state dict for an optimizer of class `cls` with these groups and the states `present`.

    The result shares nothing with `saved` but immutable values and, in a user's own entries, objects other than
    tensors, dicts, lists and tuples. Raises ValueError listing all misfits.
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
    for group, saved_group, labels in zip(merged, saved_groups, labels_of(merged), strict=True):
        numbers = [order[id(p)] for p in group["params"]]
        absent = _read_group(cls, group, saved_group, labels, numbers, saved_state, old, misfits, loaded)
        missing += [name for p, name in absent if not started or state.of(present, p)]
    loaded.states.update({k: _copied(x, None, k, misfits) for k, x in saved_state.items() if k in beside})
    _agree(cls, merged, saved_state, misfits)
    if missing and any("step" in entry for entry in state.of_parameters(loaded.states)):
        warn(
            f"{cls.__name__}.load_state_dict: the checkpoint has no state for {len(missing)} parameters "
            f"({', '.join(missing[:SHOWN])}{', ...' if len(missing) > SHOWN else ''}): they start anew",
            cls,
        )
    return loaded


def _read_group(
    cls: Any,
    group: Mapping[str, Any],
    saved_group: Mapping[str, Any],
    labels: Sequence[plans.Label],
    numbers: Sequence[Any],
    saved: Mapping[Any, Any],
    old: Collection[Any],
    misfits: Misfits,
    loaded: Loaded,
) -> list[tuple[Tensor, str]]:
    """Read the states of a group's parameters into `loaded`; returns those that have none in the checkpoint.

    numbers   the parameters' numbers in the checkpoint
    old       the numbers of parameters whose states are from before AXES
    """
    own = "plan" in saved_group  # else of torch.optim or another package
    kept = _listed(saved_group, options.ENTRIES)
    rows = list(zip(group["params"], labels, numbers, strict=True))
    arena = _arena(cls, group, {label: p for p, label, number in rows if _is_there(saved.get(number))})
    names = numbers if group.get("param_names") is None else group["param_names"]
    absent: list[tuple[Tensor, str]] = []
    for (p, label, number), name in zip(rows, names, strict=True):
        entry, extra = saved.get(number), {}
        if own:
            entry = renamed(cls, group, p, label, entry)
        if kept and isinstance(entry, Mapping):
            mine = kept - _names(cls, group, p, label)
            extra = {k: _copied(x, p.device, k, misfits) for k, x in entry.items() if k in mine}
            entry = {key: value for key, value in entry.items() if key not in mine}
        if _is_there(entry):
            where = state.label(p, name if isinstance(name, (str, int)) else str(name))
            if number in old and (said := _misread(select(cls, group, p, label)[2], p)):
                misfits.add(f"{where}: {said}")
                continue
            source = _opened_entry(cls, group, p, label, entry, own, where, misfits)
            made = None if source is None else _state(source, arena, loaded.rounded, misfits)
            if made is not None:
                loaded.states[p] = made
        elif p.requires_grad:
            absent.append((p, str(name)))
        if extra:
            loaded.states.setdefault(p, {}).update(extra)
    return absent


def _agree(cls: Any, groups: Groups, saved: Mapping[Any, Any], misfits: Misfits) -> None:
    """Raise ValueError on every rank if any rank has found misfits."""
    if sharding.anywhere(bool(misfits.lines), [p for group in groups for p in group["params"]]) and not misfits.lines:
        misfits.add("another rank found what does not fit its parts, and says it")
    if misfits.lines and (whose := _whose(cls, groups, saved)):
        misfits.heading += f": {whose}"
    misfits.stop()


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
    for group, labels in zip(groups, labels_of(groups), strict=True):
        with suppress(TypeError, ValueError):
            for p, label in zip(group["params"], labels, strict=True):
                own.add(frozenset(select(cls, group, p, label)[2].states))
    known = [names for names in found if len(found) == 1 and names in WHOSE.keys() - own]
    return f"it looks like {WHOSE[known[0]]} ({', '.join(sorted(known[0]))})" if known else ""


def _present(
    groups: list[Mapping[str, Any]], entries: Mapping[Any, Any], misfits: Misfits
) -> tuple[list[Mapping[str, Any]], Mapping[Any, Any]]:
    """Return groups and states in the present version. Groups without a plan, as of torch.optim, stay as they are."""
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
    """Return the numbers of the parameters in groups from before AXES."""
    found: set[Any] = set()
    for group in groups:
        version = group.get("format", 0)
        if "plan" in group and type(version) is int and version < AXES:
            found.update(group["params"])
    return found


def opened(cls: Any, saved: Any) -> dict[str, Any]:
    """Return a copy of a state dict that hooks may change; TypeError if it is no mapping."""
    if not isinstance(saved, Mapping):
        raise TypeError(f"{cls.__name__}.load_state_dict takes the dict that state_dict() made, got {saved!r:.80}")
    return dict(saved)


def parts(saved: Mapping[str, Any], misfits: Misfits) -> tuple[list[Mapping[str, Any]], Mapping[Any, Any]]:
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
    """Return True if a dict can look it up by value."""
    if isinstance(number, Tensor):
        return False
    try:
        hash(number)
    except TypeError:
        return False
    return True


def has_values(value: Tensor) -> bool:
    """Return True if a tensor has memory for each of its elements: reading any other would crash the process."""
    if value.layout is not torch.strided or value.is_meta:
        return False
    if type(value) not in (Tensor, nn.Parameter) or not value.numel():  # those of other types are made of others
        return True
    last = value.storage_offset() + sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
    return (last + 1) * value.element_size() <= value.untyped_storage().nbytes()


def without_values(value: Tensor) -> str:
    """Describe a tensor without values for an error message; "" if it has values."""
    if has_values(value):
        return ""
    strange = f"of layout {value.layout}" if value.layout is not torch.strided else "whose memory was freed"
    return "on the meta device" if value.is_meta else strange


def _is_there(entry: object) -> bool:
    """Return True for a nonempty state, and for anything in its place that is no mapping."""
    return bool(entry) if isinstance(entry, Mapping) else entry is not None


def _short(value: object) -> str:
    """Return a short text of any value for an error message."""
    if isinstance(value, Tensor):
        return state.describe(value.dtype, tuple(value.shape))
    return f"{value!r:.80}"


def _match(groups: Groups, saved: list[Mapping[str, Any]], misfits: Misfits) -> dict[int, Any]:
    """Return id(parameter) -> its number in the checkpoint.

    Parameters of a group are matched by name if the names are the same in any order, wrappers of modules
    (torch.compile, checkpoint_wrapper) ignored. Otherwise they are matched by position, as torch does (renamed models).
    Names of which only some agree mean another model and are refused.
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
    """Pair each name with the number of its earlier occurrences: two parameters may share a name."""
    seen: Counter[plans.Label] = Counter()
    found = []
    for name in names:
        found.append((name, seen[name]))
        seen[name] += 1
    return found


def _bare(names: Sequence[plans.Label]) -> list[tuple[plans.Label, int]]:
    """Do the same without the names of wrappers, unless two parameters would then share a name."""
    found = [overrides.bare(name) if isinstance(name, str) else name for name in names]
    return _counted(found if len(set(found)) == len(found) else names)


def positions(groups: Groups, saved: list[Mapping[str, Any]], misfits: Misfits) -> dict[int, int]:
    """Return id(parameter) -> its position in the checkpoint, counted over all groups."""
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
    """Return the group after loading: present parameters, with saved options and names over the present ones."""
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


def labels_of(groups: Sequence[Mapping[str, Any]]) -> list[list[plans.Label]]:
    """Return the labels of each group's parameters: their names, or positions over all groups."""
    start, found = 0, []
    for group in groups:
        count = len(group["params"])
        names = group.get("param_names")
        found.append(list(range(start, start + count)) if names is None else list(names))
        start += count
    return found


def _take_streams(merged: Groups, saved: Sequence[Mapping[str, Any]], order: Mapping[int, Any], unnamed: bool) -> None:
    """Record in merged groups the labels by which random bits were drawn, if parameters have other labels now.

    unnamed   the saved optimizer had no names, so that bits were drawn by positions
    """
    found: dict[Any, plans.Label] = {}
    for group, labels in zip(saved, labels_of(saved), strict=True):
        own = keys.streams(group) | (dict(zip(labels, labels, strict=True)) if unnamed else {})
        found.update((n, own[label]) for n, label in zip(group["params"], labels, strict=True) if label in own)
    for group, other, labels in zip(merged, saved, labels_of(merged), strict=True):
        if "plan" in other:
            pairs = [(label, found.get(order[id(p)], label)) for p, label in zip(group["params"], labels, strict=True)]
            group.pop("streams", None)
            if any(label != stream for label, stream in pairs):
                group["streams"] = tuple(pairs)


def _take_overrides(
    cls: Any, groups: Groups, merged: Groups, saved: Sequence[Mapping[str, Any]], order: Mapping[int, Any]
) -> None:
    """Give merged groups the checkpoint's plans of single parameters, under the present names.

    Groups of other packages have none and change nothing. Warns if the plans differ from the optimizer's.
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
    """Do the same for the blocks of single parameters."""
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
    """Record in merged groups the checkpoint's settings of single parameters under `key`, which `read` finds.

    Returns (label, this optimizer's setting, the checkpoint's) where they differ.
    """
    theirs: dict[Any, Any] = {}
    for group, labels in zip(saved, labels_of(saved), strict=True):
        own = read(group)
        theirs.update((n, own.get(label)) for n, label in zip(group["params"], labels, strict=True))
    changed: list[tuple[plans.Label, Any, Any]] = []
    for i, (present, group, other) in enumerate(zip(groups, merged, saved, strict=True)):
        before, after = labels_of(groups)[i], labels_of(merged)[i]
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
) -> tuple[str, Pair, Variant]:
    """Return (plan name, plan, variant) of a parameter under the options of its group.

    name   the parameter's label in its group: its name, or its position over all groups; None if it has no plan of its
           own
    kept   its state, if the variant is to be the one of this state (`held`)
    """
    chosen = plans.chosen(cls, group, p.dtype, name)
    flags = options.flags_of(cls, group, tuple(p.shape))
    small, vector = p.numel() < chosen.limit, p.ndim < 2
    found = plans.variant(chosen.pair, p.dtype, small, flags, vector)
    count = blocks.of(cls, group).get(name) if name is not None else None
    found = blocks.seen(found, p, count)
    return chosen.name, chosen.pair, found if kept is None else held(cls, group, p, name, found, kept)


def held(
    cls: Any, group: Mapping[str, Any], p: Tensor, name: plans.Label | None, variant: Variant, kept: Mapping[str, Any]
) -> Variant:
    """Return the variant whose states an entry has: the parameter's, or that of another setting of the flags.

    While a hyper-parameter is 0, a state that only other values need (SGD's momentum_buffer) stays as it is, as in
    torch. If it is 0 from the beginning, there is no such state until it has been set and a step was made.
    """
    if variant.keys == kept.keys():
        return variant
    fixed = {flag.name for flag in cls.FLAGS if flag.shape is not None or flag.every is not None}
    switched = {flag.name for flag in cls.FLAGS if flag.nonzero is not None}
    chosen = plans.chosen(cls, group, p.dtype, name)
    small, vector = p.numel() < chosen.limit, p.ndim < 2
    settings = {tuple(v.flags.items()) for v in chosen.pair.variants if v.param == variant.param}
    beside = [plans.variant(chosen.pair, p.dtype, small, setting, vector) for setting in sorted(settings)]
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
    """Return the names of the flags that differ."""
    return {name for name in a.flags.keys() | b.flags.keys() if a.flags.get(name, 0) != b.flags.get(name, 0)}


def _arena(cls: Any, group: Mapping[str, Any], params: Mapping[plans.Label, Tensor]) -> Arena:
    """Return a buffer for the states of the parameters on the CPU that have a plan; the others will be refused."""
    sizes: list[int] = []
    for label, p in params.items():
        with suppress(TypeError, ValueError):
            here = state.home(p).type == "cpu" and not sharding.is_sharded(p)
            sizes += state.sizes(select(cls, group, p, label)[2], p, {}) if here else ()
    return Arena(sizes)


class _Source(NamedTuple):
    """The saved state of a parameter, decoded if another package made it.

    target   the parameter that the optimizer has
    p        its values where its states are: on a sharded parameter this rank's part, or all of it if gathered
    own      an optgen optimizer saved the state
    entry    the state without keys of value None
    codes    codes and scales of another package, which the plan may read as they are
    exact    the full weight, if another package saved it
    where    the parameter and its plan, as misfits call it
    """

    plan: Pair
    variant: Variant
    target: Tensor
    p: Tensor
    parts: sharding.Parts | None
    own: bool
    entry: Mapping[str, Any]
    codes: Mapping[str, tuple[Tensor, Tensor]]
    exact: Tensor | None
    where: str

    def of_target(self, shown: Tensor) -> tuple[Tensor, Tensor]:
        """Return (parameter, its new values) for `Loaded.rounded`, of this rank's part if the parameter is sharded."""
        if self.parts is None:
            return self.target, shown
        if self.parts.gathered:  # p is a copy of all of it
            return sharding.local(self.target), sharding.part_of(shown, self.parts.layout)
        return self.p, shown


def _opened_entry(
    cls: Any,
    group: Mapping[str, Any],
    p: Tensor,
    label: plans.Label,
    entry: Any,
    own: bool,
    where: str,
    misfits: Misfits,
) -> _Source | None:
    """Return the source of a parameter's state; None, with misfits unless it is empty, if there is nothing to read."""
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
    target, parts, exact, codes, errors = p, None, None, {}, None
    try:
        plan_name, plan, variant = select(cls, group, p, label)
        if not own:
            errors = found.get("error_bits")
            codes = reader().codes(found, variant.states)
            found = reader().dense(found, variant.states, tuple(p.shape))
        variant = held(cls, group, p, label, variant, found)
    except (TypeError, ValueError) as error:
        misfits.add(f"{where}: {error}")
        return None
    where = f"{where}, plan {plan_name}"
    try:
        p = state.at_home(p)
        if sharding.is_sharded(p):
            parts = sharding.Parts.of(p, variant)
            p, found = parts.weight(p), parts.taken(found)
            errors = parts.beside("error_bits", errors) if isinstance(errors, Tensor) else errors
        if not own:
            exact = reader().weight({"error_bits": errors}, p, group.get("master_bytewidth"))
    except ValueError as error:
        misfits.add(f"{where}: {error}")
        return None
    return _Source(plan, variant, target, p, parts, own, found, codes, exact, where)


def _state(source: _Source, arena: Arena, rounded: list[tuple[Tensor, Tensor]], misfits: Misfits) -> state.State | None:
    """Return the state that a source holds; its misfits are added, and then the result is of no use."""
    before, variant = len(misfits.lines), source.variant
    dense = not source.own and is_dense(variant, source.p, source.entry)
    expected = {*variant.states, *variant.host_names, "step"} if dense else variant.keys
    for key in sorted(map(str, source.entry.keys() - expected)):
        misfits.add(f"{source.where}: {key}: not expected (it has {', '.join(sorted(expected))})")
    made = _scalars(variant, source.entry, dense, source.where, misfits)
    fill = _encode_dense if dense else _copy_fields
    rounds = fill(source, made, arena, before, misfits)
    _write_later(rounds, rounded, source.where, misfits)
    return made if source.parts is None else source.parts.wrapped(made)


def _encode_dense(
    source: _Source, made: dict[str, Any], arena: Arena, before: int, misfits: Misfits
) -> list[tuple[Tensor, Tensor]]:
    """Encode dense states into `made`; returns the weights that are rounded anew, and their new values.

    before   the number of misfits at which nothing is wrong with this parameter
    """
    plan, variant, p, parts, where = source.plan, source.variant, source.p, source.parts, source.where
    apart = variant.of_whole and parts is not None and not parts.gathered and bool(parts.layout.dims())
    assembled: dict[str, Tensor] = {}
    if apart and parts is not None:  # even if this rank found misfits: the others would wait for it
        assembled = parts.assembled({key: source.entry[key].to(p.device) for key in variant.states})
    _numbers({**source.entry, **assembled}, variant.states, variant.nonneg, where, misfits)
    if len(misfits.lines) > before:
        return []
    values = {key: source.entry[key].to(p.device) for key in variant.states}
    room = {f.name: state.zeros(f, p, arena) for f in variant.fields}
    exact = low_bits.exact(p) if source.exact is None else source.exact
    wanted = variant.names if exact is None else (*variant.names, "p")
    if apart and parts is not None:
        made.update(_encode_apart(plan, variant, p, parts, assembled, room))
        wanted = tuple(name for name in wanted if name not in made)
    made.update(layout.encode(plan, variant, p, values, wanted, room, exact))
    if source.codes and parts is None:
        _keep_codes(plan, variant, p, values, source.codes, made)
    return [] if exact is None else [source.of_target(made.pop("p"))]


def _copy_fields(
    source: _Source, made: dict[str, Any], arena: Arena, before: int, misfits: Misfits
) -> list[tuple[Tensor, Tensor]]:
    """Copy the variant's own fields into `made`; returns as `_encode_dense` does."""
    plan, variant, p, where = source.plan, source.variant, source.p, source.where
    for f in variant.fields:
        tensor = _field(f, p, source.entry.get(f.name), where, misfits, arena)
        if tensor is not None:
            made[f.name] = tensor
    if len(misfits.lines) > before:
        return []
    floats = [f for f in variant.fields if f.torch_dtype.is_floating_point]
    _numbers(made, [f.name for f in floats], {f.name for f in floats if f.nonneg}, where, misfits)
    coded = [n for n in variant.states if not variant.is_plain(n)]
    read = layout.decode(plan, variant, p, made, coded) if coded else {}
    _numbers(read, coded, variant.nonneg, where, misfits)
    _headers(made, read, variant.fields, where, misfits)
    return [source.of_target(shown) for _, shown in _true_rounding(plan, variant, p, made)]


def _write_later(
    found: list[tuple[Tensor, Tensor]], rounded: list[tuple[Tensor, Tensor]], where: str, misfits: Misfits
) -> None:
    """Record the new values of weights; a weight that cannot be written is a misfit."""
    for p, shown in found:
        if state.of_inference(p):
            misfits.add(f"{where}: the parameter {state.INFERENCE}")
        rounded.append((p, shown))


def _encode_apart(
    plan: Pair,
    variant: Variant,
    p: Tensor,
    parts: sharding.Parts,
    values: Mapping[str, Tensor],
    room: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Encode states whose formats need statistics of the whole tensor, and return this rank's parts.

    p       this rank's part of the parameter; the states do not depend on its values
    values  the states of the whole tensor
    room    tensors to write the parts into
    """
    like = torch.zeros(parts.layout.shape, dtype=p.dtype, device=p.device)
    fields = [f for f in variant.fields if f.owner in values]
    found = layout.encode(plan, variant, like, values, [f.name for f in fields])
    return {f.name: room[f.name].copy_(sharding.part_of(found[f.name], parts.field(f))) for f in fields}


def _keep_codes(
    plan: Pair,
    variant: Variant,
    p: Tensor,
    values: Mapping[str, Tensor],
    codes: Mapping[str, tuple[Tensor, Tensor]],
    made: dict[str, Any],
) -> None:
    """Keep another package's codes and scales in `made` if the plan decodes them to the same numbers.

    Encoding the numbers would not give the same codes if a table has no -1: a block's largest magnitude may then be
    less than the scale that it was encoded with.
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
    plan: Pair, variant: Variant, p: Tensor, made: Mapping[str, Any]
) -> list[tuple[Tensor, Tensor]]:
    """Return (p, its new value) if p was cast from the weight whose low bits are in `made`.

    A cast rounds ties to even and a split weight rounds them up: without this the weight would differ in its last
    place. Low bits of any other weight belong to a p that is loaded later.
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
    """Add a misfit for every tensor with NaN, and for tensors of `nonneg` with negative numbers.

    Both come from a run that diverged, or a damaged file.
    """
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
    """Add a misfit for every field of block headers with a value that its format never writes, or that decodes to
    infinity.

    read   the decoded states
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
    """Return True if an entry holds torch's dense tensors of the states, not the variant's own fields."""
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
    """Return `step` and the host states of an entry.

    torch's SGD counts no steps. If its buffer is there, a step was made, which is all that a rule without a count
    needs to know.
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
    """Copy a saved field to p's device as a contiguous tensor; floats are cast to the declared dtype."""
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


def dense_entry(plan: Pair, variant: Variant, p: Tensor, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's state in torch.optim's form: fp32 tensors under the states' names, `step` as a tensor."""
    dense: dict[str, Any] = {"step": torch.tensor(float(entry["step"]), dtype=torch.float32, device="cpu")}
    for name in variant.host_names:
        dense[name] = torch.tensor(float(entry[name]), dtype=torch.float32, device="cpu")
    dense.update(sharding.decode(plan, variant, state.at_home(p), entry, variant.states))
    return dense
