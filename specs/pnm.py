"""PNM: positive-negative momentum."""

from optgen.lang import flag, hyper, optimizer, sqrt, state
from optgen.lang.policies import decoupled as decay, l2


@optimizer(cite="Xie et al. 2021, arXiv:2103.17182", name="PNM")
def pnm(
    p, g,
    exp_avg=state(),
    neg_exp_avg=state(),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper(
        (0.9, 1.0), ge=0, le=1, doc="the decay of the momenta, and the weight of the older one, which is taken away"
    ),
    weight_decay=hyper(0.0, ge=0),
    decoupled=flag(True, doc="shrink the weight by lr * weight_decay, instead of adding the decay to the gradient"),
):
    """A momentum of every other gradient less that of the others; betas are the paper's beta1 and beta0."""
    beta1, beta0 = betas
    if decoupled:
        p = decay(p, lr, weight_decay)
    else:
        g = l2(g, p, weight_decay)
    last, decay_of_two = exp_avg, beta1 * beta1
    exp_avg = decay_of_two * neg_exp_avg + (1 - decay_of_two) * g
    p = p - lr / sqrt((1 + beta0) ** 2 + beta0 * beta0) * ((1 + beta0) * exp_avg - beta0 * last)
    neg_exp_avg = last
    return p, exp_avg, neg_exp_avg
