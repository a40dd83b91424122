"""Optimizers by the names of their rules, also of several rules for the parameters of one model."""

from __future__ import annotations

import fnmatch
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn

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


def make(rule: Any, model: Model, *, plan: Any = None, **options: Any) -> torch.optim.Optimizer:
    """Return an optimizer of a model's parameters, by the name of its rule.

    rule     the name of a ready-made rule, wrappers around one ("ema(cautious(adamw))"), a spec or its file, an
             optimizer class, or several by the parameters' names: {regular expression: one of these, or a dict of
             "rule" and options}.  An expression is searched for in the name, or is a function (name, parameter) that
             says if it takes that; "*" takes what no other matches.
    model    or its named parameters
    plan     the plan's name, or what `optgen.compile` takes; None: each rule's default
    options  of the class.  With several rules each takes those that it has, and each dict has its own first.

    ValueError, before anything is made, for a name that no expression matches or two do, and for an expression without
    a name; TypeError for an option that no rule has.
    """
    if not isinstance(model, (nn.Module, Iterable)):
        raise TypeError(f"make: expected a model or its named parameters, got {model!r:.80}")
    named: Named = list(model.named_parameters() if isinstance(model, nn.Module) else model)
    module = {"module": model} if isinstance(model, nn.Module) else {}
    if not isinstance(rule, Mapping):
        made: Optimizer = class_of(rule, plan)(named, **_planned(plan), **module, **options)
        return made
    if not all(isinstance(pair, (tuple, list)) for pair in named):
        raise TypeError("make: several rules are given by names: take the model, or its named_parameters()")
    claimed = _claims(rule, named)
    asked = {key: _options(key, value, plan) for key, value in rule.items()}
    takes = {key: inspect.signature(own["rule"]).parameters for key, own in asked.items()}
    _check_options(options, [own["rule"].__name__ for own in asked.values()], [*takes.values()])
    parts: dict[str, Optimizer] = {}
    for key, own in asked.items():
        mine = [pair for pair in named if claimed[pair[0]] == key]
        cls, own_plan = own.pop("rule"), own.pop("plan")
        given = {name: value for name, value in options.items() if name in takes[key]}
        parts[key] = cls(mine, **_planned(own_plan), **module, **{**given, **own})
    return Several(parts)


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
    patterns = {key: key if callable(key) else _searched(key) for key in rules if key != REST}
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


def _searched(pattern: Any) -> Callable[[str, Tensor], Any]:
    """Return the search for a regular expression as a function of a name and a parameter."""
    try:
        expression = re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(f"make: {pattern!r} is no regular expression of names: {error}") from None
    return lambda name, _: expression.search(name)
