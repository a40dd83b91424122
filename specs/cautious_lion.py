"""Cautious Lion: Lion that moves only where its step and the gradient agree."""

from optgen.lang import hyper, maximum, mean, optimizer, sign, state, where
from optgen.lang.policies import decoupled


@optimizer(cite="Liang et al. 2024, arXiv:2411.16085; Lion: Chen et al. 2023")
def cautious_lion(
    p, g,
    exp_avg=state(),
    *,
    lr=hyper(1e-4, ge=0),
    betas=hyper((0.9, 0.99), ge=0, lt=1, doc="the part of the average in the sign, and the decay of the average"),
    weight_decay=hyper(0.0, ge=0),
):
    """Lion masked by the agreement of signs; what is left grows by the inverse of its share, at most 1000 times."""
    beta1, beta2 = betas
    p = decoupled(p, lr, weight_decay)
    update = sign(beta1 * exp_avg + (1 - beta1) * g)
    agrees = where(update * sign(g) > 0, 1.0, 0.0)
    exp_avg = beta2 * exp_avg + (1 - beta2) * g
    p = p - lr / maximum(mean(agrees), 1e-3) * agrees * update
    return p, exp_avg
