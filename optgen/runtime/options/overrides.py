"""Plans of single parameters: `AdamW(model.named_parameters(), overrides={"*embed*": "fp32", "numel < 9999": "fp32"})`.

Rules say what is wanted; what they make of each parameter is decided once, when it comes into the optimizer, and is
recorded in its group under "overrides", by name (by position over all groups where parameters have no names).  So a
checkpoint holds the outcome, and groups stay as they were given: schedulers and checkpoints of other optimizers fit.
"""

from __future__ import annotations

import difflib
import re
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from operator import ge, gt, le, lt
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from optgen.runtime.layout import plans
from optgen.runtime.records import dtype_name
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
"""{pattern, "numel < N", module, class of modules or parameter: plan}, the first that holds wins."""


@dataclass(frozen=True)
class Member:
    """A parameter as rules see it: the names it may be called by, and the modules that it is in, by id."""

    p: Tensor
    names: tuple[str, ...]
    classes: frozenset[type] | None


def is_flattened(p: Tensor) -> bool:
    """Return True if FullyShardedDataParallel has flattened and cut it, so that its own shape is lost."""
    return bool(getattr(p, "_fsdp_flattened", False))


class Rule:
    """One entry of `overrides`, or of another option with such keys.  Modules are remembered weakly, as parameters are
    until the optimizer has them."""

    def __init__(self, owner: str, option: str, key: Any, value: Any, has_model: bool) -> None:
        self.value, self.used = value, False
        self.pattern: str | None = None
        self.size: tuple[Callable[[int, int], bool], int] | None = None
        self.kind: type[nn.Module] | None = None
        self.target: weakref.ref[Any] | None = None
        self.number: int | None = None
        self.shown = repr(key)
        if isinstance(key, str):
            size = _SIZE.fullmatch(key)
            if size is not None:
                self.size = _COMPARE[size[1]], int(size[2])
            elif re.match(r"\s*numel\b", key):
                raise ValueError(f"{owner}: {option}: expected a size such as 'numel < 16384', got {key!r}")
            else:
                self.pattern = key
        elif isinstance(key, nn.Module):
            self.target, self.shown = weakref.ref(key), f"the module {type(key).__name__}"
        elif isinstance(key, Tensor):
            self.target, self.shown = weakref.ref(key), f"a parameter of shape {list(key.shape)}"
        elif isinstance(key, type) and issubclass(key, nn.Module):
            if not has_model:
                raise ValueError(
                    f"{owner}: {option}: {key.__name__} is a class of modules, and parameters do not say in which "
                    f"modules they are: give the model as well, {owner}(..., module=model)"
                )
            self.kind, self.shown = key, key.__name__
        else:
            raise TypeError(
                f"{owner}: {option}: a key must be a pattern of parameter or module names, a size such as "
                f"'numel < 16384', a module, a class of modules or a parameter, got {key!r:.80}"
            )

    @property
    def portable(self) -> bool:
        """True if it means something where the model is another object."""
        return self.pattern is not None or self.size is not None

    def targets(self) -> frozenset[int]:
        """ids of the parameters that a module or parameter stands for, as it is now."""
        if self.number is not None:
            return frozenset((self.number,))
        found = None if self.target is None else self.target()
        if isinstance(found, nn.Module):
            return frozenset(map(id, found.parameters()))
        return frozenset() if found is None else frozenset((id(found),))

    def follow(self, p: Tensor, held: bool) -> None:
        """Note that the optimizer holds the parameter p from now on, or no more.

        A rule about p knows it by its id while it is held, because torch swaps no tensors that have weak references.
        """
        if held and self.target is not None and self.target() is p:
            self.target, self.number = None, id(p)
        elif not held and self.number == id(p):
            self.target, self.number = weakref.ref(p), None

    def holds(self, member: Member, targets: Collection[int]) -> bool:
        if self.size is not None:
            return self.size[0](member.p.numel(), self.size[1])
        if self.pattern is not None:
            pattern = self.pattern
            return any(fnmatchcase(name, pattern) for name in member.names)
        if self.kind is not None:
            kind = self.kind
            return member.classes is not None and any(issubclass(found, kind) for found in member.classes)
        return id(member.p) in targets


class Tables:
    """The names that a model gives its parameters, and the classes of the modules that they are in, by id."""

    def __init__(self, model: nn.Module) -> None:
        self.names: dict[int, list[str]] = {}
        self.classes: dict[int, set[type]] = {}
        for name, own in model.named_parameters(remove_duplicate=False):
            self.names.setdefault(id(own), []).append(name)
        for module in model.modules():
            for inside in module.parameters():
                self.classes.setdefault(id(inside), set()).add(type(module))


class Rules:
    """All entries of `overrides`, in order, and the model that says what its parameters are called."""

    OPTION: ClassVar[str] = "overrides"
    EXAMPLE: ClassVar[str] = "{'*embed*': 'fp32'}"
    tables: Tables | None = None
    """Kept only while an optimizer is made: many groups ask, and each walk takes as long as the model is large."""

    def __init__(self, cls: type, given: Given = None, model: nn.Module | None = None) -> None:
        owner = cls.__name__
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"{owner}: module must be a torch.nn.Module or None, got {type(model).__name__}")
        if given is not None and not isinstance(given, Mapping):
            raise TypeError(
                f"{owner}: {self.OPTION} must be a dict such as {self.EXAMPLE}, or None, got {given!r:.80}"
            )
        self.owner = owner
        has_model = model is not None
        self.rules = [Rule(owner, self.OPTION, key, value, has_model) for key, value in (given or {}).items()]
        for rule in self.rules:
            self.check(cls, rule)
        self._model = None if model is None else weakref.ref(model)

    def check(self, cls: type, rule: Rule) -> None:
        """TypeError or ValueError for a value that no parameter can have."""
        if not isinstance(rule.value, str):
            raise TypeError(f"{self.owner}: overrides[{rule.shown}]: expected a plan's name, got {rule.value!r:.80}")
        if rule.value not in (FP32, plans.FULL):
            plans.load(cls, rule.value)

    def portable(self) -> Rules | None:
        """Return the rules that can be pickled: patterns and sizes."""
        kept = [rule for rule in self.rules if rule.portable]
        if not kept:
            return None
        made = object.__new__(type(self))
        made.owner, made.rules, made._model = self.owner, kept, None
        return made

    @property
    def model(self) -> nn.Module | None:
        return None if self._model is None else self._model()

    def members(self, tensors: Sequence[Tensor], labels: Sequence[plans.Label]) -> list[Member]:
        """labels   what the optimizer calls them; positions are no names"""
        model = self.model
        tables = None if model is None else self.tables or Tables(model)
        made = []
        for p, label in zip(tensors, labels, strict=True):
            called = [label] if isinstance(label, str) else []
            called += () if tables is None else tables.names.get(id(p), ())
            names = dict.fromkeys(known for name in called for known in _called(name))
            made.append(Member(p, tuple(names), None if tables is None else frozenset(tables.classes.get(id(p), ()))))
        return made

    def apply(self, members: Iterable[Member]) -> list[Any]:
        """Return the value for each, or None.  Raises ValueError if it depends on a size that a flattened part lost."""
        found: list[Any] = []
        targets = [rule.targets() for rule in self.rules]
        for member in members:
            holding: list[Rule] = []
            for rule, ids in zip(self.rules, targets, strict=True):
                if rule.size is not None and is_flattened(member.p):
                    if not holding:
                        raise self._no_size(rule, member)
                elif rule.holds(member, ids):
                    holding.append(rule)
            for rule in holding:
                rule.used = True
            found.append(holding[0].value if holding else None)
        return found

    def _no_size(self, rule: Rule, member: Member) -> ValueError:
        which = f"parameter {member.names[0]!r}" if member.names else "a parameter"
        return ValueError(
            f"{self.owner}: {self.OPTION}: {rule.shown} asks for the size of {which}, of which "
            f"FullyShardedDataParallel left a flat part of {member.p.numel()} elements here, other ranks another: "
            f"name such parameters by patterns or modules, before the rule of sizes, or use "
            f"torch.distributed.fsdp.fully_shard"
        )

    def follow(self, params: Iterable[Tensor], held: bool) -> None:
        """Note that the optimizer holds these parameters from now on, or no more."""
        if any(rule.target is not None or rule.number is not None for rule in self.rules):
            for p in params:
                for rule in self.rules:
                    rule.follow(p, held)

    def refuse_unused(self, members: Sequence[Member]) -> None:
        """ValueError where a rule that is not about sizes held for no parameter so far.

        members   those of the optimizer, to say what might have been meant
        """
        unused = [rule for rule in self.rules if not rule.used and rule.size is None]
        if unused and self.model is not None:  # a frozen part of the model, which was not given to the optimizer
            params = list(self.model.parameters())
            self.apply(self.members(params, range(len(params))))
            unused = [rule for rule in unused if not rule.used]
        if not unused:
            return
        rule, names = unused[0], list(dict.fromkeys(name for m in members for name in m.names[:1]))
        if rule.pattern is not None and not names:
            raise ValueError(
                f"{self.owner}: {self.OPTION}: {rule.shown} is a pattern of names, and the parameters have none: give "
                f"model.named_parameters(), or the model as well, {self.owner}(..., module=model)"
            )
        close = "" if rule.pattern is None else near(rule.pattern, members)
        guess = f"; did you mean {close!r}?" if close else ""
        if rule.target is not None:
            guess = (
                ": it has been replaced, copied or sharded since, or its parameters were not given; make the optimizer "
                "from the model as it is now"
            )
        raise ValueError(f"{self.owner}: {self.OPTION}: {rule.shown} matches no parameter{guess}")


def near(pattern: str, members: Sequence[Member]) -> str:
    """Return the pattern nearest to this one that matches a member: a name, or one word spelt as names have it; ""
    where there is none."""
    names = dict.fromkeys(name for m in members for name in m.names)
    parts = {part for name in names for part in name.split(".")}
    words = [*parts, *{word for part in parts for word in part.split("_")}]
    for word in re.findall(r"\w+", pattern):
        for close in difflib.get_close_matches(word, words, n=3):
            found = pattern.replace(word, close)
            if any(fnmatchcase(name, found) for name in names):
                return found
    return next(iter(difflib.get_close_matches(pattern, names, n=1)), "")


def bare(name: str) -> str:
    """A parameter's name without what wrappers put before or into it."""
    for part in _WRAPPERS:
        name = name.removeprefix(part) if part == "module." else name.replace(part, "")
    return name


def _called(name: str) -> list[str]:
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
        _refuse_missing(cls, value, dtype)
        return value
    if _keeps_fp32(plans.load(cls, plans.plan_name(cls, option, dtype)), dtype):
        return plans.FULL
    name = FP32 if dtype is torch.float32 else MASTER
    _refuse_missing(cls, name, dtype)
    return name


def _refuse_missing(cls: type, name: str, dtype: torch.dtype) -> None:
    pair = plans.load(cls, name)
    if dtype_name(dtype) not in pair.dtypes:
        plans.variant(pair, dtype, False, ())  # raises, saying what the plan was built for


def _keeps_fp32(pair: Pair, dtype: torch.dtype) -> bool:
    """Return True if small tensors have all of their states as they are, in fp32."""
    fitting = [v for v in pair.variants if v.param == dtype_name(dtype)]
    small = [v for v in fitting if v.small] or fitting
    plain = all(v.is_plain(name) for v in small for name in v.states)
    return (
        bool(small) and plain and all(f.torch_dtype == torch.float32 for v in small for f in v.fields if f.owner != "p")
    )


def recorded(cls: type, value: Any) -> plans.Recorded:
    """Return what a group holds under "overrides", checked: (name or position, plan) pairs."""
    pairs = list(value) if isinstance(value, (list, tuple)) else None
    if pairs is None or not all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 and type(pair[0]) in (str, int) and type(pair[1]) is str
        for pair in pairs
    ):
        raise TypeError(
            f"{cls.__name__}: overrides of a group must be a dict of rules, or (name or position, plan) pairs, "
            f"got {value!r:.80}"
        )
    for name in dict.fromkeys(name for _, name in pairs):
        if name != plans.FULL:
            plans.load(cls, name)
    return tuple((label, name) for label, name in pairs)


def refuse_ambiguous(where: str, labels: Sequence[plans.Label], asked: Sequence[object]) -> None:
    """ValueError where two parameters share a name, by which they are known, but not what is asked for them."""
    first: dict[plans.Label, object] = {}
    for label, value in zip(labels, asked, strict=True):
        if first.setdefault(label, value) != value:
            raise ValueError(
                f"{where}: two parameters of a group are called {label!r}, and only one is to be kept otherwise: give "
                f"them different names"
            )


def decided(
    cls: type,
    option: plans.PlanOption,
    tensors: Sequence[Tensor],
    labels: Sequence[plans.Label],
    asked: Sequence[str | None],
) -> plans.Recorded:
    """The record of a group: what was asked for its parameters, settled.

    ValueError where two parameters share a name, by which they are known, but not the plan.
    """
    refuse_ambiguous(f"{cls.__name__}: overrides", labels, asked)
    return tuple(
        (label, settled(cls, option, value, p.dtype))
        for p, label, value in zip(tensors, labels, asked, strict=True)
        if value is not None and (p.requires_grad or p.dtype in TRAINED)  # frozen tensors may be anything
    )
