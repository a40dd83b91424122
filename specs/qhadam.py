"""QHAdam: Adam with quasi-hyperbolic averages."""

from optgen.lang import flag, hyper, nonneg, optimizer, sqrt, state
from optgen.lang.policies import decoupled, l2


@optimizer(cite="Ma & Yarats 2019, arXiv:1810.06801", name="QHAdam")
def qhadam(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1),
    nus=hyper((1.0, 1.0), ge=0, le=1, doc="the shares of the two averages"),
    weight_decay=hyper(0.0, ge=0),
    decouple_weight_decay=flag(
        False, doc="shrink the weight by lr * weight_decay, instead of adding the decay to the gradient"
    ),
    eps=hyper(1e-8, ge=0),
):
    """Adam with means of the gradient, and of its square, and their averages; nus are the averages' shares."""
    (beta1, beta2), (nu1, nu2) = betas, nus
    if decouple_weight_decay:
        p = decoupled(p, lr, weight_decay)
    else:
        g = l2(g, p, weight_decay)
    square = g * g
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * square
    first = (1 - nu1) * g + nu1 / (1 - beta1**t) * exp_avg
    second = (1 - nu2) * square + nu2 / (1 - beta2**t) * exp_avg_sq
    p = p - lr * first / (sqrt(second) + eps)
    return p, exp_avg, exp_avg_sq
