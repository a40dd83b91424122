"""Prodigy: Adam whose learning rate follows an estimate of how far the weights have to go."""

from optgen.lang import (
    equal, flag, hyper, maximum, minimum, model_dot, model_state, model_total, nonneg, optimizer, policies, scalar,
    sqrt, state, where,
)  # fmt: skip


@optimizer(cite="Mishchenko & Defazio 2024, arXiv:2306.06101")
def prodigy(
    p, g,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    s=state(),
    p0=state(init="param"),
    moved=scalar(0.0, when="use_bias_correction"),
    d=model_state(nonneg, init="d0"),
    d_max=model_state(nonneg, init="d0"),
    d_numerator=model_state(),
    *,
    lr=hyper(1.0, ge=0, doc="a factor of the estimated rate; usual: 1"),
    betas=hyper((0.9, 0.999), ge=0, lt=1),
    eps=hyper(1e-8, gt=0, doc="added to the denominator, times the estimate d"),
    weight_decay=hyper(0.0, ge=0),
    d0=hyper(1e-6, gt=0, doc="the first estimate of the distance"),
    d_coef=hyper(1.0, gt=0, doc="a factor of the estimate"),
    growth_rate=hyper(3e38, gt=0, doc="the factor by which the estimate grows at most in a step"),
    use_bias_correction=flag(False, doc="Adam's bias corrections"),
    safeguard_warmup=flag(False, doc="leave lr out of the estimate's divisor, for a warmup"),
    decouple=hyper(
        True, doc="shrink the weight by the rate times weight_decay, instead of adding the decay to the gradient"
    ),
):
    """The estimate d is one for the whole model: each group is in its sums with a rate of its own, lr.

    Where lr is 0 nothing moves, the states neither, and the sums leave it out.  Without `decouple` decay is a part of
    the gradient.
    """
    coupled, weight_decay = where(decouple > 0, 0.0, weight_decay), where(decouple > 0, weight_decay, 0.0)
    g = where(lr > 0, policies.l2(g, p, coupled), 0.0)
    beta1, beta2 = betas
    beta3 = sqrt(beta2)
    moves = where(lr > 0, 1.0, 0.0)
    keep1, keep2, keep3 = where(lr > 0, beta1, 1.0), where(lr > 0, beta2, 1.0), where(lr > 0, beta3, 1.0)
    gain1, gain2 = moves * (1 - beta1), moves * (1 - beta2)
    own = lr
    if use_bias_correction:
        moved = moved + moves
        k = maximum(moved, 1.0)
        own = lr * (sqrt(1 - beta2**k) / (1 - beta1**k))
    rate = d * own
    numerator = beta3 * d_numerator + d / d0 * d * model_dot(own * g, p0 - p)
    exp_avg = keep1 * exp_avg + gain1 * d * g
    exp_avg_sq = keep2 * exp_avg_sq + gain2 * (d * g) ** 2
    s = keep3 * s + d / d0 * (d * moves if safeguard_warmup else rate) * g
    d_denom = model_total(moves * abs(s))
    d_numerator = where(d_denom > 0, numerator, d_numerator)
    d_hat = d_coef * d_numerator / maximum(d_denom, 1e-37)
    raised = where(equal(d, d0), maximum(d, d_hat), d)
    d_max = maximum(d_max, where(d_denom > 0, d_hat, 0.0))
    d = where(d_denom > 0, minimum(d_max, raised * growth_rate), d)
    p = policies.decoupled(p, rate, weight_decay)
    p = p - rate * exp_avg / (sqrt(exp_avg_sq) + d * eps)
    return p, exp_avg, exp_avg_sq, s, p0, moved, d, d_max, d_numerator
