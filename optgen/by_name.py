"""Optimizers by the names of their rules, also of several rules for the parameters of one model."""

from __future__ import annotations

import fnmatch
import importlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, overload

import torch
from torch import Tensor, nn

from optgen import roles, widths
from optgen.base import ready
from optgen.runtime.optimizer import Optimizer
from optgen.runtime.options.options import near
from optgen.runtime.several import Several

REST = "*"
"""The pattern of the parameters that no other pattern matches."""

Named = list[tuple[str, Tensor]]
Model = nn.Module | Iterable[tuple[str, Tensor]]
OptimizerType = TypeVar("OptimizerType", bound=torch.optim.Optimizer)


def list_rules(pattern: str = "*") -> list[str]:
    """Return the names of the ready-made rules that match a shell pattern such as "adam*"."""
    found = (path.stem for path in ready.specs_dir().glob("*.py") if path.stem not in ("__init__", "plans"))
    return sorted(fnmatch.filter(found, pattern))


@overload
def make(rule: type[OptimizerType], model: Model, *, plan: Any = None, **options: Any) -> OptimizerType: ...


@overload
def make(rule: Mapping[Any, Any], model: Model, *, plan: Any = None, **options: Any) -> Several: ...


@overload
def make(rule: Any, model: Model, *, plan: Any = None, **options: Any) -> Optimizer: ...


def make(
    rule: Any,
    model: Model,
    *,
    plan: Any = None,
    sort: bool | Mapping[Any, str] | None = None,
    scale: str | None = None,
    base_width: int | None = None,
    **options: Any,
) -> torch.optim.Optimizer:
    """Return an optimizer of a model's parameters, by the name of its rule.

    rule     the name of a ready-made rule, wrappers around one ("ema(cautious(adamw))"), a spec or its file, an
             optimizer class, or several by the parameters' names: {regular expression: one of these, or a dict of
             "rule" and options}.  An expression is searched for in the name, or is a function (name, parameter) that
             says if it takes that; "*" takes what no other matches.
    model    or its named parameters
    plan     the plan's name, or what `optgen.compile` takes; None: each rule's default
    sort     False: step all alike.  Else Muon and rules like it, which have an AdamW, step embeddings, heads, the first
             convolution, norms and biases by that, in groups that say their "role"; Scion by its other norms.
             {expression or function: role} changes what single parameters are; roles are hidden, lora_b, lora_a,
             embedding, head, stem and vector
    scale    "mup": lr and weight_decay are those found at the width `base_width`, and follow muP to this model's
             width; without it and lr, they begin with a public sweep's (`widths.TUNED`).  "mup_coupled" leaves
             weight_decay as it is
    options  of the class.  With several rules each takes those that it has, and each dict has its own first.

    ValueError, before anything is made, for a name that no expression matches or two do, for an expression without
    a name, and for a rule or model that cannot be sorted or scaled; TypeError for an option that no rule has.
    """
    if not isinstance(model, (nn.Module, Iterable)):
        raise TypeError(f"make: expected a model or its named parameters, got {model!r:.80}")
    named: Named = list(model.named_parameters() if isinstance(model, nn.Module) else model)
    module = {"module": model} if isinstance(model, nn.Module) else {}
    asked = Asked(sort, scale, base_width)
    if isinstance(rule, Mapping):
        if asked != Asked():
            raise TypeError("make: several rules are sorted by their patterns: sort=, scale= are of one rule")
        return _several(rule, named, module, plan, options)
    cls = class_of(rule, plan)
    arguments = _arranged(cls, named, module.get("module"), options, asked)
    made: Optimizer = cls(**_planned(plan), **module, **{**options, **arguments})
    return made


def _several(
    rules: Mapping[Any, Any], named: Named, module: Mapping[str, Any], plan: Any, options: Mapping[str, Any]
) -> Several:
    """Return an optimizer of several rules; `module`: the model, as an option."""
    if not all(isinstance(pair, (tuple, list)) for pair in named):
        raise TypeError("make: several rules are given by names: take the model, or its named_parameters()")
    claimed = _claims(rules, named)
    asked = {key: _options(key, value, plan) for key, value in rules.items()}
    takes = {key: inspect.signature(own["rule"]).parameters for key, own in asked.items()}
    _check_options(options, [own["rule"].__name__ for own in asked.values()], [*takes.values()])
    parts: dict[str, Optimizer] = {}
    for key, own in asked.items():
        mine = [pair for pair in named if claimed[pair[0]] == key]
        cls, own_plan = own.pop("rule"), own.pop("plan")
        given = {name: value for name, value in options.items() if name in takes[key]}
        parts[key] = cls(mine, **_planned(own_plan), **module, **{**given, **own})
    return Several(parts)


class Asked(NamedTuple):
    """The arguments of `make` about the parameters of one rule."""

    sort: Any = None
    scale: Any = None
    base_width: Any = None

    def check(self, cls: Any, named: Named) -> bool:
        """Return True if parameters are sorted; TypeError or ValueError for what cannot be sorted or scaled."""
        pairs, sorts = all(isinstance(pair, tuple) for pair in named), roles.sorts(cls) and self.sort is not False
        if (self.sort or self.scale) and not pairs:
            raise TypeError("make: sort= and scale= go by names: take the model, or its named_parameters()")
        if self.sort and not self.scale and not sorts:
            rule = getattr(cls, "SPEC", cls.__name__)
            raise ValueError(
                f"make: sort= is of rules that leave embeddings to AdamW, as Muon does; {cls.__name__} has one step "
                f"for all: give others to another rule, make({{pattern: {rule!r}, '*': 'adamw'}}, model)"
            )
        if self.scale is not None and self.scale not in widths.SCALES:
            raise ValueError(f"make: expected scale={' or '.join(map(repr, widths.SCALES))}, got {self.scale!r}")
        if self.base_width is not None and self.scale is None:
            raise TypeError("make: base_width= goes with scale='mup'")
        return sorts and pairs


def _arranged(
    cls: Any, named: Named, model: nn.Module | None, options: Mapping[str, Any], asked: Asked
) -> dict[str, Any]:
    """Return the parameters of an optimizer, in groups by their roles and rates, and options that belong to these."""
    sorts = asked.check(cls, named) and not options.get("adamw")
    if not sorts and not asked.scale:
        return {"params": named}
    found = roles.find(named, model, asked.sort if isinstance(asked.sort, Mapping) else None)
    groups = roles.groups(cls if sorts else None, named, found)
    more: dict[str, Any] = {}
    if sorts:
        more["blocks"] = {**(options.get("blocks") or {}), **roles.blocks_of(cls, named, found, model)}
    if asked.scale:
        if (base := asked.base_width) is None:
            base, tuned = widths.tuned(cls, options)
            more |= {name: value for name, value in tuned.items() if name not in options}
        by = widths.ratios(named, found, model, base)
        groups = widths.scaled(cls, groups, {**options, **more}, by, widths.SCALES[asked.scale])
    return {"params": groups, **more}


def _options(key: Any, value: Any, plan: Any) -> dict[str, Any]:
    """Return the options of one of several rules, with its class under "rule"."""
    own = dict(value) if isinstance(value, Mapping) else {"rule": value}
    if "rule" not in own:
        raise ValueError(f"make: {key!r}: expected the name of a rule, or a dict with one under 'rule', got {own}")
    own.setdefault("plan", plan)
    own["rule"] = class_of(own["rule"], own["plan"])
    if hasattr(own["rule"], "first_step"):
        what = f"{own['rule'].__name__} takes two gradients of all parameters: make the rules without it"
        raise ValueError(f"make: {key!r}: {what}, and optgen.SAM(opt, rho=...) goes around them")
    return own


def _check_options(options: Iterable[str], classes: Iterable[str], takes: Sequence[Iterable[str]]) -> None:
    """Raise TypeError for an option that no class takes."""
    known = [name for arguments in takes for name in arguments]
    for option in options:
        if option not in known:
            names = ", ".join(dict.fromkeys(classes))
            raise TypeError(f"make: none of {names} has the option {option!r}{near(option, known)}")


def _planned(plan: Any) -> dict[str, Any]:
    """Return the option of a plan's name; other plans are compiled into the class."""
    return {"plan": plan} if isinstance(plan, (str, Mapping)) and ":" not in plan else {}


def class_of(rule: Any, plan: Any = None) -> Any:
    """Return the optimizer class of a rule; a ready-made one needs no compiler once it was generated."""
    if isinstance(rule, type):
        return rule
    if isinstance(rule, str) and rule in list_rules() and (plan is None or _planned(plan)):
        optim: Any = importlib.import_module("optgen.optim")
        return getattr(optim, next(name for name, module in ready.classes().items() if module == rule))
    compile_: Any = importlib.import_module("optgen.driver.compile").compile
    return compile_(rule) if plan is None else compile_(rule, plan=plan)


def _claims(rules: Mapping[Any, Any], named: Named) -> dict[str, Any]:
    """Return the expression, or function, that each name goes to."""
    patterns = {key: roles.searched(key) for key in rules if key != REST}
    claimed: dict[str, Any] = {}
    for name, p in named:
        found = [key for key, matches in patterns.items() if matches(name, p)]
        if len(found) > 1:
            raise ValueError(f"make: {name} is matched by {found[0]!r} and {found[1]!r}: let one of them exclude it")
        if not found and REST not in rules:
            raise ValueError(f"make: no pattern matches {name}: {REST!r} takes what is left")
        claimed[name] = found[0] if found else REST
    for key in rules:
        if key not in claimed.values():
            raise ValueError(f"make: {key!r} matches no parameter: their names are {_shown(named)}")
    return claimed


def _shown(named: Named) -> str:
    return ", ".join([*(name for name, _ in named[:8]), *(["..."] if named[8:] else [])])
