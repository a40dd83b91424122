"""D-Adaptation of Adam: its learning rate follows a lower bound of how far the weights have to go."""

from optgen.lang import (
    flag, hyper, maximum, minimum, model_dot, model_state, model_total, nonneg, optimizer, policies, scalar, sqrt,
    state, where,
)  # fmt: skip


@optimizer(cite="Defazio & Mishchenko 2023, arXiv:2301.07733", name="DAdaptAdam")
def dadapt_adam(
    p, g,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    s=state(),
    moved=scalar(0.0, when="use_bias_correction"),
    d=model_state(nonneg, init="d0"),
    numerator_weighted=model_state(),
    *,
    lr=hyper(1.0, ge=0, doc="a factor of the estimated rate; usual: 1"),
    betas=hyper((0.9, 0.999), ge=0, lt=1),
    eps=hyper(1e-8, gt=0),
    weight_decay=hyper(0.0, ge=0),
    d0=hyper(1e-6, gt=0, doc="the first estimate of the distance"),
    growth_rate=hyper(3e38, gt=0, doc="the factor by which the estimate grows at most in a step"),
    use_bias_correction=flag(False, doc="Adam's bias corrections"),
    decouple=flag(
        True, doc="shrink the weight by the rate times weight_decay, instead of adding the decay to the gradient"
    ),
):
    """The estimate d is one for the whole model: each group is in its sums with a rate of its own, lr.

    Where lr is 0 nothing moves, the states neither, and the sums leave it out.  Without `decouple` decay is a part of
    the gradient.
    """
    if not decouple:
        g = policies.l2(g, p, weight_decay)
    g = where(lr > 0, g, 0.0)
    beta1, beta2 = betas
    beta3 = sqrt(beta2)
    moves = where(lr > 0, 1.0, 0.0)
    keep1, keep2, keep3 = where(lr > 0, beta1, 1.0), where(lr > 0, beta2, 1.0), where(lr > 0, beta3, 1.0)
    gain1, gain2, gain3 = moves * (1 - beta1), moves * (1 - beta2), moves * (1 - beta3)
    own = lr
    if use_bias_correction:
        moved = moved + moves
        k = maximum(moved, 1.0)
        own = lr * (sqrt(1 - beta2**k) / (1 - beta1**k))
    rate = d * own
    numerator = d * model_dot(own * g, s / (sqrt(exp_avg_sq) + eps))
    exp_avg = keep1 * exp_avg + gain1 * rate * g
    exp_avg_sq = keep2 * exp_avg_sq + gain2 * g * g
    s = keep3 * s + gain3 * rate * g
    total = model_total(moves * abs(s))
    weighted = beta3 * numerator_weighted + (1 - beta3) * numerator
    numerator_weighted = where(total > 0, weighted, numerator_weighted)
    d_hat = numerator_weighted / maximum((1 - beta3) * total, 1e-37)
    if decouple:
        p = policies.decoupled(p, rate, weight_decay)
    p = p - moves * exp_avg / (sqrt(exp_avg_sq) + eps)
    d = maximum(d, where(total > 0, minimum(d_hat, d * growth_rate), 0.0))
    return p, exp_avg, exp_avg_sq, s, moved, d, numerator_weighted
