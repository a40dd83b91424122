"""Grams: the sign of the gradient, the size of Adam's step."""

from optgen.lang import hyper, nonneg, optimizer, sign, sqrt, state
from optgen.lang.policies import decoupled


@optimizer(cite="Cao, Li & Song 2024, arXiv:2412.17107")
def grams(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1),
    eps=hyper(1e-6, ge=0),
    weight_decay=hyper(0.0, ge=0),
):
    """Each weight moves against its gradient's sign, as far as AdamW would have moved it."""
    beta1, beta2 = betas
    p = decoupled(p, lr, weight_decay)
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    denom = sqrt(exp_avg_sq) / sqrt(1 - beta2**t) + eps
    size = abs(exp_avg) / denom
    p = p - lr / (1 - beta1**t) * sign(g) * size
    return p, exp_avg, exp_avg_sq
