"""D-Adaptation of Adan: its learning rate follows a lower bound of how far the weights have to go."""

from optgen.lang import (
    flag, hyper, maximum, minimum, model_state, model_total, nonneg, optimizer, policies, sqrt, state, where,
)  # fmt: skip


@optimizer(cite="Defazio & Mishchenko 2023, arXiv:2301.07733, as its authors' package has it", name="DAdaptAdan")
def dadapt_adan(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_diff=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    prev_grad=state(),
    s=state(),
    d=model_state(nonneg, init="d0"),
    gsq_weighted=model_state(nonneg),
    *,
    lr=hyper(1.0, ge=0, doc="a factor of the estimated rate; usual: 1"),
    betas=hyper(
        (0.98, 0.92, 0.99), ge=0, lt=1,
        doc="the decays of the averages of the gradient, of its change, and of the square of both",
    ),
    eps=hyper(1e-8, gt=0),
    weight_decay=hyper(0.02, ge=0),
    d0=hyper(1e-6, gt=0, doc="the first estimate of the distance"),
    growth_rate=hyper(3e38, gt=0, doc="the factor by which the estimate grows at most in a step"),
    no_prox=flag(False, doc="decay before the step, as AdamW does"),
):
    """The estimate d is one for the whole model: each group is in its sums with a rate of its own, lr.

    Where lr is 0 the weights stay, and the sums leave them out.
    """
    g = where(lr > 0, g, 0.0)
    beta1, beta2, beta3 = betas
    moves, rate = where(lr > 0, 1.0, 0.0), d * lr
    change = where(t > 1, g - prev_grad, 0.0)
    ahead = g + beta2 * change
    exp_avg = beta1 * exp_avg + (1 - beta1) * rate * g
    exp_avg_diff = beta2 * exp_avg_diff + (1 - beta2) * rate * change
    exp_avg_sq = beta3 * exp_avg_sq + (1 - beta3) * ahead * ahead
    denom = sqrt(exp_avg_sq) + eps
    s = beta3 * s + (1 - beta3) * rate * g
    total = model_total(moves * abs(s))
    fed = beta3 * gsq_weighted + (1 - beta3) * d * d * model_total((lr * g) ** 2 / denom)
    gsq_weighted = where(total > 0, fed, gsq_weighted)
    d_hat = (model_total(moves * s * s / denom) / (1 - beta3) - gsq_weighted) / maximum(total, 1e-37)
    if no_prox:
        p = policies.decoupled(p, rate, weight_decay)
    p = p - moves * (exp_avg + beta2 * exp_avg_diff) / denom
    if not no_prox:
        p = policies.proximal(p, rate, weight_decay)
    d = maximum(d, where(total > 0, minimum(d_hat, d * growth_rate), 0.0))
    prev_grad = g
    return p, exp_avg, exp_avg_diff, exp_avg_sq, prev_grad, s, d, gsq_weighted
