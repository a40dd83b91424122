"""An optimizer of several rules, each with parameters of its own."""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from optgen.runtime.checkpoint import checkpoint
from optgen.runtime.layout.plans import Label
from optgen.runtime.modes.release import refuse_scaled
from optgen.runtime.optimizer import Checkpointed, Loaded, Optimizer, read
from optgen.runtime.options import overrides
from optgen.runtime.records.problems import Problems
from optgen.runtime.records.uninterrupted import Uninterrupted
from optgen.runtime.states import state

RULE = "rule"
"""The key of a group that says which part steps it: the name of its class, numbered where several parts have it."""

def _names(group: Mapping[str, Any]) -> set[str]:
    return {overrides.bare(str(name)) for name in group.get("param_names") or ()}


def _of_key(name: str) -> Callable[..., Any]:
    return lambda self, key, *given: getattr(self.of(key), name)(key, *given)


class StatesOfParts(MutableMapping[Any, Any]):
    """The states of all parts as one defaultdict: one that is read or set first is of the part with its parameter."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = [(part.param_groups, part.state) for part in parts]

    def of(self, key: Any) -> dict[Any, Any]:
        """Return the states that a key is, or would be, among."""
        having = (states for _, states in self.parts if key in states)
        owning = (states for groups, states in self.parts if any(key is p for g in groups for p in g["params"]))
        return next(itertools.chain(having, owning, (self.parts[0][1],)))

    __getitem__, __setitem__, __delitem__ = map(_of_key, ("__getitem__", "__setitem__", "__delitem__"))
    __contains__, get, pop, setdefault = map(_of_key, ("__contains__", "get", "pop", "setdefault"))

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(states for _, states in self.parts)

    def __len__(self) -> int:
        return sum(len(states) for _, states in self.parts)

    def __bool__(self) -> bool:
        return any(states for _, states in self.parts)


class Several(Checkpointed):
    """Optimizers of different rules as one torch.optim.Optimizer: one step, one list of groups, one state dict.

    parts     the optimizers, by any keys (`optgen.make`: the patterns of names).  They hold the groups and states;
              gradients are released, and single steps watched, with them
    defaults  the options that all parts have, with the first one's defaults

    A group says under "rule" which part steps it.  All parts must accept a state dict before any changes; a step's
    errors come before changes of the part that raises, and after one none of them goes on but from a checkpoint.
    """

    parts: dict[Any, Optimizer]
    _order: list[str]

    def __init__(self, parts: Mapping[Any, Optimizer]) -> None:
        count = Counter[str]()
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

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._uninterrupted = Uninterrupted()
        for part in self._members:
            part._uninterrupted = self._uninterrupted

    def __getstate__(self) -> dict[str, Any]:
        return {"parts": self.parts, "defaults": self.defaults, "_order": self._labels()}

    @property
    def _members(self) -> list[Optimizer]:
        return list(self.parts.values())

    @property
    def _owners(self) -> dict[Any, Optimizer]:
        return {part.defaults[RULE]: part for part in self.parts.values()}

    def _labels(self) -> list[str]:
        """Return whose each group is, in the order in which they were added; those of single parts come last."""
        left = Counter({label: len(part.param_groups) for label, part in self._owners.items()})
        order = []
        for label in [*self._order, *left.elements()]:
            if left[label]:
                left[label] -= 1
                order.append(label)
        self._order = order
        return order

    @property
    def param_groups(self) -> Any:
        """The groups of all parts, a tuple: to change which there are, set it, or call `add_param_group`."""
        left = {label: iter(part.param_groups) for label, part in self._owners.items()}
        return tuple(next(left[label]) for label in self._labels())

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        order = [self._owner_of(group) for group in groups]
        for label, part in self._owners.items():
            part.param_groups = [group for group, own in zip(groups, order, strict=True) if own == label]
        self._order = order

    @property
    def state(self) -> Any:
        return StatesOfParts(self._members)

    @state.setter
    def state(self, states: Mapping[Any, Any]) -> None:
        for part in self._members:
            part.state = state.States(dict)
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
        if not isinstance(params, set):
            params = [params] if isinstance(params, Tensor) else list(params)
            new = {id(p[1] if isinstance(p, tuple) else p) for p in params}
            if any(id(p) in new for group in self.param_groups for p in group["params"]):
                raise ValueError("some parameters appear in more than one parameter group")
        self._labels()
        self._owners[label].add_param_group({**param_group, "params": params})

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
        return any(part._step_supports_amp_scaling for part in self._members)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient, as each part makes it."""
        self._refuse_unready("step()")
        refuse_scaled(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._uninterrupted:
            for part in self._members:
                self._step(part)
        return loss

    def _step(self, part: Any) -> None:
        """Make a part's step with its own hooks: those of all optimizers run once, around the whole step."""
        part._opt_called = True  # a scheduler of the part asks for it
        for hook in part._optimizer_step_pre_hooks.values():
            hook(part, (part,), {})
        inspect.unwrap(type(part).step)(part)
        for hook in part._optimizer_step_post_hooks.values():
            hook(part, (part,), {})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parts."""
        for part in self._members:
            part.zero_grad(set_to_none)

    def train(self) -> None:
        """Put back the weights that `eval()` took out."""
        for part in self._members:
            part.train()

    def eval(self) -> None:
        """Put weights for evaluation into the model, where a rule has such."""
        for part in self._members:
            part.eval()

    def watch(self, *given: Any, **options: Any) -> NoReturn:
        """Refuse: each part hands over the numbers of its own tensors."""
        how = "[part.watch(to=...) for part in opt.parts.values()]"
        raise NotImplementedError(f"Several: watch() is of one rule: {how}")

    def release_gradients(self, *given: Any, **options: Any) -> NoReturn:
        """Refuse: each part has a handle, and `clip_by="previous_norm"` the norm over its own parameters."""
        how = "[part.release_gradients(model) for part in opt.parts.values()]"
        raise NotImplementedError(f"Several: release_gradients() is of one rule: handles = {how}")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state dict of the same rules; ValueError lists what does not fit, and nothing has changed."""
        self._take(self._read(state_dict))

    def _read(self, state_dict: Mapping[str, Any]) -> Loaded:
        return [(part, read(part, own)) for part, own in self._split(checkpoint.opened(self, state_dict))]

    def _take(self, loaded: Loaded) -> None:
        super()._take(loaded)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _split(self, saved: dict[str, Any]) -> list[tuple[Optimizer, dict[str, Any]]]:
        """Return each part with its share of a state dict: groups go by the names in them, else by what they say."""
        groups, states = checkpoint.parts(saved, Problems("Several.load_state_dict: nothing was loaded"))
        dealt: dict[Optimizer, list[dict[str, Any]]] = {part: [] for part in self._members}
        wrong: list[set[str]] = []
        for group, part in zip(groups, self._steppers_of(groups), strict=True):
            if part is None or type(part).__name__ != str(group.get(RULE)).partition(" ")[0]:
                wrong.append(_names(group))
            else:
                dealt[part].append({**group, RULE: part.defaults[RULE]})
        if wrong:
            self._refuse(groups, sorted(set().union(*wrong)))
        shares = [{number for group in own for number in group["params"]} for own in dealt.values()]
        shares[0] |= states.keys() - set().union(*shares)  # what is beside all parameters is of the first part
        return [
            (part, {**saved, "state": {key: states[key] for key in mine if key in states}, "param_groups": own})
            for (part, own), mine in zip(dealt.items(), shares, strict=True)
        ]

    def _refuse(self, groups: Sequence[Mapping[str, Any]], others: Sequence[str]) -> NoReturn:
        got = [group.get(RULE, "no rule") for group in groups]
        of = f", which have other rules for {checkpoint.some(others)}" if others else ""
        raise ValueError(
            f"Several.load_state_dict: expected groups of {self._labels()}, got {got}{of}; nothing was loaded"
        )

    def _steppers_of(self, groups: Sequence[Mapping[str, Any]]) -> Iterator[Optimizer | None]:
        """Yield the part that each saved group is for: the one that has a parameter of its names, else the labelled."""
        known = {part: set().union(*map(_names, part.param_groups)) for part in self._members}
        for group in groups:
            labelled, names = self._owners.get(group.get(RULE)), _names(group)
            having = [part for part in known if known[part] & names]
            yield having[0] if having and labelled not in having else labelled
