"""Padam: partially adaptive momentum."""

from optgen.lang import flag, hyper, maximum, nonneg, optimizer, power, sqrt, state
from optgen.lang.policies import l2


@optimizer(cite="Chen et al. 2018, arXiv:1806.06763", name="PAdam")
def padam(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    max_exp_avg_sq=state(nonneg, when="amsgrad"),
    *,
    lr=hyper(0.1, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1),
    eps=hyper(1e-8, ge=0),
    weight_decay=hyper(0.0, ge=0),
    amsgrad=flag(True),
    partial=hyper(0.25, gt=0, le=0.5, doc="the power of the second moment that divides"),
):
    """AMSGrad whose second moment has the power `partial` in place of the root.

    The paper's algorithm 1 has no bias corrections; these are the authors' code's.
    """
    beta1, beta2 = betas
    g = l2(g, p, weight_decay)
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    if amsgrad:
        max_exp_avg_sq = maximum(max_exp_avg_sq, exp_avg_sq)
    second = max_exp_avg_sq if amsgrad else exp_avg_sq
    rate = lr * sqrt(1 - beta2**t) / (1 - beta1**t)
    p = p - rate * exp_avg / power(sqrt(second) + eps, 2 * partial)
    return p, exp_avg, exp_avg_sq, max_exp_avg_sq
