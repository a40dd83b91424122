"""DualAdam: Adam mixed with its inverse, which multiplies by the root, in early steps."""

from optgen.lang import hyper, maximum, nonneg, optimizer, sqrt, state, where
from optgen.lang.policies import l2


@optimizer(cite="Sun et al. 2026, arXiv:2603.07122", name="DualAdam")
def dual_adam(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1),
    switch_rate=hyper(0.01, gt=0, doc="the share of the inverse that a step takes away"),
    eps=hyper(1e-8, gt=0),
    weight_decay=hyper(0.0, ge=0),
):
    """The share of the inverse, 1 - t * switch_rate, is 0 once it is below switch_rate."""
    beta1, beta2 = betas
    g = l2(g, p, weight_decay)
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    left = maximum(1 - t * switch_rate, 0.0)
    share = where(left >= switch_rate, left, 0.0)
    denom = sqrt(exp_avg_sq) / sqrt(1 - beta2**t) + eps
    p = p - lr / (1 - beta1**t) * exp_avg * ((1 - share) / denom + share * denom)
    return p, exp_avg, exp_avg_sq
