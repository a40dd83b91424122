"""An optimizer of several rules, each with parameters of its own."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from optgen.runtime.checkpoint import checkpoint
from optgen.runtime.layout.plans import Label
from optgen.runtime.modes.watch import SAMPLE, Callback, Run, Watches
from optgen.runtime.optimizer import Optimizer
from optgen.runtime.options import options
from optgen.runtime.states.memory import Memory

RULE = "rule"
"""The key of a saved group with the name of its class."""


class States(ChainMap[Tensor, Any]):
    """The states of several optimizers; a parameter without one reads as {}, and gets no entry among another's."""

    def __getitem__(self, key: Tensor) -> Any:
        return next((states[key] for states in self.maps if key in states), {})


class Several(torch.optim.Optimizer):
    """Optimizers of different rules as one: one step, one list of groups, one state dict.

    parts   the optimizers, by any keys (`optgen.make`: the patterns of names).  Groups and states are theirs, in this
            order; options, released gradients and groups to be added are set on them.

    All parts must accept a state dict before any changes; a step's errors come before changes of the part that raises.
    """

    def __init__(self, parts: Mapping[str, Optimizer]) -> None:
        self.parts = dict(parts)
        super().__init__([{"params": []}], {})  # torch refuses an empty list

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a group, which must say whose it is: `parts[...].add_param_group`."""
        if param_group["params"]:
            raise NotImplementedError("Several: add a group to the part that is to step it, .parts[...]")

    # torch's base class assigns both; they are those of the parts, whatever these load.

    @property
    def param_groups(self) -> Any:
        return [group for part in self.parts.values() for group in part.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None: ...

    @property
    def state(self) -> Any:
        return States(*(part.state for part in self.parts.values()))

    @state.setter
    def state(self, states: Any) -> None: ...

    def __repr__(self) -> str:
        lines = []
        for key, part in self.parts.items():
            params = [p for group in part.param_groups for p in group["params"]]
            lines.append(
                f"    {key!r}: {type(part).__name__}, {len(params)} parameters, {sum(p.numel() for p in params):,} "
                f"elements, {', '.join(sorted(set(part.plans().values())))}"
            )
        return "\n".join(["Several (", *lines, ")"])

    def __getstate__(self) -> dict[str, Any]:
        return {"parts": self.parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Several.__init__(self, state["parts"])

    @property
    def matched(self) -> dict[str, list[Label]]:
        """The names of each part's trainable parameters, or their positions."""
        return {key: list(part.plans()) for key, part in self.parts.items()}

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return all(part._step_supports_amp_scaling for part in self.parts.values())

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient, as each part makes it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts.values():
            for name in ("grad_scale", "found_inf"):  # of a GradScaler
                if name in self.__dict__:
                    setattr(part, name, self.__dict__[name])
            try:
                part.step()
            finally:
                for name in ("grad_scale", "found_inf"):
                    part.__dict__.pop(name, None)
        return loss

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
        self, every: int = 100, *, to: Callback | Run | str | None = None, path: Any = None,
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

    def record(self, path: Any, params: Any = None) -> None:
        """Refuse a record, which is of the step of one rule: `parts[...].record`."""
        raise NotImplementedError("Several: a record is of the step of one rule, .parts[...].record(path)")

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
        """Return one state dict of all parts, whose positions go on from part to part."""
        return self._joined([(part, part.state_dict()) for part in self.parts.values()])

    def dense_state_dict(self) -> dict[str, Any]:
        """Return the same with fp32 tensors under torch's names, which parts of any plan load."""
        return self._joined([(part, part.dense_state_dict()) for part in self.parts.values()])

    @staticmethod
    def _joined(found: list[tuple[Optimizer, dict[str, Any]]]) -> dict[str, Any]:
        made: dict[str, Any] = {"state": {}, "param_groups": []}
        first = 0
        for part, saved in found:
            made["state"] |= {first + number: entry for number, entry in saved["state"].items()}
            for group in saved["param_groups"]:
                numbers = [first + number for number in group["params"]]
                made["param_groups"].append({**group, "params": numbers, RULE: type(part).__name__})
            first += sum(len(group["params"]) for group in saved["param_groups"])
            made |= {key: value for key, value in saved.items() if key not in made}
        return made

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state dict of the same rules; ValueError lists what does not fit, and nothing has changed."""
        loaded = [(part, part._read(saved)) for part, saved in self.split(state_dict)]
        for part, found in loaded:
            part._take(found)

    def split(self, saved: Mapping[str, Any]) -> Iterator[tuple[Optimizer, dict[str, Any]]]:
        """Yield the parts, each with its share of a state dict of all; ValueError if the rules of its groups differ."""
        parts = list(self.parts.values())
        dealt = checkpoint.deal([part.param_groups for part in parts], list(saved["param_groups"]))
        pairs = [(type(part).__name__, group) for part, own in zip(parts, dealt, strict=True) for group in own]
        if wrong := [group for rule, group in pairs if group.get(RULE) != rule]:
            expected = [type(part).__name__ for part in parts for _ in part.param_groups]
            got = [group.get(RULE, "no rule") for group in saved["param_groups"]]
            names = [name for group in wrong for name in group.get("param_names") or ()]
            of = f", which have other rules for {checkpoint.some(names)}" if names else ""
            raise ValueError(
                f"Several.load_state_dict: expected groups of {expected}, got {got}{of}; nothing was loaded"
            )
        for part, own in zip(parts, dealt, strict=True):
            numbers = [number for group in own for number in group["params"]]
            states = {k: v for k, v in saved["state"].items() if k in set(numbers)}
            kept = [{k: v for k, v in group.items() if k != RULE} for group in own]
            rest = {k: v for k, v in saved.items() if k == options.UNNAMED}
            yield part, {"state": states, "param_groups": kept, **rest}

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
        return [value for part in self.parts.values() for value in part.full_weights()]

    def master_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """The model's state dict with its weights at full precision (`Optimizer.master_state_dict`)."""
        found: dict[str, Any] = {}
        owned = {id(p) for group in self.param_groups for p in group["params"]}
        for part in self.parts.values():
            mine = {id(p) for group in part.param_groups for p in group["params"]}
            live = model.state_dict(keep_vars=True)
            for key, value in part.master_state_dict(model).items():
                if key not in found or id(live[key]) in mine or id(live[key]) not in owned:
                    found[key] = value
        return found

    def plans(self) -> dict[Label, str]:
        """The plan of each trainable parameter, by name."""
        return {name: plan for part in self.parts.values() for name, plan in part.plans().items()}

    def memory(self) -> Memory:
        """The bytes of the trainable weights and of their states."""
        return Memory(tuple(row for part in self.parts.values() for row in part.memory().parameters))
