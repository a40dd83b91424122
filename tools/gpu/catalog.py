"""What the generated package holds, as cases to check: (class, plan, parameter dtype, flag setting)."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from optgen.runtime import plans
from optgen.runtime.records import EIGHT, Variant

PARAMS = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}

FIRST = ("adamw", "lion", "sgd")
"""Specs that are checked before the others, so that a run that is cut short has said what matters most."""


@dataclass(frozen=True)
class Case:
    """One setting under which a class is checked: it runs the kernels for large and for small tensors.

    flags    every flag's setting, but for those that follow a parameter's shape or the step
    changed  those that differ from the default (a derived flag: from what its hyper-parameter's default gives)
    """

    cls: str
    spec: str
    plan: str
    param: str
    flags: tuple[tuple[str, bool], ...] = ()
    changed: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ".".join([self.spec, self.plan, self.param, *self.changed])

    @property
    def usual(self) -> bool:
        return not self.changed

    @property
    def dtype(self) -> torch.dtype:
        return PARAMS[self.param]


def names() -> list[str]:
    """The generated classes."""
    return list(importlib.import_module("generated").__all__)


def generated_class(name: str) -> Any:
    return getattr(importlib.import_module("generated"), name)


def plan_module(cls: Any, plan: str) -> ModuleType:
    return plans.load(cls, plan)


def variants(case: Case) -> list[Variant]:
    """The variants that a case runs: for large tensors and, where there is one, for small ones."""
    cls, setting = generated_class(case.cls), dict(case.flags)
    listed: Sequence[Variant] = plan_module(cls, case.plan).VARIANTS
    return [v for v in listed if v.param == case.param and dict(_setting(cls, v)) == setting and not v.stages]


def _setting(cls: Any, variant: Variant) -> tuple[tuple[str, bool], ...]:
    """The flags of a variant that options bring about."""
    loose = {f.name for f in cls.FLAGS if f.shape is not None or f.every is not None}
    return tuple((name, on) for name, on in variant.flags.items() if name not in loose)


def cases(only: Sequence[str] = (), *, quick: bool = False) -> list[Case]:
    """Every case of the generated package, the most used first.

    only    patterns "spec", "spec.plan", "spec.plan.dtype": cases that start with one of them; () for all
    quick   default flags and the parameter dtypes that the plan is mostly used with
    """
    found = [case for name in names() for case in _cases_of(name)]
    if only:
        wanted = tuple(f"{pattern}." for pattern in only)
        found = [case for case in found if f"{case}.".startswith(wanted)]
    if quick:
        found = [case for case in found if case.usual and case.param != "float16"]
    return sorted(found, key=_urgency)


def _cases_of(name: str) -> Iterator[Case]:
    cls = generated_class(name)
    usual = _usual(cls)
    for plan in cls.PLANS:
        listed: Sequence[Variant] = plan_module(cls, plan).VARIANTS
        # Steps of several stages, and packed codes, are checked in another way: stages.py.
        if is_packed(listed):
            continue
        seen = {(v.param, _setting(cls, v)) for v in listed if not v.stages}
        seen -= {(v.param, _setting(cls, v)) for v in listed if v.stages}
        for param, flags in sorted(seen):
            changed = tuple(k if on else f"no_{k}" for k, on in flags if usual[k] != on)
            yield Case(name, cls.SPEC, plan, param, flags, changed)


def is_packed(variants: Sequence[Variant]) -> bool:
    """Whether any of them keeps codes that share bytes."""
    return any(f.per == EIGHT for v in variants for f in v.fields)


def _usual(cls: Any) -> dict[str, bool]:
    defaults = {hyper.name: hyper.default for hyper in cls.HYPERS}
    own = [f for f in cls.FLAGS if f.shape is None and f.every is None]
    return {f.name: f.default if f.nonzero is None else bool(defaults[f.nonzero]) for f in own}


def _urgency(case: Case) -> tuple[object, ...]:
    rank = FIRST.index(case.spec) if case.spec in FIRST else len(FIRST)
    return case.plan not in ("int8_split24", "fp32"), not case.usual, rank, case.spec, case.plan, case.param


def options(case: Case, **wanted: float) -> dict[str, Any]:
    """Constructor arguments under which a case's flags hold: `wanted` hyper-parameters where they exist."""
    cls = generated_class(case.cls)
    setting = dict(case.flags)
    hypers = {hyper.name: hyper.default for hyper in cls.HYPERS}
    chosen: dict[str, Any] = {name: value for name, value in wanted.items() if name in hypers}
    for flag in cls.FLAGS:
        if flag.shape is not None or flag.every is not None:
            continue
        if flag.nonzero is None:
            chosen[flag.name] = setting.get(flag.name, flag.default)
            if chosen[flag.name] and flag.excludes is not None:
                chosen[flag.excludes] = 0.0
        else:
            on = setting.get(flag.name, bool(hypers[flag.nonzero]))
            chosen[flag.nonzero] = (hypers[flag.nonzero] or 0.9) if on else 0.0
    return chosen


# What a kernel moves --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Traffic:
    """Bytes per element that one step has to move between the processor and memory."""

    read: float
    written: float

    @property
    def total(self) -> float:
        return self.read + self.written


def traffic(module: ModuleType, function: str, grad: torch.dtype) -> Traffic:
    """What a kernel reads and writes: the loads and stores in its source, of the types that its pointers have."""
    kernels = plans.part(module, "triton_kernels")
    kernel = getattr(kernels, function, None)
    if kernel is None or "SWEEP" not in kernel.arg_names:
        raise ValueError(f"{kernels.__name__}: cannot read what the pointers of {function} point to")
    record = inspect.signature(kernel.fn).parameters["SWEEP"].default
    tile = inspect.getsource(getattr(kernels, f"{function}_tile").fn)
    shared = {"": 1, "block": record.block, "eight": 8}
    read = written = 0.0
    for i, name in zip(range(record.count()), re.findall(r"(\w+)_ptr", tile.split("):")[0]), strict=False):
        dtype = record.dtype(i, None)
        bits = grad.itemsize * 8 if dtype is None else dtype.primitive_bitwidth
        size = bits / 8 / shared[record.kind(i)]
        read += size * (re.search(rf"\bget\({name}_ptr,", tile) is not None)
        written += size * (f" put({name}_ptr," in tile)
    return Traffic(read, written)


def footprint(module: ModuleType, variant: Variant) -> float:
    """Bytes per element that a variant keeps: the weight and its states, not the gradient."""
    return PARAMS[variant.param].itemsize + sum(f.torch_dtype.itemsize * f.width / f.per for f in variant.fields)


def large_variant(module: ModuleType, param: str, flags: Mapping[str, bool]) -> Variant:
    """The variant for large tensors of that dtype."""
    return plans.variant(module, PARAMS[param], False, tuple(flags.items()))
