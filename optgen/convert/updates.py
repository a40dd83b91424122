"""The last update of well-known rules, as their states and gradients give it between two steps.

A weight that a step left as it is was the same before it, and states are those of the step: w = round(w - lr * update)
tells which these are.  Of Adam the states alone say the update, of Lion its size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from optgen.base.ready import classes as classes_of_optgen

Values = Mapping[str, Tensor]
"""Numbers of some elements: states by name, "weight", and "gradient" if there is one."""

DECAYS = {
    "exp_avg": ("betas", 0), "exp_avg_slow": ("betas", 2), "momentum_buffer": ("momentum", 0),
    "exp_avg_sq": ("betas", 1), "square_avg": ("alpha", 0), "exp_avg_var": ("betas", 1),
}  # fmt: skip
"""State -> the option that holds its decay, and the place in it."""

SECOND = ("exp_avg_sq", "square_avg", "exp_avg_var")
"""The states that divide a step: a too large one that nothing makes smaller slows a run down."""

STILL = 1e-3
"""Updates of Adam below this are of weights that have had no gradient for long, such as those of rare tokens."""


class Rule(NamedTuple):
    """The rule of an optimizer, as far as its class tells.

    name       of the first class in its MRO that is known, in lower case; else its own
    ready      the class of optgen that does the same, or ""
    decoupled  whether weights decay beside the update
    """

    name: str
    ready: str
    decoupled: bool

    @classmethod
    def of(cls, optimizer: Any, group: Mapping[str, Any]) -> Rule:
        classes = [base.__name__.lower() for base in type(optimizer).__mro__]
        plain = [re.sub(r"\d+bit|fp8|paged|fused|flash|deepspeed|cpu|anyprecision", "", name) for name in classes]
        name = next((name for name in plain if name in UPDATES), plain[0])
        decoupled = getattr(optimizer, "adam_w_mode", hasattr(optimizer, "optimizer_name") or name == "adamw")
        decoupled = UPDATES.get(name) is _sign or bool(decoupled or group.get("decoupled_weight_decay"))
        known = {ready.lower(): ready for ready in classes_of_optgen()}
        name = "adamw" if name == "adam" and decoupled else name
        return cls(name, known.get(name, ""), decoupled and UPDATES.get(name) in (_sign, _adam))

    def decay(self, state: str, group: Mapping[str, Any]) -> float | None:
        """Return the factor of a state in a step; None if it is not known."""
        option, place = DECAYS.get(state, ("", 0))
        names = (option, f"adamw_{option}", "betas") if option else ()  # Muon's; bitsandbytes has betas alone
        given = next((group[name] for name in names if name in group), ())
        given = given if isinstance(given, (tuple, list)) else (given,)
        last = UPDATES.get(self.name) is _sign and len(given) > 1 or self.name == "adan" and state == "exp_avg_sq"
        place = len(given) - 1 if last else place
        return float(given[place]) if place < len(given) else None

    def update(self, x: Values, group: Mapping[str, Any], step: Any) -> Tensor | None:
        """Return what the last step took from the weights but for their own decay, divided by lr; 0 of weights that
        STILL is about, None if that is not known."""
        count = float(group.get("step", 0) if step is None else step)
        found = UPDATES[self.name](x, group, count) if self.name in UPDATES else None
        return found * (found.abs() > STILL) if found is not None and UPDATES[self.name] is _adam else found


def _adam(x: Values, group: Mapping[str, Any], step: float) -> Tensor | None:
    if "exp_avg" not in x or "exp_avg_sq" not in x:
        return None
    corrected = step and group.get("bias_correction", group.get("correct_bias", True))
    first, second = (1 - float(beta) ** step if corrected else 1.0 for beta in group["betas"][:2])
    root = (x.get("max_exp_avg_sq", x["exp_avg_sq"]) / second).sqrt()
    return x["exp_avg"] / first / (root + float(group.get("eps", 1e-8)))


def _sign(x: Values, group: Mapping[str, Any], step: float) -> Tensor | None:
    kept = x.get("exp_avg", x.get("momentum_buffer"))
    return None if kept is None else kept.sign()


def _sgd(x: Values, group: Mapping[str, Any], step: float) -> Tensor | None:
    kept, g = x.get("momentum_buffer"), x.get("gradient")
    if g is not None and (kept is None or group.get("nesterov")):
        g = (g + float(group.get("weight_decay") or 0.0) * x["weight"]) * (g != 0)
        return g if kept is None else g + float(group["momentum"]) * kept
    return None if group.get("nesterov") else kept


UPDATES: dict[str, Callable[[Values, Mapping[str, Any], float], Tensor | None]] = {
    "adam": _adam, "adamw": _adam, "lion": _sign, "signum": _sign, "signsgd": _sign, "tiger": _sign, "sgd": _sgd,
}  # fmt: skip
