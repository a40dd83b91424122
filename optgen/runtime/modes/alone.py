"""Optimizers over a part of a user's optimizer: the same class, states and options, other tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optgen.runtime.optimizer import Optimizer

OWN = ("params", "param_names")
"""Keys of a group that say which parameters it has."""


def part(optimizer: Optimizer, groups: Iterable[dict[str, Any]]) -> Optimizer:
    """An optimizer of the same class over these groups, without states; its constructor is not run."""
    made = object.__new__(type(optimizer))
    made.defaults = optimizer.defaults
    made.state = defaultdict(dict)
    made.param_groups = list(groups)
    made._reset_caches()
    made._offload = optimizer._offload.alike()
    made._strays = None
    return made


def take_over(theirs: Mapping[str, Any], group: dict[str, Any]) -> None:
    """Gives a group the options that another one has now; its parameters and their names stay."""
    for key, value in theirs.items():
        if key not in OWN:
            group[key] = value
    if len(group) != len(theirs) + ("param_names" not in theirs):
        for key in group.keys() - theirs.keys() - set(OWN):
            del group[key]
