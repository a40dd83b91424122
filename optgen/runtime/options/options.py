"""The options of a parameter group: checked and coerced where they enter, read again at every step."""

from __future__ import annotations

import difflib
import math
import numbers
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor

from optgen.runtime.layout import plans
from optgen.runtime.layout.fp8_weight import dtype_of
from optgen.runtime.options import blocks, overrides
from optgen.runtime.records import Hyper, as_float, as_int, series, switch
from optgen.runtime.records.warn import warn

BACKENDS = ("auto", "reference", "triton", "cpp")

OWN = frozenset({"plan", "overrides", "blocks", "backend", "seed", "stagger", "workspace", "format"})
"""Keys of a group that no other package has; format: the version of the checkpoint format (checkpoint.py)."""

MODE = "train_mode"
"""Key of a group, under rules with weights for evaluation: False while the model holds these (schedulefree has it)."""

RUNNING = ("capturable", "offload")
"""Keys for the way in which a step is made, not for its result.  A group has them only if they were requested."""

HOST = "host"
"""The value of `capturable` under which the host sends the numbers of each step before a graph is replayed."""

SUMS = "model_sums"
"""Key of an optimizer's first group, while gradients are released by the sums over the model of the step before: these
sums, a tensor; so checkpoints and copies have them."""

BASE = "base_lr"
"""Key of a group of a rule with scheduled hyper-parameters: the lr that they belong to, at which the group began."""

FOREIGN = frozenset({"params", "backend", "workspace", "format", "foreach", "fused", "differentiable", *RUNNING})
"""Keys of a saved group that say how its optimizer ran or was saved, not what it had learned: not taken over."""

Setting = tuple[tuple[str, bool], ...]
"""Flags, each on or off."""

SPREAD = 0.73548
"""Multiples of it modulo 1 are spread evenly, as are every second to every 16th of them, such as those of one shape in
the layers of a model: 12 to 560 of them give none of 5 to 200 equal parts more than twice its share (rounded up), on
average 1.14 times; of the golden ratio 4 and 1.34 times, at random 5 and 1.9."""


def check(cls: Any, group: Mapping[str, Any]) -> dict[str, Any]:
    """The coerced options among a group's keys; TypeError or ValueError where one is out of its range."""
    owner = cls.__name__
    running = _running(cls, group)
    on_device = running.get("capturable") is True
    found: dict[str, Any] = {h.name: h.check(group[h.name], owner, on_device) for h in cls.HYPERS if h.name in group}
    found |= running
    if BASE in group and any(hyper.scheduled for hyper in cls.HYPERS):
        found[BASE] = Hyper(BASE, 0.0, ge=0).check(group[BASE], owner)
    found |= {name: switch(group[name], name, owner) for name in _switches(cls) if name in group}
    _check_flags(cls, {**group, **found})
    for name, read in _READERS.items():
        if name in group and ((value := read(cls, group[name])) is not None or name == "plan"):
            found[name] = value
    return found


def _check_flags(cls: Any, group: Mapping[str, Any]) -> None:
    """Raise ValueError if flags exclude one another, or an interval is none."""
    for flag in cls.FLAGS:
        flag.check(group, cls.__name__)
    if all(flag.every in group for flag in cls.FLAGS if flag.every):
        at_step(cls, group, 1, 0)


def _switches(cls: Any) -> tuple[str, ...]:
    """Return the names of options that are True or False."""
    return ("maximize", *[flag.name for flag in cls.FLAGS if not flag.derived])


def _running(cls: Any, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ways in which steps are to be made; ValueError if they cannot; `foreach`, `fused` have no effect."""
    given = {name: group[name] for name in RUNNING if group.get(name) is not None}
    host = given.get("capturable") == HOST
    found = {name: x if host and name == "capturable" else switch(x, name, cls.__name__) for name, x in given.items()}
    if _is_given(differentiable := group.get("differentiable")):
        raise ValueError(
            f"{cls.__name__} does not support differentiable={differentiable!r:.80}: the step is one fused kernel that "
            f"autograd does not see"
        )
    changing = [flag.name for flag in cls.FLAGS if flag.clock is not None]
    if found.get("capturable") is True and changing:
        raise ValueError(
            f"{cls.__name__} does not support capturable=True: {changing[0]} makes some of its steps different ones, "
            f"and a CUDA graph repeats one step; capturable={HOST!r} takes a graph for each kind"
        )
    if (fused := group.get("fused")) is not None and switch(fused, "fused", cls.__name__) and group.get("foreach"):
        raise ValueError(f"{cls.__name__}: fused and foreach cannot both be True, as in torch")
    return found


def check_again(cls: Any, group: Mapping[str, Any]) -> None:
    """Errors of `check` for what a user put into a group since, of the options that no step reads through a check of
    its own; a step that is not like the one before asks, for each group."""
    if type(group["seed"]) is not int or not all(type(group[name]) is bool for name in _switches(cls)):
        check(cls, group)


def _is_given(value: object) -> bool:
    """Return True for an option that is not empty or off; a tensor, which may have no truth, counts as given."""
    return isinstance(value, torch.Tensor) or bool(value)


def _seed(cls: Any, value: object) -> int:
    seed = as_int(value)
    if seed is None:
        raise TypeError(f"{cls.__name__}: seed must be an int, got {value!r}")
    return seed


def _stagger(cls: Any, value: object) -> bool | None:
    if not _is_given(value):
        return None
    if switch(value, "stagger", cls.__name__) and any(flag.every for flag in cls.FLAGS):
        return True
    raise ValueError(f"{cls.__name__}: stagger=True spreads what is done every k steps, and this rule does nothing so")


def _backend(cls: Any, value: object) -> object:
    if value not in BACKENDS:
        raise ValueError(f"{cls.__name__}: backend must be one of {', '.join(BACKENDS)}, got {value!r}")
    return value


def _workspace(cls: Any, value: object) -> int | None:
    """Return a number of bytes, given as one or as in "512MiB"."""
    if value is None:
        return None
    size = as_int(value)
    if isinstance(value, str) and (found := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG])iB\s*", value)):
        size = int(float(found[1]) * 1024 ** ("KMG".index(found[2]) + 1))
    if size is None or isinstance(value, bool) or size < 1:
        raise ValueError(f"{cls.__name__}: workspace must be a number of bytes >= 1, or as in '512MiB', got {value!r}")
    return size


def _plan(cls: Any, option: object) -> plans.PlanOption:
    """A plan option whose plan exists."""
    if option is None:
        return None
    if not isinstance(option, str):
        raise TypeError(
            f"{cls.__name__}: plan must be a plan's name, or None, got {option!r}; parameters of another plan are a "
            f"group of their own, {{'params': [...], 'plan': ...}}"
        )
    plans.load(cls, option)
    return option


_READERS: Mapping[str, Callable[[Any, Any], Any]] = {
    "seed": _seed, "workspace": _workspace, "stagger": _stagger, "backend": _backend, "plan": _plan,
    "overrides": lambda cls, value: overrides.Overrides.recorded(cls, value) if _is_given(value) else None,
    "blocks": lambda cls, value: (
        blocks.BlockOverrides.recorded(cls, value) if cls.BLOCKS and _is_given(value) else None
    ),
}  # fmt: skip
"""The checks of options that are neither numbers nor switches; None leaves an option out, but for `plan`."""


def record_plan(cls: type, option: plans.PlanOption, params: Iterable[Tensor]) -> str:
    """The plan option with the default filled in, so that a checkpoint says which plan its states have even where the
    default of a later build differs."""
    name = plans.plan_name(cls, option)
    for dtype in dict.fromkeys(dtype_of(p) for p in params if p.requires_grad):
        overrides.refuse_missing(cls, name, dtype)
    return name


def rounds(cls: Any, group: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of rounds that a group leaves to its coefficients."""
    left = [h for h in cls.HYPERS if h.rounds_of and group[h.name] is None]
    return {h.name: float(series.rounds(group[h.rounds_of])[0]) for h in left}


def rates(cls: Any, given: Mapping[str, Any], group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the lr and the base of scheduled hyper-parameters that a new group has.

    given     the group's own options; `group` has all, `defaults` those of the optimizer
    """
    followers = [hyper for hyper in cls.HYPERS if hyper.scheduled]
    found: dict[str, Any] = {}
    for hyper in followers:
        if hyper.lr_if and group[hyper.lr_if] and not defaults[hyper.lr_if] and "lr" not in given:
            lr, own = group["lr"], group[hyper.name]
            found["lr"] = torch.full_like(lr, float(own)) if isinstance(lr, Tensor) else float(own)
    if followers and BASE not in given:
        found[BASE] = float(found.get("lr", group["lr"])) or float(defaults["lr"])
    return found


_PLAIN = frozenset({float, int, bool, type(None)})


def _are_plain(columns: Iterable[Sequence[Any]]) -> bool:
    """Return True if all are Python numbers, or tuples of these."""
    parts = (x if type(x) is tuple else (x,) for x in chain.from_iterable(columns))
    return _PLAIN.issuperset(map(type, chain.from_iterable(parts)))


class Numbers:
    """The numbers of groups, as a step takes them: of each, in lists.

    signs   what gradients are multiplied with
    seeds   of the random bits
    hypers  of each hyper-parameter, by name
    last    True if the groups' options are Python numbers, which change where an option is another object alone
    """

    def __init__(self, cls: Any, groups: Sequence[Mapping[str, Any]], device: torch.device | None = None) -> None:
        """device: as in `Hyper.read`; errors as of `hypers_of`."""
        self.signs = [-1.0 if group["maximize"] else 1.0 for group in groups]
        self.seeds = [group["seed"] for group in groups]
        given = {hyper.name: [group[hyper.name] for group in groups] for hyper in cls.HYPERS}
        self.hypers = {hyper.name: hyper.read_all(given[hyper.name], device) for hyper in cls.HYPERS}
        self.last = all(map(is_, given.values(), self.hypers.values())) or _are_plain(given.values())
        if scheduled := [hyper.name for hyper in cls.HYPERS if hyper.scheduled]:
            read = [hypers_of(cls, group, device) for group in groups]
            self.hypers |= {name: [own[name] for own in read] for name in scheduled}


def hypers_of(cls: Any, group: Mapping[str, Any], device: torch.device | None = None) -> dict[str, Any]:
    """Return the hyper-parameters of a group as a step takes them, by name; `device` as in `Hyper.read`.

    Raises ValueError for a rate that belongs to lr=0, if lr is another, or a tensor that is not looked at.
    """
    found = {hyper.name: hyper.read(group[hyper.name], device) for hyper in cls.HYPERS}
    for hyper in (hyper for hyper in cls.HYPERS if hyper.scheduled):
        lr, base = found["lr"], group[BASE]
        if hyper.lr_if and group[hyper.lr_if]:
            found[hyper.name] = lr
        elif base or not (isinstance(lr, Tensor) or lr):
            lr = lr.double() if isinstance(lr, Tensor) else lr
            found[hyper.name] = found[hyper.name] * (lr / base if base else 0.0)
        else:
            raise ValueError(
                f"{cls.__name__} was made with lr=0, so that the lr which {hyper.name} belongs to is unknown: make it "
                f"with the largest lr and let the schedule begin at 0, or set {BASE!r} of each group to that lr"
            )
    return found


def flags_of(
    cls: Any, group: Mapping[str, Any], shape: tuple[int, ...] | None = None, name: object = None
) -> tuple[tuple[str, bool], ...]:
    """The setting of every flag in a group, derived ones included; those that follow a shape only where it is given,
    by `blocks.shape`.  Raises ValueError with the parameter's name where a function of shapes fails."""
    setting = []
    for flag in cls.FLAGS:
        if flag.shape is None:
            value: Any = False if flag.clock is not None else group[flag.nonzero or flag.name]
            several = flag.nonzero is not None and isinstance(value, (tuple, list))
            setting.append((flag.name, any(part != 0 for part in value) if several else bool(value != 0)))
        elif shape is not None:
            try:
                setting.append((flag.name, flag.holds(shape, group)))
            except Exception as error:
                where = f"the shape {shape}" + (f" of parameter {name!r}" if name is not None else "")
                what = f"the function of its shape_flag {flag.name!r} fails on {where}: {error}"
                raise ValueError(f"{cls.__name__}: {what}") from error
    return tuple(setting)


def at_step(
    cls: Any, group: Mapping[str, Any], step: int, position: int, host: Mapping[str, Any] | None = None
) -> Setting:
    """The flags that change from step to step, at one (counted from 1); ValueError for an interval below 1.

    host      the parameter's host states, which say if inputs were fed
    position  of the parameter over all groups: under `stagger` flags are on up to an interval earlier, by a fraction
              of it that follows from the position
    """
    setting = []
    early = position * SPREAD % 1 if group.get("stagger") else 0.0
    for flag in cls.FLAGS:
        if flag.every is not None:
            value = as_float(group[flag.every])
            interval = int(value) if value is not None and math.isfinite(value) else 0
            if interval < 1 or interval != value:
                raise ValueError(f"{cls.__name__}: {flag.every} must be a whole number >= 1, got {group[flag.every]!r}")
            on = (step - flag.first + int(early * interval)) % interval == 0
            setting.append((flag.name, on or (flag.first and step == 1)))
        elif flag.first:
            setting.append((flag.name, step == 1))
        elif flag.fed is not None:
            setting.append((flag.name, flag.all_fed(host or {})))
    return tuple(setting)


def warn_unknown(cls: Any, group: Mapping[str, Any]) -> None:
    """Groups may carry keys of the user's own; one that looks like a misspelt option is worth a word."""
    known = [*(h.name for h in cls.HYPERS), *(f.name for f in cls.FLAGS if not f.derived)]
    known += ["maximize", MODE, BASE, *sorted(OWN)]
    for key in group:
        if key in known or key in FOREIGN or key == "param_names":
            continue
        if guess := near(str(key), known):
            warn(f"{cls.__name__}: parameter group option {key!r} has no effect{guess}", cls)


def near(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the one that was probably meant, or ""."""
    close = difflib.get_close_matches(name, [*known], n=1, cutoff=0.85)
    return f"; did you mean {close[0]!r}?" if close else ""


def in_plain_numbers(cls: Any, group: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a group, Python's floats where a schedule gave it NumPy's, also as `initial_lr`: a file of these
    could not be loaded without running code."""
    hypers = {hyper.name for hyper in cls.HYPERS}
    real = (key for key, x in group.items() if isinstance(x, numbers.Real) and not isinstance(x, numbers.Rational))
    return {key: _plain_number(group[key]) for key in (hypers & group.keys()).union(real)}


def _plain_number(value: Any) -> Any:
    if type(value) in (tuple, list):
        return type(value)(map(_plain_number, value))
    if type(value) in (bool, int, float) or isinstance(value, Tensor):
        return value
    number = as_float(value)
    return value if number is None else number
