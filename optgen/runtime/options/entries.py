"""The parameters of an optimizer in order, each with its group and its name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from optgen.runtime.layout.plans import Label
from optgen.runtime.records.uninterrupted import Uninterrupted

OWN = ("params", "param_names", "positions")
"""Keys of a group that say which parameters it has; all others are options.  positions: of a part of a user's groups,
which is stepped by itself, the indices over all of these."""


class Owner(NamedTuple):
    """The optimizer whose step is made, or a part of it: its class, groups and states, the context in which it changes
    them, and the mesh of ranks that hold the same parameters (`replicas`), if they share work."""

    cls: Any
    groups: list[dict[str, Any]]
    states: dict[Any, Any]
    uninterrupted: Uninterrupted
    replicas: Any = None


class Entry(NamedTuple):
    """A parameter in its group.

    number    the group's index
    place     the index in the group
    position  the index over all groups of the user's
    name      the name, or the position if the group has no names
    """

    p: Tensor
    group: dict[str, Any]
    number: int
    place: int
    position: int
    name: Label


def labels(groups: Sequence[Mapping[str, Any]]) -> list[list[Label]]:
    """Return the names of each group's parameters, or positions over all groups where it has none.

    Raises ValueError for names that were not edited with their parameters.
    """
    start, found = 0, []
    for number, group in enumerate(groups):
        count = len(group["params"])
        names = group.get("param_names")
        if names is not None and len(names) != count:
            raise ValueError(
                f"group {number} has {count} parameters and {len(names)} names: edit 'param_names' as 'params', or add "
                f"parameters by add_param_group()"
            )
        found.append(list(range(start, start + count)) if names is None else list(names))
        start += count
    return found


def names(tensors: Sequence[Tensor], params: Any, kept: Any, first: int) -> list[Label]:
    """Return what the parameters of a group that is to come will be called.

    params   the group's "params": names are those of (name, parameter) pairs
    kept     its "param_names", as the group of another optimizer has them
    first    the position of its first parameter over all groups
    """
    given = params if isinstance(params, list) else []
    found = {id(p[1]): str(p[0]) for p in given if isinstance(p, tuple)}
    if not found and isinstance(kept, (list, tuple)) and len(kept) == len(tensors):
        return list(kept)
    return [found.get(id(p), first + i) for i, p in enumerate(tensors)]


def of(groups: Sequence[dict[str, Any]]) -> Iterator[Entry]:
    """Yield the entries of all groups, in order."""
    start = 0
    for number, (group, names) in enumerate(zip(groups, labels(groups), strict=True)):
        positions = group.get("positions") or range(start, start + len(names))
        for place, p in enumerate(group["params"]):
            yield Entry(p, group, number, place, positions[place], names[place])
        start += len(names)


def take_options(group: dict[str, Any], source: Mapping[str, Any]) -> None:
    """Give a group the options of another one; its parameters and their names stay."""
    for key, value in source.items():
        if key not in OWN:
            group[key] = value
    for key in group.keys() - source.keys() - set(OWN):
        del group[key]
