"""Amos: steps and a decay that shrink by themselves, toward weights of an expected scale."""

from optgen.lang import flag, hyper, mean, nonneg, optimizer, sqrt, state, tensor_state


@optimizer(cite="Tian & Parikh 2022, arXiv:2210.11693")
def amos(
    p, g, t,
    exp_avg=state(when="averages"),
    exp_avg_sq=tensor_state(nonneg),
    decay=tensor_state(nonneg),
    *,
    lr=hyper(1e-3, ge=0),
    beta=hyper(0.999, ge=0, lt=1, doc="the decay of the average square"),
    momentum=hyper(0.0, ge=0, lt=1, doc="the decay of the average step; 0 keeps none"),
    scale=hyper(0.5, gt=0, doc="the size that weights should have, the paper's eta~"),
    extra_l2=hyper(0.0, ge=0, doc="a further L2 decay"),
    c_coef=hyper(0.25, ge=0, doc="how fast the decay falls"),
    d_coef=hyper(0.25, ge=0, doc="how fast the rate falls"),
    eps=hyper(1e-18, gt=0),
    averages=flag(nonzero="momentum"),
):
    """The second moment is one per tensor; c and d, by which decay and steps shrink, follow the sum `decay` of gamma.

    `scale` is the size that weights should have, the paper's eta~: sqrt(2 / inputs) of a linear layer, .5 of a bias.
    """
    square = mean(g * g)
    exp_avg_sq = beta * exp_avg_sq + (1 - beta) * square
    inverse = (1 - beta**t) / (exp_avg_sq + eps)
    c = 1 / sqrt(1 + c_coef * sqrt(lr) * decay)
    d = 1 / (1 + d_coef * sqrt(lr * scale) * decay)
    gamma = c * lr * lr * inverse * square
    update = d * (lr * scale * sqrt(inverse) * g + (gamma - extra_l2) / 2 * p)
    decay = decay * (1 + gamma) + gamma
    if averages:
        exp_avg = momentum * exp_avg + (1 - momentum) * update
        update = exp_avg
    p = p - update
    return p, exp_avg, exp_avg_sq, decay
