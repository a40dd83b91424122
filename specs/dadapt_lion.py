"""D-Adaptation of Lion: its learning rate follows a lower bound of how far the weights have to go."""

from optgen.lang import (
    hyper, maximum, model_dot, model_state, model_total, nonneg, optimizer, policies, sign, sqrt, state, where,
)  # fmt: skip


@optimizer(cite="Defazio & Mishchenko 2023, arXiv:2301.07733, as its authors' package has it", name="DAdaptLion")
def dadapt_lion(
    p, g,
    exp_avg=state(),
    s=state(),
    d=model_state(nonneg, init="d0"),
    numerator_weighted=model_state(),
    *,
    lr=hyper(1.0, ge=0, doc="a factor of the estimated rate; usual: 1"),
    betas=hyper((0.9, 0.99), ge=0, lt=1, doc="the part of the average in the sign, and the decay of the average"),
    weight_decay=hyper(0.0, ge=0),
    d0=hyper(1e-6, gt=0, doc="the first estimate of the distance"),
):
    """The estimate d is one for the whole model: each group is in its sums with a rate of its own, lr.

    Where lr is 0 nothing moves, the states neither, and the sums leave it out.
    """
    g = where(lr > 0, g, 0.0)
    beta1, beta2 = betas
    beta3 = sqrt(beta2)
    moves = where(lr > 0, 1.0, 0.0)
    keep2, keep3 = where(lr > 0, beta2, 1.0), where(lr > 0, beta3, 1.0)
    rate = d * lr
    p = policies.decoupled(p, rate, weight_decay)
    update = moves * sign(beta1 * exp_avg + (1 - beta1) * g)
    p = p - rate * update
    exp_avg = keep2 * exp_avg + (1 - beta2) * rate * g
    numerator = d * model_dot(lr * update, s)
    s = keep3 * s + (1 - beta3) * rate * update
    total = model_total(moves * abs(s))
    weighted = beta3 * numerator_weighted + (1 - beta3) * numerator
    numerator_weighted = where(total > 0, weighted, numerator_weighted)
    d = maximum(d, where(total > 0, numerator_weighted / maximum((1 - beta3) * total, 1e-37), 0.0))
    return p, exp_avg, s, d, numerator_weighted
