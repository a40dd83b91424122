"""States of one rule taken over by another, where both mean the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from optgen.runtime.checkpoint import checkpoint
from optgen.runtime.options import entries
from optgen.runtime.states import low_bits

SAME = {"momentum_buffer": "exp_avg"}
"""States of other rules, and AdamW's of the same meaning (an average of the gradients). Equal names mean the same."""

ANEW: dict[str, Callable[[torch.Tensor], Any]] = {"lookahead_avg": torch.zeros_like, "went": lambda p: 0.0}
"""States that AdamW lacks and that begin at 0 at any step: SOAP-Muon's average of changes, and its part in p."""


def take_states(new: Any, old: torch.optim.Optimizer) -> list[str | int]:
    """Let an optimizer go on with the states and weights of AdamW (torch's or optgen's) where its rule has the same.

    Both hold the same parameters. Options stay those of `new`. A parameter begins anew if its rule has a state that
    AdamW lacks (SOAP's bases). Returns the names, or positions, of those.

    Muon goes on with the average of the gradients, and with all states of what is no matrix, SOAP and SOAP-Muon with
    the latter.
    Raises ValueError for other rules than AdamW and Adam, and TypeError if `new` was not made by optgen.
    """
    if not hasattr(new, "dense_state_dict"):
        raise TypeError(f"take_states: expected an optimizer of optgen, got {type(new).__name__}")
    if type(old).__name__ not in ("AdamW", "Adam") or any(group.get("amsgrad") for group in old.param_groups):
        raise ValueError(f"take_states: expected AdamW or Adam without amsgrad, got {type(old).__name__}")
    dense = old.dense_state_dict() if hasattr(old, "dense_state_dict") else old.state_dict()
    olds = [p for group in old.param_groups for p in group["params"]]
    found = {id(p): dense["state"].get(number) for number, p in enumerate(olds)}
    if hasattr(old, "full_weights"):
        for p, exact in zip(olds, old.full_weights(), strict=True):
            low_bits.keep(p, exact)
    taken: dict[int, dict[str, Any]] = {}
    anew: list[str | int] = []
    for entry in entries.of(new.param_groups):
        _, _, variant = checkpoint.select(type(new), entry.group, entry.p, entry.name)
        names = {name: SAME.get(name, name) for name in (*variant.states, *variant.host_names)}
        has = found.get(id(entry.p))
        if has and all(of in has or of in ANEW for of in names.values()):
            values = {name: has[of] if of in has else ANEW[of](entry.p) for name, of in names.items()}
            taken[entry.position] = {"step": has["step"], **values}
        elif entry.p.requires_grad:
            anew.append(entry.name)
    groups = new.dense_state_dict()["param_groups"]
    new.load_state_dict({"state": taken, "param_groups": groups})
    return anew
