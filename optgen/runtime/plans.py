"""From (class, plan name) to the plan's module, and from a parameter to its variant.

A generated class stands in a package; each plan that was built is a module beside it, imported when first
asked for.  A plan that was not built ahead is asked of `provider`, which the compiler registers where it is
installed.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch

from optgen.runtime import stored
from optgen.runtime.records import Flag, Variant, dtype_name, in_blocks

provider: Callable[[type, str], ModuleType] | None = None
"""(class, plan) -> module, for plans that were not built ahead; the module may hold its `reference` and
`triton_kernels` as attributes.  None: only plans that were built are known."""

_loaded: dict[tuple[type, str, object], ModuleType] = {}

PlanOption = str | Mapping[str, str] | None
"""A plan's name, one per parameter dtype ({"float32": "fp32"}), or None for the class' defaults."""


FULL = "fp32_states"
"""In the place of a plan's name: the plan of the group, as it keeps small tensors."""

Label = str | int
"""A parameter's name, or its position over all groups where it has none."""

Recorded = tuple[tuple[Label, str], ...]
"""The plans of single parameters, under "overrides" in their group: a plan's name, or FULL."""


class Chosen(NamedTuple):
    """What a parameter is kept under; tensors with fewer than `limit` elements take the variant for small ones."""

    name: str
    module: ModuleType
    limit: int

    @property
    def shown(self) -> str:
        """As it is shown to users."""
        return f"{self.name} (fp32 states)" if self.limit == sys.maxsize else self.name


def generated_class(cls: type) -> Any:
    """The class of the MRO that was generated: subclasses and wrappers may stand in modules of their own."""
    for base in cls.__mro__:
        if "PLANS" in vars(base):
            return base
    raise TypeError(f"{cls.__name__} is not a generated optimizer: it has no PLANS")


def plan_name(cls: type, option: PlanOption, dtype: torch.dtype) -> str:
    """The plan of a parameter of that dtype under a group's `plan` option."""
    if isinstance(option, str):
        return option
    name = dtype_name(dtype)
    if option is not None and name in option:
        return option[name]
    defaults: Mapping[str, str] = generated_class(cls).DEFAULT_PLAN
    if name not in defaults:
        known = ", ".join(defaults) or "none"
        raise TypeError(f"{cls.__name__} has no plan for {name} parameters (it has for: {known})")
    return defaults[name]


def load(cls: type, plan: str) -> ModuleType:
    """The module of a plan; ValueError with the way to build it where there is none."""
    base = generated_class(cls)
    key = (base, plan, provider)
    if key not in _loaded:
        _loaded[key] = _find(base, plan)
    return _loaded[key]


def _find(base: Any, plan: str) -> ModuleType:
    if plan in base.PLANS:
        name = f"{base.__module__}.{plan}"
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
    if provider is not None:
        return provider(base, plan)
    close = difflib.get_close_matches(plan, base.PLANS, n=1)
    guess = f"did you mean {close[0]!r}? " if close else ""
    raise ValueError(
        f"{base.__name__} has no plan {plan!r}: {guess}built are {', '.join(base.PLANS) or 'none'}; "
        f"to build another: optgen build {base.SPEC} --plan {plan}"
    )


def part(module: ModuleType, name: str) -> ModuleType:
    """`reference` or `triton_kernels` of a plan: an attribute of a module made in memory, else a submodule."""
    found = getattr(module, name, None)
    if isinstance(found, ModuleType):
        return found
    return importlib.import_module(f"{module.__name__}.{name}")


class Reference(NamedTuple):
    """The eager functions of a variant, see runtime/stored.py."""

    step: Callable[..., Any]
    decode: Callable[..., Mapping[str, torch.Tensor]]
    encode: Callable[..., Mapping[str, torch.Tensor]]


def reference(module: ModuleType, variant: Variant) -> Reference:
    """The eager functions of a variant: its rule's under its plan's codecs, or those of a package that has its own."""
    if variant.eager is None:
        own, name = part(module, "reference"), variant.codec_name
        return Reference(*(getattr(own, f, None) for f in (variant.step_name, f"{name}_decode", f"{name}_encode")))  # type: ignore[arg-type]
    return _composed(module, variant)


@functools.lru_cache(maxsize=4096)
def _composed(module: ModuleType, variant: Variant) -> Reference:
    rule = importlib.import_module("..eager", module.__name__)
    codecs = importlib.import_module(module.CODECS, module.__name__)
    return Reference(
        stored.step(variant, rule, codecs), stored.decode(variant, codecs), stored.encode(variant, codecs)
    )


@functools.cache
def has_part(module: ModuleType, name: str) -> bool:
    if isinstance(getattr(module, name, None), ModuleType):
        return True
    if not hasattr(module, "__path__"):
        return False
    return importlib.util.find_spec(f"{module.__name__}.{name}") is not None


@functools.lru_cache(maxsize=4096)
def variant(
    module: ModuleType, dtype: torch.dtype, small: bool, flags: tuple[tuple[str, bool], ...], vector: bool = False
) -> Variant:
    """The variant for parameters of that dtype; `small` and `vector` (of fewer than two dimensions) fall back to the
    variant for all."""
    name, setting = dtype_name(dtype), dict(flags)
    fitting = [
        v for v in module.VARIANTS if v.param == name and all(setting.get(flag) == on for flag, on in v.flags.items())
    ]
    for kind in (("small",) if small else ()) + (("vector",) if vector else ()) + ("",):
        for v in fitting:
            if kind == ("small" if v.small else "vector" if v.vector else ""):
                return v  # type: ignore[no-any-return]
    plan = module.__name__.rpartition(".")[2]
    dtypes = ", ".join(dict.fromkeys(v.param for v in module.VARIANTS))
    if name not in {v.param for v in module.VARIANTS}:
        raise TypeError(f"plan {plan!r} was not built for {name} parameters (it was for: {dtypes})")
    raise ValueError(f"plan {plan!r} has no kernel for {name} parameters with {setting}")


def at_step(module: ModuleType, variant: Variant, flags: tuple[tuple[str, bool], ...]) -> Variant:
    """The variant beside this one for flags that change from step to step."""
    wanted = {**variant.flags, **dict(flags)}
    if wanted == dict(variant.flags):
        return variant
    for v in module.VARIANTS:
        same = (v.param, v.small, v.vector) == (variant.param, variant.small, variant.vector)
        if same and dict(v.flags) == wanted:
            return in_blocks(v, variant.matrix) if isinstance(variant.matrix, int) else v
    raise ValueError(f"plan {module.__name__.rpartition('.')[2]!r} has no kernel with {dict(flags)}")


def at_steps(module: ModuleType, variant: Variant, flags: Sequence[Flag]) -> Iterator[Variant]:
    """The variants beside this one for every setting of those flags that change from step to step, that of the usual
    step first; flags of one hyper-parameter change together."""
    following = [(flag.name, flag.every) for flag in flags if flag.every is not None]
    intervals = dict.fromkeys(every for _, every in following)
    for values in itertools.product((False, True), repeat=len(intervals)):
        on = dict(zip(intervals, values, strict=True))
        yield at_step(module, variant, tuple((name, on[every]) for name, every in following))


def small_numel(module: ModuleType) -> int:
    """Tensors with fewer elements take the variant for small tensors."""
    return int(getattr(module, "SMALL_NUMEL", 0))


_tables: dict[int, tuple[object, Mapping[Label, str]]] = {}


def own(group: Mapping[str, Any]) -> Mapping[Label, str]:
    """The plans of single parameters in a group; empty where it has none.  TypeError for what is no record of them.

    Asked for each parameter: a table is found by the identity of what is recorded, which is never changed in place.
    """
    recorded = group.get("overrides")
    if not recorded:
        return {}
    known = _tables.get(id(recorded))
    if known is None or known[0] is not recorded:
        if not isinstance(recorded, (tuple, list)):
            raise TypeError(
                f"'overrides' of a parameter group: expected the record of what was decided, (name or position, plan) "
                f"pairs, got {recorded!r:.80}; rules are given where parameters come in: overrides= of the optimizer, "
                f"or a group in add_param_group"
            )
        if len(_tables) >= 256:
            _tables.clear()
        known = _tables[id(recorded)] = recorded, dict(recorded)
    return known[1]


def chosen(cls: type, group: Mapping[str, Any], dtype: torch.dtype, label: Label | None) -> Chosen:
    """The plan of a parameter: its own, or that of its group for the dtype."""
    asked = own(group).get(label) if label is not None else None
    return resolved(cls, group.get("plan"), dtype, asked)


def resolved(cls: type, option: PlanOption, dtype: torch.dtype, asked: str | None) -> Chosen:
    """asked   the parameter's own plan, FULL, or None: none of its own"""
    name = asked if asked is not None and asked != FULL else plan_name(cls, option, dtype)
    module = load(cls, name)
    return Chosen(name, module, sys.maxsize if asked == FULL else small_numel(module))
