"""An optimizer of several rules, each with parameters of its own."""

from __future__ import annotations

import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from optgen.runtime.checkpoint import checkpoint, weights
from optgen.runtime.layout.plans import Label
from optgen.runtime.modes.watch import SAMPLE, Callback, Run, Watches
from optgen.runtime.optimizer import Optimizer
from optgen.runtime.options import options
from optgen.runtime.records.misfits import Misfits
from optgen.runtime.states.memory import Memory

RULE = "rule"
"""The key of a group that says which part steps it: the name of its class, numbered where several parts have it."""

SCALED = ("grad_scale", "found_inf")
"""Attributes by which a GradScaler hands over its scale."""


class States(MutableMapping[Any, Any]):
    """The states of all parts as one defaultdict: one that is read or set first is of the part with its parameter."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = [(part.param_groups, part.state) for part in parts]

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def _of(self, key: Any) -> dict[Any, Any]:
        having = (states for _, states in self.parts if key in states)
        owning = (states for groups, states in self.parts if any(key is p for g in groups for p in g["params"]))
        return next(itertools.chain(having, owning, (self.parts[0][1],)))

    def __getitem__(self, key: Any) -> Any:
        return self._of(key)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._of(key)[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._of(key)[key]

    def __contains__(self, key: object) -> bool:
        return any(key in states for _, states in self.parts)

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(states for _, states in self.parts)

    def __len__(self) -> int:
        return sum(len(states) for _, states in self.parts)

    def __repr__(self) -> str:
        return repr(dict(self))

    def get(self, key: Any, default: Any = None) -> Any:
        """Return a state, or the default; nothing is made."""
        return self._of(key).get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        """Remove a state and return it."""
        return self._of(key).pop(key, *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Return a state, which is the default if there was none."""
        return self._of(key).setdefault(key, default)


class Groups(list[dict[str, Any]]):
    """The groups of all parts in the order in which they were added.  A change of the list is one of the parts."""

    def __init__(self, groups: Sequence[dict[str, Any]], owner: Several) -> None:
        super().__init__(groups)
        self.owner = owner

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


def _changes(name: str) -> Callable[..., Any]:
    def change(self: Groups, *given: Any, **options: Any) -> Any:
        groups = list(self.owner.param_groups)
        result = getattr(groups, name)(*given, **options)
        self.owner.param_groups = groups
        list.__setitem__(self, slice(None), groups)
        return self if name == "__iadd__" else result

    return change


for _name in (
    "append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort", "__delitem__", "__iadd__", "__setitem__",
):  # fmt: skip
    setattr(Groups, _name, _changes(_name))


class Several(torch.optim.Optimizer):
    """Optimizers of different rules as one torch.optim.Optimizer: one step, one list of groups, one state dict.

    parts     the optimizers, by any keys (`optgen.make`: the patterns of names).  They hold the groups and states;
              gradients are released, and single steps recorded, with them
    defaults  the options that all parts have, with the first one's defaults

    A group says under "rule" which part steps it.  All parts must accept a state dict before any changes; a step's
    errors come before changes of the part that raises.
    """

    parts: dict[Any, Optimizer]
    _order: list[str]

    def __init__(self, parts: Mapping[Any, Optimizer]) -> None:
        count: defaultdict[str, int] = defaultdict(int)
        for part in parts.values():
            name = type(part).__name__
            count[name] += 1
            part.defaults[RULE] = name if count[name] == 1 else f"{name} {count[name]}"
            for group in part.param_groups:
                group[RULE] = part.defaults[RULE]
        first, *others = parts.values()
        shared = {k: v for k, v in first.defaults.items() if k != RULE and all(k in x.defaults for x in others)}
        # torch's constructor would add a group and reset the states.
        self.__setstate__({"parts": dict(parts), "defaults": shared, "_order": []})

    def __getstate__(self) -> dict[str, Any]:
        return {"parts": self.parts, "defaults": self.defaults, "_order": self._labels()}

    @property
    def _owners(self) -> dict[str, Optimizer]:
        return {part.defaults[RULE]: part for part in self.parts.values()}

    def _labels(self) -> list[str]:
        """Return whose each group is, in the order in which they were added; those of single parts come last."""
        left = {label: len(part.param_groups) for label, part in self._owners.items()}
        order = []
        for label in [*self._order, *(label for label, count in left.items() for _ in range(count))]:
            if left[label]:
                left[label] -= 1
                order.append(label)
        self._order = order
        return order

    @property
    def param_groups(self) -> Any:
        left = {label: iter(part.param_groups) for label, part in self._owners.items()}
        return Groups([next(left[label]) for label in self._labels()], self)

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        order = [self._owner_of(group) for group in groups]
        for label, part in self._owners.items():
            part.param_groups = [group for group, own in zip(groups, order, strict=True) if own == label]
        self._order = order

    @property
    def state(self) -> Any:
        return States(list(self.parts.values()))

    @state.setter
    def state(self, states: Mapping[Any, Any]) -> None:
        for part in self.parts.values():
            part.state = defaultdict(dict)
        self.state.update(states)

    def _owner_of(self, group: Any) -> str:
        """Return the label of the part that steps a group; ValueError if the group does not say it."""
        label = group.get(RULE) if isinstance(group, dict) else None
        if label not in self._owners:
            raise ValueError(
                f"Several: a group says under {RULE!r} which rule steps it: expected one of {list(self._owners)}, "
                f"got {label!r}"
            )
        return str(label)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, which says under "rule" which part is to step it, with the options of that part."""
        label, params = self._owner_of(param_group), param_group["params"]
        if not isinstance(params, (Tensor, set)):
            params = list(params)
            new = {id(p[1] if isinstance(p, tuple) else p) for p in params}
            if any(id(p) in new for group in self.param_groups for p in group["params"]):
                raise ValueError("some parameters appear in more than one parameter group")
        self._labels()
        kept = {key: value for key, value in param_group.items() if key != RULE}
        self._owners[label].add_param_group({**kept, "params": params})

    def __repr__(self) -> str:
        lines = []
        for key, part in self.parts.items():
            params = [p for group in part.param_groups for p in group["params"]]
            lines.append(
                f"    {key!r}: {type(part).__name__}, {len(params)} parameters, {sum(p.numel() for p in params):,} "
                f"elements, {', '.join(sorted(set(part.plans().values())))}"
            )
        return "\n".join(["Several (", *lines, ")"])

    @property
    def matched(self) -> dict[str, list[Label]]:
        """The names of each part's trainable parameters, or their positions."""
        return {key: list(part.plans()) for key, part in self.parts.items()}

    @property
    def _step_supports_amp_scaling(self) -> bool:
        parts = self.parts.values()
        return any(part._release is not None for part in parts) or all(
            part._step_supports_amp_scaling for part in parts
        )

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient, as each part makes it."""
        self._refuse_in_evaluation("step()")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scaled = {name: vars(self)[name] for name in SCALED if name in vars(self)}
        released_first = sorted(self.parts.values(), key=lambda part: part._release is None)  # they refuse a GradScaler
        try:
            for part in released_first:
                vars(part).update(scaled)
                try:
                    self._step(part)
                finally:
                    for name in SCALED:
                        vars(part).pop(name, None)
        except BaseException:
            for name in SCALED:  # as a part does
                vars(self).pop(name, None)
            raise
        return loss

    def _step(self, part: Any) -> None:
        """Make a part's step with its own hooks: those of all optimizers run once, around the whole step."""
        part._opt_called = True  # a scheduler of the part asks for it
        for hook in part._optimizer_step_pre_hooks.values():
            hook(part, (part,), {})
        inspect.unwrap(type(part).step)(part)
        for hook in part._optimizer_step_post_hooks.values():
            hook(part, (part,), {})

    def _refuse_in_evaluation(self, action: str) -> None:
        for part in self.parts.values():
            part._refuse_in_evaluation(action)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parts."""
        for part in self.parts.values():
            part.zero_grad(set_to_none)

    def train(self) -> None:
        """Put back the weights that `eval()` took out."""
        for part in self.parts.values():
            part.train()

    def eval(self) -> None:
        """Put weights for evaluation into the model, where a rule has such."""
        for part in self.parts.values():
            part.eval()

    def watch(
        self,
        every: int = 100,
        *,
        to: Callback | Run | str | None = None,
        path: Any = None,
        sample: float = SAMPLE,
    ) -> Watches:
        """Measure every tensor as `Optimizer.watch` does; a function gets the numbers of each part by themselves."""
        made = Watches([])
        for part in self.parts.values():
            try:
                made.parts.append(part.watch(every, to=to, path=path, sample=sample))
            except BaseException:
                made.remove()
                raise
        return made

    def record(self, path: Any, params: Any = None) -> NoReturn:
        """Refuse a record, which is of the step of one rule: `parts[...].record`."""
        raise NotImplementedError("Several: a record is of the step of one rule, .parts[...].record(path)")

    def release_gradients(self, *given: Any, **options: Any) -> NoReturn:
        """Refuse: each part has a handle of its own, `parts[...].release_gradients`."""
        raise NotImplementedError("Several: gradients are released by rule, .parts[...].release_gradients(...)")

    def feed(self, *, keep: bool = False, **values: Any) -> None:
        """Give inputs to the rules that have them, by parameter or as functions of one: see `Optimizer.feed`."""
        given: dict[Any, dict[str, Any]] = {part: {} for part in self.parts.values()}
        for name, value in values.items():
            owner = {p: part for part in given if name in part.INPUTS for g in part.param_groups for p in g["params"]}
            own = {p: value(p) for p in owner if p.requires_grad} if callable(value) else value
            if not owner or not isinstance(own, Mapping) or own.keys() - owner.keys():
                what = "a dict or a function of parameters whose rules have this input"
                raise ValueError(f"Several.feed: {name} must be {what}")
            for p, x in own.items():
                given[owner[p]].setdefault(name, {})[p] = x
        for part, found in [(part, part._checked(own)) for part, own in given.items()]:
            part._feed(found, keep)

    # -- checkpoints ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return one state dict of all parts, in the order of their groups."""
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        found = self._joined({label: part.state_dict() for label, part in self._owners.items()})
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, found)
            if changed is not None:
                found = changed
        return found

    def dense_state_dict(self) -> dict[str, Any]:
        """Return the same with fp32 tensors under torch's names, which parts of any plan load."""
        return self._joined({label: part.dense_state_dict() for label, part in self._owners.items()})

    def _joined(self, found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        states: dict[Any, Any] = {}
        groups: list[dict[str, Any]] = []
        left, first = {label: iter(saved["param_groups"]) for label, saved in found.items()}, 0
        for label in self._labels():
            group = next(left[label])
            old, new = group["params"], range(first, first + len(group["params"]))
            own = found[label]["state"]
            states |= {n: own[number] for n, number in zip(new, old, strict=True) if number in own}
            groups.append({**group, "params": list(new), RULE: label})
            first += len(old)
        for saved in found.values():
            states |= {key: entry for key, entry in saved["state"].items() if not isinstance(key, int)}
        rest = {key: value for saved in reversed([*found.values()]) for key, value in saved.items()}
        return {**rest, "state": states, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state dict of the same rules; ValueError lists what does not fit, and nothing has changed."""
        loaded = [(part, part._read(own)) for part, own in self.split(checkpoint.opened(self, state_dict))]
        for part, found in loaded:
            part._take(found)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def split(self, saved: Mapping[str, Any]) -> Iterator[tuple[Optimizer, dict[str, Any]]]:
        """Yield the parts, each with its share of a state dict of all; ValueError if the rules of its groups differ."""
        groups, states = checkpoint.parts(saved, Misfits("Several.load_state_dict: nothing was loaded"))
        parts, expected = list(self._owners.values()), self._labels()
        order = [list(self._owners).index(label) for label in expected]
        dealt = checkpoint.deal([part.param_groups for part in parts], groups, order)
        pairs = [(type(part).__name__, group) for part, own in zip(parts, dealt, strict=True) for group in own]
        if wrong := [group for rule, group in pairs if str(group.get(RULE)).partition(" ")[0] != rule]:
            got = [group.get(RULE, "no rule") for group in groups]
            names = [name for group in wrong for name in group.get("param_names") or ()]
            of = f", which have other rules for {checkpoint.some(names)}" if names else ""
            raise ValueError(
                f"Several.load_state_dict: expected groups of {expected}, got {got}{of}; nothing was loaded"
            )
        strange = states.keys() - {number for group in groups for number in group["params"]}
        rest = {key: value for key, value in saved.items() if key == options.UNNAMED}
        for part, own in zip(parts, dealt, strict=True):
            mine = {number for group in own for number in group["params"]} | strange
            strange = set()  # what is beside all parameters is of the first part
            shared = {key: entry for key, entry in states.items() if key in mine}
            yield part, {"state": shared, "param_groups": [{**g, RULE: part.defaults[RULE]} for g in own], **rest}

    @staticmethod
    def places(labels: Sequence[str], groups: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
        """Return the positions of each part's parameters among those of all groups, of which the labels are given."""
        found: defaultdict[str, list[int]] = defaultdict(list)
        at = itertools.count()
        for label, group in zip(labels, groups, strict=True):
            found[label] += itertools.islice(at, len(group["params"]))
        return found

    # -- what the model is ----------------------------------------------------------------------------

    def master_weights(self) -> dict[Label, Tensor]:
        """The weights at full precision, fp32, by name."""
        return {name: value for part in self.parts.values() for name, value in part.master_weights().items()}

    def scale_rows(self, p: Tensor, factors: Any) -> None:
        """Multiply the rows of a weight: see `Optimizer.scale_rows`."""
        parts = list(self.parts.values())
        of = [part for part in parts if any(q is p for group in part.param_groups for q in group["params"])]
        (of or parts)[0].scale_rows(p, factors)

    def full_weights(self) -> list[Tensor]:
        """The weights at full precision, fp32, in the order of the groups."""
        left = {label: iter(part.full_weights()) for label, part in self._owners.items()}
        pairs = zip(self._labels(), self.param_groups, strict=True)
        return [value for label, group in pairs for value in itertools.islice(left[label], len(group["params"]))]

    def master_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """The model's state dict with its weights at full precision (`Optimizer.master_state_dict`)."""
        parts = list(self.parts.values())
        for part in parts:
            part._refuse_uphill("master_state_dict()")
        parts[0]._say_lost_bits(model)
        return weights.of_model(parts, "Several", model)

    def load_master_state_dict(self, model: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Set the model's weights, and the bits of them that parts keep (`Optimizer.load_master_state_dict`)."""
        self._refuse_in_evaluation("load_master_state_dict()")
        weights.load(list(self.parts.values()), "Several", model, state_dict, strict)

    def plans(self) -> dict[Label, str]:
        """The plan of each trainable parameter, by name."""
        return {name: plan for part in self.parts.values() for name, plan in part.plans().items()}

    def memory(self) -> Memory:
        """The bytes of the trainable weights and of their states."""
        return Memory(tuple(row for part in self.parts.values() for row in part.memory().parameters))
