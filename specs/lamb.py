"""LAMB: Adam's direction, rescaled for each tensor to the length of its weights.

The ratio of the lengths is 1 where either is 0, and may be clamped: the paper's phi is the identity between two
limits, and so is it here (0 and infinity by default).
"""

from optgen.lang import flag, hyper, maximum, minimum, nonneg, norm, optimizer, sqrt, state, where


@optimizer(cite="You et al. 2020, arXiv:1904.00962, algorithm 2", name="LAMB")
def lamb(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1),
    eps=hyper(1e-6, gt=0),
    weight_decay=hyper(1e-2, ge=0),
    min_norm=hyper(0.0, ge=0, doc="the least norm of a weight"),
    max_norm=hyper(3e38, gt=0, doc="the largest norm of a weight"),
    grad_averaging=flag(True, doc="multiply gradients by 1 - beta1"),
):
    beta1, beta2 = betas
    exp_avg = beta1 * exp_avg + ((1 - beta1) * g if grad_averaging else g)
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    denom = sqrt(exp_avg_sq) / sqrt(1 - beta2**t) + eps
    update = exp_avg / (1 - beta1**t) / denom + weight_decay * p
    weight_norm = minimum(maximum(norm(p), min_norm), max_norm)
    update_norm = norm(update)
    trust = where((weight_norm <= 0) | (update_norm <= 0), 1.0, weight_norm / update_norm)  # a NaN stays one
    p = p - lr * trust * update
    return p, exp_avg, exp_avg_sq
