"""Learning rates that stay right as a model grows wider (muP), and tuned rates of public sweeps to begin with."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from optgen import roles

SCALES = {"mup": True, "mup_coupled": False}
"""Preset -> whether lr * weight_decay stays what it is at the base width; else weight_decay does."""

BY_ELEMENT = {
    "adabelief", "adam", "adam_atan2", "adam_mini", "adamax", "adamw", "adan", "ademamix", "adopt", "cautious_adamw",
    "came", "cautious_lion", "grams", "laprop", "lion", "mars", "nadam", "prodigy", "qhadam", "radam", "rmsprop",
    "radam_schedule_free", "schedule_free_adamw", "signum", "soap", "sophia", "stable_adamw", "tiger", "yogi",
}  # fmt: skip
"""Rules whose steps are lr times numbers of one size for each element, whatever the size of the gradient."""

BY_GRADIENT = {"sgd", "sgdw", "schedule_free_sgd"}
BY_NORM = {"muon": "", "low_rank_muon": "", "normuon": "max", "adamuon": "max", "dion": "ratio", "dion2": "ratio"}
"""Rules whose step of a matrix has a spectral norm: lr sqrt(max(rows, columns)), lr sqrt(rows / columns), or either, as
the options of Muon say."""

HARMLESS = ("averaged", "cautious", "clipped", "clipped_value", "ema", "grams", "lookahead")
"""Wrappers that leave the size of a step about what it is."""

DECAY: dict[str, Any] = {"weight_decay": 0.1}
TUNED: dict[str, tuple[int, dict[str, Any]]] = {
    "adamw": (768, {"lr": 1e-3, "betas": (0.8, 0.999), **DECAY}),
    "ademamix": (768, {"lr": 1e-3, "betas": (0.9, 0.999, 0.999), "alpha": 8.0, **DECAY}),
    "adopt": (768, {"lr": 1e-3, "betas": (0.9, 0.999), "decoupled_weight_decay": True, **DECAY}),
    "cautious_adamw": (512, {"lr": 8e-3, "betas": (0.95, 0.98), "eps": 1e-15, **DECAY}),
    "lion": (768, {"lr": 1e-3, "betas": (0.9, 0.99), **DECAY}),
    "mars": (768, {"lr": 3e-3, "betas": (0.95, 0.99), "gamma": 0.025, **DECAY}),
    "muon": (768, {"lr": 1e-3, "match_rms_adamw": True, "adamw_lr": 1e-3, "adamw_betas": (0.8, 0.999), **DECAY}),
    "prodigy": (768, {"lr": 1.0, "betas": (0.9, 0.999), "use_bias_correction": True, **DECAY}),
    "schedule_free_adamw": (768, {"lr": 1e-3, "betas": (0.9, 0.9999), "warmup_steps": 2000, **DECAY}),
    "signum": (768, {"lr": 1e-3, "momentum": 0.9, **DECAY}),
    "soap": (768, {"lr": 1e-3, "betas": (0.9, 0.999), "shampoo_beta": 0.999, **DECAY}),
    "sophia": (768, {"lr": 1e-3, "betas": (0.9, 0.999), "gamma": 0.04, **DECAY}),
}
"""Rule -> a width and the options that were found for it: of cautious_adamw by Wen et al. 2025 (arXiv:2509.02046, 130M,
1x Chinchilla), of the others by Semenov, Pagliardini & Jaggi 2025 (arXiv:2509.01440, scripts/124m)."""

Ratios = dict[str, tuple[float, float]]
"""Name of a parameter -> how many times the base model's outputs and inputs it has; 1 where they follow no width."""


def rule_of(cls: Any) -> str:
    """Return the rule whose table counts; ValueError for one, or a wrapper, of which none is known."""
    known, name = BY_ELEMENT | BY_GRADIENT | BY_NORM.keys() | {"scion"}, str(getattr(cls, "SPEC", ""))
    while name not in known and (around := next((w for w in HARMLESS if name.startswith(f"{w}_")), "")):
        name = name.removeprefix(f"{around}_")
    if name not in known:
        raise ValueError(
            f"make: scale=: how {cls.__name__} scales with width is not known: give groups with rates of their own; "
            f"known are {', '.join(sorted(known))}, also in {', '.join(HARMLESS)}"
        )
    return name


def tuned(cls: Any, options: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return a width and the options of a public sweep; ValueError for a rule that is in none, and where lr is given,
    whose width only the caller knows."""
    if (name := rule_of(cls)) in TUNED and "lr" not in options:
        return TUNED[name]
    raise ValueError(
        f"make: scale= without base_width= begins with lr of a public sweep, of {', '.join(TUNED)}; for {cls.__name__} "
        f"give lr= and the base_width= that it was found at"
    )


def width_of(named: roles.Named, found: Mapping[str, str], model: nn.Module | None) -> int:
    """Return the width of a model: of its config, its first embedding or its head; ValueError if it has none."""
    known = [getattr(roles.config_of(model), key, None) for key in ("hidden_size", "n_embd", "d_model", "dim")]
    known += [p.shape[-1] for role in ("embedding", "head") for name, p in named if found[name] == role]
    width = next((width for width in known if isinstance(width, int)), None)
    if width is None:
        raise ValueError(
            "make: scale=: the model has no config (hidden_size), no embedding and no head that say its width: "
            "sort={expression: 'head'} says which parameter is the head"
        )
    return width


def ratios(named: roles.Named, found: Mapping[str, str], model: nn.Module | None, base: Any) -> Ratios:
    """Return the ratios to a model of a base width, of which all hidden sizes are taken for multiples.

    A first linear layer, of a model without embeddings, reads what follows no width; nor does a head's bias.
    ValueError for a width that is none.
    """
    if isinstance(base, bool) or not isinstance(base, int) or base < 1:
        raise ValueError(f"make: base_width must be a width of 1 or more, got {base!r}")
    heads, modules = [name for name, _ in named if found[name] == "head"], () if model is None else model.modules()
    wide = width_of(named, found, model) / base
    first = next((m for m in modules if isinstance(m, (nn.Embedding, nn.Linear, _ConvNd))), None)
    inputs = first.weight if isinstance(first, nn.Linear) and "embedding" not in found.values() else None
    sides = {"head": (1.0, wide), "lora_a": (1.0, wide), "hidden": (wide, wide)}
    by = {name: (wide, 1.0) if p is inputs else sides.get(found[name], (wide, 1.0)) for name, p in named}
    by |= dict.fromkeys(heads, sides["head"])
    return by | dict.fromkeys(by.keys() & {f"{name.removesuffix('weight')}bias" for name in heads}, (1.0, 1.0))


def factor(rule: str, group: Mapping[str, Any], shape: Sequence[int], by: tuple[float, float]) -> float:
    """Return what a rate is multiplied by for a parameter that has `by` times the base model's outputs and inputs."""
    wider, deeper = by
    if rule in BY_GRADIENT or rule == "scion":  # Scion's steps have the right norms by themselves
        return wider / deeper if rule in BY_GRADIENT else 1.0
    if rule not in BY_NORM or group.get("adamw") or len(shape) < 2:
        return 1 / deeper

    def norm(rows: float, columns: float) -> float:
        largest = BY_NORM[rule] == "max" or group.get("match_rms_adamw")
        floor = 0.0 if BY_NORM[rule] else float(group["scale_floor"])
        return math.sqrt(max(rows, columns) if largest else max(floor, rows / columns))

    rows, columns = shape[0], math.prod(shape[1:])
    return math.sqrt(wider / deeper) * norm(rows / wider, columns / deeper) / norm(rows, columns)


def scaled(
    cls: Any, groups: Sequence[dict[str, Any]], options: Mapping[str, Any], by: Ratios, independent: bool
) -> list[dict[str, Any]]:
    """Return groups of one rate each; `independent`: weight_decay grows as lr falls."""
    rule, made = rule_of(cls), list[dict[str, Any]]()
    given = {**{k: v.default for k, v in inspect.signature(cls).parameters.items()}, **options}
    for group in groups:
        whole, members = given | group, dict[float, list[tuple[str, Tensor]]]()
        for name, p in group["params"]:
            members.setdefault(round(factor(rule, whole, p.shape, by[name]), 12), []).append((name, p))
        for times, params in members.items():
            own = {"lr": given["adamw_lr" if group.get("adamw") and "adamw_lr" in given else "lr"] * times}
            if independent and "weight_decay" in given and times and not whole.get("decouple_lr"):
                own["weight_decay"] = given["weight_decay"] / times
            made.append({**group, "params": params, **own})
    return made
