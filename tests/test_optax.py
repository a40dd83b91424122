"""Rules beside optax in fp64, an oracle of another lineage; docs/peers.md says where its parts are put together."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from optgen.runtime.reference import matrices
from tests import oracles
from tests.harness import spec_of

STEPS, SHAPE = 50, (5, 7)
FACTORS = ("adadelta", "adafactor", "adafactor_paper", "dadapt_adam", "dog", "prodigy")
"""Rules whose rate is a factor of a step that they find themselves: 1 here, else 0.01."""
UNLIKE_ZERO = ("acprop", "dadapt_adam", "fromage", "prodigy")
"""Rules that differ where the first gradient is 0: optax shrinks Fromage's weight, and the others divide by 0."""


def decayed(o: Any, lr: Any, *parts: Any, by: float = 0.1) -> Any:
    """A step along what transformations make of the gradient, with decoupled decay."""
    return o.chain(*parts, o.add_decayed_weights(by), o.scale_by_learning_rate(lr))


def mixed(o: Any, *parts: Any) -> Any:
    """The sum of what several transformations make of the gradient."""

    def update(g: Any, states: Any, p: Any) -> Any:
        made = [part.update(g, state, p) for part, state in zip(parts, states, strict=True)]
        return sum(update for update, _ in made), [state for _, state in made]

    return o.GradientTransformation(lambda p: [part.init(p) for part in parts], update)


def adafactor(o: Any, lr: Any, relative: float = 0.0, average: Any = None, by: Any = 0.0) -> Any:
    """optax.adafactor with 1 - t^-0.8 in fp64, where it has fp32, and rates of t^-0.5 at most without an average."""
    factored = o.scale_by_factored_rms(min_dim_size_to_factor=2, decay_rate_fn=lambda c, power: 1 - (c + 1.0) ** -power)
    rate = lr if average else lambda c: oracles.optional("jax").numpy.minimum(lr(c), (c + 1.0) ** -0.5)
    scaled = o.scale_by_learning_rate(rate, flip_sign=False), o.scale_by_param_block_rms(), average or o.identity()
    steps = factored, o.clip_by_block_rms(1.0), o.add_decayed_weights(relative), *scaled, o.add_decayed_weights(by)
    return o.chain(*steps, o.scale(-1.0))


def lookahead(o: Any, lr: Any) -> Any:
    """optax.lookahead with the slow weights in its state."""
    fast, pair = o.lookahead(o.adamw(lr, weight_decay=0.1), 5, 0.4), o.LookaheadParams

    def update(g: Any, state: Any, p: Any) -> Any:
        made, kept = fast.update(g, state[0], pair(p, state[1]))
        return made.fast, (kept, state[1] + made.slow)

    return o.GradientTransformation(lambda p: (fast.init(pair(p, p)), p), update)


def muon(o: Any, lr: Any, momentum: Any, **options: Any) -> Any:
    """optax.contrib.muon of a momentum that has no bias corrections, for weights as torch has them."""
    axes, plain = o.contrib.MuonDimensionNumbers(1, 0), {"beta": 0.0, "nesterov": False, "eps": 1e-60}
    return o.chain(momentum, o.contrib.muon(lr, **plain, muon_weight_dimension_numbers=axes, **options))


def rprop(o: Any, lr: Any) -> Any:
    """optax.rprop, which returns the step of the last call: this one's is in its state."""
    inner = o.scale_by_rprop(lr(0))

    def update(g: Any, state: Any, p: Any) -> Any:
        state = inner.update(g, state, p)[1]
        return -state.prev_updates, state

    return o.GradientTransformation(inner.init, update)


def sophia(o: Any, lr: Any) -> Any:
    """optax.contrib.sophia without bias correction, and fed before the first step, since it uses a Hessian one late."""
    fed = [oracles.fed_at(spec_of("sophia"), SHAPE, t)[0]["hessian"].numpy() for t in range(1, STEPS + 2, 3)]
    hessians = oracles.optional("jax").numpy.stack(fed)
    diagonal = o.GradientTransformation(lambda p: 0, lambda g, k, p=None: (hessians[k], k + 1))
    options = {"gamma": 0.5, "eps": 1e-12, "update_interval": 3, "hessian_diagonal_fn": diagonal, "weight_decay": 0.1}
    steps = o.chain(o.ema(0.9, debias=False), o.contrib.sophia(lambda c: lr(c - 1), 0.0, 0.98, **options))
    return o.GradientTransformation(lambda p: steps.update(0 * p, steps.init(p), p)[1], steps.update)


B, BETAS, WD, PAIR = {"b1": 0.8, "b2": 0.95}, {"betas": (0.8, 0.95)}, {"weight_decay": 0.1}, (0.8, 0.95)
ROUNDS = (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037)
CASES: list[tuple[str, Callable[[Any, Any], Any], dict[str, Any]]] = [
    ("acprop", lambda o, lr: o.contrib.acprop(lambda c: lr(c) * (1 + 0.25 * (c > 0)), **B, eps=1e-60, eps_root=1e-60),
     BETAS | {"eps": 1e-60}),
    ("adabelief", lambda o, lr: decayed(o, lr, o.scale_by_belief(**B, eps=1e-6, eps_root=1e-6)),
     BETAS | WD | {"eps": 1e-6}),
    ("adadelta", lambda o, lr: o.adadelta(lr, 0.8, 1e-4, 0.1), WD | {"rho": 0.8, "eps": 1e-4}),
    ("adafactor", lambda o, lr: adafactor(o, lr, by=lambda c: 0.1 * lr(c)), WD),
    ("adafactor_paper", lambda o, lr: adafactor(o, lr, relative=0.1), WD),
    ("adafactor_paper", lambda o, lr: adafactor(o, lr, average=o.ema(0.9, debias=False)),
     {"relative_step": False, "beta1": 0.9}),
    ("adagrad", lambda o, lr: o.adagrad(lr, eps=0.0), {"initial_accumulator_value": 0.1, "eps": 0.0}),
    ("adam", lambda o, lr: o.chain(o.add_decayed_weights(0.1), o.adam(lr, **B)), BETAS | WD),
    ("adam", lambda o, lr: o.amsgrad(lambda c: lr(c) * (1 - 0.95 ** (c + 1)) ** 0.5, **B, eps=1e-60,
                                     bias_correction_nu=False), BETAS | {"amsgrad": True, "eps": 1e-60}),
    ("adamax", lambda o, lr: o.chain(o.add_decayed_weights(0.1), o.adamax(lr, **B)), BETAS | WD),
    ("adamw", lambda o, lr: o.adamw(lr, **B, weight_decay=0.1), BETAS | WD),
    ("adamw", lambda o, lr: o.adamw(lr, **B, weight_decay=0.1, mask=False), BETAS | {"weight_decay": 0.0}),
    ("adan", lambda o, lr: o.adan(lr, 0.8, 0.5, 0.9, eps_root=0.0, weight_decay=0.1),
     WD | {"betas": (0.8, 0.5, 0.9), "no_prox": True}),
    ("ademamix", lambda o, lr: o.contrib.ademamix(
        lr, **B, b3=0.99, alpha=lambda c: o.linear_schedule(0.0, 4.0, 20)(c + 1), weight_decay=0.1),
     WD | {"betas": (0.8, 0.95, 0.99), "alpha": 4.0, "alpha_warmup": 20}),
    ("adopt", lambda o, lr: o.contrib.adopt(lr, **B), BETAS),
    ("adopt", lambda o, lr: o.chain(o.add_decayed_weights(0.1), o.contrib.adopt(lr, **B, use_clipping=False)),
     BETAS | WD | {"clipped": False}),
    ("agc(sgd)", lambda o, lr: o.chain(o.adaptive_grad_clip(0.2, axis=1), o.sgd(lr)), {"agc_clip": 0.2}),
    ("aggmo", lambda o, lr: decayed(o, lr, mixed(o, o.trace(0.5), o.trace(0.9), o.trace(0.99)), o.scale(1 / 3), by=0),
     {"betas": (0.5, 0.9, 0.99)}),
    ("centralized(adamw)", lambda o, lr: o.chain(o.centralize(), o.adamw(lr, weight_decay=0.1)), WD),
    ("clipped_adamw", lambda o, lr: o.chain(o.normalize_by_update_norm(), o.adamw(lr, weight_decay=0.1)), WD),
    ("dadapt_adam", lambda o, lr: o.contrib.dadapt_adamw(lr, PAIR, estim_lr0=0.01, weight_decay=0.1),
     BETAS | WD | {"d0": 0.01, "use_bias_correction": True}),
    ("dog", lambda o, lr: o.contrib.dog(lr, ("heuristic", 0.01), weight_decay=0.1), WD | {"reps_rel": 0.01}),
    ("dowg", lambda o, lr: o.contrib.dowg(lr, 1e-4, 1e-8, 0.1), WD | {"reps": 0.01}),
    ("fromage", lambda o, lr: o.fromage(lr, min_norm=0.0), {}),
    ("lamb", lambda o, lr: o.lamb(lr, **B, weight_decay=0.1), BETAS | WD),
    ("lars", lambda o, lr: o.lars(lr, nesterov=True), {"nesterov": True, "weight_decay": 0.0}),
    ("lion", lambda o, lr: o.lion(lr, **B, weight_decay=0.1), BETAS | WD),
    ("lookahead_adamw", lookahead, WD | {"lookahead_k": 5, "alpha": 0.4}),
    ("madgrad", lambda o, lr: o.contrib.madgrad(lr, 0.8, 0.1), WD | {"momentum": 0.8}),
    ("muon", lambda o, lr: muon(o, lr, o.trace(0.9, nesterov=True), weight_decay=0.1),
     WD | {"momentum": 0.9, "eps": 1e-60}),
    ("muon", lambda o, lr: muon(o, lr, o.ema(0.9, debias=False), ns_coeffs=ROUNDS, ns_steps=3, consistent_rms=0.2),
     {"momentum": 0.9, "eps": 1e-60, "ns_coefficients": ROUNDS, "ns_steps": 3, "weight_decay": 0.0, "nesterov": False,
      "match_rms_adamw": True}),
    ("nadam", lambda o, lr: o.nadamw(lr, **B, weight_decay=0.1),
     BETAS | WD | {"momentum_decay": 1e9, "decoupled_weight_decay": True}),
    ("novograd", lambda o, lr: o.novograd(lr, **B, weight_decay=0.1), BETAS | WD | {"eps": 1e-6}),
    ("pid", lambda o, lr: decayed(
        o, lr, mixed(o, o.identity(), o.chain(o.trace(0.9), o.scale(5.0)), o.chain(
            o.scale_by_optimistic_gradient(0.0, 1.0), o.ema(0.9, debias=False), o.scale(10.0))), by=0), {}),
    ("prodigy", lambda o, lr: o.contrib.prodigy(lr, PAIR, estim_lr0=0.01, estim_lr_coef=0.5, weight_decay=0.1),
     BETAS | WD | {"d0": 0.01, "d_coef": 0.5, "use_bias_correction": True}),
    ("qhm", lambda o, lr: decayed(
        o, lr, mixed(o, o.scale(0.3), o.chain(o.ema(0.9, debias=False), o.scale(0.7))), by=0), {"momentum": 0.9}),
    ("radam", lambda o, lr: decayed(o, lr, o.scale_by_radam(0.8, 0.9, 1e-60)),
     WD | {"betas": (0.8, 0.9), "eps": 1e-60, "decoupled_weight_decay": True}),
    ("rmsprop", lambda o, lr: o.rmsprop(lr, 0.95, eps_in_sqrt=False), {"alpha": 0.95}),
    ("rmsprop", lambda o, lr: decayed(o, lr, o.scale_by_stddev(0.95, 1e-3, eps_in_sqrt=False), o.trace(0.9), by=0),
     {"alpha": 0.95, "eps": 1e-3, "centered": True, "momentum": 0.9}),
    ("rprop", rprop, {}),
    ("schedule_free_adamw", lambda o, lr: o.contrib.schedule_free(
        decayed(o, lr, o.scale_by_rms(0.95, eps_in_sqrt=False, bias_correction=True)), lambda c: lr(c - 1), 0.8),
     BETAS | WD),
    ("schedule_free_sgd", lambda o, lr: o.contrib.schedule_free(decayed(o, lr), lambda c: lr(c - 1), 0.8, 1.0),
     WD | {"momentum": 0.8, "weight_lr_power": 1.0}),
    ("sgd", lambda o, lr: o.chain(o.add_decayed_weights(0.1), o.sgd(lr, 0.9, nesterov=True)),
     WD | {"momentum": 0.9, "nesterov": True}),
    ("signum", lambda o, lr: o.signum(lr), {}),
    ("simplified_ademamix", lambda o, lr: o.contrib.simplified_ademamix(lr, alpha=2.0, weight_decay=0.1),
     WD | {"alpha": 2.0}),
    ("sm3", lambda o, lr: decayed(o, lr, o.scale_by_sm3(0.9), by=0), {"eps": 1e-8}),
    ("sophia", sophia, WD | {"betas": (0.9, 0.98), "gamma": 0.5}),
    ("tiger", lambda o, lr: decayed(o, lr, o.ema(0.9, debias=False), o.scale_by_sign()), WD | {"beta": 0.9}),
    ("yogi", lambda o, lr: decayed(o, lr, o.scale_by_yogi(**B, initial_accumulator_value=0.0)),
     BETAS | WD | {"initial_accumulator": 0.0}),
    ("yogi", lambda o, lr: o.yogi(lr, 0.0, 0.95), {"betas": (0.0, 0.95)}),
]  # fmt: skip
"""Rule, optax' transformation of a schedule, and our options."""


@pytest.mark.full
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize(("name", "make", "options"), CASES, ids=[name for name, *_ in CASES])
def test_the_reading_is_optax(
    name: str, make: Any, options: dict[str, Any], zero: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the roundings of `test_against_papers`: 64 per element and step, and three chains of sums.

    Gradients are those of a noisy paraboloid, and rates rise and fall.  Counts are int64, since jax' root of an int32
    is fp32, and Newton and Schulz's rounds are in fp64.
    """
    jax, optax = oracles.optional("jax"), oracles.optional("optax")
    jax.config.update("jax_enable_x64", True)
    monkeypatch.setattr(matrices, "torch", SimpleNamespace(**vars(torch) | {"bfloat16": torch.float64}))

    def rate(count: Any) -> Any:
        return (1.0 if name in FACTORS else 0.01) * (count + 1) * 0.9**count

    spec, optimizer, draw = spec_of(name), make(optax, rate), torch.Generator().manual_seed(0)
    ours, states, host = torch.randn(SHAPE, generator=draw, dtype=torch.float64), {}, {}
    p, step, apart = jax.numpy.asarray(ours.numpy()), jax.jit(optimizer.update), []
    kept = jax.tree.map(lambda x: x.astype("int64") if x.dtype == "int32" else x, optimizer.init(p))
    for t in range(1, STEPS + 1):
        g = (ours + torch.randn(SHAPE, generator=draw, dtype=torch.float64)) * (t > zero)
        fed, flags = oracles.fed_at(spec, SHAPE, t)
        ours, states, host = spec.evaluate(ours, g, t, states | fed, host, lr=rate(t - 1), **flags, **options)
        update, kept = step(jax.numpy.asarray(g.numpy()), kept, p)
        p = optax.apply_updates(p, update)
        allowed = t * (64 + 3 * ours.numel()) * 2.0**-53
        theirs = torch.tensor(p.tolist(), dtype=torch.float64)
        apart += [] if torch.allclose(ours, theirs, rtol=allowed, atol=allowed) else [t]
    assert bool(apart) is (zero and name in UNLIKE_ZERO), apart
