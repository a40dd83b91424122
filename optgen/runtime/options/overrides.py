"""Plans of single parameters: `AdamW(model.named_parameters(), overrides={"*embed*": "fp32", "numel < 9999": "fp32"})`.

Rules say what is wanted; what they make of each parameter is decided once, when it comes into the optimizer, and is
recorded in its group under "overrides", by name (by position over all groups where parameters have no names).  So a
checkpoint holds the outcome, and groups stay as they were given: schedulers and checkpoints of other optimizers fit.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from operator import ge, gt, le, lt
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from optgen.runtime.layout import plans
from optgen.runtime.layout.fp8_weight import dtype_of
from optgen.runtime.records import dtype_name, fp32_modules, keys
from optgen.runtime.records.join import Pair

FP32 = "fp32"
"""The plan that keeps states in fp32, and the weight no less precise than the plan of the group does."""

MASTER = "fp32_master"
"""The same for a 16-bit weight under a plan whose small tensors have no fp32 states."""

_SIZE = re.compile(r"\s*numel\s*(<=|>=|<|>)\s*([0-9][0-9_]*)\s*")
_COMPARE: dict[str, Callable[[int, int], bool]] = {"<": lt, "<=": le, ">": gt, ">=": ge}

TRAINED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of parameters that plans are for; frozen ones may be of any."""

_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "module.")
"""The parts of names that wrappers add before or between those of what they wrap."""

Given = Mapping[Any, Any] | None
"""{pattern, "numel < N" or class of modules: plan}, the first that holds wins."""


@dataclass(frozen=True)
class Member:
    """A parameter as rules see it: the names it may be called by, and the classes of the modules that it is in."""

    p: Tensor
    names: tuple[str, ...]
    classes: frozenset[type]


class Override:
    """One entry of `overrides`, or of another option with such keys: it holds for a pattern of names, for a size, or
    for a class of modules."""

    def __init__(self, where: str, key: Any, value: Any, has_model: bool) -> None:
        self.value, self.used, self.shown = value, False, repr(key)
        self.pattern: str | None = None
        self.size: tuple[Callable[[int, int], bool], int] | None = None
        self.kind: type[nn.Module] | None = None
        if isinstance(key, str):
            size = _SIZE.fullmatch(key)
            if size is not None:
                self.size = _COMPARE[size[1]], int(size[2])
            elif re.match(r"\s*numel\b", key):
                raise ValueError(f"{where}: expected a size such as 'numel < 16384', got {key!r}")
            else:
                self.pattern = key
        elif isinstance(key, type) and issubclass(key, nn.Module):
            if not has_model:
                raise ValueError(
                    f"{where}: {key.__name__} is a class of modules, and parameters do not say in which modules they "
                    f"are: give the model as well, {where.partition(':')[0]}(..., module=model)"
                )
            self.kind, self.shown = key, key.__name__
        else:
            raise TypeError(
                f"{where}: a key must be a pattern of parameter or module names, a size such as 'numel < 16384', or a "
                f"class of modules, got {key!r:.80}"
            )

    def holds(self, member: Member) -> bool:
        if self.size is not None:
            return self.size[0](member.p.numel(), self.size[1])
        if self.pattern is not None:
            pattern = self.pattern
            return any(fnmatchcase(name, pattern) for name in member.names)
        kind = self.kind
        return kind is not None and any(issubclass(found, kind) for found in member.classes)


class Tables:
    """The names that a model gives its parameters, and the classes of the modules that they are in, by id."""

    def __init__(self, owner: str, model: Any) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"{owner}: module must be a torch.nn.Module or None, got {type(model).__name__}")
        self.params = list(model.parameters())
        self.names: dict[int, list[str]] = {}
        self.classes: dict[int, set[type]] = {}
        for name, own in model.named_parameters(remove_duplicate=False):
            self.names.setdefault(id(own), []).append(name)
        for module in model.modules():
            for inside in module.parameters():
                self.classes.setdefault(id(inside), set()).add(type(module))


class Overrides:
    """All entries of `overrides`, in order.

    tables  of the model, while an optimizer is made of its parameters
    """

    OPTION: ClassVar[str] = "overrides"
    EXAMPLE: ClassVar[str] = "{'*embed*': 'fp32'}"
    VALUE: ClassVar[str] = "plan"

    def __init__(self, cls: type, given: Given = None, tables: Tables | None = None) -> None:
        self.where = f"{cls.__name__}: {self.OPTION}"
        if given is not None and not isinstance(given, Mapping):
            raise TypeError(f"{self.where} must be a dict such as {self.EXAMPLE}, or None, got {given!r:.80}")
        self.rules = [Override(self.where, key, value, tables is not None) for key, value in (given or {}).items()]
        for rule in self.rules:
            rule.value = self.checked(cls, rule.value, f"{self.where}[{rule.shown}]")
        self.tables: Tables | None = tables

    @classmethod
    def checked(cls, owner: type, value: Any, where: str) -> Any:
        """Return a value; TypeError or ValueError for one that no parameter can have."""
        if not isinstance(value, str):
            raise TypeError(f"{where}: expected a plan's name, got {value!r:.80}")
        if value not in (FP32, plans.FULL):
            plans.load(owner, value)
        return value

    @classmethod
    def recorded(cls, owner: type, value: Any) -> tuple[tuple[plans.Label, Any], ...]:
        """Return what a group holds under this option, checked: (name or position, value) pairs."""
        where = f"{owner.__name__}: {cls.OPTION} of"
        if not keys.are_labelled(value):
            raise TypeError(
                f"{where} a group must be a dict of rules, or (name or position, {cls.VALUE}) pairs, got {value!r:.80}"
            )
        return tuple((label, cls.checked(owner, of, f"{where} {label!r}")) for label, of in value)

    def keep(self) -> None:
        """Keep the rules that parameters of later groups may follow: patterns and sizes."""
        self.rules = [rule for rule in self.rules if rule.pattern is not None or rule.size is not None]
        self.tables = None

    def members(self, tensors: Sequence[Tensor], labels: Sequence[plans.Label]) -> list[Member]:
        """Return members; `labels`: what the optimizer calls them, positions are no names."""
        made, tables = [], self.tables
        for p, label in zip(tensors, labels, strict=True):
            called = [label] if isinstance(label, str) else []
            called += tables.names.get(id(p), ()) if tables is not None else ()
            classes = frozenset(tables.classes.get(id(p), ()) if tables is not None else ())
            made.append(Member(p, tuple(dict.fromkeys(x for name in called for x in names_of(name))), classes))
        return made

    def apply(self, members: Iterable[Member]) -> list[Any]:
        """Return the value for each, or None."""
        found: list[Any] = []
        for member in members:
            holding = [rule for rule in self.rules if rule.holds(member)]
            for rule in holding:
                rule.used = True
            found.append(holding[0].value if holding else None)
        return found

    def asked(self, cls: type, given: Any, tensors: Sequence[Tensor], labels: Sequence[plans.Label]) -> list[Any]:
        """Return what a new group says of each of its parameters, else what these rules say, else None.

        given  the group's own: rules, or what another optimizer recorded in it
        """
        is_record = given is not None and not isinstance(given, Mapping)
        recorded = dict(self.recorded(cls, given)) if is_record else {}
        if extra := [label for label in recorded if label not in labels]:
            raise ValueError(
                f"{self.where} of a group: it has no parameter {extra[0]!r} (positions are counted over all groups)"
            )
        asked = [recorded.get(label) for label in labels]
        of_group = type(self)(cls, None if is_record else given, self.tables)
        for found in (of_group, self):
            if found.rules:
                asked = [a or b for a, b in zip(asked, found.apply(found.members(tensors, labels)), strict=True)]
        of_group.refuse_unused(tensors, labels)
        first: dict[plans.Label, object] = {}
        for label, value in zip(labels, asked, strict=True):
            if first.setdefault(label, value) != value:
                raise ValueError(
                    f"{self.where}: two parameters of a group are called {label!r}, and only one is to be kept "
                    f"otherwise: give them different names"
                )
        return asked

    def refuse_unused(self, tensors: Sequence[Tensor], labels: Sequence[plans.Label]) -> None:
        """Raise ValueError if a rule that is not about sizes holds for none of these parameters, which the optimizer
        has, nor for a frozen one of the model."""
        unused = [rule for rule in self.rules if not rule.used and rule.size is None]
        if unused and self.tables is not None:
            self.apply(self.members(self.tables.params, range(len(self.tables.params))))
            unused = [rule for rule in unused if not rule.used]
        if unused:
            names = [name for member in self.members(tensors, labels) for name in member.names]
            raise ValueError(f"{self.where}: {unused[0].shown} {self._why(unused[0], names)}")

    def _why(self, rule: Override, names: Sequence[str]) -> str:
        """Return what an error says of a rule that holds for none of the parameters of these names."""
        if rule.pattern is not None and not names:
            return (
                f"is a pattern of names, and the parameters have none: give model.named_parameters(), or the model as "
                f"well, {self.where.partition(':')[0]}(..., module=model)"
            )
        close = difflib.get_close_matches(rule.pattern or "", names, n=1)
        return "matches no parameter" + (f"; did you mean {close[0]!r}?" if close else "")


def bare(name: str) -> str:
    """A parameter's name without what wrappers put before or into it."""
    for part in _WRAPPERS:
        name = name.removeprefix(part) if part == "module." else name.replace(part, "")
    return name


def names_of(name: str) -> list[str]:
    """Return the names that patterns may match: the parameter's and its modules', also without wrappers."""
    found = []
    for one in dict.fromkeys((name, bare(name))):
        parts = one.split(".")
        found += [".".join(parts[:i]) for i in range(len(parts), 0, -1)]
    return found


def settled(cls: type, option: plans.PlanOption, value: str, dtype: torch.dtype) -> str:
    """Return the record for a parameter of that dtype; TypeError or ValueError if there is no such plan for it.

    option   the plan of its group
    """
    if value not in (FP32, plans.FULL):
        refuse_missing(cls, value, dtype)
        return value
    if _keeps_fp32(plans.load(cls, plans.plan_name(cls, option)), dtype):
        return plans.FULL
    name = FP32 if dtype is torch.float32 else MASTER
    refuse_missing(cls, name, dtype)
    return name


def refuse_missing(cls: type, name: str, dtype: torch.dtype) -> None:
    """Raise TypeError or ValueError if a class has no plan of that name for parameters of that dtype."""
    pair = plans.load(cls, name)
    if dtype_name(dtype) not in pair.dtypes:
        plans.variant(pair, dtype, False, ())  # raises, saying what the plan was built for


def _keeps_fp32(pair: Pair, dtype: torch.dtype) -> bool:
    """Return True if small tensors have all of their states as they are, in fp32."""
    fitting = [v for v in pair.variants if v.param == dtype_name(dtype)]
    small = [v for v in fitting if v.small] or fitting
    plain = all(v.is_plain(name) for v in small for name in v.states)
    fp32 = all(f.torch_dtype == torch.float32 for v in small for f in v.fields if f.owner != "p")
    return bool(small) and plain and fp32


def decided(
    cls: type,
    own: Overrides,
    given: Any,
    option: plans.PlanOption,
    tensors: Sequence[Tensor],
    labels: Sequence[plans.Label],
) -> dict[str, plans.Recorded]:
    """Return {"overrides": the plans of single parameters in a group that is to come}, or {}.

    own, given  rules of the optimizer, and of the group (`Overrides.asked`); marks of modules follow
    option      the plan of the group
    """
    marked = fp32_modules.parameters()
    asked = own.asked(cls, given, tensors, labels)
    asked = [a or (FP32 if id(p) in marked else None) for a, p in zip(asked, tensors, strict=True)]
    found = tuple(
        (label, settled(cls, option, value, dtype_of(p)))
        for p, label, value in zip(tensors, labels, asked, strict=True)
        if value is not None and (p.requires_grad or p.dtype in TRAINED)  # frozen tensors may be anything
    )
    return {"overrides": found} if found else {}
