"""Cautious AdamW: AdamW that moves only where its step and the gradient agree."""

from optgen.lang import hyper, maximum, mean, nonneg, optimizer, sign, sqrt, state, where
from optgen.lang.policies import decoupled


@optimizer(cite="Liang et al. 2024, arXiv:2411.16085, algorithm 2", name="CautiousAdamW")
def cautious_adamw(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1),
    eps=hyper(1e-8, ge=0),
    weight_decay=hyper(1e-2, ge=0),
):
    """AdamW masked by the agreement of signs; what is left grows by the inverse of its share, at most 1000 times."""
    beta1, beta2 = betas
    p = decoupled(p, lr, weight_decay)
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    agrees = where(sign(exp_avg) * sign(g) > 0, 1.0, 0.0)
    scale = agrees / maximum(mean(agrees), 1e-3)
    denom = sqrt(exp_avg_sq) / sqrt(1 - beta2**t) + eps
    p = p - lr / (1 - beta1**t) * scale * exp_avg / denom
    return p, exp_avg, exp_avg_sq
