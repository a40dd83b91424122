"""AdaPNM: Adam with positive-negative momentum."""

from optgen.lang import flag, hyper, maximum, nonneg, optimizer, sqrt, state
from optgen.lang.policies import decoupled as decay, l2


@optimizer(cite="Xie et al. 2021, arXiv:2103.17182, Algorithm 3", name="AdaPNM")
def adapnm(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    neg_exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    max_exp_avg_sq=state(nonneg, when="amsgrad"),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper(
        (0.9, 0.999), ge=0, lt=1,
        doc="the root of each momentum's decay (each takes every other gradient), and the decay of squares",
    ),
    eps=hyper(1e-8, ge=0),
    weight_decay=hyper(0.0, ge=0),
    amsgrad=flag(True),
    decoupled=flag(True, doc="shrink the weight by lr * weight_decay, instead of adding the decay to the gradient"),
    beta0=hyper(1.0, ge=0, doc="the weight of the older momentum, which is taken away"),
):
    """Adam or AMSGrad with a momentum of every other gradient less that of the others, which beta0 weighs."""
    beta1, beta2 = betas
    if decoupled:
        p = decay(p, lr, weight_decay)
    else:
        g = l2(g, p, weight_decay)
    last, decay_of_two = exp_avg, beta1 * beta1
    exp_avg = decay_of_two * neg_exp_avg + (1 - decay_of_two) * g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    if amsgrad:
        max_exp_avg_sq = maximum(max_exp_avg_sq, exp_avg_sq)
    second = max_exp_avg_sq if amsgrad else exp_avg_sq
    denom = sqrt(second) / sqrt(1 - beta2**t) + eps
    rate = lr / (1 - beta1**t) / sqrt((1 + beta0) ** 2 + beta0 * beta0)
    p = p - rate * ((1 + beta0) * exp_avg - beta0 * last) / denom
    neg_exp_avg = last
    return p, exp_avg, neg_exp_avg, exp_avg_sq, max_exp_avg_sq
