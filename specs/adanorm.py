"""AdaNorm: Adam of gradients that are lengthened to the average of their norms."""

from optgen.lang import hyper, maximum, nonneg, norm, optimizer, sqrt, state, tensor_state, where
from optgen.lang.policies import l2


@optimizer(cite="Dubey et al. 2022, arXiv:2210.06364", name="AdaNorm")
def adanorm(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    exp_grad_norm=tensor_state(nonneg),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper(
        (0.9, 0.999), ge=0, lt=1,
        doc="the decays of the averages of the lengthened gradient and of the gradient's square",
    ),
    r=hyper(0.95, ge=0, lt=1, doc="the decay of the average of gradient norms"),
    eps=hyper(1e-8, ge=0),
    weight_decay=hyper(0.0, ge=0),
):
    """A tensor's gradient that is shorter than the average (r) of its norms goes into the momentum as long as that."""
    beta1, beta2 = betas
    g = l2(g, p, weight_decay)
    length = norm(g)
    exp_grad_norm = r * exp_grad_norm + (1 - r) * length
    longer = where(exp_grad_norm > length, exp_grad_norm / maximum(length, 1e-30), 1.0)
    exp_avg = beta1 * exp_avg + (1 - beta1) * g * longer
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    denom = sqrt(exp_avg_sq) / sqrt(1 - beta2**t) + eps
    p = p - lr / (1 - beta1**t) * exp_avg / denom
    return p, exp_avg, exp_avg_sq, exp_grad_norm
