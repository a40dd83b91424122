"""Find the pair of a class and a plan's name, and the variant of a parameter.

A generated class stands in a package with its rule's records; each plan is a package with its own, and the runtime
joins them when they are first asked for.  A plan that the class was not built for is asked of `provider`, which the
compiler registers where it is installed.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from optgen.runtime.layout.fp8_weight import KINDS
from optgen.runtime.records import Flag, Variant, beside, dtype_name, join, keys
from optgen.runtime.records.join import Pair
from optgen.runtime.records.keys import Label as Label
from optgen.runtime.reference import tile
from optgen.runtime.reference.run import EagerStep, ValueConversion

provider: Callable[[type, str], Pair] | None = None
"""(class, plan) -> pair, for plans that were not built ahead.  None: only plans that were built are known."""

known: dict[tuple[type, str], Pair] = {}
"""(class, plan) -> pair, of those that were built and asked for."""

_made: dict[tuple[type, str, object], Pair] = {}

PlanOption = str | None
"""A plan's name, or None for the class' default."""


USUAL = "int8_split24"
"""The default plan of a class that was built for it; others take their first one."""

DEVICE = "triton"
"""The module of a rule's Triton kernels, and of a plan's Triton codecs."""

STRICT = "strict"
"""The module of a rule's tiles in strict maths, and of a plan's codecs, which the eager reference runs."""

FULL = "fp32_states"
"""The name that stands for the plan of the group, as it keeps small tensors."""

EIGHT_BITS = (
    "keep weights in torch.bfloat16; of which layers compute with 8 bits by optgen.fp8_weights(model) or a plan of "
    'views=("mxfp8_rows",)'
)
"""The mend that errors about parameters in floats of 8 bits name."""

Recorded = tuple[tuple[Label, str], ...]
"""The plans of single parameters, under "overrides" in their group: a plan's name, or FULL."""


class Chosen(NamedTuple):
    """The plan of a parameter; tensors with fewer than `limit` elements take the variant for small ones."""

    name: str
    pair: Pair
    limit: int

    @property
    def shown(self) -> str:
        """The name that users see."""
        return f"{self.name} (fp32 states)" if self.limit == sys.maxsize else self.name


def generated_class(cls: type) -> Any:
    """The class of the MRO that was generated: subclasses and wrappers may stand in modules of their own."""
    for base in cls.__mro__:
        if "PLANS" in vars(base):
            return base
    raise TypeError(f"{cls.__name__} is not a generated optimizer: it has no PLANS")


def plan_name(cls: type, option: PlanOption) -> str:
    """The plan under a group's `plan` option."""
    name: str = generated_class(cls).DEFAULT_PLAN if option is None else option
    return name


def load(cls: type, plan: str) -> Pair:
    """The rule of a class under a plan; ValueError with the way to build it where there is none."""
    base = generated_class(cls)
    if (base, plan) in known:
        return known[base, plan]
    if plan in base.PLANS:
        found = _built(base, plan)
        if found is not None and all(v.rule is not None for v in found.variants):
            return known.setdefault((base, plan), found)
    if provider is not None:
        if (base, plan, provider) not in _made:
            _made[base, plan, provider] = provider(base, plan)
        return _made[base, plan, provider]
    if plan in base.PLANS:
        raise ValueError(
            f"{base.__name__} was built for plan {plan!r}, but files of it are missing: build it again as it was built "
            f"(`optgen build`, or `optgen build SPEC --out FOLDER`)"
        )
    close = difflib.get_close_matches(plan, base.PLANS, n=1)
    guess = f"did you mean {close[0]!r}? " if close else ""
    raise ValueError(
        f"{base.__name__} has no plan {plan!r}: {guess}built are {', '.join(base.PLANS) or 'none'}; "
        f"the table [tool.optgen] of pyproject.toml or `optgen build SPEC --plan PLAN --out FOLDER` names what is built"
    )


def _built(base: Any, plan: str) -> Pair | None:
    """Return a class under a plan, whose package stands beside the class's; None if that is missing."""
    rule = sys.modules[base.__module__]
    package = f"{rule.__name__.rpartition('.')[0]}.plans.{plan}"
    try:
        record = importlib.import_module(package)
        wrong = importlib.import_module(f"{rule.__name__}.{plan}").DISCOURAGED if record.PLAN.discouraged else {}
    except ModuleNotFoundError as error:
        if error.name in (package.rpartition(".")[0], package, f"{rule.__name__}.{plan}"):
            return None
        raise
    return Pair(
        name=plan,
        variants=tuple(join.with_steps(rule.RULES, rule.STEPS, record.PLAN)),
        small_numel=record.PLAN.small_numel,
        strict=rule.STRICT,
        eager=(rule.__name__, f"{rule.__name__}.{STRICT}", f"{package}.{STRICT}"),
        cpp=(Path(rule.__path__[0], "kernels.h"), Path(record.__path__[0], "codecs.h")),
        triton=(f"{rule.__name__}.{DEVICE}", f"{package}.{DEVICE}"),
        discouraged=wrong,
    )


@functools.lru_cache(maxsize=4096)
def strict(pair: Pair, variant: Variant) -> Variant:
    """Return a variant with the step in strict maths, as the eager reference makes it."""
    return join.with_step(variant, pair.strict)


@functools.lru_cache(maxsize=4096)
def reference(pair: Pair, variant: Variant) -> EagerStep:
    """Return the step of a variant with a step in strict maths, in eager torch."""
    _, tiles, codecs = pair.eager
    return EagerStep(variant, tile.load(tiles), tile.load(codecs))


@functools.lru_cache(maxsize=4096)
def storage(pair: Pair, variant: Variant) -> ValueConversion:
    """Return the functions that encode and decode the values of a variant."""
    return ValueConversion(variant, tile.load(pair.eager[2]))


def matrix_function(pair: Pair, name: str) -> Callable[..., Any]:
    """Return a function of whole matrices of a rule."""
    found: Callable[..., Any] = getattr(importlib.import_module(pair.eager[0]), name)
    return found


@functools.lru_cache(maxsize=4096)
def variant(
    pair: Pair, dtype: torch.dtype, small: bool, flags: tuple[tuple[str, bool], ...], vector: bool = False
) -> Variant:
    """The variant for parameters of that dtype; `small` and `vector` (of fewer than two dimensions) fall back to the
    variant for all."""
    name, setting = dtype_name(dtype), dict(flags)
    fitting = [v for v in pair.variants if v.param == name and all(setting.get(f) == on for f, on in v.flags.items())]
    for kind in (("small",) if small else ()) + (("vector",) if vector else ()) + ("",):
        for v in fitting:
            if kind == ("small" if v.small else "vector" if v.vector else ""):
                return v
    if name not in pair.dtypes:
        raise TypeError(f"plan {pair.name!r} was not built for {_what_it_is_for(pair, dtype)}")
    raise ValueError(f"plan {pair.name!r} has no kernel for {name} parameters with {setting}")


def _what_it_is_for(pair: Pair, dtype: torch.dtype) -> str:
    """Return the parameters of a dtype that a plan does not have, and what to do."""
    if kind := next((x for x in KINDS if KINDS[x].known is dtype), ""):
        return f"{kind} Fp8Weight parameters: use one of master=SplitFp8({kind!r})"
    bare = dtype.is_floating_point and dtype.itemsize == 1
    mend = f": {EIGHT_BITS}" if bare else f" (it was for: {', '.join(pair.dtypes)})"
    return f"{dtype_name(dtype)} parameters{mend}"


def at_step(pair: Pair, variant: Variant, flags: tuple[tuple[str, bool], ...]) -> Variant:
    """The variant beside this one for flags that change from step to step."""
    wanted = {**variant.flags, **dict(flags)}
    if wanted == dict(variant.flags):
        return variant
    for v in pair.variants:
        same = (v.param, v.small, v.vector) == (variant.param, variant.small, variant.vector)
        if same and dict(v.flags) == wanted:
            return beside(v, variant)
    raise ValueError(f"plan {pair.name!r} has no kernel with {dict(flags)}")


def at_steps(pair: Pair, variant: Variant, flags: Sequence[Flag]) -> Iterator[Variant]:
    """The variants beside this one for every setting of those flags that change from step to step, that of the usual
    step first; flags of one hyper-parameter change together."""
    following = [(flag.name, flag.clock) for flag in flags if flag.clock is not None]
    intervals = list(dict.fromkeys(every for _, every in following))
    for values in itertools.product((False, True), repeat=len(intervals)):
        on = dict(zip(intervals, values, strict=True))
        yield at_step(pair, variant, tuple((name, on[every]) for name, every in following))


def own(group: Mapping[str, Any]) -> Mapping[Label, str]:
    """The plans of single parameters in a group; empty where it has none.  TypeError for what is no record of them."""
    return keys.table(group.get("overrides"), _recorded)


def _recorded(pairs: Any) -> Recorded:
    if not isinstance(pairs, (tuple, list)):
        raise TypeError(
            f"'overrides' of a parameter group: expected the record of what was decided, (name or position, plan) "
            f"pairs, got {pairs!r:.80}; rules are given where parameters come in: overrides= of the optimizer, "
            f"or a group in add_param_group"
        )
    return tuple(pairs)


def chosen(cls: type, group: Mapping[str, Any], label: Label | None) -> Chosen:
    """The plan of a parameter: its own, or that of its group."""
    asked = own(group).get(label) if label is not None else None
    name = plan_name(cls, group.get("plan")) if asked is None or asked == FULL else asked
    pair = load(cls, name)
    return Chosen(name, pair, sys.maxsize if asked == FULL else pair.small_numel)
