"""AdamP: Adam without the part of its step that only rescales a scale-invariant weight."""

from optgen.lang import flag, hyper, nonneg, optimizer, shape_flag, sqrt, state
from optgen.lang.policies import decoupled, without_radial


@optimizer(cite="Heo et al. 2021, arXiv:2006.08217, algorithm 2", name="AdamP", matrix="first")
def adamp(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1),
    eps=hyper(1e-8, gt=0),
    weight_decay=hyper(0.0, ge=0),
    delta=hyper(0.1, ge=0, doc="the cosine below which a weight counts as scale-invariant"),
    wd_ratio=hyper(0.1, ge=0, le=1, doc="the part of its decay that such a weight has"),
    nesterov=flag(False),
    projected=shape_flag(lambda shape: len(shape) >= 2),
):
    """Adam with decoupled decay; a weight that looks scale-invariant decays less and is not rescaled by its step."""
    beta1, beta2 = betas
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    denom = sqrt(exp_avg_sq) / sqrt(1 - beta2**t) + eps
    update = (beta1 * exp_avg + (1 - beta1) * g if nesterov else exp_avg) / denom
    if projected:
        update, invariant = without_radial(update, p, g, delta, eps)
        weight_decay = weight_decay * (1 - (1 - wd_ratio) * invariant)
    p = decoupled(p, lr, weight_decay)
    p = p - lr / (1 - beta1**t) * update
    return p, exp_avg, exp_avg_sq
