"""Rules beside optax in fp64: an oracle of another lineage, where jax[cpu] and optax are installed."""

from typing import Any

import pytest
import torch

from tests import oracles
from tests.harness import spec_of

LR, STEPS = 1e-2, 50
RULES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "adadelta": ("adadelta", {"rho": 0.9, "eps": 1e-6}, {"rho": 0.9, "eps": 1e-6}),
    "adam": ("adam", {}, {}),
    "adamax": ("adamax", {}, {}),
    "adamw": ("adamw", {"weight_decay": 0.1}, {"weight_decay": 0.1}),
    "ademamix": ("contrib.ademamix", {"b3": 0.9999, "alpha": 5.0}, {"weight_decay": 0.0}),
    "adopt": ("contrib.adopt", {}, {"weight_decay": 0.0}),
    "fromage": ("fromage", {"min_norm": 0.0}, {}),
    "lamb": ("lamb", {}, {"weight_decay": 0.0, "eps": 1e-6}),
    "lion": ("lion", {"b1": 0.9, "b2": 0.99, "weight_decay": 0.1}, {"betas": (0.9, 0.99), "weight_decay": 0.1}),
    "rmsprop": ("rmsprop", {"decay": 0.99, "eps_in_sqrt": False}, {}),
    "sgd": ("sgd", {"momentum": 0.9}, {"momentum": 0.9}),
}
"""Rule -> (optax's name, its options, ours)."""


@pytest.mark.full
@pytest.mark.parametrize("name", RULES)
def test_the_reading_is_optax(name: str) -> None:
    """Within the roundings of `test_against_papers`: 64 per element and step, and three chains of sums."""
    jax, optax = oracles.optional("jax"), oracles.optional("optax")
    oracles.optional("optax.contrib")
    jax.config.update("jax_enable_x64", True)
    of, theirs, options = RULES[name]
    make = getattr(optax.contrib if "." in of else optax, of.rpartition(".")[2])
    spec, optimizer, draw = spec_of(name), make(LR, **theirs), torch.Generator().manual_seed(0)
    ours = torch.randn(5, 7, generator=draw, dtype=torch.float64)
    states: dict[str, Any] = {}
    host: dict[str, Any] = {}
    p = jax.numpy.asarray(ours.numpy())
    kept = optimizer.init(p)
    for t in range(1, STEPS + 1):
        g = torch.randn(5, 7, generator=draw, dtype=torch.float64)
        ours, states, host = spec.evaluate(ours, g, t, states, host, lr=LR, **options)
        update, kept = optimizer.update(jax.numpy.asarray(g.numpy()), kept, p)
        p = optax.apply_updates(p, update)
        allowed = t * (64 + 3 * ours.numel()) * 2.0**-53
        torch.testing.assert_close(ours, torch.tensor(p.tolist(), dtype=torch.float64), rtol=allowed, atol=allowed)
